//! Moves bytes from memory to memory over a long path, by a session and by plain TCP. `wan.sh` starts it.
//!
//! ```text
//! wan serve 10.78.3.2:7471                        # sends what sessions ask for, until it is ended
//! wan get 10.78.3.2:7471 --mib 64 --streams 4
//! wan tcp-serve 10.78.3.2:7472                    # the same by sockets
//! wan tcp-get 10.78.3.2:7472 --mib 64 --streams 8
//! ```
//! The end that gets prints a line: when it began (seconds of the monotonic clock), the seconds until the first byte
//! and until the last one, the Mbit/s of the whole and after the first two seconds, and the Jain index of what plain
//! connections had when half of all bytes had come (1 if all had the same, 1/n if one of n had all). All times begin
//! before it connects.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use clap::{Args, Parser, Subcommand, ValueEnum};
use rdmc::TcpFabric;
use rdmc_benches::{monotonic, object};
use rdmc_wan::{OpenError, Rate, Session, SessionConfig, SessionListener, SessionRequest, SlabVerb};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Sends slabs to each session, as many bytes as it asks for
    Serve {
        listen: SocketAddr,
        #[command(flatten)]
        session: SessionOptions,
    },
    /// Gets bytes by a session
    Get {
        server: SocketAddr,
        #[command(flatten)]
        session: SessionOptions,
        /// MiB in all.
        #[arg(long, default_value_t = 64)]
        mib: u64,
    },
    /// Sends bytes to each connection, as many as it asks for
    TcpServe {
        listen: SocketAddr,
        #[command(flatten)]
        socket: SocketOptions,
    },
    /// Gets bytes by plain TCP
    TcpGet {
        server: SocketAddr,
        #[command(flatten)]
        socket: SocketOptions,
        /// Connections, each of which carries an equal part.
        #[arg(long, default_value_t = 1)]
        streams: u64,
        /// MiB in all.
        #[arg(long, default_value_t = 64)]
        mib: u64,
    },
}

#[derive(Args)]
struct SessionOptions {
    /// Queue pairs of the data channel; the session's default if not given.
    #[arg(long)]
    streams: Option<u16>,
    /// Most MiB of a ring.
    #[arg(long)]
    ring_mib: Option<u64>,
    /// KiB of a slab.
    #[arg(long)]
    slab_kib: Option<usize>,
    /// How slabs come to the client; by its distance if not given.
    #[arg(long)]
    receive_by: Option<Verb>,
    /// Most Mbit/s of payload.
    #[arg(long)]
    rate: Option<f64>,
    /// Most bytes that the pace lets pass at once.
    #[arg(long, requires = "rate")]
    burst: Option<u64>,
    /// The congestion control; that of `rdmc_wan::tcp_config` if not given.
    #[arg(long)]
    congestion: Option<String>,
}

