//! Measures how groups of different weights share the ports of hosts. `shares.sh` starts it, once on each host.
//!
//! Each group has all hosts as members, and another root, which sends as fast as it can. The last host receives in all
//! groups. It prints for each group the part of a port that it got, as a mean over the time that is measured and as the
//! least and the most of any tenth of a second, each over what its weight promises of all that arrived meanwhile.
//!
//! With `--mouse`, one more group carries a message of 1 KiB by a ring every 10 ms. Its root, the first host, prints
//! how long it takes until all have it.

use std::cell::Cell;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bytes::Bytes;
use clap::Parser;
use futures::future::{try_join, try_join_all};
use futures::{StreamExt, TryStreamExt};
use rdmc::{Algorithm, Cluster, GroupSpec, Node, NodeId, Receiver, Sender, Shutdown, TcpFabric};

#[derive(Parser)]
struct Arguments {
    /// This host, from 0.
    #[arg(long)]
    me: u32,
    /// All hosts.
    #[arg(long, value_delimiter = ',')]
    hosts: Vec<SocketAddr>,
    /// The weights of the groups, fewer than hosts; 0 for a group without one; no groups by default.
    #[arg(long, value_delimiter = ',')]
    weights: Vec<u32>,
    /// The rate of a port in Mbit/s.
    #[arg(long)]
    rate: u64,
    /// Bytes of a block.
    #[arg(long, default_value_t = 32 << 10)]
    block: u32,
    #[arg(long, default_value = "binomial-pipeline")]
    algorithm: Algorithm,
    /// Most bytes of blocks a second that a host sends in the first group.
    #[arg(long)]
    rate_max: Option<u64>,
    /// Whether short messages are measured beside the groups.
    #[arg(long)]
    mouse: bool,
    /// Seconds until the groups have found their shares, and seconds that are measured.
    #[arg(long, default_value_t = 3)]
    settle: u64,
    #[arg(long, default_value_t = 5)]
    seconds: u64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let hosts = u32::try_from(arguments.hosts.len())?;
    ensure!(arguments.weights.len() < arguments.hosts.len(), "the last host must receive in all groups");
    let cluster = Cluster::new((0..).zip(arguments.hosts.iter().map(SocketAddr::to_string)));
    let node =
        Node::builder(NodeId(arguments.me), cluster).fabric(TcpFabric::new()).port_rate(arguments.rate * 119_500);
    let node = node.start().await?;
    let specs = (0..).zip(&arguments.weights).map(|(root, weight)| {
        let spec = GroupSpec::new(u64::from(root) + 1, (0..hosts).map(|at| NodeId((root + at) % hosts)));
        let spec = spec
            .algorithm(arguments.algorithm.clone())
            .block_size(arguments.block)
            .share((*weight > 0).then_some(*weight));
        spec.rate_max(arguments.rate_max.filter(|_| root == 0))
    });
    let end = Duration::from_secs(arguments.settle + arguments.seconds + 1);
    let mouse = GroupSpec::new(1 << 20, (0..hosts).map(NodeId)).ring(64, 4096);
    let weighted = arguments.weights.iter().any(|weight| *weight > 0);
    let mouse = mouse.share(weighted.then_some(1));
    let (mut sends, mut takes) = (Vec::new(), Vec::new());
    for spec in specs {
        if spec.members()[0] == NodeId(arguments.me) {
            sends.push(node.create_group(spec));
        } else {
            takes.push(node.join_group(spec));
        }
    }
    let (senders, receivers) = try_join(try_join_all(sends), try_join_all(takes)).await?;
    let mousing = async {
        match (arguments.mouse, arguments.me) {
            (true, 0) => send_short(&arguments, node.create_group(mouse).await?).await,
            (true, _) => take(node.join_group(mouse).await?, &Cell::new(0)).await,
            (false, _) => Ok(()),
        }
    };
    let counts: Vec<Cell<u64>> = receivers.iter().map(|_| Cell::new(0)).collect();
    let sending = try_join_all(senders.into_iter().map(|sender| send(sender, end)));
    let taking = try_join_all(receivers.into_iter().zip(&counts).map(|(receiver, count)| take(receiver, count)));
    let measuring = async {
        if arguments.me + 1 == hosts && !counts.is_empty() {
            measure(&arguments, &counts).await;
        }
        Ok(())
    };
    futures::try_join!(sending, taking, measuring, mousing)?;
    node.shutdown(Shutdown::Drain { limit: Duration::from_secs(10) }).await;
    Ok(())
}

