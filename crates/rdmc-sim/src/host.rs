//! Hosts: when software acts, and its costs.
//!
//! A node's software has one thread for each of its completion queues: one for a runtime. A thread posts operations and
//! takes completions one by one. When it takes one depends on its kind of waiting (DSN §4.2) and on the scheduler.

use crate::model::{DelayModel, Distribution, HostModel, WaitMode};
use crate::random::Random;

/// The software of one node.
#[derive(Debug, Default)]
pub(crate) struct Host {
    threads: Vec<Thread>,
    slowness: u64,
}

impl Host {
    /// Adds a thread, for a new completion queue; returns its number.
    pub(crate) fn add_thread(&mut self) -> usize {
        self.threads.push(Thread { slowness: self.slowness, ..Thread::default() });
        self.threads.len() - 1
    }

    /// Returns a thread.
    ///
    /// # Panics
    /// If it was not added.
    pub(crate) fn thread(&mut self, number: usize) -> &mut Thread {
        &mut self.threads[number]
    }

    /// Returns the first thread, and adds it if there is none.
    pub(crate) fn first_thread(&mut self) -> &mut Thread {
        if self.threads.is_empty() {
            self.add_thread();
        }
        self.thread(0)
    }

    /// Takes the cores away for a while.
    pub(crate) fn hold_up(&mut self, at_ns: u64, duration_ns: u64) {
        self.threads.iter_mut().for_each(|thread| thread.hold_up(at_ns, duration_ns));
    }

    pub(crate) fn slow_down(&mut self, times: u64) {
        self.slowness = times;
        self.threads.iter_mut().for_each(|thread| thread.slowness = times);
    }

    /// Returns the processor time of the first `elapsed_ns` of the simulation.
    pub(crate) fn cpu_ns(&self, mode: WaitMode, elapsed_ns: u64) -> u64 {
        self.threads.iter().map(|thread| thread.cpu_ns(mode, elapsed_ns)).sum()
    }
}

/// One thread of a node's software.
#[derive(Debug, Default)]
pub(crate) struct Thread {
    /// When the thread has finished its work.
    free_at_ns: u64,
    /// When a thread with hybrid waiting stops polling.
    polls_until_ns: u64,
    /// Processor time without waiting.
    worked_ns: u64,
    /// Processor time of hybrid waiting, work included.
    polled_ns: u64,
    /// Factor of all times; 0 means 1.
    slowness: u64,
}

impl Thread {
    /// Posts an operation; returns when the adapter gets it.
    pub(crate) fn post(&mut self, now_ns: u64, model: &HostModel) -> u64 {
        self.work(now_ns, model.post_ns)
    }

    /// Takes a completion that the adapter reports `at_ns`; returns when the software acts on it.
    pub(crate) fn take_completion(
        &mut self,
        at_ns: u64,
        mode: WaitMode,
        model: &HostModel,
        random: &mut Random,
    ) -> u64 {
        let asleep = at_ns > self.free_at_ns;
        let sleeps = match mode {
            WaitMode::Poll => false,
            WaitMode::Event => asleep,
            WaitMode::Hybrid => asleep && at_ns > self.polls_until_ns,
        };
        let mut from_ns = at_ns;
        if sleeps {
            from_ns += model.wake_ns * self.slowness.max(1);
            self.worked_ns += model.wake_cpu_ns * self.slowness.max(1);
        }
        if let Some(delays) = model.delays.as_ref().filter(|delays| random.chance(delays.probability)) {
            self.hold_up(from_ns, draw(delays, random));
        }
        let acts_at_ns = self.work(from_ns, model.completion_ns);
        if mode == WaitMode::Hybrid {
            let until_ns = acts_at_ns + HYBRID_WINDOW_NS;
            self.polled_ns += until_ns - self.polls_until_ns.max(from_ns).min(until_ns);
            self.polls_until_ns = until_ns;
        }
        acts_at_ns
    }

    /// Takes the core away for a while.
    fn hold_up(&mut self, at_ns: u64, duration_ns: u64) {
        self.free_at_ns = self.free_at_ns.max(at_ns).saturating_add(duration_ns);
    }

    fn cpu_ns(&self, mode: WaitMode, elapsed_ns: u64) -> u64 {
        match mode {
            WaitMode::Poll => elapsed_ns,
            WaitMode::Event => self.worked_ns,
            WaitMode::Hybrid => {
                let ahead_ns = self.polls_until_ns.saturating_sub(elapsed_ns);
                (self.polled_ns.saturating_sub(ahead_ns)).max(self.worked_ns)
            }
        }
    }

    fn work(&mut self, from_ns: u64, cost_ns: u64) -> u64 {
        let cost_ns = cost_ns * self.slowness.max(1);
        self.worked_ns += cost_ns;
        self.free_at_ns = self.free_at_ns.max(from_ns) + cost_ns;
        self.free_at_ns
    }
}

fn draw(delays: &DelayModel, random: &mut Random) -> u64 {
    let ns = match delays.distribution {
        Distribution::Fixed => delays.mean_ns,
        Distribution::Exponential => random.exponential(delays.mean_ns),
        Distribution::Lognormal => random.lognormal(delays.mean_ns / 2.0, delays.mean_ns),
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a float that does not fit saturates")]
    let ns = ns as u64;
    ns
}

/// Duration of polling after the last completion with hybrid waiting, in ns: the paper's 50 ms.
const HYBRID_WINDOW_NS: u64 = 50_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: HostModel = HostModel {
        post_ns: 10,
        completion_ns: 20,
        wake_ns: 1000,
        wake_cpu_ns: 500,
        completion: WaitMode::Poll,
        delays: None,
    };

    #[test]
    fn a_sleeping_thread_is_woken_and_a_busy_one_goes_on() {
        let (mut host, mut random) = (Thread::default(), Random::new(0));
        let mut take = |host: &mut Thread, at, mode| host.take_completion(at, mode, &MODEL, &mut random);
        assert_eq!(take(&mut host, 100, WaitMode::Event), 1120);
        assert_eq!(take(&mut host, 1110, WaitMode::Event), 1140, "still awake");
        assert_eq!(host.post(1140, &MODEL), 1150);
        assert_eq!(take(&mut host, 5000, WaitMode::Event), 6020);
        assert_eq!(host.cpu_ns(WaitMode::Event, 10_000), 2 * 500 + 3 * 20 + 10);
        assert_eq!(take(&mut host, 10_000, WaitMode::Poll), 10_020);
    }

    #[test]
    fn the_hybrid_polls_for_a_while() {
        let (mut host, mut random) = (Thread::default(), Random::new(0));
        let mut take = |host: &mut Thread, at| host.take_completion(at, WaitMode::Hybrid, &MODEL, &mut random);
        assert_eq!(take(&mut host, 100), 1120);
        assert_eq!(take(&mut host, 40_000_000), 40_000_020, "within the window");
        assert_eq!(take(&mut host, 200_000_000), 200_001_020, "asleep again");
        let polled = 40_000_020 + HYBRID_WINDOW_NS - 1100 + HYBRID_WINDOW_NS + 20;
        assert_eq!(host.cpu_ns(WaitMode::Hybrid, 1_000_000_000), polled);
    }
}
