//! TLS 1.3 between two ends that know the same secret.
//!
//! A one-way function derives two pairs of Ed25519 keys from the secret: one for ends that open connections, one for
//! ends that accept them. The public keys take the place of certificates (RFC 7250). An end proves that it knows the
//! secret by signing the handshake, so no authority, name or clock is needed. The keys of each session come from an
//! exchange of fresh keys: an attacker who learns the secret later cannot decrypt recorded sessions.

use std::fmt;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme};

/// A secret; two ends accept each other if both know it.
#[derive(Clone, PartialEq, Eq)]
pub struct SharedSecret([u8; 32]);

impl SharedSecret {
    /// Wraps a secret, which must be impossible to guess.
    pub fn new(secret: [u8; 32]) -> Self {
        Self(secret)
    }

    /// Derives a secret for one purpose. The derived secret reveals nothing about the material.
    ///
    /// `purpose` is a constant with no other use.
    pub fn derive(purpose: &str, material: &[u8]) -> Self {
        Self(blake3::derive_key(purpose, material))
    }

    /// Returns the configuration of ends that know the secret and open connections.
    pub fn client_config(&self) -> Arc<ClientConfig> {
        let provider = provider();
        let expected = Arc::new(ExpectedKey::new(&self.key(ACCEPTING, &provider), &provider));
        let own = Arc::new(self.key(OPENING, &provider));
        let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let builder = builder.expect("the provider has suites of TLS 1.3").dangerous();
        let mut config = builder
            .with_custom_certificate_verifier(expected)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
        harden_client(&mut config);
        Arc::new(config)
    }

    /// Returns the configuration of ends that know the secret and accept connections.
    pub fn server_config(&self) -> Arc<ServerConfig> {
        let provider = provider();
        let expected = Arc::new(ExpectedKey::new(&self.key(OPENING, &provider), &provider));
        let own = Arc::new(self.key(ACCEPTING, &provider));
        let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]);
        let mut config = builder
            .expect("the provider has suites of TLS 1.3")
            .with_client_cert_verifier(expected)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
        harden_server(&mut config);
        Arc::new(config)
    }

    /// Returns the server name between ends that share a secret; it has no meaning and is not sent.
    pub fn server_name() -> ServerName<'static> {
        ServerName::try_from("rdmc.invalid").expect("it is a name")
    }

    /// Derives the key pair of one side, with the public key in place of a certificate.
    fn key(&self, side: &str, provider: &CryptoProvider) -> CertifiedKey {
        let seed = blake3::derive_key(side, &self.0);
        let encoded = [ED25519_PKCS8_PREFIX.as_slice(), &seed].concat();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(encoded));
        let key = provider.key_provider.load_private_key(key).expect("any seed is a key of Ed25519");
        let public = key.public_key().expect("a key of Ed25519 has its public key");
        CertifiedKey::new(vec![CertificateDer::from(public.to_vec())], key)
    }
}

impl fmt::Debug for SharedSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSecret").finish_non_exhaustive()
    }
}

/// Returns the cryptography of all TLS connections.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// Turns off unneeded features: every connection is verified anew, and node names are not sent in clear text.
pub fn harden_client(config: &mut ClientConfig) {
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
}

/// Turns off unneeded features: every connection is verified anew.
pub fn harden_server(config: &mut ServerConfig) {
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
}

/// Accepts an end that holds one particular key.
#[derive(Debug)]
struct ExpectedKey {
    public: CertificateDer<'static>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ExpectedKey {
    fn new(key: &CertifiedKey, provider: &CryptoProvider) -> Self {
        Self { public: key.cert[0].clone(), algorithms: provider.signature_verification_algorithms }
    }

    fn verify(&self, shown: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        // Public keys are no secrets: their comparison may take variable time.
        if *shown == self.public { Ok(()) } else { Err(CertificateError::UnknownIssuer.into()) }
    }

    fn verify_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(shown.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signed, &self.algorithms)
    }
}

/// Rejects a TLS 1.2 signature; only TLS 1.3 is supported.
fn only_tls13() -> Result<HandshakeSignatureValid, rustls::Error> {
    Err(rustls::PeerIncompatible::Tls12NotOffered.into())
}

impl ServerCertVerifier for ExpectedKey {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.verify(end_entity).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        only_tls13()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for ExpectedKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.verify(end_entity).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        only_tls13()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verify_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The bytes before the 32-byte seed in an encoded Ed25519 private key (RFC 8410, version 1).
const ED25519_PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];
/// The purpose of the key of ends that open connections.
const OPENING: &str = "rdmc 2026-11 TLS key of the end that opens a connection";
/// The purpose of the key of ends that accept connections.
const ACCEPTING: &str = "rdmc 2026-11 TLS key of the end that accepts a connection";

#[cfg(test)]
mod tests;
