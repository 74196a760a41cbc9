//! One line of JSON for each spec.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::spec::Spec;

/// Times one way, in microseconds.
#[derive(Serialize)]
struct Line {
    r#impl: &'static str,
    op: &'static str,
    size: usize,
    inflight: usize,
    n: usize,
    p50: f64,
    p99: f64,
    mean: f64,
}

pub fn print(mut round_trips: Vec<Duration>) -> Result<()> {
    round_trips.sort_unstable();
    let n = round_trips.len();
    let micros = |time: Duration| time.as_nanos() as f64 / 1e3 / 2.0;
    let quantile = |q: f64| micros(round_trips[((n as f64 * q) as usize).min(n - 1)]);
    let mean = micros(round_trips.iter().sum()) / n as f64;
    let (p50, p99) = (quantile(0.5), quantile(0.99));
    let (op, size, inflight) = (Spec::OPERATION, Spec::SIZE, Spec::IN_FLIGHT);
    println!("{}", serde_json::to_string(&Line { r#impl: "iceoryx2", op, size, inflight, n, p50, p99, mean })?);
    Ok(())
}
