//! The fabric `tcp`: one connection per queue pair.
//!
//! A request is a fixed header and its payload, which is written straight out of registered memory and read straight
//! into its place. The other end answers in order: an acknowledgement when it has taken the bytes, the bytes of a
//! read, or a refusal. Connections are accepted at the port where the node listens for control connections, and only
//! with the nonce of a queue pair that waits for one; the nonces travel through the control plane alone.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::BoxFuture;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource, SoftwareCompletions};
use crate::environment::{DataAcceptor, Environment, TokioEnvironment};
use crate::fabric::{Capabilities, ConnectError, Endpoint, Fabric, FabricError, QueuePairConfig};
use crate::memory::{Memory, MemoryRegion};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion};
use crate::software::Exposures;

mod frame;
mod queue_pair;

use queue_pair::TcpQueuePair;

/// Settings of a [`TcpFabric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpConfig {
    /// Bytes a socket may hold that are not yet on the wire (`TCP_NOTSENT_LOWAT`).
    ///
    /// Bounds how far a block that has left the queue pair overlaps the next one to another neighbour: small keeps
    /// the members in step, too small starves the port between wake-ups. Default 128 KiB.
    pub unsent_bytes_max: u32,
    /// How many bytes before the end of a block the next one may begin elsewhere. Default 32 KiB.
    ///
    /// Large enough to hide the latency of telling the next sender, small enough that blocks hardly share a port. Between
    /// processes of one host there is no port to share, and blocks need not follow each other.
    pub near_bytes: u32,
    /// The congestion control of data connections (`TCP_CONGESTION`), where the system has it and allows it; the
    /// system's own otherwise, and between processes of one host. Default `reno`.
    ///
    /// Blocks come in bursts with pauses between them, on paths of at most a millisecond. CUBIC leaves slow start at the
    /// first sign of a queue and hardly grows during such bursts, BBR draws wrong conclusions from the pauses; Reno
    /// fills the path at once and recovers within milliseconds. On paths of tens of milliseconds choose another.
    pub congestion_control: Option<&'static str>,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self { unsent_bytes_max: 128 << 10, near_bytes: 32 << 10, congestion_control: Some("reno") }
    }
}

/// One node's access to other nodes by TCP.
///
/// Must be used inside a Tokio runtime with I/O and time enabled. The environment it brings listens and connects;
/// a node that only opens connections needs no listener.
pub struct TcpFabric {
    shared: Arc<TcpShared>,
    environment: Arc<TokioEnvironment>,
}

impl TcpFabric {
    /// Makes a fabric with default settings.
    pub fn new() -> Arc<Self> {
        Self::with_config(TcpConfig::default())
    }

    /// Makes a fabric.
    pub fn with_config(config: TcpConfig) -> Arc<Self> {
        let shared = Arc::new(TcpShared {
            config,
            expected: Mutex::default(),
            listening: Mutex::default(),
            exposures: Arc::default(),
            refused: AtomicU64::new(0),
        });
        let environment = Arc::new(TokioEnvironment::with_data_acceptor(shared.clone()));
        Arc::new(Self { shared, environment })
    }

    /// Counts data connections that were refused because they knew no valid nonce.
    pub fn refused_connections(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for TcpFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpFabric").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Fabric for TcpFabric {
    fn capabilities(&self) -> Capabilities {
        Capabilities::new("tcp")
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }

    fn register(&self, memory: Memory) -> Result<MemoryRegion, FabricError> {
        Ok(MemoryRegion::new(memory, Box::new(())))
    }

    fn expose(&self, memory: Expose) -> Result<ExposedRegion, FabricError> {
        Ok(self.shared.exposures.expose(&*self.environment, memory))
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        let source = Arc::new(SoftwareCompletions::new(capacity));
        Ok(CompletionQueue::new(source, self.environment.clone(), mode))
    }

    fn create_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
    ) -> Result<QueuePair, FabricError> {
        let raw = TcpQueuePair::create(self.shared.clone(), self.environment.clone(), completions, config)?;
        Ok(QueuePair::new(raw, config))
    }
}

/// What a fabric, its queue pairs and its listener share.
struct TcpShared {
    config: TcpConfig,
    /// Queue pairs that wait for the peer's connection, by their nonce.
    expected: Mutex<HashMap<u128, oneshot::Sender<Arrival>>>,
    listening: Mutex<Option<SocketAddr>>,
    exposures: Arc<Exposures>,
    refused: AtomicU64,
}

/// A connection that knew a nonce.
struct Arrival {
    stream: TcpStream,
    /// The nonce it gave as its own.
    from: u128,
}

