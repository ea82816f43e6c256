//! `MPI_Bcast` of an installed MPI on the same work.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rdmc_files::FabricSelection;
use tempfile::TempDir;

use crate::contestant::{Contestant, Mpi, Transport};
use crate::error::Kind;
use crate::local::{Program, seconds};
use crate::measured::{Attribution, Burst, Round, Samples};
use crate::options::Delivery;
use crate::plan::Case;
use crate::process::ProcessRole;

/// Refuses a configuration that cannot be compared with an MPI.
pub(crate) fn check(contestant: Contestant, case: &Case) -> anyhow::Result<()> {
    if case.groups > 1 {
        return Err(Kind::Request.error("--vs compares one group at a time: leave --groups at 1"));
    }
    if case.delivery == Delivery::Shared {
        return Err(Kind::Request.error("--vs compares copies: leave --delivery at private"));
    }
    if case.fabric == FabricSelection::Verbs && contestant.transport.is_none() {
        let name = contestant.mpi.name();
        let what = format!("--vs {name} does not use RDMA devices: give {name}:shm or {name}:tcp to compare anyway");
        return Err(Kind::Request.error(what));
    }
    Ok(())
}

/// An MPI, with the program compiled for it.
#[derive(Debug)]
pub(crate) struct Compiled {
    contestant: Contestant,
    /// This program, which runs the guard of the MPI.
    program: Program,
    launcher: &'static str,
    /// Directory of the compiled program. Dropping it removes the directory.
    dir: TempDir,
}

/// The work of one start of an MPI.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) warm_up: u32,
    pub(crate) rounds: usize,
    /// Least number of messages of a burst, number of bursts, and how long each should take.
    pub(crate) messages: u64,
    pub(crate) bursts: usize,
    pub(crate) burst_min: Duration,
}

impl Compiled {
    /// Finds the MPI and compiles the program.
    pub(crate) fn new(contestant: Contestant, program: &Program) -> anyhow::Result<Self> {
        let mpi = contestant.mpi;
        let installed = mpi.programs().into_iter().find(|(compiler, launcher)| {
            says(launcher).is_some_and(|version| mpi.knows(&version)) && says(compiler).is_some()
        });
        let (compiler, launcher) = installed.ok_or_else(|| Kind::Request.error(mpi.missing()))?;
        let dir = tempfile::Builder::new().prefix("rdmc-bench-").tempdir()?;
        compile(compiler, dir.path(), "bcast.c", include_str!("bcast.c"), &["-o", "bcast"])?;
        if mpi == Mpi::Mpich {
            let shared = ["-shared", "-fPIC", "-o", "yield.so", "-ldl"];
            compile(compiler, dir.path(), "yield.c", include_str!("yield.c"), &shared)?;
        }
        Ok(Self { contestant, program: program.clone(), launcher, dir })
    }

    /// Describes the MPI if rdmc uses the named fabric.
    pub(crate) fn by(&self, fabric: &str) -> Attribution {
        let transport = self.contestant.transport(fabric);
        let setup = format!("{} {}", self.launcher, self.options(transport).join(" "));
        Attribution::mpi(self.contestant.mpi.name(), transport, setup)
    }

    /// Measures rounds and bursts.
    pub(crate) async fn run(&self, case: &Case, fabric: &str, block: Block) -> anyhow::Result<Samples> {
        let transport = self.contestant.transport(fabric);
        let Block { warm_up, rounds, messages, bursts, burst_min } = block;
        let burst_min_ns = u64::try_from(burst_min.as_nanos())?;
        // MPI_Finalize of MPICH 4.0 over TCP does not always return.
        let leave = self.contestant.mpi == Mpi::Mpich && transport == Transport::Tcp;
        let work = [case.bytes, warm_up.into(), rounds as u64, messages, bursts as u64, burst_min_ns, leave.into()];
        let mut command = vec![self.launcher.to_owned()];
        command.extend(self.options(transport));
        command.extend(["-n".to_owned(), case.nodes.to_string(), self.path("bcast")]);
        command.extend(work.map(|number| number.to_string()));
        let (mut child, mut lines) = self.program.start_guard(ProcessRole::Guard { command }.arguments())?;
        // The guard ends the MPI when this is closed.
        let _open = child.stdin.take();
        let mut told = MpiOutput::default();
        let reading = async {
            while let Some(line) = lines.next_line().await? {
                told.take(&line)?;
            }
            anyhow::Ok(())
        };
        let read = tokio::time::timeout(RUN_LIMIT, reading).await;
        read.with_context(|| format!("{} hangs", self.launcher))??;
        let status = child.wait().await?;
        match told.wrong {
            Some(0) => {}
            Some(wrong) => {
                let what = format!("{} delivered {wrong} messages wrong", self.launcher);
                return Err(Kind::Integrity.error(what));
            }
            None => bail!("{} failed ({status}): {}", self.launcher, told.others.join("\n")),
        }
        ensure!(told.samples.rounds.len() == rounds, "{} has not done all rounds", self.launcher);
        Ok(told.samples)
    }

