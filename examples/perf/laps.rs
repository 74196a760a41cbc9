//! Times of a row's operations.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;
use tokio_rdma::{SourceBuffer, TargetBuffer};

use crate::flight::{Flight, Maker, Slot};
use crate::plan::Pace;

/// Latencies, and how long it took in all.
pub struct Laps {
    nanoseconds: Histogram<u64>,
    pub elapsed: Duration,
}

impl Laps {
    /// Goes on with all slots at a time, until the pace is done and all have come back.
    pub async fn run<B>(maker: &mut Maker<'_>, slots: &mut Vec<Slot<B>>, pace: Pace) -> Result<Self>
    where
        B: SourceBuffer + TargetBuffer,
    {
        // Up to an hour in nanoseconds, with three digits.
        let mut nanoseconds = Histogram::new_with_bounds(1, 3_600_000_000_000, 3)?;
        let mut flying: VecDeque<(Instant, Flight<B>)> = VecDeque::with_capacity(slots.len());
        let start = Instant::now();
        let (mut now, mut posted) = (start, 0);
        loop {
            while pace.goes_on(now - start, posted) {
                let Some(slot) = slots.pop() else { break };
                let since = Instant::now();
                flying.push_back((since, maker.post(slot)?));
                posted += 1;
            }
            let Some((since, flight)) = flying.pop_front() else { break };
            slots.push(flight.land().await?);
            now = Instant::now();
            nanoseconds.saturating_record((now - since).as_nanos() as u64);
        }
        Ok(Self { nanoseconds, elapsed: now - start })
    }

    pub fn count(&self) -> u64 {
        self.nanoseconds.len()
    }

    /// In microseconds; 0 is the shortest and 1 the longest.
    pub fn quantile(&self, quantile: f64) -> f64 {
        self.nanoseconds.value_at_quantile(quantile) as f64 / 1e3
    }
}

impl Pace {
    /// How long it may take, of which so much is not its own.
    pub fn most(self, limit: Duration) -> Duration {
        match self {
            Self::For(duration) => duration + limit,
            Self::Count(_) => Duration::MAX,
        }
    }

    fn goes_on(self, elapsed: Duration, posted: u64) -> bool {
        match self {
            Self::For(duration) => elapsed < duration,
            Self::Count(count) => posted < count,
        }
    }
}
