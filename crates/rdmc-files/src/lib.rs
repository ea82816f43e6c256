//! Sends files and directories from one host to many at once, by reliable multicast.
//!
//! A [`FileSender`] sends paths to receivers that it knows by their addresses. A [`FileReceiver`] listens and puts what it receives
//! into a directory. Both are streams of [`Event`]s, and polling the stream drives the transfer. Nothing is printed, and no signal is
//! handled.
//!
//! - Every receiver passes blocks on to others, so that sending to many takes hardly longer than sending to one.
//! - A file takes its name only when it is complete and matches its digest. A name that is received cannot leave the directory.
//! - If a receiver fails, the others go on; if the sender fails, the receivers complete what they hold between them.
//! - What an interrupted transfer leaves is kept, and the next one brings only the rest.
//! - Every failure is a [`TransferError`]. Its variant tells who must act, and it names the [peers](FailedPeer) that failed.
//!
//! The program `rdmc` is a thin layer over this crate. [`Wording`] lets messages name the options of a program.
//!
//! # Examples
//! See [`FileSender`].

#![deny(unsafe_code)]

mod algorithm;
mod announcement;
mod arrivals;
mod blame;
pub mod costs;
mod departures;
mod driven;
mod error;
mod event;
pub mod fabric;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
pub mod manifest;
mod mapping;
mod partial;
mod receiver;
mod receivers;
mod sender;
pub mod size;
mod source;
mod stop;
mod store;
mod wording;
pub mod words;

pub use algorithm::{WireAlgorithm, WireAlgorithmError};
pub use announcement::OnFailure;
pub use blame::{FailedPeer, PeerFailure, explain};
pub use costs::PortRate;
pub use error::TransferError;
pub use event::{Direction, Event, PlanInUse, Proof, ReceiverEvent, SessionNumber};
pub use fabric::{FabricInUse, FabricSelection, FabricSettings};
pub use receiver::{FileReceiver, FileReceiverBuilder};
pub use sender::{FileSender, FileSenderBuilder, Sending, Sent};
pub use stop::StopHandle;
pub use wording::Wording;
