//! Memory of one end that the other one has mapped, and may use without asking while its slot says so.
//!
//! A slot is two words in the link's shared memory: `state`, which the owner of the memory writes, and `busy`, which the other end sets
//! while it copies. The other end says that it is busy and then looks at the state; the owner revokes and then looks whether the
//! other end is busy. With a full fence between the two on either side, one of them sees the other: either nothing is copied, or the
//! owner waits until it is. An owner that gives up waiting says so and then looks once more; the other end, when it is done, says that
//! and then looks whether it was given up. So it never takes for done what the owner went on without; and it may look late, so a slot
//! that was given up while somebody was busy is never opened again. What did not count the other end tries through the ring, where the
//! key is unknown by then: nothing is done twice.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

use crate::memory::Access;
use crate::memory::device::{DeviceMemory, Imported};
use crate::memory::dma::Segment;
use crate::memory::mapped::Mapped;
use crate::memory::pages::{MAPPED, Place, is_ordinary};
use crate::sync::atomic::{AtomicU32, Ordering, fence};

/// Slots in each direction: so many regions of a peer are used directly at a time, and any further ones through the ring.
pub(super) const SLOTS: usize = 32;

/// For so long an owner waits for a copy of at most 256 KiB to end, or for what a GPU copies in a millisecond. One that takes longer is of a
/// process that was stopped.
const PATIENCE: Duration = Duration::from_millis(50);

/// The state of a slot that opens nothing.
const CLOSED: u32 = 0;
/// Closed, and whoever was busy then is waited for no longer. All other states are the number of a grant.
const GIVEN_UP: u32 = u32::MAX;

#[repr(C, align(64))]
#[derive(Debug, Default)]
pub(super) struct Slot {
    state: AtomicU32,
    busy: AtomicU32,
}

impl Slot {
    /// The owner opens it, under a number that is not 0.
    pub(super) fn open(&self, number: u32) {
        self.state.store(number, Ordering::SeqCst);
    }

