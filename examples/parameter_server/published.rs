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
//! Memory holds [`SLOTS`] copies, a stamp for each, and the number of the latest version. Version `v` goes to slot `v % SLOTS`.
//!
//! ```text
//! offset     0 latest          64 stamp 0     128 stamp 1     ...     64 * (1 + SLOTS) copy 0, copy 1, ...
//!
//! the server publishes v                         a worker pulls
//!   W1  stamp := BUSY                              R1  Read latest             -> v       awaited
//!   W2  copy  := the parameters                    R2  Read copy v % SLOTS               awaited
//!   W3  stamp := v                                 R3  Read stamp v % SLOTS    -> s       awaited
//!   W4  latest := v                                    whole if s = v, else once more
//! ```
//!
//! # Why it is right
//!
//! The server's stores become visible in the order W1 to W4: barriers stand between them, and devices are coherent with the CPU's
//! caches. Each Read looks at memory between its posting and its completion, and is posted when the one before it has completed.
//!
//! - R1 saw `v`, so W4 of `v` had happened, and before it W2: R2 finds nothing older than version `v` in that slot.
//! - R3 saw `v` in the stamp, so W1 of the next version for this slot had not happened when R3 looked, and its W2 even less: R2, which was
//!   over by then, found nothing newer.
//!
//! Versions only grow, so a stamp never returns to a value that it had. The words are aligned and 8 bytes long, which lie in one cache line
//! and which no device reads in two. The slots are there so that a reader rarely has to begin again: with one it would have
//! to whenever the server publishes during a pull, with [`SLOTS`] only when it does so that often.

use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result, bail, ensure};
use tokio_rdma::{Access, Buffer, Connection, ExposedRegion, ProtectionDomain, RemoteRegion, TargetBuffer};

/// Copies. A pull takes three round trips; a server with many asynchronous workers publishes once or twice in that time.
const SLOTS: u64 = 4;

/// No version: the slot is being written.
const BUSY: u64 = u64::MAX;

/// What is written by one side and looked at by another has a cache line of its own.
const LINE: u64 = 64;

/// Pulls that may begin again before something must be wrong.
const ATTEMPTS: u64 = 1000;

/// Where everything lies.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Bytes of one copy.
    len: u64,
}

impl Layout {
    const LATEST: u64 = 0;

    fn stamp(self, version: u64) -> u64 {
        LINE * (1 + version % SLOTS)
    }

    fn copy(self, version: u64) -> u64 {
        LINE * (1 + SLOTS) + version % SLOTS * self.len.next_multiple_of(LINE)
    }

    /// Bytes in all.
    fn total(self) -> u64 {
        self.copy(SLOTS - 1) + self.len
    }
}

/// The server's end. There is one of it, so nobody else writes.
#[derive(Debug)]
pub struct Publisher {
    memory: ExposedRegion,
    layout: Layout,
    latest: u64,
}

impl Publisher {
    /// Publishes the first version. All later ones have as many bytes.
    pub fn new(domain: &ProtectionDomain, version: u64, bytes: &[u8]) -> Result<Self> {
        let layout = Layout { len: bytes.len() as u64 };
        let memory = domain.alloc(layout.total() as usize)?.expose(Access::REMOTE_READ)?;
        let publisher = Self { memory, layout, latest: version };
        publisher.write(version, bytes)?;
        Ok(publisher)
    }

    /// What readers need to know.
    pub fn remote(&self) -> RemoteRegion {
        self.memory.remote()
    }

    /// Publishes the next version.
    pub fn publish(&mut self, version: u64, bytes: &[u8]) -> Result<()> {
        ensure!(version > self.latest, "publish: version {version} is not above {}", self.latest);
        ensure!(bytes.len() as u64 == self.layout.len, "publish: {} bytes instead of {}", bytes.len(), self.layout.len);
        self.write(version, bytes)?;
        self.latest = version;
        Ok(())
    }

    fn write(&self, version: u64, bytes: &[u8]) -> Result<()> {
        let (memory, layout) = (&self.memory, self.layout);
        // The bytes of a word in memory are little-endian, whatever this host's are.
        memory.store(layout.stamp(version), BUSY.to_le())?;
        // A store may pass one that follows it only in the program; the stores of the copy must not.
        fence(Ordering::SeqCst);
        memory.copy_from(layout.copy(version), bytes)?;
        fence(Ordering::SeqCst);
        memory.store(layout.stamp(version), version.to_le())?;
        memory.store(Layout::LATEST, version.to_le())?;
        Ok(())
    }
}

