//! The files of one transfer as they arrive, also when other members fail.
//!
//! Message 2i of the group is unit i of the manifest, a long file or several short ones. Message 2i + 1 is its digest.
//! A receiver agrees to the end of the group when all files are in place, and refuses it if there was a problem. If the
//! group fails, the survivors form another one. It offers every unfinished message again, under the same number.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc::{
    Arrival, BufferMut, FailedMember, GroupError, GroupFailure, GroupSpec, Memory, Message, Node, NodeId, Offer,
    OfferReceiver, RecoveryError,
};
use tokio::task::{JoinError, JoinSet};

use crate::announcement::{CLOSED_EARLY, DIGEST_LEN};
use crate::blame::{CUT_OFF, explain, given_up, peers, stopped_before, stopped_for, what_next};
use crate::error::{Context, Kind, Problem};
use crate::event::{Event, Events, Progress, TICK};
use crate::manifest::{Entry, Manifest};
use crate::source::has_digest;
use crate::store::{IncomingFile, Store};
use crate::units::Units;
use crate::words::count;

/// Receives all files of a manifest. Agrees to the end when all are complete and in place. Returns how many receivers
/// have them. Says `started` once the group is formed.
pub(crate) async fn take_files(
    node: &Node,
    spec: GroupSpec,
    manifest: &Arc<Manifest>,
    store: &Store,
    events: &Events,
    started: Event,
) -> Result<usize, Problem> {
    let mut arrivals = Arrivals {
        node,
        manifest,
        files: manifest.files().collect(),
        units: Units::of(manifest),
        store,
        events,
        progress: events.progress(manifest.totals().1),
        bytes_before: node.stats().bytes_received,
        open: BTreeMap::new(),
        preparing: None,
        ready: None,
        held: None,
        arriving: FuturesUnordered::new(),
        finishing: JoinSet::new(),
        complete: 0,
        directories_finished: false,
        started: Some(started),
        failed: Vec::new(),
        stopped: None,
        problem: None,
    };
    let mut group = match node.join_group(spec).with_offers().await {
        Err(GroupError::Failed(failure)) => arrivals.go_on(failure).await?,
        joined => joined.of_kind(Kind::Refused)?,
    };
    arrivals.begins();
    arrivals.problem = arrivals.with_directories(Store::make_directories).await.err();
    loop {
        let failure = match arrivals.take_all(&mut group).await {
            Ok(()) => {
                let members = group.members().to_vec();
                arrivals.finish_all(&members).await;
                if let Some(error) = arrivals.problem {
                    group.refuse(&error.reason());
                    return Err(error);
                }
                match group.close().await {
                    Ok(_) => return arrivals.outcome(&members).await,
                    Err(failure) => failure,
                }
            }
            Err(failure) => failure,
        };
        group = arrivals.go_on(failure).await?;
    }
}

/// The files that are arriving.
struct Arrivals<'a> {
    node: &'a Node,
    manifest: &'a Arc<Manifest>,
    files: Vec<(&'a Entry, u64)>,
    units: Units,
    store: &'a Store,
    events: &'a Events,
    progress: Progress,
    /// Bytes that the node had received before.
    bytes_before: u64,
    /// Units that have begun to arrive but lack bytes or digest, by their indices.
    open: BTreeMap<usize, OpenUnit>,
    /// The message for which memory is prepared.
    preparing: Option<Preparing>,
    /// What was prepared for a unit whose message is offered again.
    ready: Option<(usize, Result<Prepared, Problem>)>,
    /// A unit that waits until those before it are in place, because space is short.
    held: Option<(usize, Offer)>,
    /// Messages that arrive, by their numbers.
    arriving: FuturesUnordered<BoxFuture<'static, (u64, Result<Message, GroupFailure>)>>,
    /// Tasks that compare files with their digests and move them into place.
    finishing: JoinSet<Result<Finished, Problem>>,
    /// Number of files in place.
    complete: usize,
    /// Whether the directories have their modes and times.
    directories_finished: bool,
    /// What is said when a group is formed. Afterwards something may have been sent.
    started: Option<Event>,
    /// Members that have failed so far.
    failed: Vec<FailedMember>,
    /// For how long this process was stopped before the latest failure.
    stopped: Option<Duration>,
    /// The first problem at this receiver. It refuses the next message, or the end of the group, for it.
    problem: Option<Problem>,
}

