//! Tests of nodes that are used before they are connected to all others.

use std::time::Duration;

use futures::StreamExt;
use rdmc::{
    Cluster, FailureCause, GroupError, GroupSpec, Joining, MemNetwork, Node, NodeId, Rank, Shutdown, StartError,
};

use crate::cluster::{Kind, free_addresses, pattern, take_all, watched};

/// Nodes that start one by one, over TCP.
struct Late {
    cluster: Cluster,
    network: MemNetwork,
}

impl Late {
    fn new(nodes: usize) -> Self {
        Self { cluster: Cluster::new((0..).zip(free_addresses(nodes))), network: MemNetwork::new() }
    }

    async fn start(&self, id: u32, limit: Duration) -> (Node, Joining) {
        let builder = Node::builder(NodeId(id), self.cluster.clone());
        let builder = builder.fabric(Kind::Tcp.fabric(&self.network, id as usize)).connect_limit(limit);
        builder.start_joining().await.expect("it listens")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_forms_and_carries_messages_while_another_node_is_missing() {
    watched(async {
        let late = Late::new(3);
        let spec = GroupSpec::new(1, [0, 1].map(NodeId));
        let ((root, root_joins), (member, member_joins)) = futures::join!(late.start(0, AMPLE), late.start(1, AMPLE));
        let (sender, receiver) = futures::join!(root.create_group(spec.clone()), member.join_group(spec));
        let (sender, receiver) = (sender.expect("it forms"), receiver.expect("it forms"));
        let send = async {
            sender.send(pattern(100_000, 1)).await.expect("it is sent");
            sender.close().await.expect("it is closed");
        };
        let (taken, ()) = futures::join!(take_all(receiver), send);
        assert_eq!(taken[0][..], pattern(100_000, 1));
        // A group of all waits for the last node.
        let all = GroupSpec::new(2, [0, 1, 2].map(NodeId));
        let (third, third_joins) = late.start(2, AMPLE).await;
        let formed = futures::join!(
            root.create_group(all.clone()),
            member.join_group(all.clone()),
            third.join_group(all),
            root_joins,
            member_joins,
            third_joins,
        );
        assert!(matches!(&formed, (Ok(_), Ok(_), Ok(_), Ok(()), Ok(()), Ok(()))), "{formed:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_go_on_without_a_node_that_is_never_connected() {
    watched(async {
        let late = Late::new(4);
        // The root waits for longer, and learns it from the first member.
        let ((root, root_joins), (first, first_joins), (second, _second_joins)) =
            futures::join!(late.start(0, AMPLE), late.start(1, Duration::from_millis(300)), late.start(2, AMPLE));
        let pair = GroupSpec::new(1, [0, 1].map(NodeId));
        let (other, mut of_other) = futures::join!(root.create_group(pair.clone()), first.join_group(pair));
        let all = GroupSpec::new(2, [0, 1, 2, 3].map(NodeId)).recoverable(true);
        let (created, one, two, joined) = futures::join!(
            root.create_group(all.clone()),
            first.join_group(all.clone()),
            second.join_group(all.clone()),
            first_joins
        );
        assert!(
            matches!(&joined, Err(StartError::Unreachable { missing, .. }) if missing == &[NodeId(3)]),
            "{joined:?}"
        );
        let failures = [created.map(drop), one.map(drop), two.map(drop)].map(|formed| match formed {
            Err(GroupError::Failed(failure)) => failure,
            formed => panic!("{formed:?}"),
        });
        for failure in &failures {
            let [failed] = &failure.failed[..] else { panic!("{failure}") };
            assert_eq!(failed.member, Rank(3));
            assert!(matches!(&failed.cause, FailureCause::Unreachable { what } if !what.contains("127.")), "{failure}");
        }
        let [sender, one, two] = &failures;
        let recovered = futures::join!(sender.recover(), one.recover(), two.recover());
        let (Ok(sender), Ok(one), Ok(two)) = recovered else { panic!("{recovered:?}") };
        let sender = sender.into_sender().expect("the root goes on");
        let receivers = [one, two].map(|recovery| take_all(recovery.into_receiver().expect("it is no root")));
        let send = async {
            sender.send(pattern(100_000, 1)).await.expect("it is sent");
            sender.close().await.expect("it is closed");
        };
        let (taken, ()) = futures::join!(futures::future::join_all(receivers), send);
        assert!(taken.iter().all(|taken| taken[0][..] == pattern(100_000, 1)));
        // Groups without the missing node were not harmed.
        let (other, of_other) = (other.expect("it forms"), of_other.as_mut().expect("it forms"));
        other.send("abc").await.expect("it is sent");
        assert_eq!(of_other.next().await.expect("it comes").expect("it is whole")[..], b"abc"[..]);
        // At the member that has given it up, a new group need not wait for it.
        let again = first.join_group(GroupSpec::new(3, [0, 1, 2, 3].map(NodeId))).await;
        assert!(matches!(&again, Err(GroupError::Failed(_))), "{again:?}");
        drop((root, root_joins));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_dropped_or_shut_down_joins_nobody_any_more() {
    watched(async {
        let late = Late::new(2);
        let (node, joining) = late.start(0, AMPLE).await;
        drop(node);
        assert!(matches!(joining.await, Err(StartError::ShutDown)));
        let (node, joining) = late.start(0, AMPLE).await;
        node.shutdown(Shutdown::Abort).await;
        assert!(matches!(joining.await, Err(StartError::ShutDown)));
    })
    .await;
}

/// Longer than any test.
const AMPLE: Duration = Duration::from_secs(600);
