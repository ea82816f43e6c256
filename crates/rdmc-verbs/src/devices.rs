//! The machine's RDMA devices as the kernel lists them, and the choice of a port and an address.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use crate::error::VerbsError;
use crate::fabric::VerbsConfig;

/// One RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The kernel's name, such as `mlx5_0`.
    pub name: String,
    /// Whether it speaks iWARP, which has no immediates and is not supported.
    pub iwarp: bool,
    /// Its ports, numbered from 1.
    pub ports: Vec<PortInfo>,
}

impl DeviceInfo {
    /// Tells whether at least one of its ports can make reliable connections with immediates now.
    pub fn is_usable(&self) -> bool {
        !self.iwarp && self.ports.iter().any(PortInfo::is_active)
    }
}

/// One port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PortInfo {
    /// Its number, from 1.
    pub number: u8,
    /// Its state as the kernel names it, such as `ACTIVE` or `DOWN`.
    pub state: String,
    /// Whether it is an Ethernet port (RoCE) instead of an InfiniBand port.
    pub ethernet: bool,
    /// Its addresses.
    pub gids: Vec<GidInfo>,
}

impl PortInfo {
    /// Tells whether the port can be used now.
    pub fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }
}

/// One address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GidInfo {
    /// Its index in the port's table.
    pub index: u8,
    /// The address.
    pub gid: Ipv6Addr,
    /// The protocol that uses it.
    pub kind: GidKind,
}

impl GidInfo {
    /// Returns the IP address; for RoCE it is the address of the network interface.
    pub fn address(&self) -> IpAddr {
        self.gid.to_ipv4_mapped().map_or(IpAddr::V6(self.gid), IpAddr::V4)
    }

    fn preference(&self) -> u8 {
        match (self.kind, self.address()) {
            (GidKind::RoceV2, IpAddr::V4(_)) => 0,
            (GidKind::RoceV2, IpAddr::V6(address)) if !address.is_unicast_link_local() => 1,
            (GidKind::InfiniBand, _) => 2,
            (GidKind::RoceV2, _) => 3,
            (GidKind::RoceV1, _) => 4,
        }
    }
}

/// The protocol that uses an address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidKind {
    /// RDMA over UDP, which can be routed.
    RoceV2,
    /// RDMA over bare Ethernet frames.
    RoceV1,
    /// InfiniBand.
    InfiniBand,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoceV2 => "RoCE v2",
            Self::RoceV1 => "RoCE v1",
            Self::InfiniBand => "InfiniBand",
        })
    }
}

/// Lists the machine's RDMA devices, by name.
///
/// # Errors
/// The kernel's list could not be read. A machine without RDMA has an empty list, which is not an error.
pub fn devices() -> io::Result<Vec<DeviceInfo>> {
    devices_in(Path::new(SYSFS))
}

fn devices_in(directory: &Path) -> io::Result<Vec<DeviceInfo>> {
    let mut devices = Vec::new();
    for name in names_in(directory)? {
        let device = directory.join(&name);
        let iwarp = read(&device.join("node_type")).starts_with("4:");
        let mut ports = Vec::new();
        for number in numbers_in(&device.join("ports"))? {
            let port = device.join("ports").join(number.to_string());
            let ethernet = read(&port.join("link_layer")) == "Ethernet";
            let state = read(&port.join("state"));
            let state = state.split_once(": ").map_or(state.as_str(), |(_, word)| word).to_owned();
            ports.push(PortInfo { number, state, ethernet, gids: gids_in(&port, ethernet)? });
        }
        devices.push(DeviceInfo { name, iwarp, ports });
    }
    Ok(devices)
}

fn gids_in(port: &Path, ethernet: bool) -> io::Result<Vec<GidInfo>> {
    let mut gids = Vec::new();
    for index in numbers_in(&port.join("gids"))? {
        let Ok(gid) = read(&port.join("gids").join(index.to_string())).parse::<Ipv6Addr>() else { continue };
        // An empty entry, or one whose interface has no address yet: it has only the subnet's prefix.
        if gid.is_unspecified() || gid == Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0) {
            continue;
        }
        let kind = match read(&port.join("gid_attrs/types").join(index.to_string())).as_str() {
            "RoCE v2" => GidKind::RoceV2,
            _ if ethernet => GidKind::RoceV1,
            _ => GidKind::InfiniBand,
        };
        gids.push(GidInfo { index, gid, kind });
    }
    Ok(gids)
}

