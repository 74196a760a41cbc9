//! Charts of sizes and what they cost or bring.

use anyhow::{Result, ensure};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::units::size;

/// Name and points of a line: bytes, and what they cost or bring.
pub type Line = (String, Vec<(f64, f64)>);

/// A chart with both axes logarithmic.
pub fn draw<B: DrawingBackend>(area: &DrawingArea<B, Shift>, title: &str, unit: &str, lines: &[Line]) -> Result<()>
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
