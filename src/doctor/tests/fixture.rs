//! A made-up machine: files in a folder, and what its drivers would say.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::Result;
use crate::doctor::files::Files;
use crate::doctor::finding::{Finding, Link, Source};
use crate::doctor::live::{Cuda, CudaGpu, Live, MemoryFound, OpenNic, Verbs};
use crate::doctor::nvml::{INVALID_ARGUMENT, NvLinkAnswer, NvLinksAsked};
use crate::doctor::report::GpuDirectReport;
use crate::topology::{PciAddress, Topology};

pub struct Fixture {
    folder: TempDir,
    pub live: Live,
}

/// Request, completion and upstream redirect, as the kernel sets them beside an IOMMU.
pub const REDIRECT: u16 = 0x001d;

impl Fixture {
    /// No device, no driver, no file but those of the kernel.
    pub fn bare() -> Self {
        let live = Live {
            cuda: Cuda::Failed("libcuda.so.1 of the CUDA driver cannot be loaded: no such file".into()),
            verbs: Verbs::Loaded(None),
            nvlinks: NvLinksAsked::Failed(Source::new("libnvidia-ml.so.1", "cannot be loaded: no such file")),
            scatter_to_cqe: None,
        };
        let this = Self { folder: tempfile::tempdir().unwrap(), live };
        fs::create_dir_all(this.path("sys/bus/pci/devices")).unwrap();
        this.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n");
        this.write("proc/self/limits", "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         unlimited            unlimited            bytes\n");
        this.write("proc/self/status", "Name:\tdoctor\nCapEff:\t0000000000000000\n");
        this.write(
            "proc/self/maps",
            "7f0000000000-7f0000001000 r--p 00000000 fe:01 12 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0\n",
        );
        this
    }

    /// Eight GPUs, each below one switch with a NIC of its own; four on each of two NUMA nodes. NVSwitches join them. All is well.
    pub fn healthy() -> Self {
        Self::with_pairs(&[0, 1, 2, 3, 4, 5, 6, 7])
    }

    /// The first pair of it.
    pub fn single() -> Self {
        Self::with_pairs(&[0])
    }

    /// Two pairs on the first node and one on the second, of the same machine.
    pub fn small() -> Self {
        Self::with_pairs(&[0, 1, 7])
    }

