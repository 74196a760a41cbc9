//! A connection through shared memory to another process, whose memory on its GPU this one's GPU copies from and to by itself.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use tokio::runtime::Runtime;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice};
use tokio_rdma::soft::LinkPolicy;
use tokio_rdma::{Access, Connection, Device, Listener, ProtectionDomain, RemoteRegion};

use crate::stats::median;

/// Operations in flight where throughput counts and not the time that each takes.
const DEPTH: usize = 4;

/// What a line of the other process's output begins with; it prints nothing else.
const REGION: &str = "region ";

/// This end, and the other process.
pub struct Processes {
    runtime: Runtime,
    connection: Connection,
    domain: ProtectionDomain,
    gpu: GpuDevice,
    remote: RemoteRegion,
    /// Its end ends the other process.
    input: Option<ChildStdin>,
    far: Child,
    _dir: tempfile::TempDir,
}

#[derive(Clone, Copy)]
pub enum Way {
    Write,
    Read,
}

impl Processes {
    /// Starts this program once more, with `len` bytes on the GPU of that number.
    pub fn open(gpu: &GpuDevice, far_gpu: usize, len: usize) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let address = format!("unix:{}", dir.path().join("bench").display());
        let mut far = Command::new(std::env::current_exe()?)
            .args(["--gpu", &far_gpu.to_string(), "--far-end", &address, "--far-len", &len.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = far.stdin.take();
        let mut line = String::new();
        BufReader::new(far.stdout.take().context("a pipe")?).read_line(&mut line)?;
        let remote = line.trim().strip_prefix(REGION).context("the other process did not start")?;
        let remote = RemoteRegion::from_bytes(&serde_json::from_str::<Vec<u8>>(remote)?)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (connection, domain) = runtime.block_on(async {
            let domain = domain()?;
            anyhow::Ok((Connection::connect(&domain, &*address).await?, domain))
        })?;
        Ok(Self { runtime, connection, domain, gpu: gpu.clone(), remote, input, far, _dir: dir })
    }

    /// Operations of the whole length, one at a time; the median in GB/s.
    pub fn one_by_one(&self, way: Way, times: usize) -> Result<f64> {
        self.runtime.block_on(async {
            let mut buffer = self.used().await?;
            let before = self.connection.stats().direct;
            let mut rates = Vec::with_capacity(times);
            for _ in 0..times {
                let started = Instant::now();
                buffer = self.operate(way, buffer).await?;
                rates.push(self.remote.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
            }
            self.check(before, times)?;
            median(&rates).context("no rate was taken")
        })
    }

    /// Several in flight; GB/s.
    pub fn several(&self, way: Way, times: usize) -> Result<f64> {
        self.runtime.block_on(async {
            let mut buffers = Vec::new();
            for _ in 0..DEPTH {
                buffers.push(self.used().await?);
            }
            let before = self.connection.stats().direct;
            let each = times.div_ceil(DEPTH);
            let started = Instant::now();
            let operating = buffers.into_iter().map(async |mut buffer| {
                for _ in 0..each {
                    buffer = self.operate(way, buffer).await?;
                }
                anyhow::Ok(())
            });
            futures::future::try_join_all(operating).await?;
            let taken = started.elapsed().as_secs_f64();
            self.check(before, each * DEPTH)?;
            Ok(self.remote.len() as f64 * (each * DEPTH) as f64 / taken / 1e9)
        })
    }

    /// A buffer, after one operation: by the first of all, the other process lends its memory.
    async fn used(&self) -> Result<GpuBuffer> {
        let buffer = GpuBuffer::alloc(&self.gpu, &self.domain, self.remote.len() as usize)?;
        self.operate(Way::Write, buffer).await
    }

    async fn operate(&self, way: Way, buffer: GpuBuffer) -> Result<GpuBuffer> {
        Ok(match way {
            Way::Write => self.connection.write(buffer, &self.remote).await?,
            Way::Read => self.connection.read(buffer, &self.remote).await?,
        })
    }

    fn check(&self, before: u64, times: usize) -> Result<()> {
        let direct = self.connection.stats().direct - before;
        ensure!(direct == times as u64, "{direct} of {times} operations were direct");
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.input.take();
        match self.far.wait() {
            Ok(status) if status.success() => {}
            ended => eprintln!("the other process: {ended:?}"),
        }
    }
}

fn domain() -> tokio_rdma::Result<ProtectionDomain> {
    Device::builder("soft0").links(LinkPolicy::SharedMemory).open()?.alloc_pd()
}

/// The other process: exposes memory, and waits until its input ends.
pub fn far_end(gpu: &GpuDevice, address: &str, len: usize) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let domain = domain()?;
        let exposed = GpuBuffer::alloc(gpu, &domain, len)?.expose(Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        let listener = Listener::bind(&domain, address).await?;
        println!("{REGION}{}", serde_json::to_string(&exposed.remote().to_bytes().to_vec())?);
        std::io::stdout().flush()?;
        let accepted = tokio::spawn(async move { listener.accept().await });
        tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
        drop(accepted.await??);
        drop(exposed);
        Ok(())
    })
}
