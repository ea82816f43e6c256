//! What programs ask for by SOCKS5 (RFC 1928): `CONNECT` without authentication.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::note::RefusedReason;
use super::target::Target;

/// A program does not speak SOCKS5 as this entrance does.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SocksError {
    /// The connection was lost, or the program ended it.
    #[error("the connection was lost")]
    Connection(#[from] io::Error),
    /// It speaks another protocol; it got no answer.
    #[error("the program speaks another protocol than SOCKS5")]
    Version,
    /// It offers no method that needs no authentication; it was told so.
    #[error("the program wants to authenticate")]
    Method,
    /// It asks for something else than `CONNECT`; it was told so.
    #[error("the program asks for command {command}, not for CONNECT")]
    Command {
        /// The number of the command.
        command: u8,
    },
    /// Its target is none; it was told so.
    #[error("the program asks for a target that is none")]
    Target,
}

/// Reads what a program asks for. Every refusal was told to it.
///
/// It reads no byte beyond the request: those that follow belong to the flow.
pub(super) async fn negotiate(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> Result<Target, SocksError> {
    let [version, methods] = read(stream).await?;
    if version != VERSION {
        return Err(SocksError::Version);
    }
    let mut offered = vec![0; methods.into()];
    stream.read_exact(&mut offered).await?;
    if !offered.contains(&NO_AUTHENTICATION) {
        stream.write_all(&[VERSION, NO_METHOD]).await?;
        return Err(SocksError::Method);
    }
    stream.write_all(&[VERSION, NO_AUTHENTICATION]).await?;
    let [version, command, _, kind] = read(stream).await?;
    if version != VERSION {
        return Err(SocksError::Version);
    }
    let host = match kind {
        ADDRESS_IPV4 => Some(IpAddr::from(Ipv4Addr::from(read::<4>(stream).await?)).to_string()),
        ADDRESS_IPV6 => Some(IpAddr::from(Ipv6Addr::from(read::<16>(stream).await?)).to_string()),
        ADDRESS_NAME => {
            let [len] = read(stream).await?;
            let mut name = vec![0; len.into()];
            stream.read_exact(&mut name).await?;
            String::from_utf8(name).ok()
        }
        _ => {
            stream.write_all(&reply(Reply::AddressType)).await?;
            return Err(SocksError::Target);
        }
    };
    let port = u16::from_be_bytes(read(stream).await?);
    if command != CONNECT {
        stream.write_all(&reply(Reply::Command)).await?;
        return Err(SocksError::Command { command });
    }
    match host.and_then(|host| Target::new(&host, port)) {
        Some(target) => Ok(target),
        None => {
            stream.write_all(&reply(Reply::Failed)).await?;
            Err(SocksError::Target)
        }
    }
}

/// Returns the bytes that tell a program what has become of its request.
pub(super) fn answer(answer: Result<(), RefusedReason>) -> [u8; REPLY_LEN] {
    reply(match answer {
        Ok(()) => Reply::Succeeded,
        Err(RefusedReason::NotAllowed) => Reply::NotAllowed,
        Err(RefusedReason::NetworkUnreachable) => Reply::NetworkUnreachable,
        Err(RefusedReason::HostUnreachable | RefusedReason::NoSuchHost | RefusedReason::TimedOut) => {
            Reply::HostUnreachable
        }
        Err(RefusedReason::ConnectionRefused) => Reply::ConnectionRefused,
        Err(RefusedReason::Loop) => Reply::TtlExpired,
        Err(RefusedReason::TooMany | RefusedReason::Closing | RefusedReason::Failed) => Reply::Failed,
    })
}

/// The codes of RFC 1928, §6.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
enum Reply {
    Succeeded = 0,
    Failed = 1,
    NotAllowed = 2,
    NetworkUnreachable = 3,
    HostUnreachable = 4,
    ConnectionRefused = 5,
    TtlExpired = 6,
    Command = 7,
    AddressType = 8,
}

/// Returns a reply. The address in it is unspecified: the exit has connected, not this host.
fn reply(reply: Reply) -> [u8; REPLY_LEN] {
    [VERSION, reply as u8, 0, ADDRESS_IPV4, 0, 0, 0, 0, 0, 0]
}

async fn read<const LEN: usize>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NO_METHOD: u8 = 0xFF;
const CONNECT: u8 = 1;
const ADDRESS_IPV4: u8 = 1;
const ADDRESS_NAME: u8 = 3;
const ADDRESS_IPV6: u8 = 4;
pub(super) const REPLY_LEN: usize = 10;

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    /// Negotiates about these bytes, after which the program ends the connection. Returns the outcome, what was
    /// answered, and what was left to read.
    fn ask(bytes: &[u8]) -> (Result<Target, SocksError>, Vec<u8>, usize) {
        let (mut left, mut answered) = (bytes, Vec::new());
        let mut stream = tokio::io::join(&mut left, &mut answered);
        let outcome = negotiate(&mut stream).now_or_never().expect("neither end waits");
        (outcome, answered, left.len())
    }

    #[test]
    fn targets_of_every_kind_are_read_and_nothing_beyond_them() {
        for (request, target) in [
            (&b"\x05\x01\x00\x05\x01\x00\x01\x0a\x00\x00\x02\x00\x16"[..], "10.0.0.2:22"),
            (b"\x05\x03\x02\x00\x01\x05\x01\x00\x03\x0chost.example\x01\xbb", "host.example:443"),
            (b"\x05\x01\x00\x05\x01\x00\x04\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x02\x00\x50", "[fd00::2]:80"),
            (b"\x05\x01\x00\x05\x01\x00\x03\x0910.0.0.99\x00\x50", "10.0.0.99:80"),
        ] {
            let (got, answered, left) = ask(&[request, b"GET /"].concat());
            assert_eq!((got.unwrap(), left), (target.parse().unwrap(), 5));
            assert_eq!(answered, [5, 0]);
            for short in 0..request.len() {
                assert!(matches!(ask(&request[..short]).0, Err(SocksError::Connection(_))), "{short}");
            }
        }
    }

    #[test]
    fn refusals_are_well_formed() {
        let refused = |code| [&[5, 0][..], &[5, code, 0, 1, 0, 0, 0, 0, 0, 0]].concat();
        for (request, expected) in [
            (&b"\x04\x01\x00\x50\x0a\x00\x00\x02\x00"[..], vec![]),
            (b"\x05\x01\x02", vec![5, 0xFF]),
            (b"\x05\x00", vec![5, 0xFF]),
            (b"\x05\x01\x00\x05\x02\x00\x01\x0a\x00\x00\x02\x00\x16", refused(7)),
            (b"\x05\x01\x00\x05\x03\x00\x01\x0a\x00\x00\x02\x00\x16", refused(7)),
            (b"\x05\x01\x00\x05\x01\x00\x02\x0a", refused(8)),
            (b"\x05\x01\x00\x05\x01\x00\x03\x00\x00\x16", refused(1)),
            (b"\x05\x01\x00\x05\x01\x00\x03\x02\xff\xff\x00\x16", refused(1)),
        ] {
            let (got, answered, _) = ask(request);
            assert!(got.is_err());
            assert_eq!(answered, expected, "{request:?}");
        }
    }

    #[test]
    fn every_reason_has_its_code() {
        for (reason, code) in [
            (RefusedReason::Failed, 1),
            (RefusedReason::TooMany, 1),
            (RefusedReason::NotAllowed, 2),
            (RefusedReason::NetworkUnreachable, 3),
            (RefusedReason::NoSuchHost, 4),
            (RefusedReason::TimedOut, 4),
            (RefusedReason::ConnectionRefused, 5),
            (RefusedReason::Loop, 6),
        ] {
            assert_eq!(answer(Err(reason))[1], code);
        }
        assert_eq!(answer(Ok(())), [5, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_refused(
            begins in prop::sample::select(vec![&b""[..], b"\x05\x01\x00", b"\x05\x01\x00\x05\x01\x00\x03"]),
            bytes in proptest::collection::vec(any::<u8>(), 0..600),
        ) {
            let (got, answered, _) = ask(&[begins, &bytes].concat());
            prop_assert!(answered.is_empty() || answered[0] == VERSION && [2, 2 + REPLY_LEN].contains(&answered.len()));
            if let Ok(target) = got {
                prop_assert_eq!(answered, [VERSION, NO_AUTHENTICATION]);
                if let Target::Name { host, .. } = target {
                    prop_assert!((1..=255).contains(&host.len()));
                }
            }
        }
    }
}
