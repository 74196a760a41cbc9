//! Copies between buffers of GPUs, without the host. Copy engines do them: a kernel that fills the GPU does not hold them up (H200).
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_int;
use std::io;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::bounce::noted;
use super::device::Inner;
use super::error::GpuError;
use super::events::Event;
use super::mapping::{access, location};
use crate::memory::device::Transfer;
use crate::sync::Mutex;

/// Copies from one GPU's memory to another's, or within one.
#[derive(Debug)]
struct Peers {
    source: Arc<Inner>,
    target: Arc<Inner>,
    /// Behind the last copy.
    event: Event,
    copying: bool,
}

/// Contexts of other GPUs, and whether this one reaches their memory.
#[derive(Default)]
pub(super) struct Reach(Mutex<HashMap<usize, bool>>);

/// What copies from `source` to `target`; `None` where the GPUs do not reach each other.
pub(super) fn transfer(source: &Inner, target: &Inner) -> Result<Option<Box<dyn Transfer>>, GpuError> {
    let (Some(source), Some(target)) = (source.shared(), target.shared()) else { return Ok(None) };
    if !same(&source, &target) && !reaches(&target, &source)? {
        return Ok(None);
    }
    let event = target.events.unrecorded()?;
    Ok(Some(Box::new(Peers { source, target, event, copying: false })))
}

/// Whether both are of one context, though they may have been opened apart.
fn same(one: &Inner, other: &Inner) -> bool {
    one.context.cu_ctx() == other.context.cu_ctx()
}

/// Whether `from` reaches the memory of `to`, which from now on it does if it can.
fn reaches(from: &Inner, to: &Inner) -> Result<bool, GpuError> {
    let mut known = from.reach.0.lock();
    if let Some(reaches) = known.get(&(to.context.cu_ctx() as usize)) {
        return Ok(*reaches);
    }
    let mut can: c_int = 0;
    // SAFETY: the pointer is to an int of this frame; the devices are those of living contexts.
    unsafe { sys::cuDeviceCanAccessPeer(&mut can, from.context.cu_device(), to.context.cu_device()) }
        .result()
        .map_err(GpuError::driver("cuDeviceCanAccessPeer"))?;
    if can != 0 {
        from.bind()?;
        // Memory of cuMemAlloc is reached through this; without it the driver copies through the host.
        // SAFETY: a living context; 0 is the only flag there is.
        let status = unsafe { sys::cuCtxEnablePeerAccess(to.context.cu_ctx(), 0) };
        // The program may have done so itself. Whatever else goes wrong, such as too many peers, costs speed only.
        if status != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            if let Err(error) = status.result() {
                tracing::warn!(%error, ?from, ?to, "no peer access: the driver copies through the host");
            }
        }
    }
    known.insert(to.context.cu_ctx() as usize, can != 0);
    Ok(can != 0)
}

/// Lets `gpu` reach the mapped memory of `owner` around `address`, which only the GPUs do that were named when it was mapped.
///
/// Where that does not go, or the memory is of another kind, nothing is lost but speed: the driver then copies through the host
/// (38 GB/s instead of 370 between two H200).
fn open(gpu: &Inner, owner: &Inner, address: u64) {
    if !gpu.driver.maps_memory() {
        return;
    }
    let location = location(gpu);
    // Memory of another kind is an error here.
    if !matches!(access(&location, address), Ok(0)) {
        return;
    }
    let wanted = sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    // The driver knows the range of an address in its own context only.
    let range = owner.bind().and_then(|()| owner.driver.address_range(address));
    let opened = range.and_then(|(start, len)| {
        // SAFETY: all of one mapping, whose owner keeps it while it is copied from; one descriptor.
        unsafe { sys::cuMemSetAccess(start, len, &wanted, 1) }.result().map_err(GpuError::driver("cuMemSetAccess"))
    });
    if let Err(error) = opened {
        tracing::debug!(%error, address, "memory of one GPU is not opened to another");
    }
}

impl Peers {
    fn start(&mut self, from: u64, to: u64, len: usize) -> Result<(), GpuError> {
        let Self { source, target, .. } = self;
        let stream = target.incoming.cu_stream();
        if same(source, target) {
            target.bind()?;
            // SAFETY: both are registered memory of this context, which their owners keep and leave alone until the operation has
            // ended, and that is not before `wait`; or memory of another process, which whoever copies keeps mapped for as long.
            unsafe { result::memcpy_dtod_async(to, from, len, stream) }
                .map_err(GpuError::driver("cuMemcpyDtoDAsync"))?;
        } else {
            open(target, source, from);
            target.bind()?;
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
