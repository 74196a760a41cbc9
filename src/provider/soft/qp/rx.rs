//! The receiving half: reading the socket, and taking frames apart.

mod carrying;
mod landing;
mod responder;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use self::landing::Failed;
use self::landing::Landing;
use super::super::keys::{Device, Key};
use super::super::shm::CORRUPT;
use super::super::wire::{ATOMIC_OPERANDS, FRAGMENT, HEADER, Header, Kind, flag};
use super::QpShared;
use super::carrier::Carrier;
use super::queue::{ReceiveEntry, span};
use crate::error::WcStatus;
use crate::memory::dma::Scatter;
use crate::provider::{Opcode, SgeList};

/// Small messages are read into this buffer, several at a time, and copied from there.
pub(super) const STAGING: usize = 16 << 10;

/// From this payload size on only headers are staged: payload goes from the socket straight to where it belongs.
const BULK: usize = STAGING;

/// What one drive may do before others get their turn: at some GB/s a few hundred microseconds.
const DRIVE_BYTES: usize = 1 << 20;

/// The same for payload that goes into a device's memory, at the end of which copies are waited for, some 25 us, and nothing is read:
/// under a millisecond.
const DEVICE_DRIVE_BYTES: usize = 4 << 20;

/// So much may stay unacknowledged for the sake of riding on another frame.
const UNACKED_MESSAGES: u32 = 64;
const UNACKED_BYTES: usize = 1 << 20;

/// Why a drive ends the queue pair.
pub(super) enum Stop {
    Protocol(&'static str),
    Bye,
    /// The peer refused one of this side's requests.
    Refused(u32, WcStatus),
    Lost(String),
    /// A device failed that was to take in the answer to this Read, or else a part of the peer's request.
    Device(Box<Failed>),
    /// The same for a device of the peer, which is in this process.
    Source(Option<u32>),
}

impl From<&'static str> for Stop {
    fn from(why: &'static str) -> Self {
        Self::Protocol(why)
    }
}

/// Where the payload of the current frame goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Discard,
    Receive,
    Granted,
    Read,
    Operands,
}

/// A Send or Write of the peer that is not complete yet.
struct Message {
    kind: Kind,
    total: u32,
    received: u32,
    imm: Option<u32>,
    /// The rest of it is thrown away: it was refused.
    refused: bool,
}

pub(super) struct Rx {
    staging: Box<[u8]>,
    start: usize,
    end: usize,
    /// The frame whose payload is awaited.
    frame: Option<Header>,
    target: Target,
    /// Payload bytes of the frame still to come, and where in the message the next one belongs.
    remaining: usize,
    offset: usize,
    bulk: bool,
    /// The peer's next request.
    expected: u64,
    message: Option<Message>,
    /// The receive that the current message uses.
    receive: ReceiveEntry,
    holds_receive: bool,
    key: Option<Arc<Key>>,
    address: u64,
    read_sges: SgeList,
    /// The Read that the current frame answers (low bits).
    read: Option<u32>,
    /// Where the current frame's payload goes, if that is not the host's memory, and how.
    device: Device,
    landing: Landing,
    operands: [u8; ATOMIC_OPERANDS],
    /// Where payload goes whose offer's number is being read.
    named: Option<(Target, Device)>,
    /// Since when this drive has copied what a peer offered, and whether that took it long enough.
    turn: Option<Instant>,
    exhausted: bool,
    /// How much of it devices copy at a time.
    carrier: Carrier,
    /// The peer has ended: only its last words count.
    ending: bool,
    /// An RNR NAK is out: everything is discarded until `expected` comes again.
    starving: bool,
    /// A NAK is due or out: this queue pair carries out no more requests.
    refused: Option<(u64, WcStatus)>,
    rnr_nak: bool,
    /// Frames came since the last [`settle`](Self::settle).
    unsettled: bool,
    /// Latest acknowledgement and receive limit of the peer, taken in at the end of a drive.
    news: Option<(u32, u32)>,
    unacked_messages: u32,
    unacked_bytes: usize,
}

