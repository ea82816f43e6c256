//! What is measured: every combination of what the lists name.

use clap::ValueEnum;
use rdmc::Algorithm;

use super::limits::{Floor, Limits};
use super::options::{BenchOptions, Checks, Completion, Delivery};
use crate::choice::{AUTO, AlgorithmName, HybridOptions, OrAuto};
use crate::costs::{self, Assumed};
use crate::exit::Exit;
use crate::fabric::FabricName;
use crate::size::Bytes;
use crate::words::count;

/// One configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Case {
    pub(super) fabric: FabricName,
    pub(super) completion: Completion,
    pub(super) delivery: Delivery,
    pub(super) checks: Checks,
    /// Members of each group.
    pub(super) nodes: u32,
    pub(super) groups: u32,
    /// Members that are roots.
    pub(super) senders: u32,
    pub(super) algorithm: Algorithm,
    pub(super) block_size: u32,
    /// Length of a message.
    pub(super) bytes: u64,
    /// What of it was chosen by the cost model.
    pub(super) chosen: Chosen,
}

/// Whether the algorithm and the block size of a configuration were chosen by the cost model, or given.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Chosen {
    pub(super) algorithm: bool,
    pub(super) block_size: bool,
}

impl Case {
    /// Lists all configurations: those of one number of members together, the sizes of each one after the other.
    pub(super) fn all(options: &BenchOptions) -> anyhow::Result<Vec<Self>> {
        let mut cases = Vec::new();
        if options.explain && options.groups.iter().any(|&groups| groups > 1) {
            return Err(Exit::Usage.error("--explain predicts one group at a time: leave --groups at 1"));
        }
        if options.explain && options.delivery.contains(&Delivery::Shared) {
            return Err(Exit::Usage.error("--explain predicts private copies: leave --delivery at private"));
        }
        if options.device.is_some() && !options.fabric.contains(&FabricName::Verbs) {
            return Err(Exit::Usage.error("--device goes with --fabric verbs only"));
        }
        for &fabric in &distinct(&options.fabric) {
            let assumed = fabric.assumed_here();
            for &completion in &distinct(&options.completion) {
                for &delivery in &distinct(&options.delivery) {
                    check_delivery(delivery, fabric)?;
                    for &checks in &distinct(&options.checks) {
                        let case = Self { delivery, checks, ..Self::blank(fabric, completion) };
                        cases.extend(case.with_members(options, assumed)?);
                    }
                }
            }
        }
        Ok(cases)
    }

    /// Makes one of which everything else is still to be said.
    fn blank(fabric: FabricName, completion: Completion) -> Self {
        let (delivery, checks) = (Delivery::Private, Checks::Auto);
        let (nodes, groups, senders, algorithm) = (0, 0, 0, Algorithm::Sequential);
        let (block_size, bytes, chosen) = (0, 0, Chosen::default());
        Self { fabric, completion, delivery, checks, nodes, groups, senders, algorithm, block_size, bytes, chosen }
    }

    /// Lists the groups.
    fn with_members(&self, options: &BenchOptions, assumed: Assumed) -> anyhow::Result<Vec<Self>> {
        let mut cases = Vec::new();
        for &groups in &distinct(&options.groups) {
            for &nodes in &distinct(&options.nodes) {
                for senders in senders(options, groups, nodes)? {
                    let case = Self { nodes, groups, senders, ..self.clone() };
                    cases.extend(case.with_content(options, assumed)?);
                }
            }
        }
        Ok(cases)
    }

    /// Lists what is sent, and how, among so many members.
    fn with_content(&self, options: &BenchOptions, assumed: Assumed) -> anyhow::Result<Vec<Self>> {
        let mut cases: Vec<Self> = Vec::new();
        for (name, block_size) in ways(options) {
            let algorithm = resolve(options, name, self.nodes)?;
            let chosen = Chosen { algorithm: algorithm.is_none(), block_size: block_size.given().is_none() };
            for bytes in distinct(&options.size) {
                let plan = costs::plan(assumed, algorithm.as_ref(), block_size.given(), self.nodes, bytes)?;
                let (algorithm, block_size) = (plan.algorithm, plan.block_size);
                let case = Self { algorithm, block_size, bytes, chosen, ..self.clone() };
                // What was chosen is beside what is listed for a comparison, and need not be measured twice for it.
                if !(options.explain && cases.iter().any(|other| other.is_same(&case))) {
                    cases.push(case);
                }
            }
        }
        Ok(cases)
    }

