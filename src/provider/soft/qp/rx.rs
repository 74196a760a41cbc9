//! The receiving half: the parser, and the responder that carries out the peer's requests.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::keys::Key;
use super::super::wire::{ATOMIC_OPERANDS, HEADER, Header, Kind, extend, flag, nak_status};
use super::QpShared;
use super::queue::{ReceiveEntry, span};
use super::tx::{Body, Response};
use crate::error::WcStatus;
use crate::memory::Access;
use crate::memory::dma::Scatter;
use crate::provider::{Opcode, SgeList, WorkCompletion, WrOp};

/// Small messages are read into this buffer, several at a time, and copied from there.
pub(super) const STAGING: usize = 16 << 10;

/// From this payload size on only headers are staged: payload goes from the socket straight to where it belongs.
const BULK: usize = STAGING;

/// What one drive may do before others get their turn: at some GB/s a few hundred microseconds.
const DRIVE_BYTES: usize = 1 << 20;

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
    operands: [u8; ATOMIC_OPERANDS],
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
            operands: [0; ATOMIC_OPERANDS],
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
        let mut driven = Driven::default();
        let mut budget = DRIVE_BYTES;
        loop {
            self.parse(qp)?;
            if budget == 0 {
                driven.more = true;
                return Ok(driven);
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
                        return Ok(driven);
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(driven),
                    io::ErrorKind::Interrupted => {}
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
        let revoked = self.target == Target::Granted && self.remaining > 0 && pin.is_none();
        let room = if direct >= BULK || (direct == 0 && self.remaining == 0 && self.bulk) { HEADER } else { STAGING };
        scatter.push_bytes(&mut self.staging[held..room.max(held + 1)]);
        let asked = scatter.len();
        let len = scatter.read(qp.socket.as_fd());
        drop(pin);
        let len = len?;
        let placed = len.min(direct);
        self.placed(placed);
        self.end += len - placed;
        if revoked {
            self.refuse_message(WcStatus::RemoteAccess);
        }
        Ok((len, asked))
    }

    fn placed(&mut self, len: usize) {
        self.remaining -= len;
        self.offset += len;
        self.unacked_bytes += len;
    }

    /// Works through the staging buffer until it needs more bytes.
    fn parse(&mut self, qp: &QpShared) -> Result<(), Stop> {
        loop {
            match self.frame {
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
                        self.place(len);
                        self.start += len;
                        self.placed(len);
                    }
                    if self.remaining > 0 {
                        return Ok(());
                    }
                    self.frame = None;
                    self.finish(qp, &header)?;
                }
            }
        }
    }

    /// Copies staged payload to where it belongs.
    fn place(&mut self, len: usize) {
        let bytes = &self.staging[self.start..self.start + len];
        match self.target {
            Target::Discard => {}
            Target::Operands => self.operands[self.offset..self.offset + len].copy_from_slice(bytes),
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

    /// A header was read: decides where its payload goes.
    fn begin(&mut self, qp: &QpShared, header: Header) -> Result<(), Stop> {
        self.frame = Some(header);
        self.remaining = header.length as usize;
        self.offset = header.offset() as usize;
        self.bulk = self.remaining >= BULK;
        self.target = Target::Discard;
        match header.kind {
            Kind::Send | Kind::Write => self.begin_fragment(qp, &header)?,
            Kind::CompareSwap | Kind::FetchAdd => {
                self.target = Target::Operands;
                self.offset = 0;
            }
            Kind::ReadResponse if !header.has(flag::LAST) => {
                let mut tx = qp.tx.lock();
                let entry = read_entry(&mut tx, &header)?;
                self.read_sges.clear();
                self.read_sges.extend_from_slice(&entry.sges);
                self.target = Target::Read;
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether a request is to be thrown away, because it follows one that was refused or not ready for.
    fn skips(&mut self, header: &Header, first: bool) -> Result<bool, Stop> {
        if self.refused.is_some() {
            return Ok(true);
        }
        let msn = extend(self.expected, header.msn);
        if self.starving {
            if msn < self.expected {
                return Err("a request came twice".into());
            }
            if msn > self.expected || !first {
                return Ok(true);
            }
            self.starving = false;
        }
        if msn != self.expected {
            return Err("a request is out of order".into());
        }
        Ok(false)
    }

    fn begin_fragment(&mut self, qp: &QpShared, header: &Header) -> Result<(), Stop> {
        let first = header.has(flag::FIRST);
        if self.skips(header, first)? {
            return Ok(());
        }
        if first {
            if self.message.is_some() {
                return Err("a message begins inside another".into());
            }
            if u64::from(header.total) > qp.agreed.max_message {
                return Err("a message is longer than agreed".into());
            }
            if !self.begin_message(qp, header)? {
                return Ok(());
            }
        }
        let Some(message) = &self.message else { return Err("a message without a beginning".into()) };
        let offset = header.offset();
        if message.kind != header.kind || message.total != header.total || u64::from(message.received) != offset {
            return Err("a fragment is out of order".into());
        }
        self.target = match (message.refused, header.kind) {
            (true, _) => Target::Discard,
            (_, Kind::Send) => Target::Receive,
            _ => Target::Granted,
        };
        Ok(())
    }

    /// The first fragment of a Send or Write: takes a receive where one is needed, and checks the key.
    /// `false`: it is not carried out.
    fn begin_message(&mut self, qp: &QpShared, header: &Header) -> Result<bool, Stop> {
        let imm = header.imm();
        if header.kind == Kind::Write {
            self.address = header.address;
            self.key = None;
            if header.total > 0 {
                let (pd, length) = (qp.pd, u64::from(header.total));
                self.key = qp.ctx.keys.find_remote(header.key, pd, header.address, length, Access::REMOTE_WRITE);
                if self.key.is_none() {
                    self.refuse(WcStatus::RemoteAccess);
                    return Ok(false);
                }
            }
        }
        if header.kind == Kind::Send || imm.is_some() {
            // Before looking for a receive: whoever posts one later then tells the peer.
            let careful = header.has(flag::CAREFUL);
            if qp.peer_careful.load(Ordering::SeqCst) != careful {
                qp.peer_careful.store(careful, Ordering::SeqCst);
            }
            let pretend = qp.ctx.faults.as_ref().is_some_and(|faults| faults.pretends_rnr());
            if pretend || !qp.rq.lock().take(&mut self.receive) {
                qp.peer_careful.store(true, Ordering::SeqCst);
                qp.rnr_naks_sent.fetch_add(1, Ordering::Relaxed);
                (self.starving, self.rnr_nak) = (true, true);
                return Ok(false);
            }
            self.holds_receive = true;
            if header.kind == Kind::Send && u64::from(header.total) > self.receive.capacity {
                self.complete_receive(qp, WcStatus::LocalLength, Opcode::Receive, 0, None);
                self.refuse(WcStatus::RemoteInvalidRequest);
                return Ok(false);
            }
        }
        self.message = Some(Message { kind: header.kind, total: header.total, received: 0, imm, refused: false });
        Ok(true)
    }

    /// A frame is complete.
    fn finish(&mut self, qp: &QpShared, header: &Header) -> Result<(), Stop> {
        match header.kind {
            Kind::Send | Kind::Write => {
                let Some(message) = self.message.as_mut().filter(|_| self.target != Target::Discard) else {
                    return Ok(());
                };
                message.received += header.length;
                if message.received < message.total {
                    return Ok(());
                }
                let (imm, total) = (message.imm, message.total);
                self.message = None;
                self.key = None;
                self.request_done(qp);
                if self.holds_receive {
                    let opcode = if header.kind == Kind::Send { Opcode::Receive } else { Opcode::ReceiveWriteImm };
                    self.complete_receive(qp, WcStatus::Success, opcode, total, imm);
                }
                Ok(())
            }
            Kind::ReadRequest => self.read_request(qp, header),
            Kind::CompareSwap | Kind::FetchAdd => self.atomic_request(qp, header),
            Kind::ReadResponse if header.has(flag::LAST) => {
                let mut tx = qp.tx.lock();
                read_entry(&mut tx, header)?.answered = true;
                tx.reads_in_flight = tx.reads_in_flight.saturating_sub(1);
                qp.retire(&mut tx);
                Ok(())
            }
            Kind::ReadResponse => {
                read_entry(&mut qp.tx.lock(), header)?.received += header.length;
                Ok(())
            }
            Kind::AtomicResponse => self.atomic_response(qp, header),
            Kind::Ack => {
                if header.has(flag::SOLICIT) {
                    qp.ack_pending.store(true, Ordering::SeqCst);
                }
                Ok(())
            }
            Kind::Nak => Err(Stop::Refused(header.msn, nak_status(header.status))),
            Kind::RnrNak => {
                self.take_news(qp)?;
                let mut tx = qp.tx.lock();
                let msn = extend(tx.acked, header.msn);
                qp.rnr_naks_received.fetch_add(1, Ordering::Relaxed);
                tx.rewind(msn, Duration::from_micros(u64::from(header.total)))?;
                // Frames that carried an acknowledgement may be gone.
                qp.ack_pending.store(true, Ordering::SeqCst);
                qp.check_patience(&mut tx);
                Ok(())
            }
            Kind::Bye => Err(Stop::Bye),
        }
    }

    fn read_request(&mut self, qp: &QpShared, header: &Header) -> Result<(), Stop> {
        if self.skips(header, true)? {
            return Ok(());
        }
        if self.message.is_some() || u64::from(header.total) > qp.agreed.max_message {
            return Err("a read inside a message, or longer than agreed".into());
        }
        let mut key = None;
        if header.total > 0 {
            let (pd, length) = (qp.pd, u64::from(header.total));
            key = qp.ctx.keys.find_remote(header.key, pd, header.address, length, Access::REMOTE_READ);
            if key.is_none() {
                self.refuse(WcStatus::RemoteAccess);
                return Ok(());
            }
        }
        self.respond(qp, Body::Read { key, address: header.address, total: header.total, offset: 0 })
    }

    fn atomic_request(&mut self, qp: &QpShared, header: &Header) -> Result<(), Stop> {
        if self.skips(header, true)? {
            return Ok(());
        }
        if self.message.is_some() {
            return Err("an atomic inside a message".into());
        }
        if header.address % 8 != 0 {
            self.refuse(WcStatus::RemoteInvalidRequest);
            return Ok(());
        }
        let key = qp.ctx.keys.find_remote(header.key, qp.pd, header.address, 8, Access::REMOTE_ATOMIC);
        let old = key.as_deref().and_then(|key| {
            let _pin = key.pin()?;
            let (memory, offset) = key.place(header.address)?;
            let [first, second] = [0, 8].map(|at| {
                let mut raw = [0; 8];
                raw.copy_from_slice(&self.operands[at..at + 8]);
                u64::from_le_bytes(raw)
            });
            match header.kind {
                Kind::CompareSwap => memory.compare_swap(offset, first, second),
                _ => memory.fetch_add(offset, first),
            }
        });
        match old {
            Some(old) => self.respond(qp, Body::Old(old)),
            None => {
                self.refuse(WcStatus::RemoteAccess);
                Ok(())
            }
        }
    }

    fn respond(&mut self, qp: &QpShared, body: Body) -> Result<(), Stop> {
        let msn = self.expected;
        {
            let mut tx = qp.tx.lock();
            if tx.responses.len() >= qp.agreed.reads_served as usize {
                return Err("more reads and atomics in flight than agreed".into());
            }
            tx.responses.push_back(Response { msn, body });
        }
        self.request_done(qp);
        Ok(())
    }

    fn atomic_response(&mut self, qp: &QpShared, header: &Header) -> Result<(), Stop> {
        let mut tx = qp.tx.lock();
        let msn = extend(tx.acked, header.msn);
        let known = msn < tx.sent;
        let entry = tx.entry(msn).filter(|entry| known && !entry.answered);
        let Some(entry) = entry.filter(|e| matches!(e.op, WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. })) else {
            return Err("an answer to no atomic".into());
        };
        copy(&entry.sges, 0, &header.address.to_ne_bytes());
        entry.answered = true;
        tx.reads_in_flight = tx.reads_in_flight.saturating_sub(1);
        qp.retire(&mut tx);
        Ok(())
    }

    fn request_done(&mut self, qp: &QpShared) {
        self.expected += 1;
        qp.done.store(self.expected, Ordering::SeqCst);
        qp.ack_pending.store(true, Ordering::SeqCst);
        self.unacked_messages += 1;
    }

    fn complete_receive(&mut self, qp: &QpShared, status: WcStatus, opcode: Opcode, byte_len: u32, imm: Option<u32>) {
        self.holds_receive = false;
        qp.complete(WorkCompletion { wr_id: self.receive.wr_id, status, opcode, byte_len, imm, vendor_error: 0 });
    }

    /// The expected request cannot be carried out: a NAK ends the queue pair.
    fn refuse(&mut self, status: WcStatus) {
        self.refused.get_or_insert((self.expected, status));
    }

    /// The same in the middle of a message; the rest of it is thrown away.
    fn refuse_message(&mut self, status: WcStatus) {
        self.refuse(status);
        self.target = Target::Discard;
        if let Some(message) = &mut self.message {
            message.refused = true;
        }
        self.key = None;
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
        self.take_news(qp)?;
        let pending = qp.ack_pending.load(Ordering::SeqCst);
        if !pending {
            self.unacked_messages = 0;
        }
        let overdue = self.unacked_messages > UNACKED_MESSAGES || self.unacked_bytes > UNACKED_BYTES;
        let ack = overdue || (eager && pending);
        if !(unsettled || ack || self.refused.is_some()) {
            return Ok(false);
        }
        if ack {
            (self.unacked_messages, self.unacked_bytes) = (0, 0);
        }
        let mut tx = qp.tx.lock();
        if std::mem::take(&mut self.rnr_nak) {
            tx.rnr_nak = Some(self.expected);
        }
        if tx.refusal.is_none() {
            tx.refusal = self.refused;
        }
        Ok(tx.flush(qp, ack))
    }

    /// Gives up everything that names memory of a user; the receive of an unfinished message is the result.
    pub(super) fn clear(&mut self) -> Option<u64> {
        self.message = None;
        self.key = None;
        self.frame = None;
        self.target = Target::Discard;
        self.read_sges.clear();
        std::mem::take(&mut self.holds_receive).then_some(self.receive.wr_id)
    }
}

/// The Read that a response belongs to; the fragment must be the next one of it.
fn read_entry<'a>(tx: &'a mut super::tx::Tx, header: &Header) -> Result<&'a mut super::queue::SendEntry, Stop> {
    let msn = extend(tx.acked, header.msn);
    let known = msn < tx.sent;
    let entry = tx.entry(msn).filter(|entry| known && !entry.answered && matches!(entry.op, WrOp::Read { .. }));
    let fits = |e: &super::queue::SendEntry| e.length == header.total && u64::from(e.received) == header.offset();
    entry.filter(|entry| fits(entry)).ok_or(Stop::Protocol("an answer to no read"))
}

fn copy(sges: &SgeList, offset: usize, mut bytes: &[u8]) {
    for piece in span(sges, offset, bytes.len()) {
        let (now, later) = bytes.split_at(piece.len());
        piece.copy_from(now);
        bytes = later;
    }
}
