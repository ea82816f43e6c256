//! The benchmark: measures every configuration, and prints the results.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Context;
use rdmc_files::FabricSelection;
use rdmc_files::fabric::usable_devices;
use rdmc_files::size::ByteSize;
use serde::Serialize;

use crate::cluster::Members;
use crate::error::{BenchError, taken_over};
use crate::explain::{self, Explanation};
use crate::limits::{Floor, Limits};
use crate::local::{Program, cores, require_members_memory};
use crate::measured::{Attribution, CaseResult, Samples};
use crate::mpi::{self, Block, Compiled};
use crate::options::{BenchOptions, Delivery, PACKED_MAX, WINDOW, is_short};
use crate::output::{Output, OutputFormat};
use crate::picture;
use crate::plan::Case;
use crate::report::{self, Table};

/// A benchmark that is ready to run.
#[derive(Debug)]
pub struct Bench {
    options: BenchOptions,
    program: Program,
    cases: Vec<Case>,
    rivals: Vec<Compiled>,
    /// The limits that are already measured.
    limits: Vec<Limits>,
}

/// The results of a benchmark.
#[derive(Debug)]
pub struct Results(Vec<(Case, CaseResult)>);

impl Results {
    /// Draws time and rate over the size as SVG.
    pub fn picture(&self) -> String {
        picture::draw(&self.0).to_svg()
    }
}

impl Bench {
    /// Checks the options, and compiles the program for the MPIs. `program` starts the processes, whose arguments tell
    /// them their [role](crate::ProcessRole).
    ///
    /// # Errors
    /// [`BenchError::Request`]: options contradict each other, or require what this host does not have.
    pub fn prepare(options: BenchOptions, program: Program) -> Result<Self, BenchError> {
        Ok(Self::prepared(options, program)?)
    }

    fn prepared(options: BenchOptions, program: Program) -> anyhow::Result<Self> {
        let cases = Case::all(&options)?;
        if options.fabrics.contains(&FabricSelection::Verbs) {
            // Fails with what is missing.
            usable_devices(options.device.as_deref()).map_err(taken_over)?;
        }
        require_members_memory(cases.iter().map(Case::memory).max().unwrap_or(0))?;
        for contestant in &options.vs {
            cases.iter().try_for_each(|case| mpi::check(*contestant, case))?;
        }
        let rivals = options.vs.iter().map(|contestant| Compiled::new(*contestant, &program));
        let rivals = rivals.collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self { options, program, cases, rivals, limits: Vec::new() })
    }

    /// Returns the number of configurations.
    pub fn configurations(&self) -> u64 {
        self.cases.len() as u64
    }

    /// Measures every configuration, and prints each result at once.
    ///
    /// # Cancel safety
    /// The processes are killed.
    ///
    /// # Errors
    /// [`BenchError::Integrity`] if wrong content arrived; [`BenchError::Failed`] if a process failed.
    pub async fn run(mut self, format: OutputFormat, output: &dyn Output) -> Result<Results, BenchError> {
        Ok(self.measure_all(format, output).await?)
    }

    async fn measure_all(&mut self, format: OutputFormat, output: &dyn Output) -> anyhow::Result<Results> {
        let cases = std::mem::take(&mut self.cases);
        let table = Table::new(&cases, !self.options.vs.is_empty());
        let printer = Printer { output, format, table };
        let mut results = Vec::new();
        printer.begin(&self.options);
        for (done, case) in (0..).zip(&cases) {
            let label = format!("n = {}, {}", case.nodes, ByteSize(case.bytes));
            output.progress(&label, done);
            let (limits, new) = self.limits(case).await?;
            if new {
                printer.limits(&limits);
            }
            for measured in self.measure(case, &limits).await.with_context(|| label.clone())? {
                printer.result(case, &measured);
                results.push((case.clone(), measured));
            }
        }
        output.progress("", cases.len() as u64);
        printer.end(&self.limits, &results);
        if self.options.explain {
            printer.explain(&Explanation::all(&results)?);
        }
        Ok(Results(results))
    }

    /// Returns the machine's limits for a configuration, and whether they were measured just now.
    async fn limits(&mut self, case: &Case) -> anyhow::Result<(Limits, bool)> {
        let (nodes, bytes) = (case.nodes, Limits::length_for(case.bytes));
        if let Some(known) = self.limits.iter().find(|limits| (limits.nodes, limits.bytes) == (nodes, bytes)) {
            return Ok((known.clone(), false));
        }
        let program = self.program.clone();
        // In another thread, so that this task can be cancelled meanwhile.
        let limits = tokio::task::spawn_blocking(move || Limits::measure(&program, nodes, bytes)).await?;
        let limits = limits.context("the machine's limits")?;
        self.limits.push(limits.clone());
        Ok((limits, true))
    }

    /// Returns how many multicasts are in flight when messages per second are counted; `None` if messages are packed.
    fn window(&self, case: &Case) -> Option<u32> {
        // Objects cannot be packed. Longer messages lose more by the copy than they gain.
        let is_packed = case.delivery == Delivery::Private && case.bytes <= PACKED_MAX;
        self.options.window.or((!is_packed).then_some(WINDOW))
    }

    /// Measures one configuration, in turn with each MPI.
    async fn measure(&self, case: &Case, limits: &Limits) -> anyhow::Result<Vec<CaseResult>> {
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
            // Each block has as many rounds; the first blocks have the rest.
            let rounds = self.options.rounds.map(|rounds| rounds / blocks + u32::from(block < rounds % blocks));
            if rounds == Some(0) {
                break;
            }
            let mut members = Members::start(&self.program, case, self.options.device.as_deref()).await?;
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
        let own =
            CaseResult::of(case, Attribution::rdmc(&fabric), &own, limits, None).context("nothing was measured")?;
        let rivals = self.rivals.iter().zip(&others);
        let others =
            rivals.filter_map(|(rival, theirs)| CaseResult::of(case, rival.by(&fabric), theirs, limits, Some(&own)));
        let others: Vec<CaseResult> = others.collect();
        Ok(std::iter::once(own).chain(others).collect())
    }

    /// Measures one block of rounds and bursts. Finds the number of messages of a burst, unless it is known.
    async fn own_block(
        &self,
        case: &Case,
        members: &mut Members,
        (rounds, blocks): (Option<u32>, u32),
        messages: &mut Option<u64>,
        floor: &mut Option<Floor>,
    ) -> anyhow::Result<Samples> {
        for _ in 0..self.options.warm_up {
            members.rounds(1).await?;
        }
        let (least, most) = match rounds {
            Some(rounds) => (rounds, rounds),
            None => (ROUNDS_MIN.div_ceil(blocks), ROUNDS_MAX / blocks),
        };
        let limit = ROUNDS_LIMIT / blocks;
        let begun = Instant::now();
        let mut samples = Samples::default();
        let at_once = case.rounds_at_once();
        loop {
            let done = u32::try_from(samples.rounds.len()).unwrap_or(u32::MAX);
            if done >= most || done >= least && begun.elapsed() >= limit {
                break;
            }
            samples.rounds.extend(members.rounds(u64::from(at_once.min(most - done))).await?);
            if let Some(measured) = floor.take() {
                *floor = Some(tokio::task::spawn_blocking(|| measured.measure()).await?);
            }
        }
        if is_short(case.bytes) {
            let window = self.window(case);
            let count = match *messages {
                Some(known) => known,
                None => *messages.insert(full_burst(members, window).await?),
            };
            // Not counted, because it first takes memory for so many messages.
            members.burst(count, window).await?;
            for _ in 0..BURSTS.div_ceil(blocks) {
                samples.bursts.push(members.burst(count, window).await?);
            }
        }
        Ok(samples)
    }
}

