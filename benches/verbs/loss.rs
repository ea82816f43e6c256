//! Counts the transfers that complete over a network that loses packets.
//!
//! The network is the lab's, and every interface of its nodes loses packets that it sends. A packet passes two of them
//! on its way.

use std::process::Command;

use anyhow::{Result, bail, ensure};
use bytes::Bytes;
use clap::Args;
use rdmc::Algorithm;
use rdmc_benches::{median, object};

use super::{Cluster, Member, Reliability};

/// The transfers to run: some of every fabric with every loss and every block size.
#[derive(Args)]
pub(crate) struct Loss {
    /// Probabilities of a loss at an interface, in per cent.
    #[arg(long, value_delimiter = ',', default_value = "0.1,1")]
    percent: Vec<f64>,
    /// Block sizes in KiB.
    #[arg(long, value_delimiter = ',', default_value = "256,1024")]
    block_kib: Vec<u32>,
    /// Fabrics: verbs, and after it tcp, which takes the devices away.
    #[arg(long, value_delimiter = ',', default_value = "verbs,tcp")]
    fabrics: Vec<String>,
    /// Members, the sender included.
    #[arg(long, default_value_t = 4)]
    nodes: usize,
    /// Size of the object in MiB.
    #[arg(long, default_value_t = 16)]
    mib: usize,
    /// Transfers of each kind.
    #[arg(long, default_value_t = 12)]
    transfers: usize,
    /// MTU of the interfaces; devices fit their packets into it, TCP fills it.
    #[arg(long, default_value_t = 4200)]
    mtu: u32,
    #[command(flatten)]
    reliability: Reliability,
}

impl Loss {
    /// Runs the transfers, and prints a row for each kind.
    pub(crate) fn measure(&self, runtime: &tokio::runtime::Runtime) -> Result<()> {
        let found = std::env::var("RDMC_LAB_NODES").unwrap_or_default().parse().unwrap_or(0);
        let lab = (2..=found).contains(&self.nodes);
        ensure!(lab, "this is no lab with {} nodes; run `cargo xtask lab bench loss`", self.nodes);
        println!("{} nodes, {} MiB, {} transfers of each kind", self.nodes, self.mib, self.transfers);
        println!("fabric  loss %  block KiB  completed  failed  median s  longest s");
        let object = object(self.mib);
        for fabric in &self.fabrics {
            let members = self.members(fabric)?;
            for &percent in &self.percent {
                self.lose(percent)?;
                for &kib in &self.block_kib {
                    let mut seconds = self.transfer(runtime, &members, &object, kib);
                    seconds.sort_unstable_by(f64::total_cmp);
                    let (completed, failed) = (seconds.len(), self.transfers - seconds.len());
                    print!("{fabric:6}  {percent:6}  {kib:9}  {completed:9}  {failed:6}");
                    match seconds.last() {
                        Some(longest) => println!("  {:8.2}  {longest:9.2}", median(&seconds)),
                        None => println!("  {:>8}  {:>9}", "-", "-"),
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs transfers, each among new processes, and returns the seconds of those that complete.
    fn transfer(&self, runtime: &tokio::runtime::Runtime, members: &[Member], object: &Bytes, kib: u32) -> Vec<f64> {
        let transfer = |_| {
            let mut cluster = Cluster::start_among(runtime, members, "event", false, self.reliability)?;
            cluster.round(runtime, object, 1, kib << 10, &Algorithm::BinomialPipeline)
        };
        let failed = |error: &anyhow::Error| eprintln!("a transfer failed: {error:#}");
        let completed = (0..self.transfers).map(transfer).filter_map(|ended| ended.inspect_err(failed).ok());
        completed.map(|(_, figure)| figure.seconds).collect()
    }

    /// Prepares the network for a fabric, and returns the members.
    ///
    /// A TCP connection between two addresses of one host does not use the network. So its receivers move into network
    /// namespaces, where devices do not work. The kernel no longer hands several packets to the network as one, so that
    /// a loss is that of one packet.
    fn members(&self, fabric: &str) -> Result<Vec<Member>> {
        let tcp = match fabric {
            "verbs" => false,
            "tcp" => true,
            _ => bail!("{fabric} is no fabric to compare: verbs or tcp"),
        };
        let packets = format!("mtu {} gso_max_segs 1", self.mtu);
        let member = |node: usize| {
            let (name, interface) = (format!("node{node}"), format!("veth{node}"));
            if !tcp || node == 1 {
                shell(&format!("ip link set {interface} {packets}"))?;
            }
            if !tcp {
                return Ok(Member::of_device(&format!("rxe{node}")));
            }
            if node > 1 {
                shell(&format!(
                    "ip netns add {name}; ip link set {interface} netns {name}
                     ip -n {name} addr add 10.77.0.{node}/24 dev {interface}
                     ip -n {name} link set lo up; ip -n {name} link set {interface} {packets} up"
                ))?;
            }
            let namespace = (node > 1).then_some(name);
            Ok(Member { device: "tcp".to_owned(), listen: format!("10.77.0.{node}:0"), namespace })
        };
        (1..=self.nodes).map(member).collect()
    }

    /// Makes the interfaces of all nodes lose packets.
    fn lose(&self, percent: f64) -> Result<()> {
        (1..=self.nodes).try_for_each(|node| {
            shell(&format!(
                "lossy='root netem loss {percent}%'
                 tc qdisc replace dev port{node} $lossy
                 if [ -e /sys/class/net/veth{node} ]; then tc qdisc replace dev veth{node} $lossy
                 else tc -n node{node} qdisc replace dev veth{node} $lossy; fi"
            ))
        })
    }
}

/// Runs commands of the lab, all of which must succeed.
fn shell(script: &str) -> Result<()> {
    let status = Command::new("sh").args(["-ec", script]).status()?;
    ensure!(status.success(), "{status}: {script}");
    Ok(())
}
