//! The invited side: an invitation is accepted or declined, and one that was accepted leads to a node or is withdrawn.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rdmc_fabric::{Capabilities, ControlStream, Environment};

use super::{REASON_MAX, REPLY_LEN_MAX, write_frame};
use crate::cluster::Cluster;
use crate::fabrics::{ChosenFabric, FabricChoice, FabricName, FabricNames, PassedOver};
use crate::id::NodeId;
use crate::mesh::ahead::{ConnectionsAhead, open_ahead, round_trips};
use crate::mesh::listener::{ArrivedInvitation, Listener, refuse};
use crate::mesh::roster::Roster;
use crate::node::{Node, NodeBuilder};
use crate::security::Fingerprint;
use crate::wire::{self, Frame, RejectReason};

/// An invitation was withdrawn because another listener cannot take part, or because this one accepted too late.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the invitation was withdrawn: node {because_of} {reason}")]
#[non_exhaustive]
pub struct InvitationWithdrawn {
    /// That listener's number.
    pub because_of: NodeId,
    /// Its address, as the inviting node gave it.
    pub address: String,
    /// Why it cannot take part, as the inviting node tells it; at most 1000 characters.
    pub reason: String,
}

/// An invitation to become a node of a new cluster.
///
/// Dropping it declines without a reason.
pub struct Invitation {
    environment: Arc<dyn Environment>,
    stream: Box<dyn ControlStream>,
    roster: Roster,
    /// The inviting node's fabrics.
    asked: FabricNames,
    /// The fabrics among these that this node offers.
    offered: FabricNames,
    payload: Bytes,
    reply: Vec<u8>,
    /// Connections to other nodes, if they are being opened already.
    ahead: Option<ConnectionsAhead>,
    listener: Listener,
    /// The credential that the inviting node has shown, if any.
    inviting: Option<Fingerprint>,
}

impl Listener {
    /// Waits for the next invitation.
    ///
    /// # Cancel safety
    /// No invitation is lost.
    pub async fn next_invitation(&self) -> Invitation {
        let ArrivedInvitation { environment, stream, roster, asked, offered, payload, inviting } = self.invited().await;
        let (payload, reply, listener) = (payload.into(), Vec::new(), self.clone());
        Invitation { environment, stream, roster, asked, offered, payload, reply, ahead: None, listener, inviting }
    }
}

impl Invitation {
    /// Longest reply in bytes.
    pub const REPLY_LEN_MAX: usize = REPLY_LEN_MAX;

    /// Returns the inviting application's payload.
    pub fn payload(&self) -> &Bytes {
        &self.payload
    }

    /// Returns the address of the inviting node, where it has one.
    pub fn peer_address(&self) -> Option<IpAddr> {
        self.stream.peer_address()
    }

    /// Returns the numbers of all invited nodes, with the inviting one (0) and this one. If the inviting node has set a
    /// [quorum](crate::InviteOptions::quorum), the cluster may have fewer.
    pub fn nodes(&self) -> Vec<NodeId> {
        self.roster.members.keys().copied().collect()
    }

    /// Returns the [detection time](NodeBuilder::detection) of the cluster, which the inviting node chooses for all.
    pub fn detection(&self) -> Duration {
        self.roster.detection
    }

    /// Returns the number that this node would have.
    pub fn me(&self) -> NodeId {
        self.roster.you
    }

    /// Returns the fabrics that this node and the inviting one have in common; the cluster uses one of them.
    pub fn fabrics(&self) -> Vec<Capabilities> {
        let named = |name| self.listener.fabrics().named(name).expect("what is offered is had");
        self.offered.iter().map(|name| named(name).capabilities()).collect()
    }

    /// Offers only the [`fabrics`](Self::fabrics) for which `keep` is true. If there are none, changes nothing and
    /// returns false.
    pub fn retain_fabrics(&mut self, keep: impl Fn(&Capabilities) -> bool) -> bool {
        let fabrics = self.listener.fabrics();
        let kept = |name: &FabricName| fabrics.named(name).is_some_and(|fabric| keep(&fabric.capabilities()));
        let kept = self.offered.filtered(kept);
        let some = kept.is_some();
        self.offered = kept.unwrap_or(self.offered.clone());
        some
    }

    /// Sets the reply to the inviting application, sent if the invitation is accepted; default empty.
    ///
    /// # Panics
    /// If it is longer than [`REPLY_LEN_MAX`](Self::REPLY_LEN_MAX) bytes.
    pub fn reply(&mut self, reply: impl Into<Vec<u8>>) {
        self.reply = reply.into();
        assert!(self.reply.len() <= REPLY_LEN_MAX, "a reply has at most {REPLY_LEN_MAX} bytes");
    }

    /// Measures the round trips to the nodes with higher numbers, and returns those that are known after `limit`.
    ///
    /// With those of all nodes, the inviting application knows how far any two of them are from each other. It takes
    /// the longest of these round trips, or `limit` if a node does not answer. Meanwhile the connections to these nodes
    /// are opened. With TCP on Linux the kernel measures the round trips.
    ///
    /// # Cancel safety
    /// The connections go on opening. The next call, or [`accept`](Self::accept), uses them.
    pub async fn round_trips(&mut self, limit: Duration) -> BTreeMap<NodeId, Duration> {
        let environment = self.environment.clone();
        round_trips(&environment, self.connections_ahead(), limit).await
    }

    /// Begins to open the connections to the nodes with higher numbers, unless it has begun.
    fn connections_ahead(&mut self) -> &mut ConnectionsAhead {
        let Self { environment, roster, ahead, .. } = self;
        let members = roster.members.iter().map(|(node, address)| (*node, address));
        ahead.get_or_insert_with(|| open_ahead(environment, roster.you, members))
    }

