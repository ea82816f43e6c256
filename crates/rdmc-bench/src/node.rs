//! A member's process, which follows the orders of the benchmark.

use std::io::BufRead;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use futures::future::{join, try_join_all};
use futures::{SinkExt, StreamExt, TryStreamExt};
use rdmc::{
    BatchReceiver, BatchSender, Buffer, Listener, Message, Node, Payload, Receiver, Sender, SharedObject,
    SharedObjectMut, Shutdown,
};
use rdmc_files::fabric::{FabricSettings, OfferedFabrics};
use tokio::sync::mpsc;

use super::pattern;
use crate::error::{BenchError, taken_over};
use crate::local::{cpu_ns, monotonic_ns, tell};
use crate::options::Delivery;
use crate::orders::{Acknowledgement, Order, Setup, Work};
use crate::process::MemberRole;

/// Takes part as a member until standard input ends. Orders come from standard input, and acknowledgements go to
/// standard output.
///
/// # Cancel safety
/// The member leaves its groups.
///
/// # Errors
/// What went wrong. The other members then fail too.
pub async fn run_member(role: MemberRole) -> Result<(), BenchError> {
    Ok(take_part(role).await?)
}

async fn take_part(MemberRole { fabric, device, invites }: MemberRole) -> anyhow::Result<()> {
    let mut orders = Orders::read();
    let fabric = FabricSettings::new(fabric).device(device);
    let mut member = if invites {
        let (setup, addresses) = orders.begin().await?;
        let towards = addresses.first().context("a group of one has no member to invite")?;
        let offered = fabric.open_towards(towards, setup.pool_bytes()).await.map_err(taken_over)?;
        Member::invite(offered, setup, &addresses).await?
    } else {
        let offered = fabric.open_at(LOOPBACK).await.map_err(taken_over)?;
        let listener = Listener::bind(offered.fabrics().clone(), LOOPBACK).await?;
        tell(&Acknowledgement::Listening { address: listener.local_address().to_owned() });
        let (setup, _) = orders.begin().await?;
        Member::accept(offered, setup, &listener).await?
    };
    tell(&Acknowledgement::Formed { fabric: member.node.fabric_name().to_owned() });
    loop {
        match orders.next().await? {
            Order::Prepare(work) => member.work(work, &mut orders).await?,
            Order::Close => break,
            other => bail!("{other:?} is out of order"),
        }
    }
    let Member { node, groups, .. } = member;
    try_join_all(groups.into_iter().map(async |group| match group {
        Group::Root(sender) => sender.close().await.map(drop),
        Group::Receiver(receiver) => receiver.close().await.map(drop),
    }))
    .await?;
    tell(&Acknowledgement::Closed);
    node.shutdown(Shutdown::Abort).await;
    // The process ends when its standard input ends.
    std::future::pending().await
}

/// The orders of the benchmark.
struct Orders(mpsc::UnboundedReceiver<String>);

impl Orders {
    /// Reads orders in a thread. The process ends when no order can come any more.
    fn read() -> Self {
        let (tell, told) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let lines = std::io::stdin().lock().lines().map_while(Result::ok);
            // Fails only if the member has failed, which ends the process.
            lines.into_iter().for_each(|line| drop(tell.send(line)));
            std::process::exit(0);
        });
        Self(told)
    }

    async fn next(&mut self) -> anyhow::Result<Order> {
        let line = self.0.recv().await.context("no order can come any more")?;
        serde_json::from_str(&line).with_context(|| format!("{line:?} is not an order"))
    }

    async fn begin(&mut self) -> anyhow::Result<(Setup, Vec<String>)> {
        match self.next().await? {
            Order::Begin { setup, addresses } => Ok((setup, addresses)),
            other => bail!("{other:?} is out of order"),
        }
    }

    async fn expect(&mut self, expected: Order) -> anyhow::Result<()> {
        let order = self.next().await?;
        ensure!(order == expected, "the order is {order:?} instead of {expected:?}");
        Ok(())
    }
}

/// A member and its groups.
struct Member {
    node: Node,
    groups: Vec<Group>,
    bytes: usize,
    delivery: Delivery,
}

/// The content of a message.
#[derive(Clone)]
enum Content {
    Private(Buffer),
    Shared(SharedObject),
}

impl From<Content> for Payload {
    fn from(content: Content) -> Self {
        match content {
            Content::Private(buffer) => buffer.into(),
            Content::Shared(object) => object.into(),
        }
    }
}

enum Group {
    Root(Sender),
    Receiver(Receiver),
}

impl Member {
    async fn invite(offered: OfferedFabrics, setup: Setup, addresses: &[String]) -> anyhow::Result<Self> {
        let builder = rdmc::invite(offered.fabrics().clone(), addresses, Bytes::new(), START_LIMIT).await?;
        Self::start(builder, &offered, &setup).await
    }

