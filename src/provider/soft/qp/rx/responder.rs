//! What a frame asks for: the responder carries out the peer's requests, the requester takes in its answers.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::super::super::keys::Key;
use super::super::super::wire::{Header, Kind, extend, flag, nak_status};
use super::super::QpShared;
use super::super::queue::{SendEntry, span};
use super::super::tx::{Body, Response, Tx};
use super::landing::Failed;
use super::{BULK, Message, Rx, Stop, Target, copy};
use crate::error::WcStatus;
use crate::memory::Access;
use crate::memory::device::DeviceMemory;
use crate::memory::dma::Segment;
use crate::provider::{Opcode, WorkCompletion, WrOp};

impl Rx {
    /// A header was read: decides where its payload goes.
    pub(super) fn begin(&mut self, qp: &QpShared, header: Header) -> Result<(), Stop> {
        if self.device.is_some() && !self.goes_on(&header) {
            self.land(qp)?;
        }
        self.frame = Some(header);
        self.remaining = header.behind();
        self.offset = header.offset() as usize;
        self.bulk = self.remaining >= BULK;
        self.target = Target::Discard;
        if self.device.is_some() {
            self.device = None;
        }
        if self.ending {
            return Ok(());
        }
        self.read = None;
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
                (self.device, self.read) = (entry.device.clone(), Some(header.msn));
                self.target = Target::Read;
            }
            _ => {}
        }
        if header.has(flag::NEAR) {
            self.named = Some((std::mem::replace(&mut self.target, Target::Operands), self.device.take()));
            self.offset = 0;
        }
        Ok(())
    }

    /// Whether this frame's payload follows, in the same message, that of the frame before, and fits in behind it.
    fn goes_on(&self, header: &Header) -> bool {
        let same = match self.target {
            Target::Receive | Target::Granted => {
                self.message.as_ref().is_some_and(|message| message.kind == header.kind && !header.has(flag::FIRST))
            }
            Target::Read => header.kind == Kind::ReadResponse && self.read == Some(header.msn),
            Target::Discard | Target::Operands => false,
        };
        same && !header.has(flag::NEAR)
            && header.offset() == self.offset as u64
            && header.length as usize <= self.landing.space()
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
        let device = match self.target {
            Target::Receive => self.receive.device.as_ref(),
            Target::Granted => self.key.as_ref().and_then(|key| key.device().as_ref()),
            _ => None,
        };
        if device.is_some() {
            self.device = device.cloned();
        }
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
                let (pd, length) = (qp.peers_domain(), u64::from(header.total));
                self.key = qp.ctx.keys.find_remote(header.key, pd, header.address, length, Access::REMOTE_WRITE);
                if self.key.is_none() {
                    self.refuse(WcStatus::RemoteAccess);
                    return Ok(false);
                }
                self.key.iter().for_each(|key| qp.lend(key));
            }
        }
        if header.kind == Kind::Send || imm.is_some() {
            // Before looking for a receive: whoever posts one later then tells the peer.
            let careful = header.has(flag::CAREFUL);
            if qp.peer_careful.load(Ordering::SeqCst) != careful {
                qp.peer_careful.store(careful, Ordering::SeqCst);
            }
            let pretend = qp.ctx.faults.as_ref().is_some_and(|faults| faults.pretends_rnr());
            if pretend || !qp.take_receive(&mut self.receive) {
                qp.peer_careful.store(true, Ordering::SeqCst);
                qp.await_receive();
                qp.rnr_naks_sent.fetch_add(1, Ordering::Relaxed);
                (self.starving, self.rnr_nak) = (true, true);
                return Ok(false);
            }
            self.holds_receive = true;
            if careful {
                qp.await_receive();
            }
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
    pub(super) fn finish(&mut self, qp: &QpShared, header: &Header) -> Result<(), Stop> {
        if self.ending && !matches!(header.kind, Kind::Nak | Kind::Bye) {
            return Ok(());
        }
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
                self.landed(qp)?;
                self.message = None;
                self.key = None;
                self.request_done(qp, !header.has(flag::PATIENT));
                if self.holds_receive {
                    let opcode = if header.kind == Kind::Send { Opcode::Receive } else { Opcode::ReceiveWriteImm };
                    self.complete_receive(qp, WcStatus::Success, opcode, total, imm);
                }
                Ok(())
            }
            Kind::ReadRequest => self.read_request(qp, header),
            Kind::CompareSwap | Kind::FetchAdd => self.atomic_request(qp, header),
            Kind::ReadResponse if header.has(flag::LAST) => {
                self.landed(qp)?;
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
                    qp.owe_ack(true);
                }
                Ok(())
            }
            Kind::Nak => Err(Stop::Refused(header.msn, nak_status(header.status))),
            Kind::RnrNak => {
                self.take_news(qp)?;
                let mut tx = qp.tx.lock();
                let msn = extend(tx.acked, header.msn);
                qp.rnr_naks_received.fetch_add(1, Ordering::Relaxed);
                tx.rewind(qp, msn, Duration::from_micros(u64::from(header.total)))?;
                // Frames that carried an acknowledgement may be gone.
                qp.owe_ack(true);
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
            let (pd, length) = (qp.peers_domain(), u64::from(header.total));
            key = qp.ctx.keys.find_remote(header.key, pd, header.address, length, Access::REMOTE_READ);
            if key.is_none() {
                self.refuse(WcStatus::RemoteAccess);
                return Ok(());
            }
        }
        key.iter().for_each(|key| qp.lend(key));
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
        let key = qp.ctx.keys.find_remote(header.key, qp.peers_domain(), header.address, 8, Access::REMOTE_ATOMIC);
        key.iter().for_each(|key| qp.lend(key));
        let [first, second] = [0, 8].map(|at| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&self.operands[at..at + 8]);
            u64::from_le_bytes(raw)
        });
        let change = |memory: Segment, offset| match header.kind {
            Kind::CompareSwap => memory.compare_swap(offset, first, second),
            _ => memory.fetch_add(offset, first),
        };
        let old = match key.as_ref().map(|key| (key, key.device())) {
            Some((key, Some(device))) => device_atomic(qp, key, device, header.address, change)
                .map_err(|error| self.lost(qp, Failed { error, read: None }))?,
            Some((key, None)) => key.pin().and_then(|_pin| {
                let (memory, offset) = key.place(header.address)?;
                change(memory, offset)
            }),
            None => None,
        };
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
        self.request_done(qp, true);
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
        let old = header.address.to_ne_bytes();
        if let Some(device) = &entry.device {
            let landing = &mut self.landing;
            let landed = landing.prepare(device, Some(header.msn)).and_then(|()| {
                landing.put(&old);
                landing.store(span(&entry.sges, 0, old.len()), None)?;
                landing.wait()
            });
            landed.map_err(|failed| self.lost(qp, failed))?;
        } else {
            copy(&entry.sges, 0, &old);
        }
        entry.answered = true;
        tx.reads_in_flight = tx.reads_in_flight.saturating_sub(1);
        qp.retire(&mut tx);
        Ok(())
    }

    fn request_done(&mut self, qp: &QpShared, awaited: bool) {
        self.expected += 1;
        qp.done.store(self.expected, Ordering::Release);
        qp.owe_ack(awaited);
        self.unacked_messages += 1;
    }

    pub(super) fn complete_receive(
        &mut self,
        qp: &QpShared,
        status: WcStatus,
        opcode: Opcode,
        byte_len: u32,
        imm: Option<u32>,
    ) {
        self.holds_receive = false;
        self.receive.device = None;
        qp.complete(WorkCompletion { wr_id: self.receive.wr_id, status, opcode, byte_len, imm, ..Default::default() });
    }

    /// The expected request cannot be carried out: a NAK ends the queue pair.
    fn refuse(&mut self, status: WcStatus) {
        self.refused.get_or_insert((self.expected, status));
    }

    /// The same in the middle of a message; the rest of it is thrown away.
    pub(super) fn refuse_message(&mut self, status: WcStatus) {
        self.refuse(status);
        self.target = Target::Discard;
        self.device = None;
        self.landing.discard();
        if let Some(message) = &mut self.message {
            message.refused = true;
        }
        self.key = None;
    }
}

