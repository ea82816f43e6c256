//! `rdmc gateway`: carries TCP connections over a long path, in one session.

use std::fmt;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use anyhow::Context;
use rdmc::Fabrics;
use rdmc_files::TransferError;
use rdmc_files::words::printable;
use rdmc_wan::gateway::{
    AllowList, Client, Entrance, Exit as GatewayExit, GatewayConfig, RefusedFlow, RefusedReason, Route, Target,
    TransparentError, TransparentListenError, listen_transparent,
};
use rdmc_wan::{ConnectionEvent, ConnectionEvents, OpenError, Rate, SessionConfig, SessionListener, SessionRequest};
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use crate::address;
use crate::cli::GatewayOptions;
use crate::exit::{Exit, Signal, Stop, of_transfer, tell};
use crate::progress::{OutputOptions, print_json};

/// Runs a gateway until a signal comes.
pub(crate) async fn run(options: GatewayOptions, stop: Stop) -> anyhow::Result<()> {
    let settings = Settings::new(&options).await?;
    let signal = match (&options.listen, &options.peer) {
        (Some(listen), Some(peer)) => {
            let targets = match &options.to {
                Some(target) => Targets::Fixed(target.clone()),
                None if options.transparent => Targets::Transparent,
                None => Targets::Socks,
            };
            let programs = Programs::listen(&settings, peer, targets, listen).await?;
            Near::new(settings, peer.clone(), Source::Programs(programs)).run(stop).await
        }
        _ => {
            let serve = options.serve.as_deref().expect("the command line asks for one end");
            let allow = options.allow.iter().cloned().collect();
            serve_gateways(settings, serve, options.via.as_deref(), allow, stop).await?
        }
    };
    Err(Exit::Signal(signal).into())
}

/// What both ends need.
#[derive(Clone)]
struct Settings {
    fabrics: Fabrics,
    session: SessionConfig,
    gateway: GatewayConfig,
    drain: Duration,
    output: OutputOptions,
}

impl Settings {
    async fn new(options: &GatewayOptions) -> anyhow::Result<Self> {
        let mut session = SessionConfig::default();
        session.security = options.security.open()?;
        session.ring_len_max = options.ring;
        session.rate = options.rate.map(|rate| Rate::bytes_per_second((rate.bits_per_second() / 8).max(1)));
        session.streams = options.streams;
        let mut gateway = GatewayConfig::default();
        gateway.memory_max = 2 * options.ring;
        let fabric = options.fabric.settings().encrypt(options.security.encrypt);
        let opened = match (&options.serve, &options.peer) {
            (Some(serve), _) => fabric.open_at(serve).await,
            (None, peer) => fabric.open_towards(peer.as_deref().unwrap_or_default(), session.registered_max()).await,
        };
        let fabrics = opened.map_err(of_transfer)?.fabrics().clone();
        let drain = Duration::from_secs(options.drain);
        Ok(Self { fabrics, session, gateway, drain, output: options.output })
    }

    fn say(&self, event: &Event) {
        match self.output {
            OutputOptions { json: true, .. } => print_json(event),
            OutputOptions { quiet: true, .. } => {}
            _ => tell(event),
        }
    }

