//! Whole clusters of processes: `rdmc` over TCP against plain streams, in one run.
//!
//! `cargo bench -p rdmc-benches --bench cluster -- loopback` compares, on the loopback, one object to n − 1 receiving
//! processes by `rdmc` with the same object written into n − 1 plain TCP streams at once (one stream for n = 2).
//! `-- shaped --rate 200` compares with the ideal of a network whose ports have that rate in Mbit/s, inside namespaces
//! made by `benches/shaped.sh`. `-- checks` compares, on the loopback, groups that check blocks with groups that do not, in
//! turn. Receivers keep their memory; the first round of each kind is not counted.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use clap::{Parser, Subcommand};
use futures::StreamExt;
use rdmc::{Algorithm, GroupSpec, Listener, Node, NodeId, TcpConfig, TcpFabric};
use rdmc_benches::{Figure, Process, median, monotonic, object, processor_time, report};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    what: What,
    /// Given by cargo.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum What {
    /// Processes on this host's loopback.
    Loopback {
        /// Members, the sender included.
        #[arg(long, value_delimiter = ',', default_value = "2,8")]
        nodes: Vec<usize>,
        #[command(flatten)]
        work: Work,
    },
    /// Processes on this host's loopback, that check blocks in every other round.
    Checks {
        /// Members, the sender included.
        #[arg(long, value_delimiter = ',', default_value = "8")]
        nodes: Vec<usize>,
        #[command(flatten)]
        work: Work,
    },
    /// Processes in namespaces, one each; run inside the first one.
    Shaped {
        /// Members, the sender included.
        #[arg(long, value_delimiter = ',', default_value = "2,3,5,8")]
        nodes: Vec<usize>,
        /// Rate of every port in Mbit/s, headers included.
        #[arg(long, default_value_t = 200.0)]
        rate: f64,
        /// Namespace names without their number.
        #[arg(long, default_value = "h")]
        prefix: String,
        /// Addresses without the last number, which is the namespace's plus one.
        #[arg(long, default_value = "10.77.0")]
        network: String,
        #[command(flatten)]
        work: Work,
    },
    /// One receiver.
    #[command(hide = true)]
    Receiver {
        #[arg(long)]
        listen: String,
    },
}

#[derive(clap::Args, Clone)]
struct Work {
    /// Size of the object in MiB.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Block size in KiB.
    #[arg(long, default_value_t = 1024)]
    block_kib: u32,
    /// Counted rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Algorithm.
    #[arg(long, default_value = "binomial-pipeline")]
    algorithm: Algorithm,
}

fn main() -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("RDMC_LOG"))
        .with_writer(std::io::stderr)
        .init();
    match Arguments::parse().what {
        What::Receiver { listen } => receiver(&listen),
        What::Loopback { nodes, work } => {
            println!("{} MiB, blocks of {} KiB, {}, tcp on loopback", work.mib, work.block_kib, work.algorithm);
            println!("  n   rdmc s   plain s   plain/rdmc   rdmc MiB/s each   rdmc CPU s/GiB   plain CPU s/GiB");
            for n in nodes {
                let hosts = (1..n).map(|_| (vec![], "127.0.0.1".to_owned())).collect();
                let [rdmc, plain] = measure(hosts, &work, [Way::Rdmc { checks: true }, Way::Plain])?;
                let copied = (work.mib * (n - 1)) as f64 / 1024.0;
                println!(
                    "{n:3} {:8.3} {:9.3} {:12.2} {:17.0} {:16.2} {:17.2}",
                    rdmc.seconds,
                    plain.seconds,
                    plain.seconds / rdmc.seconds,
                    work.mib as f64 / rdmc.seconds,
                    rdmc.processor_seconds / copied,
                    plain.processor_seconds / copied,
                );
            }
            Ok(())
        }
        What::Checks { nodes, work } => {
            println!("{} MiB, blocks of {} KiB, {}, tcp on loopback", work.mib, work.block_kib, work.algorithm);
            println!("  n   checked s   unchecked s   checked/unchecked   checked CPU s/GiB   unchecked CPU s/GiB");
            for n in nodes {
                let hosts = (1..n).map(|_| (vec![], "127.0.0.1".to_owned())).collect();
                let [checked, unchecked] = measure(hosts, &work, [true, false].map(|checks| Way::Rdmc { checks }))?;
                let copied = (work.mib * (n - 1)) as f64 / 1024.0;
                println!(
                    "{n:3} {:11.3} {:13.3} {:19.3} {:19.2} {:21.2}",
                    checked.seconds,
                    unchecked.seconds,
                    checked.seconds / unchecked.seconds,
                    checked.processor_seconds / copied,
                    unchecked.processor_seconds / copied,
                );
            }
            Ok(())
        }
        What::Shaped { nodes, rate, prefix, network, work } => {
            // 1448 bytes of payload in a packet of 1514.
            let payload_rate = rate * 1e6 / 8.0 * (1448.0 / 1514.0);
            println!("{} MiB, blocks of {} KiB, {}, ports of {rate} Mbit/s", work.mib, work.block_kib, work.algorithm);
            println!("  n   rdmc s   ideal s   ideal/rdmc   rdmc/(size/wire rate)");
            for n in nodes {
                let hosts = (1..n)
                    .map(|i| {
                        let enter = ["ip", "netns", "exec", &format!("{prefix}{i}")].map(str::to_owned);
                        (enter.to_vec(), format!("{network}.{}", i + 1))
                    })
                    .collect();
                let [rdmc] = measure(hosts, &work, [Way::Rdmc { checks: true }])?;
                let size = (work.mib << 20) as f64;
                let block = f64::from(work.block_kib) * 1024.0;
                let steps = (size / block).ceil() - 1.0 + (n as f64).log2().ceil();
                let ideal = steps * block / payload_rate;
                let wire = size / (rate * 1e6 / 8.0);
                println!(
                    "{n:3} {:8.3} {ideal:9.3} {:12.3} {:14.3}",
                    rdmc.seconds,
                    ideal / rdmc.seconds,
                    rdmc.seconds / wire
                );
            }
            Ok(())
        }
    }
}

