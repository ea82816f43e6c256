//! Copies between two servers, for a client that has neither end of the data.
//!
//! The server that stores the files gets them from the other one, as a client of it. It tells its own client about the
//! transfer by messages.

use std::collections::VecDeque;
use std::pin::pin;
use std::time::Duration;

use futures::FutureExt;
use rdmc_wan::{Session, SessionError, SessionHandle};
use tokio::sync::mpsc;

use super::client::{conclude, get_into, no_files_come, open};
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
        let (mut tally, mut begun) = (Tally::new(events), false);
        let told = async {
            // This end has no files.
            sender.finish().await?;
            'told: loop {
                let news: Vec<FetchNews> = decode(&handle.next_message().await?)?;
                for news in news {
                    begun |= matches!(news, FetchNews::Progress { .. } | FetchNews::File { .. });
                    let event = match news {
                        FetchNews::Listed { files, bytes } => RemoteEvent::Listed { files, bytes },
                        FetchNews::Progress { bytes } => RemoteEvent::Progress { bytes },
                        FetchNews::File { path, bytes } => RemoteEvent::File { path: printable(&path), bytes },
                        FetchNews::Skipped { path, reason } => {
                            RemoteEvent::Skipped { path: printable(&path), reason: printable(&reason) }
                        }
                        FetchNews::Done { files, bytes, moved, skipped, resumed } => {
                            tally.outcome = RemoteOutcome { files, bytes, moved, skipped, resumed };
                            break 'told;
                        }
                    };
                    tally.events.say(event);
                }
            }
            no_files_come(&mut receiver).await
        };
        let told = told.await;
        // A server that was lost instead may go on for a while.
        let refused = !begun && matches!(handle.ended().now_or_never(), Some(Err(SessionError::Aborted { .. })));
        let told = told.map_err(|problem| if refused { problem.of_kind(Kind::Refused) } else { problem });
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
        let mut tally = Tally::unheard();
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
        let done = tokio::select! {
            biased;
            // A client that has gone wants no copy.
            problem = gone => Err(problem),
            fetched = self.fetch_and_tell(&handle) => fetched,
        };
        let done = async {
            // Before the sender is dropped, which would give another reason.
            let outcome = done.inspect_err(|problem| handle.abort(&problem.told()))?;
            let RemoteOutcome { files, bytes, moved, skipped, resumed } = outcome;
            let done = FetchNews::Done { files, bytes, moved, skipped, resumed };
            handle.send_message(encode(&vec![done])).await?;
            sender.finish().await?;
            Ok(outcome)
        };
        (done.await.map(|outcome| tally.outcome = outcome), tally)
    }

    /// Gets the files, and meanwhile tells the client about them.
    async fn fetch_and_tell(self, client: &SessionHandle) -> Result<RemoteOutcome, Problem> {
        let (events, queue) = RemoteEvents::new();
        let Self { from, paths, store, settings } = self;
        let fetching = async {
            let fetched = get_into(store, &from, paths, &settings, Tally::new(events)).await;
            fetched.map_err(|problem| match problem.kind {
                // It names the server.
                Kind::Refused => problem,
                _ => problem.context(format_args!("while fetching from {from}")),
            })
        };
        // The client hears of a failure before the rest of the news.
        let (outcome, ()) = tokio::try_join!(fetching, tell(queue, client))?;
        Ok(outcome)
    }
}

/// Tells the client what happens, until nothing more does: several times a second at most, in long messages.
async fn tell(mut events: mpsc::UnboundedReceiver<RemoteEvent>, client: &SessionHandle) -> Result<(), Problem> {
    let mut untold = Untold::default();
    loop {
        // For a while, so that one message has the news of many files.
        let last = match tokio::time::timeout(TOLD_EVERY, untold.gather(&mut events)).await {
            Ok(gathered) => gathered.map(|()| true)?,
            Err(_) => false,
        };
        while !untold.is_empty() {
            let mut telling = pin!(client.send_message(encode(&untold.take())));
            tokio::select! {
                biased;
                told = &mut telling => told?,
                // Events go on coming while the client does not listen.
                gathered = untold.gather(&mut events) => {
                    gathered?;
                    telling.await?;
                }
            }
            // What fills another message follows at once.
            if !last && untold.len < TOLD_AT_ONCE {
                break;
            }
        }
        if last {
            return Ok(());
        }
    }
}

