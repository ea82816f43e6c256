//! The conformance suite: test bodies that every fabric must pass.
//!
//! A fabric joins with a [`Rig`], which creates two nodes that reach each other, and one line in a test file:
//!
//! ```
//! use futures::future::BoxFuture;
//! use rdmc_fabric::MemNetwork;
//! use rdmc_fabric::conformance::{Node, Rig};
//!
//! struct MemRig;
//!
//! impl Rig for MemRig {
//!     fn pair(&self) -> BoxFuture<'_, (Node, Node)> {
//!         let network = MemNetwork::new();
//!         Box::pin(async move {
//!             (Node::listening(network.fabric(), "a:0").await, Node::listening(network.fabric(), "b:0").await)
//!         })
//!     }
//! }
//!
//! rdmc_fabric::conformance_suite!(mem, MemRig);
//! ```
//!
//! Each body becomes a test in the module that the first argument names. Bodies take time and tasks from the fabric's
//! [`Environment`] only, so a simulated fabric runs them in virtual time. A body that does not end within [`WATCHDOG`]
//! fails. Bodies require no more than the documentation of [`Fabric`] and [`QueuePair`] promises: fabrics may differ in
//! everything else.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt, join};
use tokio::sync::watch;

use crate::completion::{CompletionMode, CompletionQueue, CompletionSource};
use crate::environment::{ControlListener, Environment};
use crate::fabric::{Fabric, Peer, QueuePairConfig, Role};
use crate::memory::{Buffer, BufferMut, Lender, MemoryRegion};
use crate::queue_pair::QueuePair;
use crate::remote::{Expose, ExposedRegion, RemoteAccess};
use crate::work::{Inspector, Operation, WorkError};

mod cancellation;
mod completions;
mod connections;
mod exposures;
mod failures;
mod messages;
mod objects;

/// Creates the nodes that the bodies run on.
pub trait Rig: Send + Sync {
    /// Creates two nodes that reach each other and no other node.
    fn pair(&self) -> BoxFuture<'_, (Node, Node)>;

    /// Runs a body to its end. By default it runs on a Tokio runtime of one thread; a fabric with its own executor
    /// overrides this.
    fn run(&self, body: BoxFuture<'static, ()>) {
        block_on(0, body);
    }
}

/// Runs a body to its end on a Tokio runtime of `workers` threads, or on the calling thread if `workers` is 0.
///
/// # Panics
/// If the body panics.
pub fn block_on(workers: usize, body: BoxFuture<'static, ()>) {
    let mut builder = match workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder.worker_threads(workers.max(1)).enable_all().build();
    let runtime = runtime.expect("the operating system gives a test a runtime");
    if workers == 0 { runtime.block_on(body) } else { runtime.block_on(runtime.spawn(body)).expect("the body passes") }
}

/// One node of a pair, which listens for as long as the value lives.
pub struct Node {
    /// The node's access to the network.
    pub fabric: Arc<dyn Fabric>,
    /// The address at which the control plane would reach the node, if it has one.
    pub address: Option<IpAddr>,
    /// Kept only to be dropped with the node; the lock lets threads share nodes.
    _listener: Mutex<Box<dyn ControlListener>>,
}

impl Node {
    /// Creates a node that listens at `address`, in the form that the fabric's environment expects.
    ///
    /// # Panics
    /// If it cannot listen there.
    pub async fn listening(fabric: Arc<dyn Fabric>, address: &str) -> Self {
        let environment = fabric.environment();
        let listener = environment.listen(address).await.expect("the rig gives an address at which to listen");
        let address = listener.local_address().rsplit_once(':').and_then(|(host, _)| host.parse().ok());
        Self { fabric, address, _listener: Mutex::new(listener) }
    }

    /// Wraps the node's fabric in another one, to run the bodies on a decorator.
    #[must_use]
    pub fn map_fabric(self, wrap: impl FnOnce(Arc<dyn Fabric>) -> Arc<dyn Fabric>) -> Self {
        Self { fabric: wrap(self.fabric), ..self }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut node = f.debug_struct("Node");
        node.field("fabric", &self.fabric).field("address", &self.address).finish_non_exhaustive()
    }
}

