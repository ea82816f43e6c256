//! Strangers and peers that break the protocol cannot harm a node over TCP.

#![expect(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::time::{Duration, Instant};

use rdmc_fabric::{
    CompletionMode, ConnectError, ControlListener, Endpoint, Expose, Fabric, Inspector, Memory, Peer, QueuePair,
    QueuePairConfig, ReceiveOptions, Role, TcpConfig, TcpFabric, WorkError,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const DATA_MAGIC: &[u8] = b"rdmcDAT1";
const OWN_NONCE: [u8; 16] = [7; 16];
const WATCHDOG: Duration = Duration::from_secs(20);

async fn listening() -> (std::sync::Arc<TcpFabric>, Box<dyn ControlListener>) {
    let fabric = TcpFabric::new();
    let listener = fabric.environment().listen("127.0.0.1:0").await.unwrap();
    (fabric, listener)
}

fn queue_pair(fabric: &TcpFabric) -> QueuePair {
    let queue = fabric.create_completion_queue(1024, CompletionMode::Event).unwrap();
    let queue_pair = fabric.create_queue_pair(&queue.source(), QueuePairConfig::default()).unwrap();
    fabric.environment().spawn(Box::pin(queue.drain()));
    queue_pair
}

/// Opens a data connection with the nonce `to`.
async fn knock(listener: &dyn ControlListener, to: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(listener.local_address()).await.unwrap();
    stream.write_all(&[DATA_MAGIC, to, &OWN_NONCE].concat()).await.unwrap();
    stream
}

/// Returns the nonce in an endpoint, behind the tag of four bytes.
fn nonce(endpoint: &Endpoint) -> &[u8] {
    &endpoint.as_bytes()[4..20]
}

/// Describes this test as the peer of `queue_pair`: tag, nonce, no address.
fn myself() -> Peer {
    let endpoint = Endpoint::new([b"tcp3".as_slice(), &OWN_NONCE, &[0]].concat()).unwrap();
    Peer { endpoint, role: Role::Passive, address: None }
}

async fn is_shut(mut stream: TcpStream) -> bool {
    let read = tokio::time::timeout(WATCHDOG, stream.read(&mut [0; 1])).await;
    matches!(read.expect("the node shuts the connection"), Ok(0) | Err(_))
}

#[tokio::test]
async fn a_data_connection_without_a_nonce_is_refused() {
    let (fabric, listener) = listening().await;
    let _waiting = queue_pair(&fabric);
    assert!(is_shut(knock(&*listener, &[0; 16]).await).await);
    assert_eq!(fabric.refused_connections(), 1);
}

#[tokio::test]
async fn a_nonce_lets_in_one_connection() {
    let (fabric, listener) = listening().await;
    let queue_pair = queue_pair(&fabric);
    let endpoint = queue_pair.endpoint();
    let mut first = knock(&*listener, nonce(&endpoint)).await;
    queue_pair.connect(myself()).await.unwrap();
    let mut proof = [0; 16];
    first.read_exact(&mut proof).await.unwrap();
    assert_eq!(proof, OWN_NONCE);
    assert!(is_shut(knock(&*listener, nonce(&endpoint)).await).await);
    assert_eq!(fabric.refused_connections(), 1);
}

#[tokio::test]
async fn a_connection_from_another_than_expected_is_refused() {
    let (fabric, listener) = listening().await;
    let queue_pair = queue_pair(&fabric);
    let stream = knock(&*listener, nonce(&queue_pair.endpoint())).await;
    let other = Endpoint::new([b"tcp3".as_slice(), &[8; 16], &[0]].concat()).unwrap();
    let refused = queue_pair.connect(Peer { endpoint: other, ..myself() }).await;
    assert!(matches!(refused, Err(ConnectError::BadNonce)), "{refused:?}");
    assert!(is_shut(stream).await);
}

#[tokio::test]
async fn a_stranger_who_talks_something_else_is_refused() {
    let (_fabric, listener) = listening().await;
    let mut stream = TcpStream::connect(listener.local_address()).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(is_shut(stream).await);
}

#[tokio::test]
async fn a_peer_that_breaks_the_protocol_breaks_its_queue_pair_alone() {
    let header = |kind: u8, number: u32, len: u64| {
        let mut frame = [0; 32];
        frame[0] = kind;
        frame[4..8].copy_from_slice(&number.to_le_bytes());
        frame[8..16].copy_from_slice(&len.to_le_bytes());
        frame
    };
    let unused_set = {
        let mut frame = header(1, 0, 0);
        frame[31] = 1;
        frame
    };
    let violations = [
        ([0xff; 32], Err(WorkError::Protocol), "garbage"),
        ([0; 32], Err(WorkError::Protocol), "zeroes"),
        (unused_set, Err(WorkError::Protocol), "a field that is not used"),
        (header(4, 2, 0), Ok(()), "more acknowledgements than requests"),
        (header(5, 0, 1), Err(WorkError::Protocol), "a read response to a send"),
        (header(6, 9, 0), Err(WorkError::Protocol), "a refusal without a reason"),
        (header(8, 0, 0), Err(WorkError::Protocol), "padding without a byte"),
    ];
    let (fabric, listener) = listening().await;
    for (frame, outcome, what) in violations {
        let queue_pair = queue_pair(&fabric);
        let mut stream = knock(&*listener, nonce(&queue_pair.endpoint())).await;
        queue_pair.connect(myself()).await.unwrap();
        let room = || fabric.allocate(8).unwrap().into_mut().unwrap();
        let receive = queue_pair.receive(room());
        let send = queue_pair.send(room().freeze(), None);
        send.nearly_done().await;
        stream.write_all(&frame).await.unwrap();
        let ended = async { (send.await, receive.await.map(drop)) };
        let ended = tokio::time::timeout(WATCHDOG, ended).await.expect(what);
        assert_eq!(ended, (outcome, Err(WorkError::Flushed)), "{what}");
        assert!(ends(stream).await, "{what}");
    }
}

/// Reads the node's remaining bytes until it shuts the connection.
async fn ends(mut stream: TcpStream) -> bool {
    let mut rest = Vec::new();
    tokio::time::timeout(WATCHDOG, stream.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test]
async fn a_send_of_impossible_length_is_refused() {
    let (fabric, listener) = listening().await;
    let queue_pair = queue_pair(&fabric);
    let mut stream = knock(&*listener, nonce(&queue_pair.endpoint())).await;
    queue_pair.connect(myself()).await.unwrap();
    let receive = queue_pair.receive(fabric.allocate(8).unwrap().into_mut().unwrap());
    let mut frame = [0; 32];
    frame[0] = 1;
    frame[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    stream.write_all(&frame).await.unwrap();
    assert_eq!(receive.await.unwrap_err(), WorkError::LocalLength { got: Some(u64::MAX), room: 8 });
    let mut answer = [0; 16 + 32];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!((answer[16], answer[20]), (6, 1), "the peer is told that its request is invalid");
}

/// Returns a queue pair that sends padding, and this test's connection to it.
#[cfg(target_os = "linux")]
async fn warming_up() -> (std::sync::Arc<TcpFabric>, QueuePair, TcpStream) {
    let mut config = TcpConfig::default();
    config.padded_from = Duration::ZERO;
    let fabric = TcpFabric::with_config(config);
    // Not the address that this test connects from, as if it were on another host.
    let listener = fabric.environment().listen("127.0.0.2:0").await.unwrap();
    let queue = fabric.create_completion_queue(1024, CompletionMode::Event).unwrap();
    let config = QueuePairConfig { warm_up: true, ..QueuePairConfig::default() };
    let queue_pair = fabric.create_queue_pair(&queue.source(), config).unwrap();
    fabric.environment().spawn(Box::pin(queue.drain()));
    let mut stream = knock(&*listener, nonce(&queue_pair.endpoint())).await;
    queue_pair.connect(myself()).await.unwrap();
    stream.read_exact(&mut [0; 16]).await.unwrap();
    (fabric, queue_pair, stream)
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn padding_precedes_the_first_request_and_grows_to_its_bound() {
    let (fabric, queue_pair, mut stream) = warming_up().await;
    let mut header = [0; 32];
    for len in [14 << 10, 28 << 10, 56 << 10] {
        stream.read_exact(&mut header).await.unwrap();
        assert_eq!((header[0], u64::from_le_bytes(header[8..16].try_into().unwrap())), (8, len));
        stream.read_exact(&mut vec![0; usize::try_from(len).unwrap()]).await.unwrap();
    }
    let _send = queue_pair.send(fabric.allocate(3).unwrap().into_mut().unwrap().freeze(), None);
    stream.read_exact(&mut header).await.unwrap();
    assert_eq!(header[0], 1, "a send follows");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn padding_begins_before_the_peer_has_answered_unless_the_connection_is_encrypted() {
    for (tag, encrypt) in [(b"tcp3", false), (b"tls3", true)] {
        let mut config = TcpConfig::default();
        (config.padded_from, config.encrypt) = (Duration::ZERO, encrypt);
        let fabric = TcpFabric::with_config(config);
        let queue = fabric.create_completion_queue(1024, CompletionMode::Event).unwrap();
        let config = QueuePairConfig { warm_up: true, ..QueuePairConfig::default() };
        let queue_pair = fabric.create_queue_pair(&queue.source(), config).unwrap();
        // Not the address that the queue pair connects from.
        let peer = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let connecting = queue_pair.connect(at(tag, peer.local_addr().unwrap(), Role::Active));
        let reading = async {
            let (mut stream, _) = peer.accept().await.unwrap();
            let (mut greeting, mut next) = ([0; 8 + 32], [0; 32]);
            stream.read_exact(&mut greeting).await.unwrap();
            assert_eq!(greeting[..8], DATA_MAGIC[..]);
            stream.read_exact(&mut next).await.unwrap();
            next
        };
        let next = tokio::select! {
            next = reading => next,
            connected = connecting => panic!("nobody has answered: {connected:?}"),
        };
        let begins_to_pad = next[0] == 8 && next[8..16] == (14_u64 << 10).to_le_bytes();
        // A handshake of TLS begins with its own byte.
        assert_eq!((begins_to_pad, next[0] == 22), (!encrypt, encrypt));
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_peer_may_send_some_padding_and_no_more() {
    for (bytes, ended) in [(98 << 10, None), ((98 << 10) + 1, Some(WorkError::Flushed))] {
        let (fabric, queue_pair, mut stream) = warming_up().await;
        let (mut from, mut to) = stream.split();
        let receive = queue_pair.receive(fabric.allocate(8).unwrap().into_mut().unwrap());
        let padding = |len: usize| [[8; 1].as_slice(), &[0; 7], &len.to_le_bytes(), &[0; 16], &vec![0; len]].concat();
        let send = [[1; 1].as_slice(), &[0; 7], &3_u64.to_le_bytes(), &[0; 16], &[1, 2, 3]].concat();
        let written = [padding(5), padding(bytes - 5), send].concat();
        // The node may end the connection while this is written.
        let writing = async { drop(to.write_all(&written).await) };
        let reading = async { drop(tokio::io::copy(&mut from, &mut tokio::io::sink()).await) };
        let receiving = tokio::time::timeout(WATCHDOG, receive);
        let peer = async { tokio::join!(writing, reading, std::future::pending::<()>()) };
        let outcome = tokio::select! {
            received = receiving => received.expect("the receive ends").map(|received| received.len),
            _ = peer => unreachable!("it waits for ever"),
        };
        assert_eq!(outcome, ended.map_or(Ok(3), Err), "{bytes}");
    }
}

fn encrypting() -> std::sync::Arc<TcpFabric> {
    let mut config = TcpConfig::default();
    config.encrypt = true;
    TcpFabric::with_config(config)
}

/// Describes a queue pair with this test's own nonce that listens at `address`.
fn at(tag: &[u8; 4], address: std::net::SocketAddr, role: Role) -> Peer {
    let std::net::IpAddr::V4(ip) = address.ip() else { panic!("{address}") };
    let parts = [tag.as_slice(), &OWN_NONCE, &[4], &ip.octets(), &address.port().to_le_bytes()];
    Peer { endpoint: Endpoint::new(parts.concat()).unwrap(), role, address: None }
}

#[tokio::test]
async fn nonces_of_encrypted_connections_do_not_cross_the_network() {
    let impostor = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let fabric = encrypting();
    let queue_pair = queue_pair(&fabric);
    let endpoint = queue_pair.endpoint();
    let connecting = queue_pair.connect(at(b"tls3", impostor.local_addr().unwrap(), Role::Active));
    let overheard = async {
        let (mut stream, _) = impostor.accept().await.unwrap();
        let mut bytes = vec![0; 8 + 32];
        stream.read_exact(&mut bytes).await.unwrap();
        // An impostor without a nonce cannot answer.
        stream.shutdown().await.unwrap();
        stream.read_to_end(&mut bytes).await.unwrap();
        bytes
    };
    let (connected, bytes) = tokio::join!(connecting, overheard);
    assert!(connected.is_err(), "{connected:?}");
    assert!(bytes.starts_with(DATA_MAGIC) && bytes.len() > 8 + 32);
    for secret in [nonce(&endpoint), &OWN_NONCE] {
        assert!(!bytes.windows(16).any(|window| window == secret));
    }
}

/// Describes `queue_pair` as if it listened where `detour` does.
fn by_way_of(detour: &TcpListener, queue_pair: &QueuePair) -> Peer {
    let mut place = queue_pair.endpoint().as_bytes().to_vec();
    let port = place.len() - 2;
    place[port..].copy_from_slice(&detour.local_addr().unwrap().port().to_le_bytes());
    Peer { endpoint: Endpoint::new(place).unwrap(), role: Role::Active, address: None }
}

/// Sends 100,000 bytes of value 7 over a connection that an eavesdropper relays; returns the bytes that it saw.
async fn overheard(fabric: std::sync::Arc<TcpFabric>) -> Vec<u8> {
    let overhearing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listener = fabric.environment().listen("127.0.0.1:0").await.unwrap();
    let (to, from) = (queue_pair(&fabric), queue_pair(&fabric));
    let accepting = to.connect(Peer { endpoint: from.endpoint(), role: Role::Passive, address: None });
    let connecting = from.connect(by_way_of(&overhearing, &to));
    let overheard = async {
        let (mut near, _) = overhearing.accept().await.unwrap();
        let mut far = TcpStream::connect(listener.local_address()).await.unwrap();
        let ((mut from_near, mut to_near), (mut from_far, mut to_far)) = (near.split(), far.split());
        let mut said = Vec::new();
        let forth = async {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from_near.read(&mut bytes).await {
                said.extend_from_slice(&bytes[..n]);
                to_far.write_all(&bytes[..n]).await.unwrap();
            }
            let _ = to_far.shutdown().await;
        };
        let back = async {
            let _ = tokio::io::copy(&mut from_far, &mut to_near).await;
            let _ = to_near.shutdown().await;
        };
        tokio::join!(forth, back);
        said
    };
    let talk = async {
        tokio::try_join!(accepting, connecting).unwrap();
        let mut payload = fabric.allocate(100_000).unwrap().into_mut().unwrap();
        payload.fill(7);
        let receive = to.receive(fabric.allocate(100_000).unwrap().into_mut().unwrap());
        from.send(payload.freeze(), None).await.unwrap();
        assert_eq!(receive.await.unwrap().buffer[..], [7; 100_000]);
        from.close();
        to.close();
    };
    tokio::join!(talk, overheard).1
}

#[tokio::test]
async fn payloads_of_encrypted_connections_cannot_be_read_on_the_way() {
    for (fabric, readable) in [(TcpFabric::new(), true), (encrypting(), false)] {
        let said = tokio::time::timeout(WATCHDOG, overheard(fabric)).await.unwrap();
        assert!(said.len() > 100_000);
        assert_eq!(said.windows(32).any(|window| window == [7; 32]), readable);
    }
}

#[tokio::test]
async fn one_who_has_overheard_the_names_of_nonces_gets_nowhere() {
    // An eavesdropper records the peer's first bytes and replays them.
    let overhearing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let fabric = encrypting();
    let listener = fabric.environment().listen("127.0.0.1:0").await.unwrap();
    let (waiting, coming) = (queue_pair(&fabric), queue_pair(&encrypting()));
    let accepting = waiting.connect(Peer { endpoint: coming.endpoint(), role: Role::Passive, address: None });
    let connecting = coming.connect(by_way_of(&overhearing, &waiting));
    let replaying = async {
        let (mut stream, _) = overhearing.accept().await.unwrap();
        let mut preface = [0; 8 + 32];
        stream.read_exact(&mut preface).await.unwrap();
        let mut replayed = TcpStream::connect(listener.local_address()).await.unwrap();
        replayed.write_all(&preface).await.unwrap();
        replayed.write_all(&[0; 64]).await.unwrap();
        assert!(ends(replayed).await);
        let mut again = TcpStream::connect(listener.local_address()).await.unwrap();
        again.write_all(&preface).await.unwrap();
        assert!(is_shut(again).await);
    };
    let (accepted, connected, ()) = tokio::join!(accepting, connecting, replaying);
    assert!(matches!(accepted, Err(ConnectError::Encryption(_))), "{accepted:?}");
    assert!(connected.is_err());
    assert_eq!(fabric.refused_connections(), 2);
}

#[tokio::test]
async fn an_end_that_encrypts_and_one_that_does_not_refuse_each_other() {
    let (plain, encrypting) = (TcpFabric::new(), encrypting());
    assert_eq!((plain.capabilities().name, encrypting.capabilities().name), ("tcp", "tcp+tls"));
    let (plain, encrypting) = (queue_pair(&plain), queue_pair(&encrypting));
    let peer = |endpoint, role| Peer { endpoint, role, address: None };
    let refused = plain.connect(peer(encrypting.endpoint(), Role::Active)).await;
    assert!(matches!(refused, Err(ConnectError::PeerEncrypting)), "{refused:?}");
    let refused = encrypting.connect(peer(plain.endpoint(), Role::Passive)).await;
    assert!(matches!(refused, Err(ConnectError::PeerNotEncrypting)), "{refused:?}");
}

/// The pieces that an inspector was shown.
#[derive(Debug, Default)]
struct Pieces(std::sync::Mutex<Vec<Vec<u8>>>);

impl Inspector for Pieces {
    fn inspect(&self, bytes: &[u8]) {
        self.0.lock().unwrap().push(bytes.to_vec());
    }
}

/// Connects queue pairs of two fabrics.
async fn connected(fabrics: &[std::sync::Arc<TcpFabric>; 2]) -> [QueuePair; 2] {
    let environments = [&fabrics[0], &fabrics[1]].map(|fabric| fabric.environment());
    let _listeners = futures::future::join_all(environments.iter().map(|it| it.listen("127.0.0.1:0"))).await;
    let [a, b] = [&fabrics[0], &fabrics[1]].map(|fabric| queue_pair(fabric));
    let peer = |of: &QueuePair, role| Peer { endpoint: of.endpoint(), role, address: Some([127, 0, 0, 1].into()) };
    let (at_a, at_b) =
        futures::future::join(a.connect(peer(&b, Role::Active)), b.connect(peer(&a, Role::Passive))).await;
    at_a.and(at_b).unwrap();
    [a, b]
}

/// Checks that an inspector sees a whole message, in pieces that fit the second-level cache.
async fn shows_all(fabrics: [std::sync::Arc<TcpFabric>; 2]) {
    let [a, b] = connected(&fabrics).await;
    let message: Vec<u8> = (0..3_000_001_u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let pieces = std::sync::Arc::new(Pieces::default());
    let receive = b.receive_with(
        fabrics[1].allocate(message.len()).unwrap().into_mut().unwrap(),
        ReceiveOptions { inspector: Some(pieces.clone()), ..Default::default() },
    );
    let data = fabrics[0].register(Memory::from(message.clone())).unwrap().into_shared();
    a.send(data, None).await.unwrap();
    assert_eq!(receive.await.unwrap().len, message.len());
    let pieces = pieces.0.lock().unwrap();
    assert!(pieces.iter().all(|piece| (1..=128 << 10).contains(&piece.len())));
    assert!(pieces.concat() == message);
}

#[tokio::test]
async fn an_inspector_is_shown_all_in_pieces() {
    shows_all([TcpFabric::new(), TcpFabric::new()]).await;
    shows_all([encrypting(), encrypting()]).await;
}

/// A process that touches a mapping behind the end of its file is killed, unless the kernel does it in a system call.
#[tokio::test]
async fn a_file_that_is_shortened_while_it_is_sent_fails_the_send() {
    for fabric in [TcpFabric::new, encrypting] {
        for len in [100, 100_000] {
            let fabrics = [fabric(), fabric()];
            let [a, b] = connected(&fabrics).await;
            let file = tempfile::tempfile().unwrap();
            file.set_len(len as u64).unwrap();
            // SAFETY: no code uses the bytes as a slice.
            #[expect(unsafe_code, reason = "the test needs a mapped file")]
            let memory = unsafe { Memory::map_file(&file, len) }.unwrap();
            let data = fabrics[0].register(memory).unwrap().into_shared();
            let receive = b.receive(fabrics[1].allocate(len).unwrap().into_mut().unwrap());
            file.set_len(0).unwrap();
            let ended = async { (a.send(data, None).await, receive.await.map(drop)) };
            let (sent, received) = tokio::time::timeout(WATCHDOG, ended).await.unwrap();
            assert_eq!((sent, received.is_err()), (Err(WorkError::LocalProtection), true));
        }
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_paced_queue_pair_lets_a_read_leave_no_faster_than_its_pace() {
    /// Bytes that are read: more than ten segments of the loopback, which the kernel does not pace.
    const LEN: usize = 4 << 20;
    const PACE: u64 = 4 << 20;

    let (fabric, _listener) = listening().await;
    let (serving, reading) = (queue_pair(&fabric), queue_pair(&fabric));
    serving.pace(Some(PACE));
    let peer = |of: &QueuePair, role| Peer { endpoint: of.endpoint(), role, address: None };
    let accepting = serving.connect(peer(&reading, Role::Passive));
    let connecting = reading.connect(peer(&serving, Role::Active));
    tokio::try_join!(accepting, connecting).unwrap();
    let mut memory = fabric.allocate(LEN).unwrap().into_mut().unwrap();
    memory.fill(7);
    let exposed = fabric.expose(Expose::Frozen(memory.freeze())).unwrap();
    let into = fabric.allocate(LEN).unwrap().into_mut().unwrap();
    let begun = Instant::now();
    let read = reading.read(into, exposed.remote());
    let read = tokio::time::timeout(WATCHDOG, read).await.unwrap().unwrap();
    assert!(read.iter().all(|&byte| byte == 7));
    // In full it takes a second, without a pace some milliseconds.
    assert!(begun.elapsed() > Duration::from_millis(500), "{:?}", begun.elapsed());
}
