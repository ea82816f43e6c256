//! What multicasts cost here, by which `send` and `bench` choose algorithm and block size where they are not given.

use std::time::Duration;

use anyhow::Context;
use rdmc::Algorithm;
use rdmc_schedule::{CostModel, Plan};

use crate::announcement::{Medium, PlanTold, Plans};
use crate::exit::Exit;
use crate::local::cores;

/// What a plan assumes that members share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Assumed {
    /// A network on which each has a port.
    Network,
    /// The memory and the processors of one host.
    Host,
    /// The processors of one host, which copy into sockets and out of them. Only a benchmark knows that of members that do not
    /// share memory.
    Loopback,
}

impl From<Medium> for Assumed {
    fn from(medium: Medium) -> Self {
        match medium {
            Medium::Network => Self::Network,
            Medium::Host => Self::Host,
        }
    }
}

/// Plans messages of up to `bytes` to `members`, the sender included, for either medium. What is given is kept.
///
/// # Errors
/// The given algorithm cannot serve so many members.
pub(crate) fn plans(
    algorithm: Option<&Algorithm>,
    block_size: Option<u32>,
    members: u32,
    bytes: u64,
) -> anyhow::Result<Plans> {
    let told = |medium| {
        let Plan { algorithm, block_size, .. } = plan(medium, algorithm, block_size, members, bytes)?;
        anyhow::Ok(PlanTold::new(&algorithm, block_size))
    };
    Ok(Plans { network: told(Medium::Network)?, host: told(Medium::Host)? })
}

/// Plans for what members share, and predicts the time.
///
/// # Errors
/// The same.
pub(crate) fn plan(
    assumed: impl Into<Assumed>,
    algorithm: Option<&Algorithm>,
    block_size: Option<u32>,
    members: u32,
    bytes: u64,
) -> anyhow::Result<Plan> {
    model(assumed.into()).complete(algorithm, block_size, members, bytes).context(Exit::Usage)
}

/// Returns what it should cost. Nothing is measured before a transfer: that would take longer than most of them, and the choice
/// depends little on it.
fn model(assumed: Assumed) -> CostModel {
    let processors = u32::try_from(cores()).unwrap_or(u32::MAX);
    match assumed {
        Assumed::Network => {
            CostModel::network(PORT_RATE, PORT_PER_BLOCK, PORT_LATENCY).block_size_max(PORT_BLOCK_SIZE_MAX)
        }
        Assumed::Host => {
            CostModel::host(COPY_RATE, processors, COPY_PER_BLOCK, COPY_LATENCY).block_size_max(COPY_BLOCK_SIZE_MAX)
        }
        Assumed::Loopback => {
            CostModel::host(SOCKET_RATE, processors, PORT_PER_BLOCK, PORT_LATENCY).block_size_max(PORT_BLOCK_SIZE_MAX)
        }
    }
}

/// Bytes per second of a port: 2.5 Gbit/s, in the middle of those that TCP is used on. The best block size changes with the
/// root of it, and around the best a block of half or twice the size costs little: to seven receivers 64 MiB should take
/// 1 % longer than in the best blocks at 200 Mbit/s, 2 % longer at 10 Gbit/s, 8 % longer at 25.
pub(crate) const PORT_RATE: f64 = 312.5e6;
/// A grant, a send and their completions at both ends: over TCP on the loopback, 64 MiB to one receiver took 27 µs more for each
/// block more.
const PORT_PER_BLOCK: Duration = Duration::from_micros(30);
/// A hop through a switch, and a wake-up.
const PORT_LATENCY: Duration = Duration::from_micros(50);
/// What is lost at most when a member is interrupted in a block, and what waits outside of its place until a message's size is
/// known. What it costs besides is lost in what its bytes take.
const PORT_BLOCK_SIZE_MAX: u32 = 2 << 20;
/// Bytes per second that a processor copies from the memory of another process, while others copy too: 64 MiB to seven receivers
/// went at that rate, to one at 10 GB/s.
const COPY_RATE: f64 = 6e9;
/// Members are woken for it: between 6 µs, measured where blocks follow each other closely, and 30, where many members share
/// processors.
const COPY_PER_BLOCK: Duration = Duration::from_micros(20);
/// A wake-up.
const COPY_LATENCY: Duration = Duration::from_micros(50);
/// A quarter of what is ahead to one neighbour, so that several blocks are, and of what stays in the cache for the next one who
/// copies it.
const COPY_BLOCK_SIZE_MAX: u32 = 1 << 20;
/// Bytes per second that a processor copies into a socket and out of it again: 64 MiB to seven receivers went at that rate.
const SOCKET_RATE: f64 = 2.9e9;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn way(assumed: impl Into<Assumed>, members: u32, bytes: u64) -> (Algorithm, u32) {
        let plan = plan(assumed, None, None, members, bytes).unwrap();
        (plan.algorithm, plan.block_size)
    }

    #[test]
    fn hosts_get_the_fan_out_and_networks_the_pipeline() {
        for (members, bytes) in [(4, MIB), (8, 64 * MIB), (8, 10 << 30), (64, 256 * MIB)] {
            for assumed in [Assumed::Host, Assumed::Loopback] {
                assert_eq!(way(assumed, members, bytes).0, Algorithm::Fanout, "{members} {bytes}");
            }
            assert_eq!(way(Medium::Network, members, bytes).0, Algorithm::BinomialPipeline, "{members} {bytes}");
        }
    }

    #[test]
    fn blocks_are_as_long_as_messages_are_worth_and_no_longer_than_a_medium_bears() {
        let sizes =
            |assumed: Assumed| [0, 1, 100_000, 64 * MIB, 1 << 30, u64::MAX].map(|bytes| way(assumed, 8, bytes).1);
        let (least, middle) = (64 << 10, 1 << 20);
        assert_eq!(sizes(Assumed::Host), [least, least, 128 << 10, middle, middle, middle]);
        assert_eq!(sizes(Assumed::Loopback), [least, least, 128 << 10, 2 << 20, 2 << 20, 2 << 20]);
        assert_eq!(sizes(Assumed::Network), [least, least, least, middle / 2, 2 << 20, 2 << 20]);
        for medium in Medium::ALL {
            // With one receiver nobody relays, and one block after the other is as good as it gets.
            assert_eq!(way(medium, 2, MIB).1, 1 << 20);
        }
    }

    #[test]
    fn the_same_is_chosen_each_time_and_told_for_both_media() {
        for members in [2, 3, 8, 100] {
            for bytes in [0, 1, MIB, 1 << 40] {
                let told = plans(None, None, members, bytes).unwrap();
                assert_eq!(told, plans(None, None, members, bytes).unwrap());
                for medium in Medium::ALL {
                    let (algorithm, block_size) = way(medium, members, bytes);
                    assert_eq!(*told.on(medium), PlanTold::new(&algorithm, block_size));
                }
            }
        }
    }

    #[test]
    fn what_is_given_is_told_for_both_media() {
        let told = plans(Some(&Algorithm::Circulant), Some(1000), 8, 64 * MIB).unwrap();
        assert_eq!((&told.network, &told.host), (&told.host, &PlanTold::new(&Algorithm::Circulant, 1000)));
        let told = plans(Some(&Algorithm::Chain), None, 8, 64 * MIB).unwrap();
        for medium in Medium::ALL {
            assert_eq!(told.on(medium).algorithm, (&Algorithm::Chain).into());
        }
        assert_ne!(told.network.block_size, 1000);
    }
}
