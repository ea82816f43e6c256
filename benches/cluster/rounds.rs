//! Runs rounds: the same object, sent in several ways in turn.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use rdmc::{Algorithm, GroupSpec, Hybrid, NodeId, Racks, Spine};
use rdmc_benches::{Figure, median, monotonic, object, processor_time};

use crate::Work;
use crate::remote::{Cluster, FabricKind, Host};

/// A way of sending an object.
#[derive(Clone, Debug)]
pub(crate) enum Way {
    /// A group.
    Rdmc(Plan),
    /// Plain streams.
    Plain,
}

/// The parameters on which the members of a group must agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Whether blocks are checked.
    pub(crate) checks: bool,
    pub(crate) algorithm: Algorithm,
    /// The nodes in the order of their ranks.
    pub(crate) members: Vec<NodeId>,
}

impl Plan {
    pub(crate) fn spec(&self, id: u64, block_size: u32) -> GroupSpec {
        let spec = GroupSpec::new(id, self.members.iter().copied());
        spec.algorithm(self.algorithm.clone()).block_size(block_size).check_blocks(self.checks)
    }

    /// Returns the plan in the form that receivers [read](Self::from_words).
    fn to_words(&self) -> String {
        let members: Vec<String> = self.members.iter().map(|node| node.0.to_string()).collect();
        let racks = match &self.algorithm {
            Algorithm::Hybrid(hybrid) => {
                let rack = |rank| hybrid.racks.rack_of(rdmc::Rank(rank)).expect("every rank has a rack").to_string();
                (0..hybrid.racks.members()).map(rack).collect::<Vec<_>>().join(",")
            }
            _ => "-".to_owned(),
        };
        format!("{} {} {racks} {}", self.checks, self.algorithm, members.join(","))
    }

    pub(crate) fn from_words(words: &[&str]) -> Result<Self> {
        let [checks, algorithm, racks, members] = words else { bail!("four words, not {words:?}") };
        let numbers = |list: &str| list.split(',').map(str::parse).collect::<Result<Vec<u32>, _>>();
        let algorithm = match Spine::in_name(algorithm) {
            Some(spine) => Hybrid::new(Racks::from_assignment(&numbers(racks)?)?, spine).into(),
            None => algorithm.parse()?,
        };
        let members = numbers(members)?.into_iter().map(NodeId).collect();
        Ok(Self { checks: checks.parse()?, algorithm, members })
    }
}

/// Measures all ways in turn, and returns the medians.
pub(crate) fn measure(hosts: Vec<Host>, work: &Work, ways: &[Way]) -> Result<Vec<Figure>> {
    let object = object(work.mib);
    let mut cluster = Cluster::start(&hosts, FabricKind::Tcp, None, object.len())?;
    let mut rounds = vec![Vec::new(); ways.len()];
    let mut id = 0;
    for round in 0..=work.rounds {
        for (way, rounds) in ways.iter().zip(&mut rounds) {
            let figure = match way {
                Way::Rdmc(plan) => {
                    id += 1;
                    rdmc_round(&mut cluster, &object, plan, (id, work.block_kib * 1024))?
                }
                Way::Plain => plain_round(&mut cluster, &object)?,
            };
            rounds.extend((round > 0).then_some(figure));
        }
    }
    let of = |rounds: &[Figure], part: fn(&Figure) -> f64| median(&rounds.iter().map(part).collect::<Vec<_>>());
    let medians = rounds.iter().map(|rounds| Figure {
        seconds: of(rounds, |figure| figure.seconds),
        processor_seconds: of(rounds, |figure| figure.processor_seconds),
    });
    Ok(medians.collect())
}

fn rdmc_round(cluster: &mut Cluster, object: &Bytes, plan: &Plan, (id, block_size): (u64, u32)) -> Result<Figure> {
    cluster.tell(&format!("rdmc {id} {block_size} {}", plan.to_words()))?;
    let (started, used) = cluster.runtime.block_on(async {
        let sender = cluster.node.create_group(plan.spec(id, block_size)).await?;
        // After an empty message all members have joined.
        sender.send(Bytes::new()).await?;
        tokio::time::sleep(Duration::from_millis(100)).await;
        let (started, used) = (monotonic(), processor_time());
        sender.send(object.clone()).await?;
        sender.close().await?;
        anyhow::Ok((started, processor_time() - used))
    })?;
    Figure::of_round(cluster.remotes.iter().map(|remote| &remote.process), started, used)
}

fn plain_round(cluster: &mut Cluster, object: &Bytes) -> Result<Figure> {
    cluster.tell("plain")?;
    let streams = cluster.remotes.iter().map(|remote| TcpStream::connect(&remote.plain));
    let mut streams = streams.collect::<Result<Vec<_>, _>>()?;
    for remote in &cluster.remotes {
        ensure!(remote.process.answer()? == "ready", "a receiver is out of step");
    }
    std::thread::sleep(Duration::from_millis(100));
    let (started, used) = (monotonic(), processor_time());
    std::thread::scope(|scope| {
        let writers: Vec<_> = streams.iter_mut().map(|stream| scope.spawn(|| stream.write_all(object))).collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("a writer does not panic"))
    })
    .context("a plain stream")?;
    let used = processor_time() - used;
    Figure::of_round(cluster.remotes.iter().map(|remote| &remote.process), started, used)
}
