//! The multicast itself over `async-rdma`: nodes of the runtime on the machine's RDMA devices, one for each node as far
//! as they go.
//!
//! Without a device the tests are skipped and say so.

#![cfg(target_os = "linux")]

use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use async_rdma::device::DeviceList;
use futures::StreamExt;
use futures::future::try_join_all;
use rdmc::{Algorithm, Cluster, Fabric, GroupSpec, Node, NodeId};
use rdmc_async_rdma::{AsyncRdmaConfig, AsyncRdmaFabric};
use tokio::process::{Child, Command};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_member_gets_every_message() -> Result<()> {
    if devices().is_empty() {
        println!("skipped: this machine has no RDMA device");
        return Ok(());
    }
    for count in 2..=4 {
        let cluster = Cluster::new((0u32..).zip(free_addresses(count)?)).key(0x5eed);
        let members = cluster.nodes().into_iter().map(|me| member(me, cluster.clone()));
        watched(try_join_all(members)).await.with_context(|| format!("{count} nodes"))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_process_gets_every_message() -> Result<()> {
    if devices().is_empty() {
        println!("skipped: this machine has no RDMA device");
        return Ok(());
    }
    let addresses = free_addresses(3)?.join(" ");
    let members = (0..3).map(|me| process("one_process", me, &addresses)).collect::<Result<Vec<_>>>()?;
    let ended = watched(try_join_all(members.into_iter().map(|mut member| async move { Ok(member.wait().await?) })));
    ensure!(ended.await?.iter().all(ExitStatus::success), "a member failed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_dies_ends_the_group() -> Result<()> {
    if devices().is_empty() {
        println!("skipped: this machine has no RDMA device");
        return Ok(());
    }
    let addresses = free_addresses(3)?;
    let mut third = process("one_process_that_dies", 2, &addresses.join(" "))?;
    let cluster = Cluster::new((0u32..).zip(addresses)).key(0x5eed);
    let survivors = [NodeId(0), NodeId(1)].map(|me| {
        let cluster = cluster.clone();
        async move {
            let (node, spec) = start(me, cluster).await?;
            let failure = if me == spec.members()[0] {
                let root = node.create_group(spec).await?;
                while root.send(pattern(1 << 20, 0)).await.is_ok() {}
                root.failed().await
            } else {
                let mut messages = node.join_group(spec).await?;
                loop {
                    if let Err(failure) = messages.next().await.context("the root does not close")? {
                        break failure;
                    }
                }
            };
            ensure!(failure.first().node == NodeId(2), "node {me}: {failure}");
            Ok(())
        }
    });
    watched(try_join_all(survivors)).await?;
    ensure!(third.wait().await?.code() == Some(DIED), "the third member failed before it was to die");
    Ok(())
}

/// One member of a test above; passes at once if it was not started by it.
#[tokio::test]
async fn one_process() -> Result<()> {
    let Some((me, cluster)) = assigned()? else { return Ok(()) };
    watched(member(me, cluster)).await
}

/// One member of a test above, which takes a message and is gone; passes at once if it was not started by it.
#[tokio::test]
async fn one_process_that_dies() -> Result<()> {
    let Some((me, cluster)) = assigned()? else { return Ok(()) };
    let (node, spec) = start(me, cluster).await?;
    let mut messages = node.join_group(spec).await?;
    messages.next().await.context("the root closed early")??;
    std::process::exit(DIED);
}

fn process(test: &str, me: u32, addresses: &str) -> Result<Child> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", test, "--nocapture"]).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command.env(ME, me.to_string()).env(ADDRESSES, addresses).spawn()?)
}

/// Returns which member this process is, if it was started as one.
fn assigned() -> Result<Option<(NodeId, Cluster)>> {
    let (Ok(me), Ok(addresses)) = (std::env::var(ME), std::env::var(ADDRESSES)) else { return Ok(None) };
    let cluster = Cluster::new((0u32..).zip(addresses.split(' ').map(str::to_owned))).key(0x5eed);
    Ok(Some((NodeId(me.parse()?), cluster)))
}

/// Sends all messages as the first node of the cluster, takes and compares them as another.
async fn member(me: NodeId, cluster: Cluster) -> Result<()> {
    let (node, spec) = start(me, cluster).await?;
    if me == spec.members()[0] {
        let root = node.create_group(spec).await?;
        for (seed, len) in (0..).zip(SIZES) {
            root.send(pattern(len, seed)).await?;
        }
        root.close().await?;
        return Ok(());
    }
    let mut messages = node.join_group(spec).await?;
    for (seed, len) in (0..).zip(SIZES) {
        let message = messages.next().await.context("the root closed early")??;
        ensure!(message[..] == pattern(len, seed), "message of {len} bytes at node {me}");
    }
    ensure!(messages.next().await.is_none(), "there are more messages than were sent");
    messages.close().await?;
    Ok(())
}

/// Starts a node and specifies the group of all nodes.
async fn start(me: NodeId, cluster: Cluster) -> Result<(Node, GroupSpec)> {
    let spec = GroupSpec::new(1, cluster.nodes()).algorithm(Algorithm::BinomialPipeline).block_size(BLOCK_LEN);
    let fabric = fabric(me).await?;
    let node = Node::builder(me, cluster).fabric(fabric).connect_limit(Duration::from_secs(60)).start().await?;
    Ok((node, spec))
}

async fn fabric(me: NodeId) -> Result<Arc<dyn Fabric>> {
    let devices = devices();
    let mut config = AsyncRdmaConfig::default();
    config.device = Some(devices[me.0 as usize % devices.len()].clone());
    Ok(AsyncRdmaFabric::open(config).await?)
}

fn devices() -> Vec<String> {
    let list = DeviceList::available();
    assert!(list.is_ok() || std::env::var_os("RDMC_LAB_NODES").is_none(), "the lab's devices are not found");
    list.map(|list| list.iter().map(|device| device.name().to_owned()).collect()).unwrap_or_default()
}

fn free_addresses(count: usize) -> Result<Vec<String>> {
    let bound = (0..count).map(|_| std::net::TcpListener::bind("127.0.0.1:0")).collect::<Result<Vec<_>, _>>()?;
    bound.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect()
}

/// Bytes that depend on every position and on the seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

async fn watched<T>(test: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(Duration::from_secs(120), test).await.context("the test hangs")?
}

const SIZES: [usize; 4] = [0, 1, (1 << 20) + 7, 8 << 20];
const BLOCK_LEN: u32 = 256 << 10;
/// Exit status of the member that dies, which is none of a test's.
const DIED: i32 = 42;
const ME: &str = "RDMC_TEST_MEMBER";
const ADDRESSES: &str = "RDMC_TEST_ADDRESSES";
