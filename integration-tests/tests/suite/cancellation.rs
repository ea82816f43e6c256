//! Tests that a future of a node or cluster can be dropped at any poll: it leaves nothing behind, and others go on.

use std::time::Duration;

use futures::StreamExt;
use rdmc::{
    Algorithm, Cluster, FailureCause, GroupError, GroupSpec, InviteOptions, Listener, MemNetwork, Node, NodeId,
    Receiver, SendError, Sender, Shutdown, StartError, TcpFabric,
};

use crate::cluster::{
    Kind, form, free_addresses, pattern, poll_and_drop, spec_of_all, start, take_all, try_form, watched,
};
use crate::recovery::{check, send_all, take_over_failures};

/// Sends a message to all nodes of a cluster and closes the group.
async fn multicast(nodes: &[Node], id: u64) {
    let formed = form(nodes, &spec_of_all(id, nodes, Algorithm::BinomialPipeline, 500)).await;
    multicast_in(formed, id).await;
}

/// Multicasts one message after a restart: waits until the others notice that another node is in the place of one they
/// knew.
async fn multicast_after_a_restart(nodes: &[Node]) {
    let mut id = 1;
    let formed = loop {
        match try_form(nodes, &spec_of_all(id, nodes, Algorithm::BinomialPipeline, 500)).await {
            Err(GroupError::Failed(failure)) if failure.first().cause == FailureCause::ConnectionLost => id += 1,
            formed => break formed.expect("the group forms"),
        }
    };
    multicast_in(formed, id).await;
}

async fn multicast_in((sender, receivers): (Sender, Vec<Receiver>), id: u64) {
    let taken = futures::future::join_all(receivers.into_iter().map(take_all));
    let sent = async {
        sender.send(pattern(5000, id)).await.expect("nobody fails");
        sender.close().await.expect("nobody fails")
    };
    let (taken, certificate) = futures::join!(taken, sent);
    assert!(certificate.is_complete());
    assert!(taken.iter().all(|messages| messages.len() == 1 && messages[0][..] == pattern(5000, id)));
}

