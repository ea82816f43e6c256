//! The gateway: plain TCP flows share one session over a long path.
//!
//! An [`Entrance`] takes TCP connections near their programs, and an [`Exit`] connects to the targets (Kissel and
//! Swany, "Evaluating High Performance Data Transfer with RDMA-based Protocols in Wide-Area Networks", §III.B and
//! §IV.B). Between them, the bytes of all flows travel in slabs that they share. A program's own TCP connection is then
//! as short as the way to its gateway, and recovers there from losses within a short round trip.
//!
//! **Credit.** The receiving end of a flow grants bytes to the sending end, so a flow whose reader stalls holds up no
//! other flow.
//!
//! - A flow begins with a credit of 64 KiB in each direction.
//! - Its window then widens to [`window`](GatewayConfig::window). It doubles whenever an eighth of it has passed
//!   within a round trip, while at least half of the memory for windows is left. If another flow has a longer window, a
//!   sixteenth is enough, and a quarter of the memory. Otherwise the flow with the longest window would keep it.
//! - The memory for windows is [`memory_max`](GatewayConfig::memory_max) for all flows together. When it is used up,
//!   new flows keep their first credit. It comes back when flows end.
//!
//! So an end has at most the rings of its session, `memory_max`, and 64 KiB for each flow; a buffer may have twice the
//! bytes that it holds.
//!
//! **Turns.** Flows take turns of 64 KiB, and of 16 KiB where there are many, so flows that have bytes get equal shares
//! of the path. Bytes are read from a socket when they have a place in a slab, and wait in the socket until then.
//!
//! **Ends.** The end of a direction, and a reset, are carried to the other side. If the session fails, the sockets of
//! all its flows are reset.
//!
//! **Chains.** An exit can hand its flows to the entrance of another session ([`Route::Next`]). A pipe of 64 KiB in
//! each direction then stands in for the socket of a flow at both. So a reader that stalls holds back its flow through
//! the whole chain.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::{Environment, Scope, Spawner, TokioEnvironment};

use crate::session::{Session, SessionError, SessionHandle, SlabReceiver};

mod client;
mod entrance;
mod exit;
mod flow;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod hub;
mod note;
mod pipe;
mod slabs;
mod socket;
mod socks;
mod target;
mod transparent;

pub use client::{Client, RefusedClient};
pub use entrance::Entrance;
pub use exit::{Exit, RefusedFlow, Route};
pub use note::RefusedReason;
pub use socks::SocksError;
pub use target::{AllowList, AllowRule, ParseAllowRuleError, ParseTargetError, Target};
pub use transparent::{TransparentError, TransparentListenError, listen_transparent};

use flow::{Flow, Over};
use hub::Hub;
use note::{FlowNumber, Piece, Violation};

/// Settings of one end of a gateway.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GatewayConfig {
    /// Most flows at once; more are refused. Default 4096.
    pub flows_max: usize,
    /// The usual window of a flow in bytes: what may be on its way to this end, or wait here for the flow's reader.
    /// Default 1 MiB.
    pub window: u64,
    /// The memory for windows of all flows together, in bytes, beyond the first credit of each. Default 512 MiB, so
    /// that a lone flow can fill a ring of 256 MiB.
    pub memory_max: u64,
    /// How long an exit tries to connect to a target. Default 10 s. In a chain, only that of the last gateway applies.
    pub connect_within: Duration,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self { flows_max: 4096, window: 1 << 20, memory_max: 512 << 20, connect_within: Duration::from_secs(10) }
    }
}

/// What both ends of a gateway have: a session, and its flows.
struct Gateway {
    hub: Arc<Hub>,
    session: SessionHandle,
    scope: Scope,
}

impl Gateway {
    /// Lets flows into a session; `open` gets those that the other end opens.
    fn new(
        session: Session,
        config: &GatewayConfig,
        open: impl Fn(&Arc<Hub>, FlowNumber, Target, u8, &Spawner) -> Result<(), Violation> + Send + Sync + 'static,
    ) -> Self {
        let Session { sender, receiver, handle } = session;
        let environment: Arc<dyn Environment> = Arc::new(TokioEnvironment::new());
        let (hub, scope) = (Arc::new(Hub::new(config)), Scope::new(environment));
        let (sending, logged) = (hub.clone(), handle.clone());
        scope.spawn(async move {
            if let Err(error) = slabs::send(&sending, sender).await {
                tracing::debug!(session = ?logged, %error, "no more slabs leave");
                sending.stop();
            }
        });
        let (receiving, spawner, own) = (hub.clone(), scope.spawner(), handle.clone());
        scope.spawn(async move {
            let opened = |flow, target, passed| open(&receiving, flow, target, passed, &spawner);
            match receive(&receiving, receiver, &own, opened).await {
                Received::All => receiving.leave(),
                Received::Part => receiving.stop(),
            }
        });
        Self { hub, session: handle, scope }
    }

