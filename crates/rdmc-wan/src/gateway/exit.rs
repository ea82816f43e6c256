//! The end of a gateway that connects to targets.

use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::{Environment, TokioEnvironment};

use super::flow::Flow;
use super::hub::Hub;
use super::note::{Piece, RefusedReason};
use super::target::{AllowList, Target};
use super::{GREETING, Gateway, GatewayConfig, carry};
use crate::session::{OpenError, SessionError, SessionHandle, SessionRequest};

/// The end of a gateway that connects to the targets of flows, as far as its list allows them.
///
/// If it is dropped, all its flows are reset.
#[derive(Debug)]
pub struct Exit(pub(super) Gateway);

impl Exit {
    /// Accepts the session of an [`Entrance`](super::Entrance), whose flows may lead where `allow` says.
    ///
    /// # Cancel safety
    /// If the future is dropped, there is no session.
    ///
    /// # Errors
    /// See [`OpenError`]. The request is refused if it does not come from an entrance.
    pub async fn accept(request: SessionRequest, allow: AllowList, config: GatewayConfig) -> Result<Self, OpenError> {
        if request.metadata() != GREETING {
            let address = request.from().map_or_else(|| "the other end".to_owned(), |from| from.to_string());
            request.refuse("this is the exit of a gateway, which takes flows only").await;
            return Err(OpenError::Refused { address, reason: "it is no entrance of a gateway".to_owned() });
        }
        let session = request.accept(GREETING.to_vec()).await?;
        let (allow, within) = (Arc::new(allow), config.connect_within);
        let opened = move |hub: &Arc<Hub>, number, target, spawner: &rdmc_fabric::Spawner| {
            if let Some(flow) = hub.admit(number)? {
                let (hub, allow) = (hub.clone(), allow.clone());
                spawner.spawn(Box::pin(async move { serve(&hub, &flow, &target, &allow, within).await }));
            }
            Ok(())
        };
        Ok(Self(Gateway::new(session, &config, opened)))
    }

    /// Returns how many flows there are.
    pub fn flow_count(&self) -> usize {
        self.0.hub.flow_count()
    }

    /// Returns the session, for its counters.
    pub fn session(&self) -> &SessionHandle {
        &self.0.session
    }

    /// Waits until the session has ended. Flows whose last bytes have come are written to their end, for at most 60 s.
    /// The others are reset.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    ///
    /// # Errors
    /// How it failed.
    pub async fn ended(&self) -> Result<(), SessionError> {
        self.0.ended().await
    }

    /// Refuses new flows, lets the others end by themselves for at most `drain`, resets the rest, and ends the session.
    ///
    /// # Cancel safety
    /// If the future is dropped, all flows are reset.
    pub async fn finish(self, drain: Duration) {
        self.0.finish(drain).await;
    }
}

/// Connects a flow, and carries it.
async fn serve(hub: &Hub, flow: &Arc<Flow>, target: &Target, allow: &AllowList, within: Duration) {
    let environment = TokioEnvironment::new();
    let environment: &dyn Environment = &environment;
    let connected = tokio::select! {
        biased;
        // The program has given up.
        _ = flow.over() => return hub.remove(flow.number, None),
        connected = environment.timeout(within, allow.connect(target)) => connected,
    };
    let connected = connected.unwrap_or(Err(RefusedReason::TimedOut));
    let begun = connected.and_then(|socket| flow.connect(socket).map_err(|_| RefusedReason::Failed));
    match begun {
        Ok(()) => {
            tracing::debug!(flow = flow.number, %target, "flow connected");
            hub.push(Piece::Opened { flow: flow.number });
            flow.begin();
            carry(hub, flow).await;
        }
        Err(reason) => {
            tracing::info!(flow = flow.number, %target, %reason, "flow refused");
            hub.remove(flow.number, Some(Piece::Refused { flow: flow.number, reason }));
        }
    }
}
