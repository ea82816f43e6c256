//! Long paths: sessions of `rdmc-wan` on a modelled path, and TCP beside them.
//!
//! The experiments are those of Kissel and Swany, "Evaluating High Performance Data Transfer with RDMA-based Protocols
//! in Wide-Area Networks", §V. Times of paths are round trips, as there.

use std::sync::Arc;
use std::time::Duration;

use rdmc::Fabrics;
use rdmc_fabric::Fabric;
use rdmc_wan::{Rate, Session, SessionConfig, SessionError, SessionHandle, SessionListener, SlabVerb};

use super::measure::in_parallel;
use super::{ExperimentError, Table};
use crate::model::ClusterModel;
use crate::path::PathModel;
use crate::plot::{Axis, Content, Line, LineStyle, Panel};
use crate::simulation::NodeIndex;
use crate::world::{Simulation, World};

pub(super) mod channels;
pub(super) mod driver;
pub(super) mod loss;
pub(super) mod policer;
pub(super) mod ring;
pub(super) mod verbs;

/// A session from one node to another over a long path.
#[derive(Clone, Debug, PartialEq)]
pub struct LongPath {
    /// The time of a round trip.
    pub round_trip: Duration,
    /// The rate of the path in Mbit/s.
    pub mbps: u64,
    /// Loss, jitter, a policer; `None` for a perfect path.
    pub path: Option<PathModel>,
    /// Bytes of a slab. Both are multiples of [`SCALE`](Self::SCALE), of at least 4096 times that.
    pub slab_bytes: u64,
    /// Most bytes of the ring of each end.
    pub ring_bytes: u64,
    /// How fast the session asks for bytes.
    pub pace: Pace,
    /// Most reads of a queue pair at once; 0 for no limit.
    pub reads_max: u32,
    /// Queue pairs of the session.
    pub streams: u16,
    /// How slabs come to the receiver.
    pub receive_by: SlabVerb,
    /// Decides everything random.
    pub seed: u64,
}

/// How fast a session asks for bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// As fast as the ports are.
    Port,
    /// So many bytes per second, and so many of them at once.
    Given {
        /// Bytes per second.
        bytes_per_second: u64,
        /// Most bytes at once.
        burst: u64,
    },
    /// As fast as the session finds that the path is.
    Found,
}

impl LongPath {
    /// Bytes of the path for each byte of a slab.
    pub const SCALE: u64 = 64;

    /// Describes a perfect path of 10 Gbit/s, with slabs of 1 MiB and a ring that is long enough for it.
    pub fn new(round_trip: Duration) -> Self {
        Self {
            round_trip,
            mbps: 10_000,
            path: None,
            slab_bytes: 1 << 20,
            ring_bytes: 1 << 29,
            pace: Pace::Port,
            reads_max: 0,
            streams: 1,
            receive_by: SlabVerb::Read,
            seed: 1,
        }
    }

    /// Moves `bytes`; returns their rate in Mbit/s, from the first slab until all are in the other end's memory. The
    /// data channel is connected before.
    ///
    /// # Errors
    /// The simulation or the session fails.
    pub fn transfer(&self, bytes: u64) -> Result<f64, ExperimentError> {
        let (slab_len, mut rest, round_trip) = (self.slab_bytes / Self::SCALE, bytes / Self::SCALE, self.round_trip);
        let elapsed = self.play(move |world, sessions| async move {
            let Sessions { mut sender, receiver, .. } = sessions;
            // Until the data channel is connected.
            world.sleep(round_trip * 2).await;
            let began = world.now();
            world.spawn_on(TAKES, Box::pin(take_all(receiver)));
            while rest > 0 {
                let now = rest.min(slab_len);
                let slab = sender.sender.slab().await?;
                sender.sender.send(slab, usize::try_from(now).expect("a slab is in memory"), Vec::new()).await?;
                rest -= now;
            }
            // The acknowledgement of the last slab comes half a round trip after it.
            sender.sender.finish().await?;
            Ok(world.now().since(began))
        })?;
        let elapsed = elapsed.saturating_sub(self.round_trip / 2);
        Ok(mbps(bytes, elapsed))
    }

    /// Moves bytes without end; returns the rate in Mbit/s at which they arrive, of `duration` from the first slab.
    ///
    /// # Errors
    /// The simulation or the session fails.
    pub fn rate(&self, duration: Duration) -> Result<f64, ExperimentError> {
        self.rate_after(Duration::ZERO, duration)
    }

