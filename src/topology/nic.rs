//! RDMA devices and their ports.

use std::path::{Path, PathBuf};

use super::address::PciAddress;
use super::sysfs::{Place, Sysfs};

/// An RDMA device of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Nic {
    /// Its name, as in `Device::open`.
    pub name: String,
    /// Its PCI function. Of a software device, that of the network interface that carries it. Or why there is none.
    pub function: Result<PciAddress, String>,
    /// The network interface that carries a software device (Soft-RoCE, Soft-iWARP); `None` for hardware.
    pub parent: Option<String>,
    /// Network interfaces of the same function.
    pub interfaces: Vec<String>,
    /// Its ports, in order.
    pub ports: Vec<Port>,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Port {
    /// Counted from 1.
    pub number: u32,
    /// Its logical state in the kernel's words, for example `ACTIVE` or `DOWN`.
    pub state: Option<String>,
    /// Its physical state in the kernel's words, for example `LinkUp` or `Disabled`.
    pub physical_state: Option<String>,
    /// Bits a second, in millions; `None` when it is down, or the kernel does not say.
    pub megabits: Option<u32>,
    /// `Ethernet` or `InfiniBand`.
    pub link_layer: Option<String>,
}

impl Nic {
    /// Why nothing can be sent from it, if so: no port of it is up.
    pub fn unusable(&self) -> Option<String> {
        if self.ports.iter().any(Port::is_active) {
            return None;
        }
        let state =
            |port: &Port| format!("port {} is {}", port.number, port.state.as_deref().unwrap_or("in no known state"));
        let states: Vec<_> = self.ports.iter().map(state).collect();
        Some(if states.is_empty() { "it has no ports".to_owned() } else { states.join(", ") })
    }

    /// Bits a second of its fastest port that is up, in millions.
    pub fn megabits(&self) -> Option<u32> {
        self.ports.iter().filter(|port| port.is_active()).filter_map(|port| port.megabits).max()
    }

    pub(super) fn read(sysfs: &Sysfs, name: &str) -> Self {
        let path = path(name);
        let parent =
            if sysfs.at(path.join("device")).symlink_metadata().is_ok() { None } else { carrier(sysfs, &path) };
        let ports = sysfs.names(path.join("ports"));
        Self {
            name: name.to_owned(),
            function: function(sysfs, name),
            interfaces: sysfs.names(path.join("device/net")),
            parent,
            ports: ports
                .iter()
                .filter_map(|number| Port::read(sysfs, &path.join("ports").join(number), number))
                .collect(),
        }
    }
}

impl Port {
    /// Whether it can carry data.
    pub fn is_active(&self) -> bool {
        self.state.as_deref() == Some("ACTIVE")
    }

    fn read(sysfs: &Sysfs, path: &Path, number: &str) -> Option<Self> {
        // As in `4: ACTIVE`.
        let word = |name| Some(sysfs.text(path.join(name))?.split_once(": ")?.1.to_owned());
        Some(Self {
            number: number.parse().ok()?,
            state: word("state"),
            physical_state: word("phys_state"),
            megabits: sysfs.text(path.join("rate")).and_then(|text| megabits(&text)),
            link_layer: sysfs.text(path.join("link_layer")),
        })
    }
}

/// The PCI function of an RDMA device or of the network interface that carries it, or why there is none.
pub(super) fn function(sysfs: &Sysfs, name: &str) -> Result<PciAddress, String> {
    let path = path(name);
    if sysfs.at(&path).symlink_metadata().is_err() {
        return Err("sysfs knows no such RDMA device".to_owned());
    }
    let device = path.join("device");
    if sysfs.at(&device).symlink_metadata().is_ok() {
        return match sysfs.place(&device) {
            Ok(Place { functions, .. }) => functions.last().copied().ok_or_else(|| "it is no PCI device".to_owned()),
            Err(error) => Err(format!("the link to its device leads nowhere ({error})")),
        };
    }
    let Some(carrier) = carrier(sysfs, &path) else {
        return Err("it has no device, and does not say which network interface carries it".to_owned());
    };
    let interface = lowest(sysfs, &carrier);
    let place = sysfs.place(Path::new("class/net").join(&interface).join("device")).unwrap_or_default();
    place.functions.last().copied().ok_or_else(|| format!("{interface}, which carries it, is no PCI device"))
}

/// The network interface that carries a software device.
fn carrier(sysfs: &Sysfs, path: &Path) -> Option<String> {
    let name = sysfs.text(path.join("parent")).or_else(|| sysfs.text(path.join("ports/1/gid_attrs/ndevs/0")))?;
    // It becomes part of a path.
    Some(name).filter(|name| !name.contains('/') && !name.starts_with('.'))
}

/// The interface that a VLAN or a bridge with one member is made of.
fn lowest(sysfs: &Sysfs, interface: &str) -> String {
    const DEEPEST: usize = 8;
    let mut interface = interface.to_owned();
    for _ in 0..DEEPEST {
        let names = sysfs.names(Path::new("class/net").join(&interface));
        let mut lower = names.iter().filter_map(|name| name.strip_prefix("lower_"));
        match (lower.next(), lower.next()) {
            (Some(one), None) => interface = one.to_owned(),
            _ => break,
        }
    }
    interface
}

/// Below the root of sysfs.
fn path(name: &str) -> PathBuf {
    Path::new("class/infiniband").join(name)
}

/// Of a text like `400 Gb/sec (4X NDR)`.
fn megabits(text: &str) -> Option<u32> {
    let number: f64 = text.split_once(" Gb/sec")?.0.trim().parse().ok()?;
    (0.1..=1e6).contains(&number).then_some((number * 1000.0).round() as u32)
}
