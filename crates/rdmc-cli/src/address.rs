//! The addresses of receivers, as users write them.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// The port of receivers unless users name another.
pub(crate) const PORT_DEFAULT: u16 = 7471;
/// Where receivers listen unless users name another address.
pub(crate) const LISTEN_DEFAULT: &str = "127.0.0.1:7471";

/// Addresses of receivers, each as `HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressList(pub(crate) Vec<String>);

/// Reads the addresses of receivers, with commas or spaces between them.
pub(crate) fn parse_receivers(text: &str) -> Result<AddressList, String> {
    let text = text.trim();
    let parts = text.strip_suffix(',').unwrap_or(text).split(',');
    let mut addresses = Vec::new();
    for part in parts {
        if part.trim().is_empty() {
            let missing = if text.is_empty() { "it is empty" } else { "an address is missing at a comma" };
            return Err(format!("{missing}: {FORM_OF_RECEIVERS}"));
        }
        for address in part.split_whitespace() {
            addresses.push(parse_receiver(address)?);
        }
    }
    Ok(AddressList(addresses))
}

/// Reads the address at which a receiver listens. Without a host, these are all addresses of this host.
pub(crate) fn parse_listen(text: &str) -> Result<String, String> {
    let text = text.trim();
    let all = format!("{}:{PORT_DEFAULT}", Ipv4Addr::UNSPECIFIED);
    let wrong = |wrong: Wrong| {
        let remedy = match &wrong {
            Wrong::Number(port) => {
                format!("write {}:{port} for this host only, or :{port} for all of its addresses", Ipv4Addr::LOCALHOST)
            }
            Wrong::Ambiguous { .. } => String::new(),
            Wrong::Port(_) => format!("write ADDRESS or ADDRESS:PORT, such as {all}; port 0 is any free one"),
            _ => format!("write ADDRESS or ADDRESS:PORT, such as {all}"),
        };
        wrong.told(text, &remedy)
    };
    let address = Address::read(text).map_err(wrong)?;
    let host = if address.host.is_empty() { Ipv4Addr::UNSPECIFIED.to_string() } else { address.host };
    Ok(format!("{host}:{}", address.port))
}

/// Tells whether only this host reaches an address with a port.
pub(crate) fn is_loopback(address: &str) -> bool {
    address.parse::<SocketAddr>().is_ok_and(|address| address.ip().is_loopback())
}

fn parse_receiver(text: &str) -> Result<String, String> {
    let wrong = |wrong: Wrong| {
        let remedy = match &wrong {
            Wrong::Number(port) => format!("write HOST:{port}"),
            Wrong::Ambiguous { .. } | Wrong::NoInterface(_) => String::new(),
            _ => FORM_OF_RECEIVERS.to_owned(),
        };
        wrong.told(text, &remedy)
    };
    let Address { host, port } = Address::read(text).map_err(wrong)?;
    if host.is_empty() {
        return Err(wrong(Wrong::NoHost));
    }
    if port == 0 {
        return Err(wrong(Wrong::Port("0".to_owned())));
    }
    let address = format!("{host}:{port}");
    match address.parse::<SocketAddr>() {
        Ok(all) if all.ip().is_unspecified() => Err(wrong(Wrong::AllInterfaces)),
        Ok(SocketAddr::V6(local)) if local.ip().is_unicast_link_local() && local.scope_id() == 0 => {
            Err(wrong(Wrong::NoInterface(*local.ip())))
        }
        _ => Ok(address),
    }
}

/// A host and a port.
struct Address {
    /// A name, an IPv4 address, an IPv6 address in brackets, or nothing.
    host: String,
    port: u16,
}

/// Why a text is not an address.
enum Wrong {
    Empty,
    NoHost,
    /// It is a number alone.
    Number(String),
    /// The port is not one.
    Port(String),
    /// There is nothing after the colon.
    NoPort,
    Ipv4(String),
    Ipv6(String),
    /// It begins with a scheme.
    Url,
    /// It is where a receiver listens, and leads nowhere.
    AllInterfaces,
    /// An address that each link has anew, without its interface.
    NoInterface(Ipv6Addr),
    /// The host contains this.
    Char(char),
    /// The IPv6 address may end with a port, or not.
    Ambiguous {
        host: String,
        port: u16,
        whole: String,
    },
}

