//! The executor: tasks, events and a clock that stops while they run.
//!
//! One thread polls tasks in the order in which they became ready. When none is ready, the clock jumps to the next
//! event. Nothing else decides the order, so a seed decides everything.

use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::Timestamp;

/// The number of a modelled node, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIndex(pub u32);

impl NodeIndex {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for NodeIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Why a simulation ended before its main future did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Stalled {
    /// Every task waits, and there are no more events.
    #[error("deadlock at {at:?}: {tasks} tasks wait and there are no more events")]
    Deadlock {
        /// Virtual time since the start.
        at: Duration,
        /// Number of waiting tasks.
        tasks: usize,
    },
    /// The virtual clock passed the limit.
    #[error("not finished after {limit:?} of virtual time, with {tasks} tasks")]
    TimeLimit {
        /// The limit.
        limit: Duration,
        /// Number of tasks that have not ended.
        tasks: usize,
    },
    /// Tasks and events caused each other without end, and virtual time did not advance.
    #[error("livelock at {at:?}: {polls} polls and events while virtual time did not advance")]
    Livelock {
        /// Virtual time since the start.
        at: Duration,
        /// Number of polls and events at that moment.
        polls: u64,
    },
}

/// The tasks, events and clock of one simulated world.
///
/// Cheap to clone; all clones are the same executor. [`Simulation`](crate::Simulation) ends it.
#[derive(Clone)]
pub(crate) struct Executor(Arc<Core>);

struct Core {
    now_ns: AtomicU64,
    /// Whether there are tasks of nodes that have died.
    any_ended: AtomicBool,
    state: Mutex<State>,
    ready: Mutex<Ready>,
}

#[derive(Default)]
struct State {
    events: BinaryHeap<Event>,
    next_event: u64,
    /// Number of dropped timers in `events`.
    cancelled: usize,
    tasks: BTreeMap<u64, Arc<Task>>,
    next_task: u64,
    /// Stopped nodes, and their tasks that are ready.
    stopped: BTreeMap<NodeIndex, Vec<Arc<Task>>>,
    /// Tasks of nodes that have died.
    ended: Vec<Arc<Task>>,
}

#[derive(Default)]
struct Ready {
    queue: VecDeque<Arc<Task>>,
    /// Woken by the task or event that runs now.
    woken: Vec<Arc<Task>>,
}

/// An event at a moment. The heap returns the earliest event, and of equal ones the one scheduled first.
struct Event {
    at_ns: u64,
    number: u64,
    action: Action,
}

enum Action {
    Call(Box<dyn FnOnce() + Send>),
    Wake(Arc<Timer>),
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at_ns, other.number).cmp(&(self.at_ns, self.number))
    }
}

struct Task {
    number: u64,
    owner: Option<NodeIndex>,
    core: Weak<Core>,
    queued: AtomicBool,
    /// `None` while it is polled and after it has ended.
    future: Mutex<Option<BoxFuture<'static, ()>>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let Some(core) = self.core.upgrade() else { return };
        if !self.queued.swap(true, Ordering::Relaxed) {
            lock(&core.ready).woken.push(self.clone());
        }
    }
}

impl Executor {
    pub(crate) fn new() -> Self {
        let (now_ns, any_ended) = (AtomicU64::new(0), AtomicBool::new(false));
        Self(Arc::new(Core { now_ns, any_ended, state: Mutex::default(), ready: Mutex::default() }))
    }

    pub(crate) fn now(&self) -> Timestamp {
        Timestamp::from_nanos(self.now_ns())
    }

    pub(crate) fn now_ns(&self) -> u64 {
        self.0.now_ns.load(Ordering::Relaxed)
    }

    /// Calls `call` at a moment; as soon as possible if the moment has passed.
    pub(crate) fn call_at(&self, at_ns: u64, call: impl FnOnce() + Send + 'static) {
        self.push_event(at_ns, Action::Call(Box::new(call)));
    }

    /// Runs a task until it ends or its node, if any, dies.
    pub(crate) fn spawn(&self, owner: Option<NodeIndex>, future: BoxFuture<'static, ()>) {
        let task = {
            let mut state = self.state();
            let number = state.next_task;
            state.next_task += 1;
            let task = Arc::new(Task {
                number,
                owner,
                core: Arc::downgrade(&self.0),
                queued: AtomicBool::new(false),
                // A task may run inside a Tokio runtime, whose budget must not affect the order.
                future: Mutex::new(Some(Box::pin(tokio::task::unconstrained(future)))),
            });
            state.tasks.insert(number, task.clone());
            task
        };
        task.wake();
    }

