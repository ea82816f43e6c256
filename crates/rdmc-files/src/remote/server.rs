//! The end that has a directory.

use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cap_std::ambient_authority;
use cap_std::fs::Dir;
use rdmc_wan::{Session, SessionListener, SessionRequest};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::consumer::consume;
use super::fetch::Fetch;
use super::file::served::ServedFile;
use super::file::wire::{FileError, Opened};
use super::producer::produce;
use super::wire::{OpenHow, Opening, Request, Stored, encode};
use super::{LAST_WORD, RemoteOutcome, RemoteSettings, Tally, blocking};
use crate::error::{Context, Kind, Problem, TransferError, cannot_listen};
use crate::manifest::EntryPath;
use crate::partial;
use crate::source::{Skipped, SourceTree};
use crate::store::Store;
use crate::wording::Wording;
use crate::words::printable;

/// Settings of a [`RemoteServer`].
#[derive(Clone, Debug)]
pub struct RemoteServerBuilder {
    dir: PathBuf,
    writable: bool,
    fetches_from: Vec<String>,
    settings: RemoteSettings,
}

impl RemoteServerBuilder {
    /// Sets whether clients may put files into the directory; by default they only get files.
    #[must_use]
    pub fn writable(self, writable: bool) -> Self {
        Self { writable, ..self }
    }

    /// Sets the servers, each as `host:port`, from which clients may have this one [copy](super::copy) files into its
    /// directory; by default none. The server must be writable, too.
    #[must_use]
    pub fn fetches_from(self, addresses: Vec<String>) -> Self {
        Self { fetches_from: addresses, ..self }
    }

    /// Sets how the server talks, and how it stores files.
    #[must_use]
    pub fn settings(self, settings: RemoteSettings) -> Self {
        Self { settings, ..self }
    }

    /// Listens at `address` (`host:port`, port 0 for any free one).
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing listens.
    ///
    /// # Errors
    /// The directory cannot be used, or the address cannot be listened at.
    pub async fn bind(self, address: &str) -> Result<RemoteServer, TransferError> {
        let dir = self.dir.canonicalize();
        let root = dir.map_err(|error| Store::unusable(&self.dir, &error))?;
        let confined = Dir::open_ambient_dir(&root, ambient_authority());
        let confined = confined.with_context(|| format!("the directory {} cannot be used", root.display()))?;
        if self.writable {
            Store::open(&root, Wording::default())?;
        }
        let fabrics = self.settings.open_at(address).await?;
        let listening = SessionListener::bind(fabrics, address, self.settings.session()).await;
        let listener = listening.map_err(|error| cannot_listen(address, &error, "server"))?;
        let Self { writable, fetches_from, settings, .. } = self;
        let confined = Arc::new(confined);
        let (transfers, closing) = (Semaphore::new(TRANSFERS_MAX), watch::Sender::new(false));
        let shared = Arc::new(Served { root, confined, writable, fetches_from, settings, transfers, closing });
        Ok(RemoteServer { shared, listener, transfers: JoinSet::new() })
    }
}

/// Serves a directory to clients: see [`get`](super::get), [`put`](super::put), [`copy`](super::copy) and
/// [`RemoteFile`](super::RemoteFile).
///
/// Nothing outside the directory is read or written, not even through a symbolic link. At most 64 transfers run at
/// once, open files included; more are refused.
pub struct RemoteServer {
    shared: Arc<Served>,
    listener: SessionListener,
    transfers: JoinSet<ServedTransfer>,
}

/// A transfer that a server has ended.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ServedTransfer {
    /// The client's address.
    pub from: Option<std::net::IpAddr>,
    /// What the client wanted, in a form for people.
    pub request: String,
    /// What became of it.
    pub outcome: Result<RemoteOutcome, TransferError>,
}

struct Served {
    root: PathBuf,
    confined: Arc<Dir>,
    writable: bool,
    fetches_from: Vec<String>,
    settings: RemoteSettings,
    transfers: Semaphore,
    closing: watch::Sender<bool>,
}

impl RemoteServer {
    /// Begins to describe a server of the directory `dir`.
    pub fn builder(dir: impl Into<PathBuf>) -> RemoteServerBuilder {
        let (dir, settings) = (dir.into(), RemoteSettings::default());
        RemoteServerBuilder { dir, writable: false, fetches_from: Vec::new(), settings }
    }

