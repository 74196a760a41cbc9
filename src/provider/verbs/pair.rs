//! Queue pairs: creating them, their states, and how they end.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::cm::CmId;
use super::greeting::{self, End, Greeted, Greeting};
use super::memory::{Pd, PdInner};
use super::post::{ReceiveQueue, SendQueue};
use super::queue::{Cq, CqInner, Failures};
use super::srq::SrqInner;
use super::{hints, sys, timers};
use crate::error::{CloseReason, Result};
use crate::provider::{
    PostError, PostOne, QpConfig, QpCounters, ReceiveRequest, Seat, SendRequest, Sge, SgeList, Srq, WrOp, mixed,
};
use crate::sync::{Mutex, MutexGuard};

/// How long closing a connection may take for the sake of a receive that it has taken from a shared queue.
const LAST_RECEIVE: Duration = Duration::from_millis(20);

/// What events and completions have to know of a queue pair: its number, and where to say that it failed.
#[derive(Debug)]
pub(super) struct PairState {
    number: u32,
    failures: Arc<Failures>,
    closed: AtomicBool,
    reason: Mutex<Option<CloseReason>>,
    greeted: Greeted,
    /// It takes no more receives from its shared queue, and those that it had are reported.
    received_last: AtomicBool,
}

impl PairState {
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn reason(&self) -> Option<CloseReason> {
        if self.closed.load(Ordering::Acquire) { self.reason.lock().clone() } else { None }
    }

    /// Whether anything can be posted still.
    #[inline]
    fn check(&self) -> std::result::Result<(), PostError> {
        if !self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(PostError::closed(self.reason().unwrap_or(CloseReason::Local)))
    }

    /// The first reason stays.
    fn fail(&self, reason: CloseReason) -> bool {
        let mut place = self.reason.lock();
        if place.is_some() {
            return false;
        }
        *place = Some(reason);
        self.closed.store(true, Ordering::Release);
        true
    }

    /// Fails the queue pair and wakes whoever sleeps on its completion queue.
    pub(super) fn fail_and_tell(&self, reason: CloseReason) {
        if self.fail(reason) {
            self.failures.push(self.number);
        }
    }

    pub(super) fn greeted(&self) -> &Greeted {
        &self.greeted
    }

    /// `IBV_EVENT_QP_LAST_WQE_REACHED` came.
    pub(super) fn received_last(&self) {
        self.received_last.store(true, Ordering::Release);
    }
}

/// A queue pair.
///
/// Invariant: `raw` is live until `control.destroyed` is set, which only [`Qp::destroy`] does, after it has closed both queues.
/// Whoever posts holds the queue's lock, whoever changes the state holds `control`.
#[derive(Debug)]
pub(crate) struct Qp {
    raw: NonNull<sys::ibv_qp>,
    state: Arc<PairState>,
    send: Mutex<SendQueue>,
    receive: Mutex<ReceiveQueue>,
    control: Mutex<Control>,
    seat: Mutex<Option<Seat>>,
    // Held, so that they outlive the queue pair.
    _cq: Arc<CqInner>,
    srq: Option<Arc<SrqInner>>,
    pd: Arc<PdInner>,
}

#[derive(Debug)]
struct Control {
    in_error: bool,
    destroyed: bool,
    /// The connection; `None` for one that was set up by other means.
    id: Option<CmId>,
    /// Until the connection is made, where that is done without RDMA CM.
    greeting: Option<Greeting>,
}

// SAFETY: the verbs may be called from any thread.
unsafe impl Send for Qp {}
// SAFETY: as above; the invariant says who may call what when.
unsafe impl Sync for Qp {}