/// What a message of the group carries; units by their indices.
#[derive(Clone, Copy)]
enum MessageRole {
    Unit(usize),
    Digest(usize),
    Unexpected,
}

/// A message for which memory is being prepared.
type Preparing = BoxFuture<'static, (Offer, Result<Prepared, Problem>)>;

/// Where a unit goes, and the memory to receive into, which may hold some of it.
type Prepared = (ReceiveInto, BufferMut);

/// What has become of a unit: an event for each file that is in place, and why the others are not.
type Finished = (Vec<Event>, Result<(), Problem>);

/// A unit of which bytes or digest are missing.
struct OpenUnit {
    into: ReceiveInto,
    bytes: Option<Message>,
    digest: Option<Message>,
}

/// Where the bytes of a unit arrive.
enum ReceiveInto {
    /// In the file itself, which is mapped.
    Mapping(IncomingFile),
    /// In other memory, from which they are written to the file.
    Memory(IncomingFile),
    /// In memory, for several files. Some of them may be here already.
    Pack { has_some: bool },
}

impl ReceiveInto {
    fn has_some(&self) -> bool {
        match self {
            Self::Mapping(file) | Self::Memory(file) => file.has_some(),
            Self::Pack { has_some } => *has_some,
        }
    }

    fn into_file(self) -> Option<IncomingFile> {
        match self {
            Self::Mapping(file) | Self::Memory(file) => Some(file),
            Self::Pack { .. } => None,
        }
    }
}