    pub(crate) fn sleep_until(&self, at: Timestamp) -> Sleep {
        Sleep { core: Arc::downgrade(&self.0), at_ns: at.as_nanos(), timer: None }
    }

    /// Counts the tasks of one node that have not ended.
    pub(crate) fn tasks_of(&self, node: NodeIndex) -> usize {
        self.state().tasks.values().filter(|task| task.owner == Some(node)).count()
    }

    /// Ends all tasks of a node. They are dropped after the current task or event, which may be one of them and hold
    /// locks that the others take on drop.
    pub(crate) fn end_tasks_of(&self, node: NodeIndex) {
        let mut state = self.state();
        let state = &mut *state;
        state.stopped.remove(&node);
        let of_node = state.tasks.values().filter(|task| task.owner == Some(node));
        let numbers: Vec<u64> = of_node.map(|task| task.number).collect();
        state.ended.extend(numbers.iter().filter_map(|number| state.tasks.remove(number)));
        self.0.any_ended.store(true, Ordering::Relaxed);
    }

    /// Drops the tasks of nodes that have died.
    fn drop_ended(&self) {
        while self.0.any_ended.load(Ordering::Relaxed) {
            self.0.any_ended.store(false, Ordering::Relaxed);
            let ended = std::mem::take(&mut self.state().ended);
            for task in ended {
                // Outside all locks: the values of a task may call the executor on drop.
                let future = lock(&task.future).take();
                drop(future);
            }
        }
    }

    /// Stops the tasks of a node, as SIGSTOP stops a process.
    pub(crate) fn stop_tasks_of(&self, node: NodeIndex) {
        self.state().stopped.entry(node).or_default();
    }

    /// Resumes the tasks of a stopped node.
    pub(crate) fn resume_tasks_of(&self, node: NodeIndex) {
        let tasks = self.state().stopped.remove(&node).unwrap_or_default();
        lock(&self.0.ready).woken.extend(tasks);
    }

    /// Runs until `future` has ended.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Stalled> {
        let output = Arc::new(Mutex::new(None));
        let place = output.clone();
        self.spawn(None, Box::pin(async move { *lock(&place) = Some(future.await) }));
        let limit_ns = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX).saturating_add(self.now_ns());
        let mut polls = 0;
        loop {
            self.take_woken();
            while let Some(task) = self.next_ready() {
                self.poll(task);
                self.drop_ended();
                self.take_woken();
                if let Some(output) = lock(&output).take() {
                    return Ok(output);
                }
                polls += 1;
                if polls > POLLS_MAX {
                    return Err(Stalled::Livelock { at: Duration::from_nanos(self.now_ns()), polls });
                }
            }
            let before = self.now_ns();
            let fired = self.fire_next(limit_ns);
            self.drop_ended();
            match fired {
                Fired::Event if self.now_ns() == before => polls += 1,
                Fired::Event => polls = 0,
                Fired::Nothing => {
                    let at = Duration::from_nanos(self.now_ns());
                    return Err(Stalled::Deadlock { at, tasks: self.state().tasks.len() });
                }
                Fired::TooLate => return Err(Stalled::TimeLimit { limit, tasks: self.state().tasks.len() }),
            }
        }
    }

    /// Drops all tasks and events, which hold references to their world.
    pub(crate) fn end(&self) {
        self.drop_ended();
        loop {
            let (tasks, events) = {
                let mut state = self.state();
                state.stopped.clear();
                (std::mem::take(&mut state.tasks), std::mem::take(&mut state.events))
            };
            let ready = std::mem::take(&mut *lock(&self.0.ready));
            if tasks.is_empty() && events.is_empty() && ready.queue.is_empty() && ready.woken.is_empty() {
                return;
            }
            for task in tasks.into_values() {
                let future = lock(&task.future).take();
                drop(future);
            }
        }
    }

    /// Appends the woken tasks to the queue, in an order that is independent of the order of wakers.
    fn take_woken(&self) {
        let mut ready = lock(&self.0.ready);
        let ready = &mut *ready;
        ready.woken.sort_unstable_by_key(|task| task.number);
        ready.queue.extend(ready.woken.drain(..));
    }

    fn next_ready(&self) -> Option<Arc<Task>> {
        lock(&self.0.ready).queue.pop_front()
    }

    fn poll(&self, task: Arc<Task>) {
        if let Some(owner) = task.owner
            && let Some(waiting) = self.state().stopped.get_mut(&owner)
        {
            waiting.push(task);
            return;
        }
        task.queued.store(false, Ordering::Relaxed);
        let Some(mut future) = lock(&task.future).take() else { return };
        let waker = Waker::from(task.clone());
        let ended = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        if ended {
            drop(future);
            self.state().tasks.remove(&task.number);
        } else if self.state().tasks.contains_key(&task.number) {
            *lock(&task.future) = Some(future);
        } else {
            // The task killed its own node.
            drop(future);
        }
    }

    /// Advances the clock to the next event and executes it.
    fn fire_next(&self, limit_ns: u64) -> Fired {
        loop {
            let event = {
                let mut state = self.state();
                let Some(next) = state.events.peek() else { return Fired::Nothing };
                if next.at_ns > limit_ns {
                    self.0.now_ns.fetch_max(limit_ns, Ordering::Relaxed);
                    return Fired::TooLate;
                }
                let Some(event) = state.events.pop() else { return Fired::Nothing };
                if let Action::Wake(timer) = &event.action
                    && timer.cancelled.load(Ordering::Relaxed)
                {
                    state.cancelled -= 1;
                    continue;
                }
                event
            };
            self.0.now_ns.fetch_max(event.at_ns, Ordering::Relaxed);
            match event.action {
                Action::Call(call) => call(),
                Action::Wake(timer) => timer.fire(),
            }
            return Fired::Event;
        }
    }

    fn push_event(&self, at_ns: u64, action: Action) {
        self.0.push_event(at_ns, action);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor").field("now", &self.now()).finish_non_exhaustive()
    }
}

