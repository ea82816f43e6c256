//! The output while the program runs: bars on a terminal, lines otherwise, JSON for programs, or nothing.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget};
use rdmc_files::size::{ByteSize, Rate};
use rdmc_files::words::{count, printable};
use rdmc_files::{Direction, Event, FailedPeer, Proof, SessionNumber, explain};
use serde::Serialize;

use crate::exit::{Exit, failed_peers, tell};
use crate::named::Switch;
use line::{BarKind, Label};

mod line;

/// Options for the amount and form of the output.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct OutputOptions {
    /// Print one JSON object per line to stdout, each with an "event", instead of text
    #[arg(long, env = "RDMC_JSON", value_parser = Switch)]
    pub(crate) json: bool,
    /// Print errors only
    #[arg(long, short, env = "RDMC_QUIET", value_parser = Switch, conflicts_with = "json")]
    pub(crate) quiet: bool,
}

/// The last event of a command that fails.
#[derive(Serialize)]
#[serde(tag = "event", rename = "failed")]
struct Failed<'a> {
    code: u8,
    message: String,
    /// The peers that failed; empty if none did or they are not known.
    failed: &'a [FailedPeer],
}

/// A warning of the program itself.
#[derive(Serialize)]
#[serde(tag = "event", rename = "warning")]
struct Warning<'a> {
    message: &'a str,
}

/// Tells whether an event goes to stdout for people too.
fn is_result(event: &Event) -> bool {
    matches!(event, Event::Done { .. })
}

/// Tells whether a bar shows an event already.
fn is_shown_by_bars(event: &Event) -> bool {
    matches!(event, Event::File { .. } | Event::Progress { .. })
}

/// An event as a line for people.
struct Line<'a> {
    event: &'a Event,
    /// How many bytes of the files have travelled, as far as is known.
    travelled: Option<u64>,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.event {
            Event::Listening { address, dir, loopback_only, security, fabrics, device, .. } => {
                write!(f, "listening at {address}, receiving into {dir}")?;
                f.write_str(match security {
                    Proof::None => "",
                    Proof::Key => ", from peers with the key",
                    Proof::Certificate => ", from peers with a certificate",
                })?;
                if let (Some(device), Some((first, others))) = (device, fabrics.split_first()) {
                    write!(f, ", by {first} ({device})")?;
                    others.iter().try_for_each(|other| write!(f, " or {other}"))?;
                }
                let port = address.rsplit(':').next().unwrap_or_default();
                if *loopback_only { write!(f, " (this host only; --listen 0.0.0.0:{port} for all)") } else { Ok(()) }
            }
            Event::Warning { message, .. } => write!(f, "warning: {message}"),
            Event::Declined { from, reason, .. } => {
                write!(f, "no transfer from {}: {}", from.as_deref().unwrap_or(SOMEBODY), printable(reason))
            }
            Event::Started { direction, peers, receivers, files, bytes, fabric, plan, .. } => {
                let (shown, more) = peers.split_at(peers.len().min(PEERS_SHOWN_MAX));
                let shown = if shown.is_empty() { SOMEBODY.to_owned() } else { printable(&shown.join(", ")) };
                f.write_str(if *direction == Direction::Sending { "sending to " } else { "receiving from " })?;
                f.write_str(&shown)?;
                f.write_str(if more.is_empty() { "" } else { ", …" })?;
                let (files, receivers) = (count(*files, "file"), count(*receivers, "receiver"));
                write!(f, ": {} in {files}, {receivers}, by {fabric}, ", ByteSize(*bytes))?;
                write!(f, "{} in blocks of {}", plan.algorithm, ByteSize(plan.block_size.into()))?;
                if !plan.racks.is_empty() {
                    let racks =
                        plan.racks.iter().map(|ranks| ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(","));
                    write!(f, ", racks {}", racks.collect::<Vec<_>>().join("/"))?;
                }
                Ok(())
            }
            Event::Progress { bytes, total, .. } => write!(f, "{} of {}", ByteSize(*bytes), ByteSize(*total)),
            Event::File { path, bytes, .. } => write!(f, "{path}  {}", ByteSize(*bytes)),
            Event::Skipped { path, .. } => write!(f, "skipped {path}: a symbolic link, a device, a socket or a pipe"),
            Event::GoingOn { failed, receivers, .. } => {
                write!(f, "{}; going on with {}", explain(failed), count(*receivers, "receiver"))
            }
            Event::Done { receivers, files, bytes, skipped, seconds, received, .. } => {
                let (said_files, receivers) = (count(*files, "file"), count(*receivers, "receiver"));
                write!(f, "{said_files}, {} to {receivers} in {seconds:.2} s", ByteSize(*bytes))?;
                let travelled = match received {
                    Some(received) => Travelled::Here(*received),
                    None => Travelled::from_here(self.travelled),
                };
                write!(f, "{}", travelled.of(*bytes, *seconds))?;
                if *skipped > 0 { write!(f, "; {skipped} skipped") } else { Ok(()) }
            }
            Event::Failed(error) => write!(f, "{error}"),
            // Later events are for programs.
            _ => Ok(()),
        }
    }
}