/// What the client has not heard.
#[derive(Default)]
struct Untold {
    news: VecDeque<FetchNews>,
    /// Bytes of their texts.
    len: usize,
    /// The latest progress.
    progress: Option<u64>,
}

impl Untold {
    fn is_empty(&self) -> bool {
        self.news.is_empty() && self.progress.is_none()
    }

    /// Takes events until there are no more.
    async fn gather(&mut self, events: &mut mpsc::UnboundedReceiver<RemoteEvent>) -> Result<(), Problem> {
        while let Some(event) = events.recv().await {
            self.push(event)?;
        }
        Ok(())
    }

    fn push(&mut self, event: RemoteEvent) -> Result<(), Problem> {
        let news = match event {
            RemoteEvent::Progress { bytes } => {
                // It says more than those before.
                self.progress = Some(bytes);
                return Ok(());
            }
            RemoteEvent::Listed { files, bytes } => FetchNews::Listed { files, bytes },
            RemoteEvent::File { path, bytes } => FetchNews::File { path, bytes },
            RemoteEvent::Skipped { path, reason } => FetchNews::Skipped { path, reason },
        };
        self.len += len(&news);
        self.news.push_back(news);
        match self.len > UNTOLD_MAX {
            true => Err(Problem::local("the client does not listen to what is copied")),
            false => Ok(()),
        }
    }

    /// Takes as much as fits into one message.
    fn take(&mut self) -> Vec<FetchNews> {
        let (mut taken, mut taken_len) = (Vec::new(), 0);
        while let Some(next) = self.news.front()
            && (taken.is_empty() || taken_len + len(next) <= TOLD_AT_ONCE)
        {
            taken_len += len(next);
            taken.extend(self.news.pop_front());
        }
        self.len -= taken_len;
        if self.news.is_empty() {
            taken.extend(self.progress.take().map(|bytes| FetchNews::Progress { bytes }));
        }
        taken
    }
}

/// Returns the bytes that news take in a message, at most.
fn len(news: &FetchNews) -> usize {
    NUMBERS_LEN
        + match news {
            FetchNews::File { path, .. } => path.len(),
            FetchNews::Skipped { path, reason } => path.len() + reason.len(),
            FetchNews::Listed { .. } | FetchNews::Progress { .. } | FetchNews::Done { .. } => 0,
        }
}

/// How often the client is told at most, unless there is more than fits into a message.
const TOLD_EVERY: Duration = Duration::from_millis(100);
/// Bytes of news in one message. A path has at most 18 KiB, and a reason 6 KiB, with every byte escaped.
const TOLD_AT_ONCE: usize = 32 << 10;
/// Bytes of news that may wait for the client. Then the copy fails.
const UNTOLD_MAX: usize = 64 << 20;
/// Bytes of the numbers of news, at most.
const NUMBERS_LEN: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_are_told_in_messages_that_are_not_too_long() {
        let mut untold = Untold::default();
        let path = "\\u{1}".repeat(3072);
        for bytes in 0..100 {
            untold.push(RemoteEvent::Progress { bytes }).unwrap();
            let event = match bytes % 2 {
                0 => RemoteEvent::File { path: path.clone(), bytes: u64::MAX },
                _ => RemoteEvent::Skipped { path: "short".into(), reason: "r".repeat(6 << 10) },
            };
            untold.push(event).unwrap();
        }
        let (mut told, mut messages) = (0, 0);
        while !untold.is_empty() {
            let taken = untold.take();
            assert!(encode(&taken).len() <= 64 << 10);
            // The latest progress comes last, and no other.
            let progress = taken.iter().filter(|news| matches!(news, FetchNews::Progress { .. })).count();
            assert_eq!(progress, usize::from(untold.is_empty()));
            told += taken.len() - progress;
            messages += 1;
        }
        assert_eq!((told, untold.len), (100, 0));
        assert!(messages <= 51, "{messages}");
    }

    #[test]
    fn who_does_not_listen_ends_the_copy() {
        let mut untold = Untold::default();
        let file = || RemoteEvent::File { path: "f".repeat(1000), bytes: 1 };
        let refused = (0..).find(|_| untold.push(file()).is_err()).unwrap();
        assert!((60_000..70_000).contains(&refused), "{refused}");
    }
}
