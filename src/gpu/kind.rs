//! What a pointer points to. That a pointer can be used somewhere does not say that a NIC reaches it.

use std::fmt;

use super::driver::{Attribute, Driver};

/// Kinds of memory, as the CUDA driver tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of this GPU, which GPUDirect RDMA can be used on.
    Device,
    /// Memory of this GPU from a stream-ordered pool (`cuMemAllocAsync`, which is what cudarc's `alloc` uses), or another kind
    /// that the driver calls unfit for GPUDirect RDMA.
    Pool,
    /// Memory of this GPU that was mapped from a physical allocation (`cuMemCreate`) without `gpuDirectRDMACapable`.
    Mapped,
    /// Memory of another GPU, with its ordinal.
    OtherGpu(u32),
    /// Managed memory (`cuMemAllocManaged`), which the driver moves between host and GPU.
    Managed,
    /// Page-locked memory of the host that the CUDA driver knows.
    Pinned,
    /// Memory that the CUDA driver does not know: pageable memory of the host, or none at all.
    Pageable,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("device memory"),
            Self::Pool => f.write_str("device memory of a stream-ordered pool"),
            Self::Mapped => f.write_str("device memory mapped without gpuDirectRDMACapable"),
            Self::OtherGpu(ordinal) => write!(f, "memory of GPU {ordinal}"),
            Self::Managed => f.write_str("managed memory"),
            Self::Pinned => f.write_str("pinned host memory"),
            Self::Pageable => f.write_str("pageable host memory, or no memory"),
        }
    }
}

impl MemoryKind {
    /// What `address` is, for the GPU with this ordinal.
    pub(super) fn of(driver: &Driver, ordinal: usize, address: u64) -> Self {
        const TYPE_HOST: u64 = 1;
        let attribute = |attribute| driver.pointer_attribute(address, attribute);
        let Some(kind) = attribute(Attribute::MemoryType) else { return Self::Pageable };
        if attribute(Attribute::IsManaged).is_some_and(|managed| managed & 0xff != 0) {
            return Self::Managed;
        }
        if kind & 0xffff_ffff == TYPE_HOST {
            return Self::Pinned;
        }
        match attribute(Attribute::DeviceOrdinal) {
            Some(other) if other & 0xffff_ffff != ordinal as u64 => return Self::OtherGpu(other as u32),
            _ => {}
        }
        if attribute(Attribute::MempoolHandle).is_some_and(|pool| pool != 0) {
            return Self::Pool;
        }
        match attribute(Attribute::GpuDirectCapable) {
            Some(capable) if capable & 0xff != 0 => Self::Device,
            // Memory of cuMemAlloc is what legacy IPC can share.
            _ if attribute(Attribute::IsLegacyIpcCapable).is_some_and(|capable| capable & 0xff != 0) => Self::Device,
            _ => Self::Mapped,
        }
    }

    /// Whether it is memory of the GPU at all.
    pub(super) fn of_this_gpu(self) -> bool {
        matches!(self, Self::Device | Self::Pool | Self::Mapped)
    }

    /// What to do with memory that is not.
    pub(super) fn hint(self) -> &'static str {
        match self {
            Self::Device => "",
            Self::Pool => "allocate with GpuBuffer::alloc or cuMemAlloc, or allow staging",
            Self::Mapped => "create it with allocFlags.gpuDirectRDMACapable = 1, or allow staging",
            Self::OtherGpu(_) => "use the GpuDevice of that GPU",
            Self::Managed => "copy it to a buffer of GpuBuffer::alloc: the driver may move managed memory at any time",
            Self::Pinned | Self::Pageable => "register host memory with ProtectionDomain::register_raw",
        }
    }
}
