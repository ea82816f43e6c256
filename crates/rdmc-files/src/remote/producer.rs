//! The end that has the files: it lists them, and fills slabs with their bytes.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;

use rdmc_wan::{SessionHandle, SlabMut, SlabReceiver, SlabSender};
use twox_hash::xxhash3_128;

use super::wire::{
    ITEM_LEN_MAX, ITEMS_LEN_MAX, Item, KNOWN_BLOCK, Note, decode, decode_known, encode, known_len_max, shortened,
};
use super::{RemoteEvent, Tally, blocking};
use crate::error::{Kind, Problem};
use crate::manifest::Entry;
use crate::source::{Skipped, SourceFile, SourceTree};

/// Sends the list of files, learns what the consumer has of them, and sends the rest. Then this direction has ended.
pub(super) async fn produce(
    source: SourceTree,
    mut sender: SlabSender,
    receiver: &mut SlabReceiver,
    handle: &SessionHandle,
    tally: &mut Tally,
) -> Result<(), Problem> {
    match send(source, &mut sender, receiver, tally).await {
        Ok(()) => Ok(sender.finish().await?),
        Err(problem) => {
            // Before the sender is dropped, which would give another reason.
            handle.abort(&problem.told());
            Err(problem)
        }
    }
}

async fn send(
    source: SourceTree,
    sender: &mut SlabSender,
    receiver: &mut SlabReceiver,
    tally: &mut Tally,
) -> Result<(), Problem> {
    let (files, bytes) = source.manifest.totals();
    tally.events.say(RemoteEvent::Listed { files, bytes });
    for skipped in &source.skipped {
        tally.skipped(source.shown(skipped), &skipped.reason);
    }
    let (source, listed) = blocking(move || {
        let listed = source.manifest.encode();
        Ok((source, listed))
    })
    .await?;
    // If the consumer ends the session before its list, no byte of a file was sent.
    let refused =
        |problem: Problem| if problem.kind == Kind::Partial { problem.of_kind(Kind::Refused) } else { problem };
    send_parts(sender, &listed, |last| Note::Manifest { last }).await.map_err(refused)?;
    let known = receive_parts(receiver, known_len_max(&source.manifest), |note| match note {
        Note::Known { last } => Some(last),
        _ => None,
    });
    let known = known.await.map_err(refused)?;
    let mut reader = blocking(move || Ok(Reader::new(&source, decode_known(&known, &source.manifest)?))).await?;
    while !reader.is_at_end() {
        let mut slab = sender.slab().await?;
        let filled = blocking(move || {
            let (len, items) = reader.fill(&mut slab);
            Ok((reader, slab, len, items))
        });
        let (returned, slab, len, items) = filled.await?;
        reader = returned;
        reader.count(len, &items, tally);
        sender.send(slab, len, encode(&Note::Items(items))).await?;
    }
    Ok(())
}

/// Sends bytes as the parts of a list.
pub(super) async fn send_parts(
    sender: &mut SlabSender,
    bytes: &[u8],
    note: impl Fn(bool) -> Note,
) -> Result<(), Problem> {
    let mut rest = bytes;
    loop {
        let mut slab: SlabMut = sender.slab().await?;
        let (now, later) = rest.split_at(rest.len().min(slab.len()));
        slab[..now.len()].copy_from_slice(now);
        sender.send(slab, now.len(), encode(&note(later.is_empty()))).await?;
        rest = later;
        if rest.is_empty() {
            return Ok(());
        }
    }
}

/// Receives the parts of a list of at most `len_max` bytes. `is_last` returns `None` for other notes.
pub(super) async fn receive_parts(
    receiver: &mut SlabReceiver,
    len_max: usize,
    is_last: impl Fn(Note) -> Option<bool>,
) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    loop {
        let slab = receiver.next().await?.ok_or_else(|| Problem::local("the other end stopped before its list"))?;
        let last = is_last(decode(&slab.note)?).ok_or_else(|| Problem::local("the other end sent no list"))?;
        if bytes.len() + slab.bytes.len() > len_max {
            return Err(Problem::local(format!("the other end's list is longer than {len_max} bytes")));
        }
        bytes.extend_from_slice(&slab.bytes);
        if last {
            return Ok(bytes);
        }
    }
}

/// Reads files one after the other.
struct Reader {
    files: Vec<(PathBuf, Entry, u64)>,
    known: HashMap<u32, Vec<u128>>,
    /// What is left out, and not told yet.
    skipped: VecDeque<Skipped>,
    is_served: bool,
    /// The number of the present file.
    at: usize,
    present: Option<Present>,
    scratch: Vec<u8>,
}

/// A file that is being read.
struct Present {
    file: SourceFile,
    offset: u64,
    /// Bytes that the consumer has already.
    had: u64,
    /// The sums of the consumer's blocks.
    sums: Vec<u128>,
}

