//! Rows, from rounds to a table and a file.

use std::fs;
use std::path::Path;

use anyhow::Result;
use comfy_table::{Table, presets};
use serde::Serialize;

use crate::stats::{median, spread};

#[derive(Clone, Copy)]
pub enum Aim {
    AtMost(f64),
    AtLeast(f64),
    None,
}

/// One comparison.
pub struct Row {
    name: String,
    unit: &'static str,
    peer_name: &'static str,
    aim: Aim,
    rounds: Vec<(f64, Option<f64>)>,
}

/// As the other benchmarks write it.
#[derive(Serialize)]
struct Written<'a> {
    name: &'a str,
    placement: &'static str,
    ours: f64,
    peer: Option<f64>,
    peer_name: &'a str,
    unit: &'a str,
    ratio: Option<f64>,
    rounds: usize,
    spread: Spread,
    aim: Option<String>,
    verdict: Option<&'static str>,
    per_round: &'a [(f64, Option<f64>)],
}

#[derive(Serialize)]
struct Spread {
    ours: f64,
    peer: Option<f64>,
}

impl Row {
    pub fn new(name: String, unit: &'static str, peer_name: &'static str, aim: Aim) -> Self {
        Self { name, unit, peer_name, aim, rounds: Vec::new() }
    }

    pub fn add(&mut self, ours: f64, peer: Option<f64>) {
        self.rounds.push((ours, peer));
    }

    fn written(&self) -> Option<Written<'_>> {
        let ours: Vec<_> = self.rounds.iter().map(|round| round.0).collect();
        let peers: Vec<_> = self.rounds.iter().filter_map(|round| round.1).collect();
        let (value, peer) = (median(&ours)?, median(&peers));
        let ratio = peer.map(|peer| value / peer);
        let (aim, met) = match (self.aim, ratio) {
            (Aim::AtMost(most), Some(ratio)) => (Some(format!("<= {most}")), Some(ratio <= most)),
            (Aim::AtLeast(least), Some(ratio)) => (Some(format!(">= {least}")), Some(ratio >= least)),
            _ => (None, None),
        };
        Some(Written {
            name: &self.name,
            placement: "two threads",
            ours: value,
            peer,
            peer_name: self.peer_name,
            unit: self.unit,
            ratio,
            rounds: ours.len(),
            spread: Spread { ours: spread(&ours)?, peer: spread(&peers) },
            aim,
            verdict: met.map(|met| if met { "ok" } else { "missed" }),
            per_round: &self.rounds,
        })
    }
}

/// Prints the table, and returns how many aims were missed.
pub fn print(rows: &[Row], rounds: u32) -> usize {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header(["row", "ours", "peer", "unit", "ratio", "peer is", "spread ours/peer", "aim", "verdict"]);
    let written: Vec<_> = rows.iter().filter_map(Row::written).collect();
    for row in &written {
        let or_dash = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        let percent = |value: f64| format!("{:.0}%", value * 100.0);
        table.add_row([
            row.name.to_owned(),
            format!("{:.2}", row.ours),
            or_dash(row.peer),
            row.unit.to_owned(),
            or_dash(row.ratio),
            row.peer_name.to_owned(),
            format!("{} / {}", percent(row.spread.ours), row.spread.peer.map_or("-".to_owned(), percent)),
            row.aim.clone().unwrap_or_default(),
            row.verdict.unwrap_or_default().to_owned(),
        ]);
    }
    println!(
        "{table}\n\n{rounds} rounds; ratio = ours / peer, both the median over rounds. Latency: the p50 within each round."
    );
    if cfg!(debug_assertions) {
        println!("This is a debug build: it shows that everything works, and its figures mean nothing.");
    }
    written.iter().filter(|row| row.verdict == Some("missed")).count()
}

pub fn write(rows: &[Row], out: &Path) -> Result<()> {
    if let Some(dir) = out.parent() {
        fs::create_dir_all(dir)?;
    }
    let written: Vec<_> = rows.iter().filter_map(Row::written).collect();
    fs::write(out, serde_json::to_string_pretty(&written)?)?;
    Ok(())
}
