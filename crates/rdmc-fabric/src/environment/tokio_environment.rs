//! The environment of every fabric on a real machine: Tokio's timers and tasks, TCP control connections.
//!
//! Unsafe code reads what the kernel has measured of a connection (`TCP_INFO`), for which there is no safe call.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::{ControlListener, ControlStream, Environment, RefusalLog, RefusalSum, StrangerPlace, Strangers, Timestamp};

/// Takes connections that open a queue pair instead of a control connection.
///
/// A node needs only one open port. Control and data connections arrive at the same listener; their first eight bytes
/// tell them apart.
pub trait DataAcceptor: Send + Sync {
    /// Notes that data connections can arrive at `local`.
    fn listening(&self, local: SocketAddr);

    /// Finishes the handshake of a data connection whose magic has been read. The caller runs it on a task of its own
    /// and bounds its time.
    ///
    /// # Errors
    /// The connection is refused; the caller logs it.
    fn accept(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) -> BoxFuture<'static, Result<(), UnknownNonce>>;
}

/// A data connection named a nonce for which no queue pair waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("data connection: no queue pair waits for its nonce")]
pub struct UnknownNonce;

/// Tokio's clock, timers and tasks, the operating system's randomness, TCP control connections.
#[derive(Clone)]
pub struct TokioEnvironment {
    data: Option<Arc<dyn DataAcceptor>>,
}

impl TokioEnvironment {
    /// Creates an environment whose listeners take control connections only.
    pub fn new() -> Self {
        Self { data: None }
    }

    /// Creates an environment whose listeners give data connections to `acceptor`.
    pub fn with_data_acceptor(acceptor: Arc<dyn DataAcceptor>) -> Self {
        Self { data: Some(acceptor) }
    }
}

impl Default for TokioEnvironment {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for TokioEnvironment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokioEnvironment").field("takes_data", &self.data.is_some()).finish()
    }
}

impl Environment for TokioEnvironment {
    fn now(&self) -> Timestamp {
        static START: OnceLock<Instant> = OnceLock::new();
        let elapsed = START.get_or_init(Instant::now).elapsed();
        Timestamp::ZERO + elapsed
    }

    fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep(at.since(self.now())))
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        tokio::spawn(task);
    }

    fn give_way(&self) -> BoxFuture<'static, ()> {
        // A task that wakes itself may be polled again before others.
        Box::pin(tokio::task::yield_now())
    }

    fn fill_random(&self, bytes: &mut [u8]) {
        getrandom::fill(bytes).expect("the operating system provides randomness");
    }

    fn listen(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>> {
        let address = address.to_owned();
        Box::pin(async move {
            let listener = TcpListener::bind(&address).await?;
            let local = listener.local_addr()?;
            if let Some(data) = &self.data {
                data.listening(local);
            }
            let (accepted, incoming) = mpsc::channel(ACCEPTED_MAX);
            tokio::spawn(accept_loop(listener, accepted, self.data.clone()));
            Ok(Box::new(TcpControlListener { incoming, local }) as Box<dyn ControlListener>)
        })
    }

    fn connect(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        let address = address.to_owned();
        Box::pin(async move {
            let mut stream = TcpStream::connect(&address).await?;
            tune_control(&stream)?;
            stream.write_all(&CONTROL_MAGIC).await?;
            let peer = stream.peer_addr()?;
            Ok(Box::new(TcpControlStream { stream, peer }) as Box<dyn ControlStream>)
        })
    }
}

