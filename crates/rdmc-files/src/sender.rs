//! The sender of files and directories.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::num::NonZeroU64;
use std::path::{Path as FilePath, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{Stream, StreamExt};
use rdmc::{
    Algorithm, Buffer, DetectionError, GroupError, GroupFailure, GroupSpec, Hybrid, InviteOptions, Memory, Node,
    NodeBuilder, NodeId, Security, SendError, Shutdown, SlowReceivers, Spine,
};
use rdmc_schedule::{BlockCount, Rank, Schedule};

use crate::announcement::{Announcement, Conclusion, FileGroups, OnFailure, Reply, UNDER_WAY_MAX, WirePlan};
use crate::attempts::Attempts;
use crate::blame::PeerFailure;
use crate::costs::{Path, PortRate, plans};
use crate::departures::Departures;
use crate::driven::Driven;
use crate::error::{Context, Kind, Problem, TransferError};
use crate::event::{Direction, Event, Events, Progress, TICK};
use crate::fabric::{FabricInUse, FabricSettings, OfferedFabrics, register_to_send};
use crate::interface;
use crate::manifest::{self, Entry};
use crate::racks::{self, RackSelection};
use crate::receivers::Receivers;
use crate::size::POOL_BYTES_DEFAULT;
use crate::source::{self, FileHasher, RecentFiles, SourceFile, SourceTree};
use crate::stop::{Stop, StopHandle};
use crate::units::Units;
use crate::wording::Wording;
use crate::words::count;

/// Sends files and directories to the same receivers, any number of times. Cheap to clone.
///
/// # Examples
/// A file travels over loopback into another directory:
/// ```
/// use futures::StreamExt;
/// use rdmc_files::{Event, FileReceiver, FileSender};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (source, destination) = (tempfile::tempdir()?, tempfile::tempdir()?);
/// let file = source.path().join("greeting");
/// std::fs::write(&file, "hello, everybody")?;
///
/// let mut receiver = FileReceiver::builder(destination.path()).bind("127.0.0.1:0").await?;
/// let sender = FileSender::builder([receiver.local_address()]).build()?;
/// let sending = sender.send([file]);
/// let receiving = async {
///     while let Some(happened) = receiver.next().await {
///         if let Event::Done { .. } = happened.event {
///             break;
///         }
///     }
/// };
/// let (sent, ()) = tokio::join!(sending.outcome(), receiving);
/// assert_eq!((sent?.files, std::fs::read(destination.path().join("greeting"))?), (1, b"hello, everybody".to_vec()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct FileSender(Arc<Settings>);

/// Makes a [`FileSender`]. Every setting but the receivers has a default.
#[derive(Clone, Debug)]
pub struct FileSenderBuilder {
    receivers: Vec<String>,
    algorithm: Option<Algorithm>,
    block_size: Option<u32>,
    racks: RackSelection,
    port_rate: Option<PortRate>,
    rate: Option<PortRate>,
    round_trip: Option<Duration>,
    fabric: FabricSettings,
    security: Option<Security>,
    invitation_limit: Duration,
    wait: bool,
    detection: Duration,
    on_failure: OnFailure,
    evict_after: Option<Duration>,
    wording: Wording,
}

/// The checked settings of a sender.
#[derive(Debug)]
struct Settings {
    receivers: Receivers,
    builder: FileSenderBuilder,
}

impl FileSender {
    /// Begins to configure a sender. Each receiver listens at an address `host:port`, and the receivers must reach each
    /// other at these addresses too.
    pub fn builder(receivers: impl IntoIterator<Item = impl Into<String>>) -> FileSenderBuilder {
        FileSenderBuilder {
            receivers: receivers.into_iter().map(Into::into).collect(),
            algorithm: None,
            block_size: None,
            racks: RackSelection::default(),
            port_rate: None,
            rate: None,
            round_trip: None,
            fabric: FabricSettings::default(),
            security: None,
            invitation_limit: INVITATION_LIMIT_DEFAULT,
            wait: false,
            detection: NodeBuilder::DETECTION_DEFAULT,
            on_failure: OnFailure::Repair,
            evict_after: None,
            wording: Wording::default(),
        }
    }

    /// Sends files and directories, each under its own name. Nothing happens before the stream is polled.
    pub fn send(&self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Sending {
        let paths = paths.into_iter().map(Into::into).collect();
        let (stop_handle, stop) = Stop::new();
        let (events, said) = Events::new();
        let settings = self.0.clone();
        Sending { driven: Driven::new(said, async move { settings.send(paths, &events, &stop).await }), stop_handle }
    }
}

impl FileSenderBuilder {
    /// Sets the algorithm by which blocks travel. By default a cost model chooses it.
    pub fn algorithm(self, algorithm: impl Into<Option<Algorithm>>) -> Self {
        Self { algorithm: algorithm.into(), ..self }
    }

    /// Sets the size of a block in bytes, 1 to [`GroupSpec::BLOCK_SIZE_MAX`]. By default a cost model chooses it, from
    /// 32 KiB to 2 MiB.
    pub fn block_size(self, bytes: impl Into<Option<u32>>) -> Self {
        Self { block_size: bytes.into(), ..self }
    }

    /// Sets how the cost model learns of racks. Unless an algorithm is given, blocks travel by racks if there are any:
    /// each block then enters each rack once. By default the members measure the round trips between them, and those
    /// that are far closer to each other than to the rest form a rack.
    pub fn racks(self, racks: RackSelection) -> Self {
        Self { racks, ..self }
    }

    /// Sets the rate of the members' ports for the cost model. By default it is that of the network device by which the
    /// sender reaches the receivers. If the system does not know that, it is [2.5 Gbit/s](PortRate). It matters on a
    /// network.
    pub fn port_rate(self, rate: impl Into<Option<PortRate>>) -> Self {
        Self { port_rate: rate.into(), ..self }
    }

    /// Sets how fast each member may send the content of files, to all others together. Blocks are then shorter, so
    /// that each takes at most a tenth of a second, unless a size is [given](Self::block_size) or a block has 32 KiB.
    /// By default files leave as fast as the network takes them.
    pub fn rate(self, rate: impl Into<Option<PortRate>>) -> Self {
        Self { rate: rate.into(), ..self }
    }

    /// Sets the round trip between the members for the cost model. By default the sender measures it when it connects
    /// to the receivers. It matters on a network.
    pub fn round_trip(self, round_trip: impl Into<Option<Duration>>) -> Self {
        Self { round_trip: round_trip.into(), ..self }
    }

    /// Sets which fabrics may move the bytes. By default the best one does that all nodes offer.
    pub fn fabric(self, fabric: FabricSettings) -> Self {
        Self { fabric, ..self }
    }

    /// Sends only to receivers that know the key or have a certificate. By default everybody may take part.
    pub fn security(self, security: impl Into<Option<Security>>) -> Self {
        Self { security: security.into(), ..self }
    }

    /// Sets how long receivers may take to answer the invitation: 10 s by default.
    pub fn invitation_limit(self, limit: Duration) -> Self {
        Self { invitation_limit: limit, ..self }
    }

    /// Sets whether the sender waits for receivers that are busy, closed the connection or cannot be reached. It then
    /// invites all again until the [invitation limit](Self::invitation_limit) has passed since the beginning. By
    /// default it fails at the first refusal.
    pub fn wait(self, wait: bool) -> Self {
        Self { wait, ..self }
    }

    /// Sets after which time a silent member is given up, at all members: 2 s by default, from
    /// [`NodeBuilder::DETECTION_MIN`] to [`NodeBuilder::DETECTION_MAX`]. A longer time lets processes stop for longer.
    pub fn detection(self, detection: Duration) -> Self {
        Self { detection, ..self }
    }

    /// Sets what happens if a member fails during the transfer. By default the survivors go on.
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        Self { on_failure, ..self }
    }

    /// Evicts a receiver that has held the others up for so long without a break. By default they wait for it.
    pub fn evict_after(self, limit: impl Into<Option<Duration>>) -> Self {
        Self { evict_after: limit.into(), ..self }
    }

    /// Sets how messages call the settings.
    pub fn wording(self, wording: Wording) -> Self {
        Self { wording, ..self }
    }

    /// Checks the settings. Nothing is opened or sent.
    ///
    /// # Errors
    /// [`TransferError::Request`]: an address is malformed or given twice, or settings contradict each other.
    pub fn build(mut self) -> Result<FileSender, TransferError> {
        self.fabric = self.fabric.wording(self.wording);
        let receivers = Receivers::new(self.receivers.clone(), self.wording)?;
        if let Some(bytes) = self.block_size.filter(|bytes| !(1..=GroupSpec::BLOCK_SIZE_MAX).contains(bytes)) {
            return Err(Kind::Request.problem(format!("a block of {bytes} bytes is not possible")).into());
        }
        let detection = self.detection;
        if !(NodeBuilder::DETECTION_MIN..=NodeBuilder::DETECTION_MAX).contains(&detection) {
            return Err(Kind::Request.problem(DetectionError { got: detection }).into());
        }
        self.fabric.check(self.security.is_some())?;
        if let RackSelection::Given(racks) = &self.racks
            && racks.members() != receivers.members()
        {
            let (held, members) = (count(racks.members(), "member"), receivers.members());
            let what = format!("the racks hold {held}, but there are {members} with the sender");
            return Err(Kind::Request.problem(what).into());
        }
        // Fails if the algorithm cannot serve so many members.
        plans(self.algorithm.as_ref(), self.block_size, receivers.members(), 0, Path::default())?;
        Ok(FileSender(Arc::new(Settings { receivers, builder: self })))
    }
}

/// A transfer to receivers. It is a stream of events, and polling it drives the transfer.
///
/// The stream ends with the transfer. [`outcome`](Self::outcome) returns whether it succeeded.
///
/// # Cancel safety
/// Dropping the stream abandons the transfer. The receivers find that the sender has left. They keep complete files and
/// parts of others. A [`StopHandle`] ends the transfer in good order.
#[derive(Debug)]
#[must_use = "a transfer does nothing unless it is polled"]
pub struct Sending {
    driven: Driven<Result<Sent, Problem>>,
    stop_handle: StopHandle,
}

impl Sending {
    /// Returns a handle that ends the transfer in good order. The outcome is then [`TransferError::Stopped`].
    pub fn stop_handle(&self) -> StopHandle {
        self.stop_handle.clone()
    }

    /// Drives the transfer to its end, discards the remaining events, and returns the outcome.
    ///
    /// # Cancel safety
    /// The transfer is abandoned, as if the stream were dropped.
    ///
    /// # Errors
    /// Why not every receiver has everything.
    pub async fn outcome(mut self) -> Result<Sent, TransferError> {
        while self.next().await.is_some() {}
        Ok(self.driven.take_outcome().expect("it was driven to its end, and this takes it by value")?)
    }
}

impl Stream for Sending {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<Event>> {
        self.driven.poll_next(cx).map(|happened| happened.map(|happened| happened.event))
    }
}

/// A transfer that succeeded: every receiver has everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sent {
    /// Number of receivers.
    pub receivers: usize,
    /// Number of files.
    pub files: u64,
    /// Sum of the files' sizes in bytes.
    pub bytes: u64,
    /// Number of things that could not be sent: symbolic links, devices, sockets, pipes.
    pub skipped: usize,
    /// Duration since all have agreed to the list of files.
    pub duration: Duration,
}