impl TcpShared {
    /// Makes a queue pair known to the listener.
    fn expect(&self, nonce: u128) -> oneshot::Receiver<Arrival> {
        let (arrived, arrival) = oneshot::channel();
        lock(&self.expected).insert(nonce, arrived);
        arrival
    }

    fn forget(&self, nonce: u128) {
        lock(&self.expected).remove(&nonce);
    }
}

impl DataAcceptor for TcpShared {
    fn listening(&self, local: SocketAddr) {
        *lock(&self.listening) = Some(local);
    }

    fn accept(self: Arc<Self>, mut stream: TcpStream, peer: SocketAddr) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let mut nonces = [0; 32];
            if let Err(error) = stream.read_exact(&mut nonces).await {
                tracing::debug!(%peer, %error, "data connection ended before it gave its nonces");
                return;
            }
            let (to, from) = (nonce_at(&nonces, 0), nonce_at(&nonces, 16));
            // Taken out, so that a nonce lets in one connection only.
            let expected = lock(&self.expected).remove(&to);
            let accepted = expected.map(|arrived| arrived.send(Arrival { stream, from }).is_ok());
            if accepted != Some(true) {
                self.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%peer, "data connection refused: no queue pair waits for its nonce");
            }
        })
    }
}

/// What an endpoint says: the queue pair's nonce and where its node listens, if it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TcpEndpoint {
    nonce: u128,
    listening: Option<SocketAddr>,
}

impl TcpEndpoint {
    /// Encodes as tag, nonce, family (0, 4 or 6), address, port.
    fn encode(self) -> Endpoint {
        let mut out = ENDPOINT_TAG.to_vec();
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
        Endpoint::new(out).expect("an endpoint takes at most 39 bytes")
    }

    fn decode(endpoint: &Endpoint) -> Result<Self, ConnectError> {
        let mut rest = endpoint.as_bytes();
        let mut take = |len: usize| {
            let taken = rest.split_at_checked(len);
            taken.map(|(head, tail)| {
                rest = tail;
                head
            })
        };
        let mut parse = || {
            if take(ENDPOINT_TAG.len())? != ENDPOINT_TAG {
                return None;
            }
            let nonce = u128::from_le_bytes(take(16)?.try_into().ok()?);
            let ip = match take(1)?[0] {
                0 => return Some(Self { nonce, listening: None }),
                4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(take(4)?).ok()?)),
                6 => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(take(16)?).ok()?)),
                _ => return None,
            };
            let port = u16::from_le_bytes(take(2)?.try_into().ok()?);
            Some(Self { nonce, listening: Some(SocketAddr::new(ip, port)) })
        };
        let parsed = parse().ok_or(ConnectError::BadEndpoint)?;
        if rest.is_empty() { Ok(parsed) } else { Err(ConnectError::BadEndpoint) }
    }
}

fn nonce_at(bytes: &[u8; 32], at: usize) -> u128 {
    let mut nonce = [0; 16];
    nonce.copy_from_slice(&bytes[at..at + 16]);
    u128::from_le_bytes(nonce)
}

/// Tells whether both ends are on this host, where bytes pass through memory and not through a port.
fn stays_on_host(stream: &TcpStream) -> io::Result<bool> {
    Ok(stream.peer_addr()?.ip() == stream.local_addr()?.ip())
}

/// Sets the options of a data connection.
fn tune(stream: &TcpStream, config: TcpConfig) -> io::Result<()> {
    let on_host = stays_on_host(stream)?;
    // Acknowledgements and grants are small and urgent.
    stream.set_nodelay(true)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        let socket = socket2::SockRef::from(stream);
        socket.set_tcp_notsent_lowat(config.unsent_bytes_max)?;
        if let Some(name) = config.congestion_control.filter(|_| !on_host)
            && let Err(error) = socket.set_tcp_congestion(name.as_bytes())
        {
            tracing::debug!(name, %error, "congestion control is not available; the system's is used");
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (config, on_host);
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// First bytes of an encoded endpoint: fabric and version.
const ENDPOINT_TAG: &[u8] = b"tcp1";

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn endpoints_survive_encoding() {
        for listening in [None, Some("1.2.3.4:5"), Some("[::1]:65535")] {
            let listening = listening.map(|text| text.parse().unwrap());
            let endpoint = TcpEndpoint { nonce: u128::MAX - 7, listening };
            assert_eq!(TcpEndpoint::decode(&endpoint.encode()).unwrap(), endpoint);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_endpoint_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64), tag: bool) {
            let bytes = if tag { [ENDPOINT_TAG, &bytes].concat() } else { bytes };
            if let Ok(endpoint) = TcpEndpoint::decode(&Endpoint::new(bytes.clone()).unwrap()) {
                prop_assert_eq!(endpoint.encode().as_bytes().to_vec(), bytes);
            }
        }
    }
}
