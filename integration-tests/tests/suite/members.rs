//! Tests of the nodes of a cluster given as a list: they are lost, return, and are started again.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use futures::StreamExt;
use rdmc::{
    Algorithm, Cluster, FailureCause, GroupError, GroupSpec, MemNetwork, MemberEvent, MemberEvents, Node, NodeId,
    Shutdown, StartError,
};
use serde::{Deserialize, Serialize};

use crate::cluster::{Kind, free_addresses, pattern, spec_of_all, start, take_all, try_form, watched};
use crate::program::{signal, wait_until};

/// Variable that makes the test below the process of a node; its value is a [`Part`].
const MEMBER: &str = "RDMC_TEST_MEMBER";
/// The test below.
const TEST: &str = "members::a_node_in_a_process_of_its_own";

/// The part of a process: a node, and the group that it joins.
#[derive(Serialize, Deserialize)]
struct Part {
    addresses: Vec<String>,
    node: u32,
    group: Option<u64>,
}

impl Part {
    async fn start(&self) -> Node {
        let cluster = Cluster::new((0u32..).zip(self.addresses.iter().cloned())).key(0x5eed);
        let builder = Node::builder(NodeId(self.node), cluster).fabric(Kind::Tcp.fabric(&MemNetwork::new(), 0));
        builder.connect_limit(CONNECT_LIMIT).start().await.expect("it starts")
    }

