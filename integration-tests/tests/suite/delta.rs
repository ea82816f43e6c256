//! Tests of members that have parts of a message: only the blocks that they lack travel, from any member that has them.

use futures::StreamExt;
use rdmc::{Algorithm, Certificate, GroupFailure, GroupSpec, Memory, Message, Node, NodeId, OfferReceiver};

use crate::cluster::{Kind, form, pattern, spec_of_all, start, take_all, watched};
use crate::recovery::{check, send_all, take_over_failures};

const BLOCK_SIZE: usize = 1000;
/// Length of a message: 150 blocks, of which the last is short.
const MESSAGE_LEN: usize = 149_500;

fn message() -> Vec<u8> {
    pattern(MESSAGE_LEN, 77)
}

fn parts(blocks: impl IntoIterator<Item = usize>) -> Vec<u8> {
    parts_of(&message(), blocks)
}

/// Returns memory with the given blocks in their places and other bytes in the rest.
fn parts_of(whole: &[u8], blocks: impl IntoIterator<Item = usize>) -> Vec<u8> {
    let mut memory = vec![0xa5; whole.len()];
    for block in blocks {
        let place = block * BLOCK_SIZE..whole.len().min((block + 1) * BLOCK_SIZE);
        memory[place.clone()].copy_from_slice(&whole[place]);
    }
    memory
}

fn lacking(memory: &[u8]) -> usize {
    let (whole, have) = (message(), memory.chunks(BLOCK_SIZE));
    whole.chunks(BLOCK_SIZE).zip(have).filter(|(want, have)| want != have).map(|(want, _)| want.len()).sum()
}

fn spec(id: u64, nodes: &[Node], algorithm: Algorithm) -> GroupSpec {
    spec_of_all(id, nodes, algorithm, u32::try_from(BLOCK_SIZE).expect("it is small")).delta(true)
}

/// Receives one message into memory that has parts of it.
async fn complete(node: &Node, group: &mut OfferReceiver, memory: Memory) -> Result<Message, GroupFailure> {
    let offer = group.next_offer().await.expect("a message")?;
    let memory = node.register(memory).expect("it can be registered").into_mut().expect("it can be written");
    offer.accept_partial(memory).await
}

/// Receives one message into each node's memory, and closes.
async fn bring_up_to_date(nodes: &[Node], spec: &GroupSpec, memories: Vec<Memory>) -> (u64, Vec<u64>, Certificate) {
    let root = async {
        let sender = nodes[0].create_group(spec.clone()).await.expect("the group forms");
        sender.send(message()).await.expect("it is sent");
        let sent = sender.stats().bytes_sent;
        (sent, sender.close().await.expect("the group closes"))
    };
    let others = nodes[1..].iter().zip(memories).map(|(node, memory)| async move {
        let mut group = node.join_group(spec.clone()).with_offers().await.expect("the group forms");
        let got = complete(node, &mut group, memory).await.expect("no failure");
        assert_eq!(got[..], message());
        let received = group.stats().bytes_received;
        assert!(group.next_offer().await.is_none());
        group.close().await.expect("the group closes");
        received
    });
    let ((sent, certificate), received) = futures::join!(root, futures::future::join_all(others));
    (sent, received, certificate)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_members_lack_travels_from_whoever_has_it() {
    let algorithms = Algorithm::ALL_FLAT.into_iter().map(|algorithm| (Kind::Mem, algorithm));
    let others = Kind::all().into_iter().filter(|kind| *kind != Kind::Mem);
    for (kind, algorithm) in algorithms.chain(others.map(|kind| (kind, Algorithm::BinomialPipeline))) {
        let context = format!("{kind} {algorithm}");
        watched(async {
            let nodes = start(kind, 6).await;
            let memories = [
                parts(0..150),
                parts(0..75),
                parts((0..150).filter(|block| block % 3 == 0)),
                parts([]),
                parts(149..150),
            ];
            let lacked: Vec<u64> = memories.iter().map(|memory| lacking(memory) as u64).collect();
            assert_eq!(lacked, [0, 74_500, 99_500, 149_500, 149_000]);
            let memories = memories.into_iter().map(Memory::from).collect();
            let (sent, received, certificate) =
                bring_up_to_date(&nodes, &spec(1, &nodes, algorithm.clone()), memories).await;
            assert_eq!(received, lacked, "{context}");
            // A member with the whole message sends its share.
            assert!(sent < lacked.iter().sum::<u64>() * 6 / 10, "{context}: {sent}");
            assert!(certificate.is_complete() && certificate.messages() == 1, "{context}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_nobody_has_is_sent_as_usual_and_one_that_all_have_not_at_all() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 4).await;
            for (id, blocks, lacked) in [(1, 0..0, MESSAGE_LEN as u64), (2, 0..150, 0)] {
                let memories = vec![parts(blocks); 3].into_iter().map(Memory::from).collect();
                let spec = spec(id, &nodes, Algorithm::BinomialPipeline);
                let (sent, received, certificate) = bring_up_to_date(&nodes, &spec, memories).await;
                assert_eq!(received, [lacked; 3], "{kind}");
                assert!(sent <= 2 * lacked && certificate.is_complete(), "{kind}: {sent}");
            }
        })
        .await;
    }
}

/// Memory of the pool is not compared. The sizes are at the limits of blocks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_all_sizes_arrive_in_order_in_memory_of_the_pool() {
    for (kind, algorithm) in
        Kind::all().into_iter().flat_map(|kind| Algorithm::ALL_FLAT.map(|algorithm| (kind, algorithm)))
    {
        watched(async {
            let nodes = start(kind, 5).await;
            let (sender, receivers) = form(&nodes, &spec(1, &nodes, algorithm.clone())).await;
            let contents: Vec<Vec<u8>> = [0, 1, 999, 1000, 1001, 0, 30_000, 5].map(|len| pattern(len, 3)).into();
            let sends = async {
                let sends: futures::stream::FuturesOrdered<_> =
                    contents.iter().map(|bytes| sender.send(bytes.clone())).collect();
                let outcomes: Vec<_> = sends.collect().await;
                assert!(outcomes.iter().all(Result::is_ok), "{kind} {algorithm}: {outcomes:?}");
                sender.close().await.expect("the group closes")
            };
            let (certificate, taken) =
                futures::join!(sends, futures::future::join_all(receivers.into_iter().map(take_all)));
            for messages in taken {
                let got: Vec<&[u8]> = messages.iter().map(|message| &message[..]).collect();
                assert_eq!(got, contents, "{kind} {algorithm}");
            }
            assert!(certificate.is_complete(), "{kind} {algorithm}");
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn survivors_complete_what_was_interrupted_and_go_on_in_the_same_way() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 6).await;
            let (sender, mut receivers) = form(&nodes, &spec(1, &nodes, Algorithm::BinomialPipeline)).await;
            let mut victim = receivers.remove(1);
            let dies = async {
                victim.next().await.expect("a message").expect("no failure");
                drop(victim);
            };
            let taken = futures::future::join_all(receivers.into_iter().map(take_over_failures));
            let (certificate, taken, ()) = futures::join!(send_all(sender, 20), taken, dies);
            for given in &taken {
                check(given, 20, &kind.to_string());
            }
            assert!(certificate.is_complete() && certificate.messages() == 20, "{kind}: {certificate}");
        })
        .await;
    }
}

