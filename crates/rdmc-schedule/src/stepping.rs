//! Whether the ports of a group follow the steps of its schedule.
//!
//! Members that *keep in step* have one block on each port at a time. At the end of each step they wait for each other.
//! If members *run free*, blocks share ports, and none waits. But then the first blocks take longer, and in groups
//! whose size is no power of two, all do.

use std::time::Duration;

use crate::hop::BlockCount;

/// Returns how many blocks a message must have at least to be faster if members run free; [`BlockCount`]'s maximum if
/// it is always slower. It is meant for the binomial pipeline and what is built from it.
///
/// Blocks of `block_len` bytes cross ports of `rate` bytes per second; both are positive. In step, members `wait` for
/// each other after each block, as [`wait_in_step`] says. There are at most [`MEMBERS_MAX`](crate::MEMBERS_MAX)
/// members.
#[must_use]
pub fn runs_free_from(members: u32, block_len: f64, rate: f64, wait: Duration) -> BlockCount {
    let waits = wait.as_secs_f64() * rate / block_len;
    let saved = waits - (crowded_ratio(members) - 1.0);
    let doublings = f64::from(members.next_power_of_two().ilog2());
    let blocks = (FREE_FILL_BLOCKS - 1.0) * doublings / saved;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
    BlockCount(if saved > 0.0 { blocks.ceil() as u32 } else { u32::MAX })
}

/// Returns how long members in step wait at the end of each step.
///
/// If a fabric `tells_near` that a block is nearly through, the grant for the next one is under way meanwhile. Then
/// they wait only for the last bytes of a block that is passed on at once.
#[must_use]
pub fn wait_in_step(round_trip: Duration, tells_near: bool) -> Duration {
    if tells_near { round_trip.mul_f64(WAIT_WITH_NOTICE) } else { round_trip }
}

/// Returns how many times as long blocks take that share ports.
pub(crate) fn crowded_ratio(members: u32) -> f64 {
    if members.is_power_of_two() { SHARED_RATIO } else { CROWDED_RATIO }
}

/// The part of a round trip for which members in step wait.
const WAIT_WITH_NOTICE: f64 = 0.3;
/// If blocks share ports, this many times the blocks' time.
const SHARED_RATIO: f64 = 1.01;
/// The same, if the number of members is no power of two.
const CROWDED_RATIO: f64 = 1.17;
/// If blocks share ports, the time until the last member gets its blocks at full rate: so many blocks for each doubling
/// of the members. In step it is one.
pub(crate) const FREE_FILL_BLOCKS: f64 = 3.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_run_free_if_waits_cost_more_than_shared_ports() {
        let wait = |us| Duration::from_micros(us);
        // A block takes 1 ms.
        let from = |members, us| runs_free_from(members, 1e6, 1e9, wait(us)).0;
        assert_eq!(from(8, 0), u32::MAX);
        // Shared ports cost 1 %.
        assert_eq!(from(8, 9), u32::MAX);
        assert!((600..=601).contains(&from(8, 20)));
        assert!((60..=61).contains(&from(8, 110)));
        assert!((80..=81).contains(&from(16, 110)));
        // Here they cost 17 %.
        assert_eq!(from(13, 160), u32::MAX);
        assert!((100..=101).contains(&from(13, 250)));
    }

    #[test]
    fn a_fabric_that_tells_nothing_costs_a_round_trip() {
        let round_trip = Duration::from_micros(100);
        assert_eq!(wait_in_step(round_trip, false), round_trip);
        assert_eq!(wait_in_step(round_trip, true), Duration::from_micros(30));
    }
}
