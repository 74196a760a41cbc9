//! Completion queues. Polling one makes progress on all its queue pairs.

use std::collections::{HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use smallvec::SmallVec;

use super::context::Shared;
use super::qp::{Driven, QpShared};
use super::wires::Wires;
use crate::error::{Error, Result};
use crate::provider::WorkCompletion;
use crate::sync::Mutex;

/// Token of the notification eventfd; queue pairs have the others.
const NOTIFICATION: u64 = 0;

/// Beside the token of a queue pair whose link is in shared memory: that of its bell, the eventfd by which its peer wakes this queue.
/// Each time it is written counts as an edge, see epoll(7), so nobody reads it.
const BELL: u64 = 1 << 63;

/// At every so-many-th look epoll is asked about links through shared memory too: only their sockets tell that a peer has died.
const SOCKET_LOOKS: u64 = 512;

/// The same where there are links of which only epoll tells.
const CROWDED_LOOKS: u64 = 16;

/// At every so-many-th look the links are looked at although posting has added completions.
const POSTED_LOOKS: u64 = 8;

/// Queue pairs served by one look; the rest stay ready for the next.
const READY: usize = 64;

/// The same for those that are driven again because they had more to do than one drive takes: up to a millisecond each.
const POSTPONED: usize = 4;

/// No waiting.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Tokens of what is ready, and whether it takes bytes; waits as long as `timeout` says, without limit for `None`.
pub(super) fn ready(epoll: &OwnedFd, timeout: Option<&Timespec>) -> Result<SmallVec<[(u64, bool); READY]>, Errno> {
    let mut space = [const { MaybeUninit::<epoll::Event>::uninit() }; READY];
    match epoll::wait(epoll, &mut space[..], timeout) {
        Ok((events, _)) => {
            let writable = |event: &epoll::Event| {
                let flags = event.flags;
                flags.contains(EventFlags::OUT)
            };
            Ok(events.iter().map(|event| (event.data.u64(), writable(event))).collect())
        }
        Err(Errno::INTR) => Ok(SmallVec::new()),
        Err(error) => Err(error),
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Cq {
    pub(super) shared: Arc<CqShared>,
}

#[derive(Debug)]
pub(super) struct CqShared {
    ctx: Arc<Shared>,
    pub(super) id: u64,
    /// The sockets of all queue pairs and the eventfd: what tokio waits for.
    epoll: OwnedFd,
    event: OwnedFd,
    ring: Mutex<Completions>,
    /// Queue pairs that went into the error state and whose owner was not told yet.
    failed: Mutex<Vec<u32>>,
    any_failed: AtomicBool,
    /// Somebody sleeps, or is about to; whoever pushes a completion meanwhile wakes it once.
    armed: AtomicBool,
    /// There may be something to read in the eventfd; saves looking when the channel is readable for a socket's sake.
    notified: AtomicBool,
    events_read: AtomicU64,
    events_acknowledged: AtomicU64,
    /// Calls of `poll`: the engine leaves those alone who look.
    pub(super) looks: AtomicU64,
    /// The engine is watching the clock for this queue.
    pub(super) attended: AtomicBool,
    links: Mutex<HashMap<u64, Weak<QpShared>>>,
    /// Those of the links that go through shared memory.
    wires: Wires,
    /// Somebody has armed the channel, and was not woken by it since.
    resting: AtomicBool,
    /// The channel became readable since epoll was last asked, perhaps for a socket's sake.
    woken: AtomicBool,
    /// Bytes moved since this was last asked for.
    worked: AtomicBool,
    link_count: AtomicUsize,
    /// Queue pairs that have read from their sockets what they have not carried out: epoll has no more to say of it.
    postponed: Mutex<VecDeque<Weak<QpShared>>>,
    any_postponed: AtomicBool,
    /// The last poll left completions behind.
    backlog: AtomicBool,
    /// Posting has added completions.
    posted: AtomicBool,
    poller: Mutex<Poller>,
}

#[derive(Debug, Default)]
struct Completions {
    ready: VecDeque<(u64, WorkCompletion)>,
    depth: usize,
    /// Held back by fault injection, oldest due first.
    delayed: Vec<(Instant, u64, WorkCompletion)>,
}

#[derive(Debug, Default)]
struct Poller {
    /// Queue pairs whose acknowledgement waits for something to ride on until the next look.
    deferred: Vec<Weak<QpShared>>,
}

impl Cq {
    pub(super) fn create(ctx: &Arc<Shared>, depth: u32) -> Result<Self> {
        let failed = |error: Errno| Error::io("create", "completion queue", error.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(failed)?;
        epoll::add(&epoll, &event, EventData::new_u64(NOTIFICATION), EventFlags::IN).map_err(failed)?;
        let depth = depth as usize;
        let shared = Arc::new(CqShared {
            ctx: Arc::clone(ctx),
            id: ctx.next_id(),
            epoll,
            event,
            ring: Mutex::new(Completions { ready: VecDeque::with_capacity(depth), depth, delayed: Vec::new() }),
            failed: Mutex::default(),
            any_failed: AtomicBool::new(false),
            armed: AtomicBool::new(false),
            notified: AtomicBool::new(false),
            events_read: AtomicU64::new(0),
            events_acknowledged: AtomicU64::new(0),
            looks: AtomicU64::new(0),
            attended: AtomicBool::new(false),
            links: Mutex::default(),
            wires: Wires::default(),
            resting: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            worked: AtomicBool::new(false),
            link_count: AtomicUsize::new(0),
            postponed: Mutex::default(),
            any_postponed: AtomicBool::new(false),
            backlog: AtomicBool::new(false),
            posted: AtomicBool::new(false),
            poller: Mutex::default(),
        });
        ctx.engine.adopt(&shared);
        Ok(Self { shared })
    }

    #[inline(never)]
    pub(crate) fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize> {
        self.shared.poll(out)
    }

    pub(crate) fn arm(&self) -> Result<()> {
        self.shared.armed.store(true, Ordering::SeqCst);
        self.shared.resting.store(true, Ordering::Relaxed);
        self.shared.sleep();
        Ok(())
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }

    pub(crate) fn read_events(&self) -> Result<u32> {
        self.shared.woken.store(true, Ordering::Relaxed);
        self.shared.resting.store(false, Ordering::Relaxed);
        if !self.shared.notified.swap(false, Ordering::SeqCst) {
            return Ok(0);
        }
        let mut count = [0; 8];
        match rustix::io::read(&self.shared.event, &mut count) {
            Ok(_) => {
                let events = u64::from_ne_bytes(count);
                self.shared.events_read.fetch_add(events, Ordering::Relaxed);
                Ok(u32::try_from(events).unwrap_or(u32::MAX))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(error) => Err(Error::io("read", "completion channel", error.into())),
        }
    }

    pub(crate) fn acknowledge(&self, events: u32) {
        self.shared.events_acknowledged.fetch_add(u64::from(events), Ordering::Relaxed);
    }

    pub(crate) fn resize(&self, depth: u32) -> Result<()> {
        let mut ring = self.shared.ring.lock();
        ring.depth = ring.depth.max(depth as usize);
        let more = ring.depth.saturating_sub(ring.ready.len());
        ring.ready.reserve(more);
        Ok(())
    }

    pub(crate) fn lives_in_memory(&self) -> bool {
        let wires = self.shared.wires.count();
        wires > 0 && wires == self.shared.link_count.load(Ordering::Relaxed)
    }

    pub(crate) fn take_worked(&self) -> bool {
        self.shared.worked.load(Ordering::Relaxed) && self.shared.worked.swap(false, Ordering::Relaxed)
    }

    pub(crate) fn take_failed(&self, numbers: &mut Vec<u32>) -> bool {
        self.shared.any_failed.load(Ordering::SeqCst) && self.shared.take_failed(numbers)
    }

    pub(super) fn belongs_to(&self, ctx: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared.ctx, ctx)
    }

    /// Events read and events acknowledged.
    #[cfg(test)]
    pub(super) fn event_counts(&self) -> (u64, u64) {
        let read = self.shared.events_read.load(Ordering::Relaxed);
        (read, self.shared.events_acknowledged.load(Ordering::Relaxed))
    }
}

impl CqShared {
    fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize> {
        // Only one thread at a time comes here.
        let looks = self.looks.load(Ordering::Relaxed).wrapping_add(1);
        self.looks.store(looks, Ordering::Release);
        // After a full batch there may be another: no hurry to make more. Nor where posting has left some, but then and when others
        // want to be heard too.
        let posted = self.posted.load(Ordering::Relaxed);
        if posted {
            self.posted.store(false, Ordering::Relaxed);
        }
        // Nor may the last look before a sleep leave it at that.
        let enough = posted && looks % POSTED_LOOKS != 0 && !self.resting.load(Ordering::Relaxed);
        if !enough && !self.backlog.load(Ordering::Relaxed) {
            self.progress()?;
        }
        let mut ring = self.ring.lock();
        let count = match &self.ctx.faults {
            Some(faults) => {
                ring.release(Instant::now());
                ring.take(out, |ring| faults.reorders().map(|draw| ring.shuffled(draw)))
            }
            None => ring.take(out, |_| None),
        };
        self.backlog.store(!ring.ready.is_empty(), Ordering::Relaxed);
        Ok(count)
    }

    fn progress(&self) -> Result<()> {
        let mut poller = self.poller.lock();
        let deferred = &mut poller.deferred;
        // A look has passed and nothing was sent in which these acknowledgements could ride.
        for qp in deferred.drain(..) {
            if let Some(qp) = qp.upgrade() {
                qp.flush_ack();
            }
        }
        let postponed = self.take_postponed();
        let mut more = false;
        for qp in &postponed {
            more |= self.look_at(qp, qp.unblocked(), deferred);
        }
        let driven = |qp: &QpShared| postponed.iter().any(|other| other.token == qp.token);
        let links = self.link_count.load(Ordering::SeqCst);
        let wires = self.wires.count();
        let news = self.wires.with_news();
        let told = !news.is_empty();
        for qp in news.into_iter().filter(|qp| !driven(qp)) {
            more |= self.look_at(&qp, qp.unblocked(), deferred);
        }
        let only = match links {
            1 if wires == 0 => self.links.lock().values().next().and_then(Weak::upgrade),
            _ => None,
        };
        match only {
            // Asking epoll whether the only socket is ready costs as much as asking the socket;
            // but only epoll knows when a full socket takes bytes again.
            Some(qp) if driven(&qp) && !qp.writes_wait() => {}
            Some(qp) if !qp.writes_wait() => more |= self.look_at(&qp, false, deferred),
            _ if links == wires && !self.asks_epoll(told) => {}
            _ => {
                let ready = ready(&self.epoll, Some(&NOW))
                    .map_err(|error| Error::io("poll", "completion queue", error.into()))?;
                more |= ready.len() == READY;
                for (token, writable) in ready {
                    if token & BELL != 0 {
                        // It was meant for the engine as well, which the peer does not ring for again before it has seen to that.
                        self.want_attention();
                        // And for this sleeper, whom the peer does not ring for again either.
                        more |= self.resting.load(Ordering::Relaxed);
                        for qp in self.wires.rung(token & !BELL) {
                            more |= self.look_at(&qp, qp.unblocked(), deferred);
                        }
                        continue;
                    }
                    if let Some(qp) = self.told_of(token).filter(|qp| writable || !driven(qp)) {
                        more |= self.look_at(&qp, writable, deferred);
                    }
                }
            }
        }
        if more || self.has_postponed() {
            // Data is left that epoll has already told of: whoever goes to sleep now must not wait for news.
            self.notify();
        }
        Ok(())
    }

    fn look_at(&self, qp: &Arc<QpShared>, writable: bool, deferred: &mut Vec<Weak<QpShared>>) -> bool {
        let driven = qp.drive(false, writable);
        if driven.worked {
            self.worked.store(true, Ordering::Relaxed);
        }
        if qp.owes_ack() {
            if qp.ack_is_urgent() {
                deferred.push(Arc::downgrade(qp));
            }
            self.want_attention();
        }
        driven.more
    }

    /// Whether epoll has to be asked about sockets, none of which carries a stream. Whoever is about to sleep has to, once after it was woken,
    /// so that nothing that has woken somebody is forgotten.
    fn asks_epoll(&self, told: bool) -> bool {
        let looks = if self.wires.crowded() { CROWDED_LOOKS } else { SOCKET_LOOKS };
        let now = self.looks.load(Ordering::Relaxed) % looks == 0;
        let due = !told || self.resting.load(Ordering::Relaxed);
        now || (due && self.woken.load(Ordering::Relaxed) && self.woken.swap(false, Ordering::Relaxed))
    }

    /// Has peers wake whoever goes to sleep now. Another look comes after it.
    pub(super) fn sleep(&self) {
        self.wires.sleep();
    }

    /// Looks at this queue pair's link each time, for it may go on at any moment.
    pub(super) fn watch(&self, qp: &QpShared) {
        if let Some(gives_way) = self.wires.watch(qp.token) {
            self.postpone(&gives_way);
        }
    }

    /// The same for the engine; whether something has come meanwhile.
    pub(super) fn rest(&self) -> bool {
        self.wires.sleep();
        !self.wires.with_news().is_empty()
    }

    /// Posting has added a completion: the next look finds it.
    pub(super) fn posted(&self) {
        self.posted.store(true, Ordering::Relaxed);
    }

    /// The queue pair that epoll told of.
    fn told_of(&self, token: u64) -> Option<Arc<QpShared>> {
        let qp = self.links.lock().get(&token).and_then(Weak::upgrade)?;
        if let Some(wire) = &qp.wire {
            wire.hear();
        }
        Some(qp)
    }

    /// The engine's turn: serves what is ready and writes acknowledgements that nobody else will write.
    pub(super) fn drive(&self) -> Driven {
        let mut total = Driven::default();
        let mut serve = |qp: Arc<QpShared>, writable| {
            self.ctx.stats.engine_drives.fetch_add(1, Ordering::Relaxed);
            let driven = qp.drive(true, writable);
            total.worked |= driven.worked;
            total.more |= driven.more;
        };
        let postponed = self.take_postponed();
        postponed.iter().for_each(|qp| serve(Arc::clone(qp), qp.unblocked()));
        let driven = |qp: &QpShared| postponed.iter().any(|other| other.token == qp.token);
        for qp in self.wires.with_news().into_iter().filter(|qp| !driven(qp)) {
            let writable = qp.unblocked();
            serve(qp, writable);
        }
        let Ok(ready) = ready(&self.epoll, Some(&NOW)) else { return total };
        let full = ready.len() == READY;
        for (token, writable) in ready {
            if token & BELL != 0 {
                for qp in self.wires.rung(token & !BELL) {
                    let writable = qp.unblocked();
                    serve(qp, writable);
                }
                continue;
            }
            if let Some(qp) = self.told_of(token).filter(|qp| writable || !driven(qp)) {
                serve(qp, writable);
            }
        }
        total.more |= full || self.has_postponed();
        if total.more {
            self.notify();
        }
        self.signal();
        total
    }

    /// This queue pair is to be driven again, whether or not more comes.
    pub(super) fn postpone(&self, qp: &Arc<QpShared>) {
        if !qp.postponed.swap(true, Ordering::SeqCst) {
            self.postponed.lock().push_back(Arc::downgrade(qp));
        }
        self.any_postponed.store(true, Ordering::SeqCst);
        self.want_attention();
        self.notify();
    }

    fn take_postponed(&self) -> SmallVec<[Arc<QpShared>; POSTPONED]> {
        let mut taken = SmallVec::new();
        if self.has_postponed() {
            let mut list = self.postponed.lock();
            while taken.len() < POSTPONED {
                let Some(qp) = list.pop_front() else { break };
                if let Some(qp) = qp.upgrade() {
                    qp.postponed.store(false, Ordering::SeqCst);
                    taken.push(qp);
                }
            }
            self.any_postponed.store(!list.is_empty(), Ordering::SeqCst);
        }
        taken
    }

    #[cfg(test)]
    pub(super) fn postponed_count(&self) -> usize {
        self.postponed.lock().len()
    }

    pub(super) fn has_postponed(&self) -> bool {
        self.any_postponed.load(Ordering::SeqCst)
    }

    /// All queue pairs of this queue.
    pub(super) fn queue_pairs(&self, out: &mut Vec<Arc<QpShared>>) {
        out.extend(self.links.lock().values().filter_map(Weak::upgrade));
    }

    pub(super) fn link(&self, qp: &Arc<QpShared>) -> Result<()> {
        let failed = |error: Errno| Error::io("watch", "socket", error.into());
        let mut links = self.links.lock();
        if let Some(wire) = &qp.wire {
            let token = EventData::new_u64(qp.token | BELL);
            epoll::add(&self.epoll, wire.own_bell(), token, EventFlags::IN | EventFlags::ET).map_err(failed)?;
        }
        let flags = EventFlags::IN | EventFlags::RDHUP;
        if let Err(error) = epoll::add(&self.epoll, qp.as_socket(), EventData::new_u64(qp.token), flags) {
            if let Some(wire) = &qp.wire {
                let _ = epoll::delete(&self.epoll, wire.own_bell());
            }
            return Err(failed(error));
        }
        links.insert(qp.token, Arc::downgrade(qp));
        self.link_count.store(links.len(), Ordering::SeqCst);
        if let Some(wire) = &qp.wire {
            let has_news = self.wires.insert(qp, wire);
            drop(links);
            if has_news {
                self.postpone(qp);
            }
            self.notify();
            self.want_attention();
        }
        Ok(())
    }

    pub(super) fn unlink(&self, qp: &QpShared) {
        let mut links = self.links.lock();
        if links.remove(&qp.token).is_some() {
            let _ = epoll::delete(&self.epoll, qp.as_socket());
        }
        self.link_count.store(links.len(), Ordering::SeqCst);
        if let Some(wire) = &qp.wire {
            let _ = epoll::delete(&self.epoll, wire.own_bell());
            self.wires.remove(qp.token);
        }
    }

    pub(super) fn watch_writable(&self, qp: &QpShared, wanted: bool) {
        let mut flags = EventFlags::IN | EventFlags::RDHUP;
        flags.set(EventFlags::OUT, wanted);
        let _ = epoll::modify(&self.epoll, qp.as_socket(), EventData::new_u64(qp.token), flags);
    }

    /// Adds a completion; `false` when there was no room for it (it is kept, but its queue pair must end).
    pub(super) fn push(&self, qp: u64, completion: WorkCompletion) -> bool {
        let mut ring = self.ring.lock();
        if let Some(faults) = &self.ctx.faults {
            let ahead = ring.delayed.iter().rev().find(|(_, other, _)| *other == qp).map(|(due, ..)| *due);
            let delay = faults.delays().and_then(|delay| Instant::now().checked_add(delay));
            if let Some(due) = delay.max(ahead) {
                let at = ring.delayed.partition_point(|(other, ..)| *other <= due);
                ring.delayed.insert(at, (due, qp, completion));
                drop(ring);
                self.want_attention();
                return true;
            }
        }
        ring.ready.push_back((qp, completion));
        ring.ready.len() <= ring.depth
    }

    /// Tells the poller that a queue pair went into the error state, once its completions are all there.
    pub(super) fn report_failed(&self, number: u32) {
        self.failed.lock().push(number);
        self.any_failed.store(true, Ordering::SeqCst);
    }

    fn take_failed(&self, numbers: &mut Vec<u32>) -> bool {
        let ring = self.ring.lock();
        let mut failed = self.failed.lock();
        let before = numbers.len();
        // One with completions that are still held back has to wait for them.
        failed.retain(|number| {
            let held = ring.delayed.iter().any(|(_, token, _)| *token as u32 == *number);
            if !held {
                numbers.push(*number);
            }
            held
        });
        self.any_failed.store(!failed.is_empty(), Ordering::SeqCst);
        numbers.len() > before
    }

    /// Wakes the sleeper, if there is one and something to poll.
    pub(super) fn signal(&self) {
        if !self.armed.load(Ordering::SeqCst) {
            return;
        }
        if self.any_failed.load(Ordering::SeqCst) || !self.ring.lock().ready.is_empty() {
            self.notify();
        }
    }

    pub(super) fn notify(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
            // Afterwards, so that whoever sees it finds the event.
            self.notified.store(true, Ordering::SeqCst);
        }
    }

    /// Has the engine watch the clock for this queue; costs a system call only when it slept.
    pub(super) fn want_attention(&self) {
        if !self.attended.load(Ordering::SeqCst) && !self.attended.swap(true, Ordering::SeqCst) {
            self.ctx.engine.wake();
        }
    }

    /// Lets go of delayed completions whose time has come; when the next one is due.
    pub(super) fn release_delayed(&self, now: Instant) -> Option<Instant> {
        self.ctx.faults.as_ref()?;
        let mut ring = self.ring.lock();
        ring.release(now);
        let next = ring.delayed.first().map(|(due, ..)| *due);
        drop(ring);
        self.signal();
        next
    }

    /// Lets go of all that is held back of one queue pair: its owner forgets it.
    pub(super) fn release_all(&self, qp: u64) {
        if self.ctx.faults.is_some() {
            let mut ring = self.ring.lock();
            let Completions { ready, delayed, .. } = &mut *ring;
            ready.extend(
                delayed.iter().filter(|(_, other, _)| *other == qp).map(|(_, _, completion)| (qp, *completion)),
            );
            delayed.retain(|(_, other, _)| *other != qp);
        }
    }

    pub(super) fn injects_faults(&self) -> bool {
        self.ctx.faults.is_some()
    }

    pub(super) fn epoll(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Completions {
    fn take(&mut self, out: &mut [WorkCompletion], choose: impl Fn(&Self) -> Option<usize>) -> usize {
        let mut count = 0;
        while count < out.len() && !self.ready.is_empty() {
            let taken = match choose(self) {
                Some(index) => self.ready.remove(index),
                None => self.ready.pop_front(),
            };
            let Some((_, completion)) = taken else { break };
            out[count] = completion;
            count += 1;
        }
        count
    }

    fn release(&mut self, now: Instant) {
        let due = self.delayed.partition_point(|(due, ..)| *due <= now);
        self.ready.extend(self.delayed.drain(..due).map(|(_, qp, completion)| (qp, completion)));
    }

    /// A random queue pair's oldest completion.
    fn shuffled(&self, draw: u64) -> usize {
        let pick = (draw % self.ready.len() as u64) as usize;
        let qp = self.ready[pick].0;
        self.ready.iter().position(|(other, _)| *other == qp).unwrap_or(0)
    }
}