/// What is known of how many bytes of the files have travelled, at the end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Travelled {
    /// At a receiver: so many.
    Here(u64),
    /// At a sender: so many, when it last looked. Receivers may have had the rest.
    FromHere(u64),
}

impl Travelled {
    fn from_here(seen: Option<u64>) -> Self {
        Self::FromHere(seen.unwrap_or(0))
    }

    /// Returns what to say of `bytes`: a rate only if they have travelled.
    fn of(self, bytes: u64, seconds: f64) -> String {
        let rate = || format!(", {} each", Rate { bytes, seconds });
        match self {
            Self::Here(travelled) => match bytes.saturating_sub(travelled) {
                0 => rate(),
                had => format!("; {} were already here", ByteSize(had)),
            },
            Self::FromHere(seen) if seen >= bytes / 2 => rate(),
            Self::FromHere(_) => String::new(),
        }
    }
}

/// Prints the failure of a command for programs. People read it on stderr when the program ends.
pub(crate) fn tell_outcome(options: OutputOptions, outcome: anyhow::Result<()>) -> anyhow::Result<()> {
    if let (true, Err(error)) = (options.json, &outcome) {
        let (code, message) = (Exit::code_of(error), format!("{error:#}"));
        print_json(&Failed { code, message, failed: failed_peers(error) });
    }
    outcome
}

/// Standard error, on which there may be bars. Text goes above the bars.
#[derive(Clone, Debug)]
pub(crate) struct Screen(MultiProgress);

impl Screen {
    pub(crate) fn new() -> Self {
        Self(MultiProgress::with_draw_target(ProgressDrawTarget::hidden()))
    }
}

impl Write for Screen {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().write(text))
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Prints events as bars, lines or JSON.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    mode: Mode,
    screen: Screen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Bars,
    Lines,
    Json,
    Quiet,
}

impl Reporter {
    /// Chooses the form by the options and by whether stderr is a terminal.
    pub(crate) fn new(options: OutputOptions, screen: Screen) -> Self {
        let mode = match options {
            OutputOptions { json: true, .. } => Mode::Json,
            OutputOptions { quiet: true, .. } => Mode::Quiet,
            _ if io::stderr().is_terminal() => Mode::Bars,
            _ => Mode::Lines,
        };
        if mode == Mode::Bars {
            screen.0.set_draw_target(ProgressDrawTarget::stderr());
        }
        Self { mode, screen }
    }

    /// Prints an event. Of the bytes of its transfer, `travelled` have, as far as is known.
    fn say(&self, event: &Event, travelled: Option<u64>) {
        let line = Line { event, travelled };
        match self.mode {
            Mode::Quiet => {
                // The failure of one transfer, while the program goes on.
                if let Event::Failed(error) = event {
                    tell(format_args!("rdmc: {error}"));
                }
            }
            Mode::Json => print_json(event),
            Mode::Bars if is_shown_by_bars(event) => {}
            Mode::Bars | Mode::Lines if is_result(event) => self.print(&line.to_string()),
            Mode::Bars => self.screen.0.suspend(|| tell(line)),
            Mode::Lines => tell(line),
        }
    }

