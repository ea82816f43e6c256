//! The opened device: one context, one protection domain and one completion queue for all queue pairs.

use std::alloc::Layout;
use std::io;
use std::ops::DerefMut;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_rdma::{AccessFlag, LocalMr, MRManageStrategy, MTU, MrToken, QueuePairEndpoint, Rdma, RdmaBuilder, RemoteMr};
use enumflags2::BitFlags;
use futures::future::{BoxFuture, Either, select};
use rdmc_fabric::FabricError;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Mutex;

use crate::error::AsyncRdmaError;
use crate::fabric::AsyncRdmaConfig;
use crate::frame::{ADDRESS_LEN, QueuePairAddress};
use crate::memory::Region;

/// What all queue pairs of a fabric share.
pub(crate) struct Device {
    /// Makes the queue pairs, one at a time; it holds an unused queue pair.
    root: Arc<Mutex<Rdma>>,
    /// Allocates memory. It has an unused queue pair of its own, so that allocating never waits for the creation of
    /// one.
    allocator: Rdma,
    /// Identifies the protection domain.
    domain: Arc<()>,
    /// The source of empty messages.
    scratch: Arc<Region>,
    /// Memory of another protection domain; a queue pair that sends it breaks.
    foreign: LocalMr,
}

impl Device {
    pub(crate) async fn open(config: &AsyncRdmaConfig) -> Result<Arc<Self>, AsyncRdmaError> {
        let failed = |source| AsyncRdmaError::Device { device: config.device.clone(), source };
        let other = builder(config)?.build().map_err(failed)?;
        let foreign = other.alloc_local_mr(layout(FOREIGN_LEN).map_err(failed)?).map_err(failed)?;
        drop(other);
        let root = builder(config)?.build().map_err(failed)?;
        if root.get_qp_endpoint().gid().as_raw() == &[0; 16] {
            return Err(AsyncRdmaError::NoGid { port: config.port, gid_index: config.gid_index });
        }
        let root = Arc::new(Mutex::new(root));
        let allocator = prepare(root.clone().lock_owned().await).await.map_err(failed)?;
        let allocator = allocator.connect_to_itself().await.map_err(failed)?;
        let domain = Arc::new(());
        let scratch = allocator.alloc_local_mr(layout(1).map_err(failed)?).map_err(failed)?;
        let scratch = Arc::new(Region::new(scratch, domain.clone()));
        Ok(Arc::new(Self { root, allocator, domain, scratch, foreign }))
    }

    /// Prepares a queue pair that is not yet connected.
    pub(crate) async fn prepare(&self) -> io::Result<Prepared> {
        // A queue pair is made from another one, which stays borrowed until the new one is connected. Each gets a
        // source of its own, connected to itself, so that no connection waits for another one's peer.
        let seed = prepare(self.root.clone().lock_owned().await).await?.connect_to_itself().await?;
        prepare(Box::new(seed)).await
    }

    /// Allocates and registers `len` zeroed bytes, at least one.
    pub(crate) fn allocate(&self, len: usize, access: BitFlags<AccessFlag>) -> Result<Region, FabricError> {
        let mr = layout(len).and_then(|layout| self.allocator.alloc_local_mr_with_access(layout, access));
        let mr = mr.map_err(|source| FabricError::Memory { len, source })?;
        Ok(Region::new(mr, self.domain.clone()))
    }

    /// Breaks a queue pair, so that the device gives back everything posted to it.
    ///
    /// `async-rdma` has no call for it: it would leak what was posted, and its memory, for as long as the completion
    /// queue lives. A request that must fail breaks the queue pair too. It takes its turn behind the posted work.
    pub(crate) async fn break_queue_pair(&self, rdma: &Rdma) {
        let mut nowhere = remote(0, 0, FOREIGN_LEN);
        if let Ok(()) = rdma.write(&self.foreign, &mut nowhere).await {
            tracing::warn!("a queue pair sent memory that is not its own and cannot be broken");
        }
    }

    pub(crate) fn scratch(&self) -> &Arc<Region> {
        &self.scratch
    }

    pub(crate) fn domain(&self) -> &Arc<()> {
        &self.domain
    }
}

/// A queue pair that waits for its peer's address.
pub(crate) struct Prepared {
    address: QueuePairAddress,
    /// The rest of its creation.
    making: BoxFuture<'static, io::Result<Rdma>>,
    /// Where the creation waits for the peer's address.
    answer: TcpStream,
}

impl Prepared {
    /// Returns the address for the peer.
    pub(crate) fn address(&self) -> QueuePairAddress {
        self.address
    }