impl Arrivals<'_> {
    /// Says that the transfer begins, unless that was said.
    fn begins(&mut self) {
        if let Some(started) = self.started.take() {
            self.events.say(started);
        }
    }

    /// Receives the messages of one group. When this returns, no message of the group is arriving any more.
    async fn take_all(&mut self, group: &mut OfferReceiver) -> Result<(), GroupFailure> {
        let mut tick = tokio::time::interval(TICK);
        let mut closed = false;
        loop {
            if self.arriving.is_empty() && self.finishing.is_empty() {
                // A unit that has lost its digest with its sender does not hold up the next one.
                if let Some((at, offer)) = self.held.take() {
                    self.prepare(at, offer);
                    continue;
                }
                if closed {
                    return Ok(());
                }
            }
            let waiting = self.preparing.is_some() || self.held.is_some();
            let room = !closed && !waiting && self.finishing.len() < FINISHING_MAX;
            let offered = async {
                match room {
                    true => group.next_offer().await,
                    false => Some(Err(group.failed().await)),
                }
            };
            tokio::select! {
                offer = offered => match offer {
                    Some(Ok(offer)) => self.offered(offer),
                    Some(Err(failure)) => return Err(failure),
                    None => closed = true,
                },
                (offer, prepared) = next_of(&mut self.preparing) => self.prepared(offer, prepared),
                Some((number, outcome)) = self.arriving.next() => self.arrived(number, outcome),
                Some(finished) = self.finishing.join_next() => self.finished(finished),
                _ = tick.tick() => self.progress.set(self.node.stats().bytes_received - self.bytes_before),
            }
        }
    }

    /// Forms the group of the survivors of a failure.
    async fn go_on(&mut self, mut failure: GroupFailure) -> Result<OfferReceiver, Problem> {
        // These messages will be offered again. Work on a file continues even if nothing waits for it. Memory of the
        // pool may become free only after the survivors have formed their group.
        let preparing = self.preparing.take();
        if let Some(preparing) = preparing.filter(|_| self.node.capabilities().receives_into_files) {
            let (offer, prepared) = preparing.await;
            if let MessageRole::Unit(at) = self.role(offer.number()) {
                self.ready = Some((at, prepared));
            }
        }
        self.held = None;
        while let Some((number, outcome)) = self.arriving.next().await {
            self.arrived(number, outcome);
        }
        loop {
            self.failed.extend(failure.failed.iter().cloned());
            self.stopped = stopped_before(&failure);
            match failure.recover().with_offers().await {
                Ok(recovery) => {
                    let group = recovery.into_receiver().expect("only the sender is a root");
                    let (failed, receivers) = (peers(&failure.failed), receivers_of(group.members()));
                    if has_sender(group.members()) {
                        self.begins();
                    }
                    // Without the sender, the transfer has only begun if there is something that the others have.
                    if self.started.is_none() {
                        self.events.say(Event::GoingOn { failed, receivers });
                    }
                    return Ok(group);
                }
                Err(RecoveryError::Group(GroupError::Failed(next))) => failure = next,
                Err(error) => return Err(self.incomplete(Some(error)).await),
            }
        }
    }

    /// Finishes the directories when the group has carried everything. Finds a problem if it has not.
    async fn finish_all(&mut self, members: &[NodeId]) {
        // Once they have their modes, they may not be entered again.
        if !has_sender(members) || self.problem.is_some() || self.directories_finished {
            return;
        }
        self.problem = match self.complete < self.files.len() {
            true => Some(Kind::Partial.problem(CLOSED_EARLY)),
            false => self.with_directories(Store::finish_directories).await.err(),
        };
        self.directories_finished = self.problem.is_none();
        if self.directories_finished {
            self.progress.confirms();
            self.progress.set(self.manifest.totals().1);
        }
    }

    /// Returns the outcome of a transfer that all survivors have agreed to end.
    async fn outcome(mut self, members: &[NodeId]) -> Result<usize, Problem> {
        if has_sender(members) {
            return Ok(receivers_of(members));
        }
        if self.complete == self.files.len() {
            self.store.done();
        }
        if !self.directories_finished {
            self.problem = self.with_directories(Store::finish_directories).await.err();
        }
        Err(self.incomplete(None).await)
    }

    /// Returns why files are missing, after every complete file was moved into place.
    async fn incomplete(&mut self, error: Option<RecoveryError>) -> Problem {
        self.keep_what_is_whole();
        while let Some(finished) = self.finishing.join_next().await {
            self.finished(finished);
        }
        if let Some(error) = self.problem.take() {
            return error;
        }
        let mut failed = peers(&self.failed);
        let own = self.failed.iter().find(|failed| failed.node == self.node.id());
        let is_cut_off = matches!(error, Some(RecoveryError::NoQuorum | RecoveryError::Excluded { .. }));
        let lost_sender = failed.iter().any(|peer| peer.node() == 0);
        let stopped = self.stopped.filter(|_| own.is_some() || is_cut_off || lost_sender).map(stopped_for);
        let told = match (own, &error, stopped) {
            (Some(own), _, None) => given_up(&own.cause, self.store.wording()),
            (Some(own), _, Some(stopped)) => format!("{}; {stopped}", given_up(&own.cause, self.store.wording())),
            // All receivers may have been stopped, and the sender has given them up.
            (None, _, Some(stopped)) if !is_cut_off => format!("{}; {stopped}", explain(&failed)),
            (None, _, Some(stopped)) => {
                failed.clear();
                format!("{stopped}; they may have gone on without this receiver")
            }
            (None, Some(RecoveryError::NoQuorum), None) if failed.len() > 1 => {
                format!("{}; {CUT_OFF}", explain(&failed))
            }
            (None, None | Some(RecoveryError::Off | RecoveryError::NoQuorum), None) => explain(&failed),
            (None, Some(error), None) => format!("{}: {error}", explain(&failed)),
        };
        let next = what_next(self.store.keeps_parts(), self.store.wording());
        if self.started.is_some() {
            return Kind::Refused.blaming(if own.is_some() { format!("{told}; {next}") } else { told }, failed);
        }
        let (complete, files) = (self.complete, count(self.files.len(), "file"));
        let next = if complete < self.files.len() { format!("; {next}") } else { String::new() };
        Kind::Partial.blaming(format!("{told}; {complete} of {files} complete{next}"), failed)
    }

    /// Drops units that cannot be completed. One with all its bytes is kept even if its digest is lost: its blocks were
    /// checked on arrival, or the fabric protects them.
    fn keep_what_is_whole(&mut self) {
        for (at, open) in std::mem::take(&mut self.open) {
            if let OpenUnit { into, bytes: Some(bytes), .. } = open {
                self.finish(at, into, bytes, None);
            }
        }
    }

    /// Returns what a message carries.
    fn role(&self, number: u64) -> MessageRole {
        let at = usize::try_from(number / 2).ok().filter(|at| *at < self.units.len());
        match at {
            Some(at) if number.is_multiple_of(2) => MessageRole::Unit(at),
            Some(at) => MessageRole::Digest(at),
            None => MessageRole::Unexpected,
        }
    }

    /// Accepts an offered message, refuses it, or puts it off.
    fn offered(&mut self, offer: Offer) {
        self.begins();
        if let Some(error) = &self.problem {
            return offer.refuse(&error.reason());
        }
        let (number, size) = (offer.number(), offer.size());
        match self.role(number) {
            MessageRole::Unit(at) if size != self.units[at].bytes => {
                let what = format!("{} has another size than listed", named(&self.files_of(at)));
                self.refuse(offer, Kind::Integrity.problem(what));
            }
            MessageRole::Digest(at) if size != DIGEST_LEN as u64 => {
                let what = format!("{} has no digest", named(&self.files_of(at)));
                self.refuse(offer, Kind::Integrity.problem(what));
            }
            MessageRole::Unexpected => self.refuse(offer, Kind::Partial.problem(NOT_LISTED)),
            MessageRole::Unit(at) => match if self.open.contains_key(&at) { offer.stay() } else { Err(offer) } {
                Ok(delivery) => self.arrive(number, delivery),
                Err(offer) => {
                    if let Some((_, prepared)) = self.ready.take_if(|(ready, _)| *ready == at) {
                        return self.prepared(offer, prepared);
                    }
                    if self.store.receives_one_by_one() {
                        self.held = Some((at, offer));
                    } else {
                        self.prepare(at, offer);
                    }
                }
            },
            MessageRole::Digest(_) => match offer.stay() {
                Ok(delivery) => self.arrive(number, delivery),
                Err(offer) => match register(self.node, Memory::from(vec![0; DIGEST_LEN])) {
                    Ok(memory) => self.arrive(number, offer.accept(memory)),
                    Err(error) => self.refuse(offer, error),
                },
            },
        }
    }

    /// Makes the memory for an offered unit, and the temporary file if it is one file.
    fn prepare(&mut self, at: usize, offer: Offer) {
        let before = self.open.remove(&at);
        // The pool may be full of earlier bytes of this unit, which stay there until they are copied.
        let again = before.is_some();
        // Never receive into a file twice: the memory of the first attempt may still be in use.
        let before = before.and_then(|open| open.into.into_file());
        let (node, store) = (self.node.clone(), self.store.clone());
        let prepared = match <[(Entry, u64); 1]>::try_from(self.files_of(at)) {
            Ok([(entry, size)]) => prepare_file(node, store, entry, size, before, again).boxed(),
            Err(files) => prepare_pack(node, store, files, again).boxed(),
        };
        self.preparing = Some(prepared.map(|prepared| (offer, prepared)).boxed());
    }

    /// Returns the files of a unit, with their sizes.
    fn files_of(&self, at: usize) -> Vec<(Entry, u64)> {
        self.files[self.units[at].files.clone()].iter().map(|&(entry, size)| (entry.clone(), size)).collect()
    }

    /// Puts a unit into place.
    fn finish(&mut self, at: usize, into: ReceiveInto, bytes: Message, digest: Option<Message>) {
        let (files, store) = (self.files_of(at), self.store.clone());
        self.finishing.spawn(async move {
            let finishing = move || finish(into, &store, bytes, digest, &files);
            tokio::task::spawn_blocking(finishing).await?
        });
    }

    fn refuse(&mut self, offer: Offer, error: Problem) {
        offer.refuse(&error.reason());
        self.problem.get_or_insert(error);
    }

    /// Receives a unit into what was prepared for it.
    fn prepared(&mut self, offer: Offer, prepared: Result<Prepared, Problem>) {
        self.preparing = None;
        match prepared {
            Ok((mut into, memory)) => {
                let (number, has_some) = (offer.number(), into.has_some());
                if let ReceiveInto::Mapping(file) = &mut into {
                    file.begins();
                }
                if let MessageRole::Unit(at) = self.role(number) {
                    self.open.insert(at, OpenUnit { into, bytes: None, digest: None });
                }
                let delivery = if has_some { offer.accept_partial(memory) } else { offer.accept(memory) };
                self.arrive(number, delivery);
            }
            Err(error) => self.refuse(offer, error),
        }
    }

    fn arrive(&mut self, number: u64, delivery: Arrival) {
        self.arriving.push(delivery.map(move |outcome| (number, outcome)).boxed());
    }

    /// Stores a complete message. A message that failed with its group is offered again, or lost.
    fn arrived(&mut self, number: u64, outcome: Result<Message, GroupFailure>) {
        let (Ok(message), role) = (outcome, self.role(number)) else { return };
        let (MessageRole::Unit(at) | MessageRole::Digest(at)) = role else { return };
        let Some(mut open) = self.open.remove(&at) else { return };
        match role {
            MessageRole::Unit(_) => open.bytes = Some(message),
            _ => open.digest = Some(message),
        }
        match open {
            OpenUnit { into, bytes: Some(bytes), digest: Some(digest) } => {
                self.finish(at, into, bytes, Some(digest));
            }
            open => drop(self.open.insert(at, open)),
        }
    }

    fn finished(&mut self, finished: Result<Result<Finished, Problem>, JoinError>) {
        let outcome = finished.map_err(Problem::from).and_then(|outcome| outcome).and_then(|(events, outcome)| {
            self.complete += events.len();
            events.into_iter().for_each(|event| self.events.say(event));
            outcome
        });
        if let Err(error) = outcome {
            self.problem.get_or_insert(error);
        }
    }

    /// Runs `work` on the directories of the manifest in a blocking thread.
    fn with_directories(
        &self,
        work: fn(&Store, &Manifest) -> Result<(), Problem>,
    ) -> impl Future<Output = Result<(), Problem>> + use<> {
        let (store, manifest) = (self.store.clone(), self.manifest.clone());
        async move { tokio::task::spawn_blocking(move || work(&store, &manifest)).await? }
    }
}

