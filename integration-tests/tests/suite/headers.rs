//! Tests of messages with headers, on every fabric.

use std::io::Cursor;

use futures::StreamExt;
use futures::future::join_all;
use rdmc::{Algorithm, BufferMut, Delivery, GroupError, GroupSpec, Message, OfferReceiver, SendError, Sender};

use crate::cluster::{Kind, form, pattern, poll_and_drop, spec_of_all, start, take_all, watched};
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

/// Messages with headers are read from their sources and sent from memory, in turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_header_comes_with_a_message_from_a_source() {
    const MESSAGES: u64 = 35;
    for kind in Kind::all() {
        watched(async {
            for ring in [None, Some((4, 8000))] {
                let nodes = start(kind, 3).await;
                let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK).headers(true);
                let spec = ring.map_or(spec.clone(), |(slots, bytes)| spec.ring(slots, bytes));
                let (sender, receivers) = form(&nodes, &spec).await;
                let taken = join_all(receivers.into_iter().map(take_all));
                let sent = async {
                    for number in 0..MESSAGES {
                        let content = content(number);
                        let len = content.len() as u64;
                        // More than the message is not read.
                        let source = Cursor::new([&content, &b"more"[..]].concat());
                        let sending = match number % 3 {
                            0 if header(number).is_empty() => sender.send_from(source, len),
                            2 => sender.send_with(header(number), content),
                            _ => sender.send_from_with(header(number), source, len),
                        };
                        assert_eq!(sending.await.unwrap().number(), 2 * number + 1);
                    }
                    sender.close().await.unwrap();
                };
                let (taken, ()) = futures::join!(taken, sent);
                taken.iter().for_each(|taken| check(taken, MESSAGES, &format!("{kind} {spec:?}")));
            }
        })
        .await;
    }
}

/// A source that breaks off, and a future that is dropped, leave no header without its message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_from_a_source_that_is_not_sent_has_no_header() {
    watched(async {
        for polls in 0..20 {
            let nodes = start(Kind::Mem, 2).await;
            let spec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK).headers(true);
            let (sender, receivers) = form(&nodes, &spec).await;
            let taken = join_all(receivers.into_iter().map(take_all));
            let sent = async {
                // The first blocks are here.
                let broken = sender.send_from_with("broken", Cursor::new(vec![1; 3000]), 3001).await;
                assert!(matches!(broken, Err(SendError::Unreadable(_))), "{broken:?}");
                drop(poll_and_drop(sender.send_from_with("dropped", Cursor::new(vec![2; 5000]), 5000), polls).await);
                sender.send_with("next", "this").await.unwrap();
                sender.close().await.unwrap();
            };
            let (taken, ()) = futures::join!(taken, sent);
            let (next, before) = taken[0].split_last().expect("the last is sent");
            assert!(next.header() == b"next" && next[..] == *b"this", "{polls}");
            assert!(before.iter().all(|message| message.header() == b"dropped" && message[..] == [2; 5000]), "{polls}");
            assert!(before.len() <= 1, "{polls}");
        }
    })
    .await;
}

/// Sends messages across failures, each once, and closes. Every other message is read from a source.
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
            let content = content(next);
            let len = content.len() as u64;
            let sending = match next % 2 {
                0 => sender.send_with(header(next), content),
                _ => sender.send_from_with(header(next), Cursor::new(content), len),
            };
            match sending.await {
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
        // Nothing is read.
        let refused = sender.send_from_with("one", tokio::io::empty(), 3).await;
        assert!(matches!(refused, Err(SendError::NoHeaders)));
        drop((sender, receivers));
        let (sender, receivers) = form(&nodes, &spec(2).headers(true)).await;
        let long = vec![0; GroupSpec::HEADER_LEN_MAX + 1];
        let (bytes, max) = (long.len(), GroupSpec::HEADER_LEN_MAX);
        let from_source = sender.send_from_with(long.clone(), tokio::io::empty(), 3).await;
        for refused in [sender.send_with(long, "two").await, from_source] {
            let Err(SendError::HeaderTooLong { bytes: got, max: most }) = refused else { panic!("{refused:?}") };
            assert_eq!((got, most), (bytes, max));
        }
        drop((sender, receivers));
        let refused = nodes[0].create_group(spec(3).headers(true).delta(true)).await;
        assert!(matches!(refused, Err(GroupError::Headers)));
    })
    .await;
}
