//! A buffer's pinned twin on the host, which the NIC reads and writes in its place.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::bounce;
use super::device::{GpuDevice, Inner};
use super::error::GpuError;
use super::events::Event;
use super::pinned::Pinned;
use super::uses::Pending;
use crate::memory::dma::Segment;

/// Pinned memory of the same length as a buffer on the GPU.
///
/// Invariant: a byte of it is used by the one buffer that has the same byte of the GPU's memory, and by that buffer's operation.
#[derive(Debug)]
pub(super) struct Mirror {
    memory: ManuallyDrop<Pinned>,
    len: usize,
    gpu: Arc<Inner>,
}

impl Drop for Mirror {
    fn drop(&mut self) {
        // SAFETY: not used afterwards.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        if let Some(too_much) = self.gpu.shelf.put(memory) {
            self.gpu.reaper.retire(&self.gpu.context, Pending::default(), Box::new(too_much));
        }
    }
}

impl Mirror {
    pub(super) fn new(gpu: &GpuDevice, len: usize) -> Result<Arc<Self>, GpuError> {
        let gpu = gpu.inner().clone();
        Ok(Arc::new(Self { memory: ManuallyDrop::new(gpu.shelf.take(&gpu, len)?), len, gpu }))
    }

    pub(super) fn segment(&self) -> Segment {
        Segment::new(self.memory.ptr().as_ptr(), self.len)
    }

    /// The part of it that belongs to `len` bytes from `offset` on.
    pub(super) fn part(&self, offset: usize, len: usize) -> Option<Segment> {
        self.segment().slice(offset, len)
    }

    /// Starts bringing bytes of the GPU over.
    pub(super) fn fetch(&self, gpu: &Inner, from: u64, offset: usize, len: usize) -> Result<Event, GpuError> {
        let place = self.place(offset, len)?;
        // SAFETY: inside the mirror, which belongs to the buffer whose operation this is (the invariant), and so does the GPU's side.
        unsafe { bounce::fetch(gpu, from, place, len) }?;
        bounce::noted(&gpu.outgoing, gpu.events.record(&gpu.outgoing))
    }

    /// Starts taking bytes to the GPU.
    pub(super) fn store(&self, gpu: &Inner, offset: usize, to: u64, len: usize) -> Result<Event, GpuError> {
        let place = self.place(offset, len)?;
        // SAFETY: as in `fetch`; the device has reported that it is done with these bytes.
        unsafe { bounce::store(gpu, place, to, len) }?;
        bounce::noted(&gpu.incoming, gpu.events.record(&gpu.incoming))
    }

    fn place(&self, offset: usize, len: usize) -> Result<*mut u8, GpuError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if !inside {
            let reason = format!("{len} bytes at {offset} are outside of the {} there are", self.len);
            return Err(GpuError::Invalid { operation: "stage", reason });
        }
        // SAFETY: inside, as checked.
        Ok(unsafe { self.memory.ptr().as_ptr().add(offset) })
    }
}
