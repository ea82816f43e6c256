//! Tests that survivors of a failure complete interrupted messages from the blocks that they hold between them.

use futures::StreamExt;
use rdmc::{
    Algorithm, Certificate, GroupError, GroupFailure, GroupSpec, LostMessage, Message, Node, OfferReceiver, Rank,
    Receiver, Recovered, Recovery, RecoveryError, SendError, Sender, Shutdown,
};

use crate::cluster::{Kind, form, pattern, spec_of_all, start, watched};

const MESSAGE_LEN: usize = 150_000;
const BLOCK_SIZE: u32 = 1000;

fn message(number: u64) -> Vec<u8> {
    pattern(MESSAGE_LEN, number + 1)
}

/// Recovers from a failure, and from those that follow.
pub(crate) async fn go_on(mut failure: GroupFailure) -> Recovery {
    loop {
        match failure.recover().await {
            Ok(recovery) => return recovery,
            Err(RecoveryError::Group(GroupError::Failed(next))) => failure = next,
            Err(other) => panic!("{other}"),
        }
    }
}

/// Sends `count` messages across failures, each once, and closes.
pub(crate) async fn send_all(mut sender: Sender, count: u64) -> Certificate {
    let mut next = 0;
    loop {
        let failure = match send_from(&sender, &mut next, count).await {
            Ok(()) => match sender.close().await {
                Ok(certificate) => return certificate,
                Err(failure) => failure,
            },
            Err(failure) => failure,
        };
        sender = go_on(failure).await.into_sender().expect("the root goes on as the root");
    }
}

