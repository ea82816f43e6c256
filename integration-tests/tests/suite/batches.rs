//! Tests of short messages, many packed into one.

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use rdmc::{Algorithm, BatchError, BatchReceiver, BatchSender, DeliveryMode, Receiver, SendError};

use crate::cluster::{Kind, form, pattern, poll_and_drop, spec_of_all, start, watched};

/// Receives all messages of a member, and closes the group.
async fn take_all(receiver: Receiver) -> Vec<Bytes> {
    let mut receiver = BatchReceiver::new(receiver);
    let mut messages = Vec::new();
    while let Some(message) = receiver.next().await {
        messages.push(message.expect("a message"));
    }
    receiver.close().await.expect("the group ends well");
    messages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_messages_come_one_by_one_in_their_order() {
    let len = |number: usize| if number == 777 { 200_000 } else { number * number % 301 };
    let messages: Vec<Vec<u8>> = (0..2000).map(|number| pattern(len(number), number as u64)).collect();
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 4).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 4 << 10);
            let (sender, receivers) = form(&nodes, &spec).await;
            let taken = futures::future::join_all(receivers.into_iter().map(take_all));
            let sent = async {
                let mut sender = BatchSender::new(sender).batch_bytes(3000);
                for (number, message) in messages.iter().enumerate() {
                    sender.feed(message.clone().into()).await.unwrap();
                    if number % 100 == 99 {
                        sender.flush().await.unwrap();
                    }
                }
                sender.close().await.unwrap()
            };
            let (taken, certificate) = futures::join!(taken, sent);
            assert!(taken.iter().all(|taken| *taken == messages), "{kind}");
            let batches = certificate.messages();
            assert!((20..messages.len() as u64 / 5).contains(&batches), "{kind}: {batches} batches");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flush_dropped_at_any_poll_loses_no_message() {
    const ROUNDS: usize = 40;
    watched(async {
        let nodes = start(Kind::Mem, 3).await;
        let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 64);
        let (sender, receivers) = form(&nodes, &spec).await;
        let taken = futures::future::join_all(receivers.into_iter().map(take_all));
        let sent = async {
            let mut sender = BatchSender::new(sender).batch_bytes(100);
            for number in 0..ROUNDS {
                for part in 0..3 {
                    let message = pattern(30, (3 * number + part) as u64);
                    sender.feed(message.into()).await.unwrap();
                }
                let _ = poll_and_drop(sender.flush(), number % 8).await;
            }
            sender.close().await.unwrap();
        };
        let (taken, ()) = futures::join!(taken, sent);
        let expected: Vec<Vec<u8>> = (0..3 * ROUNDS as u64).map(|seed| pattern(30, seed)).collect();
        assert!(taken.iter().all(|taken| *taken == expected));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_batch_is_told_and_the_next_one_taken() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 64);
        let (sender, mut receivers) = form(&nodes, &spec).await;
        let mut receiver = BatchReceiver::new(receivers.pop().expect("one receiver"));
        sender.send(vec![9, 1, 2]).await.unwrap();
        assert!(matches!(receiver.next().await, Some(Err(BatchError::NoBatch { number: 0 }))));
        sender.send("").await.unwrap();
        assert!(matches!(receiver.next().await, Some(Err(BatchError::NoBatch { number: 1 }))));
        let mut batches = BatchSender::new(&sender);
        batches.send(Bytes::from_static(b"whole")).await.unwrap();
        assert_eq!(receiver.next().await.expect("a message").unwrap(), "whole");
        drop(batches);
        futures::try_join!(sender.close(), receiver.close()).unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_has_not_left_when_the_group_fails_is_given_back() {
    for flushes in [false, true] {
        watched(async {
            let nodes = start(Kind::Mem, 2).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 64);
            let (sender, receivers) = form(&nodes, &spec).await;
            let mut batches = BatchSender::new(sender).batch_bytes(6);
            batches.send(Bytes::from_static(b"sent")).await.unwrap();
            drop(receivers);
            batches.sender().failed().await;
            let mut refused = 0;
            for message in ["one", "", "three", "four"] {
                // If `feed` reports the failure because there is no room, the caller still has the message.
                let message = Bytes::from_static(message.as_bytes());
                refused += usize::from(batches.feed(message.clone()).await.is_err());
                if refused > 0 {
                    break;
                }
            }
            if flushes {
                assert!(matches!(batches.flush().await, Err(SendError::NotQueued(_))));
            }
            let (sender, left) = batches.into_parts();
            let whole = ["one", "", "three", "four"];
            assert_eq!(left, whole[..whole.len() - refused], "{flushes}");
            assert!(sender.close().await.is_err());
        })
        .await;
    }
}

#[tokio::test]
async fn a_batch_that_has_its_place_is_sent_though_nobody_waits_for_it() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 64);
        let (sender, mut receivers) = form(&nodes, &spec).await;
        let mut batches = BatchSender::new(&sender);
        batches.feed(Bytes::from_static(b"waits for nobody")).await.unwrap();
        // The engine does not run between these calls.
        assert!(poll_and_drop(batches.flush(), 1).await.is_none());
        let (_, left) = batches.into_parts();
        assert!(left.is_empty());
        let (taken, ()) = futures::join!(take_all(receivers.remove(0)), async {
            sender.close().await.unwrap();
        });
        assert_eq!(taken, ["waits for nobody"]);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_packed_is_refused_and_the_group_not_closed_as_if_it_had_come() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 64).delivery_mode(DeliveryMode::Shared);
        let (sender, mut receivers) = form(&nodes, &spec).await;
        let mut batches = BatchSender::new(sender);
        batches.feed(Bytes::from_static(b"no object")).await.unwrap();
        assert!(matches!(batches.flush().await, Err(SendError::NotAnObject)));
        assert!(matches!(batches.close().await, Err(SendError::NotAnObject)));
        assert!(receivers.remove(0).next().await.expect("the failure").is_err());
    })
    .await;
}
