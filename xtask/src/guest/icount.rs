//! `cargo xtask guest icount`: how many instructions small operations take, in the guest's kernel and outside of it.
//!
//! The guest's clock counts its instructions, so what a program there takes for nanoseconds are instructions, the same in
//! every run and on every host. That finds a change of one percent, where a clock on a busy machine finds a factor of two.
//! It does not see cache misses, and one CPU has no contention: this says what the code does, not how fast a NIC is.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use comfy_table::{CellAlignment, Table, presets};

use super::accepted::{self, Accepted, SLACK};
use super::image::{self, Image};
use super::machine::{self, Clock};
use super::pairs::{Contender, SHELL, Spec};
use super::results::{self, Figures};
use super::{install, peers, prepare};
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub struct Args {
    /// Take the counts as the good ones from now on.
    #[arg(long)]
    accept: bool,
    /// Fail when an aim is missed.
    #[arg(long)]
    strict: bool,
    /// Boot so many times, to see whether the counts repeat.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Seconds that a guest may run.
    #[arg(long, default_value_t = 300)]
    timeout: u32,
}

/// Where the good counts are.
const ACCEPTED: &str = "benches/verbs/accepted.toml";

/// Operations of one run of a case: enough for a median, and for what comes only now and then to show in a mean.
const COUNT: u32 = 1000;

/// Runs of a case, each in a process of its own, of which the least counts: where the kernel's allocator happens to stand
/// adds 2 % to all operations of some processes.
const RUNS: usize = 5;

/// How often each side of a case runs.
#[derive(Clone, Copy)]
struct Runs {
    ours: usize,
    peer: usize,
}

/// To tell a ratio.
const COMPARED: Runs = Runs { ours: RUNS, peer: RUNS };

/// To tell our counts from those accepted. That the peers run is checked too, their counts are not.
const CHECKED: Runs = Runs { ours: RUNS, peer: 1 };

struct Case {
    name: &'static str,
    spec: Spec,
    ours: Contender,
    peer: Contender,
    peer_name: &'static str,
    /// Both ends in one process, so that nothing but them is counted.
    alone: bool,
    aim: Aim,
}

#[derive(Clone, Copy)]
enum Aim {
    /// Ours / the peer's.
    Ratio(f64),
    /// Ours less the peer's.
    Extra(f64),
}

const fn spec(op: &'static str, size: u32, in_flight: u32) -> Spec {
    Spec { op, size, in_flight, count: COUNT }
}

static CASES: [Case; 6] = [
    Case {
        name: "write 8 B",
        spec: spec("write_lat", 8, 1),
        ours: Contender::Ours("MODE=adaptive"),
        peer: Contender::C("MODE=poll"),
        peer_name: "C, polling",
        alone: true,
        aim: Aim::Ratio(1.08),
    },
    Case {
        name: "write 8 B, event mode",
        spec: spec("write_lat", 8, 1),
        ours: Contender::Ours("MODE=event"),
        peer: Contender::C("MODE=channel"),
        peer_name: "C, channel and epoll",
        alone: true,
        aim: Aim::Ratio(1.15),
    },
    Case {
        name: "write 8 B, 16 in flight",
        spec: spec("write_bw", 8, 16),
        ours: Contender::Ours("MODE=adaptive"),
        peer: Contender::C("MODE=poll"),
        peer_name: "C, polling",
        alone: true,
        aim: Aim::Extra(800.0),
    },
    Case {
        name: "send/receive 8 B, event mode",
        spec: spec("send_lat", 8, 1),
        ours: Contender::Ours("MODE=event"),
        peer: Contender::C("MODE=event"),
        peer_name: "C, epoll",
        alone: false,
        aim: Aim::Ratio(1.2),
    },
    Case {
        name: "read 4 KiB, event mode",
        spec: spec("read_lat", 4096, 1),
        ours: Contender::Ours("MODE=event"),
        peer: Contender::Perftest("-e"),
        peer_name: "ib_read_lat -e",
        alone: false,
        aim: Aim::Ratio(1.1),
    },
    // 0.95 of its throughput.
    Case {
        name: "write 4 KiB, 16 in flight",
        spec: spec("write_bw", 4096, 16),
        ours: Contender::Ours("MODE=adaptive"),
        peer: Contender::Perftest(""),
        peer_name: "ib_write_bw -t 16",
        alone: false,
        aim: Aim::Ratio(1.05),
    },
];

impl Case {
    fn line(&self, who: Contender, label: &str, port: u16) -> String {
        if self.alone { who.alone(label, &self.spec, port) } else { who.pair(label, &self.spec, port) }
    }

