//! `rdmc gateway`: carries TCP connections over a long path, in one session.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rdmc::TcpFabric;
use rdmc_files::words::printable;
use rdmc_wan::gateway::{AllowList, Client, Entrance, Exit as GatewayExit, GatewayConfig, RefusedReason, Route, Target};
use rdmc_wan::{OpenError, Rate, SessionConfig, SessionListener, SessionRequest};
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::address;
use crate::cli::GatewayOptions;
use crate::exit::{Exit, Signal, Stop, tell};
use crate::progress::{OutputOptions, print_json};

/// Runs one end of a gateway until a signal comes.
pub(crate) async fn run(options: GatewayOptions, stop: Stop) -> anyhow::Result<()> {
    let settings = Settings::new(&options)?;
    let signal = match (&options.listen, &options.peer) {
        (Some(listen), Some(peer)) => {
            let targets = options.to.clone().map_or(Targets::Socks, Targets::Fixed);
            Near::new(settings, peer.clone(), targets, listen).await?.run(stop).await
        }
        _ => {
            let serve = options.serve.as_deref().expect("the command line asks for one end");
            let allow = options.allow.iter().cloned().collect();
            serve_sessions(settings, serve, allow, stop).await?
        }
    };
    Err(Exit::Signal(signal).into())
}

/// What both ends need.
#[derive(Clone)]
struct Settings {
    fabric: Arc<TcpFabric>,
    session: SessionConfig,
    gateway: GatewayConfig,
    drain: Duration,
    output: OutputOptions,
}

impl Settings {
    fn new(options: &GatewayOptions) -> anyhow::Result<Self> {
        let mut session = SessionConfig::default();
        session.security = options.security.open()?;
        session.ring_len_max = options.ring;
        session.rate = options.rate.map(|rate| Rate::bytes_per_second((rate.bits_per_second() / 8).max(1)));
        session.streams = options.streams;
        let mut gateway = GatewayConfig::default();
        gateway.memory_max = 2 * options.ring;
        let mut tcp = rdmc_wan::tcp_config();
        tcp.encrypt = options.security.encrypt;
        let (fabric, drain) = (TcpFabric::with_config(tcp), Duration::from_secs(options.drain));
        Ok(Self { fabric, session, gateway, drain, output: options.output })
    }

    fn say(&self, event: &Event) {
        match self.output {
            OutputOptions { json: true, .. } => print_json(event),
            OutputOptions { quiet: true, .. } => {}
            _ => tell(event),
        }
    }

    fn drain_after(&self, signal: Signal) -> Duration {
        if signal == Signal::Terminate { self.drain } else { Duration::ZERO }
    }
}

/// Where the connections of programs lead.
enum Targets {
    Fixed(Target),
    Socks,
}

/// The end near the programs.
struct Near {
    settings: Settings,
    peer: String,
    targets: Targets,
    listener: TcpListener,
    /// Connections whose programs have not yet said where they lead.
    asking: JoinSet<Option<Client>>,
    /// Connections that wait for a session.
    waiting: Vec<Client>,
    opening: Option<Opening>,
    entrance: Option<Entrance>,
}

type Opening = Pin<Box<dyn Future<Output = Result<Entrance, OpenError>> + Send>>;

impl Near {
    async fn new(settings: Settings, peer: String, targets: Targets, listen: &str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(listen).await.with_context(|| format!("cannot listen at {listen}"))?;
        let target = match &targets {
            Targets::Fixed(target) => Some(target.to_string()),
            Targets::Socks => None,
        };
        let address = listener.local_addr()?.to_string();
        if !address::is_loopback(&address) {
            let message = format!("any program that reaches {address} can use this gateway");
            settings.say(&Event::Warning { message });
        }
        settings.say(&Event::Listening { address, peer: Some(peer.clone()), target });
        let (asking, waiting) = (JoinSet::new(), Vec::new());
        Ok(Self { settings, peer, targets, listener, asking, waiting, opening: None, entrance: None })
    }

    /// Takes connections until a signal comes.
    async fn run(mut self, stop: Stop) -> Signal {
        self.open();
        let signal = loop {
            tokio::select! {
                biased;
                signal = stop.signalled() => break signal,
                opened = async { self.opening.as_mut().expect("it is there").await }, if self.opening.is_some() => {
                    self.opening = None;
                    self.opened(opened);
                }
                ended = async { self.entrance.as_ref().expect("it is there").ended().await },
                    if self.entrance.is_some() =>
                {
                    self.entrance = None;
                    let reason = ended.err().map(|error| error.to_string());
                    self.settings.say(&Event::Ended { peer: self.peer.clone(), reason });
                }
                Some(asked) = self.asking.join_next() => {
                    if let Ok(Some(client)) = asked {
                        self.carry(client);
                    }
                }
                socket = accept(&self.settings, &self.listener) => self.take(socket),
            }
        };
        drop(self.listener);
        if let Some(entrance) = self.entrance {
            entrance.finish(self.settings.drain_after(signal)).await;
        }
        signal
    }

    /// Takes the connection of a program.
    fn take(&mut self, socket: TcpStream) {
        match &self.targets {
            Targets::Fixed(target) => self.carry(Client::new(socket, target.clone())),
            // Those that are silent for long give their places back.
            Targets::Socks if self.asking.len() >= self.settings.gateway.flows_max => {}
            Targets::Socks => {
                self.asking.spawn(async move {
                    // A program that is refused has been told.
                    tokio::time::timeout(SOCKS_LIMIT, Client::socks(socket)).await.ok()?.ok()
                });
            }
        }
    }

