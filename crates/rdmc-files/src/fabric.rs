//! The fabrics that this host offers, and the fabric that a transfer uses.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use rdmc::{Buffer, Fabric, FabricChoice, Fabrics, Memory, Node, Rendezvous, TcpConfig, TcpFabric};
use serde::Serialize;

use crate::announcement::Medium;
use crate::costs::{Assumed, Path};
use crate::error::{Context, Kind, Problem, TransferError, chain};
use crate::size::POOL_BYTES_MIN;
use crate::wording::Wording;
use crate::words::printable;
use lockable::LOCKED_BYTES_BESIDE;
pub use lockable::Lockable;
use ports::{fitting, route_to};

mod lockable;
mod ports;

/// The fabrics between hosts that a user can select.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FabricSelection {
    /// Shared memory if all nodes are on one host. Else RDMA, if on every host a device has the address by which the
    /// others reach that host. Else shared memory between processes of one host and TCP between hosts.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// Shared memory between processes of this host only.
    Shm,
    /// RDMA only.
    Verbs,
}

impl FabricSelection {
    /// Every variant.
    pub const ALL: [Self; 4] = [Self::Auto, Self::Tcp, Self::Shm, Self::Verbs];

    /// Returns its name: `auto`, `tcp`, `shm` or `verbs`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Shm => SHM,
            Self::Verbs => VERBS,
        }
    }

    /// Returns what to assume of processes of this host that all use the fabric. A device is a port between processes
    /// of one host too.
    pub fn assumed_here(self) -> Assumed {
        match self {
            Self::Auto if shared_memory().is_ok() => Assumed::Host,
            Self::Shm => Assumed::Host,
            Self::Auto | Self::Tcp => Assumed::Loopback,
            Self::Verbs => Assumed::Network(Path::default()),
        }
    }
}

/// Settings of the fabrics that a node may offer. By default it offers every fabric of this host, unencrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FabricSettings {
    selection: FabricSelection,
    device: Option<String>,
    no_shm: bool,
    encrypt: bool,
    is_for_sessions: bool,
    wording: Wording,
}

/// The fabrics that a node offers.
#[derive(Clone, Debug)]
pub struct OfferedFabrics {
    fabrics: Fabrics,
    device: Option<String>,
    /// Memory that may be locked, if RDMA is offered.
    lockable: Lockable,
    /// Why the node does not offer RDMA.
    tcp_because: Option<String>,
}

/// The fabric of a transfer, and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FabricInUse {
    /// Name of the fabric.
    pub fabric: String,
    /// Why it was chosen; `fabric_reason` in JSON.
    #[serde(rename = "fabric_reason")]
    pub reason: String,
}

impl fmt::Display for FabricInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.fabric, printable(&self.reason))
    }
}

impl FabricInUse {
    /// Returns what the members share. They are known to be on one host only if they share memory.
    pub(crate) fn medium(&self) -> Medium {
        if self.fabric == SHM { Medium::Host } else { Medium::Network }
    }
}

impl OfferedFabrics {
    /// Returns the fabrics, best first.
    pub fn fabrics(&self) -> &Fabrics {
        &self.fabrics
    }

    /// Returns the RDMA device, if one is offered.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// Returns the memory that may be locked, if RDMA is offered.
    pub(crate) fn lockable(&self) -> Lockable {
        self.lockable
    }

    /// Describes the fabric that the nodes have agreed on.
    pub fn in_use(&self, choice: &FabricChoice) -> FabricInUse {
        self.in_use_unless(choice, None)
    }

    /// Describes the fabric that the nodes have agreed on. `withheld` tells why this node did not offer RDMA for this
    /// transfer.
    pub(crate) fn in_use_unless(&self, choice: &FabricChoice, withheld: Option<String>) -> FabricInUse {
        let here =
            (choice.fabric == SHM && self.fabrics.names().count() > 1).then(|| "all are on this host".to_owned());
        let own = withheld.or_else(|| self.tcp_because.clone()).map(|own| match self.lacking(choice) {
            Some(lacking) => format!("{own}; {lacking}"),
            None => own,
        });
        let own = here.or(own.filter(|_| choice.fabric != VERBS));
        FabricInUse { fabric: choice.fabric.clone(), reason: own.unwrap_or_else(|| choice.reason()) }
    }

