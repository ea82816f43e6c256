//! What programs and targets do with a flow, and what they see of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::cluster::pattern;
use crate::fleet::Draw;

/// A flow: what its ends send, and how they treat it.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) number: u64,
    /// When the program connects.
    pub(super) begins: Duration,
    /// Bytes of the program and of the target.
    pub(super) lens: [usize; 2],
    pub(super) order: Order,
    /// How the program and the target treat it.
    pub(super) habits: [Habit; 2],
}

/// When the ends of a flow end their directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Both send at once. Each ends its direction when it has all bytes of the other.
    Together,
    /// The target answers when the program's direction has ended.
    Answer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Habit {
    Steady,
    /// It resets the flow after a time.
    Resets(Duration),
    /// It reads nothing for a time, after so many bytes.
    Stalls(usize, Duration),
}

/// What an end of a flow has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// Bytes that came, all of them as the other end has sent them.
    pub(super) came: usize,
    /// Whether the other end has ended its direction.
    pub(super) has_end: bool,
    /// Whether this end has sent all, and ended its direction.
    pub(super) shut: bool,
    /// Why the flow failed.
    pub(super) failed: Option<String>,
    /// What must never be.
    pub(super) wrong: Option<String>,
}

impl Seen {
    /// Tells whether the flow has ended in good order.
    pub(super) fn is_whole(&self) -> bool {
        self.has_end && self.shut && self.failed.is_none()
    }
}

impl Plan {
    pub(super) fn draw(draw: &mut Draw, number: u64, len_max: u64, span: Duration) -> Self {
        let mut len = || match draw.below(8) {
            0 => 0,
            // Short ones are more frequent.
            _ => usize::try_from(draw.below(len_max).min(draw.below(len_max))).unwrap(),
        };
        let lens = [len(), len()];
        let begins = span.mul_f64(draw.fraction() / 2.0);
        let order = if draw.below(3) == 0 { Order::Answer } else { Order::Together };
        let mut habit = |len: usize| match draw.below(8) {
            0 => Habit::Resets(span.mul_f64(draw.fraction())),
            1 => Habit::Stalls(len / 2, span.mul_f64(draw.fraction())),
            _ => Habit::Steady,
        };
        let habits = [habit(lens[1]), habit(lens[0])];
        Self { number, begins, lens, order, habits }
    }

    /// A short flow that shows whether the gateways work.
    pub(super) fn probe(number: u64) -> Self {
        let habits = [Habit::Steady; 2];
        Self { number, begins: Duration::ZERO, lens: [1000, 1000], order: Order::Together, habits }
    }

    /// Tells whether an end resets the flow.
    pub(super) fn is_reset(&self) -> bool {
        self.habits.iter().any(|habit| matches!(habit, Habit::Resets(_)))
    }

    /// Returns the bytes of the program, which begin with the number, or those of the target.
    fn bytes(&self, of: Side) -> Vec<u8> {
        let bytes = pattern(self.lens[of as usize], 2 * self.number + of as u64);
        if of == Side::Program { [&self.number.to_le_bytes()[..], &bytes].concat() } else { bytes }
    }

    /// Connects, and plays the program.
    pub(super) async fn play_program(&self, entrance: &str) -> Seen {
        tokio::time::sleep(self.begins).await;
        match TcpStream::connect(entrance).await {
            Ok(socket) => self.play(Side::Program, socket, 0).await,
            Err(error) => Seen { failed: Some(error.to_string()), ..Seen::default() },
        }
    }