fn names_in(directory: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

fn numbers_in(directory: &Path) -> io::Result<Vec<u8>> {
    let mut numbers: Vec<u8> = names_in(directory)?.iter().filter_map(|name| name.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Reads a file of one line. A file that cannot be read, such as an empty entry of a table, counts as an empty line.
fn read(path: &Path) -> String {
    fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// Returns the names of the devices on which a fabric can be opened, in the order of [`devices`].
///
/// # Errors
/// The kernel's list cannot be read.
pub fn usable_devices() -> io::Result<Vec<String>> {
    Ok(devices()?.into_iter().filter(DeviceInfo::is_usable).map(|device| device.name).collect())
}

/// The port and address that a fabric uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceChoice {
    pub(crate) device: String,
    pub(crate) port: u8,
    pub(crate) ethernet: bool,
    pub(crate) gid: GidInfo,
}

/// Chooses the device, port and address that the configuration names, and the best ones where it names none.
pub(crate) fn choose(devices: &[DeviceInfo], config: &VerbsConfig) -> Result<DeviceChoice, VerbsError> {
    if devices.is_empty() {
        return Err(VerbsError::NoDevice);
    }
    let named = |device: &&DeviceInfo| config.device.as_ref().is_none_or(|name| *name == device.name);
    let candidates: Vec<&DeviceInfo> = devices.iter().filter(named).collect();
    if candidates.is_empty() {
        let have = devices.iter().map(|device| device.name.clone()).collect();
        return Err(VerbsError::UnknownDevice { name: config.device.clone().unwrap_or_default(), have });
    }
    if candidates.iter().all(|device| device.iwarp) {
        return Err(VerbsError::Iwarp { device: candidates[0].name.clone() });
    }
    let mut best: Option<DeviceChoice> = None;
    let mut problem = VerbsError::NoDevice;
    for device in candidates.into_iter().filter(|device| !device.iwarp) {
        let asked = |port: &&PortInfo| config.port.is_none_or(|number| number == port.number);
        let mut ports = device.ports.iter().filter(asked).peekable();
        if ports.peek().is_none() {
            let have = device.ports.iter().map(|port| port.number).collect();
            problem = VerbsError::UnknownPort { device: device.name.clone(), port: config.port.unwrap_or(1), have };
        }
        for port in ports {
            if !port.is_active() {
                let (device, state) = (device.name.clone(), port.state.clone());
                problem = VerbsError::PortDown { device, port: port.number, state };
                continue;
            }
            let fits = |gid: &&GidInfo| {
                config.gid_index.is_none_or(|index| index == gid.index)
                    && config.address.is_none_or(|address| address == gid.address())
            };
            let Some(gid) = port.gids.iter().filter(fits).min_by_key(|gid| gid.preference()) else {
                problem = VerbsError::NoGid {
                    device: device.name.clone(),
                    port: port.number,
                    have: port.gids.iter().map(|gid| gid.address()).collect(),
                };
                continue;
            };
            if best.as_ref().is_none_or(|best| gid.preference() < best.gid.preference()) {
                let (device, ethernet) = (device.name.clone(), port.ethernet);
                best = Some(DeviceChoice { device, port: port.number, ethernet, gid: *gid });
            }
        }
    }
    best.ok_or(problem)
}

/// Where the kernel lists RDMA devices.
const SYSFS: &str = "/sys/class/infiniband";

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, address: &str, kind: GidKind) -> GidInfo {
        let gid = match address.parse().unwrap() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        GidInfo { index, gid, kind }
    }

    fn port(number: u8, state: &str, gids: &[GidInfo]) -> PortInfo {
        PortInfo { number, state: state.into(), ethernet: true, gids: gids.to_vec() }
    }

    fn device(name: &str, ports: &[PortInfo]) -> DeviceInfo {
        DeviceInfo { name: name.into(), iwarp: false, ports: ports.to_vec() }
    }

    fn machine() -> Vec<DeviceInfo> {
        let first = [gid(0, "fe80::1", GidKind::RoceV1), gid(1, "fe80::1", GidKind::RoceV2)];
        let second = [
            gid(0, "fe80::2", GidKind::RoceV1),
            gid(2, "10.0.0.2", GidKind::RoceV1),
            gid(3, "10.0.0.2", GidKind::RoceV2),
        ];
        vec![
            device("a", &[port(1, "ACTIVE", &first), port(2, "DOWN", &[])]),
            device("b", &[port(1, "ACTIVE", &second)]),
            device("c", &[port(1, "ACTIVE", &[])]),
            DeviceInfo { iwarp: true, ..device("w", &[port(1, "ACTIVE", &second)]) },
        ]
    }

    fn chosen(config: &VerbsConfig) -> Result<(String, u8, u8), String> {
        let choice = choose(&machine(), config).map_err(|error| error.to_string())?;
        Ok((choice.device, choice.port, choice.gid.index))
    }

    #[test]
    fn roce_v2_with_an_ipv4_address_is_preferred() {
        assert_eq!(chosen(&VerbsConfig::default()), Ok(("b".into(), 1, 3)));
    }

    #[test]
    fn what_is_named_is_taken() {
        let config = VerbsConfig::default();
        let on_a = VerbsConfig { device: Some("a".into()), ..config.clone() };
        assert_eq!(chosen(&on_a), Ok(("a".into(), 1, 1)));
        assert_eq!(chosen(&VerbsConfig { gid_index: Some(0), ..on_a }), Ok(("a".into(), 1, 0)));
        let by_address = VerbsConfig { address: Some("10.0.0.2".parse().unwrap()), ..config.clone() };
        assert_eq!(chosen(&by_address), Ok(("b".into(), 1, 3)));
        assert_eq!(chosen(&VerbsConfig { gid_index: Some(2), ..by_address }), Ok(("b".into(), 1, 2)));
    }

    #[test]
    fn what_is_not_there_is_named() {
        let config = VerbsConfig::default();
        let on = |name: &str| VerbsConfig { device: Some(name.into()), ..config.clone() };
        let error = |config: VerbsConfig| chosen(&config).unwrap_err();
        assert!(error(on("z")).contains("no RDMA device \"z\"; there are a, b, c, w"), "{}", error(on("z")));
        assert!(error(VerbsConfig { port: Some(2), ..on("a") }).contains("port 2 of a is DOWN"));
        assert!(error(VerbsConfig { port: Some(7), ..on("a") }).contains("a has no port 7; it has 1, 2"));
        assert!(error(on("c")).contains("no address"), "{}", error(on("c")));
        assert!(error(on("w")).contains("iWARP"));
        let elsewhere = VerbsConfig { address: Some("10.9.9.9".parse().unwrap()), ..on("b") };
        assert!(error(elsewhere).contains("10.0.0.2"));
        assert!(matches!(choose(&[], &config), Err(VerbsError::NoDevice)));
        let iwarp = |name: &str| DeviceInfo { iwarp: true, ..device(name, &[]) };
        let error = choose(&[iwarp("v"), iwarp("w")], &config);
        assert!(matches!(error, Err(VerbsError::Iwarp { device }) if device == "v"));
    }

    #[test]
    fn the_kernels_list_is_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("rxe1/node_type", "1: CA\n");
        write("rxe1/ports/1/state", "4: ACTIVE\n");
        write("rxe1/ports/1/link_layer", "Ethernet\n");
        write("rxe1/ports/1/gids/0", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        write("rxe1/ports/1/gids/1", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n");
        write("rxe1/ports/1/gid_attrs/types/1", "RoCE v2\n");
        write("siw1/node_type", "4: RNIC\n");
        let devices = devices_in(root.path()).unwrap();
        let want = device("rxe1", &[port(1, "ACTIVE", &[gid(1, "10.77.0.1", GidKind::RoceV2)])]);
        assert_eq!(devices, [want, DeviceInfo { iwarp: true, ..device("siw1", &[]) }]);
        assert_eq!(devices_in(&root.path().join("missing")).unwrap(), []);
    }
}
