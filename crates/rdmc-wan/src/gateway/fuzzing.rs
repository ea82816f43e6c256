//! What the fuzz targets see of gateways.

use super::GatewayConfig;
use super::hub::Hub;
use super::note::{self, NoteWriter, Piece, RefusedReason, Violation};
use super::slabs::take_apart;
use super::target::Target;
use crate::fuzzing::slab_of;

/// Decodes a note, and encodes it again; `None` if the bytes are no note.
pub fn reencoded_note(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut writer = NoteWriter::default();
    note::decode(bytes).ok()?.iter().for_each(|piece| writer.push(piece));
    Some(writer.finish())
}

/// Returns a few notes: of each piece alone, and of a flow from its beginning to its end, with as many bytes as belong
/// to the slab.
pub fn gateway_notes() -> Vec<(Vec<u8>, usize)> {
    let target = Target::Name { host: "host".to_owned(), port: 7 };
    let pieces = [
        Piece::Open { flow: 1, target, passed: 1 },
        Piece::Opened { flow: 1 },
        Piece::Bytes { flow: 1, len: 5 },
        Piece::Grant { flow: 1, bytes: 9 },
        Piece::Finished { flow: 1 },
        Piece::Reset { flow: 2 },
        Piece::Refused { flow: 3, reason: RefusedReason::TimedOut },
    ];
    let note = |pieces: &[Piece]| {
        let mut writer = NoteWriter::default();
        pieces.iter().for_each(|piece| writer.push(piece));
        let len = pieces.iter().map(|piece| if let Piece::Bytes { len, .. } = piece { *len as usize } else { 0 });
        (writer.finish(), len.sum())
    };
    pieces.iter().map(std::slice::from_ref).chain([&pieces[..5], &pieces[1..]]).map(note).collect()
}

/// Takes slabs of the other end apart, each a note and bytes: at an entrance with three flows, or at an exit.
///
/// # Panics
/// If the gateway keeps more than it may.
pub fn take_slabs_apart(at_entrance: bool, slabs: &[(&[u8], &[u8])]) {
    let config = GatewayConfig { flows_max: 4, ..Default::default() };
    let hub = Hub::new(&config);
    if at_entrance {
        for port in 1..=3 {
            let target = Target::new("host", port).expect("it is a name");
            hub.open(target, 0).expect("there is room");
        }
    }
    for (note, bytes) in slabs {
        let taken = take_apart(&hub, &slab_of(bytes, note), |number, _, _| match at_entrance {
            true => Err(Violation("a flow at an entrance")),
            false => hub.admit(number).map(drop),
        });
        assert!(hub.flow_count() <= config.flows_max, "there are {} flows", hub.flow_count());
        if taken.is_err() {
            return;
        }
        while hub.next().is_some() {}
    }
}