impl Settings {
    /// Sends the files to all receivers. If it is to wait, it tries again while receivers cannot take part.
    async fn send(&self, paths: Vec<PathBuf>, events: &Events, stop: &Stop) -> Result<Sent, Problem> {
        let limit = self.builder.invitation_limit;
        let mut attempts = Attempts::new(if self.builder.wait { limit } else { Duration::ZERO });
        loop {
            // Files may have changed while the sender waited.
            let paths = paths.clone();
            let source = Arc::new(tokio::task::spawn_blocking(move || SourceTree::find(&paths)).await??);
            let is_first = attempts.is_first();
            if is_first {
                for skipped in &source.skipped {
                    events.say(Event::skipped(&skipped.at));
                }
            }
            let limit = if is_first { limit } else { attempts.left().max(INVITATION_LIMIT_MIN).min(limit) };
            let problem = match self.attempt(source, limit, events, stop).await {
                Err(problem) if problem.may_pass() => problem,
                outcome => return outcome,
            };
            let Some(pause) = attempts.next_pause() else { return Err(self.with_remedy(problem)) };
            if is_first {
                let message = format!("{}; trying again for {} s", problem.reason(), attempts.left().as_secs());
                events.say(Event::Warning { message });
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.due() => return Err(stopped()),
            }
        }
    }

