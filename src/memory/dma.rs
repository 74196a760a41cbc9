//! Raw access to memory that a queue pair may touch: the software NIC's DMA engine.
//!
//! Everything that dereferences the address of somebody's buffer is in this file. The contract that makes it sound:
//! a [`Segment`] is made from a buffer that moves into an op-table slot (or from an exposed region) at the same time,
//! and that owner keeps the memory alive and unlent until the provider has reported the completion,
//! revoked the key, or destroyed the queue pair.
//!
//! No reference to such memory is ever formed: peers, the kernel and other threads may change it at any time,
//! so it is only handed to system calls, copied through raw pointers, or accessed with atomics.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::cells::Cells;
use super::racing;

/// A run of bytes of registered memory, as a scatter/gather entry names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a Segment is an address and a length. What it points to may be used from any thread
// under the contract at the top of this file.
unsafe impl Send for Segment {}
// SAFETY: as above; `&Segment` gives nothing that `Segment` (Copy) does not.
unsafe impl Sync for Segment {}

impl Segment {
    /// Names `len` bytes at `ptr`. Dereferenced only by this module, under its contract.
    pub(crate) fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len }
    }

    pub(crate) fn address(&self) -> u64 {
        self.ptr as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The `len` bytes at `offset`, if they lie inside.
    pub(crate) fn slice(&self, offset: usize, len: usize) -> Option<Self> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        Some(Self { ptr: self.ptr.wrapping_add(offset), len })
    }

    /// The 8 bytes at `offset` as an atomic, if they lie inside and are aligned.
    fn atomic(&self, offset: usize) -> Option<&AtomicU64> {
        let place = self.slice(offset, 8)?;
        if place.address() % 8 != 0 {
            return None;
        }
        // SAFETY: in bounds and aligned (both checked above), alive by the contract of this file. Exposed memory is
        // only ever accessed with atomics, raw copies or by the kernel, so a shared reference to an atomic is allowed.
        Some(unsafe { AtomicU64::from_ptr(place.ptr.cast()) })
    }

    /// Atomic compare-and-swap; returns the old value, or `None` when out of bounds or misaligned.
    pub(crate) fn compare_swap(&self, offset: usize, compare: u64, swap: u64) -> Option<u64> {
        let place = self.atomic(offset)?;
        Some(place.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|old| old))
    }

    /// Atomic fetch-and-add (wrapping); returns the old value, or `None` when out of bounds or misaligned.
    pub(crate) fn fetch_add(&self, offset: usize, add: u64) -> Option<u64> {
        Some(self.atomic(offset)?.fetch_add(add, Ordering::SeqCst))
    }

    /// Copies `bytes` to the start of memory that nobody else uses at this time (a receive, or the target of a Read).
    pub(crate) fn copy_from(&self, bytes: &[u8]) {
        let len = bytes.len().min(self.len);
        // SAFETY: `len` bytes are inside both; the contract gives this provider the memory until the completion.
        // `bytes` is a borrow of this crate's own staging memory, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr, len) }
    }

    /// Copies `bytes` to the place `at` of memory that local threads may access at the same time: all of an exposed region,
    /// so that both sides agree on the cells that it consists of. Nothing is copied when they do not fit.
    pub(crate) fn copy_from_shared(&self, at: usize, bytes: &[u8]) {
        let Some(ptr) = NonNull::new(self.ptr) else { return };
        if at.checked_add(bytes.len()).is_some_and(|end| end <= self.len) {
            // SAFETY: alive by contract; this process reaches exposed memory through the cells over the whole region only.
            unsafe { Cells::new(ptr, self.len) }.write(at, bytes);
        }
    }

    /// Appends a copy of these bytes to `out`.
    pub(crate) fn append_to(&self, out: &mut Vec<u8>) {
        out.reserve(self.len);
        // SAFETY: `reserve` made room for `self.len` more bytes, and a fresh allocation overlaps with nothing.
        // The source is alive by contract; the bytes are initialised once copied, so the new length is right.
        unsafe {
            std::ptr::copy_nonoverlapping(self.ptr, out.as_mut_ptr().add(out.len()), self.len);
            out.set_len(out.len() + self.len);
        }
    }
}

/// The first `len` bytes of a bounce, or as many as it has. To be called when its copies were waited for; they cannot start again while
/// it is borrowed.
pub(crate) fn bounced(bounce: &dyn super::device::Bounce, len: usize) -> &[u8] {
    let segment = bounce.segment();
    let len = len.min(segment.len);
    if len == 0 {
        return &[];
    }
    // SAFETY: a bounce's memory is allocated and initialised as long as it lives, and changed only by copies, which take it mutably.
    unsafe { std::slice::from_raw_parts(segment.ptr, len) }
}

