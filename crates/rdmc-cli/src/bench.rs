//! `rdmc bench`: measures multicasts to processes of this host against what the host can do, and against MPI.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use crate::exit::Exit;
use crate::fabric::{FabricName, usable_devices};
use crate::local::{check_memory, cores};
use crate::progress::{Reporter, print_json};
use crate::size::Bytes;
use cluster::Members;
use explain::Explanation;
use limits::{Floor, Limits};
use measured::{By, Measured, Samples};
use mpi::{Block, Compiled};
use options::Delivery;
pub(crate) use options::{BenchNodeOptions, BenchOptions, Role};
use plan::Case;
use report::Table;

mod cluster;
mod copies;
mod explain;
pub(crate) mod guard;
pub(crate) mod limits;
mod measured;
mod mpi;
pub(crate) mod node;
mod options;
mod orders;
mod pattern;
mod picture;
mod plan;
mod report;
mod statistics;

/// Runs the benchmark.
pub(crate) async fn run(options: BenchOptions) -> anyhow::Result<()> {
    let cases = Case::all(&options)?;
    if options.fabric.contains(&FabricName::Verbs) {
        // Says what is missing.
        usable_devices(options.device.as_deref())?;
    }
    check_memory(cases.iter().map(Case::memory).max().unwrap_or(0))?;
    for contestant in &options.vs {
        cases.iter().try_for_each(|case| contestant.check(case))?;
    }
    let rivals = options.vs.iter().map(|contestant| Compiled::new(*contestant)).collect::<anyhow::Result<Vec<_>>>()?;
    // Before it takes long to find out that it cannot be written.
    if let Some(path) = &options.plot {
        std::fs::write(path, "").with_context(|| path.display().to_string()).context(Exit::Usage)?;
    }
    let printer = Printer::new(&options, &cases);
    let progress = printer.reporter.work_bar("", cases.len() as u64);
    let mut bench = Bench { options: &options, rivals, limits: Vec::new() };
    let mut results = Vec::new();
    printer.begin(&options);
    for (done, case) in cases.iter().enumerate() {
        let label = format!("n = {}, {}", case.nodes, Bytes(case.bytes));
        progress.label(&label);
        if !options.output.json {
            progress.set(done as u64);
        }
        let (limits, new) = bench.limits(case).await?;
        if new {
            printer.limits(&limits);
        }
        for measured in bench.measure(case, &limits).await.with_context(|| label.clone())? {
            printer.result(case, &measured);
            results.push((case.clone(), measured));
        }
    }
    drop(progress);
    printer.end(&bench.limits, &results);
    if options.explain {
        printer.explain(&Explanation::all(&results)?);
    }
    if let Some(path) = &options.plot {
        let picture = picture::draw(&results).to_svg();
        std::fs::write(path, picture).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// What the configurations have in common.
struct Bench<'a> {
    options: &'a BenchOptions,
    rivals: Vec<Compiled>,
    /// Those that were measured already.
    limits: Vec<Limits>,
}

impl Bench<'_> {
    /// Returns the machine's limits for a configuration, and whether they were measured just now.
    async fn limits(&mut self, case: &Case) -> anyhow::Result<(Limits, bool)> {
        let (nodes, bytes) = (case.nodes, Limits::length_for(case.bytes));
        if let Some(known) = self.limits.iter().find(|limits| (limits.nodes, limits.bytes) == (nodes, bytes)) {
            return Ok((known.clone(), false));
        }
        // Elsewhere, so that a signal is heeded meanwhile.
        let limits = tokio::task::spawn_blocking(move || Limits::measure(nodes, bytes)).await?;
        let limits = limits.context("the machine's limits")?;
        self.limits.push(limits.clone());
        Ok((limits, true))
    }

    /// Returns how many multicasts are in flight when messages per second are counted; none if messages are packed.
    fn window(&self, case: &Case) -> Option<u32> {
        // Objects cannot be packed, and longer messages lose more by the copy than they gain.
        let is_packed = case.delivery == Delivery::Private && case.bytes <= PACKED_MAX;
        self.options.window.or((!is_packed).then_some(WINDOW))
    }

    /// Measures one configuration: in turn with each MPI, if any is to be compared.
    async fn measure(&self, case: &Case, limits: &Limits) -> anyhow::Result<Vec<Measured>> {
        let blocks = if self.rivals.is_empty() { 1 } else { BLOCKS };
        let mut own = Samples::default();
        let mut others: Vec<Samples> = self.rivals.iter().map(|_| Samples::default()).collect();
        let mut fabric = String::new();
        let mut messages = None;
        let mut floor = if case.has_floor_in_turn() {
            let limits = limits.clone();
            Some(tokio::task::spawn_blocking(move || Floor::new(&limits)).await??)
        } else {
            None
        };
        for block in 0..blocks {
            // As many in each block, the rest in the first ones.
            let rounds = self.options.rounds.map(|rounds| rounds / blocks + u32::from(block < rounds % blocks));
            if rounds == Some(0) {
                break;
            }
            let mut members = Members::start(case, self.options.device.as_deref()).await?;
            fabric.clone_from(&members.fabric);
            let found = self.own_block(case, &mut members, (rounds, blocks), &mut messages, &mut floor).await?;
            members.end().await?;
            let work = Block {
                warm_up: self.options.warm_up,
                rounds: found.rounds.len(),
                messages: burst_min(self.window(case)),
                bursts: found.bursts.len(),
                burst_min: BURST_MIN,
            };
            own.extend(found);
            for (rival, samples) in self.rivals.iter().zip(&mut others) {
                samples.extend(rival.run(case, &fabric, work).await?);
            }
        }
        let copy_floor_in_turn_rate = floor.map(Floor::rate).transpose()?;
        let limits = &Limits { copy_floor_in_turn_rate, ..limits.clone() };
        let own = Measured::of(case, By::rdmc(&fabric), &own, limits, None).context("nothing was measured")?;
        let rivals = self.rivals.iter().zip(&others);
        let others =
            rivals.filter_map(|(rival, theirs)| Measured::of(case, rival.by(&fabric), theirs, limits, Some(&own)));
        let others: Vec<Measured> = others.collect();
        Ok(std::iter::once(own).chain(others).collect())
    }

    /// Lets the members work for their share of the time; finds out how many messages fill a burst, unless that is known.
    async fn own_block(
        &self,
        case: &Case,
        members: &mut Members,
        (rounds, blocks): (Option<u32>, u32),
        messages: &mut Option<u64>,
        floor: &mut Option<Floor>,
    ) -> anyhow::Result<Samples> {
        for _ in 0..self.options.warm_up {
            members.round().await?;
        }
        let (least, most) = match rounds {
            Some(rounds) => (rounds, rounds),
            None => (ROUNDS_MIN.div_ceil(blocks), ROUNDS_MAX / blocks),
        };
        let limit = ROUNDS_LIMIT / blocks;
        let begun = Instant::now();
        let mut samples = Samples::default();
        for done in 0..most {
            if done >= least && begun.elapsed() >= limit {
                break;
            }
            samples.rounds.push(members.round().await?);
            if let Some(measured) = floor.take() {
                *floor = Some(tokio::task::spawn_blocking(|| measured.measure()).await?);
            }
        }
        if options::is_short(case.bytes) {
            let window = self.window(case);
            let count = match *messages {
                Some(known) => known,
                None => *messages.insert(full_burst(members, window).await?),
            };
            // Not counted: memory for as many messages at once has to be taken first.
            members.burst(count, window).await?;
            for _ in 0..BURSTS.div_ceil(blocks) {
                samples.bursts.push(members.burst(count, window).await?);
            }
        }
        Ok(samples)
    }
}

