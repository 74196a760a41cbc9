//! Payload that a peer in this process offers in a device's memory: copied from there, device to device where the devices can do that
//! by themselves, and through this side's bounces where they cannot or where the bytes belong into the host's memory.
//!
//! One offer is a whole message. What does not fit into a drive's time is taken up again by the next one; in between nothing of the
//! sender's is copied or held.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use smallvec::SmallVec;

use super::super::super::keys::Hold;
use super::super::super::near::{Gone, Offer, Place};
use super::super::super::wire::{Header, OFFER};
use super::super::QpShared;
use super::super::carrier::TURN;
use super::super::queue::span;
use super::landing::Failed;
use super::{Rx, Stop, Target};
use crate::error::{CloseReason, WcStatus};
use crate::memory::device::{BOUNCE, Bounce, DeviceMemory};
use crate::memory::dma::{Segment, bounced};

type Pieces = SmallVec<[Segment; 4]>;

impl Rx {
    /// The number of an offer was read, in place of the frame's payload. `false`: some is left for the next drive.
    pub(super) fn carry(&mut self, qp: &QpShared, header: &Header) -> Result<bool, Stop> {
        let len = header.length as usize;
        if let Some((target, device)) = self.named.take() {
            (self.target, self.device, self.offset) = (target, device, 0);
        }
        let mut number = [0; OFFER];
        number.copy_from_slice(&self.operands[..OFFER]);
        let number = u64::from_le_bytes(number);
        let Some(near) = &qp.near else { return Err("an offer from another process".into()) };
        let (offer, taken) = match near.take(number) {
            Ok(taken) => taken,
            // The rest of what the peer had to say is in the socket, and among it why it ends.
            Err(Gone::Closed) => {
                self.ending = true;
                return Ok(true);
            }
            _ if self.target == Target::Discard => return Ok(true),
            Err(Gone::Revoked) => return Err(Stop::Refused(header.msn, WcStatus::RemoteAccess)),
            Err(Gone::Unknown) => return Err("an offer that was not made".into()),
        };
        if self.target == Target::Discard {
            return Ok(true);
        }
        if offer.place.len() != len {
            return Err("an offer of another length".into());
        }
        let Some((to, _hold)) = self.destination(len) else {
            self.refuse_message(WcStatus::RemoteAccess);
            return Ok(true);
        };
        let from = self.source(&offer);
        let before = self.offset;
        let turn = *self.turn.get_or_insert_with(Instant::now);
        let direct = match &self.device {
            Some(device) => device.transfer(&*offer.device).map_err(|error| Failed { error, read: self.read }),
            None => Ok(None),
        };
        match direct {
            Ok(Some(first)) => {
                let more = || match &self.device {
                    Some(device) => device.transfer(&*offer.device),
                    None => Ok(None),
                };
                let (copied, outcome) = self.carrier.copy(first, more, (&from, &to), turn);
                self.offset += copied;
                qp.carried.add(copied);
                outcome.map_err(|error| self.lost(qp, Failed { error, read: self.read }))?;
            }
            Ok(None) => self.relay(qp, &offer.device, &from, turn)?,
            Err(failed) => return Err(self.lost(qp, failed)),
        }
        let copied = self.offset - before;
        near.count(copied);
        self.unacked_bytes += copied;
        let left = self.offset < len && self.target != Target::Discard;
        self.exhausted |= left || turn.elapsed() >= TURN;
        if left {
            near.give_back(number, offer, taken);
        }
        Ok(!left)
    }

    /// Where the rest of a message of `len` bytes goes; `None` when the key was revoked.
    fn destination(&self, len: usize) -> Option<(Pieces, Option<Hold>)> {
        let left = len - self.offset;
        match self.target {
            Target::Receive => Some((span(&self.receive.sges, self.offset, left).collect(), None)),
            Target::Read => Some((span(&self.read_sges, self.offset, left).collect(), None)),
            Target::Granted => {
                let key = self.key.as_ref()?;
                let piece = key.at(self.address + self.offset as u64, left)?;
                Some((Pieces::from_slice(&[piece]), Some(key.hold()?)))
            }
            Target::Discard | Target::Operands => Some((Pieces::new(), None)),
        }
    }

    /// Where the rest of it comes from.
    fn source(&self, offer: &Offer) -> Pieces {
        match &offer.place {
            Place::Request { sges, len } => span(sges, self.offset, len - self.offset).collect(),
            Place::Granted { memory, .. } => {
                memory.slice(self.offset, memory.len() - self.offset).into_iter().collect()
            }
        }
    }

    /// Copies through the host: the next piece is fetched while one is put where it belongs.
    fn relay(
        &mut self,
        qp: &QpShared,
        source: &Arc<dyn DeviceMemory>,
        from: &[Segment],
        turn: Instant,
    ) -> Result<(), Stop> {
        let read = self.read;
        let mut chunks = from.iter().flat_map(|piece| steps(*piece, BOUNCE));
        let mut fetch = || -> io::Result<Option<(Box<dyn Bounce>, usize)>> {
            let Some(chunk) = chunks.next() else { return Ok(None) };
            let mut bounce = source.bounce()?;
            bounce.fetch(chunk.address(), 0, chunk.len())?;
            Ok(Some((bounce, chunk.len())))
        };
        let failed = |error: io::Error| {
            if let Some(near) = &qp.near {
                near.complain(CloseReason::Device(error.to_string().into()));
            }
            Stop::Source(read)
        };
        let mut next = fetch().map_err(failed)?;
        while let Some((mut bounce, len)) = next {
            let over = turn.elapsed() >= TURN;
            next = if over { None } else { fetch().map_err(failed)? };
            bounce.wait().map_err(failed)?;
            let bytes = bounced(&*bounce, len);
            if self.device.is_some() {
                self.prepare(qp)?;
                self.landing.put(bytes);
                self.offset += len;
                self.land(qp)?;
            } else {
                self.place(bytes);
                self.offset += len;
            }
            if self.target == Target::Discard {
                break;
            }
        }
        Ok(())
    }
}

/// Consecutive parts of a piece, each of at most `most` bytes.
fn steps(piece: Segment, most: usize) -> impl Iterator<Item = Segment> {
    (0..piece.len()).step_by(most).filter_map(move |at| piece.slice(at, most.min(piece.len() - at)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_a_piece() {
        let segment = |at: usize, len| Segment::new(std::ptr::without_provenance_mut(at), len);
        assert_eq!(
            steps(segment(100, 9), 4).map(|step| (step.address(), step.len())).collect::<Vec<_>>(),
            [(100, 4), (104, 4), (108, 1)]
        );
    }
}
