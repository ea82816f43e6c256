//! The end of a gateway that takes connections of programs.

use std::sync::Arc;
use std::time::Duration;

use rdmc::Fabrics;

use super::client::{Caller, Client, RefusedClient};
use super::flow::{Flow, FlowState, Over};
use super::hub::Hub;
use super::note::{Piece, Violation};
use super::{GREETING, Gateway, GatewayConfig, carry};
use crate::session::{OpenError, SessionConfig, SessionError, SessionHandle, connect};

/// The end of a gateway that takes connections of programs, or flows of another gateway, and carries them to its
/// [`Exit`](super::Exit).
///
/// If it is dropped, all its flows are reset.
#[derive(Debug)]
pub struct Entrance(pub(super) Gateway);

impl Entrance {
    /// Opens a session with the exit whose [listener](crate::SessionListener) is at `address` (`host:port`).
    ///
    /// # Cancel safety
    /// If the future is dropped, there is no session.
    ///
    /// # Errors
    /// See [`OpenError`]. It is [`Refused`](OpenError::Refused), too, if the other end is no gateway.
    pub async fn connect(
        fabrics: impl Into<Fabrics>,
        address: &str,
        session: SessionConfig,
        config: GatewayConfig,
    ) -> Result<Self, OpenError> {
        let session = connect(fabrics, address, session, GREETING.to_vec()).await?;
        if session.handle.metadata() != GREETING {
            session.handle.abort("this end is a gateway");
            return Err(OpenError::Refused { address: address.to_owned(), reason: "it is no gateway".to_owned() });
        }
        let opened = |_: &Arc<Hub>, _, _, _, _: &_| Err(Violation("an exit opens no flows"));
        Ok(Self(Gateway::new(session, &config, opened)))
    }

    /// Carries a client. It is announced at once; the bytes of a program that waits for no answer follow at once, too.
    ///
    /// # Errors
    /// There are too many flows, or the entrance is ending, or its session has failed. The program does not know yet.
    pub fn carry(&self, client: Client) -> Result<(), Box<RefusedClient>> {
        let flow = match self.0.hub.open(client.target().clone(), client.passed()) {
            Ok(flow) => flow,
            Err(reason) => return Err(Box::new(client.refused(reason))),
        };
        tracing::debug!(flow = flow.number, target = %client.target(), "flow opened");
        let (socket, caller) = client.into_parts();
        let hub = self.0.hub.clone();
        if flow.connect(socket).is_err() {
            hub.remove(flow.number, Some(Piece::Reset { flow: flow.number }));
            return Ok(());
        }
        self.0.scope.spawn(async move {
            if !caller.waits() || answer(&hub, &flow, caller).await {
                flow.begin();
                carry(&hub, &flow).await;
            }
        });
        Ok(())
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

    /// Takes no more connections, lets flows end by themselves for at most `drain`, resets the rest, and ends the
    /// session.
    ///
    /// # Cancel safety
    /// If the future is dropped, all flows are reset.
    pub async fn finish(self, drain: Duration) {
        self.0.finish(drain).await;
    }
}

/// Waits for the exit's answer, and passes it on to the caller; tells whether the flow goes on.
async fn answer(hub: &Hub, flow: &Arc<Flow>, caller: Caller) -> bool {
    let answered = tokio::select! {
        biased;
        answered = flow.answered() => answered,
        _ = flow.socket().broken() => {
            flow.change(|state| state.end(Over::Broken));
            hub.remove(flow.number, Some(Piece::Reset { flow: flow.number }));
            return false;
        }
    };
    let is_refused = answered.is_err();
    if is_refused {
        hub.remove(flow.number, None);
    }
    let told = caller.tell(flow.socket(), answered).await;
    match (is_refused, told) {
        (false, Ok(())) => return true,
        (false, Err(_)) => hub.remove(flow.number, Some(Piece::Reset { flow: flow.number })),
        // The caller knows: there is nothing to reset.
        (true, Ok(())) => flow.change(FlowState::complete),
        (true, Err(_)) => {}
    }
    false
}