    fn report_connection(&self, peer: &str, event: ConnectionEvent) {
        let peer = peer.to_owned();
        match event {
            ConnectionEvent::Lost => self.say(&Event::Lost { peer }),
            ConnectionEvent::Resumed => self.say(&Event::Resumed { peer }),
            _ => {}
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
    Transparent,
}

/// What an entrance carries.
enum Source {
    /// The connections of programs.
    Programs(Programs),
    /// The flows of other gateways.
    Gateways(mpsc::Receiver<Client>),
}

impl Source {
    /// Waits for the next client. If the future is dropped, no client is lost.
    async fn next(&mut self, settings: &Settings) -> Client {
        match self {
            Self::Programs(programs) => programs.next(settings).await,
            Self::Gateways(clients) => match clients.recv().await {
                Some(client) => client,
                None => std::future::pending().await,
            },
        }
    }
}

/// Where programs connect.
struct Programs {
    targets: Targets,
    listener: TcpListener,
    address: SocketAddr,
    /// Connections whose programs have not yet said where they lead.
    asking: JoinSet<Option<Client>>,
}

impl Programs {
    async fn listen(settings: &Settings, peer: &str, targets: Targets, listen: &str) -> anyhow::Result<Self> {
        let listener = match targets {
            Targets::Transparent => listen_for_diverted(listen).await,
            _ => TcpListener::bind(listen).await.map_err(|error| not_listening(listen, &error)),
        }?;
        // Connections inherit it: they are reset also if this process is killed before it has looked at them. Otherwise
        // the system would end them in good order.
        rustix::net::sockopt::set_socket_linger(&listener, Some(Duration::ZERO))?;
        let address = listener.local_addr()?;
        let at = address.to_string();
        // A program that connects to a transparent entrance itself is refused.
        if !address::is_loopback(&at) && !matches!(targets, Targets::Transparent) {
            let message = format!("any program that reaches {at} can use this gateway");
            settings.say(&Event::Warning { message });
        }
        let (takes, target) = match &targets {
            Targets::Fixed(target) => (format!("connections to {target}"), Some(target.to_string())),
            Targets::Socks => ("SOCKS5".to_owned(), None),
            Targets::Transparent => ("diverted connections".to_owned(), None),
        };
        settings.say(&Event::Listening { address: at, peer: Some(peer.to_owned()), target, takes });
        Ok(Self { targets, listener, address, asking: JoinSet::new() })
    }

    async fn next(&mut self, settings: &Settings) -> Client {
        loop {
            let client = tokio::select! {
                biased;
                // A program that is refused has been told.
                Some(asked) = self.asking.join_next() => asked.ok().flatten(),
                socket = accept(settings, &self.listener) => self.take(settings, socket),
            };
            if let Some(client) = client {
                return client;
            }
        }
    }

    /// Takes a connection; `None` if its program has yet to say where it leads, or if it is refused.
    fn take(&mut self, settings: &Settings, socket: TcpStream) -> Option<Client> {
        match &self.targets {
            Targets::Fixed(target) => Some(Client::new(socket, target.clone())),
            Targets::Transparent => {
                let warn = |error| settings.say(&Event::Warning { message: with_remedy(&error) });
                Client::transparent(socket, self.address).map_err(warn).ok()
            }
            // Those that are silent for long give their places back.
            Targets::Socks if self.asking.len() >= settings.gateway.flows_max => None,
            Targets::Socks => {
                self.asking
                    .spawn(async move { tokio::time::timeout(SOCKS_LIMIT, Client::socks(socket)).await.ok()?.ok() });
                None
            }
        }
    }
}

async fn listen_for_diverted(listen: &str) -> anyhow::Result<TcpListener> {
    let cannot = || format!("cannot listen at {listen}");
    let address = lookup_host(listen).await.with_context(cannot)?.next().context("the host has no address")?;
    listen_transparent(address).map_err(|error| match error {
        TransparentListenError::Listen { source, .. } => not_listening(listen, &source),
        error @ TransparentListenError::NotPermitted(_) => {
            anyhow::Error::new(error).context(NEEDS_CAPABILITY).context(cannot())
        }
        error => anyhow::Error::new(error).context(cannot()),
    })
}

fn not_listening(listen: &str, error: &io::Error) -> anyhow::Error {
    of_transfer(TransferError::cannot_listen(listen, error, "gateway"))
}

/// Adds to the text of an error what to do about it.
fn with_remedy(error: &TransparentError) -> String {
    match error {
        TransparentError::NotDiverted { .. } => format!(
            "{error}; programs connect to their targets, and a rule of the kernel diverts these connections \
             (nft list ruleset, or iptables -t mangle -L)"
        ),
        error => error.to_string(),
    }
}

/// The end that opens sessions, to the exit near the targets or to the next gateway.
struct Near {
    settings: Settings,
    peer: String,
    source: Source,
    /// Clients that wait for a session.
    waiting: Vec<Client>,
    opening: Option<Opening>,
    entrance: Option<Entrance>,
    connection_events: Option<ConnectionEvents>,
}

type Opening = Pin<Box<dyn Future<Output = Result<Entrance, OpenError>> + Send>>;

impl Near {
    fn new(settings: Settings, peer: String, source: Source) -> Self {
        Self { settings, peer, source, waiting: Vec::new(), opening: None, entrance: None, connection_events: None }
    }

    /// Carries clients until a signal comes.
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
                // First, so that a session is lost before it has ended.
                Some(event) = async { self.connection_events.as_mut().expect("it is there").next().await },
                    if self.connection_events.is_some() => self.settings.report_connection(&self.peer, event),
                ended = async { self.entrance.as_ref().expect("it is there").ended().await },
                    if self.entrance.is_some() =>
                {
                    (self.entrance, self.connection_events) = (None, None);
                    let reason = ended.err().map(|error| error.to_string());
                    self.settings.say(&Event::Ended { peer: self.peer.clone(), reason });
                }
                client = self.source.next(&self.settings) => self.carry(client),
            }
        };
        drop(self.source);
        if let Some(entrance) = self.entrance {
            entrance.finish(self.settings.drain_after(signal)).await;
        }
        signal
    }

    /// Carries a client, or lets it wait for a session.
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
            (self.entrance, self.connection_events) = (None, None);
            return self.carry(refused.into_client());
        }
        tokio::spawn(refused.refuse());
    }

    /// Begins to open a session, unless that is under way.
    fn open(&mut self) {
        let Settings { fabrics, session, gateway, .. } = self.settings.clone();
        let peer = self.peer.clone();
        let open = || -> Opening { Box::pin(async move { Entrance::connect(fabrics, &peer, session, gateway).await }) };
        self.opening.get_or_insert_with(open);
    }

    fn opened(&mut self, opened: Result<Entrance, OpenError>) {
        match opened {
            Ok(entrance) => {
                let fabric = entrance.session().fabric();
                self.settings.say(&Event::Connected { peer: self.peer.clone(), fabric });
                self.connection_events = Some(entrance.session().connection_events());
                self.entrance = Some(entrance);
                std::mem::take(&mut self.waiting).into_iter().for_each(|client| self.carry(client));
            }
            Err(error) => {
                self.settings.say(&Event::Warning { message: error.explained() });
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
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves other gateways until a signal comes. Their flows lead to their targets, or to the next gateway.
async fn serve_gateways(
    settings: Settings,
    serve: &str,
    next: Option<&str>,
    allow: AllowList,
    stop: Stop,
) -> anyhow::Result<Signal> {
    let Some(next) = next else {
        let route = Route::Targets(allow);
        let listener = listen_for_gateways(&settings, serve, None, &route).await?;
        return Ok(serve_sessions(settings, listener, route, stop).await);
    };
    let (clients, given) = mpsc::channel(CLIENTS_MAX);
    let route = Route::Next { allow: (!allow.is_empty()).then_some(allow), clients };
    let listener = listen_for_gateways(&settings, serve, Some(next), &route).await?;
    let near = Near::new(settings.clone(), next.to_owned(), Source::Gateways(given));
    Ok(tokio::join!(serve_sessions(settings, listener, route, stop.clone()), near.run(stop)).0)
}

async fn listen_for_gateways(
    settings: &Settings,
    serve: &str,
    next: Option<&str>,
    route: &Route,
) -> anyhow::Result<SessionListener> {
    let listener = SessionListener::bind(settings.fabrics.clone(), serve, settings.session.clone()).await;
    let listener = listener.map_err(|error| not_listening(serve, &error))?;
    let address = listener.local_address().to_owned();
    let is_open = settings.session.security.is_none() && !address::is_loopback(&address);
    let (peer, takes) = (next.map(str::to_owned), "gateways".to_owned());
    settings.say(&Event::Listening { address, peer, target: None, takes });
    let leads_nowhere = matches!(route, Route::Targets(allow) if allow.is_empty());
    let reached = match route {
        Route::Next { allow: None, .. } => "what the next gateway allows",
        _ => "what --allow names",
    };
    let open = format!("any host that reaches this address can connect to {reached}; --key keeps others out");
    for (is_wrong, message) in [
        (leads_nowhere, "no connection is allowed to lead anywhere: name networks or hosts with --allow"),
        (is_open, &open),
    ] {
        if is_wrong {
            settings.say(&Event::Warning { message: message.to_owned() });
        }
    }
    Ok(listener)
}

/// Serves sessions until a signal comes, and those that are there until they end.
async fn serve_sessions(settings: Settings, listener: SessionListener, route: Route, stop: Stop) -> Signal {
    let mut sessions = JoinSet::new();
    let signal = loop {
        tokio::select! {
            biased;
            signal = stop.signalled() => break signal,
            Some(_) = sessions.join_next() => {}
            request = listener.accept() => {
                let (settings, route, stop) = (settings.clone(), route.clone(), stop.clone());
                let is_full = sessions.len() >= SESSIONS_MAX;
                sessions.spawn(async move {
                    if is_full {
                        request.refuse("it serves too many gateways").await;
                    } else {
                        serve_session(&settings, request, route, stop).await;
                    }
                });
            }
        }
    };
    // The listener stays, so that sessions can be resumed while their flows end.
    let mut refusals = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            ended = sessions.join_next() => if ended.is_none() { break },
            request = listener.accept() => {
                refusals.spawn(async move { request.refuse("it is ending").await });
            }
        }
    }
    signal
}

/// Serves one session until it ends, or a signal comes.
async fn serve_session(settings: &Settings, request: SessionRequest, route: Route, stop: Stop) {
    let from = request.from().map_or_else(|| "an unknown host".to_owned(), |from| from.to_string());
    let exit = match GatewayExit::accept(request, route, settings.gateway.clone()).await {
        Ok(exit) => exit,
        Err(error) => {
            let message = format!("no session with {from}: {}", error.explained_at_listener());
            return settings.say(&Event::Warning { message });
        }
    };
    settings.say(&Event::Connected { peer: from.clone(), fabric: exit.session().fabric() });
    let (mut connection_events, mut quiet_until) = (exit.session().connection_events(), Instant::now());
    let signal = loop {
        tokio::select! {
            biased;
            // First, so that a session is lost before it has ended.
            Some(event) = connection_events.next() => settings.report_connection(&from, event),
            ended = exit.ended() => {
                let reason = ended.err().map(|error| error.to_string());
                return settings.say(&Event::Ended { peer: from, reason });
            }
            signal = stop.signalled() => break signal,
            refused = async { sleep_until(quiet_until).await; exit.next_refused().await } => {
                // Programs cannot fill the log.
                quiet_until = Instant::now() + REFUSED_PAUSE;
                let RefusedFlow { target, reason, .. } = refused;
                settings.say(&Event::Refused { peer: from.clone(), target: target.to_string(), reason });
            }
        }
    };
    exit.finish(settings.drain_after(signal)).await;
}

/// What the program tells.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Event {
    /// It listens for programs or for other gateways, whose connections go on to `peer` if there is one.
    Listening {
        address: String,
        peer: Option<String>,
        target: Option<String>,
        /// What it listens for.
        #[serde(skip)]
        takes: String,
    },
    /// A session begins.
    Connected {
        peer: String,
        fabric: &'static str,
    },
    /// A session has lost its connection, and the end that opened it tries to connect again.
    Lost {
        peer: String,
    },
    /// A session goes on over another connection.
    Resumed {
        peer: String,
    },
    /// The exit has refused a connection.
    Refused {
        peer: String,
        target: String,
        #[serde(serialize_with = "in_words")]
        reason: RefusedReason,
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
            Self::Listening { address, peer, takes, .. } => {
                write!(f, "listening at {address} for {takes}")?;
                peer.iter().try_for_each(|peer| write!(f, ", by way of {peer}"))
            }
            Self::Connected { peer, fabric } => write!(f, "session with {peer}, by {fabric}"),
            Self::Lost { peer } => write!(f, "the session with {peer} has lost its connection, and tries to go on"),
            Self::Resumed { peer } => write!(f, "the session with {peer} goes on over another connection"),
            Self::Refused { peer, target, reason } => {
                write!(f, "refused a connection of {peer} to {target}: {reason}")?;
                match reason {
                    RefusedReason::NotAllowed => write!(f, "; --allow {target} would allow it"),
                    RefusedReason::Loop => f.write_str("; look where --via of these gateways leads"),
                    _ => Ok(()),
                }
            }
            Self::Ended { peer, reason: None } => write!(f, "the session with {peer} has ended"),
            Self::Ended { peer, reason: Some(reason) } => {
                write!(f, "the session with {peer} has failed: {}", printable(reason))
            }
            Self::Warning { message } => write!(f, "warning: {}", printable(message)),
        }
    }
}

