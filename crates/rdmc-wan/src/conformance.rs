//! The session bodies: what a session does on every fabric.
//!
//! A fabric joins with a [`Rig`], which creates two nodes that reach each other, and one line in a test file:
//! `rdmc_wan::session_suite!(name, rig)`. Each body becomes a test in the module of that name. It runs twice: slabs are
//! [read](SlabVerb::Read), and [written](SlabVerb::Write).
//!
//! Bodies take time and tasks from the fabric's environment only, so a simulated fabric runs them in virtual time.

#![expect(clippy::unwrap_used, reason = "bodies belong to the tests, where nothing goes on after a failure")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use rdmc_fabric::{Fabric, MemNetwork};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::{
    Session, SessionConfig, SessionError, SessionListener, SlabReader, SlabReceiver, SlabSender, SlabVerb, SlabWriter,
    connect,
};

/// Creates the nodes that the bodies run on.
pub trait Rig: Send + Sync {
    /// Creates two nodes that reach each other.
    fn ends(&self) -> Ends;

    /// Runs a body to its end. By default it runs [on Tokio](run_on_tokio); a fabric with its own executor overrides
    /// this.
    fn run(&self, body: BoxFuture<'static, ()>) {
        run_on_tokio(body);
    }
}

/// Runs a body on a Tokio runtime of one thread.
pub fn run_on_tokio(body: BoxFuture<'static, ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("the operating system gives a test a runtime").block_on(body);
}

/// The two nodes of a session.
#[derive(Clone, Debug)]
pub struct Ends {
    /// The fabric of the node that accepts sessions.
    pub accepting: Arc<dyn Fabric>,
    /// The fabric of the node that opens them.
    pub opening: Arc<dyn Fabric>,
    /// Where the first node listens.
    pub address: String,
}

/// Nodes on the fabric `mem`.
#[derive(Debug)]
pub struct Mem;

impl Rig for Mem {
    fn ends(&self) -> Ends {
        let network = MemNetwork::new();
        Ends { accepting: network.fabric(), opening: network.fabric(), address: "listener".to_owned() }
    }
}

/// Passes TCP connections on to a listener until they are cut.
#[derive(Debug)]
pub struct Cut {
    /// Where to connect.
    pub address: String,
    cuts: watch::Sender<u64>,
}

impl Cut {
    /// Stands before the listener at that address.
    pub async fn before(listener: &str) -> Self {
        let (cuts, to) = (watch::Sender::new(0), listener.to_owned());
        let place = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = place.local_addr().unwrap().to_string();
        let seen = cuts.clone();
        tokio::spawn(async move {
            loop {
                let (mut near, _) = place.accept().await.unwrap();
                let (mut cuts, to) = (seen.subscribe(), to.clone());
                tokio::spawn(async move {
                    let Ok(mut far) = TcpStream::connect(&to).await else { return };
                    tokio::select! {
                        _ = cuts.changed() => {}
                        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    }
                });
            }
        });
        Self { address, cuts }
    }

    /// Cuts the connections that there are.
    pub fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

/// Lists the bodies once. The list generates a function that runs one body, and a macro that makes a test of each.
macro_rules! bodies {
    ($dollar:tt $($body:ident),+ $(,)?) => {
        /// Runs one body by each verb, each time on fresh nodes.
        ///
        /// # Panics
        /// If the session does not conform or hangs, or if there is no such body.
        pub fn run(rig: Arc<dyn Rig>, body: &'static str) {
            let nodes = rig.clone();
            rig.run(Box::pin(async move {
                for verb in [SlabVerb::Read, SlabVerb::Write] {
                    println!("slabs come by {verb:?}");
                    let ends = nodes.ends();
                    let environment = ends.opening.environment();
                    let harness = Harness::new(ends, verb).await;
                    let watched: BoxFuture<'_, ()> = match body {
                        $(stringify!($body) => Box::pin($body(&harness)),)+
                        _ => panic!("there is no body {body}"),
                    };
                    environment.timeout(WATCHDOG, watched).await.expect("the body must not hang");
                }
            }));
        }

        /// Creates a module with one test for each session body: `session_suite!(name, rig)`.
        #[macro_export]
        #[doc(hidden)]
        macro_rules! session_suite {
            ($dollar name:ident, $dollar rig:expr) => {
                mod $dollar name {
                    #[allow(unused_imports, reason = "a rig given by a path uses no import")]
                    use super::*;

                    $(
                        #[test]
                        fn $body() {
                            $dollar crate::conformance::run(::std::sync::Arc::new($dollar rig), stringify!($body));
                        }
                    )+
                }
            };
        }
    };
}

bodies! { $
    bytes_go_both_ways_at_once,
    nothing_is_sent_and_the_session_ends,
    one_direction_ends_before_the_other,
    notes_come_with_their_slabs_and_messages_in_order,
    a_receiver_that_holds_slabs_holds_back_the_sender,
    a_receiver_that_is_dropped_stops_the_sender,
    a_sender_that_is_dropped_fails_the_session_at_both_ends,
    an_abort_says_why_at_the_other_end,
}

async fn bytes_go_both_ways_at_once(harness: &Harness) {
    let (opened, accepted) = harness.sessions(None).await;
    exchange(opened, accepted, 3_000_000).await;
}

async fn nothing_is_sent_and_the_session_ends(harness: &Harness) {
    let (opened, accepted) = harness.sessions(None).await;
    exchange(opened, accepted, 0).await;
}

async fn one_direction_ends_before_the_other(harness: &Harness) {
    let (opened, mut accepted) = harness.sessions(None).await;
    opened.sender.finish().await.unwrap();
    assert!(accepted.receiver.next().await.unwrap().is_none());
    tokio::join!(send(accepted.sender, 100_000), receive(opened.receiver, 100_000));
    opened.handle.ended().await.unwrap();
}

