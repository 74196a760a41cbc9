//! The report, and making it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::chain::Chain;
use super::files::Files;
use super::finding::{Finding, Link, Source};
use super::judge::{gpu, machine, nic, path};
#[cfg(feature = "cuda")]
use super::live::MemoryFound;
use super::live::{Cuda, CudaGpu, Live};
use super::matrix::Matrix;
use super::nvlinks::{NvLinks, bonded};
use super::nvml::NvLinksAsked;
use super::units::cpu_list;
use crate::error::{Error, Result};
use crate::topology::{self, Level, PciAddress, Topology};

/// What stands between the NICs of a machine and the memory of its GPUs.
///
/// Its `Display` is a screen of plain text. With the feature `serde` all of it can be serialized; names are in snake case, and
/// units are in the names.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct GpuDirectReport {
    /// The machine.
    pub machine: Machine,
    /// The GPUs of NVIDIA's, by PCI address.
    pub gpus: Vec<Gpu>,
    /// The RDMA devices of the kernel, by name. The software device `soft0` is none of them.
    pub nics: Vec<Nic>,
    /// How near they are to each other.
    pub matrix: Matrix,
    /// All links between one of the GPUs and one of the NICs.
    pub chain: Chain,
}

/// Facts about the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Machine {
    /// The version of this crate.
    pub crate_version: String,
    /// Whether it was built with the feature `cuda`.
    pub has_feature_cuda: bool,
    /// The kernel's release.
    pub kernel: Option<String>,
    /// The CUDA version that the GPU's driver speaks, as in `13.0`.
    pub cuda: Option<String>,
    /// Lines of the topology's override file that are about devices which the machine has not.
    pub unused_overrides: Vec<String>,
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Gpu {
    /// What the report calls it: `GPU` and its number by PCI address, as `nvidia-smi` numbers them.
    pub name: String,
    /// Its PCI address.
    pub pci_address: String,
    /// What NVIDIA calls it; `None` where CUDA was not asked.
    pub model: Option<String>,
    /// Its number in CUDA, which `CUDA_VISIBLE_DEVICES` changes; `None` where CUDA does not show it.
    pub cuda_ordinal: Option<usize>,
    /// Its memory; `None` where CUDA was not asked.
    pub memory_bytes: Option<u64>,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// The CPUs near it, as in `0-15,32-47`.
    pub cpu_affinity: Option<String>,
    /// Its NVLinks.
    #[cfg_attr(feature = "serde", serde(default))]
    pub nvlinks: NvLinks,
}

/// An RDMA device of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Nic {
    /// What the matrix calls it: `NIC` and its number by name.
    pub name: String,
    /// Its own name, as in `Device::open`.
    pub device: String,
    /// Its PCI function, or that of the network interface that carries it.
    pub pci_address: Option<String>,
    /// The kernel's driver; `None` for a software device.
    pub driver: Option<String>,
    /// The speed of its fastest port that is up.
    pub megabits_per_second: Option<u32>,
    /// Why nothing can be sent from it, if so.
    pub unusable: Option<String>,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// The CPUs near it.
    pub cpu_affinity: Option<String>,
}

/// Which machine a report is about, and which GPU and NIC its chain.
#[derive(Clone, Debug, Default)]
pub struct GpuDirectReportBuilder {
    gpu: Option<String>,
    nic: Option<String>,
    files: Option<(PathBuf, PathBuf)>,
    nvlinks: BTreeMap<PciAddress, Vec<(Option<PciAddress>, u32, Source)>>,
    without_allocating: bool,
}

impl GpuDirectReport {
    /// About this machine: the first GPU that CUDA shows and the NIC nearest to it.
    ///
    /// Reads files of sysfs and procfs, opens the NIC and, with the feature `cuda`, the GPU, on which it allocates a few bytes: as long as
    /// the driver takes for that, which may be a second.
    ///
    /// # Errors
    ///
    /// As [`GpuDirectReportBuilder::build`].
    pub fn read() -> Result<Self> {
        Self::builder().build()
    }

