//! A group: an ordered, static list of members, the first of which sends to all others (DSN §3).

use std::pin::Pin;
use std::sync::Arc;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::FuturesUnordered;
use rdmc_fabric::Timestamp;
use rdmc_schedule::{BlockCount, Rank, Schedule};
use tokio::sync::oneshot;

use crate::certificate::Digest;
use crate::checksum::BlockIdentity;
use crate::failure::FailureCause;
use crate::id::{GroupId, NodeId};
use crate::resources::{GroupEnding, NodeResources, OpenGroup};
use crate::round_trips::PAUSES;
use crate::shares::PortUser;
use crate::stats::GroupStats;
use crate::table::{ExpectedRows, OutgoingRing, Slot};
use crate::transfer::exchange::Exchange;
use crate::transfer::waits::WaitReason;
use crate::transfer::{Blocks, Deliver, HealedBlock, HopPlan, Owner, Transfer, TransferError};
use crate::wire::GroupFrame;
use crate::woken::WhenWoken;

pub(crate) mod agreement;
pub(crate) mod continuation;
mod delta;
mod ending;
pub(crate) mod error;
mod events;
mod fates;
pub(crate) mod forming;
mod headers;
pub(crate) mod healing;
mod intake;
mod membership;
pub(crate) mod offer;
pub(crate) mod pace;
mod queue;
pub(crate) mod reader;
pub(crate) mod receipt;
pub(crate) mod receiver;
pub(crate) mod recovery;
pub(crate) mod retained;
pub(crate) mod sender;
mod share;
pub(crate) mod sharing;
mod short;
mod source;
pub(crate) mod spec;
mod status;

use delta::Delta;
use ending::GroupEnd;
use forming::{DISTANT_FROM, Grants};
use healing::Healing;
use membership::Membership;
use offer::Message;
use pace::PaceJudge;
use retained::RetainedMessages;
use share::Allotments;
pub use spec::GroupSpec;
use status::Status;

/// One member's side of a group.
///
/// It wires its parts: they have the state, and do the work.
pub(crate) struct Group {
    membership: Arc<Membership>,
    first_source: Option<Rank>,
    /// At the root: the members that cannot learn a message's size from its first block.
    announced_to: Vec<NodeId>,
    /// At the root: the members that learn it sooner from an announcement if they are distant.
    announced_early_to: Vec<NodeId>,
    exchange: Arc<Exchange>,
    pace: PaceJudge,
    end: Arc<GroupEnd>,
    status: Status,
    retained: Arc<RetainedMessages>,
    healing: Healing,
    delta: Delta,
    allotments: Allotments,
}

impl Group {
    pub(crate) fn rank(&self) -> Rank {
        self.membership.rank
    }

    pub(crate) fn first_source(&self) -> Option<Rank> {
        self.first_source
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.membership.spec.block_size
    }

    pub(crate) fn retained(&self) -> &RetainedMessages {
        &self.retained
    }

    pub(crate) fn node(&self) -> &NodeResources {
        &self.membership.node
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.membership.now()
    }

    /// Returns the schedule of a message of `blocks` blocks.
    pub(crate) fn schedule(&self, blocks: BlockCount) -> Schedule {
        self.exchange.schedule(blocks)
    }

    pub(crate) fn exchange(&self) -> &Arc<Exchange> {
        &self.exchange
    }

    /// Makes this member's part in the multicast of a message, which is kept until it is not needed any more. It is
    /// delivered to `to`, unless this member has it from the start.
    pub(crate) fn transfer(
        self: &Arc<Self>,
        number: u64,
        plan: HopPlan,
        blocks: Arc<Blocks>,
        to: Option<oneshot::Sender<Message>>,
    ) -> Transfer {
        self.retained.keep(number, &blocks);
        let deliver = to.map(|to| -> Deliver {
            let group = self.clone();
            Box::new(move |whole, digest| {
                async move {
                    let content = group.content(number, &whole).await?;
                    let message = Message::new(number, content, digest, group.status.fates.fate(number));
                    if group.is_header(number) {
                        group.take_header(&message);
                    } else if !group.retained.keeps() {
                        group.retained.headers.release(number);
                    }
                    let bytes = message.len() as u64;
                    // Its blocks may still leave for others.
                    group.message_completed(number, bytes);
                    group.end.deliver(to, message, &whole, digest);
                    group.status.report_held(bytes);
                    Ok(())
                }
                .boxed()
            })
        });
        Transfer::new(self.exchange.clone(), self.clone(), number, plan, blocks, deliver)
    }

