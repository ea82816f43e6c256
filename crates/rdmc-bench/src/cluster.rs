//! The members' processes at the benchmark.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use tokio::io::{AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::error::Kind;
use crate::local::{Program, seconds};
use crate::measured::{Burst, Round};
use crate::orders::{Acknowledgement, Order, Pace, Work};
use crate::plan::Case;
use crate::process::{MemberRole, ProcessRole};

/// The members of one configuration, in their groups.
pub(crate) struct Members {
    processes: Vec<Process>,
    /// Name of the fabric.
    pub(crate) fabric: String,
    groups: u64,
    senders: usize,
    next_seed: u64,
}

impl Members {
    /// Starts a process for each member, which then form their groups.
    pub(crate) async fn start(program: &Program, case: &Case, device: Option<&str>) -> anyhow::Result<Self> {
        let mut processes = Vec::new();
        for place in 0..rdmc::Rank(case.nodes).index() {
            processes.push(Process::start(program, place, case, device)?);
        }
        let mut addresses = Vec::new();
        for process in &mut processes[1..] {
            match process.answer().await? {
                Acknowledgement::Listening { address } => addresses.push(address),
                other => bail!("member {} began with {other:?}", process.place),
            }
        }
        // Members that will be invited must wait for the invitation first.
        for process in processes[1..].iter_mut() {
            process.tell(&Order::Begin { setup: case.into(), addresses: Vec::new() }).await?;
        }
        processes[0].tell(&Order::Begin { setup: case.into(), addresses }).await?;
        let mut fabric = String::new();
        for process in &mut processes {
            match process.answer().await? {
                Acknowledgement::Formed { fabric: formed } => fabric = formed,
                other => bail!("member {} answered {other:?} instead of forming its groups", process.place),
            }
        }
        let senders = rdmc::Rank(case.senders).index();
        Ok(Self { processes, fabric, groups: case.groups.into(), senders, next_seed: 1 })
    }

    /// Sends so many messages in each group, one at a time.
    pub(crate) async fn rounds(&mut self, rounds: u64) -> anyhow::Result<Vec<Round>> {
        let found = self.work(rounds, Pace::OneAtATime).await?;
        let cpu_seconds = found.cpu_seconds / count(rounds);
        Ok(found.times.iter().map(|&(seconds, skew_seconds)| Round { seconds, skew_seconds, cpu_seconds }).collect())
    }

    /// Sends so many messages in each group: packed, or with `window` messages in flight.
    pub(crate) async fn burst(&mut self, messages: u64, window: Option<u32>) -> anyhow::Result<Burst> {
        let found = self.work(messages, window.map_or(Pace::Packed, Pace::Window)).await?;
        Ok(Burst { messages: messages * self.groups, seconds: found.times.iter().map(|(seconds, _)| seconds).sum() })
    }

    /// Closes the groups, which confirms that all members have everything, and ends the processes.
    pub(crate) async fn end(mut self) -> anyhow::Result<()> {
        self.tell_all(&Order::Close).await?;
        self.expect_all(&Acknowledgement::Closed).await?;
        for process in &mut self.processes {
            process.orders.shutdown().await?;
        }
        for mut process in self.processes {
            drop(process.orders);
            // A process that does not end by itself is killed when it is dropped.
            let _ = tokio::time::timeout(END_LIMIT, process.child.wait()).await;
        }
        Ok(())
    }

