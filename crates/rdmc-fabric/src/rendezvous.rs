//! How two queue pairs meet: over a TCP connection of their own, which admits only a peer that knows a nonce.
//!
//! Connections arrive at the port where the node listens for control connections. Each queue pair draws a nonce, which
//! travels through the control plane inside its endpoint. A connection with an unknown nonce is refused and counted.
//! The active end opens the connection, the passive one accepts it. On `tcp` the blocks pass through it. Fabrics over
//! devices use it to agree that both ends are ready; its end tells an end that the peer is gone.
//!
//! An encrypted connection does not carry the nonces. It carries names derived from them, which do not reveal the
//! nonces. Both nonces together are the secret of a TLS handshake.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures::future::{BoxFuture, Either, select};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::environment::{DATA_MAGIC, DataAcceptor, Environment, UnknownNonce};
use crate::fabric::{ConnectError, Endpoint, Role};
use crate::sync::lock;
use crate::tls::SharedSecret;

/// The connections that a node's queue pairs wait for.
///
/// Give it to [`TokioEnvironment::with_data_acceptor`](crate::TokioEnvironment::with_data_acceptor), so that it gets
/// the data connections that arrive at the node's port.
#[derive(Default)]
pub struct Rendezvous {
    /// Queue pairs that wait for the peer's connection, by their nonce or its public name.
    expected: Mutex<HashMap<u128, oneshot::Sender<AcceptedConnection>>>,
    listening: Mutex<Option<SocketAddr>>,
    /// Room for connections to be opened, by the peer's address.
    opening: Mutex<HashMap<SocketAddr, Weak<Semaphore>>>,
    /// Connections that were opened ahead, by the peer's address.
    ahead: Mutex<HashMap<SocketAddr, Vec<JoinHandle<io::Result<TcpStream>>>>>,
    refused: AtomicU64,
}

/// A connection with the nonce of a waiting queue pair.
struct AcceptedConnection {
    stream: TcpStream,
    /// The peer's own nonce, or its public name.
    from: u128,
}

impl Rendezvous {
    /// Creates a rendezvous without waiting queue pairs.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Creates one queue pair's meeting, with a fresh nonce.
    pub fn meeting(self: &Arc<Self>, environment: &dyn Environment) -> Meeting {
        self.meeting_with(environment, |nonce| nonce)
    }

    /// Creates one queue pair's meeting for an [encrypted](Meeting::meet_encrypted) connection, with a fresh nonce.
    pub(crate) fn encrypted_meeting(self: &Arc<Self>, environment: &dyn Environment) -> Meeting {
        self.meeting_with(environment, name_of)
    }

    fn meeting_with(self: &Arc<Self>, environment: &dyn Environment, public: fn(u128) -> u128) -> Meeting {
        let nonce = environment.random_u128();
        let (sender, receiver) = oneshot::channel();
        lock(&self.expected).insert(public(nonce), sender);
        Meeting {
            rendezvous: self.clone(),
            nonce,
            public,
            accepted: Mutex::new(Some(receiver)),
            closed: watch::Sender::new(false),
            first_bytes: None,
        }
    }

    /// Opens a connection when few others to the same peer are being opened: a node closes connections from one address
    /// that have not yet said what they want, if they are many.
    async fn paced<T>(&self, at: Option<SocketAddr>, opening: impl Future<Output = T>) -> T {
        let Some(at) = at else { return opening.await };
        let room = {
            let mut all = lock(&self.opening);
            all.retain(|_, room| room.strong_count() > 0);
            all.get(&at).and_then(Weak::upgrade).unwrap_or_else(|| {
                let room = Arc::new(Semaphore::new(OPENED_AT_ONCE));
                all.insert(at, Arc::downgrade(&room));
                room
            })
        };
        let place = room.acquire().await.expect("it is never closed");
        let mut opening = std::pin::pin!(opening);
        match select(opening.as_mut(), std::pin::pin!(tokio::time::sleep(OPENED_WITHIN))).await {
            Either::Left((opened, _)) => opened,
            // The peer may wait for something else. Others need not.
            Either::Right(_) => {
                drop(place);
                opening.await
            }
        }
    }