impl Qp {
    pub(super) fn create(pd: &Pd, cq: &Cq, config: &QpConfig) -> Result<Self> {
        let (pd, cq) = (pd.inner().clone(), cq.inner().clone());
        let context = pd.context().clone();
        let cap = sys::ibv_qp_cap {
            max_send_wr: config.send_depth,
            max_recv_wr: config.receive_depth,
            max_send_sge: config.max_send_sge,
            max_recv_sge: config.max_receive_sge,
            max_inline_data: config.max_inline,
        };
        // SAFETY: integers and pointers, of which zero is a value.
        let mut init: sys::ibv_qp_init_attr = unsafe { std::mem::zeroed() };
        init.send_cq = cq.raw();
        init.recv_cq = cq.raw();
        init.cap = cap;
        init.qp_type = sys::IBV_QPT_RC;
        let srq = match &config.srq {
            None => None,
            Some(Srq::Verbs(srq)) => Some(srq.inner().clone()),
            Some(Srq::Soft(_)) => return Err(mixed("connect")),
        };
        if let Some(srq) = &srq {
            init.srq = srq.raw()?;
            init.cap.max_recv_sge = 0;
        }
        // SAFETY: domain and queues are live, and of one context; all are held for as long as the queue pair.
        let raw = unsafe { (context.verbs().ibv_create_qp)(pd.raw(), &raw mut init) };
        let Some(raw) = NonNull::new(raw) else {
            let error = std::io::Error::last_os_error();
            let what = format!(
                "a queue pair with depths {} and {}, {} and {} scatter/gather entries, {} bytes inline",
                cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge, cap.max_inline_data
            );
            return Err(hints::creating(&what, error));
        };
        let state = Arc::new(PairState {
            // SAFETY: just made.
            number: unsafe { (*raw.as_ptr()).qp_num },
            failures: cq.failures().clone(),
            closed: AtomicBool::new(false),
            reason: Mutex::new(None),
            greeted: Greeted::default(),
            received_last: AtomicBool::new(false),
        });
        context.device().add(&state);
        // Entered before anything can come in.
        let seat = config.srq.as_ref().map(|srq| srq.roster().seat(state.number));
        let longest = u32::try_from(context.limits().max_message).unwrap_or(u32::MAX);
        Ok(Self {
            raw,
            state,
            send: Mutex::new(SendQueue::new(raw, config.send_depth, longest)),
            receive: Mutex::new(ReceiveQueue::new(raw, longest)),
            control: Mutex::new(Control { in_error: false, destroyed: false, id: None, greeting: None }),
            seat: Mutex::new(seat),
            _cq: cq,
            srq,
            pd,
        })
    }

    pub(crate) fn take_seat(&self) -> Option<Seat> {
        self.seat.lock().take()
    }

    /// Puts the queue pair into the care of the connection's events.
    pub(super) fn belongs_to(&self, id: CmId) {
        id.inbox().belongs_to(&self.state);
        self.control.lock().id = Some(id);
    }

    pub(super) fn state(&self) -> &Arc<PairState> {
        &self.state
    }

    /// Modifies a queue pair that nobody else has yet, or whose `control` the caller holds and has found not destroyed.
    pub(super) fn modify(&self, attr: &mut sys::ibv_qp_attr, mask: u32, step: &'static str) -> Result<()> {
        let verbs = self.pd.context().verbs();
        // SAFETY: the queue pair is live: it can only be destroyed by whoever has it, and with `control`.
        let returned = unsafe { (verbs.ibv_modify_qp)(self.raw.as_ptr(), attr, mask as i32) };
        hints::check(returned, "move the queue pair", step)
    }

    /// Moves it to `state` with the attributes that RDMA CM knows for this connection, as changed by `adjust`.
    pub(super) fn modify_for(
        &self,
        id: &CmId,
        state: sys::ibv_qp_state,
        step: &'static str,
        adjust: impl FnOnce(&mut sys::ibv_qp_attr, &mut u32),
    ) -> Result<()> {
        // SAFETY: integers, of which zero is a value.
        let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = state;
        let mut mask = 0;
        // SAFETY: the id is live; the results go to places of ours.
        let returned = unsafe { (id.cm().rdma_init_qp_attr)(id.raw(), &raw mut attr, &raw mut mask) };
        hints::check(returned, "get the attributes of the connection for", step)?;
        let mut mask = mask as u32;
        adjust(&mut attr, &mut mask);
        self.modify(&mut attr, mask, step)
    }

    pub(crate) fn number(&self) -> u32 {
        self.state.number
    }

