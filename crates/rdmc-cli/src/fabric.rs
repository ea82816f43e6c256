//! Options that choose a fabric.

use rdmc_files::{FabricSelection, FabricSettings};

use crate::exit::Exit;
use crate::named::{Named, Switch, one_of};

/// Options that choose a fabric.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FabricOptions {
    /// The fabric, which carries the data
    #[arg(long, env = "RDMC_FABRIC", default_value = "auto", value_name = "NAME", value_parser = one_of(&FABRICS))]
    pub(crate) fabric: FabricSelection,
    /// The RDMA device, such as mlx5_0; by default the one with the address that others reach, or with --fabric verbs
    /// the best one. RDMC_DEVICE does not count with --fabric tcp and shm
    #[arg(long, env = "RDMC_DEVICE", value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// Share no memory with processes of this host; by default --fabric auto does
    #[arg(long, env = "RDMC_NO_SHM", value_parser = Switch)]
    pub(crate) no_shm: bool,
}

impl FabricOptions {
    /// Returns the settings of the library.
    pub(crate) fn settings(self, encrypt: bool) -> FabricSettings {
        FabricSettings::new(self.fabric).device(self.device).share_memory(!self.no_shm).encrypt(encrypt)
    }
}

/// Options that choose the fabric of a session between two hosts.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SessionFabricOptions {
    /// The fabric, which carries the data: the best one that both ends offer
    #[arg(
        long,
        env = "RDMC_SESSION_FABRIC",
        default_value = "tcp",
        value_name = "NAME",
        value_parser = one_of(&SESSION_FABRICS)
    )]
    pub(crate) fabric: FabricSelection,
    /// The RDMA device, such as mlx5_0; by default the one with the address that the other end reaches, or with
    /// --fabric verbs the best one
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
}

impl SessionFabricOptions {
    /// Returns the settings of the library.
    pub(crate) fn settings(&self, encrypt: bool) -> anyhow::Result<FabricSettings> {
        self.check(encrypt)?;
        Ok(FabricSettings::new(self.fabric).device(self.device.clone()).encrypt(encrypt).for_sessions())
    }

    /// Refuses options that contradict each other.
    pub(crate) fn check(&self, encrypt: bool) -> anyhow::Result<()> {
        let wrong = match self.fabric {
            FabricSelection::Tcp if self.device.is_some() => "--device needs --fabric verbs or auto",
            FabricSelection::Verbs if encrypt => "--encrypt needs --fabric tcp: RDMA carries the data as it is",
            _ => return Ok(()),
        };
        Err(Exit::Usage.error(wrong))
    }
}

/// The fabrics of sessions.
const SESSION_FABRICS: [Named<FabricSelection>; 3] = [
    (
        FabricSelection::Auto,
        "auto",
        "RDMA if both ends have a device with the address by which the other one reaches them; else TCP",
    ),
    (FabricSelection::Tcp, "tcp", "TCP only"),
    (FabricSelection::Verbs, "verbs", "RDMA only"),
];

/// The fabrics between hosts.
pub(crate) const FABRICS: [Named<FabricSelection>; 4] = [
    (
        FabricSelection::Auto,
        "auto",
        "Shared memory if all members are on one host; else RDMA if every host has a device with the address by which \
         others reach it; else shared memory between processes of one host and TCP between hosts",
    ),
    (FabricSelection::Tcp, "tcp", "TCP only"),
    (FabricSelection::Shm, "shm", "Shared memory only, between processes of this host"),
    (FabricSelection::Verbs, "verbs", "RDMA only"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_a_session_that_contradict_each_other_are_refused() {
        let check = |fabric, device: Option<&str>, encrypt| {
            let options = SessionFabricOptions { fabric, device: device.map(str::to_owned) };
            options.check(encrypt).map_err(|error| format!("{error:#}"))
        };
        for (fabric, device, encrypt, named) in [
            (FabricSelection::Tcp, Some("rxe0"), false, "--device"),
            (FabricSelection::Verbs, Some("rxe0"), true, "--encrypt"),
        ] {
            assert!(check(fabric, device, encrypt).is_err_and(|error| error.contains(named)));
        }
        assert_eq!(check(FabricSelection::Auto, Some("rxe0"), true), Ok(()));
        assert_eq!(check(FabricSelection::Tcp, None, true), Ok(()));
    }

    #[test]
    fn every_fabric_is_typed_under_its_name() {
        let typed = FABRICS.map(|(fabric, name, _)| (fabric, name));
        assert_eq!(typed, FabricSelection::ALL.map(|fabric| (fabric, fabric.name())));
    }
}