    /// Opens connections to a peer that queue pairs will soon meet at that address. Does nothing outside a runtime.
    pub(crate) fn dial_ahead(self: &Arc<Self>, address: &str, connections: u16) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (rendezvous, address) = (Arc::downgrade(self), address.to_owned());
        runtime.spawn(async move {
            // If it fails, the control connection says so.
            let Some(at) = tokio::net::lookup_host(&address).await.ok().and_then(|mut all| all.next()) else { return };
            let Some(this) = rendezvous.upgrade() else { return };
            {
                let mut ahead = lock(&this.ahead);
                let unused = ahead.entry(at).or_default();
                let count = usize::from(connections).min(AHEAD_MAX.saturating_sub(unused.len()));
                unused.extend((0..count).map(|_| tokio::spawn(TcpStream::connect(at))));
            }
            drop(this);
            tokio::time::sleep(USED_WITHIN).await;
            let Some(this) = rendezvous.upgrade() else { return };
            // All of that peer, also of later calls, which then connect as if there were none.
            let unused = lock(&this.ahead).remove(&at);
            unused.into_iter().flatten().for_each(|dialing| dialing.abort());
        });
    }

    /// Returns a connection that was opened ahead, if there is one.
    async fn dialled_ahead(&self, at: SocketAddr) -> Option<TcpStream> {
        let ahead = lock(&self.ahead).get_mut(&at).and_then(Vec::pop)?;
        ahead.await.ok()?.ok()
    }

    /// Returns the number of data connections that were refused: they named no valid nonce, or could not prove it.
    pub fn refused_connections(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rendezvous").field("listening", &*lock(&self.listening)).finish_non_exhaustive()
    }
}

impl DataAcceptor for Rendezvous {
    fn listening(&self, local: SocketAddr) {
        *lock(&self.listening) = Some(local);
    }

    fn accept(
        self: Arc<Self>,
        mut stream: TcpStream,
        peer: SocketAddr,
    ) -> BoxFuture<'static, Result<(), UnknownNonce>> {
        Box::pin(async move {
            let mut nonces = [0; 32];
            if let Err(error) = stream.read_exact(&mut nonces).await {
                tracing::debug!(%peer, %error, "data connection ended before it gave its nonces");
                return Ok(());
            }
            let (to, from) = (nonce_at(&nonces, 0), nonce_at(&nonces, 16));
            // Taken out, so that a nonce lets in one connection only.
            let expected = lock(&self.expected).remove(&to);
            let accepted = expected.map(|sender| sender.send(AcceptedConnection { stream, from }).is_ok());
            if accepted == Some(true) {
                return Ok(());
            }
            self.refused.fetch_add(1, Ordering::Relaxed);
            Err(UnknownNonce)
        })
    }
}

/// A connection on which the nonces were sent.
struct Dialled {
    stream: TcpStream,
    /// It was opened ahead, so the peer may have closed it meanwhile.
    is_ahead: bool,
}

/// One queue pair's end of a connection that is yet to be made.
pub struct Meeting {
    rendezvous: Arc<Rendezvous>,
    nonce: u128,
    /// Returns the form of a nonce that the network may see.
    public: fn(u128) -> u128,
    /// The peer's connection, if this end is the passive one; taken by [`meet`](Self::meet).
    accepted: Mutex<Option<oneshot::Receiver<AcceptedConnection>>>,
    closed: watch::Sender<bool>,
    /// Returns what follows the nonces at once on a connection that this end opens, in clear.
    first_bytes: Option<Box<FirstBytes>>,
}

type FirstBytes = dyn Fn(&TcpStream) -> Vec<u8> + Send + Sync;

impl Meeting {
    /// Sends bytes right behind the nonces, before the peer has proved who it is, if this end opens a connection in
    /// clear.
    pub(crate) fn followed_by(mut self, bytes: impl Fn(&TcpStream) -> Vec<u8> + Send + Sync + 'static) -> Self {
        self.first_bytes = Some(Box::new(bytes));
        self
    }

    /// Returns the place that the peer needs to connect.
    pub fn place(&self) -> MeetingPlace {
        MeetingPlace { nonce: self.nonce, listening: *lock(&self.rendezvous.listening) }
    }

