//! What can be asked for, and the rows that this makes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use tokio_rdma::{Address, CompletionMode, Device, IntoAddress};

use crate::memory::Place;

/// The most registered memory that one end gives to a row.
const MAX_MEMORY: u64 = 1 << 30;

/// The most operations in flight: more than any link needs to be busy.
pub const MAX_DEPTH: u32 = 1024;

/// Twice what is in flight is posted, so that no message waits for a receive while the server is busy with the last ones; and so many
/// where they are small.
const LEAST_RECEIVES: u64 = 16;

/// What those may take.
const SMALL: u64 = 16 << 20;

/// What atomics work on.
pub const WORD: usize = 8;

/// Measures operations between two processes.
#[derive(Parser)]
pub struct Options {
    /// What to measure, comma-separated [default: all of it]
    #[arg(long, value_name = "NAMES", value_enum, value_delimiter = ',')]
    operation: Vec<Operation>,

    /// Bytes of a message: single sizes and ranges that double, comma-separated, like 8,4K,64K or 8..1M; atomics take 8 in any case
    #[arg(long, visible_alias = "size", value_name = "SIZES", default_value = "8,4K,64K,1M")]
    sizes: Sizes,

    /// How many are in flight at a time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    depth: u32,

    /// How completions are waited for
    #[arg(long, value_enum, default_value = "adaptive")]
    mode: Mode,

    /// Where the bytes are: host, or gpu:N with the feature cuda
    #[arg(long, default_value = "host")]
    pub memory: Place,

    /// With --memory gpu:K: the bytes of the server are on the next of the first N GPUs, (K + 1) modulo N
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "role", value_parser = clap::value_parser!(u32).range(1..))]
    gpus: u32,

    /// The RDMA device; without it, the default one
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Run only this side, for two hosts; without it, this process is the client and starts a server
    #[arg(long)]
    pub role: Option<Role>,

    /// Where the server listens: IP:PORT, HOST:PORT or unix:PATH; port 0 takes a free one. Without it, at the device's own address
    #[arg(long, value_parser = |text: &str| text.into_address())]
    pub address: Option<Address>,

    /// How many seconds a row is measured
    #[arg(long, value_name = "SECONDS", default_value = "0.25", value_parser = seconds)]
    duration: Duration,

    /// How many operations a row is measured, instead of a time
    #[arg(long, value_name = "N", conflicts_with = "duration", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// How many seconds a row runs before it is measured
    #[arg(long, value_name = "SECONDS", default_value = "0.05", value_parser = seconds)]
    warm_up: Duration,

    /// Where the figures go for programs
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,

    /// Where a picture of the figures goes
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// How many seconds a step may take, beyond those it is asked to; one with --count takes as long as it does
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,

    /// How many seconds a server waits for its client
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    wait: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    Server,
    Client,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// A message, and one of the same length back
    RoundTrip,
    Send,
    /// With immediate data
    SendImm,
    Write,
    /// With immediate data, which tells the peer
    WriteImm,
    Read,
    FetchAdd,
    CompareSwap,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Sleep whenever nothing is there
    Event,
    /// Look for a while, then sleep
    Adaptive,
    /// A task that never sleeps
    Polling,
    /// A thread that never sleeps
    PollingThread,
}

/// One row, as the client tells it to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    pub operation: Operation,
    pub size: usize,
    pub depth: u32,
}

/// How long a row goes on.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    For(Duration),
    Count(u64),
}

impl Options {
    /// The rows, each checked.
    pub fn rows(&self) -> Result<Vec<Row>> {
        let operations = if self.operation.is_empty() { Operation::value_variants() } else { &self.operation[..] };
        let mut rows = Vec::new();
        for &operation in operations {
            let sizes = if operation.is_atomic() { &[WORD][..] } else { &self.sizes.0 };
            for &size in sizes {
                let row = Row { operation, size, depth: self.depth };
                row.check()?;
                rows.push(row);
            }
        }
        Ok(rows)
    }

    pub fn pace(&self) -> Pace {
        self.count.map_or(Pace::For(self.duration), Pace::Count)
    }