/// What a drive did.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Driven {
    pub worked: bool,
    /// It stopped before there was nothing left to read or write.
    pub more: bool,
}

impl Rx {
    pub(super) fn new() -> Self {
        Self {
            staging: vec![0; STAGING].into_boxed_slice(),
            start: 0,
            end: 0,
            frame: None,
            target: Target::Discard,
            remaining: 0,
            offset: 0,
            bulk: false,
            expected: 0,
            message: None,
            receive: ReceiveEntry::default(),
            holds_receive: false,
            key: None,
            address: 0,
            read_sges: SgeList::new(),
            read: None,
            device: None,
            landing: Landing::default(),
            operands: [0; ATOMIC_OPERANDS],
            named: None,
            turn: None,
            exhausted: false,
            carrier: Carrier::default(),
            ending: false,
            starving: false,
            refused: None,
            rnr_nak: false,
            unsettled: false,
            news: None,
            unacked_messages: 0,
            unacked_bytes: 0,
        }
    }

    /// Reads and carries out what is there, within the budget.
    pub(super) fn run(&mut self, qp: &QpShared) -> Result<Driven, Stop> {
        (self.turn, self.exhausted) = (None, false);
        let mut driven = self.read_on(qp);
        if let (Ok(driven), Some(_)) = (&mut driven, self.turn) {
            driven.worked = true;
        }
        if self.landing.is_empty() {
            return driven;
        }
        if driven.is_err() {
            self.landing.clear();
            return driven;
        }
        // What is between two pieces of this side's own receive or read may wait for the rest of it.
        self.landing.let_go().map_err(|failed| self.lost(qp, failed))?;
        driven
    }

    #[inline]
    fn read_on(&mut self, qp: &QpShared) -> Result<Driven, Stop> {
        let mut driven = Driven::default();
        let mut budget = if self.device.is_some() { DEVICE_DRIVE_BYTES } else { DRIVE_BYTES };
        loop {
            self.parse(qp)?;
            if budget == 0 || self.exhausted {
                driven.more = true;
                return Ok(driven);
            }
            if self.remaining > 0 && self.device.is_some() {
                self.prepare(qp)?;
            }
            match self.read(qp) {
                Ok((0, _)) => return Err(Stop::Lost("the peer closed the socket without a goodbye".into())),
                Ok((len, asked)) => {
                    driven.worked = true;
                    qp.received.add(len);
                    budget = budget.saturating_sub(len);
                    if len < asked {
                        // The socket is empty; if it fills again, epoll says so.
                        self.parse(qp)?;
                        driven.more = self.exhausted;
                        return Ok(driven);
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(driven),
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::InvalidData if qp.wire.is_some() => return Err(CORRUPT.into()),
                    _ => return Err(Stop::Lost(error.to_string())),
                },
            }
        }
    }

    /// One read: the rest of the payload to its place, what follows into the staging buffer.
    /// Only called with all staged bytes used up, except for a part of a header.
    fn read(&mut self, qp: &QpShared) -> io::Result<(usize, usize)> {
        let held = self.end - self.start;
        self.staging.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, held);

        let mut scatter = Scatter::new();
        let mut pin = None;
        let direct = match self.target {
            _ if self.remaining == 0 => 0,
            Target::Discard | Target::Operands => 0,
            _ if self.device.is_some() => {
                let room = self.landing.room(self.remaining);
                room.map_or(0, |room| {
                    scatter.push(room);
                    room.len()
                })
            }
            Target::Receive => {
                span(&self.receive.sges, self.offset, self.remaining).for_each(|piece| scatter.push(piece));
                self.remaining
            }
            Target::Read => {
                span(&self.read_sges, self.offset, self.remaining).for_each(|piece| scatter.push(piece));
                self.remaining
            }
            Target::Granted => {
                let place = self.key.as_deref().and_then(|key| {
                    let pin = key.pin()?;
                    Some((pin, key.at(self.address + self.offset as u64, self.remaining)?))
                });
                match place {
                    Some((held_key, piece)) => {
                        pin = Some(held_key);
                        scatter.push(piece);
                        self.remaining
                    }
                    None => 0,
                }
            }
        };
        let revoked = self.target == Target::Granted && self.remaining > 0 && pin.is_none() && self.device.is_none();
        let room = if direct >= BULK || (direct == 0 && self.remaining == 0 && self.bulk) { HEADER } else { STAGING };
        scatter.push_bytes(&mut self.staging[held..room.max(held + 1)]);
        let asked = scatter.len();
        let len = qp.take_in(scatter);
        drop(pin);
        let len = len?;
        let placed = len.min(direct);
        if self.device.is_some() {
            self.landing.fill(placed);
        }
        self.placed(placed);
        self.end += len - placed;
        if revoked {
            self.refuse_message(WcStatus::RemoteAccess);
        }
        Ok((len, asked))
    }

