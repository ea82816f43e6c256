//! A fabric over the crate `async-rdma`: RDMA for programs that build on that crate already.
//!
//! Other programs use `rdmc-verbs`, which needs nothing at build time, copies less and notices errors sooner. The
//! README lists the differences.
//!
//! ```no_run
//! use rdmc_async_rdma::{AsyncRdmaConfig, AsyncRdmaFabric};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), rdmc_async_rdma::AsyncRdmaError> {
//! let mut config = AsyncRdmaConfig::default();
//! config.device = Some("rxe0".into());
//! let fabric = AsyncRdmaFabric::open(config).await?;
//! # drop(fabric);
//! # Ok(())
//! # }
//! ```
//!
//! `async-rdma` hides queue pairs and completion queues, and its receives do not learn the length of a message. So each
//! queue pair has a *side channel*, a TCP connection between its ends. An end that posts a receive announces the
//! receive's buffer on it. A send is an RDMA write with immediate into the oldest announced buffer, and a frame on the
//! side channel with its length. The receive completes when the device has reported the write and the frame has
//! arrived. Sends, writes and reads keep one order, that of the device's queue pair.
//!
//! The `unsafe` code of the crate touches memory that the device may write; it is in the module `memory`.

#![cfg(target_os = "linux")]

mod connection;
mod device;
mod error;
mod fabric;
mod frame;
mod incoming;
mod memory;
mod outgoing;
mod queue_pair;
mod side_channel;

pub use error::AsyncRdmaError;
pub use fabric::{AsyncRdmaConfig, AsyncRdmaFabric};