    /// Meets the queue pair at the place `remote`: opens the connection or waits for it, as the role says.
    ///
    /// `address` is the address at which the control plane reaches the peer, for a peer that listens on all its
    /// addresses.
    ///
    /// # Cancel safety
    /// If the future is dropped, the meeting is over; there is only one attempt.
    ///
    /// # Errors
    /// [`ConnectError::WrongState`] at the second attempt or if closed; any other [`ConnectError`].
    pub async fn meet(
        &self,
        remote: MeetingPlace,
        role: Role,
        address: Option<IpAddr>,
    ) -> Result<TcpStream, ConnectError> {
        let accepted = lock(&self.accepted).take().ok_or(ConnectError::WrongState)?;
        let met = async {
            match role {
                Role::Active => self.rendezvous.paced(remote.at(address), self.open(remote, address)).await,
                Role::Passive => {
                    let mut stream = self.await_connection(accepted, remote).await?;
                    // The peer's own nonce proves this end's identity.
                    let proof = remote.nonce.to_le_bytes();
                    stream.write_all(&proof).await.map_err(ConnectError::Unreachable)?;
                    Ok(stream)
                }
            }
        };
        self.unless_closed(met).await
    }

    /// Meets like [`meet`](Self::meet), over a connection encrypted with both nonces.
    pub(crate) async fn meet_encrypted(
        &self,
        remote: MeetingPlace,
        role: Role,
        address: Option<IpAddr>,
    ) -> Result<TlsStream<TcpStream>, ConnectError> {
        let accepted = lock(&self.accepted).take().ok_or(ConnectError::WrongState)?;
        let secret = |active: u128, passive: u128| {
            SharedSecret::derive(CONNECTION_SECRET, &[active.to_le_bytes(), passive.to_le_bytes()].concat())
        };
        let met = async {
            let encrypted = match role {
                Role::Active => {
                    let secret = secret(self.nonce, remote.nonce);
                    let opening = self.open_encrypted(remote, address, &secret);
                    self.rendezvous.paced(remote.at(address), opening).await?
                }
                Role::Passive => {
                    let stream = self.await_connection(accepted, remote).await?;
                    let peer = stream.peer_addr().ok();
                    let acceptor = TlsAcceptor::from(secret(remote.nonce, self.nonce).server_config());
                    acceptor.accept(stream).await.map(TlsStream::from).inspect_err(|error| {
                        self.rendezvous.refused.fetch_add(1, Ordering::Relaxed);
                        tracing::warn!(?peer, %error, "data connection refused: the peer did not prove both nonces");
                    })
                }
            };
            encrypted.map_err(|error| match error.kind() {
                io::ErrorKind::InvalidData => ConnectError::Encryption(error),
                _ => ConnectError::Unreachable(error),
            })
        };
        self.unless_closed(met).await
    }

    async fn unless_closed<T>(&self, met: impl Future<Output = Result<T, ConnectError>>) -> Result<T, ConnectError> {
        let mut closed = self.closed.subscribe();
        tokio::select! {
            biased;
            _ = closed.wait_for(|&closed| closed) => Err(ConnectError::WrongState),
            met = met => met,
        }
    }

    /// Ends the meeting, whether it has taken place or not.
    pub fn close(&self) {
        self.closed.send_replace(true);
        self.forget();
        // A peer whose connection has arrived waits for the proof, which will not come.
        drop(lock(&self.accepted).take());
    }

    /// Returns a receiver that shows whether the meeting is closed.
    pub fn closed(&self) -> watch::Receiver<bool> {
        self.closed.subscribe()
    }

    /// Opens the connection and waits for the peer's proof of its identity.
    async fn open(&self, remote: MeetingPlace, address: Option<IpAddr>) -> Result<TcpStream, ConnectError> {
        loop {
            let first_bytes = self.first_bytes.as_deref();
            let Dialled { mut stream, is_ahead } = self.dial(remote, address, first_bytes).await?;
            let mut proof = [0; 16];
            match stream.read_exact(&mut proof).await {
                Ok(_) if u128::from_le_bytes(proof) == self.nonce => return Ok(stream),
                Ok(_) => return Err(ConnectError::BadNonce),
                Err(error) if is_ahead => tracing::debug!(%error, "the peer has closed a connection opened ahead"),
                Err(error) => return Err(ConnectError::Unreachable(error)),
            }
        }
    }

