//! Connections that the kernel diverts to an entrance, by a rule with `TPROXY`.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};

use super::target::Target;

/// An entrance cannot listen for connections that the kernel diverts.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransparentListenError {
    /// The process lacks the capability `CAP_NET_ADMIN`, or the system is not Linux.
    #[error("this process cannot take diverted connections")]
    NotPermitted(#[source] io::Error),
    /// The address cannot be listened at.
    #[error("cannot listen at {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
}

/// A diverted connection does not say where it leads.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransparentError {
    /// The connection was lost.
    #[error("the connection was lost")]
    Connection(#[from] io::Error),
    /// A program has connected to the entrance itself, or to the entrance's port at any address if the entrance listens
    /// at all addresses.
    #[error("the connection to {address} was not diverted to the entrance, but leads to it")]
    NotDiverted {
        /// Where the program connected to.
        address: SocketAddr,
    },
}

/// Listens at `address` for connections to any address that the kernel diverts there, by a rule with `TPROXY` or by a
/// local route. Linux only.
///
/// [`Client::transparent`](super::Client::transparent) says where each leads.
///
/// # Errors
/// See [`TransparentListenError`].
///
/// # Panics
/// If there is no Tokio runtime.
pub fn listen_transparent(address: SocketAddr) -> Result<TcpListener, TransparentListenError> {
    let failed = |source| TransparentListenError::Listen { address, source };
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP)).map_err(failed)?;
    set_transparent(&socket, address).map_err(TransparentListenError::NotPermitted)?;
    let listen = || {
        socket.set_reuse_address(true)?;
        socket.set_nonblocking(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    listen().map_err(failed)
}

#[cfg(target_os = "linux")]
fn set_transparent(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V4(_) => socket.set_ip_transparent_v4(true),
        SocketAddr::V6(_) => socket.set_ip_transparent_v6(true),
    }
}

#[cfg(not(target_os = "linux"))]
fn set_transparent(_: &Socket, _: SocketAddr) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns where a connection led before it was diverted to the listener at `listening`.
pub(super) fn target(socket: &TcpStream, listening: SocketAddr) -> Result<Target, TransparentError> {
    let local = socket.local_addr()?;
    // An IPv4 address comes as an IPv6 one if the listener takes both.
    let address = SocketAddr::new(local.ip().to_canonical(), local.port());
    let is_own = listening.ip().is_unspecified() || listening.ip().to_canonical() == address.ip();
    if is_own && listening.port() == address.port() {
        return Err(TransparentError::NotDiverted { address });
    }
    Ok(Target::Address(address))
}

/// Connections that wait to be accepted: as many as a Tokio listener lets wait.
const BACKLOG: i32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_leads_to_its_local_address_unless_that_is_the_listeners() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connecting = TcpStream::connect(address);
        let (_program, (socket, _)) = tokio::try_join!(connecting, listener.accept()).unwrap();
        let target_at = |ip: &str, port| target(&socket, SocketAddr::new(ip.parse().unwrap(), port));
        for own in ["127.0.0.1", "::ffff:127.0.0.1", "0.0.0.0", "::"] {
            let refused = target_at(own, address.port()).unwrap_err();
            assert!(matches!(refused, TransparentError::NotDiverted { address: own } if own == address), "{own}");
        }
        for other in [target_at("0.0.0.0", address.port() ^ 1), target_at("127.0.0.2", address.port())] {
            assert_eq!(other.unwrap(), Target::Address(address));
        }
    }
}
