//! Parameters that workers read at any time, with one-sided Reads, while the server goes on changing them: no reader ever gets parts
//! of two versions, and the server's program takes no part in reading.
//!
//! # Why a Read alone is not enough
//!
//! A Read of more bytes than the path MTU comes back in several packets, and the device may fetch the bytes from memory in any
//! order, at different times, beside a CPU that is writing there. What arrives is a mixture of what was there at some time between
//! posting and completion. Two words around the bytes, read by the same Read, prove nothing either: no order within a Read is promised.
//! Nor is it between two Reads in flight: the answers come in order, but the memory may have been looked at in another one.
//!
//! # The protocol
//!
//! One piece of memory holds a stamp for each of [`SLOTS`] copies and the number of the latest version, another one the copies. That one
//! may be a GPU's. Version `v` goes to slot `v % SLOTS`.
//!
//! ```text
//! stamps     0 latest     64 stamp 0     128 stamp 1     ...              copies     copy 0, copy 1, ...
//!
//! the server publishes v                         a worker pulls
//!   W1  stamp := BUSY                              R1  Read latest             -> v       awaited
//!   W2  copy  := the parameters                    R2  Read copy v % SLOTS               awaited
//!   W3  stamp := v                                 R3  Read stamp v % SLOTS    -> s       awaited
//!   W4  latest := v                                    whole if s = v, else once more
//! ```
//!
//! Where the server has told the worker a version, it told it after W4 of that version: the worker begins with R2 of it, a round trip less.
//!
//! # Why it is right
//!
//! The server's stores become visible in the order W1 to W4: barriers stand between them, and devices are coherent with the CPU's
//! caches. Each Read looks at memory between its posting and its completion, and is posted when the one before it has completed.
//!
//! - R1 saw `v`, or the server told of it, so W4 of `v` had happened, and before it W2: R2 finds nothing older than version `v` in that slot.
//! - R3 saw `v` in the stamp, so W1 of the next version for this slot had not happened when R3 looked, and its W2 even less: R2, which was
//!   over by then, found nothing newer.
//!
//! Versions only grow, so a stamp never returns to a value that it had. The words are aligned and 8 bytes long, which lie in one cache line
//! and which no device reads in two. The slots are there so that a reader rarely has to begin again: with one it would have
//! to whenever the server publishes during a pull, with [`SLOTS`] only when it does so that often.
//!
//! With the copies in a GPU's memory W2 is a kernel, and the order is the same: it is launched after the barrier behind W1, so nothing of it
//! is there before W1 is visible; and W3 comes after the kernel's event, behind which all it wrote is what a Read of that memory finds. The stamps
//! stay in the host's memory, where the CPU stores them.

use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, bail, ensure};
use tokio_rdma::{Access, Buffer, Connection, ExposedRegion, ProtectionDomain, RemoteRegion, TargetBuffer};

use crate::wire::Published;

/// Copies. A pull takes two or three round trips; a server with many asynchronous workers publishes once or twice in that time.
pub const SLOTS: u64 = 4;

/// No version: the slot is being written.
const BUSY: u64 = u64::MAX;

/// What is written by one side and looked at by another has a cache line of its own.
const LINE: u64 = 64;

/// Pulls that may begin again before something must be wrong.
const ATTEMPTS: u64 = 1000;

/// Bytes of the stamps.
const STAMPS_LEN: u64 = LINE * (1 + SLOTS);

/// Where the latest version's number lies among the stamps.
const LATEST: u64 = 0;

/// Where a version's stamp lies.
fn stamp(version: u64) -> u64 {
    LINE * (1 + version % SLOTS)
}

/// Where copies of `len` bytes lie.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub len: u64,
}

impl Layout {
    /// The first byte of a version's copy.
    pub fn copy(self, version: u64) -> u64 {
        version % SLOTS * self.len.next_multiple_of(LINE)
    }

    /// Bytes in all.
    pub fn total(self) -> u64 {
        self.copy(SLOTS - 1) + self.len
    }
}

/// The server's end: the stamps. There is one of it, so nobody else writes.
#[derive(Debug)]
pub struct Publisher {
    stamps: ExposedRegion,
    latest: u64,
}

