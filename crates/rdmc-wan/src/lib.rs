//! Bulk data over long paths.
//!
//! A [`Session`] joins two ends, and outlives its connections. Each direction moves *slabs*: the producer fills
//! registered memory and announces it, and the consumer fetches it by one-sided reads, many at once, so that a long
//! path stays full (*bulk asynchronous get*; Kissel and Swany, "Evaluating High Performance Data Transfer with
//! RDMA-based Protocols in Wide-Area Networks", §IV). Any [fabric](rdmc_fabric::Fabric) carries them: over TCP by
//! several connections at once, over devices by RDMA reads, between processes of one host by shared memory.
//!
//! - [`connect`] opens a session, [`SessionListener`] accepts sessions.
//! - [`SlabSender`] and [`SlabReceiver`] move slabs; [`SlabWriter`] and [`SlabReader`] are byte streams over them.
//! - [`SessionHandle`] has messages beside the slabs, and the counters.
//! - A [`gateway`] gathers plain TCP flows into one session.
//! - [`Rate`] paces a session below a policer.

#![forbid(unsafe_code)]

mod channel;
#[cfg(any(test, feature = "conformance"))]
#[doc(hidden)]
#[macro_use]
pub mod conformance;
mod explained;
mod finder;
mod flight;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod gateway;
mod pace;
mod ring;
mod session;
mod stream;
mod sync;
mod wire;

pub use pace::Rate;
pub use session::{
    ConnectionEvent, ConnectionEvents, OpenError, Session, SessionConfig, SessionError, SessionHandle, SessionListener,
    SessionRequest, SessionStats, Slab, SlabMut, SlabReceiver, SlabSender, SlabVerb, connect,
};
pub use stream::{SlabReader, SlabWriter};

/// Returns settings of the fabric `tcp` that suit long paths.
///
/// The congestion control is BBR, which measures what the path carries and does not take every loss for a queue. Where
/// the system does not have it, the system's own applies. More bytes wait in a socket, so that the path stays full
/// while the session's task is not running.
pub fn tcp_config() -> rdmc_fabric::TcpConfig {
    let mut config = rdmc_fabric::TcpConfig::default();
    config.congestion_control = Some("bbr");
    config.unsent_bytes_max = 1 << 20;
    config
}
