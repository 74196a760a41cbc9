//! Deadlines that keep the buffer safe.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use pin_project::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};

/// What an operation does at its deadline.
pub(crate) trait Expire: Future {
    /// Gives the operation up and says so.
    fn expire(&mut self, after: Duration) -> Self::Output;
}

/// An operation with a deadline; made by its `timeout` method.
///
/// # Panics
///
/// When it is polled outside of a tokio runtime with time enabled, as tokio's own timers do.
#[pin_project]
#[derive(Debug)]
#[must_use = "futures do nothing unless polled or posted"]
pub struct Timeout<F> {
    op: F,
    after: Duration,
    deadline: Instant,
    #[pin]
    sleep: Option<Sleep>,
}

impl<F> Timeout<F> {
    pub(crate) fn new(op: F, after: Duration) -> Self {
        // A deadline beyond the clock's range is none; a century will do.
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        let now = Instant::now();
        let deadline = now.checked_add(after).unwrap_or_else(|| now + CENTURY);
        Self { op, after, deadline, sleep: None }
    }
}

#[allow(private_bounds)] // the bound is sealed on purpose: a deadline needs to know what is posted
impl<F: Expire + Unpin> Future for Timeout<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Poll::Ready(output) = Pin::new(&mut *this.op).poll(cx) {
            return Poll::Ready(output);
        }
        if this.sleep.is_none() {
            this.sleep.set(Some(sleep_until(*this.deadline)));
        }
        match this.sleep.as_mut().as_pin_mut().map(|sleep| sleep.poll(cx)) {
            Some(Poll::Ready(())) => Poll::Ready(this.op.expire(*this.after)),
            _ => Poll::Pending,
        }
    }
}
