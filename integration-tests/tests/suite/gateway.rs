//! Tests of `rdmc gateway` as a user runs it: two processes, and programs and targets of plain TCP.

#![expect(clippy::unwrap_used, reason = "the helpers belong to the tests, where nothing goes on after a failure")]

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout};
use std::time::Duration;

use rdmc_wan::conformance::Cut;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::cluster::pattern;
use crate::program::{code, command_in, exit_of, rdmc, signal};

#[cfg(target_os = "linux")]
mod transparent;

/// One end of a gateway, a process.
pub(crate) struct Gateway {
    pub(crate) child: Child,
    /// Where it listens.
    pub(crate) address: String,
    lines: BufReader<ChildStdout>,
}

impl Gateway {
    pub(crate) fn start(options: &[&str]) -> Self {
        Self::start_in(None, options)
    }

    /// Starts it in a network namespace.
    fn start_in(namespace: Option<&str>, options: &[&str]) -> Self {
        let mut command = command_in(namespace, &[&["gateway", "--json", "--drain", "60"], options].concat());
        let mut child = command.stderr(std::process::Stdio::inherit()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut gateway = Self { child, address: String::new(), lines };
        gateway.address = gateway.event("listening")["address"].as_str().unwrap().to_owned();
        gateway
    }

    /// Waits until the process tells an event.
    pub(crate) fn event(&mut self, name: &str) -> Value {
        self.any_event(&[name])
    }

    /// Waits until the process tells one of some events.
    fn any_event(&mut self, names: &[&str]) -> Value {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it ended before {names:?}");
            let event: Value = serde_json::from_str(&line).expect("every line is an event");
            if event["event"].as_str().is_some_and(|event| names.contains(&event)) {
                return event;
            }
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A key of which both ends have a copy.
fn key(dir: &TempDir) -> String {
    let key = dir.path().join("key").to_str().unwrap().to_owned();
    assert_eq!(code(&rdmc(&["keygen", &key])), 0);
    key
}

/// Answers every request of any number of connections: sends back what came, in reverse.
pub(crate) async fn serve(targets: TcpListener) {
    loop {
        let (mut socket, _) = targets.accept().await.unwrap();
        tokio::spawn(async move {
            let mut request = Vec::new();
            if socket.read_to_end(&mut request).await.is_ok() {
                request.reverse();
                let _ = socket.write_all(&request).await;
            }
        });
    }
}

/// Sends a request, and compares the answer.
pub(crate) async fn ask(mut socket: TcpStream, seed: u64, len: usize) {
    let mut request = pattern(len, seed);
    socket.write_all(&request).await.unwrap();
    socket.shutdown().await.unwrap();
    let mut answer = Vec::new();
    watched(socket.read_to_end(&mut answer)).await.unwrap();
    request.reverse();
    assert!(answer == request, "answer {seed} differs");
}

/// Asks for a port of this host by SOCKS5; returns the connection and the code of the answer.
async fn socks(address: &str, port: u16) -> (TcpStream, u8) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let request = [&b"\x05\x01\x00\x05\x01\x00\x03\x09localhost"[..], &port.to_be_bytes()].concat();
    socket.write_all(&request).await.unwrap();
    let mut answer = [0; 12];
    watched(socket.read_exact(&mut answer)).await.unwrap();
    assert_eq!((answer[..3].to_vec(), answer[4..].to_vec()), (vec![5, 0, 5], vec![0, 1, 0, 0, 0, 0, 0, 0]));
    (socket, answer[3])
}

async fn watched<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(120), future).await.expect("it does not hang")
}

