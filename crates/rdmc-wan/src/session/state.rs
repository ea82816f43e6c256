//! How far a session has come: what outlives its connections.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use rdmc_fabric::{Buffer, ExposedRegion, RemoteMemory};

use super::error::SessionError;
use crate::wire::{Frame, INLINE_LEN_MAX, Place, Progress, SlabFrame, printable};

/// Both directions of a session, as this end sees them.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) outgoing: Outgoing,
    pub(crate) incoming: Incoming,
    pub(crate) messages: Messages,
    /// What this end tells the other before it fails.
    abort: Option<String>,
    goodbye_told: bool,
    /// The last word to the other end has left.
    pub(crate) goodbye_left: bool,
    pub(crate) goodbye_heard: bool,
    pub(crate) ended: Option<Result<(), SessionError>>,
    /// The session's task has ended.
    pub(crate) released: bool,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    /// How often the connection was lost.
    pub(crate) lost: u64,
    /// How often another connection took over.
    pub(crate) resumed: u64,
    /// The least round trip of the present connection.
    pub(crate) round_trip: Option<Duration>,
}

/// Slabs to the other end.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    /// Slabs that the other end has taken, from the first. The oldest of `slabs` has this number.
    taken: u64,
    slabs: VecDeque<OutgoingSlab>,
    /// Slabs that the other end knows of, over this connection.
    announced: u64,
    finished: bool,
    finish_told: bool,
    /// The other end wants no more.
    stopped: bool,
    /// Slabs that it has not taken then.
    lost: u64,
    /// Landings of the other end that no slab has.
    landings: VecDeque<[u8; 24]>,
    /// The number of the first of these.
    landings_used: u32,
    /// All slabs before this number have landings, or need none.
    landed: u64,
}

/// A slab that the other end has not taken yet.
#[derive(Debug)]
pub(crate) struct OutgoingSlab {
    pub(crate) memory: SlabMemory,
    pub(crate) len: u32,
    pub(crate) check: u128,
    pub(crate) note: Vec<u8>,
}

/// Slabs of the other end.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    /// Slabs that are announced over this connection, and not yet fetched.
    announced: VecDeque<SlabFrame>,
    /// Bytes of the notes of these.
    note_bytes: usize,
    /// The number of the next slab to be announced.
    next: u64,
    /// Slabs that are in this end's memory, from the first.
    taken: u64,
    taken_told: u64,
    /// Slabs that the application has not yet seen.
    ready: VecDeque<Slab>,
    /// The number of slabs in all, when the other end has said it.
    finish: Option<u64>,
    /// Slabs that have arrived with other bytes than were announced, and how often; none of them is taken.
    corrupt: HashMap<u64, u32>,
    /// The application wants no more.
    stopped: bool,
    stop_told: bool,
    /// Landings that the other end does not know of yet.
    landings: Vec<[u8; 24]>,
}

/// The memory of a slab that the other end has not taken yet.
#[derive(Debug)]
pub(crate) enum SlabMemory {
    /// The other end may read it.
    Exposed(ExposedRegion),
    /// It is written into a landing of the other end, in so many pieces. `None` before that has begun.
    Written { bytes: Buffer, pieces: Option<u32> },
    /// It is so short that it travels with its announcement. Its place in the ring is free already.
    Short(Vec<u8>),
}

/// A slab that is to be written into a landing.
pub(crate) struct Writing {
    pub(crate) bytes: Buffer,
    pub(crate) place: RemoteMemory,
    /// The number of the landing.
    pub(crate) landing: u32,
}

/// Bytes that have arrived together.
#[derive(Debug)]
#[non_exhaustive]
pub struct Slab {
    /// The bytes. Their memory goes back to the session's ring when the last holder drops it.
    pub bytes: Buffer,
    /// What the sender says of them.
    pub note: Vec<u8>,
}

/// Messages beside the slabs, in both directions.
#[derive(Debug, Default)]
pub(crate) struct Messages {
    /// Own messages that the other end's application has received, from the first. The oldest of `own` has this number.
    heard: u64,
    own: VecDeque<Vec<u8>>,
    /// Own messages that were sent over this connection, or before it began.
    told: u64,
    /// The other end's messages that were received, from the first.
    received: u64,
    inbox: VecDeque<Vec<u8>>,
    /// The other end's messages of which it knows that the application has them.
    heard_told: u64,
}

