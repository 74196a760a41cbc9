//! What goes to the socket next, frame by frame.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::super::keys::Key;
use super::super::super::near::{Near, Offer, Place};
use super::super::super::wire::{ATOMIC_OPERANDS, DEVICE_FRAGMENT, FRAGMENT, HEADER, Header, Kind, OFFER, flag};
use super::super::QpShared;
use super::super::queue::span;
use super::lifting::{Lifted, Lifts, NoLift};
use super::{Body, Response, Starved, Tx};
use crate::error::WcStatus;
use crate::memory::device::DeviceMemory;
use crate::provider::WrOp;

/// Frames and bytes gathered into one system call.
pub(super) const BATCH_FRAMES: usize = 32;
const BATCH_BYTES: usize = 512 << 10;

impl Tx {
    /// An acknowledgement of its own. While the socket is full, one that waits already is brought up to date instead.
    pub(super) fn frame_ack(&mut self, qp: &QpShared) {
        if self.frames.back().is_some_and(|frame| frame.role == Role::Ack && frame.sent == 0) {
            self.frames.pop_back();
            self.framed_bytes -= HEADER;
        }
        self.frame(qp, Header::new(Kind::Ack), Payload::None, Role::Ack);
    }

    /// Queues frames for one system call; whether there are any new ones.
    pub(super) fn fill(&mut self, qp: &QpShared) -> bool {
        let mut any = false;
        while self.frames.len() < BATCH_FRAMES && self.framed_bytes < self.batch_bytes() && !self.failed {
            let framed = if let Some(msn) = self.rnr_nak.take() {
                let micros = qp.config.rnr_timer.as_micros().min(u128::from(u32::MAX)) as u32;
                let header = Header { msn: msn as u32, total: micros, ..Header::new(Kind::RnrNak) };
                self.frame(qp, header, Payload::None, Role::RnrNak);
                true
            } else {
                self.responses_turn = !self.responses_turn;
                let first = self.responses_turn;
                (first && self.frame_response(qp)) || self.frame_request(qp) || (!first && self.frame_response(qp))
            };
            if !framed {
                break;
            }
            any = true;
        }
        if self.responses.is_empty() {
            if let Some((msn, status)) = self.refusal.filter(|_| !self.frames.iter().any(|f| f.role == Role::Refusal)) {
                self.frame(qp, nak(msn, status), Payload::None, Role::Refusal);
                any = true;
            }
        }
        any
    }

    pub(super) fn frame(&mut self, qp: &QpShared, mut header: Header, payload: Payload, role: Role) {
        if qp.owes_ack() {
            // What was done before it was set is acknowledged here.
            qp.ack_pending.swap(false, Ordering::AcqRel);
            qp.ack_urgent.swap(false, Ordering::AcqRel);
        }
        (header.ack, header.limit) = qp.piggyback();
        if self.careful {
            header.flags |= flag::CAREFUL;
        }
        let len = header.behind();
        self.framed_bytes += HEADER + len;
        let header = header.encode();
        self.frames.push_back(Frame { header, payload, len, sent: 0, role, stale: false, zeroed: Cell::new(false) });
    }

    /// What comes out of a device's memory is fetched while the frames before it are written, so there is one more of those.
    fn batch_bytes(&self) -> usize {
        if self.lifts.is_empty() { BATCH_BYTES } else { BATCH_BYTES + DEVICE_FRAGMENT }
    }