    /// Names the nodes that lack a better fabric of this node. That nodes are on several hosts needs no explanation.
    fn lacking(&self, choice: &FabricChoice) -> Option<String> {
        let has = |name: &str| self.fabrics.names().any(|own| own == name);
        let lacking = choice.passed_over.iter().find(|other| other.fabric != SHM && has(&other.fabric));
        lacking.map(ToString::to_string)
    }

    /// Returns the length of a pool: `wanted` bytes, or less if the limit of locked memory demands it. `beside` bytes
    /// are registered for other purposes.
    pub fn pool_bytes(&self, over: &FabricInUse, wanted: u64, beside: u64) -> u64 {
        if over.fabric == VERBS { wanted.min(self.lockable.room(beside)) } else { wanted }
    }

    fn without_device(fabrics: Fabrics, because: impl Into<String>) -> Self {
        Self { fabrics, device: None, lockable: Lockable::WITHOUT_LIMIT, tcp_because: Some(because.into()) }
    }
}

impl FabricSettings {
    /// Makes settings with defaults but for the fabric.
    pub fn new(selection: FabricSelection) -> Self {
        Self { selection, ..Self::default() }
    }

    /// Selects an RDMA device by its name. By default it is the device with the address that others reach. With
    /// [`FabricSelection::Verbs`] it can also be the best device.
    pub fn device(self, name: impl Into<Option<String>>) -> Self {
        Self { device: name.into(), ..self }
    }

    /// Sets whether [`FabricSelection::Auto`] may share memory with processes of this host. It may by default.
    pub fn share_memory(self, share: bool) -> Self {
        Self { no_shm: !share, ..self }
    }

    /// Sets whether TCP encrypts the data. Sender and receivers must agree. It does not by default.
    pub fn encrypt(self, encrypt: bool) -> Self {
        Self { encrypt, ..self }
    }

    /// Makes them settings of sessions between distant hosts: TCP is as [`rdmc_wan::tcp_config`] has it, and processes
    /// of this host share no memory.
    pub fn for_sessions(self) -> Self {
        Self { is_for_sessions: true, no_shm: true, ..self }
    }

    /// Sets how messages call the settings.
    pub fn wording(self, wording: Wording) -> Self {
        Self { wording, ..self }
    }

    /// Opens the fabrics of a receiver that will listen at `address`.
    ///
    /// # Cancel safety
    /// Nothing stays open.
    ///
    /// # Errors
    /// The settings contradict each other, or require what this host does not have.
    pub async fn open_at(&self, address: &str) -> Result<OfferedFabrics, TransferError> {
        Ok(self.open_here(address, POOL_BYTES_MIN).await?)
    }

    /// Opens the fabrics of a sender to `receiver`, which registers `bytes` at once.
    ///
    /// # Cancel safety
    /// Nothing stays open.
    ///
    /// # Errors
    /// The settings contradict each other, or require what this host does not have.
    pub async fn open_towards(&self, receiver: &str, bytes: u64) -> Result<OfferedFabrics, TransferError> {
        Ok(self.open_for(receiver, bytes).await?)
    }

    pub(crate) fn selection(&self) -> FabricSelection {
        self.selection
    }

    pub(crate) async fn open_here(&self, address: &str, bytes: u64) -> Result<OfferedFabrics, Problem> {
        // The attempt to listen reports a malformed address.
        let found = self.look_up(address).await;
        self.open(found.map(|address| address.ip()), bytes)
    }

    pub(crate) async fn open_for(&self, receiver: &str, bytes: u64) -> Result<OfferedFabrics, Problem> {
        // The attempt to connect reports a receiver that is not found.
        let found = self.look_up(receiver).await;
        self.open(found.and_then(|receiver| route_to(receiver).ok()), bytes)
    }

    /// Looks up an address that a device is found by.
    async fn look_up(&self, address: &str) -> Option<SocketAddr> {
        match self.selection {
            FabricSelection::Tcp | FabricSelection::Shm => None,
            FabricSelection::Auto | FabricSelection::Verbs => tokio::net::lookup_host(address).await.ok()?.next(),
        }
    }

