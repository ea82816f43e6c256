//! A fabric over the crate `async-rdma`: RDMA for programs that build on that crate already.
//!
//! Others use `rdmc-verbs`, which needs nothing at build time, copies less and notices errors sooner; the README says
//! what differs.
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
//! `async-rdma` hides queue pairs and completion queues, and its receives are not told the length of a message. So the
//! two ends hold a *leash*, a TCP connection for each queue pair: an end that posts a receive announces where the
//! memory is (a *room*); a send is an RDMA write with immediate into the oldest room, with a frame on the leash that
//! says its length. The receive completes when the device has told of the write and the frame has come. What is sent,
//! what is written and what is read keep one order, that of the device's queue pair.
//!
//! The `unsafe` code of the crate touches memory that the device may write; it is in the module `memory`.

#![cfg(target_os = "linux")]

mod connection;
mod device;
mod error;
mod fabric;
mod frame;
mod incoming;
mod leash;
mod memory;
mod outgoing;
mod queue_pair;

pub use error::AsyncRdmaError;
pub use fabric::{AsyncRdmaConfig, AsyncRdmaFabric};
