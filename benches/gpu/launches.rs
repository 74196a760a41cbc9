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

/// Both are measured in so many turns, since what a launch takes drifts by more than what is looked for.
const TURNS: usize = 10;
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
    // Longer than one turn of either takes.
    let times = times.div_ceil(TURNS);
    let nanoseconds = 20_000 * times as u64 + 20_000_000;
    let mut buffers = (0..AWAITS).map(|_| GpuBuffer::alloc(gpu, &domain, 8)).collect::<Result<Vec<_>, _>>()?;
    let (mut alone, mut beside) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        occupy(nanoseconds)?;
        alone.extend(launches(&free, times)?);
        busy.synchronize()?;

        occupy(nanoseconds)?;
        let awaits: Vec<_> = buffers
            .drain(..)
            .map(|mut buffer| {
                drop(buffer.write_on::<u8>(&busy)?);
                Ok(runtime.spawn(async move { buffer.idle().await.map(|()| buffer) }))
            })
            .collect::<Result<_>>()?;
        std::thread::sleep(std::time::Duration::from_millis(5));
        beside.extend(launches(&free, times)?);
        for done in awaits {
            buffers.push(runtime.block_on(done)??);
        }
    }
    let micros = |taken: &[f64]| median(taken).context("no time was taken");
    Ok((micros(&beside)?, micros(&alone)?))
}

/// Small pieces of work, submitted one after the other, and how many microseconds each submission took.
fn launches(stream: &Arc<CudaStream>, times: usize) -> Result<Vec<f64>> {
    let mut place = stream.alloc_zeros::<u8>(8)?;
    stream.synchronize()?;
    let mut taken = Vec::with_capacity(times);
    for _ in 0..times {
        let started = Instant::now();
        stream.memset_zeros(&mut place)?;
        taken.push(started.elapsed().as_secs_f64() * 1e6);
    }
    stream.synchronize()?;
    Ok(taken)
}
