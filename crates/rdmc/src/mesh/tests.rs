use std::net::IpAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::stream::StreamExt;
use rdmc_fabric::TokioEnvironment;
use tokio::io::{AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::Notify;

use super::ahead::OpenAhead;
use super::members::MemberEvent;
use super::*;
use crate::wire::BlockEndpoints;
use crate::wire::end::EndFrame;

/// One end of a connection. If the other is `deaf`, it takes no bytes, and notifies of each attempt.
pub(super) struct Stream {
    pub(super) stream: DuplexStream,
    pub(super) deaf: Option<Arc<Notify>>,
}

impl ControlStream for Stream {
    fn peer_address(&self) -> Option<IpAddr> {
        None
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(deaf) = &self.deaf {
            deaf.notify_one();
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn mesh(nodes: u32) -> Mesh {
    mesh_detecting(nodes, Duration::from_secs(2))
}

fn mesh_detecting(nodes: u32, detection: Duration) -> Mesh {
    let peers =
        PeerSecurity { security: None, identities: BTreeMap::new(), refusals: crate::stats::Refusals::default() };
    let members = (0..nodes).map(|node| (NodeId(node), String::new())).collect();
    Mesh::new(NodeId(0), 1, members, Arc::new(TokioEnvironment::new()), detection, peers)
}

/// Connects the mesh with a node; returns that node's end.
async fn connect(mesh: &Mesh, peer: NodeId, deaf: Option<Arc<Notify>>) -> DuplexStream {
    let far = open(mesh, peer, deaf, 0);
    mesh.connection_to(peer).await;
    far
}

/// Connects the mesh once more with a node, which is in this life.
async fn connect_again(mesh: &Mesh, peer: NodeId, incarnation: u64) -> DuplexStream {
    let serial = mesh.lock().next_serial;
    let far = open(mesh, peer, None, incarnation);
    mesh.until(|state| state.next_serial > serial).await;
    far
}

fn open(mesh: &Mesh, peer: NodeId, deaf: Option<Arc<Notify>>, incarnation: u64) -> DuplexStream {
    let (near, far) = tokio::io::duplex(1 << 20);
    let link = {
        let mesh = mesh.clone();
        async move { mesh.run_link(Box::new(Stream { stream: near, deaf }), peer, incarnation).await }
    };
    mesh.0.environment.spawn(Box::pin(link));
    far
}

fn decided() -> (Ballot, Outcome) {
    (Ballot { attempt: 1, leader: 1 }, Outcome::Closed { messages: 3 })
}

fn told(group: GroupId) -> Frame {
    let (ballot, outcome) = decided();
    Frame::Group { group, frame: GroupFrame::End(EndFrame::Decided { ballot, outcome }) }
}

#[tokio::test]
async fn what_was_said_before_a_connection_broke_is_heard() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let refused = Arc::new(Notify::new());
    let mut far = connect(&mesh, peer, Some(refused.clone())).await;
    let mut inbox = mesh.open_group(GroupId(7), &Arc::from([NodeId(0), peer])).expect("a new group");
    mesh.post(peer, GroupId(7), GroupFrame::Announce { message: 0, size: 0 });
    refused.notified().await;
    far.write_all(&wire::encode(&told(GroupId(7)))).await.unwrap();
    drop(far);
    let heard = inbox.next().await.expect("the group is open");
    assert!(matches!(heard, GroupEvent::Frame(_, GroupFrame::End(EndFrame::Decided { .. }))), "{heard:?}");
    assert!(matches!(inbox.next().await, Some(GroupEvent::Lost(NodeId(1), _))));
}

#[tokio::test]
async fn who_leaves_tells_first_how_groups_have_ended() {
    let mesh = mesh(3);
    let mut member = connect(&mesh, NodeId(1), None).await;
    let mut other = connect(&mesh, NodeId(2), None).await;
    let members = Arc::from([NodeId(0), NodeId(1)]);
    for group in (0..20).map(GroupId) {
        let _inbox = mesh.open_group(group, &members).expect("a new group");
        let (ballot, outcome) = decided();
        mesh.conclude_group(group, ballot, outcome);
    }
    mesh.leave().await;
    let frames = async |stream: &mut DuplexStream| {
        let (mut frames, mut check) = (Vec::new(), FrameCheck::default());
        while frames.last() != Some(&Frame::Goodbye) {
            frames.push(wire::read_next(stream, &mut check).await.unwrap().expect("it says goodbye"));
        }
        frames
    };
    let latest = (4..20).rev().map(GroupId).map(told).chain([Frame::Goodbye]);
    assert_eq!(frames(&mut member).await, latest.collect::<Vec<_>>());
    assert_eq!(frames(&mut other).await, [Frame::Goodbye]);
}

#[tokio::test]
async fn who_has_left_takes_no_closing_for_a_loss() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let far = connect(&mesh, peer, None).await;
    let mut inbox = mesh.open_group(GroupId(7), &Arc::from([NodeId(0), peer])).expect("a new group");
    mesh.leave().await;
    drop(far);
    let mut changes = mesh.0.changes.subscribe();
    while !mesh.missing().contains(&peer) {
        changes.changed().await.expect("the mesh is there");
    }
    // Nor does it take a new connection.
    let (near, _far) = tokio::io::duplex(64);
    mesh.run_link(Box::new(Stream { stream: near, deaf: None }), peer, 0).await;
    mesh.leave_group(GroupId(7));
    assert!(inbox.next().await.is_none());
}

#[tokio::test]
async fn a_frame_that_was_changed_ends_the_connection() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let mut far = connect(&mesh, peer, None).await;
    let mut inbox = mesh.open_group(GroupId(7), &Arc::from([NodeId(0), peer])).expect("a new group");
    let mut bytes = wire::encode(&told(GroupId(7)));
    bytes[6] ^= 1;
    far.write_all(&bytes).await.unwrap();
    assert!(matches!(inbox.next().await, Some(GroupEvent::Lost(NodeId(1), _))));
    assert!(mesh.problem().contains("changed or lost"), "{}", mesh.problem());
}

#[tokio::test]
async fn who_offers_to_join_a_group_that_has_ended_hears_how() {
    let mesh = mesh(3);
    let members = Arc::from([NodeId(0), NodeId(1)]);
    let offer = || GroupFrame::Offer { spec: [0; 32], told: 0, blocks: None, table: None };
    for (group, outcome) in [(GroupId(7), Some(decided())), (GroupId(8), None)] {
        let _inbox = mesh.open_group(group, &members).expect("a new group");
        match outcome {
            Some((ballot, outcome)) => mesh.conclude_group(group, ballot, outcome),
            None => mesh.leave_group(group),
        }
    }
    let answer = |group, from| mesh.lock().groups.route(group, from, offer());
    assert!(matches!(answer(GroupId(7), NodeId(1)), FrameRoute::ToPeer(EndFrame::Decided { .. })));
    assert!(matches!(answer(GroupId(8), NodeId(1)), FrameRoute::ToPeer(EndFrame::Absent { left: true })));
    assert!(matches!(answer(GroupId(7), NodeId(2)), FrameRoute::Nowhere), "it is no member");
}

#[tokio::test]
async fn of_groups_that_are_never_joined_the_oldest_is_forgotten() {
    let mesh = mesh(2);
    let offer = long_offer;
    for group in (0..40).map(GroupId) {
        assert!(matches!(mesh.lock().groups.route(group, NodeId(1), offer()), FrameRoute::Nowhere));
    }
    let members = Arc::from([NodeId(0), NodeId(1)]);
    let open = |group| mesh.open_group(group, &members).expect("a new group");
    let (mut oldest, mut latest) = (open(GroupId(0)), open(GroupId(39)));
    assert!(oldest.lost_early_frames() && !latest.lost_early_frames());
    assert!(oldest.next().now_or_never().is_none(), "its frames are forgotten, and the node was never connected");
    assert!(matches!(latest.next().await, Some(GroupEvent::Frame(NodeId(1), GroupFrame::Offer { .. }))));
}

#[tokio::test]
async fn a_loss_that_is_told_late_does_not_hide_the_next_connection() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let _far = connect(&mesh, peer, None).await;
    let mut inbox = mesh.open_group(GroupId(7), &Arc::from([NodeId(0), peer])).expect("a new group");
    let groups = mesh.lock().groups.listening();
    notify(&groups, 5, &GroupEvent::Connected(peer)).await;
    notify(&groups, 4, &GroupEvent::Lost(peer, FailureCause::ConnectionLost)).await;
    assert!(matches!(inbox.next().await, Some(GroupEvent::Connected(_))));
    assert!(matches!(inbox.next().await, Some(GroupEvent::Lost(..))));
    assert!(matches!(inbox.next().await, Some(GroupEvent::Connected(_))));
}

