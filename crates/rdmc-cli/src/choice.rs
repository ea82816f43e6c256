//! Options that choose an algorithm.

use std::str::FromStr;

use anyhow::Context;
use clap::ValueEnum;
use clap::builder::PossibleValue;
use rdmc::{Algorithm, Hybrid, Racks, Rank, Spine};
use rdmc_files::RackSelection;
use rdmc_files::words::count;

use crate::exit::Exit;

/// Options that choose an algorithm.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AlgorithmOptions {
    /// The algorithm by which blocks travel
    #[arg(long, short, env = "RDMC_ALGORITHM", default_value = "binomial-pipeline", value_name = "NAME")]
    pub(crate) algorithm: AlgorithmName,
    #[command(flatten)]
    pub(crate) hybrid: HybridOptions,
}

/// Options of the hybrid algorithm.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct HybridOptions {
    /// With --algorithm hybrid, the members that share a rack: sizes in order of rank (4,4), or the ranks of each rack
    /// (0,2/1,3); rank 0 is the sender
    #[arg(long, env = "RDMC_RACKS", value_name = "RACKS")]
    pub(crate) racks: Option<RacksText>,
    /// With --algorithm hybrid, the schedule among the racks; by default two trees
    #[arg(long, env = "RDMC_SPINE", value_name = "NAME")]
    pub(crate) spine: Option<SpineName>,
}

/// The algorithms by their names on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AlgorithmName {
    /// The sender gives everything to one receiver after the other
    Sequential,
    /// Each member passes every block to the next
    Chain,
    /// Members that have everything give it to as many others
    BinomialTree,
    /// Blocks spread along all dimensions of a hypercube at once: the fewest steps possible
    BinomialPipeline,
    /// Blocks spread on a circulant graph, in as few steps
    Circulant,
    /// Half of the blocks go down one binary tree, half down another: for distant hosts
    TwoTree,
    /// The sender gives every block to each receiver: for processes of one host, and for short files
    Fanout,
    /// One schedule among the racks, and a binomial pipeline or two trees inside each; needs --racks
    Hybrid,
}

/// A value that is given, or left to a cost model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OrAuto<T> {
    Auto,
    Given(T),
}

impl<T> OrAuto<T> {
    /// Returns the given value.
    pub(crate) fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Given(given) => Some(given),
        }
    }
}

impl ValueEnum for OrAuto<AlgorithmName> {
    fn value_variants<'a>() -> &'a [Self] {
        &[
            Self::Auto,
            Self::Given(AlgorithmName::Sequential),
            Self::Given(AlgorithmName::Chain),
            Self::Given(AlgorithmName::BinomialTree),
            Self::Given(AlgorithmName::BinomialPipeline),
            Self::Given(AlgorithmName::Circulant),
            Self::Given(AlgorithmName::TwoTree),
            Self::Given(AlgorithmName::Fanout),
            Self::Given(AlgorithmName::Hybrid),
        ]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Auto => Some(
                PossibleValue::new(AUTO).help("The fastest by a cost model for the members, the files and the fabric"),
            ),
            Self::Given(name) => name.to_possible_value(),
        }
    }
}

/// The schedules among racks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum SpineName {
    /// Leader to leader, from rack to rack: leaders send two blocks in a step
    Chain,
    /// A binomial pipeline among the leaders, which send two blocks in a step: for short files and many racks
    BinomialPipeline,
    /// Rack to rack, from members with a free port: none sends two blocks in a step
    Cascade,
    /// Two trees of racks, and two trees of members inside each: for distant racks
    TwoTree,
}

impl From<SpineName> for Spine {
    fn from(name: SpineName) -> Self {
        match name {
            SpineName::Chain => Spine::Chain,
            SpineName::BinomialPipeline => Spine::BinomialPipeline,
            SpineName::Cascade => Spine::Cascade,
            SpineName::TwoTree => Spine::TwoTree,
        }
    }
}

