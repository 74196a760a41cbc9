//! From frames to the socket.

use std::io;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use super::super::super::wire::HEADER;
use super::super::QpShared;
use super::super::queue::span;
use super::Tx;
use super::framing::{Payload, Role};
use super::lifting::NoLift;
use crate::error::WcStatus;
use crate::memory::dma::{Gather, MAX_PARTS, Segment};

/// Stands in for the rest of a read response whose key was revoked in the middle: its header is on the link already.
static ZEROS: [u8; 16 << 10] = [0; 16 << 10];

impl Tx {
    /// Waits until the payload of the frame at the front is on this side of a device. `false`: the device failed.
    pub(super) fn await_payload(&mut self, qp: &QpShared) -> bool {
        let Some(Payload::Lifted(lifted)) = self.frames.front().map(|frame| &frame.payload) else { return true };
        let lifted = *lifted;
        match self.lifts.wait(lifted) {
            Ok(()) => true,
            Err(error) => {
                self.lose(qp, lifted.slot(), &error);
                false
            }
        }
    }

    /// What was fetched into this slot did not arrive.
    pub(super) fn lose(&mut self, qp: &QpShared, slot: usize, error: &io::Error) {
        let lost: SmallVec<[Role; 4]> = self
            .frames
            .iter()
            .filter(|frame| matches!(frame.payload, Payload::Lifted(lifted) if lifted.slot() == slot))
            .map(|frame| frame.role)
            .collect();
        lost.into_iter().for_each(|role| self.blame(role));
        self.end(qp, error);
    }

    /// A frame got no payload: no bounce is free, or the device failed.
    pub(super) fn not_lifted(&mut self, qp: &QpShared, role: Role, why: NoLift) {
        if let NoLift::Failed(error) = why {
            self.blame(role);
            self.end(qp, &error);
        }
    }

    fn blame(&mut self, role: Role) {
        match role {
            Role::Request { msn, .. } => self.poison(msn, WcStatus::Fatal),
            Role::Response(msn) => self.refusal = self.refusal.or(Some((msn, WcStatus::RemoteOperation))),
            _ => {}
        }
    }

    fn end(&mut self, qp: &QpShared, error: &io::Error) {
        self.failed = true;
        let _ = qp.device_failure.set(error.to_string().into());
        qp.doomed.store(true, Ordering::SeqCst);
    }

    /// One system call for all queued frames: how many bytes it took, and how many there were.
    pub(super) fn write(&self, qp: &QpShared) -> io::Result<(usize, usize)> {
        let mut gather = Gather::new();
        // Memory of the peer's Reads stays pinned for this one call.
        let mut pins = SmallVec::<[_; 8]>::new();
        let mut allowed = self.cut_after.unwrap_or(u64::MAX);
        for frame in &self.frames {
            if gather.parts() >= MAX_PARTS / 2 {
                break;
            }
            let done = frame.sent.saturating_sub(HEADER);
            let left = (frame.len - done).min(usize::try_from(allowed).unwrap_or(usize::MAX));
            if matches!(frame.payload, Payload::Lifted(lifted) if !self.lifts.is_ready(lifted)) {
                // Still on its way, while what is before it goes out.
                break;
            }
            allowed -= left as u64;
            if frame.sent < HEADER {
                gather.push_bytes(&frame.header[frame.sent..]);
            }
            match &frame.payload {
                Payload::None => {}
                Payload::Operands(bytes) => gather.push_bytes(&bytes[done..done + left]),
                Payload::Offered(number) => gather.push_bytes(&number[done..done + left]),
                Payload::Request(offset) => {
                    for piece in self.pieces(frame.role, offset + done, left) {
                        gather.push(piece);
                    }
                }
                Payload::Granted(key, address) => {
                    // Once a part of it is zeros, the rest may as well be: the NAK follows.
                    let pin = if frame.zeroed.get() { None } else { key.pin() };
                    match pin.zip(key.at(address + done as u64, left)) {
                        Some((pin, piece)) => {
                            pins.push(pin);
                            gather.push_shared(piece);
                        }
                        None => {
                            frame.zeroed.set(true);
                            push_zeros(&mut gather, left);
                            // Nothing behind it: the end of this response must not follow.
                            break;
                        }
                    }
                }
                Payload::Lifted(lifted) => {
                    self.lifts.payload(*lifted, done, left).into_iter().for_each(|piece| gather.push(piece));
                }
            }
            if left < frame.len - done {
                break;
            }
        }
        let offered = gather.len();
        let taken = qp.transmit(gather);
        drop(pins);
        Ok((taken?, offered))
    }

