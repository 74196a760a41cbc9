//! What the load generator found, as a table.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use hdrhistogram::Histogram;
use tokio_rdma::Connection;

use crate::common::units::{micros, size};
use crate::load::{Distribution, Found, Load};
use crate::store::client::Counts;

pub struct Report {
    carrier: String,
    load: Load,
    gets: Histogram<u64>,
    puts: Histogram<u64>,
    elapsed: Duration,
    counts: Counts,
}

impl Report {
    pub fn new(connection: &Connection, load: &Load) -> Self {
        let device = connection.device();
        let (device, provider) = (device.name(), device.provider());
        let carrier = format!("device {device} ({provider}), link {}, server {}", connection.link(), connection.peer());
        let histogram = || Histogram::new(3).expect("three digits are allowed");
        let (gets, puts, counts) = (histogram(), histogram(), Counts::default());
        Self { carrier, load: load.clone(), gets, puts, elapsed: Duration::ZERO, counts }
    }

    /// One client more.
    pub fn add(&mut self, found: &Found) -> Result<()> {
        self.gets.add(&found.gets)?;
        self.puts.add(&found.puts)?;
        self.elapsed = self.elapsed.max(found.elapsed);
        self.counts.gets += found.counts.gets;
        self.counts.reads += found.counts.reads;
        self.counts.torn += found.counts.torn;
        self.counts.messages += found.counts.messages;
        Ok(())
    }

    pub fn print(&self) -> Result<()> {
        let Self { carrier, load, counts, .. } = self;
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header(["operation", "count", "rate", "min", "p50", "p99", "p99.9", "max"]);
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        for (name, times) in [("GET, by Read", &self.gets), ("PUT, by message", &self.puts)] {
            let mut row = vec![name.to_owned(), times.len().to_string()];
            row.push(format!("{:.0}/s", times.len() as f64 / self.elapsed.as_secs_f64()));
            let quantile = |quantile| match times.is_empty() {
                true => "-".to_owned(),
                false => micros(Duration::from_nanos(times.value_at_quantile(quantile))),
            };
            row.extend([0.0, 0.5, 0.99, 0.999, 1.0].map(quantile));
            table.add_row(row);
        }
        let distribution = match load.distribution {
            Distribution::Zipf => format!("zipf {}", load.zipf_exponent),
            Distribution::Uniform => "uniform".to_owned(),
        };
        let Load { clients, keys, .. } = load;
        let (value, seconds) = (size(load.value_size as usize), self.elapsed.as_secs_f64());
        let Counts { gets, reads, torn, messages } = counts;
        let per_get = *reads as f64 / (*gets).max(1) as f64;
        writeln!(
            io::stdout().lock(),
            "{carrier}\nclients: {clients}, keys: {keys} ({distribution}), values of {value}, {seconds:.1} s\n\n{table}\n\n\
             Reads per GET: {per_get:.2}. Reads that met a writer, and were repeated: {torn}. Messages to the server: {messages}, \
             and PUTs: {puts}.\nEvery value was whole and of its key, and no client saw a key go back to an older version.\n\
             The loop is closed: while an operation is late, its client begins no other that would be late too. Those that do not wait \
             for each other see more of what p99.9 and max tell of.",
            puts = self.puts.len()
        )
        .context("print the table")
    }
}
