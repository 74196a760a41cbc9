//! The links through shared memory of a completion queue: which of them have something to say.
//!
//! A look at a link costs a few nanoseconds, and no system call. A look at each of a thousand costs more than the system call that was
//! saved. So those that spoke last are looked at each time, and by whoever is about to sleep. The peers of all others ring whenever they
//! send something, and epoll tells which it was, as it does of a socket; that makes the link one of those that are looked at.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::qp::QpShared;
use super::shm::{self, Wire};
use crate::sync::Mutex;

/// Links that are looked at each time.
const WATCHED: usize = 32;

/// Queue pairs that want to be driven.
pub(super) type News = SmallVec<[Arc<QpShared>; 4]>;

#[derive(Debug, Default)]
pub(super) struct Wires {
    list: Mutex<List>,
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct List {
    /// Those that are watched come first. The readers of the others say that they sleep, from when they are put there until they ring.
    entries: Vec<Entry>,
    /// Which of the watched ones gives way to the next that rings.
    next: usize,
}

#[derive(Debug)]
struct Entry {
    /// The queue pair's.
    token: u64,
    wire: Arc<Wire>,
    qp: Weak<QpShared>,
}

impl Wires {
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Whether there are some that only ring.
    pub(super) fn crowded(&self) -> bool {
        self.count() > WATCHED
    }

    /// Adds one, whose peer rings from now on; whether it has something to say already.
    pub(super) fn insert(&self, qp: &Arc<QpShared>, wire: &Arc<Wire>) -> bool {
        let mut list = self.list.lock();
        list.entries.push(Entry { token: qp.token, wire: Arc::clone(wire), qp: Arc::downgrade(qp) });
        self.count.store(list.entries.len(), Ordering::SeqCst);
        wire.sleep();
        shm::settle();
        wire.has_news()
    }

    pub(super) fn remove(&self, token: u64) {
        let mut list = self.list.lock();
        if let Some(at) = list.position(token) {
            // The last one takes its place. If that was not watched before, its peer has been told to ring, and may.
            list.entries.swap_remove(at);
        }
        self.count.store(list.entries.len(), Ordering::SeqCst);
    }

    /// Of those that are watched, the ones with something to read, or room at last.
    pub(super) fn with_news(&self) -> News {
        if self.count() == 0 {
            return News::new();
        }
        let list = self.list.lock();
        list.entries[..list.watched()].iter().filter_map(Entry::news).collect()
    }

    /// The peer of this queue pair has rung: it is watched from now on, and wants to be driven.
    pub(super) fn rung(&self, token: u64) -> News {
        let mut list = self.list.lock();
        let Some(at) = list.position(token) else { return News::new() };
        let mut news: News = list.entries[at].qp.upgrade().into_iter().collect();
        news.extend(list.watch(at));
        news
    }

    /// Watches a link of which nobody rings, since this end has put off what it could do. The result is as of [`List::watch`].
    pub(super) fn watch(&self, token: u64) -> Option<Arc<QpShared>> {
        if !self.crowded() {
            return None;
        }
        let mut list = self.list.lock();
        let at = list.position(token)?;
        list.watch(at)
    }

    /// Has peers wake whoever goes to sleep now. Another look comes after it.
    pub(super) fn sleep(&self) {
        if self.count() > 0 {
            let list = self.list.lock();
            list.entries[..list.watched()].iter().for_each(|entry| entry.wire.sleep());
            drop(list);
            shm::settle();
        }
    }
}

impl List {
    fn watched(&self) -> usize {
        self.entries.len().min(WATCHED)
    }

    /// Watches the one at this place. Another gives way for it, and is the result if it wants to be driven at this moment.
    fn watch(&mut self, at: usize) -> Option<Arc<QpShared>> {
        let watched = self.watched();
        if at < watched {
            return None;
        }
        self.next = (self.next + 1) % watched;
        self.entries.swap(at, self.next);
        // The first one too: somebody may be about to sleep who has seen it where nobody looks.
        self.entries[self.next].wire.sleep();
        self.entries[at].wire.sleep();
        shm::settle();
        self.entries[at].news()
    }

    fn position(&self, token: u64) -> Option<usize> {
        self.entries.iter().position(|entry| entry.token == token)
    }
}

impl Entry {
    fn news(&self) -> Option<Arc<QpShared>> {
        match self.wire.has_news() {
            true => self.qp.upgrade(),
            // One whose link is full is looked at more closely.
            false if self.wire.is_starving() => self.qp.upgrade().filter(|qp| qp.unblocked()),
            false => None,
        }
    }
}
