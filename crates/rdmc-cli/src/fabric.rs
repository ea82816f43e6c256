//! Options that choose a fabric.

use rdmc_files::{FabricSelection, FabricSettings};

use crate::named::{Named, Switch, one_of};
use crate::wording::wording;

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
    pub(crate) fn settings(&self) -> FabricSettings {
        FabricSettings::new(self.fabric).device(self.device.clone()).for_sessions().wording(wording())
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

    #[tokio::test]
    async fn options_of_a_session_that_contradict_each_other_are_refused() {
        let check = async |fabric, device: Option<&str>, encrypt| {
            let options = SessionFabricOptions { fabric, device: device.map(str::to_owned) };
            let opened = options.settings().encrypt(encrypt).open_at("127.0.0.1:0").await;
            opened.map(drop).map_err(|error| error.to_string())
        };
        for (fabric, device, encrypt, named) in [
            (FabricSelection::Tcp, Some("rxe0"), false, "--device"),
            (FabricSelection::Verbs, Some("rxe0"), true, "--encrypt"),
        ] {
            assert!(check(fabric, device, encrypt).await.is_err_and(|error| error.contains(named)));
        }
        assert_eq!(check(FabricSelection::Auto, Some("rxe0"), true).await, Ok(()));
        assert_eq!(check(FabricSelection::Tcp, None, true).await, Ok(()));
    }

    #[test]
    fn every_fabric_is_typed_under_its_name() {
        let typed = FABRICS.map(|(fabric, name, _)| (fabric, name));
        assert_eq!(typed, FabricSelection::ALL.map(|fabric| (fabric, fabric.name())));
    }
}
