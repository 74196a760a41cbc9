//! What was measured, as a picture.

use std::path::Path;

use anyhow::{Result, ensure};
use plotters::prelude::*;

use super::text::size;
use super::{Figures, Point};

/// Name and points of a line: bytes, and what they cost or bring.
type Line = (String, Vec<(f64, f64)>);

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
        chart(&canvas.split_evenly((3, 1))[area], title, unit, &lines)?;
    }
    canvas.present()?;
    Ok(())
}

/// Both axes are logarithmic.
fn chart<B: DrawingBackend>(
    area: &DrawingArea<B, plotters::coord::Shift>,
    title: &str,
    unit: &str,
    lines: &[Line],
) -> Result<()>
where
    B::ErrorType: 'static,
{
    let points: Vec<_> = lines.iter().flat_map(|(_, points)| points).filter(|(_, y)| *y > 0.0).collect();
    ensure!(!points.is_empty(), "nothing was measured of {title}");
    let range = |values: &dyn Fn(&(f64, f64)) -> f64| {
        let (low, high) = points.iter().fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), point| {
            (low.min(values(point)), high.max(values(point)))
        });
        (low / 1.5)..(high * 1.5)
    };
    let (x, y) = (range(&|point| point.0), range(&|point| point.1));
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(36)
        .y_label_area_size(72)
        .build_cartesian_2d(x.log_scale().base(16.0), y.log_scale())?;
    chart
        .configure_mesh()
        .light_line_style(WHITE)
        .x_label_formatter(&|bytes| size(*bytes as usize))
        .y_desc(unit)
        .draw()?;
    for (index, (name, points)) in lines.iter().enumerate() {
        let color = Palette99::pick(index).to_rgba();
        let drawn = points.iter().filter(|(_, y)| *y > 0.0).copied();
        chart
            .draw_series(LineSeries::new(drawn, color.stroke_width(2)).point_size(3))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}
