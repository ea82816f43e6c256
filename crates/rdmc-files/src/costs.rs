//! The assumptions about networks and hosts by which a sender chooses algorithm and block size.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use rdmc::{Algorithm, GroupSpec};
use rdmc_schedule::{CostModel, Plan, ScheduleError};

use crate::announcement::{Plans, WirePlan};
use crate::error::{Context, Kind, Problem};

/// What a plan assumes that the members share.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Assumed {
    /// A network.
    Network(Path),
    /// The memory and the processors of one host.
    Host,
    /// The processors of one host, which copy into sockets and out of them. Use it if members on one host share no
    /// memory.
    Loopback,
}

/// A network between members.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Path {
    /// The rate of each member's port.
    pub port_rate: PortRate,
    /// The round trip between the members that are farthest from each other.
    pub round_trip: Duration,
}

/// Rate of a member's port in each direction: 1 kbit/s to 10 Tbit/s. It is read and displayed with a unit: `2.5G`, `2.5
/// Gbit/s`.
///
/// The default of 2.5 Gbit/s is in the middle of the ports that TCP is used on. The best block size grows with the
/// square root of the rate, and blocks of half or twice that size cost little. To seven receivers, 64 MiB should take
/// longer than in the best blocks by less than 1 % at 200 Mbit/s, by 2 % at 10 Gbit/s, and by 8 % at 25 Gbit/s.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PortRate(f64);

impl PortRate {
    /// Makes a rate; `None` if it is out of range.
    pub fn from_bits_per_second(bits: u64) -> Option<Self> {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        Self::checked(bits as f64)
    }

    fn checked(bits_per_second: f64) -> Option<Self> {
        (1e3..=1e13).contains(&bits_per_second).then_some(Self(bits_per_second))
    }

    /// Returns the lower of two rates.
    pub(crate) fn min(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// Returns the rate in bits per second.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "its bounds are checked")]
    pub fn bits_per_second(self) -> u64 {
        self.0.round() as u64
    }

    /// Returns the rate in bytes per second.
    pub fn bytes_per_second(self) -> f64 {
        self.0 / 8.0
    }
}

impl Default for PortRate {
    fn default() -> Self {
        Self(2.5e9)
    }
}

/// Error of a text that is not the rate of a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not the rate of a port: write bits per second (bit/s), or a number with k, M, G or T \
     (powers of 1000), from 1k to 10T: 2.5G"
)]
pub struct ParsePortRateError {
    text: String,
}

/// Parses `10G`, `2.5Gbit/s`, `200M` or plain bits per second; the units are powers of 1000.
impl FromStr for PortRate {
    type Err = ParsePortRateError;

    fn from_str(text: &str) -> Result<Self, ParsePortRateError> {
        let allowed = || ParsePortRateError { text: text.to_owned() };
        let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let unit = unit.trim_start();
        let factor = match ["bit/s", "bps", "bit"].iter().find_map(|suffix| unit.strip_suffix(suffix)).unwrap_or(unit) {
            "" => 1.0,
            "k" | "K" => 1e3,
            "m" | "M" => 1e6,
            "g" | "G" => 1e9,
            "t" | "T" => 1e12,
            _ => return Err(allowed()),
        };
        let rate = number.parse::<f64>().map_err(|_| allowed())? * factor;
        Self::checked(rate).ok_or_else(allowed)
    }
}

impl fmt::Display for PortRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("T", 1e12), ("G", 1e9), ("M", 1e6)];
        let (unit, factor) = units.into_iter().find(|&(_, factor)| self.0 >= factor).unwrap_or(("k", 1e3));
        write!(f, "{} {unit}bit/s", self.0 / factor)
    }
}

/// Plans messages of up to `bytes` to `members`, the sender included, for each medium. Given values are kept. On a
/// network, `path` is between the members.
///
/// # Errors
/// The given algorithm cannot serve so many members.
pub(crate) fn plans(
    algorithm: Option<&Algorithm>,
    block_size: Option<u32>,
    members: u32,
    bytes: u64,
    path: Path,
) -> Result<Plans, Problem> {
    let wire = |assumed| {
        let planned = plan(assumed, algorithm, block_size, members, bytes).of_kind(Kind::Request)?;
        Ok::<_, Problem>(WirePlan::new(&planned.algorithm, planned.block_size))
    };
    Ok(Plans { network: wire(Assumed::Network(path))?, host: wire(Assumed::Host)? })
}

/// Plans messages of up to `bytes` to `members`, the sender included, and predicts the time. Given values are kept.
///
/// # Errors
/// The given algorithm cannot serve so many members.
pub fn plan(
    assumed: Assumed,
    algorithm: Option<&Algorithm>,
    block_size: Option<u32>,
    members: u32,
    bytes: u64,
) -> Result<Plan, ScheduleError> {
    model(assumed, bytes).complete(algorithm, block_size, members, bytes)
}

/// Chooses the longest message that the root should write into a ring, in bytes; `None` for no ring.
///
/// # Errors
/// There can be no group of so many members.
pub fn ring_bytes(assumed: Assumed, members: u32) -> Result<Option<u32>, ScheduleError> {
    model(assumed, 1).ring_bytes(members)
}

