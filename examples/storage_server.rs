//! Runs an object store that keeps every object on every server, replicated by multicast.
//!
//! ```text
//! storage_server --id 0 --cluster 127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402 --http 127.0.0.1:8000
//! storage_server --id 1 --cluster 127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402 --http 127.0.0.1:8001
//! storage_server --id 2 --cluster 127.0.0.1:7400,127.0.0.1:7401,127.0.0.1:7402 --http 127.0.0.1:8002
//! curl -T photo.jpg http://127.0.0.1:8000/objects/photo && curl http://127.0.0.1:8002/objects/photo
//! ```
//! Each server is the root of one group, in which the others are receivers. A 201 promises that every server has stored
//! the object: the handler awaits the receipt of its message. `storage_server.sh` shows this with three processes.
//!
//! Left out: disks (to write to one, do so before `stored()`), servers that come back (when one is lost, the others
//! answer PUTs with 503 and still serve GETs), limits for all clients together, authentication.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::{Router, http::StatusCode, routing::get};
use bytes::Bytes;
use clap::Parser;
use rdmc::{Cluster, GroupSpec, Node, NodeId, Sender, TcpFabric};

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
    let (me, servers) = (NodeId(args.id), cluster.nodes());
    let node = Node::builder(me, cluster).fabric(TcpFabric::new()).start().await?;
    let store = Arc::<Mutex<Store>>::default();
    // The group of each server has its number, and the server as its root.
    let group_of = |primary: NodeId| {
        let replicas = servers.iter().copied().filter(move |server| *server != primary);
        let group = GroupSpec::new(primary.0.into(), std::iter::once(primary).chain(replicas)).block_size(BLOCK_LEN);
        group.ring(64, 4096).headers(true)
    };
    for primary in servers.iter().copied().filter(|primary| *primary != me) {
        let (node, store, spec) = (node.clone(), store.clone(), group_of(primary));
        tokio::spawn(async move {
            let Err(error) = replicate(node, spec, &store).await;
            eprintln!("no more objects from server {primary}: {error:#}");
        });
    }
    let group = node.create_group(group_of(me)).await?;
    let routes = Router::new()
        .route("/objects/{name}", get(get_object).put(put_object))
        .layer(DefaultBodyLimit::max(OBJECT_LEN_MAX))
        .with_state(Server { me, group, store });
    let listener = tokio::net::TcpListener::bind(&args.http).await?;
    println!("server {me} listens at http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, routes).await?)
}

/// Stores the objects that another server sends, until its group ends.
async fn replicate(node: Node, group: GroupSpec, store: &Mutex<Store>) -> Result<Never> {
    let primary = group.members()[0];
    let mut offers = node.join_group(group).with_offers().await?;
    loop {
        let offer = offers.next_offer().await.context("the group was closed")??;
        // Not into the pool, because objects stay in memory.
        let memory = vec![0; usize::try_from(offer.size())?];
        let message = offer.accept_into(memory)?.await?;
        let (clock, name) = message.header().split_first_chunk().context("a header begins with a time")?;
        let (clock, name) = (u64::from_le_bytes(*clock), String::from_utf8(name.to_vec())?);
        lock(store).insert(name, (clock, primary), message.clone().into_bytes());
        message.stored();
    }
}

#[derive(Clone)]
struct Server {
    me: NodeId,
    group: Sender,
    store: Arc<Mutex<Store>>,
}

async fn get_object(State(server): State<Server>, Path(name): Path<String>) -> Result<Bytes, StatusCode> {
    lock(&server.store).objects.get(&name).map(|(_, object)| object.clone()).ok_or(StatusCode::NOT_FOUND)
}

async fn put_object(State(server): State<Server>, Path(name): Path<String>, object: Bytes) -> StatusCode {
    if name.len() > NAME_LEN_MAX {
        return StatusCode::URI_TOO_LONG;
    }
    // In a task of its own: this future is dropped when the client goes away.
    let put = tokio::spawn(async move {
        let clock = lock(&server.store).tick();
        let header = [&clock.to_le_bytes(), name.as_bytes()].concat();
        server.group.send_with(header, object.clone()).await?.stored().await?;
        lock(&server.store).insert(name, (clock, server.me), object);
        anyhow::Ok(())
    });
    match put.await {
        Ok(Ok(())) => StatusCode::CREATED,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// The objects of one server with their versions, which order PUTs of one name in the same way on all servers. A PUT
/// that begins after another was answered has the later version, because all servers have seen the other.
#[derive(Default)]
struct Store {
    objects: HashMap<String, ((u64, NodeId), Bytes)>,
    /// The latest clock of a version (a Lamport clock).
    clock: u64,
}

impl Store {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Inserts the object, unless the store has a newer one of its name.
    fn insert(&mut self, name: String, version: (u64, NodeId), object: Bytes) {
        self.clock = self.clock.max(version.0);
        if self.objects.get(&name).is_none_or(|(stored, _)| *stored < version) {
            self.objects.insert(name, (version, object));
        }
    }
}

fn lock(store: &Mutex<Store>) -> std::sync::MutexGuard<'_, Store> {
    store.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A group of a server ends with an error or not at all.
type Never = std::convert::Infallible;

/// A name is part of a header, which is short.
const NAME_LEN_MAX: usize = 255;
const BLOCK_LEN: u32 = 256 << 10;
const OBJECT_LEN_MAX: usize = 1 << 30;
