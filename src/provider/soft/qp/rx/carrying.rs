//! Payload that a peer in this process offers in a device's memory: copied from there, device to device where the devices can do that
//! by themselves, and through this side's bounces where they cannot or where the bytes belong into the host's memory.

use std::io;
use std::sync::Arc;

use smallvec::SmallVec;

use super::super::super::near::{Gone, Offer, Place};
use super::super::super::wire::{Header, OFFER};
use super::super::QpShared;
use super::super::queue::span;
use super::landing::{Carried, Failed};
use super::{Rx, Stop, Target};
use crate::error::{CloseReason, WcStatus};
use crate::memory::device::{BOUNCE, Bounce, DeviceMemory};
use crate::memory::dma::{Segment, bounced};

/// What a copy between devices costs this thread, in bytes of a socket: 5 to 10 us, whatever its length.
const COST: usize = 64 << 10;

type Pieces = SmallVec<[Segment; 4]>;

impl Rx {
    /// The number of an offer was read, in place of the frame's payload.
    pub(super) fn carry(&mut self, qp: &QpShared, header: &Header) -> Result<(), Stop> {
        (self.target, self.device) = std::mem::replace(&mut self.named, (Target::Discard, None));
        let mut number = [0; OFFER];
        number.copy_from_slice(&self.operands[..OFFER]);
        let Some(near) = &qp.near else { return Err("an offer from another process".into()) };
        let (offer, taken) = match near.take(u64::from_le_bytes(number)) {
            Ok(taken) => taken,
            // The rest of what the peer had to say is in the socket, and among it why it ends.
            Err(Gone::Closed) => {
                self.ending = true;
                return Ok(());
            }
            _ if self.target == Target::Discard => return Ok(()),
            Err(Gone::Revoked) => return Err(Stop::Refused(header.msn, WcStatus::RemoteAccess)),
            Err(Gone::Unknown) => return Err("an offer that was not made".into()),
        };
        let len = header.length as usize;
        if offer.place.len() != len {
            return Err("an offer of another length".into());
        }
        self.offset = header.offset() as usize;
        self.unacked_bytes += len;
        let (to, hold) = match self.target {
            Target::Receive => (span(&self.receive.sges, self.offset, len).collect::<Pieces>(), None),
            Target::Read => (span(&self.read_sges, self.offset, len).collect(), None),
            Target::Granted => {
                let place = self
                    .key
                    .as_ref()
                    .and_then(|key| Some((key.at(self.address + self.offset as u64, len)?, key.hold()?)));
                let Some((piece, hold)) = place else {
                    self.refuse_message(WcStatus::RemoteAccess);
                    return Ok(());
                };
                (Pieces::from_slice(&[piece]), Some(hold))
            }
            Target::Discard | Target::Operands => return Ok(()),
        };
        let from = pieces(&offer);
        let failed = |error| Failed { error, read: self.read };
        let transfer = match &self.device {
            Some(device) => device.transfer(&*offer.device).map_err(failed),
            None => Ok(None),
        };
        match transfer {
            Ok(Some(transfer)) => {
                self.spent += COST;
                qp.carried.add(len);
                let carried = Carried::new(transfer, self.read, taken, hold);
                let started = self.landing.carry(carried, runs(&from, &to));
                started.map_err(|failed| self.lost(qp, failed))
            }
            Ok(None) => {
                drop(hold);
                self.spent += len;
                self.relay(qp, &offer.device, &from)
            }
            Err(failed) => Err(self.lost(qp, failed)),
        }
    }

    /// Copies through the host: the next piece is fetched while one is put where it belongs.
    fn relay(&mut self, qp: &QpShared, source: &Arc<dyn DeviceMemory>, from: &[Segment]) -> Result<(), Stop> {
        let mut chunks = from.iter().flat_map(|piece| {
            (0..piece.len()).step_by(BOUNCE).filter_map(|at| piece.slice(at, BOUNCE.min(piece.len() - at)))
        });
        let read = self.read;
        let fetch = |chunk: Option<Segment>| -> io::Result<Option<(Box<dyn Bounce>, usize)>> {
            let Some(chunk) = chunk else { return Ok(None) };
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
        let mut next = fetch(chunks.next()).map_err(failed)?;
        while let Some((mut bounce, len)) = next {
            next = fetch(chunks.next()).map_err(failed)?;
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
                return Ok(());
            }
        }
        Ok(())
    }
}

fn pieces(offer: &Offer) -> Pieces {
    match &offer.place {
        Place::Request { sges, offset, len } => span(sges, *offset, *len).collect(),
        Place::Granted { memory, .. } => Pieces::from_slice(&[*memory]),
    }
}

/// Pairs of runs of the same length, which together are all of both lists.
fn runs<'a>(from: &'a [Segment], to: &'a [Segment]) -> impl Iterator<Item = (Segment, Segment)> + 'a {
    let (mut from, mut to) = (from.iter().copied(), to.iter().copied());
    let (mut source, mut target) = (from.next(), to.next());
    std::iter::from_fn(move || {
        let (one, other) = (source?, target?);
        let len = one.len().min(other.len());
        source = if one.len() > len { one.slice(len, one.len() - len) } else { from.next() };
        target = if other.len() > len { other.slice(len, other.len() - len) } else { to.next() };
        Some((one.slice(0, len)?, other.slice(0, len)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_both_lists() {
        let segment = |at: usize, len| Segment::new(std::ptr::without_provenance_mut(at), len);
        let from = [segment(100, 10), segment(200, 5)];
        let to = [segment(1000, 3), segment(2000, 8), segment(3000, 4)];
        let runs = runs(&from, &to).map(|(a, b)| (a.address(), b.address(), a.len())).collect::<Vec<_>>();
        assert_eq!(runs, [(100, 1000, 3), (103, 2000, 7), (200, 2007, 1), (201, 3000, 4)]);
        assert_eq!(super::runs(&[], &[]).count(), 0);
    }
}
