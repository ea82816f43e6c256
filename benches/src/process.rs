//! Runs receiving processes. Each command and each answer is a line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result};

/// A receiving process. A drop ends it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    commands: ChildStdin,
    answers: mpsc::Receiver<String>,
}

impl Process {
    /// Starts the process.
    ///
    /// # Errors
    /// The system cannot start it.
    pub fn start(command: &mut Command) -> Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let commands = child.stdin.take().context("piped")?;
        let lines = BufReader::new(child.stdout.take().context("piped")?).lines();
        let (tell, answers) = mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(line)));
        Ok(Self { child, commands, answers })
    }

    /// Sends the process a line.
    ///
    /// # Errors
    /// The process has ended.
    pub fn tell(&mut self, command: &str) -> Result<()> {
        writeln!(self.commands, "{command}")?;
        Ok(self.commands.flush()?)
    }

    /// Reads the next line of the process.
    ///
    /// # Errors
    /// The process has ended, or is silent for five minutes.
    pub fn answer(&self) -> Result<String> {
        self.answers.recv_timeout(Duration::from_secs(300)).context("a receiver does not answer")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process ends with its standard input, unless it hangs.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Cost of a round.
#[derive(Clone, Copy, Debug)]
pub struct Figure {
    /// Seconds from the start at the sender to the last byte at the last receiver.
    pub seconds: f64,
    /// Processor time of all processes in seconds, without the kernel's own threads.
    pub processor_seconds: f64,
}

impl Figure {
    /// Waits until the receivers [`report`] a round that began at `started` and used `used` at the sender.
    ///
    /// # Errors
    /// A receiver has failed.
    pub fn of_round<'a>(
        receivers: impl IntoIterator<Item = &'a Process>,
        started: Duration,
        used: Duration,
    ) -> Result<Self> {
        let mut last = started;
        let mut processor_seconds = used.as_secs_f64();
        for receiver in receivers {
            let answer = receiver.answer()?;
            let (at, used) = answer.split_once(' ').context("two numbers")?;
            last = last.max(Duration::from_nanos(at.parse()?));
            processor_seconds += used.parse::<f64>()?;
        }
        Ok(Self { seconds: (last - started).as_secs_f64(), processor_seconds })
    }
}

/// Reports to the sender, from a receiving process, when the last byte came and how much processor time the round used.
pub fn report(at: Duration, used: Duration) {
    println!("{} {}", at.as_nanos(), used.as_secs_f64());
}
