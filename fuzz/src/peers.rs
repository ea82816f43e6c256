//! Targets for peers that send the fuzzer's bytes, on connections of the fabric `tcp` over loopback.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{join, join_all};
use rdmc_fabric::fuzzing::{DATA_MAGIC, TCP_HEADER_LEN, recode_tcp_header, tcp_headers};
use rdmc_fabric::{
    BufferMut, CompletionMode, ConnectError, ControlListener, Environment, Expose, ExposedRegion, Fabric, MeetingPlace,
    Operation, Peer, QueuePair, QueuePairConfig, Received, RemoteAccess, RemoteMemory, Rendezvous, Role, TcpFabric,
    TokioEnvironment, WorkError,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::allocation::{PER_BYTE, bounded};
use crate::fabric::TAG;
use crate::{Seed, named};

/// Checks that only a connection with the right magic and both nonces gets in. No other connection disturbs the waiting
/// end.
///
/// The first byte decides which of the three the fuzzer gets for free.
pub fn greeting(bytes: &[u8]) {
    let Some((&given, greeting)) = bytes.split_first() else { return };
    bounded(bytes.len(), PER_BYTE, || run(greet(given, greeting.to_vec())));
}

async fn greet(given: u8, mut greeting: Vec<u8>) {
    let rendezvous = Rendezvous::new();
    let environment = TokioEnvironment::with_data_acceptor(rendezvous.clone());
    let listener = environment.listen(LOOPBACK).await.expect("loopback has free ports");
    let address = listener.local_address();
    tokio::spawn(let_go(listener));
    let meeting = rendezvous.meeting(&environment);
    let caller = Rendezvous::new().meeting(&TokioEnvironment::new()).place();
    let wanted = [&DATA_MAGIC[..], &nonce(meeting.place()), &nonce(caller)].concat();
    for (bit, place) in [(1, 0..8), (2, 8..24), (4, 24..40)] {
        if given & bit != 0 && greeting.len() >= place.end {
            greeting[place.clone()].copy_from_slice(&wanted[place]);
        }
    }
    let calling = async {
        let answer = say(TcpStream::connect(address).await.expect("it listens"), &greeting, PROOF_LEN).await;
        meeting.close();
        answer
    };
    let (met, answer) = join(meeting.meet(caller, Role::Passive, None), calling).await;
    let says = |place: std::ops::Range<usize>| greeting.get(place.clone()) == Some(&wanted[place]);
    let (for_us, from_caller) = (says(0..24) && greeting.len() >= GREETING_LEN, says(24..40));
    match met {
        Ok(_) => assert!(for_us && from_caller && answer == nonce(caller), "a stranger was let in"),
        Err(ConnectError::BadNonce) => assert!(for_us && !from_caller && answer.is_empty()),
        Err(ConnectError::WrongState) => assert!(!for_us && answer.is_empty(), "nobody was let in"),
        Err(error) => panic!("a meeting ended with {error:?}"),
    }
    let refused = says(0..8) && greeting.len() >= GREETING_LEN && !for_us;
    assert_eq!(rendezvous.refused_connections(), u64::from(refused));
}

/// Checks that all posted work ends, whatever a peer sends, and that the peer writes only memory that it may reach.
///
/// Requests with the key 0 get the right key.
pub fn connection(bytes: &[u8]) {
    bounded(bytes.len(), PER_BYTE, || run(suffer(bytes)));
}

async fn suffer(bytes: &[u8]) {
    let fabric = TcpFabric::new();
    let listener = fabric.environment().listen(LOOPBACK).await.expect("loopback has free ports");
    tokio::spawn(let_go(listener));
    let queue = fabric.create_completion_queue(64, CompletionMode::Event).expect("there is memory");
    let source = queue.source();
    tokio::spawn(queue.drain());
    let receiver_not_ready = Duration::from_millis(1);
    let config = QueuePairConfig { send_depth: 8, receive_depth: 8, receiver_not_ready, ..QueuePairConfig::default() };
    let queue_pair = fabric.create_queue_pair(&source, config).expect("the queue has room");
    let mut memory = Carved::new(&fabric);
    let exposed = memory.expose(&fabric, EXPOSED_LEN);
    let posted = Posted::new(&fabric, &queue_pair, &mut memory);
    let stream = meet(&queue_pair).await;
    say(stream, &opened(bytes, exposed.remote().key), usize::MAX).await;
    posted.end().await;
    assert_eq!(queue_pair.send(fabric_buffer(&fabric, 1).freeze(), None).await, Err(WorkError::Flushed));
    memory.check();
}

/// Connects a queue pair, and returns the stream of its peer.
async fn meet(queue_pair: &QueuePair) -> TcpStream {
    let meeting = Rendezvous::new().meeting(&TokioEnvironment::new());
    let place = MeetingPlace::of_endpoint(&queue_pair.endpoint(), TAG).expect("it is one of this fabric");
    let peer = Peer { endpoint: meeting.place().to_endpoint(TAG), role: Role::Passive, address: None };
    let (connected, stream) = join(queue_pair.connect(peer), meeting.meet(place, Role::Active, None)).await;
    connected.expect("the peer knows the nonce");
    stream.expect("the queue pair waits for the peer")
}

/// Work of every kind.
struct Posted {
    receives: Vec<Operation<Received>>,
    sends: Vec<Operation<()>>,
    read: Operation<BufferMut>,
}

impl Posted {
    fn new(fabric: &Arc<TcpFabric>, queue_pair: &QueuePair, memory: &mut Carved) -> Self {
        let remote = RemoteMemory { key: 1, address: 2, len: 3 };
        let receives = [10, 0, 5000].map(|len| queue_pair.receive(memory.carve(len)));
        let sends = [
            queue_pair.send(fabric_buffer(fabric, 10).freeze(), Some(1)),
            queue_pair.write(fabric_buffer(fabric, 6000).freeze(), remote, None),
        ];
        let read = queue_pair.read(memory.carve(READ_LEN), remote);
        Self { receives: receives.into(), sends: sends.into(), read }
    }

    /// Waits until all work has ended.
    async fn end(self) {
        for received in join_all(self.receives).await.into_iter().flatten() {
            assert!(received.len <= received.buffer.len());
            assert_untouched(&received.buffer[received.len..]);
        }
        drop(join_all(self.sends).await);
        if let Ok(read) = self.read.await {
            assert_eq!(read.len(), READ_LEN);
        }
    }
}

/// Memory cut into pieces that a peer may write, with guards between them.
struct Carved {
    rest: BufferMut,
    guards: Vec<BufferMut>,
}

impl Carved {
    fn new(fabric: &Arc<TcpFabric>) -> Self {
        Self { rest: fabric_buffer(fabric, 16 << 10), guards: Vec::new() }
    }

    fn carve(&mut self, len: usize) -> BufferMut {
        self.guards.push(self.rest.split_to(GUARD_LEN));
        self.rest.split_to(len)
    }

    fn expose(&mut self, fabric: &Arc<TcpFabric>, len: usize) -> ExposedRegion {
        let memory = Expose::Mutable(self.carve(len), RemoteAccess::READ_WRITE);
        fabric.expose(memory).expect("memory can be exposed")
    }

    fn check(&self) {
        self.guards.iter().chain([&self.rest]).for_each(|guard| assert_untouched(guard));
    }
}

/// Sends `bytes` and ends the direction; returns the bytes of the other end, up to `len_max`.
async fn say(stream: TcpStream, bytes: &[u8], len_max: usize) -> Vec<u8> {
    let (mut from, mut to) = stream.into_split();
    let saying = async {
        // Fails if the other end has closed the connection.
        let _ = to.write_all(bytes).await;
        let _ = to.shutdown().await;
    };
    let hearing = async {
        let mut heard = Vec::new();
        let mut piece = [0; 4096];
        while heard.len() < len_max {
            match from.read(&mut piece).await {
                Ok(len) if len > 0 => heard.extend_from_slice(&piece[..len]),
                _ => break,
            }
        }
        heard
    };
    join(saying, hearing).await.1
}

/// Puts the right key into requests that have none.
fn opened(bytes: &[u8], key: u64) -> Vec<u8> {
    let mut out = bytes.to_vec();
    let mut at = 0;
    while let Some(header) = out.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<TCP_HEADER_LEN>()) {
        if recode_tcp_header(header).is_none() {
            break;
        }
        let has_payload = matches!(header[0], 1 | 2 | 5);
        let len = u64::from_le_bytes(std::array::from_fn(|byte| header[8 + byte]));
        if matches!(header[0], 2 | 3) && header[16..24] == [0; 8] {
            header[16..24].copy_from_slice(&key.to_le_bytes());
        }
        let payload = if has_payload { usize::try_from(len).unwrap_or(usize::MAX) } else { 0 };
        at = at.saturating_add(TCP_HEADER_LEN).saturating_add(payload);
    }
    out
}