/// Finds how many messages take long enough to be counted per second.
async fn full_burst(members: &mut Members, window: Option<u32>) -> anyhow::Result<u64> {
    let mut messages = burst_min(window);
    loop {
        let took = members.burst(messages, window).await?.seconds;
        if took >= BURST_MIN.as_secs_f64() || messages >= BURST_MESSAGES_MAX {
            return Ok(messages);
        }
        messages *= 2;
    }
}

/// Returns with how many messages a burst is tried first.
fn burst_min(window: Option<u32>) -> u64 {
    4 * u64::from(window.unwrap_or(64))
}

/// Tells what is measured.
struct Printer {
    reporter: Reporter,
    table: Table,
    csv: bool,
}

/// The circumstances, as programs read them.
#[derive(Serialize)]
#[serde(tag = "event", rename = "setting")]
struct Setting {
    cores: usize,
    processor: Option<String>,
    window: Option<u32>,
    warm_up: u32,
}

impl Printer {
    fn new(options: &BenchOptions, cases: &[Case]) -> Self {
        let table = Table::new(cases, !options.vs.is_empty());
        Self { reporter: Reporter::new(options.output), table, csv: options.csv }
    }

    fn begin(&self, options: &BenchOptions) {
        let BenchOptions { window, warm_up, .. } = *options;
        if self.reporter.is_json() {
            print_json(&Setting { cores: cores(), processor: processor(), window, warm_up });
        } else if self.csv {
            self.reporter.print(&report::csv_head());
        } else {
            self.reporter.print(&self.table.head(window, cores() as u64));
        }
    }

    fn limits(&self, limits: &Limits) {
        if self.reporter.is_json() {
            print_json(limits);
        }
    }

    fn result(&self, case: &Case, measured: &Measured) {
        if self.reporter.is_json() {
            print_json(measured);
        } else if self.csv {
            self.reporter.print(&report::csv_row(measured));
        } else {
            self.reporter.print(&self.table.row(case, measured));
        }
    }

    fn explain(&self, explanations: &[Explanation]) {
        if self.reporter.is_json() {
            explanations.iter().for_each(print_json);
        } else {
            self.reporter.print(&format!("\n{}", explain::table(explanations).trim_end()));
        }
    }

    fn end(&self, limits: &[Limits], results: &[(Case, Measured)]) {
        if self.csv {
            return;
        }
        self.reporter.print(&format!("\n{}", report::limits_table(limits).trim_end()));
        let setups = results.iter().filter_map(|(_, measured)| {
            let setup = measured.setup.as_ref()?;
            Some(format!("{}:{} is {setup}", measured.by, measured.transport))
        });
        // Each once.
        for setup in setups.collect::<BTreeSet<_>>() {
            self.reporter.print(&setup);
        }
    }
}

/// Returns the name of the processor, if the system tells it.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(name.trim_start_matches([' ', '\t', ':']).to_owned())
}

/// Turns in which rounds of rdmc and of an MPI alternate.
const BLOCKS: u32 = 4;
/// Rounds that are measured unless their number is given.
const ROUNDS_MIN: u32 = 5;
const ROUNDS_MAX: u32 = 1000;
/// How long they may take together if there are enough, verification included.
const ROUNDS_LIMIT: Duration = Duration::from_millis(1500);
/// Longest message that is packed when messages per second are counted, in bytes.
const PACKED_MAX: u64 = 4 << 10;
/// Multicasts in flight where messages are not packed, unless it is said how many.
const WINDOW: u32 = 64;
/// Bursts that are measured.
const BURSTS: u32 = 3;
/// How long a burst should take.
const BURST_MIN: Duration = Duration::from_millis(150);
/// Messages of a burst, at most.
const BURST_MESSAGES_MAX: u64 = 1 << 22;
