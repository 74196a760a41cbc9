//! The rounds.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use procfs::process::Process;
use procfs::{CurrentSI, KernelStats};
use serde::Serialize;

use crate::available::Available;
use crate::job::Subject;
use crate::plan::{Peer, Row};
use crate::summary::Summary;
use crate::trial::Trial;
use crate::{Settings, place, plan, report, trial};

const ROUNDS: u32 = 5;
const QUICK_ROUNDS: u32 = 2;

/// Ours and the peer's, back to back.
#[derive(Debug, Serialize)]
pub struct Round {
    pub ours: Trial,
    pub peer: Option<Trial>,
    /// CPUs that other processes kept busy meanwhile.
    pub foreign_cpus: f64,
}

/// What there is to say of a row so far.
pub struct Course {
    pub row: Row,
    pub rounds: Vec<Round>,
    /// Why it has no peer, though it should have.
    pub skipped: Option<&'static str>,
    pub failed: Option<String>,
}

pub fn run(settings: &Settings) -> Result<ExitCode> {
    let rounds = settings.rounds.unwrap_or(if settings.quick { QUICK_ROUNDS } else { ROUNDS });
    let mut courses = courses(settings)?;
    let start = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        for round in 1..=rounds {
            eprintln!("round {round} of {rounds}, {:.0} s so far", start.elapsed().as_secs_f64());
            for course in &mut courses {
                course.advance(round, settings.quick).await?;
            }
        }
        anyhow::Ok(())
    })?;
    let summaries: Vec<_> = courses.iter().filter_map(Summary::of).collect();
    report::print(&courses, &summaries, rounds, start.elapsed());
    report::write(&summaries, &settings.out)?;
    let failed = courses.iter().any(|course| course.failed.is_some());
    let missed = settings.strict && summaries.iter().any(Summary::missed);
    Ok(if failed || missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn courses(settings: &Settings) -> Result<Vec<Course>> {
    let mut rows = plan::rows();
    if let Some(only) = &settings.only {
        let mut names: Vec<_> = rows.iter().map(|row| row.name.clone()).collect();
        names.dedup();
        rows.retain(|row| row.name.contains(only));
        ensure!(!rows.is_empty(), "no row is called {only:?}; there are:\n  {}", names.join("\n  "));
    }
    let (cpus, available) = (place::cpus()?.len(), Available::look());
    let course = |row: Row| {
        let one_cpu = row.placement == plan::Placement::TwoCores && cpus < 2;
        let skipped = row.peer.and_then(|peer| available.lacks(peer));
        let skipped = skipped.or(one_cpu.then_some("this process may use one CPU only"));
        Course { row, rounds: Vec::new(), skipped, failed: None }
    };
    Ok(rows.into_iter().map(course).collect())
}

impl Course {
    /// One more round, unless one has failed: the others shall have their time.
    async fn advance(&mut self, round: u32, quick: bool) -> Result<()> {
        let Some(cpus) = self.row.placement.on(&place::cpus()?) else { return Ok(()) };
        if self.failed.is_some() {
            return Ok(());
        }
        let ours = Peer::Subject(Subject::Ours(self.row.ours));
        let peer = self.row.peer.filter(|_| self.skipped.is_none());
        let before = Busy::now()?;
        let trials = async {
            anyhow::Ok(match peer {
                None => (trial::run(&self.row, ours, cpus, quick).await?, None),
                // The order alternates, so that neither is always the one that comes second.
                Some(peer) if round % 2 == 0 => {
                    let peer = trial::run(&self.row, peer, cpus, quick).await?;
                    (trial::run(&self.row, ours, cpus, quick).await?, Some(peer))
                }
                Some(peer) => {
                    let ours = trial::run(&self.row, ours, cpus, quick).await?;
                    (ours, Some(trial::run(&self.row, peer, cpus, quick).await?))
                }
            })
        };
        match trials.await {
            Ok((ours, peer)) => self.rounds.push(Round { ours, peer, foreign_cpus: before.foreign_since()? }),
            Err(error) => self.failed = Some(format!("{error:#}")),
        }
        Ok(())
    }
}

/// How busy the machine is, and with what.
struct Busy {
    at: Instant,
    all: u64,
    /// This process and the children that have ended.
    own: u64,
}

impl Busy {
    fn now() -> Result<Self> {
        let total = KernelStats::current()?.total;
        let process = Process::myself()?.stat()?;
        let interrupts = total.irq.unwrap_or(0) + total.softirq.unwrap_or(0) + total.steal.unwrap_or(0);
        Ok(Self {
            at: Instant::now(),
            all: total.user + total.nice + total.system + interrupts,
            own: process.utime + process.stime + (process.cutime + process.cstime).unsigned_abs(),
        })
    }

    fn foreign_since(&self) -> Result<f64> {
        let now = Self::now()?;
        let ticks = (now.all - self.all).saturating_sub(now.own - self.own) as f64;
        Ok(ticks / procfs::ticks_per_second() as f64 / (now.at - self.at).as_secs_f64())
    }
}