impl Core {
    fn push_event(&self, at_ns: u64, action: Action) {
        let mut state = lock(&self.state);
        let number = state.next_event;
        state.next_event += 1;
        state.events.push(Event { at_ns, number, action });
    }

    /// Notes that a timer was dropped, and removes dropped timers when there are many.
    fn cancel(&self) {
        let mut state = lock(&self.state);
        state.cancelled += 1;
        if state.cancelled > CANCELLED_MAX && state.cancelled > state.events.len() / 2 {
            state.events.retain(|event| match &event.action {
                Action::Wake(timer) => !timer.cancelled.load(Ordering::Relaxed),
                Action::Call(_) => true,
            });
            state.cancelled = 0;
        }
    }
}

enum Fired {
    Event,
    Nothing,
    TooLate,
}

struct Timer {
    fired: AtomicBool,
    cancelled: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Timer {
    fn fire(&self) {
        self.fired.store(true, Ordering::Relaxed);
        let waker = lock(&self.waker).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A future that waits for a moment of virtual time.
pub(crate) struct Sleep {
    core: Weak<Core>,
    at_ns: u64,
    timer: Option<Arc<Timer>>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(timer) = &self.timer {
            if timer.fired.load(Ordering::Relaxed) {
                return Poll::Ready(());
            }
            *lock(&timer.waker) = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let Some(core) = self.core.upgrade() else { return Poll::Pending };
        if core.now_ns.load(Ordering::Relaxed) >= self.at_ns {
            return Poll::Ready(());
        }
        let timer = Arc::new(Timer {
            fired: AtomicBool::new(false),
            cancelled: AtomicBool::new(false),
            waker: Mutex::new(Some(cx.waker().clone())),
        });
        core.push_event(self.at_ns, Action::Wake(timer.clone()));
        self.timer = Some(timer);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let (Some(timer), Some(core)) = (&self.timer, self.core.upgrade())
            && !timer.fired.load(Ordering::Relaxed)
        {
            timer.cancelled.store(true, Ordering::Relaxed);
            core.cancel();
        }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Polls at one moment after which the executor reports a livelock.
const POLLS_MAX: u64 = 50_000_000;
/// Number of dropped timers that are always tolerated.
const CANCELLED_MAX: usize = 1024;
