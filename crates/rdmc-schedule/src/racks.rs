//! The racks of a group's members.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::clusters;
use crate::hop::Rank;
use crate::rack_trees::RackTrees;
use crate::schedule::MEMBERS_MAX;

/// Divides the members of a group into racks, each with a leader (DSN §4.3).
///
/// Racks are numbered from 0 in the order of their leaders, and a rack's leader is its lowest rank. So rack 0 is the
/// root's, and the root leads it. Two values are equal when they divide the members alike. Memory is O(n).
///
/// With the feature `serde`, racks are the list that [`from_assignment`](Self::from_assignment) takes.
///
/// # Examples
/// ```
/// use rdmc_schedule::{Rank, Racks};
///
/// let racks = Racks::from_sizes(&[2, 3])?;
/// assert_eq!(racks.members(), 5);
/// assert_eq!(racks.rack_of(Rank(4)), Some(1));
/// assert_eq!(racks.leader(1), Some(Rank(2)));
/// assert!(racks.members_of(1).eq([Rank(2), Rank(3), Rank(4)]));
/// assert_eq!(racks, Racks::from_assignment(&[7, 7, 3, 3, 3])?);
/// # Ok::<(), rdmc_schedule::RacksError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(try_from = "Vec<u32>", into = "Vec<u32>")
)]
pub struct Racks {
    /// The rack of each rank.
    rack_of: Vec<u32>,
    /// The ranks, rack by rack.
    ranks: Vec<u32>,
    /// Where each rack begins in `ranks`, and at last the number of members.
    starts: Vec<u32>,
    /// The trees of [`Spine::TwoTree`](crate::Spine::TwoTree), which depend on the racks alone.
    trees: RackTrees,
}

impl Racks {
    /// Fills racks of the given sizes with consecutive ranks.
    ///
    /// # Errors
    /// There is no member, a rack is empty, or there are more than [`MEMBERS_MAX`] members.
    pub fn from_sizes(sizes: &[u32]) -> Result<Racks, RacksError> {
        let mut assignment = Vec::new();
        for (rack, &size) in sizes.iter().enumerate() {
            if size == 0 {
                return Err(RacksError::EmptyRack { rack });
            }
            let members = assignment.len() as u64 + u64::from(size);
            if members > u64::from(MEMBERS_MAX) {
                return Err(RacksError::TooManyMembers);
            }
            let rack = u32::try_from(rack).expect("there are no more racks than members");
            assignment.extend(std::iter::repeat_n(rack, size as usize));
        }
        Racks::from_assignment(&assignment)
    }

    /// Assigns each rank the rack number at its place; any numbers will do, equal ones mean one rack.
    ///
    /// # Errors
    /// There is no member, or there are more than [`MEMBERS_MAX`].
    pub fn from_assignment(assignment: &[u32]) -> Result<Racks, RacksError> {
        if assignment.is_empty() {
            return Err(RacksError::NoMembers);
        }
        let members = u32::try_from(assignment.len())
            .ok()
            .filter(|&members| members <= MEMBERS_MAX)
            .ok_or(RacksError::TooManyMembers)?;

        // Ranks are seen in order, so a rack is first seen through its leader.
        let mut numbers = HashMap::new();
        let mut sizes = Vec::new();
        let mut rack_of = Vec::with_capacity(assignment.len());
        for given in assignment {
            let unused = numbers.len();
            let rack = *numbers.entry(*given).or_insert(unused);
            if rack == unused {
                sizes.push(0_u32);
            }
            sizes[rack] += 1;
            rack_of.push(u32::try_from(rack).expect("there are no more racks than members"));
        }

        let mut starts = vec![0];
        for size in sizes {
            starts.push(starts[starts.len() - 1] + size);
        }
        let mut ranks: Vec<u32> = (0..members).collect();
        ranks.sort_by_key(|&rank| rack_of[rank as usize]);
        let racks = starts.windows(2).map(|ends| &ranks[ends[0] as usize..ends[1] as usize]);
        let trees = RackTrees::new(&racks.collect::<Vec<_>>());
        Ok(Racks { rack_of, ranks, starts, trees })
    }

