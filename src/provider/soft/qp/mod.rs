//! A reliable-connected queue pair over a stream of bytes: a socket's, or one through shared memory.
//!
//! Locks, in this order: `rx` (whoever reads the socket), `tx` (whoever writes it), `rq`. Posting never takes `rx`.

mod carrier;
mod post;
mod queue;
mod rx;
mod share;
mod tx;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

pub(super) use self::post::{covered, invalid};
use self::queue::ReceiveQueue;
pub(super) use self::queue::{ReceiveEntry, Ring, total};
pub(super) use self::rx::Driven;
use self::rx::{Rx, Stop};
use self::tx::Tx;
use super::context::Shared;
use super::cq::CqShared;
use super::engine::LOOKED_AT_TICK;
use super::keys::Key;
use super::near::Near;
use super::shm::{self, Wire};
use super::srq::SrqShared;
use super::wire::{Header, Kind, extend};
use crate::error::{CloseReason, Result, WcStatus};
use crate::memory::dma::{Gather, Scatter};
use crate::provider::{
    Opcode, PostError, QpConfig, QpCounters, ReceiveRequest, Seat, SendRequest, Srq, WorkCompletion,
};
use crate::sync::Mutex;

/// `rnr_retry` and `retry_count` are 3 bits; this value of `rnr_retry` means "without limit".
const RNR_UNLIMITED: u8 = 7;

/// What both sides settled on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Agreed {
    pub reads_started: u32,
    pub reads_served: u32,
    pub max_message: u64,
}

/// How to reach the peer.
pub(super) struct Way {
    pub socket: OwnedFd,
    /// What carries the stream in the socket's place.
    pub wire: Option<Wire>,
    /// It is in this process.
    pub near: Option<Near>,
}

/// The owner of a queue pair; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Qp {
    shared: Arc<QpShared>,
    seat: Mutex<Option<Seat>>,
}

pub(super) struct QpShared {
    pub(super) ctx: Arc<Shared>,
    pub(super) cq: Arc<CqShared>,
    /// What carries the stream, or where there is a `wire`, the end of it.
    pub(super) socket: Arc<OwnedFd>,
    pub(super) wire: Option<Arc<Wire>>,
    near: Option<Near>,
    pub(super) token: u64,
    pd: u64,
    /// The peer may use no key yet.
    guarded: AtomicBool,
    config: QpConfig,
    agreed: Agreed,
    rx: Mutex<Rx>,
    tx: Mutex<Tx>,
    rq: Mutex<ReceiveQueue>,
    /// Where its receives come from, if not from a queue of its own.
    srq: Option<Arc<SrqShared>>,
    /// It waits there for one.
    pub(super) in_line: AtomicBool,
    me: Weak<QpShared>,
    /// It is on its completion queue's list of those to be driven again.
    pub(super) postponed: AtomicBool,
    /// Somebody wanted to drive while somebody else did.
    missed: AtomicBool,
    /// The responder's progress: all requests below are done. Rides on every frame.
    done: AtomicU64,
    receives_posted: AtomicU64,
    ack_pending: AtomicBool,
    /// The peer waits for it.
    ack_urgent: AtomicBool,
    /// The peer waits to hear of receives.
    peer_careful: AtomicBool,
    tx_blocked: AtomicBool,
    /// Something happened that ends this queue pair; whoever holds no locks carries it out.
    doomed: AtomicBool,
    overrun: AtomicBool,
    /// What a device said whose memory this queue pair was to copy from or to.
    device_failure: OnceLock<Arc<str>>,
    closed: OnceLock<CloseReason>,
    rnr_naks_sent: AtomicU64,
    rnr_naks_received: AtomicU64,
    /// Requests that were carried out on memory that the peer has lent.
    direct: AtomicU64,
    /// Bytes in: a peer that is alive makes them grow.
    received: Bytes,
    /// Bytes out, what had to be sent again included.
    pub(super) sent: Bytes,
    /// Bytes that the socket took after it was full: somebody emptied it.
    drained: Bytes,
    /// Bytes that came straight from one device's memory to another's.
    carried: Bytes,
    watch: Mutex<Watch>,
}