    /// Checks the settings against each other. `secured` tells whether only known peers are admitted.
    pub(crate) fn check(&self, secured: bool) -> Result<(), Problem> {
        if self.encrypt && !secured {
            let encrypt = self.wording.encrypt;
            let what = "needs security: a reader of the control connections could decrypt the data";
            return Err(Kind::Request.problem(format!("{encrypt} {what}")));
        }
        self.check_selection()
    }

    fn check_selection(&self) -> Result<(), Problem> {
        let Wording { fabric, device, no_shm, encrypt, .. } = self.wording;
        let wrong = match self.selection {
            FabricSelection::Tcp | FabricSelection::Shm if self.device.is_some() => {
                format!("{device} needs {fabric} verbs or auto")
            }
            FabricSelection::Shm if self.no_shm => format!("{no_shm} contradicts {fabric} shm"),
            FabricSelection::Verbs | FabricSelection::Shm if self.encrypt => {
                format!("{encrypt} needs TCP ({fabric} tcp): RDMA and shared memory carry the data as it is")
            }
            _ => return Ok(()),
        };
        Err(Kind::Request.problem(wrong))
    }

    /// Opens the fabrics of a node that others reach at `address`, if that is known. The node needs `bytes` of
    /// registered memory.
    fn open(&self, address: Option<IpAddr>, bytes: u64) -> Result<OfferedFabrics, Problem> {
        self.check_selection()?;
        let Wording { fabric, no_shm, .. } = self.wording;
        match self.selection {
            FabricSelection::Shm => {
                let opened = local::open().of_kind(Kind::Request)?;
                Ok(OfferedFabrics::without_device(opened.into(), format!("{fabric} shm")))
            }
            FabricSelection::Tcp | FabricSelection::Auto if self.encrypt => Ok(self.offer_tcp(self.wording.encrypt)),
            FabricSelection::Tcp => Ok(self.offer_tcp(format!("{fabric} tcp"))),
            FabricSelection::Verbs => {
                let ports = verbs::ports().unwrap_or_default();
                // On InfiniBand no device has an IP address. Then it is the named device or the best one.
                let fits = |address: &IpAddr| fitting(&ports, *address, self.device.as_deref(), &self.wording).is_ok();
                let address = address.filter(fits).filter(|address| !address.is_unspecified());
                let opened = verbs::open(self.device.as_deref(), address, Rendezvous::new());
                let (fabric, device) = opened.of_kind(Kind::Request)?;
                let lockable = Lockable::find(Some(&*fabric));
                lockable.check(bytes).map_err(|short| Kind::Request.problem(format!("{short}; {RAISE_THE_LIMIT}")))?;
                Ok(OfferedFabrics { fabrics: fabric.into(), device: Some(device), lockable, tcp_because: None })
            }
            FabricSelection::Auto => Ok(self.open_best(address, bytes).unwrap_or_else(|because| match self.no_shm {
                true => self.offer_tcp(format!("{because}; {no_shm}")),
                false => OfferedFabrics::without_device(self.best_first(None, Rendezvous::new()), because),
            })),
        }
    }

    fn offer_tcp(&self, because: impl Into<String>) -> OfferedFabrics {
        OfferedFabrics::without_device(TcpFabric::with_config(self.tcp()).into(), because)
    }

    fn tcp(&self) -> TcpConfig {
        let mut config = if self.is_for_sessions { rdmc_wan::tcp_config() } else { TcpConfig::default() };
        config.encrypt = self.encrypt;
        config
    }

    /// Opens RDMA and TCP. Fails with the reason if RDMA should not be used.
    fn open_best(&self, address: Option<IpAddr>, bytes: u64) -> Result<OfferedFabrics, String> {
        let ports = verbs::ports().map_err(|error| error.reason())?;
        let address = address.ok_or("the address at which others reach this host is unknown")?;
        let device = fitting(&ports, address, self.device.as_deref(), &self.wording)?;
        let address = Some(address).filter(|address| !address.is_unspecified());
        let rendezvous = Rendezvous::new();
        let opened = verbs::open(Some(device), address, rendezvous.clone());
        let (fabric, device) = opened.map_err(|error| error.reason())?;
        let lockable = Lockable::find(Some(&*fabric));
        let see_doctor = self.wording.see_doctor("; ");
        lockable.check(bytes.max(AUTO_BYTES_MIN)).map_err(|short| format!("{short}{see_doctor}"))?;
        let fabrics = self.best_first(Some(fabric), rendezvous);
        Ok(OfferedFabrics { fabrics, device: Some(device), lockable, tcp_because: None })
    }