/// Sends messages from `next` on. Afterwards `next` is the first message that was not queued.
async fn send_from(sender: &Sender, next: &mut u64, count: u64) -> Result<(), GroupFailure> {
    let mut sends: futures::stream::FuturesOrdered<_> =
        (*next..count).map(|number| sender.send(message(number))).collect();
    let mut failed = None;
    while let Some(sent) = sends.next().await {
        match sent {
            Ok(_) => *next += 1,
            Err(SendError::Failed(failure)) => {
                *next += 1;
                failed = Some(failure);
            }
            Err(SendError::NotQueued(failure)) => failed = Some(failure),
            Err(other) => panic!("{other}"),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// The messages of a member until the last group was closed.
pub(crate) struct Given {
    pub(crate) messages: Vec<Message>,
    lost: Vec<LostMessage>,
    certificate: Certificate,
}

/// Receives messages across failures, until a group is closed.
pub(crate) async fn take_over_failures(mut receiver: Receiver) -> Given {
    let (mut messages, mut lost) = (Vec::new(), Vec::new());
    loop {
        let failure = loop {
            match receiver.next().await {
                Some(Ok(message)) => messages.push(message),
                Some(Err(failure)) => break failure,
                None => match receiver.close().await {
                    Ok(certificate) => return Given { messages, lost, certificate },
                    Err(failure) => break failure,
                },
            }
        };
        let recovery = go_on(failure).await;
        lost.clone_from(&recovery.lost);
        receiver = recovery.into_receiver().expect("only the root gets a sender");
    }
}

/// Checks that a member received all messages, once and in order.
pub(crate) fn check(given: &Given, count: u64, context: &str) {
    let which = |got: &Message| (0..count).find(|number| got[..] == message(*number));
    let got: Vec<_> = given.messages.iter().map(|got| (got.number(), which(got))).collect();
    let due: Vec<_> = (0..count).map(|number| (number, Some(number))).collect();
    assert_eq!(got, due, "{context}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survivors_complete_what_a_receiver_interrupted() {
    let algorithms = Algorithm::ALL_FLAT.into_iter().map(|algorithm| (Kind::Mem, algorithm));
    let others = Kind::all().into_iter().filter(|kind| *kind != Kind::Mem);
    for (kind, algorithm) in algorithms.chain(others.map(|kind| (kind, Algorithm::BinomialPipeline))) {
        watched(async {
            let nodes = start(kind, 6).await;
            let (sender, mut receivers) = form(&nodes, &spec_of_all(1, &nodes, algorithm.clone(), BLOCK_SIZE)).await;
            let mut victim = receivers.remove(1);
            let dies = async {
                victim.next().await.expect("a message").expect("no failure");
                drop(victim);
            };
            let taken = futures::future::join_all(receivers.into_iter().map(take_over_failures));
            let (certificate, taken, ()) = futures::join!(send_all(sender, 30), taken, dies);
            let context = format!("{kind} {algorithm}");
            for given in &taken {
                check(given, 30, &context);
                assert_eq!(given.certificate, certificate, "{context}");
                assert!(given.lost.is_empty(), "{context}");
            }
            assert!(certificate.is_complete() && certificate.messages() == 30, "{context}: {certificate}");
            assert_eq!(certificate.members().len(), 5, "{context}");
            // Blocks that had arrived did not travel again.
            for node in [1, 3, 4, 5].map(|at: usize| &nodes[at]) {
                let received = node.stats().bytes_received;
                assert!(received <= 30 * MESSAGE_LEN as u64 * 105 / 100, "{context}: {received}");
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survivors_of_the_root_have_what_any_of_them_has() {
    for kind in Kind::all() {
        for algorithm in [Algorithm::BinomialPipeline, Algorithm::Chain, Algorithm::Circulant] {
            watched(async {
                let nodes = start(kind, 5).await;
                let spec = spec_of_all(1, &nodes, algorithm.clone(), BLOCK_SIZE);
                let (sender, mut receivers) = form(&nodes, &spec).await;
                let mut first = receivers.remove(0);
                let (told, tells) = tokio::sync::oneshot::channel();
                let first = async move {
                    let message = first.next().await.expect("a message").expect("no failure");
                    told.send(()).expect("the root waits for it");
                    let mut given = take_over_failures(first).await;
                    given.messages.insert(0, message);
                    given
                };
                let root = async {
                    let sends = futures::future::join_all((0..20).map(|number| sender.send(message(number))));
                    let dies = async {
                        tells.await.expect("a member tells");
                        nodes[0].clone().shutdown(Shutdown::Abort).await;
                    };
                    futures::join!(sends, dies);
                };
                let others = futures::future::join_all(receivers.into_iter().map(take_over_failures));
                let (first, mut given, ()) = futures::join!(first, others, root);
                given.push(first);
                let context = format!("{kind} {algorithm}");
                let count = given[0].messages.len() as u64;
                assert!(count > 0, "{context}");
                for one in &given {
                    check(one, count, &context);
                    assert_eq!(one.lost, given[0].lost, "{context}");
                    assert_eq!(one.certificate, given[0].certificate, "{context}");
                }
                if let Some(lost) = given[0].lost.first() {
                    assert_eq!(lost.number, count, "{context}");
                    assert_ne!(lost.blocks_missing, Some(0), "{context}");
                }
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recovery_that_fails_is_recovered_from() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 6).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK_SIZE);
            let (sender, mut receivers) = form(&nodes, &spec).await;
            let mut first = receivers.remove(4);
            let second = receivers.remove(1);
            let first_dies = async {
                first.next().await.expect("a message").expect("no failure");
                drop(first);
            };
            // This happens while the others form the group of the survivors.
            let second_dies = async {
                second.failed().await;
                nodes[2].clone().shutdown(Shutdown::Abort).await;
            };
            let taken = futures::future::join_all(receivers.into_iter().map(take_over_failures));
            let (certificate, taken, ..) = futures::join!(send_all(sender, 20), taken, first_dies, second_dies);
            for given in &taken {
                check(given, 20, &kind.to_string());
            }
            assert_eq!(certificate.members().len(), 4, "{kind}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survivors_of_the_root_and_of_another_have_the_same() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 6).await;
            let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, BLOCK_SIZE);
            let (sender, mut receivers) = form(&nodes, &spec).await;
            let second = receivers.remove(2);
            let root = async {
                let sends = futures::future::join_all((0..12).map(|number| sender.send(message(number))));
                let dies = async {
                    while nodes[5].stats().messages == 0 {
                        tokio::task::yield_now().await;
                    }
                    nodes[0].clone().shutdown(Shutdown::Abort).await;
                };
                futures::join!(sends, dies);
            };
            // Not the first of the survivors, so that no member takes it for the root.
            let second_dies = async {
                second.failed().await;
                nodes[3].clone().shutdown(Shutdown::Abort).await;
            };
            let others = futures::future::join_all(receivers.into_iter().map(take_over_failures));
            let (given, (), ()) = futures::join!(others, root, second_dies);
            let count = given[0].messages.len() as u64;
            assert!(count > 0, "{kind}");
            for one in &given {
                check(one, count, &kind.to_string());
                assert_eq!((&one.lost, &one.certificate), (&given[0].lost, &given[0].certificate), "{kind}");
            }
        })
        .await;
    }
}

/// Receives messages into its own memory, and stays with that memory where it can. Returns how often it stayed.
async fn take_with_offers(mut receiver: OfferReceiver, node: &Node) -> (Vec<Message>, u32) {
    let (mut messages, mut stayed) = (Vec::new(), 0);
    loop {
        let failure = loop {
            let offer = match receiver.next_offer().await {
                Some(Ok(offer)) => offer,
                Some(Err(failure)) => break failure,
                None => match receiver.close().await {
                    Ok(_) => return (messages, stayed),
                    Err(failure) => break failure,
                },
            };
            let delivery = match offer.stay() {
                Ok(delivery) => {
                    stayed += 1;
                    delivery
                }
                Err(offer) => {
                    let memory = node.allocate(usize::try_from(offer.size()).expect("it is short")).await;
                    offer.accept(memory.expect("the pool has room"))
                }
            };
            match delivery.await {
                Ok(message) => messages.push(message),
                Err(failure) => break failure,
            }
        };
        let recovery = failure.recover().with_offers().await.expect("one member fails");
        let Recovered::Receiver(next) = recovery.handle else { panic!("only the root gets a sender") };
        receiver = next;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_goes_on_in_the_memory_that_the_application_gave() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 3).await;
            let spec = spec_of_all(1, &nodes, Algorithm::Sequential, BLOCK_SIZE);
            let (sender, offers, victim) = futures::try_join!(
                nodes[0].create_group(spec.clone()),
                nodes[1].join_group(spec.clone()).with_offers(),
                nodes[2].join_group(spec).with_offers(),
            )
            .expect("the group forms");
            let long = pattern(3_000_000, 9);
            let dies = async {
                // Dies as soon as bytes have arrived at the other receiver.
                while nodes[1].stats().bytes_received == 0 {
                    tokio::task::yield_now().await;
                }
                drop(victim);
            };
            let sends = async {
                let failure = match sender.send(long.clone()).await {
                    Err(SendError::Failed(failure)) => failure,
                    Ok(_) => sender.failed().await,
                    Err(other) => panic!("{other}"),
                };
                let sender = go_on(failure).await.into_sender().expect("the root goes on as the root");
                sender.send("more").await.expect("nobody fails any more");
                sender.close().await.expect("nobody fails any more");
            };
            let (taken, (), ()) = futures::join!(take_with_offers(offers, &nodes[1]), sends, dies);
            let (messages, stayed) = taken;
            assert_eq!(messages.len(), 2, "{kind}");
            assert!(messages[0][..] == long[..] && messages[1][..] == *b"more", "{kind}");
            assert!(stayed <= 1, "{kind}: {stayed}");
            let received = nodes[1].stats().bytes_received;
            assert!(received <= 3_000_004 * 105 / 100, "{kind}: {received}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_cannot_go_on_is_told_why() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        // Of two members, the root goes on alone.
        let (sender, mut receivers) = form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, BLOCK_SIZE)).await;
        drop(receivers.remove(0));
        let failure = sender.failed().await;
        let alone = failure.recover().await.expect("the root goes on").into_sender().expect("it is the root");
        assert!(matches!(failure.recover().await, Err(RecoveryError::Taken)));
        alone.send(message(0)).await.expect("nobody is there who could fail");
        assert_eq!(alone.close().await.expect("nobody is there who could fail").messages(), 1);

        // A member that the failure names does not go on.
        let nodes = start(Kind::Mem, 3).await;
        let (_sender, mut receivers) = form(&nodes, &spec_of_all(2, &nodes, Algorithm::Chain, BLOCK_SIZE)).await;
        let refusing = receivers.remove(0);
        let (failure, ()) = futures::join!(receivers[0].failed(), async { refusing.refuse("not today") });
        assert_eq!(failure.first().member, Rank(1));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_formed_without_recovery_keeps_nothing() {
    watched(async {
        let nodes = start(Kind::Mem, 2).await;
        let spec: GroupSpec = spec_of_all(1, &nodes, Algorithm::Chain, BLOCK_SIZE).recoverable(false);
        let (sender, mut receivers) = form(&nodes, &spec).await;
        sender.send(message(0)).await.expect("nobody fails yet");
        let mut receiver = receivers.remove(0);
        drop(receiver.next().await.expect("a message").expect("no failure"));
        // If messages were kept after they are taken and dropped, this would wait for ever.
        while nodes[1].stats().pool_bytes_lent >= MESSAGE_LEN as u64 {
            tokio::task::yield_now().await;
        }
        drop(receiver);
        let failure = sender.failed().await;
        assert_eq!(failure.first().member, Rank(1));
        assert!(matches!(failure.recover().await, Err(RecoveryError::Off)));
    })
    .await;
}