    /// Waits until the session has ended, and all flows whose bytes have come have written them.
    async fn ended(&self) -> Result<(), SessionError> {
        self.session.ended().await?;
        let environment: &dyn Environment = &TokioEnvironment::new();
        // A reader that takes nothing in this time is reset.
        let _ = environment.timeout(WRITTEN_LIMIT, self.hub.emptied()).await;
        Ok(())
    }

    /// Lets flows end by themselves for at most `drain`, then resets the rest, and ends the session.
    async fn finish(self, drain: Duration) {
        let environment = TokioEnvironment::new();
        let environment: &dyn Environment = &environment;
        self.hub.close();
        let ended = async {
            tokio::select! {
                () = self.hub.emptied() => {}
                _ = self.session.ended() => {}
            }
        };
        let _ = environment.timeout(drain, ended).await;
        self.hub.stop();
        if environment.timeout(GOODBYE_LIMIT, self.session.ended()).await.is_err() {
            self.session.abort("its gateway is ending");
        }
    }
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("session", &self.session).field("hub", &self.hub).finish_non_exhaustive()
    }
}

/// What came over a session.
enum Received {
    /// The other end has finished.
    All,
    /// The session has failed.
    Part,
}

/// Takes slabs apart until the last one.
async fn receive(
    hub: &Hub,
    mut receiver: SlabReceiver,
    session: &SessionHandle,
    mut open: impl FnMut(FlowNumber, Target, u8) -> Result<(), Violation>,
) -> Received {
    loop {
        let slab = match receiver.next().await {
            Ok(Some(slab)) => slab,
            Ok(None) => return Received::All,
            Err(error) => {
                // An end that has finished drops the session.
                if error != SessionError::Closed {
                    // The application learns of it by `ended`.
                    tracing::debug!(?session, %error, "the session of the gateway has failed");
                }
                return Received::Part;
            }
        };
        hub.memory.note_round_trip(session.stats().round_trip);
        if let Err(Violation(what)) = slabs::take_apart(hub, &slab, &mut open) {
            tracing::error!(?session, what, "the other end of the gateway broke the protocol");
            session.abort(what);
            return Received::Part;
        }
    }
}

/// Carries a connected flow until it is over, in both directions.
async fn carry(hub: &Hub, flow: &Arc<Flow>) {
    let carried = async { tokio::try_join!(read(hub, flow), write(hub, flow)).map(drop) };
    let over = tokio::select! {
        biased;
        over = flow.over() => over,
        carried = carried => match carried {
            Ok(()) => Over::Complete,
            Err(_) => Over::Broken,
        },
        error = flow.socket().broken() => {
            tracing::debug!(flow = flow.number, %error, "flow broken");
            Over::Broken
        }
    };
    flow.change(|state| state.end(over));
    hub.remove(flow.number, (over == Over::Broken).then_some(Piece::Reset { flow: flow.number }));
}

/// Brings the socket's bytes to slabs, until the direction has ended.
async fn read(hub: &Hub, flow: &Arc<Flow>) -> std::io::Result<()> {
    loop {
        flow.readable().await?;
        hub.ready(flow);
        if flow.turned().await {
            return Ok(());
        }
    }
}

/// Writes what the socket did not take at once, until the direction has ended.
async fn write(hub: &Hub, flow: &Arc<Flow>) -> std::io::Result<()> {
    while flow.writable().await? {
        if flow.write_kept() {
            hub.grant(flow.clone());
        }
    }
    flow.socket().shut()
}

/// What each end says when a session is opened, so that no other session is taken for that of a gateway.
const GREETING: &[u8] = b"rdmc gateway 2";
/// How long flows may take to write what has come, after their session has ended.
const WRITTEN_LIMIT: Duration = Duration::from_secs(60);
/// How long a session may take to end in good order.
const GOODBYE_LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
