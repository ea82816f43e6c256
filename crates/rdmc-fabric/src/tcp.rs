//! The fabric `tcp`: one connection per queue pair.
//!
//! A request is a fixed header and its payload. The payload is written directly from registered memory and read
//! directly into its destination. The other end answers in order: an acknowledgement when it has taken the bytes, the
//! bytes of a read, or a refusal.
//!
//! Connections arrive at the port where the node listens for control connections. A connection must name the nonce of a
//! queue pair that waits for one; the nonces travel through the control plane only. With [`TcpConfig::encrypt`]
//! everything passes through TLS.
//!
//! Unsafe code sets the pace of a connection (`SO_MAX_PACING_RATE`), for which there is no safe call.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::net::TcpStream;

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource, SoftwareCompletions};
use crate::environment::{Environment, TokioEnvironment};
use crate::fabric::{Capabilities, Fabric, FabricError, QueuePairConfig, RawQueuePair};
use crate::memory::{Memory, MemoryRegion};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion};
use crate::rendezvous::Rendezvous;
use crate::software::Exposures;

pub(crate) mod frame;
mod losses;
mod queue_pair;
mod stream;

use queue_pair::TcpQueuePair;

/// Settings of a [`TcpFabric`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpConfig {
    /// Most bytes in a socket that are not yet on the wire (`TCP_NOTSENT_LOWAT`). Default 128 KiB.
    ///
    /// It bounds how far a block that has left the queue pair overlaps the next block, to another neighbour. A small
    /// value keeps the members in step; too small a value starves the port between wake-ups. Between processes of one
    /// host there is no port. There the send buffer is bounded, so that written bytes are still in the cache when they
    /// are read.
    pub unsent_bytes_max: u32,
    /// How many bytes before the end of a send it is nearly done, unless its receive [says](
    /// crate::ReceiveOptions::near_bytes) it. Default 32 KiB.
    ///
    /// Sends of at most so many bytes are nearly done when they are written. Between processes of one host, all are,
    /// since there is no port to share.
    pub near_bytes: u32,
    /// The congestion control of data connections (`TCP_CONGESTION`), where the system has it and allows it. Otherwise,
    /// and between processes of one host, the system's own applies. Default `reno`.
    ///
    /// Blocks come in bursts with pauses between them, on short paths. CUBIC leaves slow start at the first sign of a
    /// queue and hardly grows during such bursts. BBR draws wrong conclusions from the pauses. Reno fills the path at
    /// once and recovers within a few round trips.
    pub congestion_control: Option<&'static str>,
    /// The congestion control of a data connection after a loss that no full queue explains, where the system has it
    /// and allows it. Default `bbr`.
    ///
    /// Such a loss is one without longer round trips. With Reno, each costs a thousand round trips at 200 Mbit/s and 120
    /// ms. Only connections with a round trip of at least 10 ms change. `None` keeps the first congestion control.
    pub lossy_congestion_control: Option<&'static str>,
    /// Least round trip of a connection on which padding precedes the first request, if its queue pair is to [warm
    /// up](QueuePairConfig::warm_up). Default 0.5 ms.
    ///
    /// TCP begins slowly: on a new connection, 14 KiB leave in the first round trip, and twice as much in each that
    /// follows. Padding carries no data: 14 KiB, then 28 KiB and 56 KiB, a round trip apart, until the first request
    /// comes. It ends early if the piece before the last one is not acknowledged, as on slow ports. There is none
    /// between processes of one host, and where the system does not tell round trips.
    pub padded_from: Duration,
    /// Whether data connections are encrypted by TLS 1.3, under secrets that both ends learn through the control plane.
    /// Default false.
    ///
    /// It gives no protection against an attacker who reads the control plane: encrypt that as well. Both ends must
    /// agree, so the encrypted fabric has the name `tcp+tls`. Payloads cost processor time for the cipher, and a copy
    /// at each end.
    pub encrypt: bool,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            unsent_bytes_max: 128 << 10,
            near_bytes: 32 << 10,
            congestion_control: Some("reno"),
            lossy_congestion_control: Some(BBR),
            padded_from: Duration::from_micros(500),
            encrypt: false,
        }
    }
}

