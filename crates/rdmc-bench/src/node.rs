//! A member's process, which follows the orders of the benchmark.

use std::io::BufRead;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use futures::future::{join, try_join_all};
use futures::{SinkExt, StreamExt, TryStreamExt};
use rdmc::{
    BatchReceiver, BatchSender, Buffer, InviteOptions, Listener, Message, Node, Payload, Receiver, Sender,
    SharedObject, SharedObjectMut, Shutdown,
};
use rdmc_files::fabric::{FabricSettings, OfferedFabrics};
use tokio::sync::mpsc;

use super::pattern;
use crate::error::{BenchError, taken_over};
use crate::local::{cpu_ns, monotonic_ns, tell};
use crate::options::Delivery;
use crate::orders::{Acknowledgement, Order, Pace, Setup, Work};
use crate::process::MemberRole;
use crate::rounds::{receive_rounds, send_rounds, unmeasured};

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
        let builder = rdmc::invite(offered.fabrics().clone(), addresses, InviteOptions::new(START_LIMIT)).await?;
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

    /// Sends and receives one piece of work. Verifies the content outside of the measured time, or, where messages per
    /// second are counted, inside of it.
    async fn work(&mut self, work: Work, orders: &mut Orders) -> anyhow::Result<()> {
        let prepared = if work.pace == Pace::OneAtATime { Vec::new() } else { self.prepare(work).await? };
        tell(&Acknowledgement::Ready);
        orders.expect(Order::Arm).await?;
        let cpu_before = cpu_ns();
        tell(&Acknowledgement::Armed);
        let Self { node, groups, bytes, delivery } = self;
        let (bytes, delivery) = (*bytes, *delivery);
        let (mut roots, mut receivers) = (Vec::new(), Vec::new());
        for (number, group) in (0..).zip(groups) {
            match group {
                Group::Root(sender) => roots.push((number, &*sender)),
                Group::Receiver(receiver) => receivers.push((number, receiver)),
            }
        }
        let sending = async {
            if roots.is_empty() {
                return Ok(Vec::new());
            }
            orders.expect(Order::Go).await?;
            if work.pace == Pace::OneAtATime {
                let all =
                    roots.iter().map(|&(group, root)| send_one_at_a_time(node, root, group, bytes, delivery, work));
                return try_join_all(all).await;
            }
            let started_ns = monotonic_ns();
            let all = roots.iter().zip(&prepared).map(|((_, root), messages)| send(root, messages, work));
            try_join_all(all).await?;
            anyhow::Ok(vec![Sent { started_ns: vec![started_ns], aside_ns: 0 }])
        };
        let receiving = receivers.into_iter().map(|(group, receiver)| receive(receiver, group, bytes, work));
        let (sent, received) = join(sending, try_join_all(receiving)).await;
        let (sent, received) = (sent?, received?);
        let cpu_ns = cpu_ns() - cpu_before;
        let aside_ns: u64 =
            sent.iter().map(|sent| sent.aside_ns).chain(received.iter().map(|received| received.aside_ns)).sum();
        let wrong = received.iter().map(|received| received.wrong).sum();
        let started_ns = sent.into_iter().map(|sent| sent.started_ns).collect();
        let ended_ns = received.into_iter().map(|received| received.ended_ns).collect();
        tell(&Acknowledgement::Done { started_ns, ended_ns });
        orders.expect(Order::Verify).await?;
        tell(&Acknowledgement::Verified { cpu_ns: cpu_ns.saturating_sub(aside_ns), wrong });
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
                let seed = work.seed_of(group, message);
                messages.push(content(&self.node, self.bytes, self.delivery, seed, &mut 0).await?);
            }
            prepared.push(messages);
        }
        Ok(prepared)
    }
}

/// Fills memory of the pool, or a new object, with a message.
async fn content(
    node: &Node,
    bytes: usize,
    delivery: Delivery,
    seed: u64,
    aside_ns: &mut u64,
) -> anyhow::Result<Content> {
    Ok(match delivery {
        Delivery::Private => {
            let mut memory = node.allocate(bytes).await?;
            let fill = move || {
                pattern::fill(&mut memory, seed);
                memory.freeze()
            };
            Content::Private(unmeasured(bytes, aside_ns, fill).await?)
        }
        Delivery::Shared => {
            let mut object = SharedObjectMut::new(bytes)?;
            let fill = move || {
                pattern::fill(&mut object, seed);
                object.seal()
            };
            Content::Shared(unmeasured(bytes, aside_ns, fill).await??)
        }
    })
}

