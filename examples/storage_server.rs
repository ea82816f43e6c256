//! Runs an object store that keeps every object on every server, replicated by multicast.
//!
//! ```text
//! storage_server --id 0 --cluster 127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402 --http 127.0.0.1:8000
//! storage_server --id 1 --cluster 127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402 --http 127.0.0.1:8001
//! storage_server --id 2 --cluster 127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402 --http 127.0.0.1:8002
//! curl -T photo.jpg http://127.0.0.1:8000/objects/photo && curl http://127.0.0.1:8002/objects/photo
//! ```
//! `storage_server.sh` does this and more, with three processes.
//!
//! # What a 201 promises
//! A 201 promises that every server has stored the object. The end of a `send` does not suffice: the primary's memory
//! is free then, but the last servers may still receive from each other (DSN §4.6). The *close* of a group succeeds if
//! and only if every member has every message and has agreed to the end. A member agrees after it has stored. So each
//! PUT has its own group, and its answer is the outcome of the close.
//!
//! Forming a group costs connections and some round trips, so servers do it before the PUT comes. As a primary, each
//! server keeps a few groups formed and waiting: its [lanes](primary_lane). All servers can compute their numbers. In
//! a PUT, only the close remains: one control frame to each server and one back.
//!
//! Three release builds on one machine of two cores, over loopback, beside a cluster of one server, which replicates
//! nothing:
//!
//! | PUT | three servers | one server |
//! |---|---|---|
//! | 1 kB | about 1.4 ms | 0.14 ms |
//! | 64 MB | 0.32 s | 0.15 s |
//!
//! # What it leaves out
//! - Disks: objects live in memory. To write to disk, do so where [`replica_lane`] calls `Store::insert`: before the
//!   close.
//! - Membership: when a server is lost, the others answer PUTs with 503 and still serve GETs. To go on, restart all
//!   servers. After a 503 some servers may have stored the object.
//! - Atomic reads: during a PUT one server may return the new object and another server the old one. After the 201 all
//!   return the new object, or that of another PUT which had not been answered when this one began.
//! - Servers that hang without dying: a PUT waits for them.
//! - DELETE, ranges, limits for all clients together, authentication, encryption.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::routing::get;
use bytes::Bytes;
use clap::Parser;
use rdmc::{Cluster, GroupSpec, Memory, Node, NodeId, OfferReceiver, TcpFabric};
use tokio::sync::{Mutex as AsyncMutex, mpsc, oneshot};

#[derive(Parser)]
struct Args {
    /// Place of this server in the cluster list, from 0.
    #[arg(long)]
    id: u32,
    /// Addresses at which the servers reach each other; the same list for all servers.
    #[arg(long, value_delimiter = ',')]
    cluster: Vec<String>,
    /// Address at which clients reach this server.
    #[arg(long)]
    http: String,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let cluster = Cluster::new((0u32..).zip(args.cluster));
    let servers = cluster.nodes();
    let node = Node::builder(NodeId(args.id), cluster).fabric(TcpFabric::new()).start().await?;

    let store = Arc::new(Mutex::new(Store::default()));
    let (puts, queue) = mpsc::channel(PUTS_MAX);
    let queue = Arc::new(AsyncMutex::new(queue));
    for &primary in &servers {
        for lane in 0..LANES {
            let lane = Lane { primary, number: lane, servers: servers.clone() };
            let (node, store, queue) = (node.clone(), store.clone(), queue.clone());
            tokio::spawn(async move {
                let Err(error) = match primary == node.id() {
                    true => primary_lane(node, lane, store, queue).await,
                    false => replica_lane(node, lane, store).await,
                };
                eprintln!("no more replication from server {primary}: {error:#}");
            });
        }
    }
    // Only the lanes hold the queue, so that PUTs are refused when no lane is left.
    drop(queue);

    let routes = Router::new()
        .route("/objects/{name}", get(get_object).put(put_object))
        .layer(DefaultBodyLimit::max(OBJECT_LEN_MAX))
        .with_state(Server { store, puts });
    let listener = tokio::net::TcpListener::bind(&args.http).await?;
    println!("server {} listens at http://{}", args.id, listener.local_addr()?);
    Ok(axum::serve(listener, routes).await?)
}

#[derive(Clone)]
struct Server {
    store: Arc<Mutex<Store>>,
    puts: mpsc::Sender<Put>,
}

async fn get_object(State(server): State<Server>, Path(name): Path<String>) -> Result<Bytes, StatusCode> {
    lock(&server.store).objects.get(&name).map(|object| object.bytes.clone()).ok_or(StatusCode::NOT_FOUND)
}

