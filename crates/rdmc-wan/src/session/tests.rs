use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use rdmc_fabric::frames::FrameCheck;
use rdmc_fabric::{ControlStream, Expose, Role, TcpFabric};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::sync::Notify;

use super::link::{Link, LinkEnd};
use super::state::{OutgoingSlab, SlabMemory};
use super::*;
use crate::conformance::{Cut, Ends, Harness, Mem, Rig, config, exchange, receive, send};
use crate::wire::{self, Frame};

session_suite!(mem, Mem);

async fn mem() -> Harness {
    mem_by(SlabVerb::Read).await
}

async fn mem_by(receive_by: SlabVerb) -> Harness {
    Harness::new(Mem.ends(), receive_by).await
}

async fn tcp() -> Harness {
    tcp_by(SlabVerb::Read).await
}

async fn tcp_by(receive_by: SlabVerb) -> Harness {
    let ends = Ends { accepting: TcpFabric::new(), opening: TcpFabric::new(), address: "127.0.0.1:0".to_owned() };
    Harness::new(ends, receive_by).await
}

#[tokio::test]
async fn each_end_chooses_how_slabs_come_to_it() {
    for (here, there) in [(SlabVerb::Read, SlabVerb::Write), (SlabVerb::Write, SlabVerb::Read)] {
        let mut rig = mem_by(there).await;
        rig.config.receive_by = Some(here);
        let (opened, accepted) = rig.sessions(None).await;
        exchange(opened, accepted, 3_000_000).await;
    }
}

#[tokio::test]
async fn a_slab_that_is_written_with_other_bytes_comes_again_until_the_session_fails() {
    let mut rig = mem_by(SlabVerb::Write).await;
    rig.config.resume_within = Duration::from_millis(500);
    let (opened, mut accepted) = rig.sessions(None).await;
    let shared = &opened.handle.0;
    let bytes = shared.fabric.allocate(shared.terms.slab_len).unwrap().into_mut().unwrap().freeze();
    let (len, memory) = (u32::try_from(bytes.len()).unwrap(), SlabMemory::Written { bytes, pieces: None });
    shared.change(|state| state.outgoing.push(OutgoingSlab { memory, len, check: 0, note: Vec::new() }));
    let error = accepted.receiver.next().await.unwrap_err();
    assert!(matches!(error, SessionError::Corrupt { number: 0, attempts: 3 }), "{error}");
    assert_eq!(accepted.handle.stats().resumed, 2);
}

#[tokio::test]
async fn memory_that_was_not_agreed_on_is_a_violation() {
    let rig = mem().await;
    let (opened, mut accepted) = rig.sessions(None).await;
    opened.handle.0.change(|state| state.incoming.announce_landing([0; 24]));
    let error = accepted.receiver.next().await.unwrap_err();
    assert!(matches!(&error, SessionError::Protocol { what } if what.contains("landing")), "{error}");
    let rig = mem_by(SlabVerb::Write).await;
    let (opened, mut accepted) = rig.sessions(None).await;
    let shared = &opened.handle.0;
    let memory = shared.fabric.allocate(shared.terms.slab_len).unwrap().into_mut().unwrap();
    let exposed = shared.fabric.expose(Expose::Frozen(memory.freeze())).unwrap();
    let memory = SlabMemory::Exposed(exposed);
    shared.change(|state| state.outgoing.push(OutgoingSlab { memory, len: 1, check: 0, note: Vec::new() }));
    let error = accepted.receiver.next().await.unwrap_err();
    assert!(matches!(&error, SessionError::Protocol { what } if what.contains("another place")), "{error}");
}

#[tokio::test]
async fn slabs_that_never_arrive_whole_end_the_session_however_many_there_are() {
    let rig = mem().await;
    let (opened, mut accepted) = rig.sessions(None).await;
    let shared = &opened.handle.0;
    for _ in 0..40 {
        let memory = shared.fabric.allocate(shared.terms.slab_len).unwrap().into_mut().unwrap();
        let exposed = shared.fabric.expose(Expose::Frozen(memory.freeze())).unwrap();
        let len = u32::try_from(shared.terms.slab_len).unwrap();
        let slab = OutgoingSlab { memory: SlabMemory::Exposed(exposed), len, check: 0, note: Vec::new() };
        shared.change(|state| state.outgoing.push(slab));
    }
    let error = accepted.receiver.next().await.unwrap_err();
    assert!(matches!(error, SessionError::Corrupt { number: 0, attempts: 3 }), "{error}");
}

