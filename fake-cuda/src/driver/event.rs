//! Events: marks in a stream that others wait for.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Instant;

use super::context::{self, Context};
use super::registry::Registry;
use super::{Code, Out, Result, driver, hooks, lock, stream};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

struct Event {
    handle: usize,
    context: Arc<Context>,
    flags: u32,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// How often it was recorded, and the last of these whose turn has come.
    recorded: u64,
    reached: u64,
    when: Option<Instant>,
    /// How often it is still to look unfinished when it is not.
    polls: u64,
}

static EVENTS: Registry<Event> = Registry::new("event", 0xE000_0000);

impl Event {
    fn reach(&self, record: u64) {
        let mut state = lock(&self.state);
        if record > state.reached {
            state.reached = record;
            state.when = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    /// Waits until a record's turn has come.
    fn wait(&self, record: u64) {
        let mut state = lock(&self.state);
        while state.reached < record {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn last_record(&self) -> u64 {
        lock(&self.state).recorded
    }

    /// When it was reached, for measuring.
    fn time(&self) -> Result<Instant> {
        let state = lock(&self.state);
        if state.recorded == 0 || self.flags & DISABLE_TIMING != 0 {
            return Err(Code::INVALID_HANDLE);
        }
        if state.reached < state.recorded {
            return Err(Code::NOT_READY);
        }
        state.when.ok_or(Code::NOT_READY)
    }
}

pub(super) fn live() -> u64 {
    EVENTS.count()
}

/// Forgets a context's events, and says how many the program had left.
pub(super) fn purge(context: usize) -> u64 {
    EVENTS.purge(|event| event.context.handle == context)
}

fn record(event: usize, stream: usize) -> Result {
    let event = EVENTS.get(event)?;
    let stream = stream::get(stream)?;
    if !Arc::ptr_eq(&event.context, &stream.context) {
        return Err(Code::INVALID_HANDLE);
    }
    let record = {
        let mut state = lock(&event.state);
        state.recorded += 1;
        state.polls = hooks::knob("event_polls");
        state.recorded
    };
    stream.submit_always("record", move || event.reach(record));
    Ok(())
}

fn elapsed(milliseconds: Out<f32>, start: usize, end: usize) -> Result {
    let (start, end) = (EVENTS.get(start)?, EVENTS.get(end)?);
    start.context.check()?;
    let (start, end) = (start.time()?, end.time()?);
    let time = match end.checked_duration_since(start) {
        Some(time) => time.as_secs_f32(),
        None => -start.duration_since(end).as_secs_f32(),
    };
    milliseconds.put(time * 1000.0)
}

driver! {
    fn cuEventCreate(event: Out<usize>, flags: u32) {
        let context = context::usable()?;
        let between_processes = flags & INTERPROCESS != 0;
        if flags > 7 || between_processes && flags & DISABLE_TIMING == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let made = EVENTS.insert(|handle| Event {
            handle,
            context,
            flags,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        event.put(made.handle)
    }

    // What waits for it, still does.
    fn cuEventDestroy_v2(event: usize) {
        EVENTS.remove(event)?.context.check()
    }

    fn cuEventRecord(event: usize, stream: usize) {
        record(event, stream)
    }

    fn cuEventRecordWithFlags(event: usize, stream: usize, _flags: u32) {
        record(event, stream)
    }

    fn cuEventQuery(event: usize) {
        let event = EVENTS.get(event)?;
        let mut state = lock(&event.state);
        event.context.check()?;
        if state.reached < state.recorded {
            return Err(Code::NOT_READY);
        }
        if state.polls > 0 {
            state.polls -= 1;
            return Err(Code::NOT_READY);
        }
        Ok(())
    }

    fn cuEventSynchronize(event: usize) {
        let event = EVENTS.get(event)?;
        event.context.check()?;
        event.wait(event.last_record());
        event.context.check()
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) {
        elapsed(milliseconds, start, end)
    }

    fn cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
        let (event, stream) = (EVENTS.get(event)?, stream::get(stream)?);
        let record = event.last_record();
        stream.submit("wait", move || {
            event.wait(record);
            Ok(())
        });
        Ok(())
    }
}
