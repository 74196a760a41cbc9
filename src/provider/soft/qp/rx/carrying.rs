//! Payload that a peer in this process offers in a device's memory: copied from there, device to device where the devices can do that
//! by themselves, and through this side's bounces where they cannot or where the bytes belong into the host's memory.
//!
//! One offer is a whole message. What does not fit into a drive's time is taken up again by the next one; in between nothing of the
//! sender's is copied or held.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::super::super::keys::Hold;
use super::super::super::near::{Gone, Offer, Place};
use super::super::super::wire::{Header, OFFER};
use super::super::QpShared;
use super::super::queue::span;
use super::landing::Failed;
use super::{Rx, Stop, Target};
use crate::error::{CloseReason, WcStatus};
use crate::memory::device::{BOUNCE, Bounce, DeviceMemory, Transfer};
use crate::memory::dma::{Segment, bounced};

/// After so long, and what is under way by then, others get their turn.
const TURN: Duration = Duration::from_micros(500);

/// Bytes of one copy between devices, of which two are under way. It begins with the shortest, which is over within half of the [`TURN`]
/// even where the driver goes through the host (38 GB/s between two H200), and grows while pieces take little time (370 GB/s by NVLink,
/// 1600 GB/s within one), since each costs 2 us between copies and 5 us to start.
const PIECE: std::ops::RangeInclusive<usize> = 8 << 20..=64 << 20;
pub(super) const FIRST_PIECE: usize = *PIECE.start();

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
                let copied = self.pull(&*offer.device, first, &from, &to, turn);
                qp.carried.add(self.offset - before);
                copied.map_err(|failed| self.lost(qp, failed))?;
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

    /// Has the devices copy: the next piece is on its way before the one before it is waited for.
    fn pull(
        &mut self,
        source: &dyn DeviceMemory,
        first: Box<dyn Transfer>,
        from: &[Segment],
        to: &[Segment],
        turn: Instant,
    ) -> Result<(), Failed> {
        let read = self.read;
        let failed = |error| Failed { error, read };
        let (mut idle, mut busy): (_, Option<Box<dyn Transfer>>) = (Some(first), None);
        let mut started = Instant::now();
        for (from, to) in runs(from, to, self.piece) {
            let mut transfer = match idle.take() {
                Some(transfer) => transfer,
                None => match self.device.as_ref().map(|device| device.transfer(source)) {
                    Some(Ok(Some(transfer))) => transfer,
                    Some(Err(error)) => return Err(failed(error)),
                    _ => break,
                },
            };
            transfer.copy(from.address(), to.address(), from.len()).map_err(failed)?;
            self.offset += from.len();
            if let Some(mut before) = busy.replace(transfer) {
                before.wait().map_err(failed)?;
                idle = Some(before);
                self.tune(started.elapsed());
                started = Instant::now();
            }
            if turn.elapsed() >= TURN {
                break;
            }
        }
        let last = busy.map_or(Ok(()), |mut last| last.wait()).map_err(failed);
        self.tune(started.elapsed());
        last
    }

    /// Chooses the length of the next message's pieces by how long one took.
    fn tune(&mut self, taken: Duration) {
        let next = if taken > TURN / 2 {
            self.piece / 2
        } else if taken < TURN / 5 {
            self.piece * 2
        } else {
            self.piece
        };
        self.piece = next.clamp(*PIECE.start(), *PIECE.end());
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

/// Pairs of parts of the same length, at most `most`, which together are all that both lists have in common.
fn runs<'a>(from: &'a [Segment], to: &'a [Segment], most: usize) -> impl Iterator<Item = (Segment, Segment)> + 'a {
    let rest = |piece: Segment, len: usize| piece.slice(len, piece.len() - len).filter(|rest| rest.len() > 0);
    let (mut from, mut to) = (from.iter().copied(), to.iter().copied());
    let (mut source, mut target) = (from.next(), to.next());
    std::iter::from_fn(move || {
        let (one, other) = (source?, target?);
        let len = one.len().min(other.len()).min(most);
        source = rest(one, len).or_else(|| from.next());
        target = rest(other, len).or_else(|| to.next());
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
        let seen = |most| runs(&from, &to, most).map(|(a, b)| (a.address(), b.address(), a.len())).collect::<Vec<_>>();
        assert_eq!(seen(100), [(100, 1000, 3), (103, 2000, 7), (200, 2007, 1), (201, 3000, 4)]);
        assert_eq!(seen(4)[1..4], [(103, 2000, 4), (107, 2004, 3), (200, 2007, 1)]);
        assert_eq!(runs(&[], &[], 1).count(), 0);
        assert_eq!(
            steps(segment(100, 9), 4).map(|step| (step.address(), step.len())).collect::<Vec<_>>(),
            [(100, 4), (104, 4), (108, 1)]
        );
    }
}
