//! Control connections with and without TLS, and how the two are distinguished.
//!
//! An end that wants TLS sends four bytes that are the length of no frame. They name its kind of proof. It waits for
//! the same four; then TLS follows, with ordinary frames inside. So each end can say why it refuses another kind, and
//! no end ever falls back.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rdmc_fabric::tls::SharedSecret;
use rdmc_fabric::{ControlStream, Environment};
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::identity::{Identities, Identity, server_name};
use super::refusal::Distrust;
use super::{Proof, Security};
use crate::id::NodeId;
use crate::stats::Refusals;
use crate::wire::CHECK_LEN;

/// Secures the connections that a node opens to others of its cluster.
pub(crate) struct PeerSecurity {
    pub(crate) security: Option<Security>,
    pub(crate) identities: Identities,
    pub(crate) refusals: Refusals,
}

impl PeerSecurity {
    /// Makes a control connection to a node of the cluster secure, and verifies the node's identity.
    pub(crate) async fn secure(
        &self,
        environment: &dyn Environment,
        stream: Box<dyn ControlStream>,
        node: NodeId,
        address: &str,
    ) -> io::Result<Box<dyn ControlStream>> {
        let Some(security) = &self.security else { return Ok(stream) };
        let to = stream.peer_address();
        let connected = match self.identities.get(&node) {
            Some(Identity::Name(name)) => security.connect(environment, stream, name).await,
            // The node that invited opens all its connections itself.
            Some(Identity::Certificate(_)) | None => Err(Distrust::OtherCertificate.into()),
        };
        if let Err(error) = &connected
            && error.get_ref().is_some_and(|inner| inner.is::<Distrust>())
            && self.refusals.add("opened", to)
        {
            tracing::warn!(%node, address, %error, "no secure control connection");
        }
        connected
    }
}

/// The first four bytes of an arriving connection.
pub(crate) struct Opening([u8; 4]);

impl Opening {
    /// Reads them; returns `None` if the connection ends before.
    pub(crate) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Self>> {
        let mut bytes = [0; 4];
        let first = stream.read(&mut bytes).await?;
        if first == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut bytes[first..]).await?;
        Ok(Some(Self(bytes)))
    }

    pub(crate) fn asks_for_tls(&self) -> bool {
        [Proof::Key, Proof::Certificate].iter().any(|proof| self.0 == proof.opening())
    }

    /// Returns a stream that begins with these bytes.
    pub(crate) fn before<'a>(&'a self, stream: impl AsyncRead + Unpin + 'a) -> impl AsyncRead + Unpin + 'a {
        self.0.as_slice().chain(stream)
    }

    /// Returns the length of the frame that begins with these bytes.
    fn frame_len(&self) -> u32 {
        u32::from_le_bytes(self.0)
    }
}

impl Proof {
    /// Returns the first bytes of an end with this proof, and of the answer: as a length, far above that of any frame.
    fn opening(self) -> [u8; 4] {
        match self {
            Self::Key => *b"\xffTLK",
            Self::Certificate => *b"\xffTLC",
        }
    }
}

impl Security {
    /// Makes a connection secure that this end has opened, and verifies that the other end is called `name`: that its
    /// certificate names it, or that it knows the key. For protocols beside that of nodes.
    ///
    /// # Cancel safety
    /// If the future is dropped, so is the connection.
    ///
    /// # Errors
    /// The connection's. The other end is not trusted, or does not trust this end: a [`Distrust`].
    pub async fn opened(
        &self,
        environment: &dyn Environment,
        stream: Box<dyn ControlStream>,
        name: &str,
    ) -> io::Result<Box<dyn ControlStream>> {
        self.connect(environment, stream, name).await
    }

    /// Makes a connection secure that has arrived. Without `security`, it must not ask for TLS; with `security`, it
    /// must. For protocols beside that of nodes: their connections begin with fewer than 2³⁰ as a little-endian number
    /// of 4 bytes.
    ///
    /// # Cancel safety
    /// If the future is dropped, so is the connection.
    ///
    /// # Errors
    /// The connection's. The other end is not trusted, or one end wants TLS and the other does not: a [`Distrust`]; then
    /// it comes with the connection, if the other end can still be told in clear.
    pub async fn accepted(
        security: Option<&Self>,
        environment: &dyn Environment,
        mut stream: Box<dyn ControlStream>,
    ) -> Result<Box<dyn ControlStream>, (io::Error, Option<Box<dyn ControlStream>>)> {
        let opening = match Opening::read(&mut stream).await {
            Ok(Some(opening)) => opening,
            Ok(None) => return Err((io::ErrorKind::UnexpectedEof.into(), None)),
            Err(error) => return Err((error, None)),
        };
        match (security, opening.asks_for_tls()) {
            (None, false) => Ok(Box::new(BegunStream { first: opening.0, read: 0, stream })),
            (None, true) => Err((Distrust::UnexpectedTls.into(), Some(stream))),
            (Some(_), false) => {
                // With bytes unread, the end of the connection would destroy what is still to be said.
                let drained = environment.timeout(DRAIN_LIMIT, drain_frame(&opening, &mut stream)).await;
                Err((Distrust::Plain.into(), matches!(drained, Ok(Ok(()))).then_some(stream)))
            }
            (Some(security), true) => match security.accept(&opening, stream).await {
                Ok((stream, _)) => Ok(stream),
                Err((error, mut stream)) => {
                    // However that ends, the refusal was sent as far as possible.
                    let _ = environment.timeout(DRAIN_LIMIT, drain(&mut stream)).await;
                    Err((error, None))
                }
            },
        }
    }

