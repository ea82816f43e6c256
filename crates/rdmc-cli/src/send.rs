//! `rdmc send`: the sender of files and directories.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use rdmc::{Buffer, FailedMember, GroupError, GroupFailure, InviteError, Memory, Node, NodeId};
use rdmc::{Security, SendError, Shutdown, SlowReceivers, StartError};
use rdmc_schedule::{BlockCount, MEMBERS_MAX, Rank, Schedule};

use crate::announcement::{Announcement, Groups, PlanTold, Reply};
use crate::blame::{FailedPeer, explain};
use crate::cli::{LISTEN, SendOptions};
use crate::costs::plans;
use crate::departures::{Departures, UNDER_WAY_MAX};
use crate::exit::{Exit, Stop};
use crate::fabric::{Chosen, Offered, register_to_send};
use crate::manifest::{self, printable};
use crate::progress::{Bar, Direction, Event, Reporter, TICK};
use crate::size::POOL_BYTES_DEFAULT;
use crate::source::{Source, SourceFile, Watched};

/// Sends everything to everybody.
pub(crate) async fn run(options: SendOptions, stop: Stop) -> anyhow::Result<()> {
    let reporter = Reporter::new(options.output);
    let receivers = Receivers::new(options.to)?;
    let security = options.security.open(options.fabric.fabric)?;
    let algorithm = options.hybrid.resolve_given(options.algorithm, receivers.members())?;
    let files = options.files;
    let source = Arc::new(tokio::task::spawn_blocking(move || Source::find(&files)).await??);
    for path in &source.skipped {
        reporter.say(&Event::Skipped { path: printable(&path.to_string_lossy()) });
    }
    let list = source.manifest.encode();
    anyhow::ensure!(list.len() as u64 <= manifest::LEN_MAX, "there are too many files for one transfer");
    let (block_size, longest) = (options.block_size.given(), source.manifest.longest());
    let plans = plans(algorithm.as_ref(), block_size, receivers.members(), longest, options.port_rate)?;
    let told = Announcement::new(plans, &source.manifest, list.len() as u64);
    let told = Announcement { on_failure: options.on_failure, ..told };

    let sizes: Vec<u64> = source.files().map(|(_, _, size)| size).collect();
    let registered = registered_bytes_max(&sizes).max(told.manifest_len);
    let limit = Duration::from_secs(options.timeout);
    tokio::select! {
        checked = receivers.check_distinct(limit) => checked?,
        signal = stop.signalled() => return Err(Exit::Signal(signal).into()),
    }
    let offered = options.fabric.open_towards(&receivers.0[0], registered, options.security.encrypt).await?;
    let (node, over, delta) = tokio::select! {
        started = start(&offered, &receivers, &told, limit, security) => started?,
        signal = stop.signalled() => return Err(Exit::Signal(signal).into()),
    };
    let nodes = (0..receivers.members()).map(NodeId).collect();
    let mut groups = told.groups(nodes, over.medium()).context("the group cannot be formed")?;
    groups.files = groups.files.delta(delta);
    if let Some(seconds) = options.evict_after {
        groups.files = groups.files.slow_receivers(SlowReceivers::evict_after(Duration::from_secs(seconds)));
    }
    let plan = told.plans.on(over.medium());
    let transfer =
        Transfer { node: &node, receivers: &receivers, reporter: &reporter, source: &source, told: &told, plan };
    let outcome = tokio::select! {
        outcome = transfer.run(list, groups, over) => outcome,
        signal = stop.signalled() => Err(Exit::Signal(signal).into()),
    };
    // The others are told, whatever happened.
    node.shutdown(Shutdown::Abort).await;
    outcome
}

/// Forms the cluster: asks every receiver, and starts when all have agreed. Tells also whether any has parts of files.
async fn start(
    offered: &Offered,
    receivers: &Receivers,
    told: &Announcement,
    limit: Duration,
    security: Option<Security>,
) -> anyhow::Result<(Node, Chosen, bool)> {
    let payload = Bytes::from(told.encode());
    let invited = rdmc::invite_secured(offered.fabrics.clone(), &receivers.0, payload, limit, security).await;
    let builder = invited.map_err(|error| receivers.uninvited(&error))?;
    let has_parts = builder.replies().values().any(|reply| Reply::decode(reply).has_parts);
    let over = builder.fabric_choice().map(|choice| offered.chosen(choice, None));
    let over = over.expect("the builder comes from an invitation");
    // Files that a device does not register where they are mapped are copied there.
    let builder = builder.pool_bytes_max(offered.pool_bytes(&over, POOL_BYTES_DEFAULT, 0));
    let started = builder.connect_limit(limit.max(CONNECT_LIMIT_MIN)).start().await;
    let node = started.map_err(|error| match error {
        StartError::Unreachable { missing, problem } => {
            let missing: Vec<_> = missing.into_iter().filter_map(|node| receivers.address(node)).collect();
            Exit::Refused.error(format!("no connection to {}: {}", missing.join(", "), printable(&problem)))
        }
        other => anyhow::Error::new(other).context(Exit::Refused),
    })?;
    Ok((node, over, has_parts))
}

