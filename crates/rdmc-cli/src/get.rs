//! `rdmc get` and `rdmc put`: files of a distant host.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use futures::StreamExt;
use rdmc_files::manifest::EntryPath;
use rdmc_files::size::{ByteSize, Rate};
use rdmc_files::words::count;
use rdmc_files::{PortRate, RemoteEvent, RemoteLocation, RemoteOutcome, RemoteSettings, RemoteTransfer};
use serde::Serialize;

use crate::address::PORT_DEFAULT;
use crate::exit::{Exit, Stop, of_transfer};
use crate::fabric::SessionFabricOptions;
use crate::named::Switch;
use crate::progress::{Bar, OutputOptions, Reporter, Screen, print_json};
use crate::security::SecurityOptions;
use crate::{examples, exit, size};

/// Options of the path between two hosts.
#[derive(Clone, Debug, Args)]
pub(crate) struct PathOptions {
    #[command(flatten)]
    fabric: SessionFabricOptions,
    /// Connections that carry the data, 1 to 64; the client decides [default: 4, or 8 for TCP without BBR and 16 for a
    /// distant RDMA device]
    #[arg(long, env = "RDMC_STREAMS", value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    streams: Option<u16>,
    /// Most bytes in flight, and in memory, in each direction: 512M, 1GiB (powers of 1024)
    #[arg(long, env = "RDMC_IN_FLIGHT", default_value = "256MiB", value_name = "SIZE", value_parser = size::parse_pool)]
    in_flight: u64,
    /// Seconds for which a lost connection is tried again before the transfer fails
    #[arg(long, env = "RDMC_RESUME", default_value_t = 60, value_name = "SECONDS")]
    resume: u64,
}

/// The rate at which this end receives.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct RateOption {
    /// Receive at most so many bits per second: 200M, 10G (powers of 1000). Give what a policer on the path admits; by
    /// default data comes as fast as the path carries it
    #[arg(long, env = "RDMC_RATE", value_name = "RATE", value_parser = parse_rate)]
    rate: Option<PortRate>,
}

/// Parses the rate of a path.
pub(crate) fn parse_rate(text: &str) -> Result<PortRate, String> {
    text.parse().map_err(|_| {
        format!(
            "{text:?} is not a rate: write bits per second, or a number with k, M, G or T (powers of 1000), from 1k to \
             10T: 200M; leave the option out if there is no limit"
        )
    })
}

impl PathOptions {
    /// Returns the settings of a session.
    pub(crate) fn settings(
        &self,
        security: &SecurityOptions,
        rate: Option<RateOption>,
    ) -> anyhow::Result<RemoteSettings> {
        let mut settings = RemoteSettings::default();
        settings.security = security.open()?;
        settings.encrypt = security.encrypt;
        settings.fabric = self.fabric.settings();
        settings.streams = self.streams;
        let rate = rate.and_then(|option| option.rate);
        settings.rate = rate.map(|rate| rdmc_wan::Rate::bytes_per_second((rate.bits_per_second() / 8).max(1)));
        settings.in_flight = Some(self.in_flight);
        settings.resume_within = Some(Duration::from_secs(self.resume));
        Ok(settings)
    }
}

/// Options of `rdmc get`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = exit::HELP_OF_TWO,
    after_long_help = examples::of_get(),
    override_usage = "rdmc get [OPTIONS] <HOST[:PORT]/PATH>... <DIR>\n       \
                      rdmc get [OPTIONS] --from <HOST[:PORT]/PATH>... --to <HOST[:PORT]/PATH>"
)]
pub(crate) struct GetOptions {
    /// Files and directories of one server, and at last the directory for them, which must exist. HOST alone is all
    /// that it serves. The port is 7471 unless given
    #[arg(num_args = 1.., value_names = ["HOST[:PORT]/PATH", "DIR"])]
    places: Vec<OsString>,
    /// Copy these files and directories of one server to another one; the data does not pass through this host. Needs
    /// --to. The server is named as in the other one's --fetch-from
    #[arg(long, value_name = "HOST[:PORT]/PATH", num_args = 1.., requires = "to", conflicts_with = "places")]
    from: Vec<String>,
    /// The directory of the server that gets them, which must exist. That server runs with --writable and --fetch-from,
    /// and uses its own key, streams and rate
    #[arg(long, value_name = "HOST[:PORT]/PATH", requires = "from", conflicts_with_all = TO_ITSELF)]
    to: Option<String>,
    /// Keep files that exist, and fail; by default files are replaced
    #[arg(long, env = "RDMC_NO_OVERWRITE", value_parser = Switch)]
    no_overwrite: bool,
    /// Keep no parts of files when the transfer is interrupted; by default a later one brings only the missing blocks
    #[arg(long, env = "RDMC_DISCARD_PARTS", value_parser = Switch)]
    discard_parts: bool,
    /// Force every file to the disk (fsync) before it takes its name; by default the kernel writes it later
    #[arg(long, env = "RDMC_FSYNC", value_parser = Switch)]
    fsync: bool,
    #[command(flatten)]
    rate: RateOption,
    #[command(flatten)]
    path: PathOptions,
    #[command(flatten)]
    security: SecurityOptions,
    #[command(flatten)]
    output: OutputOptions,
}

