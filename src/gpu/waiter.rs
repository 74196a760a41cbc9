//! One thread that looks at events for all who await them.
//!
//! A callback of the driver would cost 16 to 60 us (measured on an H200), and hold up the GPU's other streams meanwhile.
//! Looking costs 1.6 us, so one thread does it for everybody: as fast as it can at first, then at growing intervals,
//! and not at all while nobody waits.

use std::sync::{Arc, Weak};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::error::GpuError;
use super::events::Event;
use crate::sync::Mutex;

/// After the newest arrival, so long without a pause; then with others' turns in between; then asleep between looks.
const EAGER: Duration = Duration::from_micros(100);
const POLITE: Duration = Duration::from_millis(2);
const SHORT_NAP: Duration = Duration::from_micros(50);
const LONG_NAP: Duration = Duration::from_micros(500);

/// Events looked at between two naps. Each look takes the driver's lock, which the program's launches need as well.
const PER_NAP: usize = 8;

/// The thread, once it is needed.
#[derive(Default)]
pub(super) struct Waiter(Mutex<Option<Arc<Shared>>>);

struct Shared {
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    watched: Vec<Watched>,
    thread: Option<thread::Thread>,
    arrived: Option<Instant>,
}

struct Watched {
    event: Event,
    entry: Weak<Entry>,
}

struct Entry {
    waker: Mutex<Waker>,
}

/// A place with the waiter. Dropping it gives it up.
pub(super) struct Waiting {
    entry: Arc<Entry>,
    event: Event,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting").finish_non_exhaustive()
    }
}

impl Waiter {
    /// Has the task of `cx` woken when `event` is done or has failed.
    pub(super) fn watch(&self, event: &Event, waiting: &mut Option<Waiting>, cx: &Context<'_>) -> Result<(), GpuError> {
        if let Some(Waiting { entry, .. }) = waiting.as_ref().filter(|waiting| waiting.event.is(event)) {
            let old = {
                let mut waker = entry.waker.lock();
                match waker.will_wake(cx.waker()) {
                    true => None,
                    false => Some(std::mem::replace(&mut *waker, cx.waker().clone())),
                }
            };
            drop(old);
            // Its entry may have been taken off the list with the wake-up that led here.
            if Arc::weak_count(entry) > 0 {
                return Ok(());
            }
        }
        let entry = Arc::new(Entry { waker: Mutex::new(cx.waker().clone()) });
        let shared = self.shared()?;
        let thread = {
            let mut list = shared.list.lock();
            list.watched.push(Watched { event: event.clone(), entry: Arc::downgrade(&entry) });
            list.arrived = Some(Instant::now());
            list.thread.clone()
        };
        if let Some(thread) = thread {
            thread.unpark();
        }
        *waiting = Some(Waiting { entry, event: event.clone() });
        Ok(())
    }

    fn shared(&self) -> Result<Arc<Shared>, GpuError> {
        let mut started = self.0.lock();
        if let Some(shared) = &*started {
            return Ok(shared.clone());
        }
        let shared = Arc::new(Shared { list: Mutex::default() });
        let weak = Arc::downgrade(&shared);
        let spawned = thread::Builder::new().name("gpu-waiter".into()).spawn(move || run(&weak));
        let handle = spawned.map_err(|error| GpuError::Unavailable {
            reason: format!("a thread that waits for the GPU could not be started: {error}"),
        })?;
        shared.list.lock().thread = Some(handle.thread().clone());
        *started = Some(shared.clone());
        Ok(shared)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let thread = self.0.lock().take().and_then(|shared| shared.list.lock().thread.take());
        if let Some(thread) = thread {
            thread.unpark();
        }
    }
}

fn run(shared: &Weak<Shared>) {
    if let Ok(driver) = Driver::get() {
        driver.leave_captures_alone();
    }
    let mut next = 0;
    let mut nap = SHORT_NAP;
    let mut arrived_before = None;
    loop {
        // Not held while asleep: when the GPU is closed, this ends.
        let Some(shared) = shared.upgrade() else { return };
        let _given_up;
        let (looked_at, arrived, total) = {
            let mut list = shared.list.lock();
            // Dropped after the lock: an event that goes may be the last thing that holds its GPU, and this waiter.
            _given_up = take_out(&mut list.watched, |watched| watched.entry.strong_count() == 0);
            let total = list.watched.len();
            let resting = list.arrived.is_some_and(|at| at.elapsed() > POLITE);
            let count = if resting { total.min(PER_NAP) } else { total };
            let events: Vec<_> = (0..count).map(|step| list.watched[(next + step) % total].event.clone()).collect();
            next = if total == 0 { 0 } else { (next + count) % total };
            (events, list.arrived, total)
        };
        let mut woken = false;
        for event in looked_at {
            // An error is for the task to find.
            if matches!(event.is_done(), Ok(false)) {
                continue;
            }
            woken = true;
            let mut list = shared.list.lock();
            let done = take_out(&mut list.watched, |watched| watched.event.is(&event));
            drop(list);
            for watched in done {
                if let Some(entry) = watched.entry.upgrade() {
                    // Off the list before the wake-up: see `watch`.
                    drop(watched);
                    let waker = entry.waker.lock().clone();
                    waker.wake();
                }
            }
        }
        drop(shared);
        if total == 0 {
            thread::park();
            continue;
        }
        if woken || arrived != arrived_before {
            (nap, arrived_before) = (SHORT_NAP, arrived);
        }
        match arrived.map(|at| at.elapsed()) {
            Some(waited) if waited < EAGER => std::hint::spin_loop(),
            Some(waited) if waited < POLITE => thread::yield_now(),
            _ => {
                thread::park_timeout(nap);
                nap = (nap * 2).min(LONG_NAP);
            }
        }
    }
}

/// Takes those out that are `wanted`. (`Vec::extract_if` is newer than the oldest Rust of this crate.)
fn take_out(list: &mut Vec<Watched>, wanted: impl Fn(&Watched) -> bool) -> Vec<Watched> {
    let mut taken = Vec::new();
    let mut at = 0;
    while at < list.len() {
        if wanted(&list[at]) { taken.push(list.swap_remove(at)) } else { at += 1 }
    }
    taken
}
