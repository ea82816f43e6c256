//! A node's fabrics, and the choice of one that all members of a cluster have.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use rdmc_fabric::{Environment, Fabric};
use serde::{Deserialize, Serialize};

use crate::id::NodeId;

/// Lists the fabrics that a node can use, in order of preference.
///
/// Invited and inviting nodes choose one that all of them have: see [`invite`](crate::invite). Fabrics of one node that
/// open connections share a [`Rendezvous`](crate::Rendezvous), since only the first one listens.
///
/// # Examples
/// ```
/// use rdmc::{Fabrics, MemNetwork, TcpFabric};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let one = Fabrics::from(TcpFabric::new());
/// let two = Fabrics::new(vec![MemNetwork::new().fabric(), TcpFabric::new()])?;
/// assert_eq!((one.to_string(), two.to_string()), ("tcp".into(), "mem, tcp".into()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Fabrics {
    fabrics: Vec<Arc<dyn Fabric>>,
    names: FabricNames,
}

impl Fabrics {
    /// Lists fabrics in order of preference: 1 to [`COUNT_MAX`](Self::COUNT_MAX) of them, each with another name.
    ///
    /// # Errors
    /// See [`FabricsError`].
    pub fn new(fabrics: Vec<Arc<dyn Fabric>>) -> Result<Self, FabricsError> {
        let names: Vec<String> = fabrics.iter().map(|fabric| fabric.capabilities().place()).collect();
        Ok(Self { fabrics, names: names.try_into()? })
    }

    /// Most fabrics of one node.
    pub const COUNT_MAX: usize = 8;

    /// Returns the fabrics in order of preference.
    pub fn iter(&self) -> std::slice::Iter<'_, Arc<dyn Fabric>> {
        self.fabrics.iter()
    }

    /// Returns their names in order of preference.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.fabrics.iter().map(|fabric| fabric.capabilities().name)
    }

    pub(crate) fn wire_names(&self) -> &FabricNames {
        &self.names
    }

    pub(crate) fn named(&self, name: &FabricName) -> Option<Arc<dyn Fabric>> {
        let at = self.names.0.iter().position(|own| own == name)?;
        Some(self.fabrics[at].clone())
    }

    /// Returns the environment of control connections.
    pub(crate) fn environment(&self) -> Arc<dyn Environment> {
        self.fabrics.first().expect("there is at least one").environment()
    }
}

impl fmt::Display for Fabrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.names.fmt(f)
    }
}

/// The only fabric of a node.
///
/// # Panics
/// If its name is empty, longer than 32 bytes, or has anything but printable ASCII.
impl From<Arc<dyn Fabric>> for Fabrics {
    fn from(fabric: Arc<dyn Fabric>) -> Self {
        Self::new(vec![fabric]).expect("a fabric has a short name in ASCII")
    }
}

/// The only fabric of a node.
///
/// # Panics
/// If its name is empty, longer than 32 bytes, or has anything but printable ASCII.
impl<F: Fabric + 'static> From<Arc<F>> for Fabrics {
    fn from(fabric: Arc<F>) -> Self {
        (fabric as Arc<dyn Fabric>).into()
    }
}

/// Invalid list of fabrics.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricsError {
    /// It has no fabric or too many.
    #[error("a list of {count} fabrics: 1 to {max} are allowed")]
    Count {
        /// How many fabrics it has.
        count: usize,
        /// Most that are allowed.
        max: usize,
    },
    /// A name is empty, too long, or cannot be printed.
    #[error("{name:?} is not a valid name of a fabric")]
    Name {
        /// The name, or its beginning.
        name: String,
    },
    /// Two have the same name.
    #[error("two fabrics are called {name}")]
    SameName {
        /// The name.
        name: String,
    },
}

/// The fabric that was chosen for a cluster formed by invitation, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FabricChoice {
    /// The name of the chosen one.
    pub fabric: String,
    /// The fabrics that would have been preferred, best first.
    pub passed_over: Vec<PassedOver>,
}

/// A fabric that was not chosen because some nodes lack it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassedOver {
    /// Its name.
    pub fabric: String,
    /// The addresses of the nodes that lack it; not empty.
    pub lacking: Vec<String>,
}

impl FabricChoice {
    /// Returns why this fabric was chosen: `everybody has it`, or `10.0.0.3:7471 has no verbs`.
    pub fn reason(&self) -> String {
        let mut reasons = self.passed_over.iter().map(PassedOver::to_string).peekable();
        match reasons.peek() {
            Some(_) => reasons.collect::<Vec<_>>().join("; "),
            None => "everybody has it".to_owned(),
        }
    }
}

impl fmt::Display for FabricChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.fabric, self.reason())
    }
}

