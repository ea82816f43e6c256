//! The options of the benchmark.

use std::fmt;

use rdmc::{Algorithm, CompletionMode, DeliveryMode};
use rdmc_files::FabricSelection;
use serde::{Deserialize, Serialize};

use crate::contestant::Contestant;

/// Options of the benchmark. Every combination of the lists is a configuration.
///
/// `rdmc bench` has an option for each field, and messages name these options.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BenchOptions {
    /// Numbers of members, the sender included: 2 or more each.
    pub nodes: Vec<u32>,
    /// Sizes of messages in bytes: 1 or more each.
    pub sizes: Vec<u64>,
    /// Algorithms; `None` leaves the choice to the cost model.
    pub algorithms: Vec<Option<Algorithm>>,
    /// Block sizes in bytes; `None` leaves the choice to the cost model.
    pub block_sizes: Vec<Option<u32>>,
    /// Fabrics.
    pub fabrics: Vec<FabricSelection>,
    /// How receivers get messages.
    pub deliveries: Vec<Delivery>,
    /// Whether members check sums of blocks.
    pub checks: Vec<Checks>,
    /// The rings for short messages.
    pub rings: Vec<RingChoice>,
    /// The RDMA device for [`FabricSelection::Verbs`].
    pub device: Option<String>,
    /// How members wait for completions.
    pub completions: Vec<Completion>,
    /// Numbers of groups that send at the same time, each over all members.
    pub groups: Vec<u32>,
    /// Numbers of members that are roots. If the list is empty, each group has another root, as far as there are
    /// members.
    pub senders: Vec<u32>,
    /// Number of measured rounds; `None` measures for about a second and a half, 5 to 1000 rounds.
    pub rounds: Option<u32>,
    /// Number of rounds before those, which are not counted.
    pub warm_up: u32,
    /// Number of messages in flight while messages per second are counted. `None` packs messages of up to 4 KiB into
    /// batches.
    pub window: Option<u32>,
    /// MPIs to measure in turn with rdmc.
    pub vs: Vec<Contestant>,
    /// Whether the cost model's choice is compared with other ways, up to nine if the lists name none.
    pub explain: bool,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            nodes: vec![2, 4, 8],
            sizes: vec![1, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20],
            algorithms: vec![None],
            block_sizes: vec![None],
            fabrics: vec![FabricSelection::Auto],
            deliveries: vec![Delivery::Private],
            checks: vec![Checks::Auto],
            rings: vec![RingChoice::None],
            device: None,
            completions: vec![Completion::Event],
            groups: vec![1],
            senders: Vec::new(),
            rounds: None,
            warm_up: 2,
            window: None,
            vs: Vec::new(),
            explain: false,
        }
    }
}

/// How a member waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Completion {
    /// Sleeps until there is a completion.
    Event,
    /// Polls for 50 ms after the last completion, then sleeps.
    Hybrid,
    /// Never sleeps, so that each member keeps a core busy.
    Poll,
}

impl Completion {
    /// Every variant.
    pub const ALL: [Self; 3] = [Self::Event, Self::Hybrid, Self::Poll];

    /// Returns its name: the variant in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Hybrid => "hybrid",
            Self::Poll => "poll",
        }
    }
}

impl From<Completion> for CompletionMode {
    fn from(completion: Completion) -> Self {
        match completion {
            Completion::Event => Self::Event,
            Completion::Hybrid => Self::HYBRID,
            Completion::Poll => Self::Poll,
        }
    }
}

/// A ring for short messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// Number of its slots.
    pub slots: u32,
    /// Most bytes of a message in a slot.
    pub bytes: u32,
}

/// Which ring a group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingChoice {
    /// No ring.
    None,
    /// The one that the cost model chooses, if any.
    ByModel,
    /// This one.
    Given(Ring),
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.slots, self.bytes)
    }
}

/// How receivers get messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Delivery {
    /// Each receiver has a copy in its own memory.
    Private,
    /// All map one object that cannot be changed, and nothing is copied.
    Shared,
}

impl Delivery {
    /// Every variant.
    pub const ALL: [Self; 2] = [Self::Private, Self::Shared];

    /// Returns its name: the variant in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Private => "private",
            Self::Shared => "shared",
        }
    }
}

impl From<Delivery> for DeliveryMode {
    fn from(delivery: Delivery) -> Self {
        match delivery {
            Delivery::Private => Self::Private,
            Delivery::Shared => Self::Shared,
        }
    }
}

/// Whether members check sums of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Checks {
    /// They check if the fabric does not protect the data, as with TCP. This is the default of groups.
    Auto,
    /// They do not check.
    Off,
}

impl Checks {
    /// Every variant.
    pub const ALL: [Self; 2] = [Self::Auto, Self::Off];

    /// Returns its name: the variant in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
        }
    }
}

/// Tells whether messages of this size are also counted per second.
pub(crate) fn is_short(bytes: u64) -> bool {
    bytes <= SHORT_MAX
}

/// Greatest size of messages that are counted per second, in bytes.
const SHORT_MAX: u64 = 64 << 10;
/// Greatest size of messages that are packed when they are counted per second, in bytes.
pub(crate) const PACKED_MAX: u64 = 4 << 10;
/// Default number of multicasts in flight if messages are not packed.
pub(crate) const WINDOW: u32 = 64;
