//! Handles that end transfers in good order.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Ends a sender or a receiver in good order, so that its peers learn that it leaves. Cheap to clone.
///
/// The stream must then be polled to its end, because polling drives the rest of the work.
#[derive(Clone, Debug)]
pub struct StopHandle(Arc<watch::Sender<Option<Instant>>>);

impl StopHandle {
    /// Ends all transfers at once.
    pub fn stop(&self) {
        self.drain(Duration::ZERO);
    }

    /// Takes no further transfer, and ends those under way after `limit`.
    ///
    /// A later call can only shorten the time.
    pub fn drain(&self, limit: Duration) {
        let end = Instant::now() + limit;
        self.0.send_if_modified(|known| {
            let is_sooner = known.is_none_or(|known| end < known);
            if is_sooner {
                *known = Some(end);
            }
            is_sooner
        });
    }
}

/// The end of a [`StopHandle`] inside the work.
#[derive(Clone, Debug)]
pub(crate) struct Stop(watch::Receiver<Option<Instant>>);

impl Stop {
    /// Makes both ends.
    pub(crate) fn new() -> (StopHandle, Self) {
        let (tell, stop) = watch::channel(None);
        (StopHandle(Arc::new(tell)), Self(stop))
    }

    /// Waits until no further transfer may begin.
    pub(crate) async fn requested(&self) {
        let mut end = self.0.clone();
        if end.wait_for(Option::is_some).await.is_err() {
            // The last handle is gone.
            std::future::pending().await
        }
    }

    /// Waits until the transfers under way must end.
    pub(crate) async fn due(&self) {
        self.requested().await;
        let mut end = self.0.clone();
        loop {
            let at = end.borrow_and_update().expect("it was requested, which is not taken back");
            tokio::select! {
                () = tokio::time::sleep_until(at) => return,
                Ok(()) = end.changed() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const DAY: Duration = Duration::from_secs(24 * 3600);

    #[tokio::test]
    async fn what_is_under_way_may_go_on_until_the_soonest_limit() {
        let (handle, stop) = Stop::new();
        assert!(stop.requested().now_or_never().is_none());
        handle.drain(DAY);
        assert!(stop.requested().now_or_never().is_some() && stop.due().now_or_never().is_none());
        // Also for a task that already waits.
        tokio::join!(stop.due(), async { handle.stop() });
        handle.drain(DAY);
        stop.due().await;
    }

    #[tokio::test]
    async fn a_handle_that_is_gone_stops_nothing() {
        let (handle, stop) = Stop::new();
        drop(handle);
        assert!(stop.due().now_or_never().is_none());
    }
}
