//! A connection of the software device, with one end on a thread of its own.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::runtime::Runtime;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice};
use tokio_rdma::soft::{self, Faults, default_limits};
use tokio_rdma::{Access, Buffer, Connection, Listener, ProtectionDomain, RemoteRegion};

use crate::stats::median;

/// Where a message comes from, or goes to.
#[derive(Clone, Copy, PartialEq)]
pub enum End {
    Host,
    Gpu,
}

/// What the ends know of each other.
#[derive(Clone, Copy, PartialEq)]
pub enum Ends {
    /// As much as two processes.
    Apart,
    /// That they are in one.
    Near,
}

impl Ends {
    fn domain(self) -> tokio_rdma::Result<ProtectionDomain> {
        let faults = (self == Self::Apart).then(|| Faults::seeded(0).keep_apart());
        soft::device(default_limits(), faults).open()?.alloc_pd()
    }
}

/// What the far end does next.
enum Order {
    /// Receives so many messages of this length, and answers each one with 8 bytes.
    Receive { to: End, len: usize, times: usize },
    /// Receives as many as [`DEPTH`] at a time, and answers the last one.
    Stream { to: End, len: usize, times: usize },
}

/// Messages in flight where throughput counts and not the time that each takes.
const DEPTH: usize = 4;

/// The near end, and orders for the far one.
pub struct Link {
    runtime: Runtime,
    connection: Connection,
    domain: ProtectionDomain,
    gpu: GpuDevice,
    exposed: RemoteRegion,
    orders: Option<mpsc::Sender<Order>>,
    /// The far end has a receive posted.
    ready: mpsc::Receiver<RemoteRegion>,
    far: Option<JoinHandle<Result<()>>>,
    _dir: tempfile::TempDir,
}

/// A message's memory.
enum Memory {
    Host(Buffer),
    Gpu(GpuBuffer),
}

impl Memory {
    fn new(gpu: &GpuDevice, domain: &ProtectionDomain, end: End, len: usize) -> Result<Self> {
        Ok(match end {
            End::Host => Self::Host(domain.alloc(len)?),
            End::Gpu => Self::Gpu(GpuBuffer::alloc(gpu, domain, len)?),
        })
    }

    async fn send(self, connection: &Connection) -> Result<Self> {
        Ok(match self {
            Self::Host(buffer) => Self::Host(connection.send(buffer).await?),
            Self::Gpu(buffer) => Self::Gpu(connection.send(buffer).await?),
        })
    }

    /// Posts it for a message; the future is that message's memory.
    fn post(self, connection: &Connection) -> Result<BoxFuture<'static, Result<Self>>> {
        Ok(match self {
            Self::Host(buffer) => {
                let mut receive = connection.receive(buffer);
                receive.try_post()?;
                async { Ok(Self::Host(receive.await?.buffer)) }.boxed()
            }
            Self::Gpu(buffer) => {
                let mut receive = connection.receive(buffer);
                receive.try_post()?;
                async { Ok(Self::Gpu(receive.await?.buffer)) }.boxed()
            }
        })
    }
}

fn runtime() -> std::io::Result<Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

const EXPOSED: usize = 64 << 20;

