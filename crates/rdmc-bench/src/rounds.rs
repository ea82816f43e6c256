//! Rounds at a member: one message at a time, each after a barrier, as `MPI_Bcast` after `MPI_Barrier`.

use anyhow::Context;
use futures::StreamExt;
use rdmc::{Message, Payload, Receiver, Sender, SharedObject};

use crate::local::{monotonic_ns, thread_cpu_ns};
use crate::options::Delivery;
use crate::orders::Work;

/// Runs work that is not measured; adds its processor time to `cpu_ns`.
///
/// Long work runs in another thread, since the others would give up a member that is silent for long.
pub(crate) async fn unmeasured<T: Send + 'static>(
    bytes: usize,
    cpu_ns: &mut u64,
    work: impl FnOnce() -> T + Send + 'static,
) -> anyhow::Result<T> {
    let timed = move || {
        let before = thread_cpu_ns();
        let made = work();
        (made, thread_cpu_ns() - before)
    };
    let (made, took) = if bytes <= INLINE_MAX { timed() } else { tokio::task::spawn_blocking(timed).await? };
    *cpu_ns += took;
    Ok(made)
}

/// Sends the messages of a group one at a time; returns when each was sent.
///
/// Before each message go two of one byte. The first asks receivers to verify the message before, and waits until they
/// have. The second makes caches as warm, and the members as awake, as a barrier does.
pub(crate) async fn send_rounds<Content: Into<Payload>>(
    root: &Sender,
    delivery: Delivery,
    work: Work,
    mut content: impl AsyncFnMut(u64) -> anyhow::Result<Content>,
) -> anyhow::Result<Vec<u64>> {
    let mut started_ns = Vec::new();
    for round in 0..work.messages {
        let content = content(round).await?.into();
        root.send(signal(delivery)?).await?.stored().await?;
        root.send(signal(delivery)?).await?.delivered().await?;
        started_ns.push(monotonic_ns());
        root.send(content).await?.delivered().await?;
    }
    root.send(signal(delivery)?).await?.stored().await?;
    Ok(started_ns)
}

/// A message of one byte.
fn signal(delivery: Delivery) -> anyhow::Result<Payload> {
    Ok(match delivery {
        Delivery::Private => Payload::from(&[0u8][..]),
        Delivery::Shared => SharedObject::copy_of(&[0])?.into(),
    })
}

/// Receives the messages of a group one at a time and gives each to `verify`; returns when each was received.
pub(crate) async fn receive_rounds(
    receiver: &mut Receiver,
    work: Work,
    mut verify: impl AsyncFnMut(Message, u64) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<u64>> {
    let mut ended_ns = Vec::new();
    let mut last = None;
    for round in 0..=work.messages {
        let verified = next(receiver).await?;
        if let Some(message) = last.take() {
            verify(message, round - 1).await?;
        }
        verified.stored();
        if round < work.messages {
            next(receiver).await?;
            last = Some(next(receiver).await?);
            ended_ns.push(monotonic_ns());
        }
    }
    Ok(ended_ns)
}

async fn next(receiver: &mut Receiver) -> anyhow::Result<Message> {
    Ok(receiver.next().await.context("the group was closed too early")??)
}

/// Most bytes that are filled or verified without another thread.
const INLINE_MAX: usize = 1 << 20;