/// Starts a node. Tries again while the tasks of a dropped node still hold its address.
async fn when_the_address_is_free<F>(start: impl Fn() -> F) -> Result<Node, StartError>
where
    F: Future<Output = Result<Node, StartError>>,
{
    loop {
        match start().await {
            Err(StartError::Listen { .. }) => tokio::task::yield_now().await,
            other => return other,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_dropped_at_any_poll_can_be_made_again() {
    watched(async {
        for kind in [Kind::Mem, Kind::Tcp] {
            for polls in 0..14 {
                let network = MemNetwork::new();
                let addresses = match kind {
                    Kind::Mem => (0..3).map(|id| format!("node{id}")).collect(),
                    _ => free_addresses(3),
                };
                let cluster = Cluster::new((0..).zip(addresses));
                let begin =
                    |id: u32| Node::builder(NodeId(id), cluster.clone()).fabric(kind.fabric(&network, 0)).start();
                let again = async {
                    match poll_and_drop(begin(1), polls).await {
                        Some(node) => node,
                        None => when_the_address_is_free(|| begin(1)).await,
                    }
                };
                let (a, b, c) = futures::join!(begin(0), again, begin(2));
                let nodes = [a, b, c].map(|node| node.unwrap_or_else(|error| panic!("{kind} {polls}: {error}")));
                multicast_after_a_restart(&nodes).await;
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_dropped_at_any_poll_can_be_made_again() {
    watched(async {
        for kind in [Kind::Mem, Kind::Tcp] {
            for polls in 0..14 {
                let nodes = start(kind, 3).await;
                let spec = spec_of_all(1, &nodes, Algorithm::Chain, 500);
                let (sender, receivers) = form(&nodes, &spec).await;
                let how = if polls % 2 == 0 { Shutdown::Abort } else { Shutdown::Drain { limit: Duration::ZERO } };
                let first = poll_and_drop(nodes[1].clone().shutdown(how), polls).await;
                if first.is_none() {
                    nodes[1].clone().shutdown(Shutdown::Abort).await;
                }
                let failure = sender.failed().await;
                assert_eq!(failure.first().node, nodes[1].id(), "{kind} {polls}");
                assert_eq!(receivers[1].failed().await, failure, "{kind} {polls}");
                // The others go on without it.
                multicast(&[nodes[0].clone(), nodes[2].clone()], 2).await;
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bindings_invitations_and_acceptances_dropped_at_any_poll_do_not_keep_later_ones_out() {
    watched(async {
        let limit = Duration::from_secs(20);
        for polls in 0..14 {
            let address = free_addresses(1).remove(0);
            drop(poll_and_drop(Listener::bind(TcpFabric::new(), &address), polls).await);
            let listener = loop {
                if let Ok(listener) = Listener::bind(TcpFabric::new(), &address).await {
                    break listener;
                }
                tokio::task::yield_now().await;
            };
            let addresses = [listener.local_address().to_owned()];
            let invite = || rdmc::invite(TcpFabric::new(), &addresses, InviteOptions::new(limit).payload("hello"));
            // Either end is dropped in the middle. The other end gets an error or goes on.
            let dropping_inviter = async {
                drop(poll_and_drop(invite(), polls).await);
            };
            let accepting = async {
                let accepting = async { listener.next_invitation().await.accept().await };
                let _ = tokio::time::timeout(Duration::from_millis(50), accepting).await;
            };
            futures::join!(dropping_inviter, accepting);
            let dropping_acceptor = async {
                let accepting = async { listener.next_invitation().await.accept().await };
                let accepted = poll_and_drop(accepting, polls).await;
                // Like the program: an invitation that was not accepted does not wait.
                accepted.and_then(Result::ok)
            };
            let inviting = async { tokio::time::timeout(Duration::from_millis(200), invite()).await };
            let _ = futures::join!(inviting, dropping_acceptor);
            let receiving = async {
                loop {
                    // The listener still returns invitations that were given up.
                    let Ok(builder) = listener.next_invitation().await.accept().await else { continue };
                    if let Ok(node) = builder.start().await {
                        return node;
                    }
                }
            };
            let sending = async { invite().await.expect("it is accepted").start().await.expect("it starts") };
            let (root, receiver) = futures::join!(sending, receiving);
            multicast(&[root, receiver], 1).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recovery_dropped_at_any_poll_leaves_the_others_to_go_on() {
    watched(async {
        for kind in [Kind::Mem, Kind::Tcp] {
            for polls in 0..20 {
                let nodes = start(kind, 5).await;
                let spec = spec_of_all(1, &nodes, Algorithm::BinomialPipeline, 500);
                let (sender, mut receivers) = form(&nodes, &spec).await;
                let (leaving, mut dying) = (receivers.remove(2), receivers.remove(0));
                let dies = async {
                    dying.next().await.expect("a message").expect("no failure");
                    drop(dying);
                };
                let leaves = async {
                    let failure = leaving.failed().await;
                    // A drop before the group is formed abandons the group, a later one its handle.
                    drop(poll_and_drop(failure.recover(), polls).await);
                    nodes[3].clone().shutdown(Shutdown::Abort).await;
                };
                let taken = futures::future::join_all(receivers.into_iter().map(take_over_failures));
                let (_, taken, (), ()) = futures::join!(send_all(sender, 8), taken, dies, leaves);
                for given in &taken {
                    check(given, 8, &format!("{kind} {polls}"));
                }
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_message_that_comes_after_the_close_is_not_said_to_be_sent() {
    let network = MemNetwork::new();
    let cluster = Cluster::new([(0, "a"), (1, "b")]);
    let node = |id| Node::builder(NodeId(id), cluster.clone()).fabric(network.fabric()).start();
    let (a, b) = futures::try_join!(node(0), node(1)).unwrap();
    let spec = GroupSpec::new(1, cluster.nodes());
    let (sender, receiver) = futures::try_join!(a.create_group(spec.clone()), b.join_group(spec)).unwrap();
    let (first, late) = (sender.send("first"), sender.send("late"));
    // They are polled in this order.
    let (first, closed, late, received) = futures::join!(first, sender.close(), late, receiver.close());
    first.unwrap();
    assert_eq!((closed.unwrap().messages(), received.unwrap().messages()), (1, 1));
    assert!(matches!(late, Err(SendError::Closed)), "{late:?}");
}