    /// Prints a result for people.
    pub(crate) fn print(&self, text: &str) {
        if matches!(self.mode, Mode::Bars | Mode::Lines) {
            // If the reader is gone, it wants no results.
            self.screen.0.suspend(|| drop(writeln!(io::stdout(), "{text}")));
        }
    }

    /// Prints a warning for people.
    pub(crate) fn warn(&self, text: &str) {
        if matches!(self.mode, Mode::Bars | Mode::Lines) {
            self.screen.0.suspend(|| tell(text));
        }
    }

    /// Prints a warning, for people or for programs.
    pub(crate) fn warning(&self, message: &str) {
        match self.mode {
            Mode::Json => print_json(&Warning { message }),
            _ => self.warn(&format!("warning: {message}")),
        }
    }

    /// Tells whether programs read the output.
    pub(crate) fn is_json(&self) -> bool {
        self.mode == Mode::Json
    }

    /// Starts to show the progress of something of `total` bytes.
    pub(crate) fn bar(&self, label: &str, total: u64) -> Bar {
        self.bar_of(BarKind::Bytes, label, total)
    }

    /// Starts to show the progress of work whose parts add up to `total`.
    pub(crate) fn work_bar(&self, label: &str, total: u64) -> Bar {
        let bar = self.bar_of(BarKind::Work, label, total);
        if let Shown::Bar(bar, _) = &bar.0 {
            // A part may take long.
            bar.enable_steady_tick(Duration::from_secs(1));
        }
        bar
    }

    fn bar_of(&self, kind: BarKind, label: &str, total: u64) -> Bar {
        Bar(match self.mode {
            Mode::Bars => {
                let label = Label::new(label);
                let bar = ProgressBar::new(total).with_style(kind.style(label.clone()));
                let bar = self.screen.0.add(bar);
                // Shows the bar before the first part is done.
                bar.tick();
                Shown::Bar(bar, label)
            }
            Mode::Json => Shown::Json { told: Mutex::new(Instant::now()), total },
            Mode::Lines | Mode::Quiet => Shown::Nothing,
        })
    }
}

/// Progress as programs read it.
#[derive(Serialize)]
#[serde(tag = "event", rename = "progress")]
struct Progress {
    bytes: u64,
    total: u64,
}

/// Prints the events of transfers, and shows a bar for each.
#[derive(Debug)]
pub(crate) struct TransferView {
    reporter: Reporter,
    /// The transfers that have started.
    under_way: HashMap<Option<SessionNumber>, TransferUnderWay>,
    /// What has happened before a transfer started: members may fail while they form its group.
    early: HashMap<Option<SessionNumber>, Vec<Event>>,
}

/// A transfer that has started.
#[derive(Debug)]
struct TransferUnderWay {
    bar: Bar,
    /// Bytes that have travelled.
    travelled: u64,
}

impl TransferView {
    pub(crate) fn new(reporter: Reporter) -> Self {
        Self { reporter, under_way: HashMap::new(), early: HashMap::new() }
    }

    /// Prints an event of a transfer. Failures from before it started come after its start.
    pub(crate) fn show(&mut self, session: Option<SessionNumber>, event: &Event) {
        self.show_with(session, event, |_| {});
    }

