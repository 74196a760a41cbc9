//! Lending regions to the peer, and using those that it lends.
//!
//! The owner of a region lends it when the peer first uses its key, which goes through the ring: it opens a slot and sends the
//! region's file through the socket (SCM_RIGHTS, unix(7)). From then on the peer copies by itself. The same socket carries the end of
//! the stream, so what goes through it before has a head of fixed size.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::window::{Grant, Kind, SLOTS, Window};
use super::{Wire, rights};
use crate::memory::Access;
use crate::memory::device::DeviceMemory;
use crate::memory::dma::Segment;
use crate::provider::soft::keys::Key;

/// Bytes of a message on the socket.
const MESSAGE: usize = 64;
const LENDS: u8 = 1;
const ENDS: u8 = 2;
const LENDS_OF_DEVICE: u8 = 3;

/// What one look at the socket takes in.
const MESSAGES: usize = 2 * SLOTS;

/// What comes on the socket before the rest of the stream.
pub(in super::super) const END: [u8; MESSAGE] = {
    let mut message = [0; MESSAGE];
    message[0] = ENDS;
    message
};

/// The regions that this end has lent, by slot.
#[derive(Debug, Default)]
pub(super) struct Lent {
    /// Those that the peer did not leave in time stay taken: so it can make this end wait that many times, and not more.
    keys: [Option<Weak<Key>>; SLOTS],
    number: u32,
    /// The link has ended: nothing is lent any more.
    over: bool,
}

impl Wire {
    /// Opens a slot for a region and tells the peer; the slot. `None` when all are in use, or the socket is full: another time then.
    pub(in super::super) fn lend(&self, key: &Arc<Key>, grant: Grant, memory: BorrowedFd<'_>) -> Option<usize> {
        let mut lent = self.lent.lock();
        let slot = lent.keys.iter().position(Option::is_none).filter(|_| !lent.over)?;
        // Neither of the two that are no numbers.
        lent.number = lent.number % (u32::MAX - 1) + 1;
        let grant = Grant { slot: slot as u32, number: lent.number, ..grant };
        self.memory.slot(self.direction, slot).open(grant.number);
        if !self.tell(&grant.encode(), memory) {
            self.memory.slot(self.direction, slot).close();
            return None;
        }
        lent.keys[slot] = Some(Arc::downgrade(key));
        Some(slot)
    }

    fn tell(&self, message: &[u8], attached: BorrowedFd<'_>) -> bool {
        let Some(socket) = &self.socket else { return false };
        match rights::send(socket, message, &[attached]) {
            Ok(sent) if sent == message.len() => {
                if self.writer.count_message(self.memory.positions(self.direction)) {
                    self.ring();
                }
                true
            }
            // A part of a message is as good as the end of the stream.
            Ok(_) => {
                self.cut();
                false
            }
            Err(_) => false,
        }
    }

    /// Closes a slot: the peer begins no further copy.
    pub(in super::super) fn close(&self, slot: usize) {
        self.memory.slot(self.direction, slot).close();
    }

    /// Waits for a copy that the peer had begun, and makes the slot free. A peer that does not come to an end of it, because it was
    /// stopped, keeps the slot for as long as there is the link: it will look whether it was given up, and has to find that it was.
    pub(in super::super) fn take_back(&self, slot: usize) {
        let shared = self.memory.slot(self.direction, slot);
        if self.ends.load(Ordering::SeqCst) {
            // Nobody is waited for, so nothing that is under way may count.
            shared.abandon();
        } else if !shared.drain() {
            return;
        }
        if let Some(place) = self.lent.lock().keys.get_mut(slot) {
            *place = None;
        }
    }

    /// The link has ended: closes all slots. The keys that were lent are the result.
    pub(in super::super) fn close_all(&self) -> Vec<Arc<Key>> {
        let mut lent = self.lent.lock();
        lent.over = true;
        // What is under way counts for nothing: the owner of the memory goes on without it.
        (0..SLOTS).for_each(|slot| self.memory.slot(self.direction, slot).abandon());
        self.windows.lock().clear();
        lent.keys.iter_mut().filter_map(|key| key.take()?.upgrade()).collect()
    }

    fn cut(&self) {
        if let Some(socket) = &self.socket {
            let _ = rustix::net::shutdown(socket, rustix::net::Shutdown::Both);
        }
    }

    /// Whether the peer says that something came through the socket.
    pub(in super::super) fn has_messages(&self) -> bool {
        self.reader.has_messages(self.memory.positions(1 - self.direction))
    }

