//! Tests of messages with headers, on every fabric.

use futures::StreamExt;
use futures::future::join_all;
use rdmc::{Algorithm, BufferMut, Delivery, GroupError, GroupSpec, Message, OfferReceiver, SendError, Sender};

use crate::cluster::{Kind, form, pattern, spec_of_all, start, take_all, watched};
use crate::recovery::{go_on, take_over_failures};

const BLOCK: u32 = 1 << 10;

/// The number of the message in the application's order, and in the group's.
fn header(message: u64) -> Vec<u8> {
    // Some are empty, one is as long as may be.
    match message % 7 {
        0 => Vec::new(),
        3 => pattern(GroupSpec::HEADER_LEN_MAX, message),
        _ => format!("object {message}").into_bytes(),
    }
}

fn content(message: u64) -> Vec<u8> {
    pattern([0, 1, 50, 1024, 5000][usize::try_from(message % 5).expect("it is small")], message)
}

fn check(taken: &[Message], count: u64, context: &str) {
    assert_eq!(taken.len() as u64, count, "{context}");
    for (message, number) in taken.iter().zip(0..) {
        assert_eq!(message.number(), 2 * number + 1, "{context}");
        assert!(message.header() == header(number) && message[..] == content(number), "{context}: message {number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_header_comes_with_its_message() {
    const MESSAGES: u64 = 60;
    for kind in Kind::all() {
        watched(async {
            for (algorithm, ring, delivery) in [
                (Algorithm::BinomialPipeline, None, Delivery::Immediate),
                (Algorithm::TwoTree, None, Delivery::Stable),
                (Algorithm::Chain, Some((4, 100)), Delivery::Stable),
                (Algorithm::BinomialPipeline, Some((4, 8000)), Delivery::Immediate),
            ] {
                let nodes = start(kind, 4).await;
                let spec = spec_of_all(1, &nodes, algorithm, BLOCK).headers(true).delivery(delivery);
                let spec = ring.map_or(spec.clone(), |(slots, bytes)| spec.ring(slots, bytes));
                let (sender, receivers) = form(&nodes, &spec).await;
                let taken = join_all(receivers.into_iter().map(take_all));
                let sent = async {
                    let sends = (0..MESSAGES).map(|number| sender.send_with(header(number), content(number)));
                    for (sent, number) in join_all(sends).await.into_iter().zip(0..) {
                        assert_eq!(sent.unwrap().number(), 2 * number + 1);
                    }
                    sender.close().await.unwrap()
                };
                let (taken, certificate) = futures::join!(taken, sent);
                assert_eq!(certificate.messages(), 2 * MESSAGES);
                taken.iter().for_each(|taken| check(taken, MESSAGES, &format!("{kind} {spec:?}")));
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_header_comes_with_the_offer_and_without_one_it_is_empty() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let spec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK).headers(true);
            let joins = nodes[1..].iter().map(|node| node.join_group(spec.clone()).with_offers());
            let joined =
                futures::future::try_join(nodes[0].create_group(spec.clone()), futures::future::try_join_all(joins));
            let (sender, receivers) = joined.await.unwrap();
            let taken = join_all(receivers.into_iter().map(|mut offers: OfferReceiver| async move {
                // It has the length of the first header, and is not for that.
                offers.provide(0, BufferMut::empty());
                for number in 0..20 {
                    let offer = offers.next_offer().await.unwrap().unwrap();
                    let due = if number % 2 == 0 { header(number) } else { Vec::new() };
                    assert_eq!(offer.header(), due, "{kind}");
                    let message = offer.accept_into(vec![0; content(number).len()]).unwrap().await.unwrap();
                    assert!(message.header() == due && message[..] == content(number), "{kind}");
                    message.stored();
                }
                assert!(offers.next_offer().await.is_none(), "{kind}");
                offers.close().await.unwrap();
            }));
            let sent = async {
                for number in 0..20 {
                    let sending = match number % 2 {
                        0 => sender.send_with(header(number), content(number)),
                        _ => sender.send(content(number)),
                    };
                    sending.await.unwrap().stored().await.unwrap();
                }
                sender.close().await.unwrap();
            };
            futures::join!(taken, sent);
        })
        .await;
    }
}

/// Sends messages across failures, each once, and closes.
async fn send_all(mut sender: Sender, count: u64) {
    let mut next = 0;
    loop {
        let failure = loop {
            if next == count {
                match sender.close().await {
                    Ok(_) => return,
                    Err(failure) => break failure,
                }
            }
            match sender.send_with(header(next), content(next)).await {
                Ok(_) => next += 1,
                Err(SendError::Failed(failure)) => {
                    next += 1;
                    break failure;
                }
                Err(SendError::NotQueued(failure)) => break failure,
                Err(other) => panic!("{other}"),
            }
        };
        sender = go_on(failure).await.into_sender().expect("the root goes on as the root");
    }
}

/// A receiver dies behind every message in turn, so that in some groups only the header of the next one is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_survive_members_that_die() {
    const MESSAGES: u64 = 24;
    for (ring, delivery) in [
        (None, Delivery::Immediate),
        (None, Delivery::Stable),
        (Some((4, 8000)), Delivery::Immediate),
        (Some((2, 60)), Delivery::Stable),
    ] {
        for dies_after in 0..MESSAGES {
            watched(async {
                let nodes = start(Kind::Mem, 4).await;
                let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK).headers(true).delivery(delivery);
                let spec = ring.map_or(spec.clone(), |(slots, bytes)| spec.ring(slots, bytes));
                let (sender, mut receivers) = form(&nodes, &spec).await;
                let mut victim = receivers.remove(1);
                let dies = async {
                    for _ in 0..dies_after {
                        victim.next().await.expect("a message").expect("no failure");
                    }
                    drop(victim);
                };
                let taken = join_all(receivers.into_iter().map(take_over_failures));
                let (taken, (), ()) = futures::join!(taken, send_all(sender, MESSAGES), dies);
                taken.iter().for_each(|given| check(&given.messages, MESSAGES, &format!("{dies_after} {spec:?}")));
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_that_cannot_be_are_refused() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec = |id| spec_of_all(id, &nodes, Algorithm::Chain, BLOCK);
        let (sender, receivers) = form(&nodes, &spec(1)).await;
        assert!(matches!(sender.send_with("one", "two").await, Err(SendError::NoHeaders)));
        drop((sender, receivers));
        let (sender, receivers) = form(&nodes, &spec(2).headers(true)).await;
        let long = vec![0; GroupSpec::HEADER_LEN_MAX + 1];
        let (bytes, max) = (long.len(), GroupSpec::HEADER_LEN_MAX);
        let refused = sender.send_with(long, "two").await;
        assert!(
            matches!(refused, Err(SendError::HeaderTooLong { bytes: got, max: most }) if (got, most) == (bytes, max))
        );
        drop((sender, receivers));
        let refused = nodes[0].create_group(spec(3).headers(true).delta(true)).await;
        assert!(matches!(refused, Err(GroupError::Headers)));
    })
    .await;
}