    /// Lists the fabrics of this host, best first: shared memory if all nodes are on it, RDMA, shared memory within
    /// hosts with TCP between them, TCP alone.
    fn best_first(&self, rdma: Option<Arc<dyn Fabric>>, rendezvous: Arc<Rendezvous>) -> Fabrics {
        type Open = fn(Arc<Rendezvous>) -> Result<Arc<dyn Fabric>, Problem>;
        let found = |open: Open| {
            let found = (!self.no_shm).then(|| open(rendezvous.clone()))?;
            found.inspect_err(|error| tracing::debug!(error = error.reason(), "no shared memory")).ok()
        };
        let (here, mixed) = (found(local::open_beside), found(local::open_with_tcp));
        let tcp: Arc<dyn Fabric> = TcpFabric::with_rendezvous(self.tcp(), rendezvous);
        Fabrics::new([here, rdma, mixed, Some(tcp)].into_iter().flatten().collect()).expect("their names differ")
    }
}

/// Checks whether processes of this host can share memory.
///
/// # Errors
/// Why they cannot.
pub fn shared_memory() -> Result<(), TransferError> {
    local::open()?;
    Ok(())
}

/// Finds the usable RDMA devices of this host, and the address where a member on each can listen. The list is not
/// empty.
///
/// `name` selects the device of that name or, if there is none, the devices whose names begin with it.
///
/// # Errors
/// Why no device is usable.
pub fn usable_devices(name: Option<&str>) -> Result<Vec<(String, Option<IpAddr>)>, TransferError> {
    let ports = verbs::ports()?;
    let usable = ports.iter().filter(|port| port.active && !port.addresses.is_empty());
    let mut usable: Vec<_> = usable.map(|port| (port.device.clone(), port.routable())).collect();
    usable.dedup_by(|later, first| later.0 == first.0);
    if let Some(name) = name {
        let exact = usable.iter().any(|(device, _)| device == name);
        usable.retain(|(device, _)| if exact { device == name } else { device.starts_with(name) });
    }
    if usable.is_empty() {
        // Fails with what is missing.
        let (_, device) = verbs::open(name, None, Rendezvous::new()).of_kind(Kind::Request)?;
        usable.push((device, None));
    }
    Ok(usable)
}

/// Opens the fabric of one RDMA device.
///
/// # Errors
/// The device cannot be used.
pub fn open_device(device: &str, address: Option<IpAddr>) -> Result<Arc<dyn Fabric>, TransferError> {
    let (fabric, _) = verbs::open(Some(device), address, Rendezvous::new()).of_kind(Kind::Request)?;
    Ok(fabric)
}

/// Prepares memory for sending. If the device refuses to register it, as some do with mapped files, `copy` fills
/// registered memory of the same length.
///
/// # Cancel safety
/// The memory is released.
///
/// # Errors
/// The memory can be neither registered nor copied.
pub async fn register_to_send(
    node: &Node,
    memory: Memory,
    copy: impl FnOnce(&mut [u8]) -> std::io::Result<()> + Send + 'static,
) -> Result<Buffer, TransferError> {
    Ok(register_or_copy(node, memory, copy).await?)
}

async fn register_or_copy(
    node: &Node,
    memory: Memory,
    copy: impl FnOnce(&mut [u8]) -> std::io::Result<()> + Send + 'static,
) -> Result<Buffer, Problem> {
    let len = memory.len();
    let registering = node.clone();
    // Registering reads a file, because a device needs all pages in memory.
    let registered = tokio::task::spawn_blocking(move || registering.register(memory)).await?;
    let refusal = match registered {
        Ok(region) => return Ok(region.into_shared()),
        Err(refusal) => chain(&refusal),
    };
    tracing::debug!(refusal, len, "copied because it cannot be registered");
    let allocated = node.allocate(len).await;
    let mut buffer = allocated.with_context(|| format!("it can be neither registered ({refusal}) nor copied"))?;
    let copied = tokio::task::spawn_blocking(move || {
        copy(&mut buffer)?;
        Ok::<_, Problem>(buffer.freeze())
    });
    copied.await?
}