/// Finds a number of messages that takes long enough to be counted per second.
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

/// Returns the first number of messages to try in a burst.
fn burst_min(window: Option<u32>) -> u64 {
    4 * u64::from(window.unwrap_or(64))
}

/// Prints results in the chosen form.
struct Printer<'a> {
    output: &'a dyn Output,
    format: OutputFormat,
    table: Table,
}

/// The machine and the settings as programs read them.
#[derive(Serialize)]
#[serde(tag = "event", rename = "setting")]
struct MachineSetting {
    cores: usize,
    processor: Option<String>,
    window: Option<u32>,
    warm_up: u32,
}

impl Printer<'_> {
    fn begin(&self, options: &BenchOptions) {
        let BenchOptions { window, warm_up, .. } = *options;
        match self.format {
            OutputFormat::Json => {
                self.json(&MachineSetting { cores: cores(), processor: processor(), window, warm_up })
            }
            OutputFormat::Csv => self.output.print(&report::csv_head()),
            OutputFormat::Table => self.output.print(&self.table.head(window, cores() as u64)),
        }
    }

    fn limits(&self, limits: &Limits) {
        if self.format == OutputFormat::Json {
            self.json(limits);
        }
    }

    fn result(&self, case: &Case, measured: &CaseResult) {
        match self.format {
            OutputFormat::Json => self.json(measured),
            OutputFormat::Csv => self.output.print(&report::csv_row(measured)),
            OutputFormat::Table => self.output.print(&self.table.row(case, measured)),
        }
    }

    fn explain(&self, explanations: &[Explanation]) {
        match self.format {
            OutputFormat::Json => explanations.iter().for_each(|explanation| self.json(explanation)),
            OutputFormat::Csv | OutputFormat::Table => {
                self.output.print(&format!("\n{}", explain::table(explanations).trim_end()));
            }
        }
    }

    /// Prints the tables below the results.
    fn end(&self, limits: &[Limits], results: &[(Case, CaseResult)]) {
        if self.format != OutputFormat::Table {
            return;
        }
        self.output.print(&format!("\n{}", report::limits_table(limits).trim_end()));
        let setups = results.iter().filter_map(|(_, measured)| {
            let setup = measured.setup.as_ref()?;
            Some(format!("{}:{} is {setup}", measured.by, measured.transport))
        });
        // Prints each setup once.
        for setup in setups.collect::<BTreeSet<_>>() {
            self.output.print(&setup);
        }
    }

    fn json(&self, value: &impl Serialize) {
        self.output.print(&serde_json::to_string(value).expect("results have string keys"));
    }
}

/// Returns the name of the processor, if the system tells it.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(name.trim_start_matches([' ', '\t', ':']).to_owned())
}

/// Number of blocks in which rounds of rdmc and of an MPI alternate.
const BLOCKS: u32 = 4;
/// Bounds of the number of rounds, unless it is given.
const ROUNDS_MIN: u32 = 5;
const ROUNDS_MAX: u32 = 1000;
/// How long the rounds may take together, verification included, once there are enough.
const ROUNDS_LIMIT: Duration = Duration::from_millis(1500);
/// Number of measured bursts.
const BURSTS: u32 = 3;
/// How long a burst should take.
const BURST_MIN: Duration = Duration::from_millis(150);
/// Greatest number of messages of a burst.
const BURST_MESSAGES_MAX: u64 = 1 << 22;
