//! What client and server tell each other, and how both recognise the bytes that they move.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use tokio_rdma::op::{ReceiveOp, Received};
use tokio_rdma::{Buffer, BufferPool, Connection, RemoteRegion};

/// Longest message, and the piece that a file is cut into.
pub const CHUNK: usize = 64 * 1024;

/// Length of what an atomic works on.
pub const ATOMIC: usize = 8;

/// The most memory that a server gives to a client, and so the longest file.
pub const MAX_TARGET: u64 = 1 << 30;

/// A SHA-256.
pub type Sum = [u8; 32];

/// What the client asks of the server. In bytes: kind, count and length as little-endian `u64`s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Expose this many bytes, and a counter. Answer: [`Welcome`].
    Expose { len: u64 },
    /// Send each of the next `count` messages back.
    Echo { count: u64 },
    /// Take the next `count` messages. Answer: a [`Report`] on them.
    Collect { count: u64 },
    /// Wait for `count` Writes with immediate, each `len` bytes at `immediate * len`. Answer: a [`Report`] on
    /// what is in the exposed memory when each notice arrives.
    Notices { count: u64, len: u64 },
    /// Answer: a [`Report`] on the first `len` bytes of the exposed memory, and on the counter.
    Inspect { len: u64 },
    /// Everything was checked; no more requests.
    Bye,
}

impl Request {
    pub fn to_bytes(self) -> Vec<u8> {
        let fields = match self {
            Self::Expose { len } => [1, 0, len],
            Self::Echo { count } => [2, count, 0],
            Self::Collect { count } => [3, count, 0],
            Self::Notices { count, len } => [4, count, len],
            Self::Inspect { len } => [5, 0, len],
            Self::Bye => [6, 0, 0],
        };
        fields.iter().flat_map(|field: &u64| field.to_le_bytes()).collect()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        ensure!(
            bytes.len() == 24,
            "a request of {} bytes instead of 24; is the peer a quickstart client?",
            bytes.len()
        );
        let [kind, count, len] = [0, 8, 16].map(|at| word(bytes, at));
        Ok(match kind {
            1 => Self::Expose { len },
            2 => Self::Echo { count },
            3 => Self::Collect { count },
            4 => Self::Notices { count, len },
            5 => Self::Inspect { len },
            6 => Self::Bye,
            _ => bail!("request number {kind}; is the peer a quickstart client?"),
        })
    }
}

/// What the server exposes: memory to write and read, and an 8-byte counter for atomics.
#[derive(Clone, Copy, Debug)]
pub struct Welcome {
    pub target: RemoteRegion,
    pub counter: RemoteRegion,
}

impl Welcome {
    pub fn to_bytes(self) -> Vec<u8> {
        [self.target.to_bytes(), self.counter.to_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (target, counter) = bytes.split_at_checked(RemoteRegion::WIRE_LEN).context("a short welcome")?;
        Ok(Self { target: RemoteRegion::from_bytes(target)?, counter: RemoteRegion::from_bytes(counter)? })
    }
}

/// What arrived at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    pub sum: Sum,
    pub counter: u64,
}

impl Report {
    pub fn to_bytes(self) -> Vec<u8> {
        [&self.sum[..], &self.counter.to_le_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let (sum, counter) = bytes.split_first_chunk().context("a short report")?;
        ensure!(counter.len() == 8, "a report of {} bytes", bytes.len());
        Ok(Self { sum: *sum, counter: word(counter, 0) })
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

/// Adds a message to a sum, and the immediate data that came with it.
pub fn add(sum: &mut Sha256, message: &[u8], immediate: Option<u32>) {
    sum.update(message);
    if let Some(immediate) = immediate {
        sum.update(immediate.to_le_bytes());
    }
}

/// Receives that are posted ahead, so that no message has to wait for a buffer.
pub struct Inbox {
    connection: Connection,
    posted: VecDeque<ReceiveOp<Buffer>>,
}

impl Inbox {
    pub fn new(connection: &Connection, depth: usize) -> Result<Self> {
        let pool = BufferPool::new(connection.domain(), CHUNK, depth)?;
        let mut inbox = Self { connection: connection.clone(), posted: VecDeque::with_capacity(depth) };
        while let Some(buffer) = pool.try_get() {
            inbox.post(buffer)?;
        }
        Ok(inbox)
    }

    /// Waits for the next message. Its buffer goes back with [`post`](Self::post).
    pub async fn next(&mut self, limit: Duration) -> Result<Received<Buffer>> {
        let receive = self.posted.pop_front().context("no receive is posted")?;
        Ok(receive.timeout(limit).await?)
    }

    pub fn post(&mut self, buffer: Buffer) -> Result<()> {
        let mut receive = self.connection.receive(buffer);
        receive.try_post()?;
        self.posted.push_back(receive);
        Ok(())
    }
}