    /// Accepts, waits until all others have accepted too, and returns the node to start. If the inviting node has set a
    /// [quorum](crate::InviteOptions::quorum), some of the others may not take part.
    ///
    /// # Cancel safety
    /// Dropping the future declines.
    ///
    /// # Errors
    /// The invitation was withdrawn; the error has an [`InvitationWithdrawn`] if another listener cannot take part, or
    /// this one has accepted too late for a [quorum](crate::InviteOptions::quorum). Or the inviting node gave no sign of
    /// life for five seconds, or did not finish within a minute.
    pub async fn accept(mut self) -> io::Result<NodeBuilder> {
        let listener = self.listener.clone();
        let you = self.roster.you;
        let cluster = Cluster::from_parts(self.roster.cluster, self.roster.members.clone()).invited_by(self.inviting);
        // Registered before the answer: others connect as soon as all have answered.
        let arrivals = listener.register(&cluster, you);
        let accept = Frame::Accept { fabrics: self.offered.clone(), reply: std::mem::take(&mut self.reply) };
        write_frame(&mut self.stream, &wire::encode(&accept)).await?;
        let environment = self.environment.clone();
        let mut ahead = std::mem::take(self.connections_ahead());
        let told = environment.timeout(GO_LIMIT, self.wait_for_go()).await;
        let (chosen, conclusion, missing) =
            told.unwrap_or_else(|elapsed| Err(io::Error::new(io::ErrorKind::TimedOut, elapsed)))?;
        let offered = listener.fabrics().named(&chosen.fabric).filter(|_| self.offered.has(&chosen.fabric));
        let not_offered =
            || io::Error::other(format!("the fabric {} was chosen, which was not offered", chosen.fabric));
        let fabric = offered.ok_or_else(not_offered)?;
        let choice = self.explained(&listener, &chosen);
        ahead.retain(|node, _| !missing.contains(node));
        let builder =
            Node::builder(you, cluster.without(&missing)).chosen(fabric, choice).invited_with(self.roster.detection);
        let streams = vec![(NodeId(0), self.stream)];
        Ok(builder.concluded(conclusion.into(), streams).ahead(ahead).arrivals(listener, arrivals))
    }

    /// Waits until all others have accepted, as long as the inviting node gives signs of life.
    async fn wait_for_go(&mut self) -> io::Result<(ChosenFabric, Vec<u8>, BTreeSet<NodeId>)> {
        loop {
            let heard = self.environment.timeout(SILENCE_MAX, wire::read(&mut self.stream)).await;
            match heard.map_err(|elapsed| io::Error::new(io::ErrorKind::TimedOut, elapsed))?? {
                Some(Frame::Go { chosen, conclusion, missing }) if conclusion.len() <= REPLY_LEN_MAX => {
                    let may_be_missing = |node: &NodeId| *node != NodeId(0) && *node != self.roster.you;
                    if !missing.iter().all(may_be_missing) {
                        return Err(io::Error::other("the inviting node starts without itself or this node"));
                    }
                    return Ok((chosen, conclusion, missing));
                }
                Some(Frame::Ping) => {}
                Some(Frame::Withdrawn { because_of, reason }) => {
                    let reason = reason.chars().take(REASON_MAX).collect();
                    let address = self.roster.members.get(&because_of).cloned().unwrap_or_default();
                    return Err(io::Error::other(InvitationWithdrawn { because_of, address, reason }));
                }
                _ => return Err(io::Error::other("the invitation was withdrawn")),
            }
        }
    }

    /// Adds to the inviting node's choice the better fabrics of this node, which that one does not know.
    fn explained(&self, listener: &Listener, chosen: &ChosenFabric) -> FabricChoice {
        let inviting = || self.peer_address().map_or("the inviting node".to_owned(), |address| address.to_string());
        let mut choice = chosen.explained(|node| match node {
            NodeId(0) => Some(inviting()),
            node => self.roster.members.get(&node).cloned(),
        });
        let better = listener.fabrics().wire_names().preferred_to(&chosen.fabric);
        let unknown = better.filter(|name| !self.asked.has(name));
        let unknown = unknown.map(|name| PassedOver { fabric: name.to_string(), lacking: vec![inviting()] });
        choice.passed_over.splice(0..0, unknown);
        choice
    }

    /// Declines with a reason, of which at most 1000 characters are sent.
    ///
    /// # Cancel safety
    /// Dropping the future declines without a reason.
    ///
    /// # Errors
    /// The inviting node is gone.
    pub async fn decline(mut self, reason: &str) -> io::Result<()> {
        let reason = reason.chars().take(REASON_MAX).collect();
        refuse(&mut self.stream, RejectReason::Declined { reason }).await
    }

    /// Declines because this application is busy: the inviting one gets
    /// [`InviteFailure::Busy`](crate::InviteFailure::Busy) and may invite again.
    ///
    /// # Cancel safety
    /// Dropping the future declines without a reason.
    ///
    /// # Errors
    /// The inviting node is gone.
    pub async fn busy(mut self) -> io::Result<()> {
        refuse(&mut self.stream, RejectReason::Busy).await
    }
}

impl fmt::Debug for Invitation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invitation")
            .field("me", &self.roster.you)
            .field("members", &self.roster.members)
            .finish_non_exhaustive()
    }
}

/// How long a node that has accepted waits for the others to accept.
const GO_LIMIT: Duration = Duration::from_secs(60);
/// Longest time without a sign of life of the inviting node.
const SILENCE_MAX: Duration = Duration::from_secs(5);
