//! Files of a distant host, over a [session](rdmc_wan::Session): a server has a directory, and clients get files from
//! there or put files there. A [`RemoteFile`] is one of them, read and written in place.
//!
//! One exchange of metadata begins a transfer. The producer, which has the files, sends their list. The consumer says
//! what it has of them already. Then the bytes follow in slabs: those of a long file fill many slabs, and those of many
//! short files share one.

use std::fmt;
use std::time::Duration;

use rdmc::{Fabrics, Security};
use rdmc_wan::{Rate, SessionConfig};
use tokio::sync::mpsc;

use crate::error::Problem;
use crate::fabric::{FabricSelection, FabricSettings};
use crate::manifest::EntryPath;
use crate::store::Store;

mod client;
mod consumer;
mod fetch;
mod file;
mod producer;
mod server;
mod wire;

pub use client::{RemoteLocation, RemoteTransfer, get, put};
pub use fetch::copy;
pub use file::{RemoteFile, RemoteFileMetadata, RemoteFileOptions};
pub use server::{RemoteServer, RemoteServerBuilder, ServedTransfer};

/// How the two ends of a remote transfer talk.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RemoteSettings {
    /// Protects the session; both ends have the same kind. Default `None`.
    pub security: Option<Security>,
    /// Whether data is encrypted; both ends must agree. Needs `security`. Default false.
    pub encrypt: bool,
    /// What carries the data: the two ends use the best fabric that both offer. Whether it is encrypted, `encrypt`
    /// says. Default [`FabricSelection::Tcp`].
    pub fabric: FabricSettings,
    /// Connections of the data channel, 1 to 64; the client decides. Default `None`: chosen by the session.
    pub streams: Option<u16>,
    /// The rate at which this end asks for data. Default `None`: as fast as the path goes.
    pub rate: Option<Rate>,
    /// Most bytes in flight and in memory, for each direction. Default `None`: that of the session.
    pub in_flight: Option<u64>,
    /// How long a lost connection may take to be resumed. Default `None`: that of the session.
    pub resume_within: Option<Duration>,
    /// Whether files that are stored here may replace others. Default true.
    pub overwrite: bool,
    /// Whether files are forced to the disk before they take their names, and open ones with each flush. Default
    /// false.
    pub fsync: bool,
    /// Whether parts of files stay when a transfer is interrupted, so that a later one brings the rest. Default true.
    pub keep_parts: bool,
}

impl Default for RemoteSettings {
    fn default() -> Self {
        Self {
            security: None,
            encrypt: false,
            fabric: FabricSettings::new(FabricSelection::Tcp),
            streams: None,
            rate: None,
            in_flight: None,
            resume_within: None,
            overwrite: true,
            fsync: false,
            keep_parts: true,
        }
    }
}

impl RemoteSettings {
    fn apply(&self, store: Store) -> Store {
        store.overwrite(self.overwrite).fsync(self.fsync).keep_parts(self.keep_parts)
    }

    fn session(&self) -> SessionConfig {
        let mut config = SessionConfig::default();
        config.security = self.security.clone();
        config.streams = self.streams;
        config.rate = self.rate;
        config.ring_len_max = self.in_flight.unwrap_or(config.ring_len_max);
        config.resume_within = self.resume_within.unwrap_or(config.resume_within);
        config
    }

    fn fabric(&self) -> FabricSettings {
        self.fabric.clone().encrypt(self.encrypt).for_sessions()
    }

    /// Opens the fabrics of a client of the server at `address`.
    async fn open_towards(&self, address: &str) -> Result<Fabrics, Problem> {
        Ok(self.fabric().open_for(address, self.session().registered_max()).await?.fabrics().clone())
    }

    /// Opens the fabrics of a server that listens at `address`.
    async fn open_at(&self, address: &str) -> Result<Fabrics, Problem> {
        Ok(self.fabric().open_here(address, self.session().registered_max()).await?.fabrics().clone())
    }
}

/// What happens in a remote transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemoteEvent {
    /// The list of files is known.
    #[non_exhaustive]
    Listed {
        /// Number of files.
        files: u64,
        /// Sum of their lengths in bytes.
        bytes: u64,
    },
    /// So many bytes of files are done, those that were there already included.
    #[non_exhaustive]
    Progress {
        /// The bytes.
        bytes: u64,
    },
    /// A file is complete.
    #[non_exhaustive]
    File {
        /// Its path, in a form for people.
        path: String,
        /// Its length in bytes.
        bytes: u64,
    },
    /// A file is left out, and the others go on.
    #[non_exhaustive]
    Skipped {
        /// Its path, in a form for people.
        path: String,
        /// Why.
        reason: String,
    },
}

/// What became of a remote transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteOutcome {
    /// Files that are complete at the consumer.
    pub files: u64,
    /// Sum of their lengths in bytes.
    pub bytes: u64,
    /// Bytes that have travelled.
    pub moved: u64,
    /// Files and other things that were left out, each with an event.
    pub skipped: u64,
    /// How often the session went on over another connection.
    pub resumed: u64,
}

/// Where the events of a transfer go.
#[derive(Clone, Debug)]
struct RemoteEvents(mpsc::UnboundedSender<RemoteEvent>);

impl RemoteEvents {
    fn new() -> (Self, mpsc::UnboundedReceiver<RemoteEvent>) {
        let (queue, events) = mpsc::unbounded_channel();
        (Self(queue), events)
    }

    fn say(&self, event: RemoteEvent) {
        // Fails only if nobody reads them.
        let _ = self.0.send(event);
    }
}

/// Counts what is done.
#[derive(Debug)]
struct Tally {
    events: RemoteEvents,
    outcome: RemoteOutcome,
    done_bytes: u64,
}

impl Tally {
    fn new(events: RemoteEvents) -> Self {
        Self { events, outcome: RemoteOutcome::default(), done_bytes: 0 }
    }

    /// Counts without telling anybody.
    fn unheard() -> Self {
        Self::new(RemoteEvents::new().0)
    }

    fn moved(&mut self, bytes: u64) {
        self.outcome.moved += bytes;
        self.had(bytes);
    }

    fn had(&mut self, bytes: u64) {
        if bytes > 0 {
            self.done_bytes += bytes;
            self.events.say(RemoteEvent::Progress { bytes: self.done_bytes });
        }
    }

    fn file(&mut self, path: &EntryPath, bytes: u64) {
        self.outcome.files += 1;
        self.outcome.bytes += bytes;
        self.events.say(RemoteEvent::File { path: path.to_string(), bytes });
    }

    fn skipped(&mut self, path: impl fmt::Display, reason: impl fmt::Display) {
        self.outcome.skipped += 1;
        self.events.say(RemoteEvent::Skipped { path: path.to_string(), reason: reason.to_string() });
    }
}

impl Problem {
    /// Returns the text that the other end of a session gets. It has a bounded length.
    fn told(&self) -> String {
        wire::shortened(self.reason())
    }
}

/// Does blocking work of the file system in another thread.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Problem> + Send + 'static) -> Result<T, Problem> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(Problem::local("the runtime was shut down")),
        },
    }
}

/// How long the other end may take to hear why a transfer ends.
const LAST_WORD: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
