//! Pools of equal buffers over one registration.
#![allow(unsafe_code)]

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::backing::Memory;
use super::buffer::Buffer;
use super::chunks::{Chunks, Ticket};
use super::piece::Piece;
use super::range::at_most;
use super::{MemoryRegion, ProtectionDomain};
use crate::error::{Error, Result};

/// Buffers begin at multiples of this: a cache line, so that two of them never share one.
const ALIGN: usize = 64;

/// Many buffers of one length, registered once.
///
/// Taking a buffer and giving it back (by dropping it) neither registers nor allocates anything. Cheap to clone; the memory
/// lives until the pool's last clone and its last buffer are gone, in any order.
///
/// A buffer has its full length each time it is handed out, whatever was split off before. Its contents are whatever
/// its last user left there: where that matters, `fill(0)` it.
///
/// ```
/// # async fn demo(pd: &tokio_rdma::ProtectionDomain) -> tokio_rdma::Result<()> {
/// use tokio_rdma::BufferPool;
///
/// let pool = BufferPool::new(pd, 4096, 2)?;
/// let first = pool.get().await;
/// let second = pool.try_get().expect("one is left");
/// assert!(pool.try_get().is_none());
/// drop(first);
/// assert_eq!((pool.available(), pool.capacity(), second.len()), (1, 2, 4096));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct BufferPool {
    region: MemoryRegion,
    buffer_len: usize,
}

impl BufferPool {
    /// Allocates and registers `count` zeroed buffers of `buffer_len` bytes each. The base is page-aligned and each buffer
    /// 64-byte-aligned, so the region has `count` times `buffer_len`, rounded up to a multiple of 64.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when `buffer_len` or `count` is 0, `count` above `u32::MAX`, or the whole above the device's
    /// [`max_region`](crate::DeviceLimits::max_region); [`Error::Io`] when there is no memory or the device refuses.
    pub fn new(pd: &ProtectionDomain, buffer_len: usize, count: usize) -> Result<Self> {
        const NEW: &str = "new pool";
        for (what, value) in [("buffer length", buffer_len), ("count", count)] {
            if value == 0 {
                return Err(Error::Limit { operation: NEW, what, value: 0, limit: 1, hint: "the smallest value is 1" });
            }
        }
        at_most(NEW, "count", count as u64, u32::MAX as u64)?;
        let stride = buffer_len.checked_next_multiple_of(ALIGN);
        let Some((stride, total)) = stride.and_then(|stride| Some((stride, stride.checked_mul(count)?))) else {
            let hint = "this is the total length: buffer length, rounded up to 64, times count";
            let limit = pd.limits().max_region;
            return Err(Error::Limit { operation: NEW, what: "length", value: u64::MAX, limit, hint });
        };
        pd.check_length(NEW, total as u64)?;
        let region = MemoryRegion::new(pd, Memory::pages(NEW, total)?, Chunks::free(count as u32), stride)?;
        Ok(Self { region, buffer_len })
    }

    /// A buffer, if one is free that nobody waits for.
    pub fn try_get(&self) -> Option<Buffer> {
        let chunk = self.region.chunks().take()?;
        Some(self.buffer(chunk))
    }

    /// Waits for a buffer. First come, first served.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up its place in the queue; a buffer that had become free for it goes to the next in line.
    pub fn get(&self) -> Get {
        Get { pool: self.clone(), ticket: None }
    }

    /// Buffers that [`try_get`](Self::try_get) would hand out right now.
    pub fn available(&self) -> usize {
        self.region.chunks().available()
    }

    /// Buffers that exist, handed out or not.
    pub fn capacity(&self) -> usize {
        self.region.chunks().count()
    }

    /// Length of each buffer in bytes.
    pub fn buffer_len(&self) -> usize {
        self.buffer_len
    }

    /// The region that the buffers are parts of.
    pub fn region(&self) -> &MemoryRegion {
        &self.region
    }

    /// The domain that the buffers can be used in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.region.domain()
    }

    /// The buffer of a chunk that was just taken.
    fn buffer(&self, chunk: u32) -> Buffer {
        // SAFETY: only called with a chunk fresh from `Chunks`, and the length is at most the stride by construction.
        Buffer::from_piece(unsafe { Piece::of_chunk(self.region.clone(), chunk, self.buffer_len) })
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool")
            .field("buffer_len", &self.buffer_len)
            .field("capacity", &self.capacity())
            .field("available", &self.available())
            .field("region", &self.region)
            .finish()
    }
}

/// The future of [`BufferPool::get`].
#[derive(Debug)]
#[must_use = "futures do nothing unless you `.await` or poll them"]
pub struct Get {
    pool: BufferPool,
    ticket: Option<Ticket>,
}

impl Future for Get {
    type Output = Buffer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Buffer> {
        let Self { pool, ticket } = &mut *self;
        pool.region.chunks().poll_take(ticket, cx).map(|chunk| pool.buffer(chunk))
    }
}

impl Drop for Get {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.pool.region.chunks().leave(ticket);
        }
    }
}