    async fn work(&mut self, messages: u64, pace: Pace) -> anyhow::Result<WorkTimes> {
        let work = Work { seed: self.next_seed, messages, pace };
        self.next_seed += messages;
        self.tell_all(&Order::Prepare(work)).await?;
        self.expect_all(&Acknowledgement::Ready).await?;
        self.tell_all(&Order::Arm).await?;
        self.expect_all(&Acknowledgement::Armed).await?;
        for process in &mut self.processes[..self.senders] {
            process.tell(&Order::Go).await?;
        }
        let (mut started, mut ended) = (Vec::new(), Vec::new());
        for process in &mut self.processes {
            match process.answer().await? {
                Acknowledgement::Done { started_ns, ended_ns } => {
                    started.extend(started_ns);
                    ended.extend(ended_ns);
                }
                other => bail!("member {} answered {other:?} instead of being done", process.place),
            }
        }
        self.tell_all(&Order::Verify).await?;
        let mut cpu = 0;
        for process in &mut self.processes {
            match process.answer().await? {
                Acknowledgement::Verified { cpu_ns, wrong: 0 } => cpu += cpu_ns,
                Acknowledgement::Verified { wrong, .. } => {
                    let what = format!("member {} received {wrong} of {messages} messages wrong", process.place);
                    return Err(Kind::Integrity.error(what));
                }
                other => bail!("member {} answered {other:?} instead of verifying", process.place),
            }
        }
        let parts = if pace == Pace::OneAtATime { messages } else { 1 };
        let times = (0..parts).map(|part| part_times(&started, &ended, part)).collect::<Option<_>>();
        Ok(WorkTimes { times: times.context("a member did not send, or did not receive")?, cpu_seconds: seconds(cpu) })
    }

    async fn tell_all(&mut self, order: &Order) -> anyhow::Result<()> {
        for process in &mut self.processes {
            process.tell(order).await?;
        }
        Ok(())
    }

    async fn expect_all(&mut self, expected: &Acknowledgement) -> anyhow::Result<()> {
        for process in &mut self.processes {
            let answer = process.answer().await?;
            ensure!(answer == *expected, "member {} answered {answer:?} instead of {expected:?}", process.place);
        }
        Ok(())
    }
}

/// The times of one piece of work.
struct WorkTimes {
    /// For each round, or for the burst: from the first root's start to the last receiver's last message, and from the
    /// first receiver's last message to the last one's.
    times: Vec<(f64, f64)>,
    cpu_seconds: f64,
}

/// Returns the times of one part of the work; `None` if a member has not told its time.
fn part_times(started: &[Vec<u64>], ended: &[Vec<u64>], part: u64) -> Option<(f64, f64)> {
    let of_part = |times: &[Vec<u64>]| {
        let place = usize::try_from(part).ok()?;
        times.iter().map(|times| times.get(place).copied()).collect::<Option<Vec<u64>>>()
    };
    let (started, ended) = (of_part(started)?, of_part(ended)?);
    let (first, last) = (*ended.iter().min()?, *ended.iter().max()?);
    Some((seconds(last.saturating_sub(*started.iter().min()?)), seconds(last - first)))
}

#[expect(clippy::cast_precision_loss, reason = "a small number")]
fn count(rounds: u64) -> f64 {
    rounds as f64
}

/// A member's process. Dropping it kills it.
struct Process {
    place: usize,
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(program: &Program, place: usize, case: &Case, device: Option<&str>) -> anyhow::Result<Self> {
        let (fabric, device) = (case.fabric, device.map(str::to_owned));
        let role = ProcessRole::Member(MemberRole { fabric, device, invites: place == 0 });
        let (mut child, answers) = program.start(role.arguments())?;
        let orders = child.stdin.take().expect("it is piped");
        Ok(Self { place, child, orders, answers })
    }

    async fn tell(&mut self, order: &Order) -> anyhow::Result<()> {
        let line = serde_json::to_string(order)? + "\n";
        self.orders.write_all(line.as_bytes()).await.with_context(|| format!("member {} has ended", self.place))
    }

    async fn answer(&mut self) -> anyhow::Result<Acknowledgement> {
        let told = tokio::time::timeout(SILENCE_LIMIT, self.answers.next_line()).await;
        let line = told.with_context(|| format!("member {} is silent", self.place))??;
        let Some(line) = line else {
            // It has printed the reason on stderr. A device or fabric that it does not have is a usage error.
            let status = self.child.wait().await?;
            let what = format!("member {} has ended ({status})", self.place);
            return Err(if status.code() == Some(USAGE) { Kind::Request.error(what) } else { anyhow::anyhow!(what) });
        };
        serde_json::from_str(&line).with_context(|| format!("{line:?} is not an acknowledgement"))
    }
}

/// How long a member may be silent.
const SILENCE_LIMIT: Duration = Duration::from_secs(300);
/// How long members may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// Exit code of a usage error.
const USAGE: i32 = 2;