#[tokio::test]
async fn what_a_receiver_has_thrown_away_is_not_taken() {
    let rig = mem().await;
    let (mut opened, accepted) = rig.sessions(None).await;
    let slab = opened.sender.slab().await.unwrap();
    drop(accepted.receiver);
    opened.handle.0.until(|state| state.outgoing.is_stopped().then_some(())).await;
    // It was stopped before, or after.
    let sent = opened.sender.send(slab, 1, Vec::new()).await;
    assert_eq!(sent.unwrap_err(), SessionError::Stopped);
    assert!(opened.sender.taken().await.is_ok(), "nothing was sent");
    let (mut opened, accepted) = rig.sessions(None).await;
    // It waits for a connection that does not read it.
    let held = opened.handle.0.state.lock().unwrap().outgoing.count();
    for _ in 0..3 {
        let slab = opened.sender.slab().await.unwrap();
        opened.sender.send(slab, 20_000, Vec::new()).await.unwrap();
    }
    drop(accepted.receiver);
    let outcome = opened.sender.finish().await;
    let taken = opened.handle.0.state.lock().unwrap().outgoing.taken();
    assert_eq!(outcome.is_ok(), taken == held + 3, "{outcome:?} with {taken} taken");
}

#[tokio::test]
async fn a_refused_session_says_why() {
    let rig = tcp().await;
    let address = rig.listener.local_address().to_owned();
    let opening = connect(TcpFabric::new(), &address, config(), Vec::new());
    let refusing = async { rig.listener.accept().await.refuse("the disk is full").await };
    let (opened, ()) = tokio::join!(opening, refusing);
    assert_eq!(opened.unwrap_err().to_string(), format!("{address} refuses the session: the disk is full"));
}

#[tokio::test]
async fn ends_without_a_fabric_in_common_say_so() {
    let listener = SessionListener::bind(TcpFabric::new(), "127.0.0.1:0", config()).await.unwrap();
    let mut encrypting = rdmc::TcpConfig::default();
    encrypting.encrypt = true;
    let address = listener.local_address().to_owned();
    let opening = connect(TcpFabric::with_config(encrypting), &address, config(), Vec::new());
    let accepting = async { listener.accept().await.accept(Vec::new()).await };
    let (opened, accepted) = tokio::join!(opening, accepting);
    assert_eq!(opened.unwrap_err().to_string(), format!("{address} refuses the session: it offers tcp, not tcp+tls"));
    assert!(accepted.is_err());
}

#[tokio::test]
async fn settings_out_of_bounds_are_refused() {
    for config in [
        SessionConfig { slab_len: 1, ..config() },
        SessionConfig { streams: Some(0), ..config() },
        SessionConfig { detection: Duration::ZERO, ..config() },
    ] {
        let error = connect(TcpFabric::new(), "127.0.0.1:1", config, Vec::new()).await.unwrap_err();
        assert!(matches!(error, OpenError::Invalid(_)), "{error}");
    }
}

#[tokio::test]
async fn a_shared_key_is_asked_for() {
    let key = |byte| Some(Security::shared_key([byte; 32]));
    let secured = |byte| SessionConfig { security: key(byte), ..config() };
    let listener = SessionListener::bind(TcpFabric::new(), "127.0.0.1:0", secured(1)).await.unwrap();
    let address = listener.local_address().to_owned();
    let refused = |address: String, config| async move {
        let error = connect(TcpFabric::new(), &address, config, Vec::new()).await.unwrap_err();
        std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source())
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(": ")
    };
    let plain = SessionListener::bind(TcpFabric::new(), "127.0.0.1:0", config()).await.unwrap();
    for (address, config, says) in [
        (address.clone(), secured(2), "it has another key"),
        (address.clone(), config(), "it takes only clients with a key"),
        (plain.local_address().to_owned(), secured(1), "it does not speak TLS"),
    ] {
        let error = refused(address, config).await;
        assert!(error.contains(says), "{error:?} instead of {says:?}");
    }
    let opening = connect(TcpFabric::new(), &address, secured(1), Vec::new());
    let accepting = async { listener.accept().await.accept(Vec::new()).await };
    let (opened, accepted) = tokio::join!(opening, accepting);
    exchange(opened.unwrap(), accepted.unwrap(), 100_000).await;
}

#[tokio::test]
async fn a_session_goes_on_over_another_connection() {
    goes_on(tcp().await).await;
}

#[tokio::test]
async fn a_session_whose_slabs_are_written_goes_on_over_another_connection() {
    goes_on(tcp_by(SlabVerb::Write).await).await;
}

