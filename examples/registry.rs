//! Runs a registry of blobs: node 0 takes PUTs, and every node serves its own copy.
//!
//! ```text
//! registry --id 0 --cluster 127.0.0.1:7500,127.0.0.1:7501,127.0.0.1:7502 --http 127.0.0.1:8000
//! registry --id 1 --cluster 127.0.0.1:7500,127.0.0.1:7501,127.0.0.1:7502 --http 127.0.0.1:8001
//! registry --id 2 --cluster 127.0.0.1:7500,127.0.0.1:7501,127.0.0.1:7502 --http 127.0.0.1:8002
//! curl -T photo.jpg http://127.0.0.1:8000/blobs/photo && curl http://127.0.0.1:8002/blobs/photo
//! ```
//! One group lives as long as the service. `docs/EMBEDDING.md` explains the code, and `registry.sh` shows it with three
//! processes. In `storage_server` every node takes PUTs.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::{Router, http::StatusCode, routing::get};
use bytes::Bytes;
use clap::Parser;
use futures::StreamExt;
use rdmc::{Cluster, GroupSpec, Node, NodeId, Receiver, Sender, Shutdown, TcpFabric};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Parser)]
struct Args {
    /// Place of this node in the cluster list, from 0. Node 0 takes PUTs.
    #[arg(long)]
    id: u32,
    /// Addresses at which the nodes reach each other; the same list for all nodes.
    #[arg(long, value_delimiter = ',')]
    cluster: Vec<String>,
    /// Address at which clients reach this node.
    #[arg(long)]
    http: String,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let cluster = Cluster::new((0u32..).zip(args.cluster));
    let group = GroupSpec::new(1, cluster.nodes()).block_size(256 << 10).ring(64, 4096).headers(true);
    let node = Node::builder(NodeId(args.id), cluster).fabric(TcpFabric::new()).start().await?;
    let mut members = node.members();
    tokio::spawn(async move {
        while let Some(event) = members.next().await {
            println!("{event}");
        }
    });
    let mut registry = Registry { blobs: Blobs::default(), root: None };
    if args.id == 0 {
        registry.root = Some(node.create_group(group).await?);
    } else {
        let receiving = receive(node.join_group(group).await?, registry.blobs.clone());
        tokio::spawn(async { receiving.await.unwrap_or_else(|error| eprintln!("no more blobs: {error:#}")) });
    }
    let routes = Router::new()
        .route("/blobs/{name}", get(get_blob).put(put_blob))
        .layer(DefaultBodyLimit::max(BLOB_LEN_MAX))
        .with_state(registry.clone());
    let listener = tokio::net::TcpListener::bind(&args.http).await?;
    println!("node {} listens at http://{}", args.id, listener.local_addr()?);
    let mut terminate = signal(SignalKind::terminate())?;
    axum::serve(listener, routes).with_graceful_shutdown(async move { _ = terminate.recv().await }).await?;
    if let Some(root) = registry.root {
        root.close().await?; // every node has every blob
    }
    node.shutdown(Shutdown::Drain { limit: Duration::from_secs(10) }).await;
    Ok(())
}

/// Stores the blobs that node 0 sends, until it closes the group.
async fn receive(mut messages: Receiver, blobs: Blobs) -> Result<()> {
    while let Some(message) = messages.next().await {
        let message = message?;
        let name = String::from_utf8(message.header().to_vec())?;
        // A copy: the message's memory goes back to the pool.
        store(&blobs, name, message.number(), Bytes::copy_from_slice(&message));
        message.stored(); // a real registry writes to its disk first
    }
    messages.close().await?;
    Ok(())
}

#[derive(Clone)]
struct Registry {
    blobs: Blobs,
    /// The group at node 0, which alone sends.
    root: Option<Sender>,
}

async fn get_blob(State(registry): State<Registry>, Path(name): Path<String>) -> Result<Bytes, StatusCode> {
    lock(&registry.blobs).get(&name).map(|(_, blob)| blob.clone()).ok_or(StatusCode::NOT_FOUND)
}

async fn put_blob(State(registry): State<Registry>, Path(name): Path<String>, blob: Bytes) -> StatusCode {
    let Some(root) = registry.root else { return StatusCode::MISDIRECTED_REQUEST };
    if name.len() > GroupSpec::HEADER_LEN_MAX {
        return StatusCode::URI_TOO_LONG;
    }
    // In a task of its own: this future is dropped when the client goes away.
    let put = tokio::spawn(async move {
        let receipt = root.send_with(name.clone(), blob.clone()).await?;
        receipt.stored().await?;
        store(&registry.blobs, name, receipt.number(), blob);
        anyhow::Ok(())
    });
    match put.await {
        Ok(Ok(())) => StatusCode::CREATED,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// The blobs of one node, each with the number of its message.
type Blobs = Arc<Mutex<HashMap<String, (u64, Bytes)>>>;

/// Stores a blob unless a later message has brought one of its name: PUTs at node 0 end in any order.
fn store(blobs: &Blobs, name: String, number: u64, blob: Bytes) {
    let mut blobs = lock(blobs);
    if blobs.get(&name).is_none_or(|(stored, _)| *stored < number) {
        blobs.insert(name, (number, blob));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const BLOB_LEN_MAX: usize = 1 << 30;
