//! The key table: which key names which memory, for whom, with which rights.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::shm::{Grant, Kind, Wire};
use crate::memory::Access;
use crate::memory::device::{DeviceMemory, Shareable};
use crate::memory::dma::Segment;
use crate::memory::pages::{Pages, Place};
use crate::sync::Mutex;

/// A key is a slot's index, mixed with how often the slot was used and with a random number of this context.
const INDEX_BITS: u32 = 20;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

/// Freed slots rest in a queue of at least this length: with the generation in the upper bits,
/// the same key comes back after 16 million registrations at the earliest.
const RESTING: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// An lkey: for this side's scatter/gather lists.
    Local,
    /// An rkey, with the rights it grants.
    Remote(Access),
}

/// Whose memory it is: of a device that the CPU cannot reach into, or (`None`) of the host.
pub(super) type Device = Option<Arc<dyn DeviceMemory>>;

/// Memory under a key.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) number: u32,
    pd: u64,
    usage: Use,
    segment: Segment,
    device: Device,
    revoked: AtomicBool,
    pins: AtomicUsize,
    /// Where the memory is a file that peers can map.
    pages: OnceLock<Pages>,
    /// Where it is a device's that other processes can be given.
    shareable: OnceLock<Arc<dyn Shareable>>,
    /// What they are given; nothing if that failed.
    exported: OnceLock<Option<(OwnedFd, Place)>>,
    /// To whom it is lent, and which slot of the link opens it.
    lent: Mutex<Vec<(Arc<Wire>, usize)>>,
}

/// While it lives, the key's memory may be touched: [`Key::revoke`] waits for it.
/// Held for the time of one non-blocking system call or one copy, never longer.
pub(super) struct Pin<'a>(&'a Key);

/// A [`Pin`] for as long as a device copies from or to the memory. Held until the copy has finished, which is within
/// the call that started it: whoever holds it goes on without waiting for anything but copies.
#[derive(Debug)]
pub(super) struct Hold(Arc<Key>);

