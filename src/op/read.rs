//! RDMA Read: bytes out of memory that the peer exposed.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll};

use crate::memory::TargetBuffer;
use crate::op::OpError;
use crate::op::core::Op;
use crate::op::typed::{self, common_methods};
use crate::provider::WorkCompletion;

/// An RDMA Read on its way; see [`Connection::read`](crate::Connection::read).
#[derive(Debug)]
#[must_use = "futures do nothing unless polled or posted"]
pub struct ReadOp<B> {
    op: Op,
    buffer: PhantomData<fn() -> B>,
}

common_methods!(ReadOp<B: TargetBuffer>);

impl<B: TargetBuffer> ReadOp<B> {
    fn output(_: WorkCompletion, buffer: B) -> B {
        buffer
    }
}

impl<B: TargetBuffer> Future for ReadOp<B> {
    type Output = Result<B, OpError<B>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        typed::poll(&mut self.op, cx).map_ok(|(done, buffer)| Self::output(done, buffer))
    }
}
