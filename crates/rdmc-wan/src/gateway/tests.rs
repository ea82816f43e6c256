use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use rdmc_fabric::{Fabric, MemNetwork, TcpFabric};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use twox_hash::xxhash3_128;

use super::*;
use crate::conformance::{Cut, one};
use crate::session::{SessionConfig, SessionListener};
use crate::{Rate, tcp_config};

mod chains;

/// Both ends of a gateway, with a place where programs connect, and a target.
struct Rig {
    entrance: Arc<Entrance>,
    exit: Exit,
    /// The other end of the path, as long as sessions may be resumed.
    _listener: SessionListener,
    programs: TcpListener,
    targets: TcpListener,
}

fn session_config() -> SessionConfig {
    SessionConfig {
        slab_len: 64 << 10,
        ring_len_max: 1 << 20,
        resume_within: Duration::from_secs(5),
        ..SessionConfig::default()
    }
}

fn everywhere() -> AllowList {
    ["0.0.0.0/0", "::/0"].iter().map(|rule| rule.parse::<AllowRule>().unwrap()).collect()
}

impl Rig {
    async fn tcp() -> Self {
        let (near, far) = (TcpFabric::with_config(tcp_config()), TcpFabric::with_config(tcp_config()));
        Self::new(near, far, "127.0.0.1:0", session_config(), GatewayConfig::default(), None).await
    }

    async fn mem(config: GatewayConfig) -> Self {
        let network = MemNetwork::new();
        Self::new(network.fabric(), network.fabric(), "exit", session_config(), config, None).await
    }

    async fn new(
        near: Arc<dyn Fabric>,
        far: Arc<dyn Fabric>,
        address: &str,
        session: SessionConfig,
        config: GatewayConfig,
        cut: Option<&mut Option<Cut>>,
    ) -> Self {
        let listener = SessionListener::bind(one(far), address, session.clone()).await.unwrap();
        let mut address = listener.local_address().to_owned();
        if let Some(cut) = cut {
            address = cut.insert(Cut::before(&address).await).address.clone();
        }
        let entering = Entrance::connect(one(near), &address, session, config.clone());
        let leaving = async { Exit::accept(listener.accept().await, Route::Targets(everywhere()), config).await };
        let (entrance, exit) = tokio::try_join!(entering, leaving).unwrap();
        let (programs, targets) = (local().await, local().await);
        Self { entrance: Arc::new(entrance), exit, _listener: listener, programs, targets }
    }

    /// Connects a program, and returns its connection and that of the entrance.
    async fn program(&self) -> (TcpStream, TcpStream) {
        let connecting = TcpStream::connect(self.programs.local_addr().unwrap());
        let (near, accepted) = tokio::try_join!(connecting, self.programs.accept()).unwrap();
        (near, accepted.0)
    }

    fn target(&self) -> Target {
        Target::Address(self.targets.local_addr().unwrap())
    }

    /// Opens a flow, and returns both of its ends.
    async fn flow(&self) -> (TcpStream, TcpStream) {
        let (near, accepted) = self.program().await;
        self.entrance.carry(Client::new(accepted, self.target())).unwrap();
        (near, self.targets.accept().await.unwrap().0)
    }

    /// Asks for a target by SOCKS5.
    async fn socks(&self, request: &[u8]) -> (TcpStream, Vec<u8>) {
        let (mut near, accepted) = self.program().await;
        let entrance = self.entrance.clone();
        tokio::spawn(async move {
            if let Ok(client) = Client::socks(accepted).await
                && let Err(refused) = entrance.carry(client)
            {
                refused.refuse().await;
            }
        });
        near.write_all(&[&[5, 1, 0][..], request].concat()).await.unwrap();
        let mut answer = vec![0; 12];
        near.read_exact(&mut answer).await.unwrap();
        assert_eq!(answer[..2], [5, 0]);
        (near, answer.split_off(2))
    }

    async fn emptied(&self) {
        self.entrance.0.hub.emptied().await;
        self.exit.gateway.hub.emptied().await;
    }
}

async fn local() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

/// Waits for a future that must not hang.
async fn watched<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(120), future).await.expect("it does not hang")
}

fn connect_request(address: SocketAddr) -> Vec<u8> {
    let IpAddr::V4(ip) = address.ip() else { panic!("tests use IPv4") };
    [&[5, 1, 0, 1][..], &ip.octets(), &address.port().to_be_bytes()].concat()
}

