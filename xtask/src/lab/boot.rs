//! Boots the machine, runs something in it, and brings back what came of it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::fs::{OFlags, StatVfsMountFlags, fcntl_getfl, fcntl_setfl, statvfs};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tempfile::TempDir;
use tokio::process::Child;
use tokio::signal::unix::{SignalKind, signal};

use super::Machine;
use super::build::{BUSYBOX, Parts};
use super::cache::ensure_plain;
use super::script::Script;

/// What runs in the machine.
#[derive(Debug)]
pub(crate) enum Guest<'a> {
    /// A command without input, its output in two streams.
    Run(&'a [OsString]),
    /// A shell on the terminal.
    Shell,
}

/// How a run in the machine ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The command ended with this status.
    Exited(u8),
    /// The time limit ended it.
    TimedOut,
    /// A signal of this number to this process ended it.
    Interrupted(u8),
}

impl Outcome {
    /// The status to exit with, as of `timeout` and of shells.
    pub(crate) fn status(&self) -> u8 {
        match self {
            Self::Exited(status) => *status,
            Self::TimedOut => 124,
            Self::Interrupted(signal) => 128 + signal,
        }
    }
}

/// Boots a machine, runs something in it and waits for its end.
pub(crate) fn boot(parts: &Parts, machine: &Machine, guest: &Guest<'_>) -> Result<Outcome> {
    let limit = match (machine.timeout_s, guest) {
        (Some(seconds), _) => Some(Duration::from_secs(seconds.into())),
        (None, Guest::Run(_)) => Some(RUN_LIMIT),
        (None, Guest::Shell) => None,
    };
    let run = run_directory(parts, machine, guest)?;
    let mut kernel = kernel_command(parts, machine, run.path());

    let (console, writer) = io::pipe()?;
    kernel.arg("con0=null,fd:1").stdout(writer.try_clone()?).stderr(writer);
    let console_file = run.path().join("console");
    let console = copy_console(console, File::create(&console_file)?, machine.verbose);
    let Streams { inherited, outputs, terminal } = connect(&mut kernel, guest)?;
    // What follows "--" are the arguments of the first process.
    kernel.args(["--", "sh"]).arg(run.path().join("init"));

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let end = runtime.block_on(attend(kernel, inherited, limit))?;
    drop(terminal);
    // Who reads our output may have stopped; that must not hold up an interruption.
    if !matches!(end, Some(Outcome::Interrupted(_))) {
        outputs.into_iter().try_for_each(join)?;
    }
    join(console)??;
    if let Some(file) = &machine.kernel_log {
        fs::copy(&console_file, file).with_context(|| format!("cannot save {}", file.display()))?;
    }
    let Some(outcome) = end else {
        let status = fs::read_to_string(run.path().join("status")).ok().and_then(|text| text.trim().parse().ok());
        let last_lines = || {
            format!(
                "its console's last lines:\n{}",
                tail(&fs::read(&console_file).unwrap_or_default(), CONSOLE_TAIL_LINES)
            )
        };
        let status = status.with_context(|| format!("the machine ended without a result; {}", last_lines()))?;
        if !run.path().join("complete").exists() {
            eprintln!("lab: the machine broke down after the command; output may be missing; {}", last_lines());
        }
        return Ok(Outcome::Exited(status));
    };
    if let (Outcome::TimedOut, Some(limit)) = (&outcome, limit) {
        eprintln!("lab: timed out after {} s", limit.as_secs());
    }
    Ok(outcome)
}

/// Makes the directory through which the guest's first process is told what to do, and answers.
fn run_directory(parts: &Parts, machine: &Machine, guest: &Guest<'_>) -> Result<TempDir> {
    let run = tempfile::Builder::new().prefix("rdmc-lab.").tempdir()?;
    ensure_plain(run.path())?;
    let writable = machine.writable.iter().map(|directory| writable(directory)).collect::<Result<Vec<PathBuf>>>()?;

    let mut settings = Script::default();
    settings
        .assign("run", run.path())
        .assign("busybox", parts.layer.join(BUSYBOX))
        .assign("layer", &parts.layer)
        .assign("mode", if matches!(guest, Guest::Shell) { "shell" } else { "run" })
        .assign("driver", machine.driver.to_string())
        .assign("nodes", machine.nodes.to_string())
        .assign("port_rate_mbit", machine.port_rate_mbit.map(|mbit| mbit.to_string()).unwrap_or_default())
        .assign("mhz", host_mhz(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()))
        .assign_parameters(&writable);
    fs::write(run.path().join("settings"), settings.as_bytes())?;
    fs::write(run.path().join("init"), INIT)?;

    let mut environment: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    environment.push(("RDMC_LAB_DRIVER".into(), machine.driver.to_string().into()));
    environment.push(("RDMC_LAB_NODES".into(), machine.nodes.to_string().into()));
    let shell = [OsString::from("/bin/bash")];
    let command = match *guest {
        Guest::Run(command) => command,
        Guest::Shell => &shell,
    };
    let command = Script::of_command(&std::env::current_dir()?, environment, command)?;
    fs::write(run.path().join("command"), command.as_bytes())?;
    Ok(run)
}