/// Accepts control connections and drops them.
async fn let_go(mut listener: Box<dyn ControlListener>) {
    while listener.accept().await.is_ok() {}
}

/// Runs one input on its own runtime, so that nothing is left of the input before.
fn run(body: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("the operating system gives a runtime");
    let watched = async { tokio::time::timeout(WATCHDOG, body).await };
    runtime.block_on(watched).expect("nothing may wait for ever");
}

fn fabric_buffer(fabric: &Arc<TcpFabric>, len: usize) -> BufferMut {
    let region = fabric.allocate(len).expect("there is memory");
    let mut buffer = region.into_mut().expect("allocated memory is writable");
    buffer.fill(UNTOUCHED);
    buffer
}

fn assert_untouched(bytes: &[u8]) {
    assert!(bytes.iter().all(|&byte| byte == UNTOUCHED), "memory was written that nobody may write");
}

fn nonce(place: MeetingPlace) -> Vec<u8> {
    let mut encoded = Vec::new();
    place.encode(&mut encoded);
    encoded.truncate(PROOF_LEN);
    encoded
}

/// Seeds of [`greeting`].
pub fn greeting_seeds() -> Vec<Seed> {
    let said = [&DATA_MAGIC[..], &[1; 16], &[2; 16]].concat();
    let given = |bits: u8, said: &[u8]| [&[bits], said].concat();
    named([
        ("right", given(7, &said)),
        ("right-and-more", given(7, &[&said[..], b"more"].concat())),
        ("another-caller", given(3, &said)),
        ("another-nonce", given(5, &said)),
        ("cut", given(7, &said[..30])),
        ("control", given(0, b"rdmcCTL1")),
    ])
}

