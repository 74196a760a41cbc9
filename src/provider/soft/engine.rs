//! The engine: one thread per device that steps in where nobody looks.
//!
//! Whoever polls a completion queue makes its progress, without a thread in between. But a peer's Read must be served
//! while this process is busy with something else, and timers must run. So each completion queue is in one of two modes:
//!
//! - *looked at*: somebody polls it. The engine does not wait on its sockets, so that arriving data does not wake it in
//!   vain; it only compares the number of polls at every tick, 1 ms at first and 8 ms when the polling goes on.
//! - *watched*: nobody polls it. The engine waits on its sockets. When something arrives, the program has a short while
//!   to look for itself; if it does not, the engine serves the sockets from then on without waiting, until somebody looks.
//!
//! A device on which nothing is outstanding and nobody looks causes no wake-ups at all.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use super::cq::{CqShared, ready};
use super::linger::Lingering;
use super::qp::QpShared;
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// For so long the program may look for itself before the engine does. More than waking a tokio worker takes (20 to 40 us).
const GRACE: Duration = Duration::from_micros(200);
/// After serving, the engine looks again for so long before it sleeps: a peer's next request comes soon.
const SPIN: Duration = Duration::from_micros(50);
const TICK: Duration = Duration::from_millis(1);
/// While polling goes on, ticks need not be closer than this.
pub(super) const LOOKED_AT_TICK: Duration = Duration::from_millis(8);
/// While only timers run.
const TIMER_TICK: Duration = Duration::from_millis(50);
/// After so many ticks without a look, nobody looks.
const QUIET_TICKS: u32 = 8;

/// After serving one queue for so long without a pause, the others and the timers get their turn.
const TURN: Duration = Duration::from_millis(2);

const WAKE: u64 = 0;

/// The part of the engine that others reach.
#[derive(Debug)]
pub(super) struct Control {
    epoll: OwnedFd,
    wake: OwnedFd,
    stopped: AtomicBool,
    arrivals: Mutex<Arrivals>,
    /// Rounds of the engine's loop: an idle device makes none.
    rounds: AtomicU64,
    #[cfg(test)]
    held_up: AtomicBool,
}

#[derive(Debug, Default)]
struct Arrivals {
    queues: Vec<Weak<CqShared>>,
    lingering: Vec<Lingering>,
}

impl Control {
    pub(super) fn start() -> Result<Arc<Self>> {
        let failed = |error: io::Error| Error::io("start", "software NIC", error);
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| failed(e.into()))?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(|e| failed(e.into()))?;
        let control = Arc::new(Self {
            epoll,
            wake,
            stopped: AtomicBool::new(false),
            arrivals: Mutex::default(),
            rounds: AtomicU64::new(0),
            #[cfg(test)]
            held_up: AtomicBool::new(false),
        });
        // With room from the start: on a busy host the thread gets its first turn when operations run already, and they allocate
        // nothing.
        let engine = Engine {
            control: Arc::clone(&control),
            queues: Vec::with_capacity(4),
            lingering: Vec::new(),
            pairs: Vec::with_capacity(16),
        };
        std::thread::Builder::new().name("rdma-soft".into()).spawn(move || engine.run()).map_err(failed)?;
        Ok(control)
    }

    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The thread ends by itself, after the links that still drain; nobody waits for it.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(super) fn adopt(&self, queue: &Arc<CqShared>) {
        self.arrivals.lock().queues.push(Arc::downgrade(queue));
        self.wake();
    }

    /// Says goodbye on a failed queue pair's socket, and keeps the socket until the peer has read it, for a bounded time.
    pub(super) fn linger(&self, qp: &Arc<QpShared>, goodbye: Vec<u8>) {
        let mut lingering = Lingering::new(Arc::clone(qp), goodbye);
        if !lingering.advance() {
            self.arrivals.lock().lingering.push(lingering);
            self.wake();
        }
    }

    fn spin(&self) -> Duration {
        #[cfg(test)]
        if self.held_up.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        SPIN
    }

    /// From now on the engine is held up after each look for longer than it would look on.
    #[cfg(test)]
    pub(super) fn hold_up(&self) {
        self.held_up.store(true, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }
}

struct Engine {
    control: Arc<Control>,
    queues: Vec<Watched>,
    lingering: Vec<Lingering>,
    pairs: Vec<Arc<QpShared>>,
}