#[cfg(target_os = "linux")]
mod local {
    use std::sync::Arc;

    use rdmc::{Fabric, Rendezvous, ShmFabric, TcpConfig, TcpShmFabric};

    use crate::error::{Context, Problem};

    /// Opens the fabric of shared memory between processes of this host.
    pub(super) fn open() -> Result<Arc<dyn Fabric>, Problem> {
        Ok(ShmFabric::new().context("processes cannot share memory here")?)
    }

    /// Opens the fabric of shared memory for a node that offers other fabrics too.
    pub(super) fn open_beside(rendezvous: Arc<Rendezvous>) -> Result<Arc<dyn Fabric>, Problem> {
        Ok(ShmFabric::with_rendezvous(rendezvous)?)
    }

    /// Opens the fabric of shared memory with TCP to other hosts.
    pub(super) fn open_with_tcp(rendezvous: Arc<Rendezvous>) -> Result<Arc<dyn Fabric>, Problem> {
        Ok(TcpShmFabric::with_rendezvous(TcpConfig::default(), rendezvous)?)
    }
}

#[cfg(not(target_os = "linux"))]
mod local {
    use std::sync::Arc;

    use rdmc::{Fabric, Rendezvous};

    use crate::error::Problem;

    pub(super) fn open() -> Result<Arc<dyn Fabric>, Problem> {
        Err(Problem::local("the fabric shm exists on Linux only"))
    }

    pub(super) fn open_beside(_: Arc<Rendezvous>) -> Result<Arc<dyn Fabric>, Problem> {
        open()
    }

    pub(super) fn open_with_tcp(_: Arc<Rendezvous>) -> Result<Arc<dyn Fabric>, Problem> {
        open()
    }
}

#[cfg(target_os = "linux")]
mod verbs {
    use std::net::IpAddr;
    use std::sync::Arc;

    use rdmc::{Fabric, Rendezvous};
    use rdmc_verbs::{VerbsConfig, VerbsFabric};

    use super::ports::Port;
    use crate::error::{Context, Problem};

    /// Lists the ports that reliable connections can use.
    pub(super) fn ports() -> Result<Vec<Port>, Problem> {
        let devices = rdmc_verbs::devices().context("RDMA devices cannot be listed")?;
        let usable = devices.into_iter().filter(|device| !device.iwarp);
        let ports = usable.flat_map(|device| {
            device.ports.into_iter().map(move |port| Port {
                device: device.name.clone(),
                number: port.number,
                active: port.is_active(),
                ethernet: port.ethernet,
                addresses: port.gids.iter().map(rdmc_verbs::GidInfo::address).collect(),
                state: port.state,
            })
        });
        Ok(ports.collect())
    }

    /// Opens the named device, the device with the address, or the best one.
    pub(super) fn open(
        device: Option<&str>,
        address: Option<IpAddr>,
        rendezvous: Arc<Rendezvous>,
    ) -> Result<(Arc<dyn Fabric>, String), Problem> {
        let mut config = VerbsConfig::default();
        config.device = device.map(str::to_owned);
        config.address = address;
        let fabric = VerbsFabric::open_with_rendezvous(config, rendezvous)?;
        let device = fabric.device().to_owned();
        Ok((fabric, device))
    }
}

#[cfg(not(target_os = "linux"))]
mod verbs {
    use std::net::IpAddr;
    use std::sync::Arc;

    use rdmc::{Fabric, Rendezvous};

    use super::ports::Port;
    use crate::error::Problem;

    pub(super) fn ports() -> Result<Vec<Port>, Problem> {
        Ok(Vec::new())
    }

    pub(super) fn open(
        _: Option<&str>,
        _: Option<IpAddr>,
        _: Arc<Rendezvous>,
    ) -> Result<(Arc<dyn Fabric>, String), Problem> {
        Err(Problem::local("the fabric verbs exists on Linux only"))
    }
}

