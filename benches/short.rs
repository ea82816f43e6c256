//! Measures short messages: one at a time, and many in flight.
//!
//! ```text
//! cargo bench -p rdmc-benches --bench short -- --fabric shm,tcp --members 2,4
//! ```
//!
//! Each member has a thread and a runtime of its own, in one process. *Last* is the time from the call of `send` until
//! the last receiver's application has the message; *receipt* is the time until the root knows that every application
//! has it. *Sockets* does the same without `rdmc`: the root writes the message to a plain TCP stream for each receiver,
//! and each answers with eight bytes. Ways take turns, round by round; the figures are medians of the rounds' medians.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::{Parser, ValueEnum};
use futures::StreamExt;
use rdmc::{Cluster, CompletionMode, Fabric, GroupSpec, Node, NodeId, ShmFabric, TcpFabric};
use rdmc_benches::median;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

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

/// What is measured in turn.
#[derive(Clone, Copy, Debug)]
enum Way {
    Sockets,
    Rdmc { fabric: FabricKind, ring: bool },
}

/// What a round took.
struct Round {
    last_us: f64,
    receipt_us: f64,
    /// Messages a second.
    rate: f64,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    println!("{} bytes, {} in flight", arguments.bytes, arguments.in_flight);
    for &members in &arguments.members {
        let fabrics = arguments.fabric.iter().copied();
        let rdmc = fabrics.flat_map(|fabric| [false, true].map(|ring| Way::Rdmc { fabric, ring }));
        let ways: Vec<Way> = std::iter::once(Way::Sockets).chain(rdmc).collect();
        let mut rounds: Vec<Vec<Round>> = ways.iter().map(|_| Vec::new()).collect();
        for _ in 0..arguments.rounds {
            for (way, rounds) in ways.iter().zip(&mut rounds) {
                rounds.push(round(*way, members, &arguments)?);
            }
        }
        for (way, rounds) in ways.iter().zip(rounds) {
            let name = match way {
                Way::Sockets => "sockets".to_owned(),
                Way::Rdmc { fabric, ring } => format!("{fabric:?}{}", if *ring { ", ring" } else { "" }).to_lowercase(),
            };
            let of = |value: fn(&Round) -> f64| median(&rounds.iter().map(value).collect::<Vec<_>>());
            match arguments.in_flight {
                1 => {
                    let (last, receipt) = (of(|round| round.last_us), of(|round| round.receipt_us));
                    println!("n={members} {name:10}  last {last:6.1} us  receipt {receipt:6.1} us");
                }
                _ => println!("n={members} {name:10}  {:9.0} messages a second", of(|round| round.rate)),
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
    let mut threads = Vec::new();
    for me in 0..members {
        let (ports, arrivals, formed) = (ports.clone(), arrivals.clone(), formed.clone());
        let arguments = arguments.clone();
        threads.push(thread::spawn(move || -> Result<Vec<(Instant, Instant)>> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let member = Member { me, ports, arrivals, formed, arguments };
            runtime.block_on(async move {
                match way {
                    Way::Sockets => member.sockets().await,
                    Way::Rdmc { fabric, ring } => member.rdmc(fabric, ring).await,
                }
            })
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
    let receipts = measured.map(|message| micros(sent[message].1 - sent[message].0));
    let whole = last(sent.len() - 1) - sent[0].0;
    #[expect(clippy::cast_precision_loss, reason = "a rate to be displayed")]
    let rate = sent.len() as f64 / whole.as_secs_f64();
    let (last_us, receipt_us) = (median(&lasts.collect::<Vec<_>>()), median(&receipts.collect::<Vec<_>>()));
    Ok(Round { last_us, receipt_us, rate })
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
    arguments: Arguments,
}

impl Member {
    fn note_arrival(&self) {
        self.arrivals[self.me as usize].lock().expect("nobody panicked").push(Instant::now());
    }

    /// Returns, at the root, when each message was sent and when its receipt was here.
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
        let sends = (0..self.arguments.messages).map(|_| async {
            let begun = Instant::now();
            let receipt = root.send(content.clone()).await?;
            if self.arguments.in_flight == 1 {
                receipt.delivered().await?;
            }
            anyhow::Ok((begun, Instant::now()))
        });
        let mut sending = futures::stream::iter(sends).buffered(self.arguments.in_flight);
        let mut times = Vec::new();
        while let Some(sent) = sending.next().await {
            times.push(sent?);
        }
        drop(sending);
        root.close().await?;
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
        for port in &self.ports[1..] {
            let stream = TcpStream::connect(port).await.context("a receiver listens")?;
            stream.set_nodelay(true)?;
            receivers.push(stream.into_split());
        }
        let (mut from, mut to): (Vec<_>, Vec<_>) = receivers.into_iter().unzip();
        let (mut times, mut sent) = (Vec::new(), std::collections::VecDeque::new());
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
