//! What was measured, as a picture.

use std::path::Path;

use anyhow::Result;
use plotters::prelude::*;

use super::{Figures, Point};
use crate::common::chart::{self, Line};

/// Writes an SVG: the costs of registering, and of each path the latency and the throughput.
pub fn draw(figures: &Figures, file: &Path) -> Result<()> {
    let canvas = SVGBackend::new(file, (960, 1380)).into_drawing_area();
    canvas.fill(&WHITE)?;
    let mut devices: Vec<_> = figures.registrations.iter().map(|it| &it.device).collect();
    devices.dedup();
    let costs = devices.into_iter().map(|device| {
        let of_device = figures.registrations.iter().filter(|it| it.device == *device);
        (device.clone(), of_device.map(|it| (it.bytes as f64, it.median_us)).collect())
    });
    let of_paths = |value: fn(&Point) -> f64| -> Vec<Line> {
        let line = |path: &super::Path| path.points.iter().map(|it| (it.bytes as f64, value(it))).collect();
        figures.paths.iter().map(|path| (path.name.clone(), line(path))).collect()
    };
    for (area, title, unit, lines) in [
        (0, "registering memory", "microseconds", costs.collect()),
        (1, "a message within the process", "microseconds", of_paths(|it| it.median_us)),
        (2, "messages within the process", "MB/s", of_paths(|it| it.megabytes_per_second)),
    ] {
        chart::draw(&canvas.split_evenly((3, 1))[area], title, unit, &lines)?;
    }
    canvas.present()?;
    Ok(())
}
