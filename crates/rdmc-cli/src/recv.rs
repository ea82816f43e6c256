//! `rdmc recv`: a receiver of files and directories, for any number of senders.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use rdmc::{
    FailedMember, GroupError, GroupFailure, GroupSpec, Invitation, Listener, Node, NodeId, Offer, OfferReceiver,
    Shutdown, StartError,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use crate::announcement::{Announcement, Medium, Reply};
use crate::arrivals::take_files;
use crate::blame::{FailedPeer, explain};
use crate::cli::RecvOptions;
use crate::exit::{Exit, Signal, Stop};
use crate::fabric::{Chosen, FabricName, Offered, RAISE_THE_LIMIT};
use crate::manifest::Manifest;
use crate::progress::{Direction, Event, Reporter};
use crate::security::Proof;
use crate::size::{Bytes, PAGE};
use crate::store::Store;

/// Receives until a signal comes, or one transfer with `--once`.
pub(crate) async fn run(options: RecvOptions, stop: Stop) -> anyhow::Result<()> {
    // So that a file beyond the limit of file sizes (ulimit -f) is an error of its transfer: by default the signal kills.
    let _file_size_limit = signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?;
    let reporter = Reporter::new(options.output);
    let store = Store::open(&options.dir, options.no_overwrite, options.fsync)?.discard_parts(options.discard_parts);
    let security = options.security.open(options.fabric.fabric)?;
    let offered = options.fabric.open_at(&options.listen, options.security.encrypt).await?;
    // Where there is a choice, each transfer for which that is too little says so.
    if let (FabricName::Verbs, Err(short)) = (options.fabric.fabric, offered.lockable.check(options.pool_size)) {
        tracing::warn!("{short} for all of --pool-size: longer files are declined; {RAISE_THE_LIMIT}");
    }
    let bound = Listener::bind_secured(offered.fabrics.clone(), &options.listen, security).await;
    let listener = bound.map_err(|error| {
        let usage = error.kind() == std::io::ErrorKind::InvalidInput;
        let form = if usage { ", which is to be ADDRESS:PORT" } else { "" };
        let error = anyhow::Error::new(error).context(format!("cannot listen at {}{form}", options.listen));
        if usage { error.context(Exit::Usage) } else { error }
    })?;
    let loopback_only = listener.local_address().parse().is_ok_and(|at: std::net::SocketAddr| at.ip().is_loopback());
    let security = options.security.proof();
    reporter.say(&Event::Listening {
        address: listener.local_address().to_owned(),
        dir: options.dir.canonicalize().unwrap_or(options.dir.clone()).display().to_string(),
        loopback_only,
        security,
        fabrics: offered.fabrics.names().collect(),
        device: offered.device.clone(),
    });
    if security == Proof::None && !loopback_only {
        reporter.say(&Event::Warning {
            message: format!(
                "anybody who reaches {} can send files here, and read what is sent: --key or --tls-ca keep others out",
                listener.local_address()
            ),
        });
    }
    let RecvOptions { max_size, pool_size, once, drain, .. } = options;
    let drain = Duration::from_secs(drain);
    let host = Arc::new(Host { store, reporter, offered, max_size, pool_size, once, drain, stop });
    let sessions = Arc::new(Semaphore::new(if once { 1 } else { SESSIONS_MAX }));
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            invitation = listener.next_invitation() => {
                let permit = sessions.clone().try_acquire_owned().ok();
                running.spawn(Box::pin(host.clone().receive(invitation, permit)));
            }
            Some(ended) = running.join_next() => {
                if let (Some(outcome), true) = (ended?, once) {
                    return outcome;
                }
            }
            signal = host.stop.signalled() => {
                // Nobody is let in any more; those who are here have been told too.
                drop(listener);
                let mut outcomes = running.join_all().await.into_iter().flatten();
                return outcomes.next().filter(|_| once).unwrap_or_else(|| Err(Exit::Signal(signal).into()));
            }
        }
    }
}

/// What all transfers to this receiver share.
struct Host {
    store: Store,
    reporter: Reporter,
    offered: Offered,
    max_size: Option<u64>,
    /// Registered memory of one transfer, at most.
    pool_size: u64,
    /// The outcome of the first transfer is that of the program.
    once: bool,
    /// How long transfers under way may go on when the program is to end.
    drain: Duration,
    stop: Stop,
}

