//! Tests of what survivors learn, and that dropped futures disturb no other member.

use std::time::Duration;

use futures::{FutureExt, StreamExt};
use rdmc::{
    Algorithm, Cluster, Digest, FailureCause, GroupError, GroupId, GroupSpec, MemNetwork, Node, NodeId, Rank,
    SendError, Shutdown, StartError,
};

use crate::cluster::{Kind, form, free_addresses, pattern, poll_and_drop, spec_of_all, start, take_all, watched};

#[test]
fn a_member_that_dies_ends_the_group_with_one_verdict_for_all_survivors() {
    let deaths = [(Algorithm::BinomialPipeline, 3), (Algorithm::Chain, 1), (Algorithm::Circulant, 4)];
    let kinds = Kind::all().into_iter().filter(|&kind| kind != Kind::Mem);
    for (kind, (algorithm, victim)) in kinds.flat_map(|kind| deaths.clone().map(|death| (kind, death))) {
        // The victim has its own runtime. Its end drops the tasks and sockets wherever they are.
        let mortal = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let alive = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let cluster = Cluster::new((0..).zip(free_addresses(5)));
        let spec = GroupSpec::new(1, cluster.nodes()).algorithm(algorithm.clone()).block_size(1000);
        let network = MemNetwork::new();
        let node = |id: u32| {
            let (builder, network) = (Node::builder(NodeId(id), cluster.clone()), network.clone());
            async move { builder.fabric(kind.fabric(&network, id as usize)).start().await }
        };
        let (half, reached_half) = tokio::sync::oneshot::channel();
        let (victims_node, victims_spec) = (node(victim), spec.clone());
        mortal.spawn(async move {
            let node = victims_node.await.unwrap();
            let mut receiver = node.join_group(victims_spec).await.unwrap();
            for _ in 0..3 {
                receiver.next().await.unwrap().unwrap();
            }
            half.send(()).unwrap();
            // Holds the handles while the tasks run, like a process until it is killed.
            std::future::pending::<()>().await;
            drop((node, receiver));
        });
        let verdicts = alive.block_on(watched(async {
            let survivors = (1..5).filter(|&id| id != victim).map(|id| {
                let (node, spec) = (node(id), spec.clone());
                async move {
                    let node = node.await.unwrap();
                    let mut receiver = node.join_group(spec).await.unwrap();
                    while let Some(Ok(_)) = receiver.next().await {}
                    receiver.failed().await
                }
            });
            let root = async {
                let node = node(0).await.unwrap();
                let sender = node.create_group(spec.clone()).await.unwrap();
                let failure = loop {
                    match sender.send(pattern(100_000, 1)).await {
                        Ok(_) => {}
                        Err(SendError::Failed(failure) | SendError::NotQueued(failure)) => break failure,
                        Err(other) => panic!("{other}"),
                    }
                };
                assert_eq!(sender.close().await.unwrap_err(), failure);
                failure
            };
            let kill = async {
                reached_half.await.unwrap();
                mortal.shutdown_background();
            };
            let (mut verdicts, root, ()) = futures::join!(futures::future::join_all(survivors), root, kill);
            verdicts.push(root);
            verdicts
        }));
        for verdict in &verdicts {
            assert_eq!(verdict.failed.len(), 1, "{kind} {algorithm}: {verdict}");
            assert_eq!((verdict.first().member, verdict.first().node), (Rank(victim), NodeId(victim)));
            // All of it is the same, including which member has which message.
            assert_eq!(verdict, &verdicts[0], "{kind} {algorithm}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receiver_that_is_dropped_is_named_by_all_others_and_other_groups_go_on() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 4).await;
            let doomed = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 1000);
            let healthy = spec_of_all(2, &nodes, Algorithm::BinomialPipeline, 1000);
            let (sender, mut receivers) = form(&nodes, &doomed).await;
            let (other_sender, other_receivers) = form(&nodes, &healthy).await;
            drop(receivers.remove(1));
            for receiver in &receivers {
                let failure = receiver.failed().await;
                assert_eq!(
                    (failure.first().member, &failure.first().cause),
                    (Rank(2), &FailureCause::Abandoned),
                    "{kind}"
                );
            }
            assert_eq!(sender.failed().await.first().member, Rank(2));
            assert!(matches!(sender.send("too late").await, Err(SendError::NotQueued(_))));
            let taken = futures::future::join_all(other_receivers.into_iter().map(take_all));
            let sent = async {
                other_sender.send(pattern(10_000, 1)).await.unwrap();
                other_sender.close().await.unwrap();
            };
            let (taken, ()) = futures::join!(taken, sent);
            assert!(taken.iter().all(|messages| messages[0][..] == pattern(10_000, 1)));
        }
    })
    .await;
}

