//! A listener's connections that have not ended.

use std::sync::{Arc, Weak};

use crate::completion::pair::QueuePair;
use crate::connection::Connection;
use crate::error::CloseReason;
use crate::sync::Mutex;

/// Fewer than these are not worth looking through for those that have ended.
const FEW: usize = 64;

/// Keeps none of them alive.
#[derive(Debug, Default)]
pub(super) struct OpenConnections(Mutex<Pairs>);

#[derive(Debug, Default)]
struct Pairs {
    pairs: Vec<Weak<QueuePair>>,
    /// Whoever comes now is too late.
    refused: bool,
    /// Length at which those that have ended are thrown out: twice what was left of them the last time.
    full: usize,
}

impl OpenConnections {
    pub(super) fn add(&self, connection: &Connection) {
        let mut open = self.0.lock();
        if open.refused {
            connection.inner.pair.close(CloseReason::Local);
        }
        if open.pairs.len() >= open.full.max(FEW) {
            open.sweep();
            open.full = 2 * open.pairs.len();
        }
        open.pairs.push(Arc::downgrade(&connection.inner.pair));
    }

    pub(super) fn count(&self) -> usize {
        let mut open = self.0.lock();
        open.sweep();
        open.pairs.len()
    }

    /// Resolves when all of them have ended.
    pub(super) async fn ended(&self) {
        while let Some(pair) = self.any() {
            let mut closed = pair.closed();
            drop(pair);
            // An error: the pair is gone.
            let _ = closed.wait_for(Option::is_some).await;
        }
    }

    /// Closes whoever is added from now on.
    pub(super) fn refuse(&self) {
        self.0.lock().refused = true;
    }

    /// Closes all of them, and says how many those were.
    pub(super) async fn close(&self) -> usize {
        let mut count = 0;
        while let Some(pair) = self.any() {
            count += usize::from(pair.close_reason_now().is_none());
            pair.close(CloseReason::Local);
            pair.ended().await;
            // With a NIC each of them takes system calls.
            tokio::task::yield_now().await;
        }
        count
    }

    fn any(&self) -> Option<Arc<QueuePair>> {
        let mut open = self.0.lock();
        while let Some(last) = open.pairs.last() {
            match still_open(last) {
                Some(pair) => return Some(pair),
                None => drop(open.pairs.pop()),
            }
        }
        None
    }
}

impl Pairs {
    fn sweep(&mut self) {
        self.pairs.retain(|pair| still_open(pair).is_some());
    }
}

fn still_open(pair: &Weak<QueuePair>) -> Option<Arc<QueuePair>> {
    pair.upgrade().filter(|pair| pair.close_reason().is_none())
}
