//! Invitations, among them to clusters with several fabrics: TCP under other names.

use std::net::Ipv4Addr;
use std::sync::Arc;

use futures::StreamExt;
use futures::future::Either;
use rdmc_fabric::{
    Capabilities, CompletionQueue, Fabric, FabricDecorator, FabricError, Rendezvous, TcpConfig, TcpFabric,
};

use super::*;
use crate::detection::DetectionError;
use crate::mesh::listener::Listener;
use crate::mesh::roster::Roster;
use crate::node::Node;
use crate::{CompletionMode, GroupError, GroupSpec, StartError};

/// TCP under another name, and with bounds of its own.
#[derive(Debug)]
struct Renamed {
    name: &'static str,
    tcp: Arc<TcpFabric>,
}

impl FabricDecorator for Renamed {
    fn inner(&self) -> &dyn Fabric {
        &*self.tcp
    }

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = Capabilities::new(self.name);
        capabilities.message_len_max = MESSAGE_LEN_MAX;
        capabilities.completions_max = 4096;
        capabilities
    }

    fn create_completion_queue(&self, capacity: u32, mode: CompletionMode) -> Result<CompletionQueue, FabricError> {
        assert!(capacity <= Fabric::capabilities(self).completions_max, "{capacity} is more than it has");
        self.tcp.create_completion_queue(capacity, mode)
    }
}

/// Makes fabrics of these names that share a rendezvous.
fn fabrics(names: &[&'static str]) -> Fabrics {
    let rendezvous = Rendezvous::new();
    let fabric = |&name: &&'static str| -> Arc<dyn Fabric> {
        let tcp = TcpFabric::with_rendezvous(TcpConfig::default(), rendezvous.clone());
        if name == "tcp" { tcp } else { Arc::new(Renamed { name, tcp }) }
    };
    Fabrics::new(names.iter().map(fabric).collect()).unwrap()
}

/// The outcome of an invitation at a listener that accepts everything.
type Outcome = io::Result<NodeBuilder>;

/// Invites listeners with these fabrics; returns what the inviting node and each of the others made of it.
async fn negotiate(ours: &[&'static str], theirs: &[&[&'static str]]) -> (Result<NodeBuilder, String>, Vec<Outcome>) {
    let mut listeners = Vec::new();
    for names in theirs {
        listeners.push(Listener::bind(fabrics(names), "127.0.0.1:0").await.unwrap());
    }
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_address().to_owned()).collect();
    let (done, ended) = tokio::sync::watch::channel(());
    let accepting = futures::future::join_all(listeners.iter().map(|listener| {
        let mut ended = ended.clone();
        async move {
            let invited = std::pin::pin!(listener.next_invitation());
            let over = std::pin::pin!(ended.changed());
            match futures::future::select(invited, over).await {
                Either::Left((invitation, _)) => invitation.accept().await,
                Either::Right(_) => Err(io::Error::other("not invited")),
            }
        }
    }));
    let inviting = async move {
        let invited = invite(fabrics(ours), &addresses, InviteOptions::new(LIMIT)).await;
        drop(done);
        // The ports are not the same every time.
        let numbered = addresses.iter().enumerate();
        invited.map_err(|error| {
            numbered.fold(error.to_string(), |text, (at, address)| text.replace(address, &format!("#{}", at + 1)))
        })
    };
    futures::join!(inviting, accepting)
}

fn reason(builder: &NodeBuilder) -> String {
    let choice = builder.fabric_choice().expect("it comes from an invitation").to_string();
    assert!(choice.starts_with(builder.fabric_name().expect("it has one")));
    choice
}

/// An invitation to a cluster of two nodes over TCP, with this detection time.
fn invitation(detection_ms: u32) -> Frame {
    Frame::Invite {
        version: PROTOCOL_VERSION,
        cluster: 1,
        you: NodeId(1),
        members: vec![(NodeId(0), String::new()), (NodeId(1), "a:1".into())],
        fabrics: vec!["tcp".to_owned()].try_into().unwrap(),
        payload: Vec::new(),
        detection_ms,
    }
}