impl Reader {
    fn new(source: &SourceTree, known: HashMap<u32, Vec<u128>>) -> Self {
        let files = source.files().map(|(path, entry, size)| (path.to_owned(), entry.clone(), size)).collect();
        let (skipped, is_served) = (source.skipped.iter().cloned().collect(), source.is_served());
        Self { files, known, skipped, is_served, at: 0, present: None, scratch: Vec::new() }
    }

    fn is_at_end(&self) -> bool {
        self.at == self.files.len() && self.skipped.is_empty()
    }

    /// Fills a slab; returns its length, and what is in it.
    fn fill(&mut self, slab: &mut [u8]) -> (usize, Vec<Item>) {
        let (mut len, mut items, mut note_len, mut had) = (0, Vec::new(), 0, 0);
        while !self.is_at_end() && len < slab.len() && note_len < ITEMS_LEN_MAX && had < HAD_MAX {
            if let Some(Skipped { path, reason, .. }) = self.skipped.pop_front() {
                let reason = shortened(reason);
                note_len += ITEM_LEN_MAX + reason.len() + path.0.iter().map(|name| name.len() + 2).sum::<usize>();
                items.push(Item::Skipped { path, reason });
                continue;
            }
            let item = match self.step(&mut slab[len..]) {
                Ok(Some(item)) => item,
                Ok(None) => {
                    had += KNOWN_BLOCK;
                    continue;
                }
                Err(problem) => {
                    let reason = problem.told();
                    note_len += reason.len();
                    Item::Failed { file: self.number(), reason }
                }
            };
            match &item {
                Item::Data { len: now, .. } => len += *now as usize,
                Item::Skipped { .. } => {}
                Item::Done { .. } | Item::Failed { .. } => {
                    self.present = None;
                    self.at += 1;
                }
            }
            note_len += ITEM_LEN_MAX;
            items.push(item);
        }
        (len, items)
    }

    /// Reads on; returns `None` if the consumer has the next block.
    fn step(&mut self, room: &mut [u8]) -> Result<Option<Item>, Problem> {
        let (number, (path, entry, size)) = (self.number(), &self.files[self.at]);
        let present = match &mut self.present {
            Some(present) => present,
            None => {
                // Where a server has its files is nothing to its clients.
                let shown = if self.is_served { entry.path.to_path() } else { path.clone() };
                let file = SourceFile::open(path, shown, entry, *size)?;
                let sums = self.known.remove(&number).unwrap_or_default();
                self.present.insert(Present { file, offset: 0, had: 0, sums })
            }
        };
        let (offset, left) = (present.offset, size - present.offset);
        if left == 0 {
            return match present.file.problem() {
                Some(problem) => Err(problem),
                None => Ok(Some(Item::Done { file: number, had: present.had })),
            };
        }
        let in_block = KNOWN_BLOCK as u64 - offset % KNOWN_BLOCK as u64;
        let block = usize::try_from(offset / KNOWN_BLOCK as u64).expect("a file fits into the address space");
        if in_block == KNOWN_BLOCK as u64
            && let Some(sum) = present.sums.get(block)
        {
            self.scratch.resize(KNOWN_BLOCK.min(usize::try_from(left).unwrap_or(usize::MAX)), 0);
            present.file.read_at(&mut self.scratch, offset)?;
            if xxhash3_128::Hasher::oneshot(&self.scratch) == *sum {
                present.offset += self.scratch.len() as u64;
                present.had += self.scratch.len() as u64;
                return Ok(None);
            }
        }
        // Up to the next block that the consumer may have.
        let most = if present.sums.is_empty() { left } else { left.min(in_block) };
        let now = usize::try_from(most).unwrap_or(usize::MAX).min(room.len());
        present.file.read_at(&mut room[..now], offset)?;
        present.offset += now as u64;
        Ok(Some(Item::Data { file: number, offset, len: u32::try_from(now).expect("a slab has at most 1 GiB") }))
    }

    fn number(&self) -> u32 {
        u32::try_from(self.at).expect("a manifest has fewer entries than bytes")
    }

    /// Counts what is in a slab.
    fn count(&self, len: usize, items: &[Item], tally: &mut Tally) {
        tally.moved(len as u64);
        for item in items {
            match item {
                // What is skipped was counted when it was listed.
                Item::Data { .. } | Item::Skipped { .. } => {}
                Item::Done { file, had } => {
                    let (_, entry, size) = &self.files[*file as usize];
                    tally.had(*had);
                    tally.file(&entry.path, *size);
                }
                Item::Failed { file, reason } => tally.skipped(&self.files[*file as usize].1.path, reason),
            }
        }
    }
}

/// Most bytes that are compared before a slab leaves, however empty.
const HAD_MAX: usize = 64 << 20;
