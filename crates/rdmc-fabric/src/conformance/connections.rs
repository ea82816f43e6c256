//! How queue pairs find each other, and how they fail to.

use futures::future::{join, join_all};

use super::{Harness, PATIENT, assert_gone, assert_pattern};
use crate::fabric::{ConnectError, Endpoint, Peer, Role};

pub(super) async fn garbage_is_not_an_endpoint(harness: &Harness) {
    for (bytes, role) in
        [(vec![0xee; 7], Role::Active), (vec![0xee; 7], Role::Passive), (vec![0xee; 256], Role::Active)]
    {
        let a = harness.a.queue_pair(PATIENT);
        let endpoint = Endpoint::new(bytes).expect("within the limit");
        let refused = a.connect(Peer { endpoint, role, address: harness.b.node.address }).await;
        assert!(matches!(refused, Err(ConnectError::BadEndpoint)), "{refused:?}");
    }
    assert!(matches!(Endpoint::new(vec![0; Endpoint::LEN_MAX + 1]), Err(ConnectError::BadEndpoint)));
    let a = harness.a.queue_pair(PATIENT);
    assert!(a.endpoint().as_bytes().len() <= Endpoint::LEN_MAX);
}

pub(super) async fn a_stale_endpoint_leads_nowhere(harness: &Harness) {
    let (a, b) = (harness.a.queue_pair(PATIENT), harness.b.queue_pair(PATIENT));
    let stale = harness.b.peer(&b, Role::Active);
    drop(b);
    match a.connect(stale).await {
        Err(ConnectError::BadNonce | ConnectError::Unreachable(_)) => {}
        // A fabric without a handshake detects it at the first request.
        Ok(()) => assert_gone(a.send(harness.a.filled(8, 0), None).await),
        Err(error) => panic!("connecting to a queue pair that is gone failed with {error:?}"),
    }
}

pub(super) async fn a_queue_pair_connects_once(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let c = harness.b.queue_pair(PATIENT);
    for peer in [harness.b.peer(&b, Role::Active), harness.b.peer(&c, Role::Active)] {
        let refused = a.connect(peer).await;
        assert!(matches!(refused, Err(ConnectError::WrongState)), "{refused:?}");
    }
    let refused = b.connect(harness.a.peer(&a, Role::Passive)).await;
    assert!(matches!(refused, Err(ConnectError::WrongState)), "{refused:?}");
    // The existing connection still works.
    let receive = b.receive(harness.b.room(10));
    a.send(harness.a.filled(10, 1), None).await.expect("the peer takes it");
    assert_pattern(&receive.await.expect("the message arrives").buffer, 1);
}

pub(super) async fn a_closed_queue_pair_does_not_connect(harness: &Harness) {
    for role in [Role::Active, Role::Passive] {
        let (a, b) = (harness.a.queue_pair(PATIENT), harness.b.queue_pair(PATIENT));
        a.close();
        let refused = a.connect(harness.b.peer(&b, role)).await;
        assert!(matches!(refused, Err(ConnectError::WrongState)), "{refused:?}");
        assert_gone(a.receive(harness.a.room(1)).await);
    }
}

pub(super) async fn closing_ends_a_connect(harness: &Harness) {
    let (a, b) = (harness.a.queue_pair(PATIENT), harness.b.queue_pair(PATIENT));
    let connecting = b.connect(harness.a.peer(&a, Role::Passive));
    let closing = async {
        harness.settle().await;
        b.close();
    };
    // A fabric without a handshake may have connected at once.
    let (connected, ()) = join(connecting, closing).await;
    assert!(matches!(connected, Ok(()) | Err(ConnectError::WrongState)), "{connected:?}");
    assert_gone(b.receive(harness.b.room(1)).await);
}

pub(super) async fn a_peer_that_closes_before_it_connects_leaves_nobody_waiting(harness: &Harness) {
    for drops in [false, true] {
        let (a, b) = (harness.a.queue_pair(PATIENT), harness.b.queue_pair(PATIENT));
        let (receive, send) = (a.receive(harness.a.room(8)), a.send(harness.a.filled(8, 0), None));
        let mut b = Some(b);
        let connecting = a.connect(harness.b.peer(b.as_ref().expect("taken below"), Role::Active));
        let closing = async {
            harness.settle().await;
            if drops {
                b = None;
            } else if let Some(b) = &b {
                b.close();
            }
        };
        let (connected, ()) = join(connecting, closing).await;
        if connected.is_err() {
            a.close();
        }
        assert_gone(send.await);
        assert_gone(receive.await);
    }
}

pub(super) async fn a_third_party_does_not_get_in(harness: &Harness) {
    let (a, b) = harness.connected().await;
    let third = harness.a.queue_pair(PATIENT);
    let refused = third.connect(harness.b.peer(&b, Role::Active)).await;
    if refused.is_ok() {
        // A fabric without a handshake detects it at the first request.
        assert_gone(third.send(harness.a.filled(8, 0), None).await);
    }
    let receive = b.receive(harness.b.room(10));
    a.send(harness.a.filled(10, 1), None).await.expect("the peer takes it");
    assert_pattern(&receive.await.expect("the message arrives").buffer, 1);
}

pub(super) async fn many_connections_are_made_at_once(harness: &Harness) {
    let pairs: Vec<_> = (0..32).map(|_| (harness.a.queue_pair(PATIENT), harness.b.queue_pair(PATIENT))).collect();
    join_all(pairs.iter().map(|(a, b)| harness.connect(a, b))).await;
    let sends = (0..).zip(&pairs).map(|(seed, (a, b))| async move {
        let receive = b.receive(harness.b.room(100));
        a.send(harness.a.filled(100, seed), None).await.expect("the peer takes it");
        assert_pattern(&receive.await.expect("the message arrives").buffer, seed);
    });
    join_all(sends).await;
}