/// Accepts connections until the listener is dropped.
async fn accept_loop(
    listener: TcpListener,
    accepted: mpsc::Sender<TcpControlStream>,
    data: Option<Arc<dyn DataAcceptor>>,
) {
    let strangers = Strangers::new(STRANGERS_PER_PEER_MAX, STRANGERS_MAX);
    let (refusals, environment) = (Arc::<RefusalLog>::default(), TokioEnvironment::new());
    loop {
        let connection = tokio::select! {
            connection = listener.accept() => connection,
            () = accepted.closed() => return,
            sums = refusals.next_sums(&environment) => {
                for RefusalSum { kind, from, count } in sums {
                    tracing::warn!(peer = from.map(tracing::field::display), kind, count, "connections refused lately");
                }
                continue;
            }
        };
        let (stream, peer) = match connection {
            Ok(connection) => connection,
            Err(error) => {
                // Out of descriptors, or a connection was reset in the queue: both are temporary.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if !strangers.has_room_for(Some(peer.ip())) {
            // Older connections whose first bytes have arrived are not silent: their tasks read them now.
            tokio::task::yield_now().await;
        }
        let (place, displacement) = strangers.admit(Some(peer.ip()));
        let (accepted, data, refusals) = (accepted.clone(), data.clone(), refusals.clone());
        tokio::spawn(async move {
            let refused = |kind, reason: &dyn fmt::Display| {
                if refusals.note(kind, Some(peer.ip())) {
                    tracing::warn!(%peer, %reason, "connection refused");
                }
            };
            let handshake = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake(stream, peer, &place, accepted, data));
            match displacement.unless_displaced(handshake).await {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => refused(error.kind(), &error),
                Some(Err(_)) => refused("silent", &"it did not say in time what it wants"),
                None => refused("displaced", &"too many connections had not said what they want; it was the oldest"),
            }
        });
    }
}

/// Reads the magic and hands the connection on.
///
/// # Errors
/// The peer does not speak this protocol, or knows no nonce.
async fn handshake(
    mut stream: TcpStream,
    peer: SocketAddr,
    place: &StrangerPlace,
    accepted: mpsc::Sender<TcpControlStream>,
    data: Option<Arc<dyn DataAcceptor>>,
) -> Result<(), HandshakeError> {
    let mut magic = [0; 8];
    if let Err(error) = stream.read_exact(&mut magic).await {
        tracing::debug!(%peer, %error, "connection ended before it said what it is");
        return Ok(());
    }
    place.note_spoken();
    if magic == CONTROL_MAGIC {
        if tune_control(&stream).is_ok() {
            // Fails only if the listener is gone, which also ends the connection.
            let _ = accepted.send(TcpControlStream { stream, peer }).await;
        }
    } else if let (DATA_MAGIC, Some(data)) = (magic, data) {
        data.accept(stream, peer).await?;
    } else {
        return Err(ForeignMagic(magic).into());
    }
    Ok(())
}

/// Why a connection is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum HandshakeError {
    #[error(transparent)]
    Foreign(#[from] ForeignMagic),
    #[error(transparent)]
    Data(#[from] UnknownNonce),
}

impl HandshakeError {
    /// Returns the kind under which refusals are counted.
    fn kind(&self) -> &'static str {
        match self {
            Self::Foreign(_) => "foreign",
            Self::Data(_) => "nonce",
        }
    }
}

/// The first bytes of a connection of another protocol, or of another version of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ForeignMagic([u8; 8]);

impl std::error::Error for ForeignMagic {}

impl fmt::Display for ForeignMagic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (got, own) = (self.0.escape_ascii(), CONTROL_MAGIC.escape_ascii());
        match self.0[..MAGIC_FAMILY_LEN] == CONTROL_MAGIC[..MAGIC_FAMILY_LEN] {
            true => write!(f, "it speaks another version of rdmc, or another part: it begins with {got}, not {own}"),
            false => write!(f, "it does not speak rdmc: its first bytes are \"{got}\", not \"{own}\""),
        }
    }
}

/// Sets the options of a control connection.
///
/// The connection is idle most of the time. The kernel's probes detect within half a minute that the other host has
/// vanished.
fn tune_control(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let probes = socket2::TcpKeepalive::new().with_time(PROBE_AFTER).with_interval(PROBE_INTERVAL);
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple", target_os = "freebsd"))]
    let probes = probes.with_retries(PROBES);
    socket2::SockRef::from(stream).set_tcp_keepalive(&probes)
}

struct TcpControlListener {
    incoming: mpsc::Receiver<TcpControlStream>,
    local: SocketAddr,
}

impl ControlListener for TcpControlListener {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>> {
        Box::pin(async move {
            match self.incoming.recv().await {
                Some(stream) => Ok(Box::new(stream) as Box<dyn ControlStream>),
                None => Err(io::Error::other("the listener's task has ended")),
            }
        })
    }

    fn local_address(&self) -> String {
        self.local.to_string()
    }
}

