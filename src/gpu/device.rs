//! A GPU, and what this crate keeps for it.

use std::fmt;
use std::sync::{Arc, Weak};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaStream};

use super::bounce::Bounces;
use super::driver::{self, Driver};
use super::error::GpuError;
use super::events::Events;
use super::peers::Reach;
use super::pinned::Shelf;
use super::reaper::Reaper;
use super::visibility::{Visibility, VisibilityScope};
use crate::error::Result;

/// A GPU whose memory operations can use. Cheap to clone.
///
/// It wraps a cudarc context (the device's primary context when opened by ordinal), so kernels and copies of the program's own work
/// on the same memory. It adds a stream for each direction of copies, a pool of events, and, once they are needed,
/// one thread that waits for events on behalf of all tasks and one that releases memory. Open each GPU once and share it.
///
/// # Several GPUs
///
/// Any number, each with a `GpuDevice` of its own. No call depends on which context is current in the thread, but as with
/// cudarc's own calls the GPU's context is current afterwards.
#[derive(Clone)]
pub struct GpuDevice(Arc<Inner>);

pub(super) struct Inner {
    /// The one pointer to this by which the software device knows that memory is of the same GPU.
    me: Weak<Inner>,
    pub(super) context: Arc<CudaContext>,
    /// Copies from the host to the GPU.
    pub(super) incoming: Arc<CudaStream>,
    /// Copies from the GPU to the host.
    pub(super) outgoing: Arc<CudaStream>,
    pub(super) events: Arc<Events>,
    pub(super) bounces: Bounces,
    pub(super) shelf: Shelf,
    pub(super) reaper: Reaper,
    pub(super) reach: Reach,
    pub(super) driver: &'static Driver,
    capabilities: GpuCapabilities,
}

/// What a GPU and its driver can do, as far as RDMA is concerned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuCapabilities {
    /// Its name, for people.
    pub name: String,
    /// Its number among the GPUs that CUDA shows to this process, which `CUDA_VISIBLE_DEVICES` changes.
    pub ordinal: usize,
    /// Its PCI address, which nothing changes: `domain:bus:device.function` in lower case.
    pub pci_bus_id: String,
    /// Compute capability, major and minor.
    pub compute_capability: (i32, i32),
    /// The CUDA version that the driver supports, 1000 times the major plus 10 times the minor number.
    pub driver_version: i32,
    /// `GPU_DIRECT_RDMA_SUPPORTED`: NICs may be given its memory by way of a kernel module.
    pub gpu_direct: bool,
    /// `DMA_BUF_SUPPORTED`: its memory can be exported as a dma-buf.
    pub dma_buf: bool,
    /// `VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`, and where NICs may be given the GPU's memory `GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`:
    /// memory can be allocated so that giving it back holds up nobody.
    pub mappable: bool,
    /// `HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`: memory that is mapped can be given to other processes, whose GPUs then copy
    /// from and to it by themselves.
    pub shareable: bool,
    /// `GPU_DIRECT_RDMA_WRITES_ORDERING`: 0 none, 100 ordered for this GPU, 200 for all of them.
    pub writes_ordering: i32,
    /// `GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS` has HOST: `cuFlushGPUDirectRDMAWrites` works.
    pub flush_from_host: bool,
    /// `PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES`: GPU and host share page tables over a coherent link (NVLink-C2C).
    pub coherent_with_host: bool,
}

impl GpuDevice {
    /// How many GPUs CUDA shows to this process; 0 without a driver.
    pub fn count() -> usize {
        match Driver::get() {
            Ok(_) => CudaContext::device_count().map_or(0, |count| count.try_into().unwrap_or(0)),
            Err(_) => 0,
        }
    }

    /// Opens the GPU with this ordinal, with its primary context.
    ///
    /// # Errors
    ///
    /// [`GpuError::Unavailable`] without a CUDA driver, with one that lacks a function, or when there is no such GPU: never a panic.
    pub fn open(ordinal: usize) -> Result<Self> {
        Driver::get()?;
        let count = Self::count();
        if ordinal >= count {
            let reason = format!(
                "GPU {ordinal} was asked for, and CUDA shows {count} to this process (see CUDA_VISIBLE_DEVICES)"
            );
            return Err(GpuError::Unavailable { reason }.into());
        }
        let context = CudaContext::new(ordinal).map_err(GpuError::driver("cuDevicePrimaryCtxRetain"))?;
        Self::from_context(&context)
    }

