//! `cargo xtask guest bench`: the library over Soft-RoCE beside perftest, a plain C loop and async-rdma.
//!
//! All of them run in one boot of one guest, back to back in every round, so that what differs is their own doing. The guest
//! has emulated processors: only the ratios say anything, and only where the host was not too busy.

use std::collections::BTreeMap;
use std::fs;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use super::machine::{self, Clock};
use super::pairs::{PERFTEST, SHELL};
use super::results::{self, Figures};
use super::rows::{self, Figure, Group, Row};
use super::{image, install, peers, prepare};
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub struct Args {
    /// Two short rounds: shows that everything works, measures nothing.
    #[arg(long)]
    quick: bool,
    /// Rounds; each figure is the median over them. Default 5.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Fail when an aim is missed.
    #[arg(long)]
    strict: bool,
    /// Leave async-rdma out, which takes a minute to build.
    #[arg(long)]
    without_async_rdma: bool,
    /// Seconds that the guest may run; no round begins in the last fifth.
    #[arg(long, default_value_t = 600)]
    timeout: u32,
}

/// What a contender found in a round, by round, group and contender.
type Found = BTreeMap<(u32, usize, usize), Figures>;

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    let dir = prepare(workspace)?;
    install("perftest")?;
    let mut programs = vec![peers::ours(&dir)?, peers::c_loop(&dir)?];
    if !args.without_async_rdma {
        programs.push(peers::async_rdma("release")?);
    }
    let rounds = args.rounds.unwrap_or(if args.quick { 2 } else { 5 });
    let groups = rows::groups(args.quick);
    let job = job(&groups, rounds, args);
    let image = image::build(&dir, &programs, &PERFTEST, &job)?;
    let start = Instant::now();
    let console = machine::boot(&image, &dir.join("console.log"), Clock::Host, args.timeout)?;
    let (found, dropped) = found(&console)?;
    let summaries: Vec<_> = rows::rows().iter().filter_map(|row| Summary::of(row, &groups, &found)).collect();
    if summaries.is_empty() {
        bail!("the guest measured nothing:\n{console}");
    }
    print(&summaries);
    println!(
        "{rounds} rounds, {} s. ratio = ours / peer, both the median over rounds of what each found: the p50 of latencies.",
        start.elapsed().as_secs()
    );
    println!(
        "Spread: (max - min) / median over rounds. MB = 10^6 bytes. Emulated processors: only ratios mean anything."
    );
    for reason in &dropped {
        println!("dropped: {reason}");
    }
    let out = workspace.target.join("bench/verbs.json");
    fs::create_dir_all(workspace.target.join("bench"))?;
    fs::write(&out, serde_json::to_string_pretty(&summaries)?).with_context(|| format!("write {out}"))?;
    println!("All figures, round by round: {out}");
    let missed = summaries.iter().filter(|summary| summary.verdict == Some(Verdict::Missed)).count();
    let aims = summaries.iter().filter(|summary| summary.verdict.is_some_and(|it| it != Verdict::Skipped)).count();
    println!("{missed} of {aims} aims missed.");
    Ok(if args.strict && missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn job(groups: &[Group], rounds: u32, args: &Args) -> String {
    let mut job = SHELL.to_owned();
    let latest = args.timeout * 4 / 5;
    let mut port = 20_000;
    for round in 0..rounds {
        job += &format!("[ $(cut -d. -f1 /proc/uptime) -lt {latest} ] || exit\n");
        for (number, group) in groups.iter().enumerate() {
            let count = group.contenders.len();
            for turn in 0..count {
                // Each is the first one at times.
                let place = (turn + round as usize) % count;
                let who = group.contenders[place];
                if who == super::pairs::Contender::AsyncRdma && args.without_async_rdma {
                    continue;
                }
                job += &who.pair(&format!("{round} {number} {place}"), &group.spec, port);
                port += 1;
            }
        }
    }
    job
}

/// What was found, and what was not, each with its reason.
fn found(console: &str) -> Result<(Found, Vec<String>)> {
    let (mut found, mut dropped) = (Found::new(), Vec::new());
    let groups = rows::groups(false);
    for outcome in results::outcomes(console) {
        let numbers: Vec<usize> = outcome.label.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [round, number, place] = numbers[..] else { bail!("the guest measured {:?}", outcome.label) };
        match outcome.figures {
            Ok(figures) => drop(found.insert((round as u32, number, place), figures)),
            Err(error) => {
                let group = groups.get(number).context("an unknown group")?;
                let who = group.contenders.get(place).context("an unknown contender")?.name(&group.spec);
                let Group { spec, .. } = group;
                dropped.push(format!("{who}, {} {} B, round {}: {error:#}", spec.op, spec.size, round + 1));
            }
        }
    }
    Ok((found, dropped))
}

/// A row of the report, and of the JSON; the same fields as in the benchmark of the software device.
#[derive(Serialize)]
struct Summary {
    name: &'static str,
    placement: &'static str,
    /// Medians over the rounds.
    ours: f64,
    ours_is: String,
    peer: Option<f64>,
    peer_name: Option<String>,
    unit: &'static str,
    /// `ours / peer`.
    ratio: Option<f64>,
    rounds: usize,
    /// (max - min) / median over the rounds.
    spread: Spread,
    aim: Option<String>,
    verdict: Option<Verdict>,
    per_round: Vec<Round>,
}

#[derive(Serialize)]
struct Spread {
    ours: f64,
    peer: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Missed,
    Skipped,
}

#[derive(Serialize)]
struct Round {
    ours: Option<Trial>,
    peer: Option<Trial>,
}

#[derive(Clone, Copy, Serialize)]
struct Trial {
    value: f64,
    p99: f64,
    /// Microseconds of the client's CPU an operation.
    cpu: Option<f64>,
    over_50_ms: Option<u64>,
    operations: Option<u64>,
}

impl Summary {
    /// `None` for a row that nothing is known of.
    fn of(row: &Row, groups: &[Group], found: &Found) -> Option<Self> {
        let Group { spec, contenders } = &groups[row.group];
        let trials = |who| {
            let place = contenders.iter().position(|contender| *contender == who);
            let rounds = found.keys().map(|(round, ..)| *round).max().unwrap_or(0);
            let trial = |round| {
                let figures = found.get(&(round, row.group, place?))?;
                Some(Trial {
                    value: row.figure.of(figures)?,
                    p99: figures.p99,
                    cpu: figures.cpu,
                    over_50_ms: figures.over_50_ms,
                    operations: figures.count,
                })
            };
            (0..=rounds).map(trial).collect::<Vec<Option<Trial>>>()
        };
        let (ours, peers) = (trials(row.ours), row.peer.map(trials).unwrap_or_default());
        let values = |trials: &[Option<Trial>]| trials.iter().flatten().map(|trial| trial.value).collect::<Vec<_>>();
        let figure = |values: &[f64]| match row.figure {
            _ if values.is_empty() => None,
            // These are counted over all rounds.
            Figure::Stalls => Some(values.iter().sum()),
            _ => median(values),
        };
        let value = figure(&values(&ours))?;
        let peer = figure(&values(&peers));
        if row.aim.is_none() && row.peer.is_some() && peer.is_none() {
            return None;
        }
        let ratio = peer.filter(|_| row.figure != Figure::Stalls).map(|peer| value / peer);
        let verdict = row.aim.map(|aim| match aim.met(value, ratio) {
            Some(true) => Verdict::Ok,
            Some(false) => Verdict::Missed,
            None => Verdict::Skipped,
        });
        Some(Self {
            name: row.name,
            placement: "guest, 2 CPUs",
            ours: value,
            ours_is: row.ours.name(spec),
            peer,
            peer_name: row.peer.map(|peer| peer.name(spec)),
            unit: row.figure.unit(),
            ratio,
            rounds: ours.iter().flatten().count(),
            spread: Spread { ours: spread(&values(&ours)).unwrap_or(0.0), peer: spread(&values(&peers)) },
            aim: row.aim.map(|aim| aim.to_string()),
            verdict,
            per_round: (0..ours.len())
                .map(|round| Round { ours: ours[round], peer: peers.get(round).copied().flatten() })
                .collect(),
        })
    }

    /// Of how many operations.
    fn operations(&self) -> u64 {
        self.per_round.iter().filter_map(|round| round.ours?.operations).sum()
    }
}

fn print(summaries: &[Summary]) {
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN);
    table.set_header([
        "row",
        "ours",
        "peer",
        "unit",
        "ratio",
        "ours is",
        "peer is",
        "spread ours/peer",
        "aim",
        "verdict",
    ]);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let percent = |spread: f64| format!("{:.0}%", spread * 100.0);
    for summary in summaries {
        let stalls = summary.unit == Figure::Stalls.unit();
        let spreads = format!("{} / {}", percent(summary.spread.ours), or_dash(summary.spread.peer.map(percent)));
        table.add_row([
            summary.name.to_owned(),
            if stalls { format!("{} of {}", summary.ours, summary.operations()) } else { figure(summary.ours) },
            or_dash(summary.peer.map(figure)),
            summary.unit.to_owned(),
            or_dash(summary.ratio.map(|ratio| format!("{ratio:.2}"))),
            summary.ours_is.clone(),
            or_dash(summary.peer_name.clone()),
            if stalls { "-".to_owned() } else { spreads },
            summary.aim.clone().unwrap_or_default(),
            match summary.verdict {
                Some(Verdict::Ok) => "ok",
                Some(Verdict::Missed) => "MISSED",
                Some(Verdict::Skipped) => "skipped",
                None => "",
            }
            .to_owned(),
        ]);
    }
    for column in table.column_iter_mut().filter(|column| matches!(column.index, 1 | 2 | 4 | 7)) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    println!("{table}\n");
}