/// Makes the fabric; `RDMC_BENCH_NEAR_KIB` and `RDMC_BENCH_CONGESTION` (cubic, system) set its options, here and in
/// the receivers.
fn fabric() -> std::sync::Arc<TcpFabric> {
    let mut config = TcpConfig::default();
    if let Some(kib) = std::env::var("RDMC_BENCH_NEAR_KIB").ok().and_then(|text| text.parse::<u32>().ok()) {
        config.near_bytes = kib << 10;
    }
    match std::env::var("RDMC_BENCH_CONGESTION").as_deref() {
        Ok("system") => config.congestion_control = None,
        Ok("cubic") => config.congestion_control = Some("cubic"),
        _ => {}
    }
    TcpFabric::with_config(config)
}

/// A receiver's process and where it listens.
struct Remote {
    process: Process,
    rdmc: String,
    plain: String,
}

impl Remote {
    fn start(enter: &[String], ip: &str) -> Result<Self> {
        let program = std::env::current_exe()?;
        let words: Vec<&std::ffi::OsStr> =
            enter.iter().map(AsRef::as_ref).chain([program.as_os_str(), "receiver".as_ref()]).collect();
        let mut command = Command::new(words[0]);
        let process = Process::start(command.args(&words[1..]).args(["--listen", &format!("{ip}:0")]))?;
        let hello = process.answer()?;
        let (rdmc, plain) = hello.split_once(' ').context("two addresses")?;
        Ok(Self { rdmc: rdmc.to_owned(), plain: plain.to_owned(), process })
    }
}

/// A way of sending an object.
#[derive(Clone, Copy)]
enum Way {
    Rdmc {
        /// Whether blocks are checked.
        checks: bool,
    },
    /// By plain streams.
    Plain,
}

/// Measures all ways in turn and returns the medians.
fn measure<const WAYS: usize>(
    hosts: Vec<(Vec<String>, String)>,
    work: &Work,
    ways: [Way; WAYS],
) -> Result<[Figure; WAYS]> {
    let mut remotes = hosts.iter().map(|(enter, ip)| Remote::start(enter, ip)).collect::<Result<Vec<_>>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let addresses: Vec<String> = remotes.iter().map(|remote| remote.rdmc.clone()).collect();
    let object = object(work.mib);
    for remote in &mut remotes {
        remote.process.tell(&format!("join {} {} {}", object.len(), work.block_kib * 1024, work.algorithm))?;
    }
    let node = runtime.block_on(async {
        let fabric = fabric();
        rdmc::invite(fabric, &addresses, Bytes::new(), Duration::from_secs(10))
            .await?
            .start()
            .await
            .map_err(anyhow::Error::from)
    })?;
    let mut rounds = [(); WAYS].map(|()| Vec::new());
    let mut id = 0;
    for round in 0..=work.rounds {
        for (way, rounds) in ways.iter().zip(&mut rounds) {
            let figure = match way {
                Way::Rdmc { checks } => {
                    id += 1;
                    rdmc_round(&runtime, &node, &mut remotes, &object, work, (id, *checks))?
                }
                Way::Plain => plain_round(&mut remotes, &object)?,
            };
            rounds.extend((round > 0).then_some(figure));
        }
    }
    let of = |rounds: &[Figure], part: fn(&Figure) -> f64| median(&rounds.iter().map(part).collect::<Vec<_>>());
    Ok(rounds.map(|rounds| Figure {
        seconds: of(&rounds, |figure| figure.seconds),
        processor_seconds: of(&rounds, |figure| figure.processor_seconds),
    }))
}