/// Returns the cost model for messages of up to `bytes`, which must not have too many blocks.
fn model(assumed: Assumed, bytes: u64) -> CostModel {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let processors = u32::try_from(cores).unwrap_or(u32::MAX);
    let (model, shortest) = match assumed {
        Assumed::Network(Path { port_rate, round_trip }) => {
            let latency = PORT_LATENCY + round_trip / 2;
            let model = CostModel::network(port_rate.bytes_per_second(), PORT_PER_BLOCK, latency)
                .latency_in_rack(PORT_LATENCY)
                .slow_start(PORT_INITIAL_WINDOW, round_trip)
                .block_size_max(PORT_BLOCK_SIZE_MAX);
            (model, if round_trip < FAR { BLOCK_SIZE_MIN } else { BLOCK_SIZE_MIN_FAR })
        }
        Assumed::Host => {
            let model = CostModel::host(COPY_RATE, processors, COPY_PER_BLOCK, COPY_LATENCY);
            (model.block_size_max(COPY_BLOCK_SIZE_MAX), BLOCK_SIZE_MIN)
        }
        Assumed::Loopback => {
            let model = CostModel::host(SOCKET_RATE, processors, SOCKET_PER_BLOCK, PORT_LATENCY);
            (model.block_size_max(PORT_BLOCK_SIZE_MAX), BLOCK_SIZE_MIN)
        }
    };
    let least = u32::try_from(bytes.div_ceil(GroupSpec::BLOCKS_MAX.into())).unwrap_or(u32::MAX);
    model.block_size_min(shortest.max(least))
}

