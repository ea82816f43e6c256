//! Private decoders and states, public for the fuzz targets. The module exists only with the feature `fuzzing`.

use rdmc_fabric::frames::FrameCheck;
use rdmc_fabric::{Buffer, Expose, Fabric, MemNetwork, Memory};

pub use crate::gateway::fuzzing::{gateway_notes, reencoded_note, take_slabs_apart};
use crate::session::state::{ANNOUNCED_MAX, OutgoingSlab, Slab, SlabMemory, State};
use crate::wire::{self, Frame, Place, Progress, SlabFrame};

/// Decodes a frame, and encodes it again; `None` if the bytes are no frame.
pub fn reencoded(bytes: &[u8]) -> Option<Vec<u8>> {
    wire::decode(bytes).ok().map(|frame| value(&frame))
}

/// Returns the values of a few frames.
pub fn frames() -> Vec<Vec<u8>> {
    let slab = SlabFrame { number: 0, len: 5, check: 1, place: Place::Exposed([7; 24]), note: b"note".to_vec() };
    let frames = [
        Frame::Slab(slab),
        Frame::Slab(SlabFrame { number: 1, len: 2, check: 1, place: Place::Inline(vec![1, 2]), note: Vec::new() }),
        Frame::Taken { slabs: 2 },
        Frame::Finished { slabs: 1 },
        Frame::Stopped,
        Frame::Message { number: 0, bytes: b"message".to_vec() },
        Frame::Heard { messages: 1 },
        Frame::Ping { at: 9 },
        Frame::Abort { reason: "reason".into() },
        Frame::Goodbye,
    ];
    frames.iter().map(value).collect()
}

fn value(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    wire::encode(frame, &mut FrameCheck::default(), &mut bytes);
    bytes[4..bytes.len() - 4].to_vec()
}

/// Returns a slab of these bytes.
pub(crate) fn slab_of(bytes: &[u8], note: &[u8]) -> Slab {
    let fabric = MemNetwork::new().fabric();
    let bytes = fabric.register(Memory::from(bytes.to_vec())).expect("memory is registered").into_shared();
    Slab { bytes, note: note.to_vec() }
}

/// Plays frames of the other end to a session that has sent three slabs and two messages, over several connections.
///
/// # Panics
/// If the session promises something that it does not keep.
pub fn play(values: &[&[u8]], resumptions: &[(u64, u64)]) {
    let fabric = MemNetwork::new().fabric();
    let mut state = State::default();
    for number in 0..3 {
        let exposed = fabric.expose(Expose::Frozen(Buffer::empty())).expect("memory is exposed");
        let memory = SlabMemory::Exposed(exposed);
        state.outgoing.push(OutgoingSlab { memory, len: number, check: 0, note: Vec::new() });
    }
    state.outgoing.finish();
    for message in [b"one", b"two"] {
        state.messages.push(&mut Some(message.to_vec()));
    }
    let (mut taken, mut resumptions) = (0, resumptions.iter());
    for (at, value) in values.iter().enumerate() {
        if at % 7 == 6
            && let Some((slabs, messages)) = resumptions.next()
            && state.resume(Progress { slabs: *slabs, messages: *messages }).is_err()
        {
            return;
        }
        let told = state.take_frames();
        assert!(told.len() <= ANNOUNCED_MAX + 80, "{} frames are told at once", told.len());
        let Ok(frame) = wire::decode(value) else { continue };
        if state.apply(frame).is_err() {
            return;
        }
        assert!(state.outgoing.taken() >= taken && state.outgoing.taken() <= 3, "slabs are taken once");
        taken = state.outgoing.taken();
        while let Some(slab) = state.incoming.next_announced() {
            state.incoming.take(Slab { bytes: Buffer::empty(), note: slab.note });
        }
        while let Some(Some(_)) = state.incoming.next_ready() {}
        while state.messages.next().is_some() {}
    }
}
