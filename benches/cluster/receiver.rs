//! Runs a receiver's process: it executes the commands on its standard input, one a line.

use std::io::Read;
use std::net::TcpListener;

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use rdmc::{Listener, Node};
use rdmc_benches::{monotonic, processor_time, report};
use tokio::runtime::Runtime;

use crate::bare::Mesh;
use crate::idle::{self, Held};
use crate::memory;
use crate::remote::{Completion, FabricKind};
use crate::rounds::Plan;

/// Serves rounds until standard input ends.
pub(crate) fn run(listen: &str, fabric: FabricKind, completion: Option<Completion>) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = runtime.block_on(Listener::bind(fabric.open()?, listen))?;
    let plain = TcpListener::bind(listen)?;
    println!("{} {}", listener.local_address(), plain.local_addr()?);
    let (mut joined, mut bare) = (None, None);
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        match (&words[..], &mut joined) {
            (["join", expected], none @ None) => {
                let memory = vec![1; expected.parse()?];
                let node = runtime.block_on(async {
                    let builder = listener.next_invitation().await.accept().await?;
                    anyhow::Ok(Completion::set(completion, builder).start().await?)
                })?;
                *none = Some(Joined { node, memory, held: Vec::new() });
            }
            (["plain"], Some(joined)) => joined.plain_round(&plain)?,
            (["rdmc", id, block_size, plan @ ..], Some(joined)) => {
                joined.rdmc_round(&runtime, (id.parse()?, block_size.parse()?), &Plan::from_words(plan)?)?;
            }
            (["hold", groups], Some(joined)) => {
                joined.held = runtime.block_on(idle::hold(&joined.node, groups.parse()?))?;
            }
            (["rest", settle, seconds], Some(_)) => {
                let used = runtime.block_on(idle::rest(settle.parse()?, seconds.parse()?));
                println!("{}", used.as_secs_f64());
            }
            (["bare", place, settle, seconds, all @ ..], Some(_)) => {
                let all = all.iter().map(|address| address.parse()).collect::<Result<Vec<_>, _>>()?;
                // It stays until all processes have finished their count.
                let mesh = bare.insert(Mesh::join(&plain, &all, place.parse()?)?);
                println!("{}", mesh.rest(settle.parse()?, seconds.parse()?)?.as_secs_f64());
            }
            (["receive", block_size], Some(joined)) => {
                let received = memory::receive(&joined.node, block_size.parse()?);
                println!("{}", runtime.block_on(received)?);
            }
            _ => bail!("unknown command {line:?}"),
        }
    }
    Ok(())
}

struct Joined {
    node: Node,
    /// Destination of plain streams.
    memory: Vec<u8>,
    held: Vec<Held>,
}

impl Joined {
    fn plain_round(&mut self, listener: &TcpListener) -> Result<()> {
        let (mut stream, _) = listener.accept()?;
        println!("ready");
        let used = processor_time();
        stream.read_exact(&mut self.memory)?;
        report(monotonic(), processor_time() - used);
        Ok(())
    }

    fn rdmc_round(&self, runtime: &Runtime, (id, block_size): (u64, u32), plan: &Plan) -> Result<()> {
        let (at, used) = runtime.block_on(async {
            let mut receiver = self.node.join_group(plan.spec(id, block_size)).await?;
            receiver.next().await.context("the first message")??;
            let used = processor_time();
            let message = receiver.next().await.context("the object")??;
            let at = monotonic();
            let used = processor_time() - used;
            ensure!(message.len() == self.memory.len(), "the object has another size");
            drop(message);
            receiver.close().await?;
            anyhow::Ok((at, used))
        })?;
        report(at, used);
        Ok(())
    }
}