/// One node's access to other nodes by TCP.
///
/// It must be used inside a Tokio runtime with I/O and time enabled. Its environment listens and connects; a node that
/// only opens connections needs no listener.
pub struct TcpFabric {
    shared: Arc<TcpShared>,
    environment: Arc<TokioEnvironment>,
}

impl TcpFabric {
    /// Creates a fabric with default settings.
    pub fn new() -> Arc<Self> {
        Self::with_config(TcpConfig::default())
    }

    /// Creates a fabric.
    pub fn with_config(config: TcpConfig) -> Arc<Self> {
        Self::with_rendezvous(config, Rendezvous::new())
    }

    /// Creates a fabric whose connections arrive at a rendezvous that other fabrics of the node share. One of them
    /// listens for all.
    pub fn with_rendezvous(config: TcpConfig, rendezvous: Arc<Rendezvous>) -> Arc<Self> {
        Self::with_exposures(config, rendezvous, Arc::default())
    }

    /// Creates a fabric that shares its exposed memory with other fabrics of the node.
    pub(crate) fn with_exposures(
        config: TcpConfig,
        rendezvous: Arc<Rendezvous>,
        exposures: Arc<Exposures>,
    ) -> Arc<Self> {
        let environment = Arc::new(TokioEnvironment::with_data_acceptor(rendezvous.clone()));
        let shared = Arc::new(TcpShared { config, rendezvous, exposures, congestion: OnceLock::new() });
        Arc::new(Self { shared, environment })
    }

    /// Creates a queue pair that reserves `reserved` completions.
    pub(crate) fn raw_queue_pair(
        &self,
        completions: &Arc<dyn CompletionSource>,
        config: QueuePairConfig,
        reserved: u32,
    ) -> Result<Arc<dyn RawQueuePair>, FabricError> {
        let (shared, environment) = (self.shared.clone(), self.environment.clone());
        Ok(TcpQueuePair::create(shared, environment, completions, config, reserved)?)
    }

    /// Returns the number of data connections that were refused: they named no valid nonce, or could not prove it.
    pub fn refused_connections(&self) -> u64 {
        self.shared.rendezvous.refused_connections()
    }
}

impl fmt::Debug for TcpFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpFabric").field("config", &self.shared.config).finish_non_exhaustive()
    }
}

impl Fabric for TcpFabric {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(if self.shared.config.encrypt { "tcp+tls" } else { "tcp" });
        capabilities.tells_near = true;
        capabilities.yields_to_loss = self.shared.congestion().yields_to_loss();
        capabilities
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.environment.clone()
    }

    fn connect_ahead(&self, address: &str, connections: u16) {
        self.shared.rendezvous.dial_ahead(address, connections);
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
        let reserved = config.requests_max();
        let raw = self.raw_queue_pair(completions, config, reserved)?;
        Ok(QueuePair::new(raw, config))
    }
}

/// The state that a fabric and its queue pairs share.
struct TcpShared {
    config: TcpConfig,
    rendezvous: Arc<Rendezvous>,
    exposures: Arc<Exposures>,
    congestion: OnceLock<Congestion>,
}

/// The congestion controls that this user's connections get.
struct Congestion {
    /// Of a new connection; `None` if that is not known.
    first: Option<String>,
    /// Of a distant one that has lost packets, if it is another one.
    lossy: Option<&'static str>,
}

impl TcpShared {
    fn congestion(&self) -> &Congestion {
        self.congestion.get_or_init(|| {
            let TcpConfig { congestion_control, lossy_congestion_control, .. } = self.config;
            let first = congestion_control_of_new(congestion_control).or_else(|| congestion_control_of_new(None));
            let is_another =
                |name: &&str| first.as_deref() != Some(*name) && congestion_control_of_new(Some(name)).is_some();
            let lossy = lossy_congestion_control.filter(is_another);
            Congestion { first, lossy }
        })
    }
}