/// The times of a root.
struct Sent {
    /// When each round began, or the burst.
    started_ns: Vec<u64>,
    /// Processor time for the content.
    aside_ns: u64,
}

async fn send_one_at_a_time(
    node: &Node,
    root: &Sender,
    group: u32,
    bytes: usize,
    delivery: Delivery,
    work: Work,
) -> anyhow::Result<Sent> {
    let mut aside_ns = 0;
    let content = async |round| content(node, bytes, delivery, work.seed_of(group, round), &mut aside_ns).await;
    let started_ns = send_rounds(root, delivery, work, content).await?;
    Ok(Sent { started_ns, aside_ns })
}

/// Sends the messages of a group: packed, or single messages with several in flight.
async fn send(root: &Sender, distinct: &[Content], work: Work) -> anyhow::Result<()> {
    let Pace::Window(window) = work.pace else { return send_packed(root, distinct, work).await };
    let window = rdmc::Rank(window).index();
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
    /// When it had the message of each round, or the last message.
    ended_ns: Vec<u64>,
    /// Processor time for the verification outside of the measured time.
    aside_ns: u64,
    /// Number of wrong messages.
    wrong: u64,
}

/// Receives and verifies the messages of a group.
async fn receive(receiver: &mut Receiver, group: u32, bytes: usize, work: Work) -> anyhow::Result<Received> {
    let mut found = Received { ended_ns: Vec::new(), aside_ns: 0, wrong: 0 };
    if work.pace == Pace::OneAtATime {
        let Received { aside_ns, wrong: wrongs, .. } = &mut found;
        let verify = async |message: Message, round| {
            let seed = work.seed_of(group, round);
            *wrongs += unmeasured(bytes, aside_ns, move || wrong(&message, bytes, seed)).await?;
            Ok(())
        };
        let ended_ns = receive_rounds(receiver, work, verify).await?;
        return Ok(Received { ended_ns, ..found });
    }
    let mut messages = match work.pace {
        Pace::Packed => BatchReceiver::new(receiver).map_err(anyhow::Error::from).left_stream(),
        _ => receiver.map_ok(Bytes::from).map_err(anyhow::Error::from).right_stream(),
    };
    for number in 0..work.messages {
        let message = messages.next().await.context("the group was closed too early")??;
        found.wrong += wrong(&message, bytes, work.seed_of(group, number));
    }
    found.ended_ns = vec![monotonic_ns()];
    Ok(found)
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
        let (rounds, window, packed) = (Pace::OneAtATime, Pace::Window(3), Pace::Packed);
        let works =
            [(3, 0, rounds), (3, 2, rounds), (300, 0, window), (300, 7, window), (300, 0, packed), (300, 7, packed)];
        for (messages, broken, pace) in works {
            let work = Work { seed: 5, messages, pace };
            // Those that are broken are filled as another message would be.
            let seed = |message: u64| work.seed_of(0, message) + u64::from(message < broken);
            let mut prepared = Vec::new();
            for message in 0..work.distinct() {
                prepared.push(content(&a, 100, Delivery::Private, seed(message), &mut 0).await.unwrap());
            }
            let sending = async {
                match pace {
                    Pace::OneAtATime => {
                        let content = async |round: u64| Ok(prepared[usize::try_from(round)?].clone());
                        send_rounds(&root, Delivery::Private, work, content).await
                    }
                    _ => send(&root, &prepared, work).await.map(|()| vec![1]),
                }
            };
            let (sent, received) = join(sending, receive(&mut receiver, 0, 100, work)).await;
            let (started_ns, received) = (sent.unwrap(), received.unwrap());
            assert_eq!(started_ns.len(), received.ended_ns.len());
            assert!(started_ns.iter().zip(&received.ended_ns).all(|(started, ended)| started < ended), "{pace:?}");
            // The first ones come again after 256.
            let again = broken * messages.div_ceil(256).min(2);
            assert_eq!(received.wrong, again, "{messages} {broken}");
        }
    }
}
