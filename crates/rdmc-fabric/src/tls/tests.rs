//! Who gets through a handshake, over a stream in memory.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

fn secret(byte: u8) -> SharedSecret {
    SharedSecret::new([byte; 32])
}

/// What the opening end and the accepting one make of each other; the first sends a word if it is content.
async fn meet(client: Arc<ClientConfig>, server: Arc<ServerConfig>) -> (io::Result<()>, io::Result<[u8; 4]>) {
    let (near, far) = tokio::io::duplex(1 << 16);
    let open = async {
        let mut stream = TlsConnector::from(client).connect(SharedSecret::server_name(), near).await?;
        stream.write_all(b"word").await?;
        stream.flush().await?;
        // The other end judges this one after the handshake is over here.
        stream.read_u8().await.map(drop)
    };
    let accept = async {
        let mut stream = TlsAcceptor::from(server).accept(far).await?;
        let mut word = [0; 4];
        stream.read_exact(&mut word).await?;
        stream.write_all(b"!").await?;
        stream.flush().await?;
        Ok(word)
    };
    tokio::join!(open, accept)
}

#[tokio::test]
async fn ends_that_know_the_secret_meet() {
    let (opened, accepted) = meet(secret(1).client_config(), secret(1).server_config()).await;
    opened.unwrap();
    assert_eq!(accepted.unwrap(), *b"word");
}

#[tokio::test]
async fn ends_with_different_secrets_refuse_each_other() {
    let (opened, accepted) = meet(secret(1).client_config(), secret(2).server_config()).await;
    assert!(opened.unwrap_err().to_string().contains("UnknownIssuer"));
    assert!(accepted.is_err());
}

#[tokio::test]
async fn an_end_that_shows_no_key_is_refused() {
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&TLS13]).unwrap();
    let expected = ExpectedKey::new(&secret(1).key(ACCEPTING, &provider()), &provider());
    let anonymous = builder.dangerous().with_custom_certificate_verifier(Arc::new(expected)).with_no_client_auth();
    let (opened, accepted) = meet(Arc::new(anonymous), secret(1).server_config()).await;
    assert!(opened.is_err() && accepted.is_err());
}

#[tokio::test]
async fn the_accepting_ends_key_opens_no_connection() {
    // As if an accepting end were to reflect what it was shown.
    let provider = provider();
    let own = Arc::new(secret(1).key(ACCEPTING, &provider));
    let expected = Arc::new(ExpectedKey::new(&own, &provider));
    let builder = ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&TLS13]).unwrap();
    let reflecting = builder
        .dangerous()
        .with_custom_certificate_verifier(expected)
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
    let (opened, accepted) = meet(Arc::new(reflecting), secret(1).server_config()).await;
    assert!(opened.is_err() && accepted.is_err());
}

#[test]
fn a_derived_secret_depends_on_purpose_and_material() {
    let one = SharedSecret::derive("one", b"material");
    assert_eq!(one, SharedSecret::derive("one", b"material"));
    assert_ne!(one, SharedSecret::derive("two", b"material"));
    assert_ne!(one, SharedSecret::derive("one", b"other"));
    assert_eq!(format!("{one:?}"), "SharedSecret { .. }");
}
