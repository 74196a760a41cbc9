//! What the guest's console says of the measurements.

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// What one program found. Times in microseconds.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Figures {
    pub p50: f64,
    pub p99: f64,
    /// Operations that took more than 50 ms, which means that something waited for a timer. perftest does not tell.
    #[serde(rename = "over50ms")]
    pub over_50_ms: Option<u64>,
    #[serde(rename = "n")]
    pub count: Option<u64>,
    /// 10^6 bytes a second.
    #[serde(rename = "MBps")]
    pub megabytes: f64,
    /// Operations a second.
    pub ops: f64,
    #[serde(rename = "cpu_us_per_op")]
    pub cpu: Option<f64>,
}

/// A measurement, as the job's shell functions enclose it.
#[derive(Debug)]
pub struct Outcome<'a> {
    pub label: &'a str,
    pub figures: Result<Figures>,
}

pub fn outcomes(console: &str) -> Vec<Outcome<'_>> {
    let mut outcomes = Vec::new();
    let mut current: Option<(&str, Vec<&str>)> = None;
    for line in console.lines().map(str::trim) {
        if let Some(label) = line.strip_prefix("guest: case ") {
            current = Some((label, Vec::new()));
        } else if let Some(status) = line.strip_prefix("guest: status ") {
            if let Some((label, lines)) = current.take() {
                outcomes.push(Outcome { label, figures: figures(&lines, status) });
            }
        } else if let Some((_, lines)) = &mut current {
            lines.push(line);
        }
    }
    outcomes
}

fn figures(lines: &[&str], status: &str) -> Result<Figures> {
    if status != "0" {
        bail!("exit status {status}: {}", lines.join(" | "));
    }
    match lines.iter().find(|line| line.starts_with('{')) {
        Some(line) => serde_json::from_str(line).with_context(|| format!("{line:?}")),
        None => perftest(lines).with_context(|| format!("no result in {}", lines.join(" | "))),
    }
}

/// The first row of perftest's table, by the names of its columns.
fn perftest(lines: &[&str]) -> Result<Figures> {
    let header = lines.iter().position(|line| line.starts_with("#bytes")).context("no table")?;
    let row: Vec<_> = lines.get(header + 1).context("an empty table")?.split_whitespace().collect();
    // A name is a word, or two before a bracket: "BW average[MB/sec]", "99% percentile[usec]".
    let names: Vec<_> = lines[header].split_whitespace().filter(|word| *word != "BW" && !word.ends_with('%')).collect();
    let column = |name: &str| -> Result<f64> {
        let at = names.iter().position(|word| word.starts_with(name)).with_context(|| format!("no column {name}"))?;
        let value: f64 = row.get(at).with_context(|| format!("no value of {name}"))?.parse()?;
        // Its measurement of the clock fails at times, which makes infinite or no time pass.
        if !value.is_finite() || value <= 0.0 {
            bail!("{name} is {value}: it could not measure its clock");
        }
        Ok(value)
    };
    let (size, mut figures) = (
        column("#bytes")?,
        Figures { p50: 0.0, p99: 0.0, over_50_ms: None, count: None, megabytes: 0.0, ops: 0.0, cpu: None },
    );
    if names.iter().any(|name| name.starts_with("t_typical")) {
        figures.p50 = column("t_typical")?;
        figures.p99 = column("percentile")?;
        figures.ops = 1e6 / column("t_avg")?;
        figures.megabytes = figures.ops * size / 1e6;
    } else {
        // Its MB are 2^20 bytes.
        figures.megabytes = column("average")? * f64::from(1 << 20) / 1e6;
        figures.ops = figures.megabytes * 1e6 / size;
    }
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]";
    const BANDWIDTH: &str = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]";

    fn one(text: &str) -> Result<Figures> {
        let console = format!("guest: case x\n{text}\nguest: status 0\n");
        outcomes(&console).pop().unwrap().figures
    }

    #[test]
    fn perftest_is_read_by_its_columns() {
        let found = one(&format!("{LATENCY}\n 8 1000 15.1 80.2 16.73 17.5 1.2 25.1 60.3")).unwrap();
        assert_eq!((found.p50, found.p99, found.ops), (16.73, 25.1, 1e6 / 17.5));
        let found = one(&format!("{BANDWIDTH}\n 4096 1000 60.0 50.0 0.0128")).unwrap();
        assert_eq!((found.megabytes, found.ops), (52.4288, 12800.0));
    }

    #[test]
    fn a_clock_that_was_not_measured_is_no_result() {
        for row in ["8 1000 inf inf inf inf inf inf inf", "8 1000 0.00 0.00 0.00 0.00 0.00 0.00 0.00"] {
            assert!(one(&format!("{LATENCY}\n{row}")).is_err(), "{row}");
        }
        assert!(one("Correlation coefficient r^2: 0.8 < 0.9").is_err());
    }

    #[test]
    fn a_program_that_failed_is_told_with_what_it_said() {
        let console = "guest: case a\nerror: no device\nguest: status 1\nguest: case b\n{\"p50\":1.5,\"p99\":2,\"MBps\":3,\"ops\":4}\nguest: status 0\n";
        let found = outcomes(console);
        assert_eq!(found.iter().map(|outcome| outcome.label).collect::<Vec<_>>(), ["a", "b"]);
        assert!(found[0].figures.as_ref().unwrap_err().to_string().contains("no device"));
        assert_eq!(found[1].figures.as_ref().unwrap().p50, 1.5);
    }
}