impl SessionOptions {
    fn config(&self) -> SessionConfig {
        let mut config = SessionConfig::default();
        config.streams = self.streams;
        config.ring_len_max = self.ring_mib.map_or(config.ring_len_max, |mib| mib << 20);
        config.slab_len = self.slab_kib.map_or(config.slab_len, |kib| kib << 10);
        config.receive_by = self.receive_by.map(|verb| match verb {
            Verb::Read => SlabVerb::Read,
            Verb::Write => SlabVerb::Write,
        });
        config.rate = self.rate.map(|mbit| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate of a network")]
            let rate = Rate::bytes_per_second((mbit * 1e6 / 8.0) as u64);
            self.burst.map_or(rate, |bytes| rate.burst(bytes))
        });
        config
    }

    fn fabric(&self) -> Arc<TcpFabric> {
        let mut config = rdmc_wan::tcp_config();
        if let Some(name) = self.congestion.clone() {
            // Once in a process.
            config.congestion_control = Some(name.leak());
            config.lossy_congestion_control = None;
        }
        TcpFabric::with_config(config)
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Verb {
    Read,
    Write,
}

#[derive(Args)]
struct SocketOptions {
    /// The congestion control.
    #[arg(long, default_value = "cubic")]
    congestion: String,
    /// KiB of both buffers of a socket; the system's own, which grow by themselves, if not given.
    #[arg(long)]
    buffer_kib: Option<u32>,
}

impl SocketOptions {
    fn socket(&self) -> Result<TcpSocket> {
        let socket = TcpSocket::new_v4()?;
        let congestion = socket2::SockRef::from(&socket).set_tcp_congestion(self.congestion.as_bytes());
        congestion.with_context(|| format!("congestion control {}", self.congestion))?;
        if let Some(kib) = self.buffer_kib {
            socket.set_send_buffer_size(kib << 10)?;
            socket.set_recv_buffer_size(kib << 10)?;
        }
        Ok(socket)
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    match Arguments::parse().role {
        Role::Serve { listen, session } => serve(listen, &session).await,
        Role::Get { server, session, mib } => get(server, &session, mib << 20).await,
        Role::TcpServe { listen, socket } => tcp_serve(listen, &socket).await,
        Role::TcpGet { server, socket, streams, mib } => tcp_get(server, &socket, streams, mib << 20).await,
    }
}

/// Serves sessions until the process is ended.
async fn serve(listen: SocketAddr, options: &SessionOptions) -> Result<()> {
    let listener = SessionListener::bind(options.fabric(), &listen.to_string(), options.config()).await?;
    let object = object(OBJECT_MIB);
    loop {
        let request = listener.accept().await;
        let object = object.clone();
        tokio::spawn(async move {
            if let Err(error) = send_slabs(request, object).await {
                eprintln!("{error:#}");
            }
        });
    }
}

async fn send_slabs(request: SessionRequest, object: Bytes) -> Result<()> {
    let mut left = u64::from_le_bytes(request.metadata().try_into().context("it asks for no number of bytes")?);
    let Session { mut sender, receiver, handle, .. } = request.accept(Vec::new()).await?;
    drop(receiver);
    while left > 0 {
        let mut slab = sender.slab().await?;
        let len = slab.len().min(object.len()).min(usize::try_from(left).unwrap_or(usize::MAX));
        slab[..len].copy_from_slice(&object[..len]);
        sender.send(slab, len, Vec::new()).await?;
        left -= len as u64;
    }
    sender.finish().await?;
    Ok(handle.ended().await?)
}

async fn get(server: SocketAddr, options: &SessionOptions, bytes: u64) -> Result<()> {
    let (server, metadata) = (server.to_string(), bytes.to_le_bytes().to_vec());
    let waits = monotonic();
    let (session, mut progress) = loop {
        let progress = Progress::new(1, bytes);
        match rdmc_wan::connect(options.fabric(), &server, options.config(), metadata.clone()).await {
            Ok(session) => break (session, progress),
            Err(OpenError::Unreachable { .. }) if monotonic() - waits < START_LIMIT => retry().await,
            Err(error) => return Err(error.into()),
        }
    };
    let Session { sender, mut receiver, handle, .. } = session;
    sender.finish().await?;
    while let Some(slab) = receiver.next().await? {
        progress.note(0, slab.bytes.len() as u64);
    }
    progress.report()?;
    let stats = handle.stats();
    eprintln!("round trip {:?}, ring {} KiB", stats.round_trip.unwrap_or_default(), stats.incoming_ring >> 10);
    Ok(handle.ended().await?)
}

/// Serves connections until the process is ended.
async fn tcp_serve(listen: SocketAddr, options: &SocketOptions) -> Result<()> {
    // Connections inherit its settings.
    let socket = options.socket()?;
    socket.set_reuseaddr(true)?;
    socket.bind(listen)?;
    let listener = socket.listen(BACKLOG)?;
    let object = object(OBJECT_MIB);
    loop {
        let (mut stream, _) = listener.accept().await?;
        let object = object.clone();
        tokio::spawn(async move {
            let sending = async {
                let mut left = stream.read_u64_le().await?;
                while left > 0 {
                    let len = object.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    stream.write_all(&object[..len]).await?;
                    left -= len as u64;
                }
                stream.shutdown().await
            };
            if let Err(error) = sending.await {
                eprintln!("{error}");
            }
        });
    }
}

async fn tcp_get(server: SocketAddr, options: &SocketOptions, streams: u64, bytes: u64) -> Result<()> {
    ensure!(streams > 0, "at least one stream");
    let waits = monotonic();
    let (connected, progress) = loop {
        let progress = Progress::new(usize::try_from(streams)?, bytes);
        let sockets = (0..streams).map(|_| options.socket()).collect::<Result<Vec<_>>>()?;
        match futures::future::try_join_all(sockets.into_iter().map(|socket| socket.connect(server))).await {
            Ok(connected) => break (connected, Arc::new(Mutex::new(progress))),
            Err(_) if monotonic() - waits < START_LIMIT => retry().await,
            Err(error) => return Err(error.into()),
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    for (number, stream) in connected.into_iter().enumerate() {
        let at = |number: usize| bytes * number as u64 / streams;
        let part = at(number + 1) - at(number);
        tasks.spawn(receive(stream, number, part, progress.clone()));
    }
    while let Some(done) = tasks.join_next().await {
        done??;
    }
    let progress = progress.lock().expect("no task panics");
    progress.report()
}

/// Receives all bytes of a connection.
async fn receive(mut stream: TcpStream, number: usize, part: u64, progress: Arc<Mutex<Progress>>) -> Result<()> {
    stream.write_u64_le(part).await?;
    let mut room = vec![0; READ_LEN];
    loop {
        match stream.read(&mut room).await? {
            0 => return Ok(()),
            len => progress.lock().expect("no task panics").note(number, len as u64),
        }
    }
}

/// Waits before a server is tried again that may still be starting.
async fn retry() {
    tokio::time::sleep(Duration::from_millis(50)).await;
}

/// What has arrived, and when.
struct Progress {
    began: Duration,
    wanted: u64,
    bytes: u64,
    /// Bytes of each connection.
    of_each: Vec<u64>,
    /// The Jain index when half of all bytes had come.
    fairness: f64,
    first: Option<Duration>,
    /// When the first two seconds had passed, and the bytes until then.
    started: Option<(Duration, u64)>,
    last: Duration,
}

impl Progress {
    fn new(connections: usize, wanted: u64) -> Self {
        let began = monotonic();
        let of_each = vec![0; connections];
        Self { began, wanted, bytes: 0, of_each, fairness: f64::NAN, first: None, started: None, last: began }
    }

    fn note(&mut self, connection: usize, bytes: u64) {
        self.last = monotonic();
        self.first.get_or_insert(self.last);
        self.bytes += bytes;
        self.of_each[connection] += bytes;
        if self.fairness.is_nan() && self.bytes >= self.wanted / 2 {
            let sum = |power: i32| self.of_each.iter().map(|bytes| (*bytes as f64).powi(power)).sum::<f64>();
            self.fairness = sum(1).powi(2) / (self.of_each.len() as f64 * sum(2));
        }
        if self.last - self.began >= START {
            self.started.get_or_insert((self.last, self.bytes));
        }
    }

    fn report(&self) -> Result<()> {
        ensure!(self.bytes == self.wanted, "{} of {} bytes have arrived", self.bytes, self.wanted);
        let first = self.first.context("nothing has arrived")?;
        let rate = |bytes: u64, within: Duration| bytes as f64 * 8.0 / 1e6 / within.as_secs_f64();
        let whole = self.last - self.began;
        let after = self.started.filter(|(from, _)| *from < self.last);
        let after = after.map_or(f64::NAN, |(from, before)| rate(self.bytes - before, self.last - from));
        println!(
            "{:.3} {:.3} {:.3} {:.1} {after:.1} {:.3}",
            self.began.as_secs_f64(),
            (first - self.began).as_secs_f64(),
            whole.as_secs_f64(),
            rate(self.bytes, whole),
            self.fairness
        );
        Ok(())
    }
}

/// The time after which a transfer should have the rate of its path.
const START: Duration = Duration::from_secs(2);
/// MiB in the server's memory, which it sends again and again.
const OBJECT_MIB: usize = 16;
const READ_LEN: usize = 256 << 10;
const BACKLOG: u32 = 1024;
const START_LIMIT: Duration = Duration::from_secs(30);
