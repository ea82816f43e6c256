//! What the benchmark is asked for.

use rdmc::{Algorithm, CompletionMode, DeliveryMode};
use rdmc_files::FabricSelection;
use serde::{Deserialize, Serialize};

use crate::contestant::Contestant;

/// What to measure. Every combination of what the lists name is a configuration.
///
/// The program `rdmc bench` has an option for each field; messages call the fields by the names of these options.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct BenchOptions {
    /// Members of a group, the sender included: 2 or more.
    pub nodes: Vec<u32>,
    /// Bytes of a message: 1 or more.
    pub sizes: Vec<u64>,
    /// How blocks travel; `None` is what the cost model chooses.
    pub algorithms: Vec<Option<Algorithm>>,
    /// Bytes of a block; `None` is what the cost model chooses.
    pub block_sizes: Vec<Option<u32>>,
    /// What moves the bytes.
    pub fabrics: Vec<FabricSelection>,
    /// How receivers get messages.
    pub deliveries: Vec<Delivery>,
    /// Whether blocks are summed by the members.
    pub checks: Vec<Checks>,
    /// For [`FabricSelection::Verbs`], the RDMA device.
    pub device: Option<String>,
    /// How members wait for completions.
    pub completions: Vec<Completion>,
    /// Groups that send at once, each over all members.
    pub groups: Vec<u32>,
    /// Members among which the groups' roots are shared out. If it is empty, each group has another root, as far as there are
    /// members.
    pub senders: Vec<u32>,
    /// Rounds that are measured; `None` is as many as take about a second and a half, 5 to 1000.
    pub rounds: Option<u32>,
    /// Rounds before those, which are not counted.
    pub warm_up: u32,
    /// How many messages are in flight when messages per second are counted; `None` packs those of up to 4 KiB into batches.
    pub window: Option<u32>,
    /// The MPIs to measure in turn with rdmc.
    pub vs: Vec<Contestant>,
    /// Whether what the cost model chooses is compared with other ways, up to nine of them if the lists name none.
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

/// How a node waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Completion {
    /// Sleeps until there is one.
    Event,
    /// Polls for 50 ms after the last one, then sleeps.
    Hybrid,
    /// Never sleeps: keeps a core busy for each member.
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

/// How receivers get messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Delivery {
    /// Each has a copy in its own memory.
    Private,
    /// All map one object, which nobody can change, and nothing is copied.
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

/// Whether blocks are summed by the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Checks {
    /// Where the fabric does not protect what it carries, as groups do by default: with TCP.
    Auto,
    /// Nowhere.
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

/// Tells whether messages of so many bytes are also counted per second.
pub(crate) fn is_short(bytes: u64) -> bool {
    bytes <= SHORT_MAX
}

/// Longest message of which messages per second are counted, in bytes.
const SHORT_MAX: u64 = 64 << 10;
/// Longest message that is packed when messages per second are counted, in bytes.
pub(crate) const PACKED_MAX: u64 = 4 << 10;
/// Multicasts in flight where messages are not packed, unless it is said how many.
pub(crate) const WINDOW: u32 = 64;