/// A worker's end.
#[derive(Debug)]
pub struct Puller {
    connection: Connection,
    remote: RemoteRegion,
    layout: Layout,
    /// For single words.
    word: Option<Buffer>,
    /// Pulls that had to begin again.
    pub repeated: u64,
}

impl Puller {
    /// `len` is the number of bytes that each version has.
    pub fn new(connection: &Connection, remote: RemoteRegion, len: usize) -> Result<Self> {
        let layout = Layout { len: len as u64 };
        ensure!(
            remote.len() == layout.total(),
            "the published memory has {} bytes instead of {}; run one version of the program",
            remote.len(),
            layout.total()
        );
        let word = connection.domain().alloc(size_of::<u64>())?;
        Ok(Self { connection: connection.clone(), remote, layout, word: Some(word), repeated: 0 })
    }

    /// Reads the latest version into the whole of `into`.
    pub async fn pull<B: TargetBuffer>(&mut self, mut into: B) -> Result<(u64, B)> {
        for _ in 0..ATTEMPTS {
            let version;
            (version, into) = self.attempt(into).await?;
            match version {
                Some(version) => return Ok((version, into)),
                None => self.repeated += 1,
            }
        }
        bail!("pull: the server replaced the parameters {ATTEMPTS} times while they were read; give it fewer workers")
    }

    /// One pull; no version if the bytes are not whole.
    async fn attempt<B: TargetBuffer>(&mut self, into: B) -> Result<(Option<u64>, B)> {
        let version = self.word(Layout::LATEST).await?;
        let start = self.layout.copy(version);
        let copy = self.remote.slice(start..start + self.layout.len)?;
        let into = self.connection.read(into, &copy).await.map_err(tokio_rdma::Error::from)?;
        let stamp = self.word(self.layout.stamp(version)).await?;
        Ok(((stamp == version).then_some(version), into))
    }

    async fn word(&mut self, at: u64) -> Result<u64> {
        let buffer = self.word.take().context("an earlier pull was not finished")?;
        let buffer = self.connection.read(buffer, &self.remote.slice(at..at + 8)?).await?;
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
        hammer(LinkPolicy::Sockets).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_read_is_torn_over_shared_memory() {
        hammer(LinkPolicy::SharedMemory).await;
    }

    /// Nobody reads a mixture of versions while they are replaced as fast as can be.
    async fn hammer(link: LinkPolicy) {
        const READERS: usize = 2;
        let domain = Device::builder("soft0").links(link).open().unwrap().alloc_pd().unwrap();
        let listener = Listener::bind(&domain, "127.0.0.1:0").await.unwrap();
        let publisher = Publisher::new(&domain, 1, &bytes(1)).unwrap();
        let remote = publisher.remote();
        let counts = Arc::new(Counts::default());
        let mut readers = tokio::task::JoinSet::new();
        let mut servers = Vec::new();
        for _ in 0..READERS {
            let connecting = Connection::connect(&domain, listener.local_address());
            let (connection, server) = tokio::try_join!(connecting, listener.accept()).unwrap();
            servers.push(server);
            let counts = counts.clone();
            readers.spawn(async move { read_until_sure(&connection, remote, &counts).await });
        }
        let for_writer = counts.clone();
        let writer = std::thread::spawn(move || publish_until_stopped(publisher, &for_writer));
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

    fn publish_until_stopped(mut publisher: Publisher, counts: &Counts) -> u64 {
        for version in 2.. {
            publisher.publish(version, &bytes(version)).unwrap();
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
    async fn read_until_sure(connection: &Connection, remote: RemoteRegion, counts: &Counts) -> Option<String> {
        let mut puller = Puller::new(connection, remote, LEN).unwrap();
        let mut buffer = connection.domain().alloc(LEN).unwrap();
        let mut last = 0;
        while counts.whole.load(Ordering::Relaxed) < WHOLE || counts.replaced.load(Ordering::Relaxed) < REPLACED {
            let version;
            (version, buffer) = puller.attempt(buffer).await.unwrap();
            let Some(version) = version else {
                counts.replaced.fetch_add(1, Ordering::Relaxed);
                continue;
            };
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
    async fn versions_grow_and_keep_their_length() {
        let domain = Device::open("soft0").unwrap().alloc_pd().unwrap();
        let mut publisher = Publisher::new(&domain, 5, &[1; 100]).unwrap();
        assert!(publisher.publish(5, &[1; 100]).unwrap_err().to_string().contains("not above 5"));
        assert!(publisher.publish(6, &[1; 99]).unwrap_err().to_string().contains("99 bytes"));
        publisher.publish(6, &[1; 100]).unwrap();
    }
}