impl Address {
    fn read(text: &str) -> Result<Self, Wrong> {
        if text.contains("://") {
            return Err(Wrong::Url);
        }
        if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) = rest.split_once(']').ok_or_else(|| Wrong::Ipv6(text.to_owned()))?;
            let host = bracketed(host).ok_or_else(|| Wrong::Ipv6(format!("[{host}]")))?;
            let port = match rest.strip_prefix(':') {
                Some(port) => read_port(port)?,
                None if rest.is_empty() => PORT_DEFAULT,
                None => return Err(Wrong::Port(rest.to_owned())),
            };
            return Ok(Self { host, port });
        }
        let Some((host, port)) = text.rsplit_once(':') else {
            return match text {
                "" => Err(Wrong::Empty),
                number if is_number(number) => Err(Wrong::Number(number.to_owned())),
                host => Ok(Self { host: read_host(host)?, port: PORT_DEFAULT }),
            };
        };
        if !host.contains(':') {
            let host = if host.is_empty() { String::new() } else { read_host(host)? };
            return Ok(Self { host, port: read_port(port)? });
        }
        match (bracketed(text), bracketed(host), read_port(port)) {
            (Some(whole), Some(host), Ok(port)) => Err(Wrong::Ambiguous { host, port, whole }),
            (Some(host), ..) => Ok(Self { host, port: PORT_DEFAULT }),
            (None, Some(host), port) => Ok(Self { host, port: port? }),
            (None, None, _) => Err(Wrong::Ipv6(text.to_owned())),
        }
    }
}

/// Puts an IPv6 address into brackets.
fn bracketed(address: &str) -> Option<String> {
    let bracketed = format!("[{address}]");
    // Unlike an address alone, one with a port can have the number of an interface.
    format!("{bracketed}:{PORT_DEFAULT}").parse::<SocketAddrV6>().is_ok().then_some(bracketed)
}

fn read_port(text: &str) -> Result<u16, Wrong> {
    if text.is_empty() {
        return Err(Wrong::NoPort);
    }
    let port = is_number(text).then(|| text.parse().ok()).flatten();
    port.ok_or_else(|| Wrong::Port(text.to_owned()))
}

fn read_host(text: &str) -> Result<String, Wrong> {
    let is_ipv4_like = text.chars().all(|char| char.is_ascii_digit() || char == '.');
    if is_ipv4_like && text.parse::<Ipv4Addr>().is_err() {
        return Err(Wrong::Ipv4(text.to_owned()));
    }
    let of_a_name = |char: char| char.is_alphanumeric() || matches!(char, '-' | '.' | '_');
    match text.chars().find(|char| !of_a_name(*char)) {
        Some(char) => Err(Wrong::Char(char)),
        None => Ok(text.to_owned()),
    }
}

fn is_number(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

impl Wrong {
    /// Describes the error in `text`.
    fn told(&self, text: &str, remedy: &str) -> String {
        match self {
            Self::Empty => format!("it is empty: {remedy}"),
            _ if remedy.is_empty() => format!("{text:?} {self}"),
            _ => format!("{text:?} {self}: {remedy}"),
        }
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("is empty"),
            Self::NoHost => f.write_str("names no host"),
            Self::Number(_) => f.write_str("is a port without a host"),
            Self::Port(port) => write!(f, "has the port {port:?}, which is not a number from 1 to 65535"),
            Self::NoPort => write!(f, "has no port after the colon; without the colon the port is {PORT_DEFAULT}"),
            Self::Ipv4(host) => {
                write!(f, "has the host {host:?}, which is not an IPv4 address of four numbers from 0 to 255")
            }
            Self::Ipv6(host) => {
                write!(f, "has the host {host:?}, which is not an IPv6 address; an interface after % needs its number")
            }
            Self::Url => f.write_str("is a URL, not an address"),
            Self::AllInterfaces => f.write_str("stands for all addresses of a host, and names none"),
            Self::NoInterface(host) => {
                write!(f, "is a link-local address: add the number of this host's interface, such as [{host}%2]")
            }
            Self::Char(char) => write!(f, "contains {char:?}, which is not part of a host's name"),
            Self::Ambiguous { host, port, whole } => {
                write!(f, "has two meanings: write {host}:{port}, or {whole}:{PORT_DEFAULT}")
            }
        }
    }
}

/// How users write receivers.
const FORM_OF_RECEIVERS: &str = "write HOST or HOST:PORT, and commas between receivers";

#[cfg(test)]
mod tests {
    use super::*;

    fn receivers(text: &str) -> Vec<String> {
        parse_receivers(text).unwrap_or_else(|error| panic!("{text:?}: {error}")).0
    }

    #[test]
    fn the_default_address_has_the_default_port() {
        assert_eq!(LISTEN_DEFAULT, format!("{}:{PORT_DEFAULT}", Ipv4Addr::LOCALHOST));
        assert_eq!(parse_listen(LISTEN_DEFAULT).as_deref(), Ok(LISTEN_DEFAULT));
    }

    #[test]
    fn receivers_are_separated_by_commas_or_spaces() {
        let all = ["10.0.0.2:7471", "host:80", "[::1]:7471"];
        for text in [
            "10.0.0.2,host:80,::1",
            " 10.0.0.2 , host:80 ,[::1]:7471 ",
            "10.0.0.2,host:80,::1,",
            "10.0.0.2, host:80, ::1, ",
            "10.0.0.2 host:80\n[::1]\n",
        ] {
            assert_eq!(receivers(text), all, "{text:?}");
        }
    }

