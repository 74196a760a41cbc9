//! Compare-and-swap and fetch-and-add on 8 bytes of the peer's memory.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::completion::table::Done;
use crate::error::{Error, Result};
use crate::memory::AnyBuffer;
use crate::op::Timeout;
use crate::op::core::Op;
use crate::op::timeout::Expire;

/// The operation, or why it cannot even start (no memory for its result).
#[derive(Debug)]
struct Atomic(Result<Op, Option<Error>>);

impl Atomic {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<u64>> {
        let op = match &mut self.0 {
            Ok(op) => op,
            Err(error) => return Poll::Ready(Err(error.take().unwrap_or_else(polled_after_end))),
        };
        let mut done = Done::default();
        ready!(op.poll(cx, &mut done))?;
        Poll::Ready(old_value(done.owner))
    }

    fn try_post(&mut self) -> Result<()> {
        match &mut self.0 {
            Ok(op) => op.try_post(),
            Err(error) => Err(error.take().unwrap_or_else(polled_after_end)),
        }
    }

    fn expire(&mut self, after: Duration) -> Result<u64> {
        match &mut self.0 {
            Ok(op) => old_value(Some(op.expire(after)?.1)),
            Err(error) => Err(error.take().unwrap_or_else(polled_after_end)),
        }
    }
}

/// The device puts the old value into the result's place in the byte order of this host.
fn old_value(result: Option<AnyBuffer>) -> Result<u64> {
    let bytes = match &result {
        Some(AnyBuffer::Buffer(buffer)) => buffer.first_chunk(),
        _ => None,
    };
    bytes.copied().map(u64::from_ne_bytes).ok_or_else(polled_after_end)
}

fn polled_after_end() -> Error {
    Error::Invalid { operation: "atomic", reason: "the future was polled after it had finished".to_owned() }
}

macro_rules! atomic_future {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        #[must_use = "futures do nothing unless polled or posted"]
        pub struct $name(Atomic);

        impl $name {
            pub(crate) fn new(op: Result<Op>) -> Self {
                Self(Atomic(op.map_err(Some)))
            }

            /// Posts now instead of at the first poll, without waiting for a slot in the queue.
            ///
            /// # Errors
            ///
            /// [`Error::QueueFull`] when the queue is full; the future can then still be awaited. Any other error is final.
            pub fn try_post(&mut self) -> Result<()> {
                self.0.try_post()
            }

            /// Limits the time from now to completion. An operation that was posted may still take effect afterwards.
            pub fn timeout(self, after: Duration) -> Timeout<Self> {
                Timeout::new(self, after)
            }
        }

        impl Future for $name {
            type Output = Result<u64>;

            fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
                self.0.poll(cx)
            }
        }

        impl Expire for $name {
            fn expire(&mut self, after: Duration) -> Self::Output {
                self.0.expire(after)
            }
        }
    };
}

atomic_future! {
    /// A compare-and-swap on its way; see [`Connection::compare_swap`](crate::Connection::compare_swap).
    CompareSwapOp
}
atomic_future! {
    /// A fetch-and-add on its way; see [`Connection::fetch_add`](crate::Connection::fetch_add).
    FetchAddOp
}