    /// Says of a problem that may pass how the sender waits for receivers that are busy, unless it has waited.
    fn with_remedy(&self, problem: Problem) -> Problem {
        let Wording { wait, sender, .. } = self.builder.wording;
        let is_busy = problem.failed().iter().any(|peer| peer.cause() == PeerFailure::Busy);
        if is_busy && !self.builder.wait {
            problem.followed_by(format!("with {wait}, {sender} waits for it"))
        } else {
            problem
        }
    }

    /// Sends the files to all receivers if all of them take part. They must answer the invitation within `limit`.
    async fn attempt(
        &self,
        source: Arc<SourceTree>,
        limit: Duration,
        events: &Events,
        stop: &Stop,
    ) -> Result<Sent, Problem> {
        let Self { receivers, builder } = self;
        let list = source.manifest.encode();
        if list.len() as u64 > manifest::LEN_MAX {
            return Err(Problem::local("there are too many files for one transfer"));
        }
        let members = receivers.members();
        let units = Units::of(&source.manifest);
        let sizes: Vec<u64> = units.iter().map(|unit| unit.bytes).collect();
        let registered = registered_bytes_max(&sizes).max(list.len() as u64);
        tokio::select! {
            checked = receivers.check_distinct(limit) => checked?,
            () = stop.due() => return Err(stopped()),
        }
        let offered = builder.fabric.open_for(&receivers.addresses()[0], registered).await?;
        let Started { node, fabric, delta, announcement, path } = tokio::select! {
            started = self.start(&offered, &source, &units, &list, limit) => started?,
            () = stop.due() => return Err(stopped()),
        };
        let nodes = (0..members).map(NodeId).collect();
        let mut groups = announcement.groups(nodes, fabric.medium()).context("the group cannot be formed")?;
        groups.files = groups.files.delta(delta);
        if let Some(limit) = builder.evict_after {
            groups.files = groups.files.slow_receivers(SlowReceivers::evict_after(limit));
        }
        let plan = announcement.plans.on(fabric.medium());
        let outbound = Outbound {
            node: &node,
            receivers,
            events,
            source: &source,
            units,
            announcement: &announcement,
            plan,
            path,
        };
        let outcome = tokio::select! {
            outcome = outbound.send(list, groups, fabric) => outcome,
            () = stop.due() => Err(stopped()),
        };
        let outcome = outcome.map_err(|problem| problem.blamed_on_limit(node.id(), receivers.addresses().len()));
        // Tells the others that this node leaves, whatever happened.
        node.shutdown(Shutdown::Abort).await;
        outcome
    }