/// A count that only the holder of a lock raises, and anybody reads.
#[derive(Debug, Default)]
pub(super) struct Bytes(AtomicU64);

impl Bytes {
    fn add(&self, more: usize) {
        self.0.store(self.get().wrapping_add(more as u64), Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The engine's memory of when this queue pair last got anywhere.
#[derive(Debug)]
struct Watch {
    /// What showed life at the last visit: a byte count.
    sign: u64,
    /// Whether requests were waiting for the peer to post a receive.
    starved: bool,
    since: Instant,
    poked: Instant,
}

/// What happens to which request when its time is up.
struct Due {
    at: Option<Instant>,
    status: WcStatus,
    msn: u64,
}

/// What the engine learns about a queue pair at a tick.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tick {
    /// Something must happen in time: a request is unanswered, an acknowledgement is due, or the socket is full.
    pub outstanding: bool,
    pub deadline: Option<Instant>,
}

impl std::fmt::Debug for QpShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QpShared").field("token", &self.token).field("closed", &self.closed).finish_non_exhaustive()
    }
}

impl Qp {
    /// Takes over a socket that is through with the handshake.
    pub(super) fn establish(
        ctx: &Arc<Shared>,
        pd: u64,
        cq: &Arc<CqShared>,
        config: &QpConfig,
        agreed: Agreed,
        Way { socket, wire, near }: Way,
        token: u64,
    ) -> Result<Self> {
        let srq = match &config.srq {
            Some(Srq::Soft(srq)) => Some(Arc::clone(srq.shared())),
            _ => None,
        };
        // Entered before anything can come in.
        let seat = config.srq.as_ref().map(|srq| srq.roster().seat(token as u32));
        let receives = if srq.is_some() { 1 } else { config.receive_depth as usize };
        let rq = ReceiveQueue { ring: Ring::new(receives), closed: false };
        let socket = Arc::new(socket);
        let wire = wire.map(|wire| Arc::new(wire.with_socket(&socket)));
        let cut_after = ctx.faults.as_ref().and_then(|faults| faults.cut_after());
        let shared = Arc::new_cyclic(|me| QpShared {
            me: Weak::clone(me),
            srq,
            in_line: AtomicBool::new(false),
            ctx: Arc::clone(ctx),
            cq: Arc::clone(cq),
            socket,
            wire,
            near,
            direct: AtomicU64::new(0),
            token,
            pd,
            guarded: AtomicBool::new(config.guarded),
            config: config.clone(),
            agreed,
            rx: Mutex::new(Rx::new()),
            tx: Mutex::new(Tx::new(config.send_depth as usize, cut_after)),
            rq: Mutex::new(rq),
            postponed: AtomicBool::new(false),
            missed: AtomicBool::new(false),
            done: AtomicU64::new(0),
            receives_posted: AtomicU64::new(0),
            ack_pending: AtomicBool::new(false),
            ack_urgent: AtomicBool::new(false),
            peer_careful: AtomicBool::new(false),
            tx_blocked: AtomicBool::new(false),
            doomed: AtomicBool::new(false),
            overrun: AtomicBool::new(false),
            device_failure: OnceLock::new(),
            closed: OnceLock::new(),
            rnr_naks_sent: AtomicU64::new(0),
            rnr_naks_received: AtomicU64::new(0),
            received: Bytes::default(),
            sent: Bytes::default(),
            drained: Bytes::default(),
            carried: Bytes::default(),
            watch: Mutex::new(Watch { sign: 0, starved: false, since: Instant::now(), poked: Instant::now() }),
        });
        if let Some(srq) = &shared.srq {
            srq.attach();
        }
        if let Err(error) = cq.link(&shared) {
            shared.srq.iter().for_each(|srq| srq.detach());
            return Err(error);
        }
        ctx.stats.queue_pairs.fetch_add(1, Ordering::Relaxed);
        Ok(Self { shared, seat: Mutex::new(seat) })
    }

    pub(crate) fn take_seat(&self) -> Option<Seat> {
        self.seat.lock().take()
    }