    /// The GPU of a context that the program has already.
    ///
    /// Creates streams in it. The first stream of a context that had none waits once for all of its work, and turns on
    /// cudarc's own tracking of who used a `CudaSlice`.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn from_context(context: &Arc<CudaContext>) -> Result<Self> {
        let driver = Driver::get()?;
        let capabilities = capabilities(driver, context)?;
        let stream = || driver::own(context, "cuStreamCreate", || context.new_stream());
        let (incoming, outgoing) = (stream()?, stream()?);
        let gpu = Arc::new_cyclic(|me| Inner {
            me: me.clone(),
            incoming,
            outgoing,
            events: Events::new(context),
            bounces: Bounces::default(),
            shelf: Shelf::default(),
            reaper: Reaper::default(),
            reach: Reach::default(),
            context: context.clone(),
            driver,
            capabilities,
        });
        let gpu = Self(gpu);
        let GpuCapabilities { pci_bus_id, name, .. } = gpu.capabilities();
        tracing::debug!(gpu = pci_bus_id, name, visibility = %gpu.visibility(), "GPU opened");
        Ok(gpu)
    }

    /// The context, for kernels, streams and allocations of the program's own.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.0.context
    }

    /// What it can do.
    pub fn capabilities(&self) -> &GpuCapabilities {
        &self.0.capabilities
    }

    /// How bytes that a NIC wrote become visible to it, and why.
    pub fn visibility(&self) -> Visibility {
        self.visibility_to(VisibilityScope::Owner)
    }

    /// How they become visible to work of this scope: see [`GpuBuffer::set_visibility_scope`](super::GpuBuffer::set_visibility_scope).
    pub fn visibility_to(&self, scope: VisibilityScope) -> Visibility {
        Visibility::of(&self.0.capabilities, scope)
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Inner {
    pub(super) fn shared(&self) -> Option<Arc<Self>> {
        self.me.upgrade()
    }

    pub(super) fn bind(&self) -> Result<(), GpuError> {
        driver::make_current(&self.context).map_err(GpuError::driver("cuCtxSetCurrent"))
    }

    pub(super) fn capabilities(&self) -> &GpuCapabilities {
        &self.capabilities
    }

    /// Makes what a NIC wrote visible to work of this scope.
    pub(super) fn make_visible(&self, scope: VisibilityScope) -> Result<(), GpuError> {
        self.bind()?;
        Visibility::of(&self.capabilities, scope).establish(self.driver, scope)
    }
}

impl fmt::Display for GpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.capabilities.fmt(f)
    }
}

impl fmt::Debug for GpuDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuDevice").field(&self.0.capabilities).finish()
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("pci_bus_id", &self.capabilities.pci_bus_id).finish_non_exhaustive()
    }
}

impl fmt::Display for GpuCapabilities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({} at {})", self.ordinal, self.name, self.pci_bus_id)
    }
}

fn capabilities(driver: &Driver, context: &Arc<CudaContext>) -> Result<GpuCapabilities, GpuError> {
    let ask = |attribute| context.attribute(attribute);
    // An attribute that is newer than the driver is one that the GPU does not have.
    let optional = |attribute| ask(attribute).unwrap_or(0);
    let required = |attribute| ask(attribute).map_err(GpuError::driver("cuDeviceGetAttribute"));
    let ordinal = context.ordinal();
    let gpu_direct = optional(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED) != 0;
    let maps = optional(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0;
    let maps_for_nics = optional(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) != 0;
    let mappable = driver.maps_memory() && maps && (maps_for_nics || !gpu_direct);
    Ok(GpuCapabilities {
        name: context.name().map_err(GpuError::driver("cuDeviceGetName"))?,
        ordinal,
        pci_bus_id: driver.pci_bus_id(context.cu_device())?,
        compute_capability: (
            required(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            required(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        driver_version: driver.version(),
        gpu_direct,
        mappable,
        shareable: mappable
            && driver.shares_memory()
            && optional(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0,
        dma_buf: driver.exports_dmabufs(context.cu_device()),
        writes_ordering: optional(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
        flush_from_host: optional(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS) & 1 != 0,
        coherent_with_host: optional(Attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES) != 0,
    })
}

/// The CUDA version that the installed driver supports, as in `13.0`.
///
/// # Errors
///
/// [`GpuError::Unavailable`] with the reason when there is no driver.
pub fn driver_version() -> Result<String> {
    Ok(Driver::get().map(|driver| driver::shown(driver.version()))?)
}