    /// Forms the cluster: invites every receiver, and starts when all have accepted.
    async fn start(
        &self,
        offered: &OfferedFabrics,
        source: &SourceTree,
        units: &Units,
        list: &[u8],
        limit: Duration,
    ) -> Result<Started, Problem> {
        let Self { receivers, builder: FileSenderBuilder { security, detection, .. } } = self;
        let (fabrics, addresses) = (offered.fabrics().clone(), receivers.addresses());
        let options = InviteOptions::new(limit).security(security.clone()).detection(*detection);
        let reached = rdmc::reach_listeners(fabrics, addresses, options).await;
        let reached = reached.map_err(|error| receivers.uninvited(&error))?;
        let round_trip = self.builder.round_trip.or(reached.round_trip());
        let known = || interface::rate_towards(reached.peer_addresses()).and_then(PortRate::from_bits_per_second);
        let port_rate = self.builder.port_rate.or_else(known).unwrap_or_default();
        let path = Path { port_rate, round_trip: round_trip.unwrap_or_default() };
        let (of_sender, members) = (reached.round_trips(), receivers.members());
        // A port has no more to carry than the sender may send.
        let used = Path { port_rate: self.builder.rate.map_or(port_rate, |rate| rate.min(port_rate)), ..path };
        let announcement = self.announcement(source, units, list, used)?;
        let transfer = Duration::from_secs_f64(announcement.bytes as f64 / used.port_rate.bytes_per_second());
        let finds_racks = self.builder.algorithm.is_none() && self.builder.racks == RackSelection::Find;
        // If one was not reached, the invitation fails anyway.
        let all_reached = of_sender.len() == receivers.addresses().len();
        let asks_round_trips =
            finds_racks && all_reached && racks::is_worth_a_round_trip(&of_sender, reached.peer_addresses(), transfer);
        let announcement = Announcement { asks_round_trips, ..announcement };
        let planned = units.planned_bytes();
        let conclude = |replies: &BTreeMap<NodeId, Bytes>| {
            let replies = replies.iter().map(|(node, reply)| (*node, Reply::decode(reply))).collect::<BTreeMap<_, _>>();
            let delta = replies.values().any(|reply| reply.has_parts);
            let found = asks_round_trips.then(|| racks::find(members, &of_sender, &replies)).flatten();
            let by_racks = found.and_then(|racks| racks::two_trees(racks, &announcement.plans.network, planned, used));
            Conclusion { delta, algorithm: by_racks.as_ref().map(Into::into) }.encode()
        };
        let invited = reached.invite_and_conclude(announcement.encode(), conclude).await;
        let builder = invited.map_err(|error| receivers.uninvited(&error))?;
        let conclusion = Conclusion::decode(builder.conclusion(), Rank(members).index())?;
        let (delta, announcement) = (conclusion.delta, announcement.concluded(&conclusion));
        let fabric = builder.fabric_choice().map(|choice| offered.in_use(choice));
        let fabric = fabric.expect("the builder comes from an invitation");
        // The pool takes copies of files whose mappings the device does not register.
        let builder = builder.pool_bytes_max(offered.pool_bytes(&fabric, POOL_BYTES_DEFAULT, 0));
        let started = builder.connect_limit(CONNECT_LIMIT).start_joining().await;
        // Its groups name the receivers that are not reached.
        let started = started.map_err(|error| Problem::from(error).of_kind(Kind::Refused).blamed_on_limit_of_call());
        let (node, _joining) = started?;
        Ok(Started { node, fabric, delta, announcement, path })
    }