/// The other end has broken the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Violation(pub(crate) &'static str);

impl State {
    /// Returns what this end has received.
    pub(crate) fn progress(&self) -> Progress {
        Progress { slabs: self.incoming.taken, messages: self.messages.received }
    }

    /// Begins anew over another connection, when the other end has received so much.
    pub(crate) fn resume(&mut self, theirs: Progress) -> Result<(), Violation> {
        self.outgoing.note_taken(theirs.slabs)?;
        let out = &mut self.outgoing;
        (out.announced, out.finish_told) = (out.taken, false);
        out.forget_landings();
        let incoming = &mut self.incoming;
        incoming.announced.clear();
        incoming.landings.clear();
        incoming.note_bytes = 0;
        (incoming.next, incoming.taken_told, incoming.stop_told) = (incoming.taken, incoming.taken, false);
        let messages = &mut self.messages;
        let sent = messages.heard + messages.own.len() as u64;
        if !(messages.heard..=sent).contains(&theirs.messages) {
            return Err(Violation("it has received messages that were not sent"));
        }
        messages.told = theirs.messages;
        messages.heard_told = 0;
        (self.goodbye_told, self.goodbye_left, self.goodbye_heard) = (false, false, false);
        self.round_trip = None;
        Ok(())
    }

    /// Takes note of a frame of the other end.
    pub(crate) fn apply(&mut self, frame: Frame) -> Result<(), Violation> {
        match frame {
            Frame::Slab(slab) => self.incoming.announce(slab),
            Frame::Taken { slabs } => self.outgoing.note_taken(slabs),
            Frame::Finished { slabs } => self.incoming.finish(slabs),
            Frame::Stopped => {
                self.outgoing.stop();
                Ok(())
            }
            Frame::Message { number, bytes } => self.messages.receive(number, bytes),
            Frame::Heard { messages } => self.messages.note_heard(messages),
            Frame::Abort { reason } => {
                self.end(Err(SessionError::Aborted { reason: printable(&reason) }));
                Ok(())
            }
            // After a resumption, it may come before this end has said again that it wants no more.
            Frame::Goodbye if self.outgoing.is_complete() && (self.incoming.stopped || self.incoming.is_complete()) => {
                self.goodbye_heard = true;
                Ok(())
            }
            Frame::Goodbye => Err(Violation("it ends the session before all was received")),
            Frame::Open(_) | Frame::Opened(_) | Frame::Refused(_) => Err(Violation("a second handshake")),
            Frame::Ping { .. } | Frame::Pong { .. } => Ok(()),
            Frame::Landing { place } => self.outgoing.add_landing(place),
        }
    }

    /// Returns the frames that the other end is to get, in order.
    pub(crate) fn take_frames(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        if let Some(reason) = self.abort.take() {
            // What was said before still counts. That slabs are not wanted any more follows from the reason.
            self.messages.take_frames(&mut frames);
            frames.push(Frame::Abort { reason });
            return frames;
        }
        self.outgoing.take_frames(&mut frames);
        self.incoming.take_frames(&mut frames);
        self.messages.take_frames(&mut frames);
        if self.is_complete() && !self.goodbye_told {
            self.goodbye_told = true;
            frames.push(Frame::Goodbye);
        }
        frames
    }

    /// Returns why no more slabs can be sent, if so.
    pub(crate) fn sending_error(&self) -> Option<SessionError> {
        match &self.ended {
            Some(ended) => Some(ended.clone().err().unwrap_or(SessionError::Closed)),
            None => self.outgoing.is_stopped().then_some(SessionError::Stopped),
        }
    }

    /// Notes that all frames taken so far have left.
    pub(crate) fn note_written(&mut self) {
        self.goodbye_left = self.goodbye_told;
    }

    /// Counts what has moved in both directions.
    pub(crate) fn moved(&self) -> u64 {
        self.outgoing.taken + self.incoming.taken + self.messages.heard + self.messages.received
    }

    /// Tells whether both directions have ended in good order.
    pub(crate) fn is_complete(&self) -> bool {
        self.outgoing.is_complete() && self.incoming.is_complete()
    }

