//! Clusters formed on the fly: one node invites listeners by their addresses. `invited.rs` has the listeners' side.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use bytes::Bytes;
use futures::future::FutureExt;
use futures::stream::{FuturesUnordered, StreamExt};
use rdmc_fabric::{ControlStream, Environment, Timestamp};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::cluster::Cluster;
use crate::detection::check_detection;
use crate::fabrics::{FabricNames, Fabrics};
use crate::id::NodeId;
use crate::invite_failure::{InviteError, InviteFailure};
use crate::mesh::ahead::open_ahead;
use crate::node::NodeBuilder;
use crate::security::{Security, host};
use crate::wire::{self, FRAME_LEN_MAX, Frame, PROTOCOL_VERSION, RejectReason};

mod invited;

pub use invited::{Invitation, InvitationWithdrawn};

/// Sets the options of an [invitation](invite).
#[derive(Clone, Debug)]
pub struct InviteOptions {
    payload: Bytes,
    limit: Duration,
    security: Option<Security>,
    detection: Duration,
    quorum: Option<usize>,
}

impl InviteOptions {
    /// Sets how long to wait for the listeners' answers; the other options have defaults.
    pub fn new(limit: Duration) -> Self {
        let detection = NodeBuilder::DETECTION_DEFAULT;
        Self { payload: Bytes::new(), limit, security: None, detection, quorum: None }
    }

    /// Sets the bytes for the applications of the listeners; default none.
    #[must_use]
    pub fn payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.payload = payload.into();
        self
    }

    /// Invites only listeners that `security` trusts; by default, and with `None`, all.
    ///
    /// With certificates, each listener's certificate must be for the host in its address as given, and the listeners
    /// check each other's in the same way. The caller's certificate may have any name: the listeners take only the node
    /// that invited for node 0.
    #[must_use]
    pub fn security(mut self, security: impl Into<Option<Security>>) -> Self {
        self.security = security.into();
        self
    }

    /// Sets the [detection time](NodeBuilder::detection) of all nodes of the cluster, in whole milliseconds.
    #[must_use]
    pub fn detection(mut self, detection: Duration) -> Self {
        self.detection = detection;
        self
    }

    /// Sets how many listeners must take part, without the caller; by default, and if fewer are invited, all. 0 counts
    /// as 1: if no listener accepts, the invitation fails and says why, and the caller is not left alone.
    ///
    /// The invitation waits until all have answered, or for the limit. If `listeners` or more of them have accepted
    /// then, the cluster has these as nodes and the caller. [`NodeBuilder::missing`] returns the others, which learn
    /// that they came too late if they accept. The numbers of the nodes remain those of the order given, so they have
    /// gaps. All nodes that take part must have a fabric in common.
    #[must_use]
    pub fn quorum(mut self, listeners: usize) -> Self {
        self.quorum = Some(listeners.max(1));
        self
    }
}

/// Invites the listeners at `addresses` to a new cluster and waits until each has accepted, or, with a
/// [quorum](InviteOptions::quorum), so many of them.
///
/// The caller becomes node 0, the listeners nodes 1, 2, … in the order given. Each learns the others' addresses as
/// given here, so the listeners must be able to reach each other by them. The application of each gets the
/// [payload](InviteOptions::payload), and its [reply](NodeBuilder::replies) comes with the acceptance. On success all
/// of them start their nodes; the caller starts its own from the result.
///
/// The nodes use the first of `fabrics` that all of them have; [`NodeBuilder::fabric_choice`] says which and why. The
/// first of `fabrics` opens the connections to the listeners.
///
/// # Cancel safety
/// Dropping the future withdraws the invitations.
///
/// # Errors
/// [`InviteError`] names every listener that could not be reached, refused, or lacks a fabric that the others have. The
/// invitations of the others are withdrawn. With [security](InviteOptions::security), [`InviteFailure::Insecure`] names
/// listeners that are not trusted, or do not trust this node. [`InviteFailure::Detection`] names every listener if the
/// detection time is out of bounds.
///
/// # Examples
/// ```no_run
/// use std::time::Duration;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let options = rdmc::InviteOptions::new(Duration::from_secs(10))
///     .payload("what we are about to send")
///     .detection(Duration::from_secs(5));
/// let addresses = ["10.0.0.2:7400".to_owned(), "10.0.0.3:7400".to_owned()];
/// let node = rdmc::invite(rdmc::TcpFabric::new(), &addresses, options).await?.start().await?;
/// # Ok(())
/// # }
/// ```
pub async fn invite(
    fabrics: impl Into<Fabrics>,
    addresses: &[String],
    options: InviteOptions,
) -> Result<NodeBuilder, InviteError> {
    let payload = options.payload.clone();
    reach_listeners(fabrics, addresses, options).await?.invite(payload).await
}

