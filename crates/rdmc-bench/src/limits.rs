//! The limits of this machine: copies in memory, and plain TCP streams on loopback.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::Serialize;

use crate::copies::{Copies, HAS_NON_TEMPORAL, Pass, Stores};
use crate::error::BenchError;
use crate::local::{Program, cores, end_with_stdin, monotonic_ns, seconds};
use crate::process::ProcessRole;
use crate::statistics::median;

/// The limits for messages of one length to a number of members.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename = "limits")]
pub(crate) struct Limits {
    /// Number of members: the sender, and a destination or stream for each receiver.
    pub(crate) nodes: u32,
    /// Length of the copied and sent messages.
    pub(crate) bytes: u64,
    /// Bytes per second that one thread copies to warm private memory.
    pub(crate) memcpy_rate: f64,
    pub(crate) copy_threads: usize,
    /// Bytes per second that all threads together copy from one source to a destination for each receiver.
    pub(crate) copy_floor_plain_rate: f64,
    pub(crate) copy_floor_non_temporal_rate: Option<f64>,
    /// Rate of the faster stores, if it was measured in turn with rounds.
    #[serde(skip)]
    pub(crate) copy_floor_in_turn_rate: Option<f64>,
    /// Bytes per second of one TCP stream.
    pub(crate) stream_rate: f64,
    pub(crate) stream_seconds: f64,
    /// Bytes per second of all TCP streams together, one for each receiver.
    pub(crate) streams_rate: f64,
    pub(crate) streams_seconds: f64,
}

impl Limits {
    /// Measures the limits. It takes one to three seconds for long messages.
    pub(crate) fn measure(program: &Program, nodes: u32, bytes: u64) -> anyhow::Result<Self> {
        let bytes = bytes.min(BYTES_MAX);
        let len = usize::try_from(bytes)?;
        let receivers = rdmc::Rank(nodes - 1).index();
        let threads = copy_threads(receivers);
        let times = (TIMED_MIN / (len * receivers)).clamp(1, TIMES_MAX);
        let mut copies = Copies::new(len, receivers)?;
        let mut floor = |stores| {
            let pass = Pass { stores, threads, block: BLOCK, times };
            per_second(len * receivers, repeat(|| Ok(copies.run(pass))))
        };
        let copy_floor_plain_rate = floor(Stores::Plain)?;
        let copy_floor_non_temporal_rate = HAS_NON_TEMPORAL.then(|| floor(Stores::NonTemporal)).transpose()?;
        drop(copies);
        let mut copy = Copies::new(len, 1)?;
        let pass = Pass { stores: Stores::Plain, threads: 1, block: len, times: times * receivers };
        let memcpy_rate = per_second(len, repeat(|| Ok(copy.run(pass))))?;
        drop(copy);
        let stream_seconds = streams(program, len, 1)?;
        let streams_seconds = if receivers == 1 { stream_seconds } else { streams(program, len, receivers)? };
        Ok(Self {
            nodes,
            bytes,
            memcpy_rate,
            copy_threads: threads,
            copy_floor_plain_rate,
            copy_floor_non_temporal_rate,
            copy_floor_in_turn_rate: None,
            stream_rate: per_second(len, Ok(stream_seconds))?,
            stream_seconds,
            streams_rate: per_second(len * receivers, Ok(streams_seconds))?,
            streams_seconds,
        })
    }

    /// Returns the length of the messages with which the limits are measured.
    pub(crate) fn length_for(bytes: u64) -> u64 {
        bytes.min(BYTES_MAX)
    }

    /// Returns the rate of copies by the faster stores.
    pub(crate) fn copy_floor_rate(&self) -> f64 {
        let before = self.copy_floor_non_temporal_rate.unwrap_or(0.0).max(self.copy_floor_plain_rate);
        self.copy_floor_in_turn_rate.unwrap_or(before)
    }

    fn faster_stores(&self) -> Stores {
        let non_temporal = self.copy_floor_non_temporal_rate.is_some_and(|rate| rate > self.copy_floor_plain_rate);
        if non_temporal { Stores::NonTemporal } else { Stores::Plain }
    }
}

