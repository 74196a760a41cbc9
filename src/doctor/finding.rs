//! What was found at one link of the chain.

use std::fmt;

/// How it is about a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Status {
    /// It holds.
    Ok,
    /// It does not hold.
    Broken,
    /// It could not be told: not permitted, not readable, or not asked. Never counted as holding.
    Unknown,
}

impl Status {
    /// `ok`, `broken` or `unknown`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Broken => "broken",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// When a link counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Need {
    /// Always.
    Always,
    /// On this way of registering the GPU's memory, of which one is enough.
    Route(Route),
    /// Broken always, but not when it is unknown.
    Known,
}

/// A way of registering a GPU's memory with a NIC. One that holds is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Route {
    /// As a dma-buf (`ibv_reg_dmabuf_mr(3)`).
    DmaBuf,
    /// By way of the kernel module nvidia-peermem.
    PeerMemory,
}

impl Route {
    /// Each of them, in the order in which they are tried.
    pub const ALL: [Self; 2] = [Self::DmaBuf, Self::PeerMemory];

    /// As in JSON: `dma_buf`, `peer_memory`.
    pub fn name(self) -> &'static str {
        match self {
            Self::DmaBuf => "dma_buf",
            Self::PeerMemory => "peer_memory",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DmaBuf => "dma-buf",
            Self::PeerMemory => "nvidia-peermem",
        })
    }
}

/// Declares the links with the name of each and when it counts.
macro_rules! links {
    ($($(#[$doc:meta])* $link:ident = $name:literal, $need:expr;)+) => {
        /// A link of the chain between a NIC and the memory of a GPU, in the order in which a report lists them.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[non_exhaustive]
        pub enum Link {
            $($(#[$doc])* #[cfg_attr(feature = "serde", serde(rename = $name))] $link,)+
        }

        impl Link {
            /// Each of them, in order.
            pub const ALL: &[Self] = &[$(Self::$link),+];

            /// Its name, as in JSON and in the text.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$link => $name,)+
                }
            }

            pub(super) fn need(self) -> Need {
                match self {
                    $(Self::$link => $need,)+
                }
            }
        }
    };
}

links! {
    /// There is a GPU of NVIDIA's.
    Gpu = "gpu", Need::Always;
    /// `libcuda.so.1` can be loaded, and which CUDA it speaks.
    CudaDriver = "cuda_driver", Need::Always;
    /// The kernel modules of the GPU's driver, open or proprietary (`/proc/driver/nvidia/version`).
    KernelModule = "kernel_module", Need::Known;
    /// What a `GpuBuffer` gets is memory that NICs may be given.
    MemoryKind = "memory_kind", Need::Always;
    /// Whether that memory can be of the kind that is mapped (`GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`).
    MappedMemory = "mapped_memory", Need::Known;
    /// The window into the GPU's memory on the PCIe bus (BAR1) is as large as the memory.
    Bar1 = "bar1", Need::Known;
    /// How what a NIC wrote becomes visible to the GPU.
    Visibility = "visibility", Need::Always;
    /// There is an RDMA device.
    Nic = "nic", Need::Always;
    /// libibverbs can be loaded, and the device opened.
    Verbs = "verbs", Need::Always;
    /// A port of the NIC is up.
    Port = "port", Need::Always;
    /// The size of the packets on its link.
    Mtu = "mtu", Need::Known;
    /// The port has an address that others can reach.
    Gid = "gid", Need::Always;
    /// The NIC's library leaves the bytes to the NIC, small messages too.
    CpuCopies = "cpu_copies", Need::Always;
    /// The GPU's driver exports its memory as a dma-buf (`DMA_BUF_SUPPORTED`).
    DmaBufExport = "dma_buf_export", Need::Route(Route::DmaBuf);
    /// The NIC registers dma-bufs.
    DmaBufImport = "dma_buf_import", Need::Route(Route::DmaBuf);
    /// The GPU's driver has the interface that nvidia-peermem uses (`GPU_DIRECT_RDMA_SUPPORTED`).
    GpuDirect = "gpu_direct", Need::Route(Route::PeerMemory);
    /// The kernel module nvidia-peermem, or an older one of the kind, is loaded.
    PeerMemory = "peer_memory", Need::Route(Route::PeerMemory);
    /// How near GPU and NIC are on the PCIe bus.
    Level = "level", Need::Always;
    /// No bridge between them sends their traffic up to the CPU (PCIe Access Control Services).
    Acs = "acs", Need::Always;
    /// The IOMMU gives them the addresses that they use (none, or pass-through).
    Iommu = "iommu", Need::Always;
    /// PCIe Address Translation Services of the NIC, which count only beside an IOMMU.
    Ats = "ats", Need::Known;
    /// Both are on one NUMA node.
    Numa = "numa", Need::Known;
    /// How much memory the process may lock.
    Memlock = "memlock", Need::Always;
    /// The kernel's release.
    Kernel = "kernel", Need::Known;
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a finding comes from, raw.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Source {
    /// The file, the attribute with its number, or the call.
    pub asked: String,
    /// Its text, its value, or its error with the number.
    pub answer: String,
}

impl Source {
    pub(crate) fn new(asked: impl Into<String>, answer: impl Into<String>) -> Self {
        Self { asked: asked.into(), answer: answer.into() }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.asked, self.answer)
    }
}

/// A link, and how it is about it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Finding {
    /// Which.
    pub link: Link,
    /// How it is.
    pub status: Status,
    /// What was found, in words.
    pub value: String,
    /// Where that comes from.
    pub sources: Vec<Source>,
    /// What to do, in a sentence or two. Always there where the status is not [`Status::Ok`], and where it is, only if something
    /// could be better.
    pub advice: String,
}

impl Finding {
    pub(super) fn ok(link: Link, value: impl Into<String>) -> Self {
        Self { link, status: Status::Ok, value: value.into(), sources: Vec::new(), advice: String::new() }
    }

    pub(super) fn broken(link: Link, value: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { link, status: Status::Broken, value: value.into(), sources: Vec::new(), advice: advice.into() }
    }

    pub(super) fn unknown(link: Link, value: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { link, status: Status::Unknown, value: value.into(), sources: Vec::new(), advice: advice.into() }
    }

    pub(super) fn told_by(mut self, source: Source) -> Self {
        self.sources.push(source);
        self
    }

    pub(super) fn told_by_all(mut self, sources: impl IntoIterator<Item = Source>) -> Self {
        self.sources.extend(sources);
        self
    }

    pub(super) fn remark(mut self, advice: impl Into<String>) -> Self {
        self.advice = advice.into();
        self
    }
}
