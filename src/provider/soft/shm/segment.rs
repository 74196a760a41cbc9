//! The memory of a link: a memfd that both ends have mapped, of a size that neither can change any more.
//!
//! ```text
//! 0        positions of the ring that the accepting end writes
//! 1 KiB    positions of the ring that the connecting end writes
//! 4 KiB    slots of what the accepting end lends, then of what the connecting end does
//! 8 KiB    the former's bytes, then the latter's
//! ```
//!
//! Invariant of [`Mapping`]: `LEN` bytes are mapped for reading and writing. The descriptor's size was sealed before it
//! was compared with `LEN`, so that no access beyond the end of the file (`SIGBUS`) is possible.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use super::ring::{RING, Shared};
use super::window::{SLOTS, Slot};
use crate::memory::dma::Segment;
use crate::memory::mapped::Mapped;
use crate::memory::pages::file;

const LENT: usize = 4096;
const RINGS: usize = 8192;
const LEN: usize = RINGS + 2 * RING;
const POSITIONS: usize = 1024;
const _: () = assert!(2 * SLOTS * size_of::<Slot>() <= RINGS - LENT);
const _: () = assert!(size_of::<Shared>() <= POSITIONS && align_of::<Shared>() <= POSITIONS);

#[derive(Debug)]
pub(super) struct Mapping {
    memory: Mapped,
}

/// A fresh segment, all zero: for the peer, and mapped here.
pub(super) fn create() -> io::Result<(OwnedFd, Mapping)> {
    let memory = file("tokio-rdma link", LEN)?;
    let mapping = Mapping::of(memory.as_fd())?;
    Ok((memory, mapping))
}

impl Mapping {
    /// Maps a segment, or what a peer says is one.
    pub(super) fn of(memory: BorrowedFd<'_>) -> io::Result<Self> {
        // First the seals: what they say of the size holds from then on. A descriptor that is no memfd has none to ask for.
        let sealed = fcntl_get_seals(memory)?.contains(SealFlags::SHRINK | SealFlags::GROW);
        if !sealed || fstat(memory)?.st_size != LEN as i64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the link's memory is not sealed to its size"));
        }
        Ok(Self { memory: Mapped::new(memory, LEN, true)? })
    }

    /// The positions of a direction (0 or 1).
    pub(super) fn positions(&self, direction: usize) -> &Shared {
        let at = self.memory.at(direction.min(1) * POSITIONS).cast::<Shared>();
        // SAFETY: inside of the mapping and aligned, since the base is a page's; mapped while `self` is borrowed. It consists of
        // atomics, for which every bit pattern is valid, and is used as nothing else at this end. The peer may change it at any
        // time, as atomics allow.
        unsafe { &*at }
    }

    /// A slot of what the end lends that writes this direction.
    pub(super) fn slot(&self, direction: usize, slot: usize) -> &Slot {
        let index = direction.min(1) * SLOTS + slot.min(SLOTS - 1);
        let at = self.memory.at(LENT + index * size_of::<Slot>()).cast::<Slot>();
        // SAFETY: as above.
        unsafe { &*at }
    }

    /// `len` bytes of a direction's ring from `at` on: to the end, and from the beginning on. Not more than there are.
    pub(super) fn bytes(&self, direction: usize, at: usize, len: usize) -> [Segment; 2] {
        let ring = Segment::new(self.memory.at(RINGS + direction.min(1) * RING), RING);
        let (at, len) = (at.min(RING), len.min(RING));
        let first = len.min(RING - at);
        let part = |at, len| ring.slice(at, len).unwrap_or(Segment::new(std::ptr::null_mut(), 0));
        [part(at, first), part(0, len - first)]
    }
}

#[cfg(test)]
impl Mapping {
    /// Writes a word at a place, round and round.
    pub(super) fn scribble(&self, at: usize, word: u64) {
        use std::sync::atomic::{AtomicU64, Ordering};
        let place = self.memory.at(at / 8 * 8 % LEN).cast::<u64>();
        // SAFETY: aligned and inside of the mapping, whose length is a multiple of 8.
        unsafe { AtomicU64::from_ptr(place) }.store(word, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn only_what_is_sealed_to_its_size_is_mapped() {
        let memfd = |len: u64, seals: SealFlags| {
            let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            ftruncate(&memory, len).unwrap();
            fcntl_add_seals(&memory, seals).unwrap();
            Mapping::of(memory.as_fd()).is_ok()
        };
        let both = SealFlags::SHRINK | SealFlags::GROW;
        assert!(memfd(LEN as u64, both));
        assert!(!memfd(LEN as u64, SealFlags::SHRINK) && !memfd(LEN as u64, SealFlags::GROW));
        assert!(!memfd(LEN as u64 - 1, both) && !memfd(LEN as u64 + 1, both) && !memfd(0, both));
        let file = std::fs::File::open("/dev/zero").unwrap();
        assert!(Mapping::of(file.as_fd()).is_err());
        let (memory, _mapping) = create().unwrap();
        assert!(Mapping::of(memory.as_fd()).is_ok() && ftruncate(&memory, 1).is_err());
    }

    #[test]
    fn both_ends_see_the_same_bytes_and_the_directions_do_not_overlap() {
        let (memory, here) = create().unwrap();
        let there = Mapping::of(memory.as_fd()).unwrap();
        for direction in [0, 1] {
            let [end, start] = here.bytes(direction, RING - 3, 8);
            assert_eq!((end.len(), start.len()), (3, 5));
            end.copy_from(&[1 + direction as u8; 3]);
            start.copy_from(&[11 + direction as u8; 5]);
        }
        for direction in [0, 1] {
            let mut bytes = Vec::new();
            there.bytes(direction, RING - 4, 10).iter().for_each(|part| part.append_to(&mut bytes));
            let (end, start) = (1 + direction as u8, 11 + direction as u8);
            assert_eq!(bytes, [0, end, end, end, start, start, start, start, start, 0]);
        }
    }
}
