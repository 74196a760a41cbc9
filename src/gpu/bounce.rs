//! Copies between the GPU and pinned host memory, for devices that cannot reach the GPU's.
#![allow(unsafe_code)]

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use cudarc::driver::{CudaStream, result};

use super::device::Inner;
use super::driver;
use super::error::GpuError;
use super::events::Event;
use super::mapping::Mapping;
use super::peers;
use super::pinned::Pinned;
use crate::memory::device::{BOUNCE, Bounce, DeviceMemory, Imported, Transfer};
use crate::memory::dma::Segment;
use crate::sync::Mutex;

/// Bounce buffers kept for later use: 32 MiB.
const KEPT: usize = 64;

/// Bounce buffers that nobody uses.
#[derive(Default)]
pub(super) struct Bounces(Mutex<Vec<Slab>>);

struct Slab {
    memory: Pinned,
    /// Behind its last copy.
    event: Event,
}

/// A bounce buffer in use.
struct Lent {
    /// There until it is dropped.
    slab: Option<Slab>,
    gpu: Arc<Inner>,
    copying: bool,
}

impl std::fmt::Debug for Lent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bounce").field("copying", &self.copying).finish_non_exhaustive()
    }
}

/// Copies `len` bytes from the GPU to `to`, in order with other copies of that direction.
///
/// # Safety
///
/// Both are valid for `len` bytes, and nobody else touches those at `to`, until an event recorded afterwards is done.
pub(super) unsafe fn fetch(gpu: &Inner, from: u64, to: *mut u8, len: usize) -> Result<(), GpuError> {
    gpu.bind()?;
    // SAFETY: passed on; no reference to the bytes lives longer than the call, which only looks at address and length.
    let to = unsafe { std::slice::from_raw_parts_mut(to.cast::<std::mem::MaybeUninit<u8>>(), len) };
    // SAFETY: passed on.
    unsafe { result::memcpy_dtoh_async(to, from, gpu.outgoing.cu_stream()) }
        .map_err(GpuError::driver("cuMemcpyDtoHAsync"))
}

/// Copies `len` bytes from `from` to the GPU, in order with other copies of that direction.
///
/// # Safety
///
/// As [`fetch`], and the bytes at `from` do not change.
pub(super) unsafe fn store(gpu: &Inner, from: *const u8, to: u64, len: usize) -> Result<(), GpuError> {
    gpu.bind()?;
    // SAFETY: passed on.
    let from = unsafe { std::slice::from_raw_parts(from.cast::<std::mem::MaybeUninit<u8>>(), len) };
    // SAFETY: passed on.
    unsafe { result::memcpy_htod_async(to, from, gpu.incoming.cu_stream()) }
        .map_err(GpuError::driver("cuMemcpyHtoDAsync"))
}

/// An event behind a copy that was just given to the stream. Where that cannot be had, the copy is waited for here: nothing would
/// tell of its end, and the memory may be gone by then.
pub(super) fn noted<T>(stream: &CudaStream, recorded: Result<T, GpuError>) -> Result<T, GpuError> {
    if recorded.is_err() {
        // Another error means that nothing is copied any more.
        let _ = driver::own(stream.context(), "cuStreamSynchronize", || stream.synchronize());
    }
    recorded
}

impl DeviceMemory for Inner {
    fn bounce(&self) -> io::Result<Box<dyn Bounce>> {
        let gpu = self.shared().ok_or(io::ErrorKind::NotConnected)?;
        let kept = gpu.bounces.0.lock().pop();
        let slab = match kept {
            Some(slab) => slab,
            None => Slab {
                memory: Pinned::alloc(&gpu, BOUNCE).map_err(io::Error::other)?,
                event: gpu.events.unrecorded().map_err(io::Error::other)?,
            },
        };
        Ok(Box::new(Lent { slab: Some(slab), gpu, copying: false }))
    }

    fn transfer(&self, source: &dyn DeviceMemory) -> io::Result<Option<Box<dyn Transfer>>> {
        let Some(source) = source.as_any().downcast_ref::<Self>() else { return Ok(None) };
        peers::transfer(source, self).map_err(io::Error::other)
    }

    fn import(&self, memory: BorrowedFd<'_>, len: usize) -> io::Result<Box<dyn Imported>> {
        self.bind()
            .and_then(|()| Mapping::import(self, memory, len))
            .map_or_else(|error| Err(io::Error::other(error)), |mapping| Ok(Box::new(mapping) as Box<dyn Imported>))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Imported for Mapping {
    fn address(&self) -> u64 {
        Mapping::address(self)
    }
}

impl Lent {
    fn slab(&self) -> io::Result<&Slab> {
        self.slab.as_ref().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// A copy was given to the stream.
    fn started(&mut self, stream: fn(&Inner) -> &CudaStream) -> io::Result<()> {
        self.copying = true;
        let stream = stream(&self.gpu);
        noted(stream, self.slab()?.event.record(stream)).map_err(io::Error::other)
    }

    /// The place in the host's memory, if it lies inside.
    fn place(&self, at: usize, len: usize) -> io::Result<*mut u8> {
        match at.checked_add(len) {
            // SAFETY: inside the slab.
            Some(end) if end <= BOUNCE => Ok(unsafe { self.slab()?.memory.ptr().as_ptr().add(at) }),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

impl Bounce for Lent {
    fn segment(&self) -> Segment {
        match &self.slab {
            Some(slab) => Segment::new(slab.memory.ptr().as_ptr(), BOUNCE),
            None => Segment::new(std::ptr::null_mut(), 0),
        }
    }

    fn fetch(&mut self, from: u64, at: usize, len: usize) -> io::Result<()> {
        let to = self.place(at, len)?;
        // SAFETY: inside the slab, which nobody touches before `wait`; the device's side is registered memory that its owner keeps
        // until the operation has ended.
        unsafe { fetch(&self.gpu, from, to, len) }.map_err(io::Error::other)?;
        self.started(|gpu| &gpu.outgoing)
    }

    fn store(&mut self, at: usize, to: u64, len: usize) -> io::Result<()> {
        let from = self.place(at, len)?;
        // SAFETY: as in `fetch`.
        unsafe { store(&self.gpu, from, to, len) }.map_err(io::Error::other)?;
        self.started(|gpu| &gpu.incoming)
    }

    fn wait(&mut self) -> io::Result<()> {
        if self.copying {
            self.slab()?.event.wait().map_err(io::Error::other)?;
            self.copying = false;
        }
        Ok(())
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // After an error of the GPU nothing is copied any more, and what is left is not used again.
        let usable = self.wait().is_ok();
        let Some(slab) = self.slab.take() else { return };
        let mut kept = self.gpu.bounces.0.lock();
        if usable && kept.len() < KEPT {
            kept.push(slab);
        }
    }
}