    /// The owner closes it. Whoever is busy may be so a little longer.
    pub(super) fn close(&self) {
        self.state.store(CLOSED, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Closes it for good: nobody is waited for.
    pub(super) fn abandon(&self) {
        self.state.store(GIVEN_UP, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// After closing: waits until nobody is busy. `false`: somebody is for too long, and what it copies does not count.
    pub(super) fn drain(&self) -> bool {
        self.drains() || self.give_up()
    }

    fn give_up(&self) -> bool {
        self.state.store(GIVEN_UP, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.busy.load(Ordering::Acquire) == 0
    }

    fn drains(&self) -> bool {
        let mut since = None;
        let mut spins = 0;
        while self.busy.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins < 100 {
                std::hint::spin_loop();
            } else if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                return false;
            } else {
                std::thread::yield_now();
            }
        }
        true
    }

    /// Whether it is open under this number, as far as the other end can tell without using it.
    pub(super) fn is_open(&self, number: u32) -> bool {
        self.state.load(Ordering::Relaxed) == number
    }

    /// The other end uses the memory, if the slot is open under this number. `None`: it was not, or what was done does not count.
    pub(super) fn enter<T>(&self, number: u32, then: impl FnOnce() -> T) -> Option<T> {
        self.busy.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let done = (self.state.load(Ordering::Relaxed) == number).then(then);
        self.busy.store(0, Ordering::Release);
        fence(Ordering::SeqCst);
        done.filter(|_| self.state.load(Ordering::Relaxed) != GIVEN_UP)
    }
}

/// What the owner tells of a region, beside its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Grant {
    pub kind: Kind,
    pub slot: u32,
    pub number: u32,
    pub rkey: u32,
    pub access: Access,
    /// The owner's address of the first byte that is granted, and how many there are.
    pub address: u64,
    pub len: u64,
    /// Where in the file that byte is.
    pub offset: u64,
    /// Bytes of the file, which only count where the file does not tell.
    pub size: u64,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Kind {
    Host,
    /// Of a device, which it takes a device to map.
    Device,
}

/// A peer's region.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) grant: Grant,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Host(Mapped),
    /// With the devices of this side that have used it.
    Device(OwnedFd, Place, Vec<(Arc<dyn DeviceMemory>, Box<dyn Imported>)>),
}

/// For so many devices, as a program has opened them, a region is mapped at a time.
const DEVICES: usize = 8;

impl Window {
    /// Maps a region, read-only if that is all that was granted; one of a device when it is first used, and in any case for both.
    pub(super) fn map(grant: Grant, memory: OwnedFd) -> io::Result<Self> {
        let end = grant.offset.checked_add(grant.len).ok_or_else(|| wrong("a region that wraps around"))?;
        let size = match grant.kind {
            Kind::Host => sealed_size(&memory)?,
            // Its driver maps no more than there is.
            Kind::Device => grant.size,
        };
        if end > size || grant.len == 0 || grant.slot as usize >= SLOTS || [CLOSED, GIVEN_UP].contains(&grant.number) {
            return Err(wrong("a region that is not in its memory"));
        }
        let len = usize::try_from(size).map_err(|_| wrong("a region larger than the address space"))?;
        let memory = match grant.kind {
            Kind::Host => {
                let writes = grant.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
                Memory::Host(Mapped::new(memory.as_fd(), len, writes)?)
            }
            Kind::Device => Memory::Device(memory, Place::take()?, Vec::new()),
        };
        Ok(Self { grant, memory })
    }

    /// The bytes that the owner knows at `address`, if they and the rights were granted.
    pub(super) fn place(&self, rkey: u32, needed: Access, address: u64, len: usize) -> Option<Segment> {
        let Memory::Host(memory) = &self.memory else { return None };
        let at = self.grant.find(rkey, needed, address, len)?;
        memory.segment().slice(at, len)
    }

    /// The same of a device's memory, as `device` sees it, for which it is mapped at its first use.
    pub(super) fn device_place(
        &mut self,
        device: &Arc<dyn DeviceMemory>,
        rkey: u32,
        needed: Access,
        address: u64,
        len: usize,
    ) -> Option<io::Result<Segment>> {
        let Memory::Device(file, _, mapped) = &mut self.memory else { return None };
        let at = self.grant.find(rkey, needed, address, len)?;
        let known = mapped.iter().position(|(known, _)| Arc::ptr_eq(known, device));
        let known = match known {
            Some(known) => known,
            None => match device.import(file.as_fd(), self.grant.size as usize) {
                Ok(imported) => {
                    // Nothing is copied while somebody is here.
                    mapped.truncate(DEVICES - 1);
                    mapped.push((Arc::clone(device), imported));
                    mapped.len() - 1
                }
                Err(error) => return Some(Err(error)),
            },
        };
        let start = mapped[known].1.address() as usize;
        Some(Ok(Segment::new(std::ptr::without_provenance_mut(start + at), len)))
    }
}

/// The size of a file of memory that will always have it.
fn sealed_size(memory: &OwnedFd) -> io::Result<u64> {
    let sealed = fcntl_get_seals(memory)?.contains(SealFlags::SHRINK | SealFlags::GROW);
    // The seals hold from before the size is looked at.
    let size = u64::try_from(fstat(memory)?.st_size).unwrap_or(0);
    if sealed && size <= MAPPED as u64 && is_ordinary(memory)? {
        Ok(size)
    } else {
        Err(wrong("memory that may change, or is too much"))
    }
}

fn wrong(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

impl Grant {
    /// Where in the file the bytes are that the owner knows at `address`, if they and the rights were granted: inside of it, as
    /// the whole grant is.
    fn find(&self, rkey: u32, needed: Access, address: u64, len: usize) -> Option<usize> {
        if self.rkey != rkey || !self.access.contains(needed) {
            return None;
        }
        let within = address.checked_sub(self.address)?;
        if within > self.len || len as u64 > self.len - within {
            return None;
        }
        Some((self.offset + within) as usize)
    }
}

#[cfg(all(test, not(rdma_loom)))]
mod tests {
    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn only_what_is_granted_is_in_the_window() {
        let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&memory, 8192).unwrap();
        let grant = Grant {
            kind: Kind::Host,
            slot: 1,
            number: 5,
            rkey: 77,
            access: Access::REMOTE_READ,
            address: 0x10_0100,
            len: 4096,
            offset: 0x100,
            size: 0,
        };
        let map = |grant| Window::map(grant, memory.try_clone().unwrap());
        assert!(map(grant).is_err(), "it is not sealed");
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        for wrong in [
            Grant { len: 8192, ..grant },
            Grant { offset: u64::MAX, ..grant },
            Grant { len: 0, ..grant },
            Grant { slot: SLOTS as u32, ..grant },
            Grant { number: 0, ..grant },
            Grant { number: u32::MAX, ..grant },
        ] {
            assert!(map(wrong).is_err(), "{wrong:?}");
        }
        let window = map(grant).unwrap();
        let place = |rkey, needed, address, len| window.place(rkey, needed, address, len).is_some();
        assert!(place(77, Access::REMOTE_READ, 0x10_0100, 4096) && place(77, Access::REMOTE_READ, 0x10_1100, 0));
        assert!(!place(77, Access::REMOTE_READ, 0x10_0100, 4097) && !place(77, Access::REMOTE_READ, 0x10_0000, 8));
        assert!(!place(77, Access::REMOTE_READ, u64::MAX, 8) && !place(77, Access::REMOTE_READ, 0x10_1101, 0));
        assert!(!place(76, Access::REMOTE_READ, 0x10_0100, 8) && !place(77, Access::REMOTE_WRITE, 0x10_0100, 8));
    }

    #[test]
    fn a_closed_slot_lets_nobody_in_and_one_who_stays_is_not_waited_for_for_good() {
        let slot = Slot::default();
        assert_eq!(slot.enter(7, || ()), None);
        slot.open(7);
        assert_eq!((slot.enter(7, || 1), slot.enter(8, || 1)), (Some(1), None));
        slot.close();
        assert!(slot.enter(7, || ()).is_none() && slot.drain());
        slot.open(9);
        assert!(slot.enter(9, || slot.busy.load(Ordering::Relaxed)) == Some(1));
        // Closed and given up in the middle.
        assert_eq!(slot.enter(9, || (slot.close(), assert!(!slot.drain()))), None);
    }
}

/// Every interleaving: `RUSTFLAGS="--cfg rdma_loom" cargo test --lib loom_`.
#[cfg(all(test, rdma_loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;

    use super::*;

    #[test]
    fn loom_what_counts_for_one_end_counts_for_the_other() {
        loom::model(|| {
            let shared = Arc::new((Slot::default(), UnsafeCell::new(0)));
            shared.0.open(7);
            let theirs = shared.clone();
            let copying = loom::thread::spawn(move || {
                let (slot, memory) = &*theirs;
                slot.enter(7, || memory.with_mut(|byte| unsafe { *byte = 1 })).is_some()
            });
            let (slot, memory) = &*shared;
            slot.close();
            // Without patience.
            let drained = slot.busy.load(Ordering::Acquire) == 0 || slot.give_up();
            let found = if drained { memory.with(|byte| unsafe { *byte }) } else { 0 };
            // For the next region.
            if drained {
                slot.open(9);
            }
            let counted = copying.join().unwrap();
            assert!(!counted || (drained && found == 1));
        });
    }

    #[test]
    fn loom_nothing_is_copied_after_a_slot_was_closed_and_drained() {
        loom::model(|| {
            let shared = Arc::new((Slot::default(), UnsafeCell::new(0)));
            shared.0.open(7);
            let theirs = shared.clone();
            let copying = loom::thread::spawn(move || {
                let (slot, memory) = &*theirs;
                slot.enter(7, || memory.with_mut(|byte| unsafe { *byte = 1 }));
            });
            let (slot, memory) = &*shared;
            slot.close();
            // As `drain`, whose patience is of real time.
            while slot.busy.load(Ordering::Acquire) != 0 {
                loom::thread::yield_now();
            }
            memory.with_mut(|byte| unsafe { *byte = 2 });
            copying.join().unwrap();
            assert_eq!(memory.with(|byte| unsafe { *byte }), 2);
        });
    }
}
