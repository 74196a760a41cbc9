//! Receive: a buffer for one message of the peer.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::memory::{Buffer, TargetBuffer};
use crate::op::OpError;
use crate::op::typed::{Typed, common_methods};
use crate::provider::{Opcode, WorkCompletion};

/// A posted (or about to be posted) receive; see [`Connection::receive`](crate::Connection::receive).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled or posted"]
pub struct ReceiveOp<B: TargetBuffer> {
    op: Typed<B>,
}

common_methods!(ReceiveOp<B: TargetBuffer>);

impl<B: TargetBuffer> ReceiveOp<B> {
    #[cfg(feature = "cuda")]
    pub(crate) fn landing(&mut self) -> &mut B::Landing {
        self.op.landing()
    }

    /// Whether a posted receive has ended, without taking what it got; leaves the waker behind if not.
    pub(crate) fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.op.poll_ended(cx)
    }

    fn output(done: WorkCompletion, buffer: B) -> Received<B> {
        Received::new(&done, buffer)
    }
}

impl<B: TargetBuffer> Future for ReceiveOp<B> {
    type Output = Result<Received<B>, OpError<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.op.poll(cx).map_ok(|(done, buffer)| Self::output(done, buffer))
    }
}

/// What a receive got.
#[derive(Debug)]
#[non_exhaustive]
pub struct Received<B> {
    /// The buffer that was posted, whole.
    pub buffer: B,
    /// Length of the message in bytes; of the bytes written by the peer when [`in_buffer`](Self::in_buffer) is false.
    pub len: usize,
    /// The immediate data that the peer sent along, if any, as the peer passed it.
    pub immediate: Option<u32>,
    /// `true`: the message is in the first [`len`](Self::len) bytes of the buffer. `false`: this is the notice of a Write with
    /// immediate; the bytes are where the peer wrote them, and the buffer is untouched.
    pub in_buffer: bool,
}

impl<B> Received<B> {
    pub(crate) fn new(done: &WorkCompletion, buffer: B) -> Self {
        let in_buffer = done.opcode == Opcode::Receive;
        Self { buffer, len: done.byte_len as usize, immediate: done.imm, in_buffer }
    }
}

impl Received<Buffer> {
    /// The message: the part of the buffer that was received into. Empty for the notice of a Write with immediate.
    pub fn message(&self) -> &[u8] {
        let len = if self.in_buffer { self.len } else { 0 };
        // A device never reports more than was posted.
        self.buffer.get(..len).unwrap_or(&self.buffer)
    }
}
