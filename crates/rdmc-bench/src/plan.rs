//! The configurations: every combination of the lists.

use anyhow::Context;
use rdmc::{Algorithm, CostModel};
use rdmc_files::FabricSelection;
use rdmc_files::costs::{self, Assumed};
use rdmc_files::size::ByteSize;
use rdmc_files::words::count;

use crate::error::Kind;
use crate::limits::{Floor, Limits};
use crate::options::{BenchOptions, Checks, Completion, Delivery, Ring, RingChoice};

/// Rounds of short messages that follow each other without orders between, and the longest of these messages.
const ROUNDS_AT_ONCE: u32 = 25;
const AT_ONCE_BYTES_MAX: u64 = 4 << 20;
/// Name of a value that the cost model chooses.
const AUTO: &str = "auto";
/// Name of groups without a ring.
pub(crate) const NO_RING: &str = "none";

/// One configuration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) fabric: FabricSelection,
    pub(crate) completion: Completion,
    pub(crate) delivery: Delivery,
    pub(crate) checks: Checks,
    pub(crate) ring: Option<Ring>,
    /// Number of members of each group.
    pub(crate) nodes: u32,
    pub(crate) groups: u32,
    /// Number of members that are roots.
    pub(crate) senders: u32,
    pub(crate) algorithm: Algorithm,
    pub(crate) block_size: u32,
    /// Size of a message in bytes.
    pub(crate) bytes: u64,
    /// The values that the cost model has chosen.
    pub(crate) left_to_model: LeftToModel,
}

/// Which values of a configuration the cost model has chosen. The others were given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct LeftToModel {
    pub(crate) algorithm: bool,
    pub(crate) block_size: bool,
}

impl Case {
    /// Lists all configurations. Those with the same number of members are together, ordered by size.
    pub(crate) fn all(options: &BenchOptions) -> anyhow::Result<Vec<Self>> {
        let mut cases = Vec::new();
        if options.nodes.iter().any(|&nodes| nodes < 2) || options.sizes.contains(&0) {
            return Err(Kind::Request.error("a measured group needs 2 members, and a message 1 byte"));
        }
        if options.explain && options.groups.iter().any(|&groups| groups > 1) {
            return Err(Kind::Request.error("--explain predicts one group at a time: leave --groups at 1"));
        }
        if options.explain && options.deliveries.contains(&Delivery::Shared) {
            return Err(Kind::Request.error("--explain predicts private copies: leave --delivery at private"));
        }
        if options.device.is_some() && !options.fabrics.contains(&FabricSelection::Verbs) {
            return Err(Kind::Request.error("--device needs --fabric verbs"));
        }
        for &fabric in &distinct(&options.fabrics) {
            let assumed = fabric.assumed_here();
            for &completion in &distinct(&options.completions) {
                for &delivery in &distinct(&options.deliveries) {
                    check_delivery(delivery, fabric)?;
                    for &checks in &distinct(&options.checks) {
                        let case = Self { delivery, checks, ..Self::blank(fabric, completion) };
                        for choice in distinct(&options.rings) {
                            cases.extend(case.with_members(options, assumed, choice)?);
                        }
                    }
                }
            }
        }
        Ok(cases)
    }

    /// Makes a configuration whose other values are set later.
    fn blank(fabric: FabricSelection, completion: Completion) -> Self {
        let (delivery, checks) = (Delivery::Private, Checks::Auto);
        let (nodes, groups, senders, algorithm) = (0, 0, 0, Algorithm::Sequential);
        let (block_size, bytes, left_to_model) = (0, 0, LeftToModel::default());
        Self {
            fabric,
            completion,
            delivery,
            checks,
            ring: None,
            nodes,
            groups,
            senders,
            algorithm,
            block_size,
            bytes,
            left_to_model,
        }
    }

    /// Lists the configurations with their groups.
    fn with_members(&self, options: &BenchOptions, assumed: Assumed, choice: RingChoice) -> anyhow::Result<Vec<Self>> {
        let mut cases = Vec::new();
        for &groups in &distinct(&options.groups) {
            for &nodes in &distinct(&options.nodes) {
                let ring = match choice {
                    RingChoice::None => None,
                    RingChoice::Given(ring) => Some(ring),
                    RingChoice::ByModel => {
                        let bytes = costs::ring_bytes(assumed, nodes).context(Kind::Request)?;
                        bytes.map(|bytes| Ring { slots: CostModel::RING_SLOTS, bytes })
                    }
                };
                for senders in senders(options, groups, nodes)? {
                    let case = Self { ring, nodes, groups, senders, ..self.clone() };
                    cases.extend(case.with_content(options, assumed)?);
                }
            }
        }
        Ok(cases)
    }

