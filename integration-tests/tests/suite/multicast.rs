//! Tests of multicasts to all members, on every fabric.

use bytes::Bytes;
use futures::StreamExt;
use rdmc::{Algorithm, GroupSpec, Memory, NodeId, Racks, Rank, Spine};

use crate::cluster::{Kind, form, pattern, spec_of_all, start, take_all, watched};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_algorithm_delivers_every_size_to_every_member() {
    const BLOCK: u32 = 1 << 10;
    let sizes = [0, 1, BLOCK as usize - 1, BLOCK as usize, BLOCK as usize + 1, 10 * BLOCK as usize + 1];
    let hybrid = |sizes: &[u32], spine| {
        Algorithm::Hybrid(rdmc::Hybrid::new(Racks::from_sizes(sizes).expect("racks of members"), spine))
    };
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 8).await;
            let mut id = 0;
            for count in [1, 2, 3, 5, 8] {
                let mut algorithms = Algorithm::ALL_FLAT.to_vec();
                if count == 8 {
                    algorithms.push(hybrid(&[3, 1, 4], Spine::Chain));
                    algorithms.push(hybrid(&[4, 4], Spine::BinomialPipeline));
                    algorithms.push(hybrid(&[3, 1, 4], Spine::Cascade));
                    algorithms.push(hybrid(&[3, 1, 4], Spine::TwoTree));
                }
                for algorithm in algorithms {
                    id += 1;
                    let spec = spec_of_all(id, &nodes[..count], algorithm.clone(), BLOCK);
                    let (sender, receivers) = form(&nodes, &spec).await;
                    let taken = futures::future::join_all(receivers.into_iter().map(take_all));
                    let sent = async {
                        for (size, seed) in sizes.into_iter().zip(1..) {
                            sender.send(pattern(size, seed)).await.unwrap();
                        }
                        sender.close().await.unwrap();
                    };
                    let (taken, ()) = futures::join!(taken, sent);
                    assert_eq!(taken.len(), count - 1);
                    for messages in taken {
                        assert_eq!(messages.len(), sizes.len(), "{kind} {algorithm} n={count}");
                        for ((message, size), seed) in messages.iter().zip(sizes).zip(1..) {
                            assert!(message[..] == pattern(size, seed), "{kind} {algorithm} n={count} size={size}");
                        }
                    }
                }
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_of_a_payload_arrive_as_one_message() {
    watched(async {
        let nodes = start(Kind::all()[0], 3).await;
        let (sender, receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 1000)).await;
        let (header, body) = (Bytes::from_static(b"name:"), Bytes::from(pattern(5000, 1)));
        let taken = futures::future::join_all(receivers.into_iter().map(take_all));
        let sent = async {
            sender.send([header.clone(), body.clone()]).await.unwrap();
            sender.send(vec![header.clone(), Bytes::new(), body.clone(), header.clone()]).await.unwrap();
            sender.send(vec![Bytes::new(), body.clone()]).await.unwrap();
            sender.send(Vec::<Bytes>::new()).await.unwrap();
            sender.close().await.unwrap();
        };
        let (taken, ()) = futures::join!(taken, sent);
        let expected = [&[&header[..], &body].concat(), &[&header[..], &body, &header].concat(), &body[..], &[]];
        for messages in taken {
            assert_eq!(messages.len(), expected.len());
            for (message, expected) in messages.iter().zip(expected) {
                assert!(message[..] == *expected);
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_too_many_blocks_is_refused_and_the_next_one_arrives() {
    watched(async {
        let nodes = start(Kind::all()[0], 2).await;
        let spec = spec_of_all(1, &nodes, Algorithm::Chain, 2);
        let (sender, mut receivers) = form(&nodes, &spec).await;
        let most = GroupSpec::BLOCKS_MAX as usize * 2;
        let refused = sender.send(vec![0; most + 1]).await.unwrap_err();
        assert_eq!(
            refused.to_string(),
            "2097153 bytes are more than 1048576 blocks of 2 bytes; choose blocks of 3 bytes or more"
        );
        let taken = take_all(receivers.remove(0));
        let sent = async {
            sender.send("short").await.unwrap();
            sender.close().await.unwrap();
        };
        let (taken, ()) = futures::join!(taken, sent);
        assert_eq!(taken.len(), 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_than_65535_blocks_arrive() {
    const BLOCKS: usize = 70_000;
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 16);
            let (sender, receivers) = form(&nodes, &spec).await;
            let object = pattern(BLOCKS * 16 - 5, 1);
            let taken = futures::future::join_all(receivers.into_iter().map(take_all));
            let sent = async {
                sender.send(object.clone()).await.unwrap();
                sender.close().await.unwrap();
            };
            let (taken, ()) = futures::join!(taken, sent);
            assert!(taken.iter().all(|messages| messages.len() == 1 && messages[0][..] == object), "{kind}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "moves more than 4 GiB; run by name"]
async fn an_object_above_4_gib_arrives() {
    let len = (4usize << 30) + 12_345;
    let nodes = start(Kind::Tcp, 2).await;
    let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 4 << 20);
    let root = nodes[0].create_group(spec.clone());
    let (sender, receiver) = futures::join!(root, nodes[1].join_group(spec).with_offers());
    let (sender, mut receiver) = (sender.unwrap(), receiver.unwrap());
    let object = Bytes::from(pattern(len, 9));
    let digest = blake3::hash(&object);
    let received = async {
        let offer = receiver.next_offer().await.unwrap().unwrap();
        assert_eq!(offer.size(), len as u64);
        let memory = nodes[1].register(Memory::anonymous(len).unwrap()).unwrap().into_mut().unwrap();
        let message = offer.accept(memory).await.unwrap();
        assert_eq!(blake3::hash(&message), digest);
        receiver.close().await.unwrap();
    };
    let sent = async {
        sender.send(object.clone()).await.unwrap();
        sender.close().await.unwrap();
    };
    futures::join!(received, sent);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_sends_arrive_in_order() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 5).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 1000);
            let (sender, receivers) = form(&nodes, &spec).await;
            let sizes: Vec<usize> = (0..60).map(|i| (i * 977) % 7000).collect();
            let sent = async {
                let sends = sizes.iter().zip(0..).map(|(&size, seed)| sender.send(pattern(size, seed)));
                let mut completed = 0;
                let mut sends: futures::stream::FuturesUnordered<_> =
                    sends.enumerate().map(|(i, send)| async move { (i, send.await) }).collect();
                while let Some((i, outcome)) = sends.next().await {
                    outcome.unwrap();
                    assert_eq!(i, completed, "sends complete in the order in which they were started");
                    completed += 1;
                }
                sender.close().await.unwrap();
            };
            let taken = futures::future::join_all(receivers.into_iter().map(take_all));
            let (taken, ()) = futures::join!(taken, sent);
            for messages in taken {
                for ((message, &size), seed) in messages.iter().zip(&sizes).zip(0..) {
                    assert_eq!(message.number(), seed);
                    assert!(message[..] == pattern(size, seed), "{kind}: message {seed} of {size} bytes");
                }
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_groups_of_the_same_nodes_work_at_once() {
    const GROUPS: u64 = 24;
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 4).await;
            let work = (1..=GROUPS).map(|id| {
                let nodes = &nodes;
                async move {
                    // All groups overlap. Each has another root, another order and another algorithm.
                    let count = 2 + usize::try_from(id % 3).unwrap();
                    let members =
                        (0..count).map(|i| NodeId(u32::try_from((i + usize::try_from(id).unwrap()) % 4).unwrap()));
                    let algorithm = Algorithm::ALL_FLAT[usize::try_from(id % 5).unwrap()].clone();
                    let spec = GroupSpec::new(id, members).algorithm(algorithm).block_size(512);
                    let (sender, receivers) = form(nodes, &spec).await;
                    let sent = async {
                        for message in 0..5 {
                            sender.send(pattern(3000, id * 100 + message)).await.unwrap();
                        }
                        sender.close().await.unwrap();
                    };
                    let taken = futures::future::join_all(receivers.into_iter().map(take_all));
                    let (taken, ()) = futures::join!(taken, sent);
                    for messages in taken {
                        assert_eq!(messages.len(), 5);
                        for (message, number) in messages.iter().zip(0..) {
                            assert!(message[..] == pattern(3000, id * 100 + number));
                        }
                    }
                }
            });
            futures::future::join_all(work).await;
            for node in &nodes {
                assert_eq!(node.stats().groups_failed, 0, "{kind}");
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_arrive_in_memory_that_was_provided() {
    watched(async {
        for kind in Kind::all() {
            for algorithm in [Algorithm::BinomialPipeline, Algorithm::TwoTree] {
                let nodes = start(kind, 3).await;
                let spec = spec_of_all(1, &nodes, algorithm.clone(), 1000);
                let root = nodes[0].create_group(spec.clone());
                let joining = nodes[1..].iter().map(|node| node.join_group(spec.clone()).with_offers());
                let (sender, receivers) = futures::join!(root, futures::future::try_join_all(joining));
                let (sender, receivers) = (sender.unwrap(), receivers.unwrap());
                // The memory is shorter, as long, and longer than the message; the last one has none.
                let sizes = [
                    (5000, 4000),
                    (25_000, 25_000),
                    (4321, 4321),
                    (7, 7),
                    (3000, 3001),
                    (8, 8),
                    (2500, 2500),
                    (900, 0),
                ];
                let received = receivers.into_iter().zip(&nodes[1..]).map(async |(mut receiver, node)| {
                    let memory = |len| node.register(Memory::anonymous(len).unwrap()).unwrap().into_mut().unwrap();
                    for (number, (_, provided)) in (0..).zip(sizes).take(7) {
                        receiver.provide(number, memory(provided));
                    }
                    for (number, (size, provided)) in (0..).zip(sizes) {
                        let offer = receiver.next_offer().await.unwrap().unwrap();
                        assert_eq!((offer.number(), offer.size()), (number, size as u64));
                        let delivery = match provided == size {
                            // The application may still prefer other memory.
                            true if number == 3 => offer.accept(memory(size)),
                            true => offer.stay().expect("it has memory"),
                            false => offer.stay().expect_err("it has no memory").accept(memory(size)),
                        };
                        let message = delivery.await.unwrap();
                        assert!(message[..] == pattern(size, number), "{kind} size={size}");
                    }
                    receiver.close().await.unwrap();
                });
                let sent = async {
                    for (seed, (size, _)) in (0..).zip(sizes) {
                        sender.send(pattern(size, seed)).await.unwrap();
                    }
                    sender.close().await.unwrap();
                };
                futures::join!(futures::future::join_all(received), sent);
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_is_received_into_memory_of_the_application() {
    watched(async {
        for kind in Kind::all() {
            for size in [0, 1, 1000, 1001, 25_000] {
                let nodes = start(kind, 2).await;
                let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 1000);
                let root = nodes[0].create_group(spec.clone());
                let (sender, receiver) = futures::join!(root, nodes[1].join_group(spec).with_offers());
                let (sender, mut receiver) = (sender.unwrap(), receiver.unwrap());
                let received = async {
                    let offer = receiver.next_offer().await.unwrap().unwrap();
                    assert_eq!(offer.size(), size as u64);
                    if kind == Kind::Verbs {
                        // A device does not write to files.
                        let memory = nodes[1].register(Memory::anonymous(size).unwrap()).unwrap().into_mut().unwrap();
                        assert!(offer.accept(memory).await.unwrap()[..] == pattern(size, 3), "{kind} size={size}");
                        receiver.close().await.unwrap();
                        return;
                    }
                    let file = tempfile::tempfile().unwrap();
                    file.set_len(offer.size()).unwrap();
                    // SAFETY: the file has no name, and is read only after the mapping is gone.
                    let memory = unsafe { Memory::map_file_mut(&file, size) }.unwrap();
                    let memory = nodes[1].register(memory).unwrap().into_mut().unwrap();
                    drop(offer.accept(memory).await.unwrap());
                    receiver.close().await.unwrap();
                    let mut bytes = Vec::new();
                    std::io::Read::read_to_end(&mut &file, &mut bytes).unwrap();
                    assert!(bytes == pattern(size, 3), "{kind} size={size}");
                };
                let sent = async {
                    sender.send(pattern(size, 3)).await.unwrap();
                    sender.close().await.unwrap();
                };
                futures::join!(received, sent);
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pool_memory_is_sent_and_comes_back() {
    watched(async {
        let nodes = start(Kind::Mem, 3).await;
        let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 4096);
        let (sender, receivers) = form(&nodes, &spec).await;
        let taken = futures::future::join_all(receivers.into_iter().map(take_all));
        let sent = async {
            for seed in 0..20 {
                let mut memory = nodes[0].allocate(50_000).await.unwrap();
                memory.copy_from_slice(&pattern(50_000, seed));
                sender.send(memory).await.unwrap();
            }
            sender.close().await.unwrap();
        };
        let (taken, ()) = futures::join!(taken, sent);
        assert!(taken.iter().all(|messages| messages[19][..] == pattern(50_000, 19)));
        drop(taken);
        for node in &nodes {
            // The group's last staging block returns when its connections have ended.
            while node.stats().pool_bytes_lent > 0 {
                tokio::task::yield_now().await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_message_that_is_not_taken_holds_the_root_back() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 1000);
        let (sender, mut receivers) = form(&nodes, &spec).await;
        let mut receiver = receivers.pop().unwrap();
        let mut sends = futures::stream::iter(0..100).map(|seed| sender.send(pattern(5000, seed))).buffered(100);
        let mut completed = 0;
        // The receiver takes nothing, so the root stops long before the hundredth message.
        while tokio::time::timeout(std::time::Duration::from_millis(200), sends.next()).await.is_ok() {
            completed += 1;
        }
        assert!((1..20).contains(&completed), "{completed} messages were sent although none was taken");
        let taken = async {
            for seed in 0..100 {
                assert!(receiver.next().await.unwrap().unwrap()[..] == pattern(5000, seed));
            }
        };
        futures::join!(taken, async { while sends.next().await.is_some() {} });
        drop(sends);
        futures::try_join!(sender.close(), receiver.close()).unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_group_of_one_sends_to_nobody() {
    let nodes = start(Kind::Tcp, 1).await;
    let sender = nodes[0].create_group(spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 10)).await.unwrap();
    sender.send("nobody hears this").await.unwrap();
    assert_eq!(sender.stats().messages, 1);
    sender.close().await.unwrap();
    assert!(Rank::ROOT.is_root());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queued_messages_stay_and_clones_of_a_sender_share_its_group() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let (sender, receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, 1000)).await;
            let taken = futures::future::join_all(receivers.into_iter().map(take_all));
            let sent = async {
                let clone = sender.clone();
                let first = sender.enqueue(pattern(10, 0));
                drop(clone.enqueue(pattern(5000, 1)));
                let third = clone.send(pattern(10, 2));
                drop(sender);
                assert_eq!(third.await.unwrap().number(), 2, "{kind}");
                assert_eq!(first.await.unwrap().number(), 0, "{kind}");
                let closing = clone.clone();
                closing.close().await.unwrap();
                assert!(matches!(clone.send("late").await, Err(rdmc::SendError::Closed)), "{kind}");
            };
            let (taken, ()) = futures::join!(taken, sent);
            for messages in taken {
                assert!(messages.iter().map(|message| message.len()).eq([10, 5000, 10]), "{kind}");
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_offer_is_accepted_into_a_vec() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 2).await;
            let spec = spec_of_all(1, &nodes, Algorithm::Chain, 1000);
            let joined = futures::future::try_join(
                nodes[0].create_group(spec.clone()),
                nodes[1].join_group(spec.clone()).with_offers(),
            );
            let (sender, mut offers) = joined.await.unwrap();
            let received = async {
                let offer = offers.next_offer().await.unwrap().unwrap();
                let memory = vec![0; usize::try_from(offer.size()).unwrap()];
                let message = offer.accept_into(memory).unwrap().await.unwrap();
                assert!(message[..] == pattern(12_345, 1), "{kind}");
                let offer = offers.next_offer().await.unwrap().unwrap();
                let refused = offer.accept_into(Bytes::from_static(b"read only")).unwrap_err();
                assert!(matches!(refused, rdmc::FabricError::Memory { len: 9, .. }), "{kind}: {refused}");
            };
            let sent = async {
                sender.send(pattern(12_345, 1)).await.unwrap();
                sender.send(pattern(9, 2)).await
            };
            let ((), sent) = futures::join!(received, sent);
            assert!(sent.is_err() || sender.failed().await.first().node == NodeId(1), "{kind}");
        })
        .await;
    }
}
