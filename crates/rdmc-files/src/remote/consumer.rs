//! The end that stores the files.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rdmc_wan::{SlabReceiver, SlabSender};
use twox_hash::xxhash3_128;

use super::producer::{receive_parts, send_parts};
use super::wire::{
    Item, KNOWN_BLOCK, KnownFile, Note, REASON_LEN_MAX, decode, encode_known, known_file_len_max, known_len_max,
};
use super::{RemoteEvent, Tally, blocking};
use crate::error::{Context, Kind, Problem};
use crate::manifest::{self, Entry, Manifest};
use crate::store::{IncomingFile, Store};

/// Receives the list of files, says what is here of them, and stores the rest. The direction of `sender` goes on.
///
/// All files are below the names that were `asked` for; `None` if any are welcome.
pub(super) async fn consume(
    store: Store,
    asked: Option<Vec<Vec<u8>>>,
    sender: &mut SlabSender,
    receiver: &mut SlabReceiver,
    tally: Tally,
) -> (Result<(), Problem>, Tally) {
    let (listed, mut tally) = (begin(store, asked, sender, receiver, &tally).await, tally);
    let mut files = match listed {
        Ok(files) => files,
        Err(problem) => return (Err(problem), tally),
    };
    loop {
        let (slab, note) = match receiver.next().await {
            Ok(None) => break,
            Ok(Some(slab)) => match decode(&slab.note) {
                Ok(Note::Items(items)) => (slab, items),
                Ok(_) => return (Err(Problem::local("the other end sent no files")), tally),
                Err(problem) => return (Err(problem), tally),
            },
            Err(error) => return (Err(error.into()), tally),
        };
        let stored = blocking(move || {
            let outcome = files.store(&slab.bytes, note, &mut tally);
            Ok((files, tally, outcome))
        });
        let outcome;
        (files, tally, outcome) = match stored.await {
            Ok(stored) => stored,
            // The runtime ends.
            Err(problem) => return (Err(problem), Tally::unheard()),
        };
        if let Err(problem) = outcome {
            return (Err(problem), tally);
        }
    }
    (blocking(move || files.finish()).await, tally)
}

async fn begin(
    store: Store,
    asked: Option<Vec<Vec<u8>>>,
    sender: &mut SlabSender,
    receiver: &mut SlabReceiver,
    tally: &Tally,
) -> Result<Files, Problem> {
    let len_max = usize::try_from(manifest::LEN_MAX).unwrap_or(usize::MAX);
    let listed = receive_parts(receiver, len_max, |note| match note {
        Note::Manifest { last } => Some(last),
        _ => None,
    });
    let listed = listed.await?;
    let manifest = blocking(move || Ok(Manifest::decode(&listed)?)).await?;
    let is_asked = |entry: &&Entry| asked.as_ref().is_none_or(|asked| asked.contains(&entry.path.0[0]));
    if let Some(other) = manifest.entries.iter().find(|entry| !is_asked(entry)) {
        return Err(Problem::local(format!("the other end sends {}, which was not asked for", other.path)));
    }
    let (files, bytes) = manifest.totals();
    tally.events.say(RemoteEvent::Listed { files, bytes });
    let (files, known) = blocking(move || {
        let store = store.reserve(&manifest)?;
        store.check(&manifest)?;
        let store = store.with_room(&manifest)?;
        store.check_inodes(&manifest)?;
        let store = store.for_transfer(&manifest, true);
        store.make_directories(&manifest)?;
        let files = Files::new(store, manifest);
        let known = encode_known(&files.known()?);
        Ok((files, known))
    })
    .await?;
    send_parts(sender, &known, |last| Note::Known { last }).await?;
    Ok(files)
}

/// The files of a transfer at the end that stores them.
struct Files {
    store: Store,
    manifest: Manifest,
    entries: Vec<(Entry, u64)>,
    /// The number of the present file, or of the next one.
    at: u32,
    present: Option<Present>,
}

/// A file that arrives.
struct Present {
    incoming: IncomingFile,
    received: u64,
}

impl Files {
    fn new(store: Store, manifest: Manifest) -> Self {
        let entries = manifest.files().map(|(entry, size)| (entry.clone(), size)).collect();
        Self { store, manifest, entries, at: 0, present: None }
    }