impl fmt::Display for PassedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shown, more) = self.lacking.split_at(self.lacking.len().min(LACKING_SHOWN_MAX));
        f.write_str(&shown.join(", "))?;
        match more.len() {
            0 => {}
            1 => f.write_str(" and another one")?,
            others => write!(f, " and {others} others")?,
        }
        write!(f, " {} no {}", if self.lacking.len() == 1 { "has" } else { "have" }, self.fabric)
    }
}

/// The name of one fabric on the wire: 1 to 32 printable ASCII characters. If it reaches only some nodes that have it,
/// their group follows after a slash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct FabricName(String);

impl TryFrom<String> for FabricName {
    type Error = FabricsError;

    fn try_from(name: String) -> Result<Self, FabricsError> {
        let sound = (1..=NAME_LEN_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if sound { Ok(Self(name)) } else { Err(FabricsError::Name { name: name.chars().take(NAME_LEN_MAX).collect() }) }
    }
}

impl fmt::Display for FabricName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.split('/').next().unwrap_or_default())
    }
}

/// The names of fabrics on the wire: best first, at least one, few, all different.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub(crate) struct FabricNames(Vec<FabricName>);

impl TryFrom<Vec<String>> for FabricNames {
    type Error = FabricsError;

    fn try_from(names: Vec<String>) -> Result<Self, FabricsError> {
        let (count, max) = (names.len(), Fabrics::COUNT_MAX);
        if !(1..=max).contains(&count) {
            return Err(FabricsError::Count { count, max });
        }
        let names = names.into_iter().map(FabricName::try_from).collect::<Result<Vec<_>, _>>()?;
        let mut seen = BTreeSet::new();
        match names.iter().find(|name| !seen.insert(*name)) {
            Some(FabricName(name)) => Err(FabricsError::SameName { name: name.clone() }),
            None => Ok(Self(names)),
        }
    }
}

impl fmt::Display for FabricNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&listed(&self.0).join(", "))
    }
}

impl FabricNames {
    /// Returns the names that `others` have too, in this order, or `None` if there are none.
    pub(crate) fn in_common(&self, others: &Self) -> Option<Self> {
        self.filtered(|name| others.has(name))
    }

    /// Returns the names for which `keep` is true, in this order, or `None` if there are none.
    pub(crate) fn filtered(&self, keep: impl Fn(&FabricName) -> bool) -> Option<Self> {
        let kept: Vec<_> = self.0.iter().filter(|name| keep(name)).cloned().collect();
        (!kept.is_empty()).then_some(Self(kept))
    }

    pub(crate) fn has(&self, name: &FabricName) -> bool {
        self.0.contains(name)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &FabricName> {
        self.0.iter()
    }

    /// Returns the names that `others` lack, for people.
    pub(crate) fn lacked_by(&self, others: &Self) -> Vec<String> {
        self.0.iter().filter(|name| !others.has(name)).map(FabricName::to_string).collect()
    }

    /// Returns the names for people.
    pub(crate) fn to_strings(&self) -> Vec<String> {
        listed(&self.0)
    }

    /// Returns the names for people; marks those that `others` have as well but do not reach.
    pub(crate) fn to_strings_beside(&self, others: &Self) -> Vec<String> {
        let told = |name: &FabricName| {
            let elsewhere = !others.has(name) && others.0.iter().any(|other| other.to_string() == name.to_string());
            if elsewhere { format!("{name} of another host or user") } else { name.to_string() }
        };
        self.0.iter().map(told).collect()
    }

    /// Returns the names that come before `name`.
    pub(crate) fn preferred_to<'a>(&'a self, name: &'a FabricName) -> impl Iterator<Item = &'a FabricName> {
        self.0.iter().take_while(move |better| *better != name)
    }

    /// Chooses the first fabric that all of `others` have, with the nodes that lack better ones; returns `None` if
    /// there is no such fabric.
    pub(crate) fn choose(&self, others: &[(NodeId, FabricNames)]) -> Option<ChosenFabric> {
        let lacking = |name: &FabricName| -> BTreeSet<NodeId> {
            others.iter().filter(|(_, names)| !names.has(name)).map(|(node, _)| *node).collect()
        };
        let mut passed_over = Vec::new();
        for name in &self.0 {
            let lacking = lacking(name);
            if lacking.is_empty() {
                return Some(ChosenFabric { fabric: name.clone(), passed_over });
            }
            passed_over.push((name.clone(), lacking));
        }
        None
    }
}

/// The inviting node's choice, on the wire.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ChosenFabric {
    pub(crate) fabric: FabricName,
    /// The fabrics that would have been preferred, and the nodes that lack them.
    pub(crate) passed_over: Vec<(FabricName, BTreeSet<NodeId>)>,
}

