//! What is measured: every combination of what the lists name.

use clap::ValueEnum;
use rdmc::Algorithm;

use super::options::{BenchOptions, Completion, Delivery};
use crate::choice::{AlgorithmName, HybridOptions};
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
    /// Members of each group.
    pub(super) nodes: u32,
    pub(super) groups: u32,
    /// Members that are roots.
    pub(super) senders: u32,
    pub(super) algorithm: Algorithm,
    pub(super) block_size: u32,
    /// Length of a message.
    pub(super) bytes: u64,
}

impl Case {
    /// Lists all configurations: those of one number of members together, the sizes of each one after the other.
    pub(super) fn all(options: &BenchOptions) -> anyhow::Result<Vec<Self>> {
        let mut cases = Vec::new();
        for &fabric in &distinct(&options.fabric) {
            for &completion in &distinct(&options.completion) {
                for &delivery in &distinct(&options.delivery) {
                    check_delivery(delivery, fabric)?;
                    Self::with_members(options, (fabric, completion, delivery), &mut cases)?;
                }
            }
        }
        Ok(cases)
    }

    /// Lists the groups.
    fn with_members(
        options: &BenchOptions,
        (fabric, completion, delivery): (FabricName, Completion, Delivery),
        cases: &mut Vec<Self>,
    ) -> anyhow::Result<()> {
        for &groups in &distinct(&options.groups) {
            for &nodes in &distinct(&options.nodes) {
                for senders in senders(options, groups, nodes)? {
                    let algorithm = Algorithm::Sequential;
                    let (block_size, bytes) = (0, 0);
                    let case =
                        Self { fabric, completion, delivery, nodes, groups, senders, algorithm, block_size, bytes };
                    case.with_content(options, cases)?;
                }
            }
        }
        Ok(())
    }

    /// Lists what is sent, and how, among so many members.
    fn with_content(&self, options: &BenchOptions, cases: &mut Vec<Self>) -> anyhow::Result<()> {
        for &name in &distinct(&options.algorithm) {
            let algorithm = resolve(options, name, self.nodes)?;
            for &block_size in &distinct(&options.block_size) {
                let case = |bytes| Self { algorithm: algorithm.clone(), block_size, bytes, ..self.clone() };
                cases.extend(distinct(&options.size).into_iter().map(case));
            }
        }
        Ok(())
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
        self.bytes.saturating_mul(u64::from(self.groups)).saturating_mul(u64::from(nodes) + 2)
    }

    /// Returns what it is called among those that are measured, without the size.
    pub(super) fn names(&self) -> [String; 8] {
        [
            fabric_name(self.fabric),
            self.completion.name().to_owned(),
            self.delivery.name().to_owned(),
            self.groups.to_string(),
            self.nodes.to_string(),
            self.senders.to_string(),
            self.algorithm.to_string(),
            Bytes(self.block_size.into()).to_string(),
        ]
    }
}

/// What [`Case::names`] names.
pub(super) const NAMES: [&str; 8] =
    ["fabric", "completion", "delivery", "groups", "n", "senders", "algorithm", "block"];

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

fn resolve(options: &BenchOptions, algorithm: AlgorithmName, nodes: u32) -> anyhow::Result<Algorithm> {
    let mut hybrid = HybridOptions { racks: options.racks.clone(), spine: options.spine };
    // They are for the one in the list that needs them.
    if options.algorithm.contains(&AlgorithmName::Hybrid) && algorithm != AlgorithmName::Hybrid {
        hybrid.racks = None;
    }
    hybrid.resolve(algorithm, nodes)
}

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
    fn lists_that_make_no_sense_are_usage_errors() {
        let wrong: [&[&str]; 6] = [
            &["--delivery", "private,shared", "--fabric", "tcp"],
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
