//! Sends a file to n receivers over TCP, from mapped file to mapped file, and compares the digests.
//!
//! ```text
//! cargo run -p rdmc-examples --example push_file               # makes its own file
//! cargo run -p rdmc-examples --example push_file -- FILE [n]   # n receivers, 3 by default
//! ```
//! The bytes never pass through a buffer of this program: the fabric reads them from the sender's mapping and writes
//! them into the receivers' mappings. Only the first block of a message is copied once, because it tells a receiver
//! how much memory to supply. All members are tasks of this process. Each has its own fabric and sockets.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blake3::Hash;
use futures::future::{join_all, try_join, try_join_all};
use rdmc::{GroupSpec, InviteOptions, Listener, Memory, NodeId, TcpFabric};
use rustix::fs::{FallocateFlags, fallocate};

#[tokio::main]
async fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut args = std::env::args_os().skip(1);
    let source = match args.next() {
        Some(path) => PathBuf::from(path),
        None => make_file(dir.path())?,
    };
    let count: usize = match args.next() {
        Some(count) => count.to_str().context("n is a number")?.parse().context("n is a number")?,
        None => 3,
    };

    // Receivers need no configuration: each listens somewhere and waits to be invited.
    let bind = || async { Listener::bind(TcpFabric::new(), "127.0.0.1:0").await };
    let listeners: Vec<Listener> = try_join_all((0..count).map(|_| bind())).await?;
    let addresses: Vec<String> = listeners.iter().map(|listener| listener.local_address().to_owned()).collect();
    let targets: Vec<PathBuf> = (0..count).map(|number| dir.path().join(format!("copy{number}"))).collect();

    let receivers = listeners.iter().zip(&targets).map(|(listener, target)| receive(listener, target));
    let (elapsed, _) = try_join(send(&source, &addresses), try_join_all(receivers)).await?;
    let len = source.metadata()?.len();
    println!("{len} bytes to {count} receivers in {elapsed:.1?}");

    let digests = join_all(std::iter::once(&source).chain(&targets).cloned().map(digest)).await;
    let mut digests = digests.into_iter().collect::<Result<Vec<Hash>>>()?.into_iter();
    let sent = digests.next().context("the source has a digest")?;
    println!("sent     {sent}  {}", source.display());
    for (got, target) in digests.zip(&targets) {
        println!("received {got}  {}", target.display());
        ensure!(got == sent, "{} differs", target.display());
    }
    Ok(())
}

/// Sends the file, and returns the time until every receiver had it.
async fn send(source: &Path, addresses: &[String]) -> Result<Duration> {
    let file = File::open(source).with_context(|| format!("{}", source.display()))?;
    // SAFETY: no process changes the file while it is sent; if one did, the digests would differ.
    let memory = unsafe { Memory::map_file(&file, usize::try_from(file.metadata()?.len())?) }?;
    // The payload belongs to the application: a file name, a ticket, anything by which receivers decide.
    let node = rdmc::invite(TcpFabric::new(), addresses, InviteOptions::new(CONNECT_LIMIT).payload("a file"))
        .await?
        .start()
        .await?;
    let nodes = (0u32..).take(addresses.len() + 1).map(NodeId);
    let root = node.create_group(GroupSpec::new(GROUP, nodes)).await?;
    let start = Instant::now();
    root.send(memory).await?;
    root.close().await?;
    Ok(start.elapsed())
}

/// Becomes a member of the cluster it is invited to, and receives one file.
async fn receive(listener: &Listener, target: &Path) -> Result<()> {
    let invitation = listener.next_invitation().await;
    let group = GroupSpec::new(GROUP, invitation.nodes());
    let node = invitation.accept().await?.start().await?;
    let mut offers = node.join_group(group).with_offers().await?;
    while let Some(offer) = offers.next_offer().await {
        let offer = offer?;
        let file = File::options().read(true).write(true).create_new(true).open(target)?;
        if offer.size() > 0 {
            // Reserves the space: a full disk is an error here, but a crash once the file is mapped.
            fallocate(&file, FallocateFlags::empty(), 0, offer.size())?;
        }
        // SAFETY: the file was just made in our own directory, and is read only when the mapping is gone.
        let memory = unsafe { Memory::map_file_mut(&file, usize::try_from(offer.size())?) }?;
        let memory = node.register(memory)?.into_mut().ok().context("a fresh mapping is nobody else's")?;
        offer.accept(memory).await?;
    }
    // From here on the sender may learn that this receiver has everything. To promise more, such as data on disk, do
    // that work before this line.
    offers.close().await?;
    Ok(())
}

/// Makes a file of slightly more than 16 MiB, so that the last block is short.
fn make_file(dir: &Path) -> Result<PathBuf> {
    let path = dir.join("original");
    let mut file = File::create(&path)?;
    let mut bytes = vec![0; (16 << 20) + 12_345];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    file.write_all(&bytes)?;
    Ok(path)
}

/// Returns the digest of the file's content, read from the file and not from the mapping.
async fn digest(path: PathBuf) -> Result<Hash> {
    tokio::task::spawn_blocking(move || {
        let mut hasher = blake3::Hasher::new();
        hasher.update_reader(File::open(path)?)?;
        Ok(hasher.finalize())
    })
    .await?
}

/// The only group of this cluster.
const GROUP: u64 = 1;
/// Limit on the time in which receivers answer the invitation.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
