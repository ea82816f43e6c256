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
async fn groups_of_a_node_that_cannot_join_fail_and_say_which_node_is_missing() {
    watched(async {
        let late = Late::new(3);
        // The root waits for longer, and learns it from the member.
        let ((root, root_joins), (member, mut member_joins)) =
            futures::join!(late.start(0, AMPLE), late.start(1, Duration::from_millis(300)));
        let (pair, all) = (GroupSpec::new(1, [0, 1].map(NodeId)), GroupSpec::new(2, [0, 1, 2].map(NodeId)));
        let (sender, receiver) = futures::join!(root.create_group(pair.clone()), member.join_group(pair.clone()));
        let (sender, mut receiver) = (sender.expect("it forms"), receiver.expect("it forms"));
        let (joined, waits, taken, failure) =
            futures::join!(member_joins.failed(), member.join_group(all), receiver.next(), sender.failed());
        assert!(matches!(&joined, StartError::Unreachable { missing, .. } if missing == &[NodeId(2)]), "{joined:?}");
        assert!(matches!(&waits, Err(GroupError::Failed(_))), "{waits:?}");
        assert!(matches!(&taken, Some(Err(_))), "{taken:?}");
        let [failed] = &failure.failed[..] else { panic!("{failure}") };
        let told = failed.cause.to_string();
        assert_eq!(failed.member, Rank(1));
        assert!(matches!(failed.cause, FailureCause::DataConnection { .. }), "{told}");
        assert!(
            told.contains("no connection to 127.") && told.ends_with("(all members must reach each other)"),
            "{told}"
        );
        let refused = member.join_group(GroupSpec::new(3, [0, 1].map(NodeId))).await;
        assert!(matches!(&refused, Err(GroupError::ShuttingDown)), "{refused:?}");
        // The root is told before its own time is over.
        let known = root_joins.unreachable();
        assert!(
            matches!(&known, Some(StartError::Unreachable { missing, .. }) if missing == &[NodeId(2)]),
            "{known:?}"
        );
        drop(root);
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
        let (node, mut joining) = late.start(0, AMPLE).await;
        node.shutdown(Shutdown::Abort).await;
        assert!(matches!(joining.failed().await, StartError::ShutDown));
    })
    .await;
}

/// Longer than any test.
const AMPLE: Duration = Duration::from_secs(600);
