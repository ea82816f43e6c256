//! Tests of receipts and of stable delivery, on every fabric.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::{join, join_all};
use futures::{FutureExt, StreamExt};
use rdmc::{Algorithm, Delivery, GroupSpec, Message, Node, NodeId, ReceiptError, Receiver};
use tokio::sync::watch;

use crate::cluster::{Kind, form, pattern, spec_of_all, start, take_all, watched};

const BLOCK: u32 = 1 << 10;

/// Takes all messages and does with each what the application wants.
async fn take_each(mut receiver: Receiver, mut act: impl FnMut(&Message)) -> Vec<Message> {
    let mut messages = Vec::new();
    while let Some(message) = receiver.next().await {
        let message = message.expect("the group does not fail");
        act(&message);
        messages.push(message);
    }
    receiver.close().await.expect("the group closes");
    messages
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn receipts_tell_what_all_members_have_and_have_stored() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 4).await;
            let (sender, receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK)).await;
            let stored = watch::Sender::new(0);
            let store = |message: &Message| {
                message.stored();
                stored.send_modify(|stored| *stored += 1);
            };
            let taken = join_all(receivers.into_iter().map(|receiver| take_each(receiver, store)));
            let sent = async {
                let first = sender.send(pattern(100, 1)).await.unwrap();
                let long = sender.send(pattern(100_000, 2)).await.unwrap();
                assert_eq!((first.number(), long.number()), (0, 1));
                long.stored().await.unwrap();
                first.stored().await.unwrap();
                first.delivered().await.unwrap();
                // More than a receipt asks for ahead.
                for number in 2..2600 {
                    let receipt = sender.send(pattern(10, number)).await.unwrap();
                    receipt.stored().await.unwrap();
                }
                // Many that nobody asks about, longer than what is told with others.
                for number in 0..1500 {
                    sender.send(pattern(20_000, number)).await.unwrap();
                }
                let after_many = sender.send(pattern(20_000, 1)).await.unwrap();
                // All three have stored it before anybody asks.
                let (mut count, number) = (stored.subscribe(), after_many.number());
                count.wait_for(|stored| *stored == 3 * (number + 1)).await.unwrap();
                after_many.stored().await.unwrap();
                let last = sender.send(pattern(10, 7)).await.unwrap();
                sender.close().await.unwrap();
                join(last.stored(), last.delivered()).await
            };
            let (taken, last) = futures::join!(taken, sent);
            assert_eq!(last, (Ok(()), Ok(())), "{kind}: a closed group answers as well");
            assert!(taken.iter().all(|messages| messages.len() == 4102), "{kind}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_lets_a_message_go_is_named_and_later_messages_can_be_stored() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 4).await;
            let (sender, receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK)).await;
            let taken = join_all(receivers.into_iter().enumerate().map(|(at, mut receiver)| async move {
                let mut kept = Vec::new();
                while let Some(message) = receiver.next().await {
                    let message = message.unwrap();
                    match (at, message.number()) {
                        // It stores no message but the third.
                        (1, 2) => message.stored(),
                        (1, _) => {}
                        // It stores one before the other.
                        (2, 0) => kept.push(message),
                        (2, 1) => {
                            message.stored();
                            kept.drain(..).for_each(|message: Message| message.stored());
                        }
                        // A clone keeps a message.
                        _ => {
                            let bytes = message.clone().into_bytes();
                            tokio::task::yield_now().await;
                            drop(bytes);
                            message.stored();
                        }
                    }
                }
                receiver.close().await.unwrap();
            }));
            let sent = async {
                let mut receipts = Vec::new();
                for number in 0..4 {
                    receipts.push(sender.send(pattern(3000, number)).await.unwrap());
                }
                let second = ReceiptError::NotStored { nodes: vec![NodeId(2)] };
                assert_eq!(receipts[1].stored().await, Err(second.clone()), "{kind}");
                assert_eq!(second.to_string(), "node 2 did not say that the message is stored");
                assert_eq!(receipts[0].stored().await, Err(second.clone()), "{kind}");
                assert_eq!(receipts[2].stored().await, Ok(()), "{kind}");
                assert_eq!(receipts[3].delivered().await, Ok(()), "{kind}");
                sender.close().await.unwrap();
                assert_eq!(receipts[3].stored().await, Err(second), "{kind}");
            };
            futures::join!(taken, sent);
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_application_holds_back_receipts_and_not_others_blocks() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let (sender, mut receivers) =
                form(&nodes, &spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK)).await;
            let (slow, quick) = (receivers.pop().unwrap(), receivers.pop().unwrap());
            let slowly = take_each(slow, |_| {});
            let sent = async {
                let mut receipts = Vec::new();
                for number in 0..20 {
                    receipts.push(sender.send(pattern(10_000, number)).await.unwrap());
                }
                for receipt in &receipts {
                    receipt.delivered().await.unwrap();
                }
                // The slow member has all messages and keeps them.
                assert!(receipts[0].stored().now_or_never().is_none(), "{kind}");
                let waiting = receipts[0].stored();
                let (closed, stored) = join(sender.close(), waiting).await;
                closed.unwrap();
                stored
            };
            let (slow, quick, stored) = futures::join!(slowly, take_each(quick, Message::stored), sent);
            assert_eq!(stored, Err(ReceiptError::NotStored { nodes: vec![NodeId(2)] }), "{kind}");
            assert_eq!((slow.len(), quick.len()), (20, 20), "{kind}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receipt_of_a_failed_group_says_who_has_the_message() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let (sender, mut receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, BLOCK)).await;
            let (mut dies, mut stays) = (receivers.pop().unwrap(), receivers.pop().unwrap());
            let receipt = sender.send(pattern(3000, 1)).await.unwrap();
            let message = stays.next().await.unwrap().unwrap();
            message.stored();
            let kept = dies.next().await.unwrap().unwrap();
            receipt.delivered().await.unwrap();
            // Whoever has the second message has told what it has done with the first.
            sender.send(pattern(3000, 2)).await.unwrap().delivered().await.unwrap();
            let stored = async {
                match receipt.stored().await {
                    Err(ReceiptError::Failed { failure, nodes }) => (failure, nodes),
                    other => panic!("{kind}: {other:?}"),
                }
            };
            let (outcome, ()) = join(stored, async { dies.refuse("the disk is full") }).await;
            assert_eq!(outcome.0.first().node, NodeId(2), "{kind}");
            assert_eq!(outcome.1, [NodeId(1)], "{kind}");
            assert_eq!(receipt.delivered().await, Ok(()), "{kind}: all had it");
            drop(kept);
        })
        .await;
    }
}

