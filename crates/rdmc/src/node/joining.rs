//! How a started node joins the others: it waits until all are connected, and goes on without those that are not.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{Fuse, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc_fabric::{ControlStream, Environment};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::oneshot;

use super::StartError;
use crate::id::NodeId;
use crate::mesh::Mesh;
use crate::resources::NodeResources;
use crate::wire::{self, Frame};

/// Waits until a node is connected to all others; made by [`NodeBuilder::start_joining`](super::NodeBuilder).
///
/// The node joins the others whether this is awaited or not. It waits for each until the [connect
/// limit](super::NodeBuilder::connect_limit) is over, or until the other has accepted the invitation and ended since.
/// Then it goes on without those that it has not reached. Its groups take them for
/// [unreachable](crate::FailureCause::Unreachable): they fail, and the others can
/// [recover](crate::GroupFailure::recover). Where two members do not reach each other, the group goes on without one of
/// them.
///
/// # Cancel safety
/// The node goes on.
///
/// # Errors
/// The first reason why a node is not waited for any longer. [`StartError::Unreachable`] names all that did not connect
/// in time; [`StartError::GaveUp`] names one that has accepted the invitation and ended since; [`StartError::ShutDown`]
/// says that this node has ended before.
pub struct Joining {
    joined: Fuse<oneshot::Receiver<Result<(), StartError>>>,
}

impl Future for Joining {
    type Output = Result<(), StartError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // The node has ended its tasks.
        self.joined.poll_unpin(cx).map(|joined| joined.unwrap_or(Err(StartError::ShutDown)))
    }
}

impl fmt::Debug for Joining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joining").finish_non_exhaustive()
    }
}

/// Begins to wait for the other nodes, in a task of the node.
pub(super) fn begin(node: &NodeResources, limit: Duration, invitation: InvitationStreams) -> Joining {
    let (environment, mesh, fabric) = (node.environment.clone(), node.mesh.clone(), node.fabric.capabilities().name);
    let (told, joined) = oneshot::channel();
    node.scope.spawn(async move {
        let mut first = FirstOutcome(Some(told));
        wait_for_all(environment, &mesh, limit, invitation, &mut first).await;
        if first.tell(Ok(())) {
            tracing::info!(node = %mesh.me(), fabric, "node started");
        }
    });
    Joining { joined: joined.fuse() }
}

/// Tells the first outcome.
struct FirstOutcome(Option<oneshot::Sender<Result<(), StartError>>>);

impl FirstOutcome {
    /// Tells it, if it is the first; returns whether it is.
    fn tell(&mut self, outcome: Result<(), StartError>) -> bool {
        let Some(first) = self.0.take() else { return false };
        // Nobody may wait for it.
        let _ = first.send(outcome);
        true
    }
}

/// Ends a node that does not reach some others, and that nobody uses yet. Those that it reaches may wait for it in a
/// group already.
pub(super) async fn leave_unjoined(node: &NodeResources) {
    node.mesh.leave_unjoined(node.mesh.isolation()).await;
    node.scope.end();
}

/// Connections of an invitation, with the nodes at their other ends.
pub(crate) type InvitationStreams = Vec<(NodeId, Box<dyn ControlStream>)>;

/// Waits until all nodes are connected, or this one goes on without them. Holds the connections of the invitation until
/// then, unless descriptors lack.
async fn wait_for_all(
    environment: Arc<dyn Environment>,
    mesh: &Mesh,
    limit: Duration,
    mut invitation: InvitationStreams,
    first: &mut FirstOutcome,
) {
    let environment = &*environment;
    let mut joined = std::pin::pin!(environment.timeout(limit, mesh.complete()).fuse());
    let early = {
        let watch = invitation.iter_mut().map(|(node, stream)| gives_up(environment, mesh, *node, stream).boxed());
        let mut gave_up = FuturesUnordered::from_iter(watch);
        let mut lacking = std::pin::pin!(mesh.out_of_descriptors().fuse());
        loop {
            futures::select_biased! {
                joined = joined => break Some(joined),
                () = lacking => break None,
                node = gave_up.select_next_some() => {
                    first.tell(Err(StartError::GaveUp { node }));
                    mesh.go_on_without(&[node]).await;
                }
            }
        }
    };
    let joined = match early {
        Some(joined) => joined,
        None => {
            // The others are not to take the end of the connection for that of this node.
            let goodbye = wire::encode(&Frame::Goodbye);
            for (_, mut stream) in invitation {
                let _ = stream.write_all(&goodbye).await;
            }
            joined.await
        }
    };
    if joined.is_err() {
        first.tell(Err(StartError::Unreachable { missing: mesh.missing(), problem: mesh.problem() }));
        mesh.go_on_without(&mesh.never_met()).await;
    }
}

/// Waits until a node closes the connection of the invitation although it is not connected; else for ever.
async fn gives_up(
    environment: &dyn Environment,
    mesh: &Mesh,
    node: NodeId,
    stream: &mut Box<dyn ControlStream>,
) -> NodeId {
    // A node that says goodbye goes on. One that is connected with all closes the connection, which may be noticed
    // before its own connection is.
    let ended = !matches!(stream.read(&mut [0; 1]).await, Ok(1..));
    if ended && environment.timeout(NOTICED_AFTER, mesh.connection_to(node)).await.is_err() {
        return node;
    }
    std::future::pending().await
}

/// How long a connection that was made may remain unnoticed.
const NOTICED_AFTER: Duration = Duration::from_secs(1);
