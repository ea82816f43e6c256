//! The messages of one transfer as they are sent, also when receivers fail.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::time::Duration;

use futures::future::{FutureExt, MaybeDone, maybe_done};
use rdmc::{Buffer, FailedMember, FailureCause, GroupError, GroupFailure, GroupSpec, Multicast, Node, Rank};
use rdmc::{Receipt, RecoveryError, SendError, Sender};

use crate::announcement::UNDER_WAY_MAX;
use crate::blame::{explain, send_again, sender_cut_off, stopped_before, stopped_for};
use crate::error::{INTEGRITY, Kind, Problem};
use crate::event::{Event, Events};
use crate::receivers::Receivers;
use crate::units::Units;
use crate::words::count;

/// Messages under way, and the group that carries them.
///
/// There are fewer than the group's queue takes, so that polling a message once puts it into the queue.
pub(crate) struct Departures<'a> {
    history: TransferHistory<'a>,
    sender: Sender,
    under_way: VecDeque<Departure>,
}

/// A message under way.
struct Departure {
    multicast: MaybeDone<Multicast>,
    /// Kept in case the message must be sent again.
    bytes: Buffer,
    /// The events that tell that the message was sent.
    done: Vec<Event>,
}

impl<'a> Departures<'a> {
    /// Forms the group that carries the files. If the transfer may go on without receivers that fail meanwhile, it is
    /// formed without them.
    ///
    /// # Errors
    /// Nothing was sent.
    pub(crate) async fn begin(
        node: &Node,
        spec: GroupSpec,
        units: &'a Units,
        receivers: &'a Receivers,
        events: &'a Events,
    ) -> Result<Self, Problem> {
        let mut history =
            TransferHistory { receivers, events, units, formed: false, carried: Vec::new(), failed: Vec::new() };
        let sender = match node.create_group(spec).await {
            Ok(sender) => sender,
            Err(GroupError::Failed(failure)) => {
                // With too few descriptors here, the others are not at fault.
                let problem = receivers.not_sent(&failure).blamed_on_limit(node.id(), receivers.addresses().len());
                if problem.kind == Kind::Local {
                    return Err(problem);
                }
                history.go_on(failure).await?
            }
            Err(other) => return Err(Problem::from(other).of_kind(Kind::Refused)),
        };
        history.formed = true;
        Ok(Self { history, sender, under_way: VecDeque::new() })
    }

    /// Sends a message after those before it. Waits while too many are under way.
    pub(crate) async fn send(&mut self, bytes: Buffer, done: Vec<Event>) -> Result<(), Problem> {
        while self.under_way.len() >= UNDER_WAY_MAX {
            oldest(&mut self.under_way).await;
            self.finish_oldest().await?;
        }
        self.queue(bytes, done);
        Ok(())
    }

    /// Does other work while messages are under way. After a failure it forms the next group, because the survivors
    /// wait for each other.
    pub(crate) async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Problem> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Ok(done),
                () = oldest(&mut self.under_way) => self.finish_oldest().await?,
                failure = self.sender.failed() => self.go_on(failure).await?,
            }
        }
    }

    /// Waits until all remaining receivers have everything.
    ///
    /// # Errors
    /// The receivers that failed on the way.
    pub(crate) async fn close(self) -> Result<(), Problem> {
        let Self { mut history, mut sender, mut under_way } = self;
        let receivers = loop {
            let receivers = sender.members().len() - 1;
            let mut again = Vec::new();
            // At once: the group then closes as soon as the last message is through.
            let mut closing = pin!(sender.close());
            let closed = loop {
                tokio::select! {
                    () = oldest(&mut under_way) => again.extend(history.oldest_sent(&mut under_way)?),
                    closed = &mut closing => break closed,
                }
            };
            again.extend(history.all_sent(&mut under_way).await?);
            match closed {
                Ok(_) => break receivers,
                Err(failure) => sender = history.go_on(failure).await?,
            }
            under_way.extend(again.into_iter().map(|departure| departure.queued(&sender)));
        };
        history.closed(receivers)
    }

    fn queue(&mut self, bytes: Buffer, done: Vec<Event>) {
        self.under_way.push_back(Departure::new(&self.sender, bytes, done));
    }

    /// Finishes the oldest message: says that it was sent, or forms the next group if its group has failed.
    async fn finish_oldest(&mut self) -> Result<(), Problem> {
        let Some(departure) = self.under_way.front_mut() else { return Ok(()) };
        if let Some(Err(SendError::Failed(failure) | SendError::NotQueued(failure))) = departure.output() {
            let failure = failure.clone();
            return self.go_on(failure).await;
        }
        self.history.oldest_sent(&mut self.under_way).map(drop)
    }

    /// Forms the group of the survivors, and sends again what was not queued.
    async fn go_on(&mut self, failure: GroupFailure) -> Result<(), Problem> {
        let again = self.history.all_sent(&mut self.under_way).await?;
        self.sender = self.history.go_on(failure).await?;
        self.under_way.extend(again.into_iter().map(|departure| departure.queued(&self.sender)));
        Ok(())
    }
}