/// The receivers by their addresses; they are the nodes 1, 2, ….
pub(crate) struct Receivers(Vec<String>);

impl Receivers {
    pub(crate) fn new(addresses: Vec<String>) -> anyhow::Result<Self> {
        let mut seen = std::collections::BTreeSet::new();
        for address in &addresses {
            let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
            if !port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port != 0)) {
                return Err(
                    Exit::Usage.error(format!("{address:?} is no HOST:PORT; rdmc recv listens at {LISTEN} by default"))
                );
            }
            if !seen.insert(address) {
                return Err(Exit::Usage.error(format!("{address} is given twice")));
            }
        }
        if addresses.len() >= Rank(MEMBERS_MAX).index() {
            return Err(Exit::Usage.error(format!("more than {} receivers", MEMBERS_MAX - 1)));
        }
        Ok(Self(addresses))
    }

    /// Checks that no two names stand for the same address. Those that are not found in time do not.
    async fn check_distinct(&self, limit: Duration) -> anyhow::Result<()> {
        let looked_up = self.0.iter().map(|address| async move {
            // A receiver that is not found will be told by the attempt to reach it.
            let found = tokio::time::timeout(limit, tokio::net::lookup_host(address)).await;
            found.ok().and_then(Result::ok).map_or_else(Vec::new, Iterator::collect)
        });
        let mut seen = HashMap::new();
        for (address, found) in self.0.iter().zip(futures::future::join_all(looked_up).await) {
            for found in found {
                let other = *seen.entry(found).or_insert(address);
                if other != address {
                    let both = format!("{other} and {address} both stand for {found}: name each receiver once");
                    return Err(Exit::Usage.error(both));
                }
            }
        }
        Ok(())
    }

    /// Returns the members of the group, the sender included.
    fn members(&self) -> u32 {
        u32::try_from(self.0.len() + 1).expect("checked against the largest group")
    }

    /// Returns the address of a receiver.
    fn address(&self, node: NodeId) -> Option<&str> {
        let index = Rank(node.0).index().checked_sub(1)?;
        self.0.get(index).map(String::as_str)
    }

    /// Says who did not accept the invitation.
    fn uninvited(&self, error: &InviteError) -> anyhow::Error {
        let failed = error.failures.iter().map(|(address, failure)| {
            let node = (1..).zip(&self.0).find(|(_, known)| *known == address).map_or(0, |(node, _)| node);
            FailedPeer::uninvited(node, address, failure)
        });
        let failed: Vec<FailedPeer> = failed.collect();
        let told: Vec<String> = failed.iter().map(ToString::to_string).collect();
        Exit::Refused.blaming(told.join("; "), failed)
    }

    /// Returns who has failed, by their addresses.
    pub(crate) fn peers(&self, failed: &[FailedMember]) -> Vec<FailedPeer> {
        failed.iter().map(|failed| FailedPeer::new(failed, self.address(failed.node).map(str::to_owned))).collect()
    }
}

/// One transfer under way.
struct Transfer<'a> {
    node: &'a Node,
    receivers: &'a Receivers,
    reporter: &'a Reporter,
    source: &'a Source,
    told: &'a Announcement,
    plan: &'a PlanTold,
}

