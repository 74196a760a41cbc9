//! What only the drivers themselves can say: libcuda and libibverbs, asked once per report.

use std::io;

use super::files::failure;
use super::finding::Source;
use super::nvml::NvLinksAsked;

/// All of it. Values, so that tests can make up a machine.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    pub cuda: Cuda,
    pub verbs: Verbs,
    pub nvlinks: NvLinksAsked,
    /// The variable `MLX5_SCATTER_TO_CQE` of this process.
    pub scatter_to_cqe: Option<String>,
}

/// What CUDA says.
#[derive(Clone, Debug)]
#[allow(dead_code)] // one of them or the others, by the feature
pub(crate) enum Cuda {
    /// The crate was built without it.
    NoFeature,
    /// The report is of files alone.
    NotAsked,
    /// It cannot be used, and why.
    Failed(String),
    /// It can.
    Found {
        /// 1000 times the major plus 10 times the minor number.
        version: i32,
        gpus: Vec<CudaGpu>,
    },
}

/// A GPU, as CUDA shows it to this process.
#[derive(Clone, Debug)]
pub(crate) struct CudaGpu {
    pub ordinal: usize,
    pub name: String,
    pub pci_bus_id: String,
    pub memory_bytes: Option<u64>,
    /// Each of [`ATTRIBUTES`], or the driver's error.
    pub attributes: Vec<Result<i32, u32>>,
    /// The rule, in words: `Err` where direct paths are refused because of it.
    pub visibility: Result<String, String>,
    /// Of the GPU that the chain is about.
    pub memory: Option<Result<MemoryFound, String>>,
}

/// What memory a `GpuBuffer` gets.
#[derive(Clone, Debug)]
pub(crate) struct MemoryFound {
    /// In words.
    pub kind: String,
    /// NICs may be given it.
    pub fit: bool,
    /// The pointer's attributes.
    pub sources: Vec<Source>,
    /// Memory that was tried beside it and is refused, in words.
    pub refused: Vec<String>,
}

/// Attributes of a GPU: number and name in `CUdevice_attribute`.
pub(crate) const ATTRIBUTES: [(i32, &str); 7] = [
    (100, "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"),
    (102, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
    (110, "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"),
    (116, "GPU_DIRECT_RDMA_SUPPORTED"),
    (117, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"),
    (118, "GPU_DIRECT_RDMA_WRITES_ORDERING"),
    (124, "DMA_BUF_SUPPORTED"),
];

/// What libibverbs says.
#[derive(Clone, Debug)]
pub(crate) enum Verbs {
    /// The report is of files alone.
    NotAsked,
    /// It cannot be used, and why.
    Failed(String),
    /// It can, and this is what it says of the chosen NIC, if there is one.
    Loaded(Option<Result<OpenNic, String>>),
}

/// What an opened NIC says.
#[derive(Clone, Debug)]
pub(crate) struct OpenNic {
    /// Bytes.
    pub active_mtu: u32,
    /// Bytes.
    pub max_mtu: u32,
    /// Whether it registers dma-bufs.
    pub dma_buf: Result<Source, Source>,
}

impl Live {
    /// Nothing is asked.
    pub(super) fn not_asked() -> Self {
        let nvlinks = NvLinksAsked::NotAsked("the report is of files");
        Self { cuda: Cuda::NotAsked, verbs: Verbs::NotAsked, nvlinks, scatter_to_cqe: None }
    }

    /// CUDA is asked for its GPUs, libibverbs whether it is there.
    pub(super) fn ask() -> Self {
        let verbs = match crate::provider::verbs::devices() {
            Ok(_) => Verbs::Loaded(None),
            Err(error) => Verbs::Failed(error.to_string()),
        };
        let scatter_to_cqe = std::env::var_os(SCATTER_TO_CQE).map(|value| value.to_string_lossy().into_owned());
        Self { cuda: Cuda::ask(), verbs, nvlinks: NvLinksAsked::Wanted, scatter_to_cqe }
    }
}

/// See `mlx5dv(7)`.
pub(super) const SCATTER_TO_CQE: &str = "MLX5_SCATTER_TO_CQE";

impl Cuda {
    #[cfg(feature = "cuda")]
    fn ask() -> Self {
        match crate::gpu::survey::gpus() {
            Ok((version, gpus)) => Self::Found { version, gpus },
            Err(error) => Self::Failed(error.to_string()),
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn ask() -> Self {
        Self::NoFeature
    }

    /// The GPUs that it shows.
    pub(super) fn gpus(&self) -> &[CudaGpu] {
        match self {
            Self::Found { gpus, .. } => gpus,
            _ => &[],
        }
    }

    /// Memory of a GPU that the program has.
    #[cfg(feature = "cuda")]
    pub(super) fn found_memory(&mut self, pci_bus_id: &str, found: MemoryFound) {
        if let Self::Found { gpus, .. } = self {
            gpus.iter_mut()
                .filter(|gpu| gpu.pci_bus_id == pci_bus_id)
                .for_each(|gpu| gpu.memory = Some(Ok(found.clone())));
        }
    }

    /// Allocates a little on the GPU with this ordinal, to see what memory that is.
    pub(super) fn try_memory(&mut self, ordinal: usize) {
        #[cfg(feature = "cuda")]
        if let Self::Found { gpus, .. } = self {
            if let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.ordinal == ordinal) {
                gpu.memory = Some(crate::gpu::survey::memory(ordinal).map_err(|error| error.to_string()));
            }
        }
        let _ = ordinal;
    }
}

impl CudaGpu {
    /// An attribute by its number, and where it comes from.
    pub(super) fn attribute(&self, number: i32) -> (Result<i32, u32>, Source) {
        let place = ATTRIBUTES.iter().position(|(known, _)| *known == number);
        let value = place.and_then(|place| self.attributes.get(place).copied()).unwrap_or(Err(1));
        let name = place.map_or("", |place| ATTRIBUTES[place].1);
        let answer = match value {
            Ok(value) => value.to_string(),
            Err(code) => format!("CUDA error {code}"),
        };
        (value, Source::new(format!("cuDeviceGetAttribute({name} = {number})"), answer))
    }
}

impl Verbs {
    /// Opens the NIC, unless nothing is to be asked.
    pub(super) fn open(&mut self, nic: &str) {
        if let Self::Loaded(answer) = self {
            *answer = Some(ask_nic(nic).map_err(|error| error.to_string()));
        }
    }
}

fn ask_nic(name: &str) -> crate::Result<OpenNic> {
    let found = crate::provider::verbs::survey(name)?;
    let asked = "ibv_reg_dmabuf_mr(fd = -1)";
    let dma_buf = match found.dma_buf {
        Ok(()) => Ok(Source::new(asked, "succeeded")),
        // A device that can looks at the descriptor first, and this is none.
        Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(Source::new(asked, call_failure(&error))),
        Err(error) => Err(Source::new(asked, call_failure(&error))),
    };
    Ok(OpenNic { active_mtu: found.active_mtu, max_mtu: found.max_mtu, dma_buf })
}

fn call_failure(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EBADF) => "errno 9 (EBADF)".to_owned(),
        Some(libc::EOPNOTSUPP) => "errno 95 (EOPNOTSUPP)".to_owned(),
        _ => failure(error),
    }
}