/// Connects to the listeners at `addresses`, to invite them then. [`invite`] does both. Invite soon: a listener
/// closes a connection that is silent for 10 s.
///
/// What the caller announces can depend on the [round trips](ReachedListeners::round_trip).
///
/// # Cancel safety
/// Dropping the future closes the connections.
///
/// # Errors
/// [`InviteFailure::Detection`] for every listener if the detection time is out of bounds. Listeners that cannot be
/// reached are named by the invitation.
pub async fn reach_listeners(
    fabrics: impl Into<Fabrics>,
    addresses: &[String],
    options: InviteOptions,
) -> Result<ReachedListeners, InviteError> {
    let InviteOptions { limit, security, detection, quorum, .. } = options;
    let fabrics = fabrics.into();
    if let Err(error) = check_detection(detection) {
        let failures = addresses.iter().map(|address| (address.clone(), InviteFailure::Detection(error)));
        return Err(InviteError { failures: failures.collect() });
    }
    let environment = fabrics.environment();
    let began = environment.now();
    let reach = addresses.iter().map(|address| {
        let (environment, security) = (&environment, security.as_ref());
        async move {
            let limit = limit.min(REACH_LIMIT);
            let reached = environment.timeout(limit, reach_one(&**environment, address, security)).await;
            reached.unwrap_or_else(|elapsed| Err(InviteFailure::Silent(elapsed)))
        }
    });
    let connections = futures::future::join_all(reach).await;
    let addresses = addresses.to_vec();
    Ok(ReachedListeners { fabrics, addresses, connections, began, limit, security, detection, quorum })
}

/// Connections to listeners that are to be invited; made by [`reach_listeners`].
pub struct ReachedListeners {
    fabrics: Fabrics,
    addresses: Vec<String>,
    connections: Vec<Result<ReachedListener, InviteFailure>>,
    began: Timestamp,
    limit: Duration,
    security: Option<Security>,
    detection: Duration,
    quorum: Option<usize>,
}

struct ReachedListener {
    stream: Box<dyn ControlStream>,
    /// As the operating system has measured it, or how long it took to connect.
    round_trip: Duration,
}

impl fmt::Debug for ReachedListeners {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReachedListeners").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

impl ReachedListeners {
    /// Returns the round trip to the farthest listener that was reached; `None` if none was reached.
    pub fn round_trip(&self) -> Option<Duration> {
        self.round_trips().into_values().max()
    }

    /// Returns the round trips to the listeners that were reached, by the numbers that they would have as nodes.
    ///
    /// With TCP on Linux they are those that the kernel has measured, else the times to connect.
    pub fn round_trips(&self) -> BTreeMap<NodeId, Duration> {
        let reached = (1..).map(NodeId).zip(&self.connections);
        reached.filter_map(|(node, reached)| Some((node, reached.as_ref().ok()?.round_trip))).collect()
    }

    /// Returns the addresses of the listeners that were reached, where they have one.
    pub fn peer_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.connections.iter().flatten().filter_map(|reached| reached.stream.peer_address())
    }

    /// Invites the listeners with `payload`, as the function [`invite`] does. The options' payload does not count.
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the invitations.
    ///
    /// # Errors
    /// As the function [`invite`].
    pub async fn invite(self, payload: impl Into<Bytes>) -> Result<NodeBuilder, InviteError> {
        self.invite_and_conclude(payload, |_| Bytes::new()).await
    }

