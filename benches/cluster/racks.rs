//! Compares schedules and placements of the members in racks behind narrow uplinks, in turn.

use anyhow::{Context, Result, ensure};
use rdmc::{Algorithm, Hybrid, NodeId, Spine};

use crate::rounds::{Plan, Way, measure};
use crate::{Network, Work};

/// Compares schedules in racks; benches/racks.sh runs it inside its first namespace
#[derive(clap::Args)]
pub(crate) struct Racks {
    /// Hosts of each rack; the racks follow each other.
    #[arg(long, value_delimiter = ',', default_value = "4,4")]
    racks: Vec<u32>,
    /// Rate of a rack's uplink in either direction, in Mbit/s. The ideal ignores it.
    #[arg(long, default_value_t = 400.0)]
    uplink: f64,
    /// Ways to compare; the first is compared with each other one.
    ///
    /// A way is an algorithm, or `hybrid(chain)`, `hybrid(binomial-pipeline)`, `hybrid(cascade)`, `hybrid(two-tree)`,
    /// followed by a placement: `/grouped` ranks the members rack by rack, `/alternating` puts each into another rack
    /// than the one before.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "binomial-pipeline/alternating,binomial-pipeline/grouped,hybrid(two-tree)/alternating,\
                         hybrid(two-tree)/grouped,hybrid(cascade)/alternating,chain/grouped"
    )]
    ways: Vec<String>,
    #[command(flatten)]
    network: Network,
    #[command(flatten)]
    work: Work,
}

impl Racks {
    pub(crate) fn run(&self) -> Result<()> {
        let Self { racks, uplink, network, work, .. } = self;
        let members: u32 = racks.iter().sum();
        ensure!(members > 1, "a group has two members at least");
        let ways = self.ways.iter().map(|way| self.plan(way).map(Way::Rdmc)).collect::<Result<Vec<_>>>()?;
        println!(
            "{} MiB, blocks of {} KiB, racks of {racks:?}, ports of {} Mbit/s, uplinks of {uplink} Mbit/s",
            work.mib, work.block_kib, network.rate
        );
        let figures = measure(network.receivers(members as usize), work, &ways)?;
        let least = (work.mib << 20) as f64 / network.payload_rate();
        let first = figures.first().context("nothing to compare")?.seconds;
        println!(
            "  way                                        s   of what one port takes   times as fast as the first"
        );
        for (way, figure) in self.ways.iter().zip(&figures) {
            println!(
                "  {way:36} {:7.3} {:24.2} {:28.2}",
                figure.seconds,
                figure.seconds / least,
                first / figure.seconds
            );
        }
        Ok(())
    }

    fn plan(&self, way: &str) -> Result<Plan> {
        let (algorithm, placement) = way.split_once('/').context("an algorithm and a placement")?;
        let members = match placement {
            "grouped" => (0..).take(self.racks.iter().sum::<u32>() as usize).collect(),
            "alternating" => self.alternating(),
            _ => anyhow::bail!("unknown placement {placement:?}, known are grouped, alternating"),
        };
        let algorithm = match Spine::in_name(algorithm) {
            Some(spine) => Hybrid::new(self.racks_of(&members)?, spine).into(),
            None => algorithm.parse::<Algorithm>()?,
        };
        Ok(Plan { checks: true, algorithm, members: members.into_iter().map(NodeId).collect() })
    }

    /// Returns the hosts, in turn from every rack that has one left.
    fn alternating(&self) -> Vec<u32> {
        let most = self.racks.iter().copied().max().unwrap_or(0);
        let first = |rack: usize| self.racks[..rack].iter().sum::<u32>();
        let nth_of_each =
            |nth| (0..self.racks.len()).filter(move |&rack| nth < self.racks[rack]).map(move |rack| first(rack) + nth);
        (0..most).flat_map(nth_of_each).collect()
    }

    /// Returns the racks of members in this order.
    fn racks_of(&self, members: &[u32]) -> Result<rdmc::Racks> {
        let racks: Vec<u32> =
            (0..).zip(&self.racks).flat_map(|(rack, &size)| std::iter::repeat_n(rack, size as usize)).collect();
        Ok(rdmc::Racks::from_assignment(&members.iter().map(|&host| racks[host as usize]).collect::<Vec<_>>())?)
    }
}
