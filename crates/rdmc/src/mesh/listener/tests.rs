//! Strangers at a listener: silent ones, foreign ones, and those of another version.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::FutureExt;
use rdmc_fabric::{Fabric, MemNetwork, TcpFabric};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use super::*;
use crate::wire::GroupFrame;
use crate::{GroupId, InviteFailure, InviteOptions, invite};

fn hello(version: u16) -> Vec<u8> {
    wire::encode(&Frame::Hello { version, cluster: 0, from: NodeId(0), to: NodeId(1), incarnation: 0 })
}

/// Sends bytes on a fresh connection to a listener of a network in this process; returns the answer.
async fn answer_to(network: &MemNetwork, bytes: &[u8]) -> io::Result<Option<Frame>> {
    let mut stream = network.fabric().environment().connect("a").await?;
    stream.write_all(bytes).await?;
    wire::read(&mut stream).await
}

async fn listen(network: &MemNetwork) -> Listener {
    let fabric: Arc<dyn Fabric> = network.fabric();
    Listener::bind(fabric, "a").await.unwrap()
}

#[tokio::test]
async fn silent_connections_keep_nobody_out() {
    let key = || Some(Security::shared_key([1; 32]));
    for (count, security) in [(256, None), (256, key()), (1000, None), (1000, key())] {
        let listener = Listener::bind(TcpFabric::new(), "127.0.0.1:0").security(security.clone()).await.unwrap();
        let addresses = [listener.local_address().to_owned()];
        let environment = TcpFabric::new().environment();
        let (mut silent, mut spoken) = (VecDeque::new(), VecDeque::new());
        for _ in 0..count / 2 {
            silent.push_back(TcpStream::connect(&addresses[0]).await.unwrap());
            // This one says that it is a control connection, and no more.
            spoken.push_back(environment.connect(&addresses[0]).await.unwrap());
            if silent.len() > 150 {
                // They were closed by the listener long ago.
                drop((silent.pop_front(), spoken.pop_front()));
            }
        }
        let inviting = invite(TcpFabric::new(), &addresses, InviteOptions::new(LIMIT).security(security));
        let accepting = async { listener.next_invitation().await.accept().await };
        let (invited, accepted) = futures::join!(inviting, accepting);
        invited.unwrap();
        accepted.unwrap();
    }
}

#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_slow_peer_is_not_closed_for_silent_connections_of_another() {
    let listener = Listener::bind(TcpFabric::new(), "127.0.0.1:0").await.unwrap();
    let at = listener.local_address().parse().unwrap();
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut slow = socket.connect(at).await.unwrap();
    let mut silent = VecDeque::new();
    for _ in 0..1000 {
        silent.push_back(TcpStream::connect(at).await.unwrap());
        if silent.len() > 150 {
            silent.pop_front();
        }
    }
    slow.write_all(b"rdmcCTL1").await.unwrap();
    slow.write_all(&hello(PROTOCOL_VERSION)).await.unwrap();
    let answer = wire::read(&mut slow).await.unwrap();
    assert_eq!(answer, Some(Frame::Reject { reason: RejectReason::Cluster }));
}

#[tokio::test]
async fn who_has_begun_to_speak_is_closed_after_those_that_are_silent() {
    let network = MemNetwork::new();
    let listener = listen(&network).await;
    let environment = network.fabric().environment();
    let mut slow = environment.connect("a").await.unwrap();
    let greeting = hello(PROTOCOL_VERSION);
    slow.write_all(&greeting[..4]).await.unwrap();
    let mut silent = Vec::new();
    for _ in 0..1000 {
        silent.push(environment.connect("a").await.unwrap());
    }
    slow.write_all(&greeting[4..]).await.unwrap();
    let answer = wire::read(&mut slow).await.unwrap();
    assert_eq!(answer, Some(Frame::Reject { reason: RejectReason::Cluster }));
    // The oldest were closed, and those for which there is room were not.
    let room = STRANGERS_PER_PEER_MAX - 1;
    for stream in &mut silent[..1000 - room - 1] {
        assert!(matches!(stream.read(&mut [0]).await, Ok(0) | Err(_)));
    }
    for stream in &mut silent[1000 - room..] {
        assert!(stream.read(&mut [0]).now_or_never().is_none());
    }
    assert!(listener.stats().connections_refused >= 1000 - STRANGERS_PER_PEER_MAX as u64);
}

