//! The files of one transfer as they arrive.

use std::sync::Arc;

use anyhow::Context;
use rdmc::{BufferMut, Delivery, GroupSpec, Memory, Node, Offer, OfferReceiver};
use tokio::task::JoinSet;

use crate::announcement::DIGEST_LEN;
use crate::exit::Exit;
use crate::manifest::{Entry, Manifest};
use crate::progress::{Bar, Event, Reporter, TICK};
use crate::recv::{agree, explain, next_offer, not_formed, refuse};
use crate::store::{Arrival, Store};

/// Receives all files of a manifest, and agrees to the end when all are whole and in place.
pub(crate) async fn take_files(
    node: &Node,
    spec: GroupSpec,
    manifest: Arc<Manifest>,
    store: &Store,
    reporter: &Reporter,
    bar: &Bar,
) -> anyhow::Result<()> {
    let group = node.join_group_with_offers(spec).await.map_err(|error| not_formed(error, Exit::Refused))?;
    let mut arrivals = Arrivals { node, store, reporter, bar, group, finishing: JoinSet::new(), trouble: None };
    let made = blocking(store, &manifest, Store::make_directories).await;
    arrivals.trouble = made.err();
    for (entry, size) in manifest.files() {
        let offer = arrivals.next().await?;
        if let Err((offer, error)) = arrivals.take(offer, entry, size).await {
            return Err(refuse(arrivals.group, offer, &error).await);
        }
    }
    arrivals.finish_all().await;
    if arrivals.trouble.is_none() {
        arrivals.trouble = blocking(store, &manifest, Store::finish_directories).await.err();
    }
    let last = arrivals.next().await?;
    if let Some(error) = arrivals.trouble {
        return Err(refuse(arrivals.group, last, &error).await);
    }
    bar.set(manifest.totals().1);
    bar.label("confirming");
    agree(arrivals.group, last, Exit::Partial).await
}

/// The files that are arriving, and the group they arrive in.
struct Arrivals<'a> {
    node: &'a Node,
    store: &'a Store,
    reporter: &'a Reporter,
    bar: &'a Bar,
    group: OfferReceiver,
    /// Waits for bytes and digest, compares, and gives the file its name. Dropped, it removes the temporary files.
    finishing: JoinSet<anyhow::Result<Event>>,
    /// What went wrong first; the next message is refused for it.
    trouble: Option<anyhow::Error>,
}

impl Arrivals<'_> {
    /// Waits for the next message while files are finished.
    async fn next(&mut self) -> anyhow::Result<Offer> {
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                // What went wrong here came before what the others make of it.
                offer = next_offer(&mut self.group, Exit::Partial) => {
                    return offer.map_err(|error| self.trouble.take().unwrap_or(error));
                }
                Some(finished) = self.finishing.join_next() => self.finished(finished),
                _ = tick.tick() => self.bar.set(self.group.stats().bytes_received),
            }
        }
    }

    /// Receives a file into place, and its digest; gives back the message that is to be refused.
    async fn take(&mut self, offer: Offer, entry: &Entry, size: u64) -> Result<(), (Offer, anyhow::Error)> {
        while self.finishing.len() >= FINISHING_MAX {
            self.finish_one().await;
        }
        if let Some(error) = self.trouble.take() {
            return Err((offer, error));
        }
        if offer.size() != size {
            return Err((offer, Exit::Integrity.error(format!("{} is not as long as listed", entry.path))));
        }
        let (place, memory) = match self.place(entry, size).await {
            Ok(placed) => placed,
            Err(error) => return Err((offer, error)),
        };
        let delivery = offer.accept(memory);

        let offer = match self.next().await {
            Ok(offer) => offer,
            Err(error) => {
                self.trouble = Some(error);
                return Ok(());
            }
        };
        if offer.size() != DIGEST_LEN as u64 {
            return Err((offer, Exit::Integrity.error(format!("{} has no digest", entry.path))));
        }
        match self.register(Memory::from(vec![0; DIGEST_LEN])) {
            Ok(memory) => {
                let digest = offer.accept(memory);
                self.finishing.spawn(finish(place, delivery, digest, entry.clone(), size));
                Ok(())
            }
            Err(error) => Err((offer, error)),
        }
    }

    /// Makes the temporary file, and the memory to receive its bytes: the file itself, mapped, if the fabric can.
    async fn place(&self, entry: &Entry, size: u64) -> anyhow::Result<(Place, BufferMut)> {
        let mapped = self.node.capabilities().receives_into_files;
        let (store, entry) = (self.store.clone(), entry.clone());
        let begun = tokio::task::spawn_blocking(move || {
            let arrival = store.begin(&entry, size)?;
            let memory = mapped.then(|| arrival.memory(size)).transpose()?;
            anyhow::Ok((arrival, memory))
        });
        let (arrival, memory) = begun.await??;
        match memory {
            Some(memory) => Ok((Place::Mapped(arrival), self.register(memory)?)),
            None => Ok((Place::ToWrite(arrival), self.node.allocate(usize::try_from(size)?).await?)),
        }
    }

    fn register(&self, memory: Memory) -> anyhow::Result<BufferMut> {
        let region = self.node.register(memory).context("the memory cannot be registered")?;
        region.into_mut().map_err(|_| anyhow::anyhow!("the memory cannot be written"))
    }

    async fn finish_all(&mut self) {
        while !self.finishing.is_empty() {
            self.finish_one().await;
        }
    }

    async fn finish_one(&mut self) {
        if let Some(finished) = self.finishing.join_next().await {
            self.finished(finished);
        }
    }

    fn finished(&mut self, finished: Result<anyhow::Result<Event>, tokio::task::JoinError>) {
        match finished.map_err(anyhow::Error::new).and_then(|outcome| outcome) {
            Ok(event) => self.reporter.say(&event),
            Err(error) => drop(self.trouble.get_or_insert(error)),
        }
    }
}