#[tokio::test]
async fn a_node_that_reads_nothing_is_given_up_before_memory_is() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let mut far = connect(&mesh, peer, None).await;
    let mut inbox = mesh.open_group(GroupId(7), &Arc::from([NodeId(0), peer])).expect("a new group");
    // Its questions are not answered without end.
    let mut check = FrameCheck::default();
    let mut ping = wire::encode_unchecked(&Frame::Ping);
    let mut pings = Vec::new();
    for _ in 0..100 {
        ping.truncate(5);
        check.seal(&mut ping);
        pings.extend_from_slice(&ping);
    }
    far.write_all(&pings).await.unwrap();
    let offer = long_offer;
    (0..40).for_each(|_| mesh.post(peer, GroupId(7), offer()));
    assert!(matches!(inbox.next().await, Some(GroupEvent::Lost(NodeId(1), FailureCause::Unresponsive { .. }))));
    // The frames before have arrived in order.
    let mut check = FrameCheck::default();
    let heard = wire::read_next(&mut far, &mut check).await.unwrap();
    assert!(matches!(heard, None | Some(Frame::Group { .. } | Frame::Pong)), "{heard:?}");
}

#[tokio::test]
async fn who_was_asked_is_answered_from_its_second_question_on() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let mut far = connect(&mesh, peer, None).await;
    let _inbox = mesh.open_group(GroupId(7), &Arc::from([NodeId(0), peer])).expect("a new group");
    mesh.0.environment.spawn(Box::pin(mesh.clone().watch()));
    let (mut to, mut from) = (FrameCheck::default(), FrameCheck::default());
    assert_eq!(wire::read_next(&mut far, &mut from).await.unwrap(), Some(Frame::Ping));
    for _ in 0..2 {
        let mut ping = wire::encode_unchecked(&Frame::Ping);
        to.seal(&mut ping);
        far.write_all(&ping).await.unwrap();
    }
    // The first one crossed this node's own question.
    assert_eq!(wire::read_next(&mut far, &mut from).await.unwrap(), Some(Frame::Pong));
    assert_eq!(wire::read_next(&mut far, &mut from).await.unwrap(), Some(Frame::Ping));
}

