//! Connections that are opened before the node at this end starts, so that it need not wait for that.

use std::collections::BTreeMap;
use std::sync::Arc;

use rdmc_fabric::{ControlStream, Environment};
use tokio::sync::oneshot;

use super::HANDSHAKE_LIMIT;
use crate::id::NodeId;

/// The connections that a node opens, each without a greeting.
pub(crate) type ConnectionsAhead = BTreeMap<NodeId, ConnectionAhead>;
/// A connection on the way to being open; an error if it could not be opened.
pub(crate) type ConnectionAhead = oneshot::Receiver<Box<dyn ControlStream>>;

/// Begins to open connections from node `me` to the members with higher numbers. They are closed if nobody takes them.
pub(crate) fn open_ahead<'a>(
    environment: &Arc<dyn Environment>,
    me: NodeId,
    members: impl Iterator<Item = (NodeId, &'a String)>,
) -> ConnectionsAhead {
    let open = |(node, address): (NodeId, &String)| {
        let (opened, opening) = oneshot::channel();
        let (connecting, address) = (environment.clone(), address.clone());
        environment.spawn(Box::pin(async move {
            // Whoever needs the connection tries again, and tells why it fails.
            if let Ok(Ok(stream)) = connecting.timeout(HANDSHAKE_LIMIT, connecting.connect(&address)).await {
                let _ = opened.send(stream);
            }
        }));
        (node, opening)
    };
    members.filter(|(node, _)| *node > me).map(open).collect()
}
