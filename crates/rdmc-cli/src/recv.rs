//! `rdmc recv`: receives files and directories, from any number of senders.

use std::time::Duration;

use futures::StreamExt;
use rdmc_files::{Event, FileReceiver, ReceiverEvent, TransferError};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::RecvOptions;
use crate::exit::{Exit, Signal, Stop, of_transfer};
use crate::progress::{Reporter, Screen, TransferView};
use crate::wording::wording;

/// Receives until a signal comes. With `--once`, receives one transfer.
pub(crate) async fn run(options: RecvOptions, screen: Screen, stop: Stop) -> anyhow::Result<()> {
    // The signal kills by default. Handled, the limit of file sizes (ulimit -f) fails only one transfer.
    let _file_size_limit = signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?;
    let RecvOptions { once, drain, .. } = options;
    let builder = FileReceiver::builder(options.dir)
        .fabric(options.fabric.settings(options.security.encrypt))
        .security(options.security.open()?)
        .bytes_max(options.max_size)
        .overwrite(!options.no_overwrite)
        .keep_parts(!options.discard_parts)
        .fsync(options.fsync)
        .pool_bytes_max(options.pool_size)
        .wording(wording());
    let builder = if once { builder.sessions_max(1) } else { builder };
    let mut receiver = builder.bind(&options.listen).await.map_err(of_transfer)?;
    let handle = receiver.stop_handle();
    let mut view = TransferView::new(Reporter::new(options.output, screen));
    let (mut told, mut outcome) = (None, None);
    loop {
        tokio::select! {
            happened = receiver.next() => {
                let Some(ReceiverEvent { session, event, .. }) = happened else { break };
                match event {
                    // The end of the program tells it.
                    Event::Failed(TransferError::Stopped) => view.end(session),
                    Event::Failed(error) if once => {
                        view.end(session);
                        outcome.get_or_insert(Err(of_transfer(error)));
                        handle.stop();
                    }
                    Event::Done { .. } if once => {
                        view.show(session, &event);
                        outcome.get_or_insert(Ok(()));
                        handle.stop();
                    }
                    event => view.show(session, &event),
                }
            }
            signal = stop.signalled(), if told.is_none() => {
                told = Some(signal);
                let limit = if signal == Signal::Terminate { Duration::from_secs(drain) } else { Duration::ZERO };
                handle.drain(limit);
            }
        }
    }
    let signalled = told.map_or(Ok(()), |signal| Err(Exit::Signal(signal).into()));
    outcome.unwrap_or(signalled)
}