impl AlgorithmOptions {
    /// Makes the algorithm for a group of `members`, the sender included.
    pub(crate) fn resolve(&self, members: u32) -> anyhow::Result<Algorithm> {
        self.hybrid.resolve(self.algorithm, members)
    }
}

impl HybridOptions {
    /// Makes the named algorithm for a group of `members`, the sender included.
    pub(crate) fn resolve(&self, algorithm: AlgorithmName, members: u32) -> anyhow::Result<Algorithm> {
        let flat = match algorithm {
            AlgorithmName::Sequential => Algorithm::Sequential,
            AlgorithmName::Chain => Algorithm::Chain,
            AlgorithmName::BinomialTree => Algorithm::BinomialTree,
            AlgorithmName::BinomialPipeline => Algorithm::BinomialPipeline,
            AlgorithmName::Circulant => Algorithm::Circulant,
            AlgorithmName::TwoTree => Algorithm::TwoTree,
            AlgorithmName::Fanout => Algorithm::Fanout,
            AlgorithmName::Hybrid => {
                let racks = match &self.racks {
                    Some(given) if given.are_given() => given.resolve(members)?,
                    _ => {
                        let what = "--algorithm hybrid needs the racks: --racks 4,4 (sizes) or --racks 0,2/1,3 (ranks)";
                        return Err(Exit::Usage.error(what));
                    }
                };
                return Ok(Hybrid::new(racks, self.spine.unwrap_or(SPINE).into()).into());
            }
        };
        self.check_unused(HYBRID)?;
        Ok(flat)
    }

    /// Makes the algorithm for a sender if one is given; else says how it learns of racks. `members` include it.
    pub(crate) fn selection(
        &self,
        algorithm: OrAuto<AlgorithmName>,
        members: u32,
    ) -> anyhow::Result<(Option<Algorithm>, RackSelection)> {
        let racks = match (algorithm, &self.racks) {
            (OrAuto::Given(name), _) => {
                if name != AlgorithmName::Hybrid {
                    self.check_unused(AUTO_OR_HYBRID)?;
                }
                return Ok((Some(self.resolve(name, members)?), RackSelection::Ignore));
            }
            (OrAuto::Auto, _) if self.spine.is_some() => {
                let remedy = format!("{HYBRID} and --racks; with {AUTO}, two trees join the racks");
                return Err(needs("--spine (or RDMC_SPINE)", &remedy));
            }
            (OrAuto::Auto, None | Some(RacksText::Auto)) => RackSelection::Find,
            (OrAuto::Auto, Some(RacksText::None)) => RackSelection::Ignore,
            (OrAuto::Auto, Some(given)) => RackSelection::Given(given.resolve(members)?),
        };
        Ok((None, racks))
    }

    /// Tells whether racks are given, and not found or ignored.
    pub(crate) fn has_racks(&self) -> bool {
        self.racks.as_ref().is_some_and(RacksText::are_given)
    }

    /// Makes the algorithm if one is given.
    pub(crate) fn resolve_given(
        &self,
        algorithm: OrAuto<AlgorithmName>,
        members: u32,
    ) -> anyhow::Result<Option<Algorithm>> {
        match algorithm {
            OrAuto::Given(name) => self.resolve(name, members).map(Some),
            OrAuto::Auto => self.check_unused(HYBRID).map(|()| None),
        }
    }

    /// Checks that nothing is given that only other algorithms take: racks are for `with_racks`.
    fn check_unused(&self, with_racks: &str) -> anyhow::Result<()> {
        match self.spine {
            _ if self.has_racks() => Err(needs("--racks (or RDMC_RACKS)", with_racks)),
            Some(_) => Err(needs("--spine (or RDMC_SPINE)", HYBRID)),
            None => Ok(()),
        }
    }
}

fn needs(option: &str, what: &str) -> anyhow::Error {
    Exit::Usage.error(format!("{option} needs {what}"))
}

