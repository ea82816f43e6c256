//! The end of a group: its failure, which every survivor is told, or its close, which everybody confirms.
//!
//! Locks are taken in the order verdict, barrier.

use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::FutureExt;
use rdmc_fabric::WorkError;
use rdmc_schedule::Rank;

use super::{Events, Group};
use crate::failure::{FailureCause, GroupFailure};
use crate::mesh::GroupEvent;
use crate::mesh::frame::GroupFrame;
use crate::node::NodeId;
use crate::transfer::Trouble;

impl Group {
    /// Ends the group, if it has not ended, and tells all members.
    pub(crate) fn fail(&self, member: Rank, cause: FailureCause) {
        let node = self.members.get(member.index()).copied().unwrap_or(self.node.mesh.me());
        self.adopt(GroupFailure { group: self.id, member, node, cause });
    }

    pub(super) fn adopt(&self, failure: GroupFailure) {
        let first = self.verdict.send_if_modified(|verdict| {
            let first = verdict.is_none() && !self.barrier.borrow().closed;
            if first {
                *verdict = Some(failure.clone());
            }
            first
        });
        if !first {
            return;
        }
        tracing::error!(parent: &self.span, %failure, "group failed");
        self.node.counters.groups_failed.fetch_add(1, Ordering::Relaxed);
        let node = self.node.clone();
        let group = self.id;
        // Queued here and now: a node that leaves because of the failure must not say so before it has told the failure.
        let told = |to| node.mesh.try_send(to, group, GroupFrame::Failed { failure: failure.clone() });
        let others = self.members.iter().copied().filter(|&to| to != node.mesh.me());
        let untold: Vec<NodeId> = others.filter(|&to| !told(to)).collect();
        if untold.is_empty() {
            return;
        }
        let environment = node.environment.clone();
        environment.spawn(Box::pin(async move {
            let tell = untold.into_iter().map(|to| {
                let frame = GroupFrame::Failed { failure: failure.clone() };
                let node = &node;
                async move { node.mesh.send(to, group, frame).await }
            });
            // A member that takes nothing any more must not keep this task, nor the node, for ever.
            let _ = node.environment.timeout(RELAY_LIMIT, futures::future::join_all(tell)).await;
        }));
    }

    /// Returns why the group failed, if it has.
    pub(crate) fn failure(&self) -> Option<GroupFailure> {
        self.verdict.borrow().clone()
    }

    /// Waits until the group fails.
    pub(crate) async fn failed(&self) -> GroupFailure {
        let mut verdict = self.verdict.subscribe();
        let failure = verdict.wait_for(Option::is_some).await.expect("the sender lives in self");
        failure.clone().expect("waited for one")
    }

    /// Waits until the group fails, or is closed: none then.
    pub(crate) async fn ended(&self) -> Option<GroupFailure> {
        let mut barrier = self.barrier.subscribe();
        let closed = std::pin::pin!(barrier.wait_for(|barrier| barrier.closed));
        let failed = std::pin::pin!(self.failed());
        match futures::future::select(failed, closed).await {
            futures::future::Either::Left((failure, _)) => Some(failure),
            futures::future::Either::Right(_) => None,
        }
    }

    /// Gives the mesh a moment to tell why a connection broke; returns what it says.
    ///
    /// A neighbour that has learnt of a failure breaks its connections: it must not be taken for the one that failed.
    pub(super) async fn settle(&self) -> Option<GroupFailure> {
        let (failed, patience) = (std::pin::pin!(self.failed()), std::pin::pin!(self.patience(SETTLE_LIMIT)));
        match futures::future::select(failed, patience).await {
            futures::future::Either::Left((failure, _)) => Some(failure),
            futures::future::Either::Right(_) => None,
        }
    }

    /// Waits for `limit`, in steps: a process that was stopped goes on in one of them, and in the others hears what has
    /// come meanwhile, before it gives anybody up.
    pub(super) async fn patience(&self, limit: Duration) {
        for _ in 0..PATIENCE_STEPS {
            self.node.environment.sleep(limit / PATIENCE_STEPS).await;
        }
    }