/// The copy floor, measured in turn with rounds, because a shared machine has other rates a second later.
pub(crate) struct Floor {
    copies: Copies,
    pass: Pass,
    /// Bytes of one pass.
    len: usize,
    seconds: Vec<f64>,
}

impl Floor {
    /// Tells whether the floor is measured in turn with messages of this length. Messages that fit into caches would
    /// become slower.
    pub(crate) fn is_for(bytes: u64) -> bool {
        bytes >= IN_TURN_MIN
    }

    /// Takes and touches memory for messages with these limits.
    pub(crate) fn new(limits: &Limits) -> anyhow::Result<Self> {
        let (bytes, receivers) = (usize::try_from(limits.bytes)?, rdmc::Rank(limits.nodes - 1).index());
        let pass = Pass { stores: limits.faster_stores(), threads: copy_threads(receivers), block: BLOCK, times: 1 };
        let mut copies = Copies::new(bytes, receivers)?;
        for _ in 0..WARM_UP {
            copies.run(pass);
        }
        Ok(Self { copies, pass, len: bytes * receivers, seconds: Vec::new() })
    }

    /// Copies once.
    pub(crate) fn measure(mut self) -> Self {
        self.seconds.push(self.copies.run(self.pass));
        self
    }

    /// Returns the median rate in bytes per second.
    pub(crate) fn rate(self) -> anyhow::Result<f64> {
        per_second(self.len, Ok(median(self.seconds)))
    }
}

/// Returns the number of threads that copy for so many receivers.
fn copy_threads(receivers: usize) -> usize {
    cores().min(receivers.max(2))
}

/// Receives messages on one TCP stream, and prints the time of each, until the stream ends.
///
/// # Errors
/// Nothing can be received or printed.
pub fn run_sink(bytes: usize) -> Result<(), BenchError> {
    Ok(receive(bytes)?)
}

fn receive(bytes: usize) -> anyhow::Result<()> {
    end_with_stdin();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{}", listener.local_addr()?)?;
    let (mut stream, _) = listener.accept()?;
    let mut memory = vec![1; bytes];
    while stream.read_exact(&mut memory).is_ok() {
        writeln!(stdout, "{}", monotonic_ns())?;
    }
    Ok(())
}

/// Measures one message on each TCP stream at the same time. Returns the seconds to the last receiver's last byte.
fn streams(program: &Program, bytes: usize, receivers: usize) -> anyhow::Result<f64> {
    let mut sinks = (0..receivers).map(|_| Sink::start(program, bytes)).collect::<anyhow::Result<Vec<_>>>()?;
    let message = vec![0x5a; bytes];
    repeat(|| send_to_all(&mut sinks, &message))
}

/// Sends the message to all receivers at the same time. Returns the seconds to the last receiver's last byte.
fn send_to_all(sinks: &mut [Sink], message: &[u8]) -> anyhow::Result<f64> {
    let barrier = Barrier::new(sinks.len());
    let write = |stream: &mut TcpStream| {
        barrier.wait();
        let begun = monotonic_ns();
        message.chunks(BLOCK).try_for_each(|block| stream.write_all(block)).map(|()| begun)
    };
    let begun: Vec<u64> = match &mut *sinks {
        // An additional thread would slow short messages down.
        [only] => vec![write(&mut only.stream)?],
        many => std::thread::scope(|scope| {
            let writers: Vec<_> = many.iter_mut().map(|sink| scope.spawn(|| write(&mut sink.stream))).collect();
            writers
                .into_iter()
                .map(|writer| writer.join().expect("a writer does not panic"))
                .collect::<std::io::Result<_>>()
        })?,
    };
    let begun = begun.into_iter().min().context("there is a receiver")?;
    let ended = sinks.iter_mut().map(Sink::ended).collect::<anyhow::Result<Vec<u64>>>()?;
    Ok(seconds(ended.into_iter().max().unwrap_or(begun).saturating_sub(begun)))
}