/// Lists the bodies once. The list generates a function that runs one body, and a macro that makes a test of each.
macro_rules! bodies {
    ($dollar:tt $($module:ident: $($body:ident),+;)+) => {
        /// Runs one body on a fresh pair of nodes.
        ///
        /// # Panics
        /// If the fabric does not conform or hangs, or if there is no such body.
        pub fn run(rig: Arc<dyn Rig>, body: &'static str) {
            let nodes = rig.clone();
            rig.run(Box::pin(async move {
                let (a, b) = nodes.pair().await;
                let harness = Harness { a: TestNode::new(a), b: TestNode::new(b) };
                let environment = harness.a.environment();
                let watched: BoxFuture<'_, ()> = match body {
                    $($(stringify!($body) => Box::pin($module::$body(&harness)),)+)+
                    _ => panic!("there is no body {body}"),
                };
                environment.timeout(WATCHDOG, watched).await.expect("the body must not hang");
            }));
        }

        /// Creates a module with one test for each conformance body: `conformance_suite!(name, rig)`.
        #[macro_export]
        macro_rules! conformance_suite {
            ($dollar name:ident, $dollar rig:expr) => {
                mod $dollar name {
                    #[allow(unused_imports, reason = "a rig given by a path uses no import")]
                    use super::*;

                    $($(
                        #[test]
                        fn $body() {
                            $dollar crate::conformance::run(::std::sync::Arc::new($dollar rig), stringify!($body));
                        }
                    )+)+
                }
            };
        }
    };
}

bodies! { $
    messages:
        a_send_brings_its_bytes_and_its_immediate,
        messages_of_every_size_are_exact,
        a_message_shorter_than_its_receive_leaves_the_rest_alone,
        a_thousand_sends_arrive_in_order,
        sends_and_writes_with_immediate_arrive_in_one_order,
        both_directions_work_at_once,
        a_send_waits_for_its_receive,
        a_receive_is_posted_before_the_connection_is_made,
        nearly_done_is_no_later_than_completion,
        an_inspector_sees_each_byte_once_and_in_order,
        an_inspector_sees_nothing_of_a_write;
    exposures:
        a_write_lands_and_wakes_nobody,
        the_length_is_that_of_the_local_memory,
        a_write_with_immediate_consumes_a_receive,
        a_send_does_not_overtake_a_write,
        a_read_brings_the_bytes,
        a_read_sees_the_write_before_it,
        offsets_reach_just_their_bytes,
        an_access_of_no_bytes_at_the_end_succeeds,
        large_writes_and_reads_are_exact,
        the_owner_writes_what_peers_read,
        frozen_memory_is_read_by_both,
        the_owner_cannot_reach_outside_its_exposure,
        keys_differ_between_exposures;
    objects:
        objects_are_shared_where_the_fabric_says_so;
    completions:
        the_queue_reports_what_was_posted,
        many_queue_pairs_share_one_queue,
        every_mode_reports_completions,
        an_event_queue_is_idle_without_completions,
        unsignaled_writes_complete_with_later_requests,
        unsignaled_writes_end_with_the_queue_pair,
        unsignaled_work_that_fills_the_queue_ends,
        sends_with_more_leave_in_order,
        sends_with_more_end_with_the_queue_pair,
        a_full_queue_pair_refuses_and_goes_on,
        a_completion_queue_admits_what_it_can_hold,
        completions_around_an_error_come_in_order,
        every_request_completes_once_whenever_the_queue_pair_closes,
        operations_end_with_their_queue;
    cancellation:
        dropped_operations_are_carried_out_all_the_same,
        dropped_operations_give_their_memory_back,
        operations_may_be_dropped_at_any_moment,
        closing_gives_all_memory_back;
    connections:
        garbage_is_not_an_endpoint,
        a_stale_endpoint_leads_nowhere,
        a_queue_pair_connects_once,
        a_closed_queue_pair_does_not_connect,
        closing_ends_a_connect,
        a_peer_that_closes_before_it_connects_leaves_nobody_waiting,
        a_third_party_does_not_get_in,
        many_connections_are_made_at_once;
    failures:
        too_small_a_receive_breaks_both_ends,
        a_message_too_long_stays_within_its_receive,
        a_wrong_key_is_refused,
        access_out_of_bounds_is_refused,
        access_out_of_bounds_leaves_the_neighbours_alone,
        access_that_was_not_allowed_is_refused,
        a_revoked_key_is_refused,
        a_key_revoked_before_its_turn_is_refused,
        revoked_memory_is_not_written_any_more,
        a_refused_write_brings_no_immediate,
        nothing_behind_an_error_is_carried_out,
        work_of_every_kind_on_a_broken_queue_pair_is_flushed,
        no_receive_in_time_is_an_error,
        a_close_flushes_what_was_posted_here,
        a_close_ends_what_the_peer_posted,
        a_dropped_queue_pair_ends_what_the_peer_posted,
        a_close_during_a_transfer_ends_both_sides,
        a_close_during_large_writes_and_reads_ends_both_sides,
        a_peer_that_is_gone_ends_all_work_of_both_sides,
        a_peer_that_leaves_before_the_first_work_leaves_nobody_waiting,
        work_posted_after_a_close_is_flushed,
        a_broken_queue_pair_leaves_others_whole;
}