/// Returns the round trip of a connection as TCP has measured it, from the first segment on.
#[cfg(target_os = "linux")]
pub(crate) fn tcp_round_trip(socket: &impl AsRawFd) -> Option<Duration> {
    let round_trip = tcp_info(socket)?.tcpi_rtt;
    (round_trip > 0).then(|| Duration::from_micros(round_trip.into()))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn tcp_round_trip<T>(_: &T) -> Option<Duration> {
    None
}

/// How a connection fares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpProgress {
    /// The round trip, smoothed.
    pub(crate) round_trip: Duration,
    /// Packets that were sent again.
    pub(crate) retransmitted: u32,
}

#[cfg(target_os = "linux")]
pub(crate) fn tcp_progress(socket: &impl AsRawFd) -> Option<TcpProgress> {
    let info = tcp_info(socket)?;
    let round_trip = Duration::from_micros(info.tcpi_rtt.into());
    Some(TcpProgress { round_trip, retransmitted: info.tcpi_total_retrans })
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn tcp_progress<T>(_: &T) -> Option<TcpProgress> {
    None
}

/// Returns the bytes that have left on a connection and are not acknowledged, rounded up to whole segments.
#[cfg(target_os = "linux")]
pub(crate) fn tcp_unacknowledged(socket: &impl AsRawFd) -> Option<u64> {
    let info = tcp_info(socket)?;
    Some(u64::from(info.tcpi_unacked) * u64::from(info.tcpi_snd_mss))
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn tcp_unacknowledged<T>(_: &T) -> Option<u64> {
    None
}

/// Returns what the kernel knows of a connection.
#[cfg(target_os = "linux")]
fn tcp_info(socket: &impl AsRawFd) -> Option<libc::tcp_info> {
    use std::mem::{MaybeUninit, size_of};

    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut len = libc::socklen_t::try_from(size_of::<libc::tcp_info>()).expect("some hundred bytes");
    // SAFETY: the descriptor is open as long as `socket` is borrowed. For `IPPROTO_TCP` and `TCP_INFO` the kernel
    // writes at most `len` bytes of a `tcp_info`, for which `info` has room. `len` lives as long as the call.
    let failed = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    // SAFETY: it was zeroed, the kernel has written whole fields at most, and every field is an integer.
    let info = unsafe { info.assume_init() };
    (failed == 0).then_some(info)
}

struct TcpControlStream {
    stream: TcpStream,
    peer: SocketAddr,
}

impl ControlStream for TcpControlStream {
    fn peer_address(&self) -> Option<IpAddr> {
        Some(self.peer.ip())
    }

    fn round_trip(&self) -> Option<Duration> {
        tcp_round_trip(&self.stream)
    }
}

impl AsyncRead for TcpControlStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TcpControlStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// First bytes of a control connection.
pub(crate) const CONTROL_MAGIC: [u8; 8] = *b"rdmcCTL1";
/// First bytes of a data connection.
pub(crate) const DATA_MAGIC: [u8; 8] = *b"rdmcDAT1";
/// Accepted control connections that wait to be taken.
const ACCEPTED_MAX: usize = 64;
/// Bytes of a magic that are the same in every version: those of all magics begin with them.
const MAGIC_FAMILY_LEN: usize = 4;
/// Connections that have not yet said what they want, at once: of one peer.
const STRANGERS_PER_PEER_MAX: usize = 64;
/// Connections that have not yet said what they want, at once: of all peers.
const STRANGERS_MAX: usize = 256;
/// How long a connection may take to prove its identity.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time after which a control connection is probed.
const PROBE_AFTER: Duration = Duration::from_secs(10);
/// Time between probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// Unanswered probes after which the other host counts as gone.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple", target_os = "freebsd"))]
const PROBES: u32 = 4;
/// Pause after a failed accept, so that the loop does not spin while descriptors are short.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_connections_are_quoted_and_other_versions_told_apart() {
        for (magic, said) in [
            (b"GET / HT", "it does not speak rdmc: its first bytes are \"GET / HT\", not \"rdmcCTL1\""),
            (b"\x16\x03\x01\x02\0\x01\0\x01", "it does not speak rdmc: its first bytes are \"\\x16\\x03\\x01\\x02"),
            (b"rdmcCTL2", "it speaks another version of rdmc, or another part: it begins with rdmcCTL2, not rdmcCTL1"),
        ] {
            let text = ForeignMagic(*magic).to_string();
            assert!(text.starts_with(said), "{text}");
        }
    }
}
