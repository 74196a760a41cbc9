//! The thread that makes a device's slow calls.
//!
//! Making, moving and destroying queue pairs and RDMA CM ids are system calls, which a NIC answers after 0.1 ms to some
//! tens of milliseconds. A task that made them would hold up all others of its thread for so long, so it asks this
//! thread, and waits for the answer as for anything else. It is a thread of the crate's own, since connections end in runtimes that are
//! shutting down too, and since a program may have all threads of `spawn_blocking` at work; and it is one thread, since what is
//! destroyed must be destroyed in order. The first call starts it, and it ends with the device.
//!
//! Calls that somebody waits for have a line of their own, which takes turns with what is left to be destroyed: after a thousand connections
//! were dropped, the next one is not set up behind all of those. Within each line, the order is that of asking.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::affinity::pin_this_thread;
use crate::error::{CloseReason, Error, Result};

type Job = Box<dyn FnOnce() + Send>;

/// Dropped, it ends the thread when all that was asked for is done.
#[derive(Debug, Default)]
pub(crate) struct Worker {
    shared: Arc<Shared>,
    cpus: Option<Vec<usize>>,
}

#[derive(Default)]
struct Shared {
    lines: Mutex<Lines>,
    more: Condvar,
}

#[derive(Default)]
struct Lines {
    awaited: VecDeque<Job>,
    left_over: VecDeque<Job>,
    /// Whose turn it is where both have some.
    turn: bool,
    started: bool,
    ended: bool,
}

impl Worker {
    /// Its thread will run on these CPUs, or on any.
    pub(super) fn new(cpus: Option<Vec<usize>>) -> Self {
        Self { shared: Arc::default(), cpus }
    }

    /// The answer of a call. When the future is dropped, the call is made nevertheless, and its answer dropped by the thread.
    pub(crate) async fn call<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        self.enter(Box::new(move || drop(answer.send(work()))), |lines| &mut lines.awaited);
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

    /// The same, ahead of the others.
    pub(super) fn run_soon(&self, work: impl FnOnce() + Send + 'static) {
        if in_task() { self.enter(Box::new(work), |lines| &mut lines.awaited) } else { work() }
    }

    /// The same, but always by the thread.
    pub(crate) fn ask(&self, work: impl FnOnce() + Send + 'static) {
        self.enter(Box::new(work), |lines| &mut lines.left_over);
    }

    /// As [`run`](Self::run), by the thread, after all that was left to it before.
    pub(crate) fn run_after(&self, work: impl FnOnce() + Send + 'static) {
        if in_task() || IS_WORKER.get() {
            return self.ask(work);
        }
        let (done, is_done) = channel();
        self.ask(move || {
            work();
            done.send(()).unwrap_or_default();
        });
        // An error: it panicked.
        let _ = is_done.recv();
    }

    fn enter(&self, job: Job, line: fn(&mut Lines) -> &mut VecDeque<Job>) {
        let mut lines = self.shared.lock();
        if !lines.started {
            if let Err(error) = self.start() {
                drop(lines);
                tracing::warn!(%error, "no thread for the device's slow calls: they hold up who makes them");
                return job();
            }
            lines.started = true;
        }
        line(&mut lines).push_back(job);
        drop(lines);
        self.shared.more.notify_one();
    }

    fn start(&self) -> std::io::Result<()> {
        let (shared, cpus) = (self.shared.clone(), self.cpus.clone());
        let thread = std::thread::Builder::new().name("rdma-control".into());
        thread.spawn(move || {
            cpus.iter().for_each(|cpus| pin_this_thread(cpus));
            shared.work();
        })?;
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.more.notify_one();
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        IS_WORKER.set(true);
        // The last job may drop the device, and with it the worker.
        while let Some(job) = self.next() {
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a panic on the thread of the device's slow calls");
            }
        }
    }

    /// `None` at the end.
    fn next(&self) -> Option<Job> {
        let mut lines = self.lock();
        loop {
            if let Some(job) = lines.take() {
                return Some(job);
            }
            if lines.ended {
                return None;
            }
            lines = self.more.wait(lines).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Lines {
    fn take(&mut self) -> Option<Job> {
        self.turn = !self.turn;
        match self.turn {
            true => self.awaited.pop_front().or_else(|| self.left_over.pop_front()),
            false => self.left_over.pop_front().or_else(|| self.awaited.pop_front()),
        }
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
    fn who_waits_takes_turns_with_what_is_left_over() {
        let worker = Worker::default();
        let (go_on, stop) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        worker.ask(move || stop.recv().unwrap());
        for at in 0..4 {
            let tell = tell.clone();
            worker.ask(move || tell.send(at).unwrap());
        }
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for at in [10, 11] {
                let tell = tell.clone();
                worker.run_soon(move || tell.send(at).unwrap());
            }
        });
        go_on.send(()).unwrap();
        worker.run_after(|| {});
        let order: Vec<_> = told.try_iter().collect();
        let of = |line: fn(&i32) -> bool| order.iter().copied().filter(line).collect::<Vec<_>>();
        assert_eq!((of(|at| *at < 10), of(|at| *at >= 10)), (vec![0, 1, 2, 3], vec![10, 11]));
        assert!(order[..2].contains(&10) && order[..4].contains(&11), "{order:?}");
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
            let keep = move || {
                KEPT.set(Some(alive));
                Ok(())
            };
            worker.call(keep).await.unwrap();
            worker.ask(move || drop(itself));
        });
        assert_eq!(ended.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(worker);
        assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
