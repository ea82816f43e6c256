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
    /// The round trip to the peer: measured by the system, or the time to connect.
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
            open = (&mut *connection).fuse() => open,
            () = late.clone().fuse() => return None,
        };
        // A receiver that has completed must not be polled again. If the connection failed, the new one fails as well.
        let (opened, opening) = oneshot::channel();
        *connection = opening;
        let open = open.ok()?;
        let round_trip = open.round_trip;
        let _ = opened.send(open);
        Some((*node, round_trip))
    });
    join_all(measured).await.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use rdmc_fabric::TokioEnvironment;

    use super::*;

    #[tokio::test]
    async fn a_connection_that_failed_while_it_was_measured_fails_again_and_a_late_one_is_waited_for() {
        let environment: Arc<dyn Environment> = Arc::new(TokioEnvironment::new());
        let (failed, failing) = oneshot::channel();
        let (_late, waiting) = oneshot::channel();
        drop(failed);
        let mut connections: ConnectionsAhead = [(NodeId(1), failing), (NodeId(2), waiting)].into();
        for _ in 0..2 {
            let measured = round_trips(&environment, &mut connections, Duration::from_millis(5)).await;
            assert!(measured.is_empty());
        }
        assert!(connections.remove(&NodeId(1)).unwrap().await.is_err());
        assert!(connections.remove(&NodeId(2)).unwrap().try_recv().is_err());
    }
}
