//! Authentication: TLS 1.3 on control connections, by certificates or by a shared key.
//!
//! A node without [`Security`] refuses connections that begin with TLS. A node with it takes and opens only TLS
//! connections. Certificates carry names, and a node's number is bound to its name. All holders of a shared key are
//! equal.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rdmc_fabric::tls::{self, SharedSecret};
use rustls::client::WebPkiServerVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{ClientConfig, InconsistentKeys, RootCertStore, ServerConfig};

mod channel;
mod identity;
mod refusal;

pub(crate) use channel::{DRAIN_LIMIT, Opening, PeerSecurity, drain, drain_frame};
pub(crate) use identity::{Fingerprint, Identities, Identity, host};
pub use refusal::Distrust;

/// Protects control connections: by certificates of one authority, or by a key that all nodes share.
///
/// Give it to [`NodeBuilder::security`](crate::NodeBuilder::security),
/// [`Bind::security`](crate::Bind::security) and [`InviteOptions::security`](crate::InviteOptions::security). Cheap to
/// clone. All nodes of a cluster use the same kind. Data connections of the fabric `tcp` are admitted by secrets that
/// travel over control connections, and encrypted if [`TcpConfig::encrypt`](crate::TcpConfig) is set.
///
/// # Examples
/// ```
/// # fn main() -> Result<(), rdmc::SecurityError> {
/// # let dir = tempfile::tempdir().expect("a directory");
/// # let path = dir.path().join("cluster.key");
/// # std::fs::write(&path, [7; 32]).expect("a file");
/// let by_key = rdmc::Security::key_file(path)?;
/// let by_certificate = rdmc::Security::tls_files("ca.pem", "node1.pem", "node1.key");
/// assert_eq!(by_certificate.unwrap_err().to_string(), "cannot read ca.pem");
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Security(Arc<SecurityShared>);

struct SecurityShared {
    proof: Proof,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// How an end proves its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// It knows the key.
    Key,
    /// It has a certificate with its name.
    Certificate,
}

impl Security {
    /// Admits all ends that know `key`, which must not be guessable.
    ///
    /// Every holder of the key can be any node, and can invite.
    pub fn shared_key(key: [u8; 32]) -> Self {
        let secret = SharedSecret::new(key);
        let (client, server) = (secret.client_config(), secret.server_config());
        Self(Arc::new(SecurityShared { proof: Proof::Key, client, server }))
    }

    /// Reads a [shared key](Self::shared_key) from a file.
    ///
    /// 64 hexadecimal digits or 32 bytes are the key itself. From a longer text the key is derived, without line ends
    /// at its end. Such a text must be as hard to guess as a random key: after one connection an attacker can try
    /// guesses without connecting again. The file's permissions are not checked.
    ///
    /// # Errors
    /// The file cannot be read or is shorter than a key.
    pub fn key_file(path: impl AsRef<Path>) -> Result<Self, SecurityError> {
        let path = path.as_ref();
        let bytes = read(path)?;
        let key = parse_key(&bytes).ok_or(SecurityError::ShortKey { file: path.to_owned(), bytes: bytes.len() })?;
        Ok(Self::shared_key(key))
    }

    /// Admits all ends with a certificate of the authority `ca`, and shows `certificate`, to which `key` belongs.
    ///
    /// All are files in PEM form. The certificate must be good for servers and clients, and name this node as the
    /// others know it: see [`Cluster::name`](crate::Cluster::name) and [`invite`](crate::invite()). Intermediate
    /// certificates follow it in its file.
    ///
    /// # Errors
    /// A file cannot be read or has the wrong content, or the key belongs to another certificate.
    pub fn tls_files(
        ca: impl AsRef<Path>,
        certificate: impl AsRef<Path>,
        key: impl AsRef<Path>,
    ) -> Result<Self, SecurityError> {
        let named = |path: &Path| Ok((read(path)?, path.display().to_string()));
        let (ca, certificate, key) = (named(ca.as_ref())?, named(certificate.as_ref())?, named(key.as_ref())?);
        Self::tls([&ca.0, &certificate.0, &key.0], [&ca.1, &certificate.1, &key.1])
    }

    /// Does the same as [`tls_files`](Self::tls_files), from the content of the files.
    ///
    /// # Errors
    /// The content is invalid, or the key belongs to another certificate.
    pub fn tls_pem(ca: &[u8], certificate: &[u8], key: &[u8]) -> Result<Self, SecurityError> {
        Self::tls([ca, certificate, key], ["the authority's PEM", "the certificate's PEM", "the key's PEM"])
    }

    /// Tells whether nodes show that they know a shared key. Otherwise they show certificates.
    pub fn is_by_key(&self) -> bool {
        self.0.proof == Proof::Key
    }