    /// Nobody else posts to the send queue while that is there.
    #[inline]
    pub(crate) fn sender(&self) -> Sender<'_> {
        Sender { queue: self.send.lock(), state: &self.state }
    }

    /// Posts the place for the peer's greeting. It belongs to the queue pair until [`greeted_by`](Self::greeted_by).
    /// Nothing is posted when it has come already, in an earlier round.
    pub(super) fn await_greeting(&self, pd: &Pd, round: u16, heard: bool) -> Result<()> {
        self.state.greeted.begin(round, heard);
        if heard {
            return Ok(());
        }
        let mut control = self.control.lock();
        if control.greeting.is_none() {
            control.greeting = Some(Greeting::new(pd)?);
        }
        let Some(greeting) = &mut control.greeting else { return Ok(()) };
        let request = ReceiveRequest { wr_id: greeting::id(round, true), sges: greeting.incoming() };
        self.receive.lock().post(&[request]).map_err(|error| error.into_error("post a receive for", "the greeting"))
    }

    pub(super) fn greet(&self, round: u16, me: End, peer: End) -> Result<()> {
        let mut control = self.control.lock();
        let Some(greeting) = &mut control.greeting else { return Ok(()) };
        let request = SendRequest {
            wr_id: greeting::id(round, false),
            op: WrOp::Send { imm: None, patience: 0 },
            sges: greeting.outgoing(me, peer),
            signaled: true,
            inline: false,
        };
        self.send.lock().post(&[request]).map_err(|error| error.into_error("send", "the greeting"))
    }

    /// Both greetings have completed: says what is wrong with the one that came, and releases their memory.
    pub(super) fn greeted_by(&self, peer: End, me: End) -> std::result::Result<(), String> {
        let Some(mut greeting) = self.control.lock().greeting.take() else { return Ok(()) };
        greeting.check(peer, me)
    }

    pub(crate) fn post_receive(&self, requests: &[ReceiveRequest]) -> std::result::Result<(), PostError> {
        self.state.check()?;
        self.receive.lock().post(requests)
    }

    /// Lets the peer use the keys that it has. One that is in the error state, or gone, says so at the next operation.
    #[cfg_attr(not(feature = "psk"), allow(dead_code))]
    pub(crate) fn admit(&self) -> Result<()> {
        let control = self.control.lock();
        if control.in_error || control.destroyed {
            return Ok(());
        }
        // SAFETY: integers, of which zero is a value.
        let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_access_flags = ALL_ACCESS;
        self.modify(&mut attr, sys::IBV_QP_ACCESS_FLAGS, "on, to admit the peer")
    }

    /// Moves the queue pair to the error state and tells the peer. Some providers report flushed requests late, or only when
    /// the queue pair is destroyed, so it is [`destroy`](Self::destroy) that ends the use of buffers.
    pub(crate) fn fail(&self, reason: CloseReason) -> bool {
        self.state.fail(reason);
        let mut control = self.control.lock();
        if control.destroyed {
            return true;
        }
        if !control.in_error {
            control.in_error = true;
            // SAFETY: integers, of which zero is a value.
            let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
            attr.qp_state = sys::IBV_QPS_ERR;
            if let Err(error) = self.modify(&mut attr, sys::IBV_QP_STATE, "to the error state") {
                tracing::debug!(qp = self.number(), %error, "the queue pair goes without its error state");
            } else if self.srq.is_some() {
                self.await_last_receive();
            }
            if let Some(id) = &control.id {
                id.disconnect();
            }
        }
        false
    }

    /// Waits until what the queue pair has taken from its shared queue is reported. Destroying it earlier, some devices drop such a
    /// receive without a completion (libmlx5 cleans the completion queue), and its buffer would be lost to the shared queue. The
    /// specification has an event for that (InfiniBand specification, volume 1, 11.6.3: last WQE reached), which normally is
    /// there within microseconds. Not all devices send it: one that does not gets a moment, without being asked.
    #[cold]
    fn await_last_receive(&self) {
        let device = self.pd.context().device();
        if device.is_gone() {
            return;
        }
        if !device.tells_of_last_receives() {
            std::thread::sleep(LAST_RECEIVE / 10);
            device.read_async_events();
            if self.state.received_last.load(Ordering::Acquire) {
                device.told_of_last_receive(true);
            }
            return;
        }
        let start = Instant::now();
        let told = loop {
            device.read_async_events();
            let told = self.state.received_last.load(Ordering::Acquire);
            if told || start.elapsed() > LAST_RECEIVE {
                break told;
            }
            std::thread::sleep(LAST_RECEIVE / 200);
        };
        device.told_of_last_receive(told);
    }

    /// Destroys the queue pair, if that was not done. When this returns `true`, the device touches no buffer of it any more
    /// and reports nothing further about it. What it reported before may still be in the completion queue.
    pub(crate) fn destroy(&self) -> bool {
        let mut control = self.control.lock();
        if control.destroyed {
            return true;
        }
        self.send.lock().close();
        self.receive.lock().close();
        let context = self.pd.context();
        // SAFETY: live by the invariant; both queues are closed, so nobody posts, and nobody else holds `control`.
        let returned = unsafe { (context.verbs().ibv_destroy_qp)(self.raw.as_ptr()) };
        // Of a device that is gone nothing can be destroyed any more, nor does it touch anything.
        if returned != 0 && !context.device().is_gone() {
            tracing::error!(qp = self.number(), error = %hints::error_of(returned), "a queue pair could not be destroyed");
            return false;
        }
        control.destroyed = true;
        control.greeting = None;
        context.device().remove(&self.state);
        // After the queue pair, so that its number is not used for a new connection while the old one is wound up.
        control.id = None;
        true
    }

    pub(crate) fn close_reason(&self) -> Option<CloseReason> {
        self.state.reason()
    }

    /// The devices count these per port, not per queue pair.
    pub(crate) fn counters(&self) -> QpCounters {
        QpCounters::default()
    }
}

