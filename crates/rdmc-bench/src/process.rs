//! The roles of the processes that the benchmark starts, and their command lines.

use anyhow::{Context, bail};
use rdmc_files::FabricSelection;

use crate::error::BenchError;

/// Role of a process that the benchmark has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProcessRole {
    /// A member of the groups, run by [`run_member`](crate::run_member).
    Member(MemberRole),
    /// A receiver of a plain TCP stream, run by [`run_sink`](crate::run_sink).
    Sink {
        /// Bytes of a message.
        bytes: usize,
    },
    /// The end of a flow that posts messages, run by [`run_flow_source`](crate::run_flow_source).
    FlowSource {
        /// What it must know, in JSON.
        setup: String,
    },
    /// The other end of a flow, run by [`run_flow_target`](crate::run_flow_target).
    FlowTarget {
        /// What it must know, in JSON.
        setup: String,
    },
    /// A process that runs a command and ends it with its own standard input, run by [`run_guard`](crate::run_guard).
    Guard {
        /// The command and its arguments.
        command: Vec<String>,
    },
}

/// What a member must know when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberRole {
    /// The fabric.
    pub(crate) fabric: FabricSelection,
    /// The RDMA device.
    pub(crate) device: Option<String>,
    /// Whether it invites the others or is invited.
    pub(crate) invites: bool,
}

impl ProcessRole {
    /// Reads the role from the command line, after the arguments of [`Program`](crate::local::Program).
    ///
    /// # Errors
    /// The arguments are not those of a role.
    pub fn from_arguments(arguments: &[String]) -> Result<Self, BenchError> {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        Ok(match words[..] {
            [MEMBER, fabric, role, ..] => {
                let device = words.get(3).map(|device| (*device).to_owned());
                Self::Member(MemberRole { fabric: fabric_of(fabric)?, device, invites: role == INVITES })
            }
            [SINK, bytes] => Self::Sink { bytes: bytes.parse().context("the bytes of a message")? },
            [FLOW_SOURCE, setup] => Self::FlowSource { setup: (*setup).to_owned() },
            [FLOW_TARGET, setup] => Self::FlowTarget { setup: (*setup).to_owned() },
            [GUARD, ..] => Self::Guard { command: arguments[1..].to_vec() },
            _ => return Err(anyhow::anyhow!("{arguments:?} is not a role of the benchmark").into()),
        })
    }

    /// Returns the arguments of a process with this role.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        match self {
            Self::Member(MemberRole { fabric, device, invites }) => {
                let mut arguments = words(&[MEMBER, fabric.name(), if *invites { INVITES } else { INVITED }]);
                arguments.extend(device.clone());
                arguments
            }
            Self::Sink { bytes } => words(&[SINK, &bytes.to_string()]),
            Self::FlowSource { setup } => words(&[FLOW_SOURCE, setup]),
            Self::FlowTarget { setup } => words(&[FLOW_TARGET, setup]),
            Self::Guard { command } => words(&[GUARD]).into_iter().chain(command.iter().cloned()).collect(),
        }
    }
}

fn fabric_of(name: &str) -> anyhow::Result<FabricSelection> {
    match FabricSelection::ALL.into_iter().find(|fabric| fabric.name() == name) {
        Some(fabric) => Ok(fabric),
        None => bail!("{name:?} is not a fabric"),
    }
}

/// First arguments of the roles.
const MEMBER: &str = "member";
const SINK: &str = "sink";
const FLOW_SOURCE: &str = "flow-source";
const FLOW_TARGET: &str = "flow-target";
const GUARD: &str = "guard";
/// Third argument of a member.
const INVITES: &str = "invites";
const INVITED: &str = "invited";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_knows_its_role_by_its_arguments() {
        let member = |fabric, device: Option<&str>, invites| {
            ProcessRole::Member(MemberRole { fabric, device: device.map(str::to_owned), invites })
        };
        let command = ["mpirun", "-n", "2", "--"].map(str::to_owned).to_vec();
        let roles = [
            member(FabricSelection::Tcp, None, true),
            member(FabricSelection::Verbs, Some("rxe0"), false),
            ProcessRole::Sink { bytes: 17 },
            ProcessRole::FlowSource { setup: "{\"a\": 1}".into() },
            ProcessRole::FlowTarget { setup: "{}".into() },
            ProcessRole::Guard { command },
        ];
        for role in roles {
            assert_eq!(ProcessRole::from_arguments(&role.arguments()), Ok(role));
        }
        for wrong in [&[][..], &["member"], &["member", "pigeon", "invites"], &["sink", "many"], &["spy"]] {
            let arguments: Vec<String> = wrong.iter().map(ToString::to_string).collect();
            assert!(ProcessRole::from_arguments(&arguments).is_err(), "{wrong:?}");
        }
    }
}
