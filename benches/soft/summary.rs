//! From rounds to a figure.

use serde::Serialize;

use crate::driver::{Course, Round};
use crate::stats::{median, spread};
use crate::trial::Trial;

/// A row of the report, and of the JSON.
#[derive(Debug, Serialize)]
pub struct Summary<'a> {
    pub name: &'a str,
    pub placement: String,
    /// Medians over the rounds.
    pub ours: f64,
    pub peer: Option<f64>,
    pub peer_name: Option<String>,
    pub unit: &'static str,
    /// `ours / peer`.
    pub ratio: Option<f64>,
    pub rounds: usize,
    /// (max - min) / median over the rounds.
    pub spread: Spread,
    pub aim: Option<String>,
    pub verdict: Option<Verdict>,
    pub per_round: &'a [Round],
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    pub ours: f64,
    pub peer: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    Missed,
    Skipped,
}

impl<'a> Summary<'a> {
    /// `None` for a row without a complete round.
    pub fn of(course: &'a Course) -> Option<Self> {
        let Course { row, rounds, .. } = course;
        let ours: Vec<_> = rounds.iter().map(|round| round.ours.value).collect();
        let peers: Option<Vec<_>> = rounds.iter().map(|round| Some(round.peer.as_ref()?.value)).collect();
        let value = median(&ours)?;
        let peer = peers.as_deref().and_then(median);
        let ratio = peer.map(|peer| value / peer);
        let verdict = row.aim.map(|aim| match aim.met(value, ratio) {
            Some(true) => Verdict::Ok,
            Some(false) => Verdict::Missed,
            None => Verdict::Skipped,
        });
        Some(Self {
            name: &row.name,
            placement: row.placement.to_string(),
            ours: value,
            peer,
            peer_name: row.peer_name(),
            unit: row.unit(),
            ratio,
            rounds: rounds.len(),
            spread: Spread { ours: spread(&ours)?, peer: peers.as_deref().and_then(spread) },
            aim: row.aim.map(|aim| aim.to_string()),
            verdict,
            per_round: rounds,
        })
    }

    pub fn missed(&self) -> bool {
        self.verdict == Some(Verdict::Missed)
    }

    /// The median of something else about our side.
    pub fn median_of(&self, field: impl Fn(&Trial) -> Option<f64>) -> Option<f64> {
        median(&self.per_round.iter().map(|round| field(&round.ours)).collect::<Option<Vec<_>>>()?)
    }

    pub fn foreign_cpus(&self) -> f64 {
        self.per_round.iter().map(|round| round.foreign_cpus).sum::<f64>() / self.per_round.len() as f64
    }
}
