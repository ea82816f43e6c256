//! Real RDMA: a fabric over libibverbs, which is loaded at run time.
//!
//! Nothing is needed to build it, and it builds into programs that run where there is no RDMA: [`VerbsFabric::open`]
//! then says what is missing. Any device with reliable connections serves, InfiniBand and RoCE; a kernel module, `rdma_rxe`,
//! makes one out of any network interface.
//!
//! ```no_run
//! use rdmc_fabric::Fabric;
//! use rdmc_verbs::{VerbsConfig, VerbsFabric};
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), rdmc_verbs::VerbsError> {
//! let mut config = VerbsConfig::default();
//! config.device = Some("mlx5_0".into());
//! let fabric = VerbsFabric::open(config)?;
//! println!("{} at {}", fabric.device(), fabric.gid().address());
//! println!("messages of up to {} bytes", fabric.capabilities().message_len_max);
//! # Ok(())
//! # }
//! ```
//!
//! Queue pairs are reliable connected ones. Their keys (identifiers, number, first packet's number, packet length) are in
//! the endpoint, which the control plane carries. Before the first request both ends meet over a TCP connection, agree
//! that they are ready, and keep it: its end is how an idle queue pair learns that the peer has closed or died, of
//! which the device itself tells nothing.
//!
//! All `unsafe` code of the crate calls libibverbs or touches memory that a device may write; it is in the modules
//! `sys`, `device`, `memory`, `completion` and `qp`.

#![cfg(target_os = "linux")]

mod completion;
mod connection;
mod device;
mod devices;
mod endpoint;
mod error;
mod fabric;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod qp;
mod queue_pair;
mod status;
mod sys;

pub use devices::{DeviceInfo, GidInfo, GidKind, PortInfo, devices, usable_devices};
pub use error::{LockedMemoryLimit, VerbsError};
pub use fabric::{VerbsConfig, VerbsFabric};
