//! Errors of sessions in the words of the program `rdmc`: what they mean, and what to do about them.

use std::io;

use rdmc::Distrust;

use crate::session::{OpenError, error_chain};
use crate::wire::RefusedReason;

impl OpenError {
    /// Returns what went wrong at the end that opens a session, and the remedy if there is one. It names commands and
    /// options of the program `rdmc`.
    pub fn explained(&self) -> String {
        match self {
            Self::Refused { address, reason } => match encrypting_end(reason) {
                Some(End::Listener) => {
                    format!("{address} refuses the session: it encrypts data, and this end does not: {ENCRYPT}")
                }
                Some(End::Opener) => {
                    format!("{address} refuses the session: this end encrypts data, and it does not: {ENCRYPT}")
                }
                None => self.to_string(),
            },
            Self::Handshake { address, source } if source.kind() == io::ErrorKind::InvalidData => {
                format!("{address} does not answer as {COMMANDS} do: something else seems to listen there ({source})")
            }
            Self::Handshake { address, source } if source.kind() == io::ErrorKind::TimedOut => {
                format!("{address} does not answer ({source}): does one of {COMMANDS} listen there, or something else?")
            }
            Self::Handshake { source, .. } if distrust(source) == Some(&Distrust::NotTls) => {
                format!("{}; or does something other than {COMMANDS} listen there?", error_chain(self))
            }
            _ => error_chain(self),
        }
    }

    /// Returns what went wrong at the end that listens, and the remedy if there is one. It names commands and options
    /// of the program `rdmc`.
    pub fn explained_at_listener(&self) -> String {
        let Self::Handshake { source, .. } = self else { return error_chain(self) };
        match encrypting_end(&source.to_string()) {
            Some(End::Listener) => format!("this end encrypts data, and the other end does not: {ENCRYPT}"),
            Some(End::Opener) => format!("the other end encrypts data, and this end does not: {ENCRYPT}"),
            None => error_chain(self),
        }
    }
}

enum End {
    Listener,
    Opener,
}

/// Returns which end encrypts data, if a reason says that one of them alone does.
fn encrypting_end(reason: &str) -> Option<End> {
    let is_refused = |ours: &str, theirs: &str| {
        reason == RefusedReason::Fabrics { ours: ours.to_owned(), theirs: theirs.to_owned() }.to_string()
    };
    match () {
        () if is_refused("tcp+tls", "tcp") => Some(End::Listener),
        () if is_refused("tcp", "tcp+tls") => Some(End::Opener),
        () => None,
    }
}

fn distrust(error: &io::Error) -> Option<&Distrust> {
    error.get_ref()?.downcast_ref()
}

const COMMANDS: &str = "`rdmc serve` and `rdmc gateway --serve`";
const ENCRYPT: &str = "give --encrypt to both ends, or to neither";

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rdmc_fabric::TcpFabric;
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::session::{SessionConfig, SessionListener, connect};

    fn fabric(encrypt: bool) -> Arc<TcpFabric> {
        let mut config = crate::tcp_config();
        config.encrypt = encrypt;
        TcpFabric::with_config(config)
    }

    #[tokio::test]
    async fn encryption_at_one_end_is_explained_to_both() {
        for listener_encrypts in [true, false] {
            let config = SessionConfig::default();
            let listener =
                SessionListener::bind(fabric(listener_encrypts), "127.0.0.1:0", config.clone()).await.unwrap();
            let address = listener.local_address().to_owned();
            let accepting = async { listener.accept().await.accept(Vec::new()).await.unwrap_err() };
            let opening = connect(fabric(!listener_encrypts), &address, config, Vec::new());
            let (opened, accepted) = tokio::join!(opening, accepting);
            let (opened, accepted) = (opened.unwrap_err().explained(), accepted.explained_at_listener());
            let (at_opener, at_listener) = match listener_encrypts {
                true => {
                    ("it encrypts data, and this end does not", "this end encrypts data, and the other end does not")
                }
                false => {
                    ("this end encrypts data, and it does not", "the other end encrypts data, and this end does not")
                }
            };
            assert_eq!(opened, format!("{address} refuses the session: {at_opener}: {ENCRYPT}"));
            assert_eq!(accepted, format!("{at_listener}: {ENCRYPT}"));
        }
    }

    #[tokio::test]
    async fn a_server_of_another_protocol_is_taken_for_one() {
        let key = rdmc::Security::shared_key([7; 32]);
        for (greeting, security, told) in [
            ("HTTP/1.1 400 Bad Request\r\n\r\n", None, "something else seems to listen there (a frame of "),
            ("SSH-2.0-OpenSSH_9.6\r\n", None, "something else seems to listen there (a frame of "),
            ("SSH-2.0-OpenSSH_9.6\r\n", Some(key), "or does something other than `rdmc serve`"),
        ] {
            let place = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = place.local_addr().unwrap().to_string();
            let serving = async {
                let mut sockets = Vec::new();
                // The first connection may be one for data.
                loop {
                    let (mut socket, _) = place.accept().await.unwrap();
                    let _ = socket.write_all(greeting.as_bytes()).await;
                    sockets.push(socket);
                }
            };
            let config = SessionConfig { security, ..SessionConfig::default() };
            let text = tokio::select! {
                opened = connect(fabric(false), &address, config, Vec::new()) => opened.unwrap_err().explained(),
                () = serving => unreachable!("it serves for ever"),
            };
            assert!(text.contains(told) && text.contains(&address), "{text}");
        }
    }

    #[test]
    fn a_server_that_is_silent_is_asked_for() {
        let source = io::Error::new(io::ErrorKind::TimedOut, "not finished within 15.0s");
        let text = OpenError::Handshake { address: "host:1".to_owned(), source }.explained();
        assert!(text.starts_with("host:1 does not answer (not finished within 15.0s): does one of"), "{text}");
    }
}
