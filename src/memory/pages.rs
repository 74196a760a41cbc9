//! Pages that another process may map: those of an exposed piece, moved into a file of memory (memfd_create(2)) of their own for as
//! long as the piece is exposed.
//!
//! They stay at their address. Exposing copies them into the file and maps that in their place; revoking copies them back into
//! fresh private pages, whatever a peer still has mapped: it keeps the file, and this process does not.
//!
//! Invariant of [`Pages`]: until [`restore`](Pages::restore), the `len` bytes at `ptr` are mapped from `memory`, whose size is sealed.
//! They are whole pages that belong to one piece alone, which outlives this.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, FsWord, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstatfs, memfd_create};
use rustix::process::{Resource, getrlimit};

/// Longer pieces are not copied into a file, and out of it, for the sake of being mapped.
pub(crate) const MAPPED: usize = 256 << 20;

#[derive(Debug)]
pub(crate) struct Pages {
    ptr: NonNull<u8>,
    len: usize,
    memory: File,
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
    /// `ptr` and `len` are multiples of the page size, and `used` bytes of them initialised. Peers get to write them if `writable`. The bytes are allocated until after [`restore`](Self::restore), and nobody uses
    /// them during this call, or during that one.
    pub(super) unsafe fn share(ptr: NonNull<u8>, used: usize, len: usize, writable: bool) -> io::Result<Self> {
        let place = Place::take()?;
        let memory = unsealed("tokio-rdma region", len)?;
        // What is behind the last byte is nobody's business.
        // SAFETY: the caller's bytes, which nobody uses meanwhile.
        memory.write_all_at(unsafe { std::slice::from_raw_parts(ptr.as_ptr(), used.min(len)) }, 0)?;
        // SAFETY: whole pages of the caller's, whose contents are in the file by now.
        unsafe { replace(ptr, len, libc::MAP_SHARED, memory.as_raw_fd()) }?;
        let pages = Self { ptr, len, memory, restored: AtomicBool::new(false), _place: place };
        // This end's mapping exists, so it is the others' that can only be read; whatever they have been given.
        let further = if writable { SealFlags::empty() } else { SealFlags::FUTURE_WRITE };
        if let Err(error) = fcntl_add_seals(&pages.memory, SIZE | further | SealFlags::SEAL) {
            pages.restore(true);
            return Err(error.into());
        }
        Ok(pages)
    }

    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// Bytes of the file.
    pub(crate) fn len(&self) -> usize {
        self.len
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
        // SAFETY: by the type's invariant the place is that of whole pages of the piece, whose bytes stay in the file.
        let private = unsafe { replace(self.ptr, self.len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1) };
        let restored = private.and_then(|()| if contents { self.read_back() } else { Ok(()) });
        if let Err(error) = restored {
            // From here on the memory would be the program's own, and is not, or without what was in it.
            tracing::error!(%error, len = self.len, "memory that was exposed cannot be taken back");
            std::process::abort();
        }
    }

    /// Copies what is in the file to the place, which is private by now.
    fn read_back(&self) -> io::Result<()> {
        // SAFETY: the piece's bytes, which nobody uses meanwhile, and which nobody else has mapped.
        let place = unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) };
        self.memory.read_exact_at(place, 0)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.restore(false);
    }
}

/// What keeps the size as it is.
const SIZE: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// A file of memory whose size nobody can change any more.
pub(crate) fn file(name: &str, len: usize) -> io::Result<OwnedFd> {
    let memory = unsealed(name, len)?;
    fcntl_add_seals(&memory, SIZE | SealFlags::SEAL)?;
    Ok(memory.into())
}

/// The memory is there, so that no access to it fails for want of some.
fn unsealed(name: &str, len: usize) -> io::Result<File> {
    if limit(Resource::Fsize) < len as u64 {
        // Trying it would end the process with a signal.
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let memory = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    fallocate(&memory, FallocateFlags::empty(), 0, len as u64)?;
    Ok(memory)
}

/// Whether a peer's descriptor is a file of memory in ordinary pages: of huge ones it could take back what nobody else can provide.
pub(crate) fn is_ordinary(memory: &OwnedFd) -> io::Result<bool> {
    const TMPFS_MAGIC: FsWord = 0x0102_1994;
    Ok(fstatfs(memory)?.f_type == TMPFS_MAGIC)
}

/// One of the process's descriptors. A quarter of them are for exposed regions; a program may need the others, and its further
/// regions work without.
#[derive(Debug)]
pub(crate) struct Place;

static PLACES: AtomicU64 = AtomicU64::new(0);

impl Place {
    pub(crate) fn take() -> io::Result<Self> {
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

/// Puts other pages in the place of those at `at`, in one step: if it fails for want of something, it has done nothing.
///
/// # Safety
///
/// They are whole pages, which may go.
unsafe fn replace(at: NonNull<u8>, len: usize, flags: libc::c_int, file: libc::c_int) -> io::Result<()> {
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the caller's promise.
    let mapped = unsafe { libc::mmap(at.as_ptr().cast(), len, rights, flags | libc::MAP_FIXED, file, 0) };
    if mapped == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    use super::*;
    use crate::memory::mapped::Mapped;

    fn map(pages: &Pages, writable: bool) -> io::Result<Mapped> {
        Mapped::new(pages.memory(), pages.len, writable)
    }

    #[test]
    fn what_is_granted_for_reading_cannot_be_mapped_for_writing_and_nothing_more_is_given() {
        let layout = Layout::from_size_align(8192, 4096).unwrap();
        // SAFETY: as below.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap();
        // SAFETY: inside of the allocation.
        unsafe { ptr.as_ptr().write_bytes(7, 8192) };
        // SAFETY: whole pages of an allocation that nobody else uses.
        let pages = unsafe { Pages::share(ptr, 5000, 8192, false) }.unwrap();
        assert!(map(&pages, true).is_err());
        let theirs = map(&pages, false).unwrap();
        let their = |at| theirs.at(at);
        // SAFETY: both are mapped, and this end's can be written.
        unsafe {
            ptr.as_ptr().write_volatile(8);
            assert_eq!((their(0).read_volatile(), their(4999).read_volatile(), their(5000).read_volatile()), (8, 7, 0));
            drop(pages);
            dealloc(ptr.as_ptr(), layout);
        }
    }

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
            let pages = unsafe { Pages::share(ptr, LEN, LEN, true) }.unwrap();
            let theirs = map(&pages, true).unwrap();
            let their = |at| theirs.at(at);
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
                drop(pages);
                assert_eq!(byte(1).read_volatile(), 10);
                dealloc(ptr.as_ptr(), layout);
            }
        }
    }
}
