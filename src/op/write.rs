//! RDMA Write: bytes into memory that the peer exposed.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::memory::SourceBuffer;
use crate::op::OpError;
use crate::op::typed::{Typed, common_methods};
use crate::provider::WorkCompletion;

/// An RDMA Write on its way; see [`Connection::write`](crate::Connection::write).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled or posted"]
pub struct WriteOp<B: SourceBuffer> {
    op: Typed<B>,
}

common_methods!(WriteOp<B: SourceBuffer>);

impl<B: SourceBuffer> WriteOp<B> {
    fn output(_: WorkCompletion, buffer: B) -> B {
        buffer
    }
}

impl<B: SourceBuffer> Future for WriteOp<B> {
    type Output = Result<B, OpError<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.op.poll(cx).map_ok(|(done, buffer)| Self::output(done, buffer))
    }
}
