//! The sending half: the send queue, the responses owed to the peer, and what goes to the socket next.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::super::keys::Key;
use super::super::wire::{ATOMIC_OPERANDS, FRAGMENT, HEADER, Header, Kind, extend, flag};
use super::QpShared;
use super::queue::{Ring, SendEntry, span};
use crate::error::WcStatus;
use crate::memory::dma::{Gather, MAX_PARTS, Segment};
use crate::provider::WrOp;

/// Frames and bytes gathered into one system call.
const BATCH_FRAMES: usize = 32;
const BATCH_BYTES: usize = 512 << 10;

/// What one call may write before its thread is wanted elsewhere: a fast reader must not keep a poster here for good.
/// Not more, since filling a TCP socket to the brim (megabytes) drives the data out of the cache before it is read:
/// pipelined 1 MiB writes over loopback within one thread reach 6 GB/s with 512 KiB, 2 GB/s with 1 or 2 MiB.
const FLUSH_BYTES: usize = 512 << 10;

/// Stands in for the rest of a read response whose key was revoked in the middle: its header is on the link already.
static ZEROS: [u8; 16 << 10] = [0; 16 << 10];

pub(super) struct Response {
    pub msn: u64,
    pub body: Body,
}

pub(super) enum Body {
    /// The old value of an atomic.
    Old(u64),
    /// `key` is `None` for an empty Read, which needs none.
    Read { key: Option<Arc<Key>>, address: u64, total: u32, offset: u32 },
}

enum Payload {
    None,
    Operands([u8; ATOMIC_OPERANDS]),
    /// Bytes of a request's scatter/gather list, from this offset.
    Request(usize),
    /// Bytes of granted memory.
    Granted(Arc<Key>, u64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Ack,
    Poke,
    RnrNak,
    Refusal,
    Response(u64),
    Request { msn: u64, last: bool },
}

struct Frame {
    header: [u8; HEADER],
    payload: Payload,
    len: usize,
    /// Bytes of header and payload that the socket has taken.
    sent: usize,
    role: Role,
    /// A rewind came while this frame was partly sent: its rest must follow, but it proves nothing.
    stale: bool,
    /// The key was revoked before all of the payload was sent.
    zeroed: Cell<bool>,
}

/// A request waits for the peer to post a receive.
#[derive(Clone, Copy)]
pub(super) struct Starved {
    pub msn: u64,
    pub since: Instant,
    /// Whether it is held back right now, rather than on its way again.
    pub blocked: bool,
}

pub(super) struct Tx {
    pub sq: Ring<SendEntry>,
    /// Sequence number of the oldest entry of `sq`.
    pub base: u64,
    /// What is framed next: a request and the offset in it.
    pub next: u64,
    offset: usize,
    /// All requests below are entirely in the hands of the socket; the peer can have seen no others.
    pub sent: u64,
    pub acked: u64,
    pub reads_in_flight: u32,
    pub responses: VecDeque<Response>,
    frames: VecDeque<Frame>,
    framed_bytes: usize,
    responses_turn: bool,
    /// An RNR NAK for this request is due.
    pub rnr_nak: Option<u64>,
    /// The NAK that ends this queue pair once the responses before it are out.
    pub refusal: Option<(u64, WcStatus)>,
    pub refusal_sent: Option<WcStatus>,
    /// Only send what the peer's receive limit allows.
    pub careful: bool,
    pub peer_limit: u64,
    pub receives_wanted: u64,
    pub starved: Option<Starved>,
    pub peer_rnr_timer: Duration,
    /// The socket is full; writing waits for it to become writable.
    pub blocked: bool,
    /// Writing failed. Reading tells the reason, in order after whatever the peer still had to say.
    pub broken: Option<Arc<str>>,
    /// Payload bytes until fault injection cuts the link.
    pub cut_after: Option<u64>,
}

impl Tx {
    pub(super) fn new(depth: usize, cut_after: Option<u64>) -> Self {
        Self {
            sq: Ring::new(depth),
            base: 0,
            next: 0,
            offset: 0,
            sent: 0,
            acked: 0,
            reads_in_flight: 0,
            responses: VecDeque::with_capacity(16),
            frames: VecDeque::with_capacity(BATCH_FRAMES),
            framed_bytes: 0,
            responses_turn: false,
            rnr_nak: None,
            refusal: None,
            refusal_sent: None,
            careful: false,
            peer_limit: 0,
            receives_wanted: 0,
            starved: None,
            peer_rnr_timer: Duration::ZERO,
            blocked: false,
            broken: None,
            cut_after,
        }
    }

