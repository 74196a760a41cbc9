//! The table at the end, and the line that counts.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Outcome;

#[derive(Default)]
pub struct Report {
    rows: Vec<Row>,
    /// Everything that was not checked: a whole step, or a part of one that passed otherwise.
    skips: Vec<String>,
}

struct Row {
    step: &'static str,
    result: &'static str,
    took: Duration,
    note: String,
}

impl Report {
    /// Notes how a step ended; a failure is printed at once and in full.
    pub fn add(&mut self, step: &'static str, outcome: Result<Outcome>, start: Instant) {
        let took = start.elapsed();
        let (result, note) = match outcome {
            Ok(outcome) => {
                self.skips.extend(outcome.skips.iter().map(|reason| format!("{step}: {reason}")));
                (if outcome.ran { "passed" } else { "skipped" }, outcome.note)
            }
            Err(error) => {
                println!("{error:#}");
                ("FAILED", String::new())
            }
        };
        println!("{step}: {result} after {:.1} s\n", took.as_secs_f64());
        self.rows.push(Row { step, result, took, note });
    }

    /// Prints the table, each skip's reason, and the counts alone on the last line.
    pub fn close(self) -> ExitCode {
        println!("{:10}{:10}{:>8}", "step", "result", "seconds");
        for Row { step, result, took, note } in &self.rows {
            println!("{}", format!("{step:10}{result:10}{:8.1}  {note}", took.as_secs_f64()).trim_end());
        }
        println!();
        for skip in &self.skips {
            println!("skipped: {skip}");
        }
        let count = |result| self.rows.iter().filter(|row| row.result == result).count();
        let failed = count("FAILED");
        println!("{} passed, {failed} failed, {} skipped", count("passed"), self.skips.len());
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