    fn with_pairs(numbers: &[u8]) -> Self {
        let mut this = Self::bare();
        for &number in numbers {
            this.pair(number, i32::from(number / 4));
        }
        this.write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC version: gcc\n",
        );
        this.write("sys/module/nvidia_peermem/version", "580.159.03\n");
        this.live.cuda = Cuda::Found { version: 13000, gpus: numbers.iter().map(|number| cuda_gpu(*number)).collect() };
        let links =
            |number: &u8| (Self::gpu_address(*number), Ok(nvlinks(18, NvLinkAnswer::SWITCH, "FFFFFFFF:FF:FF.0")));
        this.live.nvlinks = NvLinksAsked::Asked(numbers.iter().map(links).collect());
        this.live.scatter_to_cqe = Some("0".into());
        this.live.verbs = Verbs::Loaded(Some(Ok(OpenNic {
            active_mtu: 4096,
            max_mtu: 4096,
            dma_buf: Ok(Source::new("ibv_reg_dmabuf_mr(fd = -1)", "errno 9 (EBADF)")),
        })));
        this
    }

    /// Host bridge, root port, a switch of three ports, and below it a GPU and a NIC.
    fn pair(&self, number: u8, node: i32) {
        let bus = number * 0x10;
        let [root, up, down_a, down_b, gpu, nic] = Self::pair_addresses(number);
        let host = format!("devices/pci0000:{bus:02x}");
        let switch = format!("{host}/{root}/{up}");
        for (address, place, class) in [
            (&root, format!("{host}/{root}"), "0x060400"),
            (&up, switch.clone(), "0x060400"),
            (&down_a, format!("{switch}/{down_a}"), "0x060400"),
            (&down_b, format!("{switch}/{down_b}"), "0x060400"),
            (&gpu, format!("{switch}/{down_a}/{gpu}"), "0x030200"),
            (&nic, format!("{switch}/{down_b}/{nic}"), "0x020000"),
        ] {
            let cpus = if node == 0 { "0-47" } else { "48-95" };
            self.write(&format!("sys/{place}/class"), class);
            self.write(&format!("sys/{place}/numa_node"), node.to_string());
            self.write(&format!("sys/{place}/local_cpulist"), cpus);
            self.link(&format!("sys/bus/pci/devices/{address}"), &format!("sys/{place}"));
            self.config(address, (class == "0x060400").then_some(0), true);
        }
        self.write(&format!("sys/bus/pci/devices/{gpu}/vendor"), "0x10de");
        self.write(&format!("sys/bus/pci/devices/{nic}/vendor"), "0x15b3");
        // 16 MiB of registers, 256 GiB of memory, 32 MiB more.
        self.write(
            &format!("sys/bus/pci/devices/{gpu}/resource"),
            "0x00000000b0000000 0x00000000b0ffffff 0x0000000000040200\n\
             0x0000210000000000 0x0000213fffffffff 0x000000000014220c\n\
             0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
             0x0000214000000000 0x0000214001ffffff 0x000000000014220c\n",
        );
        self.driver(&nic, "mlx5_core");
        self.nic(&format!("mlx5_{number}"), &nic);
    }

    /// Root port, upstream port, two downstream ports, GPU and NIC.
    pub fn pair_addresses(number: u8) -> [String; 6] {
        let bus = number * 0x10;
        [(0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0)]
            .map(|(below, device)| format!("0000:{:02x}:{device:02x}.0", bus + below))
    }

    pub fn gpu_address(number: u8) -> PciAddress {
        Self::pair_addresses(number)[4].parse().unwrap()
    }

    fn nic(&self, name: &str, function: &str) {
        let nic = format!("sys/class/infiniband/{name}");
        fs::create_dir_all(self.path(&nic)).unwrap();
        self.link(&format!("{nic}/device"), &format!("sys/bus/pci/devices/{function}"));
        for (file, text) in [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", "400 Gb/sec (4X NDR)"),
            ("link_layer", "Ethernet"),
            ("gids/0", "fe80:0000:0000:0000:0000:00ff:fe00:0001"),
            ("gid_attrs/types/0", "RoCE v2"),
            ("gids/1", "0000:0000:0000:0000:0000:ffff:0a01:0101"),
            ("gid_attrs/types/1", "RoCE v2"),
            ("gid_attrs/ndevs/1", "eth0"),
            ("gids/2", "0000:0000:0000:0000:0000:0000:0000:0000"),
        ] {
            self.write(&format!("{nic}/ports/1/{file}"), text);
        }
    }

    /// A function directly below a host bridge of its own, of no known NUMA node.
    pub fn move_to(&self, address: &str, host: &str) {
        let place = format!("sys/devices/{host}/{address}");
        let class = if address.contains(":03:") { "0x030200" } else { "0x020000" };
        let vendor = if class == "0x030200" { "0x10de" } else { "0x15b3" };
        for (file, text) in [
            ("class", class),
            ("vendor", vendor),
            ("numa_node", "-1"),
            ("resource", "0x210000000000 0x213fffffffff 0x14220c"),
        ] {
            self.write(&format!("{place}/{file}"), text);
        }
        self.link(&format!("sys/bus/pci/devices/{address}"), &place);
        self.driver(address, if class == "0x030200" { "nvidia" } else { "mlx5_core" });
    }

    /// A configuration space of 4096 bytes, with these capabilities.
    pub fn config(&self, address: &str, acs: Option<u16>, ats: bool) {
        let mut space = vec![0u8; 4096];
        let mut put = |offset: usize, dword: u32| space[offset..][..4].copy_from_slice(&dword.to_le_bytes());
        put(0x100, acs.map_or(0x1400_0000, |_| 0x1401_000d));
        put(0x104, acs.map_or(0, |control| u32::from(control) << 16 | 0x5f));
        put(0x140, 0x0001_000f);
        put(0x144, u32::from(ats) << 31);
        self.write(&format!("sys/bus/pci/devices/{address}/config"), space);
    }

    /// What others than root see.
    pub fn cut_config(&self, address: &str) {
        self.write(&format!("sys/bus/pci/devices/{address}/config"), [0u8; 64]);
    }

    pub fn iommu(&self, address: &str, group: u32, kind: &str) {
        self.write(&format!("sys/kernel/iommu_groups/{group}/type"), kind);
        self.link(&format!("sys/bus/pci/devices/{address}/iommu_group"), &format!("sys/kernel/iommu_groups/{group}"));
    }

    pub fn driver(&self, address: &str, driver: &str) {
        fs::create_dir_all(self.path(&format!("sys/bus/pci/drivers/{driver}"))).unwrap();
        self.remove(&format!("sys/bus/pci/devices/{address}/driver"));
        self.link(&format!("sys/bus/pci/devices/{address}/driver"), &format!("sys/bus/pci/drivers/{driver}"));
    }

    pub fn write(&self, file: &str, content: impl AsRef<[u8]>) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub fn remove(&self, path: &str) {
        let path = self.path(path);
        let _ = if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }

    fn link(&self, name: &str, target: &str) {
        let name = self.path(name);
        fs::create_dir_all(name.parent().unwrap()).unwrap();
        symlink(self.path(target), name).unwrap();
    }

    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    pub fn files(&self) -> Files {
        Files::new(&self.path("sys"), &self.path("proc"))
    }

    pub fn report(&self) -> GpuDirectReport {
        self.report_of("0", "mlx5_0").unwrap()
    }

    /// The chain between these, or between what there is.
    pub fn report_of(&self, gpu: &str, nic: &str) -> Result<GpuDirectReport> {
        self.report_on(&Topology::read_from(self.path("sys")).unwrap(), gpu, nic)
    }

    /// The same, with a topology that was read otherwise.
    pub fn report_on(&self, topology: &Topology, gpu: &str, nic: &str) -> Result<GpuDirectReport> {
        let mut builder = GpuDirectReport::builder();
        if topology.gpus().next().is_some() {
            builder = builder.gpu(gpu);
        }
        if !topology.nics().is_empty() {
            builder = builder.nic(nic);
        }
        builder.examine(topology, &self.files(), self.live.clone(), |_, _, _| {})
    }

    pub fn finding(&self, link: Link) -> Finding {
        self.report().chain.finding(link).unwrap_or_else(|| panic!("nothing about {link}")).clone()
    }

    /// The first GPU as CUDA shows it.
    pub fn cuda(&mut self) -> &mut CudaGpu {
        match &mut self.live.cuda {
            Cuda::Found { gpus, .. } => &mut gpus[0],
            other => panic!("{other:?}"),
        }
    }

    /// What was said of the links of the GPU of a pair.
    pub fn nvlinks(&mut self, number: u8) -> &mut std::result::Result<Vec<NvLinkAnswer>, Source> {
        match &mut self.live.nvlinks {
            NvLinksAsked::Asked(answers) => answers.get_mut(&Self::gpu_address(number)).unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub fn opened(&mut self) -> &mut OpenNic {
        match &mut self.live.verbs {
            Verbs::Loaded(Some(Ok(nic))) => nic,
            other => panic!("{other:?}"),
        }
    }
}

/// What the library says of so many links that are up, and of the one behind them.
pub fn nvlinks(count: usize, kind: u32, end: &str) -> Vec<NvLinkAnswer> {
    let up = NvLinkAnswer { state: Ok(NvLinkAnswer::UP), end: Some(Ok(end.to_owned())), end_kind: Some(Ok(kind)) };
    let behind = NvLinkAnswer { state: Err(INVALID_ARGUMENT), end: None, end_kind: None };
    std::iter::repeat_n(up, count).chain([behind]).collect()
}

fn cuda_gpu(number: u8) -> CudaGpu {
    let [.., gpu, _] = Fixture::pair_addresses(number);
    CudaGpu {
        ordinal: number.into(),
        name: "NVIDIA H200".into(),
        pci_bus_id: gpu,
        memory_bytes: Some(150_110_011_392),
        attributes: [0, 1, 1, 1, 1, 100, 1].map(Ok).to_vec(),
        visibility: Ok("native: the GPU orders remote writes before later work".into()),
        memory: Some(Ok(MemoryFound {
            kind: "device memory (mapped, gpuDirectRDMACapable)".into(),
            fit: true,
            sources: vec![Source::new("cuPointerGetAttribute(IS_GPU_DIRECT_RDMA_CAPABLE = 15)", "1")],
            refused: vec!["device memory of a stream-ordered pool".into()],
        })),
    }
}