    /// Takes a whole message that is the header of the next one. The application does not get it as a message.
    fn take_header(&self, message: &Message) -> Arc<[u8]> {
        let header = Arc::<[u8]>::from(&message[..]);
        self.retained.headers.add(message.number(), header.clone());
        message.stored();
        header
    }

    /// Tells whether members report which blocks of a message they have before it begins.
    pub(crate) fn is_delta(&self) -> bool {
        self.membership.spec.delta
    }

    /// At the root of a group with a ring: waits until there is room for the slot of the next message.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    async fn room_for_slot(&self) -> Result<(), TransferError> {
        let Some(ring) = self.status.table.outgoing() else { return Ok(()) };
        loop {
            let told = ring.told();
            if ring.has_room() {
                break;
            }
            // Whoever tells of more slots is not the one that all wait for, or not any more.
            let slowest = self.status.slowest_reader();
            self.exchange.waiting(WaitReason::Ready, slowest, ring.told_more(told)).await;
        }
        Ok(self.status.table.takes_slot(ring).await?)
    }

    /// At the root of a group with a ring: writes the size of a long message into a slot, for which there is
    /// [room](Self::room_for_slot).
    fn write_size(&self, blocks: &Blocks) -> Result<(), TransferError> {
        self.write_slot(Slot::InBlocks(blocks.shape().size), |_| {})
    }

    fn write_slot(&self, slot: Slot<usize>, fill: impl FnOnce(&mut [u8])) -> Result<(), TransferError> {
        let Some(ring) = self.status.table.outgoing() else { return Ok(()) };
        self.status.table.write_slot(ring, slot, fill).map_err(|error| {
            let what = format!("a slot of the ring could not be written: {error}");
            TransferError::Local(FailureCause::Resources { what })
        })
    }

    /// Returns the most bytes of messages in a slot of the ring; 0 without one.
    fn slot_len_max(&self) -> usize {
        self.status.table.outgoing().map_or(0, OutgoingRing::bytes_max)
    }

    /// Tells whether a message travels by the ring.
    fn fits_a_slot(&self, size: u64) -> bool {
        let block_size = self.block_size();
        self.membership.spec.ring.is_some_and(|ring| size <= ring.bytes.min(block_size).into())
    }

    /// At the root: announces the size of a message.
    pub(crate) fn announce(&self, message: u64, size: u64) {
        let mesh = &self.membership.node.mesh;
        let distant = self.announced_early_to.iter().filter(|node| mesh.is_distant(**node, DISTANT_FROM));
        for &to in self.announced_to.iter().chain(distant) {
            self.membership.post(to, GroupFrame::Announce { message, size });
        }
    }

    /// Measures the round trips to all neighbours, a few times. The shortest count.
    async fn measure_round_trips(&self) {
        let (environment, known) = (&*self.membership.node.environment, &self.membership.node.round_trips);
        for pause in PAUSES {
            environment.sleep(pause).await;
            let due = self.exchange.neighbours.values().filter(|neighbour| known.is_due(neighbour.node, self.now()));
            let measuring = due.map(|neighbour| async {
                // If a connection is broken, the group is about to end.
                let measured = neighbour.round_trip(environment).await;
                measured.into_iter().for_each(|measured| known.note(neighbour.node, measured));
            });
            futures::future::join_all(measuring).await;
            let all = self.exchange.neighbours.values().map(|neighbour| known.shortest(neighbour.node));
            if let Some(farthest) = all.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max()) {
                let (round_trip, once) = farthest;
                self.exchange.distance.note_round_trip(round_trip, once);
            }
        }
        let distance = &self.exchange.distance;
        let (round_trip, rate, near_bytes) = (distance.round_trip(), distance.rate(), distance.near_bytes());
        let runs_free = distance.runs_free(distance.latest());
        tracing::info!(parent: &self.membership.span, ?round_trip, rate, near_bytes, runs_free, "distance measured");
    }

    /// At the root: tells the others which messages run free, whenever it has decided. Elsewhere it waits for ever.
    async fn tell_decisions(&self) {
        loop {
            let from_blocks = self.exchange.distance.next_decision().await;
            self.membership.post_to_others(&GroupFrame::RunFree { from_blocks });
        }
    }

    pub(crate) fn stats(&self) -> GroupStats {
        let (slow, held_up) = self.pace.held_up();
        let (neighbours, neighbours_by_shared_memory) = self.carriers();
        GroupStats {
            slow,
            held_up,
            neighbours,
            neighbours_by_shared_memory,
            round_trip: self.exchange.distance.round_trip(),
            port_rate: self.exchange.distance.rate(),
            rate_limit: self.exchange.limit.rate(),
            ..self.exchange.counters.group_stats()
        }
    }

    /// Counts the neighbours, and the neighbours that the fabric reaches by shared memory.
    fn carriers(&self) -> (usize, usize) {
        (
            self.exchange.neighbours.len(),
            self.exchange.neighbours.values().filter(|neighbour| neighbour.shares_memory()).count(),
        )
    }

    pub(crate) fn message_completed(&self, number: u64, size: u64) {
        self.exchange.counters.completed();
        self.membership.node.counters.completed();
        tracing::debug!(parent: &self.membership.span, message = number, size, "transfer completed");
    }
}