    /// Each side, who that is, and how often it runs.
    fn sides(&self, runs: Runs) -> [(&'static str, Contender, usize); 2] {
        [("ours", self.ours, runs.ours), ("peer", self.peer, runs.peer)]
    }

    /// Instructions an operation: of one, the median, which no timer tick is in; of several in flight, the mean.
    fn instructions(&self, figures: &Figures) -> f64 {
        if self.spec.in_flight == 1 { figures.p50 * 1e3 } else { 1e9 / figures.ops }
    }
}

/// Instructions an operation.
struct Counted {
    case: &'static Case,
    ours: f64,
    peer: f64,
}

/// What to boot, and what to compare with.
struct Setup {
    runs: Runs,
    dir: Utf8PathBuf,
    image: Image,
    tools: BTreeMap<String, String>,
    before: Option<Accepted>,
}

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    let setup = Setup::new(workspace, COMPARED)?;
    let mut good = true;
    for _ in 0..args.runs {
        let start = Instant::now();
        let counted = setup.count(args.timeout)?;
        println!("{}", setup.table(&counted));
        println!("guest: {} s", start.elapsed().as_secs());
        good &= !counted.iter().any(|it| setup.grown(it) || args.strict && it.missed());
        if args.accept {
            let instructions = counted.iter().map(|it| (it.case.name.to_owned(), it.ours.round())).collect();
            Accepted { tools: setup.tools.clone(), instructions }.write(Utf8Path::new(ACCEPTED))?;
            println!("accepted: {ACCEPTED}");
        }
    }
    if let Some(why) = setup.incomparable().filter(|_| !args.accept) {
        println!("Nothing is compared with what was accepted: {why}");
    }
    Ok(if good || args.accept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// For `cargo xtask test`: the cases counted, and why they were compared with nothing, if so.
/// An error when an operation takes more instructions than were accepted.
pub fn check(workspace: &Workspace) -> Result<(usize, Option<String>)> {
    let setup = Setup::new(workspace, CHECKED)?;
    let counted = setup.count(300)?;
    ensure!(!counted.iter().any(|it| setup.grown(it)), "{}", setup.table(&counted));
    Ok((counted.len(), setup.incomparable()))
}

impl Setup {
    fn new(workspace: &Workspace, runs: Runs) -> Result<Self> {
        let dir = prepare(workspace)?;
        install("perftest")?;
        let programs = [peers::ours(&dir)?, peers::c_loop(&dir)?];
        let image = image::build(&dir, &programs, &["ib_read_lat", "ib_write_bw"], &job(runs))?;
        Ok(Self { runs, dir, image, tools: accepted::tools()?, before: Accepted::read(Utf8Path::new(ACCEPTED))? })
    }

    fn count(&self, timeout: u32) -> Result<Vec<Counted>> {
        let console = self.dir.join("console.log");
        count(&machine::boot(&self.image, &console, Clock::Instructions, timeout)?, self.runs)
    }

    /// Why nothing is compared, if so.
    fn incomparable(&self) -> Option<String> {
        let Some(before) = &self.before else { return Some(format!("there is no {ACCEPTED}")) };
        let changed = self.tools.iter().filter_map(|(name, now)| {
            let then = before.tools.get(name).map_or("nothing", String::as_str);
            (then != now).then(|| format!("{name} was {then}, is {now}"))
        });
        let changed = changed.collect::<Vec<_>>().join("; ");
        (!changed.is_empty()).then(|| format!("it belongs to other tools ({changed})"))
    }

    fn accepted(&self, counted: &Counted) -> Option<f64> {
        let before = self.before.as_ref().filter(|_| self.incomparable().is_none())?;
        before.instructions.get(counted.case.name).copied()
    }

    fn grown(&self, counted: &Counted) -> bool {
        self.accepted(counted).is_some_and(|accepted| counted.ours > accepted * (1.0 + SLACK))
    }

    fn table(&self, counted: &[Counted]) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        let header =
            ["instructions an operation", "ours", "peer", "peer is", "ratio", "aim", "", "accepted", "change", ""];
        table.set_header(header);
        for it in counted {
            let Counted { case, ours, peer } = it;
            let accepted = self.accepted(it);
            table.add_row([
                case.name.to_owned(),
                format!("{ours:.0}"),
                format!("{peer:.0}"),
                case.peer_name.to_owned(),
                format!("{:.3}", ours / peer),
                match case.aim {
                    Aim::Ratio(most) => format!("ratio <= {most}"),
                    Aim::Extra(most) => format!("{:+.0} <= +{most}", ours - peer),
                },
                if it.missed() { "MISSED" } else { "ok" }.to_owned(),
                accepted.map_or("-".to_owned(), |accepted| format!("{accepted:.0}")),
                accepted.map_or("-".to_owned(), |accepted| format!("{:+.2}%", (ours / accepted - 1.0) * 100.0)),
                if self.grown(it) { "GROWN" } else { "" }.to_owned(),
            ]);
        }
        for column in table.column_iter_mut().filter(|column| matches!(column.index, 1 | 2 | 4 | 7 | 8)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        table
    }
}

impl Counted {
    fn missed(&self) -> bool {
        match self.case.aim {
            Aim::Ratio(most) => self.ours / self.peer > most,
            Aim::Extra(most) => self.ours - self.peer > most,
        }
    }
}

fn job(runs: Runs) -> String {
    let (mut job, mut port) = (SHELL.to_owned(), 20_000);
    for case in &CASES {
        for run in 0..runs.ours.max(runs.peer) {
            for (side, who, _) in case.sides(runs).into_iter().filter(|(_, _, runs)| run < *runs) {
                job += &case.line(who, &format!("{side} {}", case.name), port);
                port += 1;
            }
        }
    }
    job
}

fn count(console: &str, runs: Runs) -> Result<Vec<Counted>> {
    let outcomes = results::outcomes(console);
    let least = |case: &Case, side: &str, wanted: usize| {
        let label = format!("{side} {}", case.name);
        let runs = outcomes.iter().filter(|outcome| outcome.label == label).map(|outcome| match &outcome.figures {
            Ok(figures) => Ok(case.instructions(figures)),
            Err(error) => Err(anyhow!("{label}: {error:#}")),
        });
        let runs = runs.collect::<Result<Vec<_>>>()?;
        ensure!(
            runs.len() == wanted,
            "{label}: {} of {wanted} runs, the guest's time was too short:\n{console}",
            runs.len()
        );
        Ok(runs.into_iter().fold(f64::INFINITY, f64::min))
    };
    let counted =
        |case| Ok(Counted { case, ours: least(case, "ours", runs.ours)?, peer: least(case, "peer", runs.peer)? });
    CASES.iter().map(counted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setup(accepted: f64, kernel: &str) -> Setup {
        let tools = |kernel: &str| [("kernel".to_owned(), kernel.to_owned())].into();
        let instructions = CASES.iter().map(|case| (case.name.to_owned(), accepted)).collect();
        let image = Image { kernel: "".into(), initramfs: "".into() };
        let before = Some(Accepted { tools: tools("6.1"), instructions });
        Setup { runs: COMPARED, dir: "".into(), image, tools: tools(kernel), before }
    }

    #[test]
    fn what_grows_by_more_than_the_slack_is_found_with_the_same_tools_alone() {
        let counted = |ours| Counted { case: &CASES[0], ours, peer: 1000.0 };
        assert!(!setup(1000.0, "6.1").grown(&counted(1019.0)));
        assert!(setup(1000.0, "6.1").grown(&counted(1021.0)));
        assert!(!setup(1000.0, "6.2").grown(&counted(2000.0)));
        assert!(setup(1000.0, "6.2").incomparable().unwrap().contains("kernel was 6.1, is 6.2"));
    }

    #[test]
    fn the_least_of_all_runs_counts() {
        let line = |p50: f64| format!(r#"{{"p50":{p50},"p99":1,"MBps":1,"ops":{}}}"#, 1e6 / p50);
        let mut console = String::new();
        for case in &CASES {
            for run in 0..RUNS {
                for (side, least) in [("ours", 15.0), ("peer", 10.0)] {
                    let line = line(least + ((run + 2) % RUNS) as f64);
                    console += &format!("guest: case {side} {}\n{line}\nguest: status 0\n", case.name);
                }
            }
        }
        let counted = count(&console, COMPARED).unwrap();
        assert_eq!(counted.len(), CASES.len());
        assert!(counted.iter().all(|it| (it.ours.round(), it.peer.round()) == (15000.0, 10000.0)));
        assert!(count(&console.replacen("status 0", "status 1", 1), COMPARED).is_err(), "a run that failed is no run");
        let short = &console[..console.len() / 2];
        assert!(count(short, COMPARED).is_err(), "runs that are missing are told");
    }

    #[test]
    fn each_side_runs_as_often_as_asked() {
        let job = job(CHECKED);
        for case in &CASES {
            let runs = |side| job.matches(&format!("'{side} {}'", case.name)).count();
            assert_eq!((runs("ours"), runs("peer")), (RUNS, 1), "{}:\n{job}", case.name);
        }
    }
}
