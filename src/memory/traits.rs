//! What an operation accepts.

use std::task::{Context, Poll};

use super::{AnyBuffer, Buffer, SgList, SharedBuffer};
use crate::error::Result;
use crate::op::OpError;
use crate::op::role::Role;
use crate::provider::WorkCompletion;

/// Memory that can be sent or written from: [`Buffer`], [`SharedBuffer`], [`SgList`], and with the feature `cuda` `GpuBuffer`. Sealed.
pub trait SourceBuffer: Operand {}

/// Memory that can be received or read into: [`Buffer`], an [`SgList`] whose segments are all `Buffer`s, and with the feature `cuda`
/// `GpuBuffer`. Sealed.
///
/// That a list has only buffers is checked when the operation starts: a read-only segment is an
/// [`Error::Invalid`](crate::Error::Invalid) that names its index.
pub trait TargetBuffer: Operand {}

impl SourceBuffer for Buffer {}
impl SourceBuffer for SharedBuffer {}
impl SourceBuffer for SgList {}
impl TargetBuffer for Buffer {}
impl TargetBuffer for SgList {}

/// An operation that is over, with its buffer.
pub type Landed<B> = std::result::Result<(WorkCompletion, B), OpError<B>>;

/// The way into an operation's slot and back, and what memory that is not the host's needs before and after.
/// Not exported, which seals the traits above.
pub trait Operand: Sized + Send + Sync + Unpin + 'static {
    /// What is kept of an operation whose device is done, while the bytes are not where they belong yet. Nothing for host memory.
    type Landing: Default + Send + Sync + Unpin + std::fmt::Debug;

    fn into_any(self) -> AnyBuffer;

    /// The value that [`into_any`](Self::into_any) took, or `None` if it is another type's.
    fn from_any(any: AnyBuffer) -> Option<Self>;

    /// Resolves when the operation may be posted. Called before each attempt to, with the operation's own buffer.
    #[inline]
    fn poll_ready(_: &mut AnyBuffer, _: Role, _: &mut Context<'_>) -> Poll<Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// The same at once, or an error.
    #[inline]
    fn try_ready(_: &mut AnyBuffer, _: Role) -> Result<()> {
        Ok(())
    }

    /// Whether there is anything to be made ready: a constant, so that host memory is not asked.
    const NEEDS_READY: bool = false;

    /// The device is done with the operation: resolves when the bytes are where they belong.
    #[inline]
    fn land(self, done: WorkCompletion, _: Role, _: &mut Self::Landing, _: &mut Context<'_>) -> Poll<Landed<Self>> {
        Poll::Ready(Ok((done, self)))
    }

    /// Goes on with what [`land`](Self::land) left unfinished; `None` if it left nothing.
    #[inline]
    fn poll_landing(_: &mut Self::Landing, _: &mut Context<'_>) -> Option<Poll<Landed<Self>>> {
        None
    }

    /// Gives up waiting for that. The buffer knows what is under way.
    #[inline]
    fn give_up_landing(_: &mut Self::Landing) -> Option<Self> {
        None
    }
}

macro_rules! operand {
    ($($type:ident as $variant:ident),*) => {$(
        impl Operand for $type {
            type Landing = ();

            #[inline]
            fn into_any(self) -> AnyBuffer {
                AnyBuffer::$variant(self)
            }

            #[inline]
            fn from_any(any: AnyBuffer) -> Option<Self> {
                if let AnyBuffer::$variant(value) = any { Some(value) } else { None }
            }
        }
    )*};
}
operand!(Buffer as Buffer, SharedBuffer as Shared, SgList as List);
