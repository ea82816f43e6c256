//! The end of a gateway that connects flows to their targets, or to the next gateway.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rdmc_fabric::{Environment, Spawner, TokioEnvironment};
use tokio::sync::{mpsc, oneshot};

use super::client::Client;
use super::flow::Flow;
use super::hub::Hub;
use super::note::{Piece, RefusedReason};
use super::pipe::pipe;
use super::socket::Socket;
use super::target::{AllowList, Target};
use super::{GREETING, Gateway, GatewayConfig, carry};
use crate::session::{OpenError, SessionError, SessionHandle, SessionRequest};

/// Where the flows of an [`Exit`] lead.
///
/// # Examples
/// A gateway between, which hands the flows of one session to another session:
///
/// ```no_run
/// use rdmc_wan::gateway::{Entrance, Exit, GatewayConfig, Route};
///
/// # async fn pass_on(request: rdmc_wan::SessionRequest, onward: Entrance) -> Result<(), rdmc_wan::OpenError> {
/// let (clients, mut given) = tokio::sync::mpsc::channel(64);
/// let _exit = Exit::accept(request, Route::Next { allow: None, clients }, GatewayConfig::default()).await?;
/// while let Some(client) = given.recv().await {
///     if let Err(refused) = onward.carry(client) {
///         refused.refuse().await;
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Route {
    /// To their targets, as far as the list allows them.
    Targets(AllowList),
    /// To another gateway.
    Next {
        /// The flows that go on; all do if there is no list. Names are not resolved here, so that a rule for a network
        /// allows no name.
        allow: Option<AllowList>,
        /// Gets each flow as a client, for an [`Entrance`](super::Entrance) to the next gateway to carry. Flows wait
        /// while the channel is full, and are [refused](RefusedReason::Closing) if it is closed or drops a client.
        ///
        /// A flow that has passed eight gateways is refused as a [loop](RefusedReason::Loop).
        clients: mpsc::Sender<Client>,
    },
}

impl Route {
    /// Connects a flow that has passed so many gateways.
    async fn connect(&self, target: &Target, passed: u8, within: Duration) -> Result<Socket, Refusal> {
        match self {
            Self::Targets(allow) => {
                let environment = TokioEnvironment::new();
                let environment: &dyn Environment = &environment;
                let connected = environment.timeout(within, allow.connect(target)).await;
                Ok(Socket::of(connected.unwrap_or(Err(RefusedReason::TimedOut))?))
            }
            Self::Next { .. } if passed >= PASSED_MAX => Err(RefusedReason::Loop.into()),
            Self::Next { allow: Some(allow), .. } if !allow.allows(target) => Err(RefusedReason::NotAllowed.into()),
            Self::Next { clients, .. } => {
                let (near, far) = pipe();
                let (answer, answered) = oneshot::channel();
                let client = Client::of_flow(far, target.clone(), passed + 1, answer);
                clients.send(client).await.map_err(|_| RefusedReason::Closing)?;
                let answer = answered.await.map_err(|_| RefusedReason::Closing)?;
                answer.map_err(|reason| Refusal { reason, is_passed_on: true })?;
                Ok(Socket::Pipe(near))
            }
        }
    }
}

/// Why a flow is not connected.
#[derive(Debug)]
struct Refusal {
    reason: RefusedReason,
    /// Whether the next gateway has said so.
    is_passed_on: bool,
}

impl From<RefusedReason> for Refusal {
    fn from(reason: RefusedReason) -> Self {
        Self { reason, is_passed_on: false }
    }
}

/// A flow that an exit has refused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RefusedFlow {
    /// Where it should lead.
    pub target: Target,
    /// Why it is not connected.
    pub reason: RefusedReason,
}

/// The end of a gateway that connects flows to their targets, or to the next gateway.
///
/// If it is dropped, all its flows are reset.
#[derive(Debug)]
pub struct Exit {
    pub(super) gateway: Gateway,
    refused: tokio::sync::Mutex<mpsc::Receiver<RefusedFlow>>,
}