async fn goes_on(rig: Harness) {
    let cut = Cut::before(rig.listener.local_address()).await;
    let (opened, accepted) = rig.sessions(Some(&cut.address)).await;
    let handle = opened.handle.clone();
    let both = [&opened.handle, &accepted.handle].map(SessionHandle::connection_events);
    let cutting = async {
        for round in 1..=5u64 {
            // After some progress, so that slabs are under way.
            handle.0.until(|state| (state.received_bytes > round * 1_000_000).then_some(())).await;
            cut.cut();
            handle.0.until(|state| (state.resumed >= round).then_some(())).await;
        }
    };
    tokio::join!(exchange(opened, accepted, 30_000_000), cutting);
    let stats = handle.stats();
    assert_eq!((stats.lost, stats.resumed), (5, 5));
    for mut events in both {
        for _ in 0..5 {
            assert_eq!(events.next().await, Some(ConnectionEvent::Lost));
            assert_eq!(events.next().await, Some(ConnectionEvent::Resumed));
        }
        assert_eq!(events.next().await, None);
    }
}

#[tokio::test]
async fn a_session_whose_listener_is_gone_fails_at_both_ends() {
    let mut rig = tcp().await;
    rig.config.resume_within = Duration::from_millis(500);
    let cut = Cut::before(rig.listener.local_address()).await;
    let (mut opened, accepted) = rig.sessions(Some(&cut.address)).await;
    drop(rig);
    cut.cut();
    let error = opened.receiver.next().await.unwrap_err();
    assert!(matches!(error, SessionError::Lost { .. }), "{error}");
    let error = accepted.handle.ended().await.unwrap_err();
    assert!(matches!(error, SessionError::Lost { .. }), "{error}");
}

/// A stream that is reset in the direction to the other end. It tells of the first write.
struct Deaf {
    stream: DuplexStream,
    written: Arc<Notify>,
}

impl ControlStream for Deaf {
    fn peer_address(&self) -> Option<IpAddr> {
        None
    }
}

impl AsyncRead for Deaf {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(self: Pin<&mut Self>, _cx: &mut Context<'_>, _buf: &[u8]) -> Poll<io::Result<usize>> {
        self.written.notify_one();
        Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
    }
}

#[tokio::test]
async fn why_the_other_end_fails_is_heard_although_nothing_reaches_it_any_more() {
    let rig = mem().await;
    let (opened, _accepted) = rig.sessions(None).await;
    let shared = &opened.handle.0;
    let (channel, completions) = Channel::new(&*shared.fabric, 1, false).unwrap();
    let (near, mut far) = tokio::io::duplex(1 << 10);
    let written = Arc::new(Notify::new());
    let stream = Box::new(Deaf { stream: near, written: written.clone() });
    let link = Link { stream, channel, completions, role: Role::Active, endpoints: Vec::new() };
    let telling = async {
        // The first ping.
        written.notified().await;
        let mut bytes = Vec::new();
        wire::encode(&Frame::Abort { reason: "it is stopped".into() }, &mut FrameCheck::default(), &mut bytes);
        far.write_all(&bytes).await.unwrap();
        far
    };
    let (end, _far) = tokio::join!(shared.run(link), telling);
    assert!(matches!(end, LinkEnd::Over), "{end:?}");
    assert_eq!(opened.handle.ended().await.unwrap_err(), SessionError::Aborted { reason: "it is stopped".into() });
}

#[tokio::test]
async fn a_paced_session_keeps_its_rate() {
    let mut rig = mem().await;
    rig.config.rate = Some(Rate::bytes_per_second(2_000_000).burst(16 << 10));
    let (opened, accepted) = rig.sessions(None).await;
    let began = std::time::Instant::now();
    tokio::join!(send(accepted.sender, 1_000_000), receive(opened.receiver, 1_000_000));
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(480), "{took:?}");
}

#[test]
fn streams_by_default_follow_what_the_fabric_does_about_losses_and_distance() {
    let of = |name, change: fn(&mut Capabilities)| {
        let mut capabilities = Capabilities::new(name);
        change(&mut capabilities);
        [false, true].map(|is_distant| SessionConfig::streams_over(&capabilities, is_distant))
    };
    assert_eq!(of("tcp", |_| ()), [4, 4]);
    assert_eq!(of("tcp+tls", |of| of.yields_to_loss = true), [8, 8]);
    assert_eq!(of("verbs", |of| of.needs_pacing = true), [1, 16]);
    assert_eq!(of("shm", |_| ()), [1, 1]);
}
