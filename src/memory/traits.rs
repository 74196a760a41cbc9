//! What an operation accepts.

use super::{AnyBuffer, Buffer, SgList, SharedBuffer};

/// Memory that can be sent or written from: [`Buffer`], [`SharedBuffer`] and [`SgList`]. Sealed.
pub trait SourceBuffer: Operand {}

/// Memory that can be received or read into: [`Buffer`], and an [`SgList`] whose segments are all `Buffer`s. Sealed.
///
/// That a list has only buffers is checked when the operation starts: a read-only segment is an
/// [`Error::Invalid`](crate::Error::Invalid) that names its index.
pub trait TargetBuffer: Operand {}

impl SourceBuffer for Buffer {}
impl SourceBuffer for SharedBuffer {}
impl SourceBuffer for SgList {}
impl TargetBuffer for Buffer {}
impl TargetBuffer for SgList {}

/// The way into an operation's slot and back. Not exported, which seals the traits above.
pub trait Operand: Sized + Send + Sync + Unpin + 'static {
    fn into_any(self) -> AnyBuffer;

    /// The value that [`into_any`](Self::into_any) took, or `None` if it is another type's.
    fn from_any(any: AnyBuffer) -> Option<Self>;
}

macro_rules! operand {
    ($($type:ident as $variant:ident),*) => {$(
        impl Operand for $type {
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