    /// Opens an encrypted connection.
    async fn open_encrypted(
        &self,
        remote: MeetingPlace,
        address: Option<IpAddr>,
        secret: &SharedSecret,
    ) -> Result<io::Result<TlsStream<TcpStream>>, ConnectError> {
        loop {
            let Dialled { stream, is_ahead } = self.dial(remote, address, None).await?;
            let connector = TlsConnector::from(secret.client_config());
            match connector.connect(SharedSecret::server_name(), stream).await {
                Err(error) if is_ahead => tracing::debug!(%error, "the peer has closed a connection opened ahead"),
                connected => return Ok(connected.map(TlsStream::from)),
            }
        }
    }

    /// Opens the connection, or takes one that was opened ahead, and sends both nonces, or their public names, and the
    /// first bytes.
    async fn dial(
        &self,
        remote: MeetingPlace,
        address: Option<IpAddr>,
        first_bytes: Option<&FirstBytes>,
    ) -> Result<Dialled, ConnectError> {
        self.forget();
        let at = remote.at(address).ok_or(ConnectError::PeerNotListening)?;
        let mut preface = DATA_MAGIC.to_vec();
        preface.extend((self.public)(remote.nonce).to_le_bytes());
        preface.extend((self.public)(self.nonce).to_le_bytes());
        let greet = async |mut stream: TcpStream, is_ahead| {
            let first_bytes = first_bytes.map(|first_bytes| first_bytes(&stream)).unwrap_or_default();
            let greeting = [&preface[..], &first_bytes[..]].concat();
            stream.write_all(&greeting).await?;
            Ok(Dialled { stream, is_ahead })
        };
        while let Some(stream) = self.rendezvous.dialled_ahead(at).await {
            if let Ok(dialled) = greet(stream, true).await {
                return Ok(dialled);
            }
        }
        let connect = async { greet(TcpStream::connect(at).await?, false).await };
        connect.await.map_err(ConnectError::Unreachable)
    }

    /// Waits for the peer's connection.
    async fn await_connection(
        &self,
        accepted: oneshot::Receiver<AcceptedConnection>,
        remote: MeetingPlace,
    ) -> Result<TcpStream, ConnectError> {
        if lock(&self.rendezvous.listening).is_none() {
            return Err(ConnectError::NotListening);
        }
        let accepted = accepted.await.map_err(|_| ConnectError::WrongState)?;
        if accepted.from == (self.public)(remote.nonce) { Ok(accepted.stream) } else { Err(ConnectError::BadNonce) }
    }

    fn forget(&self) {
        lock(&self.rendezvous.expected).remove(&(self.public)(self.nonce));
    }
}

impl fmt::Debug for Meeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meeting").field("closed", &*self.closed.borrow()).finish_non_exhaustive()
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.forget();
    }
}

/// The address and nonce of a queue pair; secret, since it grants access to the queue pair.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MeetingPlace {
    nonce: u128,
    listening: Option<SocketAddr>,
}

impl MeetingPlace {
    /// Returns where to connect, if `address` is that at which the control plane reaches the peer.
    fn at(self, address: Option<IpAddr>) -> Option<SocketAddr> {
        let at = self.listening?;
        match address.filter(|_| at.ip().is_unspecified()) {
            Some(ip) => Some(SocketAddr::new(ip, at.port())),
            None => Some(at),
        }
    }

    /// Encodes the endpoint of a queue pair that needs only a place: `tag`, which names fabric and version, and the
    /// place.
    ///
    /// # Panics
    /// If the tag is longer than 200 bytes.
    pub fn to_endpoint(&self, tag: &[u8]) -> Endpoint {
        let mut out = tag.to_vec();
        self.encode(&mut out);
        Endpoint::new(out).expect("a short tag and a place fit into an endpoint")
    }

    /// Decodes the place from an endpoint that [`to_endpoint`](Self::to_endpoint) has encoded with the same tag.
    ///
    /// # Errors
    /// [`ConnectError::BadEndpoint`] if the endpoint has another form.
    pub fn of_endpoint(endpoint: &Endpoint, tag: &[u8]) -> Result<Self, ConnectError> {
        let mut rest = endpoint.as_bytes().strip_prefix(tag).ok_or(ConnectError::BadEndpoint)?;
        let place = Self::decode(&mut rest).ok_or(ConnectError::BadEndpoint)?;
        if rest.is_empty() { Ok(place) } else { Err(ConnectError::BadEndpoint) }
    }