    /// Tells whether both ends know that both directions have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.goodbye_told && self.goodbye_heard
    }

    /// Ends the session; only the first end counts.
    pub(crate) fn end(&mut self, how: Result<(), SessionError>) {
        self.ended.get_or_insert(how);
    }

    /// Ends the session because its connection was lost for too long. It has not failed if all was received.
    pub(crate) fn lose(&mut self, within: Duration, cause: String) {
        self.fail_unless_complete(SessionError::Lost { within, cause });
    }

    /// Ends the session because the other end does not go on. It has not failed if all was received.
    pub(crate) fn give_up(&mut self, reason: String) {
        self.fail_unless_complete(SessionError::NotResumed { reason });
    }

    fn fail_unless_complete(&mut self, error: SessionError) {
        self.end(if self.is_complete() { Ok(()) } else { Err(error) });
    }

    /// Has the other end told why this end fails.
    pub(crate) fn abort(&mut self, reason: &str) {
        if !self.is_complete() {
            self.abort.get_or_insert_with(|| reason.to_owned());
        }
    }

    pub(crate) fn note_round_trip(&mut self, round_trip: Duration) {
        self.round_trip = Some(self.round_trip.map_or(round_trip, |least| least.min(round_trip)));
    }
}

impl Outgoing {
    pub(crate) fn push(&mut self, slab: OutgoingSlab) {
        // After it was stopped, slabs go nowhere.
        if !self.stopped {
            self.slabs.push_back(slab);
        }
    }

    /// Tells whether one more slab may wait to be taken.
    pub(crate) fn has_room(&self) -> bool {
        self.slabs.len() < ANNOUNCED_MAX
    }

    pub(crate) fn finish(&mut self) {
        self.finished = true;
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.finished
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Returns how many slabs there were so far.
    pub(crate) fn count(&self) -> u64 {
        self.taken + self.slabs.len() as u64 + self.lost
    }

    pub(crate) fn taken(&self) -> u64 {
        self.taken
    }

    fn add_landing(&mut self, place: [u8; 24]) -> Result<(), Violation> {
        if self.landings.len() >= ANNOUNCED_MAX {
            return Err(Violation("more landings than are allowed"));
        }
        self.landings.push_back(place);
        Ok(())
    }

    /// Takes a landing for the next slab that is to be written to one, in pieces of `piece_len` bytes.
    pub(crate) fn next_to_write(&mut self, piece_len: usize) -> Option<Writing> {
        self.landed = self.landed.max(self.taken);
        let (bytes, pieces) = loop {
            let next = usize::try_from(self.landed - self.taken).expect("it counts slabs in memory");
            match &mut self.slabs.get_mut(next)?.memory {
                SlabMemory::Written { bytes, pieces: pieces @ None } => break (bytes, pieces),
                _ => self.landed += 1,
            }
        };
        let place = RemoteMemory::decode(self.landings.pop_front()?);
        *pieces = Some(u32::try_from(bytes.len().div_ceil(piece_len)).expect("a slab has at most 1 GiB"));
        // Its counterpart counts alike.
        let landing = self.landings_used;
        self.landings_used = landing.wrapping_add(1);
        Some(Writing { bytes: bytes.clone(), place, landing })
    }

    fn forget_landings(&mut self) {
        self.landings.clear();
        (self.landings_used, self.landed) = (0, self.taken);
        for slab in &mut self.slabs {
            if let SlabMemory::Written { pieces, .. } = &mut slab.memory {
                *pieces = None;
            }
        }
    }

    fn stop(&mut self) {
        if !self.is_complete() {
            self.stopped = true;
            self.lost = self.slabs.len() as u64;
            self.slabs.clear();
        }
    }

    fn is_complete(&self) -> bool {
        self.stopped || self.finished && self.slabs.is_empty()
    }

    fn note_taken(&mut self, slabs: u64) -> Result<(), Violation> {
        if self.stopped {
            return Ok(());
        }
        let more = slabs.checked_sub(self.taken).ok_or(Violation("it has taken fewer slabs than before"))?;
        if slabs > self.announced {
            return Err(Violation("it has taken slabs that were not announced"));
        }
        // Dropping them revokes their keys and gives back their memory.
        self.slabs.drain(..usize::try_from(more).expect("at most as many as there are"));
        self.taken = slabs;
        Ok(())
    }

    fn take_frames(&mut self, frames: &mut Vec<Frame>) {
        if self.stopped {
            return;
        }
        let known = usize::try_from(self.announced - self.taken).expect("it counts slabs in memory");
        let mut notes: usize = self.slabs.iter().take(known).map(|slab| slab.note.len()).sum();
        for slab in self.slabs.iter().take(ANNOUNCED_MAX).skip(known) {
            notes += slab.note.len();
            if notes > NOTE_BYTES_MAX {
                break;
            }
            let place = match &slab.memory {
                SlabMemory::Exposed(memory) => Place::Exposed(memory.remote().encode()),
                SlabMemory::Written { pieces: Some(pieces), .. } => Place::Written { pieces: *pieces },
                SlabMemory::Written { pieces: None, .. } => break,
                SlabMemory::Short(bytes) => Place::Inline(bytes.clone()),
            };
            let (number, len, check) = (self.announced, slab.len, slab.check);
            frames.push(Frame::Slab(SlabFrame { number, len, check, place, note: slab.note.clone() }));
            self.announced += 1;
        }
        if self.finished && !self.finish_told && self.announced == self.count() {
            self.finish_told = true;
            frames.push(Frame::Finished { slabs: self.announced });
        }
    }
}

impl Incoming {
    /// Returns the next slab to be fetched.
    pub(crate) fn next_announced(&mut self) -> Option<SlabFrame> {
        let slab = self.announced.pop_front()?;
        self.note_bytes -= slab.note.len();
        Some(slab)
    }

