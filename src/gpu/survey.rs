//! What a report asks of CUDA: raw attributes, and what memory this crate would get.

use cudarc::driver::{CudaContext, result};

use super::allocation::Allocation;
use super::device::{GpuCapabilities, GpuDevice};
use super::driver::{Attribute, Driver};
use super::error::GpuError;
use super::kind::MemoryKind;
use super::visibility::{Visibility, VisibilityScope};
use crate::doctor::Source;
use crate::doctor::live::{ATTRIBUTES, CudaGpu, MemoryFound};
use crate::error::Result;

/// The version of CUDA that the driver speaks, and the GPUs that it shows. Makes no context.
pub(crate) fn gpus() -> Result<(i32, Vec<CudaGpu>)> {
    let driver = Driver::get()?;
    let count = CudaContext::device_count().map_err(GpuError::driver("cuDeviceGetCount"))?;
    let gpus = (0..count).map(|ordinal| gpu(driver, ordinal)).collect::<Result<_, GpuError>>()?;
    Ok((driver.version(), gpus))
}

fn gpu(driver: &Driver, ordinal: i32) -> Result<CudaGpu, GpuError> {
    let device = result::device::get(ordinal).map_err(GpuError::driver("cuDeviceGet"))?;
    let attributes: Vec<_> = ATTRIBUTES.iter().map(|(number, _)| driver.attribute(device, *number)).collect();
    let value = |number| {
        let place = ATTRIBUTES.iter().position(|(known, _)| *known == number);
        place.and_then(|place| attributes[place].ok()).unwrap_or(0)
    };
    let capabilities = GpuCapabilities {
        writes_ordering: value(118),
        flush_from_host: value(117) & 1 != 0,
        coherent_with_host: value(100) != 0,
        ..GpuCapabilities::default()
    };
    let visibility = Visibility::of(&capabilities, VisibilityScope::Owner);
    Ok(CudaGpu {
        ordinal: ordinal as usize,
        name: result::device::get_name(device).map_err(GpuError::driver("cuDeviceGetName"))?,
        pci_bus_id: driver.pci_bus_id(device)?,
        memory_bytes: driver.total_memory(device),
        attributes,
        visibility: match visibility {
            Visibility::NeedsRead => Err(visibility.to_string()),
            _ => Ok(visibility.to_string()),
        },
        memory: None,
    })
}

/// Opens the GPU and allocates on it what a `GpuBuffer` is made of, and what cudarc allocates by itself.
pub(crate) fn memory(ordinal: usize) -> Result<MemoryFound> {
    let gpu = GpuDevice::open(ordinal)?;
    let inner = gpu.inner();
    let ours = Allocation::new(inner, 1)?;
    let mut refused = Vec::new();
    let others = super::driver::own(&inner.context, "cuMemAllocAsync", || inner.incoming.alloc_zeros::<u8>(4096))?;
    {
        use cudarc::driver::DevicePtr;
        let (address, _guard) = others.device_ptr(&inner.incoming);
        let kind = MemoryKind::of(inner.driver, ordinal, address);
        if kind != MemoryKind::Device {
            refused.push(format!("{kind} (cudarc's own alloc)"));
        }
    }
    refused.extend([MemoryKind::Managed, MemoryKind::Pinned].map(|kind| kind.to_string()));
    let mut found = describe(&gpu, MemoryKind::of(inner.driver, ordinal, ours.address()), ours.address());
    found.refused = refused;
    Ok(found)
}

/// Memory whose kind is known.
pub(crate) fn describe(gpu: &GpuDevice, kind: MemoryKind, address: u64) -> MemoryFound {
    let inner = gpu.inner();
    let source = |attribute: Attribute| {
        let asked = format!("cuPointerGetAttribute({} = {})", attribute.name(), attribute as i32);
        let value = inner.driver.pointer_attribute(address, attribute);
        Source::new(asked, value.map_or_else(|| "not known".to_owned(), |value| (value & 0xff).to_string()))
    };
    let how = if inner.capabilities().mappable { "mapped, gpuDirectRDMACapable" } else { "of cuMemAlloc" };
    let kind_text = if kind == MemoryKind::Device { format!("{kind} ({how})") } else { kind.to_string() };
    MemoryFound {
        kind: kind_text,
        fit: kind == MemoryKind::Device,
        sources: vec![source(Attribute::GpuDirectCapable)],
        refused: Vec::new(),
    }
}