/// Sends bytes that depend on `seed`, then the end; returns their digest.
async fn send(to: &mut (impl tokio::io::AsyncWrite + Unpin), seed: u64, len: usize) -> u128 {
    let mut hasher = xxhash3_128::Hasher::new();
    let (mut state, mut left) = (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1, len);
    while left > 0 {
        let bytes: Vec<u8> = (0..left.min(9973))
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect();
        hasher.write(&bytes);
        to.write_all(&bytes).await.unwrap();
        left -= bytes.len();
    }
    to.shutdown().await.unwrap();
    hasher.finish_128()
}

/// Receives until the end; returns length and digest.
async fn receive(from: &mut (impl tokio::io::AsyncRead + Unpin)) -> (usize, u128) {
    let (mut hasher, mut bytes, mut sum) = (xxhash3_128::Hasher::new(), vec![0; 20_011], 0);
    loop {
        match from.read(&mut bytes).await.unwrap() {
            0 => return (sum, hasher.finish_128()),
            len => {
                hasher.write(&bytes[..len]);
                sum += len;
            }
        }
    }
}

/// Sends different bytes both ways at once, and compares digests.
async fn exchange(near: TcpStream, far: TcpStream, seed: u64, len: usize) {
    let (mut near_from, mut near_to) = near.into_split();
    let (mut far_from, mut far_to) = far.into_split();
    let (there, got_there, back, got_back) = tokio::join!(
        send(&mut near_to, seed, len),
        receive(&mut far_from),
        send(&mut far_to, !seed, len + 1),
        receive(&mut near_from)
    );
    assert_eq!((got_there, got_back), ((len, there), (len + 1, back)), "flow {seed}");
}

async fn exchange_over(rig: &Rig, flows: u64, len: usize) {
    let mut exchanges = Vec::new();
    for seed in 1..=flows {
        let (near, far) = rig.flow().await;
        exchanges.push(exchange(near, far, seed, len));
    }
    watched(futures::future::join_all(exchanges)).await;
    watched(rig.emptied()).await;
}

#[tokio::test]
async fn bytes_of_one_flow_arrive_both_ways() {
    exchange_over(&Rig::tcp().await, 1, 20_000_000).await;
}

#[tokio::test]
async fn bytes_of_8_flows_arrive_both_ways() {
    exchange_over(&Rig::tcp().await, 8, 2_000_000).await;
}