    /// Appends the encoded form: nonce, family (0, 4 or 6), address, port; at most 35 bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend(self.nonce.to_le_bytes());
        match self.listening {
            None => out.push(0),
            Some(SocketAddr::V4(at)) => {
                out.push(4);
                out.extend(at.ip().octets());
                out.extend(at.port().to_le_bytes());
            }
            Some(SocketAddr::V6(at)) => {
                out.push(6);
                out.extend(at.ip().octets());
                out.extend(at.port().to_le_bytes());
            }
        }
    }

    /// Takes the encoded form off the front of `bytes`; returns `None` if the bytes have another form.
    pub fn decode(bytes: &mut &[u8]) -> Option<Self> {
        let mut take = |len: usize| {
            let (head, tail) = bytes.split_at_checked(len)?;
            *bytes = tail;
            Some(head)
        };
        let nonce = u128::from_le_bytes(take(16)?.try_into().ok()?);
        let ip = match take(1)?[0] {
            0 => return Some(Self { nonce, listening: None }),
            4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(take(4)?).ok()?)),
            6 => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(take(16)?).ok()?)),
            _ => return None,
        };
        let port = u16::from_le_bytes(take(2)?.try_into().ok()?);
        Some(Self { nonce, listening: Some(SocketAddr::new(ip, port)) })
    }
}

impl fmt::Debug for MeetingPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The nonce is a secret and stays out of logs.
        f.debug_struct("MeetingPlace").field("listening", &self.listening).finish_non_exhaustive()
    }
}

/// Returns the public name of a nonce: it identifies the queue pair and does not reveal the nonce.
fn name_of(nonce: u128) -> u128 {
    let name = blake3::derive_key(NONCE_NAME, &nonce.to_le_bytes());
    u128::from_le_bytes(std::array::from_fn(|at| name[at]))
}

fn nonce_at(bytes: &[u8; 32], at: usize) -> u128 {
    let mut nonce = [0; 16];
    nonce.copy_from_slice(&bytes[at..at + 16]);
    u128::from_le_bytes(nonce)
}

/// The purpose of the secret of an encrypted connection.
const CONNECTION_SECRET: &str = "rdmc 2026-11 secret of a data connection";
/// The purpose of the public name of a nonce.
const NONCE_NAME: &str = "rdmc 2026-11 name of a nonce";
/// Connections to one peer that are being opened, at most.
const OPENED_AT_ONCE: usize = 32;
/// Most unused connections to one peer that were opened ahead: a node keeps few silent ones from one address.
const AHEAD_MAX: usize = 8;
/// After this time, connections that were opened ahead are closed. The peer would close them later.
const USED_WITHIN: Duration = Duration::from_secs(5);
/// How long a connection that is being opened keeps others waiting, at most.
const OPENED_WITHIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn places_survive_encoding() {
        for listening in [None, Some("1.2.3.4:5"), Some("[::1]:65535")] {
            let listening = listening.map(|text| text.parse().unwrap());
            let place = MeetingPlace { nonce: u128::MAX - 7, listening };
            let mut encoded = Vec::new();
            place.encode(&mut encoded);
            encoded.push(42);
            let mut rest = &encoded[..];
            assert_eq!((MeetingPlace::decode(&mut rest), rest), (Some(place), &[42][..]));
        }
    }

    #[test]
    fn endpoints_of_others_and_longer_ones_are_refused() {
        let place = MeetingPlace { nonce: 7, listening: Some("1.2.3.4:5".parse().unwrap()) };
        let endpoint = place.to_endpoint(b"tag1");
        assert_eq!(MeetingPlace::of_endpoint(&endpoint, b"tag1").unwrap(), place);
        let bytes = endpoint.as_bytes();
        for bytes in [
            [bytes, &[0]].concat(),
            bytes[1..].to_vec(),
            b"tag1".to_vec(),
            place.to_endpoint(b"tag2").as_bytes().to_vec(),
        ] {
            let refused = MeetingPlace::of_endpoint(&Endpoint::new(bytes).unwrap(), b"tag1");
            assert!(matches!(refused, Err(ConnectError::BadEndpoint)));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_place_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut rest = &bytes[..];
            if let Some(place) = MeetingPlace::decode(&mut rest) {
                let mut encoded = Vec::new();
                place.encode(&mut encoded);
                prop_assert_eq!(&encoded[..], &bytes[..bytes.len() - rest.len()]);
            }
        }
    }
}
