//! `rdmc send`: sends files and directories.

use std::time::Duration;

use futures::StreamExt;
use rdmc_files::{FileSender, TransferError};

use crate::cli::SendOptions;
use crate::exit::{Exit, Stop, of_transfer};
use crate::progress::{Reporter, Screen, TransferView};
use crate::wording::wording;

/// Sends the files to all receivers.
pub(crate) async fn run(options: SendOptions, screen: Screen, stop: Stop) -> anyhow::Result<()> {
    let security = options.security.open()?;
    let members = u32::try_from(options.to.len() + 1).unwrap_or(u32::MAX);
    let algorithm = options.hybrid.resolve_given(options.algorithm, members)?;
    let sender = FileSender::builder(options.to)
        .algorithm(algorithm)
        .block_size(options.block_size.given())
        .port_rate(options.port_rate)
        .fabric(options.fabric.settings(options.security.encrypt))
        .security(security)
        .invitation_limit(Duration::from_secs(options.timeout))
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