impl Drop for Hold {
    fn drop(&mut self) {
        drop(Pin(&self.0));
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.0.pins.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Key {
    fn covers(&self, address: u64, len: u64) -> bool {
        let size = self.segment.len() as u64;
        address >= self.segment.address() && len <= size && address - self.segment.address() <= size - len
    }

    pub(super) fn pin(&self) -> Option<Pin<'_>> {
        // Pin first, look second: `revoke` does the two in the opposite order, so one of us sees the other.
        self.pins.fetch_add(1, Ordering::SeqCst);
        let pin = Pin(self);
        (!self.revoked.load(Ordering::SeqCst)).then_some(pin)
    }

    pub(super) fn hold(self: &Arc<Self>) -> Option<Hold> {
        // The hold counts in the pin's place from here on.
        std::mem::forget(self.pin()?);
        Some(Hold(Arc::clone(self)))
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// The memory from remote address `address` on; its bounds were checked when the key was looked up.
    pub(super) fn at(&self, address: u64, len: usize) -> Option<Segment> {
        let offset = usize::try_from(address.checked_sub(self.segment.address())?).ok()?;
        self.segment.slice(offset, len)
    }

    /// The whole memory and the offset of `address` in it, for atomics.
    pub(super) fn place(&self, address: u64) -> Option<(Segment, usize)> {
        let offset = usize::try_from(address.checked_sub(self.segment.address())?).ok()?;
        Some((self.segment, offset))
    }

    pub(super) fn contains(&self, segment: &Segment) -> bool {
        self.covers(segment.address(), segment.len() as u64)
    }

    fn revoke(&self) {
        self.revoked.store(true, Ordering::SeqCst);
        let mut spins = 0;
        while self.pins.load(Ordering::SeqCst) != 0 {
            // Whoever holds a pin is in a few copies or a non-blocking call; if it lost its core, give it ours.
            spins += 1;
            if spins < 100 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        // All are closed before one is waited for.
        let lent = std::mem::take(&mut *self.lent.lock());
        lent.iter().for_each(|(wire, slot)| wire.close(*slot));
        lent.iter().for_each(|(wire, slot)| wire.take_back(*slot));
    }

    /// Lends the memory through a link, unless that was done.
    pub(super) fn lend(self: &Arc<Self>, wire: &Arc<Wire>) {
        let Use::Remote(access) = self.usage else { return };
        if self.pages.get().is_none() && self.shareable.get().is_none() {
            return;
        }
        let mut lent = self.lent.lock();
        if self.revoked.load(Ordering::SeqCst) || lent.iter().any(|(other, _)| Arc::ptr_eq(other, wire)) {
            return;
        }
        let Some((kind, start, size, memory)) = self.file() else { return };
        let (address, len) = (self.segment.address(), self.segment.len() as u64);
        let offset = address - start;
        let grant = Grant { kind, slot: 0, number: 0, rkey: self.number, access, address, len, offset, size };
        if let Some(slot) = wire.lend(self, grant, memory) {
            lent.push((Arc::clone(wire), slot));
        }
    }

    /// What the memory lies in, where that begins, how many bytes it has, and what a peer maps.
    fn file(&self) -> Option<(Kind, u64, u64, BorrowedFd<'_>)> {
        if let Some(pages) = self.pages.get() {
            return Some((Kind::Host, pages.address(), pages.len() as u64, pages.memory()));
        }
        let memory = self.shareable.get()?;
        let exported =
            self.exported.get_or_init(|| match Place::take().and_then(|place| Ok((memory.export()?, place))) {
                Ok(exported) => Some(exported),
                Err(error) => {
                    tracing::debug!(%error, "memory of a device cannot be given to another process");
                    None
                }
            });
        let (start, len) = memory.range();
        let (exported, _) = exported.as_ref()?;
        Some((Kind::Device, start, len as u64, exported.as_fd()))
    }

    /// A link has ended, and all its slots are closed.
    pub(super) fn forget(&self, wire: &Arc<Wire>) {
        self.lent.lock().retain(|(other, _)| !Arc::ptr_eq(other, wire));
    }

    /// Says that the memory lies in these pages.
    pub(super) fn set_pages(&self, pages: Pages) {
        let _ = self.pages.set(pages);
    }

    /// Says that the memory lies in this.
    #[cfg(feature = "cuda")]
    pub(super) fn set_shareable(&self, memory: Arc<dyn Shareable>) {
        let _ = self.shareable.set(memory);
    }

    /// Whether a device's memory was, or may have been, given to a peer.
    #[cfg(feature = "cuda")]
    pub(super) fn was_shared(&self) -> bool {
        self.exported.get().is_some_and(Option::is_some)
    }

    /// After revoking: makes the memory this process's own again.
    pub(super) fn restore(&self, contents: bool) {
        if let Some(pages) = self.pages.get() {
            pages.restore(contents);
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    generation: u32,
    key: Option<Arc<Key>>,
}

#[derive(Debug, Default)]
struct Slots {
    slots: Vec<Slot>,
    free: VecDeque<u32>,
}

#[derive(Debug)]
pub(super) struct KeyTable {
    salt: u32,
    slots: RwLock<Slots>,
}

impl KeyTable {
    pub(super) fn new(salt: u32) -> Self {
        Self { salt, slots: RwLock::default() }
    }

    /// Enters `segment`; `None` when all keys are in use.
    pub(super) fn insert(&self, pd: u64, usage: Use, segment: Segment, device: Device) -> Option<Arc<Key>> {
        let mut table = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let full = table.slots.len() > INDEX_MASK as usize;
        let index = if full || table.free.len() > RESTING {
            table.free.pop_front()?
        } else {
            table.slots.push(Slot::default());
            table.slots.len() as u32 - 1
        };
        let slot = &mut table.slots[index as usize];
        let number = (slot.generation << INDEX_BITS | index) ^ self.salt;
        let (revoked, pins) = (AtomicBool::new(false), AtomicUsize::new(0));
        let (pages, shareable, exported) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        let lent = Mutex::default();
        let key = Arc::new(Key { number, pd, usage, segment, device, revoked, pins, pages, shareable, exported, lent });
        slot.key = Some(Arc::clone(&key));
        Some(key)
    }

    /// Removes the key and waits until nobody touches its memory. Idempotent.
    pub(super) fn remove(&self, key: &Key) {
        let index = (key.number ^ self.salt) & INDEX_MASK;
        let removed = {
            let mut table = self.slots.write().unwrap_or_else(PoisonError::into_inner);
            let slot = &mut table.slots[index as usize];
            if slot.key.as_ref().is_some_and(|k| k.number == key.number) {
                slot.generation = slot.generation.wrapping_add(1) & (u32::MAX >> INDEX_BITS);
                let removed = slot.key.take();
                table.free.push_back(index);
                removed
            } else {
                None
            }
        };
        key.revoke();
        drop(removed);
    }

    fn with<T>(&self, number: u32, then: impl FnOnce(&Arc<Key>) -> T) -> Option<T> {
        let table = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let key = table.slots.get(((number ^ self.salt) & INDEX_MASK) as usize)?.key.as_ref()?;
        (key.number == number).then(|| then(key))
    }

    /// Whether `segment` is a device's memory, if `number` is an lkey of `pd` over it.
    pub(super) fn check_local(&self, number: u32, pd: u64, segment: &Segment) -> Option<bool> {
        self.with(number, |key| {
            let allowed = key.usage == Use::Local && key.pd == pd && key.contains(segment);
            allowed.then_some(key.device.is_some())
        })?
    }

    /// Whose memory is behind a key.
    pub(super) fn device(&self, number: u32) -> Device {
        self.with(number, |key| key.device.clone())?
    }

    /// The rkey's memory, if it is of `pd`, covers the range and grants `needed`.
    pub(super) fn find_remote(&self, number: u32, pd: u64, address: u64, len: u64, needed: Access) -> Option<Arc<Key>> {
        self.with(number, |key| {
            let Use::Remote(granted) = key.usage else { return None };
            let allowed = granted.contains(needed) && key.pd == pd && key.covers(address, len);
            allowed.then(|| Arc::clone(key))
        })?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_checked_and_do_not_come_back() {
        let mut memory = vec![0u8; 64];
        let segment = Segment::new(memory.as_mut_ptr(), 64);
        let base = segment.address();
        let table = KeyTable::new(0x1234_5678);
        let key = table.insert(1, Use::Remote(Access::REMOTE_READ), segment, None).unwrap();
        let find = |pd, address, len, access| table.find_remote(key.number, pd, address, len, access).is_some();
        assert!(find(1, base, 64, Access::REMOTE_READ));
        assert!(find(1, base + 64, 0, Access::REMOTE_READ));
        assert!(!find(1, base + 1, 64, Access::REMOTE_READ));
        assert!(!find(1, base - 1, 1, Access::REMOTE_READ));
        assert!(!find(1, u64::MAX, 2, Access::REMOTE_READ));
        assert!(!find(2, base, 8, Access::REMOTE_READ));
        assert!(!find(1, base, 8, Access::REMOTE_WRITE));
        assert!(table.check_local(key.number, 1, &segment).is_none());
        table.remove(&key);
        table.remove(&key);
        assert!(!find(1, base, 8, Access::REMOTE_READ));
        assert!(key.pin().is_none());

        let mut seen = std::collections::HashSet::from([key.number]);
        for _ in 0..20_000 {
            let fresh = table.insert(1, Use::Local, segment, None).unwrap();
            assert!(seen.insert(fresh.number));
            table.remove(&fresh);
        }
    }

    #[test]
    fn revoking_waits_for_pins() {
        revoking_waits_for(|key| Box::new(key.pin().unwrap()));
    }

    #[test]
    fn revoking_waits_for_holds() {
        revoking_waits_for(|key| Box::new(key.hold().unwrap()));
    }

    /// Anything that ends when it is dropped.
    trait Held {}
    impl Held for Pin<'_> {}
    impl Held for Hold {}

    fn revoking_waits_for(hold: impl for<'a> FnOnce(&'a Arc<Key>) -> Box<dyn Held + 'a>) {
        let mut memory = vec![0u8; 8];
        let table = Arc::new(KeyTable::new(0));
        let key = table.insert(1, Use::Local, Segment::new(memory.as_mut_ptr(), 8), None).unwrap();
        let pin = hold(&key);
        let done = Arc::new(AtomicBool::new(false));
        let revoker = std::thread::spawn({
            let (table, key, done) = (Arc::clone(&table), Arc::clone(&key), Arc::clone(&done));
            move || {
                table.remove(&key);
                done.store(true, Ordering::SeqCst);
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!done.load(Ordering::SeqCst));
        drop(pin);
        revoker.join().unwrap();
        assert!(done.load(Ordering::SeqCst));
    }
}