    /// Returns the address to which clients connect, with the port that was chosen for port 0.
    pub fn local_address(&self) -> &str {
        self.listener.local_address()
    }

    /// Serves until a transfer has ended, and returns that one. The others go on meanwhile, and between the calls.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn next(&mut self) -> ServedTransfer {
        loop {
            tokio::select! {
                request = self.listener.accept() => {
                    let shared = self.shared.clone();
                    self.transfers.spawn(async move { shared.serve(request).await });
                }
                Some(ended) = self.transfers.join_next() => match ended {
                    Ok(ended) => return ended,
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    Err(_) => {}
                },
            }
        }
    }

    /// Ends all transfers, and tells their clients that the server was stopped.
    ///
    /// # Cancel safety
    /// If the future is dropped, transfers end, but clients may not learn why.
    pub async fn close(mut self) {
        self.shared.closing.send_replace(true);
        let ended = async { while self.transfers.join_next().await.is_some() {} };
        // One that has not begun may take longer.
        let _ = tokio::time::timeout(2 * LAST_WORD, ended).await;
    }

    /// Serves until the future is dropped, which ends its transfers.
    pub async fn serve(mut self) {
        loop {
            let ServedTransfer { from, request, outcome } = self.next().await;
            match outcome {
                Ok(outcome) => tracing::info!(?from, request, ?outcome, "transfer served"),
                Err(error) => tracing::warn!(?from, request, %error, "transfer failed"),
            }
        }
    }
}

impl fmt::Debug for RemoteServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteServer").field("root", &self.shared.root).finish_non_exhaustive()
    }
}

impl Served {
    async fn serve(&self, request: SessionRequest) -> ServedTransfer {
        let from = request.from();
        let decoded = Opening::decode(request.metadata());
        let text = decoded.as_ref().map_or_else(|_| "something else".to_owned(), describe);
        let outcome = match (decoded, self.transfers.try_acquire()) {
            (Ok(wanted), Ok(_place)) => self.transfer(request, wanted).await,
            (Ok(_), Err(_)) => Err(refuse(request, Kind::Busy.problem("too many transfers run")).await),
            (Err(problem), _) => Err(refuse(request, problem).await),
        };
        ServedTransfer { from, request: text, outcome: outcome.map_err(TransferError::from) }
    }

    async fn transfer(&self, request: SessionRequest, wanted: Request) -> Result<RemoteOutcome, Problem> {
        let prepared = match wanted {
            Request::Get { paths } => self.find(&paths).await.map(Work::Produce),
            Request::Put { into } => self.store(&into).await.map(|store| Work::Store(Box::new(store))),
            Request::Fetch { from, paths, into } => {
                self.fetch(from, paths, &into).await.map(|fetch| Work::Fetch(Box::new(fetch)))
            }
            Request::Open { path, how } => match self.open(path, how).await? {
                Ok(file) => Ok(Work::Open(Box::new(file))),
                Err(error) => return Err(not_opened(request, error).await),
            },
        };
        let work = match prepared {
            Ok(work) => work,
            Err(problem) => return Err(refuse(request, problem).await),
        };
        let accepted = request.accept(work.greeting()).await;
        let session = accepted.map_err(|error| Problem::local(error.explained_at_listener()))?;
        let handle = session.handle.clone();
        let mut closing = self.closing.subscribe();
        let stopped = async {
            let _ = closing.wait_for(|closing| *closing).await;
            let problem = Kind::Stopped.problem("the server was stopped; run the same command again when it runs");
            // Before the session is dropped, which has less to say.
            handle.abort(&problem.told());
            problem
        };
        let (outcome, tally) = tokio::select! {
            biased;
            problem = stopped => (Err(problem), Tally::unheard()),
            done = work.with(session) => done,
        };
        match outcome {
            Ok(()) => Ok(RemoteOutcome { resumed: tally.outcome.resumed + handle.stats().resumed, ..tally.outcome }),
            Err(problem) => {
                handle.abort(&problem.told());
                // A server that is closed waits until the client has been told.
                let _ = tokio::time::timeout(LAST_WORD, handle.released()).await;
                Err(problem)
            }
        }
    }

