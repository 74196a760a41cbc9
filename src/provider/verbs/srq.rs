//! Shared receive queues.

use std::ptr;
use std::ptr::NonNull;
use std::sync::Arc;

use super::memory::{Pd, PdInner};
use super::post::ReceiveQueue;
use super::{hints, sys};
use crate::error::{Error, Result};
use crate::provider::{PostError, ReceiveRequest, Roster};
use crate::sync::Mutex;

/// A receive queue that several queue pairs share.
#[derive(Clone, Debug)]
pub(crate) struct Srq(Arc<SrqInner>);

/// Invariant: what `queue` owns is a live shared receive queue of `pd`. It is destroyed by [`SrqInner::destroy`], which takes it out.
/// Queue pairs that use it hold this.
#[derive(Debug)]
pub(super) struct SrqInner {
    queue: Mutex<ReceiveQueue<sys::ibv_srq>>,
    roster: Arc<Roster>,
    pd: Arc<PdInner>,
}

impl Pd {
    /// A queue for `depth` receives of `max_sge` scatter/gather entries each.
    pub(crate) fn create_srq(&self, depth: u32, max_sge: u32) -> Result<Srq> {
        let pd = self.inner().clone();
        let attr = sys::ibv_srq_attr { max_wr: depth, max_sge, srq_limit: 0 };
        let mut init = sys::ibv_srq_init_attr { srq_context: ptr::null_mut(), attr };
        // SAFETY: the domain is live, and held for as long as the queue.
        let raw = unsafe { (pd.context().verbs().ibv_create_srq)(pd.raw(), &raw mut init) };
        let Some(raw) = NonNull::new(raw) else {
            let what = format!("a shared receive queue of {depth} receives, {max_sge} scatter/gather entries each");
            return Err(hints::creating(&what, std::io::Error::last_os_error()));
        };
        let longest = u32::try_from(pd.context().limits().max_message).unwrap_or(u32::MAX);
        let queue = Mutex::new(ReceiveQueue::new(raw, longest));
        Ok(Srq(Arc::new(SrqInner { queue, roster: Arc::default(), pd })))
    }
}

impl Srq {
    pub(super) fn inner(&self) -> &Arc<SrqInner> {
        &self.0
    }

    pub(crate) fn roster(&self) -> &Arc<Roster> {
        &self.0.roster
    }

    pub(crate) fn post(&self, requests: &[ReceiveRequest]) -> std::result::Result<(), PostError> {
        self.0.queue.lock().post(requests)
    }

    pub(crate) fn destroy(&self) -> bool {
        self.0.destroy()
    }
}

impl SrqInner {
    /// For a queue pair that is about to be made, and holds this.
    pub(super) fn raw(&self) -> Result<*mut sys::ibv_srq> {
        let owner = self.queue.lock().owner().ok_or_else(|| Error::Invalid {
            operation: "connect",
            reason: "the shared receive queue was destroyed".to_owned(),
        })?;
        Ok(owner.as_ptr())
    }

    /// The device refuses as long as it has a queue pair of this queue. `true`: it touches no buffer in it any more.
    fn destroy(&self) -> bool {
        let mut queue = self.queue.lock();
        let Some(owner) = queue.owner() else { return true };
        let context = self.pd.context();
        // SAFETY: live by the invariant; nobody posts, since the lock is held.
        let returned = unsafe { (context.verbs().ibv_destroy_srq)(owner.as_ptr()) };
        if returned != 0 && !context.device().is_gone() {
            let error = hints::error_of(returned);
            tracing::error!(%error, "a shared receive queue could not be destroyed");
            return false;
        }
        queue.close();
        true
    }
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        self.destroy();
    }
}
