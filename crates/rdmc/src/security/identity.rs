//! The identity of a node.

use std::collections::BTreeMap;

use rustls::client::verify_server_name;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::ParsedCertificate;

use super::refusal::Distrust;
use super::{Proof, Security};
use crate::id::NodeId;

/// The identity that a node of a cluster must prove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Identity {
    /// A certificate with this name.
    Name(String),
    /// The same certificate that was seen before.
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

/// The identities of the nodes of a cluster.
pub(crate) type Identities = BTreeMap<NodeId, Identity>;

impl Security {
    /// Checks that the credential of an end, which its handshake has proved to be its own, fits the expected identity.
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

/// Converts the name of a node for the comparison with certificates.
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