#[tokio::test]
async fn bytes_of_64_flows_arrive_both_ways() {
    exchange_over(&Rig::mem(GatewayConfig::default()).await, 64, 300_000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn bytes_of_64_flows_arrive_both_ways_with_several_threads() {
    exchange_over(&Rig::tcp().await, 64, 200_000).await;
}

#[tokio::test]
async fn flows_with_little_memory_for_windows_arrive() {
    let config = GatewayConfig { memory_max: 100_000, ..GatewayConfig::default() };
    exchange_over(&Rig::mem(config).await, 8, 500_000).await;
}

#[tokio::test]
async fn the_target_may_speak_first() {
    let rig = Rig::tcp().await;
    let (mut near, mut far) = watched(rig.flow()).await;
    far.write_all(b"220 ready").await.unwrap();
    let mut greeting = [0; 9];
    watched(near.read_exact(&mut greeting)).await.unwrap();
    assert_eq!(&greeting, b"220 ready");
}

#[tokio::test]
async fn a_direction_ends_and_the_other_goes_on() {
    let rig = Rig::tcp().await;
    let (mut near, mut far) = rig.flow().await;
    near.write_all(b"question").await.unwrap();
    near.shutdown().await.unwrap();
    let mut question = Vec::new();
    watched(far.read_to_end(&mut question)).await.unwrap();
    assert_eq!(question, b"question");
    let answering = send(&mut far, 7, 1_000_000);
    let (answer, got) = watched(async { tokio::join!(answering, receive(&mut near)) }).await;
    assert_eq!(got, (1_000_000, answer));
    watched(rig.emptied()).await;
}

#[tokio::test]
async fn a_reset_is_carried_both_ways() {
    let rig = Rig::tcp().await;
    for from_near in [true, false] {
        let (near, far) = rig.flow().await;
        let (mut one, mut other) = if from_near { (near, far) } else { (far, near) };
        one.write_all(b"begun").await.unwrap();
        watched(other.read_exact(&mut [0; 5])).await.unwrap();
        one.set_zero_linger().unwrap();
        drop(one);
        let error = watched(other.read(&mut [0; 1])).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        watched(rig.emptied()).await;
    }
}

#[tokio::test]
async fn a_reset_is_carried_while_no_byte_may_be_sent() {
    let rig = Rig::mem(GatewayConfig { memory_max: 0, ..GatewayConfig::default() }).await;
    let (mut near, mut far) = rig.flow().await;
    // More than the credit and the sockets take: the far end reads nothing.
    fill(&mut near).await;
    near.set_zero_linger().unwrap();
    drop(near);
    let error = watched(async {
        let mut bytes = vec![0; 1 << 16];
        loop {
            match far.read(&mut bytes).await {
                Ok(0) => panic!("the flow ended in good order"),
                Ok(_) => {}
                Err(error) => break error,
            }
        }
    });
    assert_eq!(error.await.kind(), std::io::ErrorKind::ConnectionReset);
    watched(rig.emptied()).await;
}

/// Writes until nothing more is taken for a while; returns how many bytes were taken.
async fn fill(to: &mut TcpStream) -> usize {
    let mut taken = 0;
    while let Ok(written) = tokio::time::timeout(Duration::from_millis(300), to.write(&[7; 1 << 16])).await {
        taken += written.unwrap();
    }
    taken
}

#[tokio::test]
async fn a_reader_that_stalls_stops_no_other_flow_and_keeps_a_bounded_memory() {
    // Windows together are much longer than the ring, which a stalled flow would fill otherwise.
    let config = GatewayConfig { memory_max: 16 << 20, ..GatewayConfig::default() };
    let rig = Rig::mem(config).await;
    let (mut stalled_near, mut stalled_far) = rig.flow().await;
    let taken = fill(&mut stalled_near).await;
    // A window that may have doubled, and what the sockets of the system take.
    assert!(taken < 40 << 20, "{taken}");
    for seed in 1..=4 {
        let (near, far) = rig.flow().await;
        watched(exchange(near, far, seed, 4_000_000)).await;
    }
    stalled_near.shutdown().await.unwrap();
    assert_eq!(watched(receive(&mut stalled_far)).await.0, taken);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_closes_while_bytes_are_kept_for_it_breaks_its_flow_alone() {
    let rig = Rig::mem(GatewayConfig::default()).await;
    for closes_far in [true, false] {
        let (near, far) = rig.flow().await;
        let (mut stalled, closing) = if closes_far { (near, far) } else { (far, near) };
        fill(&mut stalled).await;
        drop(closing);
        let error = watched(stalled.read(&mut [0; 1])).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        let (near, far) = rig.flow().await;
        watched(exchange(near, far, 1, 1_000_000)).await;
        watched(rig.emptied()).await;
    }
}

#[tokio::test]
async fn a_target_that_cannot_be_reached_resets_or_is_refused() {
    let rig = Rig::tcp().await;
    let gone = local().await.local_addr().unwrap();
    let (mut near, accepted) = rig.program().await;
    rig.entrance.carry(Client::new(accepted, Target::Address(gone))).unwrap();
    let error = watched(near.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let (mut near, answer) = watched(rig.socks(&connect_request(gone))).await;
    assert_eq!(answer, [5, 5, 0, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(watched(near.read(&mut [0; 1])).await.unwrap(), 0, "the end, not a reset");
    drop(near);
    watched(rig.emptied()).await;
}

#[tokio::test]
async fn a_target_that_is_not_allowed_is_refused_and_not_connected() {
    let network = MemNetwork::new();
    let listener = SessionListener::bind(one(network.fabric()), "exit", session_config()).await.unwrap();
    let config = GatewayConfig::default;
    let entering = Entrance::connect(one(network.fabric()), "exit", session_config(), config());
    let leaving = async { Exit::accept(listener.accept().await, Route::Targets(AllowList::default()), config()).await };
    let (entrance, exit) = tokio::try_join!(entering, leaving).unwrap();
    let (programs, targets) = (local().await, local().await);
    let rig = Rig { entrance: Arc::new(entrance), exit, _listener: listener, programs, targets };
    let (_near, answer) = watched(rig.socks(&connect_request(rig.targets.local_addr().unwrap()))).await;
    assert_eq!(answer[1], 2);
    let refused = watched(rig.exit.next_refused()).await;
    assert_eq!((refused.target, refused.reason), (rig.target(), RefusedReason::NotAllowed));
    assert!(rig.targets.accept().now_or_never().is_none());
}

#[tokio::test]
async fn programs_ask_for_addresses_and_names_by_socks() {
    let rig = Rig::tcp().await;
    let address = rig.targets.local_addr().unwrap();
    let name = [&b"\x05\x01\x00\x03\x09localhost"[..], &address.port().to_be_bytes()].concat();
    for (seed, request) in [(1, connect_request(address)), (2, name)] {
        let (near, answer) = watched(rig.socks(&request)).await;
        assert_eq!(answer[1], 0);
        let far = rig.targets.accept().await.unwrap().0;
        watched(exchange(near, far, seed, 200_000)).await;
    }
}

#[tokio::test]
async fn flows_beyond_the_bound_are_refused() {
    let rig = Rig::mem(GatewayConfig { flows_max: 1, ..GatewayConfig::default() }).await;
    let kept = rig.flow().await;
    let (mut near, accepted) = rig.program().await;
    let refused = rig.entrance.carry(Client::new(accepted, rig.target())).unwrap_err();
    assert_eq!(refused.reason(), RefusedReason::TooMany);
    refused.refuse().await;
    assert_eq!(watched(near.read(&mut [0; 1])).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    let (_near, answer) = watched(rig.socks(&connect_request(rig.targets.local_addr().unwrap()))).await;
    assert_eq!(answer[1], 1);
    watched(exchange(kept.0, kept.1, 1, 100_000)).await;
}

async fn cut_rig() -> (Rig, Cut) {
    let mut cut = None;
    let (near, far) = (TcpFabric::with_config(tcp_config()), TcpFabric::with_config(tcp_config()));
    let config = GatewayConfig::default();
    let rig = Rig::new(near, far, "127.0.0.1:0", session_config(), config, Some(&mut cut)).await;
    (rig, cut.expect("it is made"))
}

#[tokio::test]
async fn flows_go_on_when_the_path_is_cut() {
    let (rig, cut) = cut_rig().await;
    let done = watch::Sender::new(false);
    let flows = async {
        exchange_over(&rig, 8, 3_000_000).await;
        done.send_replace(true);
    };
    let cutting = async {
        let mut round = 0;
        while !*done.borrow() && round < 4 {
            // After some progress, so that slabs are under way.
            let stats = rig.entrance.session().stats();
            if stats.received_bytes > (round + 1) * 4_000_000 && stats.resumed >= round {
                round += 1;
                cut.cut();
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::join!(flows, cutting);
    assert!(rig.entrance.session().stats().resumed >= 3, "{:?}", rig.entrance.session().stats());
}

#[tokio::test]
async fn a_session_that_is_lost_resets_its_flows() {
    let (rig, cut) = cut_rig().await;
    let (mut near, mut far) = rig.flow().await;
    let (_socks, answer) = watched(rig.socks(&connect_request(rig.targets.local_addr().unwrap()))).await;
    assert_eq!(answer[1], 0);
    rig.exit.session().abort("a test");
    drop(cut);
    assert!(watched(rig.entrance.ended()).await.is_err());
    for end in [&mut near, &mut far] {
        assert_eq!(watched(end.read(&mut [0; 1])).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    }
    let (_near, accepted) = rig.program().await;
    let refused = rig.entrance.carry(Client::new(accepted, rig.target())).unwrap_err();
    assert_eq!(refused.reason(), RefusedReason::Closing);
}

#[tokio::test]
async fn an_end_that_finishes_lets_flows_end_and_resets_the_rest() {
    for at_entrance in [true, false] {
        let rig = Rig::tcp().await;
        let (ends, left) = (rig.flow().await, rig.flow().await);
        let Rig { entrance, exit, .. } = rig;
        let entrance = Arc::into_inner(entrance).unwrap();
        let (entrance_session, exit_session) = (entrance.session().clone(), exit.session().clone());
        let finishing = async {
            let drain = Duration::from_secs(2);
            if at_entrance {
                entrance.finish(drain).await;
                exit.ended().await.unwrap();
            } else {
                exit.finish(drain).await;
                entrance.ended().await.unwrap();
            }
        };
        watched(async { tokio::join!(finishing, exchange(ends.0, ends.1, 1, 500_000)) }).await;
        entrance_session.ended().await.unwrap();
        exit_session.ended().await.unwrap();
        for mut end in [left.0, left.1] {
            assert_eq!(end.read(&mut [0; 1]).await.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        }
    }
}

#[tokio::test]
async fn bytes_that_have_come_are_written_after_the_other_end_has_finished() {
    let rig = Rig::tcp().await;
    let (mut near, mut far) = rig.flow().await;
    // More than the sockets of a program take that does not read.
    let len = 16 << 20;
    near.shutdown().await.unwrap();
    let bytes = vec![7; len];
    let sending = async {
        far.write_all(&bytes).await.unwrap();
        far.shutdown().await.unwrap();
        rig.exit.gateway.hub.emptied().await;
    };
    let reading = async {
        let mut got = vec![0; len];
        near.read_exact(&mut got[..len - (4 << 20)]).await.unwrap();
        near
    };
    let ((), mut near) = watched(async { tokio::join!(sending, reading) }).await;
    let Rig { entrance, exit, .. } = rig;
    watched(exit.finish(Duration::ZERO)).await;
    entrance.session().ended().await.unwrap();
    let mut rest = Vec::new();
    watched(near.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest.len(), 4 << 20);
    watched(entrance.ended()).await.unwrap();
    assert_eq!(entrance.flow_count(), 0);
}

#[tokio::test]
async fn a_lone_request_does_not_wait_for_a_full_slab() {
    let rig = Rig::tcp().await;
    let (mut near, mut far) = rig.flow().await;
    for round in 0..50u8 {
        near.write_all(&[round]).await.unwrap();
        assert_eq!(watched(far.read_u8()).await.unwrap(), round);
        far.write_all(&[round]).await.unwrap();
        assert_eq!(watched(near.read_u8()).await.unwrap(), round);
    }
    // Each in a slab of its own.
    assert_eq!(rig.entrance.session().stats().sent_bytes, 50);
}

#[tokio::test]
async fn flows_share_the_path_equally() {
    const FLOWS: usize = 64;
    let network = MemNetwork::new();
    // The path is slower than the programs.
    let session = SessionConfig { rate: Some(Rate::bytes_per_second(40_000_000)), ..session_config() };
    let rig = Rig::new(network.fabric(), network.fabric(), "exit", session, GatewayConfig::default(), None).await;
    let counts: Arc<Vec<AtomicU64>> = Arc::new((0..FLOWS).map(|_| AtomicU64::new(0)).collect());
    let mut tasks = tokio::task::JoinSet::new();
    for flow in 0..FLOWS {
        let (mut near, mut far) = rig.flow().await;
        tasks.spawn(async move { while near.write_all(&[3; 1 << 15]).await.is_ok() {} });
        let counts = counts.clone();
        tasks.spawn(async move {
            let mut bytes = vec![0; 1 << 16];
            while let Ok(len @ 1..) = far.read(&mut bytes).await {
                counts[flow].fetch_add(len as u64, Ordering::Relaxed);
            }
        });
    }
    let now = || -> Vec<u64> { counts.iter().map(|count| count.load(Ordering::Relaxed)).collect() };
    let until = async |sum: u64| {
        while now().iter().sum::<u64>() < sum {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        now()
    };
    // Without the bytes of the beginning, when not all flows were there.
    let (before, after) = watched(async { (until(20_000_000).await, until(100_000_000).await) }).await;
    let shares: Vec<f64> = before.iter().zip(after).map(|(before, after)| (after - before) as f64).collect();
    let (sum, squares) = (shares.iter().sum::<f64>(), shares.iter().map(|share| share * share).sum::<f64>());
    let jain = sum * sum / (FLOWS as f64 * squares);
    assert!(jain >= 0.98, "{jain}: {shares:?}");
}

#[tokio::test]
async fn a_session_that_is_no_gateway_is_refused() {
    let network = MemNetwork::new();
    let listener = SessionListener::bind(one(network.fabric()), "exit", session_config()).await.unwrap();
    let opening = crate::connect(one(network.fabric()), "exit", session_config(), b"files".to_vec());
    let leaving =
        async { Exit::accept(listener.accept().await, Route::Targets(everywhere()), GatewayConfig::default()).await };
    let (opened, accepted) = tokio::join!(opening, leaving);
    assert!(opened.unwrap_err().to_string().contains("exit of a gateway"));
    assert!(accepted.unwrap_err().explained_at_listener().contains("no entrance"));
    let entering = Entrance::connect(one(network.fabric()), "exit", session_config(), GatewayConfig::default());
    let accepting = async { listener.accept().await.accept(b"files".to_vec()).await };
    let (entered, _accepted) = tokio::join!(entering, accepting);
    assert!(entered.unwrap_err().to_string().contains("no gateway"));
}