/// The two nodes of a body, `a` and `b`.
struct Harness {
    a: TestNode,
    b: TestNode,
}

impl Harness {
    /// Creates a connected pair of queue pairs with the default limits. Sends wait for a receive for as long as a body
    /// takes.
    async fn connected(&self) -> (QueuePair, QueuePair) {
        self.connected_with(PATIENT).await
    }

    async fn connected_with(&self, config: QueuePairConfig) -> (QueuePair, QueuePair) {
        let (a, b) = (self.a.queue_pair(config), self.b.queue_pair(config));
        self.connect(&a, &b).await;
        (a, b)
    }

    /// Connects a queue pair of node `a` with one of node `b`.
    async fn connect(&self, a: &QueuePair, b: &QueuePair) {
        let (of_a, of_b) =
            join(a.connect(self.b.peer(b, Role::Active)), b.connect(self.a.peer(a, Role::Passive))).await;
        of_a.expect("the active end connects");
        of_b.expect("the passive end connects");
    }

    /// Lets other traffic pass between the nodes, so that every pending effect has had time to happen.
    async fn settle(&self) {
        let (a, b) = self.connected().await;
        for seed in 0..20 {
            let there = b.receive(self.b.room(8));
            let back = a.receive(self.a.room(8));
            a.send(self.a.filled(8, seed), None).await.expect("the settling traffic flows");
            there.await.expect("the settling traffic flows");
            b.send(self.b.filled(8, seed), None).await.expect("the settling traffic flows");
            back.await.expect("the settling traffic flows");
        }
    }
}

/// A node with one completion queue that is drained by a task.
struct TestNode {
    node: Node,
    completions: Arc<dyn CompletionSource>,
}

impl TestNode {
    fn new(node: Node) -> Self {
        let (completions, queue) = completion_queue(&node, CompletionMode::Event);
        node.fabric.environment().spawn(Box::pin(queue.drain()));
        Self { node, completions }
    }

    fn environment(&self) -> Arc<dyn Environment> {
        self.node.fabric.environment()
    }

    /// Creates a completion queue that the body drains itself.
    fn completion_queue(&self, mode: CompletionMode) -> (Arc<dyn CompletionSource>, CompletionQueue) {
        completion_queue(&self.node, mode)
    }

    fn queue_pair(&self, config: QueuePairConfig) -> QueuePair {
        self.queue_pair_on(&self.completions, config)
    }

    fn queue_pair_on(&self, completions: &Arc<dyn CompletionSource>, config: QueuePairConfig) -> QueuePair {
        self.node.fabric.create_queue_pair(completions, config).expect("the completion queue has room")
    }

    /// Describes `queue_pair`, of this node, to the other node, which gets the role `role`.
    fn peer(&self, queue_pair: &QueuePair, role: Role) -> Peer {
        Peer { endpoint: queue_pair.endpoint(), role, address: self.node.address }
    }

    fn region(&self, len: usize) -> MemoryRegion {
        self.node.fabric.allocate(len).expect("memory can be allocated")
    }

    /// Returns memory to receive into, filled with a byte that shows what was not written.
    fn room(&self, len: usize) -> BufferMut {
        let mut room = self.region(len).into_mut().expect("allocated memory is writable");
        room.fill(UNTOUCHED);
        room
    }

    /// Returns memory of the [`pattern`].
    fn filled_mut(&self, len: usize, seed: u64) -> BufferMut {
        let mut buffer = self.region(len).into_mut().expect("allocated memory is writable");
        buffer.copy_from_slice(&pattern(len, seed));
        buffer
    }

    fn filled(&self, len: usize, seed: u64) -> Buffer {
        self.filled_mut(len, seed).freeze()
    }

