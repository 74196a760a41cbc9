//! The table, and the file.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use comfy_table::{Cell, CellAlignment, Table, presets};

use crate::driver::Course;
use crate::job::Exchange;
use crate::summary::{Summary, Verdict};

const HEADER: [&str; 10] =
    ["row", "placement", "ours", "peer", "unit", "ratio", "peer is", "spread ours/peer", "aim", "verdict"];

pub fn print(courses: &[Course], summaries: &[Summary], rounds: u32, took: Duration) {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(HEADER);
    for summary in summaries {
        table.add_row(cells(summary));
    }
    for column in table.column_iter_mut().filter(|column| matches!(column.index, 2 | 3 | 5 | 7)) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}\n");
    if cfg!(debug_assertions) {
        println!("This is a debug build: it shows that everything works, and its figures mean nothing.");
    }
    println!(
        "{rounds} rounds, {:.0} s. Ours and the peer's alternate; ratio = ours / peer, both the median over rounds.",
        took.as_secs_f64()
    );
    println!(
        "Latency: the p50 within each round, of whole round trips or of their half, as the unit says. Spread: (max - min) / median over rounds. MB = 10^6 bytes."
    );
    if !summaries.is_empty() {
        let foreign = summaries.iter().map(Summary::foreign_cpus).sum::<f64>() / summaries.len() as f64;
        println!("Other processes kept {foreign:.2} CPUs busy meanwhile; the less, the better the figures.");
    }
    print_idle(courses, summaries);
    for reason in courses.iter().filter_map(|course| course.skipped).collect::<std::collections::BTreeSet<_>>() {
        let rows = courses.iter().filter(|course| course.skipped == Some(reason)).count();
        println!("skipped: {rows} comparisons: {reason}");
    }
    for Course { row, failed, .. } in courses {
        if let Some(error) = failed {
            println!("FAILED: {}, {}: {error}", row.name, row.placement);
        }
    }
    let missed = summaries.iter().filter(|summary| summary.missed()).count();
    let aims =
        summaries.iter().filter(|summary| matches!(summary.verdict, Some(Verdict::Ok | Verdict::Missed))).count();
    println!("{missed} of {aims} aims missed.");
}

fn print_idle(courses: &[Course], summaries: &[Summary]) {
    for summary in summaries {
        let idle = |course: &Course| course.row.name == summary.name && course.row.exchange == Exchange::Idle;
        let switches = summary.median_of(|trial| trial.switches);
        if let (true, Some(switches)) = (courses.iter().any(idle), switches) {
            println!("{}, {}: {switches:.0} voluntary context switches", summary.name, summary.placement);
        }
    }
}

fn cells(summary: &Summary) -> Vec<Cell> {
    let percent = |spread: f64| format!("{:.0}%", spread * 100.0);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let verdict = match summary.verdict {
        Some(Verdict::Ok) => "ok",
        Some(Verdict::Missed) => "MISSED",
        Some(Verdict::Skipped) => "skipped",
        None => "",
    };
    let row = [
        summary.name.to_owned(),
        summary.placement.clone(),
        figure(summary.ours),
        or_dash(summary.peer.map(figure)),
        summary.unit.to_owned(),
        or_dash(summary.ratio.map(|ratio| if ratio < 0.1 { format!("{ratio:.4}") } else { format!("{ratio:.2}") })),
        or_dash(summary.peer_name.clone()),
        format!("{} / {}", percent(summary.spread.ours), or_dash(summary.spread.peer.map(percent))),
        summary.aim.clone().unwrap_or_default(),
        verdict.to_owned(),
    ];
    row.map(Cell::new).into()
}

/// Three digits or so.
fn figure(value: f64) -> String {
    match value {
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 1000.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

pub fn write(summaries: &[Summary], out: &Path) -> Result<()> {
    let dir = out.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    fs::write(out, serde_json::to_string_pretty(summaries)?).with_context(|| format!("write {}", out.display()))?;
    println!("All figures, round by round: {}", out.canonicalize()?.display());
    Ok(())
}