/// A process that receives from one stream. Dropping it ends the process.
struct Sink {
    child: Child,
    stream: TcpStream,
    told: Lines<BufReader<ChildStdout>>,
}

impl Sink {
    fn start(program: &Program, bytes: usize) -> anyhow::Result<Self> {
        let mut command = program.command();
        command.args(ProcessRole::Sink { bytes }.arguments());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut told = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let address = told.next().context("the receiver of a stream has ended")??;
        let stream = TcpStream::connect(&address).with_context(|| format!("a stream to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { child, stream, told })
    }

    fn ended(&mut self) -> anyhow::Result<u64> {
        let line = self.told.next().context("the receiver of a stream has ended")??;
        line.parse().with_context(|| format!("{line:?} is not a time"))
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        // It also ends with the stream.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures repeatedly, first without counting, and returns the median of the seconds.
fn repeat(mut once: impl FnMut() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    for _ in 0..WARM_UP {
        once()?;
    }
    let begun = Instant::now();
    let mut samples = Vec::new();
    while samples.len() < SAMPLES_MIN || (samples.len() < SAMPLES_MAX && begun.elapsed() < LIMIT) {
        samples.push(once()?);
    }
    Ok(median(samples))
}

#[expect(clippy::cast_precision_loss, reason = "a rate to be displayed")]
fn per_second(bytes: usize, seconds: anyhow::Result<f64>) -> anyhow::Result<f64> {
    Ok(bytes as f64 / seconds?.max(1e-9))
}

/// Greatest length of copied and sent messages. Longer ones do not change the rates.
const BYTES_MAX: u64 = 256 << 20;
/// Shortest message with which the copy floor is measured in turn.
const IN_TURN_MIN: u64 = 16 << 20;
/// Length of one copy or write.
const BLOCK: usize = 256 << 10;
/// Least number of bytes whose copy can be timed.
const TIMED_MIN: usize = 1 << 20;
/// Greatest number of repetitions of a short copy.
const TIMES_MAX: usize = 10_000;
/// Number of measurements that are not counted.
const WARM_UP: usize = 2;
/// Bounds of the number of counted measurements.
const SAMPLES_MIN: usize = 5;
const SAMPLES_MAX: usize = 200;
/// How long the measurements may take together, once there are enough.
const LIMIT: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_of_enough_measurements_is_taken_after_the_warm_up() {
        let mut calls = 0;
        let found = repeat(|| {
            calls += 1;
            Ok(if calls <= WARM_UP { 1e9 } else { 1.0 })
        });
        assert!(found.is_ok_and(|median| (median - 1.0).abs() < 1e-9));
        assert!((WARM_UP + SAMPLES_MIN..=WARM_UP + SAMPLES_MAX).contains(&calls));
    }

    #[test]
    fn the_floor_is_that_of_the_faster_stores() {
        let limits = crate::measured::tests::limits();
        assert!(limits.copy_floor_rate() > limits.copy_floor_plain_rate);
        let without = Limits { copy_floor_non_temporal_rate: None, ..limits };
        assert!((without.copy_floor_rate() - without.copy_floor_plain_rate).abs() < 1.0);
        let in_turn = Limits { copy_floor_in_turn_rate: Some(5.0), ..without };
        assert!((in_turn.copy_floor_rate() - 5.0).abs() < 1e-9);
    }

    #[test]
    fn the_floor_in_turn_is_the_median_of_what_was_measured() {
        let limits = Limits { nodes: 3, bytes: 1 << 20, ..crate::measured::tests::limits() };
        let floor = Floor::new(&limits).unwrap().measure().measure().measure();
        assert_eq!((floor.seconds.len(), floor.pass.stores), (3, limits.faster_stores()));
        let floor = Floor { seconds: vec![2.0, 1.0, 9.0], ..floor };
        assert!((floor.rate().unwrap() - f64::from(1 << 20)).abs() < 1e-9);
    }
}