    /// Returns memory of the [`pattern`] whose return `lender` counts.
    fn lent(&self, lender: &Arc<CountingLender>, len: usize, seed: u64) -> BufferMut {
        let mut buffer = self.region(len).lend(lender.clone()).expect("allocated memory is writable");
        buffer.copy_from_slice(&pattern(len, seed));
        buffer
    }

    /// Exposes memory of the [`pattern`].
    fn expose(&self, len: usize, seed: u64, access: RemoteAccess) -> ExposedRegion {
        let memory = Expose::Mutable(self.filled_mut(len, seed), access);
        self.node.fabric.expose(memory).expect("memory can be exposed")
    }
}

fn completion_queue(node: &Node, mode: CompletionMode) -> (Arc<dyn CompletionSource>, CompletionQueue) {
    let queue = node.fabric.create_completion_queue(COMPLETIONS_MAX, mode).expect("a completion queue can be made");
    (queue.source(), queue)
}

/// A lender that counts returned regions.
struct CountingLender {
    returned: watch::Sender<usize>,
}

impl CountingLender {
    fn new() -> Arc<Self> {
        Arc::new(Self { returned: watch::Sender::new(0) })
    }

    /// Waits until `count` regions are back.
    async fn holds_at_least(&self, count: usize) {
        let mut returned = self.returned.subscribe();
        returned.wait_for(|&n| n >= count).await.expect("the lender is borrowed, so its sender lives");
    }
}

impl Lender for CountingLender {
    fn take_back(&self, _region: MemoryRegion) {
        self.returned.send_modify(|count| *count += 1);
    }
}

/// Records the bytes that it is shown.
#[derive(Debug, Default)]
struct RecordingInspector(Mutex<Vec<u8>>);

impl RecordingInspector {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().expect("no code panics while it is held").clone()
    }
}

impl Inspector for RecordingInspector {
    fn inspect(&self, bytes: &[u8]) {
        self.0.lock().expect("no code panics while it is held").extend_from_slice(bytes);
    }
}

/// Returns `len` bytes that depend on their position and on `seed`.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (seed..).take(len).map(pattern_byte).collect()
}

fn pattern_byte(position: u64) -> u8 {
    position.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]
}

/// Fails at the first byte that differs from the [`pattern`], without printing megabytes.
#[track_caller]
fn assert_pattern(bytes: &[u8], seed: u64) {
    let wrong = (seed..).map(pattern_byte).zip(bytes).position(|(want, &got)| want != got);
    assert_eq!(wrong, None, "a byte of {} is wrong, seed {seed}", bytes.len());
}

#[track_caller]
fn assert_untouched(bytes: &[u8]) {
    assert!(bytes.iter().all(|&byte| byte == UNTOUCHED), "bytes outside the transfer were written");
}

/// Returns `len` bytes at `offset` of an exposure.
fn bytes_at(exposed: &ExposedRegion, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    exposed.read_at(offset, &mut bytes).expect("the range lies inside");
    bytes
}

/// Tells whether the operation has not ended.
fn is_pending<T>(operation: &mut Operation<T>) -> bool {
    operation.now_or_never().is_none()
}

/// Lets other tasks run once.
async fn turn() {
    let mut first = true;
    std::future::poll_fn(|cx| {
        if std::mem::take(&mut first) {
            cx.waker().wake_by_ref();
            return std::task::Poll::Pending;
        }
        std::task::Poll::Ready(())
    })
    .await;
}

/// Checks that work ended because the queue pair is gone, and for no other reason.
#[track_caller]
fn assert_gone<T: fmt::Debug>(outcome: Result<T, WorkError>) {
    let gone = matches!(outcome, Err(WorkError::Flushed | WorkError::ConnectionLost));
    assert!(gone, "work on a broken queue pair ended with {outcome:?}");
}

/// The longest a body may take, in the environment's time.
pub const WATCHDOG: Duration = Duration::from_secs(20);

/// A configuration in which sends wait for a receive longer than any body takes.
const PATIENT: QueuePairConfig = QueuePairConfig {
    send_depth: 128,
    receive_depth: 128,
    receiver_not_ready: Duration::from_secs(3600),
    warm_up: true,
};

/// Entries of the completion queues.
const COMPLETIONS_MAX: u32 = 16 << 10;

/// The content of memory that was not written.
const UNTOUCHED: u8 = 0xa5;
