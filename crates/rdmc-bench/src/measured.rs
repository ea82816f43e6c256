//! The measurements of one configuration, and its result.

use serde::Serialize;

use crate::contestant::Transport;
use crate::limits::Limits;
use crate::options::Delivery;
use crate::plan::Case;
use crate::statistics::{Distribution, median};

/// The times of one round: a message of each group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Round {
    /// To the last receiver's last message.
    pub(crate) seconds: f64,
    /// From the first receiver's last message to the last one's.
    pub(crate) skew_seconds: f64,
    /// Processor time of all members.
    pub(crate) cpu_seconds: f64,
}

/// The time of many messages in flight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Burst {
    /// Number of messages of all groups.
    pub(crate) messages: u64,
    pub(crate) seconds: f64,
}

/// The measured program, and its transport.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Attribution {
    /// `rdmc`, `ompi` or `mpich`.
    pub(crate) name: String,
    /// Name of the fabric or transport.
    pub(crate) transport: String,
    /// Configuration of an MPI.
    pub(crate) setup: Option<String>,
}

/// All rounds of one configuration by one program.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    pub(crate) rounds: Vec<Round>,
    pub(crate) bursts: Vec<Burst>,
}

impl Samples {
    /// Adds later measurements.
    pub(crate) fn extend(&mut self, later: Self) {
        self.rounds.extend(later.rounds);
        self.bursts.extend(later.bursts);
    }
}

/// A result as it is printed.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename = "result")]
pub(crate) struct CaseResult {
    pub(crate) by: String,
    pub(crate) transport: String,
    pub(crate) setup: Option<String>,
    pub(crate) fabric: &'static str,
    pub(crate) completion: &'static str,
    pub(crate) nodes: u32,
    pub(crate) groups: u32,
    pub(crate) senders: u32,
    pub(crate) algorithm: String,
    pub(crate) block_size: u32,
    pub(crate) bytes: u64,
    pub(crate) rounds: usize,
    pub(crate) seconds: Distribution,
    pub(crate) skew_seconds: f64,
    /// Bytes per second; `None` if nothing is copied.
    pub(crate) receiver_rate: Option<f64>,
    /// Bytes per second of all receivers of all groups together.
    pub(crate) aggregate_rate: Option<f64>,
    pub(crate) cpu_seconds_per_gib: f64,
    /// Messages per second; `None` for long messages.
    pub(crate) message_rate: Option<f64>,
    /// Bytes per second of copies in memory. They are measured in turn with the rounds of long messages, and before the
    /// rounds of short ones.
    pub(crate) copy_floor_rate: f64,
    /// The aggregate rate over the copy floor.
    pub(crate) to_copy_floor: Option<f64>,
    /// The aggregate rate over that of plain TCP streams.
    pub(crate) to_streams: Option<f64>,
    /// The rate of a receiver over that of one copying thread.
    pub(crate) to_memcpy: Option<f64>,
    /// An MPI's time over that of rdmc.
    pub(crate) seconds_to_rdmc: Option<f64>,
    pub(crate) delivery: &'static str,
    pub(crate) checks: &'static str,
    /// Slots and bytes of the ring.
    pub(crate) ring: Option<String>,
}

impl CaseResult {
    /// Makes a result of samples; `None` if there are none.
    #[expect(clippy::cast_precision_loss, reason = "rates to be displayed")]
    pub(crate) fn of(
        case: &Case,
        by: Attribution,
        samples: &Samples,
        limits: &Limits,
        rdmc: Option<&Self>,
    ) -> Option<Self> {
        let seconds = Distribution::of(samples.rounds.iter().map(|round| round.seconds))?;
        let cpu_seconds: f64 = samples.rounds.iter().map(|round| round.cpu_seconds).sum();
        let delivered = case.delivered() as f64;
        // A shared object does not move.
        let copied = case.delivery == Delivery::Private;
        let aggregate_rate = copied.then(|| rate(delivered, seconds.median));
        let receiver_rate = copied.then(|| rate(case.bytes as f64, seconds.median));
        let to = |rated: Option<f64>, limit: f64| rated.map(|rated| rate(rated, limit));
        let message_rates = samples.bursts.iter().map(|burst| rate(burst.messages as f64, burst.seconds));
        Some(Self {
            by: by.name,
            transport: by.transport,
            setup: by.setup,
            fabric: case.fabric.name(),
            completion: case.completion.name(),
            nodes: case.nodes,
            groups: case.groups,
            senders: case.senders,
            algorithm: case.algorithm.to_string(),
            block_size: case.block_size,
            bytes: case.bytes,
            rounds: samples.rounds.len(),
            skew_seconds: median(samples.rounds.iter().map(|round| round.skew_seconds)),
            receiver_rate,
            aggregate_rate,
            cpu_seconds_per_gib: cpu_seconds / (delivered * samples.rounds.len() as f64 / GIB),
            message_rate: (!samples.bursts.is_empty()).then(|| median(message_rates)),
            copy_floor_rate: limits.copy_floor_rate(),
            to_copy_floor: to(aggregate_rate, limits.copy_floor_rate()),
            to_streams: to(aggregate_rate, limits.streams_rate),
            to_memcpy: to(receiver_rate, limits.memcpy_rate),
            seconds_to_rdmc: rdmc.map(|rdmc| rate(seconds.median, rdmc.seconds.median)),
            seconds,
            delivery: case.delivery.name(),
            checks: case.checks.name(),
            ring: case.ring.map(|ring| ring.to_string()),
        })
    }
}

