//! When the GPU sees what a NIC wrote to its memory.
//!
//! A completion tells the CPU that the NIC is done. NVIDIA's GPUDirect RDMA guide ("Synchronization and Memory Ordering") asks for more
//! before work of the GPU that is submitted afterwards is sure to see the bytes: either the GPU orders such writes natively
//! (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING` is at least OWNER), or `cuFlushGPUDirectRDMAWrites` is called.
//! A CUDA event is no substitute: it orders the GPU's own work, and knows nothing of a NIC.

use std::fmt;

use super::device::GpuCapabilities;
use super::driver::Driver;
use super::error::GpuError;

/// Whose work sees what a NIC wrote to a GPU's memory, once the operation's future has resolved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum VisibilityScope {
    /// Work of the GPU whose memory it is.
    #[default]
    Owner,
    /// Work of every GPU of the process, which reads that memory by way of NVLink or PCIe.
    AllDevices,
}

impl VisibilityScope {
    /// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER` and `.._ALL_DEVICES`, and as the same numbers
    /// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER` and `.._TO_ALL_DEVICES`.
    pub(super) fn number(self) -> i32 {
        match self {
            Self::Owner => 100,
            Self::AllDevices => 200,
        }
    }
}

/// How bytes that a NIC wrote become visible to the GPU, on the direct paths. Where bytes are copied instead
/// ([`GpuPath::Software`](super::GpuPath::Software), [`GpuPath::Staged`](super::GpuPath::Staged)), the copy is work of the GPU itself, and its end is all there is to wait for.
///
/// It is about work of the GPU. Bytes that came through one NIC and go out through another were ordered by neither: await
/// work of the GPU on them in between, a copy for instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Visibility {
    /// The GPU orders a NIC's writes before all work that the CPU submits after the completion.
    Native,
    /// `cuFlushGPUDirectRDMAWrites` is called after each completion.
    Flush,
    /// Only an RDMA Read through the same NIC would do, which this version does not offer: direct paths are refused.
    NeedsRead,
}

impl Visibility {
    pub(super) fn of(capabilities: &GpuCapabilities, scope: VisibilityScope) -> Self {
        // With a second way into the GPU's memory beside PCIe the driver answers "ordered for all devices" and flushes nothing,
        // though bytes on the one way may be overtaken by a completion on the other (CUDA driver API,
        // CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE).
        if capabilities.coherent_with_host {
            Self::NeedsRead
        } else if capabilities.writes_ordering >= scope.number() {
            Self::Native
        } else if capabilities.flush_from_host {
            Self::Flush
        } else {
            Self::NeedsRead
        }
    }

    /// Called after the completion was seen, with the GPU's context current.
    pub(super) fn establish(self, driver: &Driver, scope: VisibilityScope) -> Result<(), GpuError> {
        match self {
            Self::Native => Ok(()),
            Self::Flush => driver.flush_to(scope.number()),
            Self::NeedsRead => {
                Err(GpuError::Invalid { operation: "make visible", reason: "no direct path is offered there".into() })
            }
        }
    }
}

impl fmt::Display for Visibility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Native => "native: the GPU orders remote writes before later work (writes ordering is at least OWNER)",
            Self::Flush => "cuFlushGPUDirectRDMAWrites after each completion (the GPU does not order remote writes)",
            Self::NeedsRead => {
                "an RDMA Read would have to flush: the GPU has a coherent link beside PCIe, or neither orders nor flushes"
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_follows_from_the_attributes() {
        let of = |writes_ordering, flush_from_host, coherent_with_host, scope| {
            let other = GpuCapabilities::default();
            Visibility::of(&GpuCapabilities { writes_ordering, flush_from_host, coherent_with_host, ..other }, scope)
        };
        let rule = |ordering, flush, coherent| of(ordering, flush, coherent, VisibilityScope::Owner);
        let for_all = |ordering, flush, coherent| of(ordering, flush, coherent, VisibilityScope::AllDevices);
        assert_eq!(rule(100, true, false), Visibility::Native);
        assert_eq!(rule(200, false, false), Visibility::Native);
        assert_eq!(rule(0, true, false), Visibility::Flush);
        assert_eq!(rule(0, false, false), Visibility::NeedsRead);
        assert_eq!(rule(200, true, true), Visibility::NeedsRead);
        assert_eq!(for_all(200, false, false), Visibility::Native);
        assert_eq!(for_all(100, true, false), Visibility::Flush);
        assert_eq!(for_all(100, false, false), Visibility::NeedsRead);
        assert_eq!(for_all(200, true, true), Visibility::NeedsRead);
    }
}
