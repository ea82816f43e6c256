//! The files of one transfer as they arrive.

use std::sync::Arc;

use anyhow::Context;
use rdmc::{Delivery, GroupSpec, Memory, Node, Offer, OfferReceiver};
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
        let place = {
            let (store, entry) = (self.store.clone(), entry.clone());
            tokio::task::spawn_blocking(move || {
                let arrival = store.begin(&entry, size)?;
                let memory = arrival.memory(size)?;
                anyhow::Ok((arrival, memory))
            })
        };
        let placed = place.await.map_err(anyhow::Error::new).and_then(|outcome| outcome);
        let placed = placed.and_then(|(arrival, memory)| Ok((arrival, self.register(memory)?)));
        let (arrival, memory) = match placed {
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
                self.finishing.spawn(finish(arrival, delivery, digest, entry.clone(), size));
                Ok(())
            }
            Err(error) => Err((offer, error)),
        }
    }

    fn register(&self, memory: Memory) -> anyhow::Result<rdmc::BufferMut> {
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
async fn finish(
    arrival: Arrival,
    delivery: Delivery,
    digest: Delivery,
    entry: Entry,
    size: u64,
) -> anyhow::Result<Event> {
    let partial = |failure| Exit::Partial.error(explain(&failure));
    let message = delivery.await.map_err(partial)?;
    let digest = digest.await.map_err(partial)?;
    tokio::task::spawn_blocking(move || {
        let found = blake3::hash(&message);
        // The mapping is not needed any more: nothing may change the file after it has got its time.
        drop(message);
        if digest[..] != *found.as_bytes() {
            return Err(Exit::Integrity.error(format!("{} arrived with a wrong digest", entry.path)));
        }
        arrival.keep(&entry).with_context(|| entry.path.to_string())?;
        Ok(Event::File { path: entry.path.to_string(), bytes: size })
    })
    .await?
}

/// Files that have arrived and are not yet in place, at most.
const FINISHING_MAX: usize = 8;
