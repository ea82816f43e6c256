//! The source of time, tasks, randomness and control connections.
//!
//! Code above the fabrics never calls the operating system or an executor directly. It calls the [`Environment`] of its
//! fabric. Software and hardware fabrics use Tokio; a simulated fabric uses virtual time.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::ops::{Add, Sub};
use std::task::Poll;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

mod refusal_log;
mod scope;
mod strangers;
mod tokio_environment;

pub use refusal_log::{RefusalLog, RefusalSum};
pub use scope::{Scope, Spawner};
pub use strangers::{Displacement, StrangerPlace, Strangers};
pub(crate) use tokio_environment::{DATA_MAGIC, TcpProgress, tcp_progress, tcp_round_trip, tcp_unacknowledged};
pub use tokio_environment::{DataAcceptor, TokioEnvironment, UnknownNonce};

/// A moment on an environment's monotonic clock, in nanoseconds since that clock's own start.
///
/// Moments of different environments are not comparable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The start of the clock.
    pub const ZERO: Self = Self(0);

    /// Creates a moment from nanoseconds since the clock's start.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns nanoseconds since the clock's start.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the time from `earlier` until this moment; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// Saturates at the end of the clock, some 584 years after its start.
    fn add(self, rhs: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Timestamp {
    type Output = Duration;

    fn sub(self, rhs: Self) -> Duration {
        self.since(rhs)
    }
}

/// A reliable, ordered byte stream between two nodes' control planes.
///
/// One task polls it to read, several tasks poll it to write, and some of these do not wait. A waker for one direction
/// must not replace the waker for the other.
pub trait ControlStream: AsyncRead + AsyncWrite + Send + Unpin {
    /// Returns the address of the other end, where it has one; data connections to the same node may use it.
    fn peer_address(&self) -> Option<IpAddr>;

    /// Returns the round trip to the other end as the operating system has measured it; `None` if it does not tell.
    ///
    /// The kernel takes the times, so that a program that is scheduled late does not lengthen it. A first connection
    /// includes the search for the peer's link address.
    fn round_trip(&self) -> Option<Duration> {
        None
    }
}

/// Accepts control connections.
pub trait ControlListener: Send {
    /// Waits for the next connection.
    ///
    /// # Cancel safety
    /// A dropped future loses no connection.
    ///
    /// # Errors
    /// The listener is gone for good. Errors of single connections are not returned.
    fn accept(&mut self) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>>;

    /// Returns the address at which peers can connect; it has the actual port if port 0 was requested.
    fn local_address(&self) -> String;
}

/// The source of time, tasks, randomness and control connections.
pub trait Environment: Send + Sync + fmt::Debug {
    /// Returns the current moment of the monotonic clock.
    fn now(&self) -> Timestamp;

    /// Waits until `at` and never returns earlier.
    fn sleep_until(&self, at: Timestamp) -> BoxFuture<'static, ()>;

    /// Runs `task` in the background until it ends.
    fn spawn(&self, task: BoxFuture<'static, ()>);

    /// Lets other tasks run that are ready now.
    fn give_way(&self) -> BoxFuture<'static, ()> {
        let mut gave = false;
        Box::pin(std::future::poll_fn(move |cx| {
            if std::mem::replace(&mut gave, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }))
    }

    /// Fills `bytes` with random bytes that are fit for keys.
    fn fill_random(&self, bytes: &mut [u8]);

    /// Listens for control connections at `address`. On networks it is `host:port`, with port 0 for any free one.
    fn listen(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlListener>>>;

    /// Opens a control connection to the node that listens at `address`.
    fn connect(&self, address: &str) -> BoxFuture<'_, io::Result<Box<dyn ControlStream>>>;
}

impl dyn Environment + '_ {
    /// Waits for `duration`.
    pub fn sleep(&self, duration: Duration) -> BoxFuture<'static, ()> {
        self.sleep_until(self.now() + duration)
    }

    /// Returns a random number that is fit for a key.
    pub fn random_u64(&self) -> u64 {
        let mut bytes = [0; 8];
        self.fill_random(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Returns a random number that is fit for a nonce.
    pub fn random_u128(&self) -> u128 {
        let mut bytes = [0; 16];
        self.fill_random(&mut bytes);
        u128::from_le_bytes(bytes)
    }

    /// Runs `future` for at most `limit`.
    ///
    /// # Errors
    /// [`Elapsed`] if it did not finish in time; the future is dropped then.
    pub async fn timeout<T>(&self, limit: Duration, future: impl Future<Output = T>) -> Result<T, Elapsed> {
        let sleep = self.sleep(limit);
        futures::pin_mut!(future);
        match futures::future::select(future, sleep).await {
            futures::future::Either::Left((value, _)) => Ok(value),
            futures::future::Either::Right(_) => Err(Elapsed { limit }),
        }
    }
}

/// A future did not finish within its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not finished within {:.1?}", limit)]
pub struct Elapsed {
    /// The limit.
    pub limit: Duration,
}
