//! Tests in which flows pass two gateways, while the path between these is cut and held up, gateways are paused, killed
//! and started again, and programs and targets reset flows and stall.
//!
//! The gateways are processes. `integration-tests/rounds` plays many rounds.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::cluster::free_addresses;
use crate::fleet::{Campaign, Draw};
use crate::gateway::Gateway;
use crate::program::signal;

mod end;
mod path;

use end::{NUMBER_LEN, Order, Plan, Seen, Targets};
use path::Path;

#[test]
fn flows_arrive_exactly_or_fail_at_both_ends_whatever_comes_to_harm() {
    let (whole, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    Campaign::of("RDMC_FLOW_ROUNDS", ROUNDS).play(LANES, |_, seed| {
        let round = Round::draw(seed);
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let (programs, targets) = runtime.block_on(round.play());
        let count = programs.iter().filter(|seen| seen.is_whole()).count() as u64;
        whole.fetch_add(count, Ordering::Relaxed);
        failed.fetch_add(programs.len() as u64 - count, Ordering::Relaxed);
        round.judge(&programs, &targets).map_err(|what| format!("{round:#?}\n{what}"))?;
        Ok(format!("{:?}", round.victims))
    });
    let (whole, failed) = (whole.into_inner(), failed.into_inner());
    let line = format!("{whole} flows were whole, {failed} failed\n");
    // Past the harness's capture, as the line of the campaign.
    let _ = std::io::stdout().write_all(line.as_bytes());
    assert!(whole > 0, "nothing was judged");
}

/// A round: flows, and what happens meanwhile.
#[derive(Debug)]
struct Round {
    plans: Arc<Vec<Plan>>,
    /// The gateways that are killed and started again.
    victims: Vec<Which>,
    events: Vec<(Duration, Event)>,
    /// Whether the exit ends before it has given up the session of a killed entrance.
    is_short: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Entrance,
    Exit,
}

#[derive(Clone, Copy, Debug)]
enum Event {
    /// All connections of the path are lost.
    Cut,
    /// None is made any more.
    Close,
    Open,
    /// Bytes wait on the path.
    Hold,
    Release,
    Stop(Which),
    Continue(Which),
    Kill(Which),
    Start(Which),
}

impl Round {
    fn draw(seed: u64) -> Self {
        let mut draw = Draw(seed);
        let count = if draw.below(4) == 0 { 1 } else { 1 + draw.below(FLOWS_MAX) };
        let plans = (0..count).map(|number| Plan::draw(&mut draw, number, BYTES_MAX / count, SPAN)).collect();
        // Consecutive seeds play one kind after the other.
        let victims = match seed % 4 {
            0 => vec![],
            1 => vec![Which::Exit],
            2 => vec![Which::Entrance],
            _ => vec![Which::Exit, Which::Entrance],
        };
        let mut events = Vec::new();
        for _ in 0..1 + draw.below(4) {
            let mut at = |span: Duration| span.mul_f64(draw.fraction());
            let (time, pause) = (at(SPAN), at(PAUSE_MAX));
            let which = if draw.below(2) == 0 { Which::Entrance } else { Which::Exit };
            events.extend(match draw.below(4) {
                0 => vec![(time, Event::Cut)],
                1 => vec![(time, Event::Close), (time, Event::Cut), (time + pause, Event::Open)],
                2 => vec![(time, Event::Hold), (time + pause, Event::Release)],
                _ => vec![(time, Event::Stop(which)), (time + pause, Event::Continue(which))],
            });
        }
        for &victim in &victims {
            let (time, pause) = (SPAN.mul_f64(draw.fraction()), PAUSE_MAX.mul_f64(draw.fraction()));
            events.extend([(time, Event::Kill(victim)), (time + pause, Event::Start(victim))]);
        }
        events.sort_by_key(|(time, _)| *time);
        // The last of several pauses ends them all.
        let end = events.last().expect("something happens").0;
        events.extend([(end, Event::Open), (end, Event::Release)]);
        Self { plans: Arc::new(plans), victims, events, is_short: draw.below(16) > 0 }
    }

    /// Plays the round, and returns what the programs and the targets have seen.
    async fn play(&self) -> (Vec<Seen>, Targets) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = listener.local_addr().unwrap().to_string();
        let targets = Targets::default();
        tokio::spawn(targets.clone().serve(listener, self.plans.clone()));
        let mut gateways = Gateways::start(target).await;
        let mut programs = JoinSet::new();
        for (index, plan) in self.plans.iter().cloned().enumerate() {
            let entrance = gateways.addresses[Which::Entrance as usize].clone();
            programs.spawn(async move { (index, plan.play_program(&entrance).await) });
        }
        let begun = Instant::now();
        for (time, event) in &self.events {
            tokio::time::sleep(time.saturating_sub(begun.elapsed())).await;
            gateways.play(*event);
        }
        let seen = async {
            let mut seen = vec![Seen::default(); self.plans.len()];
            while let Some(ended) = programs.join_next().await {
                let (index, one) = ended.unwrap();
                seen[index] = one;
            }
            seen
        };
        let seen = tokio::time::timeout(WATCHDOG, seen).await.expect("every program ends");
        tokio::time::timeout(WATCHDOG, self.probe(&gateways)).await.expect("the gateways work again");
        if self.victims.contains(&Which::Entrance) && self.is_short {
            signal(&gateways.running[Which::Exit as usize].as_ref().expect("it was started").child, "INT");
        }
        let begun = Instant::now();
        while !targets.have_ended() {
            assert!(begun.elapsed() < WATCHDOG, "a target does not end: {self:?}");
            tokio::time::sleep(POLL).await;
        }
        (seen, targets)
    }

    /// Waits until a flow passes.
    async fn probe(&self, gateways: &Gateways) {
        for number in self.plans.len() as u64.. {
            let probe = Plan::probe(number);
            let seen = probe.play_program(&gateways.addresses[Which::Entrance as usize]).await;
            if seen.is_whole() {
                return;
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Judges what the ends have seen.
    ///
    /// # Errors
    /// The property that does not hold.
    fn judge(&self, programs: &[Seen], targets: &Targets) -> Result<(), String> {
        if !targets.twice().is_empty() {
            return Err(format!("flows came twice: {:?}", targets.twice()));
        }
        for (plan, program) in self.plans.iter().zip(programs) {
            let target = targets.seen(plan.number);
            judge_flow(plan, program, target.as_ref(), self.victims.is_empty())
                .map_err(|what| format!("flow {}: {what}\nprogram: {program:?}\ntarget: {target:?}", plan.number))?;
        }
        Ok(())
    }
}

/// Judges a flow; `is_safe` if no gateway was killed.
fn judge_flow(plan: &Plan, program: &Seen, target: Option<&Seen>, is_safe: bool) -> Result<(), &'static str> {
    let none = Seen::default();
    let target = target.unwrap_or(&none);
    let program_has_all = program.came == plan.lens[1];
    let target_has_all = target.came == plan.lens[0] + NUMBER_LEN;
    for (holds, what) in [
        (program.wrong.is_none() && target.wrong.is_none(), "bytes differ"),
        (program.shut || !target.has_end, "the target saw an end that the program did not give"),
        (target.shut || !program.has_end, "the program saw an end that the target did not give"),
        (!program.is_whole() || program_has_all && target_has_all, "only the program ended in good order"),
        // A target that answers hears nothing of its answer.
        (
            !target.is_whole() || plan.order == Order::Answer || program_has_all && target_has_all,
            "only the target ended in good order",
        ),
        (!is_safe || plan.is_reset() || program.is_whole() && target.is_whole(), "it failed without a reason"),
    ] {
        if !holds {
            return Err(what);
        }
    }
    Ok(())
}

/// Both gateways, and the path between them.
struct Gateways {
    path: Path,
    target: String,
    addresses: Vec<String>,
    /// The gateways that run.
    running: [Option<Gateway>; 2],
}

impl Gateways {
    async fn start(target: String) -> Self {
        let addresses = free_addresses(2);
        let path = Path::to(addresses[Which::Exit as usize].clone()).await;
        let mut gateways = Self { path, target, addresses, running: [None, None] };
        gateways.play(Event::Start(Which::Exit));
        gateways.play(Event::Start(Which::Entrance));
        gateways.running[Which::Entrance as usize].as_mut().expect("it was started").event("connected");
        gateways
    }

    fn play(&mut self, event: Event) {
        match event {
            Event::Cut => self.path.cut(),
            Event::Close => self.path.close(true),
            Event::Open => self.path.close(false),
            Event::Hold => self.path.stall(true),
            Event::Release => self.path.stall(false),
            Event::Stop(which) => self.signal(which, "STOP"),
            Event::Continue(which) => self.signal(which, "CONT"),
            Event::Kill(which) => drop(self.running[which as usize].take()),
            Event::Start(which) => {
                let address = &self.addresses[which as usize];
                let ends = match which {
                    Which::Exit => vec!["--serve", address, "--allow", "127.0.0.1"],
                    Which::Entrance => vec!["--listen", address, "--peer", &self.path.address, "--to", &self.target],
                };
                self.running[which as usize] = Some(Gateway::start(&[&ends[..], &OPTIONS].concat()));
            }
        }
    }

    fn signal(&self, which: Which, name: &str) {
        if let Some(gateway) = &self.running[which as usize] {
            signal(&gateway.child, name);
        }
    }
}

/// The flows of a round last about as long as things happen.
const OPTIONS: [&str; 4] = ["--ring", "4M", "--rate", "80M"];
/// Rounds in a run of the test suite: one of each kind.
const ROUNDS: u64 = 4;
/// Rounds at a time in a long campaign.
const LANES: usize = 4;
const FLOWS_MAX: u64 = 64;
/// Most bytes of all flows of a round in each direction.
const BYTES_MAX: u64 = 8 << 20;
/// Until when things happen.
const SPAN: Duration = Duration::from_millis(500);
/// Longest pause, which no connection takes for the end of the other gateway.
const PAUSE_MAX: Duration = Duration::from_millis(400);
const POLL: Duration = Duration::from_millis(5);
/// More than the minute after which a session is given up.
const WATCHDOG: Duration = Duration::from_secs(180);
