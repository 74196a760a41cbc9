//! PCI functions and the bridges above them.

use std::path::Path;

use super::address::PciAddress;
use super::answer::Answer;
use super::config::{self, Acs};
use super::cpus;
use super::sysfs::Sysfs;

/// A PCI function that RDMA is interested in: a GPU, another display device, an accelerator, or the function of a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Function {
    /// Its address, which is its name.
    pub address: PciAddress,
    /// What it is.
    pub kind: FunctionKind,
    /// The PCI vendor's number; NVIDIA's is 0x10de.
    pub vendor: Option<u16>,
    /// The vendor's number for this kind of device.
    pub device: Option<u16>,
    /// Class code: base class, subclass and programming interface, 8 bits each.
    pub class: Option<u32>,
    /// The kernel's driver, if one has it.
    pub driver: Option<String>,
    /// The NUMA node of its host bridge; `None` when the firmware does not say (`-1`) or the kernel knows no nodes.
    pub numa_node: Option<u32>,
    /// CPUs that share the NUMA node with it, in order; empty when that is not known.
    pub local_cpus: Vec<usize>,
    /// Its link to the bridge above.
    pub link: PcieLink,
    /// Who translates the addresses that it uses.
    pub iommu: Iommu,
    /// Whether Address Translation Services are enabled: it caches translations of its own.
    pub ats: Answer,
    /// The host bridge that it is below, for example `pci0000:80`; `None` when its place is not in sysfs.
    pub host_bridge: Option<String>,
    /// The bridges above it, nearest first, up to the one below the host bridge. A switch shows as two: a downstream and an
    /// upstream port.
    pub bridges: Vec<PciAddress>,
}

/// What a function is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FunctionKind {
    /// A display or 3D controller of NVIDIA.
    Gpu,
    /// A display device of another vendor: no GPU that CUDA knows.
    Display,
    /// A processing accelerator, as which the GPUs of some servers show.
    Accelerator,
    /// What an RDMA device belongs to.
    Nic,
}

/// A bridge on the way to a GPU or a NIC: a root port, or a port of a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Bridge {
    /// Its address.
    pub address: PciAddress,
    /// Whether it redirects peer-to-peer traffic.
    pub acs: Acs,
    /// Its link to the bridge above; of a root port, the one below.
    pub link: PcieLink,
}

/// A PCIe link. What is `None` the kernel does not know, as for a device on a root bus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PcieLink {
    /// Megatransfers a second for each lane: 16000 is Gen 4, 32000 Gen 5.
    pub speed: Option<u32>,
    /// Lanes.
    pub width: Option<u32>,
    /// The fastest that the device can do, in megatransfers a second.
    pub max_speed: Option<u32>,
    /// The most lanes that the device has.
    pub max_width: Option<u32>,
}

/// The IOMMU's part in a function's accesses to memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Iommu {
    /// Functions of one group cannot be told apart by the IOMMU.
    pub group: Option<u32>,
    /// What it does.
    pub mode: IommuMode,
}

/// What an IOMMU does with a function's addresses, by its group's `type` in sysfs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IommuMode {
    /// The function is in no group: no IOMMU takes part.
    None,
    /// Addresses go through unchanged (`identity`, as with `iommu=pt`).
    Identity,
    /// Addresses are translated (`DMA` or `DMA-FQ`, whichever it is).
    Translated(String),
    /// Every access is blocked (`blocked`).
    Blocked,
    /// It is in a group, and this is why no more can be told.
    Unknown(String),
}

impl PcieLink {
    /// Bits a second in each direction that the link carries, in millions, after its encoding and before headers. `None` when speed or
    /// width are not known.
    pub fn megabits(&self) -> Option<u32> {
        let (speed, width) = (self.speed?, self.width?);
        // 8b/10b up to Gen 2, 128b/130b up to Gen 5, 242 of 256 bytes of a flit from Gen 6 on.
        let (payload, symbol) = match speed {
            ..=5_000 => (8, 10),
            5_001..=32_000 => (128, 130),
            _ => (242, 256),
        };
        u32::try_from(u64::from(speed) * u64::from(width) * payload / symbol).ok()
    }

    /// Whether it runs slower or narrower than the device can. Links of idle devices may.
    pub fn is_degraded(&self) -> Answer {
        match (self.speed, self.max_speed, self.width, self.max_width) {
            (Some(speed), Some(max_speed), Some(width), Some(max_width)) => {
                (speed < max_speed || width < max_width).into()
            }
            _ => Answer::Unknown("its speed or width is not in sysfs".into()),
        }
    }

    pub(super) fn read(sysfs: &Sysfs, function: &Path) -> Self {
        let speed = |name| megatransfers(&sysfs.text(function.join(name))?);
        // A width of 0 or 63 (255 in older kernels) means that there is no link.
        let width = |name| sysfs.number(function.join(name)).filter(|lanes| (1..=32).contains(lanes));
        Self {
            speed: speed("current_link_speed"),
            width: width("current_link_width"),
            max_speed: speed("max_link_speed"),
            max_width: width("max_link_width"),
        }
    }
}

