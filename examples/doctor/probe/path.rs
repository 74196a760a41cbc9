//! Messages between two ends in this process.

use std::time::{Duration, Instant};

use anyhow::Result;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio_rdma::soft::LinkPolicy;
use tokio_rdma::{Address, Connection, Device, Link, Listener, ProtectionDomain, SourceBuffer, TargetBuffer};

use super::{Figures, Path, Point, median};

const SIZES: [usize; 5] = [8, 4 << 10, 64 << 10, 1 << 20, 8 << 20];
/// Of one size, for its latency and once more for its throughput.
const TIME: Duration = Duration::from_millis(120);
const ROUNDS: usize = 1000;
/// Enough that the device always has the next one.
const IN_FLIGHT: usize = 8;
/// Nothing in this process takes so long.
const PATIENCE: Duration = Duration::from_secs(5);

/// Two ends of a connection, each with a domain of its own. Closes when dropped.
pub struct Pair {
    pub client: Connection,
    pub server: Connection,
    /// Of a Unix-domain socket.
    _folder: Option<tempfile::TempDir>,
}

impl Pair {
    /// Over this link of the software device, or over the one that a device has by itself.
    pub async fn connect(device: &str, link: Option<Link>) -> Result<Self> {
        let builder = Device::builder(device);
        let device = match link {
            None => builder,
            Some(Link::SharedMemory) => builder.links(LinkPolicy::SharedMemory),
            Some(_) => builder.links(LinkPolicy::Sockets),
        };
        let device = device.open()?;
        let folder = if link == Some(Link::Unix) { Some(tempfile::tempdir()?) } else { None };
        let address: Address = match &folder {
            Some(folder) => format!("unix:{}", folder.path().join("doctor").display()).parse()?,
            None => device.local_address(0)?,
        };
        let (here, there) = (device.alloc_pd()?, device.alloc_pd()?);
        let listener = Listener::bind(&there, address).await?;
        let connecting = Connection::connect(&here, listener.local_address());
        let (client, server) =
            tokio::time::timeout(PATIENCE, async { tokio::try_join!(connecting, listener.accept()) }).await??;
        Ok(Self { client, server, _folder: folder })
    }

    /// The sizes there are, with memory that `make` allocates for either end.
    pub async fn points<B>(
        &self,
        make: impl Fn(&ProtectionDomain, usize) -> tokio_rdma::Result<B>,
    ) -> Result<Vec<Point>>
    where
        B: SourceBuffer + TargetBuffer,
    {
        let mut points = Vec::new();
        for bytes in SIZES {
            let both = || anyhow::Ok((make(self.client.domain(), bytes)?, make(self.server.domain(), bytes)?));
            let median_us = median(self.latencies(both()?).await?);
            let start = Instant::now();
            let moved = self.stream(bytes, (0..IN_FLIGHT).map(|_| both()).collect::<Result<_>>()?).await?;
            let megabytes_per_second = moved as f64 / start.elapsed().as_secs_f64() / 1e6;
            points.push(Point { bytes, median_us, megabytes_per_second });
        }
        Ok(points)
    }

    /// One message at a time, in microseconds.
    async fn latencies<B: SourceBuffer + TargetBuffer>(&self, (mut source, mut target): (B, B)) -> Result<Vec<f64>> {
        let start = Instant::now();
        let mut times = Vec::new();
        // The first ones find everything cold.
        const WARM_UP: usize = 5;
        while times.len() <= WARM_UP || (start.elapsed() < TIME && times.len() < ROUNDS) {
            let posted = Instant::now();
            (source, target) = self.message(source, target).await?;
            times.push(posted.elapsed().as_secs_f64() * 1e6);
        }
        Ok(times.split_off(WARM_UP))
    }

    /// Several at a time; the bytes that arrived.
    async fn stream<B: SourceBuffer + TargetBuffer>(&self, bytes: usize, buffers: Vec<(B, B)>) -> Result<usize> {
        let start = Instant::now();
        let mut flying: FuturesUnordered<_> =
            buffers.into_iter().map(|(source, target)| self.message(source, target)).collect();
        let mut moved = 0;
        while let Some(buffers) = flying.next().await {
            let (source, target) = buffers?;
            moved += bytes;
            if start.elapsed() < TIME {
                flying.push(self.message(source, target));
            }
        }
        Ok(moved)
    }

    async fn message<B: SourceBuffer + TargetBuffer>(&self, source: B, target: B) -> Result<(B, B)> {
        // In this order, so that a place is there before the message comes.
        let (receive, send) = (self.server.receive(target), self.client.send(source));
        let both = async { tokio::join!(biased; receive, send) };
        let (received, sent) = tokio::time::timeout(PATIENCE, both).await?;
        Ok((sent?, received?.buffer))
    }
}

/// Memory of the host, over this device.
pub async fn host(device: &str, deadline: Instant, figures: &mut Figures) {
    let links = match device {
        "soft0" => [Link::Tcp, Link::Unix, Link::SharedMemory].map(Some).to_vec(),
        _ => vec![None],
    };
    for link in links {
        let outcome = measure(device, link, deadline, "host", "", |domain, len| domain.alloc(len)).await;
        let over = link.map_or_else(String::new, |link| format!(", {link}"));
        figures.add(format!("host memory over {device}{over}"), outcome);
    }
}

/// A path, or why it was left out. `by` is what carries the bytes, where that is not the link.
pub async fn measure<B>(
    device: &str,
    link: Option<Link>,
    deadline: Instant,
    memory: &'static str,
    by: &str,
    make: impl Fn(&ProtectionDomain, usize) -> tokio_rdma::Result<B>,
) -> Result<Path>
where
    B: SourceBuffer + TargetBuffer,
{
    anyhow::ensure!(Instant::now() < deadline, "no time was left");
    let pair = Pair::connect(device, link).await?;
    let link = pair.client.link().to_string();
    let by = if by.is_empty() { link } else { by.to_owned() };
    let points = pair.points(make).await?;
    pair.client.close().await;
    Ok(Path { name: format!("{memory}, {device}, {by}"), device: device.to_owned(), memory, by, points })
}

impl Figures {
    /// What was measured, or why it was not.
    pub fn add(&mut self, what: String, outcome: Result<Path>) {
        match outcome {
            Ok(path) => self.paths.push(path),
            Err(error) => self.left_out.push(format!("{what}: {error:#}")),
        }
    }
}
