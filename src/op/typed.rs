//! From the untyped operation to the caller's buffer type.

use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::error::Error;
use crate::memory::Operand;
use crate::op::OpError;
use crate::op::core::{Finished, Op};
use crate::provider::WorkCompletion;

/// Polls the operation and gives its buffer the caller's type again.
#[inline]
pub(super) fn poll<B: Operand>(op: &mut Op, cx: &mut Context<'_>) -> Poll<Result<(WorkCompletion, B), OpError<B>>> {
    let finished = ready!(op.poll(cx));
    Poll::Ready(typed(op, finished))
}

/// Gives up at a deadline.
pub(super) fn expire<B: Operand>(op: &mut Op, after: Duration) -> Result<(WorkCompletion, B), OpError<B>> {
    let finished = op.expire(after);
    typed(op, finished)
}

#[inline]
fn typed<B: Operand>(op: &Op, finished: Finished) -> Result<(WorkCompletion, B), OpError<B>> {
    match finished {
        Ok((done, buffer)) => match B::from_any(buffer) {
            Some(buffer) => Ok((done, buffer)),
            None => Err(OpError::new(wrong_type(op), None)),
        },
        Err(error) => Err(error.with(B::from_any)),
    }
}

/// A slot gives back the very buffer that was put in, so this does not happen; if it did, it would be an error and no panic.
fn wrong_type(op: &Op) -> Error {
    Error::Invalid { operation: op.operation(), reason: "the buffer came back as another type".to_owned() }
}

/// The methods that every operation's future has.
macro_rules! common_methods {
    ($future:ident < $b:ident : $bound:path >) => {
        impl<$b: $bound> $future<$b> {
            pub(crate) fn new(op: crate::op::core::Op) -> Self {
                Self { op, buffer: std::marker::PhantomData }
            }

            /// Posts now instead of at the first poll, without waiting for a slot in the queue.
            ///
            /// Use it to have a receive in place before the peer is told to send, or to fix the order of several operations.
            /// The future still has to be awaited for the result.
            ///
            /// # Errors
            ///
            /// [`Error::QueueFull`](crate::Error::QueueFull) when the queue is full; the future can then still be awaited, and waits for a slot.
            /// Any other error is final, and the future gives the buffer back when it is polled.
            pub fn try_post(&mut self) -> crate::Result<()> {
                self.op.try_post()
            }

            /// Limits the time from now to completion.
            ///
            /// When it is over, the future ends with [`Error::Timeout`](crate::Error::Timeout). An operation that was not posted yet never
            /// will be, and its buffer is in the error. One that was posted may still take effect: its buffer stays quarantined
            /// until the device reports its completion or the queue pair ends, and is not in the error.
            pub fn timeout(self, after: std::time::Duration) -> crate::op::Timeout<Self> {
                crate::op::Timeout::new(self, after)
            }
        }

        impl<$b: $bound> crate::op::timeout::Expire for $future<$b> {
            fn expire(&mut self, after: std::time::Duration) -> Self::Output {
                crate::op::typed::expire(&mut self.op, after).map(|(done, buffer)| Self::output(done, buffer))
            }
        }
    };
}
pub(super) use common_methods;
