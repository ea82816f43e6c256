//! `rdmc send`: sends files and directories.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt;
use rdmc_files::{FileSender, TransferError};

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
    let sender = FileSender::builder(receivers)
        .algorithm(algorithm)
        .block_size(options.block_size.given())
        .racks(racks)
        .port_rate(options.port_rate)
        .round_trip(options.path_rtt)
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
    let mut told = None;
    loop {
        tokio::select! {
            event = sending.next() => match event {
                Some(event) => view.show(None, &event),
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

#[cfg(test)]
mod tests {
    use super::*;

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
