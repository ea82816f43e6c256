//! Sends files and directories from one host to many at once, by reliable multicast.
//!
//! A [`FileSender`] sends paths to receivers at known addresses. A [`FileReceiver`] listens, and puts what it receives
//! into a directory. Both give streams of [`Event`]s, and polling the stream drives the transfer. The crate prints
//! nothing and handles no signals.
//!
//! - Every receiver passes blocks on to others. Sending to many receivers takes hardly longer than sending to one.
//! - A file takes its name only when it is complete and matches its digest. No received name leaves the directory.
//! - If a receiver fails, the others go on. If the sender fails, the receivers complete what they hold between them.
//! - Parts of an interrupted transfer stay, and the next transfer brings only the rest.
//! - Every failure is a [`TransferError`]. Its variant tells who must act. It names the [peers](FailedPeer) that
//!   failed.
//!
//! The program `rdmc` is a thin layer over this crate. With [`Wording`] messages name the options of a program.
//!
//! # Examples
//! See [`FileSender`].

#![deny(unsafe_code)]

mod algorithm;
mod announcement;
mod arrivals;
mod attempts;
mod blame;
pub mod costs;
mod departures;
mod descriptors;
mod driven;
mod error;
mod event;
pub mod fabric;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod interface;
pub mod manifest;
mod mapping;
mod partial;
mod racks;
mod receiver;
mod receivers;
mod remote;
mod reservation;
mod sender;
pub mod size;
mod source;
mod stop;
mod store;
mod units;
mod wording;
pub mod words;

pub use announcement::OnFailure;
pub use blame::{FailedPeer, PeerFailure, explain};
pub use costs::PortRate;
pub use error::TransferError;
pub use event::{Direction, Event, PathInUse, PlanInUse, Proof, ReceiverEvent, SessionNumber};
pub use fabric::{FabricInUse, FabricSelection, FabricSettings};
pub use racks::RackSelection;
pub use receiver::{FileReceiver, FileReceiverBuilder};
pub use remote::{
    RemoteEvent, RemoteFile, RemoteFileMetadata, RemoteFileOptions, RemoteLocation, RemoteOutcome, RemoteServer,
    RemoteServerBuilder, RemoteSettings, RemoteTransfer, ServedTransfer, copy, get, put,
};
pub use sender::{FileSender, FileSenderBuilder, Sending, Sent};
pub use stop::StopHandle;
pub use wording::Wording;