/// Racks as typed, before they are checked against the members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RacksText {
    /// The sender finds them.
    Auto,
    /// There are none.
    None,
    /// Sizes of racks of consecutive ranks.
    Sizes(Vec<u32>),
    /// Ranks in each rack.
    Ranks(Vec<Vec<u32>>),
}

impl FromStr for RacksText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = |part: &str| {
            let number = |word: &str| word.trim().parse::<u32>().map_err(|_| format!("{word:?} is no number; {FORMS}"));
            part.split(',').map(number).collect::<Result<Vec<u32>, String>>()
        };
        if text == AUTO {
            Ok(RacksText::Auto)
        } else if text == NONE {
            Ok(RacksText::None)
        } else if text.contains('/') {
            text.split('/').map(numbers).collect::<Result<_, _>>().map(RacksText::Ranks)
        } else {
            numbers(text).map(RacksText::Sizes)
        }
    }
}

impl RacksText {
    fn are_given(&self) -> bool {
        matches!(self, Self::Sizes(_) | Self::Ranks(_))
    }

    fn resolve(&self, members: u32) -> anyhow::Result<Racks> {
        self.checked(members).context("--racks (or RDMC_RACKS)").context(Exit::Usage)
    }

    fn checked(&self, members: u32) -> anyhow::Result<Racks> {
        let racks = match self {
            RacksText::Sizes(sizes) if sizes.contains(&0) => anyhow::bail!(
                "a list without / has the sizes of racks, and one is 0; for the ranks in each rack, put / between the \
                 racks: 0,1/2,3"
            ),
            RacksText::Sizes(sizes) => Racks::from_sizes(sizes)?,
            RacksText::Ranks(racks) => Racks::from_assignment(&assignment(racks, members)?)?,
            RacksText::Auto | RacksText::None => {
                anyhow::bail!("{AUTO} and {NONE} are for --algorithm {AUTO} of rdmc send; write them as 4,4 or 0,2/1,3")
            }
        };
        let held = racks.members();
        let (hold, are) = (count(held, "member"), if members == 1 { "is" } else { "are" });
        anyhow::ensure!(held == members, "the racks hold {hold}, but there {are} {members} with the sender");
        Ok(racks)
    }
}

fn assignment(racks: &[Vec<u32>], members: u32) -> anyhow::Result<Vec<u32>> {
    let mut rack_of = vec![None; Rank(members).index()];
    for (rack, ranks) in (0..).zip(racks) {
        for &rank in ranks {
            let Some(place) = rack_of.get_mut(Rank(rank).index()) else {
                anyhow::bail!(
                    "rank {rank} does not exist: {} have ranks 0 to {}",
                    count(members, "member"),
                    members - 1
                );
            };
            anyhow::ensure!(place.replace(rack).is_none(), "rank {rank} is in two racks");
        }
    }
    let missing = rack_of.iter().position(Option::is_none);
    rack_of.into_iter().collect::<Option<_>>().with_context(|| format!("rank {} is in no rack", missing.unwrap_or(0)))
}

/// What --racks takes.
const FORMS: &str = "give the sizes of racks (4,4), the ranks in each (0,2/1,3), auto or none";
/// What takes racks and a spine, and what takes racks in `rdmc send`.
const HYBRID: &str = "--algorithm hybrid";
const AUTO_OR_HYBRID: &str = "--algorithm auto or hybrid";
/// Default schedule among the racks.
const SPINE: SpineName = SpineName::TwoTree;
/// Value of --racks that ignores racks.
const NONE: &str = "none";
/// Name of a value that is left to a cost model.
pub(crate) const AUTO: &str = "auto";

#[cfg(test)]
mod tests {
    use super::*;

    fn hybrid(racks: &str, members: u32) -> anyhow::Result<Algorithm> {
        let racks = Some(racks.parse().map_err(anyhow::Error::msg)?);
        HybridOptions { racks, spine: Some(SpineName::Chain) }.resolve(AlgorithmName::Hybrid, members)
    }

