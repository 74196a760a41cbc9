//! Page-locked memory of the host.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use super::device::Inner;
use super::driver;
use super::error::GpuError;
use crate::sync::Mutex;

const PAGE: usize = 4096;

/// Bytes kept for later use.
const KEPT: usize = 256 << 20;

/// Pages that the GPU copies to and from directly, and the CPU reads and writes.
///
/// They are the process's own, and registered: a socket is read into such pages 15 % faster than into those of `cuMemHostAlloc`
/// (measured on an H200 for 256 KiB, each time copied to the GPU).
///
/// Invariant: `ptr` is valid for reads and writes of `layout.size()` bytes until it is dropped, and registered with the context.
pub(super) struct Pinned {
    ptr: NonNull<u8>,
    layout: Layout,
    context: Arc<CudaContext>,
}

// SAFETY: an address, a length and a context that may be used from any thread. What may be done with the bytes is up to the owner.
unsafe impl Send for Pinned {}
// SAFETY: `&Pinned` only tells where it is.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// At least `len` bytes, zeroed.
    pub(super) fn alloc(gpu: &Inner, len: usize) -> Result<Self, GpuError> {
        const ALLOCATE: &str = "allocate";
        let too_long = |_| GpuError::Invalid { operation: ALLOCATE, reason: format!("{len} bytes are too many") };
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(too_long)?.pad_to_align();
        gpu.bind()?;
        // SAFETY: the size is not 0.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) });
        let ptr = ptr.ok_or_else(|| GpuError::Invalid {
            operation: ALLOCATE,
            reason: format!("the host has no {len} bytes of memory"),
        })?;
        // SAFETY: pages of this process that nobody else has, and that stay until they are unregistered.
        let registered = unsafe { sys::cuMemHostRegister_v2(ptr.as_ptr().cast::<c_void>(), layout.size(), 0) };
        match registered.result() {
            Ok(()) => Ok(Self { ptr, layout, context: gpu.context.clone() }),
            Err(error) => {
                // SAFETY: allocated above with this layout.
                unsafe { dealloc(ptr.as_ptr(), layout) };
                Err(GpuError::driver("cuMemHostRegister")(error))
            }
        }
    }

    pub(super) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let bound = driver::make_current(&self.context);
        // SAFETY: registered by `alloc`, and unregistered only here.
        let unregistered = unsafe { sys::cuMemHostUnregister(self.ptr.as_ptr().cast::<c_void>()) };
        match bound.and(unregistered.result()) {
            // SAFETY: allocated by `alloc` with this layout; the GPU does not know it any more.
            Ok(()) => unsafe { dealloc(self.ptr.as_ptr(), self.layout) },
            // The GPU might still write to it, so it stays.
            Err(error) => tracing::warn!(%error, len = self.len(), "pinned memory could not be given back"),
        }
    }
}

impl std::fmt::Debug for Pinned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pinned").field("ptr", &self.ptr).field("len", &self.len()).finish_non_exhaustive()
    }
}

/// Memory that nobody uses at the moment. Giving it back to the system waits for all that the GPU has to do, and keeps other
/// threads from submitting meanwhile, so some of it is kept for who needs as much.
#[derive(Default)]
pub(super) struct Shelf(Mutex<Vec<Pinned>>);

impl Shelf {
    /// At least `len` bytes, with whatever is in them.
    pub(super) fn take(&self, gpu: &Inner, len: usize) -> Result<Pinned, GpuError> {
        let fits = |memory: &Pinned| memory.len() >= len && memory.len() - len < PAGE;
        let kept = {
            let mut shelf = self.0.lock();
            shelf.iter().position(fits).map(|at| shelf.swap_remove(at))
        };
        kept.map_or_else(|| Pinned::alloc(gpu, len), Ok)
    }

    /// What there is no room for comes back.
    pub(super) fn put(&self, memory: Pinned) -> Option<Pinned> {
        let mut shelf = self.0.lock();
        let kept: usize = shelf.iter().map(Pinned::len).sum();
        if kept.saturating_add(memory.len()) > KEPT {
            return Some(memory);
        }
        shelf.push(memory);
        None
    }
}
