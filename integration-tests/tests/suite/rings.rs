//! Tests of groups with a ring for short messages, on every fabric.

use futures::StreamExt;
use futures::future::join_all;
use rdmc::{Algorithm, Delivery, FailureCause, GroupError, Message, OfferReceiver, SlowReceivers};

use crate::cluster::{Kind, form, pattern, spec_of_all, start, take_all, watched};
use crate::recovery::{check, send_all, take_over_failures};

const BLOCK: u32 = 1 << 10;

/// Sizes around those of a slot and of a block.
fn size(number: u64) -> usize {
    [0, 1, 99, 100, 101, 1023, 1024, 1025, 5000, 30, 30, 30, 30][usize::try_from(number % 13).expect("it is small")]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_and_long_messages_keep_one_order() {
    const MESSAGES: u64 = 400;
    for kind in Kind::all() {
        watched(async {
            for (count, bytes, delivery) in [
                (1, 100, Delivery::Immediate),
                (2, 100, Delivery::Immediate),
                (5, 100, Delivery::Immediate),
                (5, 4000, Delivery::Stable),
            ] {
                let nodes = start(kind, count).await;
                let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK);
                let (sender, receivers) = form(&nodes, &spec.ring(4, bytes).delivery(delivery)).await;
                let taken = join_all(receivers.into_iter().map(take_all));
                let sent = async {
                    let sends = (0..MESSAGES).map(|number| sender.enqueue(pattern(size(number), number)));
                    let numbers = join_all(sends).await;
                    assert!(numbers.into_iter().map(|sent| sent.unwrap().number()).eq(0..MESSAGES));
                    sender.close().await.unwrap()
                };
                let (taken, certificate) = futures::join!(taken, sent);
                assert_eq!(certificate.messages(), MESSAGES);
                assert!(certificate.records().iter().all(|record| record.size == size(record.number) as u64));
                for messages in taken {
                    assert!(messages.iter().map(Message::number).eq(0..MESSAGES), "{kind} n={count}");
                    for message in messages {
                        assert!(message[..] == pattern(size(message.number()), message.number()), "{kind} n={count}");
                    }
                }
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_read_its_ring_holds_the_root_back() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let (sender, mut receivers) =
                form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, BLOCK).ring(4, 100)).await;
            let slow = receivers.pop().unwrap();
            let quick = receivers.pop().unwrap();
            let mut sends: Vec<_> = (0..200).map(|number| sender.enqueue(pattern(50, number))).collect();
            // Four in the ring, and 64 taken ahead of the application.
            let stuck = tokio::time::timeout(std::time::Duration::from_millis(300), sends.pop().unwrap()).await;
            assert!(stuck.is_err(), "{kind}: the last message was sent before a receiver had read the first");
            let taken = join_all([take_all(slow), take_all(quick)]);
            let (taken, closed) = futures::join!(taken, sender.close());
            assert!(closed.unwrap().messages() == 200 && taken.iter().all(|messages| messages.len() == 200), "{kind}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offers_of_a_ring_are_accepted_like_others() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let spec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK).ring(8, 200);
            let joins = nodes[1..].iter().map(|node| node.join_group(spec.clone()).with_offers());
            let joined =
                futures::future::try_join(nodes[0].create_group(spec.clone()), futures::future::try_join_all(joins));
            let (sender, receivers) = joined.await.unwrap();
            let taken = join_all(receivers.into_iter().map(|mut offers: OfferReceiver| async move {
                for number in 0..30 {
                    let offer = offers.next_offer().await.unwrap().unwrap();
                    let memory = vec![0; usize::try_from(offer.size()).unwrap()];
                    let message = offer.accept_into(memory).unwrap().await.unwrap();
                    assert!(message[..] == pattern(size(number), number), "{kind}");
                    message.stored();
                }
                offers.close().await.unwrap();
            }));
            let sent = async {
                for number in 0..30 {
                    sender.send(pattern(size(number), number)).await.unwrap().stored().await.unwrap();
                }
                sender.close().await.unwrap();
            };
            futures::join!(taken, sent);
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survivors_complete_messages_of_a_ring() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 5).await;
            // Messages of the ring are as long as those of this test.
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 200_000).ring(4, 65_536);
            for long in [true, false] {
                let spec = if long { spec.clone() } else { spec_of_all(2, &nodes, Algorithm::Chain, 1000).ring(2, 50) };
                let (sender, mut receivers) = form(&nodes, &spec).await;
                let mut victim = receivers.remove(1);
                let dies = async {
                    victim.next().await.expect("a message").expect("no failure");
                    drop(victim);
                };
                let taken = join_all(receivers.into_iter().map(take_over_failures));
                let (certificate, taken, ()) = futures::join!(send_all(sender, 30), taken, dies);
                taken.iter().for_each(|given| check(given, 30, &format!("{kind}")));
                assert!(certificate.is_complete(), "{kind}");
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rings_that_cannot_be_are_refused() {
    let nodes = start(Kind::Mem, 1).await;
    let spec = |id| spec_of_all(id, &nodes, Algorithm::Chain, BLOCK);
    let refused = async |spec| nodes[0].create_group(spec).await.unwrap_err();
    assert!(matches!(refused(spec(1).ring(1, 100)).await, GroupError::Ring { slots: 1, bytes: 100 }));
    assert!(matches!(refused(spec(2).ring(4, 0)).await, GroupError::Ring { slots: 4, bytes: 0 }));
    assert!(matches!(refused(spec(3).ring(4, 100).delta(true)).await, GroupError::RingDelta));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_never_reads_its_ring_is_evicted_where_the_group_wants_that() {
    watched(async {
        let nodes = start(Kind::Mem, 3).await;
        let after = std::time::Duration::from_secs(1);
        let spec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK).ring(4, 100);
        let (sender, mut receivers) = form(&nodes, &spec.slow_receivers(SlowReceivers::evict_after(after))).await;
        let slow = receivers.pop().expect("there are two");
        let mut quick = receivers.pop().expect("there are two");
        let taking = async { while let Some(Ok(_)) = quick.next().await {} };
        let sending = async {
            for number in 0..200 {
                if sender.send(pattern(50, number)).await.is_err() {
                    break;
                }
            }
            sender.failed().await
        };
        let (failure, ()) = futures::join!(sending, taking);
        assert_eq!(failure.first().node, nodes[2].id(), "{failure}");
        assert!(matches!(failure.first().cause, FailureCause::TooSlow { .. }), "{failure}");
        drop(slow);
    })
    .await;
}
