//! Turns: what keeps the messages of a group in order.

use tokio::sync::oneshot;

/// Hands out turns, each of which begins when the one before it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Turnstile {
    last: Option<oneshot::Receiver<()>>,
}

impl Turnstile {
    /// Takes the next turn.
    pub(crate) fn next(&mut self) -> Turn {
        let (ends, ended) = oneshot::channel();
        Turn { before: self.last.replace(ended), _ends: ends }
    }
}

/// One turn; it ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    before: Option<oneshot::Receiver<()>>,
    _ends: oneshot::Sender<()>,
}

impl Turn {
    /// Waits until the turn before this one has ended.
    pub(crate) async fn wait(&mut self) {
        if let Some(before) = &mut self.before {
            // Nothing is ever sent: the wait ends when the other end is dropped.
            let _ = before.await;
            self.before = None;
        }
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
        drop(first);
        assert!(second.wait().now_or_never().is_some());
        assert!(third.wait().now_or_never().is_none());
        drop(second);
        assert!(third.wait().now_or_never().is_some());
    }
}
