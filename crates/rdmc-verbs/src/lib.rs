//! Real RDMA: a fabric over libibverbs, which is loaded at run time.
//!
//! The crate needs nothing at build time. A program that uses it also runs on machines without RDMA: there
//! [`VerbsFabric::open`] fails with an error that names what is missing. Any device with reliable connections works,
//! InfiniBand or RoCE. The kernel module `rdma_rxe` makes one out of any network interface.
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
//! Queue pairs are reliable and connected. An endpoint, which the control plane carries, has the identifiers of the
//! queue pair: its port's addresses, its number, the number of its first packet and the packet length. Before the first
//! request, both ends meet over a TCP connection and agree that they are ready. They keep the connection: by its end an
//! idle queue pair learns that the peer has closed or died, which the device does not report.
//!
//! All `unsafe` code of the crate calls libibverbs or touches memory that a device may write. It is in the modules
//! `sys`, `device`, `memory`, `completion` and `qp`.

#![cfg(target_os = "linux")]

mod completion;
mod connection;
mod device;
mod devices;
mod endpoint;
mod error;
mod fabric;
#[cfg(feature = "fuzzing")]
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
