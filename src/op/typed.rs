//! From the untyped operation to the caller's buffer type.

use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use crate::completion::table::{Done, Outcome};
use crate::error::Error;
use crate::memory::{AnyBuffer, Landed, Operand};
use crate::op::OpError;
use crate::op::core::{Ended, Finished, Op};
use crate::op::role::Role;

/// What carries an operation out, whatever its buffer is: [`Op`] on a connection.
pub(crate) trait Engine {
    fn operation(&self) -> &'static str;

    fn role(&self) -> Role;

    /// The buffer of an operation that is not posted yet, and can be.
    fn unposted(&mut self) -> Option<&mut AnyBuffer>;

    /// Ends an operation that is not posted, and never will be.
    fn refuse(&mut self, error: Error) -> OpError<AnyBuffer>;

    /// Ends with the buffer and the completion in `done`, or with the error.
    fn poll(&mut self, cx: &mut Context<'_>, done: &mut Done<AnyBuffer>) -> Poll<Ended>;

    /// Posts now, without waiting for a slot.
    fn try_post(&mut self) -> Result<(), Error>;

    fn is_posted(&self) -> bool;

    /// Whether a posted operation's result is there to be taken. Leaves the waker behind if not, and does not look.
    fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()>;

    /// Its time is up. It may have finished at the last moment; the buffer comes back unless the device has it.
    fn expire(&mut self, after: Duration) -> Finished;
}

impl Engine for Op {
    #[inline]
    fn operation(&self) -> &'static str {
        Op::operation(self)
    }

    #[inline]
    fn role(&self) -> Role {
        Op::role(self)
    }

    #[inline]
    fn unposted(&mut self) -> Option<&mut AnyBuffer> {
        Op::unposted(self)
    }

    #[inline]
    fn refuse(&mut self, error: Error) -> OpError<AnyBuffer> {
        Op::refuse(self, error)
    }

    #[inline]
    fn poll(&mut self, cx: &mut Context<'_>, done: &mut Done<AnyBuffer>) -> Poll<Ended> {
        Op::poll(self, cx, done)
    }

    #[inline]
    fn try_post(&mut self) -> Result<(), Error> {
        Op::try_post(self)
    }

    #[inline]
    fn is_posted(&self) -> bool {
        Op::is_posted(self)
    }

    #[inline]
    fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        Op::poll_ended(self, cx)
    }

    #[inline]
    fn expire(&mut self, after: Duration) -> Finished {
        Op::expire(self, after)
    }
}

/// An operation with its buffer's type.
#[derive(Debug)]
pub(super) struct Typed<B: Operand, O = Op> {
    op: O,
    landing: B::Landing,
}

impl<B: Operand, O: Engine> Typed<B, O> {
    pub(super) fn new(op: O) -> Self {
        Self { op, landing: B::Landing::default() }
    }

    /// Where the bytes go when the device is done.
    #[cfg(feature = "cuda")]
    pub(super) fn landing(&mut self) -> &mut B::Landing {
        &mut self.landing
    }

    #[inline]
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Landed<B>> {
        if let Some(landed) = B::poll_landing(&mut self.landing, cx) {
            return landed;
        }
        if B::NEEDS_READY {
            let role = self.op.role();
            if let Some(buffer) = self.op.unposted() {
                if let Err(error) = ready!(B::poll_ready(buffer, role, cx)) {
                    return Poll::Ready(Err(self.op.refuse(error).with(B::from_any)));
                }
            }
        }
        let mut done = Done::default();
        if let Err(error) = ready!(self.op.poll(cx, &mut done)) {
            return Poll::Ready(Err(error.with(B::from_any)));
        }
        // One after the other: a pair of them would be put together first.
        if let Some(Outcome::Completed(completion)) = done.outcome {
            if let Some(buffer) = done.owner.and_then(B::from_any) {
                return buffer.land(completion, self.op.role(), &mut self.landing, cx);
            }
        }
        Poll::Ready(Err(OpError::new(wrong_type(&self.op), None)))
    }

    pub(super) fn try_post(&mut self) -> Result<(), Error> {
        if B::NEEDS_READY {
            let role = self.op.role();
            if let Some(buffer) = self.op.unposted() {
                B::try_ready(buffer, role)?;
            }
        }
        self.op.try_post()
    }

    pub(super) fn is_posted(&self) -> bool {
        self.op.is_posted()
    }

    /// Whether the device is done with a posted operation; leaves the waker behind if not.
    pub(super) fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.op.poll_ended(cx)
    }

    /// Gives up at a deadline.
    pub(super) fn expire(&mut self, after: Duration) -> Landed<B> {
        if let Some(buffer) = B::give_up_landing(&mut self.landing) {
            return Err(self.on_its_way(after, Some(buffer)));
        }
        let finished = self.op.expire(after);
        // It may have finished at the last moment, and then it finishes as always.
        let (done, buffer) = self.typed(finished)?;
        let mut cx = Context::from_waker(Waker::noop());
        match buffer.land(done, self.op.role(), &mut self.landing, &mut cx) {
            Poll::Ready(landed) => landed,
            Poll::Pending => {
                let buffer = B::give_up_landing(&mut self.landing);
                Err(self.on_its_way(after, buffer))
            }
        }
    }

    fn on_its_way(&self, after: Duration, buffer: Option<B>) -> OpError<B> {
        let hint = "the device is done with it, but the bytes are still on their way to the GPU";
        OpError::new(Error::Timeout { operation: self.op.operation(), after, hint: hint.into() }, buffer)
    }

    #[inline]
    fn typed(&self, finished: Finished) -> Landed<B> {
        match finished {
            Ok((done, buffer)) => match B::from_any(buffer) {
                Some(buffer) => Ok((done, buffer)),
                None => Err(OpError::new(wrong_type(&self.op), None)),
            },
            Err(error) => Err(error.with(B::from_any)),
        }
    }
}

/// A slot gives back the very buffer that was put in, so this does not happen; if it did, it would be an error and no panic.
fn wrong_type(op: &impl Engine) -> Error {
    Error::Invalid { operation: op.operation(), reason: "the buffer came back as another type".to_owned() }
}

/// The methods that every operation's future has.
macro_rules! common_methods {
    ($future:ident < $b:ident : $bound:path >) => {
        crate::op::typed::common_methods!($future<$b: $bound>, crate::op::core::Op);
    };
    ($future:ident < $b:ident : $bound:path >, $engine:ty) => {
        impl<$b: $bound> $future<$b> {
            pub(crate) fn new(op: $engine) -> Self {
                Self { op: crate::op::typed::Typed::new(op) }
            }

            /// Posts now instead of at the first poll, without waiting for a slot in the queue.
            ///
            /// Use it to have a receive in place before the peer is told to send, or to fix the order of several operations.
            /// The future still has to be awaited for the result.
            ///
            /// # Errors
            ///
            /// [`Error::QueueFull`](crate::Error::QueueFull) when the queue is full, and `GpuError::Busy` when a GPU is at work on the buffer; the
            /// future can then still be awaited, and waits for that.
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
                self.op.expire(after).map(|(done, buffer)| Self::output(done, buffer))
            }
        }
    };
}
pub(super) use common_methods;
