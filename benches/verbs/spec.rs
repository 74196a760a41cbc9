//! What is to be measured, in the words that every program beside this one understands too.

use std::str::FromStr;

use anyhow::{Context, Error, ensure};
use clap::ValueEnum;

/// `op:size:in_flight:count`.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    pub op: Op,
    /// Bytes.
    pub size: usize,
    pub in_flight: usize,
    pub count: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Op {
    /// A message there and one back; the latency is half of that.
    SendLat,
    WriteLat,
    ReadLat,
    /// Writes, for their throughput.
    WriteBw,
}

/// As deep as a connection's send queue is by default.
const MOST_IN_FLIGHT: usize = 128;

impl FromStr for Spec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let parts: Vec<_> = text.split(':').collect();
        let [op, size, in_flight, count] = parts[..] else { anyhow::bail!("not op:size:in_flight:count") };
        let op = Op::from_str(op, false).map_err(Error::msg)?;
        let number = |text: &str| text.parse().with_context(|| format!("{text:?} is not a number"));
        let spec = Self { op, size: number(size)?, in_flight: number(in_flight)?, count: number(count)? };
        ensure!(spec.size > 0 && spec.count > 0, "size and count are at least 1");
        ensure!((1..=MOST_IN_FLIGHT).contains(&spec.in_flight), "1 to {MOST_IN_FLIGHT} can be in flight");
        Ok(spec)
    }
}

impl Spec {
    pub fn name(&self) -> String {
        self.op.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// Operations that are not counted.
    pub fn warm_up(&self) -> usize {
        (self.count / 10).max(50)
    }

    /// Memory that a peer must expose for it.
    pub fn exposed(&self) -> usize {
        if self.op == Op::SendLat { 0 } else { self.size * self.in_flight }
    }
}