// One thread: the time of both is over in the same turn.
#[tokio::test]
async fn members_that_do_not_reach_each_other_are_named_with_the_reason() {
    watched(async {
        let mut addresses = free_addresses(5);
        let dead = addresses.pop().expect("there are five");
        let cluster = Cluster::new((0..).zip(addresses.clone()));
        // The first receiver opens the connection to the second one, at an address where none listens.
        let without_path =
            Cluster::new((0..).zip([&addresses[0], &addresses[1], &dead, &addresses[3]].map(Clone::clone)));
        let network = MemNetwork::new();
        let spec = GroupSpec::new(1, cluster.nodes()).algorithm(Algorithm::Chain);
        let node = |id: u32, cluster: &Cluster, limit: u64| {
            let builder = Node::builder(NodeId(id), cluster.clone()).fabric(Kind::Tcp.fabric(&network, id as usize));
            builder.connect_limit(Duration::from_secs(limit)).start()
        };
        let root = async { node(0, &cluster, 60).await.unwrap().create_group(spec.clone()).await.map(drop) };
        let member = async { node(3, &cluster, 60).await.unwrap().join_group(spec.clone()).await.map(drop) };
        let pair = futures::future::join(node(1, &without_path, 3), node(2, &cluster, 3));
        let (root, member, (first, second)) = futures::join!(root, member, pair);
        for isolated in [first, second] {
            assert!(matches!(isolated, Err(StartError::Unreachable { .. })), "{isolated:?}");
        }
        for error in [root.unwrap_err(), member.unwrap_err()] {
            let GroupError::Failed(failure) = error else { panic!("{error}") };
            let failed = failure.failed.iter().map(|failed| (failed.member, failed.cause.to_string()));
            let [(Rank(1), first), (Rank(2), second)] = &failed.collect::<Vec<_>>()[..] else { panic!("{failure}") };
            for (told, peer) in [(first, &dead), (second, &addresses[1])] {
                assert!(told.starts_with("could not exchange blocks with another member: no connection to "), "{told}");
                assert!(told.contains(peer) && told.ends_with("(all members must reach each other)"), "{told}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_node_without_a_fabric_does_not_start() {
    let refused = Node::builder(NodeId(0), Cluster::new([(0, "a")])).start().await;
    assert!(matches!(refused, Err(StartError::NoFabric)), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_is_written_with_its_certificate() {
    watched(async {
        let nodes = start(Kind::Mem, 3).await;
        let spec = spec_of_all(7, &nodes, Algorithm::Chain, 1000).check_blocks(true);
        let (sender, mut receivers) = form(&nodes, &spec).await;
        sender.send("abc").await.unwrap();
        for receiver in &mut receivers {
            receiver.next().await.unwrap().unwrap();
        }
        drop(receivers.pop());
        let written = serde_json::to_value(sender.failed().await).unwrap();
        assert_eq!(written["failed"], serde_json::json!([{ "member": 2, "node": 2, "cause": "abandoned" }]));
        assert_eq!((&written["quorum"], &written["certificate"]["group"]), (&true.into(), &7.into()));
        let digest = Digest::of(b"abc", 1000).to_string();
        let message = serde_json::json!({ "number": 0, "size": 3, "digest": digest });
        assert_eq!(written["certificate"]["records"], serde_json::json!([message]));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_root_that_is_dropped_ends_the_group() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 3).await;
            let (sender, receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, 1000)).await;
            sender.send(pattern(5000, 1)).await.unwrap();
            drop(sender);
            for mut receiver in receivers {
                // Messages that arrived before are still delivered.
                let mut last = None;
                while let Some(next) = receiver.next().await {
                    last = Some(next);
                }
                let failure = last.unwrap().unwrap_err();
                assert_eq!(
                    (failure.first().member, &failure.first().cause),
                    (Rank::ROOT, &FailureCause::Abandoned),
                    "{kind}"
                );
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_message_ends_the_group_with_the_reason() {
    watched(async {
        let nodes = start(Kind::Tcp, 3).await;
        let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 1000);
        let (sender, picky, other) = futures::try_join!(
            nodes[0].create_group(spec.clone()),
            nodes[1].join_group(spec.clone()).with_offers(),
            nodes[2].join_group(spec)
        )
        .unwrap();
        let mut picky = picky;
        let refuse = async { picky.next_offer().await.unwrap().unwrap().refuse("no room") };
        // The root may have completed its own part before it learns of the refusal.
        let send = async { drop(sender.send(pattern(50_000, 1)).await) };
        futures::join!(refuse, send);
        let expected = FailureCause::Refused { reason: "no room".to_owned() };
        let failure = other.failed().await;
        assert_eq!(failure.first().cause, expected);
        assert_eq!(sender.close().await.unwrap_err(), failure);
    })
    .await;
}

#[tokio::test]
async fn members_that_disagree_do_not_form_a_group() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let here = GroupSpec::new(1, [NodeId(0), NodeId(1)]).block_size(1000);
        let there = here.clone().block_size(2000);
        let (sender, receiver) = futures::join!(nodes[0].create_group(here), nodes[1].join_group(there));
        for error in [sender.unwrap_err(), receiver.unwrap_err()] {
            let GroupError::Failed(failure) = error else { panic!("{error}") };
            assert_eq!((failure.first().member, &failure.first().cause), (Rank(1), &FailureCause::SpecMismatch));
        }
    })
    .await;
}

#[tokio::test]
async fn a_member_that_does_not_join_is_given_up() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec = spec_of_all(1, &nodes, Algorithm::Chain, 10).formation_limit(Duration::from_millis(50));
        let error = nodes[0].create_group(spec).await.unwrap_err();
        let GroupError::Failed(failure) = error else { panic!("{error}") };
        assert_eq!((failure.first().member, &failure.first().cause), (Rank(1), &FailureCause::NotJoined));
    })
    .await;
}

#[tokio::test]
async fn bad_specifications_are_refused_with_the_reason() {
    let nodes = start(Kind::Mem, 2).await;
    let all = [NodeId(0), NodeId(1)];
    let refused = |spec| nodes[0].create_group(spec).map(Result::unwrap_err);
    assert!(matches!(refused(GroupSpec::new(1, [])).await, GroupError::NotMember { .. }));
    assert!(matches!(refused(GroupSpec::new(1, [NodeId(0); 2])).await, GroupError::DuplicateMember { .. }));
    assert!(matches!(refused(GroupSpec::new(1, [NodeId(0), NodeId(7)])).await, GroupError::UnknownNode { .. }));
    assert!(matches!(refused(GroupSpec::new(1, all).block_size(0)).await, GroupError::BlockSize { .. }));
    assert!(matches!(nodes[0].join_group(GroupSpec::new(1, all)).await.unwrap_err(), GroupError::WrongRole { .. }));
    let alone = || GroupSpec::new(9, [NodeId(0)]);
    nodes[0].create_group(alone()).await.unwrap().close().await.unwrap();
    assert!(matches!(refused(alone()).await, GroupError::GroupIdUsed { .. }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sends_and_receives_dropped_at_any_poll_disturb_nobody() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 4).await;
            let (sender, receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 500)).await;
            let taken = receivers.into_iter().map(|mut receiver| async move {
                let mut sizes = Vec::new();
                let mut polls = 0;
                // Each wait for a message is dropped after some polls; this loses no message.
                loop {
                    polls = (polls + 1) % 7;
                    match poll_and_drop(receiver.next(), polls).await {
                        Some(Some(message)) => {
                            let message = message.unwrap();
                            assert!(message[..] == pattern(message.len(), message.len() as u64), "{kind}");
                            sizes.push(message.len());
                        }
                        Some(None) => break,
                        None => {}
                    }
                }
                receiver.close().await.unwrap();
                sizes
            });
            let sent = async {
                let mut certain = Vec::new();
                for round in 0..60 {
                    let size = 100 + round * 97;
                    if poll_and_drop(sender.send(pattern(size, size as u64)), round % 9).await.is_some() {
                        certain.push(size);
                    }
                }
                sender.send(pattern(7, 7)).await.unwrap();
                certain.push(7);
                sender.close().await.unwrap();
                certain
            };
            let (taken, certain) = futures::join!(futures::future::join_all(taken), sent);
            for sizes in &taken {
                assert_eq!(*sizes, taken[0], "{kind}: every member has the same messages");
                // Sends that were awaited to the end arrive, in order; dropped sends may arrive.
                let mut rest = sizes.iter();
                assert!(certain.iter().all(|size| rest.any(|other| other == size)), "{kind}: {certain:?} in {sizes:?}");
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forming_and_closing_dropped_at_any_poll_hang_nobody() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 3).await;
            for polls in 0..40 {
                let spec = spec_of_all(polls, &nodes, Algorithm::BinomialPipeline, 500);
                let quick = spec.clone().formation_limit(Duration::from_millis(300));
                let joined = nodes[1..].iter().map(|node| node.join_group(quick.clone()));
                let created = poll_and_drop(nodes[0].create_group(spec.clone()), usize::try_from(polls).unwrap());
                let (joined, created) = futures::join!(futures::future::join_all(joined), created);
                let Some(Ok(sender)) = created else {
                    // The root has left: members that had joined by then learn it.
                    for receiver in joined.into_iter().flatten() {
                        receiver.failed().await;
                    }
                    continue;
                };
                let receivers = joined.into_iter().map(|receiver| receiver.unwrap());
                let taken = receivers.map(|mut receiver| async move {
                    while let Some(Ok(_)) = receiver.next().await {}
                    receiver.close().await
                });
                let close = async {
                    sender.send("all").await.unwrap();
                    poll_and_drop(sender.close(), usize::try_from(polls % 5).unwrap()).await
                };
                // The group closed or was abandoned. No member waits for ever, and all outcomes agree.
                let (outcomes, closed) = futures::join!(futures::future::join_all(taken), close);
                if let Some(outcome) = closed {
                    assert!(outcomes.iter().all(|other| other.is_ok() == outcome.is_ok()), "{kind} {polls}");
                }
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offers_and_arrivals_dropped_at_any_poll_lose_no_memory() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 3).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 500);
            let joined = nodes[1..].iter().map(|node| node.join_group(spec.clone()).with_offers());
            let (sender, joined) =
                futures::join!(nodes[0].create_group(spec.clone()), futures::future::join_all(joined));
            let sender = sender.unwrap();
            let taken = joined.into_iter().zip(&nodes[1..]).map(|(receiver, node)| async move {
                let mut receiver = receiver.unwrap();
                let (mut polls, mut sizes) = (0, 0);
                loop {
                    polls = (polls + 1) % 7;
                    let offer = match poll_and_drop(receiver.next_offer(), polls).await {
                        Some(Some(offer)) => offer.unwrap(),
                        Some(None) => break,
                        None => continue,
                    };
                    let size = usize::try_from(offer.size()).unwrap();
                    // A dropped wait for memory lends none.
                    let memory = match poll_and_drop(node.allocate(size), polls).await {
                        Some(memory) => memory,
                        None => node.allocate(size).await,
                    };
                    // A dropped arrival is still received and relayed.
                    if let Some(message) = poll_and_drop(offer.accept(memory.unwrap()), polls).await {
                        assert!(message.unwrap()[..] == pattern(size, size as u64), "{kind}");
                    }
                    sizes += size;
                }
                assert!(receiver.close().await.unwrap().is_complete());
                sizes
            });
            let sent = async {
                let sizes = (0..40).map(|round| round * 83);
                for size in sizes.clone() {
                    sender.send(pattern(size, size as u64)).await.unwrap();
                }
                sender.close().await.unwrap();
                sizes.sum()
            };
            let (taken, sent): (Vec<usize>, usize) = futures::join!(futures::future::join_all(taken), sent);
            assert!(taken.iter().all(|taken| *taken == sent), "{kind}");
            // The last relays release their blocks when they are acknowledged.
            for node in &nodes {
                while node.stats().pool_bytes_lent > 0 {
                    tokio::task::yield_now().await;
                }
            }
        }
    })
    .await;
}

