//! Copies between two servers, for a client that has neither end of the data.
//!
//! The server that stores the files gets them from the other one, as a client of it. It tells its own client about the
//! transfer by messages.

use std::time::{Duration, Instant};

use rdmc_wan::{Session, SessionError, SessionHandle};
use tokio::sync::mpsc;

use super::client::{conclude, get_into, open};
use super::wire::{FetchNews, Request, decode, encode};
use super::{RemoteEvent, RemoteEvents, RemoteLocation, RemoteOutcome, RemoteSettings, RemoteTransfer, Tally};
use crate::error::{Kind, Problem};
use crate::manifest::EntryPath;
use crate::store::Store;
use crate::words::printable;

/// Copies files and directories of the server at `from` into a directory of the server `to`, each under its own name.
/// The bytes go from the one to the other.
///
/// The server `to` must be writable, and allow the other one ([`fetches_from`]). It reaches `from` by its own settings:
/// key, streams, rate. `settings` are those of the session with it.
///
/// If the connection to the server `to` is lost for longer than it may be resumed, the copy ends. Parts of files stay
/// there, and the same call brings the rest.
///
/// [`fetches_from`]: super::RemoteServerBuilder::fetches_from
pub fn copy(from: &str, paths: Vec<EntryPath>, to: &RemoteLocation, settings: RemoteSettings) -> RemoteTransfer {
    let (events, queue) = RemoteEvents::new();
    let (from, to) = (from.to_owned(), to.clone());
    let work = async move {
        let request = Request::Fetch { from, paths, into: to.path };
        let Session { sender, mut receiver, handle, .. } = open(&to.address, &settings, request).await?;
        let (mut tally, mut listed) = (Tally::new(events), false);
        let told = async {
            // This end has no files.
            sender.finish().await?;
            loop {
                match decode(&handle.next_message().await?)? {
                    FetchNews::Done { files, bytes, moved, skipped, resumed } => {
                        tally.outcome = RemoteOutcome { files, bytes, moved, skipped, resumed };
                        break;
                    }
                    FetchNews::Listed { files, bytes } => {
                        listed = true;
                        tally.events.say(RemoteEvent::Listed { files, bytes });
                    }
                    FetchNews::Progress { bytes } => tally.events.say(RemoteEvent::Progress { bytes }),
                    FetchNews::File { path, bytes } => {
                        tally.events.say(RemoteEvent::File { path: printable(&path), bytes });
                    }
                    FetchNews::Skipped { path, reason } => {
                        let (path, reason) = (printable(&path), printable(&reason));
                        tally.events.say(RemoteEvent::Skipped { path, reason });
                    }
                }
            }
            match receiver.next().await? {
                None => Ok(()),
                Some(_) => Err(Problem::local("the server sends files, although it is to store them")),
            }
        };
        let told = told.await;
        // Nothing was copied before.
        let told = told.map_err(|problem| if listed { problem } else { problem.of_kind(Kind::Refused) });
        conclude(&handle, told, tally).await
    };
    RemoteTransfer::new(work, queue)
}

/// At the server that stores the files: gets them, and tells the client about it.
pub(super) struct Fetch {
    pub(super) from: String,
    pub(super) paths: Vec<EntryPath>,
    pub(super) store: Store,
    pub(super) settings: RemoteSettings,
}

impl Fetch {
    /// Does it for the client of a session.
    pub(super) async fn with(self, client: Session) -> (Result<(), Problem>, Tally) {
        let Session { sender, mut receiver, handle, .. } = client;
        // Nobody reads what the server's own tally says.
        let mut tally = Tally::new(RemoteEvents::new().0);
        let gone = async {
            // The client's direction has nothing but its end.
            match receiver.next().await {
                Ok(None) => {}
                Ok(Some(_)) => return Problem::local("the client sends files, although it has none"),
                Err(error) => return error.into(),
            }
            match handle.ended().await {
                Ok(()) => Problem::local("the client has ended the session early"),
                Err(error) => error.into(),
            }
        };
        let done = async {
            let (events, queue) = RemoteEvents::new();
            let Self { from, paths, store, settings } = self;
            let fetching = get_into(store, &from, paths, &settings, Tally::new(events));
            let (fetched, told) = tokio::join!(fetching, tell(queue, &handle));
            // Before the sender is dropped, which would give another reason.
            let fetched = fetched.map_err(|problem| match problem.kind {
                // It names the server.
                Kind::Refused => problem,
                _ => problem.context(from),
            });
            let outcome = fetched.inspect_err(|problem| handle.abort(&problem.reason()))?;
            told?;
            let RemoteOutcome { files, bytes, moved, skipped, resumed } = outcome;
            handle.send_message(encode(&FetchNews::Done { files, bytes, moved, skipped, resumed })).await?;
            sender.finish().await?;
            Ok(outcome)
        };
        let done = tokio::select! {
            biased;
            // A client that has gone wants no copy.
            problem = gone => Err(problem),
            done = done => done,
        };
        (done.map(|outcome| tally.outcome = outcome), tally)
    }
}

/// Tells the client what happens, until nothing more does.
async fn tell(mut events: mpsc::UnboundedReceiver<RemoteEvent>, client: &SessionHandle) -> Result<(), SessionError> {
    let (mut untold, mut told_at) = (None, None);
    while let Some(event) = events.recv().await {
        let news = match event {
            // A later one says more.
            RemoteEvent::Progress { bytes } if told_at.is_some_and(|at: Instant| at.elapsed() < PROGRESS_EVERY) => {
                untold = Some(bytes);
                continue;
            }
            RemoteEvent::Progress { bytes } => {
                (untold, told_at) = (None, Some(Instant::now()));
                FetchNews::Progress { bytes }
            }
            RemoteEvent::Listed { files, bytes } => FetchNews::Listed { files, bytes },
            RemoteEvent::File { path, bytes } => FetchNews::File { path, bytes },
            RemoteEvent::Skipped { path, reason } => FetchNews::Skipped { path, reason },
        };
        client.send_message(encode(&news)).await?;
    }
    match untold {
        Some(bytes) => client.send_message(encode(&FetchNews::Progress { bytes })).await,
        None => Ok(()),
    }
}

/// How often the client hears how far a copy is.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
