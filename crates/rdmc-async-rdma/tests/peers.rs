//! Peers that break the protocol: they end their own connection and nothing else.
//!
//! Without a device the tests are skipped and say so.

#![cfg(target_os = "linux")]

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_rdma::device::DeviceList;
use rdmc_async_rdma::{AsyncRdmaConfig, AsyncRdmaFabric};
use rdmc_fabric::{
    CompletionMode, CompletionSource, ConnectError, ControlListener, Endpoint, Fabric, MeetingPlace, Peer, QueuePair,
    QueuePairConfig, Rendezvous, Role, TokioEnvironment, WorkError,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;

#[tokio::test]
async fn what_no_peer_says_breaks_the_queue_pair() -> Result<()> {
    let Some(victim) = Victim::open().await? else { return Ok(()) };
    let buffer = || frame(1, 7, 4096, 8);
    let protocol = Some(WorkError::Protocol);
    let cases: [(&str, Vec<u8>, Option<WorkError>); 8] = [
        ("a kind that there is not", frame(9, 0, 0, 0), protocol),
        ("a frame with more than belongs into it", frame(6, 1, 0, 0), protocol),
        ("a buffer that got more than it holds", frame(2, 0, 0, 9), protocol),
        ("a buffer that is too small for what fits it", frame(5, 0, 0, 8), protocol),
        ("a second buffer, where one was announced", [frame(2, 0, 0, 8), frame(4, 5, 0, 0)].concat(), protocol),
        // The first of them is used at once, by a write without an answer.
        ("too many buffers", (0..18).flat_map(|_| buffer()).collect(), None),
        ("half a frame", buffer()[..13].to_vec(), Some(WorkError::ConnectionLost)),
        ("nothing", Vec::new(), Some(WorkError::ConnectionLost)),
    ];
    for (what, bytes, want) in cases {
        let Met { mut liar, queue_pair, connecting } = victim.meet_liar().await?;
        liar.write_all(&victim.hello()?).await?;
        liar.read_exact(&mut [0; HELLO_LEN]).await?;
        liar.write_u8(READY).await?;
        ensure!(liar.read_u8().await? == READY);
        connecting.await?.context(what)?;
        let receive = queue_pair.receive(victim.fabric.allocate(8)?.into_mut().expect("writable"));
        // The buffer is announced to the liar.
        liar.read_exact(&mut [0; FRAME_LEN]).await?;
        let send = queue_pair.send(victim.fabric.allocate(8)?.into_shared(), None);
        liar.write_all(&bytes).await?;
        liar.shutdown().await?;
        let (sent, received) = watched(futures::future::join(send, receive)).await?;
        ensure!(sent.is_err() && want.is_none_or(|want| sent == Err(want)), "{what}: {sent:?}");
        ensure!(matches!(received, Err(WorkError::Flushed | WorkError::ConnectionLost)), "{what}: {received:?}");
        victim.is_well().await.context(what)?;
    }
    Ok(())
}

#[tokio::test]
async fn a_peer_that_does_not_agree_is_refused() -> Result<()> {
    let Some(victim) = Victim::open().await? else { return Ok(()) };
    let mut other_version = victim.hello()?;
    other_version[0] = 2;
    let mut other_packets = victim.hello()?;
    other_packets[3] = 2;
    let unready = [victim.hello()?, vec![0]].concat();
    let cases = [("silence", vec![]), ("a version", other_version), ("packets", other_packets), ("no", unready)];
    for (what, bytes) in cases {
        let Met { mut liar, connecting, .. } = victim.meet_liar().await?;
        liar.write_all(&bytes).await?;
        liar.shutdown().await?;
        let refused = watched(connecting).await??;
        ensure!(
            matches!(refused, Err(ConnectError::Unreachable(_) | ConnectError::BadEndpoint)),
            "{what}: {refused:?}"
        );
        victim.is_well().await.context(what)?;
    }
    Ok(())
}

/// A node that is lied to.
struct Victim {
    fabric: Arc<AsyncRdmaFabric>,
    device: String,
    completions: Arc<dyn CompletionSource>,
    _listener: Box<dyn ControlListener>,
}

/// A queue pair of the victim that is being connected, and what is at the other end.
struct Met {
    liar: TcpStream,
    queue_pair: Arc<QueuePair>,
    connecting: JoinHandle<Result<(), ConnectError>>,
}

impl Victim {
    async fn open() -> Result<Option<Self>> {
        let devices = DeviceList::available();
        let Some(device) = devices.ok().and_then(|list| list.first().map(|device| device.name().to_owned())) else {
            println!("skipped: this machine has no RDMA device");
            return Ok(None);
        };
        let mut config = AsyncRdmaConfig::default();
        config.device = Some(device.clone());
        // A write without an answer ends soon.
        (config.acknowledgement_timeout, config.retries) = (Duration::from_millis(15), 2);
        let fabric = AsyncRdmaFabric::open(config).await?;
        let listener = fabric.environment().listen("127.0.0.1:0").await?;
        let queue = fabric.create_completion_queue(10_000, CompletionMode::Event)?;
        let completions = queue.source();
        tokio::spawn(queue.drain());
        Ok(Some(Self { fabric, device, completions, _listener: listener }))
    }

    /// Makes a queue pair and connects it to somebody who knows its endpoint.
    async fn meet_liar(&self) -> Result<Met> {
        let rendezvous = Rendezvous::new();
        let environment = TokioEnvironment::with_data_acceptor(rendezvous.clone());
        let liar = rendezvous.meeting(&environment);
        let mut endpoint = b"ard1".to_vec();
        liar.place().encode(&mut endpoint);
        let queue_pair = Arc::new(self.make()?);
        let peer = Peer { endpoint: Endpoint::new(endpoint)?, role: Role::Passive, address: None };
        let place = MeetingPlace::decode(&mut &queue_pair.endpoint().as_bytes()[4..]).context("a place")?;
        let connected = queue_pair.clone();
        let connecting = tokio::spawn(async move { connected.connect(peer).await });
        Ok(Met { liar: liar.meet(place, Role::Active, None).await?, queue_pair, connecting })
    }

    fn make(&self) -> Result<QueuePair> {
        Ok(self.fabric.create_queue_pair(&self.completions, QueuePairConfig::default())?)
    }

    /// Says what an honest peer would, but for a queue pair that there is not.
    fn hello(&self) -> Result<Vec<u8>> {
        let gid = std::fs::read_to_string(format!("/sys/class/infiniband/{}/ports/1/gids/1", self.device))?;
        let gid: Ipv6Addr = gid.trim().parse()?;
        let (version, packet_len, micros, number, lid) = (1u16, 1024u16, 1_000_000u64, 0x00ab_cdefu32, 0u16);
        let mut hello = [version.to_le_bytes(), packet_len.to_le_bytes()].concat();
        hello.extend(micros.to_le_bytes());
        hello.extend(number.to_le_bytes());
        hello.extend(lid.to_le_bytes());
        hello.extend(gid.octets());
        Ok(hello)
    }

    /// Checks that two honest queue pairs of the fabric still reach each other.
    async fn is_well(&self) -> Result<()> {
        let (a, b) = (self.make()?, self.make()?);
        let peer = |of: &QueuePair, role| Peer { endpoint: of.endpoint(), role, address: None };
        futures::try_join!(a.connect(peer(&b, Role::Active)), b.connect(peer(&a, Role::Passive)))?;
        let receive = b.receive(self.fabric.allocate(8)?.into_mut().expect("writable"));
        watched(a.send(self.fabric.allocate(8)?.into_shared(), Some(3))).await??;
        ensure!(watched(receive).await??.imm == Some(3));
        Ok(())
    }
}

fn frame(kind: u32, word: u32, address: u64, len: u64) -> Vec<u8> {
    let (words, longs) = ([kind, word].map(u32::to_le_bytes), [address, len].map(u64::to_le_bytes));
    [words.concat(), longs.concat()].concat()
}

async fn watched<T>(test: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(Duration::from_secs(30), test).await.context("it hangs")
}

const HELLO_LEN: usize = 34;
const FRAME_LEN: usize = 24;
const READY: u8 = 1;