impl OpenGroup for Group {
    fn id(&self) -> GroupId {
        self.membership.id
    }

    fn declare(&self, cause: FailureCause) {
        self.end.declare(cause);
    }

    fn depart(&self) {
        self.end.depart();
    }

    fn state(&self) -> Option<GroupEnding> {
        Some(match self.end.outcome()? {
            Ok(_) => GroupEnding::Closed,
            Err(_) => GroupEnding::Failed,
        })
    }

    fn ended(&self) -> BoxFuture<'_, ()> {
        self.end.ended().map(drop).boxed()
    }
}

impl Owner for Group {
    fn heal<'a>(
        &'a self,
        by: Rank,
        identity: BlockIdentity,
        first: bool,
        memory: &'a mut [u8],
    ) -> BoxFuture<'a, Result<HealedBlock, TransferError>> {
        self.healing.fetch_anew(by, identity, first, memory).boxed()
    }

    fn note_digest(&self, message: u64, digest: Option<Digest>) {
        self.end.note_own_digest(message, digest);
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.membership.node.mesh.leave_group(self.membership.id);
    }
}

/// Runs a member's engine until the group is to do no further work; then waits until all members agree on its end, and
/// closes its connections.
pub(crate) fn start(
    group: Arc<Group>,
    engine: impl Future<Output = Result<(), TransferError>> + Send + 'static,
    expected_rows: ExpectedRows,
) {
    let environment = group.membership.node.environment.clone();
    let span = group.membership.span.clone();
    let user: Arc<dyn PortUser> = group.clone();
    group.membership.node.port.join(&user);
    let task = async move {
        {
            let working = async {
                if let Err(error) = engine.await {
                    group.end.report(error);
                }
            };
            let tending = std::pin::pin!(group.status.run(expected_rows));
            let mut tending = WhenWoken::new(tending).fuse();
            let mut working = std::pin::pin!(working.fuse());
            let (stopped, pacing) = (std::pin::pin!(group.end.stopped()), std::pin::pin!(group.pace.watch()));
            let (mut stopped, mut pacing) = (WhenWoken::new(stopped).fuse(), WhenWoken::new(pacing).fuse());
            let measuring = std::pin::pin!(group.measure_round_trips());
            let mut measuring = WhenWoken::new(measuring).fuse();
            let telling = std::pin::pin!(group.tell_decisions());
            let mut telling = WhenWoken::new(telling).fuse();
            // The engine ends when this member has done its part. Others may be far behind.
            loop {
                futures::select_biased! {
                    () = stopped => break,
                    () = working => group.status.note_done(),
                    () = tending => {}
                    () = pacing => {}
                    () = measuring => {}
                    () = telling => {}
                }
            }
        }
        // The connections stay until all have agreed: a neighbour that does not know of the failure yet must not take
        // this member for its cause.
        let _ = group.end.ended().await;
        for neighbour in group.exchange.neighbours.values() {
            neighbour.close();
        }
        group.status.table.close();
        group.retained.mark_idle();
    };
    environment.spawn(Box::pin(tracing::Instrument::instrument(task, span)));
}

/// Takes the grants of all neighbours, until a connection breaks.
pub(crate) fn take_grants(group: &Arc<Group>, grants: Grants) -> FuturesUnordered<BoxFuture<'static, TransferError>> {
    grants
        .into_iter()
        .map(|(rank, posted)| {
            let group = group.clone();
            async move { group.exchange.neighbour(rank).take_grants(posted).await }.boxed()
        })
        .collect()
}

/// A future that owns everything it needs.
pub(crate) type OwnedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
