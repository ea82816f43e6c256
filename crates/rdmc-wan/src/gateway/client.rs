//! A program's connection to an entrance, and where it leads.

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::time::Duration;

use rdmc_fabric::{Environment, TokioEnvironment};
use socket2::SockRef;
use tokio::net::TcpStream;

use super::note::RefusedReason;
use super::socks::{self, SocksError};
use super::target::Target;

/// A program's connection, before it is a flow.
pub struct Client {
    socket: TcpStream,
    target: Target,
    /// The program waits for an answer.
    is_socks: bool,
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
        Self { socket, target, is_socks: false }
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
            Ok(target) => Ok(Self { socket, target, is_socks: true }),
            Err(error) => {
                if SockRef::from(&socket).shutdown(Shutdown::Write).is_ok() {
                    linger(&socket).await;
                }
                Err(error)
            }
        }
    }

    /// Returns where it leads.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Tells the program that it is not connected: by SOCKS5 if it speaks that, else by a reset.
    ///
    /// # Cancel safety
    /// If the future is dropped, the connection is closed.
    pub async fn refuse(self, reason: RefusedReason) {
        tracing::debug!(target = %self.target, %reason, "connection refused");
        if self.is_socks {
            if answer_socks(&self.socket, Err(reason)).await.is_ok() {
                linger(&self.socket).await;
            }
        } else {
            // If that fails, the connection is gone already.
            let _ = self.socket.set_zero_linger();
        }
    }

    pub(super) fn refused(self, reason: RefusedReason) -> RefusedClient {
        RefusedClient { client: self, reason }
    }

    pub(super) fn into_parts(self) -> (TcpStream, bool) {
        (self.socket, self.is_socks)
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("target", &self.target).field("is_socks", &self.is_socks).finish_non_exhaustive()
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

/// Tells a program what has become of its request. After a refusal, ends the direction to the program.
pub(super) async fn answer_socks(socket: &TcpStream, answer: Result<(), RefusedReason>) -> io::Result<()> {
    let mut bytes = &socks::answer(answer)[..];
    while !bytes.is_empty() {
        socket.writable().await?;
        match socket.try_write(bytes) {
            Ok(len) => bytes = &bytes[len..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    if answer.is_err() { SockRef::from(socket).shutdown(Shutdown::Write) } else { Ok(()) }
}

/// Lets a program read the last bytes: closing a socket with unread bytes would reset it.
pub(super) async fn linger(socket: &TcpStream) {
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
