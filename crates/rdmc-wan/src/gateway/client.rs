//! A program's connection to an entrance, and where it leads.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use rdmc_fabric::{Environment, TokioEnvironment};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::note::RefusedReason;
use super::pipe::PipeEnd;
use super::socket::Socket;
use super::socks::{self, SocksError};
use super::target::Target;
use super::transparent::{self, TransparentError};

/// A program's connection, or a flow of another gateway, before it is a flow of an [`Entrance`](super::Entrance).
pub struct Client {
    socket: Socket,
    target: Target,
    caller: Caller,
    /// How many gateways it has passed since a program opened it.
    passed: u8,
}

/// What waits for the exit's answer.
pub(super) enum Caller {
    /// Nothing does.
    Silent,
    /// A program that speaks SOCKS5.
    Socks,
    /// The flow of another gateway, which its own session answers.
    Flow(oneshot::Sender<Result<(), RefusedReason>>),
}

/// A connection that was not carried. [`refuse`](Self::refuse) tells the program.
#[derive(Debug)]
pub struct RefusedClient {
    client: Client,
    reason: RefusedReason,
}

impl Client {
    /// Makes one that leads to `target`. The program needs to say nothing.
    pub fn new(socket: TcpStream, target: Target) -> Self {
        Self { socket: Socket::of(socket), target, caller: Caller::Silent, passed: 0 }
    }

    /// Makes one that leads where the program asks for, by SOCKS5.
    ///
    /// # Cancel safety
    /// If the future is dropped, the connection is closed.
    ///
    /// # Errors
    /// The program does not speak SOCKS5 or asks for something else than a connection: see [`SocksError`].
    pub async fn socks(mut socket: TcpStream) -> Result<Self, SocksError> {
        // The parts of the handshake are short, and each waits for the other.
        socket.set_nodelay(true)?;
        match socks::negotiate(&mut socket).await {
            Ok(target) => Ok(Self { socket: Socket::of(socket), target, caller: Caller::Socks, passed: 0 }),
            Err(error) => {
                let socket = Socket::Tcp(socket);
                socket.settle();
                if socket.shut().is_ok() {
                    linger(&socket).await;
                }
                Err(error)
            }
        }
    }

    /// Makes one that leads where the program connected to, before the kernel diverted the connection to the listener
    /// at `listening` (see [`listen_transparent`](super::listen_transparent)). The program needs to say nothing.
    ///
    /// # Errors
    /// The connection was not diverted, and would lead to the entrance again: see [`TransparentError`]. Then it is
    /// reset.
    pub fn transparent(socket: TcpStream, listening: SocketAddr) -> Result<Self, TransparentError> {
        match transparent::target(&socket, listening) {
            Ok(target) => Ok(Self::new(socket, target)),
            Err(error) => {
                Socket::Tcp(socket).reset();
                Err(error)
            }
        }
    }

    /// Makes one of a flow of another gateway, to which `answer` goes.
    pub(super) fn of_flow(
        end: PipeEnd,
        target: Target,
        passed: u8,
        answer: oneshot::Sender<Result<(), RefusedReason>>,
    ) -> Self {
        Self { socket: Socket::Pipe(end), target, caller: Caller::Flow(answer), passed }
    }

    /// Returns where it leads.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Tells the program that it is not connected: by SOCKS5 if it speaks that, else by a reset. If another gateway
    /// waits, it gets the reason, and tells the program.
    ///
    /// # Cancel safety
    /// If the future is dropped, the connection is closed.
    pub async fn refuse(self, reason: RefusedReason) {
        tracing::debug!(target = %self.target, %reason, "connection refused");
        // If that fails, the program is gone already.
        let _ = self.caller.tell(&self.socket, Err(reason)).await;
    }

    pub(super) fn refused(self, reason: RefusedReason) -> RefusedClient {
        RefusedClient { client: self, reason }
    }

    pub(super) fn passed(&self) -> u8 {
        self.passed
    }

    pub(super) fn into_parts(self) -> (Socket, Caller) {
        (self.socket, self.caller)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("target", &self.target).field("passed", &self.passed).finish_non_exhaustive()
    }
}

impl RefusedClient {
    /// Returns the reason.
    pub fn reason(&self) -> RefusedReason {
        self.reason
    }

    /// Gives the connection back.
    pub fn into_client(self) -> Client {
        self.client
    }

    /// Tells the program.
    ///
    /// # Cancel safety
    /// If the future is dropped, the connection is closed.
    pub async fn refuse(self) {
        self.client.refuse(self.reason).await;
    }
}

impl Caller {
    /// Tells whether the flow waits for the exit's answer.
    pub(super) fn waits(&self) -> bool {
        !matches!(self, Self::Silent)
    }

    /// Passes the exit's answer on. A program that is refused has time to read why.
    pub(super) async fn tell(self, socket: &Socket, answer: Result<(), RefusedReason>) -> io::Result<()> {
        match self {
            Self::Silent => {
                if answer.is_err() {
                    socket.reset();
                }
            }
            Self::Socks => {
                answer_socks(socket, answer).await?;
                if answer.is_err() {
                    socket.settle();
                    linger(socket).await;
                }
            }
            Self::Flow(sender) => sender.send(answer).map_err(|_| io::ErrorKind::BrokenPipe)?,
        }
        Ok(())
    }
}

/// Tells a program what has become of its request. After a refusal, ends the direction to the program.
async fn answer_socks(socket: &Socket, answer: Result<(), RefusedReason>) -> io::Result<()> {
    let mut bytes = &socks::answer(answer)[..];
    while !bytes.is_empty() {
        socket.writable().await?;
        match socket.try_write(bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    if answer.is_err() { socket.shut() } else { Ok(()) }
}

/// Lets a program read the last bytes: closing a socket with unread bytes would reset it.
async fn linger(socket: &Socket) {
    let environment = TokioEnvironment::new();
    let environment: &dyn Environment = &environment;
    let lingering = async {
        let mut unread = [0; 1024];
        loop {
            socket.readable().await?;
            match socket.try_read(&mut unread) {
                Ok(0) => return io::Result::Ok(()),
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
                _ => {}
            }
        }
    };
    // The program may do as it likes.
    let _ = environment.timeout(LINGER_LIMIT, lingering).await;
}

/// How long a program may take to read why it is refused.
const LINGER_LIMIT: Duration = Duration::from_secs(2);