/// Options of `rdmc put`.
#[derive(Clone, Debug, Args)]
#[command(after_help = exit::HELP_OF_TWO, after_long_help = examples::of_put())]
pub(crate) struct PutOptions {
    /// Files and directories
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The server's directory for them, which must exist; HOST alone is the one that it serves. The port is 7471 unless
    /// given
    #[arg(value_name = "HOST[:PORT]/PATH")]
    to: String,
    #[command(flatten)]
    path: PathOptions,
    #[command(flatten)]
    security: SecurityOptions,
    #[command(flatten)]
    output: OutputOptions,
}

impl GetOptions {
    /// Returns the amount and form of the output.
    pub(crate) fn output(&self) -> OutputOptions {
        self.output
    }
}

impl PutOptions {
    /// Returns the amount and form of the output.
    pub(crate) fn output(&self) -> OutputOptions {
        self.output
    }
}

/// Gets files.
pub(crate) async fn get(mut options: GetOptions, screen: Screen, stop: Stop) -> anyhow::Result<()> {
    let mut settings = options.path.settings(&options.security, Some(options.rate))?;
    if let Some(to) = &options.to {
        let (address, paths) = one_server(&options.from)?;
        let copying = rdmc_files::copy(&address, paths, &location(to)?, settings);
        return drive(copying, options.output, screen, stop, "copying").await;
    }
    settings.overwrite = !options.no_overwrite;
    settings.keep_parts = !options.discard_parts;
    settings.fsync = options.fsync;
    let dir = options.places.pop().filter(|dir| !dir.is_empty() && !options.places.is_empty());
    let dir = dir.ok_or_else(|| {
        Exit::Usage.error("name what to get, and at last the directory for it: rdmc get node2/data /here")
    })?;
    let from = options.places.into_iter().map(|place| {
        place.into_string().map_err(|place| Exit::Usage.error(format!("{} is no UTF-8", place.display())))
    });
    let (address, paths) = one_server(&from.collect::<anyhow::Result<Vec<_>>>()?)?;
    let getting = rdmc_files::get(&address, paths, dir, settings);
    drive(getting, options.output, screen, stop, "receiving").await
}

/// Returns the address of the one server that has all of these, and their paths there.
fn one_server(from: &[String]) -> anyhow::Result<(String, Vec<EntryPath>)> {
    let locations = from.iter().map(|text| location(text)).collect::<anyhow::Result<Vec<_>>>()?;
    let address = locations[0].address.clone();
    if let Some(other) = locations.iter().find(|location| location.address != address) {
        let what = format!("{address} and {} are two servers: get from one after the other", other.address);
        return Err(Exit::Usage.error(what));
    }
    Ok((address, locations.into_iter().map(|location| location.path).collect()))
}

/// Puts files.
pub(crate) async fn put(options: PutOptions, screen: Screen, stop: Stop) -> anyhow::Result<()> {
    let settings = options.path.settings(&options.security, None)?;
    let to = location(&options.to)?;
    drive(rdmc_files::put(&to.address, options.files, to.path, settings), options.output, screen, stop, "sending").await
}

fn location(text: &str) -> anyhow::Result<RemoteLocation> {
    RemoteLocation::parse(text, PORT_DEFAULT).map_err(|what| Exit::Usage.error(what))
}