/// A completion queue and what the engine thinks of it.
struct Watched {
    queue: Weak<CqShared>,
    id: u64,
    looks: u64,
    /// Its sockets are in the engine's epoll.
    watching: bool,
    /// Somebody looked since the engine last had to serve it.
    patient: bool,
    signalled: bool,
    quiet: u32,
    tick: Duration,
    /// When the engine wants to look at it next; `None`: only when it is told to.
    due: Option<Instant>,
}

impl Engine {
    fn run(mut self) {
        while self.round() {}
    }

    fn round(&mut self) -> bool {
        self.wait();
        self.control.rounds.fetch_add(1, Ordering::Relaxed);
        self.welcome();
        let control = Arc::clone(&self.control);
        let pairs = &mut self.pairs;
        self.queues.retain_mut(|watched| watched.attend(&control, pairs));
        self.lingering.retain_mut(|lingering| {
            let done = lingering.advance() || lingering.expired(Instant::now());
            if done {
                let _ = epoll::delete(&control.epoll, lingering.socket());
                lingering.close();
            }
            !done
        });
        !(self.control.stopped.load(Ordering::SeqCst) && self.lingering.is_empty() && self.nobody_arrived())
    }

    fn nobody_arrived(&self) -> bool {
        self.control.arrivals.lock().lingering.is_empty()
    }

    fn wait(&mut self) {
        let due = self.queues.iter().filter_map(|watched| watched.due);
        let next = due.chain(self.lingering.iter().map(Lingering::deadline)).min();
        let timeout = next.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() }
        });
        for (token, _) in ready(&self.control.epoll, timeout.as_ref()).unwrap_or_default() {
            if token == WAKE {
                let _ = rustix::io::read(&self.control.wake, &mut [0; 8]);
            } else if let Some(watched) = self.queues.iter_mut().find(|watched| watched.id == token) {
                watched.signalled = true;
            }
        }
    }

    fn welcome(&mut self) {
        let Arrivals { queues, lingering } = std::mem::take(&mut *self.control.arrivals.lock());
        for queue in queues {
            if let Some(strong) = queue.upgrade() {
                self.queues.push(Watched::new(queue, &strong, &self.control));
            }
        }
        for mut lingering in lingering {
            let flags = lingering.wants();
            let data = EventData::new_u64(u64::MAX);
            if epoll::add(&self.control.epoll, lingering.socket(), data, flags).is_ok() {
                self.lingering.push(lingering);
            } else {
                lingering.close();
            }
        }
    }
}

impl Watched {
    fn new(queue: Weak<CqShared>, strong: &CqShared, control: &Control) -> Self {
        let looks = strong.looks.load(Ordering::SeqCst);
        let mut watched = Self {
            queue,
            id: strong.id,
            looks,
            watching: false,
            patient: true,
            signalled: false,
            quiet: 0,
            tick: TICK,
            due: None,
        };
        watched.watch(strong, control);
        watched
    }

    /// Edge-triggered: only news count, since what is there already has been seen to.
    fn watch(&mut self, queue: &CqShared, control: &Control) {
        let flags = EventFlags::IN | EventFlags::ET;
        if !self.watching && epoll::add(&control.epoll, queue.epoll(), EventData::new_u64(self.id), flags).is_ok() {
            self.watching = true;
            self.rest(queue);
        }
    }

    /// Has peers whose links are in shared memory ring from now on.
    fn rest(&mut self, queue: &CqShared) {
        if queue.rest() {
            self.signalled = true;
            self.due = Some(Instant::now());
        }
    }

    fn look_away(&mut self, queue: &CqShared, control: &Control) {
        if std::mem::take(&mut self.watching) {
            let _ = epoll::delete(&control.epoll, queue.epoll());
        }
        self.patient = true;
        self.signalled = false;
    }

    /// Whether somebody looked since the last call.
    fn looked(&mut self, queue: &CqShared) -> bool {
        let looks = queue.looks.load(Ordering::SeqCst);
        std::mem::replace(&mut self.looks, looks) != looks
    }

