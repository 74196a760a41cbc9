//! Payload that comes out of a device's memory: it is fetched into bounces when its frame is made, and written from there.
//!
//! The fetches of the frames behind run while the first one is written. What is fetched under a peer's key is waited for before
//! the call that started it returns, so that whoever revokes that key waits for copies and for nothing else; what is fetched for
//! a request of this side may still be under way, since the request's owner waits for its completion anyway.

use std::io;
use std::sync::Arc;

use smallvec::SmallVec;

use super::super::super::keys::Hold;
use super::super::super::wire::FRAGMENT;
use crate::memory::device::{BOUNCE, Bounce, DeviceMemory};
use crate::memory::dma::Segment;

/// Bounces of one queue pair for what it sends, each until the last of its frames is in the hands of the socket:
/// one is written, the next one or two are filled, and one is for a device other than theirs.
pub(super) const LIFTS: usize = 4;

// What is lifted or landed at a time is a frame's payload.
const _: () = assert!(FRAGMENT <= BOUNCE);

/// Small payloads share a bounce, at places that a device copies to quickly.
const ALIGNMENT: usize = 64;

/// Why a payload was not lifted.
pub(super) enum NoLift {
    /// All bounces are in use: again once frames are written.
    Busy,
    Failed(io::Error),
}

/// Where a frame's payload is, or will be once it is waited for.
#[derive(Clone, Copy)]
pub(super) struct Lifted {
    slot: usize,
    at: usize,
}

struct Slot {
    device: Arc<dyn DeviceMemory>,
    bounce: Box<dyn Bounce>,
    used: usize,
    frames: usize,
    /// Everything fetched has arrived; nothing is fetched into it any more.
    ready: bool,
    holds: SmallVec<[Hold; 1]>,
}

impl Slot {
    fn wait(&mut self) -> io::Result<()> {
        if self.ready {
            return Ok(());
        }
        self.ready = true;
        let waited = self.bounce.wait();
        self.holds.clear();
        waited
    }
}

impl Drop for Slot {
    /// Memory that is given back to its owner, or whose key is revoked, is read no more.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

#[derive(Default)]
pub(super) struct Lifts {
    slots: [Option<Slot>; LIFTS],
    /// Takes more payload.
    open: Option<usize>,
    in_use: usize,
}

impl Lifts {
    /// No bounce is in use: the same as that no frame's payload comes out of a device's memory.
    pub(super) fn is_empty(&self) -> bool {
        self.in_use == 0
    }

    /// Starts fetching `len` bytes, at most a fragment, from `pieces` of the device's memory.
    pub(super) fn lift(
        &mut self,
        device: &Arc<dyn DeviceMemory>,
        pieces: impl Iterator<Item = Segment>,
        len: usize,
        hold: Option<Hold>,
    ) -> Result<Lifted, NoLift> {
        let index = self.slot_for(device, len)?;
        let Some(slot) = &mut self.slots[index] else { return Err(NoLift::Busy) };
        let at = slot.used;
        slot.holds.extend(hold);
        let mut to = at;
        let fetched = pieces.into_iter().try_for_each(|piece| {
            slot.bounce.fetch(piece.address(), to, piece.len())?;
            to += piece.len();
            Ok(())
        });
        slot.used = (at + len).next_multiple_of(ALIGNMENT);
        slot.frames += 1;
        let lifted = Lifted { slot: index, at };
        fetched.map(|()| lifted).map_err(|error| {
            self.release(lifted);
            NoLift::Failed(error)
        })
    }

    fn slot_for(&mut self, device: &Arc<dyn DeviceMemory>, len: usize) -> Result<usize, NoLift> {
        if let Some(index) = self.open {
            let fits = |slot: &Slot| Arc::ptr_eq(&slot.device, device) && len <= BOUNCE.saturating_sub(slot.used);
            if self.slots[index].as_ref().is_some_and(fits) {
                return Ok(index);
            }
        }
        let index = self.slots.iter().position(Option::is_none).ok_or(NoLift::Busy)?;
        let bounce = device.bounce().map_err(NoLift::Failed)?;
        let (device, holds) = (Arc::clone(device), SmallVec::new());
        self.slots[index] = Some(Slot { device, bounce, used: 0, frames: 0, ready: false, holds });
        self.open = Some(index);
        self.in_use += 1;
        Ok(index)
    }

    /// Waits for a frame's payload.
    pub(super) fn wait(&mut self, lifted: Lifted) -> io::Result<()> {
        // The socket reads it from now on, so nothing is copied into it meanwhile.
        self.open = self.open.filter(|open| *open != lifted.slot);
        self.slots[lifted.slot].as_mut().map_or(Ok(()), Slot::wait)
    }

    /// Whether a frame's payload was waited for.
    pub(super) fn is_ready(&self, lifted: Lifted) -> bool {
        self.slots[lifted.slot].as_ref().is_some_and(|slot| slot.ready)
    }

    /// The `len` bytes from `offset` on of a frame's payload, if it was waited for.
    pub(super) fn payload(&self, lifted: Lifted, offset: usize, len: usize) -> Option<Segment> {
        let slot = self.slots[lifted.slot].as_ref().filter(|slot| slot.ready)?;
        slot.bounce.segment().slice(lifted.at + offset, len)
    }

    /// A frame's payload is needed no more. The last one gives the bounce back.
    pub(super) fn release(&mut self, lifted: Lifted) {
        let place = &mut self.slots[lifted.slot];
        let Some(slot) = place else { return };
        slot.frames -= 1;
        if slot.frames == 0 {
            *place = None;
            self.in_use -= 1;
            self.open = self.open.filter(|open| *open != lifted.slot);
        }
    }

    /// Waits for everything that is fetched under peers' keys; on an error the result says also where.
    pub(super) fn let_go(&mut self) -> Result<(), (usize, io::Error)> {
        for (index, place) in self.slots.iter_mut().enumerate() {
            let Some(slot) = place.as_mut().filter(|slot| !slot.holds.is_empty()) else { continue };
            self.open = self.open.filter(|open| *open != index);
            slot.wait().map_err(|error| (index, error))?;
        }
        Ok(())
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Lifted {
    pub(super) fn slot(self) -> usize {
        self.slot
    }
}