#[tokio::test]
async fn who_follows_the_members_is_told_of_each_state_and_of_what_passed_once() {
    let mesh = mesh(4);
    let far = connect(&mesh, NodeId(1), None).await;
    let mut members = mesh.members();
    assert_eq!(members.next().await, Some(MemberEvent::Joined(NodeId(1))));
    assert_eq!(members.next().now_or_never(), None);
    let _others = connect(&mesh, NodeId(3), None).await;
    assert_eq!(members.next().await, Some(MemberEvent::Joined(NodeId(3))));
    drop(far);
    assert_eq!(members.next().await, Some(MemberEvent::Lost(NodeId(1), FailureCause::ConnectionLost)));
    assert_eq!(members.next().now_or_never(), None);
    // It comes back, and is lost and comes back many times before the next look.
    for _ in 0..20 {
        drop(connect(&mesh, NodeId(1), None).await);
        mesh.until(|state| !state.links.contains_key(&NodeId(1))).await;
    }
    assert_eq!(members.next().now_or_never(), None, "it is in the same state");
    let _far = connect(&mesh, NodeId(1), None).await;
    assert_eq!(members.next().await, Some(MemberEvent::Returned { node: NodeId(1), restarted: false }));
    // Another connection in place of this one is a loss and a return.
    let _far = connect_again(&mesh, NodeId(1), 0).await;
    assert_eq!(members.next().await, Some(MemberEvent::Lost(NodeId(1), FailureCause::ConnectionLost)));
    assert_eq!(members.next().await, Some(MemberEvent::Returned { node: NodeId(1), restarted: false }));
    // Who begins now gets the present state, however late it reads.
    let mut later = mesh.members();
    let _far = connect_again(&mesh, NodeId(1), 0).await;
    assert_eq!(later.next().await, Some(MemberEvent::Joined(NodeId(1))));
    assert_eq!(later.next().await, Some(MemberEvent::Joined(NodeId(3))));
    assert_eq!(later.next().await, Some(MemberEvent::Lost(NodeId(1), FailureCause::ConnectionLost)));
    assert_eq!(later.next().await, Some(MemberEvent::Returned { node: NodeId(1), restarted: false }));
    assert_eq!(later.next().now_or_never(), None);
}

