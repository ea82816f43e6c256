//! Measures short messages: one at a time, many in flight, and on a schedule.
//!
//! ```text
//! cargo bench -p rdmc-benches --bench short -- --fabric shm,tcp --members 2,4
//! ```
//!
//! Each member has a thread and a runtime of its own, in one process. *Last* is the time from the call of `send` until
//! the last receiver's application has the message; *receipt* is the time until the root knows that every application
//! has it. *Sockets* does the same without `rdmc`: the root writes the message to a plain TCP stream for each receiver,
//! and each answers with eight bytes. *Futex*, with two members, is the least that two sleeping threads need. Ways take
//! turns, round by round; the figures are medians of the rounds' medians.
//!
//! With `--per-second`, messages leave on a schedule, whatever has become of those before. Times count from the instant
//! of the schedule, so that a message which leaves late is not measured as a fast one. One function paces all ways: it
//! sleeps on a timer of the system, which is as exact as the system's clock, where tokio's has steps of a millisecond.

use std::collections::VecDeque;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::{Parser, ValueEnum};
use futures::StreamExt;
use futures::channel::mpsc::unbounded;
use futures::future::{BoxFuture, FutureExt};
use rdmc::{Cluster, CompletionMode, Fabric, GroupSpec, Multicast, Node, NodeId, ShmFabric, TcpFabric};
use rdmc_benches::median;
use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex as AsyncMutex;

#[derive(Parser, Clone)]
struct Arguments {
    /// Fabrics.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "shm,tcp")]
    fabric: Vec<FabricKind>,
    /// Members, the sender included.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    members: Vec<u32>,
    /// Bytes of a message.
    #[arg(long, default_value_t = 1024)]
    bytes: usize,
    /// Messages of a round.
    #[arg(long, default_value_t = 5000)]
    messages: usize,
    /// Messages in flight; 1 measures times, more measure messages a second.
    #[arg(long, default_value_t = 1)]
    in_flight: usize,
    /// Messages that are due in a second, whether those before are acknowledged or not; 0 sends by --in-flight.
    #[arg(long, default_value_t = 0)]
    per_second: u32,
    /// Groups with a ring, without, or both.
    #[arg(long, value_enum, default_value = "both")]
    ring: Ring,
    /// How members wait for completions.
    #[arg(long, value_enum, default_value = "event")]
    completion: Completion,
    /// Rounds of each way.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum FabricKind {
    Shm,
    Tcp,
}

