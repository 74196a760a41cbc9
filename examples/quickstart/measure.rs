//! Times of one step.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::Result;
use hdrhistogram::Histogram;

/// Latencies of a step's operations, and how long any of them was in flight.
pub struct Times {
    latencies: Histogram<u64>,
    busy: Duration,
}

impl Times {
    pub fn new() -> Self {
        // Up to an hour in nanoseconds, with three digits.
        let latencies = Histogram::new_with_bounds(1, 3_600_000_000_000, 3).expect("these bounds are valid");
        Self { latencies, busy: Duration::ZERO }
    }

    /// Times one operation that runs alone.
    pub async fn time<T>(&mut self, operation: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let output = operation.await;
        self.record(start.elapsed());
        self.busy += start.elapsed();
        output
    }

    pub fn quantile(&self, quantile: f64) -> Duration {
        Duration::from_nanos(self.latencies.value_at_quantile(quantile))
    }

    pub fn busy(&self) -> Duration {
        self.busy
    }

    fn record(&mut self, latency: Duration) {
        self.latencies.saturating_record(latency.as_nanos().try_into().unwrap_or(u64::MAX));
    }
}

/// Runs `count` operations with up to `window` of them in flight: `prepare` makes one, `post` hands it to the device,
/// `done` gets its result. All three see the operations in order.
pub async fn pipelined<F, T, E>(
    count: usize,
    window: usize,
    mut prepare: impl FnMut(usize) -> Result<F>,
    post: impl Fn(&mut F) -> tokio_rdma::Result<()>,
    mut done: impl FnMut(usize, T) -> Result<()>,
) -> Result<Times>
where
    F: Future<Output = std::result::Result<T, E>>,
    anyhow::Error: From<E>,
{
    let mut times = Times::new();
    let mut in_flight: VecDeque<(Instant, F)> = VecDeque::with_capacity(window);
    let (mut next, mut busy_since) = (0, Instant::now());
    for index in 0..count {
        while next < count && in_flight.len() < window {
            let mut operation = prepare(next)?;
            let posted = Instant::now();
            if in_flight.is_empty() {
                busy_since = posted;
            }
            post(&mut operation)?;
            in_flight.push_back((posted, operation));
            next += 1;
        }
        let Some((posted, operation)) = in_flight.pop_front() else { break };
        let output = operation.await?;
        times.record(posted.elapsed());
        if in_flight.is_empty() {
            times.busy += busy_since.elapsed();
        }
        done(index, output)?;
    }
    Ok(times)
}