/// Three digits or so.
fn figure(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value < 10.0 => format!("{value:.2}"),
        value if value < 1000.0 => format!("{value:.1}"),
        value => format!("{value:.0}"),
    }
}

fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some((low + high) / 2.0)
}

fn spread(values: &[f64]) -> Option<f64> {
    let most = values.iter().copied().max_by(f64::total_cmp)?;
    let least = values.iter().copied().min_by(f64::total_cmp)?;
    Some((most - least) / median(values)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"p50":P,"p99":9,"MBps":1,"ops":1,"n":2000,"over50ms":0,"cpu_us_per_op":4}"#;

    #[test]
    fn a_row_is_the_median_over_the_rounds_that_succeeded() {
        let mut console = String::new();
        // Ours, then the C loop in event mode, of the first group.
        for (round, ours, peer) in [(0, "10", "20"), (1, "30", "20"), (2, "12", "20")] {
            console += &format!("guest: case {round} 0 0\n{}\nguest: status 0\n", LINE.replace('P', ours));
            console += &format!("guest: case {round} 0 1\n{}\nguest: status 0\n", LINE.replace('P', peer));
        }
        console += "guest: case 3 0 0\nbroken\nguest: status 1\n";
        let (found, dropped) = found(&console).unwrap();
        let rows = rows::rows();
        let summary = Summary::of(&rows[0], &rows::groups(false), &found).unwrap();
        assert_eq!((summary.ours, summary.peer, summary.ratio), (12.0, Some(20.0), Some(0.6)));
        assert!(summary.verdict == Some(Verdict::Ok));
        assert_eq!(dropped.len(), 1);
        assert!(dropped[0].contains("send_lat 8 B, round 4: exit status 1: broken"), "{}", dropped[0]);
    }

    #[test]
    fn stalls_are_counted_over_all_rounds() {
        let stalled = |count: &str| LINE.replace("\"over50ms\":0", &format!("\"over50ms\":{count}")).replace('P', "1");
        let console = format!(
            "guest: case 0 0 0\n{}\nguest: status 0\nguest: case 1 0 0\n{}\nguest: status 0\n",
            stalled("0"),
            stalled("2")
        );
        let (found, _) = found(&console).unwrap();
        let rows = rows::rows();
        let row = rows.iter().find(|row| row.figure == Figure::Stalls).unwrap();
        let summary = Summary::of(row, &rows::groups(false), &found).unwrap();
        assert_eq!((summary.ours, summary.operations()), (2.0, 4000));
        assert!(summary.verdict == Some(Verdict::Missed));
    }
}