    /// The last drive may have left what it had read already.
    pub(super) fn is_unfinished(&self) -> bool {
        self.exhausted
    }

    fn placed(&mut self, len: usize) {
        self.remaining -= len;
        self.offset += len;
        self.unacked_bytes += len;
    }

    /// Works through the staging buffer until it needs more bytes, or has done enough for one drive.
    fn parse(&mut self, qp: &QpShared) -> Result<(), Stop> {
        loop {
            match self.frame {
                None if self.exhausted => return Ok(()),
                None => {
                    let Some(raw) = self.staging[self.start..self.end].first_chunk::<HEADER>() else { return Ok(()) };
                    let header = Header::parse(raw)?;
                    self.start += HEADER;
                    self.news = Some((header.ack, header.limit));
                    self.unsettled = true;
                    self.begin(qp, header)?;
                }
                Some(header) => {
                    let len = self.remaining.min(self.end - self.start);
                    if len > 0 {
                        if self.device.is_some() {
                            self.prepare(qp)?;
                            self.landing.put(&self.staging[self.start..self.start + len]);
                        } else {
                            let staging = std::mem::take(&mut self.staging);
                            self.place(&staging[self.start..self.start + len]);
                            self.staging = staging;
                        }
                        self.start += len;
                        self.placed(len);
                    }
                    if self.remaining > 0 {
                        return Ok(());
                    }
                    if header.has(flag::NEAR) {
                        if !self.carry(qp, &header)? {
                            return Ok(());
                        }
                    } else if self.device.is_some() && (header.ends() || self.landing.space() < FRAGMENT) {
                        self.land(qp)?;
                    }
                    self.frame = None;
                    self.finish(qp, &header)?;
                }
            }
        }
    }

    /// Copies the next bytes of the payload to where they belong.
    fn place(&mut self, bytes: &[u8]) {
        match self.target {
            Target::Discard => {}
            Target::Operands => self.operands[self.offset..self.offset + bytes.len()].copy_from_slice(bytes),
            Target::Receive => copy(&self.receive.sges, self.offset, bytes),
            Target::Read => copy(&self.read_sges, self.offset, bytes),
            Target::Granted => {
                let placed = self.key.as_deref().is_some_and(|key| {
                    let place = key.place(self.address + self.offset as u64);
                    let Some((_pin, (whole, at))) = key.pin().zip(place) else { return false };
                    whole.copy_from_shared(at, bytes);
                    true
                });
                if !placed {
                    self.refuse_message(WcStatus::RemoteAccess);
                }
            }
        }
    }

    /// Makes room for payload of a frame that goes into a device's memory.
    fn prepare(&mut self, qp: &QpShared) -> Result<(), Stop> {
        let Some(device) = &self.device else { return Ok(()) };
        self.landing.prepare(device, self.read).map_err(|failed| self.lost(qp, failed))
    }