    pub(crate) fn number(&self) -> u32 {
        self.shared.token as u32
    }

    pub(crate) fn post_send(&self, requests: &[SendRequest]) -> std::result::Result<(), PostError> {
        self.shared.post_send(requests)
    }

    pub(crate) fn post_receive(&self, requests: &[ReceiveRequest]) -> std::result::Result<(), PostError> {
        self.shared.post_receive(requests)
    }

    pub(crate) fn fail(&self, reason: CloseReason) -> bool {
        self.shared.fail(reason);
        self.shared.cq.release_all(self.shared.token);
        true
    }

    pub(crate) fn admit(&self) {
        self.shared.guarded.store(false, Ordering::Release);
    }

    pub(crate) fn close_reason(&self) -> Option<CloseReason> {
        self.shared.closed.get().cloned()
    }

    pub(crate) fn counters(&self) -> QpCounters {
        QpCounters {
            rnr_naks_sent: self.shared.rnr_naks_sent.load(Ordering::Relaxed),
            rnr_naks_received: self.shared.rnr_naks_received.load(Ordering::Relaxed),
            bytes_between_devices: self.shared.carried.get(),
            direct: self.shared.direct.load(Ordering::Relaxed),
        }
    }

    #[cfg(test)]
    pub(super) fn shared(&self) -> &Arc<QpShared> {
        &self.shared
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        self.shared.fail(CloseReason::Local);
        self.shared.ctx.stats.queue_pairs.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A protection domain that no key is of.
const NOBODYS: u64 = u64::MAX;

impl QpShared {
    /// Whose keys the peer may use.
    fn peers_domain(&self) -> u64 {
        if self.guarded.load(Ordering::Acquire) { NOBODYS } else { self.pd }
    }

    /// Reads what the peer sent and carries it out. Whoever comes second leaves it to the first,
    /// who looks again before leaving, or says that there is more: nothing stays unseen.
    ///
    /// `writable`: the socket was full and takes bytes again.
    pub(super) fn drive(self: &Arc<Self>, eager: bool, writable: bool) -> Driven {
        let mut total = Driven { worked: writable, more: false };
        if let Some(wire) = self.wire.as_ref().filter(|wire| wire.has_messages()) {
            wire.hear();
        }
        let unwritten = writable && self.resume();
        for _ in 0..2 {
            let guard = self.rx.try_lock().or_else(|| {
                self.missed.store(true, Ordering::SeqCst);
                self.rx.try_lock()
            });
            let Some(mut rx) = guard else { break };
            let driven = self.drive_locked(&mut rx, eager);
            drop(rx);
            let missed = self.missed.swap(false, Ordering::SeqCst);
            total.worked |= driven.worked;
            total.more = driven.more || missed;
            if driven.more && missed {
                // Whoever came meanwhile has taken this one off the list of those to be driven again.
                self.cq.postpone(self);
            }
            if driven.more || !missed {
                break;
            }
        }
        total.more |= unwritten;
        total
    }

    fn drive_locked(self: &Arc<Self>, rx: &mut Rx, eager: bool) -> Driven {
        if self.closed.get().is_some() {
            return Driven::default();
        }
        let result = rx.run(self).and_then(|driven| {
            let more = rx.settle(self, eager)?;
            Ok(Driven { more: driven.more || more, ..driven })
        });
        match result {
            Ok(driven) => {
                if rx.is_unfinished() {
                    self.cq.postpone(self);
                }
                if self.doomed.load(Ordering::SeqCst) {
                    let mut tx = self.tx.lock();
                    self.fulfil_doom(rx, &mut tx);
                }
                driven
            }
            Err(stop) => {
                self.stop(rx, stop);
                Driven { worked: true, more: false }
            }
        }
    }

    /// Writes on. The result says whether more could be written.
    fn resume(self: &Arc<Self>) -> bool {
        let mut tx = self.tx.lock();
        let more = self.closed.get().is_none() && tx.resume(self);
        drop(tx);
        self.check_doom();
        more
    }

    /// Sends an acknowledgement that found nothing to ride on.
    pub(super) fn flush_ack(self: &Arc<Self>) {
        if !self.ack_pending.load(Ordering::SeqCst) {
            return;
        }
        let mut tx = self.tx.lock();
        if self.closed.get().is_none() {
            tx.flush(self, true);
        }
        drop(tx);
        self.check_doom();
    }

    pub(super) fn owes_ack(&self) -> bool {
        self.ack_pending.load(Ordering::SeqCst)
    }

    /// Whether the peer waits for the acknowledgement that is owed. Any other goes with what is sent next, or at the engine's next tick.
    pub(super) fn ack_is_urgent(&self) -> bool {
        self.ack_urgent.load(Ordering::SeqCst)
    }

    fn owe_ack(&self, urgent: bool) {
        // In this order, after what is to be acknowledged: whoever takes a flag acknowledges that.
        if urgent {
            self.ack_urgent.store(true, Ordering::SeqCst);
        }
        self.ack_pending.store(true, Ordering::SeqCst);
    }

    pub(super) fn writes_wait(&self) -> bool {
        self.tx_blocked.load(Ordering::SeqCst)
    }

    /// Acknowledgement and receive limit for a header.
    fn piggyback(&self) -> (u32, u32) {
        (self.done.load(Ordering::SeqCst) as u32, self.receives_posted.load(Ordering::SeqCst) as u32)
    }

    fn activity(&self) -> u64 {
        self.heard().wrapping_add(self.drained.get())
    }

    /// What tells that the peer is alive. While much is copied between the two, neither gets to read what the other says.
    fn heard(&self) -> u64 {
        self.received.get().wrapping_add(self.near.as_ref().map_or(0, Near::moved))
    }

    /// Hands bytes to the link; how many it took.
    fn transmit(&self, gather: Gather<'_>) -> io::Result<usize> {
        match &self.wire {
            None => gather.send(self.socket.as_fd()),
            Some(wire) => wire.send(&gather),
        }
    }

    /// Takes bytes that the link has.
    fn take_in(&self, scatter: Scatter<'_>) -> io::Result<usize> {
        match &self.wire {
            None => scatter.read(self.socket.as_fd()),
            Some(wire) => wire.read(scatter, self.socket.as_fd()),
        }
    }

    fn want_writable(&self, wanted: bool) {
        self.tx_blocked.store(wanted, Ordering::SeqCst);
        if self.closed.get().is_none() && self.wire.is_none() {
            self.cq.watch_writable(self, wanted);
        }
    }

    /// Lends the memory of a key that the peer has used to it, where the two can share it. What misbehaves on purpose does so in
    /// what goes through the ring.
    fn lend(&self, key: &Arc<Key>) {
        if let Some(wire) = self.wire.as_ref().filter(|_| self.ctx.faults.is_none()) {
            // A peer in this process has a way to a device's memory that maps nothing.
            if self.near.is_none() || key.device().is_none() {
                key.lend(wire);
            }
        }
    }

    /// Through shared memory: whether the link, which was full, takes bytes again.
    pub(super) fn unblocked(&self) -> bool {
        self.writes_wait() && self.wire.as_ref().is_some_and(|wire| wire.has_room())
    }

    /// Through shared memory: has the peer tell when there is room; whether there is already.
    fn await_room(&self) -> bool {
        self.wire.as_ref().is_some_and(|wire| wire.starve())
    }

    /// Cuts the link without a goodbye.
    fn cut(&self) {
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
    }

    fn complete(&self, mut completion: WorkCompletion) {
        completion.source = self.token as u32;
        if !self.cq.push(self.token, completion) {
            self.overrun.store(true, Ordering::SeqCst);
            self.doomed.store(true, Ordering::SeqCst);
        }
    }

    /// Completes the requests at the front of the send queue that are done.
    fn retire(&self, tx: &mut Tx) {
        let acked = tx.acked;
        while let Some(entry) = tx.sq.get_mut(0) {
            if entry.poison.is_some() {
                self.doomed.store(true, Ordering::SeqCst);
                return;
            }
            let done = if entry.wants_answer() { entry.answered } else { tx.base < acked };
            if !done {
                return;
            }
            if entry.signaled {
                if let Some(status) = self.ctx.faults.as_ref().and_then(|faults| faults.fails_completion()) {
                    entry.poison = Some(status);
                    continue;
                }
                let (wr_id, byte_len) = (entry.wr_id, entry.length);
                self.complete(WorkCompletion { wr_id, byte_len, ..WorkCompletion::default() });
            }
            entry.device = None;
            tx.sq.pop();
            tx.base += 1;
        }
    }

    pub(super) fn fail(self: &Arc<Self>, reason: CloseReason) {
        // Even if it failed already: whoever is at it still reads the memory of a frame that was begun.
        let mut rx = self.rx.lock();
        let mut tx = self.tx.lock();
        self.fail_locked(&mut rx, &mut tx, reason);
    }

    /// Ends the queue pair if something doomed it. Called without locks.
    fn check_doom(self: &Arc<Self>) {
        if self.doomed.load(Ordering::SeqCst) && self.closed.get().is_none() {
            let mut rx = self.rx.lock();
            let mut tx = self.tx.lock();
            self.fulfil_doom(&mut rx, &mut tx);
            drop((rx, tx));
            self.make_up();
        }
    }

    /// After `rx` was held by somebody who did not read: others may have come meanwhile to do so, and left it to the holder.
    fn make_up(self: &Arc<Self>) {
        if self.missed.swap(false, Ordering::SeqCst) && self.closed.get().is_none() {
            self.cq.postpone(self);
        }
    }

    fn fulfil_doom(self: &Arc<Self>, rx: &mut Rx, tx: &mut Tx) {
        let status = tx.front_poison().or(tx.refusal_sent);
        let reason = match (self.device_failure.get(), status) {
            (Some(why), _) => CloseReason::Device(Arc::clone(why)),
            _ if self.overrun.load(Ordering::SeqCst) => CloseReason::Device("the completion queue overran".into()),
            (None, Some(status)) => CloseReason::Failed(status),
            (None, None) => return,
        };
        self.fail_locked(rx, tx, reason);
    }

    /// Dooms the queue pair if the peer has not been ready for too long.
    fn check_patience(&self, tx: &mut Tx) {
        let Some(starved) = tx.starved.filter(|_| self.config.rnr_retry < RNR_UNLIMITED) else { return };
        if starved.since.elapsed() >= self.rnr_patience(tx) {
            tx.poison(starved.msn, WcStatus::RnrRetryExceeded);
            self.retire(tx);
        }
    }

    /// The peer's timer, as often as this side tries.
    fn rnr_patience(&self, tx: &Tx) -> Duration {
        tx.peer_rnr_timer.saturating_mul(u32::from(self.config.rnr_retry) + 1)
    }

    /// The peer, or the link, ended it.
    fn stop(self: &Arc<Self>, rx: &mut Rx, stop: Stop) {
        // What the peer acknowledged before is done, whatever came after.
        let news = rx.take_news(self);
        let mut tx = self.tx.lock();
        let reason = match (stop, news) {
            (Stop::Protocol(why), _) | (_, Err(Stop::Protocol(why))) => CloseReason::Protocol(why.into()),
            (Stop::Bye, _) => CloseReason::Peer,
            (Stop::Refused(msn, status), _) => {
                let status =
                    if matches!(self.fault(), Some(CloseReason::Device(_))) { WcStatus::Fatal } else { status };
                let msn = extend(tx.acked, msn);
                if !tx.begun(msn) {
                    CloseReason::Protocol("a NAK for what was not sent".into())
                } else {
                    tx.poison(msn, status);
                    CloseReason::Failed(status)
                }
            }
            (Stop::Device(failed), _) => {
                match failed.read {
                    Some(low) => {
                        let msn = extend(tx.acked, low);
                        tx.poison(msn, WcStatus::Fatal);
                    }
                    None => tx.refusal = tx.refusal.or(Some(rx.failure())),
                }
                CloseReason::Device(failed.error.to_string().into())
            }
            (Stop::Source(Some(low)), _) => {
                let msn = extend(tx.acked, low);
                tx.poison(msn, WcStatus::RemoteOperation);
                CloseReason::Failed(WcStatus::RemoteOperation)
            }
            (Stop::Source(None), _) => {
                tx.refusal = tx.refusal.or(Some(rx.failure()));
                CloseReason::Peer
            }
            (Stop::Lost(why), _) => {
                let oldest = tx.base;
                tx.poison(oldest, WcStatus::RetryExceeded);
                CloseReason::LinkLost(tx.broken.clone().unwrap_or_else(|| why.into()))
            }
        };
        let reason = match (reason, self.fault()) {
            (CloseReason::Peer | CloseReason::Failed(_), Some(fault)) => fault.clone(),
            (reason, _) => reason,
        };
        self.fail_locked(rx, &mut tx, reason);
    }

    /// What was wrong with memory that this side offered, if that is why the peer ends.
    fn fault(&self) -> Option<&CloseReason> {
        self.near.as_ref()?.fault()
    }

    /// The error state: flushes everything, says goodbye, lets go of the link.
    fn fail_locked(self: &Arc<Self>, rx: &mut Rx, tx: &mut Tx, reason: CloseReason) {
        let lost = matches!(reason, CloseReason::LinkLost(_)) || tx.broken.is_some();
        if self.closed.set(reason).is_err() {
            return;
        }
        let mut goodbye = Vec::new();
        if let Some(wire) = &self.wire {
            goodbye.extend_from_slice(&shm::END);
            wire.close_all().iter().for_each(|key| key.forget(wire));
        }
        if !lost {
            tx.rest_of_frame(&mut goodbye);
            let (ack, limit) = self.piggyback();
            if let Some((msn, status)) = tx.refusal.filter(|_| tx.refusal_sent.is_none()) {
                goodbye.extend_from_slice(&Header { ack, limit, ..tx::nak(msn, status) }.encode());
            }
            goodbye.extend_from_slice(&Header { ack, limit, ..Header::new(Kind::Bye) }.encode());
        }
        tx.clear();
        if let Some(near) = &self.near {
            near.close();
        }
        // First of all: it waits for copies into buffers that the completions give back.
        let unfinished = rx.clear();
        while let Some(entry) = tx.sq.pop() {
            let (wr_id, status) = (entry.wr_id, entry.poison.unwrap_or(WcStatus::Flushed));
            entry.device = None;
            self.complete(WorkCompletion { wr_id, status, ..WorkCompletion::default() });
        }
        let flushed = |wr_id, status| WorkCompletion { wr_id, status, opcode: Opcode::Receive, ..Default::default() };
        if let Some(wr_id) = unfinished {
            self.complete(flushed(wr_id, WcStatus::Flushed));
        }
        let mut rq = self.rq.lock();
        rq.closed = true;
        let mut unused = None;
        while let Some(entry) = rq.ring.pop() {
            if self.srq.is_some() {
                // The one that was set aside.
                unused = Some(std::mem::take(entry));
                continue;
            }
            let status = entry.poison.unwrap_or(WcStatus::Flushed);
            entry.device = None;
            self.complete(flushed(entry.wr_id, status));
        }
        drop(rq);
        if let Some(srq) = &self.srq {
            unused.iter_mut().for_each(|unused| self.give_back(srq, unused));
            srq.detach();
        }
        self.tx_blocked.store(false, Ordering::SeqCst);
        self.cq.unlink(self);
        if lost {
            self.cut();
        } else {
            self.ctx.engine.linger(self, goodbye);
        }
        self.cq.report_failed(self.token as u32);
        self.cq.signal();
    }

    /// The engine's look at the clock.
    pub(super) fn tick(self: &Arc<Self>, now: Instant) -> Tick {
        let Some(mut tx) = self.tx.try_lock() else {
            // Somebody is sending: no reason to worry, but come back.
            return Tick { outstanding: true, deadline: None };
        };
        if self.closed.get().is_some() {
            return Tick::default();
        }
        let mut tick = Tick { outstanding: tx.sq.len() > 0 || tx.blocked || self.owes_ack(), deadline: None };
        if tx.sq.len() == 0 {
            self.restart_watch(now);
            return tick;
        }
        let starved = tx.starved.filter(|starved| starved.blocked);
        let (lost, poke) = self.watch_peer(now, starved.is_some());
        let rnr = starved.filter(|_| self.config.rnr_retry < RNR_UNLIMITED).map(|starved| Due {
            at: starved.since.checked_add(self.rnr_patience(&tx)),
            status: WcStatus::RnrRetryExceeded,
            msn: starved.msn,
        });
        let lost = Due { at: lost, status: WcStatus::RetryExceeded, msn: tx.base };
        if poke.is_some_and(|at| now >= at) {
            self.watch.lock().poked = now;
            tx.poke(self);
        }
        let activity = self.activity();
        drop(tx);
        self.check_doom();
        for due in rnr.into_iter().chain([lost]) {
            if due.at.is_some_and(|at| now >= at) {
                self.give_up(due.msn, due.status, activity);
                return Tick::default();
            }
            tick.deadline = tick.deadline.into_iter().chain(due.at).min();
        }
        let next_poke = poke.and_then(|at| if now >= at { now.checked_add(self.config.ack_timeout) } else { Some(at) });
        tick.deadline = tick.deadline.into_iter().chain(next_poke).min();
        tick
    }

    /// When the peer counts as lost, and when to ask it for a sign of life, which only a starved queue pair needs:
    /// any other has sent requests that the peer answers.
    fn watch_peer(&self, now: Instant, starved: bool) -> (Option<Instant>, Option<Instant>) {
        if self.config.ack_timeout == Duration::ZERO {
            return (None, None);
        }
        let sign = if starved { self.heard() } else { self.activity() };
        let mut watch = self.watch.lock();
        if sign != watch.sign || starved != watch.starved {
            *watch = Watch { sign, starved, since: now, poked: now };
        }
        let patience = self.config.ack_timeout.saturating_mul(u32::from(self.config.retry_count) + 1);
        let poke = watch.poked.checked_add(self.config.ack_timeout).filter(|_| starved);
        (watch.since.checked_add(patience), poke)
    }

    /// Ends the queue pair because `msn` waited too long, unless it got further in the meantime.
    fn give_up(self: &Arc<Self>, msn: u64, status: WcStatus, activity: u64) {
        let mut rx = self.rx.lock();
        // If this side was away, what the peer said in time lies unread.
        self.drive_locked(&mut rx, true);
        let mut tx = self.tx.lock();
        let stuck = match status {
            WcStatus::RnrRetryExceeded => tx.starved.is_some_and(|s| s.blocked && s.msn == msn),
            _ => tx.base == msn && tx.sq.len() > 0 && self.activity() == activity,
        };
        if stuck {
            tx.poison(msn, status);
            self.fail_locked(&mut rx, &mut tx, CloseReason::Failed(status));
        }
        drop((rx, tx));
        self.make_up();
    }

    /// Whether nobody gives the peer up for an acknowledgement that waits until an engine's next tick.
    fn outlasts_a_tick(&self) -> bool {
        let timeout = self.config.ack_timeout;
        timeout == Duration::ZERO || timeout >= LOOKED_AT_TICK * 4
    }

    /// Forgets how long nothing happened: the engine did not watch.
    pub(super) fn restart_watch(&self, now: Instant) {
        let mut watch = self.watch.lock();
        (watch.since, watch.poked) = (now, now);
    }

    /// Keeps everybody else from driving this queue pair, as if its process hung.
    #[cfg(test)]
    pub(super) fn mute(self: &Arc<Self>) -> std::sync::mpsc::Sender<()> {
        let shared = Arc::clone(self);
        let (hold, held) = (std::sync::mpsc::channel::<()>(), std::sync::mpsc::channel::<()>());
        std::thread::spawn(move || {
            let rx = shared.rx.lock();
            let _ = held.0.send(());
            let _ = hold.1.recv();
            drop(rx);
            shared.make_up();
        });
        let _ = held.1.recv();
        hold.0
    }

    pub(super) fn as_socket(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
