//! The paths by which an RDMA device reaches a GPU's memory, and choosing one.

use std::fmt;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use super::device::GpuDevice;
use super::error::{GpuError, Refusal};
use super::kind::MemoryKind;
use super::staging::Mirror;
use super::survey;
use super::visibility::Visibility;
use crate::doctor::{GpuDirectReport, PEER_MEMORY, copies_with_cpu};
use crate::error::Result;
use crate::memory::dma::Segment;
use crate::memory::{Access, ProtectionDomain};
use crate::provider::{Grant, Mr, Pd};

/// Pages of dma-bufs.
const PAGE: u64 = 4096;

/// How the bytes of a [`GpuBuffer`](super::GpuBuffer) get to the RDMA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuPath {
    /// The NIC reads and writes the GPU's memory, registered as a dma-buf (`ibv_reg_dmabuf_mr(3)`).
    DmaBuf,
    /// The NIC reads and writes the GPU's memory, by way of the kernel module nvidia-peermem.
    PeerMemory,
    /// The software device copies between the GPU's memory and its link, in pieces by way of pinned memory, while the link is busy
    /// with others.
    Software,
    /// Each operation copies between the GPU's memory and a pinned buffer of the same length, which is what the NIC reads and writes.
    /// Only for buffers that were allowed to: see [`PathPolicy`].
    Staged,
}

impl fmt::Display for GpuPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DmaBuf => "dma-buf",
            Self::PeerMemory => "nvidia-peermem",
            Self::Software => "software",
            Self::Staged => "staged",
        })
    }
}

/// Which paths a buffer may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PathPolicy {
    /// Only those without a copy of the whole on the host. With the software device that is its own path, since it is what
    /// its user chose. An error lists each path that was tried and why it does not go.
    #[default]
    Direct,
    /// Those, or else through a pinned buffer on the host: twice the memory, and the time of a copy more per operation.
    AllowStaging,
    /// Through a pinned buffer on the host, even where a direct path goes.
    Staged,
}

/// A way found.
pub(super) struct Registered {
    pub path: GpuPath,
    pub mr: Mr,
    /// On the staged path.
    pub mirror: Option<Arc<Mirror>>,
}

/// Finds the way for `len` bytes at `address`.
pub(super) fn register(
    gpu: &GpuDevice,
    domain: &ProtectionDomain,
    (address, len): (u64, usize),
    kind: MemoryKind,
    policy: PathPolicy,
) -> Result<Registered> {
    let pd = domain.provider();
    let segment = Segment::new(std::ptr::without_provenance_mut(address as usize), len);
    let mut refusals = Vec::new();
    if policy == PathPolicy::Staged {
        return staged(gpu, domain, len);
    }
    // Each GPU's own memory that the driver calls unfit is so for every direct path.
    if kind != MemoryKind::Device && policy == PathPolicy::Direct {
        let hint = kind.hint();
        return Err(GpuError::Unfit { operation: "register", address, kind, hint }.into());
    }
    if let Pd::Soft(_) = pd {
        let mr = pd.register_device(segment, gpu.inner().clone())?;
        return Ok(Registered { path: GpuPath::Software, mr, mirror: None });
    }
    let fit = fit_for_direct(gpu, kind).and_then(|()| keeps_cpu_out(&device_name(domain)));
    for path in [GpuPath::DmaBuf, GpuPath::PeerMemory] {
        let tried = fit.clone().and_then(|()| match path {
            GpuPath::DmaBuf => dmabuf(gpu, pd, (address, len), Access::empty()),
            _ => peer_memory(gpu, pd, segment),
        });
        match tried {
            Ok(mr) => return Ok(Registered { path, mr, mirror: None }),
            Err(reason) => refusals.push(Refusal { path, reason }),
        }
    }
    if policy == PathPolicy::AllowStaging {
        let refused: Vec<_> = refusals.iter().map(ToString::to_string).collect();
        tracing::info!(gpu = %gpu, ?refused, len, "no direct path: the buffer is staged through pinned memory");
        return staged(gpu, domain, len);
    }
    refusals.push(Refusal { path: GpuPath::Staged, reason: "not allowed; see PathPolicy::AllowStaging".into() });
    let device = device_name(domain);
    let report =
        GpuDirectReport::of_registration(&gpu.capabilities().pci_bus_id, &device, survey::describe(gpu, kind, address));
    Err(GpuError::NoPath { device, gpu: gpu.to_string(), refusals, report: report.map(Box::new) }.into())
}

fn device_name(domain: &ProtectionDomain) -> String {
    crate::Device::from_domain(domain).map_or_else(|| "the device".to_owned(), |device| device.name().to_owned())
}

fn staged(gpu: &GpuDevice, domain: &ProtectionDomain, len: usize) -> Result<Registered> {
    let mirror = Mirror::new(gpu, len)?;
    let mr = domain.provider().register(mirror.segment())?;
    Ok(Registered { path: GpuPath::Staged, mr, mirror: Some(mirror) })
}