    /// Invites the listeners with `payload`, as [`invite`](Self::invite) does, and tells them what the caller concludes
    /// from the [replies](NodeBuilder::replies) of all that take part. They start with that
    /// [conclusion](NodeBuilder::conclusion).
    ///
    /// # Cancel safety
    /// Dropping the future withdraws the invitations.
    ///
    /// # Errors
    /// As the function [`invite`].
    ///
    /// # Panics
    /// If the conclusion is longer than [`Invitation::REPLY_LEN_MAX`] bytes.
    pub async fn invite_and_conclude(
        self,
        payload: impl Into<Bytes>,
        conclude: impl FnOnce(&BTreeMap<NodeId, Bytes>) -> Bytes,
    ) -> Result<NodeBuilder, InviteError> {
        let Self { fabrics, addresses, connections, began, limit, security, detection, quorum } = self;
        let payload: Bytes = payload.into();
        let detection_ms = u32::try_from(detection.as_millis()).expect("its bounds are checked");
        let environment = fabrics.environment();
        // If one could not be reached, the others have some time to answer all the same.
        let limit = limit.saturating_sub(environment.now().since(began)).max(limit.min(ANSWER_LIMIT_MIN));
        let cluster = environment.random_u128();
        let members: Vec<(NodeId, String)> = std::iter::once((NodeId(0), String::new()))
            .chain((1u32..).map(NodeId).zip(addresses.iter().cloned()))
            .collect();
        let reached = connections.iter().zip(&members[1..]).filter(|(reached, _)| reached.is_ok());
        let mut ahead = open_ahead(&environment, NodeId(0), reached.map(|(_, (node, address))| (*node, address)));
        let ask = connections.into_iter().zip(&members[1..]).map(|(reached, (you, _))| {
            let invite = Frame::Invite {
                version: PROTOCOL_VERSION,
                cluster,
                you: *you,
                members: members.clone(),
                fabrics: fabrics.wire_names().clone(),
                payload: payload.to_vec(),
                detection_ms,
            };
            answer_of(&*environment, reached, invite, *you, limit, quorum.is_some())
        });
        let mut accepted = Vec::new();
        let mut missing = BTreeSet::new();
        let mut offers = Vec::new();
        let mut replies = BTreeMap::new();
        let mut failures = Vec::new();
        for (answer, (node, address)) in invite_all(&*environment, ask).await.into_iter().zip(&members[1..]) {
            let answer = if quorum.is_some() { answer.and_then(unless_gone) } else { answer };
            match answer {
                Ok((stream, names, reply)) => {
                    accepted.push((*node, stream));
                    offers.push((*node, names));
                    replies.insert(*node, reply);
                }
                Err(failure) => {
                    missing.insert(*node);
                    failures.push((address.clone(), failure));
                }
            }
        }
        let members: BTreeMap<NodeId, String> = members.iter().cloned().collect();
        let needed = quorum.map_or(addresses.len(), |quorum| quorum.min(addresses.len()));
        let chosen = match fabrics.wire_names().choose(&offers) {
            _ if accepted.len() < needed => Err(InviteError { failures }),
            None => {
                let mut error = nothing_in_common(fabrics.wire_names(), &offers, &members);
                error.failures.extend(failures);
                Err(error)
            }
            Some(chosen) => Ok((chosen, failures)),
        };
        let (chosen, absent) = match chosen {
            Ok(chosen) => chosen,
            Err(error) => {
                if let Some((address, failure)) = error.failures.first() {
                    let because_of = members.iter().find(|(_, known)| *known == address);
                    let because_of = because_of.map_or(NodeId(0), |(node, _)| *node);
                    let accepted = accepted.into_iter().map(|(_, stream)| stream);
                    withdraw(&*environment, accepted, because_of, failure).await;
                }
                return Err(error);
            }
        };
        let conclusion = conclude(&replies);
        assert!(conclusion.len() <= REPLY_LEN_MAX, "a conclusion has at most {REPLY_LEN_MAX} bytes");
        let conclusion_told = conclusion.to_vec();
        let go = Frame::Go { chosen: chosen.clone(), conclusion: conclusion_told, missing: missing.clone() };
        let go = wire::encode(&go);
        let mut failures = Vec::new();
        for (node, stream) in &mut accepted {
            if let Err(error) = write_frame(stream, &go).await {
                failures.push((members[node].clone(), InviteFailure::Unreachable(error)));
            }
        }
        if !failures.is_empty() {
            return Err(InviteError { failures });
        }
        let choice = chosen.explained(|node| members.get(&node).cloned());
        let fabric = fabrics.named(&chosen.fabric).expect("it was chosen among these");
        let cluster = Cluster::from_parts(cluster, members).without(&missing);
        let builder = NodeBuilder::new(NodeId(0), cluster).security(security);
        let builder = builder.chosen(fabric, choice).invited_with(Duration::from_millis(detection_ms.into()));
        ahead.retain(|node, _| !missing.contains(node));
        Ok(builder.replied(replies, absent).concluded(conclusion, accepted).ahead(ahead))
    }
}