    /// Returns the options of the launcher.
    fn options(&self, transport: Transport) -> Vec<String> {
        let words = match (self.contestant.mpi, transport) {
            (Mpi::Open, Transport::SharedMemory) => format!("{OPEN} --mca btl vader,self"),
            (Mpi::Open, Transport::Tcp) => format!("{OPEN} --mca btl tcp,self --mca btl_tcp_if_include lo"),
            (Mpi::Mpich, Transport::SharedMemory) => format!("-env LD_PRELOAD {}", self.path("yield.so")),
            (Mpi::Mpich, Transport::Tcp) => {
                let over = "-env MPIR_CVAR_NOLOCAL 1 -env UCX_TLS tcp,self -env UCX_NET_DEVICES lo";
                format!("-env LD_PRELOAD {} {over}", self.path("yield.so"))
            }
        };
        words.split(' ').map(str::to_owned).collect()
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }
}

/// The output of the program.
#[derive(Debug, Default)]
struct MpiOutput {
    samples: Samples,
    /// Number of wrong messages; `None` until the program is done.
    wrong: Option<u64>,
    /// The last lines of other output.
    others: Vec<String>,
}

impl MpiOutput {
    fn take(&mut self, line: &str) -> anyhow::Result<()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ns = |word: &str| word.parse().map(seconds).with_context(|| format!("{line:?}"));
        match words[..] {
            ["rdmc-bench", "round", last, skew, cpu] => {
                let (seconds, skew_seconds, cpu_seconds) = (ns(last)?, ns(skew)?, ns(cpu)?);
                self.samples.rounds.push(Round { seconds, skew_seconds, cpu_seconds });
            }
            ["rdmc-bench", "burst", last, messages] => {
                self.samples.bursts.push(Burst { messages: messages.parse()?, seconds: ns(last)? });
            }
            ["rdmc-bench", "end", wrong] => self.wrong = Some(wrong.parse()?),
            _ => {
                self.others.push(line.to_owned());
                let over = self.others.len().saturating_sub(OTHERS_MAX);
                self.others.drain(..over);
            }
        }
        Ok(())
    }
}

/// Returns a program's version; `None` if there is no such program.
fn says(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn compile(compiler: &str, dir: &Path, name: &str, source: &str, options: &[&str]) -> anyhow::Result<()> {
    std::fs::write(dir.join(name), source)?;
    let mut command = Command::new(compiler);
    command.current_dir(dir).args(["-O2", name]).args(options).stdin(Stdio::null());
    let output = command.output().with_context(|| compiler.to_owned())?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{compiler} does not compile the program to compare with: {said}");
    Ok(())
}

/// Options of Open MPI: more ranks than cores, no rank bound to a core, and ranks that yield while they wait.
const OPEN: &str = "--allow-run-as-root --oversubscribe --bind-to none --mca pml ob1 --mca mpi_yield_when_idle 1";
/// How long one start of an MPI may take.
const RUN_LIMIT: Duration = Duration::from_secs(300);
/// Greatest number of lines of other output.
const OTHERS_MAX: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::tests::case;

    #[test]
    fn what_an_mpi_cannot_do_is_refused_as_usage() {
        let open: Contestant = "ompi".parse().unwrap();
        assert!(check(open, &case(3, 1)).is_ok());
        let verbs = Case { fabric: FabricSelection::Verbs, ..case(3, 1) };
        let shared = Case { delivery: Delivery::Shared, ..case(3, 1) };
        for wrong in [Case { groups: 2, ..case(3, 1) }, verbs.clone(), shared] {
            assert_eq!(Kind::of(&check(open, &wrong).unwrap_err()), Some(Kind::Request));
        }
        assert!(check("ompi:tcp".parse().unwrap(), &verbs).is_ok());
    }

    #[test]
    fn lines_of_the_program_are_read_and_others_are_kept_for_the_error() {
        let mut told = MpiOutput::default();
        for line in ["rdmc-bench round 2000000000 5 7", "hello", "rdmc-bench burst 500000000 10", "rdmc-bench end 0"] {
            told.take(line).unwrap();
        }
        assert!((told.samples.rounds[0].seconds - 2.0).abs() < 1e-9);
        assert_eq!(told.samples.bursts, [Burst { messages: 10, seconds: 0.5 }]);
        assert_eq!((told.wrong, told.others), (Some(0), vec!["hello".to_owned()]));
        assert!(MpiOutput::default().take("rdmc-bench round soon 0 0").is_err());
    }
}