impl Link {
    /// The GPUs of the near and of the far end may be one.
    pub fn open(gpu: &GpuDevice, far_gpu: &GpuDevice, ends: Ends) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let address = format!("unix:{}", dir.path().join("bench").display());
        let (orders, given) = mpsc::channel();
        let (is_ready, ready) = mpsc::channel();
        let far = thread::spawn({
            let (gpu, address) = (far_gpu.clone(), address.clone());
            move || far_end(&gpu, ends, &address, &is_ready, &given)
        });
        let exposed = ready.recv().context("the far end did not start")?;
        let runtime = runtime()?;
        let (connection, domain) = runtime.block_on(async {
            let domain = ends.domain()?;
            anyhow::Ok((Connection::connect(&domain, &*address).await?, domain))
        })?;
        let (orders, far) = (Some(orders), Some(far));
        Ok(Self { runtime, connection, domain, gpu: gpu.clone(), exposed, orders, ready, far, _dir: dir })
    }

    /// Round trips of messages into the GPU's memory and into the host's, alternating; the medians in microseconds.
    pub fn latency(&mut self, size: usize, times: usize) -> Result<(f64, f64)> {
        let on_gpu = self.exchange(End::Host, End::Gpu, size, times)?;
        let on_host = self.exchange(End::Host, End::Host, size, times)?;
        let micros = |seconds: &[f64]| median(seconds).map(|seconds| seconds * 1e6).context("no time was taken");
        Ok((micros(&on_gpu)?, micros(&on_host)?))
    }

    /// Messages, one at a time and each answered; the median in GB/s.
    pub fn messages(&mut self, from: End, to: End, len: usize, times: usize) -> Result<f64> {
        rate(len, &self.exchange(from, to, len, times)?)
    }

    /// Messages, several in flight and only the last one answered; GB/s.
    pub fn stream(&mut self, from: End, to: End, len: usize, times: usize) -> Result<f64> {
        let each = times.div_ceil(DEPTH);
        let times = each * DEPTH;
        self.orders.as_ref().context("closed")?.send(Order::Stream { to, len, times })?;
        self.ready.recv().context("the far end has ended")?;
        let (connection, domain, gpu) = (&self.connection, &self.domain, &self.gpu);
        self.runtime.block_on(async {
            let memories: Vec<_> = (0..DEPTH).map(|_| Memory::new(gpu, domain, from, len)).collect::<Result<_>>()?;
            let answer = connection.receive(domain.alloc(8)?);
            let started = Instant::now();
            let sending = memories.into_iter().map(|mut memory| async move {
                for _ in 0..each {
                    memory = memory.send(connection).await?;
                }
                anyhow::Ok(())
            });
            let sent = futures::future::try_join_all(sending);
            let (sent, answer) = tokio::join!(sent, answer);
            let taken = started.elapsed().as_secs_f64();
            sent?;
            answer?;
            Ok((len * times) as f64 / taken / 1e9)
        })
    }

    fn exchange(&mut self, from: End, to: End, len: usize, times: usize) -> Result<Vec<f64>> {
        let warm_up = times / 10 + 1;
        let all = times + warm_up;
        self.orders.as_ref().context("closed")?.send(Order::Receive { to, len, times: all })?;
        self.ready.recv().context("the far end has ended")?;
        let (connection, domain, gpu) = (&self.connection, &self.domain, &self.gpu);
        self.runtime.block_on(async {
            let mut memory = Memory::new(gpu, domain, from, len)?;
            let mut answer = domain.alloc(8)?;
            let mut taken = Vec::with_capacity(all);
            for _ in 0..all {
                let mut receive = connection.receive(answer);
                receive.try_post()?;
                let started = Instant::now();
                memory = memory.send(connection).await?;
                answer = receive.await?.buffer;
                taken.push(started.elapsed().as_secs_f64());
            }
            Ok(taken.split_off(warm_up))
        })
    }

    /// Writes of the host's memory into the far end's on the GPU; the median in GB/s.
    pub fn writes(&mut self, len: usize, times: usize) -> Result<f64> {
        self.one_sided(len, times, async |buffer, connection, remote| Ok(connection.write(buffer, remote).await?))
    }

    /// Reads of the far end's memory on the GPU into the host's; the median in GB/s.
    pub fn reads(&mut self, len: usize, times: usize) -> Result<f64> {
        self.one_sided(len, times, async |buffer, connection, remote| Ok(connection.read(buffer, remote).await?))
    }

    fn one_sided(
        &mut self,
        len: usize,
        times: usize,
        operation: impl AsyncFn(Buffer, &Connection, &RemoteRegion) -> Result<Buffer>,
    ) -> Result<f64> {
        let taken: Result<Vec<_>> = self.runtime.block_on(async {
            let mut buffer = self.domain.alloc(len)?;
            let mut taken = Vec::new();
            for _ in 0..times {
                let started = Instant::now();
                buffer = operation(buffer, &self.connection, &self.exposed).await?;
                taken.push(started.elapsed().as_secs_f64());
            }
            Ok(taken)
        });
        rate(len, &taken?)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.orders.take();
        if let Some(Ok(Err(error))) = self.far.take().map(JoinHandle::join) {
            eprintln!("the far end failed: {error:#}");
        }
    }
}

fn rate(len: usize, taken: &[f64]) -> Result<f64> {
    median(taken).map(|seconds| len as f64 / seconds / 1e9).context("no time was taken")
}

fn far_end(
    gpu: &GpuDevice,
    ends: Ends,
    address: &str,
    ready: &mpsc::Sender<RemoteRegion>,
    orders: &mpsc::Receiver<Order>,
) -> Result<()> {
    runtime()?.block_on(async {
        let domain = ends.domain()?;
        let exposed = GpuBuffer::alloc(gpu, &domain, EXPOSED)?.expose(Access::REMOTE_READ | Access::REMOTE_WRITE)?;
        let listener = Listener::bind(&domain, address).await?;
        ready.send(exposed.remote())?;
        let connection = listener.accept().await?;
        let mut answer = domain.alloc(8)?;
        loop {
            // Blocks this thread while it has nothing to do: the device's own engine serves Reads and Writes.
            let (to, len, times) = match orders.recv() {
                Ok(Order::Receive { to, len, times }) => (to, len, times),
                Ok(Order::Stream { to, len, times }) => {
                    let post = |memory: Memory| memory.post(&connection);
                    let memories = (0..DEPTH).map(|_| Memory::new(gpu, &domain, to, len));
                    let mut posted: VecDeque<_> = memories.map(|memory| post(memory?)).collect::<Result<_>>()?;
                    ready.send(exposed.remote())?;
                    for left in (0..times).rev() {
                        let memory = posted.pop_front().context("a receive is posted for each message")?.await?;
                        if left >= DEPTH {
                            posted.push_back(post(memory)?);
                        }
                    }
                    answer = connection.send(answer).await?;
                    continue;
                }
                Err(_) => return Ok(()),
            };
            // The next message finds its place, whatever the sender's pace: one that finds none is sent twice.
            let mut spare = Some(Memory::new(gpu, &domain, to, len)?);
            let mut receiving = Some(Memory::new(gpu, &domain, to, len)?.post(&connection)?);
            ready.send(exposed.remote())?;
            for left in (0..times).rev() {
                let landed = receiving.take().context("a receive is posted for each message")?.await?;
                if let Some(memory) = spare.replace(landed).filter(|_| left > 0) {
                    receiving = Some(memory.post(&connection)?);
                }
                answer = connection.send(answer).await?;
            }
        }
    })
}