impl Host {
    /// Judges an invitation and receives what it announces; returns nothing if no file was begun to be sent.
    async fn receive(
        self: Arc<Self>,
        mut invitation: Invitation,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Option<anyhow::Result<()>> {
        let from = invitation.peer_address().map(|address| address.to_string());
        let declined = |reason| self.reporter.say(&Event::Declined { from: from.clone(), reason });
        let judged = match permit {
            Some(_) => self.judge(&mut invitation),
            None => Err(anyhow::anyhow!("it is busy with other transfers")),
        };
        let Judged { told, withheld } = match judged {
            Ok(judged) => judged,
            Err(error) => {
                let reason = format!("{error:#}");
                // Whoever does not wait for the answer needs none.
                let _ = tokio::time::timeout(LEAVE_LIMIT, invitation.decline(&reason)).await;
                declined(reason);
                return None;
            }
        };
        let nodes = invitation.nodes();
        invitation.reply(Reply { has_parts: self.store.has_parts() }.encode());
        let accepted = tokio::select! {
            accepted = invitation.accept() => accepted,
            _ = self.stop.signalled() => return None,
        };
        let builder = match accepted {
            Ok(builder) => builder,
            Err(error) => {
                declined(error.to_string());
                return None;
            }
        };
        let over = builder.fabric_choice().map(|choice| self.offered.chosen(choice, withheld));
        let over = over.expect("the builder comes from an invitation");
        let outcome = self.session(builder, &told, nodes, from.clone(), over).await;
        match &outcome {
            // It came to nothing before the first file, here or elsewhere.
            Err(error) if error.downcast_ref() == Some(&Exit::Refused) => {
                declined(reason(error));
                return None;
            }
            // That a signal ends it is said when the program ends.
            Err(error) if matches!(error.downcast_ref(), Some(Exit::Signal(_))) => {}
            Err(error) if !self.once => self.reporter.say_failure(error),
            _ => {}
        }
        Some(outcome)
    }

    fn judge(&self, invitation: &mut Invitation) -> anyhow::Result<Judged> {
        let told = Announcement::decode(invitation.payload())?;
        for medium in Medium::ALL {
            told.groups(invitation.nodes(), medium)?;
        }
        if let Some(max) = self.max_size
            && told.bytes > max
        {
            anyhow::bail!("{} are more than the {} allowed here", Bytes(told.bytes), Bytes(max));
        }
        let pool = self.pool_size;
        anyhow::ensure!(
            told.manifest_len <= pool,
            "the list of files is longer than the {} of --pool-size",
            Bytes(pool)
        );
        let mut withheld = None;
        if invitation.fabrics().iter().any(|fabric| !fabric.receives_into_files)
            && let Some(reason) = too_long(&told, pool, self.offered.lockable.room(staging_bytes(&told)))
        {
            anyhow::ensure!(invitation.retain_fabrics(|fabric| fabric.receives_into_files), reason);
            withheld = Some(reason);
        }
        Ok(Judged { told, withheld })
    }

    async fn session(
        &self,
        builder: rdmc::NodeBuilder,
        told: &Announcement,
        nodes: Vec<NodeId>,
        from: Option<String>,
        over: Chosen,
    ) -> anyhow::Result<()> {
        let receivers = nodes.len() - 1;
        let groups = told.groups(nodes, over.medium())?;
        let how = told.plans.on(over.medium()).into();
        let node = builder
            .pool_bytes_max(self.offered.pool_bytes(&over, self.pool_size, staging_bytes(told)))
            .start()
            .await
            .map_err(|error| match error {
                StartError::Unreachable { .. } => anyhow::Error::new(error).context(Exit::Refused),
                local => local.into(),
            })?;
        let outcome = async {
            let (manifest, delta) = take_manifest(&node, groups.manifest, told, &self.store).await?;
            let store = self.store.for_transfer(&manifest, delta);
            let (files, bytes) = (told.files, told.bytes);
            self.reporter.say(&Event::Started {
                direction: Direction::Receiving,
                peers: from.into_iter().collect(),
                receivers,
                files,
                bytes,
                over,
                how,
            });
            let (begun, before) = (Instant::now(), node.stats().bytes_received);
            let bar = self.reporter.bar("receiving", bytes);
            let files_group = groups.files.delta(delta);
            let receivers = take_files(&node, files_group, &manifest, &store, &self.reporter, &bar).await?;
            store.done();
            drop((bar, store));
            let seconds = begun.elapsed().as_secs_f64();
            let received = Some(node.stats().bytes_received - before);
            self.reporter.say(&Event::Done { receivers, files, bytes, skipped: 0, seconds, received });
            Ok(())
        };
        let ended = async {
            let signal = self.stop.signalled().await;
            if signal == Signal::Terminate {
                tokio::time::sleep(self.drain).await;
            }
            Err(Exit::Signal(signal).into())
        };
        let outcome = tokio::select! {
            outcome = outcome => outcome,
            ended = ended => ended,
        };
        // The others are told, whatever happened.
        node.shutdown(Shutdown::Abort).await;
        outcome
    }
}

/// An offer that is accepted.
struct Judged {
    told: Announcement,
    /// Why a fabric that could be used is not offered for this transfer.
    withheld: Option<String>,
}

/// Says why what is announced does not fit into a pool of `pool` bytes where `lockable` may be locked, if so: a device
/// that writes files behind the file system's back needs memory for the whole file instead.
fn too_long(told: &Announcement, pool: u64, lockable: u64) -> Option<String> {
    let longest = told.file_bytes_max.max(told.manifest_len);
    if longest <= pool.min(lockable) {
        return None;
    }
    let what = if told.file_bytes_max < longest { "the list of files" } else { "a file" };
    let longest = Bytes(longest);
    Some(if pool <= lockable {
        format!(
            "{what} of {longest} does not fit into the {} of registered memory that RDMA receives into; \
             a larger --pool-size at the receiver would allow it",
            Bytes(pool)
        )
    } else {
        format!(
            "{what} of {longest} does not fit into the {} of memory that RDMA may lock at the receiver \
             (RLIMIT_MEMLOCK); a higher limit there would allow it, see rdmc doctor",
            Bytes(lockable)
        )
    })
}

/// Returns the memory that RDMA registers beside the pool: the first block of a message waits there, rounded up, until the
/// message's size is known.
fn staging_bytes(told: &Announcement) -> u64 {
    (u64::from(told.plans.on(Medium::Network).block_size) * 9 / 8).next_multiple_of(PAGE)
}

/// Receives the list of files, and agrees to it or not. Tells also whether only what is lacking is to travel.
async fn take_manifest(
    node: &Node,
    spec: GroupSpec,
    told: &Announcement,
    store: &Store,
) -> anyhow::Result<(Arc<Manifest>, bool)> {
    let mut group = node.join_group_with_offers(spec).await.map_err(not_formed)?;
    let offer = next_offer(&mut group).await?;
    if offer.size() != told.manifest_len {
        return Err(refuse(group, offer, Exit::Refused.error("the list of files is not as long as announced")).await);
    }
    let memory = node.allocate(usize::try_from(told.manifest_len)?).await?;
    let message = offer.accept(memory).await.map_err(|failure| not_sent(&failure))?;
    let (expected, place) = (told.clone(), store.clone());
    let judged = tokio::task::spawn_blocking(move || {
        let manifest = Manifest::decode(&message).context("the list of files is malformed")?;
        expected.check(&manifest)?;
        place.check(&manifest)?;
        place.check_room(place.bytes_needed(&manifest))?;
        anyhow::Ok(manifest)
    });
    let judged = judged.await?;
    let last = next_offer(&mut group).await?;
    match judged {
        Ok(manifest) => {
            let delta = agree(node, group, last).await?;
            Ok((Arc::new(manifest), delta))
        }
        Err(error) => Err(refuse(group, last, error.context(Exit::Refused)).await),
    }
}

/// Waits for a message of the list of files, which must come.
async fn next_offer(group: &mut OfferReceiver) -> anyhow::Result<Offer> {
    match group.next_offer().await {
        Some(offer) => offer.map_err(|failure| not_sent(&failure)),
        None => Err(Exit::Refused.error(CLOSED_EARLY)),
    }
}

/// Takes the last message, and waits until all have done so; tells whether it says anything.
async fn agree(node: &Node, group: OfferReceiver, last: Offer) -> anyhow::Result<bool> {
    if last.size() > 1 {
        return Err(refuse(group, last, Exit::Refused.error("the list of files ends in more than a byte")).await);
    }
    let delta = last.size() == 1;
    let memory = node.allocate(usize::from(delta)).await?;
    let agreed = async {
        last.accept(memory).await?;
        group.close().await
    };
    agreed.await.map(|_| delta).map_err(|failure: GroupFailure| not_sent(&failure))
}

/// Refuses a message because of `error`, and waits until the group has failed by it.
async fn refuse(mut group: OfferReceiver, offer: Offer, error: anyhow::Error) -> anyhow::Error {
    offer.refuse(&reason(&error));
    let _ = tokio::time::timeout(LEAVE_LIMIT, group.next_offer()).await;
    error
}

/// Returns what the others are told when something is refused because of `error`.
pub(crate) fn reason(error: &anyhow::Error) -> String {
    let whole = format!("{error:#}");
    // They need not know what the refusal means for this receiver's exit code, unless bytes are wrong.
    match error.downcast_ref::<Exit>() {
        Some(kind) if *kind != Exit::Integrity => {
            whole.strip_prefix(&format!("{kind}: ")).map(str::to_owned).unwrap_or(whole)
        }
        _ => whole,
    }
}

/// Returns who has failed, of whom nobody's address is known here.
pub(crate) fn peers(failed: &[FailedMember]) -> Vec<FailedPeer> {
    failed.iter().map(|failed| FailedPeer::new(failed, None)).collect()
}

/// Says that a failure has ended a transfer before anything was sent.
fn not_sent(failure: &GroupFailure) -> anyhow::Error {
    let failed = peers(&failure.failed);
    Exit::Refused.blaming(explain(&failed), failed)
}

/// Says why the group of the list of files was not formed.
fn not_formed(error: GroupError) -> anyhow::Error {
    match error {
        GroupError::Failed(failure) => not_sent(&failure),
        other => anyhow::Error::new(other).context(Exit::Refused),
    }
}

/// What is wrong with a group that ends too soon.
pub(crate) const CLOSED_EARLY: &str = "the sender closed the group before everything was sent";
/// What is wrong with a group that does not end with an empty message.
pub(crate) const NOT_EMPTY: &str = "the last message is not empty";
/// Transfers at once; more are declined.
const SESSIONS_MAX: usize = 8;
/// How long to wait for others who are told that this node refuses or leaves.
const LEAVE_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use rdmc::Algorithm;