/// An evicted member gets the blocks that it lacks from members that have the message, after its sender is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_was_given_up_catches_up_from_other_receivers() {
    for kind in Kind::all() {
        watched(async {
            let nodes = start(kind, 4).await;
            let first = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 1000);
            let (sender, mut receivers) = form(&nodes, &first).await;
            // The victim leaves in the middle, with the blocks that it has so far.
            let victim = receivers.remove(1);
            let leaves = async {
                while victim.stats().bytes_received < 50_000 {
                    tokio::task::yield_now().await;
                }
                drop(victim);
            };
            let taken = futures::future::join_all(receivers.into_iter().map(take_over_failures));
            let (_, mut holders, ()) = futures::join!(send_all(sender, 1), taken, leaves);
            // One holder is the root of the group in which the victim catches up; another one helps.
            let (source, helper) = (holders.remove(0).messages.remove(0), holders.remove(0).messages.remove(0));
            let catching_up = GroupSpec::new(2, [1, 2, 3].map(NodeId)).block_size(1000).delta(true);
            let (whole, half) = (source.to_vec(), parts_of(&source, 0..75));
            let sends = async {
                let sender = nodes[1].create_group(catching_up.clone()).await.expect("the group forms");
                sender.send(source.into_buffer()).await.expect("it is sent");
                let sent = sender.stats().bytes_sent;
                sender.close().await.expect("the group closes");
                sent
            };
            let takes = [(2, half), (3, helper.to_vec())].map(|(number, memory)| {
                let (node, spec, whole) = (&nodes[number], catching_up.clone(), &whole);
                async move {
                    let before = node.stats();
                    let mut group = node.join_group(spec).with_offers().await.expect("the group forms");
                    let got = complete(node, &mut group, memory.into()).await.expect("no failure");
                    assert_eq!(got[..], whole[..], "{kind}");
                    assert!(group.next_offer().await.is_none(), "{kind}");
                    group.close().await.expect("the group closes");
                    let after = node.stats();
                    (after.bytes_received - before.bytes_received, after.bytes_sent - before.bytes_sent)
                }
            });
            let (sent, taken) = futures::join!(sends, futures::future::join_all(takes));
            assert_eq!((taken[0].0, taken[1].0), (75_000, 0), "{kind}");
            assert!(sent > 0 && sent + taken[1].1 == 75_000 && sent < 75_000, "{kind}: {sent}, {taken:?}");
        })
        .await;
    }
}
