//! The task of a stream. It sleeps, but for three occasions:
//!
//! - Something is to be sent, and nobody polls the stream when it can be.
//! - The peer has used its credits and nobody reads: it takes in what has arrived, up to the limit.
//! - The stream was dropped: it sends what was written, and the end.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Poll, ready};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, Result};
use crate::stream::Shared;

/// How long a peer without credits waits for a reader that was there lately, before its messages are copied out of their slots.
/// A reader comes sooner, if it comes at all; the copy of all slots takes about as long.
const PATIENCE: Duration = Duration::from_millis(1);

/// The runtime that the task is to run in.
pub(super) fn runtime() -> Result<Handle> {
    Handle::try_current().map_err(|error| Error::Invalid { operation: "make a stream", reason: error.to_string() })
}

pub(super) fn spawn(runtime: &Handle, shared: Arc<Shared>, linger: Duration) {
    runtime.spawn(async move {
        if watch(&shared).await {
            // If it takes longer, the connection ends as it is.
            let _ = timeout(linger, finish(&shared)).await;
        }
    });
}

/// Until the stream is dropped (`true`), or has failed.
async fn watch(shared: &Shared) -> bool {
    let keeper = &shared.wakers.keeper;
    let mut patience = pin!(sleep(Duration::ZERO));
    let mut waits = false;
    let mut seen_reads = 0;
    poll_fn(|cx| {
        keeper.task.register(cx.waker());
        let mut engine = shared.engine.lock();
        let write_dropped = keeper.write_dropped.load(Ordering::SeqCst);
        if write_dropped && keeper.read_dropped.load(Ordering::SeqCst) {
            return Poll::Ready(true);
        }
        if write_dropped {
            engine.want_end();
            engine.advance_for_writer();
        } else if keeper.wanted.load(Ordering::SeqCst) {
            engine.advance_for_writer();
        }
        if engine.failed() {
            return Poll::Ready(false);
        }
        while engine.starves() && engine.can_spill() {
            if waits {
                ready!(patience.as_mut().poll(cx));
                waits = false;
            }
            if engine.reads == seen_reads {
                if engine.spill() {
                    // Once a turn: the peer may be quick.
                    cx.waker().wake_by_ref();
                }
                break;
            }
            seen_reads = engine.reads;
            patience.as_mut().reset(Instant::now() + PATIENCE);
            waits = true;
        }
        Poll::Pending
    })
    .await
}

/// Until the peer has everything.
async fn finish(shared: &Shared) {
    shared.engine.lock().close();
    let finished = poll_fn(|cx| {
        shared.wakers.keeper.task.register(cx.waker());
        let mut engine = shared.engine.lock();
        engine.advance_for_writer();
        engine.ended()
    });
    if let Err(error) = finished.await {
        tracing::debug!(%error, "a dropped stream could not be finished");
    }
}
