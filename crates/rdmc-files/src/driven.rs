//! Work that makes progress when the stream of its events is polled.

use std::fmt;
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::event::ReceiverEvent;

/// Work that produces events, and its outcome.
pub(crate) struct Driven<T> {
    events: mpsc::UnboundedReceiver<ReceiverEvent>,
    /// `None` when it is done.
    work: Option<BoxFuture<'static, T>>,
    outcome: Option<T>,
}

impl<T> Driven<T> {
    /// Makes a stream of the events that `work` produces.
    pub(crate) fn new(
        events: mpsc::UnboundedReceiver<ReceiverEvent>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Self {
        Self { events, work: Some(work.boxed()), outcome: None }
    }

    /// Returns the next event. Polls the work only if no event is waiting.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<ReceiverEvent>> {
        loop {
            if let Ok(event) = self.events.try_recv() {
                return Poll::Ready(Some(event));
            }
            let Some(work) = &mut self.work else { return Poll::Ready(None) };
            match work.poll_unpin(cx) {
                Poll::Ready(outcome) => (self.outcome, self.work) = (Some(outcome), None),
                Poll::Pending if self.events.is_empty() => return Poll::Pending,
                Poll::Pending => {}
            }
        }
    }

    /// Returns the outcome, once, after the last event.
    pub(crate) fn take_outcome(&mut self) -> Option<T> {
        self.outcome.take()
    }
}

impl<T> fmt::Debug for Driven<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driven").field("done", &self.work.is_none()).finish_non_exhaustive()
    }
}