#[tokio::test]
async fn streams_of_members_end_with_their_node() {
    let mesh = mesh(2);
    let _far = connect(&mesh, NodeId(1), None).await;
    let mut members = mesh.members();
    assert_eq!(members.next().await, Some(MemberEvent::Joined(NodeId(1))));
    let ((), ended) = futures::join!(mesh.leave(), members.next());
    assert_eq!(ended, None);
    assert_eq!(mesh.members().next().await, None, "it has left");

    let mesh = self::mesh(2);
    let mut members = mesh.members();
    let (ended, ()) = futures::join!(members.next(), async { drop(mesh) });
    assert_eq!(ended, None);
}

#[tokio::test]
async fn who_follows_the_members_asks_nodes_without_a_group_and_gives_up_those_that_are_silent() {
    let mesh = mesh_detecting(2, Duration::from_millis(100));
    let peer = NodeId(1);
    let mut far = connect(&mesh, peer, None).await;
    mesh.0.environment.spawn(Box::pin(mesh.clone().watch()));
    assert!(!mesh.lock().monitors_any());
    let mut members = mesh.members();
    assert_eq!(members.next().await, Some(MemberEvent::Joined(peer)));
    assert_eq!(wire::read_next(&mut far, &mut FrameCheck::default()).await.unwrap(), Some(Frame::Ping));
    let silence = Duration::from_millis(85);
    assert_eq!(members.next().await, Some(MemberEvent::Lost(peer, FailureCause::Unresponsive { silence })));
    drop(members);
    assert!(!mesh.lock().monitors_any());
}

#[tokio::test]
async fn who_follows_nobody_and_shares_no_group_answers_all_the_same() {
    let mesh = mesh(2);
    let mut far = connect(&mesh, NodeId(1), None).await;
    mesh.0.environment.spawn(Box::pin(mesh.clone().watch()));
    let (mut to, mut from) = (FrameCheck::default(), FrameCheck::default());
    for _ in 0..3 {
        let mut ping = wire::encode_unchecked(&Frame::Ping);
        to.seal(&mut ping);
        far.write_all(&ping).await.unwrap();
        assert_eq!(wire::read_next(&mut far, &mut from).await.unwrap(), Some(Frame::Pong));
    }
}

#[tokio::test]
async fn a_connection_that_was_opened_ahead_is_greeted_and_without_it_another_is_opened() {
    let mesh = mesh(2);
    let (near, mut far) = tokio::io::duplex(1 << 10);
    let (opened, opening) = tokio::sync::oneshot::channel();
    let stream = Box::new(Stream { stream: near, deaf: None }) as Box<dyn ControlStream>;
    let _ = opened.send(OpenAhead { stream, round_trip: Duration::ZERO });
    far.write_all(&wire::encode(&Frame::Welcome { incarnation: 7 })).await.unwrap();
    // Nobody could be reached at this address.
    let greeted = mesh.say_hello(NodeId(1), "nowhere", Some(opening)).await;
    assert_eq!(greeted.map(|(_, incarnation)| incarnation).ok(), Some(7));
    assert!(matches!(wire::read(&mut far).await, Ok(Some(Frame::Hello { to: NodeId(1), .. }))));

    let (failed, opening) = tokio::sync::oneshot::channel();
    drop(failed);
    let error = mesh.say_hello(NodeId(1), "nowhere", Some(opening)).await.err().expect("it tries to connect");
    assert!(error.to_string().starts_with("nowhere: "), "{error}");
}