    fn frame_response(&mut self, qp: &QpShared) -> bool {
        let Some(Response { msn, body }) = self.responses.front_mut() else { return false };
        let msn = *msn;
        let mut header = Header { msn: msn as u32, ..Header::new(Kind::ReadResponse) };
        let (payload, finished) = match body {
            Body::Old(value) => {
                header.kind = Kind::AtomicResponse;
                header.address = *value;
                (Payload::None, true)
            }
            Body::Read { key, address, total, offset } => {
                let of_device = key.as_ref().is_some_and(|key| key.device().is_some());
                let len = ((*total - *offset) as usize).min(fragment(qp, of_device));
                header.total = *total;
                header.address = u64::from(*offset);
                header.length = len as u32;
                match key {
                    Some(key) if len > 0 => match granted(qp, &mut self.lifts, key, *address + u64::from(*offset), len)
                    {
                        Ok(payload) => {
                            *offset += len as u32;
                            header.flags |= payload.flag();
                            (payload, false)
                        }
                        Err(why) => {
                            self.not_lifted(qp, Role::Response(msn), why);
                            return false;
                        }
                    },
                    _ => {
                        header.flags = flag::LAST;
                        (Payload::None, true)
                    }
                }
            }
        };
        if finished {
            self.responses.pop_front();
        }
        self.frame(qp, header, payload, Role::Response(msn));
        true
    }

    fn frame_request(&mut self, qp: &QpShared) -> bool {
        let (msn, offset, unanswered) = (self.next, self.offset, self.sq.len());
        let Some(entry) = self.sq.get((msn - self.base) as usize) else { return false };
        if entry.poison.is_some() || self.refusal.is_some() {
            return false;
        }
        if entry.wants_answer() && self.reads_in_flight >= qp.agreed.reads_started {
            return false;
        }
        if self.careful && offset == 0 && entry.receive.is_some_and(|receive| receive >= self.peer_limit) {
            self.hold_back(msn);
            return false;
        }
        let total = entry.length as usize;
        let mut header = Header { msn: msn as u32, total: entry.length, ..Header::new(Kind::Send) };
        let mut payload = Payload::None;
        let mut last = true;
        match entry.op {
            WrOp::Send { imm, .. } | WrOp::Write { imm, .. } => {
                let len = (total - offset).min(fragment(qp, entry.device.is_some()));
                last = offset + len == total;
                header.length = len as u32;
                header.address = offset as u64;
                header.flags |= if last { flag::LAST } else { 0 };
                if offset == 0 {
                    header.flags |= flag::FIRST;
                }
                if let WrOp::Write { remote, .. } = entry.op {
                    header.kind = Kind::Write;
                    if offset == 0 {
                        (header.address, header.key) = (remote.address, remote.rkey);
                    }
                }
                if let WrOp::Send { patience, .. } = entry.op {
                    let patient = last && unanswered <= patience as usize && qp.outlasts_a_tick();
                    header.flags |= if patient { flag::PATIENT } else { 0 };
                }
                if let Some(imm) = imm {
                    header.flags |= flag::IMM;
                    header.imm = imm;
                }
                if len > 0 {
                    payload = Payload::Request(offset);
                    if let (Some(device), Some(near)) = (&entry.device, &qp.near) {
                        let place = Place::Request { sges: entry.sges.clone(), len };
                        payload = offered(near, device, place);
                        header.flags |= payload.flag();
                    } else if let Some(device) = &entry.device {
                        match self.lifts.lift(device, span(&entry.sges, offset, len), len, None) {
                            Ok(lifted) => payload = Payload::Lifted(lifted),
                            Err(why) => {
                                self.not_lifted(qp, Role::Request { msn, last }, why);
                                return false;
                            }
                        }
                    }
                }
            }
            WrOp::Read { remote } => {
                header.kind = Kind::ReadRequest;
                (header.address, header.key) = (remote.address, remote.rkey);
            }
            WrOp::CompareSwap { remote, compare, swap } => {
                header.kind = Kind::CompareSwap;
                (header.address, header.key) = (remote.address, remote.rkey);
                payload = operands(&mut header, compare, swap);
            }
            WrOp::FetchAdd { remote, add } => {
                header.kind = Kind::FetchAdd;
                (header.address, header.key) = (remote.address, remote.rkey);
                payload = operands(&mut header, add, 0);
            }
        }
        if entry.wants_answer() {
            self.reads_in_flight += 1;
        }
        if last {
            (self.next, self.offset) = (msn + 1, 0);
        } else {
            self.offset = offset + header.length as usize;
        }
        if let Some(starved) = &mut self.starved {
            starved.blocked = false;
        }
        self.frame(qp, header, payload, Role::Request { msn, last });
        true
    }

