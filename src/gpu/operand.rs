//! GPU buffers as what operations take.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use cudarc::driver::CudaStream;

use super::buffer::GpuBuffer;
use super::events::Event;
use super::waiter::Waiting;
use crate::error::Result;
use crate::memory::{AnyBuffer, Landed, Operand, SourceBuffer, TargetBuffer};
use crate::meters::GpuWait;
use crate::op::role::Role;
use crate::op::{OpError, ReadOp, ReceiveOp};
use crate::provider::{Opcode, WorkCompletion};

impl SourceBuffer for GpuBuffer {}
impl TargetBuffer for GpuBuffer {}

/// Bytes that the device has delivered, on their way to where the GPU sees them.
///
/// `pub` because a sealed trait names it; not exported.
#[derive(Debug, Default)]
pub struct GpuLanding {
    /// Whose work is to wait, in place of the task.
    stream: Option<Arc<CudaStream>>,
    under_way: Option<UnderWay>,
}

#[derive(Debug)]
struct UnderWay {
    done: WorkCompletion,
    buffer: GpuBuffer,
    event: Event,
    waiting: Option<Waiting>,
}

impl Operand for GpuBuffer {
    type Landing = GpuLanding;

    const NEEDS_READY: bool = true;

    fn into_any(self) -> AnyBuffer {
        AnyBuffer::Gpu(self)
    }

    fn from_any(any: AnyBuffer) -> Option<Self> {
        if let AnyBuffer::Gpu(buffer) = any { Some(buffer) } else { None }
    }

    fn poll_ready(any: &mut AnyBuffer, role: Role, cx: &mut Context<'_>) -> Poll<Result<()>> {
        match any {
            AnyBuffer::Gpu(buffer) => buffer.held_mut().poll_ready(role, cx).map_err(Into::into),
            _ => Poll::Ready(Ok(())),
        }
    }

    fn try_ready(any: &mut AnyBuffer, role: Role) -> Result<()> {
        match any {
            AnyBuffer::Gpu(buffer) => Ok(buffer.held_mut().try_ready("post", role)?),
            _ => Ok(()),
        }
    }

    fn land(
        mut self,
        done: WorkCompletion,
        role: Role,
        landing: &mut GpuLanding,
        cx: &mut Context<'_>,
    ) -> Poll<Landed<GpuBuffer>> {
        let held = self.held_mut();
        held.reset_ready();
        if role == Role::Source {
            return Poll::Ready(Ok((done, self)));
        }
        let len = match done.opcode {
            Opcode::Request => held.piece.len(),
            Opcode::Receive => done.byte_len as usize,
            Opcode::ReceiveWriteImm => 0,
        };
        match held.land(len) {
            Ok(None) => Poll::Ready(Ok((done, self))),
            Err(error) => Poll::Ready(Err(OpError::new(error.into(), Some(self)))),
            Ok(Some(event)) => match landing.stream.take() {
                // The buffer's own record of the copy would make it wait as well, if the program only ever used guards.
                Some(stream) => Poll::Ready(match event.hold(&stream) {
                    Ok(()) => Ok((done, self)),
                    Err(error) => Err(OpError::new(error.into(), Some(self))),
                }),
                None => {
                    self.domain().meters().gpu_wait(GpuWait::Visible);
                    landing.under_way = Some(UnderWay { done, buffer: self, event, waiting: None });
                    landing.poll(cx)
                }
            },
        }
    }

    fn poll_landing(landing: &mut GpuLanding, cx: &mut Context<'_>) -> Option<Poll<Landed<GpuBuffer>>> {
        landing.under_way.is_some().then(|| landing.poll(cx))
    }

    fn give_up_landing(landing: &mut GpuLanding) -> Option<Self> {
        landing.under_way.take().map(|under_way| under_way.buffer)
    }
}

impl GpuLanding {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Landed<GpuBuffer>> {
        let Some(under_way) = &mut self.under_way else { return Poll::Pending };
        let result = ready!(under_way.event.poll_done(&mut under_way.waiting, cx));
        let Some(UnderWay { done, buffer, .. }) = self.under_way.take() else { return Poll::Pending };
        Poll::Ready(match result {
            Ok(()) => Ok((done, buffer)),
            Err(error) => Err(OpError::new(error.into(), Some(buffer))),
        })
    }
}

macro_rules! on_stream {
    ($($op:ident)*) => {$(
        impl $op<GpuBuffer> {
            /// Resolves as soon as the device is done, and makes `stream` wait for whatever else it takes until the bytes are where
            /// they belong: work that is launched on that stream afterwards sees them.
            ///
            /// That differs from plain awaiting on the [staged](crate::gpu::GpuPath::Staged) path only, where the last step is a copy
            /// of the GPU's own.
            pub fn on(mut self, stream: &Arc<CudaStream>) -> Self {
                self.landing().stream = Some(stream.clone());
                self
            }
        }
    )*};
}
on_stream!(ReceiveOp ReadOp);