#[tokio::test]
async fn who_was_started_again_is_in_no_group_of_its_earlier_life() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let members = Arc::from([NodeId(0), peer]);
    let far = connect(&mesh, peer, None).await;
    let _closed = mesh.open_group(GroupId(6), &members).expect("a new group");
    let (ballot, outcome) = decided();
    mesh.conclude_group(GroupId(6), ballot, outcome);
    let mut inbox = mesh.open_group(GroupId(7), &members).expect("a new group");
    let mut followed = mesh.members();
    assert_eq!(followed.next().await, Some(MemberEvent::Joined(peer)));
    drop(far);
    assert!(matches!(inbox.next().await, Some(GroupEvent::Lost(_, FailureCause::ConnectionLost))));
    assert_eq!(followed.next().await, Some(MemberEvent::Lost(peer, FailureCause::ConnectionLost)));
    let mut far = connect_again(&mesh, peer, 1).await;
    assert_eq!(followed.next().await, Some(MemberEvent::Returned { node: peer, restarted: true }));
    // A group that is opened now is one of its new life.
    let mut new = mesh.open_group(GroupId(8), &members).expect("a new group");
    for group in [7, 8].map(GroupId) {
        mesh.post(peer, group, GroupFrame::Announce { message: 0, size: 0 });
        mesh.send(peer, group, GroupFrame::Announce { message: 1, size: 0 }).await;
    }
    let (mut to, mut from) = (FrameCheck::default(), FrameCheck::default());
    for message in 0..2 {
        let frame = GroupFrame::Announce { message, size: 0 };
        let expected = Frame::Group { group: GroupId(8), frame };
        assert_eq!(wire::read_next(&mut far, &mut from).await.unwrap(), Some(expected));
    }
    // It wants to be in groups of its earlier life: one that has ended, and one that has not.
    for group in [6, 7, 8].map(GroupId) {
        let offer = GroupFrame::Offer { spec: [0; 32], told: 0, blocks: None, table: None };
        let mut frame = wire::encode_unchecked(&Frame::Group { group, frame: offer });
        to.seal(&mut frame);
        far.write_all(&frame).await.unwrap();
    }
    assert!(matches!(new.next().await, Some(GroupEvent::Frame(NodeId(1), GroupFrame::Offer { .. }))));
    mesh.leave_group(GroupId(7));
    assert!(inbox.next().await.is_none(), "it did not get the offer, nor the connection");
    for group in [6, 7].map(GroupId) {
        let answer = wire::read_next(&mut far, &mut from).await.unwrap();
        let Some(Frame::Group { group: of, frame: GroupFrame::End(EndFrame::Decided { outcome, .. }) }) = answer else {
            panic!("{answer:?}")
        };
        let Outcome::Failed(verdict) = outcome else { panic!("{outcome:?}") };
        assert_eq!((of, &verdict.failed[..]), (group, &[(1, FailureCause::Restarted)][..]));
    }
    // Nor does it hear of their ends when this node leaves.
    mesh.leave().await;
    assert_eq!(wire::read_next(&mut far, &mut from).await.unwrap(), Some(Frame::Goodbye));
}

#[tokio::test]
async fn what_a_process_sent_before_another_took_its_place_is_void() {
    let mesh = mesh(2);
    let peer = NodeId(1);
    let members = Arc::from([NodeId(0), peer]);
    let offer = |group| {
        let frame = GroupFrame::Offer { spec: [0; 32], told: 0, blocks: None, table: None };
        wire::encode_unchecked(&Frame::Group { group: GroupId(group), frame })
    };
    let (mut old, mut check) = (connect(&mesh, peer, None).await, FrameCheck::default());
    let mut inbox = mesh.open_group(GroupId(7), &members).expect("a new group");
    for group in [8, 7] {
        let mut frame = offer(group);
        check.seal(&mut frame);
        old.write_all(&frame).await.unwrap();
    }
    assert!(matches!(inbox.next().await, Some(GroupEvent::Frame(..))));
    let mut followed = mesh.members();
    assert_eq!(followed.next().await, Some(MemberEvent::Joined(peer)));
    // The end of the old connection is not noticed yet.
    let mut far = connect_again(&mesh, peer, 1).await;
    assert!(matches!(inbox.next().await, Some(GroupEvent::Lost(_, FailureCause::Restarted))));
    assert_eq!(followed.next().await, Some(MemberEvent::Lost(peer, FailureCause::Restarted)));
    assert_eq!(followed.next().await, Some(MemberEvent::Returned { node: peer, restarted: true }));
    // A frame of the old connection may still be read.
    mesh.deliver((peer, 0), GroupId(8), GroupFrame::RepeatRow).await;
    let mut new = mesh.open_group(GroupId(8), &members).expect("a new group");
    let mut frame = offer(8);
    FrameCheck::default().seal(&mut frame);
    far.write_all(&frame).await.unwrap();
    assert!(matches!(new.next().await, Some(GroupEvent::Frame(_, GroupFrame::Offer { .. }))));
    mesh.leave_group(GroupId(8));
    assert!(new.next().await.is_none(), "the offer came once");
}

/// Half of the longest frame.
fn long_offer() -> GroupFrame {
    let blocks = BlockEndpoints { data: vec![0; 1 << 19], ready: Vec::new(), cells: [0; 24] };
    GroupFrame::Offer { spec: [0; 32], told: 0, blocks: Some(blocks), table: None }
}