    /// Announces the files, and how their blocks will travel.
    fn announcement(
        &self,
        source: &SourceTree,
        units: &Units,
        list: &[u8],
        path: Path,
    ) -> Result<Announcement, Problem> {
        let FileSenderBuilder { algorithm, block_size, racks, rate, on_failure, .. } = &self.builder;
        let (members, longest) = (self.receivers.members(), units.longest());
        let max = GroupSpec::BLOCKS_MAX;
        if let Some(block_size) = block_size.filter(|bytes| longest > u64::from(*bytes) * u64::from(max)) {
            let too_many = SendError::TooManyBlocks { size: longest, block_size, max };
            return Err(Kind::Request.problem(format!("the longest file, or those that travel together: {too_many}")));
        }
        let mut plans = plans(algorithm.as_ref(), *block_size, members, units.planned_bytes(), path)?;
        if let (Some(rate), None) = (rate, block_size) {
            plans.shorten_blocks(block_size_max(*rate, longest));
        }
        let announcement = Announcement::new(plans, &source.manifest, list.len() as u64);
        let mut announcement = announcement.with_short_manifest(list, self.receivers.addresses().len());
        if let (None, RackSelection::Given(racks)) = (algorithm, racks) {
            let by_racks: Algorithm = Hybrid::new(racks.clone(), Spine::TwoTree).into();
            announcement.plans.network.algorithm = (&by_racks).into();
        }
        let rate_max = rate.and_then(|rate| NonZeroU64::new(rate.bits_per_second() / 8));
        Ok(Announcement { on_failure: *on_failure, rate_max, ..announcement })
    }
}

/// Returns the size of a block that takes a tenth of a second at a rate, at least 32 KiB, and so much that the longest
/// message is not divided into too many.
fn block_size_max(rate: PortRate, longest: u64) -> u32 {
    let bytes = (rate.bits_per_second() / 80).max(BLOCK_SIZE_MIN).max(longest.div_ceil(GroupSpec::BLOCKS_MAX.into()));
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// Shortest block for the sake of a rate.
const BLOCK_SIZE_MIN: u64 = 32 << 10;

/// A cluster that is formed.
struct Started {
    node: Node,
    fabric: FabricInUse,
    /// Whether a receiver has parts of files.
    delta: bool,
    announcement: Announcement,
    /// As given, or as measured.
    path: Path,
}

/// One transfer under way.
struct Outbound<'a> {
    node: &'a Node,
    receivers: &'a Receivers,
    events: &'a Events,
    source: &'a SourceTree,
    units: Units,
    announcement: &'a Announcement,
    plan: &'a WirePlan,
    path: Path,
}