    /// Makes a fresh connection secure, and verifies that a node called `name` is at its other end.
    pub(crate) async fn connect(
        &self,
        environment: &dyn Environment,
        mut stream: Box<dyn ControlStream>,
        name: &str,
    ) -> io::Result<Box<dyn ControlStream>> {
        let name = match self.0.proof {
            Proof::Key => SharedSecret::server_name(),
            Proof::Certificate => server_name(name)?,
        };
        let own = self.0.proof.opening();
        stream.write_all(&own).await?;
        stream.flush().await?;
        match Opening::read(&mut stream).await? {
            Some(answer) if answer.0 == own => {}
            Some(answer) if answer.asks_for_tls() => return Err(Distrust::OtherKind.into()),
            Some(_) => return Err(Distrust::NotTls.into()),
            None => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection")),
        }
        let peer = stream.peer_address();
        let connecting = TlsConnector::from(self.0.client.clone()).connect(name, GatheredStream(stream));
        match connecting.into_fallible().await {
            Ok(stream) => Ok(Box::new(SecureStream { stream: Box::new(stream.into()), peer, proof: self.0.proof })),
            Err((error, mut stream)) => {
                // However that ends, the alert was sent as far as possible.
                let _ = environment.timeout(DRAIN_LIMIT, drain(&mut stream)).await;
                Err(Distrust::explained(error, self.0.proof))
            }
        }
    }

    /// Makes a connection secure whose other end has asked for it; returns also the credential that the other end
    /// shows.
    ///
    /// # Errors
    /// Returned with the stream, which has the alert for the other end: [drain](drain) it.
    pub(crate) async fn accept(
        &self,
        opening: &Opening,
        mut stream: Box<dyn ControlStream>,
    ) -> Result<(Box<dyn ControlStream>, CertificateDer<'static>), (io::Error, Box<dyn ControlStream>)> {
        let peer = stream.peer_address();
        let answered = async {
            stream.write_all(&self.0.proof.opening()).await?;
            stream.flush().await?;
            if opening.0 == self.0.proof.opening() { Ok(()) } else { Err(Distrust::OtherKind.into()) }
        };
        if let Err(error) = answered.await {
            return Err((error, stream));
        }
        let accepting = TlsAcceptor::from(self.0.server.clone()).accept(GatheredStream(stream)).into_fallible().await;
        let stream = accepting.map_err(|(error, stream)| (Distrust::explained(error, self.0.proof), stream.0))?;
        let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let shown = shown.expect("the handshake asks for it").clone().into_owned();
        Ok((Box::new(SecureStream { stream: Box::new(stream.into()), peer, proof: self.0.proof }), shown))
    }
}

/// Reads what the other end still sends until it closes the connection.
///
/// A connection closed with bytes unread is reset, and the other end might not read the refusal.
pub(crate) async fn drain(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> io::Result<()> {
    stream.shutdown().await?;
    tokio::io::copy(stream, &mut tokio::io::sink()).await.map(drop)
}

/// Reads the rest of a frame without keeping it.
pub(crate) async fn drain_frame(opening: &Opening, stream: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
    let rest = stream.take(u64::from(opening.frame_len()) + CHECK_LEN as u64);
    tokio::io::copy(&mut { rest }, &mut tokio::io::sink()).await.map(drop)
}

/// A connection whose first bytes were read.
struct BegunStream {
    first: [u8; 4],
    /// How many of these were read again.
    read: usize,
    stream: Box<dyn ControlStream>,
}

impl ControlStream for BegunStream {
    fn peer_address(&self) -> Option<IpAddr> {
        self.stream.peer_address()
    }

    fn round_trip(&self) -> Option<Duration> {
        self.stream.round_trip()
    }
}

impl AsyncRead for BegunStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.read == this.first.len() {
            return Pin::new(&mut this.stream).poll_read(cx, buf);
        }
        let rest = &this.first[this.read..];
        let now = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..now]);
        this.read += now;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for BegunStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A control connection below TLS.
struct GatheredStream(Box<dyn ControlStream>);

impl AsyncRead for GatheredStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for GatheredStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    /// Writes all records of TLS at once.
    ///
    /// When TLS fails, it tries once to write its alert, which may not be the first of several records. A stream that
    /// takes one record at a time would leave it out.
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match bufs {
            [one] => Pin::new(&mut self.0).poll_write(cx, one),
            several => {
                let gathered: Vec<u8> = several.iter().flat_map(|buf| buf.iter().copied()).collect();
                Pin::new(&mut self.0).poll_write(cx, &gathered)
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// A control connection inside TLS.
struct SecureStream {
    stream: Box<TlsStream<GatheredStream>>,
    peer: Option<IpAddr>,
    proof: Proof,
}

impl ControlStream for SecureStream {
    fn peer_address(&self) -> Option<IpAddr> {
        self.peer
    }

    fn round_trip(&self) -> Option<Duration> {
        self.stream.get_ref().0.0.round_trip()
    }
}

impl AsyncRead for SecureStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let proof = self.proof;
        Pin::new(&mut self.stream).poll_read(cx, buf).map_err(|error| Distrust::explained(error, proof)).map(|read| {
            match read {
                // Frames have lengths and groups are closed explicitly: a truncated stream counts as a lost one.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
                read => read,
            }
        })
    }
}

impl AsyncWrite for SecureStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// How long an end that refuses, or is refused, may take to read or to send the rest.
pub(crate) const DRAIN_LIMIT: Duration = Duration::from_secs(2);
