//! A device's addresses, and what stands behind them.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::lock;

/// A range of addresses that only the device may touch, and the memory behind it, which the driver sees elsewhere.
pub(super) struct Window {
    start: u64,
    shadow: usize,
    len: usize,
    memory: OwnedFd,
    visible: AtomicBool,
    free: Mutex<BTreeMap<u64, u64>>,
}

impl Window {
    /// Reserves `len` bytes, a multiple of 2 MiB. They cost memory once they are used.
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let memory = memory_file(c"fake-cuda", len)?;
        let start = map(&memory, len, libc::PROT_NONE)?;
        let shadow = map(&memory, len, libc::PROT_READ | libc::PROT_WRITE)?;
        // Addresses begin as a real device's do, where large pages begin.
        let first = (start as u64).next_multiple_of(LARGE_PAGE);
        let free = BTreeMap::from([(first, start as u64 + len as u64 - first)]);
        let (visible, free) = (AtomicBool::new(false), Mutex::new(free));
        Ok(Self { start: start as u64, shadow, len, memory, visible, free })
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        (self.start..self.start + self.len as u64).contains(&address)
    }

    /// Where the driver sees what the device has at `address`.
    pub(super) fn shadow(&self, address: u64) -> usize {
        self.shadow + (address - self.start) as usize
    }

    /// Lets the CPU touch the device's addresses, or not.
    pub(super) fn set_visible(&self, visible: bool) {
        self.visible.store(visible, Ordering::SeqCst);
        let protection = self.protection();
        // SAFETY: the range is the mapping that `new` made, which no reference points into.
        let changed = unsafe { libc::mprotect(self.start as *mut _, self.len, protection) };
        assert_eq!(changed, 0, "the protection of one's own mapping can be changed");
    }

    fn protection(&self) -> i32 {
        if self.visible.load(Ordering::SeqCst) { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE }
    }

    /// Puts a file of memory behind a range, which is whole pages.
    pub(super) fn put_in(&self, at: u64, len: u64, file: &OwnedFd) -> io::Result<()> {
        self.replace(at, len, file, 0)
    }

    /// Puts the device's own memory there again.
    pub(super) fn take_out(&self, at: u64, len: u64) {
        let replaced = self.replace(at, len, &self.memory, (at - self.start) as i64);
        replaced.expect("the device's own memory can be mapped");
    }

    fn replace(&self, at: u64, len: u64, file: &OwnedFd, offset: i64) -> io::Result<()> {
        let places = [(at as usize, self.protection()), (self.shadow(at), libc::PROT_READ | libc::PROT_WRITE)];
        for (place, protection) in places {
            // SAFETY: the range is whole pages of the mappings that `new` made, which no reference points into.
            let mapped = unsafe {
                let flags = libc::MAP_SHARED | libc::MAP_NORESERVE | libc::MAP_FIXED;
                libc::mmap(place as *mut _, len as usize, protection, flags, file.as_raw_fd(), offset)
            };
            if mapped == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: as above.
            unsafe { libc::madvise(mapped, len as usize, libc::MADV_DONTDUMP) };
        }
        Ok(())
    }

    /// Takes the lowest free range: what was freed is soon used again, as a program should expect.
    pub(super) fn take(&self, len: u64, align: u64) -> Option<u64> {
        let mut free = lock(&self.free);
        let (from, room, at) = free.iter().find_map(|(&from, &room)| {
            let at = from.next_multiple_of(align);
            (at + len <= from + room).then_some((from, room, at))
        })?;
        free.remove(&from);
        if at > from {
            free.insert(from, at - from);
        }
        if at + len < from + room {
            free.insert(at + len, from + room - at - len);
        }
        Some(at)
    }

    /// Gives a range back that [`take`](Self::take) gave.
    pub(super) fn give_back(&self, mut at: u64, mut len: u64) {
        let mut free = lock(&self.free);
        if let Some(after) = free.remove(&(at + len)) {
            len += after;
        }
        match free.range(..at).next_back() {
            Some((&before, &room)) if before + room == at => (at, len) = (before, len + room),
            _ => {}
        }
        free.insert(at, len);
    }

    /// Overwrites freed memory, so that who reads it sees that it was. Of much memory the middle is given to the system.
    pub(super) fn poison(&self, at: u64, len: u64) {
        const EDGE: u64 = 8 << 20;
        let fill = |at: u64, len: u64| {
            // SAFETY: the range lies in the shadow, which no reference points into.
            unsafe { std::ptr::write_bytes(self.shadow(at) as *mut u8, 0xDD, len as usize) };
        };
        if len <= 2 * EDGE {
            return fill(at, len);
        }
        fill(at, EDGE);
        fill(at + len - EDGE, EDGE);
        let middle = (at - self.start + EDGE) as i64;
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: only frees pages of the file, in a range that nobody uses.
        unsafe { libc::fallocate(self.memory.as_raw_fd(), mode, middle, (len - 2 * EDGE) as i64) };
    }
}

/// Where memory of `cuMemCreate` begins and what it is a multiple of.
pub(super) const LARGE_PAGE: u64 = 2 << 20;

/// A file in memory.
pub(super) fn memory_file(name: &CStr, len: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a string; the descriptor is new and nobody else's.
    let file = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    // SAFETY: sets the length of a file that is ours.
    match unsafe { libc::ftruncate(file.as_raw_fd(), len as i64) } {
        0 => Ok(file),
        _ => Err(io::Error::last_os_error()),
    }
}

fn map(file: &OwnedFd, len: usize, protection: i32) -> io::Result<usize> {
    // SAFETY: a new mapping, at an address that the system chooses, of a file that is as long.
    let address = unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0)
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping is ours. A core dump would be of its length; where it is not, nothing is lost.
    unsafe { libc::madvise(address, len, libc::MADV_DONTDUMP) };
    Ok(address as usize)
}