/// What holds for every direct path of a NIC.
fn fit_for_direct(gpu: &GpuDevice, kind: MemoryKind) -> Result<(), String> {
    if kind != MemoryKind::Device {
        return Err(format!("the memory is {kind}; {}", kind.hint()));
    }
    if gpu.visibility() == Visibility::NeedsRead {
        return Err(format!("what the NIC writes could not be made visible: {}", gpu.visibility()));
    }
    Ok(())
}

/// mlx5 delivers small messages inside their completions unless it is told not to (`MLX5_SCATTER_TO_CQE` in mlx5dv(7)). Its library
/// then copies them to the posted buffer with the CPU, which is a fault where the buffer is a GPU's.
fn keeps_cpu_out(device: &str) -> Result<(), String> {
    const VARIABLE: &str = "MLX5_SCATTER_TO_CQE";
    let driver = std::fs::read_link(format!("/sys/class/infiniband/{device}/device/driver"));
    let driver = driver.ok().and_then(|driver| Some(driver.file_name()?.to_str()?.to_owned()));
    if copies_with_cpu(driver.as_deref()) && std::env::var_os(VARIABLE).is_none_or(|value| value != "0") {
        return Err(format!("mlx5 would copy small messages with the CPU: start the program with {VARIABLE}=0"));
    }
    Ok(())
}

/// Exports the pages that hold the range, and registers the range alone.
fn dmabuf(gpu: &GpuDevice, pd: &Pd, range: (u64, usize), access: Access) -> Result<Mr, String> {
    with_dmabuf(gpu, pd, range, |fd, offset, (address, len)| pd.register_dmabuf(fd, offset, len, address, access))
}

fn with_dmabuf<T>(
    gpu: &GpuDevice,
    pd: &Pd,
    (address, len): (u64, usize),
    register: impl FnOnce(i32, u64, (u64, usize)) -> std::io::Result<T>,
) -> Result<T, String> {
    if !gpu.capabilities().dma_buf {
        return Err("the GPU's driver exports no dma-bufs (DMA_BUF_SUPPORTED is 0; it takes the open kernel modules, or a newer driver)".into());
    }
    pd.supports_dmabuf().map_err(|error| error.to_string())?;
    let start = address & !(PAGE - 1);
    let pages = (address + len as u64).next_multiple_of(PAGE) - start;
    let inner = gpu.inner();
    inner.bind().map_err(|error| error.to_string())?;
    let fd = inner.driver.export_dmabuf(start, pages as usize).map_err(|error| error.to_string())?;
    register(fd.as_raw_fd(), address - start, (address, len)).map_err(|error| format!("ibv_reg_dmabuf_mr: {error}"))
    // The registration holds the dma-buf from here on; the descriptor goes.
}

fn peer_memory(gpu: &GpuDevice, pd: &Pd, segment: Segment) -> Result<Mr, String> {
    if !gpu.capabilities().gpu_direct {
        return Err("the GPU does not support GPUDirect RDMA (GPU_DIRECT_RDMA_SUPPORTED is 0)".into());
    }
    if !PEER_MEMORY.iter().any(|file| Path::new("/sys").join(file).exists()) {
        return Err("the kernel module nvidia-peermem is not loaded".into());
    }
    pd.register(segment).map_err(|error| error.to_string())
}

/// A key for peers over a part of what was registered.
pub(super) fn grant(
    gpu: &GpuDevice,
    domain: &ProtectionDomain,
    path: GpuPath,
    mr: &Mr,
    segment: Segment,
    access: Access,
) -> Result<Grant> {
    let pd = domain.provider();
    match path {
        GpuPath::Software | GpuPath::PeerMemory => pd.grant(mr, segment, access),
        GpuPath::DmaBuf => {
            let range = (segment.address(), segment.len());
            with_dmabuf(gpu, pd, range, |fd, offset, (address, len)| pd.grant_dmabuf(fd, offset, len, address, access))
                .map_err(|reason| GpuError::Invalid { operation: "expose", reason }.into())
        }
        GpuPath::Staged => Err(GpuError::Invalid {
            operation: "expose",
            reason: "the buffer is staged through pinned memory, which peers cannot be given in the GPU's place".into(),
        }
        .into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::allocation::Allocation;

    /// A registration holds the memory; a descriptor that stayed open would be one of a few hundred.
    #[test]
    fn ten_thousand_exports_leave_no_descriptor_behind() {
        // Loaded first, it is what is found; where a real driver would be found instead, it says so, and that one will do.
        let _ = fake_cuda::load();
        let gpu = GpuDevice::open(0).unwrap();
        let inner = gpu.inner();
        let memory = Allocation::new(inner, 1 << 20).unwrap();
        for round in 0..10_000u64 {
            let start = memory.address() + round % 256 * PAGE;
            let fd =
                inner.driver.export_dmabuf(start, PAGE as usize).unwrap_or_else(|error| panic!("{round}: {error}"));
            assert!(fd.as_raw_fd() < 5_000, "descriptors pile up");
        }
        let error = inner.driver.export_dmabuf(memory.address() + 1, PAGE as usize).unwrap_err();
        assert!(error.to_string().contains("cuMemGetHandleForAddressRange: CUDA_ERROR_INVALID_VALUE"), "{error}");
    }
}