    /// Plays one side of the flow, of which some bytes came before.
    async fn play(&self, side: Side, mut socket: TcpStream, came: usize) -> Seen {
        let seen = watch::Sender::new(Seen { came, ..Seen::default() });
        let habit = self.habits[side as usize];
        let (own, others) = (self.bytes(side), self.bytes(side.other()));
        let (from, to) = socket.split();
        let stall = if let Habit::Stalls(after, pause) = habit { Some((after, pause)) } else { None };
        let answers = self.order == Order::Answer && side == Side::Target;
        let waits = self.order == Order::Together;
        let playing = async {
            tokio::try_join!(read(from, &others, stall, &seen), write(to, &own, others.len(), (answers, waits), &seen))
        };
        let reset = async {
            match habit {
                Habit::Resets(after) => tokio::time::sleep(after).await,
                _ => std::future::pending().await,
            }
        };
        let failed = tokio::select! {
            played = playing => played.err().map(|error| error.to_string()),
            () = reset => {
                let _ = socket.set_zero_linger();
                Some("it was reset here".to_owned())
            }
        };
        let seen = seen.borrow().clone();
        Seen { failed, ..seen }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Program = 0,
    Target = 1,
}

impl Side {
    fn other(self) -> Self {
        if self == Self::Program { Self::Target } else { Self::Program }
    }
}

/// Compares what comes until its end.
async fn read(
    mut from: ReadHalf<'_>,
    expected: &[u8],
    mut stall: Option<(usize, Duration)>,
    seen: &watch::Sender<Seen>,
) -> std::io::Result<()> {
    let mut bytes = vec![0; 30_011];
    let wrong = |what: String| seen.send_modify(|seen| seen.wrong = Some(what));
    loop {
        let came = seen.borrow().came;
        if let Some((_, pause)) = stall.take_if(|(after, _)| came >= *after) {
            tokio::time::sleep(pause).await;
        }
        let len = from.read(&mut bytes).await?;
        if len == 0 {
            if came < expected.len() {
                wrong(format!("the end came after {came} of {} bytes", expected.len()));
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            seen.send_modify(|seen| seen.has_end = true);
            return Ok(());
        }
        if expected.get(came..came + len) != Some(&bytes[..len]) {
            wrong(format!("{len} bytes at {came} of {} differ", expected.len()));
            return Err(std::io::Error::other("other bytes came"));
        }
        seen.send_modify(|seen| seen.came += len);
    }
}

/// Sends all, and ends the direction in its turn.
async fn write(
    mut to: WriteHalf<'_>,
    bytes: &[u8],
    others_len: usize,
    (answers, waits): (bool, bool),
    seen: &watch::Sender<Seen>,
) -> std::io::Result<()> {
    let mut changed = seen.subscribe();
    if answers {
        let _ = changed.wait_for(|seen| seen.has_end).await;
    }
    to.write_all(bytes).await?;
    if waits {
        let _ = changed.wait_for(|seen| seen.came == others_len).await;
    }
    to.shutdown().await?;
    seen.send_modify(|seen| seen.shut = true);
    Ok(())
}

/// The targets of all flows.
#[derive(Clone, Default)]
pub(super) struct Targets {
    /// What they have seen, by the number of the flow; `None` until the flow ends.
    seen: Arc<Mutex<BTreeMap<u64, Option<Seen>>>>,
    /// Flows that came twice.
    twice: Arc<Mutex<Vec<u64>>>,
}

impl Targets {
    /// Plays the targets of flows, and of probes with numbers beyond.
    pub(super) async fn serve(self, listener: TcpListener, plans: Arc<Vec<Plan>>) {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            let (targets, plans) = (self.clone(), plans.clone());
            tokio::spawn(async move {
                let mut number = [0; NUMBER_LEN];
                // A flow that fails before it has a number is one that its program has lost.
                if socket.read_exact(&mut number).await.is_err() {
                    return;
                }
                let number = u64::from_le_bytes(number);
                if targets.seen.lock().unwrap().insert(number, None).is_some() {
                    targets.twice.lock().unwrap().push(number);
                }
                let plan = usize::try_from(number).ok().and_then(|number| plans.get(number)).cloned();
                let seen = plan.unwrap_or(Plan::probe(number)).play(Side::Target, socket, NUMBER_LEN).await;
                targets.seen.lock().unwrap().insert(number, Some(seen));
            });
        }
    }

    /// Tells whether all flows that came have ended.
    pub(super) fn have_ended(&self) -> bool {
        self.seen.lock().unwrap().values().all(Option::is_some)
    }

    /// Returns what the target of a flow has seen; `None` if it did not come.
    pub(super) fn seen(&self, number: u64) -> Option<Seen> {
        self.seen.lock().unwrap().get(&number).cloned().flatten()
    }

    /// Returns the flows that came twice.
    pub(super) fn twice(&self) -> Vec<u64> {
        self.twice.lock().unwrap().clone()
    }
}

/// Bytes of the number of a flow.
pub(super) const NUMBER_LEN: usize = 8;
