//! `rdmc serve`: serves a directory to `rdmc get` and `rdmc put`.

use std::path::PathBuf;

use clap::Args;
use rdmc_files::words::{count, printable};
use rdmc_files::{RemoteLocation, RemoteServer, RemoteSettings, ServedTransfer, size::ByteSize};
use serde::Serialize;

use crate::address::{self, LISTEN_DEFAULT, PORT_DEFAULT};
use crate::exit::{Exit, Stop, of_transfer, tell};
use crate::get::{PathOptions, RateOption};
use crate::named::Switch;
use crate::progress::{OutputOptions, print_json};
use crate::security::SecurityOptions;
use crate::{examples, exit};

/// Options of `rdmc serve`.
#[derive(Clone, Debug, Args)]
#[command(after_help = exit::HELP_OF_TWO, after_long_help = examples::of_serve())]
pub(crate) struct ServeOptions {
    /// The directory. Nothing outside it is reached, not even through a symbolic link
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The address to listen at. The default is for clients on this host only; 0.0.0.0 or :7471 is for clients
    /// anywhere. The port is 7471 unless given; port 0 is any free port
    #[arg(
        long,
        short,
        env = "RDMC_LISTEN",
        default_value = LISTEN_DEFAULT,
        value_name = "ADDRESS[:PORT]",
        value_parser = address::parse_listen
    )]
    listen: String,
    /// Let clients put files into the directory; by default they only get files
    #[arg(long, env = "RDMC_WRITABLE", value_parser = Switch)]
    writable: bool,
    /// Servers from which a client may have this one fetch files (`rdmc get --to`); needs --writable. So clients can
    /// read there what this server may. The port is 7471 unless given
    #[arg(
        long,
        env = "RDMC_FETCH_FROM",
        value_name = "HOST[:PORT],…",
        value_delimiter = ',',
        requires = "writable",
        value_parser = parse_server
    )]
    fetch_from: Vec<String>,
    /// Force files to the disk (fsync) before a client learns that they are stored; by default the kernel writes them
    /// later
    #[arg(long, env = "RDMC_FSYNC", value_parser = Switch)]
    fsync: bool,
    /// Keep files that exist: a client that would replace one fails; by default files are replaced
    #[arg(long, env = "RDMC_NO_OVERWRITE", value_parser = Switch)]
    no_overwrite: bool,
    #[command(flatten)]
    rate: RateOption,
    #[command(flatten)]
    path: PathOptions,
    #[command(flatten)]
    security: SecurityOptions,
    #[command(flatten)]
    output: OutputOptions,
}

impl ServeOptions {
    /// Returns the amount and form of the output.
    pub(crate) fn output(&self) -> OutputOptions {
        self.output
    }

    fn settings(&self) -> anyhow::Result<RemoteSettings> {
        let mut settings = self.path.settings(&self.security, Some(self.rate))?;
        settings.fsync = self.fsync;
        settings.overwrite = !self.no_overwrite;
        Ok(settings)
    }
}

/// Parses the address of a server.
fn parse_server(text: &str) -> Result<String, String> {
    let RemoteLocation { address, path } = RemoteLocation::parse(text, PORT_DEFAULT)?;
    if path.0.is_empty() { Ok(address) } else { Err("give HOST or HOST:PORT, without a path".to_owned()) }
}

/// What programs read.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum ServeEvent<'a> {
    Listening { address: &'a str, dir: String, writable: bool },
    Warning { message: &'a str },
    Served { from: Option<String>, request: String, files: u64, bytes: u64, moved: u64, skipped: u64, resumed: u64 },
    Failed { from: Option<String>, request: String, code: u8, message: String },
}

/// Serves until a signal comes.
pub(crate) async fn run(options: ServeOptions, stop: Stop) -> anyhow::Result<()> {
    let server = RemoteServer::builder(&options.dir).writable(options.writable);
    let server = server.fetches_from(options.fetch_from.clone()).settings(options.settings()?);
    let mut server = server.bind(&options.listen).await.map_err(of_transfer)?;
    let dir = printable(&options.dir.to_string_lossy());
    let address = server.local_address().to_owned();
    if !options.security.is_given() && !address::is_loopback(&address) {
        let what = match (options.writable, options.fetch_from.is_empty()) {
            (false, _) => "read what is served",
            (true, true) => "read what is served, and put files here",
            (true, false) => "read what is served, put files here, and fetch from the servers that you named",
        };
        let warning = format!("anybody who reaches {address} can {what}: --key keeps others out");
        say(options.output, &ServeEvent::Warning { message: &warning });
    }
    say(options.output, &ServeEvent::Listening { address: server.local_address(), dir, writable: options.writable });
    loop {
        tokio::select! {
            ended = server.next() => {
                let ServedTransfer { from, request, outcome, .. } = ended;
                let from = from.map(|from| from.to_string());
                say(options.output, &match outcome {
                    Ok(done) => ServeEvent::Served {
                        from,
                        request,
                        files: done.files,
                        bytes: done.bytes,
                        moved: done.moved,
                        skipped: done.skipped,
                        resumed: done.resumed,
                    },
                    Err(error) => ServeEvent::Failed { from, request, code: error.code(), message: error.to_string() },
                });
            }
            signal = stop.signalled() => {
                server.close().await;
                return Err(Exit::Signal(signal).into());
            }
        }
    }
}

fn say(output: OutputOptions, event: &ServeEvent<'_>) {
    if output.json {
        return print_json(event);
    }
    let from = |from: &Option<String>| from.as_deref().unwrap_or("an unknown host").to_owned();
    match event {
        _ if output.quiet && !matches!(event, ServeEvent::Failed { .. }) => {}
        ServeEvent::Warning { message } => tell(format_args!("warning: {message}")),
        ServeEvent::Listening { address, dir, writable } => {
            let how = if *writable { "gets and puts" } else { "gets" };
            tell(format_args!("serving {dir} at {address}: {how}"));
        }
        ServeEvent::Served { from: host, request, files, bytes, moved, skipped, resumed } => {
            let mut text = format!("{}: {request}: {}, {}", from(host), count(*files, "file"), ByteSize(*bytes));
            if moved != bytes {
                text += &format!(", {} moved", ByteSize(*moved));
            }
            if *skipped > 0 {
                text += &format!(", {skipped} skipped");
            }
            if *resumed > 0 {
                text += &format!(", resumed {}", count(*resumed, "time"));
            }
            tell(text);
        }
        ServeEvent::Failed { from: host, request, message, .. } => {
            tell(format_args!("{}: {request}: {}", from(host), printable(message)));
        }
    }
}