    /// Has the device copy what came of the current frame to where it belongs.
    fn land(&mut self, qp: &QpShared) -> Result<(), Stop> {
        let len = if self.device.is_some() { self.landing.filled() } else { 0 };
        if len == 0 {
            return Ok(());
        }
        let from = self.offset - len;
        let started = match self.target {
            Target::Receive => self.landing.store(span(&self.receive.sges, from, len), None),
            Target::Read => self.landing.store(span(&self.read_sges, from, len), None),
            Target::Granted => {
                let key = self.key.as_ref();
                let place = key.and_then(|key| Some((key.hold()?, key.at(self.address + from as u64, len)?)));
                match place {
                    Some((hold, piece)) => self.landing.store(std::iter::once(piece), Some(hold)),
                    None => {
                        self.refuse_message(WcStatus::RemoteAccess);
                        Ok(())
                    }
                }
            }
            Target::Discard | Target::Operands => Ok(()),
        };
        started.map_err(|failed| self.lost(qp, failed))
    }

    /// Waits until all payload is where it belongs: before anybody hears that it is.
    fn landed(&mut self, qp: &QpShared) -> Result<(), Stop> {
        if self.landing.is_empty() {
            return Ok(());
        }
        self.landing.wait().map_err(|failed| self.lost(qp, failed))
    }

    fn lost(&mut self, qp: &QpShared, failed: Failed) -> Stop {
        // Earlier pieces may still be on their way into the buffer that is given back here.
        self.landing.clear();
        if failed.read.is_none() && self.holds_receive {
            self.complete_receive(qp, WcStatus::Fatal, Opcode::Receive, 0, None);
        }
        Stop::Device(Box::new(failed))
    }

    /// The NAK for a request of the peer that this side failed to carry out.
    pub(super) fn failure(&self) -> (u64, WcStatus) {
        self.refused.unwrap_or((self.expected, WcStatus::RemoteOperation))
    }

    /// Hands the peer's latest acknowledgement and limit to the sending half.
    pub(super) fn take_news(&mut self, qp: &QpShared) -> Result<(), Stop> {
        if let Some((ack, limit)) = self.news.take() {
            let mut tx = qp.tx.lock();
            tx.acknowledge(ack, limit)?;
            qp.retire(&mut tx);
        }
        Ok(())
    }

    /// The end of a drive: acknowledgements in, then responses, NAKs and acknowledgements out.
    /// `eager`: nobody is about to send anything that an acknowledgement could ride on.
    /// The result says whether more could be written.
    pub(super) fn settle(&mut self, qp: &QpShared, eager: bool) -> Result<bool, Stop> {
        let unsettled = std::mem::take(&mut self.unsettled);
        let pending = qp.ack_pending.load(Ordering::SeqCst);
        if !pending {
            self.unacked_messages = 0;
        }
        let overdue = self.unacked_messages > UNACKED_MESSAGES || self.unacked_bytes > UNACKED_BYTES;
        let ack = overdue || (eager && pending);
        if !(unsettled || ack || self.refused.is_some() || self.news.is_some()) {
            return Ok(false);
        }
        if ack {
            (self.unacked_messages, self.unacked_bytes) = (0, 0);
        }
        let mut tx = qp.tx.lock();
        if let Some((ack, limit)) = self.news.take() {
            tx.acknowledge(ack, limit)?;
            qp.retire(&mut tx);
        }
        if std::mem::take(&mut self.rnr_nak) {
            tx.rnr_nak = Some(self.expected);
        }
        if tx.refusal.is_none() {
            tx.refusal = self.refused;
        }
        Ok((ack || tx.has_work()) && tx.flush(qp, ack))
    }

    /// Gives up everything that names memory of a user; the receive of an unfinished message is the result.
    pub(super) fn clear(&mut self) -> Option<u64> {
        self.message = None;
        self.key = None;
        self.frame = None;
        self.target = Target::Discard;
        (self.device, self.receive.device, self.named) = (None, None, None);
        self.landing.clear();
        self.read_sges.clear();
        std::mem::take(&mut self.holds_receive).then_some(self.receive.wr_id)
    }
}

fn copy(sges: &SgeList, offset: usize, mut bytes: &[u8]) {
    for piece in span(sges, offset, bytes.len()) {
        let (now, later) = bytes.split_at(piece.len());
        piece.copy_from(now);
        bytes = later;
    }
}