/// Part of a block's handling that does not overlap with the transmission of another block. On ports of 400 to 1000
/// Mbit/s an additional step took 4 to 108 µs, which is 2 to 27 µs for each of the hosts that shared a processor. With
/// 12 µs the chosen blocks, of 128 or 256 KiB, took at most 1 % longer there than the best ones.
const PORT_PER_BLOCK: Duration = Duration::from_micros(12);
/// One hop through a switch and one wake-up.
const PORT_LATENCY: Duration = Duration::from_micros(50);
/// Bytes that a TCP connection sends in its first round trip: ten segments.
const PORT_INITIAL_WINDOW: u32 = 14_480;
/// Shorter blocks would cost processors more than they save. Between sites, short blocks save round trips.
const BLOCK_SIZE_MIN: u32 = 64 << 10;
const BLOCK_SIZE_MIN_FAR: u32 = 32 << 10;
/// The round trip from which on members are at different sites. On a busy host it takes a millisecond to connect.
const FAR: Duration = Duration::from_millis(4);
/// Bounds what an interrupted member loses, and what is buffered until a message's size is known. Longer blocks save
/// little: their cost per block is small beside their bytes.
const PORT_BLOCK_SIZE_MAX: u32 = 2 << 20;
/// Bytes per second that a processor copies from the memory of another process while other processors copy too.
/// Measured with 64 MiB to seven receivers; one receiver copied 10 GB/s.
const COPY_RATE: f64 = 6e9;
/// Wake-ups of the members. Measured: 6 µs if blocks follow each other closely, 30 µs if many members share processors.
const COPY_PER_BLOCK: Duration = Duration::from_micros(20);
/// One wake-up.
const COPY_LATENCY: Duration = Duration::from_micros(50);
/// Lets several blocks be ahead to one neighbour, and keeps what one receiver copies in the cache until the next one
/// copies it.
const COPY_BLOCK_SIZE_MAX: u32 = 1 << 20;
/// A grant, a send and their completions at both ends. Measured over TCP on loopback: with 64 MiB to one receiver each
/// additional block took 27 µs.
const SOCKET_PER_BLOCK: Duration = Duration::from_micros(30);
/// Bytes per second that a processor copies into a socket and out of it again. Measured with 64 MiB to seven receivers.
const SOCKET_RATE: f64 = 2.9e9;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::announcement::Medium;

    const MIB: u64 = 1 << 20;

    const MEDIA: [(Medium, Assumed); 2] = [
        (Medium::Network, Assumed::Network(Path { port_rate: PortRate(2.5e9), round_trip: Duration::ZERO })),
        (Medium::Host, Assumed::Host),
    ];

    fn path(port_rate: &str) -> Path {
        Path { port_rate: port_rate.parse().unwrap(), round_trip: Duration::ZERO }
    }

    fn way(assumed: Assumed, members: u32, bytes: u64) -> (Algorithm, u32) {
        let plan = plan(assumed, None, None, members, bytes).unwrap();
        (plan.algorithm, plan.block_size)
    }

    #[test]
    fn hosts_get_the_fan_out_and_networks_two_trees() {
        for (members, bytes) in [(4, MIB), (8, 64 * MIB), (8, 10 << 30), (64, 256 * MIB)] {
            for assumed in [Assumed::Host, Assumed::Loopback] {
                assert_eq!(way(assumed, members, bytes).0, Algorithm::Fanout, "{members} {bytes}");
            }
            assert_eq!(way(MEDIA[0].1, members, bytes).0, Algorithm::TwoTree, "{members} {bytes}");
        }
    }

    #[test]
    fn the_loopback_gets_the_fan_out_in_whole_messages_of_up_to_2_mib() {
        for members in [4, 8] {
            for (bytes, block) in
                [64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB].into_iter().zip([64, 256, 1024, 2048, 2048])
            {
                let chosen = way(Assumed::Loopback, members, bytes);
                assert_eq!(chosen, (Algorithm::Fanout, block << 10), "{members} {bytes}");
            }
        }
    }

    #[test]
    fn blocks_are_as_long_as_messages_are_worth_and_no_longer_than_a_medium_bears() {
        let sizes =
            |assumed: Assumed| [0, 1, 100_000, 64 * MIB, 1 << 30, 1 << 40].map(|bytes| way(assumed, 8, bytes).1);
        let (least, middle) = (64 << 10, 1 << 20);
        assert_eq!(sizes(Assumed::Host), [least, least, 128 << 10, middle, middle, middle]);
        assert_eq!(sizes(Assumed::Loopback), [least, least, 128 << 10, 2 << 20, 2 << 20, 2 << 20]);
        assert_eq!(sizes(MEDIA[0].1), [least, least, least, 256 << 10, middle, 2 << 20]);
        for (_, assumed) in MEDIA {
            assert_eq!(way(assumed, 8, 7 << 40).1, 8 << 20, "no more blocks than there can be");
            // With one receiver no member relays, and one block after the other is optimal.
            assert_eq!(way(assumed, 2, MIB).1, 1 << 20);
        }
    }

    #[test]
    fn ports_that_are_known_get_blocks_that_suit_them() {
        let size = |rate: &str| way(Assumed::Network(path(rate)), 8, 64 * MIB).1;
        let rates = ["200M", "1G", "2.5G", "10G", "25G"];
        assert_eq!(rates.map(size), [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]);
        let told = plans(None, None, 8, 64 * MIB, path("200M")).unwrap();
        assert_eq!((told.network.block_size, told.host.block_size), (64 << 10, 1 << 20));
    }

    #[test]
    fn far_members_get_two_trees_in_blocks_that_keep_the_path_full() {
        for (rate, ms) in [("200M", 24), ("10G", 1), ("10G", 50)] {
            let far = Path { round_trip: Duration::from_millis(ms), ..path(rate) };
            let (algorithm, block_size) = way(Assumed::Network(far), 8, 1 << 30);
            assert_eq!(algorithm, Algorithm::TwoTree, "{rate} {ms} ms");
            assert!((64 << 10..=2 << 20).contains(&block_size), "{rate} {ms} ms: {block_size}");
        }
    }

    #[test]
    fn rates_of_ports_are_read_with_their_units_and_written_so() {
        let rates =
            [("1000", "1 kbit/s"), ("200M", "200 Mbit/s"), ("2.5Gbit/s", "2.5 Gbit/s"), ("10 Gbps", "10 Gbit/s")];
        for (text, written) in
            rates.into_iter().chain([("1.5T", "1.5 Tbit/s"), ("100kbps", "100 kbit/s"), ("10gbit", "10 Gbit/s")])
        {
            assert_eq!(text.parse::<PortRate>().map(|rate| rate.to_string()).as_deref(), Ok(written), "{text}");
        }
        for text in ["", "G", "fast", "-1G", "0", "999", "11T", "10GB/s", "1..5G", "10Gi", "inf", "NaN", "1e9"] {
            assert!(
                text.parse::<PortRate>().is_err_and(|error| error.to_string().contains(&format!("{text:?}"))),
                "{text}"
            );
        }
        assert_eq!("2.5G".parse(), Ok(PortRate::default()));
    }

    #[test]
    fn the_same_is_chosen_each_time_and_told_for_both_media() {
        for members in [2, 3, 8, 100] {
            for bytes in [0, 1, MIB, 1 << 40] {
                let told = plans(None, None, members, bytes, Path::default()).unwrap();
                assert_eq!(told, plans(None, None, members, bytes, Path::default()).unwrap());
                for (medium, assumed) in MEDIA {
                    let (algorithm, block_size) = way(assumed, members, bytes);
                    assert_eq!(*told.on(medium), WirePlan::new(&algorithm, block_size));
                }
            }
        }
    }

    #[test]
    fn what_is_given_is_told_for_both_media() {
        let told = plans(Some(&Algorithm::Circulant), Some(1000), 8, 64 * MIB, Path::default()).unwrap();
        assert_eq!((&told.network, &told.host), (&told.host, &WirePlan::new(&Algorithm::Circulant, 1000)));
        let told = plans(Some(&Algorithm::Chain), None, 8, 64 * MIB, Path::default()).unwrap();
        for medium in Medium::ALL {
            assert_eq!(told.on(medium).algorithm, (&Algorithm::Chain).into());
        }
        assert_ne!(told.network.block_size, 1000);
    }
}