    /// Returns the rate of `duration`, which begins when `settling` has passed since the first slab.
    ///
    /// # Errors
    /// The simulation or the session fails.
    pub fn rate_after(&self, settling: Duration, duration: Duration) -> Result<f64, ExperimentError> {
        let bytes = self.play(move |world, sessions| async move {
            let Sessions { sender, receiver, arrived } = sessions;
            world.spawn_on(TAKES, Box::pin(take_all(receiver)));
            world.spawn_on(SENDS, Box::pin(send_for_ever(sender)));
            world.sleep(settling).await;
            let before = arrived.stats().received_bytes;
            world.sleep(duration).await;
            Ok(arrived.stats().received_bytes - before)
        })?;
        Ok(mbps(bytes * Self::SCALE, duration))
    }

    /// Returns the rate of the first minute.
    ///
    /// Paths without random losses are at rest long before: only the first [`STARTS`] are played.
    fn first_minute(&self) -> Result<f64, ExperimentError> {
        let (start, later) = self.play(move |world, sessions| async move {
            let Sessions { sender, receiver, arrived } = sessions;
            world.spawn_on(TAKES, Box::pin(take_all(receiver)));
            world.spawn_on(SENDS, Box::pin(send_for_ever(sender)));
            world.sleep(STARTS - RESTS).await;
            let before = arrived.stats().received_bytes;
            world.sleep(RESTS).await;
            Ok((before, arrived.stats().received_bytes - before))
        })?;
        let later = mbps(later * Self::SCALE, RESTS);
        let start = mbps(start * Self::SCALE, STARTS - RESTS);
        let share = (STARTS - RESTS).as_secs_f64() / MINUTE.as_secs_f64();
        Ok(start * share + later * (1.0 - share))
    }

    /// Opens a session and runs what uses it.
    fn play<T: Send + 'static, U>(
        &self,
        using: impl FnOnce(World, Sessions) -> U + Send + 'static,
    ) -> Result<T, ExperimentError>
    where
        U: Future<Output = Result<T, SessionError>> + Send,
    {
        let simulation = Simulation::new(self.model(), self.seed)?;
        let (world, config) = (simulation.world().clone(), self.config());
        simulation.run(super::measure::VIRTUAL_LIMIT, async move {
            let sessions = open(&world, config).await?;
            Ok(using(world, sessions).await?)
        })?
    }

    fn model(&self) -> ClusterModel {
        let latency_ns = u64::try_from(self.round_trip.as_nanos() / 2).unwrap_or(u64::MAX);
        let mut model = ClusterModel::new(2, self.mbps, latency_ns);
        model.control.latency_ns = latency_ns;
        (model.payload_scale, model.scales_writes) = (Self::SCALE, true);
        model.path = self.path;
        model.nic.reads_max = self.reads_max;
        (model.host.post_ns, model.host.completion_ns, model.nic.operation_ns) = (200, 300, 150);
        model
    }

    fn config(&self) -> SessionConfig {
        let mut config = SessionConfig::default();
        config.slab_len = usize::try_from(self.slab_bytes / Self::SCALE).expect("a slab is in memory");
        config.ring_len_max = self.ring_bytes / Self::SCALE;
        config.streams = Some(self.streams);
        config.receive_by = Some(self.receive_by);
        config.rate = match self.pace {
            Pace::Port => Some(Rate::bytes_per_second(u64::MAX).burst(u64::MAX)),
            Pace::Given { bytes_per_second, burst } => {
                Some(Rate::bytes_per_second(bytes_per_second / Self::SCALE).burst(burst / Self::SCALE))
            }
            Pace::Found => None,
        };
        config
    }
}

/// Both ends of a session.
struct Sessions {
    sender: Session,
    receiver: Session,
    /// The receiver's counters.
    arrived: SessionHandle,
}

async fn open(world: &World, config: SessionConfig) -> Result<Sessions, ExperimentError> {
    let fabrics = |node| {
        let fabric: Arc<dyn Fabric> = world.fabric(node);
        Fabrics::new(vec![fabric]).expect("one fabric")
    };
    let listener = SessionListener::bind(fabrics(TAKES), "taker:1", config.clone()).await;
    let listener =
        listener.map_err(|error| ExperimentError::Input { path: "taker:1".into(), what: error.to_string() })?;
    let (sender, receiver) =
        futures::future::join(rdmc_wan::connect(fabrics(SENDS), listener.local_address(), config, Vec::new()), async {
            listener.accept().await.accept(Vec::new()).await
        })
        .await;
    let (sender, receiver) = (sender?, receiver?);
    let arrived = receiver.handle.clone();
    Ok(Sessions { sender, receiver, arrived })
}