    /// Lists the configurations with their messages, algorithms and block sizes.
    fn with_content(&self, options: &BenchOptions, assumed: Assumed) -> anyhow::Result<Vec<Self>> {
        let mut cases: Vec<Self> = Vec::new();
        for (algorithm, block_size) in ways(options) {
            let left_to_model = LeftToModel { algorithm: algorithm.is_none(), block_size: block_size.is_none() };
            for bytes in distinct(&options.sizes) {
                let plan = costs::plan(assumed, algorithm.as_ref(), block_size, self.nodes, bytes);
                let plan = plan.context(Kind::Request)?;
                let (algorithm, block_size) = (plan.algorithm, plan.block_size);
                let case = Self { algorithm, block_size, bytes, left_to_model, ..self.clone() };
                // The choice of the cost model may be among the listed ways. It is measured once.
                if !(options.explain && cases.iter().any(|other| other.is_same(&case))) {
                    cases.push(case);
                }
            }
        }
        Ok(cases)
    }

    /// Tells whether the cost model has chosen both algorithm and block size.
    pub(crate) fn is_chosen(&self) -> bool {
        self.left_to_model == LeftToModel { algorithm: true, block_size: true }
    }

    /// Tells whether another configuration does the same work in any way.
    pub(crate) fn is_same_work(&self, other: &Self) -> bool {
        let (algorithm, block_size, left_to_model) = (self.algorithm.clone(), self.block_size, self.left_to_model);
        *self == Self { algorithm, block_size, left_to_model, ..other.clone() }
    }

    /// Tells whether another configuration does the same work in the same way. A block may be longer than the message.
    fn is_same(&self, other: &Self) -> bool {
        let block = |case: &Self| u64::from(case.block_size).min(case.bytes);
        self.is_same_work(other) && self.algorithm == other.algorithm && block(self) == block(other)
    }

    /// Returns the number of receivers of a group.
    pub(crate) fn receivers(&self) -> u32 {
        self.nodes - 1
    }

    /// Returns the bytes that one round delivers to all receivers of all groups.
    pub(crate) fn delivered(&self) -> u64 {
        self.bytes * u64::from(self.receivers()) * u64::from(self.groups)
    }

    /// Returns the memory of all members in bytes: the messages of a round at each, and one more at roots that is not
    /// released yet.
    pub(crate) fn memory(&self) -> u64 {
        // A shared object exists once.
        let nodes = if self.delivery == Delivery::Shared { 0 } else { self.nodes };
        let floor = if self.has_floor_in_turn() { Limits::length_for(self.bytes) * u64::from(self.nodes) } else { 0 };
        let members = self.bytes.saturating_mul(u64::from(self.groups)).saturating_mul(u64::from(nodes) + 2);
        members.saturating_add(floor)
    }

    /// Returns how many rounds may follow each other without the benchmark's orders between. It gives them where
    /// several groups begin a round together, and where each round takes long.
    pub(crate) fn rounds_at_once(&self) -> u32 {
        if self.groups == 1 && self.bytes <= AT_ONCE_BYTES_MAX { ROUNDS_AT_ONCE } else { 1 }
    }

    /// Tells whether the copy floor is measured in turn with its rounds.
    pub(crate) fn has_floor_in_turn(&self) -> bool {
        self.delivery == Delivery::Private && Floor::is_for(self.bytes)
    }

    /// Returns the names of its values, without the size.
    pub(crate) fn names(&self) -> [String; 10] {
        [
            self.fabric.name().to_owned(),
            self.completion.name().to_owned(),
            self.delivery.name().to_owned(),
            self.checks.name().to_owned(),
            self.ring.map_or_else(|| NO_RING.to_owned(), |ring| ring.to_string()),
            self.groups.to_string(),
            self.nodes.to_string(),
            self.senders.to_string(),
            if self.left_to_model.algorithm { AUTO.to_owned() } else { self.algorithm.to_string() },
            if self.left_to_model.block_size { AUTO.to_owned() } else { ByteSize(self.block_size.into()).to_string() },
        ]
    }

    /// Returns its algorithm and block size.
    pub(crate) fn way(&self) -> String {
        way(&self.algorithm.to_string(), self.block_size)
    }
}

