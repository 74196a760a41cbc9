//! Copies between buffers of GPUs, without the host.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::io;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::bounce::noted;
use super::device::Inner;
use super::error::GpuError;
use super::events::Event;
use crate::memory::device::Transfer;

/// Copies from one GPU's memory to another's, or within one.
#[derive(Debug)]
struct Peers {
    source: Arc<Inner>,
    target: Arc<Inner>,
    /// Behind the last copy.
    event: Event,
    copying: bool,
}

/// What copies from `source` to `target`; `None` where the GPUs do not reach each other.
pub(super) fn transfer(source: &Inner, target: &Inner) -> Result<Option<Box<dyn Transfer>>, GpuError> {
    let (Some(source), Some(target)) = (source.shared(), target.shared()) else { return Ok(None) };
    if !same(&source, &target) && !reaches(&target.context, &source.context)? {
        return Ok(None);
    }
    let event = target.events.unrecorded()?;
    Ok(Some(Box::new(Peers { source, target, event, copying: false })))
}

/// Whether both are of one context, though they may have been opened apart.
fn same(one: &Inner, other: &Inner) -> bool {
    one.context.cu_ctx() == other.context.cu_ctx()
}

fn reaches(from: &CudaContext, to: &CudaContext) -> Result<bool, GpuError> {
    let mut can: c_int = 0;
    // SAFETY: the pointer is to an int of this frame; the devices are those of living contexts.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, from.cu_device(), to.cu_device()) }
        .result()
        .map_err(GpuError::driver("cuDeviceCanAccessPeer"))?;
    Ok(can != 0)
}

impl Peers {
    fn start(&mut self, from: u64, to: u64, len: usize) -> Result<(), GpuError> {
        let Self { source, target, .. } = self;
        target.bind()?;
        let stream = target.incoming.cu_stream();
        if same(source, target) {
            // SAFETY: both are registered memory of this context, which their owners keep and leave alone until the operation has
            // ended, and that is not before `wait`.
            unsafe { result::memcpy_dtod_async(to, from, len, stream) }
                .map_err(GpuError::driver("cuMemcpyDtoDAsync"))?;
        } else {
            let (to_context, from_context) = (target.context.cu_ctx(), source.context.cu_ctx());
            // SAFETY: as above, each in its own context.
            unsafe { result::memcpy_peer_async(to_context, to, from_context, from, len, stream) }
                .map_err(GpuError::driver("cuMemcpyPeerAsync"))?;
        }
        self.copying = true;
        noted(&self.target.incoming, self.event.record(&self.target.incoming))
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

impl Transfer for Peers {
    fn copy(&mut self, from: u64, to: u64, len: usize) -> io::Result<()> {
        self.start(from, to, len).map_err(io::Error::other)
    }

    fn wait(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.copying) {
            self.event.wait().map_err(io::Error::other)?;
        }
        Ok(())
    }
}
