//! Shared receive queues.
//!
//! A message takes the oldest receive, whichever queue pair it comes in by. Where there is none, the queue pair gets in line, and the
//! next receive that is posted is set aside for it: it is told to send again once, and finds what it was told of. What was set aside
//! for a queue pair that ends goes back to the front.
//!
//! Locks: a queue pair's own come before `state`, except for its receive queue's, which comes after.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::context::{Pd, Shared, at_most};
use super::qp::{QpShared, ReceiveEntry, Ring, covered, invalid, total};
use crate::error::{CloseReason, Result};
use crate::provider::{PostError, PostErrorKind, ReceiveRequest, Roster};
use crate::sync::Mutex;

#[derive(Clone, Debug)]
pub(crate) struct Srq {
    shared: Arc<SrqShared>,
}

pub(super) struct SrqShared {
    ctx: Arc<Shared>,
    pd: u64,
    max_sge: u32,
    roster: Arc<Roster>,
    /// Queue pairs that may write into its buffers.
    pairs: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    ring: Ring<ReceiveEntry>,
    /// Queue pairs whose peers wait, the first first. None while there are receives.
    line: VecDeque<Weak<QpShared>>,
    closed: bool,
}

/// Queue pairs for which receives were set aside, and whose peers have yet to hear of it.
pub(super) type Served = SmallVec<[Arc<QpShared>; 2]>;

impl std::fmt::Debug for SrqShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SrqShared").field("pd", &self.pd).finish_non_exhaustive()
    }
}

impl Srq {
    pub(super) fn create(ctx: &Arc<Shared>, pd: &Pd, depth: u32, max_sge: u32) -> Result<Self> {
        const CREATE: &str = "create shared receive queue";
        at_most(CREATE, "capacity", depth.into(), ctx.limits.max_srq_depth.into())?;
        at_most(CREATE, "scatter/gather entries", max_sge.into(), ctx.limits.max_srq_sge.into())?;
        let state = State { ring: Ring::new(depth as usize), line: VecDeque::new(), closed: false };
        let (ctx, roster, state) = (Arc::clone(ctx), Arc::default(), Mutex::new(state));
        Ok(Self { shared: Arc::new(SrqShared { ctx, pd: pd.id, max_sge, roster, pairs: AtomicUsize::new(0), state }) })
    }

    pub(super) fn shared(&self) -> &Arc<SrqShared> {
        &self.shared
    }

    pub(super) fn belongs_to(&self, ctx: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared.ctx, ctx)
    }

    pub(crate) fn roster(&self) -> &Arc<Roster> {
        &self.shared.roster
    }

    pub(crate) fn post(&self, requests: &[ReceiveRequest]) -> std::result::Result<(), PostError> {
        self.shared.post(requests)
    }

    pub(crate) fn destroy(&self) -> bool {
        if self.shared.pairs.load(Ordering::SeqCst) > 0 {
            return false;
        }
        let mut state = self.shared.state.lock();
        state.closed = true;
        while let Some(entry) = state.ring.pop() {
            entry.device = None;
        }
        state.line.clear();
        true
    }
}

impl SrqShared {
    /// A queue pair begins to use it.
    pub(super) fn attach(&self) {
        self.pairs.fetch_add(1, Ordering::SeqCst);
    }

    /// One has ended: it touches no buffer any more.
    pub(super) fn detach(&self) {
        self.pairs.fetch_sub(1, Ordering::SeqCst);
    }

    fn post(&self, requests: &[ReceiveRequest]) -> std::result::Result<(), PostError> {
        let mut result = Ok(());
        let mut state = self.state.lock();
        for (accepted, request) in requests.iter().enumerate() {
            if let Err(kind) = self.enqueue(&mut state, request) {
                result = Err(PostError { accepted, kind });
                break;
            }
        }
        let served = state.serve();
        drop(state);
        served.iter().for_each(QpShared::announce_receives);
        result
    }

    fn enqueue(&self, state: &mut State, request: &ReceiveRequest) -> std::result::Result<(), PostErrorKind> {
        if state.closed {
            return Err(PostErrorKind::Closed(CloseReason::Local));
        }
        if request.sges.len() > self.max_sge as usize {
            return Err(invalid("more scatter/gather entries than the shared receive queue was made for"));
        }
        // There is no queue pair yet that could end for its sake.
        let Some(device) = covered(&self.ctx, self.pd, &request.sges)? else {
            return Err(invalid("a key does not cover its entry of the list"));
        };
        let entry = state.ring.push().ok_or(PostErrorKind::Full)?;
        entry.wr_id = request.wr_id;
        entry.sges.clear();
        entry.sges.extend_from_slice(&request.sges);
        (entry.capacity, entry.poison, entry.device) = (total(&request.sges), None, device);
        Ok(())
    }

    /// Moves the oldest receive into `entry`, or puts the queue pair in line.
    pub(super) fn take(&self, qp: &QpShared, entry: &mut ReceiveEntry) -> bool {
        let mut state = self.state.lock();
        if let Some(oldest) = state.ring.pop() {
            std::mem::swap(entry, oldest);
            // A peer may be told of as many as its messages have used, and no more.
            qp.count_receive();
            return true;
        }
        state.get_in_line(qp);
        false
    }

    /// The peer waits to hear of a receive: sets one aside, or puts the queue pair in line, unless either was done.
    pub(super) fn await_receive(&self, qp: &QpShared) {
        let mut state = self.state.lock();
        if qp.in_line.load(Ordering::SeqCst) || qp.has_receive() {
            return;
        }
        let Some(oldest) = state.ring.get_mut(0) else { return state.get_in_line(qp) };
        if qp.set_aside(oldest) {
            state.ring.pop();
        }
    }

    /// Takes back what a queue pair that ends has not used.
    pub(super) fn take_back(&self, entry: &mut ReceiveEntry) -> Served {
        let mut state = self.state.lock();
        if state.closed {
            return Served::new();
        }
        if let Some(place) = state.ring.push_front() {
            std::mem::swap(place, entry);
        }
        state.serve()
    }
}

impl State {
    fn get_in_line(&mut self, qp: &QpShared) {
        if !qp.in_line.swap(true, Ordering::SeqCst) {
            self.line.push_back(qp.weak());
        }
    }

    /// Sets receives aside for those in line.
    fn serve(&mut self) -> Served {
        let mut served = Served::new();
        while let Some(oldest) = self.ring.get_mut(0) {
            let Some(first) = self.line.pop_front() else { break };
            let Some(qp) = first.upgrade() else { continue };
            qp.in_line.store(false, Ordering::SeqCst);
            if qp.set_aside(oldest) {
                self.ring.pop();
                served.push(qp);
            }
        }
        served
    }
}