    /// Finds what a client wants. Each path arrives under its own last name, also if it is a link to another one.
    async fn find(&self, paths: &[EntryPath]) -> Result<SourceTree, Problem> {
        let (mut found, mut skipped) = (Vec::new(), Vec::new());
        for path in paths {
            let inside = self.resolve(path)?;
            match path.0.last() {
                Some(name) => found.push((self.root.join(inside), name.clone())),
                None => list(&self.root, &mut found, &mut skipped)?,
            }
        }
        blocking(move || SourceTree::find_served(found, skipped)).await
    }

    /// Opens the directory into which a client wants to put files.
    async fn store(&self, into: &EntryPath) -> Result<Store, Problem> {
        if !self.writable {
            return Err(Kind::Refused.problem(UNWRITABLE));
        }
        let path = self.root.join(self.resolve_directory(into)?);
        let (settings, shown) = (self.settings.clone(), format!("/{into} of the server"));
        blocking(move || Ok(settings.apply(Store::open_called(&path, &shown, Wording::default())?))).await
    }

    /// Prepares a copy of files of another server.
    async fn fetch(&self, from: String, paths: Vec<EntryPath>, into: &EntryPath) -> Result<Fetch, Problem> {
        let store = self.store(into).await?;
        if !self.fetches_from.iter().any(|allowed| allowed.eq_ignore_ascii_case(&from)) {
            let from = printable(&from);
            let what = format!("this server may fetch nothing from {from}: start it with --fetch-from {from}");
            return Err(Kind::Refused.problem(what));
        }
        Ok(Fetch { from, paths, store, settings: self.settings.clone() })
    }

    /// Opens a file for a client.
    async fn open(&self, path: EntryPath, how: OpenHow) -> Result<io::Result<ServedFile>, Problem> {
        let how = match self.may_open(how) {
            Ok(how) => how,
            Err(error) => return Ok(Err(error)),
        };
        let place = match self.inside(&path.to_path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && (how.create || how.create_new) => {
                self.new_inside(&path)
            }
            place => place,
        };
        let (confined, fsync) = (self.confined.clone(), self.settings.fsync);
        blocking(move || Ok(place.and_then(|place| ServedFile::open(&confined, &place, path, how, fsync)))).await
    }

    /// Returns how this server opens a file.
    fn may_open(&self, how: OpenHow) -> io::Result<OpenHow> {
        let denied = |what| Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
        match (how.write, self.settings.overwrite) {
            (true, _) if !self.writable => denied(UNWRITABLE),
            (true, false) if !how.create && !how.create_new => denied("this server keeps the files that it has"),
            (true, false) => Ok(OpenHow { create_new: true, ..how }),
            _ => Ok(how),
        }
    }

    /// Returns the path without symbolic links, from the server's directory. It is inside.
    fn resolve(&self, path: &EntryPath) -> Result<PathBuf, Problem> {
        if path.0.is_empty() {
            return Ok(PathBuf::new());
        }
        self.inside(&path.to_path()).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Kind::Refused.problem(format!("{path} does not exist at the server")),
            _ => Kind::Refused.problem(format!("{path} cannot be used: {error}")),
        })
    }

    /// Does the same for a directory, into which files are put.
    fn resolve_directory(&self, path: &EntryPath) -> Result<PathBuf, Problem> {
        if let Err(error) = self.inside(&path.to_path())
            && error.kind() == io::ErrorKind::NotFound
        {
            let what = format!("the directory {path} does not exist at the server: create it there first");
            return Err(Kind::Refused.problem(what));
        }
        let resolved = self.resolve(path)?;
        match resolved.as_os_str().is_empty() || self.confined.metadata(&resolved).is_ok_and(|found| found.is_dir()) {
            true => Ok(resolved),
            false => Err(Kind::Refused.problem(format!("{path} is no directory at the server"))),
        }
    }

    /// Returns the path without symbolic links, from the server's directory. It is inside, and not hidden.
    fn inside(&self, path: &Path) -> io::Result<PathBuf> {
        if path.as_os_str().is_empty() {
            return Ok(PathBuf::from("."));
        }
        let resolved = self.confined.canonicalize(path)?;
        let is_hidden = resolved.components().any(|name| partial::is_hidden(name.as_os_str()));
        if is_hidden { Err(io::ErrorKind::NotFound.into()) } else { Ok(resolved) }
    }

    /// Returns where a file is to be made.
    fn new_inside(&self, path: &EntryPath) -> io::Result<PathBuf> {
        let (parents, name) = path.split();
        match partial::is_hidden(name) {
            true => Err(io::Error::new(io::ErrorKind::PermissionDenied, "this name is for parts of files")),
            false => Ok(self.inside(&parents)?.join(name)),
        }
    }
}