/// The right to post to a send queue.
#[derive(Debug)]
pub(crate) struct Sender<'a> {
    queue: MutexGuard<'a, SendQueue>,
    state: &'a PairState,
}

impl Sender<'_> {
    pub(crate) fn post_list(&mut self, requests: &[SendRequest]) -> std::result::Result<(), PostError> {
        self.state.check()?;
        self.queue.post(requests)
    }
}

impl PostOne for Sender<'_> {
    #[inline]
    fn set_entry(&mut self, entry: Option<Sge>) {
        self.queue.set_entry(entry);
    }

    fn sges(&mut self) -> &mut SgeList {
        self.queue.sges()
    }

    #[inline(always)]
    fn post_one(
        &mut self,
        wr_id: u64,
        fill: impl FnOnce(&mut WrOp),
        inline: bool,
    ) -> std::result::Result<(), PostError> {
        self.state.check()?;
        self.queue.post_one(wr_id, fill, inline)
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.fail(CloseReason::Local);
        if !self.destroy() {
            // The device may still write there.
            std::mem::forget(self.control.lock().greeting.take());
        }
    }
}

/// Which memory a peer reaches is decided by the keys it has, not by the queue pair.
const ALL_ACCESS: u32 = sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_REMOTE_ATOMIC;

/// The attributes that this side decides, whatever RDMA CM says.
pub(super) struct Choices<'a> {
    pub(super) config: &'a QpConfig,
    /// Reads and atomics in flight, agreed on with the peer.
    pub(super) rd_atomic: u8,
}

impl Choices<'_> {
    pub(super) fn init(&self, attr: &mut sys::ibv_qp_attr, mask: &mut u32) {
        attr.qp_access_flags = if self.config.guarded { 0 } else { ALL_ACCESS };
        *mask |= sys::IBV_QP_ACCESS_FLAGS;
    }

    pub(super) fn ready_to_receive(&self, attr: &mut sys::ibv_qp_attr, mask: &mut u32) {
        attr.path_mtu = attr.path_mtu.min(timers::mtu_from_bytes(self.config.path_mtu));
        // RDMA CM leaves it at 0, which means 655 ms.
        attr.min_rnr_timer = timers::rnr_timer(self.config.rnr_timer);
        attr.max_dest_rd_atomic = self.rd_atomic;
        *mask |= sys::IBV_QP_PATH_MTU | sys::IBV_QP_MIN_RNR_TIMER | sys::IBV_QP_MAX_DEST_RD_ATOMIC;
    }

    pub(super) fn ready_to_send(&self, attr: &mut sys::ibv_qp_attr, mask: &mut u32) {
        attr.timeout = timers::ack_timeout(self.config.ack_timeout);
        attr.retry_cnt = self.config.retry_count;
        attr.rnr_retry = self.config.rnr_retry;
        attr.max_rd_atomic = self.rd_atomic;
        *mask |= sys::IBV_QP_TIMEOUT | sys::IBV_QP_RETRY_CNT | sys::IBV_QP_RNR_RETRY | sys::IBV_QP_MAX_QP_RD_ATOMIC;
    }
}