/// Tells whether the sender is a member. It is the first node, and the root of every group it is in.
fn has_sender(members: &[NodeId]) -> bool {
    members.first() == Some(&NodeId(0))
}

fn receivers_of(members: &[NodeId]) -> usize {
    members.len() - usize::from(has_sender(members))
}

/// Waits for `work`; for ever if there is none.
async fn next_of<T>(work: &mut Option<BoxFuture<'static, T>>) -> T {
    match work {
        Some(work) => work.await,
        None => std::future::pending().await,
    }
}

/// Makes the temporary file, and the memory for its bytes. If the fabric receives into files, the memory is the mapped
/// file.
async fn prepare_file(
    node: Node,
    store: Store,
    entry: Entry,
    size: u64,
    before: Option<IncomingFile>,
    again: bool,
) -> Result<Prepared, Problem> {
    let mapped = node.capabilities().receives_into_files;
    let begun = tokio::task::spawn_blocking(move || {
        let mut file = store.begin(&entry, size, before)?;
        let memory = mapped.then(|| file.memory(size)).transpose()?;
        Ok::<_, Problem>((file, memory))
    });
    let (file, memory) = begun.await??;
    let mut memory = match memory {
        Some(memory) => return Ok((ReceiveInto::Mapping(file), register(&node, memory)?)),
        None => unmapped(&node, size, again).await?,
    };
    let read = tokio::task::spawn_blocking(move || {
        if file.has_some() {
            file.read(&mut memory)?;
        }
        Ok::<_, Problem>((ReceiveInto::Memory(file), memory))
    });
    read.await?
}