#[tokio::test]
async fn programs_reach_a_target_through_two_gateways() {
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = targets.local_addr().unwrap().port();
    let served = tokio::spawn(serve(targets));
    let dir = TempDir::new().unwrap();
    let key = key(&dir);
    let allow = format!("127.0.0.0/8:{port}");
    let mut far = Gateway::start(&["--serve", "127.0.0.1:0", "--allow", &allow, "--key", &key, "--encrypt"]);
    let target = format!("127.0.0.1:{port}");
    let near = |options: &[&str]| {
        let common = ["--listen", "127.0.0.1:0", "--peer", &far.address, "--key", &key, "--encrypt", "--ring", "4M"];
        Gateway::start(&[&common, options].concat())
    };
    let (fixed, mut by_socks) = (near(&["--to", &target]), near(&["--socks"]));
    let mut asked = tokio::task::JoinSet::new();
    for seed in 1..=16 {
        asked.spawn(ask(TcpStream::connect(&fixed.address).await.unwrap(), seed, 1_000_000));
        let (socket, answer) = socks(&by_socks.address, port).await;
        assert_eq!(answer, 0);
        asked.spawn(ask(socket, seed + 100, 300_000));
    }
    while let Some(asked) = asked.join_next().await {
        asked.unwrap();
    }
    // Other ports are not allowed, which the exit tells.
    assert_eq!(socks(&by_socks.address, port ^ 1).await.1, 2);
    let refused = far.event("refused");
    let target = format!("localhost:{}", port ^ 1);
    assert_eq!((&refused["peer"], &refused["target"]), (&"127.0.0.1".into(), &target.into()), "{refused}");
    assert_eq!(refused["reason"], "the exit does not allow the target");
    // Without encryption, both ends say what to do.
    let mut plain = Gateway::start(&["--listen", "127.0.0.1:0", "--peer", &far.address, "--socks", "--key", &key]);
    for (end, told) in [(&mut plain, "it encrypts data, and this end does not"), (&mut far, "this end encrypts data")] {
        let warning = end.event("warning")["message"].as_str().unwrap().to_owned();
        assert!(warning.contains(told) && warning.contains("give --encrypt to both ends"), "{warning}");
    }

    // A connection that is there may end in good order after SIGTERM, and new ones are not taken.
    let (socket, answer) = socks(&by_socks.address, port).await;
    assert_eq!(answer, 0);
    signal(&by_socks.child, "TERM");
    while TcpStream::connect(&by_socks.address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    ask(socket, 7, 500_000).await;
    assert_eq!(tokio::task::spawn_blocking(move || exit_of(&mut by_socks.child)).await.unwrap(), 143);
    served.abort();
}

#[tokio::test]
async fn an_entrance_resets_connections_when_its_exit_is_gone_and_goes_on_with_the_next_one() {
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = targets.local_addr().unwrap().to_string();
    let mut far = Gateway::start(&["--serve", "127.0.0.1:0", "--allow", "127.0.0.1"]);
    let peer = far.address.clone();
    let mut near = Gateway::start(&["--listen", "127.0.0.1:0", "--peer", &peer, "--to", &target]);
    near.event("connected");
    let mut socket = TcpStream::connect(&near.address).await.unwrap();
    socket.write_all(b"begun").await.unwrap();
    let (mut reached, _) = watched(targets.accept()).await.unwrap();
    watched(reached.read_exact(&mut [0; 5])).await.unwrap();

    // SIGINT does not wait for connections.
    signal(&far.child, "INT");
    let error = watched(socket.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(watched(reached.read(&mut [0; 1])).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(tokio::task::spawn_blocking(move || exit_of(&mut far.child)).await.unwrap(), 130);
    near.event("ended");
    // There is no exit now.
    let refused = async { TcpStream::connect(&near.address).await?.read(&mut [0; 1]).await };
    assert!(watched(refused).await.is_err());

    let _far = Gateway::start(&["--serve", &peer, "--allow", "127.0.0.1"]);
    tokio::spawn(serve(targets));
    ask(TcpStream::connect(&near.address).await.unwrap(), 1, 100_000).await;
}

#[tokio::test]
async fn both_gateways_tell_that_their_session_goes_on_after_its_path_was_cut() {
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = targets.local_addr().unwrap().to_string();
    tokio::spawn(serve(targets));
    let mut far = Gateway::start(&["--serve", "127.0.0.1:0", "--allow", "127.0.0.1"]);
    let cut = Cut::before(&far.address).await;
    let mut near = Gateway::start(&["--listen", "127.0.0.1:0", "--peer", &cut.address, "--to", &target]);
    // The path is played by this thread.
    let told = async |gateway: Gateway, events: &'static [&'static str]| {
        let listening = move || {
            let mut gateway = gateway;
            let told: Vec<Value> = events.iter().map(|event| gateway.event(event)).collect();
            (gateway, told)
        };
        tokio::task::spawn_blocking(listening).await.unwrap()
    };
    (near, _) = told(near, &["connected"]).await;
    for seed in 1..=2 {
        ask(TcpStream::connect(&near.address).await.unwrap(), seed, 100_000).await;
        cut.cut();
        let events;
        (near, events) = told(near, &["lost", "resumed"]).await;
        assert!(events.iter().all(|event| event["peer"] == *cut.address), "{events:?}");
        let events;
        (far, events) = told(far, &["lost", "resumed"]).await;
        assert!(events.iter().all(|event| event["peer"] == "127.0.0.1"), "{events:?}");
    }
    ask(TcpStream::connect(&near.address).await.unwrap(), 3, 100_000).await;
}

#[tokio::test]
async fn an_exit_that_is_ending_refuses_sessions_at_once() {
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = targets.local_addr().unwrap().to_string();
    let far = Gateway::start(&["--serve", "127.0.0.1:0", "--allow", "127.0.0.1"]);
    let near = |peer: &str| Gateway::start(&["--listen", "127.0.0.1:0", "--peer", peer, "--to", &target]);
    let first = near(&far.address);
    // A connection that is there holds up the end.
    let mut program = TcpStream::connect(&first.address).await.unwrap();
    let (mut reached, _) = watched(targets.accept()).await.unwrap();
    program.write_all(&[1]).await.unwrap();
    watched(reached.read_exact(&mut [0; 1])).await.unwrap();
    signal(&far.child, "TERM");
    let refusal = loop {
        let mut later = near(&far.address);
        // One that came before the signal is accepted, and its session ends.
        match later.any_event(&["warning", "ended"]) {
            told if told["event"] == "warning" => break told,
            _ => {}
        }
    };
    let message = refusal["message"].as_str().unwrap();
    assert!(message.ends_with("refuses the session: it is ending"), "{message}");
    drop(program);
}

#[tokio::test]
async fn a_gateway_that_is_killed_resets_its_connections() {
    for killed in 0..2 {
        let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let target = targets.local_addr().unwrap().to_string();
        let far = Gateway::start(&["--serve", "127.0.0.1:0", "--allow", "127.0.0.1"]);
        let near = Gateway::start(&["--listen", "127.0.0.1:0", "--peer", &far.address, "--to", &target]);
        let mut program = TcpStream::connect(&near.address).await.unwrap();
        let (mut reached, _) = watched(targets.accept()).await.unwrap();
        // Then both gateways know that they are connected.
        program.write_all(&[1]).await.unwrap();
        watched(reached.read_exact(&mut [0; 1])).await.unwrap();
        let mut gateways = [Some(near), Some(far)];
        gateways[killed] = None;
        let neighbour = if killed == 0 { &mut program } else { &mut reached };
        // Not the end of all bytes.
        let error = watched(neighbour.read(&mut [0; 1])).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    }
}

#[tokio::test]
async fn programs_reach_a_target_through_a_chain_whose_gateways_end_in_good_order() {
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = targets.local_addr().unwrap().port();
    tokio::spawn(serve(targets));
    let allow = format!("127.0.0.0/8:{port}");
    let far = Gateway::start(&["--serve", "127.0.0.1:0", "--allow", &allow]);
    let mut middle = Gateway::start(&["--serve", "127.0.0.1:0", "--via", &far.address]);
    middle.event("connected");
    let near = Gateway::start(&["--listen", "127.0.0.1:0", "--peer", &middle.address, "--socks"]);
    let mut asked = tokio::task::JoinSet::new();
    for seed in 1..=8 {
        let (socket, answer) = socks(&near.address, port).await;
        assert_eq!(answer, 0);
        asked.spawn(ask(socket, seed, 500_000));
    }
    while let Some(asked) = asked.join_next().await {
        asked.unwrap();
    }
    // The far gateway does not allow the port.
    assert_eq!(socks(&near.address, port ^ 1).await.1, 2);

    // A connection that is there goes on after SIGTERM.
    let (socket, answer) = socks(&near.address, port).await;
    assert_eq!(answer, 0);
    signal(&middle.child, "TERM");
    ask(socket, 9, 500_000).await;
    assert_eq!(tokio::task::spawn_blocking(move || exit_of(&mut middle.child)).await.unwrap(), 143);
    assert_eq!(socks(&near.address, port).await.1, 1, "the way is gone");
}

#[tokio::test]
async fn a_middle_gateway_opens_a_new_session_when_the_next_one_was_lost() {
    let targets = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = targets.local_addr().unwrap().to_string();
    let mut far = Gateway::start(&["--serve", "127.0.0.1:0", "--allow", "127.0.0.1"]);
    let mut middle = Gateway::start(&["--serve", "127.0.0.1:0", "--via", &far.address, "--allow", "127.0.0.1"]);
    middle.event("connected");
    let near = Gateway::start(&["--listen", "127.0.0.1:0", "--peer", &middle.address, "--to", &target]);
    let (mut socket, peer) = (TcpStream::connect(&near.address).await.unwrap(), far.address.clone());
    socket.write_all(b"begun").await.unwrap();
    let (mut reached, _) = watched(targets.accept()).await.unwrap();
    watched(reached.read_exact(&mut [0; 5])).await.unwrap();

    signal(&far.child, "INT");
    assert_eq!(watched(socket.read(&mut [0; 1])).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert_eq!(tokio::task::spawn_blocking(move || exit_of(&mut far.child)).await.unwrap(), 130);
    middle.event("ended");
    let _far = Gateway::start(&["--serve", &peer, "--allow", "127.0.0.1"]);
    tokio::spawn(serve(targets));
    ask(TcpStream::connect(&near.address).await.unwrap(), 1, 100_000).await;
}
