//! Turns, which keep the messages of a group in order.

use tokio::sync::oneshot;

/// Hands out turns, each of which begins when the one before it has ended.
#[derive(Debug, Default)]
pub(crate) struct Turnstile {
    last: Option<oneshot::Receiver<()>>,
}

impl Turnstile {
    /// Takes the next turn.
    pub(crate) fn next(&mut self) -> Turn {
        let (ends, ended) = oneshot::channel();
        Turn { before: self.last.replace(ended), ends }
    }
}

/// One turn. If it is dropped before it has ended, as when its transfer fails, no later turn begins.
#[derive(Debug)]
pub(crate) struct Turn {
    before: Option<oneshot::Receiver<()>>,
    ends: oneshot::Sender<()>,
}

impl Turn {
    /// Waits until the turn before this one has ended.
    pub(crate) async fn wait(&mut self) {
        if let Some(before) = &mut self.before {
            if before.await.is_err() {
                std::future::pending::<()>().await;
            }
            self.before = None;
        }
    }

    /// Lets the next turn begin.
    pub(crate) fn end(self) {
        // Fails only if there is no next turn.
        let _ = self.ends.send(());
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_turn_begins_when_the_one_before_it_ends() {
        let mut turnstile = Turnstile::default();
        let (mut first, mut second, mut third) = (turnstile.next(), turnstile.next(), turnstile.next());
        assert!(first.wait().now_or_never().is_some());
        assert!(second.wait().now_or_never().is_none());
        first.end();
        assert!(second.wait().now_or_never().is_some());
        assert!(third.wait().now_or_never().is_none());
        // It failed: the next one must not take its place.
        drop(second);
        assert!(third.wait().now_or_never().is_none());
    }
}