    use super::*;
    use crate::announcement::{PlanTold, Plans};

    fn told(file_bytes_max: u64) -> Announcement {
        let plan = PlanTold::new(&Algorithm::Chain, 1 << 20);
        let told = Announcement::new(Plans { network: plan.clone(), host: plan }, &Manifest::default(), 100);
        Announcement { file_bytes_max, ..told }
    }

    #[test]
    fn a_file_must_fit_into_the_pool_and_into_what_may_be_locked() {
        let (file, pool) = (told(3 << 30), 4 << 30);
        assert_eq!(too_long(&file, pool, u64::MAX), None);
        assert_eq!(too_long(&file, pool, 3 << 30), None);
        let reason = |pool, lockable| too_long(&file, pool, lockable).unwrap();
        assert!(reason(2 << 30, u64::MAX).contains("a file of 3 GiB does not fit into the 2 GiB of registered memory"));
        assert!(reason(2 << 30, 2 << 30).contains("--pool-size"));
        let locked = reason(pool, 2 << 30);
        assert!(locked.contains("the 2 GiB of memory that RDMA may lock"), "{locked}");
        assert!(locked.contains("RLIMIT_MEMLOCK"), "{locked}");
    }

    #[test]
    fn the_list_of_files_must_fit_too() {
        let list = Announcement { manifest_len: 2 << 20, ..told(0) };
        assert!(too_long(&list, 4 << 30, 1 << 20).unwrap().starts_with("the list of files of 2 MiB does not fit"));
        assert_eq!(too_long(&list, 4 << 30, 2 << 20), None);
    }
}