/// The directory that the guest may write to, by the name that it has on the host.
fn writable(directory: &Path) -> Result<PathBuf> {
    let path = directory.canonicalize().with_context(|| format!("no directory {}", directory.display()))?;
    ensure!(path.is_dir(), "{} is not a directory", path.display());
    ensure_plain(&path)?;
    Ok(path)
}

/// The kernel's command line, save for its consoles and the arguments of its first process.
fn kernel_command(parts: &Parts, machine: &Machine, run: &Path) -> Command {
    // If this process is killed, so is the machine.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "TERM"]).arg(&parts.kernel);
    command.arg(format!("mem={}M", machine.memory_mib));
    command.args(["root=none", "rootfstype=hostfs", "rootflags=/", "ro"]);
    // All of the log on the console, none of it on the terminal. After an oops nothing is to be trusted.
    command.args(["con=null", "ignore_loglevel", "oops=panic"]);
    command.arg(joined("uml_dir=", run.as_os_str())).arg("umid=machine");
    command.arg(joined("init=", parts.layer.join(BUSYBOX).as_os_str()));
    command.env("TMPDIR", memory_directory(u64::from(machine.memory_mib) << 20, run));
    command
}

/// Where the machine's memory is kept, as a file without a name: in the host's memory if that can be.
fn memory_directory(len: u64, otherwise: &Path) -> PathBuf {
    let shm = Path::new("/dev/shm");
    let fits = statvfs(shm).is_ok_and(|stat| {
        !stat.f_flag.contains(StatVfsMountFlags::NOEXEC) && stat.f_bavail.saturating_mul(stat.f_frsize) >= len
    });
    if fits { shm.to_owned() } else { otherwise.to_owned() }
}

/// What connects the guest's consoles with our standard streams.
struct Streams {
    /// What the kernel inherits besides its own standard streams.
    inherited: Vec<PipeWriter>,
    /// What copies its output to ours.
    outputs: Vec<JoinHandle<()>>,
    terminal: Option<Terminal>,
}

/// Connects a command's output, or the terminal for a shell.
fn connect(kernel: &mut Command, guest: &Guest<'_>) -> Result<Streams> {
    if matches!(guest, Guest::Shell) {
        let terminal = Terminal::of_stdin()?;
        kernel.stdin(Stdio::inherit()).arg("con1=fd:0");
        return Ok(Streams { inherited: Vec::new(), outputs: Vec::new(), terminal: Some(terminal) });
    }
    let mut streams = Streams { inherited: Vec::new(), outputs: Vec::new(), terminal: None };
    kernel.stdin(Stdio::null());
    let ours = [io::stdout().as_fd().try_clone_to_owned()?, io::stderr().as_fd().try_clone_to_owned()?];
    for (i, stream) in (1..).zip(ours) {
        // A pipe, because user-mode Linux makes its descriptors non-blocking, for all who share them.
        let (reader, writer) = io::pipe()?;
        fcntl_setfd(&writer, FdFlags::empty())?;
        kernel.arg(format!("con{i}=null,fd:{}", writer.as_raw_fd()));
        streams.inherited.push(writer);
        streams.outputs.push(copy_output(reader, stream));
    }
    Ok(streams)
}

/// Starts the kernel and waits for its end; returns why it had to be brought about, if it had.
///
/// `inherited` is what the kernel inherits besides the standard streams. Our copies are closed once it has its own, so that
/// those who read them see their end.
async fn attend(kernel: Command, inherited: Vec<PipeWriter>, limit: Option<Duration>) -> Result<Option<Outcome>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    let mut kernel = tokio::process::Command::from(kernel);
    let pinned = Pinned::to_last_cpu();
    let mut child = kernel.spawn().context("cannot run setpriv (package util-linux)")?;
    drop((pinned, kernel, inherited));

    let out_of_time = async {
        match limit {
            Some(limit) => tokio::time::sleep(limit).await,
            None => std::future::pending().await,
        }
    };
    let pid = child.id();
    let end = tokio::select! {
        status = child.wait() => { status?; None }
        () = out_of_time => Some(Outcome::TimedOut),
        _ = interrupt.recv() => Some(Outcome::Interrupted(2)),
        _ = terminate.recv() => Some(Outcome::Interrupted(15)),
        _ = hangup.recv() => Some(Outcome::Interrupted(1)),
    };
    kill_all(&mut child, pid).await?;
    Ok(end)
}

/// While it lives, this thread and the processes that it starts stay on one processor, where these remain afterwards.
///
/// The machine has one processor, and the kernel and its guests' processes run in turn: they switch about twice as fast,
/// and more steadily, when none has to be woken elsewhere.
struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// Chooses the last processor that may be used; where that cannot be, all stays as it is.
    fn to_last_cpu() -> Option<Self> {
        let before = sched_getaffinity(None).ok()?;
        sched_setaffinity(None, cpus().ok()?.last()?).ok()?;
        Some(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Lists the processors that this thread may use, each as a set of one.
pub(crate) fn cpus() -> io::Result<Vec<CpuSet>> {
    let usable = sched_getaffinity(None)?;
    let only = |cpu| {
        let mut only = CpuSet::new();
        only.set(cpu);
        only
    };
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| usable.is_set(cpu)).map(only).collect())
}