    fn tls(pem: [&[u8]; 3], places: [&str; 3]) -> Result<Self, SecurityError> {
        let provider = tls::provider();
        let [ca, certificate, key] = places.map(str::to_owned);
        let mut roots = RootCertStore::empty();
        for root in certificates(pem[0], &ca)? {
            roots.add(root).map_err(|source| SecurityError::BadCertificate { place: ca.clone(), source })?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(pem[1], &certificate)?;
        let private = PrivateKeyDer::from_pem_slice(pem[2]).map_err(|_| SecurityError::NoKey { place: key.clone() })?;
        let own = CertifiedKey::from_der(chain, private, &provider).map_err(|source| match source {
            rustls::Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                SecurityError::KeyMismatch { key: key.clone(), certificate: certificate.clone() }
            }
            rustls::Error::InvalidCertificate(_) => {
                SecurityError::BadCertificate { place: certificate.clone(), source }
            }
            _ => SecurityError::BadKey { place: key.clone(), source },
        })?;
        let authority = |error: rustls::server::VerifierBuilderError| {
            let source = rustls::Error::General(error.to_string());
            SecurityError::BadCertificate { place: ca.clone(), source }
        };
        let clients = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone());
        let clients = clients.build().map_err(authority)?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone());
        let servers = servers.build().map_err(authority)?;
        if let Err(error) = clients.verify_client_cert(&own.cert[0], &own.cert[1..], UnixTime::now()) {
            let problem = Distrust::of(error, Proof::Certificate);
            tracing::warn!(certificate, %problem, "others will refuse the own certificate");
        }
        let own = Arc::new(SingleCertAndKey::from(own));
        let opening = ClientConfig::builder_with_provider(provider.clone()).with_protocol_versions(&[&TLS13]);
        let opening = opening.expect("the provider has suites of TLS 1.3").with_webpki_verifier(servers);
        let mut client = opening.with_client_cert_resolver(own.clone());
        tls::harden_client(&mut client);
        let accepting = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let accepting = accepting.expect("the provider has suites of TLS 1.3").with_client_cert_verifier(clients);
        let mut server = accepting.with_cert_resolver(own);
        tls::harden_server(&mut server);
        let (client, server) = (Arc::new(client), Arc::new(server));
        Ok(Self(Arc::new(SecurityShared { proof: Proof::Certificate, client, server })))
    }
}

impl fmt::Debug for Security {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Keys stay out of logs.
        f.debug_struct("Security").field("proof", &self.0.proof).finish_non_exhaustive()
    }
}

/// Keys or certificates cannot be used: the user must give others.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SecurityError {
    /// A file cannot be read.
    #[error("cannot read {}", file.display())]
    Unreadable {
        /// The file.
        file: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file is too short for a key.
    #[error(
        "{} has {bytes} bytes, which is too short for a key: it takes 64 hexadecimal digits, 32 bytes, or a text of \
         more than 32 bytes",
        file.display()
    )]
    ShortKey {
        /// The file.
        file: PathBuf,
        /// Its length in bytes.
        bytes: usize,
    },
    /// A file has no certificate.
    #[error("{place} has no certificate: it takes PEM, which begins with -----BEGIN CERTIFICATE-----")]
    NoCertificate {
        /// The file.
        place: String,
    },
    /// A certificate is malformed or of a kind that is not supported.
    #[error("{place} has a certificate that cannot be used")]
    BadCertificate {
        /// The file.
        place: String,
        /// Why.
        source: rustls::Error,
    },
    /// A file has no private key.
    #[error(
        "{place} has no private key: it takes PEM without a passphrase, which begins with -----BEGIN PRIVATE KEY-----"
    )]
    NoKey {
        /// The file.
        place: String,
    },
    /// A private key is malformed or of a kind that is not supported.
    #[error("{place} has a private key that cannot be used: it takes ECDSA (P-256, P-384), Ed25519 or RSA")]
    BadKey {
        /// The file.
        place: String,
        /// Why.
        source: rustls::Error,
    },
    /// The private key belongs to another certificate.
    #[error(
        "the private key in {key} does not belong to the certificate in {certificate}: give the two that were made \
         together"
    )]
    KeyMismatch {
        /// The key's file.
        key: String,
        /// The certificate's file.
        certificate: String,
    },
}

fn read(file: &Path) -> Result<Vec<u8>, SecurityError> {
    std::fs::read(file).map_err(|source| SecurityError::Unreadable { file: file.to_owned(), source })
}

fn certificates(pem: &[u8], place: &str) -> Result<Vec<CertificateDer<'static>>, SecurityError> {
    let none = || SecurityError::NoCertificate { place: place.to_owned() };
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    found.ok().filter(|found| !found.is_empty()).ok_or_else(none)
}

/// Returns the key that a file's content stands for, or `None` if it is too short.
fn parse_key(bytes: &[u8]) -> Option<[u8; KEY_LEN]> {
    if let Ok(key) = bytes.try_into() {
        return Some(key);
    }
    let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
    let text = &bytes[..end];
    if let Ok(key) = text.try_into() {
        return Some(key);
    }
    let hex = std::str::from_utf8(text).ok().and_then(|text| blake3::Hash::from_hex(text).ok());
    match hex {
        Some(key) => Some(key.into()),
        None if text.len() > KEY_LEN => Some(blake3::derive_key(KEY_OF_TEXT, text)),
        None => None,
    }
}

/// Bytes of a key.
const KEY_LEN: usize = 32;
/// The purpose for which a key is derived from a text.
const KEY_OF_TEXT: &str = "rdmc 2026-11 cluster key of a text";

#[cfg(test)]
mod tests;
