//! The MPIs to compare with.

use std::str::FromStr;

/// An MPI to compare with. It is parsed from `ompi`, `mpich:tcp` and the like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contestant {
    pub(crate) mpi: Mpi,
    /// Transport of the MPI; `None` for that of the fabric.
    pub(crate) transport: Option<Transport>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mpi {
    Open,
    Mpich,
}

/// Transport of an MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    SharedMemory,
    Tcp,
}

impl Transport {
    /// Returns the name of the transport.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shm",
            Self::Tcp => "tcp",
        }
    }
}

impl FromStr for Contestant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, transport) = text.split_once(':').map_or((text, None), |(name, by)| (name, Some(by)));
        let mpi = match name {
            "ompi" => Mpi::Open,
            "mpich" => Mpi::Mpich,
            _ => return Err(format!("{name:?} is not a known MPI: give ompi or mpich")),
        };
        let transport = match transport {
            None => None,
            Some("shm") => Some(Transport::SharedMemory),
            Some("tcp") => Some(Transport::Tcp),
            Some(other) => {
                return Err(format!("{other:?} is not one of its transports: give {name}:shm or {name}:tcp"));
            }
        };
        Ok(Self { mpi, transport })
    }
}

impl Contestant {
    /// Returns the transport if rdmc uses the named fabric.
    pub(crate) fn transport(self, fabric: &str) -> Transport {
        // All members are on this host, so that tcp+shm is shared memory.
        let is_tcp = fabric.starts_with("tcp") && !fabric.contains("shm");
        let as_fabric = if is_tcp { Transport::Tcp } else { Transport::SharedMemory };
        self.transport.unwrap_or(as_fabric)
    }
}

impl Mpi {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Open => "ompi",
            Self::Mpich => "mpich",
        }
    }

    /// Returns names of compilers and launchers in distributions. Names that only this MPI has come first.
    pub(crate) fn programs(self) -> [(&'static str, &'static str); 2] {
        match self {
            Self::Open => [("mpicc.openmpi", "mpirun.openmpi"), ("mpicc", "mpirun")],
            Self::Mpich => [("mpicc.mpich", "mpiexec.mpich"), ("mpicc", "mpiexec")],
        }
    }

    /// Tells whether a launcher's version is that of this MPI.
    pub(crate) fn knows(self, version: &str) -> bool {
        match self {
            Self::Open => version.contains("Open MPI") || version.contains("OpenRTE"),
            Self::Mpich => version.contains("HYDRA"),
        }
    }

    pub(crate) fn missing(self) -> &'static str {
        match self {
            Self::Open => {
                "Open MPI is not installed: there is no mpicc and mpirun of it \
                 (Debian, Ubuntu: apt install gcc openmpi-bin libopenmpi-dev)"
            }
            Self::Mpich => {
                "MPICH is not installed: there is no mpicc and mpiexec of it \
                 (Debian, Ubuntu: apt install gcc mpich libmpich-dev)"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mpi_is_named_with_or_without_its_transport() {
        let open = Contestant { mpi: Mpi::Open, transport: None };
        assert_eq!("ompi".parse(), Ok(open));
        for (fabric, transport) in [("tcp", "tcp"), ("shm", "shm"), ("tcp+shm", "shm")] {
            assert_eq!(open.transport(fabric).name(), transport, "{fabric}");
        }
        let insisting = "mpich:shm".parse::<Contestant>().unwrap();
        assert_eq!(insisting.transport("tcp"), Transport::SharedMemory);
        for (text, remedy) in [("lam", "ompi or mpich"), ("ompi:rdma", "ompi:shm or ompi:tcp")] {
            let error = text.parse::<Contestant>().unwrap_err();
            assert!(error.contains(remedy), "{error}");
        }
    }
}
