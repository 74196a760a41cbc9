//! What was measured, as tables with bars.

use std::fmt;

use comfy_table::{CellAlignment, Table, presets};

use super::Figures;
use crate::common::units::size;

pub struct Shown<'a>(pub &'a Figures);

/// The longest bar.
const BAR: usize = 24;

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Figures { registrations, paths, left_out } = self.0;
        writeln!(f, "registering memory, beside sending as much of it from memory that is registered (median):\n")?;
        let mut table = table(&["device", "size", "register", "send", ""]);
        let slowest = registrations.iter().map(|it| it.median_us).fold(0.0, f64::max);
        for it in registrations {
            let path = paths.iter().find(|path| path.device == it.device && path.memory == "host");
            let sent = path.and_then(|path| path.points.iter().find(|point| point.bytes == it.bytes));
            let sent = sent.map(|point| micros(point.median_us)).unwrap_or_default();
            let bar = bar(it.median_us.ln_1p(), slowest.ln_1p());
            table.add_row([it.device.clone(), size(it.bytes), micros(it.median_us), sent, bar]);
        }
        writeln!(
            f,
            "{table}\nThe bar is logarithmic. A NIC's driver pins each page and tells the NIC of it, soft0 only takes note: so register \
             once and reuse (BufferPool).\n"
        )?;

        writeln!(f, "messages within this process (median of one alone; throughput of several in flight):\n")?;
        let mut table = self::table(&["memory", "device", "by", "size", "latency", "throughput", ""]);
        let points = paths.iter().flat_map(|path| &path.points);
        let fastest = points.map(|it| it.megabytes_per_second).fold(0.0, f64::max);
        for path in paths {
            for point in &path.points {
                let speed = point.megabytes_per_second;
                let cells = [path.memory.to_owned(), path.device.clone(), path.by.clone(), size(point.bytes)];
                let figures = [micros(point.median_us), format!("{speed:.1} MB/s"), bar(speed, fastest)];
                table.add_row(cells.into_iter().chain(figures));
            }
        }
        writeln!(f, "{table}\n1 MB = 1e6 bytes.")?;
        left_out.iter().try_for_each(|it| writeln!(f, "not measured: {it}"))
    }
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
    // Numbers.
    table.column_iter_mut().zip(header).for_each(|(column, name)| {
        if ["size", "register", "send", "latency", "throughput"].contains(name) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    });
    table
}

fn bar(value: f64, most: f64) -> String {
    let share = if most > 0.0 { (value / most).clamp(0.0, 1.0) } else { 0.0 };
    "#".repeat((share * BAR as f64).round() as usize)
}

fn micros(time: f64) -> String {
    format!("{time:.1} us")
}