/// The values that [`Case::names`] names.
pub(crate) const NAMES: [&str; 10] =
    ["fabric", "completion", "delivery", "checks", "ring", "groups", "n", "senders", "algorithm", "block"];

/// Refuses shared objects on a fabric without shared memory.
fn check_delivery(delivery: Delivery, fabric: FabricSelection) -> anyhow::Result<()> {
    match (delivery, fabric) {
        (Delivery::Shared, FabricSelection::Tcp | FabricSelection::Verbs) => {
            let fabric = fabric.name();
            let what = format!("--delivery shared needs shared memory: use --fabric shm or auto, not {fabric}");
            Err(Kind::Request.error(what))
        }
        _ => Ok(()),
    }
}

/// Names an algorithm and a block size together.
pub(crate) fn way(algorithm: &str, block_size: u32) -> String {
    format!("{algorithm}, {}", ByteSize(block_size.into()))
}

/// An algorithm and a block size; `None` is what the cost model chooses.
type Way = (Option<Algorithm>, Option<u32>);

/// Lists the ways that blocks travel. With `--explain` the cost model's choice comes first, and other ways follow even
/// if none are listed.
fn ways(options: &BenchOptions) -> Vec<Way> {
    let (mut algorithms, mut block_sizes) = (distinct(&options.algorithms), distinct(&options.block_sizes));
    if options.explain && algorithms == [None] && block_sizes == [None] {
        algorithms = EXPLAINED_ALGORITHMS.map(Some).to_vec();
        block_sizes = EXPLAINED_BLOCK_SIZES.map(Some).to_vec();
    }
    let listed = algorithms.iter().flat_map(|algorithm| block_sizes.iter().map(|size| (algorithm.clone(), *size)));
    let chosen = options.explain.then_some((None, None));
    distinct(&chosen.into_iter().chain(listed).collect::<Vec<_>>())
}

/// The ways that a choice is compared with if none are listed.
const EXPLAINED_ALGORITHMS: [Algorithm; 3] = [Algorithm::BinomialPipeline, Algorithm::Chain, Algorithm::Fanout];
const EXPLAINED_BLOCK_SIZES: [u32; 3] = [256 << 10, 1 << 20, 4 << 20];

/// Returns the numbers of roots for so many groups and members.
fn senders(options: &BenchOptions, groups: u32, nodes: u32) -> anyhow::Result<Vec<u32>> {
    if options.senders.is_empty() {
        return Ok(vec![groups.min(nodes)]);
    }
    if let Some(&senders) = options.senders.iter().find(|senders| **senders > groups) {
        let (senders, groups) = (count(senders, "sender"), count(groups, "group"));
        let what = format!("{senders} need as many groups, not {groups}: give fewer --senders or more --groups");
        return Err(Kind::Request.error(what));
    }
    if let Some(&senders) = options.senders.iter().find(|senders| **senders > nodes) {
        let what = format!("{} among {nodes}: give fewer --senders or more --nodes", count(senders, "sender"));
        return Err(Kind::Request.error(what));
    }
    Ok(distinct(&options.senders))
}

/// Returns the distinct items of a list in their order.
fn distinct<T: Clone + PartialEq>(list: &[T]) -> Vec<T> {
    let mut once = Vec::new();
    for item in list {
        if !once.contains(item) {
            once.push(item.clone());
        }
    }
    once
}

#[cfg(test)]
mod tests {
    use rdmc::{Hybrid, Racks, Spine};

    use super::*;

    const TCP: FabricSelection = FabricSelection::Tcp;

    fn cases(options: BenchOptions) -> Vec<Case> {
        Case::all(&options).unwrap()
    }

    fn defaults() -> BenchOptions {
        BenchOptions::default()
    }

    #[test]
    fn every_combination_is_a_case_once() {
        let algorithms = [Algorithm::Chain, Algorithm::Sequential].map(Some).to_vec();
        let (nodes, sizes, groups) = (vec![2, 3, 2], vec![1, 64 << 10], vec![1, 2]);
        let all = cases(BenchOptions { nodes, sizes, algorithms, groups, ..defaults() });
        assert_eq!(all.len(), 16);
        let repeated = |case: &Case| all.iter().filter(|other| *other == case).count() > 1;
        assert!(!all.iter().any(repeated));
        assert_eq!((all[0].bytes, all[1].bytes, all[0].nodes, all[4].nodes), (1, 64 << 10, 2, 3));
        assert!(all.iter().all(|case| case.senders == case.groups));
    }