    /// Starts the node in a process.
    fn spawn(&self) -> Process {
        let mut command = Command::new(std::env::current_exe().expect("a test knows where it is"));
        command.args([TEST, "--exact", "--nocapture"]);
        command.env(MEMBER, serde_json::to_string(self).expect("it is text and numbers"));
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        Process(command.spawn().expect("it is this program"))
    }
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As a test it does nothing. In its own process it is a node, and a receiver of one message.
#[test]
fn a_node_in_a_process_of_its_own() {
    let Ok(part) = std::env::var(MEMBER) else { return };
    let part: Part = serde_json::from_str(&part).expect("the test has written it");
    std::thread::spawn(|| {
        // The end of the pipe is that of the process that started this.
        while std::io::Read::read(&mut std::io::stdin(), &mut [0]).is_ok_and(|read| read > 0) {}
        std::process::exit(1);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("there are threads").block_on(async {
        let node = part.start().await;
        let Some(group) = part.group else { return std::future::pending().await };
        let messages = take_all(node.join_group(spec(group, part.node)).await.expect("the group forms")).await;
        assert_eq!(messages[0][..], pattern(LEN, group));
        node.shutdown(Shutdown::Drain { limit: CONNECT_LIMIT }).await;
    });
}

/// Specifies a group of three nodes of which this one is not the root.
fn spec(group: u64, receiver: u32) -> GroupSpec {
    let members = [(receiver + 1) % 3, receiver, (receiver + 2) % 3].map(NodeId);
    GroupSpec::new(group, members).algorithm(Algorithm::Chain).block_size(1000)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_is_killed_and_started_again_is_in_the_next_group() {
    watched(async {
        // The first one opens the connections to the others, and the last one none.
        for victim in 0..3 {
            let addresses = free_addresses(3);
            let part = |node, group| Part { addresses: addresses.clone(), node, group };
            let mut process = part(victim, Some(1)).spawn();
            let others = [1, 2].map(|offset| part((victim + offset) % 3, None));
            let (a, b) = futures::join!(others[0].start(), others[1].start());
            let mut members = [a.members(), b.members()];
            let groups = futures::try_join!(a.create_group(spec(1, victim)), b.join_group(spec(1, victim)));
            let (root, receiver) = groups.expect("the group forms");
            process.0.kill().expect("it runs");
            process.0.wait().expect("it was killed");
            let failure = root.failed().await;
            let first = failure.first();
            let lost = matches!(first.cause, FailureCause::ConnectionLost | FailureCause::DataConnection { .. });
            assert!(lost && first.node == NodeId(victim), "{failure}");
            assert_eq!(receiver.failed().await, failure);
            // A group that is formed without it fails as well.
            let forming = futures::join!(a.create_group(spec(2, victim)), b.join_group(spec(2, victim)));
            assert!(matches!(forming.0, Err(GroupError::Failed(failure)) if failure.first().node == NodeId(victim)));
            process = part(victim, Some(3)).spawn();
            for members in &mut members {
                assert_eq!(until_back(members, NodeId(victim)).await, (FailureCause::ConnectionLost, true));
            }
            let groups = futures::try_join!(a.create_group(spec(3, victim)), b.join_group(spec(3, victim)));
            let (root, receiver) = groups.expect("the group forms");
            root.send(pattern(LEN, 3)).await.expect("all are there");
            let (closed, taken) = futures::join!(root.close(), take_all(receiver));
            assert!(closed.expect("all have it").is_complete());
            assert_eq!(taken[0][..], pattern(LEN, 3));
            wait_until("the new process ends", || process.0.try_wait().expect("it is a child").is_some());
            assert!(process.0.wait().expect("it has ended").success());
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_follows_the_members_notices_a_stopped_process_without_a_group() {
    watched(async {
        for victim in [0, 2] {
            let addresses = free_addresses(3);
            let part = |node| Part { addresses: addresses.clone(), node, group: None };
            let process = part(victim).spawn();
            let others = [1, 2].map(|offset| part((victim + offset) % 3));
            let (node, _other) = futures::join!(others[0].start(), others[1].start());
            let mut members = node.members();
            signal(&process.0, "STOP");
            let cause = until_lost(&mut members, NodeId(victim)).await;
            assert!(matches!(cause, FailureCause::Unresponsive { .. }), "{cause}");
            signal(&process.0, "CONT");
            assert_eq!(members.next().await, Some(MemberEvent::Returned { node: NodeId(victim), restarted: false }));
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_started_again_is_told_that_its_groups_are_gone() {
    watched(async {
        for again in 0..3 {
            let addresses = free_addresses(3);
            let part = |node| Part { addresses: addresses.clone(), node, group: None };
            let parts = [0, 1, 2].map(part);
            let mut nodes = futures::future::join_all(parts.iter().map(Part::start)).await;
            let (sender, receivers) = try_form(&nodes, &spec_of_all(1, &nodes, Algorithm::Chain, 1000)).await.unwrap();
            let (closed, _) =
                futures::join!(sender.close(), futures::future::join_all(receivers.into_iter().map(take_all)));
            assert!(closed.unwrap().is_complete());
            let old = nodes.remove(again);
            let mut members: Vec<MemberEvents> = nodes.iter().map(Node::members).collect();
            old.shutdown(Shutdown::Abort).await;
            let cluster = Cluster::new((0u32..).zip(addresses.iter().cloned())).key(0x5eed);
            let new = loop {
                let fabric = Kind::Tcp.fabric(&MemNetwork::new(), 0);
                let builder = Node::builder(NodeId(u32::try_from(again).unwrap()), cluster.clone()).fabric(fabric);
                match builder.connect_limit(CONNECT_LIMIT).start().await {
                    // The listener of the old one has not ended yet.
                    Err(StartError::Listen { .. }) => tokio::time::sleep(Duration::from_millis(5)).await,
                    started => break started.unwrap(),
                }
            };
            for members in &mut members {
                let (_, restarted) = until_back(members, new.id()).await;
                assert!(restarted);
            }
            nodes.insert(again, new);
            // Numbers of groups are not used again, although the new node does not know them.
            let spec = spec_of_all(1, &nodes, Algorithm::Chain, 1000);
            let joined = match again {
                0 => nodes[0].create_group(spec).await.map(drop),
                _ => nodes[again].join_group(spec).await.map(drop),
            };
            let Err(GroupError::Failed(failure)) = joined else { panic!("it joined a group that has ended") };
            assert_eq!((failure.first().node, &failure.first().cause), (nodes[again].id(), &FailureCause::Restarted));
            let (sender, receivers) = try_form(&nodes, &spec_of_all(2, &nodes, Algorithm::Chain, 1000)).await.unwrap();
            sender.send(pattern(LEN, 2)).await.unwrap();
            let taken = futures::future::join_all(receivers.into_iter().map(take_all));
            let (closed, taken) = futures::join!(sender.close(), taken);
            assert!(closed.unwrap().is_complete());
            assert!(taken.iter().all(|messages| messages[0][..] == pattern(LEN, 2)));
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_are_followed_on_every_fabric() {
    watched(async {
        for kind in Kind::all() {
            let mut nodes = start(kind, 3).await;
            let mut members = nodes[0].members();
            let mut joined = [members.next().await, members.next().await].map(Option::unwrap);
            joined.sort_by_key(MemberEvent::node);
            assert_eq!(joined, [NodeId(1), NodeId(2)].map(MemberEvent::Joined), "{kind}");
            drop(nodes.pop());
            assert_eq!(
                members.next().await,
                Some(MemberEvent::Lost(NodeId(2), FailureCause::ConnectionLost)),
                "{kind}"
            );
            nodes[0].clone().shutdown(Shutdown::Abort).await;
            assert_eq!(members.next().await, None, "{kind}");
        }
    })
    .await;
}

/// Waits until a node is lost and connected again; returns the cause, and whether it was started again.
async fn until_back(members: &mut MemberEvents, node: NodeId) -> (FailureCause, bool) {
    let cause = until_lost(members, node).await;
    match members.next().await {
        Some(MemberEvent::Returned { node: back, restarted }) if back == node => (cause, restarted),
        other => panic!("{other:?}"),
    }
}

async fn until_lost(members: &mut MemberEvents, node: NodeId) -> FailureCause {
    loop {
        match members.next().await {
            Some(MemberEvent::Joined(_)) => {}
            Some(MemberEvent::Lost(lost, cause)) if lost == node => return cause,
            other => panic!("{other:?}"),
        }
    }
}

/// How long a node waits for the others.
const CONNECT_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of a message.
const LEN: usize = 50_000;
