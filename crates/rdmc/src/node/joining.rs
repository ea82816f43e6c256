//! How a started node joins the others: it waits until all are connected, and ends its groups if some are not.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, Fuse, FutureExt};
use futures::stream::StreamExt;
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
/// It does not keep the node alive. If it fails, the node is of no more use: its groups have failed, with this node as
/// the cause, and the other nodes know why.
///
/// # Cancel safety
/// The node no longer waits for the missing nodes. Nodes that are not connected yet may report that it has gone. So
/// shut it down.
///
/// # Errors
/// [`StartError::Unreachable`] names the nodes that did not connect in time; [`StartError::GaveUp`] names one that has
/// accepted the invitation and ended since; [`StartError::ShutDown`] says that this node has ended.
#[must_use = "a node that some others do not reach is noticed only where this is awaited"]
pub struct Joining {
    mesh: Mesh,
    joining: Fuse<BoxFuture<'static, Result<(), StartError>>>,
}

impl Joining {
    pub(super) fn new(
        node: &Arc<NodeResources>,
        gone: oneshot::Receiver<Infallible>,
        limit: Duration,
        invitation: InvitationStreams,
    ) -> Self {
        let (environment, mesh, fabric) = (node.environment.clone(), node.mesh.clone(), node.fabric.clone());
        let (node, node_mesh) = (Arc::downgrade(node), mesh.clone());
        let joining = async move {
            let connected = futures::select_biased! {
                () = std::pin::pin!(mesh.left().fuse()) => Err(StartError::ShutDown),
                _ = gone.fuse() => Err(StartError::ShutDown),
                connected = std::pin::pin!(connected(&*environment, &mesh, limit, invitation).fuse()) => connected,
            };
            match (&connected, node.upgrade()) {
                (Ok(()), _) => {
                    tracing::info!(node = %mesh.me(), fabric = fabric.capabilities().name, "node started");
                }
                (Err(StartError::ShutDown), _) | (_, None) => {}
                (Err(_), Some(node)) => give_up(&node).await,
            }
            connected
        };
        Self { mesh: node_mesh, joining: joining.boxed().fuse() }
    }

    /// Waits until the node cannot join the others, and returns why; for ever if it does join them.
    ///
    /// # Cancel safety
    /// It may be called again.
    pub async fn failed(&mut self) -> StartError {
        match (&mut *self).await {
            Ok(()) => std::future::pending().await,
            Err(error) => error,
        }
    }

    /// Returns the error that names the nodes that were never connected, if there are any: they may be why a group has
    /// failed, before the time to connect is over.
    pub fn unreachable(&self) -> Option<StartError> {
        let missing = self.mesh.never_met();
        (!missing.is_empty()).then(|| StartError::Unreachable { missing, problem: self.mesh.problem() })
    }
}

impl Future for Joining {
    type Output = Result<(), StartError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.joining.poll_unpin(cx)
    }
}

impl fmt::Debug for Joining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Joining").finish_non_exhaustive()
    }
}

/// Ends the groups of a node that does not reach some others, and leaves: nodes that reach all others may wait for it
/// in a group already.
async fn give_up(node: &NodeResources) {
    let cause = node.mesh.isolation();
    let groups = node.groups.close();
    groups.iter().for_each(|group| group.declare(cause.clone()));
    node.mesh.leave_unjoined(cause).await;
    groups.iter().for_each(|group| group.depart());
    node.scope.end();
}

/// Connections of an invitation, with the nodes at their other ends.
pub(crate) type InvitationStreams = Vec<(NodeId, Box<dyn ControlStream>)>;

/// Waits until all nodes are connected. Holds the connections of the invitation until then, unless descriptors lack.
///
/// # Errors
/// Some nodes are missing after `limit`, or a node gives up before it is connected.
async fn connected(
    environment: &dyn Environment,
    mesh: &Mesh,
    limit: Duration,
    mut invitation: InvitationStreams,
) -> Result<(), StartError> {
    let watched = async {
        let gave_up = {
            let watch = invitation.iter_mut().map(|(node, stream)| gives_up(environment, mesh, *node, stream).boxed());
            let mut gave_up = futures::stream::FuturesUnordered::from_iter(watch);
            let mut lacking = std::pin::pin!(mesh.out_of_descriptors().fuse());
            futures::select_biased! {
                () = lacking => None,
                gave_up = gave_up.select_next_some() => Some(gave_up),
            }
        };
        if gave_up.is_none() {
            // The others are not to take the end of the connection for that of this node.
            let goodbye = wire::encode(&Frame::Goodbye);
            for (_, stream) in &mut invitation {
                let _ = stream.write_all(&goodbye).await;
            }
            invitation.clear();
            std::future::pending::<()>().await;
        }
        gave_up
    };
    futures::select_biased! {
        connected = std::pin::pin!(environment.timeout(limit, mesh.complete()).fuse()) => connected.map_err(|_| {
            StartError::Unreachable { missing: mesh.missing(), problem: mesh.problem() }
        }),
        gave_up = std::pin::pin!(watched.fuse()) => match gave_up {
            Some(node) => Err(StartError::GaveUp { node }),
            None => unreachable!("it waits for ever"),
        },
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