    /// Tells whether the cost model alone has chosen how blocks travel.
    pub(super) fn is_chosen(&self) -> bool {
        self.chosen == Chosen { algorithm: true, block_size: true }
    }

    /// Tells whether another one does the same work, whichever way.
    pub(super) fn is_same_work(&self, other: &Self) -> bool {
        let (algorithm, block_size, chosen) = (self.algorithm.clone(), self.block_size, self.chosen);
        *self == Self { algorithm, block_size, chosen, ..other.clone() }
    }

    /// Tells whether another one does the same work in the same way: a block may be longer than the message.
    fn is_same(&self, other: &Self) -> bool {
        let block = |case: &Self| u64::from(case.block_size).min(case.bytes);
        self.is_same_work(other) && self.algorithm == other.algorithm && block(self) == block(other)
    }

    /// Returns the receivers of a group.
    pub(super) fn receivers(&self) -> u32 {
        self.nodes - 1
    }

    /// Returns the bytes that one round delivers to all receivers of all groups.
    pub(super) fn delivered(&self) -> u64 {
        self.bytes * u64::from(self.receivers()) * u64::from(self.groups)
    }

    /// Returns the memory that its members take: each the messages of a round, and roots one more that is not yet let go.
    pub(super) fn memory(&self) -> u64 {
        // What is shared is there once.
        let nodes = if self.delivery == Delivery::Shared { 0 } else { self.nodes };
        let floor = if self.has_floor_in_turn() { Limits::length_for(self.bytes) * u64::from(self.nodes) } else { 0 };
        let members = self.bytes.saturating_mul(u64::from(self.groups)).saturating_mul(u64::from(nodes) + 2);
        members.saturating_add(floor)
    }

    /// Tells whether the copy floor is measured in turn with its rounds.
    pub(super) fn has_floor_in_turn(&self) -> bool {
        self.delivery == Delivery::Private && Floor::is_for(self.bytes)
    }

    /// Returns what it is called among those that are measured, without the size.
    pub(super) fn names(&self) -> [String; 9] {
        [
            fabric_name(self.fabric),
            self.completion.name().to_owned(),
            self.delivery.name().to_owned(),
            self.checks.name().to_owned(),
            self.groups.to_string(),
            self.nodes.to_string(),
            self.senders.to_string(),
            if self.chosen.algorithm { AUTO.to_owned() } else { self.algorithm.to_string() },
            if self.chosen.block_size { AUTO.to_owned() } else { Bytes(self.block_size.into()).to_string() },
        ]
    }

    /// Returns how its blocks travel, whether that was chosen or given.
    pub(super) fn way(&self) -> String {
        way(&self.algorithm.to_string(), self.block_size)
    }
}

/// What [`Case::names`] names.
pub(super) const NAMES: [&str; 9] =
    ["fabric", "completion", "delivery", "checks", "groups", "n", "senders", "algorithm", "block"];

/// Returns the name under which a fabric is typed.
pub(super) fn fabric_name(fabric: FabricName) -> String {
    fabric.to_possible_value().expect("no fabric is skipped").get_name().to_owned()
}

/// Refuses to share objects by what shares no memory.
fn check_delivery(delivery: Delivery, fabric: FabricName) -> anyhow::Result<()> {
    match (delivery, fabric) {
        (Delivery::Shared, FabricName::Tcp | FabricName::Verbs) => {
            let fabric = fabric_name(fabric);
            let what = format!("--delivery shared needs shared memory: use --fabric shm or auto, not {fabric}");
            Err(Exit::Usage.error(what))
        }
        _ => Ok(()),
    }
}