fn rdmc_round(
    runtime: &tokio::runtime::Runtime,
    node: &Node,
    remotes: &mut [Remote],
    object: &Bytes,
    work: &Work,
    (id, checks): (u64, bool),
) -> Result<Figure> {
    for remote in remotes.iter_mut() {
        remote.process.tell(&format!("rdmc {checks}"))?;
    }
    let members = (0..).take(remotes.len() + 1).map(NodeId);
    let spec = GroupSpec::new(id, members).algorithm(work.algorithm.clone()).block_size(work.block_kib * 1024);
    let spec = spec.check_blocks(checks);
    let (started, used) = runtime.block_on(async {
        let sender = node.create_group(spec).await?;
        // A message of no bytes: everybody has joined.
        sender.send(Bytes::new()).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (started, used) = (monotonic(), processor_time());
        sender.send(object.clone()).await?;
        sender.close().await?;
        anyhow::Ok((started, processor_time() - used))
    })?;
    Figure::of_round(remotes.iter().map(|remote| &remote.process), started, used)
}

fn plain_round(remotes: &mut [Remote], object: &Bytes) -> Result<Figure> {
    let mut streams = Vec::new();
    for remote in remotes.iter_mut() {
        remote.process.tell("plain")?;
        streams.push(TcpStream::connect(&remote.plain)?);
    }
    for remote in remotes.iter() {
        ensure!(remote.process.answer()? == "ready", "a receiver is out of step");
    }
    std::thread::sleep(Duration::from_millis(100));
    let (started, used) = (monotonic(), processor_time());
    std::thread::scope(|scope| {
        let writers: Vec<_> = streams.iter_mut().map(|stream| scope.spawn(|| stream.write_all(object))).collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("a writer does not panic"))
    })?;
    let used = processor_time() - used;
    Figure::of_round(remotes.iter().map(|remote| &remote.process), started, used)
}

/// Serves rounds until standard input ends.
fn receiver(listen: &str) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = runtime.block_on(Listener::bind(fabric(), listen))?;
    let plain = TcpListener::bind(listen)?;
    println!("{} {}", listener.local_address(), plain.local_addr()?);
    let mut node = None;
    let mut memory = Vec::new();
    let (mut block_size, mut algorithm) = (0, Algorithm::default());
    let mut id = 0;
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["join", size, block, how] => {
                memory = vec![1u8; size.parse()?];
                (block_size, algorithm) = (block.parse()?, how.parse()?);
                node = Some(runtime.block_on(async {
                    let invitation = listener.next_invitation().await;
                    let nodes = invitation.nodes();
                    anyhow::Ok((invitation.accept().await?.start().await?, nodes))
                })?);
            }
            ["plain"] => {
                let (mut stream, _) = plain.accept()?;
                println!("ready");
                let used = processor_time();
                stream.read_exact(&mut memory)?;
                report(monotonic(), processor_time() - used);
            }
            ["rdmc", checks] => {
                let (node, nodes) = node.as_ref().context("joined")?;
                id += 1;
                let spec = GroupSpec::new(id, nodes.clone()).algorithm(algorithm.clone()).block_size(block_size);
                let spec = spec.check_blocks(checks.parse()?);
                let (at, used) = runtime.block_on(async {
                    let mut receiver = node.join_group(spec).await?;
                    receiver.next().await.context("the first message")??;
                    let used = processor_time();
                    let message = receiver.next().await.context("the object")??;
                    let at = monotonic();
                    let used = processor_time() - used;
                    ensure!(message.len() == memory.len(), "the object has another size");
                    drop(message);
                    receiver.close().await?;
                    anyhow::Ok((at, used))
                })?;
                report(at, used);
            }
            _ => bail!("unknown command {line:?}"),
        }
    }
    Ok(())
}