    /// Makes the queue pair ready to send to and receive from the peer's.
    pub(crate) async fn connect(self, peer: QueuePairAddress) -> io::Result<Rdma> {
        let Self { address, making, mut answer } = self;
        let runtime = Handle::current();
        // The kernel may take a second to resolve the path to the peer, and blocks the thread meanwhile.
        let made = tokio::task::spawn_blocking(move || {
            runtime.block_on(async {
                answer.write_all(&peer).await?;
                making.await
            })
        });
        let made = made.await.map_err(io::Error::other)??;
        // The creation asked on a port of this host; another process could have answered before it.
        if address == address_of(&made.get_qp_endpoint()) {
            Ok(made)
        } else {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    }

    async fn connect_to_itself(self) -> io::Result<Rdma> {
        let address = self.address;
        self.connect(address).await
    }
}

/// Begins to create a queue pair that shares the device's resources with the one behind `from`.
///
/// `async-rdma` offers only one way: to connect by TCP to a listener that tells the peer's address. Here that listener
/// is this function, which learns the queue pair's own address from it; [`Prepared::connect`] gets the peer's.
async fn prepare<R>(mut from: R) -> io::Result<Prepared>
where
    R: DerefMut<Target = Rdma> + Send + 'static,
{
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let loopback = listener.local_addr()?;
    let making: BoxFuture<'static, _> = Box::pin(async move { from.new_connect(loopback).await });
    let asked = std::pin::pin!(async {
        let (mut stream, _) = listener.accept().await?;
        let mut address = [0; ADDRESS_LEN];
        stream.read_exact(&mut address).await?;
        io::Result::Ok((address, stream))
    });
    match tokio::time::timeout(PREPARE_LIMIT, select(making, asked)).await? {
        Either::Right((asked, making)) => {
            let (address, answer) = asked?;
            Ok(Prepared { address, making, answer })
        }
        Either::Left((made, _)) => Err(made.err().unwrap_or_else(|| io::Error::other("made without a peer"))),
    }
}

/// Names memory of a peer for `async-rdma`, which in its raw mode uses only key and address.
pub(crate) fn remote(key: u32, address: usize, len: usize) -> RemoteMr {
    RemoteMr::new(MrToken { addr: address, len, rkey: key, ddl: std::time::UNIX_EPOCH, access: 0 })
}

/// Starts an operation of `async-rdma` now instead of at its first poll, so that operations keep the order of the
/// calls.
pub(crate) fn post_now<T: Send + 'static>(mut operation: BoxFuture<'static, T>) -> BoxFuture<'static, T> {
    match operation.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => Box::pin(std::future::ready(outcome)),
        Poll::Pending => operation,
    }
}

fn builder(config: &AsyncRdmaConfig) -> Result<RdmaBuilder, AsyncRdmaError> {
    let setting = |setting, bounds| Err(AsyncRdmaError::Setting { setting, bounds });
    let mtu = match config.packet_len {
        256 => MTU::MTU256,
        512 => MTU::MTU512,
        1024 => MTU::MTU1024,
        2048 => MTU::MTU2048,
        4096 => MTU::MTU4096,
        _ => return setting("packet_len", "256, 512, 1024, 2048 or 4096"),
    };
    if config.retries > 7 {
        return setting("retries", "at most 7");
    }
    let entries = u64::from(config.queue_pairs_max) * u64::from(SENDS_MAX + 1 + RECEIVES_MAX);
    let Some(entries) = u32::try_from(entries).ok().filter(|&entries| entries > 0) else {
        return setting("queue_pairs_max", "at least 1 and at most 2²⁶");
    };
    let builder = RdmaBuilder::default()
        .set_raw(true)
        .set_mr_strategy(MRManageStrategy::Raw)
        .set_port_num(config.port)
        .set_gid_index(config.gid_index.into())
        .set_mtu(mtu)
        .set_cq_size(entries)
        .set_qp_max_send_wr(SENDS_MAX + 1)
        .set_qp_max_recv_wr(RECEIVES_MAX)
        .set_qp_max_send_sge(1)
        .set_qp_max_recv_sge(1)
        .set_max_rd_atomic(READS_MAX)
        .set_max_dest_rd_atomic(READS_MAX)
        .set_timeout(timeout_code(config.acknowledgement_timeout))
        .set_retry_cnt(config.retries)
        .set_rnr_retry(RECEIVER_NOT_READY_RETRIES);
    Ok(match &config.device {
        Some(name) => builder.set_dev(name),
        None => builder,
    })
}

/// Returns the code of the shortest timeout of 4.096 µs times a power of two that is not below `limit`.
fn timeout_code(limit: Duration) -> u8 {
    let covers = |code: &u8| (4096 << *code) >= limit.as_nanos();
    (1..TIMEOUT_CODE_MAX).find(covers).unwrap_or(TIMEOUT_CODE_MAX)
}

fn address_of(endpoint: &QueuePairEndpoint) -> QueuePairAddress {
    let mut address = [0; ADDRESS_LEN];
    address[..4].copy_from_slice(&endpoint.qp_num().to_le_bytes());
    address[4..6].copy_from_slice(&endpoint.lid().to_le_bytes());
    address[6..].copy_from_slice(endpoint.gid().as_raw());
    address
}

fn layout(len: usize) -> io::Result<Layout> {
    // A layout of no bytes must not be allocated.
    Layout::from_size_align(len.max(1), PAGE_LEN).map_err(|error| io::Error::new(io::ErrorKind::OutOfMemory, error))
}

/// Sends, writes and reads that a queue pair gives to the device at once.
pub(crate) const SENDS_MAX: u32 = 16;
/// Receives that a queue pair gives to the device, and announces to the peer, at once.
pub(crate) const RECEIVES_MAX: u32 = 16;
/// Reads of one queue pair that the device has under way at once.
const READS_MAX: u8 = 16;
/// A write with immediate meets a receive that was posted before its buffer was announced. Seven would mean no limit.
const RECEIVER_NOT_READY_RETRIES: u8 = 6;
/// The code of the longest acknowledgement timeout, some 2.4 hours.
const TIMEOUT_CODE_MAX: u8 = 31;
/// How long a queue pair may take to ask this process for its peer's address.
const PREPARE_LIMIT: Duration = Duration::from_secs(10);
const FOREIGN_LEN: usize = 64;
const PAGE_LEN: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_rounded_up() {
        assert_eq!(timeout_code(Duration::ZERO), 1);
        assert_eq!(timeout_code(Duration::from_nanos(4096 << 14)), 14);
        assert_eq!(timeout_code(Duration::from_nanos((4096 << 14) + 1)), 15);
        assert_eq!(timeout_code(Duration::MAX), 31);
    }
}
