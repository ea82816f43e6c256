//! Clusters formed on the fly: one node invites listeners by their addresses.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rdmc_fabric::{ControlStream, Elapsed, Environment, Fabric};
use tokio::io::AsyncWriteExt;

use super::frame::{self, FRAME_LEN_MAX, Frame, PROTOCOL_VERSION, Reject};
use super::listener::{Listener, refuse};
use crate::node::{Cluster, Node, NodeBuilder, NodeId};

/// Invites the listeners at `addresses` to a new cluster and waits until each has accepted.
///
/// The caller becomes node 0, the listeners nodes 1, 2, … in the order given. Each learns the others' addresses as
/// given here, so they must be such that the listeners can reach each other by them. `payload` is handed to the
/// application of each. On success all of them start their nodes; the caller starts its own from the result.
///
/// # Cancel safety
/// Dropping the future withdraws the invitations.
///
/// # Errors
/// [`InviteError`] names every listener that could not be reached or refused; the others are told to forget it.
pub async fn invite(
    fabric: Arc<dyn Fabric>,
    addresses: &[String],
    payload: Bytes,
    limit: Duration,
) -> Result<NodeBuilder, InviteError> {
    let environment = fabric.environment();
    let cluster = environment.random_u128();
    let members: Vec<(NodeId, String)> = std::iter::once((NodeId(0), String::new()))
        .chain((1u32..).map(NodeId).zip(addresses.iter().cloned()))
        .collect();
    let ask = members[1..].iter().map(|(you, address)| {
        let invite = Frame::Invite {
            version: PROTOCOL_VERSION,
            cluster,
            you: *you,
            members: members.clone(),
            payload: payload.to_vec(),
        };
        let environment = &environment;
        async move {
            let asked = environment.timeout(limit, ask(&**environment, address, &invite)).await;
            asked.unwrap_or_else(|elapsed| Err(InviteFailure::Silent(elapsed)))
        }
    });
    let mut accepted = Vec::new();
    let mut failures = Vec::new();
    for (answer, address) in futures::future::join_all(ask).await.into_iter().zip(addresses) {
        match answer {
            Ok(stream) => accepted.push((stream, address)),
            Err(failure) => failures.push((address.clone(), failure)),
        }
    }
    if !failures.is_empty() {
        return Err(InviteError { failures });
    }
    for (stream, address) in &mut accepted {
        let go = async {
            stream.write_all(&frame::encode(&Frame::Go)).await?;
            stream.flush().await
        };
        if let Err(error) = go.await {
            failures.push(((*address).clone(), InviteFailure::Unreachable(error)));
        }
    }
    if failures.is_empty() {
        Ok(NodeBuilder::new(NodeId(0), Cluster::from_parts(cluster, members.into_iter().collect())).fabric(fabric))
    } else {
        Err(InviteError { failures })
    }
}

async fn ask(
    environment: &dyn Environment,
    address: &str,
    invite: &Frame,
) -> Result<Box<dyn ControlStream>, InviteFailure> {
    let bytes = frame::encode(invite);
    if bytes.len() > FRAME_LEN_MAX {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "the invitation's payload is too long");
        return Err(InviteFailure::Unreachable(error));
    }
    let mut stream = environment.connect(address).await.map_err(InviteFailure::Unreachable)?;
    stream.write_all(&bytes).await.map_err(InviteFailure::Unreachable)?;
    stream.flush().await.map_err(InviteFailure::Unreachable)?;
    match frame::read(&mut stream).await.map_err(InviteFailure::Unreachable)? {
        Some(Frame::Accept) => Ok(stream),
        Some(Frame::Reject { reason }) => Err(InviteFailure::Refused { reason: reason.to_string() }),
        Some(_) => Err(InviteFailure::Refused { reason: "it does not answer as a listener does".to_owned() }),
        None => Err(InviteFailure::Refused { reason: "it closed the connection".to_owned() }),
    }
}