/// Sends for so long, and closes the group.
async fn send(sender: Sender, time: Duration) -> Result<()> {
    let (begun, message) = (Instant::now(), Bytes::from(vec![7; MESSAGE_LEN]));
    let sends = std::iter::repeat_with(|| sender.send(message.clone())).take_while(|_| begun.elapsed() < time);
    let mut sends = futures::stream::iter(sends).buffered(3);
    while sends.try_next().await?.is_some() {}
    drop(sends);
    sender.close().await?;
    Ok(())
}

/// Sends short messages, and prints how long they take.
async fn send_short(arguments: &Arguments, sender: Sender) -> Result<()> {
    tokio::time::sleep(Duration::from_secs(arguments.settle)).await;
    let (message, mut times) = (Bytes::from(vec![7; 1 << 10]), Vec::new());
    let until = Instant::now() + Duration::from_secs(arguments.seconds);
    while Instant::now() < until {
        let begun = Instant::now();
        sender.send(message.clone()).await?.delivered().await?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    times.sort_by(f64::total_cmp);
    let at = |part: usize| times[times.len() * part / 100];
    println!("short messages: {:.2} ms, 99 of 100 within {:.2} ms", at(50), at(99));
    sender.close().await?;
    Ok(())
}

/// Receives all messages, and counts their bytes as they arrive.
async fn take(mut receiver: Receiver, count: &Cell<u64>) -> Result<()> {
    loop {
        let next = tokio::time::timeout(Duration::from_millis(5), receiver.next()).await;
        count.set(receiver.stats().bytes_received);
        match next {
            Ok(Some(message)) => drop(message?),
            Ok(None) => break,
            Err(_) => {}
        }
    }
    receiver.close().await?;
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "parts of a port")]
async fn measure(arguments: &Arguments, counts: &[Cell<u64>]) {
    let counted = || counts.iter().map(Cell::get).collect::<Vec<_>>();
    tokio::time::sleep(Duration::from_secs(arguments.settle)).await;
    let (mut at, mut before, mut windows) = (Instant::now(), counted(), Vec::new());
    for _ in 0..10 * arguments.seconds {
        tokio::time::sleep(WINDOW).await;
        let now = counted();
        let port = (arguments.rate * 125_000) as f64 * at.elapsed().as_secs_f64();
        windows.push(now.iter().zip(&before).map(|(now, before)| (now - before) as f64 / port).collect::<Vec<f64>>());
        (at, before) = (Instant::now(), now);
    }
    let weights: f64 = arguments.weights.iter().map(|weight| f64::from((*weight).max(1))).sum();
    let whole: f64 = windows.iter().flatten().sum();
    println!("{:.3} of a port in all", whole / windows.len() as f64);
    for (group, weight) in arguments.weights.iter().enumerate() {
        let promised = f64::from((*weight).max(1)) / weights;
        let part: f64 = windows.iter().map(|window| window[group]).sum();
        let over = windows.iter().map(|window| window[group] / window.iter().sum::<f64>() / promised);
        let (least, most) =
            over.fold((f64::INFINITY, 0.0_f64), |(least, most), over| (least.min(over), most.max(over)));
        println!(
            "weight {weight}: {:.3} of a port, {:.3} of what it is promised; in 0.1 s {least:.2} to {most:.2}",
            part / windows.len() as f64,
            part / whole / promised,
        );
    }
}

/// Bytes of a message.
const MESSAGE_LEN: usize = 4 << 20;
const WINDOW: Duration = Duration::from_millis(100);