async fn put_object(State(server): State<Server>, Path(name): Path<String>, bytes: Bytes) -> StatusCode {
    // A lane carries out the PUT. This function is dropped when the client goes away, which would abandon the group.
    let (done, stored) = oneshot::channel();
    if server.puts.send(Put { name, bytes, done }).await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    match stored.await {
        Ok(()) => StatusCode::CREATED,
        Err(_) => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// An object to be stored on all servers.
struct Put {
    name: String,
    bytes: Bytes,
    /// Completes when all servers have the object; dropped if that fails.
    done: oneshot::Sender<()>,
}

/// A sequence of groups with the same root, one after the other.
///
/// Its ends leave a group at the same time, by closing it. Then they form the next group without coordination.
struct Lane {
    primary: NodeId,
    number: u32,
    servers: Vec<NodeId>,
}

impl Lane {
    /// Returns the lane's groups. Group numbers are used once; each lane has a range of its own.
    fn groups(&self) -> impl Iterator<Item = GroupSpec> {
        let lane = u64::from(self.primary.0) * u64::from(LANES) + u64::from(self.number);
        let replicas = self.servers.iter().copied().filter(|&server| server != self.primary);
        let members: Vec<NodeId> = std::iter::once(self.primary).chain(replicas).collect();
        (lane << 32..(lane + 1) << 32).map(move |id| GroupSpec::new(id, members.clone()))
    }
}

/// Replicates one PUT after the other, each in a group that was formed before the PUT came.
async fn primary_lane(
    node: Node,
    lane: Lane,
    store: Arc<Mutex<Store>>,
    queue: Arc<AsyncMutex<mpsc::Receiver<Put>>>,
) -> Result<Never> {
    for group in lane.groups() {
        let group = node.create_group(group).await?;
        let next = async { queue.lock().await.recv().await };
        let put = tokio::select! {
            put = next => put.context("the server has ended")?,
            failure = group.failed() => return Err(failure.into()),
        };
        let version = lock(&store).next_version(lane.primary);
        group.send(header(version, &put.name)).await?;
        group.send(put.bytes.clone()).await?;
        group.close().await?;
        lock(&store).insert(put.name, Object { version, bytes: put.bytes });
        // The client may have gone away.
        let _ = put.done.send(());
    }
    anyhow::bail!("all group numbers are used up")
}

/// Stores the objects that the primary at the other end sends.
async fn replica_lane(node: Node, lane: Lane, store: Arc<Mutex<Store>>) -> Result<Never> {
    for group in lane.groups() {
        let mut offers = node.join_group_with_offers(group).await?;
        let (clock, name) = parse_header(&receive(&node, &mut offers).await?)?;
        let bytes = receive(&node, &mut offers).await?;
        lock(&store).insert(name, Object { version: (clock, lane.primary), bytes });
        offers.close().await?; // only now may the primary answer
    }
    anyhow::bail!("all group numbers are used up")
}

/// Receives a message into memory of exactly its size. It does not use the pool, because objects stay in memory.
async fn receive(node: &Node, offers: &mut OfferReceiver) -> Result<Bytes> {
    let offer = offers.next_offer().await.context("closed before everything was sent")??;
    let memory = Memory::from(vec![0; usize::try_from(offer.size())?]);
    let memory = node.register(memory)?.into_mut().ok().context("new memory is nobody else's")?;
    Ok(offer.accept(memory).await?.into_bytes())
}

/// Returns the message before an object: the version's clock and the name.
fn header((clock, _): Version, name: &str) -> Vec<u8> {
    [&clock.to_le_bytes(), name.as_bytes()].concat()
}

fn parse_header(header: &[u8]) -> Result<(u64, String)> {
    let (clock, name) = header.split_first_chunk().context("a header is at least 8 bytes")?;
    Ok((u64::from_le_bytes(*clock), String::from_utf8(name.to_vec())?))
}

/// The objects of one server.
#[derive(Default)]
struct Store {
    objects: HashMap<String, Object>,
    /// The highest version seen (a Lamport clock).
    clock: u64,
}

struct Object {
    version: Version,
    bytes: Bytes,
}

/// Orders PUTs of one name in the same way on all servers: two lanes may carry two of them at once.
///
/// A PUT that begins after another was answered has the higher clock, because all servers saw the other.
type Version = (u64, NodeId);

impl Store {
    fn next_version(&mut self, primary: NodeId) -> Version {
        self.clock += 1;
        (self.clock, primary)
    }

    /// Inserts the object, unless the store has a newer one of its name.
    fn insert(&mut self, name: String, object: Object) {
        self.clock = self.clock.max(object.version.0);
        if self.objects.get(&name).is_none_or(|stored| stored.version < object.version) {
            self.objects.insert(name, object);
        }
    }
}

fn lock(store: &Mutex<Store>) -> std::sync::MutexGuard<'_, Store> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A lane ends with an error or not at all.
type Never = std::convert::Infallible;

/// PUTs that one primary replicates at the same time.
const LANES: u32 = 4;
/// PUTs that wait for a lane; further PUTs wait in their connections.
const PUTS_MAX: usize = 16;
/// Largest object in bytes.
const OBJECT_LEN_MAX: usize = 1 << 30;