/// Names every node that lacks one of our fabrics.
fn nothing_in_common(
    ours: &FabricNames,
    offers: &[(NodeId, FabricNames)],
    members: &BTreeMap<NodeId, String>,
) -> InviteError {
    let failures = offers.iter().filter_map(|(node, names)| {
        let lacks = ours.lacked_by(names);
        let somebody = (!lacks.is_empty()).then(|| members[node].clone())?;
        Some((somebody, InviteFailure::NotForAll { offers: names.to_strings(), lacks }))
    });
    InviteError { failures: failures.collect() }
}

type Acceptance = (Box<dyn ControlStream>, FabricNames, Bytes);
type InviteResult = Result<Acceptance, InviteFailure>;

/// Returns an acceptance unless the listener has gone since. It sends nothing before it starts.
fn unless_gone((mut stream, fabrics, reply): Acceptance) -> InviteResult {
    match stream.read(&mut [0; 1]).now_or_never() {
        None => Ok((stream, fabrics, reply)),
        Some(Err(error)) => Err(InviteFailure::of(error)),
        Some(Ok(_)) => Err(InviteFailure::Closed(io::ErrorKind::UnexpectedEof.into())),
    }
}

/// Waits for all answers, and meanwhile gives signs of life to the listeners that have accepted.
async fn invite_all(
    environment: &dyn Environment,
    ask: impl Iterator<Item = impl Future<Output = InviteResult>>,
) -> Vec<InviteResult> {
    let asked = ask.enumerate().map(|(index, ask)| async move { (index, ask.await) });
    let mut asked: FuturesUnordered<_> = asked.collect();
    let mut answers: BTreeMap<usize, InviteResult> = BTreeMap::new();
    let ping = wire::encode(&Frame::Ping);
    let mut pause = environment.sleep(PING_PAUSE).fuse();
    loop {
        futures::select_biased! {
            answered = asked.next() => match answered {
                Some((index, answer)) => drop(answers.insert(index, answer)),
                None => return answers.into_values().collect(),
            },
            () = pause => {
                for (stream, ..) in answers.values_mut().flatten() {
                    // A listener that is gone is noticed when the start is sent to it.
                    let _ = environment.timeout(PING_PAUSE, write_frame(stream, &ping)).await;
                }
                pause = environment.sleep(PING_PAUSE).fuse();
            }
        }
    }
}

/// Asks a listener that was reached, and waits for its answer. If it `may_be_missing`, it learns that it is late.
async fn answer_of(
    environment: &dyn Environment,
    reached: Result<ReachedListener, InviteFailure>,
    invite: Frame,
    you: NodeId,
    limit: Duration,
    may_be_missing: bool,
) -> InviteResult {
    let (mut stream, mut asked) = (reached?.stream, false);
    match environment.timeout(limit, invite_one(&mut stream, &invite, &mut asked)).await {
        Ok(answer) => answer.map(|(fabrics, reply)| (stream, fabrics, reply)),
        Err(elapsed) => {
            let failure = InviteFailure::Silent(elapsed);
            // It must have the whole invitation, and may accept it later.
            if asked && may_be_missing {
                withdraw(environment, std::iter::once(stream), you, &failure).await;
            }
            Err(failure)
        }
    }
}