    /// About this GPU and this device, between which memory could not be registered. What the memory is, is known there.
    /// `None` where there is nothing to say, as for the software device.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_registration(gpu: &str, device: &str, memory: MemoryFound) -> Option<Self> {
        let builder = Self::builder().gpu(gpu).nic(device);
        let (topology, files, mut live) = builder.look().ok()?;
        // Nothing of a registration depends on them.
        live.nvlinks = NvLinksAsked::NotAsked("the report is of a registration");
        let ask = |live: &mut Live, _: Option<&Gpu>, nic: Option<&Nic>| {
            nic.into_iter().for_each(|nic| live.verbs.open(&nic.device));
            live.cuda.found_memory(gpu, memory);
        };
        builder.examine(&topology, &files, live, ask).ok()
    }

    /// Settings for a report.
    pub fn builder() -> GpuDirectReportBuilder {
        GpuDirectReportBuilder::default()
    }
}

impl GpuDirectReportBuilder {
    /// The GPU of the chain: `0` or `GPU0` for the first by PCI address, or a PCI address in any form. Default: the first that CUDA
    /// shows to this process, or else the first.
    #[must_use]
    pub fn gpu(mut self, gpu: impl Into<String>) -> Self {
        self.gpu = Some(gpu.into());
        self
    }

    /// The RDMA device of the chain, by its own name. Default: the first of [`Topology::nics_for`] the GPU.
    #[must_use]
    pub fn nic(mut self, device: impl Into<String>) -> Self {
        self.nic = Some(device.into());
        self
    }

    /// Reads another machine's files, copied into folders: its `/sys` and its `/proc`. Asks no driver; what only drivers know is unknown.
    #[must_use]
    pub fn files(mut self, sys: impl Into<PathBuf>, proc: impl Into<PathBuf>) -> Self {
        self.files = Some((sys.into(), proc.into()));
        self
    }

    /// NVLinks of a GPU of that other machine, which its files do not tell of: `count` of them lead to `end`, another GPU, or `None` for
    /// NVSwitches. `asked` becomes the source, for example a line of a file. Can be called for each GPU and each end; where it is called,
    /// the driver is not asked.
    #[must_use]
    pub fn nvlinks(mut self, gpu: PciAddress, end: Option<PciAddress>, count: u32, asked: impl Into<String>) -> Self {
        self.nvlinks.entry(gpu).or_default().push((end, count, Source::new(asked, count.to_string())));
        self
    }

    /// Makes no context on the GPU and allocates nothing there: the link `memory_kind` is then unknown.
    #[must_use]
    pub fn without_allocating(mut self) -> Self {
        self.without_allocating = true;
        self
    }

    /// Makes the report.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when there is no sysfs; [`Error::Invalid`] when the GPU or the NIC asked for is none of the machine's,
    /// and for a faulty override file of the topology.
    pub fn build(self) -> Result<GpuDirectReport> {
        let (topology, files, live) = self.look()?;
        let allocates = !self.without_allocating;
        self.examine(&topology, &files, live, |live, gpu, nic| {
            if let Some(nic) = nic {
                live.verbs.open(&nic.device);
            }
            if let Some(ordinal) = gpu.and_then(|gpu| gpu.cuda_ordinal).filter(|_| allocates) {
                live.cuda.try_memory(ordinal);
            }
        })
    }

    fn look(&self) -> Result<(Topology, Files, Live)> {
        let (topology, files, mut live) = match &self.files {
            Some((sys, proc)) => (Topology::read_from(sys)?, Files::new(sys, proc), Live::not_asked()),
            None => (Topology::read()?, Files::new(Path::new("/sys"), Path::new("/proc")), Live::ask()),
        };
        if !self.nvlinks.is_empty() {
            live.nvlinks = NvLinksAsked::Told(self.nvlinks.clone());
        }
        Ok((topology, files, live))
    }

