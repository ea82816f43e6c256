//! Tests of gateways between gateways.

use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::*;

/// A gateway between the two ends of a rig.
struct Chain {
    rig: Rig,
    middle: Exit,
    onward: Arc<Entrance>,
    carrying: JoinHandle<()>,
    _listener: SessionListener,
}

impl Chain {
    async fn new(config: GatewayConfig, allow: Option<AllowList>) -> Self {
        let network = MemNetwork::new();
        let last = listen(&network, "exit").await;
        let (onward, exit) = join(&network, &last, Route::Targets(everywhere()), &config).await;
        Self::before(&network, (last, exit), onward, allow, &config).await
    }

    async fn before(
        network: &MemNetwork,
        (last, exit): (SessionListener, Exit),
        onward: Entrance,
        allow: Option<AllowList>,
        config: &GatewayConfig,
    ) -> Self {
        let (clients, given) = mpsc::channel(1);
        let onward = Arc::new(onward);
        let carrying = tokio::spawn(carry_all(onward.clone(), given));
        let listener = listen(network, "middle").await;
        let (entrance, middle) = join(network, &listener, Route::Next { allow, clients }, config).await;
        let (programs, targets) = (local().await, local().await);
        let rig = Rig { entrance: Arc::new(entrance), exit, _listener: last, programs, targets };
        Self { rig, middle, onward, carrying, _listener: listener }
    }

    async fn plain() -> Self {
        Self::new(GatewayConfig::default(), None).await
    }

    async fn emptied(&self) {
        self.rig.emptied().await;
        self.middle.gateway.hub.emptied().await;
        self.onward.0.hub.emptied().await;
    }

    /// Returns the code of the answer to a request for a target.
    async fn asked(&self, address: SocketAddr) -> u8 {
        watched(self.rig.socks(&connect_request(address))).await.1[1]
    }
}

async fn listen(network: &MemNetwork, address: &str) -> SessionListener {
    SessionListener::bind(one(network.fabric()), address, session_config()).await.unwrap()
}

/// Joins an entrance to the exit of a listener.
async fn join(network: &MemNetwork, at: &SessionListener, route: Route, config: &GatewayConfig) -> (Entrance, Exit) {
    let entering = Entrance::connect(one(network.fabric()), at.local_address(), session_config(), config.clone());
    let leaving = async { Exit::accept(at.accept().await, route, config.clone()).await };
    tokio::try_join!(entering, leaving).unwrap()
}

async fn carry_all(entrance: Arc<Entrance>, mut clients: mpsc::Receiver<Client>) {
    while let Some(client) = clients.recv().await {
        if let Err(refused) = entrance.carry(client) {
            refused.refuse().await;
        }
    }
}

fn is_reset(read: std::io::Result<usize>) -> bool {
    read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
}

