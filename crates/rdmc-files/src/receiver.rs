//! A receiver of files and directories, for any number of senders.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use futures::stream::FuturesUnordered;
use futures::{FutureExt, Stream, StreamExt};
use rdmc::{
    GroupError, GroupFailure, GroupSpec, Invitation, InvitationWithdrawn, Listener, Node, NodeBuilder, NodeId, Offer,
    OfferReceiver, Security, Shutdown,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::announcement::{Announcement, CLOSED_EARLY, Conclusion, DIGEST_LEN, Medium, Reply};
use crate::arrivals::take_files;
use crate::blame::{peers, refusal};
use crate::driven::Driven;
use crate::error::{Kind, Problem, TransferError, cannot_listen};
use crate::event::{Direction, Event, Events, Proof, ReceiverEvent, SessionNumber};
use crate::fabric::{FabricInUse, FabricSelection, FabricSettings, OfferedFabrics, RAISE_THE_LIMIT};
use crate::manifest::Manifest;
use crate::racks::RECEIVERS_MAX;
use crate::size::{ByteSize, PAGE, POOL_BYTES_DEFAULT, POOL_BYTES_MIN};
use crate::stop::{Stop, StopHandle};
use crate::store::Store;
use crate::units::{Unit, Units};
use crate::wording::Wording;
use crate::words::printable;

/// Receives files and directories into a directory, from any number of senders. It is a stream of events, and polling
/// it drives all transfers.
///
/// The first event is [`Event::Listening`]. A transfer begins with [`Event::Started`], and ends with [`Event::Done`],
/// [`Event::Declined`] or [`Event::Failed`]. The stream ends only after a [`StopHandle`] was used.
///
/// A process that reaches its limit of file sizes gets SIGXFSZ, which kills it by default. If the process catches or
/// ignores the signal, only the transfer fails.
///
/// # Cancel safety
/// Dropping the receiver abandons all transfers. Their senders find that this host has left. Parts of files stay,
/// unless [`keep_parts`](FileReceiverBuilder::keep_parts) is off.
///
/// # Examples
/// See [`FileSender`](crate::FileSender).
#[derive(Debug)]
#[must_use = "a receiver does nothing unless it is polled"]
pub struct FileReceiver {
    address: String,
    driven: Driven<()>,
    stop_handle: StopHandle,
}

/// Makes a [`FileReceiver`]. Every setting but the directory has a default.
#[derive(Clone, Debug)]
pub struct FileReceiverBuilder {
    dir: PathBuf,
    fabric: FabricSettings,
    security: Option<Security>,
    bytes_max: Option<u64>,
    overwrite: bool,
    keep_parts: bool,
    fsync: bool,
    pool_bytes_max: u64,
    sessions_max: usize,
    wording: Wording,
}

impl FileReceiver {
    /// Begins to configure a receiver. The directory must exist. Every received path stays below it.
    pub fn builder(dir: impl Into<PathBuf>) -> FileReceiverBuilder {
        FileReceiverBuilder {
            dir: dir.into(),
            fabric: FabricSettings::default(),
            security: None,
            bytes_max: None,
            overwrite: true,
            keep_parts: true,
            fsync: false,
            pool_bytes_max: POOL_BYTES_DEFAULT,
            sessions_max: SESSIONS_MAX_DEFAULT,
            wording: Wording::default(),
        }
    }

    /// Returns the address that senders connect to, with the port that was chosen for port 0.
    pub fn local_address(&self) -> &str {
        &self.address
    }

    /// Returns a handle that ends the receiver in good order.
    pub fn stop_handle(&self) -> StopHandle {
        self.stop_handle.clone()
    }
}

impl FileReceiverBuilder {
    /// Sets which fabrics may move the bytes. By default the best one does that all nodes offer.
    pub fn fabric(self, fabric: FabricSettings) -> Self {
        Self { fabric, ..self }
    }

    /// Admits only senders that know the key or have a certificate. By default everybody who reaches the address may
    /// send.
    pub fn security(self, security: impl Into<Option<Security>>) -> Self {
        Self { security: security.into(), ..self }
    }

    /// Declines transfers of more bytes than this. By default there is no limit.
    pub fn bytes_max(self, bytes: impl Into<Option<u64>>) -> Self {
        Self { bytes_max: bytes.into(), ..self }
    }

    /// Sets whether files may replace others; they may by default. If not, transfers that would replace a file are
    /// declined, and a transfer fails if a file appears meanwhile.
    pub fn overwrite(self, overwrite: bool) -> Self {
        Self { overwrite, ..self }
    }

    /// Sets whether parts of files stay when a transfer is interrupted; they do by default, for seven days. A later
    /// transfer then brings only the rest. If not, a transfer also removes what earlier ones have left of its files.
    pub fn keep_parts(self, keep: bool) -> Self {
        Self { keep_parts: keep, ..self }
    }

    /// Sets whether every file is forced to the disk before it takes its name; it is not by default.
    pub fn fsync(self, fsync: bool) -> Self {
        Self { fsync, ..self }
    }

    /// Bounds the registered memory of a transfer in bytes: 4 GiB by default. RDMA receives whole files into it, so
    /// that longer files need TCP or a larger bound.
    pub fn pool_bytes_max(self, bytes: u64) -> Self {
        Self { pool_bytes_max: bytes, ..self }
    }

    /// Sets how many transfers may be under way at once: 8 by default. Further ones are declined as busy, so that
    /// senders that [wait](crate::FileSenderBuilder::wait) try again.
    pub fn sessions_max(self, count: usize) -> Self {
        Self { sessions_max: count, ..self }
    }

    /// Sets how messages call the settings.
    pub fn wording(self, wording: Wording) -> Self {
        Self { wording, ..self }
    }

    /// Listens at `address`: `host:port`, with port 0 for any free port.
    ///
    /// # Cancel safety
    /// Nothing listens any more.
    ///
    /// # Errors
    /// [`TransferError::Request`] if settings contradict each other or require what this host does not have;
    /// [`TransferError::Local`] if the directory or the address cannot be used.
    pub async fn bind(self, address: &str) -> Result<FileReceiver, TransferError> {
        Ok(self.bound(address).await?)
    }

    async fn bound(self, address: &str) -> Result<FileReceiver, Problem> {
        let Self { overwrite, keep_parts, fsync, wording, .. } = self;
        let fabric = self.fabric.wording(wording);
        fabric.check(self.security.is_some())?;
        let store = Store::open(&self.dir, wording)?.overwrite(overwrite).fsync(fsync).keep_parts(keep_parts);
        let offered = fabric.open_here(address, POOL_BYTES_MIN).await?;
        // With other fabrics to choose from, each transfer that does not fit says so itself.
        let short = offered.lockable().check(self.pool_bytes_max);
        if let (FabricSelection::Verbs, Err(short)) = (fabric.selection(), short) {
            let pool = wording.pool_bytes_max;
            tracing::warn!("{short} for all of {pool}: longer files are declined; {RAISE_THE_LIMIT}");
        }
        let security = match &self.security {
            None => Proof::None,
            Some(security) if security.is_by_key() => Proof::Key,
            Some(_) => Proof::Certificate,
        };
        let bound = Listener::bind(offered.fabrics().clone(), address).security(self.security).await;
        let listener = bound.map_err(|error| cannot_listen(address, &error, "receiver"))?;
        let address = listener.local_address().to_owned();
        let loopback_only = address.parse().is_ok_and(|at: SocketAddr| at.ip().is_loopback());
        let (events, said) = Events::new();
        events.say(Event::Listening {
            address: address.clone(),
            dir: self.dir.canonicalize().unwrap_or(self.dir).display().to_string(),
            loopback_only,
            security,
            fabrics: offered.fabrics().names().collect(),
            device: offered.device().map(str::to_owned),
        });
        if security == Proof::None && !loopback_only {
            let message = format!(
                "anybody who reaches {address} can send files here, and read what is sent: {}",
                wording.security
            );
            events.say(Event::Warning { message });
        }
        let (stop_handle, stop) = Stop::new();
        let (bytes_max, pool_bytes_max, sessions_max) = (self.bytes_max, self.pool_bytes_max, self.sessions_max);
        let sessions = Sessions { store, events, offered, bytes_max, pool_bytes_max, wording, stop };
        let driven = Driven::new(said, Arc::new(sessions).serve(listener, sessions_max));
        Ok(FileReceiver { address, driven, stop_handle })
    }
}

impl Stream for FileReceiver {
    type Item = ReceiverEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<Option<ReceiverEvent>> {
        self.driven.poll_next(cx)
    }
}

/// The state that all transfers to this receiver share.
struct Sessions {
    store: Store,
    events: Events,
    offered: OfferedFabrics,
    bytes_max: Option<u64>,
    /// Bound of the registered memory of one transfer.
    pool_bytes_max: u64,
    wording: Wording,
    stop: Stop,
}

impl Sessions {
    /// Takes invitations until the receiver stops, and drives the transfers.
    async fn serve(self: Arc<Self>, listener: Listener, sessions_max: usize) {
        let permits = Arc::new(Semaphore::new(sessions_max.min(Semaphore::MAX_PERMITS)));
        let mut sessions = FuturesUnordered::new();
        for number in (1..).map(SessionNumber) {
            let invitation = loop {
                tokio::select! {
                    invitation = listener.next_invitation() => break Some(invitation),
                    Some(()) = sessions.next() => {}
                    () = self.stop.requested() => break None,
                }
            };
            let Some(invitation) = invitation else { break };
            let permit = permits.clone().try_acquire_owned().ok();
            sessions.push(self.clone().receive(invitation, permit, self.events.of(number)).boxed());
        }
        // No sender is admitted any more. The transfers under way have learned of the stop themselves.
        drop(listener);
        while sessions.next().await.is_some() {}
    }

    /// Accepts or declines an invitation, and receives its transfer.
    async fn receive(
        self: Arc<Self>,
        mut invitation: Invitation,
        permit: Option<OwnedSemaphorePermit>,
        events: Events,
    ) {
        let from = invitation.peer_address().map(|address| address.to_string());
        let declined = |reason| events.say(Event::Declined { from: from.clone(), reason });
        if permit.is_none() {
            let _ = tokio::time::timeout(LEAVE_LIMIT, invitation.busy()).await;
            return declined("busy with other transfers".to_owned());
        }
        let mut acceptable = match self.judge(&mut invitation).await {
            Ok(acceptable) => acceptable,
            Err(problem) => {
                let reason = problem.reason();
                // A sender that does not wait for the answer needs none.
                let _ = tokio::time::timeout(LEAVE_LIMIT, invitation.decline(&reason)).await;
                return declined(reason);
            }
        };
        let nodes = invitation.nodes();
        let accepted = async {
            let reply = self.reply(&mut invitation, &acceptable.announcement).await;
            invitation.reply(reply.encode());
            invitation.accept().await
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = self.stop.requested() => return,
        };
        let builder = match accepted {
            Ok(builder) => builder,
            Err(error) => return declined(withdrawn(&error)),
        };
        let withheld = acceptable.withheld.take();
        let fabric = builder.fabric_choice().map(|choice| self.offered.in_use_unless(choice, withheld));
        let fabric = fabric.expect("the builder comes from an invitation");
        match self.session(builder, acceptable, nodes, from.clone(), fabric, &events).await {
            Ok(()) => {}
            // A receiver declined, or the sender withdrew, before the first file.
            Err(problem) if matches!(problem.kind, Kind::Refused | Kind::Busy) => declined(problem.reason()),
            Err(problem) => events.say(Event::Failed(problem.into())),
        }
    }

    async fn judge(&self, invitation: &mut Invitation) -> Result<Acceptable, Problem> {
        let mut announcement = Announcement::decode(invitation.payload())?;
        for medium in Medium::ALL {
            announcement.groups(invitation.nodes(), medium)?;
        }
        if let Some(max) = self.bytes_max
            && announcement.bytes > max
        {
            let (bytes, max) = (ByteSize(announcement.bytes), ByteSize(max));
            return Err(Problem::local(format!("{bytes} are more than the {max} allowed here")));
        }
        let pool = self.pool_bytes_max;
        if announcement.manifest_len > pool {
            let (pool, setting) = (ByteSize(pool), self.wording.pool_bytes_max);
            return Err(Problem::local(format!("the list of files is longer than the {pool} of {setting}")));
        }
        let mut withheld = None;
        let lockable = self.offered.lockable().room(staging_bytes(&announcement));
        if invitation.fabrics().iter().any(|fabric| !fabric.receives_into_files)
            && let Some(reason) = too_long(&announcement, pool, lockable, &self.wording)
        {
            if !invitation.retain_fabrics(|fabric| fabric.receives_into_files) {
                return Err(Problem::local(reason));
            }
            withheld = Some(reason);
        }
        let agreed = match announcement.manifest.take() {
            Some(encoded) => {
                let (announced, store) = (announcement.clone(), self.store.clone());
                Some(tokio::task::spawn_blocking(move || agree(&announced, &encoded, &store)).await??)
            }
            None => None,
        };
        Ok(Acceptable { announcement, withheld, agreed })
    }

    /// Replies to an invitation. If the sender asks for it, measures the round trips to the receivers that come next.
    async fn reply(&self, invitation: &mut Invitation, announcement: &Announcement) -> Reply {
        let has_parts = self.store.has_parts();
        let (me, members) = (invitation.me(), invitation.nodes().len());
        if !announcement.asks_round_trips || members > RECEIVERS_MAX + 1 {
            return Reply::new(has_parts, []);
        }
        let measured = invitation.round_trips(MEASURED_LIMIT).await;
        let next = invitation.nodes().into_iter().filter(|node| *node > me);
        Reply::new(has_parts, next.map(|node| measured.get(&node).copied()))
    }

    async fn session(
        &self,
        builder: NodeBuilder,
        acceptable: Acceptable,
        nodes: Vec<NodeId>,
        from: Option<String>,
        fabric: FabricInUse,
        events: &Events,
    ) -> Result<(), Problem> {
        let Acceptable { announcement, agreed, .. } = acceptable;
        let receivers = nodes.len() - 1;
        let conclusion = Conclusion::decode(builder.conclusion(), nodes.len())?;
        let (delta, announcement) = (conclusion.delta, announcement.concluded(&conclusion));
        let groups = announcement.groups(nodes, fabric.medium())?;
        let plan = announcement.plans.on(fabric.medium()).into();
        let pool_bytes_max = self.offered.pool_bytes(&fabric, self.pool_bytes_max, staging_bytes(&announcement));
        // Its groups name the members that are not reached.
        let (node, _joining) = builder.pool_bytes_max(pool_bytes_max).start_joining().await?;
        let outcome = async {
            let AgreedFiles { manifest, store } = match agreed {
                Some(agreed) => agreed,
                None => take_manifest(&node, groups.manifest, &announcement, &self.store).await?,
            };
            let store = store.for_transfer(&manifest, delta);
            let (files, bytes) = (announcement.files, announcement.bytes);
            let (direction, peers) = (Direction::Receiving, from.into_iter().collect());
            let started = Event::Started { direction, peers, receivers, files, bytes, fabric, plan, path: None };
            let (begun, before) = (Instant::now(), node.stats().bytes_received);
            let files_group = groups.files.delta(delta);
            let receivers = take_files(&node, files_group, &manifest, &store, events, started).await?;
            store.done();
            drop(store);
            let seconds = begun.elapsed().as_secs_f64();
            let digests = Units::of(&manifest).len() * DIGEST_LEN;
            let received = Some((node.stats().bytes_received - before).saturating_sub(digests as u64));
            events.say(Event::Done { receivers, files, bytes, skipped: 0, seconds, received });
            Ok(())
        };
        let outcome = tokio::select! {
            outcome = outcome => outcome,
            () = self.stop.due() => Err(Kind::Stopped.problem("")),
        };
        let outcome = outcome.map_err(|problem| problem.blamed_on_limit(node.id(), receivers));
        // Tells the others that this node leaves, whatever happened.
        node.shutdown(Shutdown::Abort).await;
        outcome
    }
}

/// Says why an invitation was withdrawn.
fn withdrawn(error: &io::Error) -> String {
    let because_of = error.get_ref().and_then(|error| error.downcast_ref::<InvitationWithdrawn>());
    match because_of {
        // As the sender says it.
        Some(InvitationWithdrawn { because_of, address, reason, .. }) => {
            let told = reason.strip_prefix("refused: ").map_or_else(|| reason.clone(), refusal);
            let receiver = if address.is_empty() { format!("receiver {because_of}") } else { printable(address) };
            format!("{receiver} {}", printable(&told))
        }
        None => error.to_string(),
    }
}

/// An acceptable offer.
struct Acceptable {
    announcement: Announcement,
    /// Why this transfer does not get a fabric that this host has.
    withheld: Option<String>,
    /// The files, if the invitation lists them.
    agreed: Option<AgreedFiles>,
}

/// A list of files that this receiver agrees to, and the store with their paths reserved.
struct AgreedFiles {
    manifest: Arc<Manifest>,
    store: Store,
}

/// Returns why the announced files do not fit into a pool of `pool` bytes with `lockable` bytes that may be locked;
/// `None` if they fit. A device that cannot receive into files needs memory for a whole file.
fn too_long(announcement: &Announcement, pool: u64, lockable: u64, wording: &Wording) -> Option<String> {
    let longest = announcement.unit_bytes_max.max(announcement.manifest_len);
    if longest <= pool.min(lockable) {
        return None;
    }
    let what = match announcement.unit_bytes_max {
        shorter if shorter < longest => "the list of files",
        packed if packed <= Unit::PACK_BYTES_MAX => "what travels in one message",
        _ => "a file",
    };
    let longest = ByteSize(longest);
    Some(if pool <= lockable {
        format!(
            "{what} of {longest} does not fit into the {} of registered memory that RDMA receives into; \
             a larger {} at the receiver would allow it",
            ByteSize(pool),
            wording.pool_bytes_max
        )
    } else {
        format!(
            "{what} of {longest} does not fit into the {} of memory that RDMA may lock at the receiver \
             (RLIMIT_MEMLOCK); a higher limit there would allow it{}",
            ByteSize(lockable),
            wording.see_doctor(", ")
        )
    })
}

/// Returns the memory that RDMA registers beside the pool. The first block of a message waits there, rounded up, until
/// the message's size is known.
fn staging_bytes(announcement: &Announcement) -> u64 {
    (u64::from(announcement.plans.on(Medium::Network).block_size) * 9 / 8).next_multiple_of(PAGE)
}

/// Agrees to an encoded list of files: decodes it, reserves its paths, and checks that it can be stored.
fn agree(announcement: &Announcement, encoded: &[u8], store: &Store) -> Result<AgreedFiles, Problem> {
    let manifest = announcement.decode_manifest(encoded)?;
    // Before the checks, so that no other transfer makes a file that they have missed.
    let store = store.reserve(&manifest)?;
    store.check(&manifest)?;
    let store = store.with_room(&manifest)?;
    store.check_inodes(&manifest)?;
    Ok(AgreedFiles { manifest: Arc::new(manifest), store })
}

/// Receives the manifest in its group. Agrees to it with all others, or refuses the end of the group.
async fn take_manifest(
    node: &Node,
    spec: GroupSpec,
    announcement: &Announcement,
    store: &Store,
) -> Result<AgreedFiles, Problem> {
    let mut group = node.join_group(spec).with_offers().await.map_err(not_formed)?;
    let offer = next_offer(&mut group).await?;
    if offer.size() != announcement.manifest_len {
        let problem = Kind::Refused.problem("the list of files has another length than announced");
        group.refuse(&problem.reason());
        return Err(problem);
    }
    let memory = node.allocate(usize::try_from(announcement.manifest_len)?).await?;
    let message = offer.accept(memory).await.map_err(|failure| not_sent(&failure))?;
    let (announced, store) = (announcement.clone(), store.clone());
    match tokio::task::spawn_blocking(move || agree(&announced, &message, &store)).await? {
        Ok(agreed) => {
            group.close().await.map_err(|failure| not_sent(&failure))?;
            Ok(agreed)
        }
        Err(error) => {
            group.refuse(&error.reason());
            Err(if error.kind == Kind::Busy { error } else { error.of_kind(Kind::Refused) })
        }
    }
}

/// Waits for a message of the manifest, which must come.
async fn next_offer(group: &mut OfferReceiver) -> Result<Offer, Problem> {
    match group.next_offer().await {
        Some(offer) => offer.map_err(|failure| not_sent(&failure)),
        None => Err(Kind::Refused.problem(CLOSED_EARLY)),
    }
}

/// Returns the error of a failure before anything was sent.
fn not_sent(failure: &GroupFailure) -> Problem {
    Problem::not_sent(failure, peers(&failure.failed))
}

/// Returns why the group of the manifest was not formed.
fn not_formed(error: GroupError) -> Problem {
    match error {
        GroupError::Failed(failure) => not_sent(&failure),
        other => Problem::from(other).of_kind(Kind::Refused),
    }
}

/// Default of the number of transfers under way at once.
const SESSIONS_MAX_DEFAULT: usize = 8;
/// How long other receivers may take to answer, so that the round trip to them is known.
const MEASURED_LIMIT: Duration = Duration::from_millis(500);
/// How long the others may take to learn that this node refuses or leaves.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use rdmc::Algorithm;

    use super::*;
    use crate::announcement::{Plans, WirePlan};

    fn wording() -> Wording {
        Wording { pool_bytes_max: "--pool-size", ..Wording::default() }
    }

    fn told(unit_bytes_max: u64) -> Announcement {
        let plan = WirePlan::new(&Algorithm::Chain, 1 << 20);
        let told = Announcement::new(Plans { network: plan.clone(), host: plan }, &Manifest::default(), 100);
        Announcement { unit_bytes_max, ..told }
    }

    #[test]
    fn a_file_must_fit_into_the_pool_and_into_what_may_be_locked() {
        let (file, pool) = (told(3 << 30), 4 << 30);
        assert_eq!(too_long(&file, pool, u64::MAX, &wording()), None);
        assert_eq!(too_long(&file, pool, 3 << 30, &wording()), None);
        let reason = |pool, lockable| too_long(&file, pool, lockable, &wording()).unwrap();
        assert!(reason(2 << 30, u64::MAX).contains("a file of 3 GiB does not fit into the 2 GiB of registered memory"));
        assert!(reason(2 << 30, 2 << 30).contains("--pool-size"));
        let locked = reason(pool, 2 << 30);
        assert!(locked.contains("the 2 GiB of memory that RDMA may lock"), "{locked}");
        assert!(locked.contains("RLIMIT_MEMLOCK"), "{locked}");
    }

    #[test]
    fn the_list_of_files_must_fit_too() {
        let list = Announcement { manifest_len: 2 << 20, ..told(0) };
        assert!(
            too_long(&list, 4 << 30, 1 << 20, &wording())
                .unwrap()
                .starts_with("the list of files of 2 MiB does not fit")
        );
        assert_eq!(too_long(&list, 4 << 30, 2 << 20, &wording()), None);
    }
}
