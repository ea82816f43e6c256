use std::sync::atomic::{AtomicU64, Ordering};

use rdmc_fabric::{Expose, MemNetwork, TcpFabric};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::state::{OutgoingSlab, SlabMemory};
use super::*;
use crate::{SlabReader, SlabWriter};

/// A listener, and the fabric of the end that opens sessions.
struct Rig {
    listener: SessionListener,
    opening: Arc<dyn Fabric>,
    config: SessionConfig,
}

/// Small, so that tests pass through all of a ring many times.
fn config() -> SessionConfig {
    SessionConfig {
        slab_len: 32 << 10,
        ring_len_max: 512 << 10,
        detection: Duration::from_secs(2),
        resume_within: Duration::from_secs(5),
        ..SessionConfig::default()
    }
}

impl Rig {
    /// Slabs come to both ends in the same way.
    async fn new(network: [Arc<dyn Fabric>; 2], address: &str, receive_by: SlabVerb) -> Self {
        let [accepting, opening] = network;
        let config = SessionConfig { receive_by: Some(receive_by), ..config() };
        let listener = SessionListener::bind(vec_of(accepting), address, config.clone()).await.unwrap();
        Self { listener, opening, config }
    }

    async fn tcp_by(receive_by: SlabVerb) -> Self {
        Self::new([TcpFabric::new(), TcpFabric::new()], "127.0.0.1:0", receive_by).await
    }

    async fn mem_by(receive_by: SlabVerb) -> Self {
        let network = MemNetwork::new();
        Self::new([network.fabric(), network.fabric()], "listener", receive_by).await
    }

    async fn tcp() -> Self {
        Self::tcp_by(SlabVerb::Read).await
    }

    async fn mem() -> Self {
        Self::mem_by(SlabVerb::Read).await
    }

    /// Opens a session to the listener, by way of another address if there is one.
    async fn sessions(&self, by: Option<&str>) -> (Session, Session) {
        let address = by.unwrap_or(self.listener.local_address());
        let opening = connect(vec_of(self.opening.clone()), address, self.config.clone(), b"from the opener".to_vec());
        let accepting = async {
            let request = self.listener.accept().await;
            assert_eq!(request.metadata(), b"from the opener");
            request.accept(b"from the listener".to_vec()).await
        };
        let (opened, accepted) = tokio::join!(opening, accepting);
        let (opened, accepted) = (opened.unwrap(), accepted.unwrap());
        assert_eq!(opened.handle.metadata(), b"from the listener");
        (opened, accepted)
    }
}

fn vec_of(fabric: Arc<dyn Fabric>) -> rdmc::Fabrics {
    rdmc::Fabrics::new(vec![fabric]).unwrap()
}

