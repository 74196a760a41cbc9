//! Who computes which ticket, and when a step may be taken. No I/O: events go in, decisions come out.
//!
//! One rule makes both modes. A step applies all gradients that have arrived, and may be taken when afterwards no worker that still computes
//! would be more than `staleness` steps behind. So no gradient is ever applied that is older than that. With 0 a step
//! waits for every worker: synchronous training. With more, a fast worker goes on while a slow one computes, and waits only at the bound.
//!
//! A ticket whose worker has left goes to the next one that is free: each is applied exactly once, whoever dies.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail, ensure};

use crate::wire::Work;

#[derive(Debug)]
pub struct Schedule {
    staleness: u64,
    /// Steps taken.
    version: u64,
    /// The first ticket that was never given out.
    next: u64,
    /// The first ticket that does not exist.
    end: u64,
    /// Tickets that came back.
    returned: BTreeSet<u64>,
    /// Gradients that arrived, by ticket, with the version that they were computed with.
    arrived: BTreeMap<u64, u64>,
    workers: BTreeMap<u32, Place>,
    /// No ticket is given out before so many are there.
    quorum: usize,
    stalest: u64,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Idle,
    /// Since this version.
    Computing {
        ticket: u64,
        since: u64,
    },
    /// Its gradient waits for a step.
    Delivered {
        ticket: u64,
    },
}

/// How far a training has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    pub version: u64,
    pub next: u64,
    /// Tickets below `next` that were not applied.
    pub due: Vec<u64>,
}

impl Schedule {
    /// Goes on from a position up to the ticket `end`.
    pub fn new(position: Position, end: u64, staleness: u64, quorum: usize) -> Self {
        let Position { version, next, due } = position;
        Self {
            staleness,
            version,
            next,
            end,
            returned: due.into_iter().collect(),
            arrived: BTreeMap::new(),
            workers: BTreeMap::new(),
            quorum,
            stalest: 0,
        }
    }

    pub fn join(&mut self, worker: u32) {
        self.workers.insert(worker, Place::Idle);
        if self.workers.len() >= self.quorum {
            self.quorum = 0;
        }
    }

    /// A gradient that it delivered stays.
    pub fn leave(&mut self, worker: u32) {
        if let Some(Place::Computing { ticket, .. }) = self.workers.remove(&worker) {
            self.returned.insert(ticket);
        }
    }

    /// Takes note of a gradient.
    pub fn deliver(&mut self, worker: u32, ticket: u64, base: u64) -> Result<()> {
        let Some(place) = self.workers.get_mut(&worker) else { bail!("worker {worker} is not known") };
        let Place::Computing { ticket: given, since } = *place else { bail!("worker {worker} has no ticket") };
        ensure!(ticket == given, "a gradient for ticket {ticket} instead of {given}");
        let version = self.version;
        ensure!((since..=version).contains(&base), "a gradient of version {base}, not of {since} to {version}");
        *place = Place::Delivered { ticket };
        self.arrived.insert(ticket, base);
        Ok(())
    }

    /// Takes a step if one may be taken: the tickets whose gradients it applies, in order.
    pub fn step(&mut self) -> Option<Vec<u64>> {
        let too_far = |place: &Place| match place {
            Place::Computing { since, .. } => self.version + 1 - since > self.staleness,
            Place::Idle | Place::Delivered { .. } => false,
        };
        if self.arrived.is_empty() || self.workers.values().any(too_far) {
            return None;
        }
        let applied = std::mem::take(&mut self.arrived);
        self.stalest = applied.values().map(|base| self.version - base).fold(self.stalest, u64::max);
        self.version += 1;
        let delivered = |place: &&mut Place| matches!(place, Place::Delivered { .. });
        self.workers.values_mut().filter(delivered).for_each(|place| *place = Place::Idle);
        Some(applied.into_keys().collect())
    }

    /// Gives tickets to workers that have nothing to do.
    pub fn assign(&mut self) -> Vec<(u32, Work)> {
        if self.quorum > 0 {
            return Vec::new();
        }
        let mut given = Vec::new();
        for (worker, place) in self.workers.iter_mut().filter(|(_, place)| **place == Place::Idle) {
            let ticket = match self.returned.pop_first() {
                Some(ticket) => ticket,
                None if self.next < self.end => {
                    self.next += 1;
                    self.next - 1
                }
                None => break,
            };
            *place = Place::Computing { ticket, since: self.version };
            given.push((*worker, Work { ticket, version: self.version }));
        }
        given
    }

    /// Where a training goes on that has nothing but the parameters of the last step.
    pub fn position(&self) -> Position {
        let mut due: Vec<u64> = self.due().collect();
        due.sort_unstable();
        Position { version: self.version, next: self.next, due }
    }