    /// Finds racks by the round trips between members: those that are far closer to each other than to the rest.
    ///
    /// `round_trip` returns the time from a member to one of higher rank and back, or `None` if it is not known. Groups
    /// of members are joined one after the other, the closest first, by the geometric mean of the round trips between
    /// them, so that a single one that was measured badly counts little. Racks are the groups before the last step at
    /// which the distance doubles, and grows by 50 µs, which software can delay. So hosts of several sites are divided
    /// by site, not by the racks of a site.
    ///
    /// Returns `None` if there are no racks, or all members would be in racks of their own. O(n³), in O(n²)
    /// memory.
    ///
    /// # Examples
    /// ```
    /// use std::time::Duration;
    ///
    /// use rdmc_schedule::Racks;
    ///
    /// // Members of even rank are at one site, the others at another.
    /// let round_trip_ms = |a: u32, b: u32| if a % 2 == b % 2 { 1 } else { 25 };
    /// let racks = Racks::by_round_trips(6, |a, b| Some(Duration::from_millis(round_trip_ms(a.0, b.0))));
    /// assert_eq!(racks, Some(Racks::from_assignment(&[0, 1, 0, 1, 0, 1])?));
    /// # Ok::<(), rdmc_schedule::RacksError>(())
    /// ```
    pub fn by_round_trips(members: u32, round_trip: impl Fn(Rank, Rank) -> Option<Duration>) -> Option<Racks> {
        Racks::from_assignment(&clusters::by_distance(members, round_trip)?).ok()
    }

    /// Returns the number of members in all racks together.
    #[must_use]
    pub fn members(&self) -> u32 {
        self.starts[self.starts.len() - 1]
    }

    /// Returns the number of racks, at least 1.
    #[must_use]
    pub fn count(&self) -> u32 {
        u32::try_from(self.starts.len() - 1).expect("there are no more racks than members")
    }

    /// Returns the rack of `rank`, or `None` if it is not a member.
    #[must_use]
    pub fn rack_of(&self, rank: Rank) -> Option<u32> {
        self.rack_of.get(rank.index()).copied()
    }

    /// Returns the leader of `rack`, its lowest rank, or `None` if there is no such rack.
    #[must_use]
    pub fn leader(&self, rack: u32) -> Option<Rank> {
        self.ranks_of(rack).first().copied().map(Rank)
    }

    /// Lists the members of `rack` in order, the leader first; lists none if there is no such rack.
    pub fn members_of(&self, rack: u32) -> impl ExactSizeIterator<Item = Rank> + '_ {
        self.ranks_of(rack).iter().copied().map(Rank)
    }

    /// Returns the number of members in `rack`.
    pub(crate) fn size(&self, rack: u32) -> u32 {
        u32::try_from(self.range(rack).len()).expect("there are no more in a rack than members")
    }

    /// Returns the ranks in `rack`, ascending.
    pub(crate) fn ranks_of(&self, rack: u32) -> &[u32] {
        &self.ranks[self.range(rack)]
    }

    pub(crate) fn trees(&self) -> &RackTrees {
        &self.trees
    }

    /// Returns how many hops from rack to rack, and how many inside racks, a block takes at most in the
    /// [trees](Self::trees).
    pub(crate) fn hops_in_trees(&self) -> (u32, u32) {
        self.trees.hops(|rank| self.rack_of[rank as usize])
    }

    fn range(&self, rack: u32) -> Range<usize> {
        let rack = rack as usize;
        match (self.starts.get(rack), self.starts.get(rack + 1)) {
            (Some(&start), Some(&end)) => start as usize..end as usize,
            _ => 0..0,
        }
    }
}

impl TryFrom<Vec<u32>> for Racks {
    type Error = RacksError;

    /// Assigns each rank the rack number at its place, as [`from_assignment`](Self::from_assignment) does.
    fn try_from(assignment: Vec<u32>) -> Result<Racks, RacksError> {
        Racks::from_assignment(&assignment)
    }
}

impl From<Racks> for Vec<u32> {
    /// Lists the rack of each rank.
    fn from(racks: Racks) -> Vec<u32> {
        racks.rack_of
    }
}

/// A list does not describe racks; the caller must correct it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RacksError {
    /// The list has no member.
    NoMembers,
    /// A rack has no member, and so no leader.
    EmptyRack {
        /// The rack's index in the list of sizes.
        rack: usize,
    },
    /// There are more than [`MEMBERS_MAX`] members.
    TooManyMembers,
}

impl fmt::Display for RacksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RacksError::NoMembers => write!(f, "racks without any member"),
            RacksError::EmptyRack { rack } => write!(f, "rack {rack} has no member"),
            RacksError::TooManyMembers => write!(f, "racks hold more than {MEMBERS_MAX} members"),
        }
    }
}

impl Error for RacksError {}
