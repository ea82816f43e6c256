//! `rdmc send`: sends files and directories.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt;
use rdmc_files::size::ByteSize;
use rdmc_files::{Event, FileSender, PortRate, TransferError};

use crate::address::AddressList;
use crate::cli::SendOptions;
use crate::exit::{Exit, Stop, of_transfer};
use crate::progress::{Reporter, Screen, TransferView};
use crate::wording::wording;

/// Sends the files to all receivers.
pub(crate) async fn run(options: SendOptions, screen: Screen, stop: Stop) -> anyhow::Result<()> {
    check_files(&options.files)?;
    let security = options.security.open()?;
    let receivers: Vec<String> = options.to.into_iter().flat_map(|AddressList(addresses)| addresses).collect();
    let members = u32::try_from(receivers.len() + 1).unwrap_or(u32::MAX);
    let (algorithm, racks) = options.hybrid.selection(options.algorithm, members)?;
    let given = GivenOptions {
        algorithm: algorithm.is_some(),
        block_size: options.block_size.given().is_some(),
        port_rate: options.port_rate.is_some(),
        path_rtt: options.path_rtt.is_some(),
        racks: options.hybrid.has_racks(),
    };
    let sender = FileSender::builder(receivers)
        .algorithm(algorithm)
        .block_size(options.block_size.given())
        .racks(racks)
        .port_rate(options.port_rate)
        .round_trip(options.path_rtt)
        .rate(options.rate)
        .fabric(options.fabric.settings(options.security.encrypt))
        .security(security)
        .invitation_limit(Duration::from_secs(options.timeout))
        .wait(options.wait)
        .detection(options.detection)
        .on_failure(options.on_failure)
        .evict_after(options.evict_after.map(Duration::from_secs))
        .wording(wording())
        .build()
        .map_err(of_transfer)?;
    let mut sending = sender.send(options.files);
    let mut view = TransferView::new(Reporter::new(options.output, screen));
    if let Some(bytes) = options.block_size.given().filter(|bytes| *bytes < BLOCK_SIZE_SHORT) {
        let block = ByteSize(bytes.into());
        let message = format!("blocks of {block} are short, so that most of the time goes into their handling");
        view.reporter().warning(&message);
    }
    let mut told = None;
    loop {
        tokio::select! {
            event = sending.next() => match event {
                Some(event) => view.show_with(None, &event, |reporter| given.explain(&event, reporter)),
                None => break,
            },
            signal = stop.signalled(), if told.is_none() => {
                told = Some(signal);
                sending.stop_handle().stop();
            }
        }
    }
    drop(view);
    match (sending.outcome().await, told) {
        (Err(TransferError::Stopped), Some(signal)) => Err(Exit::Signal(signal).into()),
        (outcome, _) => outcome.map(drop).map_err(of_transfer),
    }
}

/// Which options of the plan are given. The cost model chooses the rest.
#[derive(Clone, Copy, Debug)]
struct GivenOptions {
    algorithm: bool,
    block_size: bool,
    port_rate: bool,
    path_rtt: bool,
    racks: bool,
}

impl GivenOptions {
    /// Says, when the transfer has started, what the choice has assumed, and which options have had no effect.
    fn explain(self, event: &Event, reporter: &Reporter) {
        let Event::Started { fabric, path: Some(path), plan, .. } = event else { return };
        // Members of one host have no path between them.
        let is_network = fabric.fabric != SHM;
        if is_network && !(self.algorithm && self.block_size) && !reporter.is_json() {
            reporter.warn(&self.assumptions(path.port_rate_bits, path.round_trip_ms));
        }
        let without_effect = [
            (self.racks && plan.racks.is_empty(), "--racks (or RDMC_RACKS)"),
            (self.port_rate && !is_network, "--port-rate (or RDMC_PORT_RATE)"),
            (self.path_rtt && !is_network, "--path-rtt (or RDMC_PATH_RTT)"),
        ];
        for (_, option) in without_effect.into_iter().filter(|(is_given, _)| *is_given) {
            reporter.warning(&format!("{option} has no effect: all members are on one host and share memory"));
        }
    }

    fn assumptions(self, port_rate_bits: u64, round_trip_ms: f64) -> String {
        let rate = PortRate::from_bits_per_second(port_rate_bits).unwrap_or_default();
        let known_by = match self.port_rate {
            true => "given",
            // A device may have just this rate.
            false if rate == PortRate::default() => "assumed",
            false => "as this host's",
        };
        // Shorter round trips hardly matter.
        let far = match round_trip_ms {
            ..0.5 => String::new(),
            ms @ ..1000.0 => format!(", {ms:.1} ms to the farthest and back"),
            ms => format!(", {:.1} s to the farthest and back", ms / 1e3),
        };
        format!("chosen for ports of {rate} ({known_by}){far}")
    }
}

/// Refuses the address of a receiver that stands in the place of a file, as after `--to 10.0.0.2, 10.0.0.3`.
fn check_files(files: &[PathBuf]) -> anyhow::Result<()> {
    for file in files {
        let text = file.to_string_lossy();
        let address = text.trim_matches(',');
        let is_address = address.parse::<IpAddr>().is_ok() || address.parse::<SocketAddr>().is_ok();
        if is_address && !file.exists() {
            return Err(Exit::Usage.error(format!(
                "there is no file {text}: to send to {address}, too, separate the receivers of --to by commas only, or quote \
                 them"
            )));
        }
    }
    Ok(())
}

/// Name of the fabric that only shares memory.
const SHM: &str = "shm";
/// The block size in bytes below which blocks cost more than they carry.
const BLOCK_SIZE_SHORT: u32 = 4 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_explained_by_the_rate_of_the_ports_and_the_round_trip() {
        let explained = |port_rate, bits, ms| {
            GivenOptions { algorithm: false, block_size: false, port_rate, path_rtt: false, racks: false }
                .assumptions(bits, ms)
        };
        let far = ", 24.0 ms to the farthest and back";
        assert_eq!(explained(true, 2_500_000_000, 24.0), format!("chosen for ports of 2.5 Gbit/s (given){far}"));
        assert_eq!(explained(false, 2_500_000_000, 0.2), "chosen for ports of 2.5 Gbit/s (assumed)");
        assert_eq!(explained(false, 10_000_000_000, 0.2), "chosen for ports of 10 Gbit/s (as this host's)");
        assert!(explained(true, 1_000_000, 60_000.0).ends_with(", 60.0 s to the farthest and back"));
    }

    #[test]
    fn an_address_among_the_files_is_refused() {
        for wrong in ["10.0.0.3", "10.0.0.3,", "10.0.0.3:7471", "[::1]:80"] {
            let error = check_files(&["Cargo.toml".into(), wrong.into()]).expect_err(wrong);
            assert_eq!(Exit::code_of(&error), 2, "{wrong}");
            assert!(format!("{error:#}").contains(wrong), "{error:#}");
        }
        assert!(check_files(&["Cargo.toml".into(), "10.0.0".into(), "missing".into()]).is_ok());
    }
}
