//! A file of memory, mapped at a place of the kernel's choice.
//!
//! Invariant of [`Mapped`]: `len` bytes at `base` are mapped from a file until it is dropped. That the file is as long, and stays so, is
//! for whoever maps it to see to: an access beyond its end ends the process.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use super::dma::Segment;

#[derive(Debug)]
pub(crate) struct Mapped {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address of memory that any thread may use; what it is used for are atomics and copies.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    /// The first `len` bytes of the file, which are the other processes' too that have it.
    pub(crate) fn new(file: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<Self> {
        let rights = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let (nowhere, file) = (std::ptr::null_mut(), file.as_raw_fd());
        // SAFETY: a fresh mapping at a place of the kernel's choice touches no other memory.
        let base = unsafe { libc::mmap(nowhere, len, rights, libc::MAP_SHARED, file, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    pub(crate) fn segment(&self) -> Segment {
        Segment::new(self.base.as_ptr(), self.len)
    }

    /// The address `offset` bytes behind the first one.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length, and no borrow of it is left. That it fails, for want of memory for the
        // kernel's books, leaves it mapped, which harms nobody.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
