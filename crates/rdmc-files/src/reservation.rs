//! The paths that the transfers under way to one receiver write, and the space that they will take. Each path has one
//! writer at a time.
//!
//! A transfer reserves its paths before it agrees to the list of files, and begins only if all receivers agree. So two
//! transfers of one path never overlap, at no receiver.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The paths of all transfers to a receiver. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reservations(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    /// Number of the next reservation.
    next: u64,
    reserved: BTreeMap<u64, PathsWritten>,
    /// Bytes that each transfer will still take.
    promised: BTreeMap<u64, u64>,
    /// Number of changes of these.
    changes: u64,
}

/// The space that a transfer was promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Promised {
    /// As much as it wants.
    All,
    /// As little as it needs.
    Least,
    /// None: it does not fit beside the other transfers.
    Nothing {
        /// Bytes that are free.
        free: u64,
        /// Bytes that are promised to the others.
        others: u64,
    },
}

/// What a transfer writes, by path. A directory comes with everything in it that the transfer writes.
pub(crate) type PathsWritten = HashMap<PathBuf, Written>;

/// What a transfer makes of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// A file.
    File,
    /// A directory with this mode.
    Directory {
        /// Permission bits.
        mode: u32,
    },
}

/// The paths of one transfer. They are free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    all: Reservations,
    number: u64,
}

impl Reservations {
    /// Reserves paths. Transfers may share a directory in which they write different files, if they give it the same
    /// mode.
    ///
    /// # Errors
    /// A path that another transfer writes.
    pub(crate) fn reserve(&self, paths: PathsWritten) -> Result<Reservation, PathBuf> {
        let mut table = self.table();
        if let Some(taken) = table.reserved.values().find_map(|others| collision(&paths, others)) {
            return Err(taken.to_owned());
        }
        let number = table.next;
        table.next += 1;
        table.reserved.insert(number, paths);
        Ok(Reservation { all: self.clone(), number })
    }

    #[cfg(test)]
    pub(crate) fn promised(&self) -> u64 {
        self.table().promised.values().copied().fold(0, u64::saturating_add)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reservation {
    /// Promises `most` bytes to this transfer, or else `least`, as far as they are not promised to others. `free`
    /// returns the bytes that are free; it is asked again if another transfer takes some meanwhile.
    ///
    /// # Errors
    /// That of `free`.
    pub(crate) fn promise<E>(&self, least: u64, most: u64, free: impl Fn() -> Result<u64, E>) -> Result<Promised, E> {
        loop {
            let seen = self.all.table().changes;
            let free = free()?;
            let mut table = self.all.table();
            if table.changes != seen {
                continue;
            }
            let others = table.promised.iter().filter(|(number, _)| **number != self.number);
            let others = others.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add);
            let left = free.saturating_sub(others);
            let (bytes, promised) = if most <= left {
                (most, Promised::All)
            } else if least <= left {
                (least, Promised::Least)
            } else {
                return Ok(Promised::Nothing { free, others });
            };
            table.promised.insert(self.number, bytes);
            table.changes += 1;
            return Ok(promised);
        }
    }

    /// Notes that this transfer has taken some of the space that was promised to it.
    pub(crate) fn note_taken(&self, bytes: u64) {
        let mut table = self.all.table();
        table.changes += 1;
        if let Some(promised) = table.promised.get_mut(&self.number) {
            *promised = promised.saturating_sub(bytes);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut table = self.all.table();
        table.reserved.remove(&self.number);
        table.promised.remove(&self.number);
        table.changes += 1;
    }
}

/// Finds a path that two transfers cannot both write. A path below a file of the other transfer needs no search: its
/// directory has the path of that file.
fn collision<'a>(one: &'a PathsWritten, other: &'a PathsWritten) -> Option<&'a Path> {
    let (few, many) = if one.len() <= other.len() { (one, other) } else { (other, one) };
    let collides = |(path, here): &(&PathBuf, &Written)| match (here, many.get(*path)) {
        (_, None) => false,
        (Written::Directory { .. }, Some(there)) => *here != there,
        (Written::File, Some(_)) => true,
    };
    few.iter().find(collides).map(|(path, _)| path.as_path())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(of: &[(&str, Written)]) -> PathsWritten {
        of.iter().map(|(path, written)| (PathBuf::from(path), *written)).collect()
    }

    const FILE: Written = Written::File;
    const DIRECTORY: Written = Written::Directory { mode: 0o755 };

    #[test]
    fn a_path_has_one_writer_until_its_transfer_ends() {
        let all = Reservations::default();
        let tree = || paths(&[("d", DIRECTORY), ("d/x", FILE), ("y", FILE)]);
        let first = all.reserve(tree()).unwrap();
        assert!(all.reserve(tree()).is_err());
        assert_eq!(all.reserve(paths(&[("z", FILE), ("y", FILE)])).unwrap_err(), Path::new("y"));
        // What was refused reserves nothing.
        let other = all.reserve(paths(&[("z", FILE)])).unwrap();
        drop(first);
        let again = all.reserve(tree()).unwrap();
        drop((other, again));
        assert!(all.table().reserved.is_empty());
    }

    #[test]
    fn space_is_promised_to_one_transfer_until_it_takes_it_or_ends() {
        let all = Reservations::default();
        let [one, two] = [("x", FILE), ("y", FILE)].map(|path| all.reserve(paths(&[path])).unwrap());
        let asks = |transfer: &Reservation, least, most, free| {
            transfer.promise(least, most, || Ok::<u64, std::convert::Infallible>(free)).unwrap()
        };
        assert_eq!(asks(&one, 10, 70, 100), Promised::All);
        assert_eq!(asks(&two, 40, 50, 100), Promised::Nothing { free: 100, others: 70 });
        assert_eq!(asks(&two, 30, 50, 100), Promised::Least);
        one.note_taken(20);
        assert_eq!(asks(&two, 40, 50, 100), Promised::All);
        // It is asked again if another transfer changes something meanwhile.
        let asked = std::cell::Cell::new(0);
        let free = || {
            asked.set(asked.get() + 1);
            if asked.get() == 1 {
                one.note_taken(10);
            }
            Ok::<u64, std::convert::Infallible>(90)
        };
        assert_eq!((two.promise(40, 50, free), asked.get()), (Ok(Promised::All), 2));
        one.note_taken(1000);
        assert_eq!(all.promised(), 50);
        drop((one, two));
        assert_eq!(all.promised(), 0);
    }

    #[test]
    fn a_directory_is_shared_unless_it_would_differ_or_be_a_file() {
        let all = Reservations::default();
        let _first = all.reserve(paths(&[("d", DIRECTORY), ("d/x", FILE)])).unwrap();
        drop(all.reserve(paths(&[("d", DIRECTORY), ("d/y", FILE), ("d/z", FILE)])).unwrap());
        let taken = |of: &[(&str, Written)]| all.reserve(paths(of)).unwrap_err();
        assert_eq!(taken(&[("d", Written::Directory { mode: 0o700 })]), Path::new("d"));
        assert_eq!(taken(&[("d", FILE)]), Path::new("d"));
        assert_eq!(taken(&[("d", DIRECTORY), ("d/x", DIRECTORY), ("d/x/y", FILE)]), Path::new("d/x"));
    }
}
