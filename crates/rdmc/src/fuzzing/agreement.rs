//! One member of a group; bytes determine what the other members send and do.

use std::time::Duration;

use rdmc_fabric::Timestamp;
use serde::{Deserialize, Serialize};

use crate::failure::FailureCause;
use crate::group::agreement::{Agreement, Patience};
use crate::wire::end::{Ballot, EndFrame, Evidence, Outcome, Report};

/// An event at the member.
#[derive(Debug, Serialize, Deserialize)]
enum Event {
    Hear(u8, EndFrame),
    Lose(u8),
    Reconnect(u8),
    Accuse(u8),
    Refuse,
    Wait { ms: u16 },
    Message,
    Close,
    Confirm,
}

/// Plays the events that bytes encode, after the number of members and this one's rank.
///
/// # Panics
/// If the member violates an invariant.
pub fn play(bytes: &[u8]) {
    let [members, me, rest @ ..] = bytes else { return };
    let mut rest: &[u8] = rest;
    let members = u32::from(members % 7) + 1;
    let me = u32::from(*me) % members;
    let patience =
        Patience { settling: Duration::from_millis(250), outbid: Duration::from_secs(1), all: Duration::from_secs(8) };
    let mut agreement = Agreement::new(me, members, patience);
    let mut now = Timestamp::ZERO;
    let mut decided = None;
    while let Ok((event, left)) = postcard::take_from_bytes::<Event>(rest) {
        rest = left;
        if let Event::Wait { ms } = &event {
            now = now + Duration::from_millis((*ms).into());
        }
        step(&mut agreement, event, me, members, now);
        let frames = agreement.take_frames();
        assert!(frames.len() <= 8 * members as usize, "{} frames for one event", frames.len());
        assert!(frames.iter().all(|(to, _)| *to != me && *to < members));
        if let Some(first) = &decided {
            assert_eq!(agreement.outcome(), Some(first), "an outcome changed");
        }
        decided = agreement.outcome().cloned();
        assert!(decided.is_none() || agreement.stopped());
    }
    if agreement.stopped() && decided.is_none() {
        // No member answers any more: it ends by itself.
        while agreement.outcome().is_none() {
            let at = agreement.deadline().expect("one that has stopped gives up some day");
            now = now.max(at);
            agreement.elapse(now);
            assert!(now.since(Timestamp::ZERO) <= patience.all + Duration::from_secs(1) * 65_536);
        }
    }
}

fn step(agreement: &mut Agreement, event: Event, me: u32, members: u32, now: Timestamp) {
    // No member receives its own frames, and roles are types.
    let rank = |rank: u8| (me + 1 + u32::from(rank) % (members - 1).max(1)) % members;
    let is_about_others = matches!(event, Event::Hear(..) | Event::Lose(_) | Event::Reconnect(_) | Event::Accuse(_));
    match event {
        _ if is_about_others && members == 1 => {}
        Event::Hear(from, frame) => _ = agreement.receive(rank(from), frame, now),
        Event::Lose(other) => agreement.lose(rank(other), FailureCause::ConnectionLost, now),
        Event::Reconnect(other) => agreement.reconnect(rank(other), now),
        Event::Accuse(other) => agreement.accuse([(rank(other), FailureCause::NotJoined)], now),
        Event::Refuse => agreement.declare(FailureCause::Abandoned, now),
        Event::Wait { .. } => agreement.elapse(now),
        Event::Message => {
            let _ = agreement.begin(1) && agreement.hold();
        }
        Event::Close if me == 0 && agreement.messages().is_none() => agreement.close(agreement.held(), now),
        Event::Confirm if me != 0 => agreement.confirm(now),
        Event::Close | Event::Confirm => {}
    }
}

/// Makes inputs, by their names.
pub fn examples() -> Vec<(&'static str, Vec<u8>)> {
    let input = |members: u8, me: u8, events: &[Event]| {
        let mut bytes = vec![members - 1, me];
        bytes.extend(events.iter().flat_map(|event| postcard::to_stdvec(event).expect("plain data is encoded")));
        bytes
    };
    let (ballot, confirm) = (Ballot { attempt: 1, leader: 0 }, EndFrame::Confirm { messages: 1 });
    let closed = Outcome::Closed { messages: 1 };
    let report = |ballot| EndFrame::Report { ballot, report: Box::new(Report::default()) };
    let root = [
        Event::Message,
        Event::Close,
        Event::Hear(1, confirm.clone()),
        Event::Hear(2, confirm),
        Event::Hear(1, EndFrame::Accepted { ballot: Ballot::CLOSE }),
    ];
    let member = [
        Event::Message,
        Event::Hear(0, EndFrame::Closing { messages: 1, digest: None }),
        Event::Confirm,
        Event::Hear(0, EndFrame::Propose { ballot: Ballot::CLOSE, outcome: closed.clone(), quorum: true }),
        Event::Hear(0, EndFrame::Decided { ballot: Ballot::CLOSE, outcome: closed }),
    ];
    let loss = [
        Event::Lose(2),
        Event::Hear(1, EndFrame::Wedged(Evidence { lost: vec![2], ..Evidence::default() })),
        Event::Hear(1, report(ballot)),
        Event::Hear(1, EndFrame::Accepted { ballot }),
    ];
    let duel = [
        Event::Refuse,
        Event::Hear(1, EndFrame::Gather { ballot: Ballot { attempt: 2, leader: 1 } }),
        Event::Hear(2, EndFrame::Outbid { promised: ballot }),
        Event::Wait { ms: 1000 },
        Event::Reconnect(1),
        Event::Accuse(2),
        Event::Hear(3, EndFrame::Absent { left: true }),
    ];
    vec![
        ("close-root", input(3, 0, &root)),
        ("close-member", input(3, 1, &member)),
        ("loss", input(3, 0, &loss)),
        ("duel", input(4, 0, &duel)),
    ]
}