/// The Read that a response belongs to; the fragment must be the next one of it.
fn read_entry<'a>(tx: &'a mut Tx, header: &Header) -> Result<&'a mut SendEntry, Stop> {
    let msn = extend(tx.acked, header.msn);
    let known = msn < tx.sent;
    let entry = tx.entry(msn).filter(|entry| known && !entry.answered && matches!(entry.op, WrOp::Read { .. }));
    let fits = |e: &SendEntry| e.length == header.total && u64::from(e.received) == header.offset();
    entry.filter(|entry| fits(entry)).ok_or(Stop::Protocol("an answer to no read"))
}

/// An atomic on a device's memory, through a bounce of its own. One at a time per NIC: they are atomic among its peers,
/// not with what the device does itself.
fn device_atomic(
    qp: &QpShared,
    key: &Arc<Key>,
    device: &Arc<dyn DeviceMemory>,
    address: u64,
    change: impl FnOnce(Segment, usize) -> Option<u64>,
) -> io::Result<Option<u64>> {
    let Some(_hold) = key.hold() else { return Ok(None) };
    let _turn = qp.ctx.device_atomics.lock();
    let mut bounce = device.bounce()?;
    bounce.fetch(address, 0, 8)?;
    bounce.wait()?;
    let word = bounce.segment();
    let old = change(word, 0);
    // What a comparison left alone is not written: the device may have changed it by now.
    if old != word.fetch_add(0, 0) {
        bounce.store(0, address, 8)?;
        bounce.wait()?;
    }
    Ok(old)
}
