//! Measures `rdmc` beside Aeron and iceoryx2: short messages from one sender to three receivers of one host.
//!
//! ```text
//! cargo run --release --manifest-path benches/beside/Cargo.toml
//! ```
//!
//! Aeron is built from its C sources. That needs a C++ compiler, libclang and CMake 3.30; the variable `CMAKE` may name
//! the program. Aeron's libraries are found where cargo starts the program, not elsewhere.
//!
//! Each member is a process, and so is Aeron's media driver. In a round, the sender sends single messages of 1 KiB,
//! each when all receivers have answered the one before, then a stream of messages of 64 bytes. Every receiver checks
//! number, order and content. A round fails if a message is lost. Ways take turns, round by round; the figures are
//! medians of the rounds. The first tenth of each part is not counted.
//!
//! There are two tables, since ways of waiting decide about times:
//!
//! - *Sleep*: `rdmc` and iceoryx2 wake their receivers. Aeron cannot: its members and its driver sleep for a
//!   microsecond, which the system makes about 55, and look again.
//! - *Yield*: all look again and again, and yield the core after each look.

mod aeron;
mod groups;
mod member;
mod services;

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};
use rdmc::{ShmFabric, TcpFabric};

use member::{Figures, Part, RECEIVERS, Waiting};

#[derive(Parser)]
struct Arguments {
    /// How members wait.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sleep,yield")]
    waiting: Vec<Waiting>,
    /// What carries the messages.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "rdmc-shm,rdmc-tcp,aeron-ipc,aeron-udp,iceoryx2")]
    way: Vec<Way>,
    /// Rounds of each way.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    #[command(flatten)]
    part: Part,
    /// What this process does in a round.
    #[arg(long, value_enum, hide = true)]
    role: Option<Role>,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum Way {
    RdmcShm,
    RdmcTcp,
    AeronIpc,
    AeronUdp,
    Iceoryx2,
}

#[derive(Clone, Copy, ValueEnum, Debug)]
enum Role {
    Member,
    Driver,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.role {
        None => compare(&arguments),
        Some(role) => {
            // If the parent is killed, nobody else ends this process.
            thread::spawn(|| {
                thread::sleep(ROUND_MAX + Duration::from_secs(10));
                eprintln!("a round takes too long");
                std::process::exit(1);
            });
            take_part(role, arguments.way[0], arguments.waiting[0], &arguments.part)
        }
    }
}

/// Runs all ways in turn, and prints a table for each way of waiting.
fn compare(arguments: &Arguments) -> Result<()> {
    for &waiting in &arguments.waiting {
        let mut rounds: Vec<Vec<Figures>> = arguments.way.iter().map(|_| Vec::new()).collect();
        for _ in 0..arguments.rounds {
            for (way, rounds) in arguments.way.iter().zip(&mut rounds) {
                rounds.push(round(*way, waiting, &arguments.part).with_context(|| format!("{way:?}"))?);
            }
        }
        println!("\n| {} | messages a second | p50 in us | p99 in us |\n|---|---|---|---|", name(&waiting));
        for (way, rounds) in arguments.way.iter().zip(&rounds) {
            let of = |value: fn(&Figures) -> f64| {
                let mut values: Vec<f64> = rounds.iter().map(value).collect();
                values.sort_by(f64::total_cmp);
                values[values.len() / 2]
            };
            let (rate, p50, p99) = (of(|it| it.rate), of(|it| it.p50_us), of(|it| it.p99_us));
            println!("| {} | {rate:.0} | {p50:.0} | {p99:.0} |", name(way));
        }
    }
    Ok(())
}

/// Runs a process for each member, and returns what the root has measured.
fn round(way: Way, waiting: Waiting, part: &Part) -> Result<Figures> {
    let listeners = (0..RECEIVERS + 2).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
    let listeners: Vec<TcpListener> = listeners.collect::<std::io::Result<_>>()?;
    let ports = listeners.iter().map(|listener| Ok(listener.local_addr()?.port())).collect::<Result<_>>()?;
    drop(listeners);
    let part = Part { ports, ..part.clone() };
    let start = |role, rank| Process::start(role, way, waiting, &Part { rank, ..part.clone() });
    let _driver = match way {
        Way::AeronIpc | Way::AeronUdp => Some(start(Role::Driver, 0)?),
        _ => None,
    };
    let mut members = (0..=RECEIVERS).map(|rank| start(Role::Member, rank)).collect::<Result<Vec<_>>>()?;
    let begun = Instant::now();
    while !members.iter_mut().map(Process::has_ended).collect::<Result<Vec<_>>>()?.iter().all(|&ended| ended) {
        ensure!(begun.elapsed() < ROUND_MAX, "the round takes too long");
        thread::sleep(Duration::from_millis(20));
    }
    let mut told = String::new();
    let root = members[0].0.stdout.as_mut().context("piped")?;
    std::io::Read::read_to_string(root, &mut told)?;
    let figures: Vec<f64> = told.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let [p50_us, p99_us, rate] = figures[..] else { bail!("the root has told {told:?}") };
    Ok(Figures { p50_us, p99_us, rate })
}

/// Takes part in a round as one of its processes.
fn take_part(role: Role, way: Way, waiting: Waiting, part: &Part) -> Result<()> {
    if let Role::Driver = role {
        return aeron::drive(waiting, part);
    }
    let figures = match way {
        Way::RdmcShm => groups::run(ShmFabric::new()?, waiting, part),
        Way::RdmcTcp => groups::run(TcpFabric::new(), waiting, part),
        Way::AeronIpc => aeron::run(aeron::Medium::Ipc, waiting, part),
        Way::AeronUdp => aeron::run(aeron::Medium::Udp, waiting, part),
        Way::Iceoryx2 => services::run(waiting, part),
    };
    let figures = figures.with_context(|| format!("member {}", part.rank))?;
    if let Some(Figures { p50_us, p99_us, rate }) = figures {
        println!("{p50_us} {p99_us} {rate}");
    }
    Ok(())
}

/// A process of a round. A drop ends it.
struct Process(Child);

impl Process {
    fn start(role: Role, way: Way, waiting: Waiting, part: &Part) -> Result<Self> {
        let mut command = Command::new(Path::new("/proc/self/exe").canonicalize()?);
        let ports = part.ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
        command.args(["--role", &name(&role), "--way", &name(&way), "--waiting", &name(&waiting), "--ports", &ports]);
        command.args(["--rank", &part.rank.to_string(), "--in-flight", &part.in_flight.to_string()]);
        command.args(["--singles", &part.singles.to_string(), "--stream", &part.stream.to_string()]);
        Ok(Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?))
    }

    fn has_ended(&mut self) -> Result<bool> {
        let ended = self.0.try_wait()?;
        ensure!(ended.is_none_or(|status| status.success()), "a member has failed");
        Ok(ended.is_some())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The driver ends with its standard input, and removes its files.
        drop(self.0.stdin.take());
        let asked = Instant::now();
        while asked.elapsed() < Duration::from_secs(2) && matches!(self.0.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(10));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().expect("every value has a name").get_name().to_owned()
}

const ROUND_MAX: Duration = Duration::from_secs(60);
