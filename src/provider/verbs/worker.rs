//! The thread that makes a device's slow calls, in the order in which they were asked for.
//!
//! Making, moving and destroying queue pairs and RDMA CM ids are system calls, which a NIC answers after 0.1 ms to some
//! tens of milliseconds. A task that made them would hold up all others of its thread for so long, so it asks this
//! thread, and waits for the answer as for anything else. It is a thread of the crate's own, since connections end in runtimes that are
//! shutting down too, and since a program may have all threads of `spawn_blocking` at work; and it is one thread, since what is
//! destroyed must be destroyed in order. The first call starts it, and it ends with the device.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::affinity::pin_this_thread;
use crate::error::{CloseReason, Error, Result};
use crate::sync::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// Dropped, it ends the thread when all that was asked for is done.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    jobs: Mutex<Option<Sender<Job>>>,
    cpus: Option<Vec<usize>>,
}

impl Worker {
    /// Its thread will run on these CPUs, or on any.
    pub(super) fn new(cpus: Option<Vec<usize>>) -> Self {
        Self { jobs: Mutex::new(None), cpus }
    }

    /// The answer of a call. When the future is dropped, the call is made nevertheless, and its answer dropped by the thread.
    pub(crate) async fn call<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        self.ask(move || drop(answer.send(work())));
        match answered.await {
            Ok(result) => result,
            // What was released on the way had code of the program's in it, which panicked.
            Err(_) => {
                Err(Error::io("wait for", "the device's thread", std::io::Error::other("a panic ended the call")))
            }
        }
    }

    /// Something that nobody waits for. Who is no task may be held up, and does it himself: when this returns, it is done.
    pub(crate) fn run(&self, work: impl FnOnce() + Send + 'static) {
        if in_task() { self.ask(work) } else { work() }
    }

    /// The same, but always by the thread.
    pub(crate) fn ask(&self, work: impl FnOnce() + Send + 'static) {
        let job: Job = Box::new(work);
        let unsent = match &mut *self.jobs.lock() {
            Some(jobs) => jobs.send(job).err().map(|unsent| unsent.0),
            none => match self.start() {
                Ok(jobs) => none.insert(jobs).send(job).err().map(|unsent| unsent.0),
                Err(error) => {
                    tracing::warn!(%error, "no thread for the device's slow calls: they hold up who makes them");
                    Some(job)
                }
            },
        };
        if let Some(job) = unsent {
            job();
        }
    }

    /// As [`run`](Self::run), after all that was asked for before.
    pub(crate) fn run_after(&self, work: impl FnOnce() + Send + 'static) {
        if in_task() || IS_WORKER.get() {
            return self.ask(work);
        }
        if self.jobs.lock().is_some() {
            let (done, all_done) = channel();
            self.ask(move || done.send(()).unwrap_or_default());
            let _ = all_done.recv();
        }
        work();
    }

    fn start(&self) -> std::io::Result<Sender<Job>> {
        let (sender, jobs) = channel();
        let cpus = self.cpus.clone();
        std::thread::Builder::new().name("rdma-control".into()).spawn(move || {
            cpus.iter().for_each(|cpus| pin_this_thread(cpus));
            work(&jobs);
        })?;
        Ok(sender)
    }
}

/// The answer of a call that may take a second, for which the others must not wait: over RoCE, the kernel looks for the address of a
/// peer while a queue pair gets ready to receive from it, unless RDMA CM has found it already.
pub(crate) async fn long_call<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let gone = |_| Error::Closed { operation: "connect", reason: CloseReason::RuntimeGone };
    tokio::task::spawn_blocking(work).await.map_err(gone)?
}

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

fn work(jobs: &Receiver<Job>) {
    IS_WORKER.set(true);
    // The last job may drop the device, and with it the other end of this channel.
    for job in jobs {
        if catch_unwind(AssertUnwindSafe(job)).is_err() {
            tracing::error!("a panic on the thread of the device's slow calls");
        }
    }
}

/// Whether others are held up when this thread is.
pub(crate) fn in_task() -> bool {
    Handle::try_current().is_ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    use super::*;

    fn here() -> Result<ThreadId> {
        Ok(thread::current().id())
    }

    #[test]
    fn only_a_task_has_it_done_elsewhere() {
        let worker = Worker::default();
        let (tell, told) = mpsc::channel();
        let say = |tell: &mpsc::Sender<_>| {
            let tell = tell.clone();
            move || tell.send(thread::current().id()).unwrap()
        };
        worker.run(say(&tell));
        assert_eq!(told.try_recv().unwrap(), thread::current().id());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let first = runtime.block_on(async { worker.call(here).await.unwrap() });
        assert_ne!(first, thread::current().id());
        runtime.block_on(async { worker.run(say(&tell)) });
        worker.run_after(|| {});
        assert_eq!(told.try_recv().unwrap(), first, "one thread does all");
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_released_there() {
        struct Left(mpsc::Sender<ThreadId>);
        impl Drop for Left {
            fn drop(&mut self) {
                self.0.send(thread::current().id()).unwrap();
            }
        }
        let worker = Worker::default();
        let (tell, told) = mpsc::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (go_on, stop) = mpsc::channel();
        let thread = runtime.block_on(async {
            let thread = worker.call(here).await.unwrap();
            let call = worker.call(move || {
                stop.recv().unwrap();
                Ok(Left(tell))
            });
            tokio::time::timeout(Duration::from_millis(1), call).await.map(drop).unwrap_err();
            thread
        });
        go_on.send(()).unwrap();
        assert_eq!(told.recv_timeout(Duration::from_secs(20)).unwrap(), thread);
    }

    #[test]
    fn a_panic_ends_one_call_and_the_device_ends_the_thread() {
        let worker = Arc::new(Worker::default());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (alive, ended) = mpsc::channel::<()>();
        runtime.block_on(async {
            worker.call(|| -> Result<()> { panic!("told to") }).await.unwrap_err();
            // A thread's locals are dropped at its end.
            thread_local!(static KEPT: Cell<Option<mpsc::Sender<()>>> = const { Cell::new(None) });
            let itself = worker.clone();
            worker.call(move || Ok(KEPT.set(Some(alive)))).await.unwrap();
            worker.ask(move || drop(itself));
        });
        assert_eq!(ended.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(worker);
        assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