    /// From what was read to what was found. `ask` is for what only the GPU and the NIC of the chain can say.
    pub(super) fn examine(
        self,
        topology: &Topology,
        files: &Files,
        mut live: Live,
        ask: impl FnOnce(&mut Live, Option<&Gpu>, Option<&Nic>),
    ) -> Result<GpuDirectReport> {
        let gpus = gpus(topology, &mut live);
        let nics: Vec<_> =
            topology.nics().iter().enumerate().map(|(index, it)| describe_nic(topology, index, it)).collect();
        let gpu = self.choose_gpu(&gpus)?;
        let nic = self.choose_nic(topology, gpu, &nics)?;
        ask(&mut live, gpu, nic);
        let findings = findings(topology, files, &live, (gpu, gpus.len()), (nic, nics.len()));
        let chain = Chain { gpu: gpu.map(|gpu| gpu.name.clone()), nic: nic.map(|nic| nic.device.clone()), findings };
        let places: Vec<_> =
            gpus.iter().map(|it| Some(&it.pci_address)).chain(nics.iter().map(|it| it.pci_address.as_ref())).collect();
        let matrix = Matrix::new(&gpus, &nics, |row, column| {
            let (level, is_overridden) = level(topology, places[row], places[column]);
            let nvlinks = gpus.get(row).zip(gpus.get(column)).and_then(|(row, column)| bonded(row, column));
            nvlinks.filter(|_| !is_overridden).map_or_else(|| level.to_string(), |count| format!("NV{count}"))
        });
        Ok(GpuDirectReport { machine: describe_machine(topology, files, &live), gpus, nics, matrix, chain })
    }

    fn choose_gpu<'a>(&self, gpus: &'a [Gpu]) -> Result<Option<&'a Gpu>> {
        let Some(wanted) = &self.gpu else {
            return Ok(gpus.iter().find(|gpu| gpu.cuda_ordinal.is_some()).or(gpus.first()));
        };
        let address = wanted.parse::<PciAddress>().ok().map(|address| address.to_string());
        let number = wanted.strip_prefix("GPU").unwrap_or(wanted);
        let found = gpus
            .iter()
            .find(|gpu| gpu.name.strip_prefix("GPU") == Some(number) || Some(&gpu.pci_address) == address.as_ref());
        found.map(Some).ok_or_else(|| {
            let there: Vec<_> = gpus.iter().map(|gpu| format!("{} at {}", gpu.name, gpu.pci_address)).collect();
            none_of("GPU", wanted, &there)
        })
    }

    fn choose_nic<'a>(&self, topology: &Topology, gpu: Option<&Gpu>, nics: &'a [Nic]) -> Result<Option<&'a Nic>> {
        let by_name = |name: &str| nics.iter().find(|nic| nic.device == name);
        if let Some(wanted) = &self.nic {
            let there: Vec<_> = nics.iter().map(|nic| nic.device.clone()).collect();
            return by_name(wanted).map(Some).ok_or_else(|| none_of("RDMA device", wanted, &there));
        }
        let Some(address) = gpu.and_then(|gpu| gpu.pci_address.parse().ok()) else { return Ok(nics.first()) };
        let ranking = topology.nics_for(address);
        let best = ranking.usable.first().or(ranking.left_out.first());
        Ok(best.and_then(|best| by_name(&best.name)))
    }
}

fn none_of(what: &str, wanted: &str, there: &[String]) -> Error {
    let there = if there.is_empty() { "none".to_owned() } else { there.join(", ") };
    Error::Invalid { operation: "report", reason: format!("this machine has no {what} {wanted:?}; it has {there}") }
}

/// In the order in which they are told.
fn findings(
    topology: &Topology,
    files: &Files,
    live: &Live,
    (gpu, gpus): (Option<&Gpu>, usize),
    (nic, nics): (Option<&Nic>, usize),
) -> Vec<Finding> {
    let mut found = vec![gpu::gpu(gpu, gpus), gpu::cuda_driver(&live.cuda)];
    if let Some(gpu) = gpu {
        let cuda = &live.cuda;
        found.extend([
            gpu::kernel_module(files),
            gpu::memory_kind(cuda, gpu),
            gpu::mapped_memory(cuda, gpu),
            gpu::bar1(files, gpu),
            gpu::visibility(cuda, gpu),
            gpu::dma_buf_export(cuda, gpu),
            gpu::gpu_direct(cuda, gpu),
            machine::peer_memory(files),
        ]);
    }
    found.extend([nic::nic(nic, nics), nic::verbs(files, &live.verbs)]);
    if let Some(nic) = nic {
        found.extend([
            nic::port(files, &nic.device),
            nic::mtu(&live.verbs),
            nic::gid(files, &nic.device),
            nic::cpu_copies(nic, live),
            nic::dma_buf_import(&live.verbs),
        ]);
    }
    if let (Some(gpu), Some(nic)) = (gpu, nic) {
        found.extend(on_the_way(topology, gpu, nic));
    }
    found.extend([machine::memlock(files), machine::kernel(files)]);
    found.sort_by_key(|finding| finding.link);
    found
}