impl Function {
    /// `None` when it is none of the kinds. `is_nic`: an RDMA device belongs to it.
    pub(super) fn read(sysfs: &Sysfs, address: PciAddress, is_nic: bool) -> Option<Self> {
        let path = path(address);
        let class = sysfs.hex(path.join("class"));
        let half = |name| sysfs.hex(path.join(name)).and_then(|number| u16::try_from(number).ok());
        let vendor = half("vendor");
        let kind = match (class.map(|class| class >> 16), vendor) {
            _ if is_nic => FunctionKind::Nic,
            (Some(DISPLAY), Some(NVIDIA)) => FunctionKind::Gpu,
            (Some(DISPLAY), _) => FunctionKind::Display,
            (Some(ACCELERATOR), _) => FunctionKind::Accelerator,
            _ => return None,
        };
        Some(Self {
            address,
            kind,
            vendor,
            device: half("device"),
            class,
            driver: sysfs.link(path.join("driver")),
            numa_node: numa_node(sysfs, address),
            local_cpus: cpus::list_of(sysfs, &path).unwrap_or_default(),
            link: PcieLink::read(sysfs, &path),
            iommu: Iommu::read(sysfs, &path),
            ats: config::ats(&sysfs.at(path.join("config"))),
            host_bridge: None,
            bridges: Vec::new(),
        })
    }
}

impl Bridge {
    pub(super) fn read(sysfs: &Sysfs, address: PciAddress) -> Self {
        let path = path(address);
        Self { address, acs: config::acs(&sysfs.at(path.join("config"))), link: PcieLink::read(sysfs, &path) }
    }
}

impl Iommu {
    fn read(sysfs: &Sysfs, function: &Path) -> Self {
        let Some(name) = sysfs.link(function.join("iommu_group")) else {
            return Self { group: None, mode: IommuMode::None };
        };
        let mode = match sysfs.text(format!("kernel/iommu_groups/{name}/type")).as_deref() {
            Some("identity") => IommuMode::Identity,
            Some("blocked") => IommuMode::Blocked,
            Some(kind @ ("DMA" | "DMA-FQ")) => IommuMode::Translated(kind.to_owned()),
            Some(kind) => IommuMode::Unknown(format!("the type of its group {name} is {kind:?}")),
            None => IommuMode::Unknown(format!("the type of its group {name} cannot be read")),
        };
        Self { group: name.parse().ok(), mode }
    }
}

// Base classes, of the PCI Code and ID Assignment Specification.
const DISPLAY: u32 = 0x03;
const ACCELERATOR: u32 = 0x12;
const NVIDIA: u16 = 0x10de;

/// Below the root of sysfs.
pub(super) fn path(address: PciAddress) -> std::path::PathBuf {
    Path::new("bus/pci/devices").join(address.to_string())
}

/// `None` for -1, and where there is no such file.
pub(super) fn numa_node(sysfs: &Sysfs, address: PciAddress) -> Option<u32> {
    sysfs.number(path(address).join("numa_node"))
}

/// Of a text like `16.0 GT/s PCIe`, or `2.5 GT/s` in older kernels.
fn megatransfers(text: &str) -> Option<u32> {
    let number: f64 = text.split_once(" GT/s")?.0.trim().parse().ok()?;
    (0.1..=1024.0).contains(&number).then_some((number * 1000.0).round() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_of_links() {
        for (text, speed) in [
            ("16.0 GT/s PCIe", Some(16_000)),
            ("2.5 GT/s", Some(2_500)),
            ("8 GT/s", Some(8_000)),
            ("64.0 GT/s PCIe", Some(64_000)),
            ("Unknown", None),
            ("", None),
            ("-1 GT/s", None),
            ("nan GT/s", None),
            ("1e99 GT/s", None),
        ] {
            assert_eq!(megatransfers(text), speed, "{text:?}");
        }
    }

    #[test]
    fn what_a_link_carries() {
        let link = |speed, width| PcieLink { speed: Some(speed), width: Some(width), ..PcieLink::default() };
        assert_eq!(link(2_500, 1).megabits(), Some(2_000));
        assert_eq!(link(16_000, 16).megabits(), Some(252_061));
        assert_eq!(link(64_000, 16).megabits(), Some(968_000));
        assert_eq!(PcieLink::default().megabits(), None);
        let slow = PcieLink { max_speed: Some(16_000), max_width: Some(16), ..link(8_000, 16) };
        assert_eq!(slow.is_degraded(), Answer::Yes);
        assert_eq!(PcieLink { speed: Some(16_000), ..slow }.is_degraded(), Answer::No);
        assert!(matches!(link(8_000, 16).is_degraded(), Answer::Unknown(_)));
    }
}