    pub(super) fn entry(&mut self, msn: u64) -> Option<&mut SendEntry> {
        self.sq.get_mut(usize::try_from(msn.checked_sub(self.base)?).ok()?)
    }

    /// Makes a request end with `status` when its turn comes.
    pub(super) fn poison(&mut self, msn: u64, status: WcStatus) {
        if let Some(entry) = self.entry(msn) {
            entry.poison.get_or_insert(status);
        }
    }

    pub(super) fn front_poison(&self) -> Option<WcStatus> {
        self.sq.get(0).and_then(|entry| entry.poison)
    }

    /// Whether the peer may have seen a part of this request.
    pub(super) fn begun(&self, msn: u64) -> bool {
        msn >= self.base && (msn < self.next || (msn == self.next && self.offset > 0))
    }

    /// Takes in the peer's acknowledgement and receive limit (low 32 bits).
    pub(super) fn acknowledge(&mut self, ack: u32, limit: u32) -> Result<(), &'static str> {
        let ack = extend(self.acked, ack);
        if ack < self.acked || ack > self.sent {
            return Err("an acknowledgement of what was not sent");
        }
        self.acked = ack;
        let limit = extend(self.peer_limit, limit);
        if limit < self.peer_limit {
            return Err("a receive limit that shrinks");
        }
        self.peer_limit = limit;
        if self.starved.is_some_and(|s| s.msn < ack) {
            self.starved = None;
        }
        self.calm_down();
        Ok(())
    }

    /// Careful mode ends when nothing is held back any more.
    fn calm_down(&mut self) {
        if self.careful && self.receives_wanted <= self.peer_limit {
            self.careful = false;
        }
    }