#[tokio::test]
async fn a_greeting_of_another_version_is_answered_with_both_versions() {
    let network = MemNetwork::new();
    let listener = listen(&network).await;
    // An invitation of a version whose other fields are not known, without a check value.
    let mut invite = postcard::to_stdvec(&(3u32, PROTOCOL_VERSION + 1, "what later versions say")).unwrap();
    invite.splice(0..0, u32::try_from(invite.len()).unwrap().to_le_bytes());
    for (greeting, refused) in [(hello(PROTOCOL_VERSION - 1), 1), (invite, 2)] {
        let answer = answer_to(&network, &greeting).await.unwrap();
        assert_eq!(answer, Some(Frame::Reject { reason: RejectReason::Version { ours: PROTOCOL_VERSION } }));
        assert_eq!(listener.stats().connections_refused, refused);
    }
}

/// Listens as a process of another kind does, says something to the first connection, and waits for its end.
async fn stranger(says: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    TcpFabric::new().environment().spawn(Box::pin(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(says).await.unwrap();
        if !says.is_empty() {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }));
    address
}

/// Invites a process of another kind; returns why it does not accept.
async fn refusal_of(says: &'static [u8]) -> InviteFailure {
    let addresses = [stranger(says).await];
    let mut failures = invite(TcpFabric::new(), &addresses, InviteOptions::new(LIMIT)).await.unwrap_err().failures;
    failures.remove(0).1
}

#[tokio::test]
async fn what_is_no_listener_is_said_to_be_none() {
    for (says, text) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "does not speak rdmc: its first bytes are \"HTTP\""),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak rdmc: its first bytes are \"SSH-\""),
        (b"rdmcCTL1", "does not speak rdmc: it sends what only the end that opens a connection sends"),
    ] {
        let failure = refusal_of(says).await;
        assert!(matches!(failure, InviteFailure::Stranger(_)), "{failure:?}");
        assert_eq!(failure.to_string(), text);
    }
}

#[tokio::test]
async fn a_listener_of_another_version_is_told_apart() {
    // The length, a rejection (2), of a version (0), which is the one before.
    let failure = refusal_of(&[3, 0, 0, 0, 2, 0, 5]).await;
    let InviteFailure::OtherVersion { theirs, ours } = failure else { panic!("{failure:?}") };
    assert_eq!((theirs, ours), (5, PROTOCOL_VERSION));
    assert_eq!(
        failure.to_string(),
        format!("speaks version 5 of the protocol, this node speaks version {PROTOCOL_VERSION}")
    );
}

#[tokio::test]
async fn a_connection_that_is_closed_before_an_answer_is_told_apart() {
    let failure = refusal_of(b"").await;
    assert!(matches!(failure, InviteFailure::Closed(_)), "{failure:?}");
    assert_eq!(failure.to_string(), "closed the connection before it answered");
}

/// Counts the warnings of this thread.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicU64>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test]
async fn many_bad_connections_are_warned_of_once() {
    let network = MemNetwork::new();
    let listener = listen(&network).await;
    let warnings = Warnings::default();
    let _subscriber = tracing::subscriber::set_default(warnings.clone());
    let group = Frame::Group { group: GroupId(1), frame: GroupFrame::Begin { message: 1 } };
    for (bytes, kinds) in [(wire::encode(&group), 1), (b"GET / HTTP/1.1".to_vec(), 1), (hello(PROTOCOL_VERSION + 1), 2)]
    {
        for _ in 0..100 {
            let _ = answer_to(&network, &bytes).await;
        }
        assert_eq!(warnings.0.load(Ordering::Relaxed), kinds);
    }
    assert_eq!(listener.stats().connections_refused, 300);
}

const LIMIT: Duration = Duration::from_secs(60);