    fn hold_back(&mut self, msn: u64) {
        match &mut self.starved {
            Some(starved) if starved.msn == msn => starved.blocked = true,
            _ => self.starved = Some(Starved { msn, since: Instant::now(), blocked: true }),
        }
    }
}

/// The longest piece of a message.
fn fragment(qp: &QpShared, of_device: bool) -> usize {
    match (of_device, &qp.near) {
        (false, _) => FRAGMENT,
        (true, None) => DEVICE_FRAGMENT,
        (true, Some(_)) => usize::MAX,
    }
}

pub(super) enum Payload {
    None,
    Operands([u8; ATOMIC_OPERANDS]),
    /// Bytes of a request's scatter/gather list, from this offset.
    Request(usize),
    /// Bytes of granted memory.
    Granted(Arc<Key>, u64),
    /// Bytes that come out of a device's memory, of either kind.
    Lifted(Lifted),
    /// Bytes that the peer has a device copy: the number of the offer.
    Offered([u8; OFFER]),
}

impl Payload {
    fn flag(&self) -> u8 {
        if matches!(self, Self::Offered(_)) { flag::NEAR } else { 0 }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Ack,
    Poke,
    RnrNak,
    Refusal,
    Response(u64),
    Request { msn: u64, last: bool },
}

pub(super) struct Frame {
    pub header: [u8; HEADER],
    pub payload: Payload,
    pub len: usize,
    /// Bytes of header and payload that the socket has taken.
    pub sent: usize,
    pub role: Role,
    /// A rewind came while this frame was partly sent: its rest must follow, but it proves nothing.
    pub stale: bool,
    /// The key was revoked before all of the payload was sent.
    pub zeroed: Cell<bool>,
}

impl Frame {
    /// Gives back what its payload takes up; nothing of it is sent any more.
    pub(super) fn release(&self, lifts: &mut Lifts) {
        if let Payload::Lifted(lifted) = self.payload {
            lifts.release(lifted);
        }
    }

    /// The same for one of which nothing was sent.
    pub(super) fn withdraw(&self, qp: &QpShared, lifts: &mut Lifts) {
        self.release(lifts);
        if let (Payload::Offered(number), Some(near)) = (&self.payload, &qp.near) {
            near.withdraw(u64::from_le_bytes(*number));
        }
    }
}

/// Payload that answers a Read.
fn granted(qp: &QpShared, lifts: &mut Lifts, key: &Arc<Key>, address: u64, len: usize) -> Result<Payload, NoLift> {
    // Without a hold the key is revoked: nothing is fetched, and writing will not find the memory either.
    let place = key.device().as_ref().and_then(|device| Some((device, key.hold()?, key.at(address, len)?)));
    match place {
        Some((device, hold, memory)) => match &qp.near {
            // Held again when it is copied.
            Some(near) => Ok(offered(near, device, Place::Granted { key: Arc::clone(key), memory })),
            None => lifts.lift(device, std::iter::once(memory), len, Some(hold)).map(Payload::Lifted),
        },
        None => Ok(Payload::Granted(Arc::clone(key), address)),
    }
}

fn offered(near: &Near, device: &Arc<dyn DeviceMemory>, place: Place) -> Payload {
    Payload::Offered(near.offer(Offer { device: Arc::clone(device), place }).to_le_bytes())
}

pub(in super::super) fn nak(msn: u64, status: WcStatus) -> Header {
    Header { msn: msn as u32, status: status.as_raw() as u16, ..Header::new(Kind::Nak) }
}

fn operands(header: &mut Header, first: u64, second: u64) -> Payload {
    header.length = ATOMIC_OPERANDS as u32;
    let mut bytes = [0; ATOMIC_OPERANDS];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    Payload::Operands(bytes)
}