/// Makes the memory for several files.
async fn prepare_pack(node: Node, store: Store, files: Vec<(Entry, u64)>, again: bool) -> Result<Prepared, Problem> {
    // Where files are mapped, the pool may be too small for anything else.
    let own = again || node.capabilities().receives_into_files;
    let mut memory = unmapped(&node, files.iter().map(|(_, size)| size).sum(), own).await?;
    let read = tokio::task::spawn_blocking(move || {
        let has_some = store.read_known(&files, &mut memory)?;
        Ok::<_, Problem>((ReceiveInto::Pack { has_some }, memory))
    });
    read.await?
}

/// Returns memory that is no file: of its `own`, or of the node's pool.
async fn unmapped(node: &Node, len: u64, own: bool) -> Result<BufferMut, Problem> {
    let len = usize::try_from(len)?;
    if own { register(node, Memory::from(vec![0; len])) } else { Ok(node.allocate(len).await?) }
}

fn register(node: &Node, memory: Memory) -> Result<BufferMut, Problem> {
    let region = node.register(memory).context("the memory cannot be registered")?;
    region.into_mut().map_err(|_| Problem::local("the memory cannot be written"))
}

/// Compares a unit with its digest, if there is one, and moves its files into place.
fn finish(
    into: ReceiveInto,
    store: &Store,
    bytes: Message,
    digest: Option<Message>,
    files: &[(Entry, u64)],
) -> Result<Finished, Problem> {
    if digest.is_some_and(|digest| !has_digest(&bytes, &digest)) {
        into.into_file().into_iter().for_each(IncomingFile::discard);
        return Err(Kind::Integrity.problem(format!("{} arrived with a wrong digest", named(files))));
    }
    let (placed, outcome) = match into {
        ReceiveInto::Pack { .. } => store.place_all(files, &bytes),
        ReceiveInto::Mapping(file) => {
            // The memory is a mapping. Nothing may change the file once its time is set.
            drop(bytes);
            file.keep(&files[0].0)?;
            (1, Ok(()))
        }
        ReceiveInto::Memory(file) => {
            let entry = &files[0].0;
            file.write(&bytes).with_context(|| entry.path.to_string())?;
            drop(bytes);
            file.keep(entry)?;
            (1, Ok(()))
        }
    };
    let events = files[..placed].iter().map(|(entry, size)| Event::file(&entry.path, *size));
    Ok((events.collect(), outcome))
}