/// The byte at a place of a stream, so that any confusion of places shows.
fn byte_at(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

async fn send(sender: SlabSender, len: u64) {
    let mut writer = SlabWriter::new(sender);
    let mut at = 0;
    while at < len {
        // Odd lengths, so that writes cross the bounds of slabs.
        let now = (len - at).min(7919);
        let bytes: Vec<u8> = (at..at + now).map(byte_at).collect();
        writer.write_all(&bytes).await.unwrap();
        at += now;
        if at % 5 == 0 {
            writer.flush().await.unwrap();
        }
    }
    writer.shutdown().await.unwrap();
}

async fn receive(receiver: SlabReceiver, len: u64) {
    let mut reader = SlabReader::new(receiver);
    let mut bytes = vec![0; 10_007];
    let mut at = 0;
    loop {
        let got = reader.read(&mut bytes).await.unwrap() as u64;
        if got == 0 {
            break;
        }
        for (byte, place) in bytes.iter().zip(at..at + got) {
            assert_eq!(*byte, byte_at(place), "at {place}");
        }
        at += got;
    }
    assert_eq!(at, len);
}

/// Bytes go both ways at once, and both ends see the session end.
async fn exchange(a: Session, b: Session, len: u64) {
    let (ended_a, ended_b) = (a.handle.clone(), b.handle.clone());
    tokio::join!(send(a.sender, len), receive(a.receiver, len), send(b.sender, len), receive(b.receiver, len));
    ended_a.ended().await.unwrap();
    ended_b.ended().await.unwrap();
    assert_eq!(ended_a.stats().sent_bytes, len);
    assert_eq!(ended_b.stats().received_bytes, len);
}

#[tokio::test]
async fn bytes_go_both_ways_over_tcp() {
    let rig = Rig::tcp().await;
    let (opened, accepted) = rig.sessions(None).await;
    exchange(opened, accepted, 3_000_000).await;
}

#[tokio::test]
async fn bytes_go_both_ways_in_memory() {
    let rig = Rig::mem().await;
    let (opened, accepted) = rig.sessions(None).await;
    exchange(opened, accepted, 3_000_000).await;
}

#[tokio::test]
async fn slabs_are_written_both_ways_over_tcp() {
    let rig = Rig::tcp_by(SlabVerb::Write).await;
    let (opened, accepted) = rig.sessions(None).await;
    exchange(opened, accepted, 3_000_000).await;
}

#[tokio::test]
async fn slabs_are_written_both_ways_in_memory() {
    let rig = Rig::mem_by(SlabVerb::Write).await;
    let (opened, accepted) = rig.sessions(None).await;
    exchange(opened, accepted, 3_000_000).await;
}

#[tokio::test]
async fn each_end_chooses_how_slabs_come_to_it() {
    for (here, there) in [(SlabVerb::Read, SlabVerb::Write), (SlabVerb::Write, SlabVerb::Read)] {
        let mut rig = Rig::mem_by(there).await;
        rig.config.receive_by = Some(here);
        let (opened, accepted) = rig.sessions(None).await;
        exchange(opened, accepted, 3_000_000).await;
    }
}

#[tokio::test]
async fn a_slab_that_is_written_with_other_bytes_comes_again_until_the_session_fails() {
    let mut rig = Rig::mem_by(SlabVerb::Write).await;
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
    let rig = Rig::mem().await;
    let (opened, mut accepted) = rig.sessions(None).await;
    opened.handle.0.change(|state| state.incoming.announce_landing([0; 24]));
    let error = accepted.receiver.next().await.unwrap_err();
    assert!(matches!(&error, SessionError::Protocol { what } if what.contains("landing")), "{error}");
    let rig = Rig::mem_by(SlabVerb::Write).await;
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
async fn nothing_is_sent_and_the_session_ends() {
    let rig = Rig::tcp().await;
    let (opened, accepted) = rig.sessions(None).await;
    exchange(opened, accepted, 0).await;
}

#[tokio::test]
async fn one_direction_ends_before_the_other() {
    let rig = Rig::mem().await;
    let (opened, mut accepted) = rig.sessions(None).await;
    opened.sender.finish().await.unwrap();
    assert!(accepted.receiver.next().await.unwrap().is_none());
    tokio::join!(send(accepted.sender, 100_000), receive(opened.receiver, 100_000));
    opened.handle.ended().await.unwrap();
}

#[tokio::test]
async fn slabs_that_never_arrive_whole_end_the_session_however_many_there_are() {
    let rig = Rig::mem().await;
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
async fn notes_come_with_their_slabs_and_messages_in_order() {
    let rig = Rig::mem().await;
    let (mut opened, mut accepted) = rig.sessions(None).await;
    let sending = async {
        for number in 0..200u32 {
            let slab = opened.sender.slab().await.unwrap();
            opened.sender.send(slab, number as usize, number.to_le_bytes().to_vec()).await.unwrap();
            opened.handle.send_message(number.to_le_bytes().to_vec()).await.unwrap();
        }
        opened.sender.finish().await.unwrap();
    };
    let receiving = async {
        for number in 0..200u32 {
            let slab = accepted.receiver.next().await.unwrap().unwrap();
            assert_eq!((slab.bytes.len(), slab.note), (number as usize, number.to_le_bytes().to_vec()));
            assert_eq!(accepted.handle.next_message().await.unwrap(), number.to_le_bytes());
        }
        assert!(accepted.receiver.next().await.unwrap().is_none());
    };
    tokio::join!(sending, receiving);
}

#[tokio::test]
async fn a_receiver_that_holds_slabs_holds_back_the_sender() {
    held_slabs_hold_back(Rig::mem().await, 32).await;
}

#[tokio::test]
async fn a_receiver_that_holds_slabs_holds_back_a_sender_that_writes() {
    held_slabs_hold_back(Rig::mem_by(SlabVerb::Write).await, 48).await;
}

/// The sender is at most so many slabs ahead: those of rings of at most 16.
async fn held_slabs_hold_back(rig: Rig, ahead_max: u64) {
    let (mut opened, mut accepted) = rig.sessions(None).await;
    let sent = AtomicU64::new(0);
    let sending = async {
        for _ in 0..500 {
            let slab = opened.sender.slab().await.unwrap();
            let len = slab.len();
            opened.sender.send(slab, len, Vec::new()).await.unwrap();
            sent.fetch_add(1, Ordering::Relaxed);
        }
        opened.sender.finish().await.unwrap();
    };
    let receiving = async {
        let mut held = vec![accepted.receiver.next().await.unwrap().unwrap()];
        for _ in 1..16 {
            held.push(accepted.receiver.next().await.unwrap().unwrap());
            assert!(sent.load(Ordering::Relaxed) <= held.len() as u64 + ahead_max);
            if held.len() >= 4 {
                held.remove(0);
            }
        }
        drop(held);
        let mut count = 16;
        while accepted.receiver.next().await.unwrap().is_some() {
            count += 1;
        }
        assert_eq!(count, 500);
    };
    tokio::join!(sending, receiving);
}

#[tokio::test]
async fn a_receiver_that_is_dropped_stops_the_sender() {
    let rig = Rig::tcp().await;
    let (mut opened, accepted) = rig.sessions(None).await;
    drop(accepted.receiver);
    let error = loop {
        match opened.sender.slab().await {
            Ok(slab) => match opened.sender.send(slab, 1, Vec::new()).await {
                Ok(()) => {}
                Err(error) => break error,
            },
            Err(error) => break error,
        }
    };
    assert_eq!(error, SessionError::Stopped);
    tokio::join!(send(accepted.sender, 50_000), receive(opened.receiver, 50_000));
    opened.handle.ended().await.unwrap();
    accepted.handle.ended().await.unwrap();
}

#[tokio::test]
async fn what_a_receiver_has_thrown_away_is_not_taken() {
    let rig = Rig::mem().await;
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
async fn a_sender_that_is_dropped_fails_the_session_at_both_ends() {
    let rig = Rig::tcp().await;
    let (mut opened, mut accepted) = rig.sessions(None).await;
    let slab = opened.sender.slab().await.unwrap();
    opened.sender.send(slab, 3, Vec::new()).await.unwrap();
    assert_eq!(accepted.receiver.next().await.unwrap().unwrap().bytes.len(), 3);
    drop(opened.sender);
    let error = accepted.receiver.next().await.unwrap_err();
    assert!(matches!(&error, SessionError::Aborted { reason } if reason.contains("dropped")), "{error}");
    assert_eq!(opened.receiver.next().await.unwrap_err(), SessionError::Closed);
}

#[tokio::test]
async fn a_refused_session_says_why() {
    let rig = Rig::tcp().await;
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

/// Passes connections on to a listener until they are cut.
pub(crate) struct Cut {
    pub(crate) address: String,
    pub(crate) cut: watch::Sender<u64>,
}

impl Cut {
    pub(crate) async fn before(listener: &str) -> Self {
        let (cut, to) = (watch::Sender::new(0), listener.to_owned());
        let place = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = place.local_addr().unwrap().to_string();
        let cuts = cut.clone();
        tokio::spawn(async move {
            loop {
                let (mut near, _) = place.accept().await.unwrap();
                let (mut cuts, to) = (cuts.subscribe(), to.clone());
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(&to).await else { return };
                    tokio::select! {
                        _ = cuts.changed() => {}
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    }
                });
            }
        });
        Self { address, cut }
    }
}

#[tokio::test]
async fn a_session_goes_on_over_another_connection() {
    goes_on(Rig::tcp().await).await;
}

#[tokio::test]
async fn a_session_whose_slabs_are_written_goes_on_over_another_connection() {
    goes_on(Rig::tcp_by(SlabVerb::Write).await).await;
}

async fn goes_on(rig: Rig) {
    let cut = Cut::before(rig.listener.local_address()).await;
    let (opened, accepted) = rig.sessions(Some(&cut.address)).await;
    let handle = opened.handle.clone();
    let cutting = async {
        for round in 1..=5u64 {
            // After some progress, so that slabs are under way.
            handle.0.until(|state| (state.received_bytes > round * 1_000_000).then_some(())).await;
            cut.cut.send_modify(|cut| *cut += 1);
            handle.0.until(|state| (state.resumed >= round).then_some(())).await;
        }
    };
    tokio::join!(exchange(opened, accepted, 30_000_000), cutting);
    assert_eq!(handle.stats().resumed, 5);
}

#[tokio::test]
async fn a_session_whose_listener_is_gone_fails_at_both_ends() {
    let mut rig = Rig::tcp().await;
    rig.config.resume_within = Duration::from_millis(500);
    let cut = Cut::before(rig.listener.local_address()).await;
    let (mut opened, accepted) = rig.sessions(Some(&cut.address)).await;
    drop(rig);
    cut.cut.send_modify(|cut| *cut += 1);
    let error = opened.receiver.next().await.unwrap_err();
    assert!(matches!(error, SessionError::Lost { .. }), "{error}");
    let error = accepted.handle.ended().await.unwrap_err();
    assert!(matches!(error, SessionError::Lost { .. }), "{error}");
}

#[tokio::test]
async fn a_paced_session_keeps_its_rate() {
    let mut rig = Rig::mem().await;
    rig.config.rate = Some(Rate::bytes_per_second(2_000_000).burst(16 << 10));
    let (opened, accepted) = rig.sessions(None).await;
    let began = std::time::Instant::now();
    tokio::join!(send(accepted.sender, 1_000_000), receive(opened.receiver, 1_000_000));
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(480), "{took:?}");
}
