//! RDMA Read: bytes out of memory that the peer exposed.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::memory::TargetBuffer;
use crate::op::OpError;
use crate::op::typed::{Typed, common_methods};
use crate::provider::WorkCompletion;

/// An RDMA Read on its way; see [`Connection::read`](crate::Connection::read).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled or posted"]
pub struct ReadOp<B: TargetBuffer> {
    op: Typed<B>,
}

common_methods!(ReadOp<B: TargetBuffer>);

impl<B: TargetBuffer> ReadOp<B> {
    #[cfg(feature = "cuda")]
    pub(crate) fn landing(&mut self) -> &mut B::Landing {
        self.op.landing()
    }

    fn output(_: WorkCompletion, buffer: B) -> B {
        buffer
    }
}

impl<B: TargetBuffer> Future for ReadOp<B> {
    type Output = Result<B, OpError<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.op.poll(cx).map_ok(|(done, buffer)| Self::output(done, buffer))
    }
}
