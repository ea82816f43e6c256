//! The list of nodes that an invitation carries.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::id::NodeId;

/// The nodes of the cluster to form, as an invitation lists them.
pub(crate) struct Roster {
    pub(crate) cluster: u128,
    pub(crate) you: NodeId,
    pub(crate) members: BTreeMap<NodeId, String>,
    pub(crate) detection: Duration,
}

impl Roster {
    /// Checks the list; returns `None` if it is invalid. The detection time is that of all nodes.
    pub(crate) fn new(cluster: u128, you: NodeId, members: Vec<(NodeId, String)>, detection: Duration) -> Option<Self> {
        let count = members.len();
        let printable = |address: &String| address.len() <= ADDRESS_LEN_MAX && !address.contains(char::is_control);
        let sound = members.iter().all(|(_, address)| printable(address));
        let members: BTreeMap<_, _> = members.into_iter().collect();
        let sound = sound && members.len() == count && members.contains_key(&you) && you != NodeId(0);
        sound.then_some(Self { cluster, you, members, detection })
    }
}

/// Longest address of a member in bytes: a host name and a port.
const ADDRESS_LEN_MAX: usize = 300;
