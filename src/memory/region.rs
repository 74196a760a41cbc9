//! Memory regions: registrations with a device.

use std::fmt;
use std::ptr::NonNull;

use super::backing::Memory;
use super::chunks::Chunks;
use super::dma::Segment;
use super::domain::{Counted, ProtectionDomain};
use crate::error::Result;
use crate::meters::Registered;
use crate::provider::Mr;
use crate::sync::Arc;

/// A memory region (MR): a range of memory that is registered with a device.
///
/// A handle to look at; the bytes are reached through the [`Buffer`](super::Buffer)s made of the region. Cheap to clone.
/// The region stays registered, and its memory allocated, while a handle or a buffer exists.
#[derive(Clone)]
pub struct MemoryRegion(Arc<Registration>);

struct Registration {
    // Field order: deregistered, then freed, then no longer counted.
    mr: Mr,
    memory: Memory,
    chunks: Chunks,
    /// From the start of a chunk to the start of the next.
    stride: usize,
    counted: Counted,
    _metered: Registered,
}

impl MemoryRegion {
    /// Registers `memory`, in which chunk `i` begins at `i * stride`.
    pub(super) fn new(domain: &ProtectionDomain, memory: Memory, chunks: Chunks, stride: usize) -> Result<Self> {
        debug_assert!(chunks.count().checked_mul(stride).is_some_and(|len| len <= memory.len()));
        let mr = domain.provider().register(Segment::new(memory.ptr().as_ptr(), memory.len()))?;
        Ok(Self::registered(domain, mr, memory, chunks, stride))
    }

    /// The same for memory that was registered already.
    pub(super) fn registered(domain: &ProtectionDomain, mr: Mr, memory: Memory, chunks: Chunks, stride: usize) -> Self {
        let counted = Counted::new(domain, |live| &live.regions);
        let _metered = Registered::new(domain.meters(), memory.len());
        Self(Arc::new(Registration { mr, memory, chunks, stride, counted, _metered }))
    }

    /// The key that proves to the device that this side's memory is registered.
    pub fn lkey(&self) -> u32 {
        self.0.mr.lkey()
    }

    /// Address of the first byte, in this process; of memory of a GPU, the address that the GPU knows it by.
    pub fn address(&self) -> u64 {
        self.ptr().as_ptr() as u64
    }

    /// Length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)] // it never is
    pub fn len(&self) -> usize {
        self.0.memory.len()
    }

    /// The domain that the region is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.0.counted.domain()
    }

    pub(super) fn ptr(&self) -> NonNull<u8> {
        self.0.memory.ptr()
    }

    /// Whether the memory consists of pages of its own, the last one padded.
    pub(super) fn has_pages(&self) -> bool {
        self.0.memory.has_pages()
    }

    pub(super) fn mr(&self) -> &Mr {
        &self.0.mr
    }

    pub(super) fn chunks(&self) -> &Chunks {
        &self.0.chunks
    }

    pub(super) fn stride(&self) -> usize {
        self.0.stride
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("len", &self.len())
            .field("lkey", &format_args!("{:#x}", self.lkey()))
            .field("domain", &self.domain().id())
            .finish()
    }
}
