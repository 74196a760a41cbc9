//! A counted hold on some bytes of a chunk: what buffers of every kind are made of.
//!
//! Invariants of [`Piece`]:
//! - its bytes lie inside its chunk of its region, and the chunk's count of pieces includes it,
//!   so the bytes stay allocated, registered and out of the pool while it lives;
//! - whoever holds a piece exclusively (a `Buffer`, an `ExposedRegion`) holds the only piece that covers any of its bytes;
//!   pieces that overlap are all read-only (`SharedBuffer`).
//!
//! A piece itself dereferences nothing.
#![allow(unsafe_code)]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use super::backing::PAGE;
use super::dma::Segment;
use super::pages::{MAPPED, Pages};
use super::range::at_most;
use super::region::MemoryRegion;
use crate::error::Result;
use crate::provider::Sge;

pub(crate) struct Piece {
    region: MemoryRegion,
    chunk: u32,
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a piece is a counted pointer, and the counts are atomic. What may be done with the bytes
// is the business of the type around it.
unsafe impl Send for Piece {}
// SAFETY: as above; nothing changes through `&Piece`.
unsafe impl Sync for Piece {}

/// Why two pieces do not make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Apart {
    Region,
    Chunk,
    Bytes,
}

impl Piece {
    /// The first `len` bytes of a chunk.
    ///
    /// # Safety
    ///
    /// The chunk was just taken from the region's [`Chunks`](super::chunks::Chunks), and its one piece is the one made here.
    /// `len` is at most the region's stride.
    pub(super) unsafe fn of_chunk(region: MemoryRegion, chunk: u32, len: usize) -> Self {
        region.domain().live().buffers.fetch_add(1, Ordering::Relaxed);
        let ptr = further(region.ptr(), chunk as usize * region.stride());
        Self { region, chunk, ptr, len }
    }

    pub(super) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(super) fn address(&self) -> u64 {
        self.ptr.as_ptr() as u64
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn region(&self) -> &MemoryRegion {
        &self.region
    }

    pub(super) fn segment(&self) -> Segment {
        Segment::new(self.ptr.as_ptr(), self.len)
    }

    /// The scatter/gather entry, or `None` for an empty piece: to some devices an entry of length 0 means 2 GiB.
    pub(super) fn sge(&self) -> Option<Sge> {
        (self.len > 0).then(|| Sge { segment: self.segment(), lkey: self.region.lkey() })
    }

    /// Another piece over a part of this one's bytes. Both must be read-only from now on, or `self` about to be.
    ///
    /// `range` lies inside `0..len`.
    pub(super) fn share(&self, range: Range<usize>) -> Self {
        debug_assert!(range.start <= range.end && range.end <= self.len);
        // The region's count first: it is the one that catches an overflow.
        let region = self.region.clone();
        region.chunks().add_piece(self.chunk);
        let ptr = further(self.ptr, range.start);
        Self { region, chunk: self.chunk, ptr, len: range.end - range.start }
    }

    /// Cuts at `at`: `self` keeps the head, the tail is returned. On an error nothing changed.
    pub(super) fn split_off(&mut self, operation: &'static str, at: usize) -> Result<Self> {
        at_most(operation, "position", at as u64, self.len as u64)?;
        let tail = self.share(at..self.len);
        self.len = at;
        Ok(tail)
    }

    /// Appends `tail`, if it is of the same chunk and begins where this piece ends.
    pub(super) fn join(&mut self, tail: Self) -> Result<(), (Self, Apart)> {
        if !self.region.is(&tail.region) {
            Err((tail, Apart::Region))
        } else if self.chunk != tail.chunk {
            Err((tail, Apart::Chunk))
        } else if self.address() + self.len as u64 != tail.address() {
            Err((tail, Apart::Bytes))
        } else {
            self.len += tail.len;
            Ok(())
        }
    }

    /// Moves the pages of this piece into a file, if they are its own and nobody else's. Nobody uses the bytes meanwhile.
    pub(super) fn share_pages(&self, writable: bool) -> Option<Pages> {
        let len = self.whole_pages()?;
        // SAFETY: whole pages of this piece alone. It is exclusive and becomes exposed memory at this moment, and whoever has
        // that drops the grant, which restores the pages, before the piece.
        unsafe { Pages::share(self.ptr, self.len, len, writable) }.ok()
    }

    /// The length of the pages that this piece is in, if it begins where one does and shares none.
    fn whole_pages(&self) -> Option<usize> {
        let padded = self.len.checked_next_multiple_of(PAGE)?;
        let begins = self.ptr.as_ptr().addr() % PAGE == 0 && self.region.has_pages();
        if !begins || self.len == 0 || padded > MAPPED {
            return None;
        }
        let at = self.ptr.as_ptr().addr() - self.region.ptr().as_ptr().addr();
        let chunk = (self.chunk as usize + 1) * self.region.stride();
        // What is behind the region's last byte is nobody's, up to the end of its page.
        let end = match self.is_only() {
            true if chunk >= self.region.len() => usize::MAX,
            true => chunk,
            false => at + self.len,
        };
        (at + padded <= end).then_some(padded)
    }

    /// Whether no other piece of the chunk exists. It stays so while the caller makes none.
    pub(super) fn is_only(&self) -> bool {
        self.region.chunks().is_only_piece(self.chunk)
    }
}

/// So many bytes on, inside of a region's memory or just behind it. Wrapping, since memory of a device is no allocation of this
/// process, in which alone pointers may be added to in the stricter way.
fn further(ptr: NonNull<u8>, bytes: usize) -> NonNull<u8> {
    // SAFETY: no memory ends at the end of the address space, so this is not null.
    unsafe { NonNull::new_unchecked(ptr.as_ptr().wrapping_add(bytes)) }
}

impl Drop for Piece {
    fn drop(&mut self) {
        let chunks = self.region.chunks();
        if chunks.drop_piece(self.chunk) {
            self.region.domain().live().buffers.fetch_sub(1, Ordering::Relaxed);
            chunks.put_back(self.chunk);
        }
    }
}