/// Kills the kernel and the processes in which it runs those of the guest: it has made itself the leader of their group.
async fn kill_all(child: &mut Child, pid: Option<u32>) -> Result<()> {
    if let Some(pid) = pid.and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw) {
        // There is none if it has ended all, or was not yet so far.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    if child.id().is_some() {
        child.kill().await?;
    }
    Ok(())
}

/// Copies what the guest writes to a stream of ours, to the end of it even if nobody reads ours any more.
fn copy_output(mut reader: PipeReader, stream: OwnedFd) -> JoinHandle<()> {
    let mut stream = File::from(stream);
    thread::spawn(move || {
        // Not by io::copy, which splices: where stdout and stderr are one file, splices at the same time take the same
        // offset, and one overwrites the other. Writes take turns.
        let mut buffer = vec![0; COPY_BYTES];
        let mut read_by_somebody = true;
        while let Ok(len @ 1..) = reader.read(&mut buffer) {
            read_by_somebody = read_by_somebody && stream.write_all(&buffer[..len]).is_ok();
        }
    })
}

/// Copies the console to a file, and to stderr if it is to be seen.
fn copy_console(mut reader: PipeReader, mut file: File, verbose: bool) -> JoinHandle<io::Result<()>> {
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        loop {
            let len = reader.read(&mut buffer)?;
            if len == 0 {
                return Ok(());
            }
            file.write_all(&buffer[..len])?;
            if verbose {
                let _ = io::stderr().write_all(&buffer[..len]);
            }
        }
    })
}

fn join<T>(thread: JoinHandle<T>) -> Result<T> {
    thread.join().ok().context("a thread that copies the machine's output has panicked")
}

/// The terminal on stdin, put back as it was when dropped: user-mode Linux changes it and may not get to change it back.
struct Terminal {
    attributes: Termios,
    flags: OFlags,
}

impl Terminal {
    fn of_stdin() -> Result<Self> {
        let stdin = io::stdin();
        ensure!(isatty(&stdin), "a shell needs a terminal on stdin");
        Ok(Self { attributes: tcgetattr(&stdin)?, flags: fcntl_getfl(&stdin)? })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let stdin = io::stdin();
        let _ = tcsetattr(&stdin, OptionalActions::Flush, &self.attributes);
        let _ = fcntl_setfl(&stdin, self.flags);
    }
}

/// The last lines of a text.
pub(crate) fn tail(text: &[u8], lines_max: usize) -> String {
    let text = String::from_utf8_lossy(text);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(lines_max)..].join("\n")
}

/// The frequency of the host's first processor in MHz, from the text of `/proc/cpuinfo`.
fn host_mhz(cpuinfo: &str) -> &str {
    cpuinfo
        .lines()
        .filter_map(|line| line.strip_prefix("cpu MHz")?.split_once(':'))
        .map(|(_, value)| value.trim())
        .find(|value| value.parse::<f64>().is_ok())
        .unwrap_or("1000.000")
}

fn joined(prefix: &str, rest: &OsStr) -> OsString {
    let mut word = OsString::from(prefix);
    word.push(rest);
    word
}

const INIT: &str = include_str!("../../lab/init.sh");
const RUN_LIMIT: Duration = Duration::from_secs(300);
const CONSOLE_TAIL_LINES: usize = 20;
const COPY_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequency_is_that_of_the_first_processor() {
        assert_eq!(host_mhz("model name\t: x\ncpu MHz\t\t: 2596.136\n\ncpu MHz\t\t: 1.0\n"), "2596.136");
        assert_eq!(host_mhz("cpu MHz\t\t: none\nprocessor: 1"), "1000.000");
        assert_eq!(host_mhz(""), "1000.000");
    }

    #[test]
    fn only_what_is_started_meanwhile_is_pinned() {
        let before = sched_getaffinity(None).unwrap();
        let pinned = Pinned::to_last_cpu().unwrap();
        let output = Command::new("nproc").output().unwrap();
        drop(pinned);
        assert_eq!(output.stdout, b"1\n");
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }

    #[test]
    fn memory_that_does_not_fit_is_kept_elsewhere() {
        assert_eq!(memory_directory(u64::MAX, Path::new("/elsewhere")), Path::new("/elsewhere"));
    }

    #[test]
    fn tail_is_the_end_of_a_text_whatever_its_length() {
        assert_eq!(tail(b"", 20), "");
        assert_eq!(tail(b"only\n", 20), "only");
        let lines: Vec<String> = (0..100).map(|i| i.to_string()).collect();
        assert_eq!(tail(lines.join("\n").as_bytes(), 20), lines[80..].join("\n"));
    }
}