/// Least registered memory with which RDMA is chosen automatically: 1 GiB, with the memory that is locked beside it.
const AUTO_BYTES_MIN: u64 = (1 << 30) - LOCKED_BYTES_BESIDE;
/// Remedy against a low limit of locked memory.
pub const RAISE_THE_LIMIT: &str =
    "raise the limit with `ulimit -l`, in /etc/security/limits.d or by LimitMEMLOCK= of the service";
/// Name of the fabric of shared memory.
const SHM: &str = "shm";
/// Name of the fabric of RDMA devices.
const VERBS: &str = "verbs";

#[cfg(test)]
pub(crate) mod strict;

#[cfg(test)]
mod tests {
    use super::*;

    fn wording() -> Wording {
        Wording { fabric: "--fabric", device: "--device", encrypt: "--encrypt", ..Wording::default() }
    }

    #[test]
    fn a_pool_over_rdma_is_not_longer_than_what_may_be_locked() {
        let offered =
            OfferedFabrics { lockable: Lockable::up_to(2 << 30), ..FabricSettings::default().offer_tcp("a test") };
        let over = |fabric: &str| FabricInUse { fabric: fabric.into(), reason: String::new() };
        assert_eq!(offered.pool_bytes(&over("tcp"), 4 << 30, 0), 4 << 30);
        assert_eq!(offered.pool_bytes(&over("verbs"), 4 << 30, 0), (2 << 30) - LOCKED_BYTES_BESIDE);
        assert_eq!(offered.pool_bytes(&over("verbs"), 1 << 30, 1 << 20), 1 << 30);
    }

    #[tokio::test]
    async fn the_loopback_is_never_taken_for_rdma() {
        let settings = FabricSettings::default();
        for offered in [settings.open_at("127.0.0.1:0").await, settings.open_towards("127.0.0.1:1", 0).await] {
            let offered = offered.unwrap();
            assert_eq!((offered.fabrics.to_string(), offered.device), ("shm, tcp+shm, tcp".into(), None));
            assert!(offered.tcp_because.is_some());
        }
    }

    #[tokio::test]
    async fn what_is_to_be_encrypted_travels_by_tcp() {
        for selection in [FabricSelection::Auto, FabricSelection::Tcp] {
            let settings = FabricSettings::new(selection).encrypt(true).wording(wording());
            let offered = settings.open_at("0.0.0.0:0").await.unwrap();
            assert_eq!(offered.fabrics.to_string(), "tcp+tls");
            assert_eq!(offered.tcp_because.as_deref(), Some("--encrypt"));
        }
        for selection in [FabricSelection::Shm, FabricSelection::Verbs] {
            let error = FabricSettings::new(selection).encrypt(true).open_at("0.0.0.0:0").await.unwrap_err();
            assert_eq!(error.code(), 2);
            assert!(error.to_string().contains("RDMA and shared memory carry the data as it is"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_device_that_is_not_there_is_a_wrong_request_if_it_must_be() {
        let named = |selection| FabricSettings::new(selection).device("no-such-device".to_owned());
        for selection in [FabricSelection::Verbs, FabricSelection::Tcp] {
            assert_eq!(named(selection).open_at("0.0.0.0:0").await.unwrap_err().code(), 2);
        }
        let offered = named(FabricSelection::Auto).open_at("0.0.0.0:0").await.unwrap();
        assert_eq!(offered.fabrics.to_string(), "shm, tcp+shm, tcp");
        assert!(offered.tcp_because.is_some_and(|reason| reason.contains("no RDMA device no-such-device")));
    }

    #[tokio::test]
    async fn memory_that_cannot_be_registered_is_copied() {
        let node = strict::Strict::nodes(1).await.remove(0);
        let registered = register_to_send(&node, Memory::from(vec![7; 5000]), |_| panic!("it needs no copy"));
        assert_eq!(registered.await.unwrap()[..], [7; 5000]);
        let copied = register_to_send(&node, Memory::from(bytes::Bytes::from_static(b"bytes")), |to| {
            to.copy_from_slice(b"bytes");
            Ok(())
        });
        assert_eq!(copied.await.unwrap()[..], *b"bytes");
    }
}