fn stable(id: u64, nodes: &[Node], algorithm: Algorithm) -> GroupSpec {
    spec_of_all(id, nodes, algorithm, BLOCK).delivery(Delivery::Stable)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stable_delivery_delivers_all_messages_in_order() {
    for kind in Kind::all() {
        watched(async {
            // In a group of more members the rows travel through the root.
            for count in [1, 2, 5, 18] {
                let nodes = start(kind, count).await;
                let (sender, receivers) = form(&nodes, &stable(1, &nodes, Algorithm::BinomialPipeline)).await;
                let taken = join_all(receivers.into_iter().map(take_all));
                let sent = async {
                    for number in 0..50 {
                        sender.send(pattern(100 * number, number as u64)).await.unwrap();
                    }
                    sender.close().await.unwrap();
                };
                let (taken, ()) = futures::join!(taken, sent);
                for messages in &taken {
                    assert!(messages.iter().map(Message::number).eq(0..50), "{kind} n={count}");
                    assert!(messages.iter().enumerate().all(|(at, got)| got[..] == pattern(100 * at, at as u64)));
                }
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_stable_delivery_nobody_gets_a_message_that_a_member_lacks() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 4).await;
            let (sender, mut receivers) = form(&nodes, &stable(1, &nodes, Algorithm::BinomialPipeline)).await;
            // The last member takes no message: of those after the fourth, it lacks blocks.
            let idle = receivers.pop().unwrap();
            let sends: Vec<_> = (0..12).map(|number| sender.send(pattern(50_000, number))).collect();
            let sending = join_all(sends);
            let receiving = join_all(receivers.iter_mut().map(|receiver| async move {
                let mut taken = 0;
                loop {
                    match tokio::time::timeout(Duration::from_millis(300), receiver.next()).await {
                        Ok(Some(Ok(message))) => taken = message.number() + 1,
                        Ok(other) => panic!("{other:?}"),
                        Err(_) => break taken,
                    }
                }
            }));
            let mut sending = std::pin::pin!(sending.fuse());
            let taken = futures::select! {
                taken = std::pin::pin!(receiving.fuse()) => taken,
                sent = sending => panic!("{kind}: all was sent: {sent:?}"),
            };
            let most = *taken.iter().max().unwrap();
            assert!(most <= 4, "{kind}: {taken:?}");
            // It gives up. The survivors end after the same messages.
            idle.refuse("enough");
            let rest = join_all(receivers.iter_mut().map(|receiver| async move {
                let mut last = None;
                while let Some(item) = receiver.next().await {
                    match item {
                        Ok(message) => last = Some(message.number() + 1),
                        Err(failure) => assert!(failure.quorum),
                    }
                }
                last
            }));
            let (rest, _) = join(rest, sending).await;
            let ends: BTreeSet<u64> = rest.iter().zip(&taken).map(|(rest, taken)| rest.unwrap_or(*taken)).collect();
            assert_eq!(ends.len(), 1, "{kind}: {taken:?} {rest:?}");
        })
        .await;
    }
}
