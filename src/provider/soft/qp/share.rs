//! A queue pair's part in a shared receive queue.

use std::sync::Weak;
use std::sync::atomic::Ordering;

use super::super::srq::SrqShared;
use super::QpShared;
use super::queue::ReceiveEntry;

impl QpShared {
    /// Moves the receive that the next message uses into `entry`. With a shared queue, this queue pair waits there for one if it has none.
    pub(super) fn take_receive(&self, entry: &mut ReceiveEntry) -> bool {
        self.rq.lock().take(entry) || self.srq.as_ref().is_some_and(|srq| srq.take(self, entry))
    }

    /// The peer holds messages back, and hears of a receive when there is one for it.
    pub(super) fn await_receive(&self) {
        if let Some(srq) = &self.srq {
            srq.await_receive(self);
        }
    }

    /// Whether a receive was set aside and not used yet.
    pub(in super::super) fn has_receive(&self) -> bool {
        self.rq.lock().ring.len() > 0
    }

    /// Takes a receive of the shared queue for the peer's next message, unless there is one already or this queue pair has ended.
    pub(in super::super) fn set_aside(&self, entry: &mut ReceiveEntry) -> bool {
        let mut rq = self.rq.lock();
        if rq.closed {
            return false;
        }
        let Some(place) = rq.ring.push() else { return false };
        std::mem::swap(place, entry);
        self.count_receive();
        true
    }

    /// Raises the limit of the peer by one.
    pub(in super::super) fn count_receive(&self) {
        self.receives_posted.fetch_add(1, Ordering::SeqCst);
    }

    pub(in super::super) fn weak(&self) -> Weak<Self> {
        Weak::clone(&self.me)
    }

    /// Gives back a receive of the shared queue that no message has used. Whoever gets it tells its peer when it is driven next:
    /// this one's locks are held.
    #[cold]
    pub(super) fn give_back(&self, srq: &SrqShared, unused: &mut ReceiveEntry) {
        for next in srq.take_back(unused) {
            next.owe_ack(true);
            next.cq.postpone(&next);
        }
    }
}