    /// One round for this queue; `false` when it is gone.
    fn attend(&mut self, control: &Control, pairs: &mut Vec<Arc<QpShared>>) -> bool {
        let Some(queue) = self.queue.upgrade() else { return false };
        if self.watching && std::mem::take(&mut self.signalled) {
            self.answer(&queue, control);
        }
        let attended = queue.attended.load(Ordering::SeqCst);
        let due = self.due.is_some_and(|due| due <= Instant::now());
        if due || (attended && self.due.is_none()) {
            self.tick(&queue, control, pairs);
        }
        true
    }

    /// Something arrived on a watched queue.
    fn answer(&mut self, queue: &CqShared, control: &Control) {
        if self.patient {
            std::thread::sleep(GRACE);
            if self.looked(queue) {
                return self.leave_to_others(queue, control);
            }
            self.patient = false;
        }
        let started = Instant::now();
        let mut idle_since = started;
        loop {
            if started.elapsed() > TURN {
                // On with it in the next round.
                self.signalled = true;
                self.due = Some(started);
                return;
            }
            let driven = queue.drive();
            if self.looked(queue) {
                return self.leave_to_others(queue, control);
            }
            if driven.worked || driven.more {
                idle_since = Instant::now();
            }
            // Asked only now: on a busy host the time may be over before the first look, and nobody tells of this arrival again.
            if !driven.more && idle_since.elapsed() >= control.spin() {
                break;
            }
            rustix::thread::sched_yield();
        }
        self.rest(queue);
    }

    /// Somebody looks: count their looks from now on.
    fn leave_to_others(&mut self, queue: &CqShared, control: &Control) {
        self.look_away(queue, control);
        queue.attended.store(true, Ordering::SeqCst);
        self.quiet = 0;
        self.tick = TICK;
        self.due = Some(Instant::now() + TICK);
    }

    fn tick(&mut self, queue: &Arc<CqShared>, control: &Control, pairs: &mut Vec<Arc<QpShared>>) {
        let now = Instant::now();
        let started = self.due.is_none();
        if started || self.looked(queue) {
            if started || self.watching {
                self.look_away(queue, control);
                self.tick = TICK;
            } else {
                self.tick = (self.tick * 2).min(LOOKED_AT_TICK);
            }
            self.quiet = 0;
        } else {
            self.quiet += 1;
            // Nobody looked since the last tick: serve what lies there, and from now on at once.
            let driven = queue.drive();
            if driven.worked || driven.more {
                self.watch(queue, control);
                self.patient = false;
                self.signalled = true;
            } else if self.watching {
                // The drive may have taken a bell; ringing it took the flag down that asks for the next.
                self.rest(queue);
            }
            if self.watching {
                self.tick = (self.tick * 2).min(TIMER_TICK);
            } else {
                self.tick = TICK;
                if self.quiet >= QUIET_TICKS {
                    self.watch(queue, control);
                }
            }
        }
        if queue.injects_faults() {
            self.tick = TICK;
        }
        let (outstanding, deadline) = self.timers(queue, pairs, now, started);
        let at = now + self.tick;
        self.due = Some(deadline.map_or(at, |deadline| deadline.min(at)));
        if self.watching && !outstanding {
            // Rest. Whoever posts wakes us; whoever posted before this store is seen by looking once more.
            queue.attended.store(false, Ordering::SeqCst);
            let (outstanding, _) = self.timers(queue, pairs, now, false);
            if outstanding {
                queue.attended.store(true, Ordering::SeqCst);
            } else {
                self.due = None;
            }
        }
        if self.signalled {
            self.due = Some(now);
        }
    }

    /// Runs the timers of all queue pairs: whether anything is outstanding, and what is due first.
    fn timers(
        &mut self,
        queue: &Arc<CqShared>,
        pairs: &mut Vec<Arc<QpShared>>,
        now: Instant,
        started: bool,
    ) -> (bool, Option<Instant>) {
        let mut next = queue.release_delayed(now);
        let mut outstanding = next.is_some() || queue.has_postponed();
        queue.queue_pairs(pairs);
        for qp in pairs.drain(..) {
            if started {
                qp.restart_watch(now);
            }
            if self.quiet > 0 || !qp.ack_is_urgent() {
                qp.flush_ack();
            }
            let tick = qp.tick(now);
            outstanding |= tick.outstanding;
            next = next.into_iter().chain(tick.deadline).min();
        }
        (outstanding, next)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        for lingering in &mut self.lingering {
            lingering.close();
        }
    }
}
