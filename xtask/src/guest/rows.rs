//! The rows of `cargo xtask guest bench`: what is compared with what, and what is aimed at.

use std::fmt;

use super::pairs::{Contender, Spec};
use super::results::Figures;

/// The library as a user gets it who sets nothing but a current-thread runtime.
pub const OURS: Contender = Contender::Ours("MODE=adaptive");
const OURS_EVENT: Contender = Contender::Ours("MODE=event");
const OURS_TWO_WORKERS: Contender = Contender::Ours("MODE=adaptive WORKERS=2");
const OURS_ONE_WORKER: Contender = Contender::Ours("MODE=adaptive WORKERS=1");
pub const C_EVENT: Contender = Contender::C("MODE=event");
const C_POLL: Contender = Contender::C("MODE=poll");
const PERFTEST: Contender = Contender::Perftest("");
const PERFTEST_EVENT: Contender = Contender::Perftest("-e");

/// A spec and all who run it, back to back in every round.
pub struct Group {
    pub spec: Spec,
    pub contenders: &'static [Contender],
}

/// Ours beside a peer.
pub struct Row {
    pub name: &'static str,
    /// Which of [`groups`].
    pub group: usize,
    pub ours: Contender,
    pub peer: Option<Contender>,
    pub figure: Figure,
    pub aim: Option<Aim>,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Figure {
    /// The median latency.
    Latency,
    Throughput,
    Cpu,
    /// Operations above 50 ms, over all rounds.
    Stalls,
}

#[derive(Clone, Copy)]
pub enum Aim {
    RatioAtMost(f64),
    RatioAtLeast(f64),
    None,
}

const SMALL: &[Contender] =
    &[OURS, C_EVENT, OURS_EVENT, C_POLL, PERFTEST, PERFTEST_EVENT, Contender::AsyncRdma, OURS_TWO_WORKERS];
const WRITE: &[Contender] = &[OURS, C_EVENT, OURS_EVENT, C_POLL, PERFTEST, Contender::AsyncRdma, OURS_TWO_WORKERS];
const STREAM: &[Contender] = &[OURS_ONE_WORKER, PERFTEST, C_POLL, Contender::AsyncRdma];

/// `quick`: a tenth of the operations, which shows that everything works.
pub fn groups(quick: bool) -> Vec<Group> {
    let spec =
        |op, size, in_flight, count: u32| Spec { op, size, in_flight, count: if quick { count / 10 } else { count } };
    vec![
        Group { spec: spec("send_lat", 8, 1, 2000), contenders: SMALL },
        Group { spec: spec("write_lat", 8, 1, 4000), contenders: WRITE },
        Group { spec: spec("read_lat", 8, 1, 2000), contenders: SMALL },
        Group { spec: spec("write_bw", 4096, 1, 3200), contenders: STREAM },
        Group { spec: spec("write_bw", 4096, 16, 6400), contenders: STREAM },
        Group { spec: spec("write_bw", 4096, 64, 6400), contenders: STREAM },
    ]
}

pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (group, name, most) in [(0, "send/receive 8 B, one way", 1.2), (1, "write 8 B", 1.15), (2, "read 8 B", 1.15)] {
        let mut latency = |ours, peer, aim| {
            rows.push(Row { name, group, ours, peer: Some(peer), figure: Figure::Latency, aim });
        };
        latency(OURS, C_EVENT, Some(Aim::RatioAtMost(most)));
        latency(OURS, C_POLL, None);
        latency(OURS, PERFTEST, None);
        if group != 1 {
            latency(OURS, PERFTEST_EVENT, None);
        }
        latency(OURS, Contender::AsyncRdma, None);
        latency(OURS_EVENT, C_EVENT, None);
        latency(OURS_TWO_WORKERS, C_EVENT, None);
    }
    for (name, peer) in [("round trips above 50 ms", None), ("the same of async-rdma", Some(Contender::AsyncRdma))] {
        let aim = if peer.is_none() { Some(Aim::None) } else { None };
        rows.push(Row { name, group: 0, ours: OURS, peer, figure: Figure::Stalls, aim });
    }
    let aim = Some(Aim::RatioAtMost(1.3));
    let name = "client's CPU a write of 8 B";
    rows.push(Row { name, group: 1, ours: OURS, peer: Some(C_EVENT), figure: Figure::Cpu, aim });
    rows.push(Row { name, group: 1, ours: OURS, peer: Some(Contender::AsyncRdma), figure: Figure::Cpu, aim: None });
    for (group, name) in
        [(3, "write 4 KiB, 1 in flight"), (4, "write 4 KiB, 16 in flight"), (5, "write 4 KiB, 64 in flight")]
    {
        for (peer, aim) in [(PERFTEST, Some(Aim::RatioAtLeast(0.95))), (C_POLL, None), (Contender::AsyncRdma, None)] {
            rows.push(Row { name, group, ours: OURS_ONE_WORKER, peer: Some(peer), figure: Figure::Throughput, aim });
        }
    }
    rows
}

impl Figure {
    pub fn of(self, figures: &Figures) -> Option<f64> {
        match self {
            Self::Latency => Some(figures.p50),
            Self::Throughput => Some(figures.megabytes),
            Self::Cpu => figures.cpu,
            Self::Stalls => figures.over_50_ms.map(|count| count as f64),
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            Self::Latency => "us",
            Self::Throughput => "MB/s",
            Self::Cpu => "us of CPU",
            Self::Stalls => "operations",
        }
    }
}

impl Aim {
    /// `None` where it cannot be told.
    pub fn met(self, ours: f64, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::RatioAtMost(most) => Some(ratio? <= most),
            Self::RatioAtLeast(least) => Some(ratio? >= least),
            Self::None => Some(ours == 0.0),
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RatioAtMost(most) => write!(f, "ratio <= {most}"),
            Self::RatioAtLeast(least) => write!(f, "ratio >= {least}"),
            Self::None => f.write_str("none"),
        }
    }
}

impl Contender {
    /// What the table calls it.
    pub fn name(self, spec: &Spec) -> String {
        match self {
            Self::Ours(settings) => format!("ours, {}", settings.replace("MODE=", "").replace("WORKERS=", "workers ")),
            Self::C(settings) => settings.replace("MODE=", "C, "),
            Self::Perftest(options) => {
                let depth = if spec.op == "write_bw" { format!(" -t {}", spec.in_flight) } else { String::new() };
                format!("{}{depth} {options}", Self::tool(spec)).trim_end().to_owned()
            }
            Self::AsyncRdma => "async-rdma".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_about_contenders_that_run() {
        let groups = groups(false);
        for row in rows() {
            let runs = |who: Contender| groups[row.group].contenders.contains(&who);
            assert!(runs(row.ours) && row.peer.is_none_or(runs), "{}", row.name);
        }
    }
}