    async fn accept(offered: OfferedFabrics, setup: Setup, listener: &Listener) -> anyhow::Result<Self> {
        let invitation = listener.next_invitation().await;
        Self::start(invitation.accept().await?, &offered, &setup).await
    }

    async fn start(builder: rdmc::NodeBuilder, offered: &OfferedFabrics, setup: &Setup) -> anyhow::Result<Self> {
        let chosen = offered.in_use(builder.fabric_choice().context("invited nodes have one")?);
        let pool = offered.pool_bytes(&chosen, setup.pool_bytes(), 0);
        let node = builder.pool_bytes_max(pool).completion_mode(setup.completion.into()).start().await?;
        let me = node.id();
        let form = async |group: u32| {
            let spec = setup.spec(group);
            anyhow::Ok(if spec.members().first() == Some(&me) {
                Group::Root(node.create_group(spec).await?)
            } else {
                Group::Receiver(node.join_group(spec).await?)
            })
        };
        let groups = try_join_all((0..setup.groups).map(form)).await?;
        Ok(Self { node, groups, bytes: usize::try_from(setup.bytes)?, delivery: setup.delivery })
    }

    /// Sends and receives one piece of work. Verifies the content outside of the measured time.
    async fn work(&mut self, work: Work, orders: &mut Orders) -> anyhow::Result<()> {
        let prepared = self.prepare(work).await?;
        tell(&Acknowledgement::Ready);
        orders.expect(Order::Arm).await?;
        let cpu_before = cpu_ns();
        tell(&Acknowledgement::Armed);
        let (mut roots, mut receivers) = (Vec::new(), Vec::new());
        for (number, group) in (0..).zip(&mut self.groups) {
            match group {
                Group::Root(sender) => roots.push(&*sender),
                Group::Receiver(receiver) => receivers.push((number, receiver)),
            }
        }
        let sending = async {
            if roots.is_empty() {
                return Ok(None);
            }
            orders.expect(Order::Go).await?;
            if work.begins_with_barrier() {
                try_join_all(roots.iter().map(|root| barrier(root, self.delivery))).await?;
            }
            let started_ns = monotonic_ns();
            let all = roots.iter().zip(&prepared).map(|(root, messages)| send(root, messages, work));
            try_join_all(all).await?;
            anyhow::Ok(Some(started_ns))
        };
        let bytes = self.bytes;
        let receiving = receivers.into_iter().map(|(group, receiver)| receive(receiver, group, bytes, work));
        let receiving = try_join_all(receiving);
        let (sent, received) = join(sending, receiving).await;
        let (started_ns, received) = (sent?, received?);
        let ended_ns = received.iter().map(|received| received.ended_ns).collect();
        tell(&Acknowledgement::Done { started_ns, ended_ns });
        orders.expect(Order::Verify).await?;
        let cpu_ns = cpu_ns() - cpu_before;
        drop(prepared);
        let wrong = aside(move || received.into_iter().map(|received| received.wrong(work, bytes)).sum()).await?;
        tell(&Acknowledgement::Verified { cpu_ns, wrong });
        Ok(())
    }

    /// Fills memory of the pool, which is warm, or new objects with the messages of each root.
    async fn prepare(&self, work: Work) -> anyhow::Result<Vec<Vec<Content>>> {
        let mut prepared = Vec::new();
        for (group, role) in (0..).zip(&self.groups) {
            if matches!(role, Group::Receiver(_)) {
                continue;
            }
            let mut messages = Vec::new();
            for message in 0..work.distinct() {
                messages.push(self.content(work.seed_of(group, message)).await?);
            }
            prepared.push(messages);
        }
        Ok(prepared)
    }

    async fn content(&self, seed: u64) -> anyhow::Result<Content> {
        Ok(match self.delivery {
            Delivery::Private => {
                let mut memory = self.node.allocate(self.bytes).await?;
                let fill = move || {
                    pattern::fill(&mut memory, seed);
                    memory.freeze()
                };
                Content::Private(aside(fill).await?)
            }
            Delivery::Shared => {
                let mut object = SharedObjectMut::new(self.bytes)?;
                let fill = move || {
                    pattern::fill(&mut object, seed);
                    object.seal()
                };
                Content::Shared(aside(fill).await??)
            }
        })
    }
}

/// Runs long work in another thread. The others would give up a member that is silent for long.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> anyhow::Result<T> {
    Ok(tokio::task::spawn_blocking(work).await?)
}

/// Sends a message that is not measured, and waits until all members have it. So caches are as warm, and the members as
/// awake, as after `MPI_Barrier`.
async fn barrier(root: &Sender, delivery: Delivery) -> anyhow::Result<()> {
    let payload = match delivery {
        Delivery::Private => Payload::from(&[0u8][..]),
        Delivery::Shared => SharedObject::copy_of(&[0])?.into(),
    };
    Ok(root.send(payload).await?.delivered().await?)
}