/// Names an algorithm and a block size together.
pub(super) fn way(algorithm: &str, block_size: u32) -> String {
    format!("{algorithm}, {}", Bytes(block_size.into()))
}

/// Lists how blocks are to travel: with `--explain` first what is chosen, and if no others are listed some to compare it with.
fn ways(options: &BenchOptions) -> Vec<(OrAuto<AlgorithmName>, OrAuto<u32>)> {
    let (mut algorithms, mut block_sizes) = (distinct(&options.algorithm), distinct(&options.block_size));
    if options.explain && algorithms == [OrAuto::Auto] && block_sizes == [OrAuto::Auto] {
        algorithms = EXPLAINED_ALGORITHMS.map(OrAuto::Given).to_vec();
        block_sizes = EXPLAINED_BLOCK_SIZES.map(OrAuto::Given).to_vec();
    }
    let listed = algorithms.iter().flat_map(|algorithm| block_sizes.iter().map(|size| (*algorithm, *size)));
    let chosen = options.explain.then_some((OrAuto::Auto, OrAuto::Auto));
    distinct(&chosen.into_iter().chain(listed).collect::<Vec<_>>())
}

/// Makes the algorithm, if one is given.
fn resolve(options: &BenchOptions, algorithm: OrAuto<AlgorithmName>, nodes: u32) -> anyhow::Result<Option<Algorithm>> {
    let mut hybrid = HybridOptions { racks: options.racks.clone(), spine: options.spine };
    let named = OrAuto::Given(AlgorithmName::Hybrid);
    // They are for the one in the list that needs them.
    if options.algorithm.contains(&named) && algorithm != named {
        (hybrid.racks, hybrid.spine) = (None, None);
    }
    hybrid.resolve_given(algorithm, nodes)
}

/// With what a choice is compared unless something is listed.
const EXPLAINED_ALGORITHMS: [AlgorithmName; 3] =
    [AlgorithmName::BinomialPipeline, AlgorithmName::Chain, AlgorithmName::Fanout];
const EXPLAINED_BLOCK_SIZES: [u32; 3] = [256 << 10, 1 << 20, 4 << 20];

/// Returns the numbers of roots to try with so many groups and members.
fn senders(options: &BenchOptions, groups: u32, nodes: u32) -> anyhow::Result<Vec<u32>> {
    if options.senders.is_empty() {
        return Ok(vec![groups.min(nodes)]);
    }
    if let Some(&senders) = options.senders.iter().find(|senders| **senders > groups) {
        let (senders, groups) = (count(senders, "sender"), count(groups, "group"));
        let what = format!("{senders} need as many groups, not {groups}: give fewer --senders or more --groups");
        return Err(Exit::Usage.error(what));
    }
    if let Some(&senders) = options.senders.iter().find(|senders| **senders > nodes) {
        let what = format!("{} among {nodes}: give fewer --senders or more --nodes", count(senders, "sender"));
        return Err(Exit::Usage.error(what));
    }
    Ok(distinct(&options.senders))
}

