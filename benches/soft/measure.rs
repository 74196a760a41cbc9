//! Clocks and meters of a client.

use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use procfs::process::Process;

use crate::job::{Found, Pace, Usage};

/// What this process uses from now on.
pub struct Meter {
    since: Instant,
    before: (Duration, u64),
}

impl Meter {
    pub fn start() -> Result<Self> {
        Ok(Self { before: used()?, since: Instant::now() })
    }

    pub fn read(&self) -> Result<Usage> {
        let (wall, (cpu, switches)) = (self.since.elapsed(), used()?);
        Ok(Usage { wall, cpu: cpu.saturating_sub(self.before.0), switches: switches.saturating_sub(self.before.1) })
    }
}

/// CPU time and voluntary context switches of the threads that live. To the nanosecond as of each thread's last switch:
/// `getrusage` counts in ticks, which is too coarse for an idle process.
fn used() -> Result<(Duration, u64)> {
    let (mut cpu, mut switches) = (Duration::ZERO, 0);
    for task in Process::myself()?.tasks()? {
        let task = task?;
        cpu += Duration::from_nanos(task.schedstat()?.sum_exec_runtime);
        switches += task.status()?.voluntary_ctxt_switches.unwrap_or(0);
    }
    Ok((cpu, switches))
}

/// Times exchanges one by one, after a warm-up.
pub struct Laps {
    pace: Pace,
    /// What is told of a lap is its time divided by this.
    parts: u32,
    since: Instant,
    last: Instant,
    meter: Option<Meter>,
    nanoseconds: Histogram<u64>,
}

impl Laps {
    pub fn start(pace: &Pace) -> Result<Self> {
        let now = Instant::now();
        // From a nanosecond to ten seconds, to three digits.
        let nanoseconds = Histogram::new_with_bounds(1, 10_000_000_000, 3)?;
        Ok(Self { pace: *pace, parts: 1, since: now, last: now, meter: None, nanoseconds })
    }

    /// Each lap is so many times what is to be told: both ways of a round trip, or operations too short to be timed alone.
    pub fn of(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// An exchange has just ended. Tells whether there is time for another.
    pub fn lap(&mut self) -> Result<bool> {
        let now = Instant::now();
        if self.meter.is_some() {
            self.nanoseconds.saturating_record((now - self.last).as_nanos() as u64);
            self.last = now;
            return Ok(now - self.since < self.pace.measured);
        }
        if now - self.since >= self.pace.warm_up {
            self.meter = Some(Meter::start()?);
            self.since = Instant::now();
        }
        self.last = Instant::now();
        Ok(true)
    }

    pub fn found(&self) -> Result<Found> {
        let usage = self.meter.as_ref().map(Meter::read).transpose()?.unwrap_or_default();
        let microseconds =
            |quantile| Some(self.nanoseconds.value_at_quantile(quantile) as f64 / 1e3 / f64::from(self.parts));
        Ok(Found { value: microseconds(0.5), p99: microseconds(0.99), exchanges: self.nanoseconds.len(), usage })
    }
}

/// A way to move chunks.
pub trait Push {
    /// Moves so many, and resolves when the other side has all of them.
    fn push(&mut self, chunks: u64) -> impl Future<Output = Result<()>> + Send;
}

/// In MB/s.
pub async fn throughput(pace: &Pace, chunk: usize, way: impl Push) -> Result<Found> {
    rate(pace, (pace.warm_up_bytes / chunk).max(1) as u64, chunk as f64 / 1e6, way).await
}

/// In `unit`s of a chunk a second, after so many chunks.
pub async fn rate(pace: &Pace, warm_up: u64, unit: f64, mut way: impl Push) -> Result<Found> {
    let start = Instant::now();
    way.push(warm_up).await?;
    let rate = warm_up as f64 / start.elapsed().as_secs_f64();

    let chunks = ((rate * pace.measured.as_secs_f64()) as u64).max(warm_up);
    let meter = Meter::start()?;
    let start = Instant::now();
    way.push(chunks).await?;
    let elapsed = start.elapsed().as_secs_f64();
    Ok(Found { value: Some(chunks as f64 * unit / elapsed), p99: None, exchanges: chunks, usage: meter.read()? })
}
