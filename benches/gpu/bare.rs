//! The same with nothing of this crate: CUDA alone, and a plain socket.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, PinnedHostSlice, result, sys};
use tokio_rdma::gpu::GpuDevice;

use crate::stats::median;

/// Memory on both sides, and a stream.
pub struct Bare {
    stream: Arc<CudaStream>,
    pinned: RefCell<PinnedHostSlice<u8>>,
    device: RefCell<CudaSlice<u8>>,
}

impl Bare {
    pub fn new(gpu: &GpuDevice, len: usize) -> Result<Self> {
        let context = gpu.context();
        let stream = context.new_stream()?;
        // SAFETY: written before it is read, a few lines below. Not write-combined.
        let mut pinned = unsafe { context.alloc_pinned_with_flags::<u8>(len, 0)? };
        pinned.as_mut_slice()?.fill(7);
        let device = stream.alloc_zeros::<u8>(len)?;
        Ok(Self { stream, pinned: pinned.into(), device: device.into() })
    }

    /// Copies `size` bytes to the GPU, records an event and asks for it until it is done; the median in microseconds.
    ///
    /// The CPU has just written the bytes, as it has when they came out of a socket: the GPU then fetches them from its caches.
    pub fn latency(&self, size: usize, times: usize) -> Result<f64> {
        let mut device = self.device.borrow_mut();
        let event = self.stream.context().new_event(None)?;
        let mut pinned = self.pinned.borrow_mut();
        let mut taken = Vec::with_capacity(times);
        for round in 0..times {
            pinned.as_mut_slice()?[..size].fill(round as u8);
            let source = &pinned.as_slice()?[..size];
            let started = Instant::now();
            self.stream.memcpy_htod(source, &mut device.slice_mut(..size))?;
            event.record(&self.stream)?;
            while !event.try_is_complete()? {
                std::hint::spin_loop();
            }
            taken.push(started.elapsed().as_secs_f64() * 1e6);
        }
        median(&taken).context("no time was taken")
    }

    /// Copies all of the memory to another place, on this GPU or on another one, one copy at a time; the median in GB/s.
    pub fn between(&self, to: &GpuDevice, times: usize) -> Result<f64> {
        let len = self.device.borrow().len();
        let (from_context, to_context) = (self.stream.context().cu_ctx(), to.context().cu_ctx());
        // Not from the pool, whose memory other GPUs do not reach.
        let allocate = |gpu: &Arc<CudaContext>| -> Result<u64> {
            gpu.bind_to_thread()?;
            // SAFETY: freed at the end, after the last copy.
            Ok(unsafe { result::malloc_sync(len)? })
        };
        let (from, to) = (allocate(self.stream.context())?, allocate(to.context())?);
        if from_context != to_context {
            self.stream.context().bind_to_thread()?;
            // SAFETY: a living context. That it may be done already is no matter.
            let _ = unsafe { sys::cuCtxEnablePeerAccess(to_context, 0) };
        }
        let mut rates = Vec::with_capacity(times);
        for _ in 0..times {
            let started = Instant::now();
            self.stream.context().bind_to_thread()?;
            // SAFETY: both are allocations of `len` bytes of their contexts, which live until the copy has ended.
            unsafe {
                result::memcpy_peer_async(to_context, to, from_context, from, len, self.stream.cu_stream())?;
            }
            self.stream.synchronize()?;
            rates.push(len as f64 / started.elapsed().as_secs_f64() / 1e9);
        }
        for memory in [from, to] {
            // SAFETY: allocated above, and not used any more.
            unsafe { result::free_sync(memory)? };
        }
        median(&rates).context("no rate was taken")
    }

    /// Copies all of the memory to the GPU, one copy at a time; the median in GB/s.
    pub fn throughput(&self, times: usize) -> Result<f64> {
        let mut device = self.device.borrow_mut();
        let pinned = self.pinned.borrow();
        let source = pinned.as_slice()?;
        let mut rates = Vec::with_capacity(times);
        for _ in 0..times {
            let started = Instant::now();
            self.stream.memcpy_htod(source, &mut *device)?;
            self.stream.synchronize()?;
            rates.push(source.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
        }
        median(&rates).context("no rate was taken")
    }
}

/// Messages of `len` bytes over a Unix-domain socket from one thread to another, each answered with a byte; the median in GB/s.
pub fn socket(len: usize, times: usize) -> Result<f64> {
    let (mut near, mut far) = UnixStream::pair()?;
    let receiver = thread::spawn(move || -> std::io::Result<()> {
        let mut memory = vec![0; len];
        for _ in 0..times {
            far.read_exact(&mut memory)?;
            far.write_all(&[1])?;
        }
        Ok(())
    });
    let message = vec![7; len];
    let mut rates = Vec::with_capacity(times);
    for _ in 0..times {
        let started = Instant::now();
        near.write_all(&message)?;
        near.read_exact(&mut [0])?;
        rates.push(len as f64 / started.elapsed().as_secs_f64() / 1e9);
    }
    receiver.join().map_err(|_| anyhow::anyhow!("the receiver panicked"))??;
    median(&rates).context("no rate was taken")
}
