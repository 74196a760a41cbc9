//! Completion queues, each with a channel of its own.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Context;

use futures::task::AtomicWaker;

use super::device::ContextInner;
use super::{greeting, hints, sys};
use crate::error::{Error, Result, WcStatus};
use crate::provider::{Opcode, WorkCompletion};
use crate::sync::Mutex;

/// Completions taken with one call of `ibv_poll_cq`.
const BATCH: usize = 32;

/// Entries of a new queue: 32 KiB to 64 KiB of memory, and enough for a handful of connections without resizing.
const FIRST_DEPTH: u32 = 1024;

/// A completion queue with its channel.
#[derive(Clone, Debug)]
pub(crate) struct Cq(Arc<CqInner>);

/// Invariant: `raw` is a live completion queue of `context` on `channel`, which is live too. Queue pairs hold this.
#[derive(Debug)]
pub(super) struct CqInner {
    raw: NonNull<sys::ibv_cq>,
    channel: Channel,
    /// Arming brings one event, so until that was read the queue needs no arming, and the channel has no other.
    armed: AtomicBool,
    /// Events that were read and not acknowledged: destroying the queue would wait for them for ever.
    unacknowledged: AtomicU32,
    failures: Arc<Failures>,
    depth: Mutex<u32>,
    context: Arc<ContextInner>,
}

// SAFETY: the verbs may be called from any thread.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

/// Queue pairs of one completion queue that failed, and who sleeps on the queue.
#[derive(Debug, Default)]
pub(super) struct Failures {
    any: AtomicBool,
    numbers: Mutex<Vec<u32>>,
    sleeper: AtomicWaker,
}

impl Failures {
    pub(super) fn push(&self, number: u32) {
        self.numbers.lock().push(number);
        self.any.store(true, Ordering::SeqCst);
        self.sleeper.wake();
    }
}

/// Invariant: `raw` is a live completion channel of a context that outlives this.
#[derive(Debug)]
struct Channel {
    raw: NonNull<sys::ibv_comp_channel>,
    verbs: &'static sys::Verbs,
}