/// Not everybody accepted an invitation.
#[derive(Debug, thiserror::Error)]
#[error("{} of the invited did not accept: {}", failures.len(), failures.iter().map(|(address, failure)| format!("{address} {failure}")).collect::<Vec<_>>().join("; "))]
pub struct InviteError {
    /// Who did not, by address, and why.
    pub failures: Vec<(String, InviteFailure)>,
}

/// Why one listener did not accept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InviteFailure {
    /// It could not be reached.
    #[error("could not be reached: {0}")]
    Unreachable(io::Error),
    /// It refused.
    #[error("refused: {reason}")]
    Refused {
        /// What it said.
        reason: String,
    },
    /// It did not answer in time.
    #[error("did not answer: {0}")]
    Silent(Elapsed),
}

/// An invitation to become a member of a new cluster.
///
/// Dropping it declines without a reason.
pub struct Invitation {
    environment: Arc<dyn Environment>,
    stream: Box<dyn ControlStream>,
    cluster: u128,
    you: NodeId,
    members: BTreeMap<NodeId, String>,
    payload: Bytes,
    listener: Option<Listener>,
}

impl Invitation {
    /// Checks an invitation; gives the stream back if it makes no sense.
    pub(crate) fn new(
        environment: Arc<dyn Environment>,
        stream: Box<dyn ControlStream>,
        cluster: u128,
        you: NodeId,
        members: Vec<(NodeId, String)>,
        payload: Vec<u8>,
    ) -> Result<Self, Box<dyn ControlStream>> {
        let count = members.len();
        let members: BTreeMap<_, _> = members.into_iter().collect();
        if members.len() != count || !members.contains_key(&you) || you == NodeId(0) {
            return Err(stream);
        }
        Ok(Self { environment, stream, cluster, you, members, payload: payload.into(), listener: None })
    }

    pub(crate) fn arrived_at(&mut self, listener: Listener) {
        self.listener = Some(listener);
    }

    /// Returns what the inviting application has to say.
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// Returns the address the invitation came from, where there is such a thing.
    pub fn peer_address(&self) -> Option<IpAddr> {
        self.stream.peer_address()
    }

    /// Returns the numbers of all nodes, the inviting one (0) and this one included.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.members.keys().copied().collect()
    }

    /// Returns the number this node would have.
    pub fn me(&self) -> NodeId {
        self.you
    }

    /// Accepts, waits until all others have accepted too, and returns the node to be started.
    ///
    /// # Cancel safety
    /// Dropping the future declines.
    ///
    /// # Errors
    /// The invitation was withdrawn, for instance because somebody else refused.
    pub async fn accept(mut self) -> io::Result<NodeBuilder> {
        let listener = self.listener.take().expect("invitations are handed out by their listener");
        // Registered before the answer: others connect as soon as everybody has answered.
        let arrivals = listener.register(self.cluster, self.you);
        self.stream.write_all(&frame::encode(&Frame::Accept)).await?;
        self.stream.flush().await?;
        let go = self.environment.timeout(GO_LIMIT, frame::read(&mut self.stream)).await;
        match go {
            Ok(Ok(Some(Frame::Go))) => {}
            Ok(Err(error)) => return Err(error),
            Ok(Ok(_)) => return Err(io::Error::other("the invitation was withdrawn")),
            Err(elapsed) => return Err(io::Error::new(io::ErrorKind::TimedOut, elapsed)),
        }
        let cluster = Cluster::from_parts(self.cluster, std::mem::take(&mut self.members));
        let fabric = listener.fabric();
        Ok(Node::builder(self.you, cluster).fabric(fabric).arrivals(listener, arrivals))
    }

    /// Declines with a reason, of which at most 1000 characters are passed on.
    ///
    /// # Errors
    /// The inviting node is gone.
    pub async fn decline(mut self, reason: &str) -> io::Result<()> {
        let reason = reason.chars().take(1000).collect();
        refuse(&mut self.stream, Reject::Declined { reason }).await
    }
}

impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invitation").field("me", &self.you).field("members", &self.members).finish_non_exhaustive()
    }
}

/// How long one who accepted waits for the others to accept.
const GO_LIMIT: Duration = Duration::from_secs(60);