/// Most parts of one gather or scatter; far below the kernel's `IOV_MAX` (1024).
pub(crate) const MAX_PARTS: usize = 256;

type Parts = SmallVec<[libc::iovec; 24]>;

fn push(parts: &mut Parts, base: *mut u8, len: usize) {
    if len > 0 {
        parts.push(libc::iovec { iov_base: base.cast(), iov_len: len });
    }
}

/// Up to this size a copy is cheaper than a list of pieces.
const SMALL: usize = 1024;

const SEND_FLAGS: libc::c_int = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;

// The system calls below are made directly: libc's functions are cancellation points, whose bookkeeping costs as much
// as the rest of the wrapper, and nothing here is ever cancelled.
fn checked(result: libc::c_long) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Bytes from several places, sent with one system call.
pub(crate) struct Gather<'a> {
    parts: Parts,
    len: usize,
    /// Somebody may write some of it at this moment.
    shared: bool,
    borrowed: PhantomData<&'a [u8]>,
}

impl<'a> Gather<'a> {
    pub(crate) fn new() -> Self {
        Self { parts: Parts::new(), len: 0, shared: false, borrowed: PhantomData }
    }

    pub(crate) fn push_bytes(&mut self, bytes: &'a [u8]) {
        self.len += bytes.len();
        push(&mut self.parts, bytes.as_ptr().cast_mut(), bytes.len());
    }

    pub(crate) fn push(&mut self, segment: Segment) {
        self.len += segment.len;
        push(&mut self.parts, segment.ptr, segment.len);
    }

    /// Memory that others may write at the same time (exposed regions): only the kernel reads it.
    pub(crate) fn push_shared(&mut self, segment: Segment) {
        self.shared = true;
        self.push(segment);
    }

    /// Bytes gathered so far.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Copies as much as there is room for; how much that was. The room is memory that another process may use at the same time.
    pub(crate) fn copy_to(&self, room: [Segment; 2]) -> usize {
        copy_parts(self.parts.iter().map(|part| (part.iov_base.cast(), part.iov_len)), room.map(|it| (it.ptr, it.len)))
    }

    /// One non-blocking send; returns how many bytes the socket took.
    pub(crate) fn send(mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if self.len <= SMALL && !self.shared {
            return self.send_copied(socket);
        }
        // SAFETY: msghdr is plain data; all-zero means no name, no control data, no parts.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.parts.as_mut_ptr();
        message.msg_iovlen = self.parts.len() as _;
        // SAFETY: the parts outlive the call: borrowed bytes by `'a`, segments by the contract of this file.
        // The kernel only reads them.
        checked(unsafe { libc::syscall(libc::SYS_sendmsg, socket.as_raw_fd(), &message, SEND_FLAGS) })
    }

    /// The kernel is quicker with one small piece than with a list of them.
    fn send_copied(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut bytes = [const { MaybeUninit::<u8>::uninit() }; SMALL];
        let mut at = 0;
        for part in &self.parts {
            // SAFETY: the lengths of the parts add up to `self.len <= SMALL`. They are alive as in `send`;
            // nobody changes them meanwhile, since memory that others may change is pushed as shared.
            unsafe {
                let to = bytes.as_mut_ptr().add(at).cast::<u8>();
                std::ptr::copy_nonoverlapping(part.iov_base.cast::<u8>(), to, part.iov_len);
            }
            at += part.iov_len;
        }
        // SAFETY: the first `at` bytes were initialised above; the kernel only reads them. No address (null, 0).
        checked(unsafe {
            libc::syscall(
                libc::SYS_sendto,
                socket.as_raw_fd(),
                bytes.as_ptr(),
                at,
                SEND_FLAGS,
                std::ptr::null::<libc::sockaddr>(),
                0usize,
            )
        })
    }
}

/// Places for bytes, filled in order with one system call.
pub(crate) struct Scatter<'a> {
    parts: Parts,
    len: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Scatter<'a> {
    pub(crate) fn new() -> Self {
        Self { parts: Parts::new(), len: 0, borrowed: PhantomData }
    }

    pub(crate) fn push_bytes(&mut self, bytes: &'a mut [u8]) {
        self.len += bytes.len();
        push(&mut self.parts, bytes.as_mut_ptr(), bytes.len());
    }

    pub(crate) fn push(&mut self, segment: Segment) {
        self.len += segment.len;
        push(&mut self.parts, segment.ptr, segment.len);
    }

    /// Room for so many bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Fills the places with as much as there is; how much that was. It comes from memory that another process may use at the
    /// same time.
    pub(crate) fn copy_from(&self, from: [Segment; 2]) -> usize {
        let places = self.parts.iter().map(|part| (part.iov_base.cast(), part.iov_len));
        copy_parts(from.into_iter().map(|it| (it.ptr, it.len)), places)
    }

    /// One read from a non-blocking socket; 0 at its end.
    pub(crate) fn read(self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        if let [part] = self.parts.as_slice() {
            // SAFETY: as below, for the only part. No address is asked for (null, null).
            return checked(unsafe {
                libc::syscall(
                    libc::SYS_recvfrom,
                    socket.as_raw_fd(),
                    part.iov_base,
                    part.iov_len,
                    libc::MSG_DONTWAIT,
                    std::ptr::null::<libc::sockaddr>(),
                    std::ptr::null::<libc::socklen_t>(),
                )
            });
        }
        // SAFETY: the parts outlive the call and may be written: borrowed bytes by `'a` (a mutable borrow),
        // segments by the contract of this file. The length fits: at most MAX_PARTS parts are pushed.
        checked(unsafe { libc::syscall(libc::SYS_readv, socket.as_raw_fd(), self.parts.as_ptr(), self.parts.len()) })
    }
}

