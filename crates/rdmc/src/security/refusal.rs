//! The reasons why an end of a control connection is not trusted.

use std::fmt;
use std::io;
use std::time::Duration;

use rustls::{AlertDescription, CertificateError};

use super::Proof;

/// There is no secure control connection; in the messages "it" is the other end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Distrust {
    /// The other end does not speak TLS.
    #[error("it does not speak TLS: was it started without a key or certificates?")]
    NotTls,
    /// The other end does not speak TLS where this one does.
    #[error("it does not speak TLS, and this node takes nothing else: it needs a key or certificates")]
    Plain,
    /// The other end speaks TLS where this one does not.
    #[error("it speaks TLS, and this node does not: it was started without a key or certificates")]
    UnexpectedTls,
    /// One end has a key, the other certificates.
    #[error("one side has a shared key, the other certificates: give both the same kind")]
    OtherKind,
    /// The other end has another key.
    #[error("it has another key: give all nodes the same")]
    OtherKey,
    /// The other end's certificate is of another authority.
    #[error("its certificate is not of the authority (CA) that is trusted here")]
    OtherAuthority,
    /// The other end's certificate has another name.
    #[error("its certificate is for {}, not for {expected}", listed(presented))]
    OtherName {
        /// The names in the certificate.
        presented: Vec<String>,
        /// The name that was expected.
        expected: String,
    },
    /// The other end does not have the certificate that was seen before.
    #[error("its certificate is not that of the node that invited")]
    OtherCertificate,
    /// A certificate cannot have the name of the node.
    #[error("{name:?} is neither a DNS name nor an IP address, so no certificate can be for it: give the node a name")]
    NoName {
        /// The name.
        name: String,
    },
    /// The other end's certificate has expired.
    #[error("its certificate expired {} ago: it needs a new one, or a clock is wrong", RoughDuration(*expired_for))]
    Expired {
        /// How long ago it expired.
        expired_for: Duration,
    },
    /// The other end's certificate is not valid yet.
    #[error("its certificate is not valid yet: a clock is wrong, or it was made for later")]
    NotYetValid,
    /// The other end's certificate is for other purposes.
    #[error("its certificate must be good for servers and for clients (extendedKeyUsage serverAuth, clientAuth)")]
    OtherPurpose,
    /// The other end's certificate is malformed, or its signature wrong.
    #[error("its certificate is not valid: {reason}")]
    Invalid {
        /// The problem.
        reason: String,
    },
    /// The other end has shown no certificate.
    #[error("it showed no certificate")]
    NoCertificate,
    /// The other end asks for a certificate.
    #[error("it asks for a certificate")]
    CertificateRequired,
    /// The other end does not accept this one's credential.
    #[error("it refuses this node: {reason}")]
    Refused {
        /// Its reason, as far as it gives one.
        reason: String,
    },
    /// TLS failed in another way.
    #[error("TLS failed: {reason}")]
    Tls {
        /// The error of TLS.
        reason: String,
    },
}

impl Distrust {
    /// Returns the meaning of a TLS error, for ends with this kind of proof.
    pub(super) fn of(error: rustls::Error, proof: Proof) -> Self {
        match error {
            rustls::Error::NoCertificatesPresented => Self::NoCertificate,
            rustls::Error::InvalidCertificate(error) => Self::of_certificate(error, proof),
            rustls::Error::AlertReceived(alert) => Self::of_alert(alert, proof),
            rustls::Error::InvalidMessage(_) => Self::NotTls,
            error => Self::Tls { reason: error.to_string() },
        }
    }

    fn of_certificate(error: CertificateError, proof: Proof) -> Self {
        match error {
            CertificateError::UnknownIssuer if proof == Proof::Key => Self::OtherKey,
            // An authority of the same name has other signatures.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::OtherAuthority,
            CertificateError::ExpiredContext { time, not_after } => {
                let seconds = time.as_secs().saturating_sub(not_after.as_secs());
                Self::Expired { expired_for: Duration::from_secs(seconds) }
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYetValid,
            CertificateError::NotValidForNameContext { expected, presented } => {
                let presented = presented.iter().map(|name| bare(name)).collect();
                Self::OtherName { presented, expected: expected.to_str().into_owned() }
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => Self::OtherPurpose,
            error => Self::Invalid { reason: error.to_string() },
        }
    }

    fn of_alert(alert: AlertDescription, proof: Proof) -> Self {
        let reason = match alert {
            AlertDescription::CertificateRequired => return Self::CertificateRequired,
            AlertDescription::UnknownCA if proof == Proof::Key => return Self::OtherKey,
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                "this node's certificate is of an authority (CA) that it does not trust"
            }
            AlertDescription::CertificateExpired => {
                "by its clock this node's certificate has expired or is not valid yet"
            }
            AlertDescription::BadCertificate => "this node's certificate is not for the name by which it was reached",
            AlertDescription::UnsupportedCertificate => {
                "this node's certificate is not good for servers and clients (extendedKeyUsage serverAuth, clientAuth)"
            }
            alert => return Self::Refused { reason: format!("{alert:?}") },
        };
        Self::Refused { reason: reason.to_owned() }
    }

    /// Returns the message for the end that is refused.
    pub(crate) fn told(&self) -> String {
        match self {
            Self::OtherName { presented, expected } => {
                format!("its certificate would have to be for {expected}, and is for {}", listed(presented))
            }
            other => other.to_string(),
        }
    }

    /// Returns the meaning of a stream's error, if it is one of TLS.
    pub(super) fn explained(error: io::Error, proof: Proof) -> io::Error {
        match error.downcast::<rustls::Error>() {
            Ok(error) => Self::of(error, proof).into(),
            Err(error) => error,
        }
    }
}

impl From<Distrust> for io::Error {
    fn from(distrust: Distrust) -> Self {
        io::Error::new(io::ErrorKind::PermissionDenied, distrust)
    }
}

/// Returns the name inside its text in TLS errors: `DnsName("name")` or `IpAddress(address)`.
fn bare(presented: &str) -> String {
    let inside = presented.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
    inside.unwrap_or(presented).trim_matches('"').to_owned()
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "nobody (it has no subjectAltName)".to_owned() } else { names.join(", ") }
}

/// Writes a long time in one unit.
struct RoughDuration(Duration);

impl fmt::Display for RoughDuration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let units = [(86_400, "day"), (3600, "hour"), (60, "minute"), (1, "second")];
        let (length, unit) = units.into_iter().find(|(length, _)| seconds >= *length).unwrap_or((1, "second"));
        let count = seconds / length;
        write!(f, "{count} {unit}{}", if count == 1 { "" } else { "s" })
    }
}