#[derive(Clone, Copy, ValueEnum)]
enum Completion {
    Event,
    Hybrid,
    Poll,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
enum Ring {
    Both,
    On,
    Off,
}

/// What is measured in turn.
#[derive(Clone, Copy, Debug)]
enum Way {
    Sockets,
    /// The least that two sleeping threads need: the message is copied to shared memory, and futexes wake.
    Futex,
    Rdmc {
        fabric: FabricKind,
        ring: bool,
    },
}

/// What a round took.
struct Round {
    last_us: f64,
    receipt_us: f64,
    receipt_p99_us: f64,
    /// Messages a second.
    rate: f64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.per_second {
        0 => println!("{} bytes, {} in flight", arguments.bytes, arguments.in_flight),
        rate => {
            println!("{} bytes, {rate} due in a second; beside them, times as long as over sockets", arguments.bytes)
        }
    }
    for &members in &arguments.members {
        let fabrics = arguments.fabric.iter().copied();
        let rings = [(false, Ring::Off), (true, Ring::On)];
        let rings = rings.iter().filter(|(_, only)| [Ring::Both, *only].contains(&arguments.ring));
        let rdmc = fabrics.flat_map(|fabric| rings.clone().map(move |&(ring, _)| Way::Rdmc { fabric, ring }));
        let one_by_one = arguments.in_flight == 1 && arguments.per_second == 0;
        let futex = (one_by_one && members == 2).then_some(Way::Futex);
        let ways: Vec<Way> = std::iter::once(Way::Sockets).chain(futex).chain(rdmc).collect();
        let mut rounds: Vec<Vec<Round>> = ways.iter().map(|_| Vec::new()).collect();
        for _ in 0..arguments.rounds {
            for (way, rounds) in ways.iter().zip(&mut rounds) {
                rounds.push(round(*way, members, &arguments)?);
            }
        }
        let of = |rounds: &[Round], value: fn(&Round) -> f64| median(&rounds.iter().map(value).collect::<Vec<_>>());
        for (way, of_way) in ways.iter().zip(&rounds) {
            let name = match way {
                Way::Sockets => "sockets".to_owned(),
                Way::Futex => "futex".to_owned(),
                Way::Rdmc { fabric, ring } => format!("{fabric:?}{}", if *ring { ", ring" } else { "" }).to_lowercase(),
            };
            let [last, p50, p99, rate]: [fn(&Round) -> f64; 4] =
                [|round| round.last_us, |round| round.receipt_us, |round| round.receipt_p99_us, |round| round.rate];
            match (arguments.per_second, arguments.in_flight) {
                (0, 1) => {
                    let (last, receipt) = (of(of_way, last), of(of_way, p50));
                    println!("n={members} {name:10}  last {last:6.1} us  receipt {receipt:6.1} us");
                }
                (0, _) => println!("n={members} {name:10}  {:9.0} messages a second", of(of_way, rate)),
                _ => {
                    // The first way is that over sockets.
                    let [p50, p99] = [p50, p99].map(|value| (of(of_way, value), of(&rounds[0], value)));
                    let column = |(us, sockets): (f64, f64)| format!("{us:7.0} us {:5.2}", us / sockets);
                    println!("n={members} {name:10}  p50 {}  p99 {}", column(p50), column(p99));
                }
            }
        }
    }
    Ok(())
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// When each receiver had each message.
type Arrivals = Arc<Vec<Mutex<Vec<Instant>>>>;

/// Runs all members of one way, each in a thread.
fn round(way: Way, members: u32, arguments: &Arguments) -> Result<Round> {
    let ports: Vec<SocketAddr> = (0..members).map(|_| free_port()).collect::<Result<_>>()?;
    let arrivals: Arrivals = Arc::new((0..members).map(|_| Mutex::default()).collect());
    let formed = Arc::new(Barrier::new(members as usize));
    let shared = Arc::new(SharedMemory::default());
    let mut threads = Vec::new();
    for me in 0..members {
        let (ports, arrivals, formed, shared) = (ports.clone(), arrivals.clone(), formed.clone(), shared.clone());
        let arguments = arguments.clone();
        threads.push(thread::spawn(move || -> Result<Vec<(Instant, Instant)>> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let member = Member { me, ports, arrivals, formed, shared, arguments };
            let ran = runtime.spawn(async move {
                match way {
                    Way::Sockets => member.sockets().await,
                    Way::Futex => member.futex(),
                    Way::Rdmc { fabric, ring } => member.rdmc(fabric, ring).await,
                }
            });
            runtime.block_on(ran)?
        }));
    }
    let mut sent = Vec::new();
    for member in threads {
        sent.extend(member.join().map_err(|_| anyhow!("a member panicked"))??);
    }
    let of_all: Vec<Vec<Instant>> =
        arrivals.iter().skip(1).map(|of_one| std::mem::take(&mut *of_one.lock().expect("nobody panicked"))).collect();
    let last = |message: usize| of_all.iter().map(|of_one| of_one[message]).max().expect("a receiver");
    // The first tenth is not counted.
    let measured = sent.len() / 10..sent.len();
    let lasts = measured.clone().map(|message| micros(last(message).saturating_duration_since(sent[message].0)));
    let mut receipts: Vec<f64> = measured.map(|message| micros(sent[message].1 - sent[message].0)).collect();
    receipts.sort_by(f64::total_cmp);
    let whole = last(sent.len() - 1) - sent[0].0;
    #[expect(clippy::cast_precision_loss, reason = "a rate to be displayed")]
    let rate = sent.len() as f64 / whole.as_secs_f64();
    let (last_us, receipt_us) = (median(&lasts.collect::<Vec<_>>()), median(&receipts));
    Ok(Round { last_us, receipt_us, receipt_p99_us: receipts[receipts.len() * 99 / 100], rate })
}

/// Returns an address of the loopback that nobody uses now.
fn free_port() -> Result<SocketAddr> {
    Ok(std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?)
}

struct Member {
    me: u32,
    ports: Vec<SocketAddr>,
    arrivals: Arrivals,
    formed: Arc<Barrier>,
    shared: Arc<SharedMemory>,
    arguments: Arguments,
}

/// What two threads share that wake each other by futexes.
#[derive(Default)]
struct SharedMemory {
    content: Mutex<Vec<u8>>,
    /// Messages sent.
    sent: AtomicU32,
    /// Messages answered.
    answered: AtomicU32,
}

/// Counts one more, and wakes the thread that waits for it. The flags are those of processes that share memory.
fn count(counter: &AtomicU32) -> Result<()> {
    counter.fetch_add(1, Ordering::SeqCst);
    futex::wake(counter, futex::Flags::empty(), 1)?;
    Ok(())
}

/// Sleeps until a counter is no more what it was.
fn sleep_while(counter: &AtomicU32, is: u32) -> Result<()> {
    while counter.load(Ordering::SeqCst) == is {
        match futex::wait(counter, futex::Flags::empty(), is, None) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

impl Member {
    fn note_arrival(&self) {
        self.arrivals[self.me as usize].lock().expect("nobody panicked").push(Instant::now());
    }

    /// Returns, at the root, when each message was sent, or due, and when its receipt was here.
    async fn rdmc(self, fabric: FabricKind, ring: bool) -> Result<Vec<(Instant, Instant)>> {
        let cluster = Cluster::new((0..).zip(self.ports.iter().map(SocketAddr::to_string)));
        let fabric: Arc<dyn Fabric> = match fabric {
            FabricKind::Shm => ShmFabric::new()?,
            FabricKind::Tcp => TcpFabric::new(),
        };
        let mode = match self.arguments.completion {
            Completion::Event => CompletionMode::Event,
            Completion::Hybrid => CompletionMode::HYBRID,
            Completion::Poll => CompletionMode::Poll,
        };
        let spec = GroupSpec::new(1, cluster.nodes());
        let spec = if ring { spec.ring(64, 4096) } else { spec };
        let node = Node::builder(NodeId(self.me), cluster).fabric(fabric).completion_mode(mode).start().await?;
        if self.me > 0 {
            let mut messages = node.join_group(spec).await?;
            self.formed.wait();
            while let Some(message) = messages.next().await {
                let message = message?;
                self.note_arrival();
                message.stored();
            }
            messages.close().await?;
            return Ok(Vec::new());
        }
        let root = node.create_group(spec).await?;
        self.formed.wait();
        let content = node.allocate(self.arguments.bytes).await?.freeze();
        if self.arguments.per_second > 0 {
            let sender = root.clone();
            let send = move || {
                let sending = sender.enqueue(content.clone());
                async { Ok(sending) }.boxed()
            };
            let acknowledged = |sending: Multicast| async { Ok(sending.await?.delivered().await?) }.boxed();
            let times = on_schedule(self.arguments, send, acknowledged).await?;
            root.close().await?;
            return Ok(times);
        }
        let in_flight = self.arguments.in_flight;
        let sends = (0..self.arguments.messages).map(|_| {
            let (root, content) = (root.clone(), content.clone());
            async move {
                let begun = Instant::now();
                let receipt = root.send(content.clone()).await?;
                if in_flight == 1 {
                    receipt.delivered().await?;
                }
                anyhow::Ok((begun, Instant::now()))
            }
            .boxed()
        });
        let mut sending = futures::stream::iter(sends).buffered(in_flight);
        let mut times = Vec::new();
        while let Some(sent) = sending.next().await {
            times.push(sent?);
        }
        drop(sending);
        root.close().await?;
        Ok(times)
    }

    /// The same between two threads by memory that they share.
    fn futex(self) -> Result<Vec<(Instant, Instant)>> {
        let shared = &self.shared;
        let mut content = vec![7; self.arguments.bytes];
        let mut times = Vec::new();
        self.formed.wait();
        for message in 0..u32::try_from(self.arguments.messages)? {
            if self.me > 0 {
                sleep_while(&shared.sent, message)?;
                content.clone_from(&shared.content.lock().expect("nobody panicked"));
                self.note_arrival();
                count(&shared.answered)?;
                continue;
            }
            let begun = Instant::now();
            shared.content.lock().expect("nobody panicked").clone_from(&content);
            count(&shared.sent)?;
            sleep_while(&shared.answered, message)?;
            times.push((begun, Instant::now()));
        }
        Ok(times)
    }

    /// The same over plain sockets.
    async fn sockets(self) -> Result<Vec<(Instant, Instant)>> {
        let (bytes, messages) = (self.arguments.bytes, self.arguments.messages);
        let mut content = vec![7; bytes];
        if self.me > 0 {
            let listener = TcpListener::bind(self.ports[self.me as usize]).await?;
            self.formed.wait();
            let (mut root, _) = listener.accept().await?;
            root.set_nodelay(true)?;
            for _ in 0..messages {
                root.read_exact(&mut content).await?;
                self.note_arrival();
                root.write_all(&[1; 8]).await?;
            }
            return Ok(Vec::new());
        }
        self.formed.wait();
        let mut receivers = Vec::new();
        for port in self.ports.into_iter().skip(1) {
            let stream = TcpStream::connect(port).await.context("a receiver listens")?;
            stream.set_nodelay(true)?;
            receivers.push(stream.into_split());
        }
        let (mut from, mut to): (Vec<_>, Vec<_>) = receivers.into_iter().unzip();
        if self.arguments.per_second > 0 {
            let (to, from, content) =
                (Arc::new(AsyncMutex::new(to)), Arc::new(AsyncMutex::new(from)), Arc::new(content));
            let send = move || {
                let (to, content) = (to.clone(), content.clone());
                async move {
                    for stream in to.lock().await.iter_mut() {
                        stream.write_all(&content).await?;
                    }
                    Ok(())
                }
                .boxed()
            };
            let acknowledged = move |()| {
                let from = from.clone();
                async move {
                    for stream in from.lock().await.iter_mut() {
                        stream.read_exact(&mut [0; 8]).await?;
                    }
                    Ok(())
                }
                .boxed()
            };
            return on_schedule(self.arguments, send, acknowledged).await;
        }
        let (mut times, mut sent) = (Vec::new(), VecDeque::new());
        while times.len() < messages {
            while sent.len() < self.arguments.in_flight && times.len() + sent.len() < messages {
                sent.push_back(Instant::now());
                for stream in &mut to {
                    stream.write_all(&content).await?;
                }
            }
            for stream in &mut from {
                stream.read_exact(&mut [0; 8]).await?;
            }
            times.extend(sent.pop_front().map(|begun| (begun, Instant::now())));
        }
        Ok(times)
    }
}

/// Sends each message when it is due; returns when it was due and when all receivers had acknowledged it.
async fn on_schedule<T>(
    arguments: Arguments,
    mut send: impl FnMut() -> BoxFuture<'static, Result<T>>,
    mut acknowledged: impl FnMut(T) -> BoxFuture<'static, Result<()>>,
) -> Result<Vec<(Instant, Instant)>> {
    let (under_way, mut sent) = unbounded();
    let sending = async {
        let mut schedule = Schedule::new(arguments.per_second)?;
        for _ in 0..arguments.messages {
            let due = schedule.next().await?;
            let message = send().await?;
            // The other end is there as long as this one.
            under_way.unbounded_send((due, message)).ok();
        }
        drop(under_way);
        anyhow::Ok(())
    };
    let acknowledging = async {
        let mut times = Vec::new();
        while let Some((due, message)) = sent.next().await {
            acknowledged(message).await?;
            times.push((due, Instant::now()));
        }
        Ok(times)
    };
    let ((), times) = futures::try_join!(sending, acknowledging)?;
    Ok(times)
}

/// When messages are due.
struct Schedule {
    due: Instant,
    period: Duration,
    timer: AsyncFd<OwnedFd>,
}

impl Schedule {
    fn new(per_second: u32) -> Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        // SAFETY: `timer` owns its descriptor, always returns that one, and stays in the `AsyncFd` until both
        // are dropped.
        let timer = unsafe { AsyncFd::register(timer) }.map_err(io::Error::from)?;
        Ok(Self { due: Instant::now(), period: Duration::from_secs(1) / per_second, timer })
    }

    /// Waits until the next message is due; returns when that is or was.
    async fn next(&mut self) -> Result<Instant> {
        self.due += self.period;
        let wait = self.due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            let once = Itimerspec { it_interval: zero, it_value: wait.try_into()? };
            rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
            let mut over = self.timer.readable().await?;
            rustix::io::read(&self.timer, &mut [0_u8; 8])?;
            over.clear_ready();
        }
        Ok(self.due)
    }
}
