//! Any holdings.

use proptest::prelude::*;
use rdmc_schedule::Repair;

use crate::repair::{checked, fewest_steps, holdings};

prop_compose! {
    /// Holders of each of up to 80 blocks among up to 20 members, from rare to frequent.
    fn situations()(members in 1_u32..=20)(
        members in Just(members),
        holders in prop::collection::vec((0..members, any::<u32>(), any::<u32>(), any::<bool>()), 1..80),
    ) -> (u32, Vec<u32>) {
        let all = u32::MAX >> (u32::BITS - members);
        let spread = |(one, some, other, rare): (u32, u32, u32, bool)| {
            let others = if rare { some & other & (other >> 3) } else { some | other };
            (1 << one | others) & all
        };
        (members, holders.into_iter().map(spread).collect())
    }
}

proptest! {
    #[test]
    fn any_holdings_that_are_complete_together_are_repaired((members, holders) in situations()) {
        let holdings = holdings(members, &holders);
        let repair = checked(&holdings);
        let (steps, fewest) = (repair.steps(), fewest_steps(members, &holders));
        let doublings = u64::from(members.next_power_of_two().ilog2());
        prop_assert!(10 * steps <= 11 * fewest + 10 * doublings, "{steps} steps, {fewest} at least");

        // Others compute the same.
        prop_assert_eq!(format!("{repair:?}"), format!("{:?}", Repair::new(&holdings).unwrap()));
    }
}