    pub fn warm_up(&self) -> Pace {
        Pace::For(self.warm_up)
    }

    pub fn mode(&self) -> Mode {
        self.mode
    }

    pub fn limit(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    pub fn wait(&self) -> Duration {
        Duration::from_secs(self.wait)
    }

    pub fn open_device(&self) -> Result<Device> {
        // The builder wants a name.
        let name = match &self.device {
            Some(name) => name.clone(),
            None => Device::open_default().context("open the device")?.name().to_owned(),
        };
        let mode = match self.mode {
            Mode::Event => CompletionMode::Event,
            Mode::Adaptive => CompletionMode::default(),
            Mode::Polling => CompletionMode::Polling,
            Mode::PollingThread => CompletionMode::PollingThread { cpu: None },
        };
        Device::builder(&name).completion_mode(mode).open().context("open the device")
    }

    /// Whether there can be as many GPUs as are asked for.
    pub fn check_gpus(&self) -> Result<(), PlanError> {
        match self.memory {
            Place::Host if self.gpus > 1 => Err(PlanError::NoGpu { gpus: self.gpus }),
            Place::Gpu(ordinal) if self.gpus > 1 && ordinal >= self.gpus as usize => {
                Err(PlanError::NotAmongGpus { ordinal, gpus: self.gpus })
            }
            #[cfg(feature = "cuda")]
            Place::Gpu(_) if self.gpus > 1 && (self.gpus as usize) > tokio_rdma::gpu::GpuDevice::count() => {
                Err(PlanError::FewerGpus { gpus: self.gpus, shown: tokio_rdma::gpu::GpuDevice::count() })
            }
            _ => Ok(()),
        }
    }

    /// Where the bytes are of the server that this process starts.
    fn memory_of_server(&self) -> Place {
        match self.memory {
            Place::Gpu(ordinal) if self.gpus > 1 => Place::Gpu((ordinal + 1) % self.gpus as usize),
            same => same,
        }
    }

    /// The command line of a server for this client.
    pub fn of_server(&self) -> Vec<String> {
        let mut arguments = vec!["--role".to_owned(), "server".to_owned()];
        let mut add = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
        add("--memory", self.memory_of_server().to_string());
        add("--mode", name(self.mode));
        add("--timeout", self.timeout.to_string());
        add("--wait", self.timeout.to_string());
        if let Some(device) = &self.device {
            add("--device", device.clone());
        }
        if let Some(address) = &self.address {
            add("--address", address.to_string());
        }
        arguments
    }
}

impl Row {
    /// Whether there is memory enough; a server asks too, since it does not choose its client.
    pub fn check(&self) -> Result<(), PlanError> {
        let Self { operation, size, depth } = *self;
        // First of all: what follows computes with them.
        for (what, value, limit) in
            [("depth", u64::from(depth), u64::from(MAX_DEPTH)), ("size", size as u64, MAX_MEMORY)]
        {
            if !(1..=limit).contains(&value) {
                return Err(PlanError::Range { operation, what, value, limit });
            }
        }
        let value = self.most_memory();
        match value <= MAX_MEMORY {
            true => Ok(()),
            false => Err(PlanError::Memory { operation, size, depth, value, limit: MAX_MEMORY }),
        }
    }

    /// Bytes that the end registers which needs more of them.
    fn most_memory(&self) -> u64 {
        let (size, depth) = (self.size as u64, u64::from(self.depth));
        // A round trip has a place for its answer.
        let client = if self.operation == Operation::RoundTrip { 2 * size * depth } else { size * depth };
        let exposed = match self.operation.is_one_sided() && !self.operation.is_atomic() {
            true => size.next_multiple_of(64) * depth,
            false => 0,
        };
        client.max(exposed + u64::from(self.receives()) * self.receive_len() as u64)
    }

