//! Clocks, and the line that a measurement ends in.

use std::time::Duration;

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::spec::{Op, Spec};

/// Longer than any operation takes, unless something waited for a timer.
const STALL: Duration = Duration::from_millis(50);

/// Latencies one by one, after a warm-up, and what the process used meanwhile.
pub struct Laps {
    spec: Spec,
    warm_up: usize,
    nanoseconds: Vec<u64>,
    since: u64,
    cpu: u64,
}

impl Laps {
    pub fn start(spec: &Spec) -> Self {
        Self {
            spec: *spec,
            warm_up: spec.warm_up(),
            nanoseconds: Vec::with_capacity(spec.count),
            since: now(),
            cpu: cpu_time(),
        }
    }

    /// One more, which began at `since` and has just ended.
    pub fn lap(&mut self, since: u64) {
        let lap = now() - since;
        if self.warm_up == 0 {
            self.nanoseconds.push(lap);
            return;
        }
        self.warm_up -= 1;
        if self.warm_up == 0 {
            (self.since, self.cpu) = (now(), cpu_time());
        }
    }

    /// A line of JSON on standard output.
    pub fn report(mut self) -> Result<()> {
        let (wall, cpu) = ((now() - self.since) as f64 / 1e9, (cpu_time() - self.cpu) as f64 / 1e9);
        // A message there and one back count as two.
        let ways = if self.spec.op == Op::SendLat { 2.0 } else { 1.0 };
        let microseconds = |nanoseconds: u64| nanoseconds as f64 / 1e3 / ways;
        self.nanoseconds.sort_unstable();
        let count = self.nanoseconds.len();
        let at = |share: f64| self.nanoseconds.get((count as f64 * share) as usize).copied().map(microseconds);
        let max = *self.nanoseconds.last().context("nothing was measured")?;
        let line = Line {
            r#impl: std::env::var("BENCH_IMPL").unwrap_or_else(|_| "ours".into()),
            op: self.spec.name(),
            size: self.spec.size,
            inflight: self.spec.in_flight,
            n: count,
            p50: at(0.5).unwrap_or_default(),
            p99: at(0.99).unwrap_or_default(),
            max: microseconds(max),
            mean: microseconds(self.nanoseconds.iter().sum()) / count as f64,
            over50ms: self.nanoseconds.iter().filter(|&&lap| u128::from(lap) > STALL.as_nanos()).count(),
            megabytes_per_second: (self.spec.size * count) as f64 / wall / 1e6,
            ops: count as f64 / wall,
            cpu_us_per_op: cpu * 1e6 / count as f64,
            errors: 0,
        };
        println!("{}", serde_json::to_string(&line)?);
        Ok(())
    }
}

/// The fields that the programs beside this one print; times in microseconds.
#[derive(Serialize)]
struct Line {
    r#impl: String,
    op: String,
    size: usize,
    inflight: usize,
    n: usize,
    p50: f64,
    p99: f64,
    max: f64,
    mean: f64,
    over50ms: usize,
    #[serde(rename = "MBps")]
    megabytes_per_second: f64,
    ops: f64,
    cpu_us_per_op: f64,
    errors: usize,
}

/// Nanoseconds. Read as the C loop reads them: std's own clock takes as long as a tenth of a small operation's bookkeeping.
pub fn now() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Nanoseconds of all threads of this process, those that have ended included.
fn cpu_time() -> u64 {
    nanoseconds(ClockId::ProcessCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
