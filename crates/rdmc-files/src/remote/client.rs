//! The end that asks: gets files of a server, or puts files there.

use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use futures::Stream;
use futures::future::BoxFuture;
use rdmc::Fabrics;
use rdmc_wan::{OpenError, Session, SlabReceiver};
use tokio::sync::mpsc;

use super::consumer::consume;
use super::producer::produce;
use super::wire::{Opening, Request, Stored, decode};
use super::{LAST_WORD, RemoteEvent, RemoteEvents, RemoteOutcome, RemoteSettings, Tally, blocking};
use crate::error::{Kind, Problem, TransferError};
use crate::manifest::EntryPath;
use crate::source::SourceTree;
use crate::store::Store;
use crate::wording::Wording;

/// A server, and a path in its directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteLocation {
    /// Where the server listens: `host:port`.
    pub address: String,
    /// Components of the path, from the server's directory; empty for the directory itself.
    pub path: EntryPath,
}

impl RemoteLocation {
    /// Reads `host:port/path`; the port is `port` unless it is given.
    ///
    /// # Errors
    /// What is wrong with it, for the user.
    pub fn parse(text: &str, port: u16) -> Result<Self, String> {
        let (host, path) = text.split_once('/').unwrap_or((text, ""));
        let bare = host.strip_prefix('[').map_or(host, |rest| rest.rsplit_once(']').map_or(rest, |(_, after)| after));
        if host.is_empty() || host.starts_with(':') {
            return Err(format!("{text:?} names no host: give HOST[:PORT]/PATH"));
        }
        let address = match bare.rsplit_once(':') {
            Some((_, given)) if given.parse::<u16>().is_ok_and(|given| given > 0) => host.to_owned(),
            Some((_, given)) => {
                return Err(format!(
                    "{host:?} is no address, since {given:?} is no port from 1 to 65535: give HOST or HOST:PORT, with [] \
                     around an IPv6 address"
                ));
            }
            None => format!("{host}:{port}"),
        };
        let names = path.split('/').filter(|name| !name.is_empty() && *name != ".");
        let path = EntryPath(names.map(|name| name.as_bytes().to_vec()).collect());
        if !path.0.is_empty() {
            path.check().map_err(|flaw| flaw.to_string())?;
        }
        Ok(Self { address, path })
    }
}

impl fmt::Display for RemoteLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.path)
    }
}

/// A transfer between this host and a server: a stream of its events.
///
/// Polling it does the work. Dropping it ends the transfer; parts of files stay, if they are to be kept.
pub struct RemoteTransfer {
    work: Option<BoxFuture<'static, Result<RemoteOutcome, Problem>>>,
    events: mpsc::UnboundedReceiver<RemoteEvent>,
    outcome: Option<Result<RemoteOutcome, TransferError>>,
}

impl RemoteTransfer {
    pub(super) fn new(
        work: impl Future<Output = Result<RemoteOutcome, Problem>> + Send + 'static,
        events: mpsc::UnboundedReceiver<RemoteEvent>,
    ) -> Self {
        Self { work: Some(Box::pin(work)), events, outcome: None }
    }

    /// Does the rest of the work, and returns what became of it. If files were left out, that is
    /// [`RemoteOutcome::skipped`].
    ///
    /// # Cancel safety
    /// Dropping the future drops the transfer.
    ///
    /// # Errors
    /// How the transfer failed.
    pub async fn finish(mut self) -> Result<RemoteOutcome, TransferError> {
        use futures::StreamExt;
        while self.next().await.is_some() {}
        self.outcome.take().expect("the stream ends with the work")
    }

    /// Returns what became of the transfer, when the stream has ended.
    pub fn outcome(&self) -> Option<&Result<RemoteOutcome, TransferError>> {
        self.outcome.as_ref()
    }
}

impl Stream for RemoteTransfer {
    type Item = RemoteEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<RemoteEvent>> {
        let this = &mut *self;
        if let Some(work) = &mut this.work
            && let Poll::Ready(outcome) = work.as_mut().poll(cx)
        {
            this.work = None;
            this.outcome = Some(outcome.map_err(TransferError::from));
        }
        // The work has the other end.
        this.events.poll_recv(cx)
    }
}

impl fmt::Debug for RemoteTransfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteTransfer").field("outcome", &self.outcome).finish_non_exhaustive()
    }
}