/// Sends the messages of a group: packed, or single messages with several in flight.
async fn send(root: &Sender, distinct: &[Content], work: Work) -> anyhow::Result<()> {
    if work.is_packed() {
        return send_packed(root, distinct, work).await;
    }
    let window = rdmc::Rank(work.window.unwrap_or(1)).index();
    let messages = distinct.iter().cycle().zip(0..work.messages);
    let mut sending = futures::stream::iter(messages.map(|(message, _)| root.send(message.clone()))).buffered(window);
    while let Some(sent) = sending.next().await {
        sent?;
    }
    Ok(())
}

async fn send_packed(root: &Sender, distinct: &[Content], work: Work) -> anyhow::Result<()> {
    let bytes = |content: &Content| match content {
        Content::Private(buffer) => Ok(Bytes::from(buffer.clone())),
        Content::Shared(_) => bail!("objects are not packed"),
    };
    let distinct = distinct.iter().map(bytes).collect::<anyhow::Result<Vec<_>>>()?;
    let mut root = BatchSender::new(root);
    for (message, _) in distinct.iter().cycle().zip(0..work.messages) {
        root.feed(message.clone()).await?;
    }
    Ok(root.flush().await?)
}

/// The state of a receiver after one piece of work.
struct Received {
    group: u32,
    /// Time of the last message.
    ended_ns: u64,
    /// A single message, which is verified later.
    only: Option<Message>,
    /// Number of wrong messages.
    wrong: u64,
}

impl Received {
    /// Returns the number of wrong messages.
    fn wrong(self, work: Work, bytes: usize) -> u64 {
        let only = self.only.map_or(0, |message| wrong(&message, bytes, work.seed_of(self.group, 0)));
        self.wrong + only
    }
}

/// Receives the messages of a group. A single message is verified later; several are verified as they come.
async fn receive(receiver: &mut Receiver, group: u32, bytes: usize, work: Work) -> anyhow::Result<Received> {
    let mut received = Received { group, ended_ns: 0, only: None, wrong: 0 };
    let too_early = "the group was closed too early";
    if work.begins_with_barrier() {
        receiver.next().await.context(too_early)??;
    }
    if work.messages == 1 {
        let message = receiver.next().await.context(too_early)??;
        received.ended_ns = monotonic_ns();
        received.only = Some(message);
        return Ok(received);
    }
    let mut messages = match work.is_packed() {
        true => BatchReceiver::new(receiver).map_err(anyhow::Error::from).left_stream(),
        false => receiver.map_ok(Bytes::from).map_err(anyhow::Error::from).right_stream(),
    };
    for number in 0..work.messages {
        let message = messages.next().await.context(too_early)??;
        received.wrong += wrong(&message, bytes, work.seed_of(group, number));
    }
    received.ended_ns = monotonic_ns();
    Ok(received)
}

/// Returns 1 for a wrong message.
fn wrong(message: &[u8], bytes: usize, seed: u64) -> u64 {
    u64::from(message.len() != bytes || !pattern::is_right(message, seed))
}

/// Address where members listen.
const LOOPBACK: &str = "127.0.0.1:0";
/// How long members may take to answer an invitation.
const START_LIMIT: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use rdmc::{Cluster, GroupSpec, MemNetwork};

    use super::*;

    #[tokio::test]
    async fn wrong_content_is_noticed_in_a_round_and_in_a_burst() {
        let network = MemNetwork::new();
        let cluster = Cluster::new([(0, "a"), (1, "b")]);
        let node = |id| Node::builder(rdmc::NodeId(id), cluster.clone()).fabric(network.fabric()).start();
        let (a, b) = futures::try_join!(node(0), node(1)).unwrap();
        let spec = GroupSpec::new(1, cluster.nodes()).block_size(64);
        let (root, mut receiver) = futures::try_join!(a.create_group(spec.clone()), b.join_group(spec)).unwrap();
        let works = [(1, 0, None), (1, 1, None), (300, 0, Some(3)), (300, 7, Some(3)), (300, 0, None), (300, 7, None)];
        for (messages, broken, window) in works {
            let work = Work { seed: 5, messages, window };
            let mut distinct = Vec::new();
            for message in 0..work.distinct() {
                let mut memory = a.allocate(100).await.unwrap();
                // Those that are broken are filled as another message would be.
                pattern::fill(&mut memory, work.seed_of(0, message) + u64::from(message < broken));
                distinct.push(Content::Private(memory.freeze()));
            }
            let sending = async {
                if work.begins_with_barrier() {
                    barrier(&root, Delivery::Private).await?;
                }
                send(&root, &distinct, work).await
            };
            let (sent, received) = join(sending, receive(&mut receiver, 0, 100, work)).await;
            sent.unwrap();
            let received = received.unwrap();
            assert!(received.ended_ns > 0);
            // The first ones come again after 256.
            let again = broken * messages.div_ceil(256).min(2);
            assert_eq!(received.wrong(work, 100), again, "{messages} {broken}");
        }
    }
}
