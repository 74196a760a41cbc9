//! The loss over the steps, as a picture.

use std::path::Path;

use anyhow::{Context, Result};
use plotters::prelude::*;

/// Steps that the smooth line takes the mean of.
const WINDOW: usize = 20;

/// Writes an SVG of the losses after so many steps `before`.
pub fn draw(before: usize, losses: &[f32], title: &str, file: &Path) -> Result<()> {
    let draw = || -> Result<()> {
        let canvas = SVGBackend::new(file, (960, 540)).into_drawing_area();
        canvas.fill(&WHITE)?;
        let highest = losses.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
        let mut chart = ChartBuilder::on(&canvas)
            .caption(title, ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(before..before + losses.len().max(1), 0.0..highest * 1.05)?;
        chart.configure_mesh().light_line_style(WHITE).x_desc("step").y_desc("training loss").draw()?;
        let each = losses.iter().enumerate().map(|(step, loss)| (before + step + 1, *loss));
        chart.draw_series(LineSeries::new(each, BLUE.mix(0.3)))?;
        let smooth = losses.windows(WINDOW.min(losses.len().max(1))).enumerate().map(|(first, window)| {
            let mean = window.iter().sum::<f32>() / window.len() as f32;
            (before + first + 1 + window.len() / 2, mean)
        });
        chart.draw_series(LineSeries::new(smooth, BLUE.stroke_width(2)))?;
        canvas.present()?;
        Ok(())
    };
    draw().with_context(|| format!("draw {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_losses_makes_a_picture() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("loss.svg");
        for count in [0, 1, 19, 500] {
            let losses: Vec<f32> = (0..count).map(|step| 1.0 / (step + 1) as f32).collect();
            draw(7, &losses, "loss", &file).unwrap();
            let text = std::fs::read_to_string(&file).unwrap();
            assert!(text.contains("<svg") && text.contains("training loss"), "{text}");
            let drawn = text.lines().filter(|it| it.contains("<polyline") && it.contains("#0000FF")).count();
            assert_eq!(drawn > 0, count > 0, "{count} losses: {text}");
        }
    }
}
