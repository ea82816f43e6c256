//! Slabs that many flows share: how they are filled, and how they are taken apart.

use super::flow::{Over, Read};
use super::hub::{Hub, Next};
use super::note::{self, FlowNumber, NoteWriter, Piece, Violation};
use super::target::Target;
use crate::session::{SessionError, Slab, SlabSender};

/// Fills slabs and sends them, until the hub has stopped and all has left.
///
/// A slab leaves when it is full, or when nothing more waits. While the path holds back the next slab, bytes wait in
/// the sockets: so slabs are long under load, and a lone request leaves at once.
pub(super) async fn send(hub: &Hub, mut sender: SlabSender) -> Result<(), SessionError> {
    let mut unused = None;
    while hub.waiting().await {
        let mut slab = match unused.take() {
            Some(slab) => slab,
            None => sender.slab().await?,
        };
        // Other flows may notice now that their sockets have bytes.
        tokio::task::yield_now().await;
        let mut note = NoteWriter::default();
        let len = fill(hub, &mut slab, &mut note);
        if note.is_empty() {
            // The flow with bytes is over.
            unused = Some(slab);
            continue;
        }
        sender.send(slab, len, note.finish()).await?;
    }
    drop(unused);
    sender.finish().await
}

/// Fills a slab with what waits; returns the length of its bytes.
fn fill(hub: &Hub, slab: &mut [u8], note: &mut NoteWriter) -> usize {
    let mut at = 0;
    while at < slab.len() && note.has_room() {
        match hub.next() {
            None => break,
            Some(Next::Piece(piece)) => note.push(&piece),
            Some(Next::Grant(flow)) => {
                if let Some(bytes) = flow.take_grant() {
                    note.push(&Piece::Grant { flow: flow.number, bytes });
                }
            }
            Some(Next::Bytes(flow, left)) => {
                let end = slab.len().min(at + left);
                match flow.read(&mut slab[at..end]) {
                    Read::Bytes(len) => {
                        note.push_bytes(flow.number, u32::try_from(len).expect("a turn has fewer bytes"));
                        at += len;
                        hub.turn(flow, left - len);
                    }
                    Read::End => {
                        note.push(&Piece::Finished { flow: flow.number });
                        flow.release();
                    }
                    Read::Nothing => flow.release(),
                }
            }
        }
    }
    at
}

/// Takes a slab apart; `open` gets the flows that the other end opens.
pub(super) fn take_apart(
    hub: &Hub,
    slab: &Slab,
    mut open: impl FnMut(FlowNumber, Target, u8) -> Result<(), Violation>,
) -> Result<(), Violation> {
    let mut bytes: &[u8] = &slab.bytes;
    for piece in note::decode(&slab.note)? {
        match piece {
            Piece::Open { flow, target, passed } => open(flow, target, passed)?,
            Piece::Opened { flow } => {
                if let Some(flow) = hub.flow(flow)? {
                    flow.change(|state| state.answer(Ok(())));
                }
            }
            Piece::Refused { flow, reason } => {
                if let Some(flow) = hub.flow(flow)? {
                    tracing::debug!(flow = flow.number, %reason, "flow refused");
                    flow.change(|state| {
                        state.answer(Err(reason));
                        state.end(Over::Ended);
                    });
                }
            }
            Piece::Bytes { flow, len } => {
                let (of_flow, rest) = bytes.split_at_checked(len as usize).ok_or(Violation("pieces without bytes"))?;
                bytes = rest;
                if let Some(flow) = hub.flow(flow)?
                    && flow.deliver(of_flow)?
                {
                    hub.grant(flow);
                }
            }
            Piece::Finished { flow } => hub.flow(flow)?.map_or(Ok(()), |flow| flow.finish())?,
            Piece::Reset { flow } => {
                if let Some(flow) = hub.flow(flow)? {
                    flow.change(|state| state.end(Over::Ended));
                }
            }
            Piece::Grant { flow, bytes } => hub.flow(flow)?.map_or(Ok(()), |flow| flow.add_credit(bytes))?,
        }
    }
    if bytes.is_empty() { Ok(()) } else { Err(Violation("bytes without pieces")) }
}