    /// Tickets applied.
    pub fn applied(&self) -> u64 {
        self.next - self.due().count() as u64
    }

    pub fn is_finished(&self) -> bool {
        self.applied() >= self.end
    }

    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// How many workers the first ticket still waits for; 0 once they were there.
    pub fn quorum(&self) -> usize {
        self.quorum
    }

    pub fn version(&self) -> u64 {
        self.version
    }

    /// How many steps the oldest gradient that was applied lay behind.
    pub fn stalest(&self) -> u64 {
        self.stalest
    }

    /// Tickets that were given out and not applied, each once, in any order.
    fn due(&self) -> impl Iterator<Item = u64> {
        let with_workers = self.workers.values().filter_map(|place| match place {
            Place::Computing { ticket, .. } => Some(ticket),
            // Is among the arrived ones, also when its worker has left.
            Place::Idle | Place::Delivered { .. } => None,
        });
        self.returned.iter().chain(self.arrived.keys()).chain(with_workers).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn start() -> Position {
        Position { version: 0, next: 0, due: Vec::new() }
    }

    #[test]
    fn a_synchronous_step_waits_for_all() {
        let mut schedule = Schedule::new(start(), 10, 0, 2);
        schedule.join(1);
        assert!(schedule.assign().is_empty(), "the second one is missing");
        schedule.join(2);
        let work = |ticket, version| Work { ticket, version };
        assert_eq!(schedule.assign(), [(1, work(0, 0)), (2, work(1, 0))]);
        schedule.deliver(2, 1, 0).unwrap();
        assert_eq!(schedule.step(), None);
        assert!(schedule.assign().is_empty());
        schedule.deliver(1, 0, 0).unwrap();
        assert_eq!(schedule.step(), Some(vec![0, 1]));
        assert_eq!(schedule.assign(), [(1, work(2, 1)), (2, work(3, 1))]);
        // One that dies holds nobody up, and its ticket goes to the next one.
        schedule.deliver(1, 2, 1).unwrap();
        schedule.leave(2);
        assert_eq!(schedule.step(), Some(vec![2]));
        assert_eq!(schedule.assign(), [(1, work(3, 2))]);
    }

    #[test]
    fn what_nobody_asked_for_is_refused() {
        let mut schedule = Schedule::new(start(), 10, 0, 1);
        assert!(schedule.deliver(1, 0, 0).is_err());
        schedule.join(1);
        assert!(schedule.deliver(1, 0, 0).is_err());
        schedule.assign();
        assert!(schedule.deliver(1, 1, 0).is_err());
        assert!(schedule.deliver(1, 0, 1).is_err());
        schedule.deliver(1, 0, 0).unwrap();
        assert!(schedule.deliver(1, 0, 0).is_err());
    }

    proptest! {
        /// Whatever workers do, and whenever the server begins anew from a position: each ticket is applied once, and none too late.
        #[test]
        fn every_ticket_is_applied_once_and_none_too_late(
            staleness in 0u64..5,
            events in prop::collection::vec((0u32..6, 0u8..8), 0..300),
        ) {
            const END: u64 = 40;
            let mut schedule = Schedule::new(start(), END, staleness, 1);
            let mut working = HashMap::new();
            let mut applied = Vec::new();
            let mut fresh = 0;
            // At last a single worker does all that is left.
            let rest = std::iter::repeat_n((0, 9), 2 * END as usize + 20);
            for (which, event) in events.into_iter().chain(rest) {
                let mut ids: Vec<u32> = schedule.workers.keys().copied().collect();
                let chosen = ids.get(which as usize % ids.len().max(1)).copied();
                match (event, chosen) {
                    (0, _) | (9, None) => {
                        fresh += 1;
                        schedule.join(fresh);
                    }
                    (1, Some(id)) => schedule.leave(id),
                    (2, _) => {
                        // What is on disk is all that is left.
                        schedule = Schedule::new(schedule.position(), END, staleness, 1);
                        working.clear();
                    }
                    (9, Some(_)) if ids.len() > 1 => schedule.leave(ids.swap_remove(0)),
                    (_, Some(id)) => {
                        if let Some(Work { ticket, version }) = working.remove(&id) {
                            schedule.deliver(id, ticket, version).unwrap();
                        }
                    }
                    (_, None) => {}
                }
                while let Some(tickets) = schedule.step() {
                    applied.extend(tickets);
                }
                working.extend(schedule.assign());
                prop_assert!(schedule.stalest() <= staleness);
                prop_assert_eq!(applied.len() as u64, schedule.applied());
            }
            applied.sort_unstable();
            prop_assert!(applied.into_iter().eq(0..END));
            prop_assert!(schedule.is_finished());
        }
    }
}