impl Departure {
    fn new(sender: &Sender, bytes: Buffer, done: Vec<Event>) -> Self {
        let mut multicast = maybe_done(sender.send(bytes.clone()));
        // The first poll gives the message its place in the queue.
        let _ = (&mut multicast).now_or_never();
        Self { multicast, bytes, done }
    }

    /// Queues the message again, in another group.
    fn queued(self, sender: &Sender) -> Self {
        Self::new(sender, self.bytes, self.done)
    }

    fn output(&mut self) -> Option<&mut Result<Receipt, SendError>> {
        Pin::new(&mut self.multicast).output_mut()
    }
}

/// Waits until the oldest message is sent or has failed; for ever if there is none.
async fn oldest(under_way: &mut VecDeque<Departure>) {
    match under_way.front_mut() {
        Some(departure) => (&mut departure.multicast).await,
        None => std::future::pending().await,
    }
}

/// What has happened in all groups of a transfer.
struct TransferHistory<'a> {
    receivers: &'a Receivers,
    events: &'a Events,
    units: &'a Units,
    /// Whether a group was formed. Afterwards something may have been sent.
    formed: bool,
    /// Events to say when all remaining receivers have everything.
    carried: Vec<Event>,
    /// Members that have failed so far.
    failed: Vec<FailedMember>,
}