#[tokio::test]
async fn replies_come_with_acceptances() {
    let mut listeners = Vec::new();
    for _ in 0..3 {
        listeners.push(Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0").await.unwrap());
    }
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_address().to_owned()).collect();
    let replies = [None, Some(vec![7; Invitation::REPLY_LEN_MAX]), Some(b"some".to_vec())];
    let accepting = listeners.iter().zip(replies.clone()).map(async |(listener, reply)| {
        let mut invitation = listener.next_invitation().await;
        if let Some(reply) = reply {
            invitation.reply(reply);
        }
        invitation.accept().await.unwrap()
    });
    let inviting = invite(fabrics(&["tcp"]), &addresses, InviteOptions::new(LIMIT));
    let (builder, accepted) = futures::join!(inviting, futures::future::join_all(accepting));
    let told: Vec<_> = builder.unwrap().replies().iter().map(|(node, reply)| (node.0, reply.to_vec())).collect();
    let due: Vec<_> = (1..).zip(replies.map(Option::unwrap_or_default)).collect();
    assert_eq!(told, due);
    assert!(accepted[0].replies().is_empty(), "they are the inviting application's");
}

#[tokio::test]
async fn an_invited_node_measures_the_round_trips_to_those_with_higher_numbers_and_its_node_uses_the_connections() {
    let listeners = [0; 3].map(|_| Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0"));
    let listeners = futures::future::try_join_all(listeners).await.unwrap();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_address().to_owned()).collect();
    let accepting = listeners.iter().map(async |listener| {
        let mut invitation = listener.next_invitation().await;
        let measured = invitation.round_trips(LIMIT).await;
        assert!(measured.values().all(|round_trip| !round_trip.is_zero()), "{measured:?}");
        let measured: Vec<_> = measured.into_keys().map(|node| node.0).collect();
        let expected: Vec<_> = (invitation.me().0 + 1..=3).collect();
        assert_eq!(measured, expected);
        // A second time they are known.
        assert_eq!(invitation.round_trips(LIMIT).await.len(), expected.len());
        invitation.accept().await.unwrap().start().await.unwrap()
    });
    let inviting = async {
        let reached = reach_listeners(fabrics(&["tcp"]), &addresses, InviteOptions::new(LIMIT)).await.unwrap();
        let measured = reached.round_trips();
        assert_eq!(measured.values().max(), reached.round_trip().as_ref());
        assert!(measured.into_keys().eq((1..=3).map(NodeId)));
        reached.invite("").await.unwrap().start().await.unwrap()
    };
    futures::join!(inviting, futures::future::join_all(accepting));
}