    /// The memory behind a request's frame.
    fn pieces(&self, role: Role, offset: usize, len: usize) -> impl Iterator<Item = Segment> + '_ {
        let entry = match role {
            Role::Request { msn, .. } => self.sq.get(msn.wrapping_sub(self.base) as usize),
            _ => None,
        };
        span(entry.map_or(&[], |entry| &entry.sges), offset, len)
    }

    pub(super) fn consume(&mut self, qp: &QpShared, mut taken: usize) {
        self.framed_bytes = self.framed_bytes.saturating_sub(taken);
        let mut revoked = None;
        while let Some(frame) = self.frames.front_mut() {
            let step = taken.min(HEADER + frame.len - frame.sent);
            if let Some(cut) = &mut self.cut_after {
                let payload = (frame.sent + step).saturating_sub(HEADER) - frame.sent.saturating_sub(HEADER);
                *cut = cut.saturating_sub(payload as u64);
            }
            frame.sent += step;
            taken -= step;
            if frame.sent < HEADER + frame.len {
                break;
            }
            let (role, stale, zeroed) = (frame.role, frame.stale, frame.zeroed.get());
            frame.release(&mut self.lifts);
            self.frames.pop_front();
            match role {
                Role::Request { msn, last: true } if !stale => self.sent = msn + 1,
                Role::Response(msn) if zeroed && !stale => revoked = revoked.or(Some(msn)),
                Role::Refusal => self.refusal_sent = self.refusal.map(|(_, status)| status),
                _ => {}
            }
        }
        // Only now is it known which frames were begun.
        if let Some(msn) = revoked {
            self.refuse_response(qp, msn);
        }
    }

    /// The memory of a Read was revoked while it was being served.
    fn refuse_response(&mut self, qp: &QpShared, msn: u64) {
        self.refusal = Some((msn, WcStatus::RemoteAccess));
        self.responses.clear();
        self.drop_frames(qp, |role| matches!(role, Role::Response(_) | Role::Refusal));
    }

    /// What must still go out for the peer to understand the frames that follow: the rest of a frame that was begun.
    pub(in super::super) fn rest_of_frame(&mut self, out: &mut Vec<u8>) {
        let Some(frame) = self.frames.front().filter(|frame| frame.sent > 0) else { return };
        let done = frame.sent.saturating_sub(HEADER);
        let left = frame.len - done;
        out.extend_from_slice(&frame.header[frame.sent.min(HEADER)..]);
        let end = out.len() + left;
        match &frame.payload {
            Payload::None => {}
            Payload::Operands(bytes) => out.extend_from_slice(&bytes[done..]),
            Payload::Offered(number) => out.extend_from_slice(&number[done..]),
            Payload::Request(offset) => {
                self.pieces(frame.role, offset + done, left).for_each(|piece| piece.append_to(out));
            }
            // Zeros do: the end of this response never comes, so nobody takes it for the data.
            Payload::Granted(..) => {}
            Payload::Lifted(lifted) => {
                self.lifts.payload(*lifted, done, left).into_iter().for_each(|piece| piece.append_to(out));
            }
        }
        out.resize(end, 0);
        self.frames.clear();
        self.framed_bytes = 0;
    }

    /// Lets go of everything that names memory of a user.
    pub(in super::super) fn clear(&mut self) {
        self.frames.clear();
        self.framed_bytes = 0;
        self.lifts.clear();
        self.responses.clear();
        self.starved = None;
        self.rnr_nak = None;
    }
}

fn push_zeros(gather: &mut Gather<'_>, mut len: usize) {
    while len > 0 {
        let piece = len.min(ZEROS.len());
        gather.push_bytes(&ZEROS[..piece]);
        len -= piece;
    }
}