impl Outbound<'_> {
    async fn send(&self, list: Vec<u8>, groups: FileGroups, fabric: FabricInUse) -> Result<Sent, Problem> {
        if self.announcement.manifest.is_none() {
            self.agree(list, groups.manifest).await?;
        }
        let (files, bytes) = (self.announcement.files, self.announcement.bytes);
        let departures = Departures::begin(self.node, groups.files, &self.units, self.receivers, self.events).await?;

        let peers = self.receivers.addresses().to_vec();
        let (receivers, direction, plan) = (peers.len(), Direction::Sending, self.plan.into());
        let path = Some(self.path.into());
        self.events.say(Event::Started { direction, peers, receivers, files, bytes, fabric, plan, path });
        let begun = Instant::now();
        self.send_files(departures).await?;
        let (duration, skipped) = (begun.elapsed(), self.source.skipped.len());
        let seconds = duration.as_secs_f64();
        self.events.say(Event::Done { receivers, files, bytes, skipped, seconds, received: None });
        Ok(Sent { receivers, files, bytes, skipped, duration })
    }

    /// Sends the list of files in a group of its own, and waits until all receivers agree to it.
    async fn agree(&self, list: Vec<u8>, group: GroupSpec) -> Result<(), Problem> {
        let not_sent = |failure: &GroupFailure| self.receivers.not_sent(failure);
        let not_formed = |error: GroupError| match error {
            GroupError::Failed(failure) => not_sent(&failure),
            other => Problem::from(other).of_kind(Kind::Refused),
        };
        let offer = self.node.create_group(group).await.map_err(not_formed)?;
        let agreed = async {
            offer.send(list).await?;
            offer.close().await?;
            Ok(())
        };
        agreed.await.map_err(|error: SendError| match error {
            SendError::Failed(failure) | SendError::NotQueued(failure) => not_sent(&failure),
            other => Problem::from(other).of_kind(Kind::Refused),
        })
    }

    async fn send_files(&self, mut departures: Departures<'_>) -> Result<(), Problem> {
        let progress = self.events.progress(self.announcement.bytes);
        let share = self.root_share()?;
        let mut recent = RecentFiles::default();
        let closed = async {
            self.feed(&mut departures, &mut recent).await?;
            progress.confirms();
            departures.close().await
        };
        let closed = tokio::select! {
            closed = closed => closed,
            never = watch(self.node, &progress, share) => match never {},
        };
        closed.map_err(|error| recent.blamed_for(error))?;
        match recent.changed() {
            Some(changed) => Err(changed.context("every receiver has the bytes that were announced")),
            None => Ok(()),
        }
    }

    /// Sends one unit after the other, each followed by its digest.
    async fn feed(&self, departures: &mut Departures<'_>, recent: &mut RecentFiles) -> Result<(), Problem> {
        let files: Vec<_> = self.source.files().collect();
        for unit in self.units.iter() {
            match &files[unit.files.clone()] {
                [(path, entry, size)] => self.feed_file(path, entry, *size, departures, recent).await?,
                files => self.feed_pack(files, departures).await?,
            }
        }
        Ok(())
    }

    async fn feed_file(
        &self,
        path: &FilePath,
        entry: &Entry,
        size: u64,
        departures: &mut Departures<'_>,
        recent: &mut RecentFiles,
    ) -> Result<(), Problem> {
        let (at, entry) = (path.to_owned(), entry.clone());
        let done = Event::file(&entry.path, size);
        let opening = tokio::task::spawn_blocking(move || SourceFile::open(&at, at.clone(), &entry, size));
        let file = Arc::new(departures.meanwhile(opening).await???);
        recent.add(file.clone());
        let registering = register_to_send(self.node, file.map()?, file.reader()?);
        let registered = departures.meanwhile(registering).await?;
        let registered = registered.with_context(|| path.display())?;
        let hasher = FileHasher::new(self.node, self.plan.block_size);
        let digest = tokio::task::spawn_blocking(move || file.digest(hasher));
        departures.send(registered, vec![done]).await?;
        let digest = departures.meanwhile(digest).await???;
        departures.send(self.register(digest.to_vec())?, Vec::new()).await
    }

    /// Sends short files together. They are read before, so that a later change does no harm.
    async fn feed_pack(
        &self,
        files: &[(&FilePath, &Entry, u64)],
        departures: &mut Departures<'_>,
    ) -> Result<(), Problem> {
        let done = files.iter().map(|(_, entry, size)| Event::file(&entry.path, *size)).collect();
        let files = files.iter().map(|&(path, entry, size)| (path.to_owned(), entry.clone(), size));
        let (files, hasher) = (files.collect::<Vec<_>>(), FileHasher::new(self.node, self.plan.block_size));
        let packing = tokio::task::spawn_blocking(move || source::pack(&files, hasher));
        let (packed, digest) = departures.meanwhile(packing).await???;
        let copied = packed.clone();
        let copy = move |to: &mut [u8]| {
            to.copy_from_slice(&copied);
            Ok(())
        };
        let registering = register_to_send(self.node, Memory::from(packed), copy);
        let registered = departures.meanwhile(registering).await??;
        departures.send(registered, done).await?;
        departures.send(self.register(digest.to_vec())?, Vec::new()).await
    }

    fn register(&self, bytes: Vec<u8>) -> Result<Buffer, Problem> {
        Ok(self.node.register(Memory::from(bytes)).context("a digest cannot be registered")?.into_shared())
    }

    /// Returns how many bytes the sender itself sends for each byte of the files.
    #[expect(clippy::cast_precision_loss, reason = "a ratio to be displayed")]
    fn root_share(&self) -> Result<f64, Problem> {
        let algorithm = self.plan.algorithm.resolve(Rank(self.receivers.members()).index())?;
        let copies = |size: u64| {
            let blocks = size.div_ceil(u64::from(self.plan.block_size)).clamp(1, BLOCKS_COUNTED_MAX);
            let blocks = u32::try_from(blocks).expect("clamped");
            let schedule = Schedule::new(&algorithm, self.receivers.members(), BlockCount(blocks));
            let sends = schedule.map_or(0, |schedule| schedule.sends(Rank::ROOT).count());
            sends as f64 / f64::from(blocks)
        };
        let sent: f64 = self.units.iter().map(|unit| unit.bytes as f64 * copies(unit.bytes)).sum();
        Ok(if self.announcement.bytes == 0 { 1.0 } else { sent / self.announcement.bytes as f64 })
    }
}