    /// How many receives the server posts: at least one for each message in flight, and more within the limit on memory.
    pub fn receives(&self) -> u32 {
        if !self.operation.is_received() {
            return 0;
        }
        let (len, depth) = (self.receive_len() as u64, u64::from(self.depth));
        let wanted = (2 * depth).max(LEAST_RECEIVES.min(SMALL / len));
        wanted.min(MAX_MEMORY / len).max(depth) as u32
    }

    /// Bytes of each. What is written goes elsewhere, and takes up a receive for its immediate data only.
    pub fn receive_len(&self) -> usize {
        if self.operation == Operation::WriteImm { WORD } else { self.size }
    }

    /// From one slot to the next in the exposed memory: no two share a cache line.
    pub fn stride(&self) -> usize {
        self.size.next_multiple_of(64)
    }

    /// Of all slots.
    pub fn memory(&self) -> usize {
        self.stride() * self.depth as usize
    }

    /// What the message in this slot is filled with, before anything is timed.
    pub fn seed(&self, slot: usize) -> u64 {
        (self.operation as u64) << 48 | (self.size as u64) << 16 | slot as u64
    }
}

impl Operation {
    pub fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd | Self::CompareSwap)
    }

    /// Whether each takes up a receive of the server.
    pub fn is_received(self) -> bool {
        matches!(self, Self::RoundTrip | Self::Send | Self::SendImm | Self::WriteImm)
    }

    /// Whether the bytes go to, or come from, memory that the server exposes.
    pub fn is_one_sided(self) -> bool {
        !matches!(self, Self::RoundTrip | Self::Send | Self::SendImm)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoundTrip => "round trip",
            Self::Send => "send",
            Self::SendImm => "send with immediate",
            Self::Write => "write",
            Self::WriteImm => "write with immediate",
            Self::Read => "read",
            Self::FetchAdd => "fetch-and-add",
            Self::CompareSwap => "compare-and-swap",
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(*self))
    }
}

/// As the command line has it.
fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// A row that cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("{operation}: {what} is {value}, the limits are 1 and {limit}; choose another one")]
    Range { operation: Operation, what: &'static str, value: u64, limit: u64 },

    /// The host's memory is on none.
    #[error("gpus: {gpus} were asked for, and the memory is the host's; add --memory gpu:0")]
    NoGpu { gpus: u32 },

    /// The client's would be none of them.
    #[error("gpus: gpu:{ordinal} is none of the first {gpus}; choose more with --gpus, or one of them with --memory")]
    NotAmongGpus { ordinal: usize, gpus: u32 },

    /// There are not so many.
    #[cfg(feature = "cuda")]
    #[error(
        "gpus: {gpus} were asked for, and CUDA shows {shown} to this process (see CUDA_VISIBLE_DEVICES); choose fewer"
    )]
    FewerGpus { gpus: u32, shown: usize },

    /// It takes more memory than an end gives.
    #[error(
        "{operation}: {depth} slots of {size} bytes take {value} bytes, the limit is {limit}; \
         choose fewer with --depth, or shorter ones with --sizes"
    )]
    Memory { operation: Operation, size: usize, depth: u32, value: u64, limit: u64 },
}

/// Sizes of messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(Vec<usize>);

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = Vec::new();
        for item in text.split(',').map(str::trim) {
            let Some((first, last)) = item.split_once("..") else {
                sizes.push(bytes(item)?);
                continue;
            };
            let (first, last) = (bytes(first)?, bytes(last)?);
            if first > last {
                return Err(format!("{item}: the range ends before it begins"));
            }
            sizes.extend(
                std::iter::successors(Some(first), |size| size.checked_mul(2)).take_while(|size| *size <= last),
            );
        }
        Ok(Self(sizes))
    }
}

/// A number of bytes, with K, M or G for powers of 1024.
fn bytes(text: &str) -> Result<usize, String> {
    let text = text.trim();
    let digits = text.trim_end_matches(|last: char| !last.is_ascii_digit());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1u64,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        other => return Err(format!("{text:?}: no unit is called {other:?}; there are K, M and G")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text:?} is no number of bytes"))?;
    match number.checked_mul(unit) {
        Some(value @ 1..=MAX_MEMORY) => Ok(value as usize),
        _ => Err(format!("{text} is out of range: 1 byte to {MAX_MEMORY}")),
    }
}