    /// Does the same while nobody else listens to the mesh.
    pub(super) async fn settle_listening(&self, events: &mut Events) -> Option<GroupFailure> {
        let mut settled = std::pin::pin!(self.settle().fuse());
        loop {
            futures::select_biased! {
                failure = settled => return failure,
                event = events.inbox.next().fuse() => match event {
                    Some(GroupEvent::Frame(from, frame @ GroupFrame::Failed { .. })) => {
                        self.take_frame(from, frame, &events.announced);
                    }
                    Some(GroupEvent::Frame(..)) => {}
                    Some(GroupEvent::Lost(node)) => self.lost(node),
                    None => return None,
                }
            }
        }
    }

    /// Ends the group because of what this member has run into.
    pub(super) async fn end(&self, trouble: Trouble) {
        match trouble {
            Trouble::Own(cause) => self.fail(self.rank, cause),
            Trouble::Protocol { by, what } => self.fail(by, FailureCause::Protocol { what }),
            Trouble::Work { with, error } => {
                if self.settle().await.is_none() {
                    let cause = match error {
                        WorkError::Flushed | WorkError::ConnectionLost => FailureCause::ConnectionLost,
                        WorkError::LocalProtection => {
                            let what = "the memory of a block could not be read or written".to_owned();
                            return self.fail(self.rank, FailureCause::Resources { what });
                        }
                        WorkError::Device { .. } | WorkError::QueueFull { .. } => {
                            let what = error.to_string();
                            return self.fail(self.rank, FailureCause::Resources { what });
                        }
                        error => FailureCause::Protocol { what: error.to_string() },
                    };
                    self.fail(with, cause);
                }
            }
        }
    }

    /// At the root: waits until every member has confirmed that it has everything, then lets them go.
    pub(super) async fn close_as_root(&self, messages: u64) {
        self.barrier.send_modify(|barrier| barrier.messages = Some(messages));
        for &to in &self.members[1..] {
            self.node.mesh.send(to, self.id, GroupFrame::Closing { messages }).await;
        }
        let mut barrier = self.barrier.subscribe();
        let all = self.members.len() - 1;
        // Fails only if the group is gone, with nobody left to tell.
        let _ = barrier.wait_for(|barrier| barrier.confirmed.len() == all).await;
        if !self.conclude() {
            // It failed at the same moment: this engine is about to be ended.
            std::future::pending::<()>().await;
        }
        let tell = self.members[1..].iter().map(|&to| self.node.mesh.send_written(to, self.id, GroupFrame::Closed));
        let _ = self.node.environment.timeout(RELAY_LIMIT, futures::future::join_all(tell)).await;
    }

    /// Notes that everybody has everything, unless the group has failed; returns whether it has not.
    ///
    /// A group is closed or fails, and never both: each is decided while the verdict is locked.
    pub(super) fn conclude(&self) -> bool {
        let mut closed = false;
        self.verdict.send_if_modified(|verdict| {
            closed = verdict.is_none();
            if closed {
                self.barrier.send_modify(|barrier| barrier.closed = true);
            }
            false
        });
        closed
    }

    /// At a member: confirms that it has everything and waits until everybody has.
    pub(super) async fn close_as_member(&self, messages: u64) {
        self.barrier.send_modify(|barrier| barrier.sent_confirm = true);
        self.node.mesh.send(self.members[0], self.id, GroupFrame::Confirm { messages }).await;
        let mut barrier = self.barrier.subscribe();
        let _ = barrier.wait_for(|barrier| barrier.closed).await;
    }

    /// At a member: waits until the root closes the group; returns the number of messages.
    pub(super) async fn closing(&self) -> u64 {
        let mut barrier = self.barrier.subscribe();
        let barrier = barrier.wait_for(|barrier| barrier.messages.is_some()).await.expect("the sender lives in self");
        barrier.messages.expect("waited for it")
    }
}

/// How long a broken connection waits for the mesh to tell why.
const SETTLE_LIMIT: Duration = Duration::from_secs(1);
/// Steps in which a limit passes.
const PATIENCE_STEPS: u32 = 4;
/// How long the last frames of a group may take to be written.
const RELAY_LIMIT: Duration = Duration::from_secs(5);
