//! The schedules of reliable multicast out of unicast: which member sends which block to which member in which step.
//!
//! A message of k blocks goes from member 0, the *root*, to the n − 1 other members of its group, and members relay
//! blocks to each other. A *schedule* lists the *hops* of every *step*: one block from one member to another. Each
//! member computes its own part from n, k and its rank alone, so members agree on nothing and announce nothing. This
//! crate is that arithmetic. It has no input or output, no clock, and no dependencies but `serde` with the feature of
//! that name.
//!
//! | [`Algorithm`] | steps | source |
//! |---|---|---|
//! | sequential | k(n − 1) | DSN §4.3 |
//! | chain | k + n − 2 | DSN §4.3 |
//! | binomial tree | k⌈log₂ n⌉ | DSN §4.3 |
//! | binomial pipeline | k − 1 + ⌈log₂ n⌉ | DSN §4.4; Draft, App. A |
//! | circulant | k − 1 + ⌈log₂ n⌉ | Träff, arXiv 2312.11236 |
//! | two trees | k + 2⌊log₂ (n − 1)⌋ at most | after Sanders, Speck, Träff, Parallel Computing 35(12), 2009 |
//! | fan-out | k(n − 1) | for members of one host |
//! | hybrid | by racks | DSN §4.3; the spines cascade and two-tree are ours |
//!
//! With one block out and one block in per member and step, k − 1 + ⌈log₂ n⌉ steps are the least possible. Groups
//! have up to [`MEMBERS_MAX`] members, messages up to 2³² − 1 blocks.
//!
//! A [`Repair`] is a schedule for members that hold some of the blocks already, as after a message that was
//! interrupted. Members compute it from what each of them holds ([`BlockSet`]), which they have to tell each other.
//!
//! A [`CostModel`] predicts the time of a multicast, and chooses algorithm and block size.
//!
//! *DSN* is Behrens, Jha, Birman, Tremel, "RDMC: A Reliable RDMA Multicast for Large Objects", DSN 2018; *Draft*
//! its longer version, "Pushing Bytes: Cloud-Scale Data Replication with RDMC".
//!
//! # Examples
//! The binomial pipeline carries 3 blocks to 8 members in 3 − 1 + log₂ 8 = 5 steps. A row is a member, a column a
//! step, and `1<3` means "takes block 1 from member 3":
//! ```
//! use rdmc_schedule::{Algorithm, BlockCount, Rank, Schedule};
//!
//! let schedule = Schedule::new(&Algorithm::BinomialPipeline, 8, BlockCount(3))?;
//! let row = |rank| {
//!     let mut cells = [" . "; 5].map(String::from);
//!     for receive in schedule.receives(rank) {
//!         cells[receive.step.0 as usize] = format!("{}<{}", receive.block, receive.peer);
//!     }
//!     cells.join("  ")
//! };
//! let grid: Vec<String> = (1..schedule.members()).map(|rank| row(Rank(rank))).collect();
//! assert_eq!(grid, [
//!     "0<0   .    .   2<0  1<3",
//!     " .   1<0   .   0<3  2<0",
//!     " .   0<1   .   1<2  2<1",
//!     " .    .   2<0  0<5  1<6",
//!     " .    .   0<1  2<4  1<7",
//!     " .    .   1<2  0<7  2<4",
//!     " .    .   0<3  1<6  2<5",
//! ]);
//! # Ok::<(), rdmc_schedule::ScheduleError>(())
//! ```

#![forbid(unsafe_code)]

mod algorithm;
mod cascade;
mod circulant;
mod clusters;
mod cost;
mod hop;
mod hybrid;
mod pipeline;
mod rack_trees;
mod racks;
mod repair;
mod schedule;
mod simple;
mod stepping;
mod two_tree;
mod walk;

pub use algorithm::{Algorithm, Hybrid, ParseAlgorithmError, Spine};
pub use cost::{CostModel, Plan};
pub use hop::{BlockCount, BlockIndex, Hop, Rank, Step};
pub use racks::{Racks, RacksError};
pub use repair::{BlockSet, BlockSetError, REPAIR_BLOCKS_MAX, REPAIR_HOPS_MAX, Repair, RepairError, RepairHops};
pub use schedule::{MEMBERS_MAX, Neighbours, Receives, Schedule, ScheduleError, Sends, first_source, neighbours};
pub use stepping::{runs_free_from, wait_in_step};
