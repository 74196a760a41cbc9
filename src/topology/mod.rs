//! Where GPUs and NICs are on the PCIe bus, and which are near each other.
//!
//! A NIC that moves bytes of a GPU's memory does it over the bus, and how fast it is depends on what lies between them.
//! [`Topology::read`] reads that from sysfs, [`Topology::level`] names it as `nvidia-smi topo --matrix` does,
//! [`Topology::nics_for`] chooses by it, and `Device::open_near` (feature `cuda`) or
//! [`Device::open_near_function`](crate::Device::open_near_function) opens the choice.
//! Threads run near it with [`Device::pin_this_thread`](crate::Device::pin_this_thread) and
//! [`DeviceBuilder::pin_to_local_cpus`](crate::DeviceBuilder::pin_to_local_cpus).
//!
//! ```no_run
//! use tokio_rdma::topology::Topology;
//!
//! let topology = Topology::read()?;
//! for gpu in topology.gpus() {
//!     for nic in topology.nics_for(gpu.address).usable {
//!         println!("{} {}: {}, since {}", gpu.address, nic.name, nic.path.level, nic.path.why);
//!     }
//! }
//! # Ok::<(), tokio_rdma::Error>(())
//! ```
//!
//! # Levels
//!
//! | level | between the two | what that costs | source |
//! |---|---|---|---|
//! | `PIX` | at most one switch | the least: where there are only switches on the way, GPUDirect is fastest | [GPUDirect] |
//! | `PXB` | several switches, no host bridge | latency for each switch, and uplinks that others use too. NCCL uses GPUDirect up to here by itself (`ncclTopoCheckGdr`) | [NCCL] |
//! | `PHB` | the host bridge | works, and is slower; reads from a peer much slower on some processors. In a virtual machine it may be a `PIX` whose switch the hypervisor hides | [GPUDirect] |
//! | `NODE` | the interconnect of the host bridges of one NUMA node | as `PHB`, and the way between the bridges | [nvidia-smi] |
//! | `SYS` | the interconnect of the NUMA nodes | the most: extremely slow, or unreliable, on some platforms | [GPUDirect] |
//! | unknown | what sysfs does not show | ranked last; an override file can tell | |
//!
//! [GPUDirect]: https://docs.nvidia.com/cuda/gpudirect-rdma/#supported-systems
//! [NCCL]: https://github.com/NVIDIA/nccl/blob/master/src/graph/paths.cc
//! [nvidia-smi]: https://docs.nvidia.com/deploy/nvidia-smi/
//!
//! The definitions are those that `nvidia-smi topo --matrix` prints; NVML, `nvmlGpuTopologyLevel_t`, says "switch" where those say bridge.
//!
//! # Rules
//!
//! sysfs nests a function in the folders of the bridges above it, below the folder of its host bridge. Of two functions,
//!
//! - the same one, or two functions of one device: `PIX`. Nothing is between them.
//! - below a common bridge: `PIX` with at most one switch on the way, else `PXB`. A switch shows as two bridges, an upstream port and a
//!   downstream port, and counts once.
//! - below one host bridge: `PHB`, whatever their `numa_node` says.
//! - below two host bridges: `NODE` when both have the same `numa_node`, `SYS` when they have different ones. When one or both are
//!   not known (`-1`, or a kernel without NUMA, which has no such file): `NODE` if only one node of the machine has CPUs (`has_cpu`), since then
//!   there is nothing between nodes to cross; unknown otherwise. Clusters within a socket (sub-NUMA clustering, NPS) are nodes like any other.
//! - where one is not in sysfs, or its place is not: unknown.
//!
//! In a virtual machine sysfs shows the hypervisor's bus. A hypervisor that hides the switches leaves `PHB` and farther, and that is
//! what is said here: nothing is concluded that sysfs does not show.
//!
//! # Override file
//!
//! The environment's `TOKIO_RDMA_TOPOLOGY` names a file with what the administrator knows better. Each line has two devices and a level;
//! devices are PCI addresses or names of RDMA devices. `#` starts a comment.
//!
//! ```text
//! # GPU and NIC share a switch that this virtual machine does not see
//! 0001:00:00.0  mlx5_0  PIX
//! 0002:00:00.0  mlx5_1  PIX
//! ```
//!
//! A pair that it corrects says so ([`PciPath::overridden`]). Lines about devices that are not there are told in a tracing event and in
//! [`Topology::unused_overrides`]. A line of another form is an error.

mod address;
mod answer;
mod choice;
mod config;
mod cpus;
mod function;
mod level;
mod near;
mod nic;
mod overrides;
mod path;
mod sysfs;

use std::collections::BTreeMap;
use std::path::Path;

use self::overrides::{Name, Overrides};
use self::path::Node;
use self::sysfs::{Place, Sysfs};
use crate::error::{Error, Result};

pub use self::address::PciAddress;
pub use self::answer::Answer;
pub use self::choice::{Candidate, Ranking};
pub use self::config::Acs;
pub use self::function::{Bridge, Function, FunctionKind, Iommu, IommuMode, PcieLink};
pub use self::level::Level;
pub use self::nic::{Nic, Port};
pub use self::path::PciPath;

pub(crate) use self::cpus::local_cpus;
pub(crate) use self::near::listed;