    #[test]
    fn by_default_there_are_three_sizes_of_groups_and_six_of_messages() {
        assert_eq!(cases(defaults()).len(), 18);
    }

    #[test]
    fn what_is_not_given_is_chosen_for_each_size_and_named_as_chosen() {
        let tcp = || BenchOptions { nodes: vec![8], sizes: vec![1, 64 << 20], fabrics: vec![TCP], ..defaults() };
        let all = cases(tcp());
        assert!(all.iter().all(|case| case.is_chosen() && case.names()[8..] == ["auto", "auto"]));
        assert_eq!(all[0].block_size, 64 << 10);
        assert!(all[1].block_size > 64 << 10);
        let (algorithms, block_sizes) = (vec![Some(Algorithm::Chain), None], vec![Some(64 << 10), None]);
        let all = cases(BenchOptions { sizes: vec![64 << 20], algorithms, block_sizes, ..tcp() });
        let names: Vec<_> = all.iter().map(|case| case.names()[8..].join(" ")).collect();
        assert_eq!(names, ["chain 64 KiB", "chain auto", "auto 64 KiB", "auto auto"]);
        assert_eq!((all[0].way(), &all[1].algorithm), ("chain, 64 KiB".to_owned(), &Algorithm::Chain));
    }

    #[test]
    fn a_choice_is_explained_beside_others_none_of_which_is_measured_twice() {
        let explained = |sizes| BenchOptions { nodes: vec![8], sizes, fabrics: vec![TCP], explain: true, ..defaults() };
        let all = cases(explained(vec![100 << 10, 64 << 20]));
        assert_eq!(all.iter().filter(|case| case.is_chosen()).count(), 2);
        for (at, case) in all.iter().enumerate() {
            assert!(!all[..at].iter().any(|other| other.is_same(case)), "{case:?}");
        }
        // In one block there is nothing to choose but the algorithm.
        assert_eq!(all.iter().filter(|case| case.bytes == 100 << 10 && case.block_size >= 100 << 10).count(), 3);
        let (algorithms, block_sizes) = (vec![Some(Algorithm::Chain)], vec![Some(1 << 10)]);
        let listed = cases(BenchOptions { algorithms, block_sizes, ..explained(vec![64 << 20]) });
        let ways: Vec<_> = listed.iter().map(Case::way).collect();
        assert_eq!((ways.len(), ways[1].as_str()), (2, "chain, 1 KiB"));
    }

    #[test]
    fn lists_that_make_no_sense_are_wrong_requests() {
        let hybrid = Hybrid::new(Racks::from_sizes(&[2, 2]).unwrap(), Spine::Cascade);
        let hybrid = || vec![Some(Algorithm::from(hybrid.clone()))];
        let (private, shared) = (Delivery::Private, vec![Delivery::Shared]);
        let wrong = [
            BenchOptions { deliveries: vec![private, Delivery::Shared], fabrics: vec![TCP], ..defaults() },
            BenchOptions { deliveries: shared, fabrics: vec![FabricSelection::Shm], explain: true, ..defaults() },
            BenchOptions { groups: vec![1, 2], explain: true, ..defaults() },
            BenchOptions { senders: vec![2], ..defaults() },
            BenchOptions { senders: vec![3], groups: vec![3], nodes: vec![2], ..defaults() },
            BenchOptions { algorithms: hybrid(), nodes: vec![8], ..defaults() },
            BenchOptions { device: Some("rxe0".to_owned()), ..defaults() },
            BenchOptions { nodes: vec![2, 1], ..defaults() },
            BenchOptions { sizes: vec![0], ..defaults() },
        ];
        for options in wrong {
            assert_eq!(Kind::of(&Case::all(&options).unwrap_err()), Some(Kind::Request), "{options:?}");
        }
        let algorithms = [hybrid(), vec![Some(Algorithm::Chain)]].concat();
        assert!(Case::all(&BenchOptions { algorithms, nodes: vec![4], ..defaults() }).is_ok());
    }

    #[test]
    fn a_round_delivers_to_every_receiver_of_every_group() {
        let options = || BenchOptions { nodes: vec![4], sizes: vec![10], groups: vec![3], ..defaults() };
        let all = cases(options());
        assert_eq!((all[0].delivered(), all[0].memory()), (90, 180));
        let shared = cases(BenchOptions { deliveries: vec![Delivery::Shared], ..options() });
        assert_eq!((shared[0].delivered(), shared[0].memory()), (90, 60));
    }
}
