//! What a member does, whichever way messages take: single messages, each answered, then a stream of them.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

/// Receivers of every message.
pub(crate) const RECEIVERS: u16 = 3;

/// How a member waits. Both leave the core to others, since there are more members than cores.
#[derive(Clone, Copy, ValueEnum, Debug)]
pub(crate) enum Waiting {
    /// Sleeps until it is woken, or for a moment where nobody can wake it.
    Sleep,
    /// Looks again and again, and yields the core after each look.
    Yield,
}

impl Waiting {
    /// Waits a moment before the next look. For members that cannot be woken.
    pub(crate) fn pause(self) {
        match self {
            Waiting::Sleep => thread::sleep(Duration::from_micros(1)),
            Waiting::Yield => thread::yield_now(),
        }
    }
}

/// A member's part in one round.
#[derive(Args, Clone, Debug)]
pub(crate) struct Part {
    /// Rank; the sender has 0.
    #[arg(long, default_value_t = 0, hide = true)]
    pub(crate) rank: u16,
    /// Ports of the round that nobody uses: one for each rank, and one for answers.
    #[arg(long, value_delimiter = ',', hide = true)]
    pub(crate) ports: Vec<u16>,
    /// Messages of 1 KiB, each sent when all receivers have answered the one before.
    #[arg(long, default_value_t = 5_000)]
    pub(crate) singles: u64,
    /// Messages of 64 bytes, sent without waiting for answers.
    #[arg(long, default_value_t = 200_000)]
    pub(crate) stream: u64,
    /// Messages of the stream that rdmc has in flight at most, and that iceoryx2 buffers for each receiver.
    #[arg(long, default_value_t = 256)]
    pub(crate) in_flight: usize,
}

impl Part {
    /// Returns a name that no other round has.
    pub(crate) fn round(&self) -> String {
        format!("rdmc-beside-{}", self.ports[0])
    }

    /// The first tenth of the stream is not measured. All answer its last message.
    fn warm_up_end(&self) -> u64 {
        self.singles + self.stream / 10
    }

    fn end(&self) -> u64 {
        self.singles + self.stream
    }

    fn is_answered(&self, number: u64) -> bool {
        number < self.singles || [self.warm_up_end(), self.end()].contains(&(number + 1))
    }
}

/// The sender's end of a way.
pub(crate) trait Root {
    /// Sends a message as soon as flow control allows it.
    async fn send(&mut self, message: &[u8]) -> Result<()>;
    /// Waits until all receivers have answered the message sent last.
    async fn answered(&mut self) -> Result<()>;
    /// Ends what [`Root::send`] has begun.
    async fn close(self) -> Result<()>;
}

/// What the root measures in a round.
pub(crate) struct Figures {
    /// Time from the call of `send` until the last answer.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    /// Messages a second, the last one's answers included.
    pub(crate) rate: f64,
}

/// Sends all messages of a round.
pub(crate) async fn lead(mut root: impl Root, part: &Part) -> Result<Figures> {
    let mut message = vec![7; SINGLE_BYTES];
    let mut times = Vec::new();
    for number in 0..part.singles {
        message[..8].copy_from_slice(&number.to_le_bytes());
        let begun = Instant::now();
        root.send(&message).await?;
        root.answered().await?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    let mut begun = Instant::now();
    message.truncate(STREAM_BYTES);
    for number in part.singles..part.end() {
        message[..8].copy_from_slice(&number.to_le_bytes());
        root.send(&message).await?;
        if number + 1 == part.warm_up_end() {
            root.answered().await?;
            begun = Instant::now();
        }
    }
    root.answered().await?;
    #[expect(clippy::cast_precision_loss, reason = "a rate to be displayed")]
    let rate = (part.end() - part.warm_up_end()) as f64 / begun.elapsed().as_secs_f64();
    root.close().await?;
    // The first tenth is not counted.
    let counted = times.len() / 10..;
    let times = &mut times[counted];
    times.sort_by(f64::total_cmp);
    Ok(Figures { p50_us: times[times.len() / 2], p99_us: times[times.len() * 99 / 100], rate })
}

/// Checks that a receiver gets every message once, in order and whole.
pub(crate) struct Check {
    part: Part,
    next: u64,
}

impl Check {
    pub(crate) fn new(part: &Part) -> Self {
        Self { part: part.clone(), next: 0 }
    }

    /// Takes the next message; returns whether the receiver answers it.
    pub(crate) fn take(&mut self, message: &[u8]) -> Result<bool> {
        let want = self.next;
        let len = if want < self.part.singles { SINGLE_BYTES } else { STREAM_BYTES };
        ensure!(message.len() == len, "message {want} has {} bytes, not {len}", message.len());
        let number = u64::from_le_bytes(message[..8].try_into()?);
        ensure!(number == want, "message {number} came where {want} is due: lost, doubled or out of order");
        ensure!(message[8..].iter().all(|&byte| byte == 7), "message {number} has another content");
        self.next += 1;
        Ok(self.part.is_answered(number))
    }

    pub(crate) fn is_done(&self) -> bool {
        self.next == self.part.end()
    }
}

const SINGLE_BYTES: usize = 1024;
const STREAM_BYTES: usize = 64;
