//! CUDA events from a pool, and awaiting them.

use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream};

use super::driver;
use super::error::GpuError;
use super::waiter::{Waiter, Waiting};
use crate::sync::Mutex;

/// Events kept for later use; more than that are destroyed.
const KEPT: usize = 1024;

/// How long an await looks at an event itself before the waiter thread does. A copy of a few kilobytes takes 4 to 9 us on an H200,
/// waking a thread 20 us and more.
pub(super) const SPIN: Duration = Duration::from_micros(20);

/// A context's events.
pub(super) struct Events {
    context: Arc<CudaContext>,
    free: Mutex<Vec<CudaEvent>>,
    waiter: Waiter,
}

impl Events {
    pub(super) fn new(context: &Arc<CudaContext>) -> Arc<Self> {
        Arc::new(Self { context: context.clone(), free: Mutex::default(), waiter: Waiter::default() })
    }

    /// An event behind everything that was submitted to `stream` so far.
    pub(super) fn record(self: &Arc<Self>, stream: &CudaStream) -> Result<Event, GpuError> {
        let event = self.unrecorded()?;
        event.record(stream)?;
        Ok(event)
    }

    /// An event to be recorded; until then it counts as done.
    pub(super) fn unrecorded(self: &Arc<Self>) -> Result<Event, GpuError> {
        let kept = self.free.lock().pop();
        let event = match kept {
            Some(event) => event,
            None => driver::own(&self.context, "cuEventCreate", || self.context.new_event(None))?,
        };
        Ok(Event(Arc::new(Pooled { event: Some(event), events: Arc::downgrade(self) })))
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

/// A point in a stream of the GPU. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Event(Arc<Pooled>);

#[derive(Debug)]
struct Pooled {
    /// There until it is dropped.
    event: Option<CudaEvent>,
    events: Weak<Events>,
}

impl Drop for Pooled {
    fn drop(&mut self) {
        if let (Some(event), Some(events)) = (self.event.take(), self.events.upgrade()) {
            let mut free = events.free.lock();
            if free.len() < KEPT {
                free.push(event);
                return;
            }
            drop(free);
            drop(event);
        }
    }
}

impl Event {
    fn get(&self) -> Result<&CudaEvent, GpuError> {
        self.0
            .event
            .as_ref()
            .ok_or_else(|| GpuError::Invalid { operation: "await", reason: "the event is gone".into() })
    }

    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), GpuError> {
        let event = self.get()?;
        driver::own(stream.context(), "cuEventRecord", || event.record(stream))
    }

    /// Whether both are one.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Makes `stream` wait for it, without the CPU.
    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), GpuError> {
        let event = self.get()?;
        driver::own(stream.context(), "cuStreamWaitEvent", || stream.wait(event))
    }

    /// Whether the GPU has come this far. An error of the GPU is an error, not a no.
    ///
    /// While some thread captures a graph, the driver may refuse to say: then it is a no, until it says.
    pub(super) fn is_done(&self) -> Result<bool, GpuError> {
        const CAPTURE_UNSUPPORTED: u32 = 900;
        match self.get()?.try_is_complete() {
            Err(error) if error.0 as u32 == CAPTURE_UNSUPPORTED => Ok(false),
            done => done.map_err(GpuError::driver("cuEventQuery")),
        }
    }

    /// Waits on this thread, for work that takes microseconds.
    pub(super) fn wait(&self) -> Result<(), GpuError> {
        let started = Instant::now();
        while !self.is_done()? {
            // A copy that takes longer waits behind others; then somebody else may need this CPU.
            if started.elapsed() > SPIN { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        Ok(())
    }

    /// Resolves when it [is done](Self::is_done): looks, looks again for [`SPIN`], and then leaves it to the waiter thread.
    pub(super) fn poll_done(&self, waiting: &mut Option<Waiting>, cx: &mut Context<'_>) -> Poll<Result<(), GpuError>> {
        if self.is_done()? {
            *waiting = None;
            return Poll::Ready(Ok(()));
        }
        if waiting.is_none() {
            let started = Instant::now();
            while started.elapsed() < SPIN {
                std::hint::spin_loop();
                if self.is_done()? {
                    return Poll::Ready(Ok(()));
                }
            }
        }
        let Some(events) = self.0.events.upgrade() else {
            return Poll::Ready(Err(GpuError::Invalid { operation: "await", reason: "the GPU was closed".into() }));
        };
        events.waiter.watch(self, waiting, cx)?;
        // It may have been done between the look and the registration, which is fine: the waiter looks as well.
        Poll::Pending
    }
}

/// Resolves when every one of them is done.
pub(super) async fn all_done(events: impl IntoIterator<Item = Event>) -> Result<(), GpuError> {
    for event in events {
        let mut waiting = None;
        poll_fn(|cx| event.poll_done(&mut waiting, cx)).await?;
    }
    Ok(())
}
