//! The processes of the two ends.

use std::cell::Cell;
use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::FlowFabric;
use super::ends::{self, EndSetup, FlowAnswer, FlowOrder, FlowOrders};
use super::flow::Flow;
use super::server::{self, Started};
use crate::error::BenchError;
use crate::local::{cpu_ns, end_with_stdin, tell};

/// What the process of a source must know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SourceSetup {
    pub(crate) flow: Flow,
    pub(crate) fabric: FlowFabric,
    pub(crate) device: Option<String>,
    /// Where it asks for a target.
    pub(crate) server: String,
}

/// Is the source of a flow until standard input ends. The setup is that of its [role](crate::ProcessRole).
///
/// # Cancel safety
/// The flow ends.
///
/// # Errors
/// None: standard output tells them.
pub async fn run_flow_source(setup: &str) -> Result<(), BenchError> {
    if let Err(error) = source(setup).await {
        let error = BenchError::from(error);
        let by_request = matches!(error, BenchError::Request { .. });
        tell(&FlowAnswer::Failed { message: without_kind(&error), by_request });
    }
    Ok(())
}

async fn source(setup: &str) -> anyhow::Result<()> {
    let SourceSetup { flow, fabric, device, server } = serde_json::from_str(setup)?;
    let orders = read_orders();
    ends::pin(flow.core)?;
    let target = server::ask(&server, &flow, fabric).await?;
    let setup = EndSetup { flow, fabric, device, here: target.here };
    let fabric = setup.open()?;
    ends::post(fabric, &setup.flow, &target.address.to_string(), cpu_ns, orders, tell).await
}

/// Returns what an error says. Who is told adds the kind again.
fn without_kind(error: &BenchError) -> String {
    let text = error.to_string();
    text.strip_prefix("usage: ").unwrap_or(&text).to_owned()
}

/// Reads orders in a thread. The process ends when no order can come any more.
fn read_orders() -> FlowOrders {
    let (tell, orders) = mpsc::unbounded_channel();
    let stops = Arc::new(AtomicBool::new(false));
    let seen = stops.clone();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(order) = serde_json::from_str(&line) else { break };
            if order == FlowOrder::Stop {
                seen.store(true, Ordering::Relaxed);
            }
            // Fails only if the source has failed, which ends the process.
            let _ = tell.send(order);
        }
        std::process::exit(0);
    });
    FlowOrders { orders, stops }
}

/// Is the target of a flow until its source goes, or standard input ends. The setup is that of its
/// [role](crate::ProcessRole).
///
/// # Cancel safety
/// The flow ends.
///
/// # Errors
/// What went wrong after the source has come. Before that, standard output tells it.
pub async fn run_flow_target(setup: &str) -> Result<(), BenchError> {
    end_with_stdin();
    let is_listening = Cell::new(false);
    let serving = async {
        let setup: EndSetup = serde_json::from_str(setup)?;
        ends::pin(setup.flow.far_core)?;
        let place = std::net::SocketAddr::new(setup.here, 0).to_string();
        let listening = |address: &str| {
            is_listening.set(true);
            let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(0);
            tell(&Started::Listening { port });
        };
        ends::serve(setup.open()?, &setup.flow, &place, cpu_ns, listening).await
    };
    match serving.await {
        Err(error) if !is_listening.get() => {
            tell(&Started::Refused { reason: without_kind(&BenchError::from(error)) });
            Ok(())
        }
        served => Ok(served.context("the target of a flow")?),
    }
}