impl Publisher {
    /// Publishes the first version, whose copy is where it belongs.
    pub fn new(domain: &ProtectionDomain, version: u64) -> Result<Self> {
        let stamps = domain.alloc(STAMPS_LEN as usize)?.expose(Access::REMOTE_READ)?;
        for version in 0..SLOTS {
            stamps.store(stamp(version), BUSY.to_le())?;
        }
        let mut publisher = Self { stamps, latest: version };
        publisher.tell(version)?;
        Ok(publisher)
    }

    /// What readers need to know, beside the copies.
    pub fn remote(&self) -> RemoteRegion {
        self.stamps.remote()
    }

    /// Publishes the next version, whose copy is complete when `write` is. A copy that fails is never found.
    pub async fn publish(&mut self, version: u64, write: impl Future<Output = Result<()>>) -> Result<()> {
        ensure!(version > self.latest, "publish: version {version} is not above {}", self.latest);
        // The bytes of a word in memory are little-endian, whatever this host's are.
        self.stamps.store(stamp(version), BUSY.to_le())?;
        // A store may pass one that follows it only in the program; the stores of the copy must not. Nor may what starts a kernel.
        fence(Ordering::SeqCst);
        write.await?;
        fence(Ordering::SeqCst);
        self.tell(version)
    }

    fn tell(&mut self, version: u64) -> Result<()> {
        self.stamps.store(stamp(version), version.to_le())?;
        self.stamps.store(LATEST, version.to_le())?;
        self.latest = version;
        Ok(())
    }
}

/// A worker's end.
#[derive(Debug)]
pub struct Puller {
    connection: Connection,
    published: Published,
    layout: Layout,
    /// For single words.
    word: Option<Buffer>,
    /// Pulls that had to begin again.
    pub repeated: u64,
}

impl Puller {
    /// `len` is the number of bytes that each version has.
    pub fn new(connection: &Connection, published: Published, len: usize) -> Result<Self> {
        let layout = Layout { len: len as u64 };
        let Published { stamps, copies } = published;
        let (there, expected) = ((stamps.len(), copies.len()), (STAMPS_LEN, layout.total()));
        ensure!(
            there == expected,
            "the published memory has {there:?} bytes instead of {expected:?}; run one version of the program"
        );
        let word = connection.domain().alloc(size_of::<u64>())?;
        Ok(Self { connection: connection.clone(), published, layout, word: Some(word), repeated: 0 })
    }

    /// Reads the latest version into the whole of `into`; the one that the server has told of, if it is still there.
    ///
    /// What can be thrown away may be begun with bytes of which it is not known yet whether they are whole. If they are not, it is begun again.
    pub async fn pull<B: TargetBuffer>(
        &mut self,
        told: u64,
        mut into: B,
        mut begin: impl FnMut(&B) -> Result<()>,
    ) -> Result<(u64, B)> {
        let mut told = Some(told);
        for _ in 0..ATTEMPTS {
            let version;
            (version, into) = self.copy(told.take(), into).await?;
            begin(&into)?;
            if self.is_whole(version).await? {
                return Ok((version, into));
            }
            self.repeated += 1;
        }
        bail!("pull: the server replaced the parameters {ATTEMPTS} times while they were read; give it fewer workers")
    }

    /// R1, unless the server has told of a version, and R2.
    async fn copy<B: TargetBuffer>(&mut self, told: Option<u64>, into: B) -> Result<(u64, B)> {
        let version = match told {
            Some(version) => version,
            None => self.word(LATEST).await?,
        };
        let start = self.layout.copy(version);
        let copy = self.published.copies.slice(start..start + self.layout.len)?;
        let into = self.connection.read(into, &copy).await.map_err(tokio_rdma::Error::from)?;
        Ok((version, into))
    }

    /// R3: whether a copy is what it was said to be.
    async fn is_whole(&mut self, version: u64) -> Result<bool> {
        Ok(self.word(stamp(version)).await? == version)
    }

    async fn word(&mut self, at: u64) -> Result<u64> {
        let buffer = self.word.take().context("an earlier pull was not finished")?;
        let buffer = self.connection.read(buffer, &self.published.stamps.slice(at..at + 8)?).await?;
        let word = buffer.first_chunk().copied().map(u64::from_le_bytes);
        self.word = Some(buffer);
        word.context("a short word")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64};
    use std::time::Duration;

    use tokio::runtime::Handle;
    use tokio_rdma::soft::LinkPolicy;
    use tokio_rdma::{Device, Listener};