    /// Announces a landing to the other end.
    pub(crate) fn announce_landing(&mut self, place: [u8; 24]) {
        self.landings.push(place);
    }

    /// Notes that a slab has arrived with other bytes; returns how often it has.
    pub(crate) fn note_corrupt(&mut self, number: u64) -> u32 {
        let attempts = self.corrupt.entry(number).or_default();
        *attempts += 1;
        *attempts
    }

    /// Adds a slab that was fetched, in order.
    pub(crate) fn take(&mut self, slab: Slab) {
        self.corrupt.remove(&self.taken);
        self.taken += 1;
        if !self.stopped {
            self.ready.push_back(slab);
        }
    }

    /// Returns the next slab for the application: `Some(None)` after the last one.
    pub(crate) fn next_ready(&mut self) -> Option<Option<Slab>> {
        match self.ready.pop_front() {
            None if self.finish == Some(self.taken) => Some(None),
            None => None,
            slab => Some(slab),
        }
    }

    /// The application wants no more slabs.
    pub(crate) fn stop(&mut self) {
        if !self.is_complete() {
            self.stopped = true;
        }
        self.ready.clear();
        self.announced.clear();
        self.note_bytes = 0;
    }

    fn is_complete(&self) -> bool {
        self.stopped && self.stop_told || self.finish == Some(self.taken)
    }

    fn announce(&mut self, slab: SlabFrame) -> Result<(), Violation> {
        if slab.number != self.next || self.finish.is_some_and(|finish| slab.number >= finish) {
            return Err(Violation("a slab out of order"));
        }
        if self.next - self.taken >= ANNOUNCED_MAX as u64 || self.note_bytes + slab.note.len() > NOTE_BYTES_MAX {
            return Err(Violation("too many slabs are announced"));
        }
        if slab.note.len() > MESSAGE_LEN_MAX {
            return Err(Violation("a note that is too long"));
        }
        let fits = match &slab.place {
            Place::Inline(bytes) => bytes.len() == slab.len as usize && bytes.len() <= INLINE_LEN_MAX,
            Place::Exposed(_) => true,
            Place::Written { pieces } => (1..=slab.len).contains(pieces),
        };
        if !fits {
            return Err(Violation("a slab of another length than it says"));
        }
        self.next += 1;
        if !self.stopped {
            self.note_bytes += slab.note.len();
            self.announced.push_back(slab);
        }
        Ok(())
    }

    fn finish(&mut self, slabs: u64) -> Result<(), Violation> {
        let as_before = self.finish.is_none_or(|before| before == slabs);
        if slabs != self.next || !as_before {
            return Err(Violation("its slabs ended at another number"));
        }
        self.finish = Some(slabs);
        Ok(())
    }