    /// The peer had no receive for `msn` and discards everything from there on: go back and send it again when it has one.
    pub(super) fn rewind(&mut self, msn: u64, timer: Duration) -> Result<(), &'static str> {
        let consumes = self.entry(msn).is_some_and(|entry| entry.receive.is_some());
        if !consumes || msn < self.acked || !self.begun(msn) {
            return Err("an RNR NAK for what was not sent");
        }
        if (msn..=self.next).any(|m| self.entry(m).is_some_and(|e| e.answered || e.received > 0)) {
            return Err("an RNR NAK for what comes before an answer");
        }
        self.next = msn;
        self.offset = 0;
        self.sent = self.sent.min(msn);
        self.careful = true;
        self.peer_rnr_timer = timer;
        let since = self.starved.filter(|s| s.msn == msn).map_or_else(Instant::now, |s| s.since);
        self.starved = Some(Starved { msn, since, blocked: false });
        self.reads_in_flight =
            (self.base..msn).filter(|m| self.entry(*m).is_some_and(|e| e.wants_answer() && !e.answered)).count() as u32;
        self.drop_frames(|role| matches!(role, Role::Request { msn: m, .. } if m >= msn));
        Ok(())
    }

    /// Forgets frames that were not begun; one that was must be finished.
    fn drop_frames(&mut self, unwanted: impl Fn(Role) -> bool) {
        self.frames.retain_mut(|frame| {
            if !unwanted(frame.role) {
                return true;
            }
            frame.stale = true;
            frame.sent > 0
        });
        self.framed_bytes = self.frames.iter().map(|f| HEADER + f.len - f.sent).sum();
    }

    /// Frames what can be sent and writes until the socket is full or enough was written; in the latter case the result is
    /// `true`, and somebody must go on. `ack`: send an acknowledgement even if nothing else goes out.
    ///
    /// A full socket is left alone until epoll says that it takes bytes again: trying earlier fills each gap as it opens,
    /// with many small pieces where one large one would do.
    pub(super) fn flush(&mut self, qp: &QpShared, mut ack: bool) -> bool {
        if self.blocked {
            if ack {
                qp.ack_pending.store(true, Ordering::SeqCst);
            }
            return false;
        }
        let mut budget = FLUSH_BYTES;
        while self.broken.is_none() && self.refusal_sent.is_none() {
            if self.fill(qp) {
                ack = false;
            }
            if std::mem::take(&mut ack) {
                self.frame_ack(qp);
            }
            if self.frames.is_empty() {
                self.unblock(qp);
                return false;
            }
            if budget == 0 {
                // The socket is not full, so epoll has no news for those who wait for an edge: they are told here.
                self.block(qp);
                qp.cq.notify();
                return true;
            }
            match self.write(qp.socket.as_fd()) {
                Ok((taken, offered)) => {
                    budget = budget.saturating_sub(taken);
                    qp.sent.add(taken);
                    if qp.writes_wait() {
                        qp.drained.add(taken);
                    }
                    self.consume(taken);
                    if self.cut_after == Some(0) {
                        qp.cut();
                        self.broken = Some("cut by fault injection".into());
                    } else if taken < offered && !self.block(qp) {
                        return false;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.block(qp) {
                        return false;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.broken = Some(error.to_string().into());
                    // What lies in the socket can still be read; then it ends.
                    qp.cut();
                }
            }
        }
        if self.refusal_sent.is_some() {
            qp.doomed.store(true, Ordering::SeqCst);
        }
        self.unblock(qp);
        false
    }

    /// An acknowledgement of its own. While the socket is full, one that waits already is brought up to date instead.
    fn frame_ack(&mut self, qp: &QpShared) {
        if self.frames.back().is_some_and(|frame| frame.role == Role::Ack && frame.sent == 0) {
            self.frames.pop_back();
            self.framed_bytes -= HEADER;
        }
        self.frame(qp, Header::new(Kind::Ack), Payload::None, Role::Ack);
    }

    /// Goes on where the socket was full.
    pub(super) fn resume(&mut self, qp: &QpShared) -> bool {
        std::mem::take(&mut self.blocked) && self.flush(qp, qp.owes_ack())
    }

    /// The socket is full. `true`: it must be tried once more, since it may have emptied before epoll was told to watch for
    /// that; and epoll reports no change to those who wait for an edge if the socket was on its list anyway.
    fn block(&mut self, qp: &QpShared) -> bool {
        self.blocked = true;
        if qp.writes_wait() {
            return false;
        }
        qp.want_writable(true);
        true
    }

    fn unblock(&mut self, qp: &QpShared) {
        self.blocked = false;
        if qp.writes_wait() {
            qp.want_writable(false);
        }
    }

    /// Asks the peer for a sign of life.
    pub(super) fn poke(&mut self, qp: &QpShared) {
        if !self.frames.iter().any(|frame| frame.role == Role::Poke) {
            let header = Header { flags: flag::SOLICIT, ..Header::new(Kind::Ack) };
            self.frame(qp, header, Payload::None, Role::Poke);
        }
        self.flush(qp, false);
    }

    /// Queues frames for one system call; whether there are any new ones.
    fn fill(&mut self, qp: &QpShared) -> bool {
        let mut any = false;
        while self.frames.len() < BATCH_FRAMES && self.framed_bytes < BATCH_BYTES {
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

    fn frame(&mut self, qp: &QpShared, mut header: Header, payload: Payload, role: Role) {
        if qp.owes_ack() {
            qp.ack_pending.store(false, Ordering::SeqCst);
        }
        (header.ack, header.limit) = qp.piggyback();
        if self.careful {
            header.flags |= flag::CAREFUL;
        }
        let len = header.length as usize;
        self.framed_bytes += HEADER + len;
        let header = header.encode();
        self.frames.push_back(Frame { header, payload, len, sent: 0, role, stale: false, zeroed: Cell::new(false) });
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
                let len = ((*total - *offset) as usize).min(FRAGMENT);
                header.total = *total;
                header.address = u64::from(*offset);
                header.length = len as u32;
                match key {
                    Some(key) if len > 0 => {
                        let payload = Payload::Granted(Arc::clone(key), *address + u64::from(*offset));
                        *offset += len as u32;
                        (payload, false)
                    }
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
        let (msn, offset) = (self.next, self.offset);
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
            WrOp::Send { imm } | WrOp::Write { imm, .. } => {
                let len = (total - offset).min(FRAGMENT);
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
                if let Some(imm) = imm {
                    header.flags |= flag::IMM;
                    header.imm = imm;
                }
                if len > 0 {
                    payload = Payload::Request(offset);
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

    /// One system call for all queued frames: how many bytes it took, and how many there were.
    fn write(&self, socket: BorrowedFd<'_>) -> io::Result<(usize, usize)> {
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
            allowed -= left as u64;
            if frame.sent < HEADER {
                gather.push_bytes(&frame.header[frame.sent..]);
            }
            match &frame.payload {
                Payload::None => {}
                Payload::Operands(bytes) => gather.push_bytes(&bytes[done..done + left]),
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
            }
            if left < frame.len - done {
                break;
            }
        }
        let offered = gather.len();
        let taken = gather.send(socket);
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

    fn consume(&mut self, mut taken: usize) {
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
            self.refuse_response(msn);
        }
    }

    /// The memory of a Read was revoked while it was being served.
    fn refuse_response(&mut self, msn: u64) {
        self.refusal = Some((msn, WcStatus::RemoteAccess));
        self.responses.clear();
        self.drop_frames(|role| matches!(role, Role::Response(_) | Role::Refusal));
    }

    /// What must still go out for the peer to understand the frames that follow: the rest of a frame that was begun.
    pub(super) fn rest_of_frame(&mut self, out: &mut Vec<u8>) {
        let Some(frame) = self.frames.front().filter(|frame| frame.sent > 0) else { return };
        let done = frame.sent.saturating_sub(HEADER);
        let left = frame.len - done;
        out.extend_from_slice(&frame.header[frame.sent.min(HEADER)..]);
        let end = out.len() + left;
        match &frame.payload {
            Payload::None => {}
            Payload::Operands(bytes) => out.extend_from_slice(&bytes[done..]),
            Payload::Request(offset) => {
                self.pieces(frame.role, offset + done, left).for_each(|piece| piece.append_to(out));
            }
            // Zeros do: the end of this response never comes, so nobody takes it for the data.
            Payload::Granted(..) => {}
        }
        out.resize(end, 0);
        self.frames.clear();
        self.framed_bytes = 0;
    }

    /// Lets go of everything that names memory of a user.
    pub(super) fn clear(&mut self) {
        self.frames.clear();
        self.framed_bytes = 0;
        self.responses.clear();
        self.starved = None;
        self.rnr_nak = None;
    }
}

pub(super) fn nak(msn: u64, status: WcStatus) -> Header {
    Header { msn: msn as u32, status: status.as_raw() as u16, ..Header::new(Kind::Nak) }
}

fn operands(header: &mut Header, first: u64, second: u64) -> Payload {
    header.length = ATOMIC_OPERANDS as u32;
    let mut bytes = [0; ATOMIC_OPERANDS];
    bytes[..8].copy_from_slice(&first.to_le_bytes());
    bytes[8..].copy_from_slice(&second.to_le_bytes());
    Payload::Operands(bytes)
}

fn push_zeros(gather: &mut Gather<'_>, mut len: usize) {
    while len > 0 {
        let piece = len.min(ZEROS.len());
        gather.push_bytes(&ZEROS[..piece]);
        len -= piece;
    }
}