/// What programs read.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum GetEvent<'a> {
    Listed { files: u64, bytes: u64 },
    File { path: &'a str, bytes: u64 },
    Skipped { path: &'a str, reason: &'a str },
    Done { files: u64, bytes: u64, moved: u64, skipped: u64, resumed: u64, seconds: f64 },
}

/// Does the work of a transfer, and shows it.
async fn drive(
    mut transfer: RemoteTransfer,
    output: OutputOptions,
    screen: Screen,
    stop: Stop,
    label: &str,
) -> anyhow::Result<()> {
    let began = Instant::now();
    let reporter = Reporter::new(output, screen);
    let mut bar: Option<Bar> = None;
    loop {
        let event = tokio::select! {
            event = transfer.next() => event,
            signal = stop.signalled() => {
                drop(transfer);
                // So that the other end learns it.
                tokio::time::sleep(LAST_WORD).await;
                return Err(Exit::Signal(signal).into());
            }
        };
        let Some(event) = event else { break };
        match event {
            RemoteEvent::Listed { files, bytes, .. } => {
                say(&reporter, &GetEvent::Listed { files, bytes });
                bar = Some(reporter.bar(label, bytes));
            }
            RemoteEvent::Progress { bytes, .. } => bar.iter().for_each(|bar| bar.set(bytes)),
            RemoteEvent::File { path, bytes, .. } => say(&reporter, &GetEvent::File { path: &path, bytes }),
            RemoteEvent::Skipped { path, reason, .. } => {
                say(&reporter, &GetEvent::Skipped { path: &path, reason: &reason });
                reporter.warn(&format!("skipped {path}: {reason}"));
            }
            // Later events are for other programs.
            _ => {}
        }
    }
    drop(bar);
    let outcome = transfer.outcome().expect("the stream has ended").clone().map_err(of_transfer)?;
    let RemoteOutcome { files, bytes, moved, skipped, resumed, .. } = outcome;
    let seconds = began.elapsed().as_secs_f64();
    say(&reporter, &GetEvent::Done { files, bytes, moved, skipped, resumed, seconds });
    reporter.print(&summary(&outcome, seconds));
    if skipped > 0 { Err(Exit::Partial.error(format!("{} left out", count(skipped, "file")))) } else { Ok(()) }
}

/// Returns the last line for people.
fn summary(outcome: &RemoteOutcome, seconds: f64) -> String {
    let RemoteOutcome { files, bytes, moved, skipped, resumed, .. } = *outcome;
    let rate = Rate { bytes: moved, seconds };
    let mut text = format!("{}, {} in {seconds:.2} s, {rate}", count(files, "file"), ByteSize(bytes));
    if moved < bytes {
        text += &format!("; {} were already there", ByteSize(bytes - moved));
    }
    if skipped > 0 {
        text += &format!("; {skipped} skipped");
    }
    if resumed > 0 {
        text += &format!("; the connection was lost and resumed {}", count(resumed, "time"));
    }
    text
}

/// Options of how files are received and stored here.
const TO_ITSELF: [&str; 6] = ["rate", "streams", "in_flight", "no_overwrite", "discard_parts", "fsync"];
/// How long the last word to the other end may take.
const LAST_WORD: Duration = Duration::from_millis(200);

fn say(reporter: &Reporter, event: &GetEvent<'_>) {
    if reporter.is_json() {
        print_json(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_transfer_says_so() {
        let mut outcome = RemoteOutcome::default();
        (outcome.files, outcome.bytes, outcome.moved, outcome.skipped) = (1, 2048, 1024, 2);
        assert_eq!(summary(&outcome, 1.0), "1 file, 2 KiB in 1.00 s, 1.0 KiB/s; 1 KiB were already there; 2 skipped");
        outcome.resumed = 1;
        assert!(summary(&outcome, 1.0).ends_with("; the connection was lost and resumed 1 time"));
    }

    #[test]
    fn a_rate_that_cannot_be_is_refused_with_the_remedy() {
        for text in ["0", "fast", "-1"] {
            let error = parse_rate(text).unwrap_err();
            assert!(error.contains(&format!("{text:?}")) && error.contains("leave the option out"), "{error}");
        }
        assert!(parse_rate("200M").is_ok());
    }
}
