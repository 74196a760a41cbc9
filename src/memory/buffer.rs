//! Owned buffers.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::slice;

use super::piece::{Apart, Piece};
use super::{MemoryRegion, ProtectionDomain, SharedBuffer};
use crate::error::{Error, Result};

/// Registered memory that this value alone may read and write.
///
/// Every operation takes its buffer by value and gives it back when the device has let go of it, so a buffer in the program's
/// hands is never touched by a device. It dereferences to `[u8]`, all of it initialised, and its length is fixed: to send a shorter
/// message [`split_to`](Self::split_to) the part, and [`unsplit`](Self::unsplit) afterwards.
///
/// Splitting, freezing and dropping neither copy nor allocate. When the last piece of it is dropped, a buffer of a pool returns
/// to its pool, and any other is deregistered and freed.
///
/// ```
/// # fn demo(pd: &tokio_rdma::ProtectionDomain) -> tokio_rdma::Result<()> {
/// let mut buffer = pd.alloc(4096)?;
/// let mut header = buffer.split_to(16)?;
/// header.fill(0xff);
/// assert_eq!((header.len(), buffer.len()), (16, 4080));
///
/// let buffer = header.unsplit(buffer)?;
/// assert_eq!(buffer.len(), 4096);
/// # Ok(())
/// # }
/// ```
pub struct Buffer(Piece);

impl Buffer {
    /// The piece is exclusive from now on.
    pub(super) fn from_piece(piece: Piece) -> Self {
        Self(piece)
    }

    pub(super) fn piece(&self) -> &Piece {
        &self.0
    }

    pub(super) fn into_piece(self) -> Piece {
        self.0
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the length is 0, as it can be after a split.
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

    /// Takes the first `at` bytes off; `self` keeps the rest.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when `at` is above the length; `self` is unchanged.
    pub fn split_to(&mut self, at: usize) -> Result<Self> {
        let tail = self.0.split_off("split_to", at)?;
        Ok(Self(std::mem::replace(&mut self.0, tail)))
    }

    /// Takes the bytes from `at` on off; `self` keeps the first `at`.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when `at` is above the length; `self` is unchanged.
    pub fn split_off(&mut self, at: usize) -> Result<Self> {
        self.0.split_off("split_off", at).map(Self)
    }

    /// Joins two buffers that a split made of one: `other` begins where `self` ends.
    ///
    /// # Errors
    ///
    /// When they are not neighbours in memory, or not parts of one original buffer. The error holds both.
    pub fn unsplit(mut self, other: Self) -> Result<Self, UnsplitError> {
        match self.0.join(other.0) {
            Ok(()) => Ok(self),
            Err((tail, why)) => Err(UnsplitError { first: self, second: Self(tail), why }),
        }
    }

    /// Makes the buffer read-only and cheap to clone.
    pub fn freeze(self) -> SharedBuffer {
        SharedBuffer::from_piece(self.0)
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are initialised and stay allocated while the piece lives, and nobody else can reach them.
        unsafe { slice::from_raw_parts(self.0.ptr().as_ptr(), self.0.len()) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` rules out other references through this value.
        unsafe { slice::from_raw_parts_mut(self.0.ptr().as_ptr(), self.0.len()) }
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Where it is, not what is in it.
impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_piece(f, "Buffer", &self.0)
    }
}

pub(super) fn debug_piece(f: &mut fmt::Formatter<'_>, name: &str, piece: &Piece) -> fmt::Result {
    f.debug_struct(name)
        .field("address", &format_args!("{:#x}", piece.address()))
        .field("len", &piece.len())
        .field("lkey", &format_args!("{:#x}", piece.region().lkey()))
        .finish()
}

/// [`Buffer::unsplit`] refused, and gives both buffers back.
#[derive(Debug)]
pub struct UnsplitError {
    first: Buffer,
    second: Buffer,
    why: Apart,
}

impl UnsplitError {
    /// The two buffers, in the order they were given.
    pub fn into_buffers(self) -> (Buffer, Buffer) {
        (self.first, self.second)
    }
}

impl fmt::Display for UnsplitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (first, second) = (self.first.address(), self.second.address());
        match self.why {
            Apart::Region => f.write_str("unsplit: the buffers belong to different memory regions"),
            Apart::Chunk => f.write_str("unsplit: the buffers were taken from their pool one by one"),
            Apart::Bytes => {
                let end = first + self.first.len() as u64;
                write!(f, "unsplit: the first buffer ends at {end:#x}, but the second begins at {second:#x}")
            }
        }
    }
}

impl std::error::Error for UnsplitError {}

impl From<UnsplitError> for Error {
    fn from(error: UnsplitError) -> Self {
        let text = error.to_string();
        let reason = text.strip_prefix("unsplit: ").unwrap_or(&text).to_owned();
        Self::Invalid { operation: "unsplit", reason }
    }
}