    #[test]
    fn every_algorithm_can_be_given_or_left_to_be_chosen() {
        let all = OrAuto::<AlgorithmName>::value_variants().iter().filter_map(|choice| choice.given());
        assert!(all.eq(AlgorithmName::value_variants().iter().copied()));
        let none = HybridOptions { racks: None, spine: None };
        assert_eq!(none.resolve_given(OrAuto::Auto, 4).unwrap(), None);
        assert_eq!(none.resolve_given(OrAuto::Given(AlgorithmName::Chain), 4).unwrap(), Some(Algorithm::Chain));
        let racks = HybridOptions { racks: Some(RacksText::Sizes(vec![2, 2])), ..none };
        assert_eq!(Exit::code_of(&racks.resolve_given(OrAuto::Auto, 4).unwrap_err()), 2);
    }

    #[test]
    fn racks_and_spines_that_an_algorithm_does_not_take_are_refused_with_what_takes_them() {
        let racks = || Some(RacksText::Sizes(vec![2, 2]));
        let given = HybridOptions { racks: racks(), spine: None };
        let (two_tree, hybrid) = (OrAuto::Given(AlgorithmName::TwoTree), OrAuto::Given(AlgorithmName::Hybrid));
        assert!(matches!(given.selection(OrAuto::Auto, 4), Ok((None, RackSelection::Given(_)))));
        assert!(matches!(given.selection(hybrid, 4), Ok((Some(_), RackSelection::Ignore))));
        let said = |options: &HybridOptions, algorithm| format!("{:#}", options.selection(algorithm, 4).unwrap_err());
        assert_eq!(said(&given, two_tree), "usage: --racks (or RDMC_RACKS) needs --algorithm auto or hybrid");
        let refused = format!("{:#}", given.resolve(AlgorithmName::TwoTree, 4).unwrap_err());
        assert_eq!(refused, "usage: --racks (or RDMC_RACKS) needs --algorithm hybrid");
        let with_spine = HybridOptions { racks: racks(), spine: Some(SpineName::Chain) };
        assert!(said(&with_spine, OrAuto::Auto).ends_with("and --racks; with auto, two trees join the racks"));
        for racks in [None, Some(RacksText::Auto), Some(RacksText::None)] {
            assert!(said(&HybridOptions { racks, spine: None }, hybrid).contains("needs the racks: --racks 4,4"));
        }
    }

    #[test]
    fn racks_are_given_by_size_or_by_rank() {
        assert_eq!(hybrid("2,2", 4).unwrap(), hybrid("0,1/2,3", 4).unwrap());
        assert_ne!(hybrid("2,2", 4).unwrap(), hybrid("0,2/1,3", 4).unwrap());
        assert!(hybrid("1", 1).is_ok());
    }

    #[test]
    fn racks_that_do_not_fit_the_members_are_a_usage_error() {
        let wrong = ["4,4", "0,4", "", "a", "0,1/1,2,3", "0/1,2", "0,1/2,3,4294967295", "4294967295,4294967295", "/"];
        for text in wrong {
            assert!(hybrid(text, 4).is_err(), "{text:?}");
        }
        assert_eq!("2,x".parse::<RacksText>(), Err(format!("\"x\" is no number; {FORMS}")));
        let said = format!("{:#}", hybrid("0,1/1,2,3", 4).unwrap_err());
        assert_eq!(said, "usage: --racks (or RDMC_RACKS): rank 1 is in two racks");
        assert_eq!(Exit::code_of(&hybrid("4,4", 4).unwrap_err()), 2);
        let ranks_without_racks = format!("{:#}", hybrid("0,1,2,3", 4).unwrap_err());
        assert!(ranks_without_racks.contains("put / between the racks: 0,1/2,3"), "{ranks_without_racks}");
    }
}
