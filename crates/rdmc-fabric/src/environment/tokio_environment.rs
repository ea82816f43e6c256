//! The environment of every fabric that runs on a real machine: Tokio's timers and tasks, TCP control connections.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};

use super::{ControlListener, ControlStream, Environment, Timestamp};

/// Takes connections that open a queue pair instead of a control connection.
///
/// A node needs one open port: control and data connections arrive at the same listener and say in their first eight
/// bytes which they are.
pub trait DataAcceptor: Send + Sync {
    /// Learns that data connections can arrive at `local`.
    fn listening(&self, local: SocketAddr);

    /// Finishes the handshake of a data connection whose magic has been read; called on a task of its own and bounded
    /// in time by the caller.
    fn accept(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) -> BoxFuture<'static, ()>;
}

/// Tokio's clock, timers and tasks, the operating system's randomness, TCP control connections.
#[derive(Clone)]
pub struct TokioEnvironment {
    data: Option<Arc<dyn DataAcceptor>>,
}

impl TokioEnvironment {
    /// Makes an environment whose listeners take control connections only.
    pub fn new() -> Self {
        Self { data: None }
    }

    /// Makes an environment whose listeners hand data connections to `acceptor`.
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

/// Accepts until nobody listens for control connections any more.
async fn accept_loop(
    listener: TcpListener,
    accepted: mpsc::Sender<TcpControlStream>,
    data: Option<Arc<dyn DataAcceptor>>,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    loop {
        let connection = tokio::select! {
            connection = listener.accept() => connection,
            () = accepted.closed() => return,
        };
        let (stream, peer) = match connection {
            Ok(connection) => connection,
            Err(error) => {
                // Out of descriptors or a connection reset in the queue: both pass.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = handshakes.clone().try_acquire_owned() else {
            tracing::warn!(%peer, max = HANDSHAKES_MAX, "connection refused: too many handshakes at once");
            continue;
        };
        let (accepted, data) = (accepted.clone(), data.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let handshake = handshake(stream, peer, accepted, data);
            if tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await.is_err() {
                tracing::warn!(%peer, "connection refused: it did not say what it is in time");
            }
        });
    }
}

async fn handshake(
    mut stream: TcpStream,
    peer: SocketAddr,
    accepted: mpsc::Sender<TcpControlStream>,
    data: Option<Arc<dyn DataAcceptor>>,
) {
    let mut magic = [0; 8];
    if let Err(error) = stream.read_exact(&mut magic).await {
        tracing::debug!(%peer, %error, "connection ended before it said what it is");
        return;
    }
    if magic == CONTROL_MAGIC {
        if tune_control(&stream).is_ok() {
            // Fails only if the listener is gone, which ends the connection too.
            let _ = accepted.send(TcpControlStream { stream, peer }).await;
        }
    } else if let (DATA_MAGIC, Some(data)) = (magic, data) {
        data.accept(stream, peer).await;
    } else {
        tracing::warn!(%peer, ?magic, "connection refused: not a protocol this node speaks");
    }
}

/// Sets the options of a control connection.
///
/// It is idle most of the time: the kernel's probes tell when the host at the other end has vanished, within
/// half a minute.
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

struct TcpControlStream {
    stream: TcpStream,
    peer: SocketAddr,
}

impl ControlStream for TcpControlStream {
    fn peer_address(&self) -> Option<IpAddr> {
        Some(self.peer.ip())
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
/// Connections that have not yet proved who they are, at once.
const HANDSHAKES_MAX: usize = 256;
/// How long a connection may take to prove who it is.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time after which a control connection is probed.
const PROBE_AFTER: Duration = Duration::from_secs(10);
/// Time between probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
/// Probes without an answer after which the other host is given up.
#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple", target_os = "freebsd"))]
const PROBES: u32 = 4;
/// Pause after a failed accept, so that a lack of descriptors does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
