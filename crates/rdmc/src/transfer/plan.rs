//! The hops of a message: those of a schedule, or of a repair if members hold parts of the message.

use rdmc_schedule::{Hop, Rank, Repair, Schedule};

/// All members' sends and receives of one message.
pub(crate) enum HopPlan {
    /// The root has the message.
    Schedule(Schedule),
    /// Members have parts of it, and all know its size.
    Repair(Repair),
    /// All members have it without blocks: it came by the ring.
    Nothing,
}

impl HopPlan {
    /// Lists the hops that a member sends, in step order.
    pub(crate) fn sends(&self, rank: Rank) -> Box<dyn Iterator<Item = Hop> + Send + Sync> {
        match self {
            Self::Schedule(schedule) => Box::new(schedule.sends(rank)),
            Self::Repair(repair) => Box::new(repair.sends(rank)),
            Self::Nothing => Box::new(std::iter::empty()),
        }
    }

    /// Lists the hops that a member receives, in step order.
    pub(crate) fn receives(&self, rank: Rank) -> Box<dyn Iterator<Item = Hop> + Send + Sync> {
        match self {
            Self::Schedule(schedule) => Box::new(schedule.receives(rank)),
            Self::Repair(repair) => Box::new(repair.receives(rank)),
            Self::Nothing => Box::new(std::iter::empty()),
        }
    }

    /// Tells whether all members know of the message before it begins.
    pub(crate) fn is_repair(&self) -> bool {
        matches!(self, Self::Repair(_))
    }
}
