//! Bytes that one GPU kernel makes and another one checks, with a connection in between.
//!
//! ```text
//! cargo run --example gpu_quickstart --features cuda                            # both ends here
//! cargo run --example gpu_quickstart --features cuda -- --listen 0.0.0.0:4791   # one end,
//! cargo run --example gpu_quickstart --features cuda -- --connect host:4791     # and the other
//! ```

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Parser;
use comfy_table::{Table, presets::UTF8_FULL_CONDENSED};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, PathPolicy};
use tokio_rdma::{Connection, Device, Listener, ProtectionDomain};

/// `fill` writes a pattern that depends on a seed, `check` counts the bytes that differ from it.
const KERNELS: &str = include_str!("../tests/gpu/kernels.ptx");

const SIZES: [usize; 4] = [8, 4 << 10, 256 << 10, 16 << 20];

#[derive(Parser)]
struct Options {
    /// Be the end that receives, at this address.
    #[arg(long, conflicts_with = "connect")]
    listen: Option<String>,
    /// Be the end that sends, to this address.
    #[arg(long)]
    connect: Option<String>,
    /// The RDMA device; by default a NIC, or `soft0` where there is none.
    #[arg(long)]
    device: Option<String>,
    /// The GPU's number.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let gpu = match GpuDevice::open(options.gpu) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("gpu_quickstart: {error}");
            return ExitCode::from(2);
        }
    };
    match run(&options, gpu).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpu_quickstart: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options, gpu: GpuDevice) -> Result<()> {
    let device = match &options.device {
        Some(name) => Device::open(name)?,
        None => Device::open_default()?,
    };
    let domain = device.alloc_pd()?;
    println!("{gpu}\nvisibility of what a NIC writes: {}", gpu.visibility());
    if let Some(address) = &options.connect {
        return send(Connection::connect(&domain, address.as_str()).await?, gpu).await;
    }
    let listener = match &options.listen {
        Some(address) => Listener::bind(&domain, address.as_str()).await?,
        None => Listener::bind(&domain, device.local_address(0)?).await?,
    };
    if options.listen.is_some() {
        println!("listening at {}", listener.local_address());
        return receive(listener.accept().await?, gpu).await;
    }
    let address = listener.local_address();
    tokio::try_join!(async { receive(listener.accept().await?, gpu.clone()).await }, async {
        send(Connection::connect(&domain, address).await?, gpu.clone()).await
    },)?;
    Ok(())
}

/// The end where a kernel makes the bytes.
async fn send(connection: Connection, gpu: GpuDevice) -> Result<()> {
    let kernels = Kernels::load(&gpu)?;
    let stream = gpu.context().new_stream()?;
    for size in SIZES {
        let mut buffer = alloc(&gpu, connection.domain(), size)?;
        kernels.fill(&stream, &mut buffer, size as u64)?;
        // Goes out when the kernel has finished; no thread waits for that.
        connection.send(buffer).await?;
    }
    // The other end says when it is done.
    connection.receive(connection.domain().alloc(1)?).await?;
    connection.close().await;
    Ok(())
}

/// The end where a kernel checks them.
async fn receive(connection: Connection, gpu: GpuDevice) -> Result<()> {
    let kernels = Kernels::load(&gpu)?;
    let stream = gpu.context().new_stream()?;
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(["bytes", "path", "from request to checked", "wrong bytes"]);
    for size in SIZES {
        let buffer = alloc(&gpu, connection.domain(), size)?;
        let started = Instant::now();
        let received = connection.receive(buffer).await?;
        // The bytes are there for every kernel that is launched from here on.
        let wrong = kernels.check(&stream, &received.buffer, size as u64)?;
        let (path, time) = (received.buffer.path(), started.elapsed());
        table.add_row([size.to_string(), path.to_string(), shown(time), wrong.to_string()]);
        ensure!(wrong == 0 && received.len == size, "{wrong} of {size} bytes are wrong");
    }
    println!("{table}");
    println!("over {} on {}", connection.link(), connection.device().name());
    connection.send(connection.domain().alloc(1)?).await?;
    connection.closed().await;
    Ok(())
}

/// Memory of the GPU, by the best path there is: staged through the host where the RDMA device does not reach the GPU.
fn alloc(gpu: &GpuDevice, domain: &ProtectionDomain, len: usize) -> tokio_rdma::Result<GpuBuffer> {
    GpuBuffer::alloc_with(gpu, domain, len, PathPolicy::AllowStaging)
}

fn shown(time: Duration) -> String {
    format!("{:.1} us", time.as_secs_f64() * 1e6)
}

struct Kernels {
    fill: CudaFunction,
    check: CudaFunction,
}

/// Threads that go over any number of bytes together.
const GRID: LaunchConfig = LaunchConfig { grid_dim: (64, 1, 1), block_dim: (256, 1, 1), shared_mem_bytes: 0 };

impl Kernels {
    fn load(gpu: &GpuDevice) -> Result<Self> {
        let module = gpu.context().load_module(Ptx::from_src(KERNELS))?;
        Ok(Self { fill: module.load_function("fill")?, check: module.load_function("check")? })
    }

    fn fill(&self, stream: &Arc<CudaStream>, buffer: &mut GpuBuffer, seed: u64) -> Result<()> {
        let mut bytes = buffer.write_on::<u8>(stream)?;
        let len = bytes.len() as u64;
        let mut launch = stream.launch_builder(&self.fill);
        launch.arg(&mut bytes).arg(&len).arg(&seed);
        // SAFETY: the kernel takes a pointer to bytes that it writes, their number, and a seed.
        unsafe { launch.launch(GRID) }?;
        Ok(())
    }

    fn check(&self, stream: &Arc<CudaStream>, buffer: &GpuBuffer, seed: u64) -> Result<u64> {
        let bytes = buffer.read_on::<u8>(stream)?;
        let len = bytes.len() as u64;
        let mut mismatches = stream.alloc_zeros::<u64>(1)?;
        let mut launch = stream.launch_builder(&self.check);
        launch.arg(&bytes).arg(&len).arg(&seed).arg(&mut mismatches);
        // SAFETY: the kernel takes a pointer to bytes that it reads, their number, a seed, and a pointer to a counter.
        unsafe { launch.launch(GRID) }?;
        Ok(stream.clone_dtoh(&mismatches)?[0])
    }
}
