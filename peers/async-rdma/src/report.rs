//! One line of JSON for each spec.

use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::resource::{getrusage, UsageWho};
use serde::Serialize;

use crate::settings;
use crate::spec::{Op, Spec};

/// Times in microseconds; `MBps` in 10^6 bytes.
#[derive(Serialize)]
#[allow(non_snake_case)]
struct Line {
    r#impl: String,
    op: String,
    size: usize,
    inflight: usize,
    n: usize,
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
    mean: f64,
    over50ms: usize,
    MBps: f64,
    ops: f64,
    cpu_us_per_op: f64,
    errors: usize,
}

/// When measuring began, and what this process had used of the processors by then.
pub struct Started {
    at: Instant,
    processor: f64,
}

impl Started {
    pub fn now() -> Result<Self> {
        Ok(Self { at: Instant::now(), processor: processor()? })
    }

    /// `errors`: how often the library refused an operation that was then tried again.
    pub fn report(&self, spec: &Spec, mut times: Vec<Duration>, errors: usize) -> Result<()> {
        let (wall, processor) = (micros(self.at.elapsed()), processor()? - self.processor);
        // As ib_send_lat does.
        if matches!(spec.op, Op::SendLat | Op::SendRawLat) {
            times.iter_mut().for_each(|time| *time /= 2);
        }
        times.sort();
        let n = times.len();
        let quantile = |q: f64| micros(times[((n as f64 * q) as usize).min(n - 1)]);
        let line = Line {
            r#impl: settings::variable("BENCH_IMPL", "async-rdma"),
            op: spec.op.to_string(),
            size: spec.size,
            inflight: spec.inflight,
            n,
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: quantile(1.0),
            mean: micros(times.iter().sum()) / n as f64,
            over50ms: times.iter().filter(|time| time.as_millis() >= 50).count(),
            MBps: (spec.size * n) as f64 / wall,
            ops: n as f64 / wall * 1e6,
            cpu_us_per_op: processor / n as f64,
            errors,
        };
        println!("{}", serde_json::to_string(&line)?);
        Ok(())
    }
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn processor() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let micros = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 * 1e6 + time.tv_usec() as f64;
    Ok(micros(usage.user_time()) + micros(usage.system_time()))
}
