//! The table, the JSON, the picture.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use plotters::prelude::*;
use serde::Serialize;
use tokio_rdma::Connection;

use crate::common::chart::{self, Line};
use crate::common::units::{micros, size};
use crate::laps::Laps;
use crate::plan::{Mode, Operation, Row};

/// What was measured of a row.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Operations.
    count: u64,
    seconds: f64,
    min_us: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    /// Payload; of a round trip, both ways. 1 MB is 1e6 bytes.
    mb_per_second: f64,
    operations_per_second: f64,
    /// Times that the server had no receive posted; a NIC does not tell.
    receiver_not_ready: u64,
    /// Operations that were carried out directly on the server's memory (link shm).
    direct: u64,
    /// Bytes that the client's GPU copied from or to the server's, since the row began.
    bytes_between_gpus: u64,
    #[serde(skip)]
    link: String,
}

impl Figures {
    pub fn new(row: Row, laps: &Laps, connection: &Connection) -> Self {
        let seconds = laps.elapsed.as_secs_f64();
        let per_second = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let ways = if row.operation == Operation::RoundTrip { 2.0 } else { 1.0 };
        let stats = connection.stats();
        Self {
            count: laps.count(),
            seconds,
            min_us: laps.quantile(0.0),
            p50_us: laps.quantile(0.5),
            p99_us: laps.quantile(0.99),
            p999_us: laps.quantile(0.999),
            max_us: laps.quantile(1.0),
            mb_per_second: per_second(laps.count() as f64 * row.size as f64 * ways / 1e6),
            operations_per_second: per_second(laps.count() as f64),
            receiver_not_ready: stats.rnr_received,
            direct: stats.direct,
            bytes_between_gpus: stats.bytes_between_gpus,
            link: connection.link().to_string(),
        }
    }
}

/// A row as programs get it. The first fields are those of the rows that `cargo bench --bench soft` writes.
#[derive(Debug, Serialize)]
struct Entry {
    name: String,
    placement: &'static str,
    /// The median.
    ours: f64,
    unit: &'static str,
    peer: Option<f64>,
    rounds: u32,
    #[serde(flatten)]
    row: Row,
    mode: String,
    device: String,
    provider: String,
    link: String,
    /// Of the client and the server.
    memory: [String; 2],
    /// Between two GPUs over the software device: whether they copied directly. Otherwise null.
    gpus_copied: Option<bool>,
    debug_build: bool,
    #[serde(flatten)]
    figures: Figures,
}

pub struct Report {
    entries: Vec<Entry>,
    device: String,
    provider: String,
    peer: String,
    mode: Mode,
    memory: [String; 2],
}

impl Report {
    pub fn new(connection: &Connection, mode: Mode, memory: [String; 2]) -> Self {
        let (device, peer) = (connection.device(), connection.peer().to_owned());
        let (device, provider) = (device.name().to_owned(), device.provider().to_string());
        Self { entries: Vec::new(), device, provider, peer, mode, memory }
    }

    pub fn add(&mut self, row: Row, figures: Figures) {
        // The word that they work on, and what they find, are the host's in any case.
        let is_host = row.operation.is_atomic();
        let memory = if is_host { ["host", "host"].map(str::to_owned) } else { self.memory.clone() };
        let between_gpus = self.provider == "software" && memory.iter().all(|end| end != "host");
        self.entries.push(Entry {
            name: format!("{} {} {}", row.operation, size(row.size), figures.link),
            placement: "two processes",
            ours: figures.p50_us,
            unit: "us",
            peer: None,
            rounds: 1,
            row,
            mode: self.mode.to_string(),
            device: self.device.clone(),
            provider: self.provider.clone(),
            link: figures.link.clone(),
            memory,
            gpus_copied: between_gpus.then_some(figures.bytes_between_gpus > 0),
            debug_build: cfg!(debug_assertions),
            figures,
        });
    }

    pub fn print(&self) -> Result<()> {
        let mut table = Table::new();
        let header = ["operation", "by", "size", "depth", "count", "min", "p50", "p99", "p99.9", "bandwidth", "rate"];
        table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
        table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        for Entry { row, device, link, figures, gpus_copied, .. } in &self.entries {
            let copied = match gpus_copied {
                Some(true) => ", the GPUs copy",
                Some(false) => ", by way of the host",
                None => "",
            };
            let time = |value: f64| micros(Duration::from_secs_f64(value / 1e6));
            table.add_row([
                row.operation.to_string(),
                format!("{device}, link {link}{copied}"),
                size(row.size),
                row.depth.to_string(),
                figures.count.to_string(),
                time(figures.min_us),
                time(figures.p50_us),
                time(figures.p99_us),
                time(figures.p999_us),
                format!("{:.1} MB/s", figures.mb_per_second),
                format!("{:.0} msg/s", figures.operations_per_second),
            ]);
        }
        let atomics = match self.entries.iter().any(|it| it.row.operation.is_atomic() && it.memory != self.memory) {
            true => ", of atomics the host's",
            false => "",
        };
        let Self { device, provider, peer, mode, memory: [here, there], .. } = self;
        let mut out = io::stdout().lock();
        writeln!(
            out,
            "device {device} ({provider}), peer {peer}, mode {mode}, memory {here} here and {there} there{atomics}\n\n{table}\n\n\
             The first messages of each row were compared. Latency is from posting to completion, of a round trip until the answer \
             is there; its bandwidth counts both ways. 1 MB = 1e6 bytes.\n\
             The loop is closed: while an operation is late, none begins that would be late too. Those that do not wait for each other see \
             more of what p99.9 and the longest time tell of."
        )
        .context("print the table")?;
        if cfg!(debug_assertions) {
            writeln!(out, "This is a debug build: it shows that everything works, and its figures mean little.")?;
        }
        Ok(())
    }

    pub fn write(&self, json: Option<&Path>, svg: Option<&Path>) -> Result<()> {
        let doing = |what: &str, file: &Path| format!("{what} {}", file.display());
        if let Some(file) = json {
            let text = serde_json::to_string_pretty(&self.entries)?;
            fs::write(file, text + "\n").with_context(|| doing("write", file))?;
        }
        if let Some(file) = svg {
            self.draw(file).with_context(|| doing("draw", file))?;
        }
        Ok(())
    }

    fn draw(&self, file: &Path) -> Result<()> {
        let canvas = SVGBackend::new(file, (960, 1380)).into_drawing_area();
        canvas.fill(&WHITE)?;
        for (area, title, unit, value) in [
            (0, "median latency", "microseconds", (|it| it.p50_us) as fn(&Figures) -> f64),
            (1, "99th percentile", "microseconds", |it| it.p99_us),
            (2, "bandwidth", "MB/s", |it| it.mb_per_second),
        ] {
            chart::draw(&canvas.split_evenly((3, 1))[area], title, unit, &self.lines(value))?;
        }
        canvas.present()?;
        Ok(())
    }

    /// One line for each operation.
    fn lines(&self, value: fn(&Figures) -> f64) -> Vec<Line> {
        let mut lines: Vec<Line> = Vec::new();
        for Entry { row, link, figures, .. } in &self.entries {
            let name = format!("{}, {link}", row.operation);
            let point = (row.size as f64, value(figures));
            match lines.iter_mut().find(|(known, _)| *known == name) {
                Some((_, points)) => points.push(point),
                None => lines.push((name, vec![point])),
            }
        }
        lines
    }
}