fn on_the_way(topology: &Topology, gpu: &Gpu, nic: &Nic) -> Vec<Finding> {
    let function = |address: Option<&String>| topology.function(address?.parse().ok()?);
    let (gpu_function, nic_function) = (function(Some(&gpu.pci_address)), function(nic.pci_address.as_ref()));
    let way = gpu.pci_address.parse().ok().zip(topology.nic(&nic.device));
    let way = way.map(|(gpu, nic)| topology.path_to_nic(gpu, nic));
    let (level, acs) = (way.as_ref().map(path::level), way.as_ref().map(path::acs));
    let functions: Vec<_> = [gpu_function, nic_function].into_iter().flatten().collect();
    let ats = nic_function.map_or_else(
        || Finding::ok(Link::Ats, "of no account: a device without a PCI function does no DMA"),
        path::ats,
    );
    let rest = [path::iommu(&functions), ats, path::numa(gpu_function, nic_function)];
    level.into_iter().chain(acs).chain(rest).collect()
}

/// And whether the override file says so.
fn level(topology: &Topology, from: Option<&String>, to: Option<&String>) -> (Level, bool) {
    let address = |text: Option<&String>| text?.parse::<PciAddress>().ok();
    match (address(from), address(to)) {
        (Some(from), Some(to)) => {
            let path = topology.path(from, to);
            (path.level, path.overridden.is_some())
        }
        _ => (Level::Unknown, false),
    }
}

fn describe_machine(topology: &Topology, files: &Files, live: &Live) -> Machine {
    let cuda = match live.cuda {
        Cuda::Found { version, .. } => Some(format!("{}.{}", version / 1000, version % 1000 / 10)),
        _ => None,
    };
    Machine {
        crate_version: env!("CARGO_PKG_VERSION").to_owned(),
        has_feature_cuda: cfg!(feature = "cuda"),
        kernel: files.proc("sys/kernel/osrelease").get().map(str::to_owned),
        cuda,
        unused_overrides: topology.unused_overrides().to_vec(),
    }
}

/// Those of sysfs and those of CUDA, which sees them in some containers where sysfs does not show them.
fn gpus(topology: &Topology, live: &mut Live) -> Vec<Gpu> {
    let Live { cuda, nvlinks, .. } = live;
    let address = |gpu: &CudaGpu| gpu.pci_bus_id.parse::<PciAddress>().ok();
    let shown = cuda.gpus().iter().filter_map(address);
    let mut addresses: Vec<_> = topology.gpus().map(|function| function.address).chain(shown).collect();
    addresses.sort();
    addresses.dedup();
    nvlinks.ask(&addresses);
    let describe = |(index, pci): (usize, PciAddress)| {
        let shown = cuda.gpus().iter().find(|gpu| address(gpu) == Some(pci));
        let function = topology.function(pci);
        Gpu {
            name: format!("GPU{index}"),
            pci_address: pci.to_string(),
            model: shown.map(|gpu| gpu.name.clone()),
            cuda_ordinal: shown.map(|gpu| gpu.ordinal),
            memory_bytes: shown.and_then(|gpu| gpu.memory_bytes),
            numa_node: function.and_then(|function| function.numa_node),
            cpu_affinity: function.and_then(|function| cpu_list(&function.local_cpus)),
            nvlinks: NvLinks::of(pci, &addresses, nvlinks),
        }
    };
    addresses.iter().copied().enumerate().map(describe).collect()
}

fn describe_nic(topology: &Topology, index: usize, nic: &topology::Nic) -> Nic {
    let address = nic.function.as_ref().ok().copied();
    let function = address.and_then(|address| topology.function(address));
    Nic {
        name: format!("NIC{index}"),
        device: nic.name.clone(),
        pci_address: address.map(|address| address.to_string()),
        driver: function.filter(|_| nic.parent.is_none()).and_then(|function| function.driver.clone()),
        megabits_per_second: nic.megabits(),
        unusable: nic.unusable(),
        numa_node: function.and_then(|function| function.numa_node),
        cpu_affinity: function.and_then(|function| cpu_list(&function.local_cpus)),
    }
}