impl TransferHistory<'_> {
    /// Records the outcome of the oldest message, which was waited for. Returns it if it must be sent again.
    fn oldest_sent(&mut self, under_way: &mut VecDeque<Departure>) -> Result<Option<Departure>, Problem> {
        let Some(mut departure) = under_way.pop_front() else { return Ok(None) };
        match Pin::new(&mut departure.multicast).take_output().expect("it was waited for") {
            Ok(_) => departure.done.into_iter().for_each(|event| self.events.say(event)),
            // The group of the survivors carries it.
            Err(SendError::Failed(_)) => self.carried.extend(departure.done),
            Err(SendError::NotQueued(_)) => return Ok(Some(departure)),
            Err(other) => return Err(other.into()),
        }
        Ok(None)
    }

    /// Records the outcomes of all messages of a group that has ended, so this does not wait for long. Returns those that
    /// must be sent again.
    async fn all_sent(&mut self, under_way: &mut VecDeque<Departure>) -> Result<Vec<Departure>, Problem> {
        let mut again = Vec::new();
        while !under_way.is_empty() {
            oldest(under_way).await;
            again.extend(self.oldest_sent(under_way)?);
        }
        Ok(again)
    }

    /// Forms the group of the survivors.
    ///
    /// # Errors
    /// The members that failed, if no receiver is left or the survivors cannot go on.
    async fn go_on(&mut self, mut failure: GroupFailure) -> Result<Sender, Problem> {
        loop {
            let failed_before = self.failed.len();
            self.failed.extend(failure.failed.iter().cloned());
            let left = failure.certificate.members().len() - failure.failed.len();
            let stopped = stopped_before(&failure);
            if left <= 1 {
                return Err(stopped.map_or_else(|| self.error(""), |stopped| self.was_stopped(stopped, failed_before)));
            }
            match failure.recover().await {
                Ok(recovery) => {
                    let sender = recovery.into_sender().expect("the root goes on as the root");
                    let (failed, receivers) = (self.receivers.peers(&failure.failed), sender.members().len() - 1);
                    self.events.say(Event::GoingOn { failed, receivers });
                    return Ok(sender);
                }
                Err(RecoveryError::Group(GroupError::Failed(next))) => failure = next,
                Err(RecoveryError::Off) => return Err(self.error(&self.held_by_survivors(&failure))),
                Err(RecoveryError::NoQuorum | RecoveryError::Excluded { .. }) => {
                    if let Some(stopped) = stopped {
                        return Err(self.was_stopped(stopped, failed_before));
                    }
                    return Err(self.error_with("", Some(&sender_cut_off(self.receivers.wording()))));
                }
                Err(other) => return Err(self.error(&format!(": {other}"))),
            }
        }
    }

    /// Returns the outcome of a transfer that all survivors have agreed to end.
    fn closed(self, receivers: usize) -> Result<(), Problem> {
        self.carried.iter().for_each(|event| self.events.say(event.clone()));
        match (self.failed.is_empty(), receivers) {
            (true, _) => Ok(()),
            (false, 1) => Err(self.error("; the other receiver has everything")),
            (false, _) => Err(self.error(&format!("; the other {receivers} receivers have everything"))),
        }
    }

    /// Says how many files the survivors have.
    fn held_by_survivors(&self, failure: &GroupFailure) -> String {
        let others = (1..).map(Rank).take(failure.certificate.members().len() - 1);
        let others: Vec<Rank> = others.filter(|rank| !failure.names(*rank)).collect();
        let held = others.iter().filter_map(|rank| failure.certificate.held_by(*rank));
        // Each unit is followed by its digest. A receiver keeps files whose digest is lost.
        let units = held.map(|messages| usize::try_from(messages.div_ceil(2)).unwrap_or(usize::MAX));
        let held: Vec<usize> = units.map(|units| self.units.files_in_first(units)).collect();
        let (Some(least), Some(most), true) = (held.iter().min(), held.iter().max(), self.formed) else {
            return String::new();
        };
        let (some, files) =
            (if least == most { least.to_string() } else { format!("{least} to {most}") }, self.units.files());
        let unknown = if held.len() < others.len() { ", as far as is known" } else { "" };
        match others.len() {
            1 => format!("; the other receiver has {some} of {}", count(files, "file")),
            others => format!("; the other {others} receivers have {some} of {}{unknown}", count(files, "file")),
        }
    }

    /// Returns the error of a sender that was itself stopped, and so has lost all others. It blames only the first
    /// `failed_before` members that have failed.
    fn was_stopped(&self, stopped: Duration, failed_before: usize) -> Problem {
        let failed = self.receivers.peers(&self.failed[..failed_before]);
        let earlier = if failed.is_empty() { String::new() } else { format!("{}; ", explain(&failed)) };
        let (told, next) = (stopped_for(stopped), sender_cut_off(self.receivers.wording()));
        let kind = if self.formed { Kind::Partial } else { Kind::Refused };
        kind.blaming(format!("{earlier}{told}; {next}"), failed)
    }

    fn error(&self, more: &str) -> Problem {
        // Sending again does not help against a refusal.
        let lost = |failed: &FailedMember| !matches!(failed.cause, FailureCause::Refused { .. });
        let helps = self.formed && self.failed.iter().any(lost);
        self.error_with(more, helps.then(|| send_again(self.receivers.wording())).as_deref())
    }

    fn error_with(&self, more: &str, remedy: Option<&str>) -> Problem {
        let integrity = |failed: &FailedMember| match &failed.cause {
            FailureCause::Refused { reason } => reason.starts_with(INTEGRITY),
            cause => matches!(cause, FailureCause::Corrupted { .. } | FailureCause::Diverged),
        };
        let kind = match self.failed.iter().any(integrity) {
            true => Kind::Integrity,
            false if self.formed => Kind::Partial,
            false => Kind::Refused,
        };
        let failed = self.receivers.peers(&self.failed);
        let remedy = remedy.map_or_else(String::new, |remedy| format!("; {remedy}"));
        kind.blaming(format!("{}{more}{remedy}", explain(&failed)), failed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use rdmc::{GroupSpec, Memory, Node, NodeId};

    use super::*;
    use crate::arrivals::take_files;
    use crate::fabric::register_to_send;
    use crate::fabric::strict::{POOL_BYTES, Strict};
    use crate::manifest::Manifest;
    use crate::store::Store;
    use crate::wording::Wording;

    const BLOCK_SIZE: u32 = 32 << 10;

    async fn receive(node: &Node, spec: GroupSpec, manifest: &Arc<Manifest>) -> Result<tempfile::TempDir, Problem> {
        let dir = tempfile::tempdir()?;
        let (events, _said) = Events::new();
        let store = Store::open(dir.path(), Wording::default())?;
        let begins = Event::Warning { message: "it begins".to_owned() };
        assert_eq!(take_files(node, spec, manifest, &store, &events, begins).await?, 2);
        Ok(dir)
    }

    /// Sends each unit followed by its digest.
    async fn send(node: &Node, spec: GroupSpec, manifest: &Manifest, contents: &[Bytes]) -> Result<(), Problem> {
        let addresses = (1..=3).map(|number| format!("10.0.0.{number}:7471")).collect();
        let receivers = Receivers::new(addresses, Wording::default())?;
        let (events, _said) = Events::new();
        let units = Units::of(manifest);
        let mut departures = Departures::begin(node, spec, &units, &receivers, &events).await?;
        for unit in units.iter() {
            let bytes = Bytes::from(contents[unit.files.clone()].concat());
            let copied = bytes.clone();
            let copy = move |to: &mut [u8]| {
                to.copy_from_slice(&copied);
                Ok(())
            };
            let registered = departures.meanwhile(register_to_send(node, Memory::from(bytes.clone()), copy)).await??;
            departures.send(registered, Vec::new()).await?;
            let digest = Memory::from(rdmc::Digest::of(&bytes, BLOCK_SIZE).0.to_vec());
            departures.send(node.register(digest)?.into_shared(), Vec::new()).await?;
        }
        departures.close().await
    }

    /// In memory of a pool that holds one large file at a time, so that whatever is kept too long holds all up.
    #[tokio::test]
    async fn those_who_are_left_get_everything_when_one_gives_up_after_any_number_of_messages() {
        let sizes = [200_000, 0, usize::try_from(POOL_BYTES).unwrap(), 40_000, 1, 1_000_000, 10_000, 1_048_000];
        let (manifest, contents) = Manifest::of_sizes(&sizes);
        let manifest = Arc::new(manifest);
        for taken in 0..=2 * Units::of(&manifest).len() {
            let nodes = Strict::nodes(4).await;
            let spec = GroupSpec::new(1, (0..4).map(NodeId)).block_size(BLOCK_SIZE);
            let gives_up = async {
                let mut group = nodes[2].join_group(spec.clone()).with_offers().await?;
                for _ in 0..taken {
                    let offer = group.next_offer().await.expect("a message")?;
                    let memory = Memory::from(vec![0; usize::try_from(offer.size())?]);
                    let memory = nodes[2].register(memory)?.into_mut().expect("it can be written");
                    // It dies while the message arrives.
                    drop(offer.accept(memory));
                }
                Ok::<_, Problem>(())
            };
            let sends = send(&nodes[0], spec.clone(), &manifest, &contents).map(Ok::<_, Problem>);
            let (first, second) =
                (receive(&nodes[1], spec.clone(), &manifest), receive(&nodes[3], spec.clone(), &manifest));
            let (sent, (), first, second) = futures::try_join!(sends, gives_up, first, second).unwrap();
            let error = sent.unwrap_err();
            assert_eq!(error.kind, Kind::Partial);
            let told = error.to_string();
            assert!(
                told.contains("10.0.0.2:7471 left") && told.contains("the other 2 receivers have everything"),
                "{told}"
            );
            [first, second].iter().for_each(|dir| assert_has(dir, &contents));
        }
    }

    fn assert_has(dir: &tempfile::TempDir, contents: &[Bytes]) {
        for (bytes, at) in contents.iter().zip(0..) {
            assert_eq!(std::fs::read(dir.path().join(format!("file{at}"))).unwrap(), bytes[..]);
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), contents.len());
    }

    #[tokio::test]
    async fn those_who_are_left_get_everything_when_one_is_gone_before_the_group_is_formed() {
        let (manifest, contents) = Manifest::of_sizes(&[100_000, 5]);
        let manifest = Arc::new(manifest);
        for (goes_on, delta) in [(true, false), (true, true), (false, false)] {
            let nodes = Strict::nodes(4).await;
            let spec = GroupSpec::new(1, (0..4).map(NodeId)).block_size(BLOCK_SIZE).recoverable(goes_on).delta(delta);
            nodes[2].clone().shutdown(rdmc::Shutdown::Abort).await;
            let receive = |at: usize| receive(&nodes[at], spec.clone(), &manifest);
            let (sent, first, second) =
                futures::join!(send(&nodes[0], spec.clone(), &manifest, &contents), receive(1), receive(3));
            let error = sent.unwrap_err();
            assert!(error.to_string().contains("10.0.0.2:7471"), "{error}");
            if goes_on {
                assert_eq!(error.kind, Kind::Partial);
                [first, second].iter().for_each(|dir| assert_has(dir.as_ref().unwrap(), &contents));
                continue;
            }
            for error in [error, first.unwrap_err(), second.unwrap_err()] {
                assert_eq!(error.kind, Kind::Refused, "{error}");
                assert!(!error.to_string().contains("files"), "{error}");
            }
        }
    }
}