/// Tells listeners that were invited which one cannot take part, which may be the same.
async fn withdraw(
    environment: &dyn Environment,
    invited: impl Iterator<Item = Box<dyn ControlStream>>,
    because_of: NodeId,
    failure: &InviteFailure,
) {
    let reason = failure.to_string().chars().take(REASON_MAX).collect();
    let withdrawn = wire::encode(&Frame::Withdrawn { because_of, reason });
    let told = invited.map(|mut stream| {
        let withdrawn = &withdrawn;
        // If one does not take it, the end of the connection withdraws the invitation as well.
        async move { environment.timeout(PING_PAUSE, write_frame(&mut stream, withdrawn)).await }
    });
    futures::future::join_all(told).await;
}

async fn write_frame(stream: &mut Box<dyn ControlStream>, frame: &[u8]) -> io::Result<()> {
    stream.write_all(frame).await?;
    stream.flush().await
}

/// Connects to a listener.
async fn reach_one(
    environment: &dyn Environment,
    address: &str,
    security: Option<&Security>,
) -> Result<ReachedListener, InviteFailure> {
    let began = environment.now();
    let mut stream = environment.connect(address).await.map_err(InviteFailure::of)?;
    let round_trip = stream.round_trip().unwrap_or_else(|| environment.now().since(began));
    if let Some(security) = security {
        stream = security.connect(environment, stream, host(address)).await.map_err(InviteFailure::of)?;
    }
    Ok(ReachedListener { stream, round_trip })
}

/// Asks a listener, and waits for its answer; sets `asked` when the listener has the whole invitation.
async fn invite_one(
    stream: &mut Box<dyn ControlStream>,
    invite: &Frame,
    asked: &mut bool,
) -> Result<(FabricNames, Bytes), InviteFailure> {
    let bytes = wire::encode(invite);
    if bytes.len() > FRAME_LEN_MAX {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "the invitation's payload is too long");
        return Err(InviteFailure::Unreachable(error));
    }
    write_frame(stream, &bytes).await.map_err(InviteFailure::of)?;
    *asked = true;
    match wire::read(stream).await.map_err(InviteFailure::of)? {
        Some(Frame::Accept { reply, .. }) if reply.len() > REPLY_LEN_MAX => {
            Err(InviteFailure::Refused { reason: format!("its reply is longer than {REPLY_LEN_MAX} bytes") })
        }
        Some(Frame::Accept { fabrics, reply }) => Ok((fabrics, reply.into())),
        Some(Frame::Reject { reason: RejectReason::Fabrics { offers, asked } }) => {
            Err(InviteFailure::OtherFabrics { offers: offers.to_strings_beside(&asked), asked: asked.to_strings() })
        }
        Some(Frame::Reject { reason: RejectReason::Busy }) => Err(InviteFailure::Busy),
        Some(Frame::Reject { reason }) => Err(InviteFailure::Refused { reason: reason.to_string() }),
        Some(_) => Err(InviteFailure::Refused { reason: "it does not answer as a listener does".to_owned() }),
        None => Err(InviteFailure::Closed(io::ErrorKind::UnexpectedEof.into())),
    }
}

/// Longest reply to an invitation, and longest conclusion from all replies, in bytes.
const REPLY_LEN_MAX: usize = 1024;
/// Longest reason of declining or withdrawing an invitation, in characters.
const REASON_MAX: usize = 1000;
/// Time to connect to all listeners: those that were reached first must not have closed their connections.
const REACH_LIMIT: Duration = Duration::from_secs(7);
/// Least time to answer an invitation, unless the caller's limit is shorter.
const ANSWER_LIMIT_MIN: Duration = Duration::from_secs(1);
/// Time between two signs of life of an inviting node.
const PING_PAUSE: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
