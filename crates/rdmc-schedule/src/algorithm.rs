//! The choice among the schedules.

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::racks::Racks;

/// Chooses how a message's blocks travel from the root to all members; n is the number of members, k that of blocks.
///
/// The flat algorithms are written and parsed by name: `sequential`, `chain`, `binomial-tree`, `binomial-pipeline`,
/// `circulant`, `two-tree`, `fanout`. The hybrid is written as `hybrid(chain)`, `hybrid(binomial-pipeline)`,
/// `hybrid(cascade)` or `hybrid(two-tree)`. It is not parsed, since it needs the racks; [`Spine::in_name`] returns its
/// spine.
///
/// With the feature `serde`, a flat algorithm is its name in files too. A hybrid is a table of its spine and of the
/// rack of each rank: `{ hybrid = { spine = "cascade", racks = [0, 0, 1, 1] } }`.
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Algorithm {
    /// The root sends the whole message to one member after the other: k(n − 1) steps (DSN §4.3).
    Sequential,
    /// The root sends each block to one member after the other: k(n − 1) steps.
    ///
    /// Where members share no port, as between processes of one host, every member has the block while it is in the
    /// processor's cache.
    Fanout,
    /// Each member passes every block to the next rank: k + n − 2 steps (DSN §4.3).
    Chain,
    /// Members that have the whole message send it to as many others, and so double their number: k⌈log₂ n⌉ steps
    /// (DSN §4.3).
    BinomialTree,
    /// Blocks spread over a hypercube along all its dimensions at once: k − 1 + ⌈log₂ n⌉ steps for every n.
    ///
    /// That is the least possible. A member has at most 2⌊log₂ n⌋ + 1 neighbours (DSN §4.4; Draft, App. A).
    #[default]
    BinomialPipeline,
    /// Träff's schedule on a circulant graph (arXiv 2312.11236): as many steps as the binomial pipeline.
    ///
    /// Relays have more slack when n is just above a power of two. They have more neighbours, and most of them have no
    /// fixed first source.
    Circulant,
    /// Half of the blocks go down one binary tree, half down another: k + 2⌊log₂ (n − 1)⌋ steps at most.
    ///
    /// Every member is inside one tree and a leaf of the other (after Sanders, Speck, Träff, *Parallel Computing*
    /// 35(12), 2009), and has two parents and two children. No block waits for one that comes a longer way, so distance
    /// delays a member only once for each level of the trees. Members inside the second tree have no fixed first
    /// source.
    TwoTree,
    /// One schedule among the racks, and the binomial pipeline inside each of them (DSN §4.3); or two trees on both
    /// levels.
    Hybrid(Hybrid),
}

impl Algorithm {
    /// Lists the algorithms that take no parameter.
    pub const ALL_FLAT: [Algorithm; 7] = [
        Algorithm::Sequential,
        Algorithm::Chain,
        Algorithm::BinomialTree,
        Algorithm::BinomialPipeline,
        Algorithm::Circulant,
        Algorithm::TwoTree,
        Algorithm::Fanout,
    ];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Algorithm::Hybrid(Hybrid { spine, .. }) => return write!(f, "hybrid({spine})"),
            Algorithm::Sequential => "sequential",
            Algorithm::Fanout => "fanout",
            Algorithm::Chain => "chain",
            Algorithm::BinomialTree => "binomial-tree",
            Algorithm::BinomialPipeline => "binomial-pipeline",
            Algorithm::Circulant => "circulant",
            Algorithm::TwoTree => "two-tree",
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

/// Holds the parameters of the hybrid algorithm (DSN §4.3).
///
/// The spine brings the blocks over the slow links between racks to the leaders of the racks. The leaders follow one
/// another in order of rank, so the root is the first. Each leader is the root of a binomial pipeline inside its rack,
/// which takes the blocks in the order in which the spine delivers them. A member can send one block on each level in
/// the same step. With [`Spine::TwoTree`] racks have no leaders: each tree enters a rack at a member of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Hybrid {
    /// The rack of each member; must cover exactly the members of the group.
    pub racks: Arc<Racks>,
    /// The schedule among the racks.
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

/// Chooses the schedule among the racks; r is their number, d = ⌊log₂ n⌋ for a rack of n.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
#[non_exhaustive]
pub enum Spine {
    /// Leader to leader, in order of rank: the last rack begins after r − 1 steps. Leaders send two blocks a step.
    Chain,
    /// The binomial pipeline among leaders: the last rack begins after ⌈log₂ r⌉ steps. Leaders send two blocks a
    /// step.
    BinomialPipeline,
    /// Rack to rack: a member whose port the pipeline inside its rack leaves idle sends to the next leader.
    ///
    /// No port sends two blocks a step, as long messages need it. The last rack begins after d + 1 steps for each rack
    /// before it. In a rack whose size is no power of two, one member sends two blocks in the last step.
    Cascade,
    /// Two trees of racks, and two trees of members inside each, as in [`Algorithm::TwoTree`]: for distant racks.
    ///
    /// No port sends two blocks a step. A block passes O(log r) racks, and O(log s) members in each; s is the size of
    /// the largest rack.
    TwoTree,
}

impl Spine {
    /// Lists all spines.
    pub const ALL: [Spine; 4] = [Spine::Chain, Spine::BinomialPipeline, Spine::Cascade, Spine::TwoTree];

    /// Returns the spine of the hybrid that is written so, or `None` if the name is not that of a hybrid.
    ///
    /// # Examples
    /// ```
    /// use rdmc_schedule::Spine;
    ///
    /// assert_eq!(Spine::in_name("hybrid(cascade)"), Some(Spine::Cascade));
    /// assert_eq!(Spine::in_name("chain"), None);
    /// ```
    pub fn in_name(algorithm: &str) -> Option<Spine> {
        let spine = algorithm.strip_prefix("hybrid(")?.strip_suffix(')')?;
        Spine::ALL.into_iter().find(|known| known.to_string() == spine)
    }
}

impl fmt::Display for Spine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Spine::Chain => "chain",
            Spine::BinomialPipeline => "binomial-pipeline",
            Spine::Cascade => "cascade",
            Spine::TwoTree => "two-tree",
        })
    }
}

/// A name is not that of a flat algorithm; the caller must choose one that [`Algorithm`] lists.
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