    /// Carries a connection, or lets it wait for a session.
    fn carry(&mut self, client: Client) {
        let Some(entrance) = &self.entrance else {
            if self.waiting.len() >= self.settings.gateway.flows_max {
                tokio::spawn(client.refuse(RefusedReason::TooMany));
                return;
            }
            self.waiting.push(client);
            return self.open();
        };
        let Err(refused) = entrance.carry(client) else { return };
        if refused.reason() == RefusedReason::Closing {
            // The session is ending: the next one serves the connection.
            self.entrance = None;
            return self.carry(refused.into_client());
        }
        tokio::spawn(refused.refuse());
    }

    /// Begins to open a session, unless that is under way.
    fn open(&mut self) {
        let Settings { fabric, session, gateway, .. } = self.settings.clone();
        let peer = self.peer.clone();
        let open = || -> Opening { Box::pin(async move { Entrance::connect(fabric, &peer, session, gateway).await }) };
        self.opening.get_or_insert_with(open);
    }

    fn opened(&mut self, opened: Result<Entrance, OpenError>) {
        match opened {
            Ok(entrance) => {
                let fabric = entrance.session().fabric();
                self.settings.say(&Event::Connected { peer: self.peer.clone(), fabric });
                self.entrance = Some(entrance);
                std::mem::take(&mut self.waiting).into_iter().for_each(|client| self.carry(client));
            }
            Err(error) => {
                let message = format!("{:#}", anyhow::Error::new(error));
                self.settings.say(&Event::Warning { message });
                for client in self.waiting.drain(..) {
                    tokio::spawn(client.refuse(RefusedReason::Closing));
                }
            }
        }
    }
}

/// Waits for the next connection. Errors of single connections, and a lack of descriptors, pass.
async fn accept(settings: &Settings, listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((socket, _)) => return socket,
            Err(error) => {
                settings.say(&Event::Warning { message: format!("cannot accept a connection: {error}") });
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves the sessions of other gateways until a signal comes: the end near the targets.
async fn serve_sessions(settings: Settings, serve: &str, allow: AllowList, stop: Stop) -> anyhow::Result<Signal> {
    let listener = SessionListener::bind(settings.fabric.clone(), serve, settings.session.clone()).await;
    let listener = listener.with_context(|| format!("cannot listen at {serve}"))?;
    let address = listener.local_address().to_owned();
    let is_open = settings.session.security.is_none() && !address::is_loopback(&address);
    settings.say(&Event::Listening { address, peer: None, target: None });
    for (is_wrong, message) in [
        (allow.is_empty(), "no connection is allowed to lead anywhere: name networks or hosts with --allow"),
        (is_open, "any host that reaches this address can connect to what --allow names; --key keeps others out"),
    ] {
        if is_wrong {
            settings.say(&Event::Warning { message: message.to_owned() });
        }
    }
    let mut sessions = JoinSet::new();
    let signal = loop {
        tokio::select! {
            biased;
            signal = stop.signalled() => break signal,
            Some(_) = sessions.join_next() => {}
            request = listener.accept() => {
                let (settings, allow, stop) = (settings.clone(), allow.clone(), stop.clone());
                let is_full = sessions.len() >= SESSIONS_MAX;
                sessions.spawn(async move {
                    if is_full {
                        request.refuse("it serves too many gateways").await;
                    } else {
                        serve_session(&settings, request, allow, stop).await;
                    }
                });
            }
        }
    };
    // The listener stays, so that sessions can be resumed while their flows end.
    while sessions.join_next().await.is_some() {}
    Ok(signal)
}

/// Serves one session until it ends, or a signal comes.
async fn serve_session(settings: &Settings, request: SessionRequest, allow: AllowList, stop: Stop) {
    let from = request.from().map_or_else(|| "an unknown host".to_owned(), |from| from.to_string());
    let exit = match GatewayExit::accept(request, Route::Targets(allow), settings.gateway.clone()).await {
        Ok(exit) => exit,
        Err(error) => {
            let message = format!("no session with {from}: {:#}", anyhow::Error::new(error));
            return settings.say(&Event::Warning { message });
        }
    };
    settings.say(&Event::Connected { peer: from.clone(), fabric: exit.session().fabric() });
    tokio::select! {
        ended = exit.ended() => {
            let reason = ended.err().map(|error| error.to_string());
            settings.say(&Event::Ended { peer: from, reason });
        }
        signal = stop.signalled() => exit.finish(settings.drain_after(signal)).await,
    }
}

/// What the program tells.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event {
    /// It listens: for programs that connect to `target` by way of `peer`, or for other gateways.
    Listening {
        address: String,
        peer: Option<String>,
        target: Option<String>,
    },
    /// A session begins.
    Connected {
        peer: String,
        fabric: &'static str,
    },
    /// A session has ended. Its connections are reset.
    Ended {
        peer: String,
        reason: Option<String>,
    },
    Warning {
        message: String,
    },
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listening { address, peer: None, .. } => write!(f, "listening at {address} for gateways"),
            Self::Listening { address, peer: Some(peer), target: Some(target) } => {
                write!(f, "listening at {address} for connections to {target}, by way of {peer}")
            }
            Self::Listening { address, peer: Some(peer), target: None } => {
                write!(f, "listening at {address} for SOCKS5, by way of {peer}")
            }
            Self::Connected { peer, fabric } => write!(f, "session with {peer}, by {fabric}"),
            Self::Ended { peer, reason: None } => write!(f, "the session with {peer} has ended"),
            Self::Ended { peer, reason: Some(reason) } => {
                write!(f, "the session with {peer} has failed: {}", printable(reason))
            }
            Self::Warning { message } => write!(f, "warning: {}", printable(message)),
        }
    }
}

/// Most sessions that one exit serves at once; each may use the memory of its rings.
const SESSIONS_MAX: usize = 64;
/// How long a program may take to say where its connection leads.
const SOCKS_LIMIT: Duration = Duration::from_secs(10);
/// The pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