/// Names the file that corrects what sysfs shows: see [above](self#override-file).
pub const OVERRIDE_VARIABLE: &str = "TOKIO_RDMA_TOPOLOGY";

/// Where Linux shows its devices.
const ROOT: &str = "/sys";

/// The GPUs and NICs of a machine, and the bridges between them, at one moment.
#[derive(Clone, Debug)]
pub struct Topology {
    functions: BTreeMap<PciAddress, Function>,
    nics: Vec<Nic>,
    bridges: BTreeMap<PciAddress, Bridge>,
    /// Every function, also those that are of no interest.
    nodes: BTreeMap<PciAddress, Node>,
    /// Whether it is known that there is no link between NUMA nodes.
    has_one_node: bool,
    overrides: Overrides,
}

impl Topology {
    /// This machine's, corrected by the file that [`OVERRIDE_VARIABLE`] names, if it is set.
    ///
    /// Reads a few hundred small files, and some registers of bridges: some milliseconds. Asks for no right; what needs
    /// root is [`Answer::Unknown`] without it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when there is no sysfs, or no such file; [`Error::Invalid`] when the file is faulty.
    pub fn read() -> Result<Self> {
        let this = Self::read_from(ROOT)?;
        match std::env::var_os(OVERRIDE_VARIABLE) {
            Some(file) => this.with_overrides(file),
            None => Ok(this),
        }
    }

    /// That of a tree that looks like `/sys`, as it is.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when there is no such folder. What a tree lacks is not known, and no error.
    pub fn read_from(root: impl AsRef<Path>) -> Result<Self> {
        let root = root.as_ref();
        let sysfs = Sysfs::new(root).map_err(|error| Error::io("read the topology", root.display(), error))?;
        let nics: Vec<_> = sysfs.names("class/infiniband").iter().map(|name| Nic::read(&sysfs, name)).collect();
        let (mut nodes, mut functions, mut bridges) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for name in sysfs.names("bus/pci/devices") {
            let Ok(address) = name.parse::<PciAddress>() else { continue };
            let place = sysfs.place(function::path(address)).unwrap_or_default();
            // A link to somewhere else tells nothing of this function.
            let place = if place.functions.last() == Some(&address) { place } else { Place::default() };
            let node = Node { place, numa_node: function::numa_node(&sysfs, address) };
            let is_nic = nics.iter().any(|nic| nic.function == Ok(address));
            if let Some(mut function) = Function::read(&sysfs, address, is_nic) {
                function.host_bridge.clone_from(&node.place.host_bridge);
                function.bridges = node.place.functions.iter().rev().skip(1).copied().collect();
                for bridge in &function.bridges {
                    bridges.entry(*bridge).or_insert_with(|| Bridge::read(&sysfs, *bridge));
                }
                functions.insert(address, function);
            }
            nodes.insert(address, node);
        }
        let has_one_node = has_one_node(&sysfs);
        Ok(Self { functions, nics, bridges, nodes, has_one_node, overrides: Overrides::default() })
    }

    /// Corrected by this file, in place of one that corrected it before.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when it cannot be read; [`Error::Invalid`] names the line that is faulty, and what was expected.
    pub fn with_overrides(mut self, file: impl AsRef<Path>) -> Result<Self> {
        let overrides = Overrides::read(file.as_ref(), |name| self.known(name))?;
        overrides.unused().iter().for_each(|line| tracing::warn!("topology override: {line}"));
        self.overrides = overrides;
        Ok(self)
    }

    /// The GPUs, other display devices, accelerators and functions of NICs, by address.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.functions.values()
    }

    /// The GPUs of NVIDIA, by address.
    pub fn gpus(&self) -> impl Iterator<Item = &Function> {
        self.functions().filter(|function| function.kind == FunctionKind::Gpu)
    }

    /// One of [`functions`](Self::functions).
    pub fn function(&self, address: PciAddress) -> Option<&Function> {
        self.functions.get(&address)
    }

    /// The RDMA devices, by name; software devices of the kernel too.
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// The RDMA device with this name.
    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.name == name)
    }

    /// The bridges above the [`functions`](Self::functions), by address.
    pub fn bridges(&self) -> impl Iterator<Item = &Bridge> {
        self.bridges.values()
    }

    /// Lines of the override file that are about devices which this machine has not, each with its number.
    pub fn unused_overrides(&self) -> &[String] {
        self.overrides.unused()
    }

    /// What the tables call a device that a person called so.
    fn known(&self, name: &Name) -> Option<Name> {
        match name {
            Name::Function(address) => self.nodes.contains_key(address).then(|| name.clone()),
            Name::Nic(text) => {
                let function = self.nic(text)?.function.as_ref().ok().copied();
                Some(function.map_or_else(|| name.clone(), Name::Function))
            }
        }
    }
}

/// Nodes without CPUs, which are memory of GPUs or of CXL, have no link of their own to another socket.
fn has_one_node(sysfs: &Sysfs) -> bool {
    const MOST: usize = 1024;
    let nodes = |name| sysfs::list(&sysfs.text(Path::new("devices/system/node").join(name))?, MOST);
    nodes("has_cpu").or_else(|| nodes("online")).is_some_and(|nodes| nodes.len() == 1)
}
