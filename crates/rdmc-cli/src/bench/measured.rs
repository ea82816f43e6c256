//! What was measured of one configuration, and what is told of it.

use serde::Serialize;

use super::limits::Limits;
use super::mpi::Transport;
use super::options::Delivery;
use super::plan::{Case, fabric_name};
use super::statistics::{Distribution, median};

/// What one round took: a message of each group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Round {
    /// To the last receiver's last message.
    pub(super) seconds: f64,
    /// From the first receiver that had it to the last.
    pub(super) skew_seconds: f64,
    /// Of all members.
    pub(super) cpu_seconds: f64,
}

/// What many messages in flight took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Burst {
    /// Of all groups.
    pub(super) messages: u64,
    pub(super) seconds: f64,
}

/// Whose figures these are.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct By {
    /// `rdmc`, `ompi` or `mpich`.
    pub(super) name: String,
    /// What moves the bytes.
    pub(super) transport: String,
    /// How an MPI was configured.
    pub(super) setup: Option<String>,
}

/// All rounds of one configuration by one program.
#[derive(Clone, Debug, Default)]
pub(super) struct Samples {
    pub(super) rounds: Vec<Round>,
    pub(super) bursts: Vec<Burst>,
}

impl Samples {
    /// Adds what was measured later.
    pub(super) fn extend(&mut self, later: Self) {
        self.rounds.extend(later.rounds);
        self.bursts.extend(later.bursts);
    }
}

/// A result, as it is printed.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "event", rename = "result")]
pub(super) struct Measured {
    pub(super) by: String,
    pub(super) transport: String,
    pub(super) setup: Option<String>,
    pub(super) fabric: String,
    pub(super) completion: &'static str,
    pub(super) nodes: u32,
    pub(super) groups: u32,
    pub(super) senders: u32,
    pub(super) algorithm: String,
    pub(super) block_size: u32,
    pub(super) bytes: u64,
    pub(super) rounds: usize,
    pub(super) seconds: Distribution,
    pub(super) skew_seconds: f64,
    /// Bytes per second, where they are copied.
    pub(super) receiver_rate: Option<f64>,
    /// Of all receivers of all groups together.
    pub(super) aggregate_rate: Option<f64>,
    pub(super) cpu_seconds_per_gib: f64,
    /// Messages per second, of short ones.
    pub(super) message_rate: Option<f64>,
    /// Bytes per second of copies in memory: in turn with the rounds if they are long, before them if not.
    pub(super) copy_floor_rate: f64,
    /// The aggregate rate over that.
    pub(super) to_copy_floor: Option<f64>,
    /// The aggregate rate over that of plain TCP streams.
    pub(super) to_streams: Option<f64>,
    /// The rate of a receiver over that of one thread that copies.
    pub(super) to_memcpy: Option<f64>,
    /// An MPI's time over that of rdmc.
    pub(super) seconds_to_rdmc: Option<f64>,
    pub(super) delivery: &'static str,
    pub(super) checks: &'static str,
}

impl Measured {
    /// Makes a result of samples; none if there are none.
    #[expect(clippy::cast_precision_loss, reason = "rates to be displayed")]
    pub(super) fn of(case: &Case, by: By, samples: &Samples, limits: &Limits, rdmc: Option<&Self>) -> Option<Self> {
        let seconds = Distribution::of(samples.rounds.iter().map(|round| round.seconds))?;
        let cpu_seconds: f64 = samples.rounds.iter().map(|round| round.cpu_seconds).sum();
        let delivered = case.delivered() as f64;
        // Of what all have in common nothing moves.
        let copied = case.delivery == Delivery::Private;
        let aggregate_rate = copied.then(|| rate(delivered, seconds.median));
        let receiver_rate = copied.then(|| rate(case.bytes as f64, seconds.median));
        let to = |rated: Option<f64>, limit: f64| rated.map(|rated| rate(rated, limit));
        let message_rates = samples.bursts.iter().map(|burst| rate(burst.messages as f64, burst.seconds));
        Some(Self {
            by: by.name,
            transport: by.transport,
            setup: by.setup,
            fabric: fabric_name(case.fabric),
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
        })
    }
}

/// Returns a quotient, 0 where there is none.
fn rate(amount: f64, per: f64) -> f64 {
    if per > 0.0 { amount / per } else { 0.0 }
}

impl By {
    /// The program itself.
    pub(super) fn rdmc(fabric: &str) -> Self {
        Self { name: "rdmc".to_owned(), transport: fabric.to_owned(), setup: None }
    }

    /// An MPI.
    pub(super) fn mpi(name: &str, transport: Transport, setup: String) -> Self {
        Self { name: name.to_owned(), transport: transport.name().to_owned(), setup: Some(setup) }
    }
}

const GIB: f64 = (1u64 << 30) as f64;

#[cfg(test)]
pub(super) mod tests {
    use rdmc::Algorithm;

    use super::super::options::{Checks, Completion};
    use super::super::plan::Chosen;
    use super::*;
    use crate::fabric::FabricName;

    pub(crate) fn case(nodes: u32, bytes: u64) -> Case {
        Case {
            fabric: FabricName::Tcp,
            completion: Completion::Event,
            delivery: Delivery::Private,
            checks: Checks::Auto,
            nodes,
            groups: 1,
            senders: 1,
            algorithm: Algorithm::Chain,
            block_size: 1 << 20,
            bytes,
            chosen: Chosen::default(),
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

    pub(crate) fn measured() -> Measured {
        let round = |seconds| Round { seconds, skew_seconds: 0.25, cpu_seconds: 1.0 };
        let samples = Samples {
            rounds: vec![round(0.5), round(1.0), round(1.5)],
            bursts: vec![Burst { messages: 1000, seconds: 0.5 }],
        };
        Measured::of(&case(3, 1 << 30), By::rdmc("tcp"), &samples, &limits(), None).unwrap()
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
        let by = By::mpi("ompi", Transport::Tcp, "as it comes".to_owned());
        let theirs = Measured::of(&case(3, 1 << 30), by, &samples, &limits(), Some(&measured())).unwrap();
        assert_eq!((theirs.seconds_to_rdmc, theirs.message_rate), (Some(2.0), None));
    }

    #[test]
    fn what_is_shared_has_a_time_and_no_rate() {
        let samples =
            Samples { rounds: vec![Round { seconds: 2.0, skew_seconds: 0.0, cpu_seconds: 0.0 }], bursts: Vec::new() };
        let case = Case { delivery: Delivery::Shared, ..case(3, 1 << 30) };
        let measured = Measured::of(&case, By::rdmc("shm"), &samples, &limits(), None).unwrap();
        assert_eq!((measured.delivery, measured.aggregate_rate, measured.to_copy_floor), ("shared", None, None));
        assert!((measured.seconds.median - 2.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_measured_is_no_result() {
        assert!(Measured::of(&case(2, 1), By::rdmc("tcp"), &Samples::default(), &limits(), None).is_none());
    }
}
