//! The sending half: the send queue, the responses owed to the peer, and what goes to the socket next.

mod direct;
mod framing;
mod lifting;
mod writing;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub(super) use self::framing::nak;
use self::framing::{BATCH_FRAMES, Frame, Payload, Role};
use self::lifting::Lifts;
use super::super::keys::Key;
use super::super::wire::{HEADER, Header, Kind, extend, flag};
use super::QpShared;
use super::carrier::Carrier;
use super::queue::{Ring, SendEntry};
use crate::error::WcStatus;

/// What one call may write before its thread is wanted elsewhere: a fast reader must not keep a poster here for good.
/// Not more, since filling a TCP socket to the brim (megabytes) drives the data out of the cache before it is read:
/// pipelined 1 MiB writes over loopback within one thread reach 6 GB/s with 512 KiB, 2 GB/s with 1 or 2 MiB.
const FLUSH_BYTES: usize = 512 << 10;

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
    /// Payload of frames that comes out of a device's memory.
    lifts: Lifts,
    /// What a device copies by itself from and to the peer's memory.
    carrier: Carrier,
    /// A device failed: nothing is framed or written any more, and the queue pair is doomed.
    failed: bool,
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
            lifts: Lifts::default(),
            carrier: Carrier::default(),
            failed: false,
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
    pub(super) fn rewind(&mut self, qp: &QpShared, msn: u64, timer: Duration) -> Result<(), &'static str> {
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
        // A receive may have been posted between the NAK and its way here.
        self.careful = self.receives_wanted > self.peer_limit;
        self.peer_rnr_timer = timer;
        let since = self.starved.filter(|s| s.msn == msn).map_or_else(Instant::now, |s| s.since);
        self.starved = Some(Starved { msn, since, blocked: false });
        self.reads_in_flight =
            (self.base..msn).filter(|m| self.entry(*m).is_some_and(|e| e.wants_answer() && !e.answered)).count() as u32;
        self.drop_frames(qp, |role| matches!(role, Role::Request { msn: m, .. } if m >= msn));
        Ok(())
    }

    /// Forgets frames that were not begun; one that was must be finished.
    fn drop_frames(&mut self, qp: &QpShared, unwanted: impl Fn(Role) -> bool) {
        let lifts = &mut self.lifts;
        self.frames.retain_mut(|frame| {
            if !unwanted(frame.role) {
                return true;
            }
            frame.stale = true;
            if frame.sent == 0 {
                frame.withdraw(qp, lifts);
            }
            frame.sent > 0
        });
        self.framed_bytes = self.frames.iter().map(|f| HEADER + f.len - f.sent).sum();
    }

    /// Frames what can be sent and writes until the socket is full or enough was written; in the latter case the result is
    /// `true`, and somebody must go on. `ack`: send an acknowledgement even if nothing else goes out.
    ///
    /// A full socket is left alone until epoll says that it takes bytes again: trying earlier fills each gap as it opens,
    /// with many small pieces where one large one would do.
    ///
    /// Where payload comes out of a device's memory, the thread also waits for copies: in front of each write for those into
    /// one bounce at most, which began while the write before was under way, and at the end for what was fetched for peers.
    pub(super) fn flush(&mut self, qp: &QpShared, ack: bool) -> bool {
        let more = self.write_on(qp, ack);
        if !self.lifts.is_empty() {
            if let Err((slot, error)) = self.lifts.let_go() {
                self.lose(qp, slot, &error);
            }
        }
        more
    }

    fn write_on(&mut self, qp: &QpShared, mut ack: bool) -> bool {
        if self.blocked {
            if ack {
                qp.owe_ack(true);
            }
            return false;
        }
        let mut budget = FLUSH_BYTES;
        while self.broken.is_none() && self.refusal_sent.is_none() && !self.failed {
            if self.carry_out(qp, &mut budget) {
                self.block(qp);
                qp.cq.notify();
                return true;
            }
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
            if self.failed || !(self.lifts.is_empty() || self.await_payload(qp)) {
                break;
            }
            match self.write(qp) {
                Ok((taken, offered)) => {
                    budget = budget.saturating_sub(taken);
                    qp.sent.add(taken);
                    if qp.writes_wait() {
                        qp.drained.add(taken);
                    }
                    self.consume(qp, taken);
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

    /// Goes on where the socket was full.
    pub(super) fn resume(&mut self, qp: &QpShared) -> bool {
        std::mem::take(&mut self.blocked) && self.flush(qp, qp.owes_ack())
    }

    /// The socket is full. `true`: it must be tried once more, since it may have emptied before epoll was told to watch for
    /// that; and epoll reports no change to those who wait for an edge if the socket was on its list anyway.
    fn block(&mut self, qp: &QpShared) -> bool {
        self.blocked = true;
        if qp.wire.is_some() {
            qp.cq.watch(qp);
        }
        if qp.writes_wait() {
            return qp.await_room();
        }
        qp.want_writable(true);
        qp.wire.is_none() || qp.await_room()
    }

    fn unblock(&mut self, qp: &QpShared) {
        self.blocked = false;
        if qp.writes_wait() {
            qp.want_writable(false);
        }
    }

    /// Whether a [`flush`](Self::flush) might find something to frame or to write.
    pub(super) fn has_work(&self) -> bool {
        !self.frames.is_empty()
            || !self.responses.is_empty()
            || self.rnr_nak.is_some()
            || self.refusal.is_some()
            || self.next < self.base + self.sq.len() as u64
            || !self.lifts.is_empty()
    }

    /// Asks the peer for a sign of life.
    pub(super) fn poke(&mut self, qp: &QpShared) {
        if !self.frames.iter().any(|frame| frame.role == Role::Poke) {
            let header = Header { flags: flag::SOLICIT, ..Header::new(Kind::Ack) };
            self.frame(qp, header, Payload::None, Role::Poke);
        }
        self.flush(qp, false);
    }
}