/// Where the bytes of a file go.
enum Place {
    /// They arrive in the file.
    Mapped(Arrival),
    /// They arrive in memory.
    ToWrite(Arrival),
}

/// Does something with the directories of a manifest.
async fn blocking(
    store: &Store,
    manifest: &Arc<Manifest>,
    work: fn(&Store, &Manifest) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (store, manifest) = (store.clone(), manifest.clone());
    tokio::task::spawn_blocking(move || work(&store, &manifest)).await?
}

/// Waits for a file, compares it with its digest, and gives it its name.
async fn finish(place: Place, delivery: Delivery, digest: Delivery, entry: Entry, size: u64) -> anyhow::Result<Event> {
    let partial = |failure| Exit::Partial.error(explain(&failure));
    let message = delivery.await.map_err(partial)?;
    let digest = digest.await.map_err(partial)?;
    tokio::task::spawn_blocking(move || {
        if digest[..] != *blake3::hash(&message).as_bytes() {
            return Err(Exit::Integrity.error(format!("{} arrived with a wrong digest", entry.path)));
        }
        let arrival = match place {
            Place::Mapped(arrival) => arrival,
            Place::ToWrite(arrival) => {
                arrival.write(&message).with_context(|| entry.path.to_string())?;
                arrival
            }
        };
        // The memory is not needed any more; if it is a mapping, nothing may change the file after it has got its time.
        drop(message);
        arrival.keep(&entry).with_context(|| entry.path.to_string())?;
        Ok(Event::File { path: entry.path.to_string(), bytes: size })
    })
    .await?
}

/// Files that have arrived and are not yet in place, at most.
const FINISHING_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use rdmc::NodeId;

    use super::*;
    use crate::cli::OutputOptions;
    use crate::fabric::register_to_send;
    use crate::fabric::strict::{POOL_BYTES, Strict};
    use crate::manifest::{EntryPath, Kind};

    #[tokio::test]
    async fn files_arrive_by_memory_where_the_fabric_does_not_receive_into_files() {
        let mut nodes = Strict::nodes(3).await;
        let spec = GroupSpec::new(1, (0..3).map(NodeId)).block_size(64 << 10);
        // Each takes more than half of the pool, so that one waits for the other.
        let sizes = [0, 600_000, 700_001, 1, usize::try_from(POOL_BYTES).unwrap()];
        let contents = sizes.map(|size| Bytes::from_iter((0..=250).cycle().take(size)));
        let entries = contents.iter().zip(0..).map(|(bytes, at)| Entry {
            path: EntryPath(vec![format!("file{at}").into_bytes()]),
            kind: Kind::File { size: bytes.len() as u64 },
            mode: 0o600,
            mtime_s: 1,
            mtime_ns: 2,
        });
        let manifest = Arc::new(Manifest { entries: entries.collect() });
        let root = nodes.remove(0);
        let receive = nodes.iter().map(|node| {
            let (spec, manifest) = (spec.clone(), manifest.clone());
            async move {
                let dir = tempfile::tempdir()?;
                let store = Store::open(dir.path(), false, false)?;
                let reporter = Reporter::new(OutputOptions { json: false, quiet: true });
                let bar = reporter.bar("receiving", manifest.totals().1);
                take_files(node, spec, manifest, &store, &reporter, &bar).await?;
                anyhow::Ok(dir)
            }
        });
        let send = async {
            let sender = root.create_group(spec.clone()).await?;
            for bytes in &contents {
                let copied = bytes.clone();
                let copy = move |to: &mut [u8]| {
                    to.copy_from_slice(&copied);
                    Ok(())
                };
                sender.send(register_to_send(&root, Memory::from(bytes.clone()), copy).await?).await?;
                sender.send(blake3::hash(bytes).as_bytes().to_vec()).await?;
            }
            sender.send(Bytes::new()).await?;
            sender.close().await?;
            anyhow::Ok(())
        };
        let ((), dirs) = futures::future::try_join(send, futures::future::try_join_all(receive)).await.unwrap();
        for dir in dirs {
            for (bytes, at) in contents.iter().zip(0..) {
                assert_eq!(std::fs::read(dir.path().join(format!("file{at}"))).unwrap(), bytes[..]);
            }
        }
    }
}
