//! Releasing memory of a GPU without making anybody wait.
//!
//! Freeing waits for everything that the GPU was given to do (`cuMemFree`), so a task must not do it; and memory that the GPU
//! still uses is kept until it does not. A thread takes care of both.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;

use super::device::Inner;
use super::driver::{self, Driver};
use super::uses::Pending;
use crate::sync::Mutex;

/// Between two looks at work that is not finished.
const PAUSE: Duration = Duration::from_micros(200);

struct Retired {
    after: Pending,
    context: Arc<CudaContext>,
    owner: Box<dyn Send>,
}

/// The thread, once it is needed.
#[derive(Default)]
pub(super) struct Reaper(Mutex<Option<Sender<Retired>>>);

impl Reaper {
    /// Drops `owner` elsewhere, when what is pending in `context` is done or the GPU has failed.
    pub(super) fn retire(&self, context: &Arc<CudaContext>, after: Pending, owner: Box<dyn Send>) {
        let retired = Retired { after, context: context.clone(), owner };
        let refused = self.0.lock().get_or_insert_with(start).send(retired).err();
        // Not under the lock: the owner may have something to retire itself.
        if let Some(mpsc::SendError(refused)) = refused {
            while !refused.is_ready() {
                thread::sleep(PAUSE);
            }
            refused.release();
        }
    }
}

/// Something that takes its time to drop, and that nothing is under way on any more: it is dropped by the reaper.
#[derive(Debug)]
pub(super) struct Elsewhere<T: Send + 'static> {
    /// There until it is dropped.
    value: Option<T>,
    gpu: Arc<Inner>,
}

impl<T: Send + 'static> Elsewhere<T> {
    pub(super) fn new(gpu: &Arc<Inner>, value: T) -> Self {
        Self { value: Some(value), gpu: gpu.clone() }
    }

    pub(super) fn get(&self) -> Option<&T> {
        self.value.as_ref()
    }
}

impl<T: Send + 'static> Drop for Elsewhere<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.gpu.reaper.retire(&self.gpu.context, Pending::default(), Box::new(value));
        }
    }
}

fn start() -> Sender<Retired> {
    let (sender, receiver) = channel();
    // Without a thread the channel is closed, and what comes is released in place.
    if let Err(error) = thread::Builder::new().name("gpu-reaper".into()).spawn(move || run(&receiver)) {
        tracing::warn!(%error, "no thread to release GPU memory: it is released where it is dropped");
    }
    sender
}

/// Takes what is ready first: one that waits for a kernel without end holds up nobody else.
fn run(retired: &Receiver<Retired>) {
    if let Ok(driver) = Driver::get() {
        driver.leave_captures_alone();
    }
    let mut waiting = Vec::new();
    loop {
        if waiting.is_empty() {
            match retired.recv() {
                Ok(next) => waiting.push(next),
                Err(_) => return,
            }
        }
        waiting.extend(retired.try_iter());
        let (ready, later): (Vec<_>, Vec<_>) = waiting.into_iter().partition(Retired::is_ready);
        waiting = later;
        ready.into_iter().for_each(Retired::release);
        if !waiting.is_empty() {
            thread::sleep(PAUSE);
        }
    }
}

impl Retired {
    /// After an error of the GPU nothing runs any more.
    fn is_ready(&self) -> bool {
        !self.after.events.iter().any(|event| matches!(event.is_done(), Ok(false)))
    }

    fn release(self) {
        if self.after.everything {
            if let Err(error) = driver::own(&self.context, "cuCtxSynchronize", || self.context.synchronize()) {
                tracing::debug!(%error, "memory of a GPU that has failed is released");
            }
        }
        // It may be the program's own, and whatever that does, the others' memory is still to be released in order.
        if catch_unwind(AssertUnwindSafe(|| drop(self.owner))).is_err() {
            tracing::error!("the owner of GPU memory panicked when it was dropped");
        }
    }
}