/// Copies from one list of pieces to another, until either ends; how many bytes that were.
///
/// Private: the pieces are those of a gather or scatter and of a link's memory, all of which are alive during the call.
fn copy_parts(
    from: impl IntoIterator<Item = (*mut u8, usize)>,
    to: impl IntoIterator<Item = (*mut u8, usize)>,
) -> usize {
    let (mut from, mut to) = (from.into_iter(), to.into_iter());
    let (mut source, mut target) = (from.next(), to.next());
    let mut copied = 0;
    while let (Some((at, left)), Some((place, room))) = (source, target) {
        let len = left.min(room);
        // SAFETY: `len` bytes are inside of both pieces. They are alive: borrowed for the gather's or scatter's lifetime, or
        // by the contract of this file, or mapped while the link exists that names them. A link's memory is mapped for it
        // alone, so it overlaps with nothing, and nobody holds a reference to it, or to memory of a segment.
        unsafe { racing::copy(at, place, len) };
        copied += len;
        source = if len == left { from.next() } else { Some((at.wrapping_add(len), left - len)) };
        target = if len == room { to.next() } else { Some((place.wrapping_add(len), room - len)) };
    }
    copied
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(miri))]
    fn copies_go_over_the_ends_of_pieces() {
        let bytes: Vec<u8> = (0..50).collect();
        let mut memory = vec![0u8; 40];
        let all = Segment::new(memory.as_mut_ptr(), 40);
        let room = |at, len| all.slice(at, len).unwrap();
        let mut gather = Gather::new();
        for piece in [0..7, 7..7, 7..30, 30..50] {
            gather.push_bytes(&bytes[piece]);
        }
        assert_eq!(gather.copy_to([room(30, 10), room(0, 17)]), 27);
        let (mut head, mut tail) = (vec![0; 12], vec![0; 100]);
        let mut scatter = Scatter::new();
        scatter.push_bytes(&mut head);
        scatter.push_bytes(&mut tail);
        assert_eq!(scatter.copy_from([room(30, 10), room(0, 17)]), 27);
        assert_eq!([&head[..], &tail[..15]].concat(), bytes[..27]);
        assert_eq!(tail[15..], [0; 85]);
    }

    #[test]
    fn shared_copy_handles_every_alignment() {
        for start in 0..9 {
            for len in 0..40 {
                let mut memory = vec![0u8; 64];
                let source: Vec<u8> = (1..=len as u8).collect();
                let whole = Segment::new(memory.as_mut_ptr(), 64);
                whole.copy_from_shared(start, &source);
                let segment = whole.slice(start, len).unwrap();
                let mut out = Vec::new();
                segment.append_to(&mut out);
                assert_eq!(out, source);
                assert!(memory[..start].iter().chain(&memory[start + len..]).all(|b| *b == 0));
            }
        }
    }

    #[test]
    fn slices_stay_inside() {
        let mut memory = [0u8; 16];
        let segment = Segment::new(memory.as_mut_ptr(), 16);
        assert!(segment.slice(16, 0).is_some());
        assert!(segment.slice(17, 0).is_none());
        assert!(segment.slice(8, 9).is_none());
        assert!(segment.slice(usize::MAX, 2).is_none());
    }

    #[test]
    fn atomics_check_alignment_and_bounds() {
        let mut memory = [0u64; 2];
        let segment = Segment::new(memory.as_mut_ptr().cast(), 16);
        assert_eq!(segment.fetch_add(8, 5), Some(0));
        assert_eq!(segment.compare_swap(8, 5, 9), Some(5));
        assert_eq!(segment.compare_swap(8, 5, 1), Some(9));
        assert_eq!(segment.fetch_add(4, 1), None);
        assert_eq!(segment.fetch_add(16, 1), None);
        assert_eq!(memory, [0, 9]);
    }
}