impl Transfer<'_> {
    async fn run(&self, list: Vec<u8>, groups: Groups, over: Chosen) -> anyhow::Result<()> {
        let not_sent = |failure: &GroupFailure| {
            let failed = self.receivers.peers(&failure.failed);
            Exit::Refused.blaming(explain(&failed), failed)
        };
        let not_formed = |error: GroupError| match error {
            GroupError::Failed(failure) => not_sent(&failure),
            other => anyhow::Error::new(other).context(Exit::Refused),
        };
        let offer = self.node.create_group(groups.manifest).await.map_err(not_formed)?;
        let offered = async {
            offer.send(list).await?;
            offer.send(vec![1; usize::from(groups.files.is_delta())]).await?;
            offer.close().await?;
            Ok(())
        };
        offered.await.map_err(|error: SendError| match error {
            SendError::Failed(failure) | SendError::NotQueued(failure) => not_sent(&failure),
            other => anyhow::Error::new(other).context(Exit::Refused),
        })?;
        let departures =
            Departures::begin(self.node, groups.files, self.told.files, self.receivers, self.reporter).await?;

        let (receivers, files, bytes) = (self.receivers.0.len(), self.told.files, self.told.bytes);
        let (direction, peers, how) = (Direction::Sending, self.receivers.0.clone(), self.plan.into());
        self.reporter.say(&Event::Started { direction, peers, receivers, files, bytes, over, how });
        let begun = Instant::now();
        self.send_files(departures).await?;
        let (seconds, skipped) = (begun.elapsed().as_secs_f64(), self.source.skipped.len());
        self.reporter.say(&Event::Done { receivers, files, bytes, skipped, seconds, received: None });
        Ok(())
    }

    async fn send_files(&self, mut departures: Departures<'_>) -> anyhow::Result<()> {
        let bar = self.reporter.bar("sending", self.told.bytes);
        let share = self.root_share()?;
        let mut watched = Watched::default();
        let closed = async {
            self.feed(&mut departures, &mut watched).await?;
            bar.label("confirming");
            departures.close().await
        };
        let closed = tokio::select! {
            closed = closed => closed,
            never = watch(self.node, &bar, share) => match never {},
        };
        closed.map_err(|error| watched.blamed_for(error))
    }

    /// Sends file after file, each followed by its digest.
    async fn feed(&self, departures: &mut Departures<'_>, watched: &mut Watched) -> anyhow::Result<()> {
        for (path, entry, size) in self.source.files() {
            let (at, entry) = (path.to_owned(), entry.clone());
            let done = Event::File { path: entry.path.to_string(), bytes: size };
            let opening = tokio::task::spawn_blocking(move || SourceFile::open(&at, &entry, size));
            let file = Arc::new(departures.meanwhile(opening).await???);
            watched.add(file.clone());
            let len = usize::try_from(size).context("the file is longer than the address space")?;
            // SAFETY: the bytes are only read by the kernel, which sends them; one who changes the file meanwhile changes
            // what is sent, which the digest, made of what is read from the file, tells.
            #[expect(unsafe_code, reason = "the file is mapped, to be sent without a copy")]
            let memory = unsafe { Memory::map_file(&file.file, len) };
            let memory = memory.with_context(|| format!("{}", path.display()))?;
            let registered = departures.meanwhile(register_to_send(self.node, memory, file.reader()?)).await?;
            let registered = registered.with_context(|| format!("{}", path.display()))?;
            let digest = tokio::task::spawn_blocking(move || file.digest());
            departures.send(registered, Some(done)).await?;
            let digest = departures.meanwhile(digest).await???;
            departures.send(self.register(digest.as_bytes().to_vec())?, None).await?;
        }
        departures.send(self.register(Vec::new())?, None).await
    }

    fn register(&self, bytes: Vec<u8>) -> anyhow::Result<Buffer> {
        Ok(self.node.register(Memory::from(bytes)).context("a digest cannot be registered")?.into_shared())
    }

    /// Returns how many bytes the sender itself sends for every byte of the files.
    #[expect(clippy::cast_precision_loss, reason = "a ratio to be displayed")]
    fn root_share(&self) -> anyhow::Result<f64> {
        let algorithm = self.plan.algorithm.resolve(Rank(self.receivers.members()).index())?;
        let copies = |size: u64| {
            let blocks = size.div_ceil(u64::from(self.plan.block_size)).clamp(1, BLOCKS_COUNTED_MAX);
            let blocks = u32::try_from(blocks).expect("clamped");
            let schedule = Schedule::new(&algorithm, self.receivers.members(), BlockCount(blocks));
            let sends = schedule.map_or(0, |schedule| schedule.sends(Rank::ROOT).count());
            sends as f64 / f64::from(blocks)
        };
        let sent: f64 = self.source.files().map(|(_, _, size)| size as f64 * copies(size)).sum();
        Ok(if self.told.bytes == 0 { 1.0 } else { sent / self.told.bytes as f64 })
    }
}

/// Returns the bytes that are registered at once, at most, when files of these sizes are sent one after the other.
fn registered_bytes_max(sizes: &[u64]) -> u64 {
    let at_once = sizes.windows(sizes.len().clamp(1, FILES_REGISTERED_MAX));
    at_once.map(|files| files.iter().copied().fold(0, u64::saturating_add)).max().unwrap_or(0)
}

/// Shows the progress for ever, over all groups that the node sends in.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "for display")]
async fn watch(node: &Node, bar: &Bar, share: f64) -> Infallible {
    let before = node.stats().bytes_sent;
    loop {
        tokio::time::sleep(TICK).await;
        bar.set(((node.stats().bytes_sent - before) as f64 / share.max(1e-9)) as u64);
    }
}

/// Files registered at once: those under way, each with its digest, and the next one.
const FILES_REGISTERED_MAX: usize = UNDER_WAY_MAX / 2 + 1;
/// Blocks beyond which the sender's share hardly changes.
const BLOCKS_COUNTED_MAX: u64 = 4096;
/// How long receivers that have all agreed have to connect, at least.
const CONNECT_LIMIT_MIN: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_none_are_a_usage_error() {
        for wrong in [&["host"][..], &["host:"], &[":1"], &["host:0"], &["host:99999"], &["a:1", "a:1"], &[""]] {
            let addresses = wrong.iter().map(ToString::to_string).collect();
            let error = Receivers::new(addresses).err().expect("it is refused");
            assert_eq!(Exit::code_of(&error), 2, "{wrong:?}");
        }
        let receivers = Receivers::new(vec!["[::1]:7471".into(), "host:7471".into()]).unwrap();
        assert_eq!((receivers.members(), receivers.address(NodeId(2))), (3, Some("host:7471")));
        assert_eq!(receivers.address(NodeId(0)), None);
    }

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