#[test]
fn handles_and_futures_are_send_and_handles_are_sync() {
    fn sync<T: Send + Sync>() {}
    fn send<T: Send>() {}
    sync::<Node>();
    sync::<rdmc::Sender>();
    sync::<rdmc::Receiver>();
    sync::<rdmc::OfferReceiver>();
    sync::<rdmc::Message>();
    send::<rdmc::Multicast>();
    send::<rdmc::Delivery>();
    send::<rdmc::Offer>();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_drains_waits_for_its_groups_and_lets_nobody_in() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 3).await;
            let (sender, receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, 1000)).await;
            let draining = tokio::spawn(nodes[1].clone().shutdown(Shutdown::Drain { limit: Duration::from_secs(60) }));
            let alone = |id| nodes[1].create_group(GroupSpec::new(id, [nodes[1].id()]));
            let mut id = 100;
            while !matches!(alone(id).await, Err(GroupError::ShuttingDown)) {
                id += 1;
            }
            sender.send(pattern(50_000, 1)).await.unwrap();
            let taken = futures::future::join_all(receivers.into_iter().map(take_all));
            let (taken, closed) = futures::join!(taken, sender.close());
            assert!(taken.iter().all(|messages| messages[0][..] == pattern(50_000, 1)), "{kind}");
            assert!(closed.unwrap().is_complete());
            assert_eq!(draining.await.unwrap(), [], "{kind}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_aborts_is_named_by_its_groups() {
    watched(async {
        for kind in Kind::all() {
            let nodes = start(kind, 3).await;
            let (sender, receivers) = form(&nodes, &spec_of_all(7, &nodes, Algorithm::BinomialPipeline, 1000)).await;
            let cut_short = nodes[2].clone().shutdown(Shutdown::Abort).await;
            assert_eq!(cut_short, [GroupId(7)], "{kind}");
            let failure = sender.failed().await;
            assert_eq!((failure.first().member, &failure.first().cause), (Rank(2), &FailureCause::Abandoned), "{kind}");
            for receiver in receivers {
                assert_eq!(receiver.failed().await, failure, "{kind}");
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_after_many_messages_fits_into_a_log_line() {
    watched(async {
        let nodes = start(Kind::Mem, 3).await;
        let (sender, mut receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, 1000)).await;
        let refuses = receivers.remove(1);
        let taken = take_until_failure(receivers.remove(0));
        let sent = async {
            let mut refuses = refuses;
            for number in 0..1000 {
                let sent = sender.send(pattern(10, number));
                futures::join!(sent, refuses.next()).0.unwrap();
            }
            refuses.refuse("the disk is full");
            sender.failed().await
        };
        let (failure, ()) = futures::join!(sent, taken);
        assert_eq!(failure.certificate.records().len(), 1000);
        let text = format!("{failure:?}");
        assert!(text.len() < 1200 && text.contains("the disk is full") && text.contains("records: 1000 ["), "{text}");
    })
    .await;
}

async fn take_until_failure(mut receiver: rdmc::Receiver) {
    while let Some(Ok(_)) = receiver.next().await {}
}