    #[test]
    fn a_port_may_be_left_out() {
        for (text, expected) in [
            ("10.0.0.2", "10.0.0.2:7471"),
            ("10.0.0.2:1", "10.0.0.2:1"),
            ("node-7.rack_2.example", "node-7.rack_2.example:7471"),
            ("2host:9", "2host:9"),
            ("[fd00::2]", "[fd00::2]:7471"),
            ("[fd00::2]:9", "[fd00::2]:9"),
            ("[fe80::2%3]:9", "[fe80::2%3]:9"),
            ("fd00::2", "[fd00::2]:7471"),
            ("fd00::", "[fd00::]:7471"),
            ("fe80::2%3", "[fe80::2%3]:7471"),
            ("1:2:3:4:5:6:7:8", "[1:2:3:4:5:6:7:8]:7471"),
            ("1:2:3:4:5:6:7:8:9", "[1:2:3:4:5:6:7:8]:9"),
            ("fd00::2:17471", "[fd00::2]:17471"),
            ("::ffff:10.0.0.2", "[::ffff:10.0.0.2]:7471"),
        ] {
            assert_eq!(receivers(text), [expected], "{text:?}");
            assert_eq!(parse_listen(text).as_deref(), Ok(expected), "{text:?}");
        }
    }

    #[test]
    fn a_receiver_may_listen_at_all_addresses_and_at_any_port() {
        for (text, expected) in [
            (":7471", "0.0.0.0:7471"),
            (" :80 ", "0.0.0.0:80"),
            (":0", "0.0.0.0:0"),
            ("0.0.0.0", "0.0.0.0:7471"),
            ("::", "[::]:7471"),
            ("[::]", "[::]:7471"),
            ("127.0.0.1:0", "127.0.0.1:0"),
            ("localhost", "localhost:7471"),
        ] {
            assert_eq!(parse_listen(text).as_deref(), Ok(expected), "{text:?}");
        }
    }

    #[test]
    fn an_error_names_the_part_and_the_remedy() {
        for (text, part, remedy) in [
            ("", "it is empty", "HOST"),
            (",", "missing at a comma", "HOST"),
            ("a,,b", "missing at a comma", "HOST"),
            (",a", "missing at a comma", "HOST"),
            ("a,:80", "\":80\" names no host", "HOST:PORT"),
            ("a,7471", "\"7471\" is a port without a host", "write HOST:7471"),
            ("a,b:", "\"b:\" has no port", "without the colon the port is 7471"),
            ("a:0", "port \"0\"", "from 1 to 65535"),
            ("a:+80", "port \"+80\"", "from 1 to 65535"),
            ("a:65536", "port \"65536\"", "from 1 to 65535"),
            ("[::1]80", "port \"80\"", "HOST:PORT"),
            ("::1:99999", "port \"99999\"", "from 1 to 65535"),
            ("10.0.0.256", "host \"10.0.0.256\"", "IPv4"),
            ("10.0.2:80", "host \"10.0.2\"", "IPv4"),
            ("[::1", "host \"[::1\"", "IPv6"),
            ("[host]:80", "host \"[host]\"", "IPv6"),
            ("fe80::1%eth0", "host \"fe80::1%eth0\"", "its number"),
            ("http://a", "is a URL", "HOST:PORT"),
            ("http://127.0.0.1:7471/", "is a URL", "HOST:PORT"),
            ("0.0.0.0", "stands for all addresses", "HOST:PORT"),
            ("[::]:80", "stands for all addresses", "HOST:PORT"),
            ("fe80::1", "link-local", "[fe80::1%2]"),
            ("[fe80::1]:9", "link-local", "[fe80::1%2]"),
            ("me@a:80", "contains '@'", "HOST:PORT"),
            ("a;b", "contains ';'", "commas between"),
            ("a:80:90", "host \"a:80:90\"", "IPv6"),
            ("fd00::2:80", "two meanings", "[fd00::2]:80, or [fd00::2:80]:7471"),
        ] {
            let error = parse_receivers(text).expect_err(text);
            assert!(error.contains(part) && error.contains(remedy), "{text:?}: {error}");
        }
        for (text, part, remedy) in [
            ("", "it is empty", "ADDRESS:PORT"),
            ("80", "\"80\" is a port without a host", "127.0.0.1:80 for this host only, or :80 for all"),
            ("eth0:", "no port", "7471"),
            ("a,b", "contains ','", "0.0.0.0:7471"),
            ("a b", "contains ' '", "0.0.0.0:7471"),
        ] {
            let error = parse_listen(text).expect_err(text);
            assert!(error.contains(part) && error.contains(remedy), "{text:?}: {error}");
        }
    }
}