impl Congestion {
    /// Tells whether connections keep a congestion control other than BBR.
    fn yields_to_loss(&self) -> bool {
        ![self.first.as_deref(), self.lossy].contains(&Some(BBR))
    }
}

/// Returns the congestion control of this user's new connections, if they ask for `name` or for none; `None` if they
/// may not have it.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn congestion_control_of_new(name: Option<&str>) -> Option<String> {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).ok()?;
    if let Some(name) = name {
        set_congestion_control(&socket, name).ok()?;
    }
    let name = socket.tcp_congestion().ok()?;
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    Some(String::from_utf8_lossy(name).into_owned())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn congestion_control_of_new(_: Option<&str>) -> Option<String> {
    None
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn set_congestion_control(socket: &socket2::Socket, name: &str) -> io::Result<()> {
    socket.set_tcp_congestion(name.as_bytes())
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn set_congestion_control(_: &socket2::Socket, _: &str) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
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
        if on_host {
            socket.set_send_buffer_size(ON_HOST_UNTAKEN)?;
            return Ok(());
        }
        socket.set_tcp_notsent_lowat(config.unsent_bytes_max)?;
        if let Some(name) = config.congestion_control
            && let Err(error) = set_congestion_control(&socket, name)
        {
            tracing::debug!(name, %error, "the system's congestion control is used, because this one is not available");
        }
    }
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (config, on_host);
    Ok(())
}

/// Bounds the bytes that leave in a second. TCP spaces its packets by itself, where the port does not.
#[cfg(target_os = "linux")]
fn set_pace(stream: &TcpStream, bytes_per_second: u64) -> io::Result<()> {
    use std::mem::size_of;
    use std::os::fd::AsRawFd;

    // A zero would stop the connection.
    let rate = libc::c_ulong::try_from(bytes_per_second).unwrap_or(libc::c_ulong::MAX).max(1);
    let len = libc::socklen_t::try_from(size_of::<libc::c_ulong>()).expect("four or eight bytes");
    let (level, option) = (libc::SOL_SOCKET, libc::SO_MAX_PACING_RATE);
    // SAFETY: the descriptor is open as long as `stream` is borrowed. The kernel reads `len` bytes of `rate`, which has
    // so many and lives as long as the call.
    let failed = unsafe { libc::setsockopt(stream.as_raw_fd(), level, option, (&raw const rate).cast(), len) };
    if failed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
fn set_pace(_: &TcpStream, _: u64) -> io::Result<()> {
    Ok(())
}

/// The congestion control that does not take each loss for a queue.
const BBR: &str = "bbr";
/// Most bytes that a process of the same host has not yet read (`SO_SNDBUF`, which the system doubles for its own needs
/// and bounds by its maximum). The kernel then reuses its pages for them while they are in the cache. Members took a
/// quarter less processor time for each byte than with the system's automatic size; twice as many bytes were worse.
#[cfg(any(target_os = "linux", target_os = "android"))]
const ON_HOST_UNTAKEN: usize = 512 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_yield_to_losses_unless_they_may_have_bbr() {
        let with = |congestion_control, lossy_congestion_control| {
            let config = TcpConfig { congestion_control, lossy_congestion_control, ..TcpConfig::default() };
            TcpFabric::with_config(config).capabilities().yields_to_loss
        };
        let has = |name| congestion_control_of_new(name).is_some_and(|own| own == BBR);
        assert!(with(Some("reno"), None) && with(Some("reno"), Some("cubic")));
        assert_eq!(with(None, None), !has(None));
        assert_eq!([with(Some(BBR), None), with(Some("reno"), Some(BBR))], [!has(Some(BBR)); 2]);
        assert_eq!(congestion_control_of_new(Some("none such")), None);
    }
}
