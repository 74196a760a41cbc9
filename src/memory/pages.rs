//! Pages that another process may map: those of an exposed piece, moved into a file of memory (memfd_create(2)) of their own for as
//! long as the piece is exposed.
//!
//! They stay at their address. Exposing copies them into the file and maps that in their place; revoking copies them back into
//! fresh private pages, whatever a peer still has mapped: it keeps the file, and this process does not.
//!
//! Invariant of [`Pages`]: until [`restore`](Pages::restore), the `len` bytes at `ptr` are mapped from `memory`, whose size is sealed.
//! They are whole pages that belong to one piece alone, which outlives this.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::process::{Resource, getrlimit};

use super::racing;

#[derive(Debug)]
pub(crate) struct Pages {
    ptr: NonNull<u8>,
    len: usize,
    memory: OwnedFd,
    restored: AtomicBool,
    _place: Place,
}

// SAFETY: an address, which is used by `restore` alone, once.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Moves the pages into a file.
    ///
    /// # Safety
    ///
    /// `ptr` and `len` are multiples of the page size. The bytes are allocated until after [`restore`](Self::restore), and nobody uses
    /// them during this call, or during that one.
    pub(super) unsafe fn share(ptr: NonNull<u8>, len: usize) -> io::Result<Self> {
        let place = Place::take()?;
        let memory = file("tokio-rdma region", len)?;
        let file = memory.as_raw_fd();
        let fresh = map(std::ptr::null_mut(), len, libc::MAP_SHARED, file)?;
        // SAFETY: the caller's bytes, and as many that were just mapped.
        unsafe { racing::copy(ptr.as_ptr(), fresh.as_ptr(), len) };
        // SAFETY: what was at the caller's place is as long, and its contents are in the file by now.
        let moved = unsafe { replace(fresh, ptr, len) };
        moved.map(|()| Self { ptr, len, memory, restored: AtomicBool::new(false), _place: place })
    }

    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The address that the file begins at.
    pub(crate) fn address(&self) -> u64 {
        self.ptr.as_ptr() as u64
    }

    /// Gives the piece private pages again, with the same contents or with zeros. Idempotent.
    pub(crate) fn restore(&self, contents: bool) {
        if self.restored.swap(true, Ordering::SeqCst) {
            return;
        }
        let restored =
            map(std::ptr::null_mut(), self.len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).and_then(|fresh| {
                if contents {
                    // SAFETY: as many bytes as are mapped at both places; a peer may write the source meanwhile.
                    unsafe { racing::copy(self.ptr.as_ptr(), fresh.as_ptr(), self.len) };
                }
                // SAFETY: by the type's invariant the place is that of whole pages of the piece, whose bytes are in the new ones.
                unsafe { replace(fresh, self.ptr, self.len) }
            });
        if let Err(error) = restored {
            // Nothing can be taken back without memory; who has the file belongs to the same user.
            tracing::error!(%error, len = self.len, "a revoked region stays mapped by its peers");
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.restore(false);
    }
}

/// A file of memory whose size nobody can change any more.
pub(crate) fn file(name: &str, len: usize) -> io::Result<OwnedFd> {
    if limit(Resource::Fsize) < len as u64 {
        // Trying it would end the process with a signal.
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memory, len as u64)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// One of the process's descriptors. A quarter of them are for exposed regions; a program may need the others, and its further
/// regions work without.
#[derive(Debug)]
struct Place;

static PLACES: AtomicU64 = AtomicU64::new(0);

impl Place {
    fn take() -> io::Result<Self> {
        let place = Self;
        if PLACES.fetch_add(1, Ordering::Relaxed) < limit(Resource::Nofile) / 4 {
            Ok(place)
        } else {
            Err(io::Error::from_raw_os_error(libc::EMFILE))
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        PLACES.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A limit of this process; see getrlimit(2).
fn limit(of: Resource) -> u64 {
    getrlimit(of).current.unwrap_or(u64::MAX)
}

fn map(at: *mut libc::c_void, len: usize, flags: libc::c_int, file: libc::c_int) -> io::Result<NonNull<u8>> {
    // SAFETY: a fresh mapping at a place of the kernel's choice touches no other memory.
    let mapped = unsafe { libc::mmap(at, len, libc::PROT_READ | libc::PROT_WRITE, flags, file, 0) };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(mapped.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Puts the pages at `fresh` in the place of those at `at`, in one step.
///
/// # Safety
///
/// Both are whole pages; nobody else knows of those at `fresh`, and those at `at` may go.
unsafe fn replace(fresh: NonNull<u8>, at: NonNull<u8>, len: usize) -> io::Result<()> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: the caller's promise.
    let moved = unsafe { libc::mremap(fresh.as_ptr().cast(), len, len, flags, at.as_ptr()) };
    if moved == libc::MAP_FAILED {
        let error = io::Error::last_os_error();
        // SAFETY: still at its first place, which nobody else knows.
        unsafe { libc::munmap(fresh.as_ptr().cast(), len) };
        return Err(error);
    }
    Ok(())
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::alloc::{Layout, alloc_zeroed, dealloc};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn pages_are_shared_while_exposed_and_private_again_afterwards() {
        const LEN: usize = 3 * 4096;
        let layout = Layout::from_size_align(LEN, 4096).unwrap();
        for contents in [true, false] {
            // SAFETY: the layout is not empty; the memory is freed below, when nobody uses it any more.
            let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
            let byte = |at| ptr.as_ptr().wrapping_add(at);
            // SAFETY: inside of the allocation, here and below.
            unsafe { byte(5000).write_volatile(7) };
            // SAFETY: whole pages of an allocation that nobody else uses.
            let pages = unsafe { Pages::share(ptr, LEN) }.unwrap();
            let theirs = map(std::ptr::null_mut(), LEN, libc::MAP_SHARED, pages.memory().as_raw_fd()).unwrap();
            let their = |at| theirs.as_ptr().wrapping_add(at);
            // SAFETY: as above; `theirs` is as long.
            unsafe {
                assert_eq!(their(5000).read_volatile(), 7);
                their(0).write_volatile(8);
                assert_eq!(byte(0).read_volatile(), 8);
                pages.restore(contents);
                assert_eq!(
                    (byte(0).read_volatile(), byte(5000).read_volatile()),
                    if contents { (8, 7) } else { (0, 0) }
                );
                their(0).write_volatile(9);
                byte(1).write_volatile(10);
                assert_ne!(byte(0).read_volatile(), 9);
                assert_eq!(their(1).read_volatile(), 0);
                libc::munmap(theirs.as_ptr().cast(), LEN);
                drop(pages);
                assert_eq!(byte(1).read_volatile(), 10);
                dealloc(ptr.as_ptr(), layout);
            }
        }
    }
}
