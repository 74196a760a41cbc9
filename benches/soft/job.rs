//! What a process is to do, and what it found; both travel as a line of JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Job {
    pub subject: Subject,
    pub exchange: Exchange,
    pub pace: Pace,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Subject {
    /// The software device, in this completion mode.
    Ours(Mode),
    /// A plain tokio socket.
    Sockets,
    /// Two processes that sleep in `epoll` until the other one writes to an `eventfd`: what waking costs.
    EventFd,
    /// One process that copies memory, all of it in the cache: what a write costs at least.
    Copy,
    /// One process, of which one task gives the runtime its turn and gets it back.
    Yield,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The default, as a user gets it who sets nothing.
    Adaptive,
    Event,
    Polling,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exchange {
    /// A message there, one of the same length back. Sockets: `write_all` and `read_exact`.
    RoundTrip { size: usize },
    /// Writes into the server's memory, 16 in flight. Sockets: the same bytes pushed out of as many
    /// buffers, a byte back at the end.
    Write { chunk: usize },
    /// A read of the server's memory. Sockets: a request of 32 bytes, an answer of the length read.
    Read { size: usize },
    /// A connection with receives posted on which nothing happens.
    Idle,
    /// A round trip of which half counts.
    OneWay { size: usize },
    /// As many messages as go, with many under way.
    Sends { size: usize },
    /// As `Sends`, posted by the batch.
    BatchedSends { size: usize },
    /// A write of eight bytes there and one back, of which half counts. Each side looks at its exposed memory until it sees them.
    WriteSeen,
    /// One write after the other.
    SingleWrite { size: usize },
    /// As `Write`, all from one buffer.
    SameWrite { chunk: usize },
    /// Reads that are complete at their first poll.
    ReadAtOnce { size: usize },
}

impl Subject {
    /// Whether it has no server.
    pub fn is_alone(self) -> bool {
        matches!(self, Self::Copy | Self::Yield)
    }
}

/// How long to go on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Pace {
    pub warm_up: Duration,
    pub measured: Duration,
    /// Bytes that a throughput job moves before it measures.
    pub warm_up_bytes: usize,
}

/// What a process used while it was measured.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Usage {
    pub wall: Duration,
    /// CPU time of all its threads.
    pub cpu: Duration,
    /// Voluntary context switches of all its threads.
    pub switches: u64,
}

/// What a client found.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Found {
    /// Microseconds of an exchange (the median), MB/s, or millions of messages a second; nothing when idle.
    pub value: Option<f64>,
    /// The 99th percentile of latencies.
    pub p99: Option<f64>,
    /// Round trips, operations or chunks.
    pub exchanges: u64,
    pub usage: Usage,
}

impl Job {
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }
}