/// Returns what a list names, each once, in its order.
fn distinct<T: Copy + PartialEq>(list: &[T]) -> Vec<T> {
    let mut once = Vec::new();
    for item in list {
        if !once.contains(item) {
            once.push(*item);
        }
    }
    once
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn cases(arguments: &[&str]) -> anyhow::Result<Vec<Case>> {
        let command = BenchOptions::augment_args(clap::Command::new("bench"));
        let matches = command.try_get_matches_from(std::iter::once(&"bench").chain(arguments))?;
        Case::all(&BenchOptions::from_arg_matches(&matches)?)
    }

    #[test]
    fn every_combination_is_a_case_once() {
        let all =
            cases(&["-n", "2,3,2", "--size", "1,64k", "--algorithm", "chain,sequential", "--groups", "1,2"]).unwrap();
        assert_eq!(all.len(), 16);
        let repeated = |case: &Case| all.iter().filter(|other| *other == case).count() > 1;
        assert!(!all.iter().any(repeated));
        assert_eq!((all[0].bytes, all[1].bytes, all[0].nodes, all[4].nodes), (1, 64 << 10, 2, 3));
        assert!(all.iter().all(|case| case.senders == case.groups));
    }

    #[test]
    fn by_default_there_are_three_sizes_of_groups_and_six_of_messages() {
        assert_eq!(cases(&[]).unwrap().len(), 18);
    }

    #[test]
    fn what_is_not_given_is_chosen_for_each_size_and_named_as_chosen() {
        let all = cases(&["-n", "8", "--size", "1,64M", "--fabric", "tcp"]).unwrap();
        assert!(all.iter().all(|case| case.is_chosen() && case.names()[7..] == ["auto", "auto"]));
        assert_eq!(all[0].block_size, 64 << 10);
        assert!(all[1].block_size > 64 << 10);
        let all =
            cases(&["-n", "8", "--size", "64M", "--fabric", "tcp", "-b", "64k,auto", "-a", "chain,auto"]).unwrap();
        let names: Vec<_> = all.iter().map(|case| case.names()[7..].join(" ")).collect();
        assert_eq!(names, ["chain 64 KiB", "chain auto", "auto 64 KiB", "auto auto"]);
        assert_eq!((all[0].way(), &all[1].algorithm), ("chain, 64 KiB".to_owned(), &Algorithm::Chain));
    }

    #[test]
    fn a_choice_is_explained_beside_others_none_of_which_is_measured_twice() {
        let all = cases(&["-n", "8", "--size", "100k,64M", "--fabric", "tcp", "--explain"]).unwrap();
        assert_eq!(all.iter().filter(|case| case.is_chosen()).count(), 2);
        for (at, case) in all.iter().enumerate() {
            assert!(!all[..at].iter().any(|other| other.is_same(case)), "{case:?}");
        }
        // In one block there is nothing to choose but the algorithm.
        assert_eq!(all.iter().filter(|case| case.bytes == 100 << 10 && case.block_size >= 100 << 10).count(), 3);
        let listed = cases(&["-n", "8", "--size", "64M", "--fabric", "tcp", "--explain", "-a", "chain", "-b", "1k"]);
        let ways: Vec<_> = listed.unwrap().iter().map(Case::way).collect();
        assert_eq!((ways.len(), ways[1].as_str()), (2, "chain, 1 KiB"));
    }

    #[test]
    fn lists_that_make_no_sense_are_usage_errors() {
        let wrong: [&[&str]; 9] = [
            &["--delivery", "private,shared", "--fabric", "tcp"],
            &["--explain", "--delivery", "shared", "--fabric", "shm"],
            &["--explain", "--groups", "1,2"],
            &["--racks", "1,1", "-n", "2", "--algorithm", "auto"],
            &["--senders", "2"],
            &["--senders", "3", "--groups", "3", "-n", "2"],
            &["--algorithm", "hybrid"],
            &["--racks", "1,1", "-n", "2"],
            &["--algorithm", "hybrid", "--racks", "2,2", "-n", "8"],
        ];
        for arguments in wrong {
            assert_eq!(Exit::code_of(&cases(arguments).unwrap_err()), 2, "{arguments:?}");
        }
        assert!(cases(&["--algorithm", "hybrid,chain", "--racks", "2,2", "-n", "4"]).is_ok());
        for arguments in [["-n", "1"], ["-n", "2,,3"], ["--size", "0"], ["--fabric", "pigeon"], ["--vs", "lam"]] {
            assert!(cases(&arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn a_round_delivers_to_every_receiver_of_every_group() {
        let all = cases(&["-n", "4", "--size", "10", "--groups", "3"]).unwrap();
        assert_eq!((all[0].delivered(), all[0].memory()), (90, 180));
        let shared = cases(&["-n", "4", "--size", "10", "--groups", "3", "--delivery", "shared"]).unwrap();
        assert_eq!((shared[0].delivered(), shared[0].memory()), (90, 60));
    }
}