/// Seconds, with fractions.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    match seconds {
        0.0..=3600.0 => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("{text} is out of range: 0 to 3600 seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn sizes_are_single_ones_and_ranges() {
        let sizes = |text: &str| text.parse::<Sizes>().map(|sizes| sizes.0);
        assert_eq!(sizes("8,4K, 1MiB"), Ok(vec![8, 4096, 1 << 20]));
        assert_eq!(sizes("8..64"), Ok(vec![8, 16, 32, 64]));
        assert_eq!(sizes("3..13,1g"), Ok(vec![3, 6, 12, 1 << 30]));
        for wrong in ["", "0", "8,", "x", "1T", "64..8", "..8", "2G", "99999999999999999999G", "-8", "8…9"] {
            assert!(sizes(wrong).is_err(), "{wrong}: {:?}", sizes(wrong));
        }
    }

    #[test]
    fn a_row_of_a_client_that_means_harm_is_refused() {
        for (size, depth) in [(usize::MAX, 1), (usize::MAX - 70, MAX_DEPTH), (0, 1), (8, 0), (8, u32::MAX)] {
            for operation in Operation::value_variants() {
                let error = Row { operation: *operation, size, depth }.check().unwrap_err().to_string();
                assert!(error.contains("the limits are 1 and"), "{error}");
            }
        }
    }

    #[test]
    fn the_limit_on_memory_counts_receives() {
        for operation in Operation::value_variants() {
            for size in [1, 8, 4096, 1 << 20, 1 << 25, 1 << 29, 1 << 30] {
                for depth in [1, 2, 7, MAX_DEPTH] {
                    let row = Row { operation: *operation, size, depth };
                    if row.check().is_ok() && operation.is_received() {
                        let (receives, len) = (row.receives(), row.receive_len());
                        assert!(u64::from(receives) * len as u64 <= MAX_MEMORY, "{row:?}: {receives} of {len} bytes");
                        assert!(receives >= depth, "{row:?}: {receives}");
                    }
                }
            }
        }
        let receives = |operation, size| Row { operation, size, depth: 1 }.receives();
        assert_eq!(receives(Operation::Send, 4096), 16);
        assert_eq!(receives(Operation::Send, 1 << 28), 2);
        assert_eq!(receives(Operation::WriteImm, 1 << 30), 16);
    }

    #[test]
    fn the_command_line_is_consistent() {
        Options::command().debug_assert();
        let rows = |arguments: &[&str]| Options::try_parse_from([&["perf"], arguments].concat()).unwrap().rows();
        assert_eq!(rows(&["--size", "8..16"]).unwrap().len(), 6 * 2 + 2, "atomics have one size");
        let error = rows(&["--sizes", "1G", "--depth", "2", "--operation", "write"]).unwrap_err().to_string();
        assert!(error.starts_with("write: 2 slots of 1073741824 bytes take 2147483648 bytes, the limit is"), "{error}");
        let server = |memory: &str, gpus: &str| {
            let options = Options::try_parse_from(["perf", "--memory", memory, "--gpus", gpus]).unwrap();
            options.memory_of_server().to_string()
        };
        for (memory, gpus, of_server) in [
            ("host", "1", "host"),
            ("gpu:0", "1", "gpu:0"),
            ("gpu:3", "1", "gpu:3"),
            ("gpu:0", "2", "gpu:1"),
            ("gpu:1", "2", "gpu:0"),
            ("gpu:2", "8", "gpu:3"),
        ] {
            assert_eq!(server(memory, gpus), of_server, "{memory} of {gpus}");
        }
        for wrong in [
            &["--duration", "-1"][..],
            &["--gpus", "0"],
            &["--gpus", "2", "--role", "server"],
            &["--duration", "NaN"],
            &["--count", "0"],
            &["--memory", "tape"],
        ] {
            assert!(Options::try_parse_from([&["perf"], wrong].concat()).is_err(), "{wrong:?}");
        }
    }
}