impl Channel {
    fn new(context: &ContextInner) -> Result<Self> {
        // SAFETY: the context is live.
        let raw = unsafe { (context.verbs().ibv_create_comp_channel)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| hints::last("create", "a completion channel"))?;
        Ok(Self { raw, verbs: context.verbs() })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is live, and with it its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.raw.as_ptr()).fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: live by the invariant; its queue was destroyed before.
        unsafe { (self.verbs.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

impl Cq {
    pub(super) fn create(context: &Arc<ContextInner>, depth: u32, vector: u32) -> Result<Self> {
        let vector = vector % context.completion_vectors();
        let depth = depth.max(FIRST_DEPTH).min(context.limits().max_cq_depth);
        let channel = Channel::new(context)?;
        rustix::io::ioctl_fionbio(channel.fd(), true)
            .map_err(|error| Error::io("prepare", "the completion channel", error.into()))?;
        // SAFETY: context and channel are live.
        let raw = unsafe {
            let (channel, vector) = (channel.raw.as_ptr(), vector as i32);
            (context.verbs().ibv_create_cq)(context.raw(), depth as i32, ptr::null_mut(), channel, vector)
        };
        let Some(raw) = NonNull::new(raw) else {
            let what = format!("a completion queue of {depth} entries");
            return Err(hints::creating(&what, std::io::Error::last_os_error()));
        };
        Ok(Self(Arc::new(CqInner {
            raw,
            channel,
            armed: AtomicBool::new(false),
            unacknowledged: AtomicU32::new(0),
            failures: Arc::default(),
            depth: Mutex::new(depth),
            context: context.clone(),
        })))
    }

    pub(super) fn inner(&self) -> &Arc<CqInner> {
        &self.0
    }

    /// Fewer than there is room for means that there were no more.
    #[inline(never)]
    pub(crate) fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize> {
        let mut batch = [const { MaybeUninit::<sys::ibv_wc>::uninit() }; BATCH];
        let mut kept = 0;
        while kept < out.len() {
            let room = (out.len() - kept).min(BATCH);
            // SAFETY: the queue is live, and the batch has that much room.
            let taken = unsafe { sys::ibv_poll_cq(self.0.raw(), room as i32, batch.as_mut_ptr().cast()) };
            if taken < 0 {
                return Err(Error::io("poll", "the completion queue", hints::error_of(taken)));
            }
            let taken = (taken as usize).min(room);
            for completion in &batch[..taken] {
                // SAFETY: the provider wrote that many.
                let completion = unsafe { completion.assume_init_ref() };
                // Nearly all, and no table of numbers has to be gone through for them.
                let status = match completion.status {
                    sys::IBV_WC_SUCCESS => WcStatus::Success,
                    other => failed(other),
                };
                if greeting::is_id(completion.wr_id) {
                    self.0.context.device().greeted(completion.qp_num, completion.wr_id, status);
                    continue;
                }
                if status != WcStatus::Success {
                    self.0.context.device().completion_failed(completion.qp_num, status);
                }
                out[kept] = translate(completion, status);
                kept += 1;
            }
            if taken < room {
                break;
            }
        }
        Ok(kept)
    }

    pub(crate) fn arm(&self) -> Result<()> {
        if self.0.armed.load(Ordering::Relaxed) {
            return Ok(());
        }
        // Before, so that a resizing at the same time is what counts.
        self.0.armed.store(true, Ordering::Relaxed);
        // SAFETY: the queue is live.
        let returned = unsafe { sys::ibv_req_notify_cq(self.0.raw(), 0) };
        if returned != 0 {
            self.0.armed.store(false, Ordering::Relaxed);
        }
        hints::check(returned, "arm", "the completion queue")
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.channel.fd()
    }

    pub(crate) fn read_events(&self) -> Result<u32> {
        loop {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the channel is live and non-blocking; the results go to places of ours.
            let returned = unsafe {
                (self.0.context.verbs().ibv_get_cq_event)(self.0.channel.raw.as_ptr(), &raw mut cq, &raw mut context)
            };
            if returned == 0 {
                self.0.armed.store(false, Ordering::Relaxed);
                self.0.unacknowledged.fetch_add(1, Ordering::Relaxed);
                return Ok(1);
            }
            let error = std::io::Error::last_os_error();
            match error.kind() {
                std::io::ErrorKind::WouldBlock => return Ok(0),
                std::io::ErrorKind::Interrupted => {}
                _ => return Err(Error::io("read", "the completion channel", error)),
            }
        }
    }

    pub(crate) fn acknowledge(&self, events: u32) {
        let before = self.0.unacknowledged.fetch_sub(events, Ordering::Relaxed);
        debug_assert!(before >= events);
        // SAFETY: the queue is live, and that many of its events were read.
        unsafe { (self.0.context.verbs().ibv_ack_cq_events)(self.0.raw(), events) };
    }

    #[inline]
    pub(crate) fn take_failed(&self, numbers: &mut Vec<u32>) -> bool {
        let failures = &self.0.failures;
        if !failures.any.load(Ordering::Acquire) || !failures.any.swap(false, Ordering::AcqRel) {
            return false;
        }
        numbers.append(&mut failures.numbers.lock());
        !numbers.is_empty()
    }

    pub(crate) fn wake_at_failure(&self, cx: &Context<'_>) -> bool {
        let failures = &self.0.failures;
        failures.sleeper.register(cx.waker());
        failures.any.load(Ordering::SeqCst)
    }

    /// Never shrinks, and at least doubles, since every resizing is a system call and moves what is queued.
    pub(crate) fn resize(&self, depth: u32) -> Result<()> {
        let mut current = self.0.depth.lock();
        if depth <= *current {
            return Ok(());
        }
        let wanted = depth.max(current.saturating_mul(2)).min(self.0.context.limits().max_cq_depth);
        // SAFETY: the queue is live; providers lock it against concurrent polling.
        let returned = unsafe { (self.0.context.verbs().ibv_resize_cq)(self.0.raw(), wanted as i32) };
        if returned != 0 {
            let what = format!("the completion queue from {} to {wanted} entries", *current);
            return Err(Error::io("resize", what, hints::error_of(returned)));
        }
        *current = wanted;
        // Whether a device remembers it is not said; one event too many does no harm.
        self.0.armed.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl CqInner {
    pub(super) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw.as_ptr()
    }

    pub(super) fn failures(&self) -> &Arc<Failures> {
        &self.failures
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        let verbs = self.context.verbs();
        let unacknowledged = *self.unacknowledged.get_mut();
        // SAFETY: live by the invariant. The queue pairs are gone, since each held this; nothing was left unacknowledged,
        // so destroying does not wait. The channel is a field, which is dropped afterwards.
        let returned = unsafe {
            if unacknowledged > 0 {
                (verbs.ibv_ack_cq_events)(self.raw(), unacknowledged);
            }
            (verbs.ibv_destroy_cq)(self.raw())
        };
        if returned != 0 {
            tracing::error!(error = %hints::error_of(returned), "a completion queue could not be destroyed");
        }
    }
}

#[cold]
fn failed(status: u32) -> WcStatus {
    WcStatus::from_raw(status)
}

#[inline]
fn translate(completion: &sys::ibv_wc, status: WcStatus) -> WorkCompletion {
    // Of a failed completion only the id, the status, the queue pair and the vendor's code mean something.
    let success = status == WcStatus::Success;
    if success && completion.opcode & sys::IBV_WC_RECV == 0 {
        // A request has no more to tell.
        return WorkCompletion { wr_id: completion.wr_id, source: completion.qp_num, ..WorkCompletion::default() };
    }
    let immediate = success && completion.wc_flags & sys::IBV_WC_WITH_IMM != 0;
    WorkCompletion {
        wr_id: completion.wr_id,
        status,
        opcode: match completion.opcode {
            sys::IBV_WC_RECV if success => Opcode::Receive,
            sys::IBV_WC_RECV_RDMA_WITH_IMM if success => Opcode::ReceiveWriteImm,
            _ => Opcode::Request,
        },
        byte_len: if success { completion.byte_len } else { 0 },
        // SAFETY: both members of the union are 32-bit integers.
        imm: immediate.then(|| u32::from_be(unsafe { completion.__bindgen_anon_1.imm_data })),
        vendor_error: completion.vendor_err,
        source: completion.qp_num,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion() -> sys::ibv_wc {
        // SAFETY: integers, of which zero is a value.
        unsafe { std::mem::zeroed() }
    }

    #[test]
    fn immediate_data_counts_only_with_its_flag() {
        let mut wc = sys::ibv_wc { opcode: sys::IBV_WC_RECV, byte_len: 5, ..completion() };
        wc.__bindgen_anon_1.imm_data = 0x0102_0304_u32.to_be();
        let translated = translate(&wc, WcStatus::Success);
        assert_eq!((translated.imm, translated.opcode, translated.byte_len), (None, Opcode::Receive, 5));

        wc.wc_flags = sys::IBV_WC_WITH_IMM;
        wc.opcode = sys::IBV_WC_RECV_RDMA_WITH_IMM;
        let translated = translate(&wc, WcStatus::Success);
        assert_eq!((translated.imm, translated.opcode), (Some(0x0102_0304), Opcode::ReceiveWriteImm));
    }

    #[test]
    fn a_request_tells_its_id_and_its_queue_pair() {
        let wc = sys::ibv_wc { wr_id: 7, opcode: sys::IBV_WC_RDMA_READ, qp_num: 5, wc_flags: !0, ..completion() };
        let translated = translate(&wc, WcStatus::Success);
        assert_eq!((translated.wr_id, translated.source, translated.opcode), (7, 5, Opcode::Request));
        assert_eq!((translated.status, translated.imm), (WcStatus::Success, None));
    }

    #[test]
    fn nothing_else_is_read_from_a_failed_completion() {
        let garbage = sys::ibv_wc { wr_id: 7, byte_len: !0, wc_flags: !0, opcode: !0, vendor_err: 9, ..completion() };
        let translated = translate(&garbage, WcStatus::Flushed);
        assert_eq!((translated.wr_id, translated.vendor_error), (7, 9));
        assert_eq!((translated.imm, translated.byte_len), (None, 0));
    }
}