/// Lists the server's directory. Links are skipped: they lead out of it, or to what is there anyway.
fn list(dir: &Path, found: &mut Vec<(PathBuf, Vec<u8>)>, skipped: &mut Vec<Skipped>) -> Result<(), Problem> {
    let listed = std::fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut listed = listed.context("the server cannot list its directory")?;
    listed.sort_by_key(std::fs::DirEntry::file_name);
    for entry in listed {
        if partial::is_hidden(&entry.file_name()) {
            continue;
        }
        let (at, name) = (entry.path(), entry.file_name().as_bytes().to_vec());
        match entry.file_type()? {
            kind if kind.is_file() || kind.is_dir() => found.push((at, name)),
            _ => skipped.push(Skipped::special(at, EntryPath(vec![name]))),
        }
    }
    Ok(())
}

/// What a server does for a client.
enum Work {
    Produce(SourceTree),
    Store(Box<Store>),
    Fetch(Box<Fetch>),
    Open(Box<ServedFile>),
}

impl Work {
    /// Returns what the client learns when the session is accepted.
    fn greeting(&self) -> Vec<u8> {
        match self {
            Self::Open(file) => encode(&Opened::Ok(file.metadata)),
            Self::Produce(_) | Self::Store(_) | Self::Fetch(_) => Vec::new(),
        }
    }

    /// Does it, over a session.
    async fn with(self, session: Session) -> (Result<(), Problem>, Tally) {
        match self {
            Self::Produce(source) => send(source, session).await,
            Self::Store(store) => receive(*store, session).await,
            Self::Fetch(fetch) => fetch.with(session).await,
            Self::Open(file) => file.with(session).await,
        }
    }
}

/// Sends files to a client.
async fn send(source: SourceTree, session: Session) -> (Result<(), Problem>, Tally) {
    let Session { sender, mut receiver, handle, .. } = session;
    let mut tally = Tally::unheard();
    let mut outcome = produce(source, sender, &mut receiver, &handle, &mut tally).await;
    if outcome.is_ok() {
        // The client's direction has nothing more than its end.
        outcome = receiver.next().await.map(drop).map_err(Problem::from);
    }
    (outcome, tally)
}

/// Stores files of a client.
async fn receive(store: Store, session: Session) -> (Result<(), Problem>, Tally) {
    let Session { mut sender, mut receiver, handle, .. } = session;
    let (outcome, tally) = consume(store, None, &mut sender, &mut receiver, Tally::unheard()).await;
    let told = async {
        // Before the sender is dropped, which would give another reason.
        outcome.inspect_err(|problem| handle.abort(&problem.told()))?;
        let RemoteOutcome { files, bytes, .. } = tally.outcome;
        handle.send_message(encode(&Stored { files, bytes })).await?;
        sender.finish().await.map_err(Problem::from)
    };
    (told.await, tally)
}

/// Tells the client why nothing happens.
async fn refuse(request: SessionRequest, problem: Problem) -> Problem {
    request.refuse(&problem.told()).await;
    problem
}

/// Tells the client why its file is not open. It learns the kind of the error, which no refusal has.
async fn not_opened(request: SessionRequest, error: io::Error) -> Problem {
    let problem = Kind::Refused.problem(&error);
    if let Ok(session) = request.accept(encode(&Opened::Err(FileError::from(error)))).await {
        // The client ends it.
        let _ = tokio::time::timeout(LAST_WORD, session.handle.ended()).await;
    }
    problem
}

fn describe(request: &Request) -> String {
    let list = |paths: &[EntryPath]| paths.iter().map(|path| format!("/{path}")).collect::<Vec<_>>().join(" ");
    match request {
        Request::Get { paths } => format!("get {}", list(paths)),
        Request::Put { into } => format!("put into /{into}"),
        Request::Fetch { from, paths, into } => {
            format!("fetch {} from {} into /{into}", list(paths), printable(from))
        }
        Request::Open { path, how } => {
            let what = match (how.read, how.write) {
                (true, true) => "read and write",
                (_, true) => "write",
                (_, false) => "read",
            };
            format!("{what} /{path}")
        }
    }
}

/// Transfers at once.
const TRANSFERS_MAX: usize = 64;
const UNWRITABLE: &str = "this server takes no files: it was not started as writable (--writable)";
