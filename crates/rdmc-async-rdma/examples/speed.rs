//! Sends between the first two RDMA devices of the machine as fast as it can, and prints how fast that is.
//!
//! ```text
//! cargo run --release --example speed [PACKET_LEN]
//! ```

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use async_rdma::device::DeviceList;
use futures::future::{try_join, try_join_all};
use rdmc_async_rdma::{AsyncRdmaConfig, AsyncRdmaFabric};
use rdmc_fabric::{CompletionMode, Fabric, Memory, Peer, QueuePair, QueuePairConfig, Role};

#[tokio::main]
async fn main() -> Result<()> {
    let packet_len = std::env::args().nth(1).map_or(Ok(1024), |text| text.parse())?;
    let devices = DeviceList::available().context("this machine has no RDMA device")?;
    let names: Vec<String> = devices.iter().map(|device| device.name().to_owned()).collect();
    drop(devices);
    let ends = [&names[0], names.get(1).unwrap_or(&names[0])].map(|device| open(device, packet_len));
    let [a, b] = try_join_all(ends).await?.try_into().ok().context("two ends were opened")?;
    let peer = |end: &End, role| Peer { endpoint: end.queue_pair.endpoint(), role, address: None };
    try_join(a.queue_pair.connect(peer(&b, Role::Active)), b.queue_pair.connect(peer(&a, Role::Passive))).await?;
    for (len, at_once) in [(1 << 20, 1), (1 << 20, 4), (1 << 20, 16), (64 << 10, 1), (64 << 10, 16), (4 << 10, 16)] {
        let mib = measure(&a, &b, len, at_once, false).await?;
        println!("{at_once:2} messages of {:4} KiB at once: {mib:4.0} MiB/s", len >> 10);
    }
    println!(
        "16 messages of 1024 KiB at once, of foreign memory: {:4.0} MiB/s",
        measure(&a, &b, 1 << 20, 16, true).await?
    );
    Ok(())
}

struct End {
    fabric: Arc<AsyncRdmaFabric>,
    queue_pair: QueuePair,
    _listener: Box<dyn rdmc_fabric::ControlListener>,
}

async fn open(device: &str, packet_len: u16) -> Result<End> {
    let mut config = AsyncRdmaConfig::default();
    config.device = Some(device.to_owned());
    config.packet_len = packet_len;
    let fabric = AsyncRdmaFabric::open(config).await?;
    let listener = fabric.environment().listen("127.0.0.1:0").await?;
    let queue = fabric.create_completion_queue(1000, CompletionMode::Event)?;
    let queue_pair = fabric.create_queue_pair(&queue.source(), QueuePairConfig::default())?;
    tokio::spawn(queue.drain());
    Ok(End { fabric, queue_pair, _listener: listener })
}

/// Returns how many MiB per second get from `a` to `b` when so many messages are under way.
async fn measure(a: &End, b: &End, len: usize, at_once: usize, foreign: bool) -> Result<f64> {
    let total = (256 << 20).min(len * 4096);
    let flows = (0..at_once).map(|_| async move {
        let data = if foreign {
            a.fabric.register(Memory::from(vec![1; len]))?.into_shared()
        } else {
            a.fabric.allocate(len)?.into_shared()
        };
        let mut room = b.fabric.allocate(len)?.into_mut().ok().context("allocated memory is writable")?;
        for _ in 0..total / len / at_once {
            let receive = b.queue_pair.receive(room);
            a.queue_pair.send(data.clone(), None).await?;
            room = receive.await?.buffer;
        }
        anyhow::Ok(())
    });
    let started = Instant::now();
    try_join_all(flows).await?;
    let moved = total / len / at_once * at_once * len;
    Ok((moved >> 20) as f64 / started.elapsed().as_secs_f64())
}