/// Names the files of a unit.
fn named(files: &[(Entry, u64)]) -> String {
    match files {
        [] => String::new(),
        [(entry, _)] => entry.path.to_string(),
        [(first, _), others @ ..] => format!("{} with {}", first.path, count(others.len(), "other")),
    }
}

/// Reason for refusing a message that is no file's.
const NOT_LISTED: &str = "more was sent than the list of files has";
/// Greatest number of units that are being moved into place.
const FINISHING_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use rdmc::NodeId;

    use super::*;
    use crate::fabric::register_to_send;
    use crate::fabric::strict::{POOL_BYTES, Strict};
    use crate::wording::Wording;

    #[tokio::test]
    async fn files_arrive_by_memory_where_the_fabric_does_not_receive_into_files() {
        let mut nodes = Strict::nodes(3).await;
        let spec = GroupSpec::new(1, (0..3).map(NodeId)).block_size(64 << 10);
        // Each takes more than half of the pool, so that one waits for the other.
        let sizes = [0, 600_000, 700_001, 1, 0, 7, usize::try_from(POOL_BYTES).unwrap()];
        let (manifest, contents) = Manifest::of_sizes(&sizes);
        let manifest = Arc::new(manifest);
        let root = nodes.remove(0);
        let begins = &Event::Warning { message: "it begins".to_owned() };
        let receive = nodes.iter().map(|node| {
            let (spec, manifest) = (spec.clone(), manifest.clone());
            async move {
                let dir = tempfile::tempdir()?;
                let store = Store::open(dir.path(), Wording::default())?;
                let (events, mut said) = Events::new();
                assert_eq!(take_files(node, spec, &manifest, &store, &events, begins.clone()).await?, 2);
                assert_eq!(said.try_recv().map(|said| said.event).as_ref(), Ok(begins));
                Ok::<_, Problem>(dir)
            }
        });
        let send = async {
            let sender = root.create_group(spec.clone()).await?;
            for unit in Units::of(&manifest).iter() {
                let bytes = Bytes::from(contents[unit.files.clone()].concat());
                let copied = bytes.clone();
                let copy = move |to: &mut [u8]| {
                    to.copy_from_slice(&copied);
                    Ok(())
                };
                sender.send(register_to_send(&root, Memory::from(bytes.clone()), copy).await?).await?;
                sender.send(rdmc::Digest::of(&bytes, 64 << 10).0.to_vec()).await?;
            }
            sender.close().await?;
            Ok::<_, Problem>(())
        };
        let ((), dirs) = futures::future::try_join(send, futures::future::try_join_all(receive)).await.unwrap();
        for dir in dirs {
            for (bytes, at) in contents.iter().zip(0..) {
                assert_eq!(std::fs::read(dir.path().join(format!("file{at}"))).unwrap(), bytes[..]);
            }
        }
    }
}