    /// Lists what is here of the files, as far as the list may be long.
    fn known(&self) -> Result<Vec<KnownFile>, Problem> {
        let (mut known, mut left) = (Vec::new(), known_len_max(&self.manifest));
        for ((entry, size), file) in self.entries.iter().zip(0..) {
            let len = known_file_len_max(*size);
            if *size == 0 || len > left {
                continue;
            }
            if let Some(here) = self.store.known(entry, *size) {
                known.push(KnownFile { file, sums: sums(&here, *size).with_context(|| entry.path.to_string())? });
                left -= len;
            }
        }
        Ok(known)
    }

    /// Stores what is in a slab.
    fn store(&mut self, bytes: &[u8], items: Vec<Item>, tally: &mut Tally) -> Result<(), Problem> {
        let mut rest = bytes;
        for item in items {
            match item {
                Item::Data { file, offset, len } => {
                    let (now, later) = rest.split_at_checked(len as usize).ok_or_else(broken)?;
                    rest = later;
                    let (size, present) = self.present(file)?;
                    if offset.checked_add(len.into()).is_none_or(|end| end > size) {
                        return Err(broken());
                    }
                    present.incoming.begins();
                    present.incoming.write_at(now, offset)?;
                    present.received += u64::from(len);
                    tally.moved(len.into());
                }
                Item::Done { file, had } => {
                    let (size, present) = self.present(file)?;
                    let (received, has_some) = (present.received, present.incoming.has_some());
                    if received.checked_add(had) != Some(size) || had > 0 && !has_some {
                        let entry = &self.entries[file as usize].0;
                        let what = format!("{}: {received} and {had} of {size} bytes", entry.path);
                        return Err(Kind::Integrity.problem(what));
                    }
                    let present = self.present.take().expect("it is the present file");
                    let entry = &self.entries[file as usize].0;
                    present.incoming.keep(entry)?;
                    self.at = file + 1;
                    tally.had(had);
                    tally.file(&entry.path, size);
                }
                Item::Skipped { reason, .. } if reason.len() > REASON_LEN_MAX => return Err(broken()),
                Item::Skipped { path, reason } => tally.skipped(path, crate::words::printable(&reason)),
                Item::Failed { file, reason } => {
                    if reason.len() > REASON_LEN_MAX {
                        return Err(broken());
                    }
                    self.present(file)?;
                    if let Some(present) = self.present.take() {
                        present.incoming.discard();
                    }
                    self.at = file + 1;
                    tally.skipped(&self.entries[file as usize].0.path, crate::words::printable(&reason));
                }
            }
        }
        if rest.is_empty() { Ok(()) } else { Err(broken()) }
    }

    /// Returns the present file, and its size; begins it if it is the next one.
    fn present(&mut self, file: u32) -> Result<(u64, &mut Present), Problem> {
        let (entry, size) = self.entries.get(file as usize).filter(|_| file == self.at).ok_or_else(broken)?;
        let present = match self.present.take() {
            Some(present) => present,
            None => Present { incoming: self.store.begin(entry, *size, None)?, received: 0 },
        };
        Ok((*size, self.present.insert(present)))
    }

    /// Ends the transfer when everything has come.
    fn finish(self) -> Result<(), Problem> {
        if self.at as usize != self.entries.len() {
            return Err(Problem::local("the other end stopped before the last file"));
        }
        self.store.finish_directories(&self.manifest)?;
        self.store.done();
        Ok(())
    }
}

/// Sums the blocks of a file.
fn sums(file: &File, size: u64) -> std::io::Result<Vec<u128>> {
    let mut block = vec![0; KNOWN_BLOCK];
    let sum = |at: u64| {
        let len = usize::try_from(size - at).unwrap_or(usize::MAX).min(KNOWN_BLOCK);
        file.read_exact_at(&mut block[..len], at)?;
        Ok(xxhash3_128::Hasher::oneshot(&block[..len]))
    };
    (0..size).step_by(KNOWN_BLOCK).map(sum).collect()
}

/// The other end breaks the rules.
fn broken() -> Problem {
    Problem::local("the other end sends files in another order, or of another size, than it has listed")
}
