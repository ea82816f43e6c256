//! Targets for the peers of sessions over long paths.

use rdmc_wan::fuzzing::{frames, play, reencoded};

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
