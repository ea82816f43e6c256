//! What a node is known by.

use std::collections::BTreeMap;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

use super::refusal::Distrust;
use super::{Proof, Security};
use crate::node::NodeId;

/// What a node of a cluster must show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Identity {
    /// A certificate with this name.
    Name(String),
    /// The very certificate that was seen before.
    Certificate(Fingerprint),
}

/// A digest of a certificate, or of the key in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(blake3::Hash);

impl Fingerprint {
    pub(crate) fn of(shown: &CertificateDer<'_>) -> Self {
        Self(blake3::hash(shown))
    }
}

/// What the nodes of a cluster must show.
pub(crate) type Identities = BTreeMap<NodeId, Identity>;

impl Security {
    /// Checks that what an end has shown, which its handshake has proved to be its own, makes it the one it should be.
    pub(crate) fn check(&self, shown: &CertificateDer<'_>, expected: &Identity) -> Result<(), Distrust> {
        match expected {
            // A key has no name.
            Identity::Name(_) if self.0.proof == Proof::Key => Ok(()),
            Identity::Name(name) => {
                let of_tls = |error| Distrust::of(error, Proof::Certificate);
                let shown = ParsedCertificate::try_from(shown).map_err(of_tls)?;
                verify_server_name(&shown, &server_name(name)?).map_err(of_tls)
            }
            Identity::Certificate(seen) if Fingerprint::of(shown) == *seen => Ok(()),
            Identity::Certificate(_) => Err(Distrust::OtherCertificate),
        }
    }
}

/// Turns the name of a node into what certificates are compared with.
pub(crate) fn server_name(name: &str) -> Result<ServerName<'static>, Distrust> {
    ServerName::try_from(name.to_owned()).map_err(|_| Distrust::NoName { name: name.to_owned() })
}

/// Returns the host in an address `host:port`, without the brackets of IPv6; the whole if there is no port.
pub(crate) fn host(address: &str) -> &str {
    let host = match address.rsplit_once(':') {
        Some((host, _)) if !host.contains(':') || host.ends_with(']') => host,
        _ => address,
    };
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}