    /// Takes in what came through the socket.
    pub(in super::super) fn hear(&self) {
        let Some(socket) = &self.socket else { return };
        let mut windows = self.windows.lock();
        self.reader.hear(self.memory.positions(1 - self.direction));
        // What was taken back is held no longer.
        windows.retain(|window| {
            self.memory.slot(1 - self.direction, window.grant.slot as usize).is_open(window.grant.number)
        });
        self.has_windows.store(!windows.is_empty(), Ordering::Relaxed);
        for _ in 0..MESSAGES {
            if self.ends.load(Ordering::SeqCst) {
                return;
            }
            let mut message = [0; MESSAGE];
            match rights::receive(socket, &mut message) {
                Ok((MESSAGE, mut received)) if [LENDS, LENDS_OF_DEVICE].contains(&message[0]) => {
                    // It got lost on the way, for want of a number for instance.
                    let Some(memory) = received.pop() else { continue };
                    // One that cannot be mapped is used through the ring, as before.
                    if let Ok(window) = Window::map(Grant::parse(&message), memory) {
                        windows.retain(|other| other.grant.slot != window.grant.slot);
                        windows.push(window);
                        self.has_windows.store(true, Ordering::Relaxed);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The end, of the stream or of the socket. What else comes is no part of the stream, which then ends too.
                _ => self.end(),
            }
        }
    }

    /// Uses the host's memory that the peer has lent; `None` if it has not, or not any more, and then nothing was done.
    pub(in super::super) fn within<T>(
        &self,
        (rkey, needed): (u32, Access),
        (address, len): (u64, usize),
        then: impl FnOnce(Segment) -> T,
    ) -> Option<T> {
        if !self.has_windows.load(Ordering::Relaxed) {
            return None;
        }
        let mut windows = self.windows.lock();
        let (at, place) = windows
            .iter()
            .enumerate()
            .find_map(|(at, window)| Some((at, window.place(rkey, needed, address, len)?)))?;
        self.enter(&mut windows, at, || then(place))
    }

    /// The same with memory of a device, at an address of `device`, which copies.
    pub(in super::super) fn within_device<T>(
        &self,
        device: &Arc<dyn DeviceMemory>,
        (rkey, needed): (u32, Access),
        (address, len): (u64, usize),
        then: impl FnOnce(Segment) -> T,
    ) -> Option<T> {
        let mut windows = self.windows.lock();
        let (at, place) = windows
            .iter_mut()
            .enumerate()
            .find_map(|(at, window)| Some((at, window.device_place(device, rkey, needed, address, len)?)))?;
        match place {
            Ok(place) => self.enter(&mut windows, at, || then(place)),
            Err(error) => {
                // It goes through the ring from now on.
                tracing::debug!(%error, "memory of a peer's device cannot be mapped");
                self.forget(&mut windows, at);
                None
            }
        }
    }

    fn enter<T>(&self, windows: &mut Vec<Window>, at: usize, then: impl FnOnce() -> T) -> Option<T> {
        let grant = &windows[at].grant;
        let slot = self.memory.slot(1 - self.direction, grant.slot as usize);
        let done = slot.enter(grant.number, then);
        if done.is_none() {
            self.forget(windows, at);
        }
        done
    }

    fn forget(&self, windows: &mut Vec<Window>, at: usize) {
        windows.swap_remove(at);
        self.has_windows.store(!windows.is_empty(), Ordering::Relaxed);
    }
}

impl Grant {
    fn encode(&self) -> [u8; MESSAGE] {
        let mut out = [0; MESSAGE];
        out[0] = match self.kind {
            Kind::Host => LENDS,
            Kind::Device => LENDS_OF_DEVICE,
        };
        for (at, word) in [(4, self.slot), (8, self.number), (12, self.rkey), (16, self.access.bits())] {
            out[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        for (at, word) in [(24, self.address), (32, self.len), (40, self.offset), (48, self.size)] {
            out[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    fn parse(raw: &[u8; MESSAGE]) -> Self {
        let short = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let long = |at: usize| u64::from(short(at)) | u64::from(short(at + 4)) << 32;
        Self {
            kind: if raw[0] == LENDS_OF_DEVICE { Kind::Device } else { Kind::Host },
            slot: short(4),
            number: short(8),
            rkey: short(12),
            access: Access::from_bits_truncate(short(16)),
            address: long(24),
            len: long(32),
            offset: long(40),
            size: long(48),
        }
    }
}

#[cfg(all(test, not(rdma_loom)))]
mod tests {
    use super::*;

    #[test]
    fn grants_survive_the_round_trip() {
        let grant = Grant {
            kind: Kind::Device,
            slot: 31,
            number: u32::MAX,
            rkey: 0xdead_beef,
            access: Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            address: u64::MAX - 5,
            len: 1 << 40,
            offset: 4095,
            size: u64::MAX,
        };
        for kind in [Kind::Device, Kind::Host] {
            assert_eq!(Grant::parse(&Grant { kind, ..grant }.encode()), Grant { kind, ..grant });
        }
        assert_ne!(grant.encode()[0], END[0]);
    }
}
