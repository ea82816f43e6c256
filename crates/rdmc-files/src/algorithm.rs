//! Algorithms as a sender names them to the receivers.

use std::fmt;

use rdmc::{Algorithm, Hybrid, Racks, RacksError, Rank, Spine};
use rdmc_schedule::ParseAlgorithmError;
use serde::{Deserialize, Serialize};

use crate::words::count;

/// An algorithm as it travels: its name, and the racks of a hybrid. A name that is unknown is found out when the
/// algorithm is needed, so that the rest of the announcement can be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct WireAlgorithm {
    name: String,
    /// The rack of each rank; empty for the flat algorithms.
    racks: Vec<u32>,
}

impl From<&Algorithm> for WireAlgorithm {
    fn from(algorithm: &Algorithm) -> Self {
        let racks = match algorithm {
            Algorithm::Hybrid(Hybrid { racks, .. }) => {
                (0..racks.members()).filter_map(|rank| racks.rack_of(Rank(rank))).collect()
            }
            _ => Vec::new(),
        };
        Self { name: algorithm.to_string(), racks }
    }
}

impl WireAlgorithm {
    /// Makes the algorithm for a group of `members`.
    pub(crate) fn resolve(&self, members: usize) -> Result<Algorithm, WireAlgorithmError> {
        let Some(spine) = Spine::in_name(&self.name) else {
            return Ok(self.name.parse()?);
        };
        let held = self.racks.len();
        if held != members {
            return Err(WireAlgorithmError::Members { held, members });
        }
        Ok(Hybrid::new(Racks::from_assignment(&self.racks)?, spine).into())
    }

    /// Returns the ranks in each rack, in order; none of the flat algorithms has racks.
    pub(crate) fn racks(&self) -> Vec<Vec<u32>> {
        let Ok(racks) = Racks::from_assignment(&self.racks) else { return Vec::new() };
        (0..racks.count()).map(|rack| racks.members_of(rack).map(|rank| rank.0).collect()).collect()
    }
}

impl fmt::Display for WireAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Error of an algorithm that a sender names but that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireAlgorithmError {
    /// Its name is unknown.
    #[error(transparent)]
    Unknown(#[from] ParseAlgorithmError),
    /// Its racks hold another number of members than the group.
    #[error("racks for {} in a group of {members}", count(*held, "member"))]
    Members {
        /// Members in the racks.
        held: usize,
        /// Members of the group.
        members: usize,
    },
    /// Its racks are malformed.
    #[error(transparent)]
    Racks(#[from] RacksError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hybrid(racks: &[u32]) -> Algorithm {
        Hybrid::new(Racks::from_assignment(racks).unwrap(), Spine::Chain).into()
    }

    #[test]
    fn an_algorithm_is_told_and_understood() {
        for algorithm in Algorithm::ALL_FLAT.into_iter().chain([hybrid(&[0, 1, 0, 1])]) {
            let told = WireAlgorithm::from(&algorithm);
            assert_eq!(told.resolve(4).unwrap(), algorithm);
        }
        let unknown = WireAlgorithm { name: "teleport".into(), racks: Vec::new() };
        assert!(unknown.resolve(4).is_err());
        assert!(WireAlgorithm::from(&hybrid(&[0, 0, 1, 1])).resolve(5).is_err());
    }
}