async fn take_all(mut session: Session) {
    // The other direction has no slabs. If the session fails, the measurement of the sender says so.
    let _ = session.sender.finish().await;
    while let Ok(Some(slab)) = session.receiver.next().await {
        drop(slab);
    }
    let _ = session.handle.ended().await;
}

async fn send_for_ever(mut session: Session) {
    while let Ok(slab) = session.sender.slab().await {
        let len = slab.len();
        if session.sender.send(slab, len, Vec::new()).await.is_err() {
            return;
        }
    }
}

/// Rates in Mbit/s against the round trip.
#[derive(Clone, Debug)]
struct Curve {
    name: String,
    /// Round trips in ms, and rates.
    points: Vec<(u64, f64)>,
}

impl Curve {
    /// Computes a rate for each of some round trips.
    fn new(
        name: impl Into<String>,
        round_trips_ms: &[u64],
        rate: impl Fn(u64) -> Result<f64, ExperimentError> + Sync,
    ) -> Result<Self, ExperimentError> {
        let rates = in_parallel(round_trips_ms, |&round_trip_ms| rate(round_trip_ms))?;
        Ok(Self { name: name.into(), points: round_trips_ms.iter().copied().zip(rates).collect() })
    }

    /// Returns the rate at one of the round trips.
    fn at(&self, round_trip_ms: u64) -> f64 {
        self.points.iter().find(|point| point.0 == round_trip_ms).map_or(f64::NAN, |point| point.1)
    }

    /// Returns the least rate as a share of the greatest.
    fn flatness(&self) -> f64 {
        let rates = || self.points.iter().map(|point| point.1);
        rates().fold(f64::INFINITY, f64::min) / rates().fold(0.0, f64::max)
    }
}

/// Lists the rates of curves over the same round trips in Gbit/s.
fn table_of(name: &'static str, curves: &[Curve]) -> Table {
    let columns: Vec<String> = curves.iter().map(|curve| format!("{} (Gbit/s)", curve.name.replace(',', ""))).collect();
    let columns: Vec<&str> = std::iter::once("round_trip_ms").chain(columns.iter().map(String::as_str)).collect();
    let mut table = Table::new(name, &columns);
    for &(round_trip_ms, _) in &curves[0].points {
        let rates = curves.iter().map(|curve| format!("{:.3}", curve.at(round_trip_ms) / 1e3));
        table.push(std::iter::once(round_trip_ms.to_string()).chain(rates).collect());
    }
    table
}

fn panel_of(title: &str, axis: &str, curves: &[Curve]) -> Panel {
    #[expect(clippy::cast_precision_loss, reason = "a time to be displayed")]
    let line = |curve: &Curve| {
        let points = curve.points.iter().map(|&(round_trip_ms, mbps)| (round_trip_ms as f64, mbps / 1e3));
        Line::new(curve.name.clone(), points.collect(), LineStyle::Markers)
    };
    Panel {
        title: Some(title.into()),
        ..Panel::new(
            Axis::linear(axis),
            Axis::linear("rate (Gbit/s)").with_range(0.0, 10.0),
            Content::Lines(curves.iter().map(line).collect()),
        )
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate to be displayed")]
fn mbps(bytes: u64, elapsed: Duration) -> f64 {
    bytes as f64 * 8e-6 / elapsed.as_secs_f64()
}

/// Payload of RoCE in Mbit/s of a port of 10 Gbit/s: 2048 bytes of each frame of 2142, with preamble and gap.
const RDMA_MBPS: u64 = 9_561;
/// Payload of TCP in Mbit/s of the same port: 8948 bytes of each frame of 9038.
const TCP_MBPS: u64 = 9_900;
/// How long a measurement of the paper takes.
const MINUTE: Duration = Duration::from_secs(60);
/// The part of it that is played, and the end of that part, which stands for the rest.
const STARTS: Duration = Duration::from_secs(12);
const RESTS: Duration = Duration::from_secs(4);
/// The node that sends, which opens the session.
const SENDS: NodeIndex = NodeIndex(0);
/// The node that takes.
const TAKES: NodeIndex = NodeIndex(1);