/// Gets files and directories of the server at `address` into the directory `into`, each under its own name. An empty
/// path is all that is in the server's directory.
///
/// Parts of files that an interrupted transfer has left are completed, and files of equal length and time bring only
/// the blocks that differ.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// # let (there, here) = (tempfile::tempdir()?, tempfile::tempdir()?);
/// # std::fs::write(there.path().join("model.bin"), b"weights")?;
/// use rdmc_files::{RemoteLocation, RemoteServer, RemoteSettings};
///
/// let server = RemoteServer::builder(there.path()).bind("127.0.0.1:0").await?;
/// let location = RemoteLocation::parse(&format!("{}/model.bin", server.local_address()), 0).unwrap();
/// let serving = tokio::spawn(server.serve());
/// let getting = rdmc_files::get(&location.address, vec![location.path], here.path(), RemoteSettings::default());
/// assert_eq!(getting.finish().await?.files, 1);
/// assert_eq!(std::fs::read(here.path().join("model.bin"))?, b"weights");
/// # serving.abort();
/// # Ok(())
/// # }
/// ```
pub fn get(address: &str, paths: Vec<EntryPath>, into: impl Into<PathBuf>, settings: RemoteSettings) -> RemoteTransfer {
    let (events, queue) = RemoteEvents::new();
    let (address, into) = (address.to_owned(), into.into());
    let work = async move {
        let stored = settings.clone();
        let store = blocking(move || Ok(stored.apply(Store::open(&into, Wording::default())?))).await?;
        get_into(store, &address, paths, &settings, Tally::new(events)).await
    };
    RemoteTransfer::new(work, queue)
}

/// Puts files and directories into a directory of the server at `address`, each under its own name. They are stored
/// there, as durably as the server is set, when the transfer has ended.
pub fn put(address: &str, files: Vec<PathBuf>, into: EntryPath, settings: RemoteSettings) -> RemoteTransfer {
    let (events, queue) = RemoteEvents::new();
    let address = address.to_owned();
    let work = async move {
        let source = blocking(move || SourceTree::find(&files)).await?;
        let session = open(&address, &settings, Request::Put { into }).await?;
        let Session { sender, mut receiver, handle, .. } = session;
        let mut tally = Tally::new(events);
        let sent = async {
            produce(source, sender, &mut receiver, &handle, &mut tally).await?;
            let Stored { files, .. } = decode(&handle.next_message().await?)?;
            no_files_come(&mut receiver).await?;
            Ok(files)
        };
        let outcome = match sent.await {
            Ok(files) if files != tally.outcome.files => {
                Err(Problem::local(format!("the server has stored {files} of {} files", tally.outcome.files)))
            }
            Ok(_) => Ok(()),
            Err(problem) => Err(problem),
        };
        conclude(&handle, outcome, tally).await
    };
    RemoteTransfer::new(work, queue)
}

/// Gets files of the server at `address` into a store.
pub(super) async fn get_into(
    store: Store,
    address: &str,
    paths: Vec<EntryPath>,
    settings: &RemoteSettings,
    tally: Tally,
) -> Result<RemoteOutcome, Problem> {
    // A server cannot choose what is written here.
    let asked: Option<Vec<_>> = paths.iter().map(|path| path.0.last().cloned()).collect();
    let Session { mut sender, mut receiver, handle, .. } = open(address, settings, Request::Get { paths }).await?;
    let (outcome, tally) = consume(store, asked, &mut sender, &mut receiver, tally).await;
    let outcome = match outcome {
        Ok(()) => sender.finish().await.map_err(Problem::from),
        Err(problem) => Err(problem),
    };
    conclude(&handle, outcome, tally).await
}

/// Waits for the end of the direction of a server that only stores files.
pub(super) async fn no_files_come(receiver: &mut SlabReceiver) -> Result<(), Problem> {
    match receiver.next().await? {
        None => Ok(()),
        Some(_) => Err(Problem::local("the server sends files, although it is to store them")),
    }
}

pub(super) async fn open(address: &str, settings: &RemoteSettings, request: Request) -> Result<Session, Problem> {
    let fabrics = settings.open_towards(address).await?;
    connect(fabrics, address, settings, request).await.map_err(|error| match error {
        OpenError::Invalid(_) => Kind::Request.problem(error),
        OpenError::Unreachable { .. } => {
            Kind::Refused.problem(format!("{}: does a server of files run there?", error.explained()))
        }
        error => Kind::Refused.problem(error.explained()),
    })
}

pub(super) async fn connect(
    fabrics: Fabrics,
    address: &str,
    settings: &RemoteSettings,
    request: Request,
) -> Result<Session, OpenError> {
    rdmc_wan::connect(fabrics, address, settings.session(), Opening::encode(request)).await
}

/// Ends the session as the work has ended.
pub(super) async fn conclude(
    handle: &rdmc_wan::SessionHandle,
    outcome: Result<(), Problem>,
    tally: Tally,
) -> Result<RemoteOutcome, Problem> {
    let resumed = handle.stats().resumed;
    match outcome {
        Ok(()) => {
            handle.parted().await?;
            Ok(RemoteOutcome { resumed: tally.outcome.resumed + resumed, ..tally.outcome })
        }
        Err(problem) => {
            handle.abort(&problem.told());
            // So that the other end learns it before this process ends.
            let _ = tokio::time::timeout(LAST_WORD, handle.released()).await;
            Err(problem)
        }
    }
}
