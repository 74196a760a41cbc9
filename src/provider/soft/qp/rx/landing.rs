//! Payload on its way into a device's memory: the socket is read into bounces, and the device is told to copy from there.
//!
//! A bounce takes the payload of several frames of a message, and its copy runs while the next one is filled. All copies have finished before a message counts as done.
//! So whoever drives waits for the copies out of one bounce at a time, each of which began while another bounce was filled;
//! at the end of a message, of all in flight.
//!
//! Between two drives a part of a message stays in its bounce, and copies go on. But no hold on a key outlives a drive, since who
//! revokes a key waits for those who hold it.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::super::super::keys::Hold;
use crate::memory::device::{Bounce, DeviceMemory};
use crate::memory::dma::Segment;

/// Bounces of one queue pair for what it receives: one is filled while two are emptied.
pub(super) const LANDINGS: usize = 3;

/// A device failed that was to take bytes in.
pub(in super::super) struct Failed {
    pub error: io::Error,
    /// They answer this Read (low bits of its number) rather than being part of the peer's request.
    pub read: Option<u32>,
}

/// A bounce, filled from the start with consecutive bytes of one message.
struct Chunk {
    device: Arc<dyn DeviceMemory>,
    bounce: Box<dyn Bounce>,
    filled: usize,
    /// Of the answer to this Read, or of a request of the peer.
    read: Option<u32>,
    hold: Option<Hold>,
    /// No copy is under way.
    waited: bool,
}

impl Chunk {
    fn wait(&mut self) -> Result<(), Failed> {
        if self.waited {
            return Ok(());
        }
        let waited = self.bounce.wait().map_err(|error| Failed { error, read: self.read });
        self.waited = true;
        self.hold = None;
        waited
    }
}

impl Drop for Chunk {
    /// Memory that is given back to its owner, or whose key is revoked, is written no more.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

#[derive(Default)]
pub(super) struct Landing {
    /// What is being filled.
    filling: Option<Chunk>,
    /// What was filled, the oldest first.
    landing: VecDeque<Chunk>,
}

impl Landing {
    /// Nothing is held or under way.
    pub(super) fn is_empty(&self) -> bool {
        self.filling.is_none() && self.landing.is_empty()
    }

    /// Makes sure that there is a bounce to fill for `device`.
    pub(super) fn prepare(&mut self, device: &Arc<dyn DeviceMemory>, read: Option<u32>) -> Result<(), Failed> {
        match &mut self.filling {
            Some(chunk) if chunk.filled > 0 => return Ok(()),
            Some(chunk) if Arc::ptr_eq(&chunk.device, device) => {
                chunk.read = read;
                return Ok(());
            }
            other => *other = None,
        }
        let done = self.landing.front().is_some_and(|oldest| oldest.waited);
        let oldest = if done || self.landing.len() + 1 >= LANDINGS { self.landing.pop_front() } else { None };
        if let Some(mut oldest) = oldest {
            oldest.wait()?;
            if Arc::ptr_eq(&oldest.device, device) {
                (oldest.filled, oldest.read) = (0, read);
                self.filling = Some(oldest);
                return Ok(());
            }
        }
        let bounce = device.bounce().map_err(|error| Failed { error, read })?;
        let device = Arc::clone(device);
        self.filling = Some(Chunk { device, bounce, filled: 0, read, hold: None, waited: true });
        Ok(())
    }

    /// The next `len` bytes to fill, after [`prepare`](Self::prepare).
    pub(super) fn room(&self, len: usize) -> Option<Segment> {
        let chunk = self.filling.as_ref()?;
        chunk.bounce.segment().slice(chunk.filled, len)
    }

    /// So many bytes were read into the [`room`](Self::room).
    pub(super) fn fill(&mut self, len: usize) {
        if let Some(chunk) = &mut self.filling {
            chunk.filled += len;
        }
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        if let Some(room) = self.room(bytes.len()) {
            room.copy_from(bytes);
            self.fill(bytes.len());
        }
    }

    /// So many bytes fit in behind what was filled.
    pub(super) fn space(&self) -> usize {
        self.filling.as_ref().map_or(0, |chunk| chunk.bounce.segment().len() - chunk.filled)
    }

    pub(super) fn filled(&self) -> usize {
        self.filling.as_ref().map_or(0, |chunk| chunk.filled)
    }

    pub(super) fn discard(&mut self) {
        if let Some(chunk) = &mut self.filling {
            chunk.filled = 0;
        }
    }

    /// Starts copying what was filled to `pieces`, which together are as long.
    pub(super) fn store(
        &mut self,
        mut pieces: impl Iterator<Item = Segment>,
        hold: Option<Hold>,
    ) -> Result<(), Failed> {
        let Some(mut chunk) = self.filling.take() else { return Ok(()) };
        (chunk.hold, chunk.waited) = (hold, false);
        let mut at = 0;
        let started = pieces.try_for_each(|piece| {
            chunk.bounce.store(at, piece.address(), piece.len())?;
            at += piece.len();
            Ok(())
        });
        started.map_err(|error| Failed { error, read: chunk.read })?;
        self.landing.push_back(chunk);
        Ok(())
    }

    /// Waits until everything is where it belongs.
    pub(super) fn wait(&mut self) -> Result<(), Failed> {
        self.landing.iter_mut().try_for_each(Chunk::wait)
    }

    /// Waits for what goes into memory of an exposed region, and gives the bounces back when nothing is left to be done.
    pub(super) fn let_go(&mut self) -> Result<(), Failed> {
        self.landing.iter_mut().filter(|chunk| chunk.hold.is_some()).try_for_each(Chunk::wait)?;
        if self.filled() == 0 && self.landing.iter().all(|chunk| chunk.waited) {
            self.clear();
        }
        Ok(())
    }

    /// Waits, and gives all bounces back.
    pub(super) fn clear(&mut self) {
        self.filling = None;
        self.landing.clear();
    }
}