impl ChosenFabric {
    /// Names the nodes by their addresses; leaves out invalid entries.
    pub(crate) fn explained(&self, address: impl Fn(NodeId) -> Option<String>) -> FabricChoice {
        let passed_over = self.passed_over.iter().take(Fabrics::COUNT_MAX).map(|(fabric, lacking)| PassedOver {
            fabric: fabric.to_string(),
            lacking: lacking.iter().filter_map(|&node| address(node)).collect(),
        });
        let passed_over = passed_over.filter(|passed| !passed.lacking.is_empty()).collect();
        FabricChoice { fabric: self.fabric.to_string(), passed_over }
    }
}

fn listed(names: &[FabricName]) -> Vec<String> {
    names.iter().map(FabricName::to_string).collect()
}

/// Longest name of a fabric in bytes.
const NAME_LEN_MAX: usize = 32;
/// Most nodes that are named for one fabric that they lack.
const LACKING_SHOWN_MAX: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Result<FabricNames, FabricsError> {
        list.iter().map(ToString::to_string).collect::<Vec<_>>().try_into()
    }

    #[test]
    fn what_has_another_reach_is_told_as_such() {
        let (theirs, ours) = (names(&["shm/a", "tcp"]).unwrap(), names(&["shm/b"]).unwrap());
        assert_eq!(theirs.to_strings_beside(&ours), ["shm of another host or user", "tcp"]);
        assert_eq!(theirs.to_strings_beside(&theirs), ["shm", "tcp"]);
    }

    fn chosen(ours: &[&str], others: &[&[&str]]) -> Option<String> {
        let others = (1..).map(NodeId).zip(others.iter().map(|list| names(list).unwrap())).collect::<Vec<_>>();
        let chosen = names(ours).unwrap().choose(&others)?;
        Some(chosen.explained(|node| Some(format!("node{node}"))).to_string())
    }

    #[test]
    fn the_first_that_everybody_has_is_chosen_and_who_lacks_the_others_is_named() {
        let both: &[&str] = &["tcp", "verbs"];
        let says = |text: &str| Some(text.to_owned());
        assert_eq!(chosen(&["verbs", "tcp"], &[both, both]), says("verbs: everybody has it"));
        assert_eq!(chosen(&["verbs", "tcp"], &[both, &["tcp"]]), says("tcp: node2 has no verbs"));
        assert_eq!(chosen(&["tcp", "verbs"], &[both, both]), says("tcp: everybody has it"));
        assert_eq!(chosen(&["verbs"], &[]), says("verbs: everybody has it"));
        assert_eq!(chosen(&["verbs", "tcp"], &[&["tcp"], &["verbs"]]), None);
        assert_eq!(chosen(&["shm/ab", "tcp"], &[&["shm/ab", "tcp"]]), says("shm: everybody has it"));
        assert_eq!(chosen(&["shm/ab", "tcp"], &[&["shm/cd", "tcp"]]), says("tcp: node1 has no shm"));
        let none: &[&str] = &["c"];
        let says_all = "c: node1, node2, node3 and 2 others have no a; node1, node2, node3 and 2 others have no b";
        assert_eq!(chosen(&["a", "b", "c"], &[none; 5]), says(says_all));
    }

    #[test]
    fn what_is_in_common_keeps_the_order() {
        let (ours, theirs) = (names(&["c", "b", "a"]).unwrap(), names(&["a", "d", "c"]).unwrap());
        assert_eq!(ours.in_common(&theirs), Some(names(&["c", "a"]).unwrap()));
        assert_eq!(ours.in_common(&names(&["x"]).unwrap()), None);
        assert_eq!(theirs.lacked_by(&ours), ["d"]);
    }

    #[test]
    fn lists_without_bounds_or_sense_are_refused() {
        let long = "n".repeat(33);
        for name in ["", " ", "a b", "tcp\n", "\u{1b}[2J", "naïve", long.as_str()] {
            assert!(matches!(names(&["tcp", name]), Err(FabricsError::Name { .. })), "{name:?}");
        }
        assert_eq!(names(&[]), Err(FabricsError::Count { count: 0, max: 8 }));
        assert!(names(&["a", "b", "c", "d", "e", "f", "g", "h"]).is_ok());
        assert!(matches!(names(&["a"; 9]), Err(FabricsError::Count { count: 9, .. })));
        assert_eq!(names(&["a", "b", "a"]), Err(FabricsError::SameName { name: "a".into() }));
    }

    #[test]
    fn lists_that_are_none_are_no_frames() {
        let wire = postcard::to_stdvec(&vec!["tcp", "tcp"]).unwrap();
        assert!(postcard::from_bytes::<FabricNames>(&wire).is_err());
        let wire = postcard::to_stdvec(&vec!["verbs", "tcp"]).unwrap();
        assert_eq!(postcard::from_bytes::<FabricNames>(&wire).unwrap(), names(&["verbs", "tcp"]).unwrap());
    }
}
