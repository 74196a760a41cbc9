//! What awaiting costs those who launch work meanwhile.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use cudarc::driver::{CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use tokio_rdma::Device;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice};

use crate::stats::median;

const AWAITS: usize = 64;
const KERNELS: &str = include_str!("../../tests/gpu/kernels.ptx");

/// The median time of a launch while 64 tasks await a stream that is busy, and while none does; in microseconds.
pub fn measure(gpu: &GpuDevice, times: usize) -> Result<(f64, f64)> {
    let context = gpu.context();
    let spin = context.load_module(Ptx::from_src(KERNELS))?.load_function("spin")?;
    let (busy, free) = (context.new_stream()?, context.new_stream()?);
    let occupy = |nanoseconds: u64| -> Result<()> {
        let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the kernel takes one number.
        unsafe { busy.launch_builder(&spin).arg(&nanoseconds).launch(one) }?;
        Ok(())
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let domain = Device::open("soft0")?.alloc_pd()?;
    // Longer than both measurements take.
    let nanoseconds = 20_000 * times as u64 + 20_000_000;

    occupy(nanoseconds)?;
    let alone = launches(&free, times)?;
    busy.synchronize()?;

    occupy(nanoseconds)?;
    let mut awaits = Vec::new();
    for _ in 0..AWAITS {
        let mut buffer = GpuBuffer::alloc(gpu, &domain, 8)?;
        drop(buffer.write_on::<u8>(&busy)?);
        awaits.push(runtime.spawn(async move { buffer.idle().await }));
    }
    std::thread::sleep(std::time::Duration::from_millis(5));
    let beside = launches(&free, times)?;
    for done in awaits {
        runtime.block_on(done)??;
    }
    Ok((beside, alone))
}

/// Small pieces of work, submitted one after the other.
fn launches(stream: &Arc<CudaStream>, times: usize) -> Result<f64> {
    let mut place = stream.alloc_zeros::<u8>(8)?;
    stream.synchronize()?;
    let mut taken = Vec::with_capacity(times);
    for _ in 0..times {
        let started = Instant::now();
        stream.memset_zeros(&mut place)?;
        taken.push(started.elapsed().as_secs_f64() * 1e6);
    }
    stream.synchronize()?;
    median(&taken).context("no time was taken")
}