async fn notes_come_with_their_slabs_and_messages_in_order(harness: &Harness) {
    let (mut opened, mut accepted) = harness.sessions(None).await;
    // Most slabs travel with their announcement; each seventh does not.
    let len_of = |number: u32| if number.is_multiple_of(7) { 20_000 + number as usize } else { number as usize };
    let sending = async {
        for number in 0..200u32 {
            let slab = opened.sender.slab().await.unwrap();
            opened.sender.send(slab, len_of(number), number.to_le_bytes().to_vec()).await.unwrap();
            opened.handle.send_message(number.to_le_bytes().to_vec()).await.unwrap();
        }
        opened.sender.finish().await.unwrap();
    };
    let receiving = async {
        for number in 0..200u32 {
            let slab = accepted.receiver.next().await.unwrap().unwrap();
            assert_eq!((slab.bytes.len(), slab.note), (len_of(number), number.to_le_bytes().to_vec()));
            assert_eq!(accepted.handle.next_message().await.unwrap(), number.to_le_bytes());
        }
        assert!(accepted.receiver.next().await.unwrap().is_none());
    };
    tokio::join!(sending, receiving);
}

async fn a_receiver_that_holds_slabs_holds_back_the_sender(harness: &Harness) {
    // All slabs of the rings: a third one is at the end to which slabs are written.
    let rings = if harness.config.receive_by == Some(SlabVerb::Write) { 3 } else { 2 };
    let ahead_max = rings * harness.config.ring_len_max / harness.config.slab_len as u64;
    let (mut opened, mut accepted) = harness.sessions(None).await;
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

async fn a_receiver_that_is_dropped_stops_the_sender(harness: &Harness) {
    let (mut opened, accepted) = harness.sessions(None).await;
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

async fn a_sender_that_is_dropped_fails_the_session_at_both_ends(harness: &Harness) {
    let (mut opened, mut accepted) = harness.sessions(None).await;
    let slab = opened.sender.slab().await.unwrap();
    opened.sender.send(slab, 3, Vec::new()).await.unwrap();
    assert_eq!(accepted.receiver.next().await.unwrap().unwrap().bytes.len(), 3);
    drop(opened.sender);
    let error = accepted.receiver.next().await.unwrap_err();
    assert!(matches!(&error, SessionError::Aborted { reason } if reason.contains("dropped")), "{error}");
    assert_eq!(opened.receiver.next().await.unwrap_err(), SessionError::Closed);
}

async fn an_abort_says_why_at_the_other_end(harness: &Harness) {
    let (mut opened, mut accepted) = harness.sessions(None).await;
    let slab = opened.sender.slab().await.unwrap();
    let len = slab.len();
    opened.sender.send(slab, len, Vec::new()).await.unwrap();
    assert_eq!(accepted.receiver.next().await.unwrap().unwrap().bytes.len(), len);
    opened.handle.abort("the disk is full");
    let aborted = SessionError::Aborted { reason: "the disk is full".to_owned() };
    assert_eq!(accepted.receiver.next().await.unwrap_err(), aborted);
    assert_eq!(accepted.handle.ended().await.unwrap_err(), aborted);
    assert_eq!(accepted.sender.slab().await.unwrap_err(), aborted);
    assert_eq!(opened.handle.ended().await.unwrap_err(), SessionError::Closed);
}

/// A listener, and the fabric of the end that opens sessions.
pub(crate) struct Harness {
    pub(crate) listener: SessionListener,
    pub(crate) opening: Arc<dyn Fabric>,
    pub(crate) config: SessionConfig,
}

impl Harness {
    /// Slabs come to both ends in the same way.
    pub(crate) async fn new(ends: Ends, receive_by: SlabVerb) -> Self {
        let config = SessionConfig { receive_by: Some(receive_by), ..config() };
        let listener = SessionListener::bind(one(ends.accepting), &ends.address, config.clone()).await.unwrap();
        Self { listener, opening: ends.opening, config }
    }

    /// Opens a session to the listener, by way of another address if there is one.
    pub(crate) async fn sessions(&self, by: Option<&str>) -> (Session, Session) {
        let address = by.unwrap_or(self.listener.local_address());
        let opening = connect(one(self.opening.clone()), address, self.config.clone(), b"from the opener".to_vec());
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

impl fmt::Debug for Harness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Harness").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Small, so that bodies pass through all of a ring many times.
pub(crate) fn config() -> SessionConfig {
    SessionConfig {
        slab_len: 32 << 10,
        ring_len_max: 512 << 10,
        detection: Duration::from_secs(2),
        resume_within: Duration::from_secs(5),
        ..SessionConfig::default()
    }
}

pub(crate) fn one(fabric: Arc<dyn Fabric>) -> rdmc::Fabrics {
    rdmc::Fabrics::new(vec![fabric]).unwrap()
}

/// The byte at a place of a stream, so that any confusion of places shows.
fn byte_at(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

pub(crate) async fn send(sender: SlabSender, len: u64) {
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

pub(crate) async fn receive(receiver: SlabReceiver, len: u64) {
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
pub(crate) async fn exchange(a: Session, b: Session, len: u64) {
    let (ended_a, ended_b) = (a.handle.clone(), b.handle.clone());
    tokio::join!(send(a.sender, len), receive(a.receiver, len), send(b.sender, len), receive(b.receiver, len));
    ended_a.ended().await.unwrap();
    ended_b.ended().await.unwrap();
    assert_eq!(ended_a.stats().sent_bytes, len);
    assert_eq!(ended_b.stats().received_bytes, len);
}

/// The longest a body may take, in the environment's time.
const WATCHDOG: Duration = Duration::from_secs(60);
