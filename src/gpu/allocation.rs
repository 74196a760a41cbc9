//! Who keeps device memory allocated.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use cudarc::driver::result;

use super::device::Inner;
use super::driver;
use super::error::GpuError;
use super::mapping::Mapping;
use super::reaper::Elsewhere;
use crate::memory::device::Shareable;

/// GPUDirect RDMA pins memory in units of this size, and so allocations are made of whole ones.
const UNIT: usize = 64 << 10;

/// Longer memory is not given to other processes, since taking it back needs as much again.
const SHARED: usize = 4 << 30;

/// Memory that NICs may be given; that of the stream-ordered pools may not.
#[derive(Debug)]
pub(super) struct Allocation {
    address: u64,
    memory: Elsewhere<Memory>,
}

#[derive(Debug)]
enum Memory {
    Mapped(Mapping),
    Plain(Plain),
}

impl Allocation {
    /// `len` zeroed bytes, and those to the next multiple of the unit of allocation: 2 MiB on the GPUs of today.
    pub(super) fn new(gpu: &Arc<Inner>, len: usize) -> Result<Self, GpuError> {
        gpu.bind()?;
        let memory = match gpu.capabilities().mappable {
            true => Memory::Mapped(Mapping::new(gpu, len)?),
            false => Memory::Plain(Plain::new(gpu, len)?),
        };
        // All of what other processes may be given, or else what was asked for.
        let (address, len) = match &memory {
            Memory::Mapped(mapping) => (mapping.address(), mapping.len()),
            Memory::Plain(plain) => (plain.address, len),
        };
        let allocation = Self { address, memory: Elsewhere::new(gpu, memory) };
        let stream = &gpu.incoming;
        // SAFETY: just allocated, at least `len` bytes, and nobody else knows them.
        unsafe { result::memset_d8_async(address, 0, len, stream.cu_stream()) }
            .map_err(GpuError::driver("cuMemsetD8Async"))?;
        // Whatever stream the program uses first comes after this.
        driver::own(&gpu.context, "cuStreamSynchronize", || stream.synchronize())?;
        Ok(allocation)
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Whether other processes can be given it.
    pub(super) fn is_shareable(&self, gpu: &Inner) -> bool {
        gpu.capabilities().shareable && self.mapping().is_some_and(|mapping| mapping.len() <= SHARED)
    }

    /// Puts other memory in its place, with the same contents, where other processes may have been given it.
    ///
    /// Nothing uses the addresses during the call; after an error nobody may use them at all.
    pub(super) fn renew(&self, gpu: &Inner) -> Result<(), GpuError> {
        self.mapping().map_or(Ok(()), |mapping| mapping.renew(gpu))
    }

    fn mapping(&self) -> Option<&Mapping> {
        match self.memory.get() {
            Some(Memory::Mapped(mapping)) => Some(mapping),
            _ => None,
        }
    }
}

impl Shareable for Allocation {
    fn range(&self) -> (u64, usize) {
        self.mapping().map_or((self.address, 0), |mapping| (mapping.address(), mapping.len()))
    }

    fn export(&self) -> io::Result<OwnedFd> {
        let mapping = self.mapping().ok_or(io::ErrorKind::Unsupported)?;
        mapping.export().map_err(io::Error::other)
    }
}

/// Memory of `cuMemAlloc`, where there is no other. Freeing it waits for all that the GPU has to do, and meanwhile other threads can
/// submit nothing (measured on an H200).
#[derive(Debug)]
struct Plain {
    address: u64,
    context: Arc<cudarc::driver::CudaContext>,
}

impl Plain {
    fn new(gpu: &Inner, len: usize) -> Result<Self, GpuError> {
        let whole = len.checked_next_multiple_of(UNIT).ok_or_else(|| too_long(len))?;
        // SAFETY: the context is current; the memory is initialised by the caller.
        let address = unsafe { result::malloc_sync(whole) }.map_err(GpuError::driver("cuMemAlloc"))?;
        Ok(Self { address, context: gpu.context.clone() })
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let bound = driver::make_current(&self.context);
        // SAFETY: allocated by `cuMemAlloc`, deregistered by now, and freed only here. The driver waits for work that uses it.
        let freed = unsafe { result::free_sync(self.address) };
        if let Err(error) = bound.and(freed) {
            tracing::warn!(%error, address = self.address, "GPU memory could not be freed");
        }
    }
}

pub(super) fn too_long(len: usize) -> GpuError {
    GpuError::Invalid { operation: "allocate", reason: format!("{len} bytes are more than there can be") }
}
