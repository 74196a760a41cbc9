//! Progress while steps run, and the table at the end.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, presets};
use tokio_rdma::Connection;

use crate::common::child::within;
use crate::common::units::{micros, size};
use crate::measure::Times;
use crate::wire::{ATOMIC, CHUNK, Sum};

/// What one step did.
pub struct Row {
    /// Bytes of one operation.
    pub len: usize,
    pub count: usize,
    /// Bytes of all operations.
    pub bytes: usize,
    pub times: Times,
}

impl Row {
    /// `count` operations of `len` bytes each.
    pub fn new(len: usize, count: usize, times: Times) -> Self {
        Self { len, count, bytes: len * count, times }
    }

    /// A file of `bytes`, cut into pieces.
    pub fn file(bytes: usize, times: Times) -> Self {
        Self { len: CHUNK.min(bytes), count: bytes.div_ceil(CHUNK), bytes, times }
    }
}

pub struct Table {
    table: comfy_table::Table,
    /// What carries the bytes.
    carrier: String,
    limit: Duration,
}

impl Table {
    pub fn new(connection: &Connection, limit: Duration) -> Self {
        let device = connection.device();
        let (device, provider) = (device.name(), device.provider());
        let carrier = format!("device {device} ({provider}), link {}, peer {}", connection.link(), connection.peer());
        let mut table = comfy_table::Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header(["operation", "size", "count", "median", "p99", "throughput"]);
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        Self { table, carrier, limit }
    }

    /// Runs a step, and shows its name meanwhile if somebody watches.
    pub async fn step(&mut self, name: &str, work: impl Future<Output = Result<Row>>) -> Result<()> {
        let _progress = Progress::show(name);
        let Row { len, count, bytes, times } = within(self.limit, name, work).await?;
        let seconds = times.busy().as_secs_f64();
        let throughput = match len {
            ATOMIC => format!("{:.0} op/s", count as f64 / seconds),
            _ => format!("{:.0} MB/s", bytes as f64 / seconds / 1e6),
        };
        let [median, p99] = [0.5, 0.99].map(|quantile| micros(times.quantile(quantile)));
        self.table.add_row([name, &size(len), &count.to_string(), &median, &p99, &throughput]);
        Ok(())
    }

    pub fn print(&self, file: &str, len: usize, sum: &Sum) -> Result<()> {
        let Self { table, carrier, .. } = self;
        let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut out = io::stdout().lock();
        writeln!(
            out,
            "{carrier}\n\n{table}\n\n\
             All contents were compared. Latency is from posting to completion; 1 MB = 1e6 bytes.\n\
             {file} ({}) has this SHA-256 at both ends:\n{sum}",
            size(len),
        )
        .context("print the table")
    }
}

/// A line on a terminal that goes away by itself.
struct Progress;

impl Progress {
    fn show(name: &str) -> Option<Self> {
        let mut stderr = io::stderr();
        stderr.is_terminal().then(|| {
            let _ = write!(stderr, "\r\x1b[K{name} ...");
            Self
        })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let _ = write!(io::stderr(), "\r\x1b[K");
    }
}
