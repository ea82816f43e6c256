//! One object to all members, on every software fabric.

use rdmc::Algorithm;

use crate::cluster::{Kind, form, pattern, spec_of_all, start, take_all, watched};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_algorithm_delivers_every_size_to_every_member() {
    const BLOCK: u32 = 1 << 10;
    let sizes = [0, 1, BLOCK as usize - 1, BLOCK as usize, BLOCK as usize + 1, 10 * BLOCK as usize + 1];
    watched(async {
        for kind in Kind::ALL {
            let nodes = start(kind, 8).await;
            let mut id = 0;
            for count in [1, 2, 3, 5, 8] {
                for algorithm in Algorithm::ALL_FLAT {
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