fn in_words<S: serde::Serializer>(reason: &RefusedReason, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(reason)
}

const NEEDS_CAPABILITY: &str =
    "--transparent needs the capability CAP_NET_ADMIN on Linux: run as root, or `setcap cap_net_admin+ep` the program";
/// Most clients between the sessions of other gateways and the entrance; more wait in their sessions.
const CLIENTS_MAX: usize = 64;
/// Most sessions that one exit serves at once; each may use the memory of its rings.
const SESSIONS_MAX: usize = 64;
/// The least pause between two refused connections of a session that are told.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);
/// How long a program may take to say where its connection leads.
const SOCKS_LIMIT: Duration = Duration::from_secs(10);
/// The pause after a connection could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_user_can_mend_is_told_with_the_remedy() {
        let refused = |reason| {
            let (peer, target) = ("10.0.0.1".to_owned(), "10.2.0.9:22".to_owned());
            Event::Refused { peer, target, reason }.to_string()
        };
        let told = "refused a connection of 10.0.0.1 to 10.2.0.9:22: ";
        for (reason, remedy) in [
            (RefusedReason::NotAllowed, "; --allow 10.2.0.9:22 would allow it"),
            (RefusedReason::Loop, "; look where --via of these gateways leads"),
            (RefusedReason::ConnectionRefused, "the target refuses the connection"),
        ] {
            let text = refused(reason);
            assert!(text.starts_with(told) && text.ends_with(remedy), "{text}");
        }
        let text = with_remedy(&TransparentError::NotDiverted { address: ([10, 0, 0, 1], 7471).into() });
        assert!(text.contains("10.0.0.1:7471 was not diverted") && text.contains("nft list ruleset"), "{text}");
    }
}
