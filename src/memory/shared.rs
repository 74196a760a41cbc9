//! Read-only buffers with many owners.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, RangeBounds};
use std::slice;

use super::buffer::{Buffer, debug_piece};
use super::piece::Piece;
use super::range::resolve_local;
use super::{MemoryRegion, ProtectionDomain};
use crate::error::Result;

/// Registered memory that nobody writes any more, cheap to clone: the same bytes can go to many peers at once.
///
/// Made by [`Buffer::freeze`]. When the last clone and slice is dropped, the memory goes where the buffer's would have gone.
///
/// ```
/// # fn demo(pd: &tokio_rdma::ProtectionDomain) -> tokio_rdma::Result<()> {
/// let page = pd.register(b"headline and text".to_vec())?.freeze();
/// let headline = page.slice(..8)?;
/// assert_eq!(&headline[..], b"headline");
///
/// drop(headline);
/// let page = page.try_into_buffer().expect("the only owner");
/// assert_eq!(page.len(), 17);
/// # Ok(())
/// # }
/// ```
pub struct SharedBuffer(Piece);

impl SharedBuffer {
    /// The piece was exclusive, or read-only already.
    pub(super) fn from_piece(piece: Piece) -> Self {
        Self(piece)
    }

    pub(super) fn piece(&self) -> &Piece {
        &self.0
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte, in this process.
    pub fn address(&self) -> u64 {
        self.0.address()
    }

    /// The region that this buffer is a part of.
    pub fn region(&self) -> &MemoryRegion {
        self.0.region()
    }

    /// The domain that this buffer can be used in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.0.region().domain()
    }

    /// A part of this buffer, which keeps the memory alive on its own.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`](crate::Error::Limit) when the range ends behind the buffer's end, or before it starts.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<Self> {
        let range = resolve_local("slice", range, self.len())?;
        Ok(Self(self.0.share(range)))
    }

    /// Makes the bytes writable again, if nothing else is left of the original buffer: no clone, no slice, no split-off part.
    /// Gives itself back otherwise.
    pub fn try_into_buffer(self) -> Result<Buffer, Self> {
        if self.0.is_only() { Ok(Buffer::from_piece(self.0)) } else { Err(self) }
    }
}

impl Clone for SharedBuffer {
    fn clone(&self) -> Self {
        Self(self.0.share(0..self.len()))
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are initialised and stay allocated while the piece lives, and nobody writes them.
        unsafe { slice::from_raw_parts(self.0.ptr().as_ptr(), self.0.len()) }
    }
}

impl AsRef<[u8]> for SharedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl From<Buffer> for SharedBuffer {
    fn from(buffer: Buffer) -> Self {
        buffer.freeze()
    }
}

/// Where it is, not what is in it.
impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_piece(f, "SharedBuffer", &self.0)
    }
}