    fn take_frames(&mut self, frames: &mut Vec<Frame>) {
        frames.extend(self.landings.drain(..).map(|place| Frame::Landing { place }));
        if self.stopped {
            if !self.stop_told {
                self.stop_told = true;
                frames.push(Frame::Stopped);
            }
        } else if self.taken > self.taken_told {
            self.taken_told = self.taken;
            frames.push(Frame::Taken { slabs: self.taken });
        }
    }
}

impl Messages {
    /// Queues a message, if there is room.
    pub(crate) fn push(&mut self, bytes: &mut Option<Vec<u8>>) -> Option<()> {
        if self.own.len() >= MESSAGES_MAX {
            return None;
        }
        self.own.extend(bytes.take());
        Some(())
    }

    /// Returns the other end's next message.
    pub(crate) fn next(&mut self) -> Option<Vec<u8>> {
        self.inbox.pop_front()
    }

    fn receive(&mut self, number: u64, bytes: Vec<u8>) -> Result<(), Violation> {
        if number != self.received {
            return Err(Violation("a message out of order"));
        }
        if self.inbox.len() >= MESSAGES_MAX || bytes.len() > MESSAGE_LEN_MAX {
            return Err(Violation("more or longer messages than are allowed"));
        }
        self.received += 1;
        self.inbox.push_back(bytes);
        Ok(())
    }

    fn note_heard(&mut self, messages: u64) -> Result<(), Violation> {
        let more = messages.checked_sub(self.heard).ok_or(Violation("it has heard fewer messages than before"))?;
        if messages > self.told {
            return Err(Violation("it has heard messages that were not sent"));
        }
        self.own.drain(..usize::try_from(more).expect("at most as many as there are"));
        self.heard = messages;
        Ok(())
    }

    fn take_frames(&mut self, frames: &mut Vec<Frame>) {
        let known = usize::try_from(self.told - self.heard).expect("it counts messages in memory");
        for bytes in self.own.iter().skip(known) {
            frames.push(Frame::Message { number: self.told, bytes: bytes.clone() });
            self.told += 1;
        }
        let heard = self.received - self.inbox.len() as u64;
        if heard > self.heard_told {
            self.heard_told = heard;
            frames.push(Frame::Heard { messages: heard });
        }
    }
}

/// Most slabs that are announced and not yet taken.
pub(crate) const ANNOUNCED_MAX: usize = 1024;
/// Most bytes in the notes of these.
const NOTE_BYTES_MAX: usize = 4 << 20;
/// Most messages that the other end's application has not yet received.
const MESSAGES_MAX: usize = 64;
/// Longest note of a slab, and longest message, in bytes.
pub(crate) const MESSAGE_LEN_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn announced(number: u64, len: u32, place: Place, note: usize) -> Result<(), Violation> {
        let slab = SlabFrame { number, len, check: 0, place, note: vec![0; note] };
        State::default().apply(Frame::Slab(slab))
    }

    #[test]
    fn the_reason_of_an_end_comes_before_all_that_follows_from_it() {
        let mut state = State::default();
        state.messages.push(&mut Some(b"said before".to_vec()));
        state.abort("no room");
        state.incoming.stop();
        let frames = state.take_frames();
        assert!(matches!(&frames[..], [Frame::Message { .. }, Frame::Abort { .. }]), "{frames:?}");
    }

    #[test]
    fn announcements_out_of_bounds_are_violations() {
        let inline = |len: usize| Place::Inline(vec![0; len]);
        assert_eq!(announced(0, 5, inline(5), MESSAGE_LEN_MAX), Ok(()));
        for wrong in [
            announced(1, 5, inline(5), 0),
            announced(0, 5, inline(4), 0),
            announced(0, 20_000, inline(20_000), 0),
            announced(0, 5, inline(5), MESSAGE_LEN_MAX + 1),
        ] {
            assert!(wrong.is_err());
        }
    }

    #[test]
    fn a_goodbye_is_heard_before_the_stop_is_told_again() {
        let mut state = State::default();
        state.outgoing.finish();
        state.incoming.stop();
        while !state.take_frames().is_empty() {}
        state.resume(Progress::default()).unwrap();
        assert_eq!(state.apply(Frame::Goodbye), Ok(()));
    }
}