/// Returns a quotient; 0 if the divisor is 0.
fn rate(amount: f64, per: f64) -> f64 {
    if per > 0.0 { amount / per } else { 0.0 }
}

impl Attribution {
    /// The program itself.
    pub(crate) fn rdmc(fabric: &str) -> Self {
        Self { name: "rdmc".to_owned(), transport: fabric.to_owned(), setup: None }
    }

    /// An MPI.
    pub(crate) fn mpi(name: &str, transport: Transport, setup: String) -> Self {
        Self { name: name.to_owned(), transport: transport.name().to_owned(), setup: Some(setup) }
    }
}

const GIB: f64 = (1u64 << 30) as f64;

#[cfg(test)]
pub(crate) mod tests {
    use rdmc::Algorithm;
    use rdmc_files::FabricSelection;

    use super::*;
    use crate::options::{Checks, Completion};
    use crate::plan::LeftToModel;

    pub(crate) fn case(nodes: u32, bytes: u64) -> Case {
        Case {
            fabric: FabricSelection::Tcp,
            completion: Completion::Event,
            delivery: Delivery::Private,
            checks: Checks::Auto,
            ring: None,
            nodes,
            groups: 1,
            senders: 1,
            algorithm: Algorithm::Chain,
            block_size: 1 << 20,
            bytes,
            left_to_model: LeftToModel::default(),
        }
    }

    pub(crate) fn limits() -> Limits {
        Limits {
            nodes: 3,
            bytes: 1 << 30,
            memcpy_rate: 4.0 * GIB,
            copy_threads: 2,
            copy_floor_plain_rate: 6.0 * GIB,
            copy_floor_non_temporal_rate: Some(8.0 * GIB),
            copy_floor_in_turn_rate: None,
            stream_rate: 2.0 * GIB,
            stream_seconds: 0.5,
            streams_rate: 4.0 * GIB,
            streams_seconds: 0.5,
        }
    }

    pub(crate) fn measured() -> CaseResult {
        let round = |seconds| Round { seconds, skew_seconds: 0.25, cpu_seconds: 1.0 };
        let samples = Samples {
            rounds: vec![round(0.5), round(1.0), round(1.5)],
            bursts: vec![Burst { messages: 1000, seconds: 0.5 }],
        };
        CaseResult::of(&case(3, 1 << 30), Attribution::rdmc("tcp"), &samples, &limits(), None).unwrap()
    }

    #[test]
    fn rates_are_those_of_the_median_round() {
        let measured = measured();
        let near = |got: f64, want: f64| assert!((got / want - 1.0).abs() < 1e-9, "{got} is not {want}");
        near(measured.seconds.median, 1.0);
        near(measured.receiver_rate.unwrap(), GIB);
        near(measured.aggregate_rate.unwrap(), 2.0 * GIB);
        near(measured.cpu_seconds_per_gib, 0.5);
        near(measured.message_rate.unwrap(), 2000.0);
        near(measured.to_copy_floor.unwrap(), 0.25);
        near(measured.to_streams.unwrap(), 0.5);
        near(measured.to_memcpy.unwrap(), 0.25);
        near(measured.skew_seconds, 0.25);
    }

    #[test]
    fn another_program_is_compared_with_rdmc() {
        let samples =
            Samples { rounds: vec![Round { seconds: 2.0, skew_seconds: 0.0, cpu_seconds: 0.0 }], bursts: Vec::new() };
        let by = Attribution::mpi("ompi", Transport::Tcp, "as it comes".to_owned());
        let theirs = CaseResult::of(&case(3, 1 << 30), by, &samples, &limits(), Some(&measured())).unwrap();
        assert_eq!((theirs.seconds_to_rdmc, theirs.message_rate), (Some(2.0), None));
    }

    #[test]
    fn what_is_shared_has_a_time_and_no_rate() {
        let samples =
            Samples { rounds: vec![Round { seconds: 2.0, skew_seconds: 0.0, cpu_seconds: 0.0 }], bursts: Vec::new() };
        let case = Case { delivery: Delivery::Shared, ..case(3, 1 << 30) };
        let measured = CaseResult::of(&case, Attribution::rdmc("shm"), &samples, &limits(), None).unwrap();
        assert_eq!((measured.delivery, measured.aggregate_rate, measured.to_copy_floor), ("shared", None, None));
        assert!((measured.seconds.median - 2.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_measured_is_no_result() {
        assert!(CaseResult::of(&case(2, 1), Attribution::rdmc("tcp"), &Samples::default(), &limits(), None).is_none());
    }
}
