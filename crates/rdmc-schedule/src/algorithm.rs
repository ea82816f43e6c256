//! The choice among the schedules.

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::racks::Racks;

/// How a message's blocks travel from the root to everybody; n is the number of members, k that of blocks.
///
/// The flat algorithms are written and parsed by name: `sequential`, `chain`, `binomial-tree`, `binomial-pipeline`,
/// `circulant`, `fanout`. The hybrid, which needs to know the racks, is written as `hybrid(chain)` or
/// `hybrid(binomial-pipeline)` and not parsed.
///
/// # Examples
/// ```
/// use rdmc_schedule::Algorithm;
///
/// let algorithm: Algorithm = "binomial-tree".parse()?;
/// assert_eq!(algorithm, Algorithm::BinomialTree);
/// assert_eq!(Algorithm::default().to_string(), "binomial-pipeline");
/// # Ok::<(), rdmc_schedule::ParseAlgorithmError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// The root gives the whole message to one member after the other: k(n − 1) steps (DSN §4.3).
    Sequential,
    /// The root gives each block to one member after the other: k(n − 1) steps. Where no port is shared, as between processes
    /// of one host, every member has the block while it is in the processor's cache.
    Fanout,
    /// Each member passes every block to the next rank: k + n − 2 steps (DSN §4.3).
    Chain,
    /// Members that have the whole message give it to as many others, doubling their number: k⌈log₂ n⌉ steps (DSN
    /// §4.3).
    BinomialTree,
    /// Blocks spread over a hypercube along all its dimensions at once: k − 1 + ⌈log₂ n⌉ steps for every n, which
    /// is the least possible, with at most 2⌊log₂ n⌋ + 1 neighbours each (DSN §4.4; Draft, App. A).
    #[default]
    BinomialPipeline,
    /// Träff's schedule on a circulant graph (arXiv 2312.11236): as many steps as the binomial pipeline. Relays have
    /// more slack when n is just above a power of two, but more neighbours, and most have no fixed first source.
    Circulant,
    /// One schedule among the leaders of the racks, and the binomial pipeline inside each rack (DSN §4.3).
    Hybrid(Hybrid),
}

impl Algorithm {
    /// The algorithms that take no parameter.
    pub const ALL_FLAT: [Algorithm; 6] = [
        Algorithm::Sequential,
        Algorithm::Chain,
        Algorithm::BinomialTree,
        Algorithm::BinomialPipeline,
        Algorithm::Circulant,
        Algorithm::Fanout,
    ];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Algorithm::Sequential => "sequential",
            Algorithm::Fanout => "fanout",
            Algorithm::Chain => "chain",
            Algorithm::BinomialTree => "binomial-tree",
            Algorithm::BinomialPipeline => "binomial-pipeline",
            Algorithm::Circulant => "circulant",
            Algorithm::Hybrid(Hybrid { spine: Spine::Chain, .. }) => "hybrid(chain)",
            Algorithm::Hybrid(Hybrid { spine: Spine::BinomialPipeline, .. }) => "hybrid(binomial-pipeline)",
        })
    }
}

impl FromStr for Algorithm {
    type Err = ParseAlgorithmError;

    fn from_str(name: &str) -> Result<Algorithm, ParseAlgorithmError> {
        Algorithm::ALL_FLAT
            .into_iter()
            .find(|algorithm| algorithm.to_string() == name)
            .ok_or_else(|| ParseAlgorithmError { name: name.into() })
    }
}

/// The parameters of the hybrid algorithm (DSN §4.3).
///
/// The leaders of the racks, in order of rank and so with the root first, run the spine's schedule over the slow
/// links between racks. Each leader is the root of a binomial pipeline inside its rack, which takes the blocks in
/// the order in which the spine delivers them. A leader can send one block on each level in the same step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hybrid {
    /// Who stands where; must cover exactly the members of the group.
    pub racks: Arc<Racks>,
    /// The schedule among the leaders.
    pub spine: Spine,
}

impl Hybrid {
    /// Puts the parameters together.
    pub fn new(racks: impl Into<Arc<Racks>>, spine: Spine) -> Hybrid {
        Hybrid { racks: racks.into(), spine }
    }
}

impl From<Hybrid> for Algorithm {
    fn from(hybrid: Hybrid) -> Algorithm {
        Algorithm::Hybrid(hybrid)
    }
}

/// The schedule among the leaders of the racks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Spine {
    /// Leader to leader, in order of rank: every block crosses each link between neighbouring racks once.
    Chain,
    /// The binomial pipeline: fewer steps when there are many racks.
    BinomialPipeline,
}

/// A name that no flat algorithm has; the caller must choose one that [`Algorithm`] lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseAlgorithmError {
    name: String,
}

impl fmt::Display for ParseAlgorithmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = Algorithm::ALL_FLAT.map(|algorithm| algorithm.to_string());
        write!(f, "unknown algorithm {:?}, known are {}", self.name, known.join(", "))
    }
}

impl Error for ParseAlgorithmError {}
