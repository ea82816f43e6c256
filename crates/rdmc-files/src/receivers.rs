//! The receivers of a transfer at the sender.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use rdmc::{FailedMember, GroupFailure, InviteError, InviteFailure, NodeId};
use rdmc_schedule::{MEMBERS_MAX, Rank};

use crate::blame::FailedPeer;
use crate::descriptors;
use crate::error::{Kind, Problem};
use crate::wording::Wording;

/// The addresses of the receivers, which are the nodes 1, 2, ….
#[derive(Clone, Debug)]
pub(crate) struct Receivers {
    addresses: Vec<String>,
    wording: Wording,
}

impl Receivers {
    /// Checks the addresses.
    pub(crate) fn new(addresses: Vec<String>, wording: Wording) -> Result<Self, Problem> {
        let mut seen = BTreeSet::new();
        for address in &addresses {
            let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
            if !port.is_some_and(|port| port.parse::<u16>().is_ok_and(|port| port != 0)) {
                let default = wording.default_address.map_or_else(String::new, |default| format!("; {default}"));
                return Err(Kind::Request.problem(format!("{address:?} is not HOST:PORT{default}")));
            }
            if !seen.insert(address) {
                return Err(Kind::Request.problem(format!("{address} is given twice")));
            }
        }
        if addresses.is_empty() {
            return Err(Kind::Request.problem("there is no receiver"));
        }
        if addresses.len() >= Rank(MEMBERS_MAX).index() {
            return Err(Kind::Request.problem(format!("more than {} receivers", MEMBERS_MAX - 1)));
        }
        Ok(Self { addresses, wording })
    }

    /// Checks that no two names stand for the same address. Names that are not found in time are distinct.
    pub(crate) async fn check_distinct(&self, limit: Duration) -> Result<(), Problem> {
        let looked_up = self.addresses.iter().map(|address| async move {
            // The attempt to connect reports a receiver that is not found.
            let found = tokio::time::timeout(limit, tokio::net::lookup_host(address)).await;
            found.ok().and_then(Result::ok).map_or_else(Vec::new, Iterator::collect)
        });
        let mut seen = HashMap::new();
        for (address, found) in self.addresses.iter().zip(futures::future::join_all(looked_up).await) {
            for found in found {
                let other = *seen.entry(found).or_insert(address);
                if other != address {
                    let both = format!("{other} and {address} both stand for {found}: name each receiver once");
                    return Err(Kind::Request.problem(both));
                }
            }
        }
        Ok(())
    }

    /// Returns the addresses, in their order.
    pub(crate) fn addresses(&self) -> &[String] {
        &self.addresses
    }

    /// Returns how messages call the settings.
    pub(crate) fn wording(&self) -> &Wording {
        &self.wording
    }

    /// Returns the number of members, the sender included.
    pub(crate) fn members(&self) -> u32 {
        u32::try_from(self.addresses.len() + 1).expect("checked against the largest group")
    }

    /// Returns the address of a receiver.
    pub(crate) fn address(&self, node: NodeId) -> Option<&str> {
        let index = Rank(node.0).index().checked_sub(1)?;
        self.addresses.get(index).map(String::as_str)
    }

    /// Returns which receivers did not accept the invitation.
    pub(crate) fn uninvited(&self, error: &InviteError) -> Problem {
        let failed = error.failures.iter().map(|(address, failure)| {
            let node = (1..).zip(&self.addresses).find(|(_, known)| *known == address).map_or(0, |(node, _)| node);
            FailedPeer::uninvited(node, address, failure, &self.wording)
        });
        let failed: Vec<FailedPeer> = failed.collect();
        let told: Vec<String> = failed.iter().map(ToString::to_string).collect();
        let problem = Kind::Refused.blaming(told.join("; "), failed);
        // What a receiver answers may name a limit, too: its own.
        let own_limit = |(_, failure): &(String, InviteFailure)| match failure {
            InviteFailure::Unreachable(error) => descriptors::names_limit(&error.to_string()),
            _ => false,
        };
        if error.failures.iter().any(own_limit) { problem.of_own_limit() } else { problem }
    }

    /// Returns why nothing was sent: a group has failed before.
    pub(crate) fn not_sent(&self, failure: &GroupFailure) -> Problem {
        Problem::not_sent(failure, self.peers(&failure.failed))
    }

    /// Describes failed members with their addresses.
    pub(crate) fn peers(&self, failed: &[FailedMember]) -> Vec<FailedPeer> {
        failed.iter().map(|failed| FailedPeer::new(failed, self.address(failed.node).map(str::to_owned))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_none_are_a_usage_error() {
        for wrong in [&["host"][..], &["host:"], &[":1"], &["host:0"], &["host:99999"], &["a:1", "a:1"], &[""], &[]] {
            let addresses = wrong.iter().map(ToString::to_string).collect();
            let error = Receivers::new(addresses, Wording::default()).unwrap_err();
            assert_eq!(error.kind, Kind::Request, "{wrong:?}");
        }
        let receivers = Receivers::new(vec!["[::1]:7471".into(), "host:7471".into()], Wording::default()).unwrap();
        assert_eq!((receivers.members(), receivers.address(NodeId(2))), (3, Some("host:7471")));
        assert_eq!(receivers.address(NodeId(0)), None);
    }
}