impl Exit {
    /// Accepts the session of an [`Entrance`](super::Entrance), whose flows lead where `route` says.
    ///
    /// # Cancel safety
    /// If the future is dropped, there is no session.
    ///
    /// # Errors
    /// See [`OpenError`]. The request is refused if it does not come from an entrance.
    pub async fn accept(request: SessionRequest, route: Route, config: GatewayConfig) -> Result<Self, OpenError> {
        if request.metadata() != GREETING {
            let address = request.from().map_or_else(|| "the other end".to_owned(), |from| from.to_string());
            request.refuse("this is the exit of a gateway, which takes flows only").await;
            return Err(OpenError::Handshake { address, source: io::Error::other("it is no entrance of a gateway") });
        }
        let session = request.accept(GREETING.to_vec()).await?;
        let (route, within) = (Arc::new(route), config.connect_within);
        let (tell, refused) = mpsc::channel(REFUSED_MAX);
        // The application may have no wish to hear of them.
        let note = move |target, reason| drop(tell.try_send(RefusedFlow { target, reason }));
        let opened = move |hub: &Arc<Hub>, number, target: Target, passed, spawner: &Spawner| {
            let flow = match hub.admit(number)? {
                Ok(flow) => flow,
                Err(reason) => {
                    note(target, reason);
                    return Ok(());
                }
            };
            let (hub, route, note) = (hub.clone(), route.clone(), note.clone());
            spawner.spawn(Box::pin(async move {
                let served = serve(&hub, &flow, &target, route.connect(&target, passed, within)).await;
                if let Err(Refusal { reason, is_passed_on: false }) = served {
                    note(target, reason);
                }
            }));
            Ok(())
        };
        Ok(Self { gateway: Gateway::new(session, &config, opened), refused: refused.into() })
    }

    /// Waits for the next flow that this exit refuses. Of those that come faster than they are taken, it keeps 64. A
    /// flow that the next gateway has refused is not among them: that gateway tells of it.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn next_refused(&self) -> RefusedFlow {
        match self.refused.lock().await.recv().await {
            Some(refused) => refused,
            // There will be no more flows.
            None => std::future::pending().await,
        }
    }

    /// Returns how many flows there are.
    pub fn flow_count(&self) -> usize {
        self.gateway.hub.flow_count()
    }

    /// Returns the session, for its counters.
    pub fn session(&self) -> &SessionHandle {
        &self.gateway.session
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
        self.gateway.ended().await
    }

    /// Refuses new flows, lets the others end by themselves for at most `drain`, resets the rest, and ends the session.
    ///
    /// # Cancel safety
    /// If the future is dropped, all flows are reset.
    pub async fn finish(self, drain: Duration) {
        self.gateway.finish(drain).await;
    }
}

/// Connects a flow, and carries it.
///
/// # Errors
/// It is refused. The other end hears of it.
async fn serve(
    hub: &Hub,
    flow: &Arc<Flow>,
    target: &Target,
    connecting: impl Future<Output = Result<Socket, Refusal>>,
) -> Result<(), Refusal> {
    let connected = tokio::select! {
        biased;
        // The program has given up.
        _ = flow.over() => {
            hub.remove(flow.number, None);
            return Ok(());
        }
        connected = connecting => connected,
    };
    let begun = connected.and_then(|socket| flow.connect(socket).map_err(|_| RefusedReason::Failed.into()));
    match begun {
        Ok(()) => {
            tracing::debug!(flow = flow.number, %target, "flow connected");
            hub.push(Piece::Opened { flow: flow.number });
            flow.begin();
            carry(hub, flow).await;
            Ok(())
        }
        Err(refusal) => {
            let reason = refusal.reason;
            tracing::info!(flow = flow.number, %target, %reason, "flow refused");
            hub.remove(flow.number, Some(Piece::Refused { flow: flow.number, reason }));
            Err(refusal)
        }
    }
}

/// Refused flows of which the application has not heard.
const REFUSED_MAX: usize = 64;
/// Most gateways that a flow passes between its entrance and its exit.
const PASSED_MAX: u8 = 8;
