//! Probing silent connections: a reliable queue pair that sends nothing does not notice that its peer is gone.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::completion::pair::QueuePair;

/// The connections of a device that are probed when they are silent; one task for all of them.
#[derive(Default)]
pub(crate) struct Keepalive {
    watched: Mutex<Watched>,
    changed: Notify,
}

#[derive(Default)]
struct Watched {
    running: bool,
    connections: Vec<Silence>,
}

/// How long a connection has been silent.
struct Silence {
    pair: Weak<QueuePair>,
    interval: Duration,
    due: Instant,
    /// Completions seen at the last visit.
    completed: u64,
}

impl Keepalive {
    /// Probes `pair` whenever nothing completed on it for `interval`.
    pub(super) fn watch(self: &Arc<Self>, pair: &Arc<QueuePair>, interval: Duration) {
        let mut watched = self.lock();
        watched.connections.push(Silence {
            pair: Arc::downgrade(pair),
            interval,
            due: Instant::now() + interval,
            completed: pair.completed(),
        });
        let start = !std::mem::replace(&mut watched.running, true);
        drop(watched);
        if start {
            // Without the lock: a runtime that is shutting down drops the task right here.
            let task = Running { keepalive: self.clone(), ended: false };
            tokio::spawn(async move {
                task.keepalive.run().await;
                task.end();
            });
        }
        self.changed.notify_one();
    }

    async fn run(&self) {
        while let Some(due) = self.visit() {
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// Probes what is silent and due. Returns when to come back, or `None` when nothing is left to watch.
    fn visit(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut watched = self.lock();
        watched.connections.retain_mut(|silence| silence.visit(now));
        let next = watched.connections.iter().map(|silence| silence.due).min();
        watched.running = next.is_some();
        next
    }

    fn lock(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Silence {
    /// `false` when the connection has ended.
    fn visit(&mut self, now: Instant) -> bool {
        let Some(pair) = self.pair.upgrade().filter(|pair| pair.close_reason().is_none()) else { return false };
        if now >= self.due {
            // Requests in flight have the provider's retry budget running already.
            if pair.completed() == self.completed && pair.send.in_flight() == 0 {
                tracing::trace!(qp = pair.number(), "keepalive probe");
                pair.probe();
            }
            self.completed = pair.completed();
            self.due = now + self.interval;
        }
        true
    }
}

/// Dropped with the task when its runtime ends: the next connection starts another one.
struct Running {
    keepalive: Arc<Keepalive>,
    /// By itself, so that another one may be running by now.
    ended: bool,
}

impl Running {
    fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.ended {
            self.keepalive.lock().running = false;
        }
    }
}

impl fmt::Debug for Keepalive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keepalive").field("connections", &self.lock().connections.len()).finish()
    }
}