/// Seeds of [`connection`]: each kind of frame alone, and conversations.
pub fn connection_seeds() -> Vec<Seed> {
    let at = RemoteMemory { key: 0, address: 0, len: 10 };
    let frames: Vec<(&str, Vec<u8>)> = tcp_headers(at)
        .into_iter()
        .map(|(name, header)| {
            let payload = if matches!(header[0], 1 | 2 | 5) { &[3; 10][..] } else { &[] };
            (name, [&header[..], payload].concat())
        })
        .collect();
    let said = |names: &[&str]| -> Vec<u8> {
        let frame = |name: &&str| frames.iter().find(|(known, _)| known == name).expect("a kind of frame").1.clone();
        names.iter().flat_map(frame).collect()
    };
    let outside = RemoteMemory { address: u64::MAX - 4, ..at };
    let refused = tcp_headers(outside).into_iter().find(|(name, _)| *name == "write").expect("a kind of frame").1;
    let mut seeds = named(frames.clone());
    seeds.extend(named([
        ("answers", said(&["nearly-taken", "acknowledge", "acknowledge", "read-response"])),
        ("requests", said(&["send", "write-imm", "read", "send-imm", "write", "send"])),
        ("too-long", said(&["send", "send"])),
        ("outside", refused.to_vec()),
    ]));
    seeds
}

const LOOPBACK: &str = "127.0.0.1:0";
/// Magic and two nonces.
const GREETING_LEN: usize = 40;
const PROOF_LEN: usize = 16;
const EXPOSED_LEN: usize = 100;
const READ_LEN: usize = 10;
const GUARD_LEN: usize = 64;
/// Content of memory that was not written.
const UNTOUCHED: u8 = 0xa5;
/// Limit on the time of one input.
const WATCHDOG: Duration = Duration::from_secs(10);
