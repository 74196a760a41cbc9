//! Running a case so that it ends, whatever happens in it.

use std::future::Future;
use std::panic;
use std::pin::Pin;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, Once};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use super::rig::{Rig, Setup};

/// No case takes a tenth of this on an idle machine; it is there for sanitizers and for machines with other work to do.
/// `TOKIO_RDMA_TEST_CASE_SECONDS` makes room for cases that are told to go on for longer.
fn limit() -> Duration {
    let seconds = std::env::var("TOKIO_RDMA_TEST_CASE_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(100))
}

/// For whatever should happen soon, but may be held up by a busy machine.
pub const SOON: Duration = Duration::from_secs(20);

/// Longer than any case: a driver that spins this long does not sleep, unless others want the CPU.
pub const LONG_SPIN: Duration = Duration::from_secs(1000);

/// Panics inside of the crate, on whichever thread: tokio and the libtest harness would swallow those of background tasks.
static CRATE_PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Runs a case in a runtime of its own.
pub fn run<C, F>(setup: Setup, case: C)
where
    C: FnOnce(Rig) -> F + Send + 'static,
    F: Future<Output = ()> + 'static,
{
    run_boxed(setup, Box::new(|rig| Box::pin(case(rig))));
}

type Case = Box<dyn FnOnce(Rig) -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// Not generic, so that the compiler makes it once, and not for each case.
fn run_boxed(setup: Setup, case: Case) {
    watch_for_panics();
    let (done, ended) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        let _done = done;
        let runtime = setup.runtime();
        runtime.block_on(within(limit(), case(Rig::new(setup))));
        // A driver that cannot be stopped would hang here.
        let start = Instant::now();
        drop(runtime);
        assert!(start.elapsed() < SOON, "dropping the runtime took {:?}", start.elapsed());
    });
    if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(limit() + SOON) {
        panic!("the case blocks its thread: no end within {:?}", limit() + SOON);
    }
    if let Err(payload) = thread.join() {
        panic::resume_unwind(payload);
    }
    let panics = CRATE_PANICS.lock().unwrap();
    assert!(panics.is_empty(), "panics inside of the crate: {panics:#?}");
}

fn watch_for_panics() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let inner = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if info.location().is_some_and(|at| at.file().starts_with("src/")) {
                CRATE_PANICS.lock().unwrap().push(info.to_string());
            }
            inner(info);
        }));
    });
}

/// The future's output; panics when it does not come in time.
#[track_caller]
pub fn within<F: Future>(limit: Duration, future: F) -> impl Future<Output = F::Output> {
    let caller = panic::Location::caller();
    async move {
        match tokio::time::timeout(limit, future).await {
            Ok(output) => output,
            Err(_) => panic!("nothing within {limit:?}, waited for at {caller}"),
        }
    }
}

/// Waits until the condition holds; panics with what `state` says when it does not within [`SOON`].
#[track_caller]
pub fn eventually<S: std::fmt::Debug>(
    mut condition: impl FnMut() -> bool,
    mut state: impl FnMut() -> S,
) -> impl Future<Output = ()> {
    let caller = panic::Location::caller();
    async move {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < SOON, "still not so after {SOON:?}, at {caller}: {:#?}", state());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// The condition holds for all of that time.
#[track_caller]
pub fn holds_for(time: Duration, mut condition: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let caller = panic::Location::caller();
    async move {
        let start = Instant::now();
        while start.elapsed() < time {
            assert!(condition(), "no longer so after {:?}, at {caller}", start.elapsed());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Polls with a waker that does nothing.
pub fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Lets other tasks run that many times.
pub async fn yields(times: usize) {
    for _ in 0..times {
        tokio::task::yield_now().await;
    }
}
