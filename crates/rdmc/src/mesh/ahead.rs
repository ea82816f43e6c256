//! Connections that are opened before the node at this end starts, so that it need not wait for that.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::join_all;
use rdmc_fabric::{ControlStream, Environment};
use tokio::sync::oneshot;

use super::HANDSHAKE_LIMIT;
use crate::id::NodeId;

/// The connections that a node opens, each without a greeting.
pub(crate) type ConnectionsAhead = BTreeMap<NodeId, ConnectionAhead>;
/// A connection on the way to being open; an error if it could not be opened.
pub(crate) type ConnectionAhead = oneshot::Receiver<OpenAhead>;

/// A connection that is open.
pub(crate) struct OpenAhead {
    pub(crate) stream: Box<dyn ControlStream>,
    /// The round trip to the peer, as far as it is known.
    pub(crate) round_trip: Duration,
}

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
            let began = connecting.now();
            // If it fails, the mesh tries again when it needs the connection, and tells why that fails.
            if let Ok(Ok(stream)) = connecting.timeout(HANDSHAKE_LIMIT, connecting.connect(&address)).await {
                let round_trip = stream.round_trip().unwrap_or_else(|| connecting.now().since(began));
                let _ = opened.send(OpenAhead { stream, round_trip });
            }
        }));
        (node, opening)
    };
    members.filter(|(node, _)| *node > me).map(open).collect()
}

/// Waits until the connections are open, for `limit` at most, and returns the round trips to these peers.
pub(crate) async fn round_trips(
    environment: &Arc<dyn Environment>,
    connections: &mut ConnectionsAhead,
    limit: Duration,
) -> BTreeMap<NodeId, Duration> {
    let late = environment.sleep(limit).shared();
    let measured = connections.iter_mut().map(|(node, connection)| async {
        let open = futures::select_biased! {
            open = (&mut *connection).fuse() => open.ok()?,
            () = late.clone().fuse() => return None,
        };
        let round_trip = open.round_trip;
        let (opened, opening) = oneshot::channel();
        // The receiver is there.
        let _ = opened.send(open);
        *connection = opening;
        Some((*node, round_trip))
    });
    join_all(measured).await.into_iter().flatten().collect()
}