#[tokio::test]
async fn all_learn_what_the_inviting_application_concludes_from_their_replies() {
    let listeners = [0; 2].map(|_| Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0"));
    let listeners = futures::future::try_join_all(listeners).await.unwrap();
    let addresses: Vec<_> = listeners.iter().map(|listener| listener.local_address().to_owned()).collect();
    let accepting = listeners.iter().zip(1_u8..).map(async |(listener, number)| {
        let mut invitation = listener.next_invitation().await;
        invitation.reply([number]);
        invitation.accept().await.unwrap()
    });
    let inviting = async {
        let reached = reach_listeners(fabrics(&["tcp"]), &addresses, InviteOptions::new(LIMIT)).await?;
        reached.invite_and_conclude("payload", |replies| replies.values().flatten().copied().collect()).await
    };
    let (builder, accepted) = futures::join!(inviting, futures::future::join_all(accepting));
    assert_eq!(builder.unwrap().conclusion()[..], [1, 2]);
    accepted.iter().for_each(|builder| assert_eq!(builder.conclusion()[..], [1, 2]));
}

#[tokio::test]
async fn who_is_invited_notices_that_the_inviting_node_gives_up_before_it_has_started() {
    let (ours, theirs) = negotiate(&["tcp"], &[&["tcp"], &["tcp"]]).await;
    drop(ours.unwrap());
    for builder in theirs {
        let started = builder.unwrap().start().await;
        assert!(matches!(started, Err(StartError::GaveUp { .. })), "{started:?}");
    }
}

#[tokio::test]
async fn the_inviting_nodes_preference_is_used_if_everybody_has_it() {
    let (ours, theirs) = negotiate(&["verbs", "tcp"], &[&["verbs", "tcp"], &["tcp", "verbs"]]).await;
    assert_eq!(reason(&ours.unwrap()), "verbs: everybody has it");
    for builder in theirs {
        assert_eq!(reason(&builder.unwrap()), "verbs: everybody has it");
    }
}

#[tokio::test]
async fn both_sides_learn_who_lacks_what_would_be_better() {
    let (ours, theirs) = negotiate(&["verbs", "tcp"], &[&["verbs", "tcp"], &["tcp"]]).await;
    let said = reason(&ours.unwrap());
    assert!(said.starts_with("tcp: 127.0.0.1:") && said.ends_with(" has no verbs"), "{said}");
    for builder in theirs {
        assert_eq!(reason(&builder.unwrap()), said);
    }
    let (ours, theirs) = negotiate(&["tcp"], &[&["verbs", "tcp"]]).await;
    assert_eq!(reason(&ours.unwrap()), "tcp: everybody has it");
    assert_eq!(reason(theirs[0].as_ref().unwrap()), format!("tcp: {} has no verbs", Ipv4Addr::LOCALHOST));
}

#[tokio::test]
async fn a_listener_without_any_of_the_fabrics_refuses_and_names_both_lists() {
    let (ours, theirs) = negotiate(&["verbs"], &[&["verbs", "tcp"], &["tcp", "other"]]).await;
    let said = ours.unwrap_err();
    assert_eq!(said, "1 of the invited cannot take part: #2 refused: it offers tcp, other, not verbs");
    let said: Vec<_> = theirs.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
    let withdrawn = "the invitation was withdrawn: node 2 refused: it offers tcp, other, not verbs";
    assert_eq!(said, [withdrawn, "not invited"]);
}

#[tokio::test]
async fn without_a_fabric_for_all_everybody_who_lacks_one_is_named() {
    let (ours, theirs) = negotiate(&["verbs", "tcp"], &[&["verbs"], &["tcp"], &["tcp", "verbs"]]).await;
    let expected = "2 of the invited cannot take part: #1 offers verbs, not tcp, and no fabric is offered by all; \
                    #2 offers tcp, not verbs, and no fabric is offered by all";
    assert_eq!(ours.unwrap_err(), expected);
    assert!(theirs.iter().all(Result::is_err));
}

#[tokio::test]
async fn a_listener_may_offer_less_for_one_invitation() {
    let listener = Listener::bind(fabrics(&["verbs", "tcp"]), "127.0.0.1:0").await.unwrap();
    let address = listener.local_address().to_owned();
    let accept = async {
        let mut invitation = listener.next_invitation().await;
        assert!(!invitation.retain_fabrics(|fabric| fabric.name == "other"));
        assert_eq!(invitation.fabrics().len(), 2);
        assert!(invitation.retain_fabrics(|fabric| fabric.message_len_max > MESSAGE_LEN_MAX));
        invitation.accept().await.unwrap()
    };
    let addresses = [address.clone()];
    let (theirs, ours) =
        futures::join!(accept, invite(fabrics(&["verbs", "tcp"]), &addresses, InviteOptions::new(LIMIT)));
    let expected = format!("tcp: {address} has no verbs");
    assert_eq!((reason(&theirs), reason(&ours.unwrap())), (expected.clone(), expected));
}

#[tokio::test]
async fn the_chosen_fabric_carries_a_group_though_another_one_listens() {
    let (ours, theirs) = negotiate(&["second", "tcp"], &[&["tcp", "second"], &["tcp", "second"]]).await;
    let starts = std::iter::once(ours.unwrap()).chain(theirs.into_iter().map(Result::unwrap)).map(NodeBuilder::start);
    let nodes = futures::future::try_join_all(starts).await.unwrap();
    assert!(nodes.iter().all(|node| node.fabric_name() == "second" && node.fabric_choice().is_some()));
    let spec = |id| GroupSpec::new(id, nodes.iter().map(Node::id));
    let joins = nodes[1..].iter().map(|node| node.join_group(spec(1).block_size(1000)));
    let root = nodes[0].create_group(spec(1).block_size(1000));
    let (root, receivers) = futures::try_join!(root, futures::future::try_join_all(joins)).unwrap();
    let receive = receivers.into_iter().map(|mut receiver| async move {
        assert_eq!(receiver.next().await.unwrap().unwrap().len(), 12_345);
        receiver.close().await
    });
    let send = async {
        root.send(vec![1; 12_345]).await.unwrap();
        root.close().await
    };
    futures::try_join!(send, futures::future::try_join_all(receive)).unwrap();

    let too_long = nodes[0].create_group(spec(2)).await.unwrap_err();
    assert!(matches!(too_long, GroupError::BlockTooLong { bytes: 1_048_576, max: MESSAGE_LEN_MAX, fabric: "second" }));
}

#[tokio::test]
async fn what_is_no_list_of_fabrics_is_refused() {
    let listener = Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0").await.unwrap();
    let invite = invitation(2000);
    let mut bytes = wire::encode_unchecked(&invite);
    let at = bytes.windows(3).position(|bytes| bytes == b"tcp").unwrap();
    bytes[at] = b'\n';
    wire::FrameCheck::default().seal(&mut bytes);
    let environment = TcpFabric::new().environment();
    let mut stream = environment.connect(listener.local_address()).await.unwrap();
    stream.write_all(&bytes).await.unwrap();
    stream.flush().await.unwrap();
    assert!(matches!(wire::read(&mut stream).await, Ok(None) | Err(_)));
}

#[tokio::test]
async fn a_busy_listener_is_told_apart_from_one_that_refuses() {
    let listener = Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0").await.unwrap();
    let addresses = [listener.local_address().to_owned()];
    let accepting = async {
        listener.next_invitation().await.busy().await.unwrap();
        listener.next_invitation().await.decline("no room").await.unwrap();
    };
    let inviting = async {
        let busy = invite(fabrics(&["tcp"]), &addresses, InviteOptions::new(LIMIT)).await.unwrap_err();
        assert!(matches!(&busy.failures[..], [(_, InviteFailure::Busy)]), "{busy}");
        let declined = invite(fabrics(&["tcp"]), &addresses, InviteOptions::new(LIMIT)).await.unwrap_err();
        assert!(
            matches!(&declined.failures[..], [(_, InviteFailure::Refused { reason })] if reason == "no room"),
            "{declined}"
        );
    };
    futures::join!(accepting, inviting);
}

#[tokio::test]
async fn a_listener_whose_application_takes_no_invitations_is_busy() {
    let listener = Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0").await.unwrap();
    let addresses = [listener.local_address().to_owned()];
    // As many as wait, and some more.
    let invitations =
        (0..20).map(|_| invite(fabrics(&["tcp"]), &addresses, InviteOptions::new(Duration::from_secs(5))));
    let refused = futures::future::join_all(invitations).await.into_iter().map(|invited| invited.unwrap_err().failures);
    let refused: Vec<_> = refused.flatten().map(|(_, failure)| failure).collect();
    let busy = refused.iter().filter(|failure| matches!(failure, InviteFailure::Busy)).count();
    let silent = refused.iter().filter(|failure| matches!(failure, InviteFailure::Silent(_))).count();
    assert_eq!((busy, silent), (4, 16), "{refused:?}");
}

#[tokio::test]
async fn the_inviting_nodes_detection_time_applies_to_all() {
    let detection = Duration::from_millis(750);
    let listener = Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0").await.unwrap();
    let addresses = [listener.local_address().to_owned()];
    let start = async |change: fn(NodeBuilder) -> NodeBuilder| {
        let options = InviteOptions::new(LIMIT).detection(detection);
        let accepting = async {
            let invitation = listener.next_invitation().await;
            assert_eq!(invitation.detection(), detection);
            change(invitation.accept().await.unwrap()).connect_limit(Duration::from_secs(1)).start().await
        };
        let inviting = async {
            let invited = invite(fabrics(&["tcp"]), &addresses, options).await.unwrap();
            invited.connect_limit(Duration::from_secs(1)).start().await
        };
        futures::join!(inviting, accepting)
    };
    let (ours, theirs) = start(|builder| builder).await;
    assert_eq!((ours.unwrap().0.mesh.detection(), theirs.unwrap().0.mesh.detection()), (detection, detection));
    let (same, _) = start(|builder| builder.detection(Duration::from_millis(750))).await;
    assert!(same.is_ok());
    let (_, other) = start(|builder| builder.detection(Duration::from_secs(2))).await;
    let other = other.expect_err("the inviting node chooses");
    assert_eq!(other.to_string(), "a detection time of 2s where the inviting node chose 750ms for all nodes");
}

#[tokio::test]
async fn a_detection_time_out_of_bounds_is_refused() {
    let listener = Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0").await.unwrap();
    let addresses = [listener.local_address().to_owned()];
    for detection in [Duration::from_millis(49), Duration::from_secs(3601), Duration::MAX] {
        let options = InviteOptions::new(LIMIT).detection(detection);
        let failures = invite(fabrics(&["tcp"]), &addresses, options).await.unwrap_err().failures;
        let expected = DetectionError { got: detection };
        assert!(
            matches!(&failures[..], [(address, InviteFailure::Detection(error))]
                if address == &addresses[0] && *error == expected),
            "{failures:?}"
        );
        let builder = Node::builder(NodeId(0), Cluster::new([(0, "a")])).fabric(TcpFabric::new()).detection(detection);
        let refused = builder.start().await.expect_err("it is out of bounds");
        assert!(matches!(refused, StartError::Detection(error) if error == expected), "{refused}");
    }
    // Nor is it believed when a peer says it.
    let invite = invitation(49);
    let mut stream = TcpFabric::new().environment().connect(&addresses[0]).await.unwrap();
    write_frame(&mut stream, &wire::encode(&invite)).await.unwrap();
    let answer = wire::read(&mut stream).await.unwrap();
    let Some(Frame::Reject { reason }) = answer else { panic!("{answer:?}") };
    assert_eq!(reason.to_string(), "a detection time of 49ms is not between 50ms and 3600s");
}

/// Returns an address at which nobody listens.
fn dead_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

async fn listeners<const N: usize>() -> ([Listener; N], [String; N]) {
    let listeners = [0; N].map(|_| Listener::bind(fabrics(&["tcp"]), "127.0.0.1:0"));
    let listeners = futures::future::try_join_all(listeners).await.unwrap();
    let listeners: [Listener; N] = listeners.try_into().unwrap();
    let addresses = listeners.each_ref().map(|listener| listener.local_address().to_owned());
    (listeners, addresses)
}

#[tokio::test]
async fn a_quorum_goes_on_without_those_that_are_missing() {
    let ([first, third], addresses) = listeners().await;
    let dead = dead_address();
    let addresses = [addresses[0].clone(), dead.clone(), addresses[1].clone()];
    let accept = async |listener: &Listener, reply: &str| {
        let mut invitation = listener.next_invitation().await;
        assert_eq!(invitation.nodes(), [0, 1, 2, 3].map(NodeId));
        invitation.reply(reply);
        let builder = invitation.accept().await.unwrap();
        assert_eq!((&builder.conclusion()[..], builder.missing().len()), (&b"ac"[..], 0));
        builder.start().await.unwrap()
    };
    let inviting = async {
        let options = InviteOptions::new(LIMIT).quorum(2);
        let reached = reach_listeners(fabrics(&["tcp"]), &addresses, options).await.unwrap();
        let builder = reached.invite_and_conclude("", |replies| replies.values().flatten().copied().collect()).await;
        let builder = builder.unwrap();
        assert_eq!(builder.replies().keys().copied().collect::<Vec<_>>(), [NodeId(1), NodeId(3)]);
        assert!(
            matches!(builder.missing(), [(address, InviteFailure::Unreachable(_))] if *address == dead),
            "{:?}",
            builder.missing()
        );
        builder.start().await.unwrap()
    };
    let (ours, a, c) = futures::join!(inviting, accept(&first, "a"), accept(&third, "c"));
    for node in [&ours, &a, &c] {
        assert_eq!(node.nodes(), [0, 1, 3].map(NodeId));
    }
    let spec = GroupSpec::new(1, ours.nodes()).block_size(1000);
    let groups = futures::try_join!(ours.create_group(spec.clone()), a.join_group(spec.clone()), c.join_group(spec));
    let (root, a, c) = groups.unwrap();
    let receive = async |mut receiver: crate::Receiver| {
        assert_eq!(receiver.next().await.unwrap().unwrap().len(), 12_345);
        receiver.close().await
    };
    let send = async {
        root.send(vec![1; 12_345]).await.unwrap();
        root.close().await
    };
    futures::try_join!(send, receive(a), receive(c)).unwrap();
}

#[tokio::test]
async fn less_than_a_quorum_fails_and_names_all_that_are_missing() {
    let ([busy, ready], [busy_address, ready_address]) = listeners().await;
    let addresses = [dead_address(), busy_address, ready_address];
    let accepting = async {
        busy.next_invitation().await.busy().await.unwrap();
        ready.next_invitation().await.accept().await.map(drop).unwrap_err()
    };
    // More than are invited are all.
    let options = InviteOptions::new(LIMIT).quorum(2);
    let (invited, withdrawn) = futures::join!(invite(fabrics(&["tcp"]), &addresses, options), accepting);
    let failures = invited.unwrap_err().failures;
    assert!(
        matches!(&failures[..], [(dead, InviteFailure::Unreachable(_)), (busy, InviteFailure::Busy)]
            if *dead == addresses[0] && *busy == addresses[1]),
        "{failures:?}"
    );
    let withdrawn: InvitationWithdrawn = withdrawn.downcast().unwrap();
    assert_eq!(withdrawn.because_of, NodeId(1));
}

#[tokio::test]
async fn a_quorum_of_none_needs_one() {
    let options = InviteOptions::new(LIMIT).quorum(0);
    let dead = [dead_address(), dead_address()];
    let failures = invite(fabrics(&["tcp"]), &dead, options.clone()).await.unwrap_err().failures;
    assert_eq!(failures.iter().map(|(address, _)| address).collect::<Vec<_>>(), [&dead[0], &dead[1]]);
    let ([listener, _], [address, _]) = listeners().await;
    let addresses = [dead[0].clone(), address];
    let accepting = async { listener.next_invitation().await.accept().await.unwrap() };
    let (invited, accepted) = futures::join!(invite(fabrics(&["tcp"]), &addresses, options), accepting);
    assert_eq!((invited.unwrap().missing().len(), accepted.missing().len()), (1, 0));
}

#[tokio::test]
async fn without_a_quorum_and_with_one_above_all_every_listener_must_accept() {
    for quorum in [None, Some(2), Some(100)] {
        let ([listener], [address]) = listeners().await;
        let addresses = [address, dead_address()];
        let mut options = InviteOptions::new(LIMIT);
        options.quorum = quorum;
        let accepting = async { listener.next_invitation().await.accept().await.map(drop) };
        let (invited, accepted) = futures::join!(invite(fabrics(&["tcp"]), &addresses, options), accepting);
        assert_eq!(invited.unwrap_err().failures.len(), 1, "{quorum:?}");
        assert!(accepted.is_err());
    }
}

#[tokio::test]
async fn who_accepts_too_late_for_a_quorum_learns_it() {
    let ([ready, late], addresses) = listeners().await;
    let (invited, done) = tokio::sync::oneshot::channel();
    let inviting = async {
        let options = InviteOptions::new(Duration::from_secs(2)).quorum(1);
        let builder = invite(fabrics(&["tcp"]), &addresses, options).await.unwrap();
        invited.send(()).unwrap();
        assert!(matches!(builder.missing(), [(_, InviteFailure::Silent(_))]), "{:?}", builder.missing());
        builder.start().await.unwrap()
    };
    let accepting = async { ready.next_invitation().await.accept().await.unwrap().start().await.unwrap() };
    let late = async {
        let invitation = late.next_invitation().await;
        done.await.unwrap();
        invitation.accept().await.map(drop).unwrap_err()
    };
    let (ours, theirs, withdrawn) = futures::join!(inviting, accepting, late);
    assert_eq!((ours.nodes(), theirs.nodes()), ([0, 1].map(NodeId).into(), [0, 1].map(NodeId).into()));
    let withdrawn: InvitationWithdrawn = withdrawn.downcast().unwrap();
    assert_eq!((withdrawn.because_of, &withdrawn.address), (NodeId(2), &addresses[1]));
}

#[tokio::test]
async fn who_goes_before_the_others_have_answered_is_missing() {
    let ([goes, stays], addresses) = listeners().await;
    let (gone, has_gone) = tokio::sync::oneshot::channel();
    let going = async {
        let mut accepting = std::pin::pin!(goes.next_invitation().await.accept());
        assert!((&mut accepting).now_or_never().is_none());
        gone.send(()).unwrap();
    };
    let staying = async {
        let invitation = stays.next_invitation().await;
        has_gone.await.unwrap();
        invitation.accept().await.unwrap().start().await.unwrap()
    };
    let inviting = async {
        let options = InviteOptions::new(LIMIT).quorum(1);
        let builder = invite(fabrics(&["tcp"]), &addresses, options).await.unwrap();
        assert!(matches!(builder.missing(), [(_, InviteFailure::Closed(_))]), "{:?}", builder.missing());
        builder.start().await.unwrap()
    };
    let (ours, theirs, ()) = futures::join!(inviting, staying, going);
    assert_eq!((ours.nodes(), theirs.nodes()), ([0, 2].map(NodeId).into(), [0, 2].map(NodeId).into()));
}

#[tokio::test]
async fn a_quorum_chooses_a_fabric_among_those_that_take_part() {
    let best = Listener::bind(fabrics(&["verbs", "tcp"]), "127.0.0.1:0").await.unwrap();
    let other = Listener::bind(fabrics(&["other"]), "127.0.0.1:0").await.unwrap();
    let addresses = [other.local_address().to_owned(), best.local_address().to_owned()];
    let accepting = async { best.next_invitation().await.accept().await.unwrap() };
    let options = InviteOptions::new(LIMIT).quorum(1);
    let inviting = invite(fabrics(&["verbs", "tcp"]), &addresses, options);
    let (ours, theirs) = futures::join!(inviting, accepting);
    let ours = ours.unwrap();
    assert_eq!((reason(&ours), reason(&theirs)), ("verbs: everybody has it".into(), "verbs: everybody has it".into()));
    assert!(matches!(ours.missing(), [(_, InviteFailure::OtherFabrics { .. })]), "{:?}", ours.missing());
}

#[tokio::test]
async fn an_inviting_node_cannot_start_without_itself_or_the_invited_one() {
    for missing in [0, 1] {
        let ([listener], [address]) = listeners().await;
        let inviting = async {
            let mut stream = TcpFabric::new().environment().connect(&address).await.unwrap();
            write_frame(&mut stream, &wire::encode(&invitation(2000))).await.unwrap();
            let Some(Frame::Accept { fabrics, .. }) = wire::read(&mut stream).await.unwrap() else { panic!() };
            let chosen = fabrics.choose(&[]).unwrap();
            let go = Frame::Go { chosen, conclusion: Vec::new(), missing: [NodeId(missing)].into() };
            write_frame(&mut stream, &wire::encode(&go)).await.unwrap();
            stream
        };
        let accepting = async { listener.next_invitation().await.accept().await.map(drop) };
        let (accepted, _stream) = futures::join!(accepting, inviting);
        assert!(accepted.unwrap_err().to_string().contains("without itself or this node"));
    }
}

#[test]
fn a_list_of_members_must_make_sense() {
    let roster = |you: u32, members: &[(u32, &str)]| {
        let members = members.iter().map(|&(node, address)| (NodeId(node), address.to_owned())).collect();
        Roster::new(1, NodeId(you), members, NodeBuilder::DETECTION_DEFAULT).is_some()
    };
    assert!(roster(1, &[(0, ""), (1, "a:1")]));
    assert!(!roster(0, &[(0, ""), (1, "a:1")]), "the inviting node itself");
    assert!(!roster(2, &[(0, ""), (1, "a:1")]), "not in the list");
    assert!(!roster(1, &[(0, ""), (1, "a:1"), (1, "b:1")]), "twice in the list");
    assert!(!roster(1, &[(0, ""), (1, "a\u{1b}[2J:1")]), "not printable");
    assert!(!roster(1, &[(0, ""), (1, &"a".repeat(301))]), "too long");
}

const LIMIT: Duration = Duration::from_secs(60);
const MESSAGE_LEN_MAX: u64 = 64 << 10;
