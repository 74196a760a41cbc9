//! Send: a message into a buffer that the peer posted.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::memory::SourceBuffer;
use crate::op::OpError;
use crate::op::typed::{Typed, common_methods};
use crate::provider::WorkCompletion;

/// A Send on its way; see [`Connection::send`](crate::Connection::send).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled or posted"]
pub struct SendOp<B: SourceBuffer> {
    op: Typed<B>,
}

common_methods!(SendOp<B: SourceBuffer>);

impl<B: SourceBuffer> SendOp<B> {
    /// Whether the device has it: its order among the others is fixed.
    pub(crate) fn is_posted(&self) -> bool {
        self.op.is_posted()
    }

    fn output(_: WorkCompletion, buffer: B) -> B {
        buffer
    }
}

impl<B: SourceBuffer> Future for SendOp<B> {
    type Output = Result<B, OpError<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.op.poll(cx).map_ok(|(done, buffer)| Self::output(done, buffer))
    }
}
