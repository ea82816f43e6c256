//! Tests of messages that are read while they travel: from a source at the root, and at a receiver as they arrive.

use std::io::{self, Cursor};

use futures::{FutureExt, StreamExt};
use rdmc::{
    Algorithm, Arrival, Cluster, Delivery, FailureCause, GroupFailure, GroupSpec, Node, NodeId, OfferReceiver,
    Recovered, RecoveryError, SendError, Sender, Shutdown,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::cluster::{Kind, fabrics, form, pattern, poll_and_drop, spec_of_all, start, take_all, watched};

const BLOCK_SIZE: u32 = 1000;
const BLOCK: usize = BLOCK_SIZE as usize;
const LEN: usize = 10 * BLOCK + 500;

/// Forms a group of which the second member takes offers, and returns a source for its root.
async fn form_with_offers(nodes: &[Node], spec: &GroupSpec) -> (Sender, OfferReceiver, Vec<rdmc::Receiver>) {
    let joins = nodes[2..].iter().map(|node| node.join_group(spec.clone()));
    let offers = nodes[1].join_group(spec.clone()).with_offers();
    let formed = futures::try_join!(nodes[0].create_group(spec.clone()), offers, futures::future::try_join_all(joins));
    formed.expect("the group forms")
}

fn source() -> (DuplexStream, DuplexStream) {
    tokio::io::duplex(1 << 20)
}

async fn accept(offers: &mut OfferReceiver) -> Arrival {
    let offer = offers.next_offer().await.expect("a message").expect("no failure");
    let memory = vec![0; usize::try_from(offer.size()).expect("a short message")];
    offer.accept_into(memory).expect("memory is registered")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_reads_what_the_source_of_the_root_has_given_so_far() {
    for (kind, checks) in Kind::all().into_iter().zip([true, false].into_iter().cycle()) {
        for algorithm in [Algorithm::BinomialPipeline, Algorithm::Chain, Algorithm::Sequential] {
            watched(async {
                let nodes = start(kind, 4).await;
                let spec = spec_of_all(1, &nodes, algorithm.clone(), BLOCK_SIZE).check_blocks(checks);
                let (sender, mut offers, receivers) = form_with_offers(&nodes, &spec).await;
                let taken = futures::future::join_all(receivers.into_iter().map(take_all));
                let (mut given, reader) = source();
                let object = pattern(LEN, 1);
                let multicast = sender.send_from(reader, LEN as u64);
                let sent = async {
                    multicast.await.unwrap().delivered().await.unwrap();
                    sender.close().await.unwrap();
                };
                let received = async {
                    // The third block is not whole.
                    let (first, rest) = object.split_at(2 * BLOCK + 100);
                    given.write_all(first).await.unwrap();
                    let arrival = accept(&mut offers).await;
                    let mut progress = arrival.progress();
                    let mut reader = arrival.into_reader();
                    let mut read = vec![0; 2 * BLOCK];
                    // In the pipeline, another member has the second block first.
                    if algorithm != Algorithm::BinomialPipeline {
                        reader.read_exact(&mut read[..700]).await.unwrap();
                        reader.read_exact(&mut read[700..]).await.unwrap();
                        assert!(read == first[..2 * BLOCK], "{kind} {algorithm}");
                        assert_eq!((progress.done(), progress.total()), (2 * BLOCK as u64, LEN as u64));
                        let more = reader.read_u8().now_or_never();
                        assert!(more.is_none(), "{kind} {algorithm}: {more:?}");
                    } else {
                        read.clear();
                    }
                    // More than the message is not read.
                    given.write_all(&[rest, b"more"].concat()).await.unwrap();
                    reader.read_to_end(&mut read).await.unwrap();
                    assert!(read == object, "{kind} {algorithm}");
                    let message = reader.into_message().await.unwrap();
                    assert!(message[..] == object && message.digest().is_some() == checks, "{kind} {algorithm}");
                    let mut last = 0;
                    while let Some(done) = progress.changed().await {
                        assert!(done > last && done <= LEN as u64);
                        last = done;
                    }
                    assert_eq!(last, LEN as u64);
                    offers.close().await.unwrap();
                };
                let (taken, (), ()) = futures::join!(taken, sent, received);
                assert!(taken.iter().all(|messages| messages[0][..] == object), "{kind} {algorithm}");
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_stable_delivery_a_reader_gets_no_byte_before_all_members_have_all() {
    watched(async {
        let nodes = start(Kind::Mem, 3).await;
        let spec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK_SIZE).delivery(Delivery::Stable);
        let (sender, mut offers, receivers) = form_with_offers(&nodes, &spec).await;
        let taken = futures::future::join_all(receivers.into_iter().map(take_all));
        let (mut given, reader) = source();
        let object = pattern(LEN, 2);
        let sent = async {
            sender.send_from(reader, LEN as u64).await.unwrap();
            sender.close().await.unwrap();
        };
        let received = async {
            given.write_all(&object[..3 * BLOCK]).await.unwrap();
            let arrival = accept(&mut offers).await;
            let mut progress = arrival.progress();
            while progress.changed().await.expect("more comes") < 3 * BLOCK as u64 {}
            let mut reader = arrival.into_reader();
            let mut read = Vec::new();
            assert!(reader.read_u8().now_or_never().is_none());
            given.write_all(&object[3 * BLOCK..]).await.unwrap();
            reader.read_to_end(&mut read).await.unwrap();
            assert!(read == object);
            drop(reader);
            offers.close().await.unwrap();
        };
        futures::join!(taken, sent, received);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_ends_early_fails_the_group_and_every_reader_with_its_cause() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let spec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK_SIZE);
            let (sender, mut offers, mut receivers) = form_with_offers(&nodes, &spec).await;
            let (mut given, reader) = source();
            let sent = sender.send_from(reader, LEN as u64);
            let received = async {
                given.write_all(&pattern(2 * BLOCK + 10, 1)).await.unwrap();
                let mut reader = accept(&mut offers).await.into_reader();
                let mut read = vec![0; 2 * BLOCK];
                reader.read_exact(&mut read).await.unwrap();
                drop(given);
                let failed = reader.read_u8().await.unwrap_err();
                let failure = failed.get_ref().and_then(|cause| cause.downcast_ref::<GroupFailure>()).unwrap().clone();
                assert_eq!(reader.into_message().await.unwrap_err(), failure, "{kind}");
                failure
            };
            let (sent, failure) = futures::join!(sent, received);
            let Err(SendError::Failed(at_root)) = sent else { panic!("{kind}: {sent:?}") };
            assert_eq!(at_root, failure, "{kind}");
            let what = "it ended after 2010 of 10500 bytes".to_owned();
            assert_eq!(failure.first().node, NodeId(0), "{kind}");
            assert_eq!(failure.first().cause, FailureCause::Unreadable { message: 0, what }, "{kind}");
            assert_eq!(receivers[0].next().await.unwrap().unwrap_err(), failure, "{kind}");
            let other = receivers[0].failed().await;
            let excluded = at_root.recover().await.unwrap_err();
            assert!(matches!(excluded, RecoveryError::Excluded { .. }), "{kind}: {excluded}");
            let (one, other) = futures::try_join!(failure.recover(), other.recover()).expect("they recover");
            assert_eq!((one.lost.len(), other.lost.len()), (1, 1), "{kind}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_fails_before_the_message_has_its_place_fails_the_future_alone() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let (sender, mut receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, BLOCK_SIZE)).await;
        let taken = take_all(receivers.remove(0));
        let sent = async {
            let short = sender.send_from(Cursor::new(vec![1; BLOCK - 1]), LEN as u64);
            let mut progress = short.progress();
            let failed = short.await.unwrap_err();
            let SendError::Unreadable(error) = failed else { panic!("{failed}") };
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            assert_eq!(progress.changed().await, None);
            let failed = sender.send_from(tokio::io::empty(), 1).await.unwrap_err();
            assert!(matches!(failed, SendError::Unreadable(_)), "{failed}");
            let failed = sender.send_from(tokio::io::repeat(1), 1 << 40).await.unwrap_err();
            assert!(matches!(failed, SendError::TooManyBlocks { .. }), "{failed}");
            assert_eq!(sender.send("next").await.unwrap().number(), 0);
            sender.close().await.unwrap();
        };
        let (taken, ()) = futures::join!(taken, sent);
        assert_eq!(taken.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_messages_from_sources_follow_each_other_in_a_pool_for_one() {
    watched(async {
        let cluster = Cluster::new((0u32..2).map(|id| (id, format!("node{id}"))));
        let starts = (0u32..).zip(fabrics(Kind::Mem, 2)).map(|(id, fabric)| {
            let builder = Node::builder(NodeId(id), cluster.clone()).fabric(fabric);
            builder.pool_bytes_max(LEN.next_multiple_of(4 << 10) as u64).start()
        });
        let nodes = futures::future::try_join_all(starts).await.expect("they start");
        let (sender, mut receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, BLOCK_SIZE)).await;
        let taken = async {
            let (mut receiver, mut taken) = (receivers.remove(0), 0);
            while let Some(message) = receiver.next().await {
                assert!(message.unwrap()[..] == pattern(LEN, taken));
                taken += 1;
            }
            receiver.close().await.unwrap();
            taken
        };
        let sent = async {
            for seed in 0..3 {
                sender.send_from(Cursor::new(pattern(LEN, seed)), LEN as u64).await.unwrap();
            }
            sender.close().await.unwrap();
        };
        let (taken, ()) = futures::join!(taken, sent);
        assert_eq!(taken, 3);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sources_serve_groups_of_all_kinds_and_messages_of_all_lengths() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let spec = |id| spec_of_all(id, &nodes, Algorithm::BinomialPipeline, BLOCK_SIZE);
            let alone = spec_of_all(4, &nodes[..1], Algorithm::Chain, BLOCK_SIZE);
            for spec in [spec(1), spec(2).delta(true), spec(3).ring(8, 400), alone, spec(5).recoverable(false)] {
                let (sender, receivers) = form(&nodes, &spec).await;
                let taken = futures::future::join_all(receivers.into_iter().map(take_all));
                let lens = [0, 1, 400, 401, BLOCK, BLOCK + 1, LEN];
                let sent = async {
                    for (len, seed) in lens.into_iter().zip(1..) {
                        let source = Cursor::new(pattern(LEN, seed));
                        let multicast = sender.send_from(source, len as u64);
                        let progress = multicast.progress();
                        multicast.await.unwrap();
                        assert_eq!((progress.done(), progress.total()), (len as u64, len as u64), "{kind} {spec:?}");
                    }
                    sender.close().await.unwrap();
                };
                let (taken, ()) = futures::join!(taken, sent);
                for messages in taken {
                    assert_eq!(messages.len(), lens.len(), "{kind}");
                    for ((message, len), seed) in messages.iter().zip(lens).zip(1..) {
                        assert!(message[..] == pattern(LEN, seed)[..len], "{kind} {len} {spec:?}");
                    }
                }
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_source_outlives_a_failure_is_completed_by_recovery() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK_SIZE);
            let (sender, mut offers, receivers) = form_with_offers(&nodes, &spec).await;
            let (mut given, reader) = source();
            let (mut behind, second) = source();
            let object = pattern(LEN, 3);
            let sent = async {
                let first = sender.send_from(reader, LEN as u64);
                let failed = first.await.unwrap_err();
                let SendError::Failed(failure) = failed else { panic!("{kind}: {failed}") };
                let late = sender.send_from(second, LEN as u64).await.unwrap_err();
                assert!(matches!(late, SendError::NotQueued(_)), "{kind}: {late}");
                let recovered = failure.recover().await.expect("the root recovers").into_sender().expect("the root");
                recovered.close().await.unwrap();
            };
            let received = async {
                behind.write_all(&object).await.unwrap();
                given.write_all(&object[..3 * BLOCK]).await.unwrap();
                let mut reader = accept(&mut offers).await.into_reader();
                assert_eq!(reader.read_u8().await.unwrap(), object[0]);
                nodes[2].clone().shutdown(Shutdown::Abort).await;
                drop(receivers);
                let failure = offers.failed().await;
                assert_eq!(failure.first().node, NodeId(2), "{kind}");
                given.write_all(&object[3 * BLOCK..]).await.unwrap();
                drop(reader);
                let recovery = failure.recover().with_offers().await.expect("the receiver recovers");
                let Recovered::Receiver(mut offers) = recovery.handle else { panic!("it is no root") };
                let mut read = Vec::new();
                accept(&mut offers).await.into_reader().read_to_end(&mut read).await.unwrap();
                assert!(read == object, "{kind}");
                assert!(offers.next_offer().await.is_none());
                offers.close().await.unwrap();
            };
            futures::join!(sent, received);
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sends_from_a_source_that_are_dropped_at_any_poll_do_not_keep_the_next_message() {
    watched(async {
        let nodes = start(Kind::Mem, 3).await;
        for polls in 0..20 {
            let spec = spec_of_all(polls + 1, &nodes, Algorithm::Chain, BLOCK_SIZE);
            let (sender, receivers) = form(&nodes, &spec).await;
            let taken = futures::future::join_all(receivers.into_iter().map(take_all));
            let sent = async {
                let dropped = sender.send_from(Cursor::new(pattern(LEN, 1)), LEN as u64);
                drop(poll_and_drop(dropped, usize::try_from(polls).expect("a small number")).await);
                sender.send("next").await.unwrap();
                sender.close().await.unwrap();
            };
            let (taken, ()) = futures::join!(taken, sent);
            for messages in taken {
                let (last, before) = messages.split_last().expect("the last is sent");
                assert_eq!(last[..], *b"next");
                assert!(before.len() <= 1 && before.iter().all(|message| message[..] == pattern(LEN, 1)));
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_yields_the_whole_message_and_ends_when_it_is_delivered() {
    for kind in Kind::all() {
        for delivery in [Delivery::Immediate, Delivery::Stable] {
            watched(async {
                let nodes = start(kind, 3).await;
                let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK_SIZE).delivery(delivery);
                let spec = spec.check_blocks(true).ring(8, 100);
                let (sender, mut offers, receivers) = form_with_offers(&nodes, &spec).await;
                let taken = futures::future::join_all(receivers.into_iter().map(take_all));
                let lens = [0, 100, 101, BLOCK, LEN];
                let sent = async {
                    for len in lens {
                        sender.send(pattern(len, 1)).await.unwrap();
                    }
                    sender.close().await.unwrap();
                };
                let received = async {
                    for len in lens {
                        let mut reader = accept(&mut offers).await.into_reader();
                        let mut read = Vec::new();
                        reader.read_to_end(&mut read).await.unwrap();
                        assert!(read == pattern(len, 1), "{kind} {delivery:?} {len}");
                        let message = reader.into_message().now_or_never().expect("it is delivered").unwrap();
                        assert!(message[..] == read && message.digest().is_some(), "{kind} {delivery:?} {len}");
                    }
                    assert!(offers.next_offer().await.is_none());
                    offers.close().await.unwrap();
                };
                futures::join!(taken, sent, received);
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_fails_with_the_failure_of_the_group() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK_SIZE).delivery(Delivery::Stable);
        let (sender, mut offers, _) = form_with_offers(&nodes, &spec).await;
        let sent = sender.enqueue(pattern(LEN, 1));
        let mut reader = accept(&mut offers).await.into_reader();
        nodes[0].clone().shutdown(Shutdown::Abort).await;
        let failure = offers.failed().await;
        if let Err(error) = reader.read_to_end(&mut Vec::new()).await {
            let cause = error.get_ref().and_then(|cause| cause.downcast_ref::<GroupFailure>());
            assert_eq!(cause, Some(&failure));
            assert_eq!(reader.into_message().await.unwrap_err(), failure);
        }
        drop(sent);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_goes_up_to_the_total_at_the_root_and_at_a_receiver() {
    for kind in Kind::all() {
        for algorithm in Algorithm::ALL_FLAT {
            watched(async {
                let nodes = start(kind, 4).await;
                let spec = spec_of_all(1, &nodes, algorithm.clone(), BLOCK_SIZE).ring(8, 100);
                let (sender, mut offers, receivers) = form_with_offers(&nodes, &spec).await;
                let taken = futures::future::join_all(receivers.into_iter().map(take_all));
                let watch = |mut progress: rdmc::Progress| async move {
                    let mut seen = 0;
                    while let Some(done) = progress.changed().await {
                        assert!(done > seen && done <= progress.total(), "{seen} {progress:?}");
                        seen = done;
                    }
                    assert_eq!(seen, progress.total());
                };
                let sent = async {
                    for len in [LEN, 100] {
                        let multicast = sender.enqueue(pattern(len, 1));
                        let watched = watch(multicast.progress());
                        let (sent, ()) = futures::join!(multicast, watched);
                        sent.unwrap();
                    }
                    sender.close().await.unwrap();
                };
                let received = async {
                    for len in [LEN, 100] {
                        let arrival = accept(&mut offers).await;
                        let watched = watch(arrival.progress());
                        let (message, ()) = futures::join!(arrival, watched);
                        assert_eq!(message.unwrap().len(), len, "{kind}");
                    }
                    assert!(offers.next_offer().await.is_none());
                    offers.close().await.unwrap();
                };
                futures::join!(taken, sent, received);
            })
            .await;
        }
    }
}
