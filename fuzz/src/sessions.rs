//! Targets for the peers of sessions over long paths.

use rdmc_wan::fuzzing::{frames, gateway_notes, play, reencoded, reencoded_note, take_slabs_apart};

use crate::allocation::{PER_BYTE, bounded};
use crate::{Seed, named};

/// Checks that a frame that is decoded is the one that was encoded.
pub fn frame(bytes: &[u8]) {
    let Some(encoded) = bounded(bytes.len(), PER_BYTE, || reencoded(bytes)) else { return };
    assert_eq!(reencoded(&encoded).as_deref(), Some(&encoded[..]));
}

/// Makes frames.
pub fn frame_seeds() -> Vec<Seed> {
    named(frames().into_iter().enumerate().map(|(number, value)| (format!("frame-{number}"), value)))
}

/// Plays frames to a session. Each is a length in one byte and its value; first come three progresses in a byte each.
pub fn state(bytes: &[u8]) {
    let Some((progress, mut rest)) = bytes.split_at_checked(3) else { return };
    let resumptions: Vec<(u64, u64)> =
        progress.iter().map(|byte| (u64::from(byte & 15), u64::from(byte >> 4))).collect();
    let mut values = Vec::new();
    while let Some((len, after)) = rest.split_first() {
        let (value, after) = after.split_at(after.len().min(usize::from(*len)));
        values.push(value);
        rest = after;
    }
    play(&values, &resumptions);
}

/// Makes plays.
pub fn state_seeds() -> Vec<Seed> {
    let play = |progress: [u8; 3], values: &[Vec<u8>]| {
        let framed = values.iter().flat_map(|value| {
            let len = u8::try_from(value.len()).expect("these are short");
            [len].into_iter().chain(value.iter().copied())
        });
        progress.into_iter().chain(framed).collect::<Vec<u8>>()
    };
    let all = frames();
    named([
        ("all", play([0x23, 0x23, 0x23], &all)),
        ("again", play([0x12, 0x23, 0], &[all.clone(), all.clone()].concat())),
        ("end", play([0; 3], &[all[0].clone(), all[2].clone(), vec![1, 3], all[9].clone()])),
    ])
}

/// Checks that a note of a gateway that is decoded is the one that was encoded.
pub fn note(bytes: &[u8]) {
    let Some(encoded) = bounded(bytes.len(), PER_BYTE, || reencoded_note(bytes)) else { return };
    assert_eq!(reencoded_note(&encoded).as_deref(), Some(&encoded[..]));
}

/// Makes notes.
pub fn note_seeds() -> Vec<Seed> {
    named(gateway_notes().into_iter().enumerate().map(|(number, (note, _))| (format!("note-{number}"), note)))
}

/// Takes slabs of a gateway apart. Each is the lengths of its note and of its bytes, and both; first comes a byte whose
/// lowest bit is set at an entrance.
pub fn slabs(bytes: &[u8]) {
    let Some((at_entrance, mut rest)) = bytes.split_first() else { return };
    let mut slabs = Vec::new();
    while let [note_len, len, after @ ..] = rest {
        let (note, after) = after.split_at(after.len().min(usize::from(*note_len)));
        let (bytes, after) = after.split_at(after.len().min(usize::from(*len)));
        slabs.push((note, bytes));
        rest = after;
    }
    take_slabs_apart(at_entrance & 1 == 1, &slabs);
}

/// Makes slabs.
pub fn slabs_seeds() -> Vec<Seed> {
    let notes = gateway_notes();
    let slab = |(note, len): &(Vec<u8>, usize)| {
        let lens = [note.len(), *len].map(|len| u8::try_from(len).expect("these are short"));
        lens.into_iter().chain(note.iter().copied()).chain(vec![7; *len]).collect::<Vec<u8>>()
    };
    let play = |first: u8, notes: &[(Vec<u8>, usize)]| {
        [first].into_iter().chain(notes.iter().flat_map(slab)).collect::<Vec<u8>>()
    };
    let last = notes.len() - 1;
    named([("exit", play(0, &notes[last - 1..last])), ("entrance", play(1, &notes[last..])), ("all", play(0, &notes))])
}