#[tokio::test]
async fn bytes_of_one_flow_pass_a_chain_both_ways() {
    let chain = Chain::plain().await;
    exchange_over(&chain.rig, 1, 20_000_000).await;
    watched(chain.emptied()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn bytes_of_200_flows_pass_a_chain_both_ways() {
    let chain = Chain::plain().await;
    exchange_over(&chain.rig, 200, 100_000).await;
    watched(chain.emptied()).await;
}

#[tokio::test]
async fn a_program_learns_through_a_chain_why_it_is_refused() {
    let chain = Chain::plain().await;
    let gone = local().await.local_addr().unwrap();
    assert_eq!(chain.asked(gone).await, 5, "the connection is refused");
    let allow = ["10.0.0.0/8".parse().unwrap()].into_iter().collect();
    let elsewhere = Chain::new(GatewayConfig::default(), Some(allow)).await;
    assert_eq!(elsewhere.asked(elsewhere.rig.targets.local_addr().unwrap()).await, 2, "the middle does not allow it");
    let by_name = b"\x05\x01\x00\x03\x09localhost\x00\x16";
    assert_eq!(watched(elsewhere.rig.socks(by_name)).await.1[1], 2, "the middle resolves no names");
    watched(chain.emptied()).await;
    watched(elsewhere.emptied()).await;
}

#[tokio::test]
async fn a_middle_gateway_with_a_list_passes_on_what_it_allows() {
    let allow = ["127.0.0.0/8".parse().unwrap(), "localhost".parse().unwrap()].into_iter().collect();
    let chain = Chain::new(GatewayConfig::default(), Some(allow)).await;
    exchange_over(&chain.rig, 2, 100_000).await;
    let port = chain.rig.targets.local_addr().unwrap().port();
    let by_name = [&b"\x05\x01\x00\x03\x09localhost"[..], &port.to_be_bytes()].concat();
    assert_eq!(watched(chain.rig.socks(&by_name)).await.1[1], 0);
}

#[tokio::test]
async fn a_direction_ends_through_a_chain_and_the_other_goes_on() {
    let chain = Chain::plain().await;
    let (mut near, mut far) = chain.rig.flow().await;
    near.write_all(b"question").await.unwrap();
    near.shutdown().await.unwrap();
    let mut question = Vec::new();
    watched(far.read_to_end(&mut question)).await.unwrap();
    assert_eq!(question, b"question");
    let (answer, got) = watched(async { tokio::join!(send(&mut far, 7, 1_000_000), receive(&mut near)) }).await;
    assert_eq!(got, (1_000_000, answer));
    watched(chain.emptied()).await;
}

#[tokio::test]
async fn a_reset_is_carried_through_a_chain_both_ways() {
    let chain = Chain::plain().await;
    for from_near in [true, false] {
        let (near, far) = chain.rig.flow().await;
        let (mut one, mut other) = if from_near { (near, far) } else { (far, near) };
        one.write_all(b"begun").await.unwrap();
        watched(other.read_exact(&mut [0; 5])).await.unwrap();
        one.set_zero_linger().unwrap();
        drop(one);
        assert!(is_reset(watched(other.read(&mut [0; 1])).await));
        watched(chain.emptied()).await;
    }
}

#[tokio::test]
async fn a_reader_that_stalls_behind_a_chain_stops_no_other_flow_and_keeps_a_bounded_memory() {
    let chain = Chain::new(GatewayConfig { memory_max: 8 << 20, ..GatewayConfig::default() }, None).await;
    let (mut stalled_near, mut stalled_far) = chain.rig.flow().await;
    let taken = fill(&mut stalled_near).await;
    // The windows of both sessions, and what the sockets of the system take.
    assert!(taken < 40 << 20, "{taken}");
    for seed in 1..=4 {
        let (near, far) = chain.rig.flow().await;
        watched(exchange(near, far, seed, 4_000_000)).await;
    }
    stalled_near.shutdown().await.unwrap();
    assert_eq!(watched(receive(&mut stalled_far)).await.0, taken);
    stalled_far.shutdown().await.unwrap();
    watched(chain.emptied()).await;
}

#[tokio::test]
async fn a_middle_gateway_that_is_lost_resets_its_flows_at_both_ends() {
    for is_onward in [true, false] {
        let chain = Chain::plain().await;
        let (mut near, mut far) = chain.rig.flow().await;
        let lost = if is_onward { chain.onward.session() } else { chain.middle.session() };
        lost.abort("a test");
        for end in [&mut near, &mut far] {
            assert!(is_reset(watched(end.read(&mut [0; 1])).await), "{is_onward}");
        }
        if is_onward {
            assert_eq!(chain.asked(chain.rig.targets.local_addr().unwrap()).await, 1, "there is no way on");
            chain.carrying.abort();
            assert_eq!(chain.asked(chain.rig.targets.local_addr().unwrap()).await, 1, "no client is taken any more");
            watched(chain.middle.gateway.hub.emptied()).await;
        }
        watched(async {
            chain.onward.0.hub.emptied().await;
            chain.rig.exit.gateway.hub.emptied().await;
        })
        .await;
    }
}

#[tokio::test]
async fn a_program_that_gives_up_while_a_chain_connects_leaves_nothing_behind() {
    let network = MemNetwork::new();
    let last = listen(&network, "exit").await;
    // The last gateway takes flows and does not answer.
    let (unanswered, mut silent) = mpsc::channel(1);
    let config = GatewayConfig::default();
    let route = Route::Next { allow: None, clients: unanswered };
    let (onward, exit) = join(&network, &last, route, &config).await;
    let chain = Chain::before(&network, (last, exit), onward, None, &config).await;
    let (near, accepted) = chain.rig.program().await;
    chain.rig.entrance.carry(Client::new(accepted, chain.rig.target())).unwrap();
    let _client = watched(silent.recv()).await.unwrap();
    near.set_zero_linger().unwrap();
    drop(near);
    watched(chain.emptied()).await;
}

#[tokio::test]
async fn gateways_that_lead_to_each_other_refuse_the_flow() {
    let network = MemNetwork::new();
    let listener = listen(&network, "loop").await;
    let (clients, given) = mpsc::channel(1);
    let route = || Route::Next { allow: None, clients: clients.clone() };
    let config = GatewayConfig::default();
    // The gateway's own entrance leads to itself.
    let (onward, back) = join(&network, &listener, route(), &config).await;
    tokio::spawn(carry_all(Arc::new(onward), given));
    let (entrance, first) = join(&network, &listener, route(), &config).await;
    let (programs, targets) = (local().await, local().await);
    let rig = Rig { entrance: Arc::new(entrance), exit: first, _listener: listener, programs, targets };
    let address = rig.targets.local_addr().unwrap();
    assert_eq!(watched(rig.socks(&connect_request(address))).await.1[1], 6);
    // One of the nine gateways on the way has refused it, and tells of it.
    let refused = watched(back.next_refused()).await;
    assert_eq!((refused.target, refused.reason), (Target::Address(address), RefusedReason::Loop));
    assert!(back.next_refused().now_or_never().is_none() && rig.exit.next_refused().now_or_never().is_none());
    // Of nine flows the first is another session's.
    assert_eq!(back.gateway.hub.flow(8).map(|flow| flow.is_some()), Ok(false));
    assert!(back.gateway.hub.flow(9).is_err());
    watched(rig.emptied()).await;
    watched(back.gateway.hub.emptied()).await;
}