    /// Prints an event of a transfer, and what `explain` prints to it.
    pub(crate) fn show_with(&mut self, session: Option<SessionNumber>, event: &Event, explain: impl FnOnce(&Reporter)) {
        match event {
            Event::Progress { bytes, total, confirming, .. } => {
                if let Some(TransferUnderWay { bar, travelled }) = self.under_way.get_mut(&session) {
                    *travelled = *bytes;
                    bar.set(*bytes);
                    // A sender has queued everything before everything has travelled.
                    if *confirming && bytes >= total {
                        bar.label("confirming");
                    }
                }
                return;
            }
            Event::GoingOn { .. } if !self.under_way.contains_key(&session) => {
                self.early.entry(session).or_default().push(event.clone());
                return;
            }
            _ => {}
        }
        let ends = matches!(event, Event::Done { .. } | Event::Declined { .. } | Event::Failed(_));
        let travelled = self.under_way.get(&session).map(|transfer| transfer.travelled);
        if ends {
            self.end(session);
        }
        self.reporter.say(event, travelled);
        explain(&self.reporter);
        if let Event::Started { direction, bytes, .. } = event {
            for early in self.early.remove(&session).unwrap_or_default() {
                self.reporter.say(&early, None);
            }
            let label = if *direction == Direction::Sending { "sending" } else { "receiving" };
            let bar = self.reporter.bar(label, *bytes);
            self.under_way.insert(session, TransferUnderWay { bar, travelled: 0 });
        }
    }

    /// Ends a transfer: removes its bar.
    pub(crate) fn end(&mut self, session: Option<SessionNumber>) {
        self.under_way.remove(&session);
        self.early.remove(&session);
    }

    /// Returns what prints.
    pub(crate) fn reporter(&self) -> &Reporter {
        &self.reporter
    }
}

/// Progress on the screen. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct Bar(Shown);

/// Where progress is shown.
#[derive(Debug)]
enum Shown {
    /// As a bar with a label.
    Bar(ProgressBar, Label),
    /// As lines for programs.
    Json {
        told: Mutex<Instant>,
        total: u64,
    },
    Nothing,
}

impl Bar {
    /// Shows that so many bytes, or parts of the work, are done.
    pub(crate) fn set(&self, bytes: u64) {
        match &self.0 {
            Shown::Bar(bar, _) => bar.set_position(bytes.min(bar.length().unwrap_or(bytes))),
            Shown::Json { told, total } => {
                let mut told = told.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                if told.elapsed() >= JSON_INTERVAL {
                    *told = Instant::now();
                    print_json(&Progress { bytes: bytes.min(*total), total: *total });
                }
            }
            Shown::Nothing => {}
        }
    }

    /// Shows what is being done.
    pub(crate) fn label(&self, text: &str) {
        if let Shown::Bar(bar, label) = &self.0 {
            label.set(text);
            bar.tick();
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Shown::Bar(bar, _) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

/// Prints one line of JSON.
pub(crate) fn print_json(value: &impl Serialize) {
    print_line(&serde_json::to_string(value).expect("events have string keys"));
}

/// Prints a line for programs. If the reader is gone, the line is lost.
pub(crate) fn print_line(line: &str) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{line}").and_then(|()| stdout.flush());
}

/// Interval between calls of [`Bar::set`].
pub(crate) const TICK: Duration = Duration::from_millis(100);
/// Interval between lines of progress for programs.
const JSON_INTERVAL: Duration = Duration::from_millis(500);
/// Greatest number of peers that the first line of a transfer names.
const PEERS_SHOWN_MAX: usize = 4;
/// Name of a peer whose address is not known.
const SOMEBODY: &str = "an unknown host";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_said_only_of_bytes_that_have_travelled() {
        let bytes = 8 << 20;
        let said = |travelled: Travelled| travelled.of(bytes, 2.0);
        assert_eq!(said(Travelled::Here(bytes)), ", 4.0 MiB/s each");
        assert_eq!(said(Travelled::Here(0)), "; 8 MiB were already here");
        assert_eq!(said(Travelled::Here(1 << 20)), "; 7 MiB were already here");
        assert_eq!(said(Travelled::from_here(Some(bytes - 1))), ", 4.0 MiB/s each");
        assert_eq!(said(Travelled::from_here(Some(1 << 20))), "");
        assert_eq!(said(Travelled::from_here(None)), "");
    }
}
