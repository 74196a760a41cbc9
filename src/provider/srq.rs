//! Shared receive queues: the device's queue, and which connection each of its queue pairs is.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use smallvec::SmallVec;

use super::{Context, Pd, PostError, ReceiveRequest, mixed, soft, verbs};
use crate::error::Result;
use crate::sync::Mutex;

/// A receive queue that several queue pairs take their receives from. Clones are the same queue.
#[derive(Clone, Debug)]
pub(crate) enum Srq {
    Soft(soft::Srq),
    Verbs(verbs::Srq),
}

impl Srq {
    /// Posts the list with one doorbell.
    pub(crate) fn post(&self, requests: &[ReceiveRequest]) -> std::result::Result<(), PostError> {
        either!(self, inner => inner.post(requests))
    }

    /// Ends the use of the buffers in it, once its queue pairs are gone. Nothing is reported of what was left in it.
    /// `false` when the device refuses, as it does while it has a queue pair of this queue. Idempotent.
    pub(crate) fn destroy(&self) -> bool {
        either!(self, inner => inner.destroy())
    }

    pub(crate) fn roster(&self) -> &Arc<Roster> {
        either!(self, inner => inner.roster())
    }
}

impl Context {
    /// A queue for `depth` receives of up to `max_sge` scatter/gather entries each.
    pub(crate) fn create_srq(&self, pd: &Pd, depth: u32, max_sge: u32) -> Result<Srq> {
        match (self, pd) {
            (Self::Soft(inner), Pd::Soft(pd)) => inner.create_srq(pd, depth, max_sge).map(Srq::Soft),
            (Self::Verbs(_), Pd::Verbs(pd)) => pd.create_srq(depth, max_sge).map(Srq::Verbs),
            _ => Err(mixed("create a shared receive queue")),
        }
    }
}

/// The connections of one shared receive queue, by the numbers of their queue pairs: all that a completion names.
///
/// A queue pair is entered before it can receive, which is before its connection is there, and stays until its last completion was
/// taken. Its number may go to the next one a moment earlier than that; since the next one has yet to be connected, what is
/// still to come is the older one's.
#[derive(Debug, Default)]
pub(crate) struct Roster(Mutex<HashMap<u32, SmallVec<[u32; 1]>>>);

impl Roster {
    /// Enters a queue pair, under a fresh id.
    pub(crate) fn seat(self: &Arc<Self>, number: u32) -> Seat {
        let id = next_connection_id();
        self.0.lock().entry(number).or_default().push(id);
        Seat { roster: self.clone(), number, id }
    }

    /// The connection whose queue pair has this number.
    pub(crate) fn find(&self, number: u32) -> Option<u32> {
        self.0.lock().get(&number)?.first().copied()
    }
}

/// A queue pair's place in a [`Roster`]; dropping it leaves.
#[derive(Debug)]
pub(crate) struct Seat {
    roster: Arc<Roster>,
    number: u32,
    id: u32,
}

impl Seat {
    pub(crate) fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.roster.0.lock();
        if let Some(ids) = seats.get_mut(&self.number) {
            ids.retain(|id| *id != self.id);
            if ids.is_empty() {
                seats.remove(&self.number);
            }
        }
    }
}

/// What tells connections apart within the process; never 0. Four billion later a number comes again.
pub(crate) fn next_connection_id() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    loop {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        if id != 0 {
            return id;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_number_is_the_older_ones() {
        let roster = Arc::new(Roster::default());
        let first = roster.seat(7);
        let second = roster.seat(7);
        let other = roster.seat(8);
        assert_ne!(first.id(), second.id());
        assert_eq!((roster.find(7), roster.find(8), roster.find(9)), (Some(first.id()), Some(other.id()), None));
        drop(first);
        assert_eq!(roster.find(7), Some(second.id()));
        drop(second);
        assert_eq!(roster.find(7), None);
        drop(other);
        assert!(roster.0.lock().is_empty());
    }
}