    use super::*;

    /// Several packets of the largest MTU.
    const LEN: usize = 16 * 1024;

    /// What a reader must have met before it is sure.
    const WHOLE: u64 = 200;
    const REPLACED: u64 = 50;

    /// Pulls by all readers.
    #[derive(Debug, Default)]
    struct Counts {
        whole: AtomicU64,
        replaced: AtomicU64,
        stop: AtomicBool,
    }

    impl Counts {
        fn pulls(&self) -> u64 {
            self.whole.load(Ordering::Relaxed) + self.replaced.load(Ordering::Relaxed)
        }

        /// Whether readers meet the writer so often that they hardly get through.
        fn crowded(&self) -> bool {
            self.replaced.load(Ordering::Relaxed) > self.whole.load(Ordering::Relaxed)
        }

        fn stopped(&self) -> bool {
            self.stop.load(Ordering::Relaxed)
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_read_is_torn_over_sockets() {
        hammer(LinkPolicy::Sockets, false).await;
    }

    #[cfg(feature = "cuda")]
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_read_is_torn_that_a_gpu_writes() {
        hammer(LinkPolicy::Sockets, true).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_read_is_torn_over_shared_memory() {
        hammer(LinkPolicy::SharedMemory, false).await;
    }

    /// Nobody reads a mixture of versions while they are replaced as fast as can be.
    async fn hammer(link: LinkPolicy, gpu: bool) {
        const READERS: usize = 2;
        let domain = Device::builder("soft0").links(link).open().unwrap().alloc_pd().unwrap();
        let listener = Listener::bind(&domain, "127.0.0.1:0").await.unwrap();
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
        let mut server = Server::new(&domain, 1);
        if gpu {
            #[cfg(feature = "cuda")]
            {
                server.copies = Copies::Gpu(on_gpu::Copies::new(&domain).await);
                server.publish(2).await.unwrap();
            }
        }
        let published = server.published();
        let counts = Arc::new(Counts::default());
        let mut readers = tokio::task::JoinSet::new();
        let mut servers = Vec::new();
        for _ in 0..READERS {
            let connecting = Connection::connect(&domain, listener.local_address());
            let (connection, server) = tokio::try_join!(connecting, listener.accept()).unwrap();
            servers.push(server);
            let counts = counts.clone();
            readers.spawn(async move { read_until_sure(&connection, published, &counts).await });
        }
        let (for_writer, runtime) = (counts.clone(), Handle::current());
        let writer = std::thread::spawn(move || publish_until_stopped(server, &for_writer, &runtime));
        let outcome = tokio::time::timeout(Duration::from_secs(20), readers.join_all()).await;
        counts.stop.store(true, Ordering::Relaxed);
        let published = writer.join().unwrap();
        let wrong: Vec<String> = outcome
            .unwrap_or_else(|_| panic!("too few meetings in {published} versions: {counts:?}"))
            .into_iter()
            .flatten()
            .collect();
        assert!(wrong.is_empty(), "of {published} versions: {wrong:?}");
    }

    /// Every word of a version is its number.
    fn bytes(version: u64) -> Vec<u8> {
        version.to_le_bytes().repeat(LEN / 8)
    }

    /// Copies in some memory, and their stamps.
    struct Server {
        publisher: Publisher,
        copies: Copies,
    }

    enum Copies {
        Host(ExposedRegion),
        #[cfg(feature = "cuda")]
        Gpu(on_gpu::Copies),
    }

    const LAYOUT: Layout = Layout { len: LEN as u64 };

    impl Server {
        fn new(domain: &ProtectionDomain, version: u64) -> Self {
            let copies = domain.alloc(LAYOUT.total() as usize).unwrap().expose(Access::REMOTE_READ).unwrap();
            copies.copy_from(LAYOUT.copy(version), &bytes(version)).unwrap();
            Self { publisher: Publisher::new(domain, version).unwrap(), copies: Copies::Host(copies) }
        }

        fn published(&self) -> Published {
            let copies = match &self.copies {
                Copies::Host(copies) => copies.remote(),
                #[cfg(feature = "cuda")]
                Copies::Gpu(copies) => copies.remote(),
            };
            Published { stamps: self.publisher.remote(), copies }
        }

        async fn publish(&mut self, version: u64) -> Result<()> {
            let copies = &mut self.copies;
            let write = async {
                match copies {
                    Copies::Host(copies) => Ok(copies.copy_from(LAYOUT.copy(version), &bytes(version))?),
                    #[cfg(feature = "cuda")]
                    Copies::Gpu(copies) => copies.write(version).await,
                }
            };
            self.publisher.publish(version, write).await
        }
    }

    #[cfg(feature = "cuda")]
    mod on_gpu {
        use std::sync::Arc;

        use cudarc::driver::CudaStream;
        use tokio_rdma::gpu::{GpuBuffer, GpuDevice, GpuExposedRegion};

        use super::*;

        /// A GPU writes them; the stand-in for its driver where there is none.
        pub struct Copies {
            memory: GpuExposedRegion,
            stream: Arc<CudaStream>,
            /// What is in there.
            all: Vec<u8>,
        }

        impl Copies {
            pub async fn new(domain: &ProtectionDomain) -> Self {
                // Where a real driver would be found instead, it says so, and that one will do.
                let _ = fake_cuda::load();
                let gpu = GpuDevice::open(0).unwrap();
                let len = LAYOUT.total() as usize;
                let buffer = GpuBuffer::alloc(&gpu, domain, len).unwrap();
                buffer.idle().await.unwrap();
                let memory = buffer.expose(Access::REMOTE_READ).unwrap();
                Self { memory, stream: gpu.context().new_stream().unwrap(), all: vec![0; len] }
            }

            pub fn remote(&self) -> RemoteRegion {
                self.memory.remote()
            }

            /// All copies anew, of which one has changed.
            pub async fn write(&mut self, version: u64) -> Result<()> {
                self.all[LAYOUT.copy(version) as usize..][..LEN].copy_from_slice(&bytes(version));
                self.stream.memcpy_htod(&self.all, &mut self.memory.write_on::<u8>(&self.stream)?)?;
                Ok(self.memory.idle().await?)
            }
        }
    }

    fn publish_until_stopped(mut server: Server, counts: &Counts, runtime: &Handle) -> u64 {
        for version in server.publisher.latest + 1.. {
            runtime.block_on(server.publish(version)).unwrap();
            let pulls = counts.pulls();
            while counts.crowded() && counts.pulls() == pulls && !counts.stopped() {
                std::thread::yield_now();
            }
            if counts.stopped() {
                return version;
            }
        }
        u64::MAX
    }

    /// Reads until both happened often: whole copies, and such that were replaced meanwhile. Returns what was wrong.
    async fn read_until_sure(connection: &Connection, published: Published, counts: &Counts) -> Option<String> {
        let mut puller = Puller::new(connection, published, LEN).unwrap();
        let mut buffer = connection.domain().alloc(LEN).unwrap();
        let (mut last, mut pulls) = (0, 0);
        while counts.whole.load(Ordering::Relaxed) < WHOLE || counts.replaced.load(Ordering::Relaxed) < REPLACED {
            let version;
            // Every other time a version that was there, and mostly is not any more.
            let told = (pulls % 2 == 1).then_some(last);
            pulls += 1;
            (version, buffer) = puller.copy(told, buffer).await.unwrap();
            if !puller.is_whole(version).await.unwrap() {
                counts.replaced.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            counts.whole.fetch_add(1, Ordering::Relaxed);
            if version < last {
                return Some(format!("version {version} after {last}"));
            }
            last = version;
            if let Some(other) = buffer.chunks_exact(8).find(|word| **word != version.to_le_bytes()) {
                return Some(format!("{other:?} in version {version}"));
            }
        }
        None
    }

    #[tokio::test]
    async fn versions_grow_and_one_that_failed_is_not_found() {
        let domain = Device::open("soft0").unwrap().alloc_pd().unwrap();
        let mut server = Server::new(&domain, 5);
        assert!(server.publish(5).await.unwrap_err().to_string().contains("not above 5"));
        server.publish(6).await.unwrap();
        let failing = server.publisher.publish(7, async { bail!("a fault") }).await;
        assert_eq!(failing.unwrap_err().to_string(), "a fault");
        let stamps = &server.publisher.stamps;
        assert_eq!((stamps.load(LATEST).unwrap(), stamps.load(stamp(7)).unwrap()), (6, BUSY));
    }
}