/// Returns the greatest number of bytes that are registered at once if units of these sizes are sent in their order.
fn registered_bytes_max(sizes: &[u64]) -> u64 {
    let at_once = sizes.windows(sizes.len().clamp(1, UNITS_REGISTERED_MAX));
    at_once.map(|files| files.iter().copied().fold(0, u64::saturating_add)).max().unwrap_or(0)
}

/// Reports the progress for ever, over all groups that the node sends in.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "for display")]
async fn watch(node: &Node, progress: &Progress, share: f64) -> Infallible {
    let before = node.stats().bytes_sent;
    loop {
        tokio::time::sleep(TICK).await;
        progress.set(((node.stats().bytes_sent - before) as f64 / share.max(1e-9)) as u64);
    }
}

/// Makes the problem of a transfer that its caller has stopped.
fn stopped() -> Problem {
    Kind::Stopped.problem("")
}

/// Default of how long receivers may take to answer an invitation.
const INVITATION_LIMIT_DEFAULT: Duration = Duration::from_secs(10);
/// Least time to answer an invitation at a later attempt, also if that is after the limit.
const INVITATION_LIMIT_MIN: Duration = Duration::from_secs(1);
/// Greatest number of units that are registered at once: those under way, each with its digest, and the next one.
const UNITS_REGISTERED_MAX: usize = UNDER_WAY_MAX / 2 + 1;
/// Number of blocks from which on the sender's share hardly changes.
const BLOCKS_COUNTED_MAX: u64 = 4096;
/// How long the groups wait for connections with receivers that have accepted: a little longer than those do for each
/// other, and less than groups may take to form.
const CONNECT_LIMIT: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_under_way_together_are_registered_together() {
        assert_eq!(
            (registered_bytes_max(&[]), registered_bytes_max(&[7]), registered_bytes_max(&[1, 2, 3])),
            (0, 7, 6)
        );
        assert_eq!(registered_bytes_max(&[9, 0, 0, 0, 0, 9, 1, 1, 1, 1, 2]), 13);
        assert_eq!(registered_bytes_max(&[u64::MAX, 1]), u64::MAX);
    }
}
