//! Sessions of `rdmc-wan` pass their bodies in virtual time, and keep to the memory of their rings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::future::{BoxFuture, join};
use rdmc::Fabrics;
use rdmc_fabric::{Fabric, FabricDecorator, FabricError, MemoryRegion};
use rdmc_sim::{ClusterModel, NodeIndex, PathModel, Simulation, World};
use rdmc_wan::conformance::{Ends, Rig};
use rdmc_wan::{Session, SessionConfig, SessionListener, SlabVerb};

/// Two nodes of a modelled network.
struct Sim {
    simulation: Simulation,
    /// How many pairs of ends there were, each with an address of its own.
    pairs: AtomicU64,
}

impl Sim {
    fn new(round_trip_ms: u64, path: Option<PathModel>) -> Self {
        let mut model = ClusterModel::new(2, 10_000, round_trip_ms * 500_000);
        model.control.latency_ns = round_trip_ms * 500_000;
        model.path = path;
        let simulation = Simulation::new(model, 1).expect("the model is valid");
        Self { simulation, pairs: AtomicU64::new(0) }
    }

    fn lossy() -> Self {
        Self::new(10, Some(PathModel { loss: 1e-3, jitter_ns: 100_000, ..PathModel::default() }))
    }
}

impl Rig for Sim {
    fn ends(&self) -> Ends {
        let [accepting, opening] =
            [0, 1].map(|node| -> Arc<dyn Fabric> { self.simulation.world().fabric(NodeIndex(node)) });
        let pair = self.pairs.fetch_add(1, Ordering::Relaxed);
        Ends { accepting, opening, address: format!("listener{pair}:1") }
    }

    fn run(&self, body: BoxFuture<'static, ()>) {
        self.simulation.run(LIMIT, body).expect("the body must not hang");
    }
}

rdmc_wan::session_suite!(near, Sim::new(0, None));
rdmc_wan::session_suite!(far, Sim::new(60, None));
rdmc_wan::session_suite!(far_and_lossy, Sim::lossy());

/// A fabric that counts what is allocated.
#[derive(Debug)]
struct Counting {
    inner: Arc<dyn Fabric>,
    allocated: AtomicU64,
}

impl FabricDecorator for Counting {
    fn inner(&self) -> &dyn Fabric {
        &*self.inner
    }

    fn allocate(&self, len: usize) -> Result<MemoryRegion, FabricError> {
        self.allocated.fetch_add(len as u64, Ordering::Relaxed);
        self.inner.allocate(len)
    }
}

/// Slabs are used again, so all that an end allocates in its life fits into its rings.
#[test]
fn a_session_on_a_long_path_allocates_no_more_than_its_rings() {
    for (verb, rings) in [(SlabVerb::Read, 2), (SlabVerb::Write, 3)] {
        let simulation = Sim::new(60, None).simulation;
        let ends = [0, 1].map(|node| {
            let inner: Arc<dyn Fabric> = simulation.world().fabric(NodeIndex(node));
            Arc::new(Counting { inner, allocated: AtomicU64::new(0) })
        });
        let (world, fabrics) = (simulation.world().clone(), ends.clone());
        let moved = simulation.run(LIMIT, async move {
            let (opened, accepted) = sessions(fabrics, verb).await;
            join(move_slabs(&world, opened), move_slabs(&world, accepted)).await
        });
        let (there, back) = moved.expect("it ends");
        assert_eq!((there, back), (SLABS * SLAB_BYTES, SLABS * SLAB_BYTES));
        for end in ends {
            let allocated = end.allocated.load(Ordering::Relaxed);
            println!("{verb:?}: {allocated} bytes are allocated, {there} were moved");
            // The path carries more than a ring in a round trip, so all rings grow to their bound.
            assert_eq!(allocated, rings * RING_BYTES, "{verb:?}");
        }
    }
}

/// Opens a session between the two ends.
async fn sessions(ends: [Arc<Counting>; 2], verb: SlabVerb) -> (Session, Session) {
    let mut config = SessionConfig::default();
    config.slab_len = usize::try_from(SLAB_BYTES).expect("a slab is in memory");
    config.ring_len_max = RING_BYTES;
    config.receive_by = Some(verb);
    let [accepting, opening] = ends.map(|fabric| Fabrics::new(vec![fabric as Arc<dyn Fabric>]).expect("one fabric"));
    let listener = SessionListener::bind(accepting, "listener:1", config.clone()).await.expect("it listens");
    let opening = rdmc_wan::connect(opening, listener.local_address(), config, Vec::new());
    let accepting = async { listener.accept().await.accept(Vec::new()).await };
    let (opened, accepted) = join(opening, accepting).await;
    (opened.expect("it is accepted"), accepted.expect("it is accepted"))
}

/// Sends and takes many whole slabs; returns the bytes that were taken.
async fn move_slabs(world: &World, session: Session) -> u64 {
    let Session { mut sender, mut receiver, handle, .. } = session;
    let sending = async {
        for _ in 0..SLABS {
            let slab = sender.slab().await.expect("the session lasts");
            let len = slab.len();
            sender.send(slab, len, Vec::new()).await.expect("the session lasts");
        }
        sender.finish().await.expect("the session lasts");
    };
    let taking = async {
        let mut bytes = 0;
        while let Some(slab) = receiver.next().await.expect("the session lasts") {
            let stats = handle.stats();
            assert!(stats.outgoing_ring.max(stats.incoming_ring) <= RING_BYTES, "{stats:?}");
            bytes += slab.bytes.len() as u64;
            // Now and then the application is slow, so that slabs wait for it.
            if bytes % (100 * SLAB_BYTES) == 0 {
                world.sleep(Duration::from_millis(200)).await;
            }
        }
        bytes
    };
    let ((), bytes) = join(sending, taking).await;
    handle.ended().await.expect("it ends in good order");
    bytes
}

const SLAB_BYTES: u64 = 16 << 10;
const RING_BYTES: u64 = 32 * SLAB_BYTES;
/// 64 times what a ring has.
const SLABS: u64 = 64 * 32;
const LIMIT: Duration = Duration::from_secs(600);
