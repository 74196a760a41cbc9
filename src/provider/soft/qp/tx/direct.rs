//! Requests that need no peer to carry them out: one-sided ones on memory that it has lent through the link.
//!
//! Only at the front of the send queue, with nothing before them unfinished: so they are done in the order of the queue like all others.
//! They take no sequence number, since the peer does not count them.
//!
//! The CPU copies between memory of the host, and a device between its own and a device's. What belongs to both goes through the ring.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use smallvec::SmallVec;

use super::super::QpShared;
use super::super::carrier::{Carrier, TURN};
use super::super::queue::{SendEntry, span};
use super::Tx;
use crate::memory::Access;
use crate::memory::device::DeviceMemory;
use crate::memory::dma::{Gather, Scatter, Segment};
use crate::provider::{RemoteAddress, WorkCompletion, WrOp};

/// What is copied in one go: at some GB/s some tens of microseconds, which is also for how long one who revokes a key waits.
const CHUNK: usize = 256 << 10;

/// The outcome of one step.
enum Step {
    Done,
    /// So many bytes, and more to come.
    Partly(usize),
    /// It goes through the ring.
    Framed,
}

impl Tx {
    /// Carries out what can be, within `budget` bytes. `true`: it was used up, and there is more.
    #[inline]
    pub(super) fn carry_out(&mut self, qp: &QpShared, budget: &mut usize) -> bool {
        match &qp.wire {
            Some(wire) if wire.lends() && qp.ctx.faults.is_none() => self.carry_out_directly(qp, budget),
            _ => false,
        }
    }

    fn carry_out_directly(&mut self, qp: &QpShared, budget: &mut usize) -> bool {
        // Of all copies of devices together.
        let mut turn = None;
        // Nothing is under way: all before `base` are done, and nothing from there on was begun.
        while self.next == self.base && self.offset == 0 && self.refusal.is_none() {
            let Some(entry) = self.sq.get_mut(0) else { return false };
            if entry.poison.is_some() {
                return false;
            }
            if *budget == 0 {
                return true;
            }
            let step = match entry.device.clone() {
                None => step(qp, entry, (*budget).min(CHUNK)),
                Some(_) if turn.is_some_and(|turn: Instant| turn.elapsed() >= TURN) => return true,
                Some(device) => {
                    let turn = *turn.get_or_insert_with(Instant::now);
                    step_of_device(qp, entry, &device, &mut self.carrier, turn)
                }
            };
            match step {
                Step::Framed => {
                    entry.received = 0;
                    return false;
                }
                Step::Partly(len) => {
                    *budget = budget.saturating_sub(len);
                    qp.drained.add(len);
                }
                Step::Done => {
                    let left = entry.length as usize - entry.received as usize;
                    *budget = budget.saturating_sub(left);
                    qp.drained.add(left);
                    if entry.signaled {
                        let (wr_id, byte_len) = (entry.wr_id, entry.length);
                        qp.complete(WorkCompletion { wr_id, byte_len, ..WorkCompletion::default() });
                        qp.cq.posted();
                    }
                    qp.direct.fetch_add(1, Ordering::Relaxed);
                    self.sq.pop();
                    if self.front_poison().is_some() {
                        qp.doomed.store(true, Ordering::SeqCst);
                        return false;
                    }
                }
            }
        }
        false
    }
}

fn step(qp: &QpShared, entry: &mut SendEntry, most: usize) -> Step {
    let Some(wire) = &qp.wire else { return Step::Framed };
    let length = entry.length as usize;
    let done = entry.received as usize;
    let len = (length - done).min(most);
    let Some((remote, needed)) = wanted(entry) else { return Step::Framed };
    let copied = wire.within((remote.rkey, needed), (remote.address, length), |memory| {
        let place = [memory.slice(done, len)?, memory.slice(0, 0)?];
        Some(match entry.op {
            WrOp::Write { .. } => {
                let mut gather = Gather::new();
                span(&entry.sges, done, len).for_each(|piece| gather.push(piece));
                gather.copy_to(place)
            }
            WrOp::Read { .. } => {
                let mut scatter = Scatter::new();
                span(&entry.sges, done, len).for_each(|piece| scatter.push(piece));
                scatter.copy_from(place)
            }
            WrOp::CompareSwap { compare, swap, .. } => keep(entry, memory.compare_swap(0, compare, swap)?),
            WrOp::FetchAdd { add, .. } => keep(entry, memory.fetch_add(0, add)?),
            WrOp::Send { .. } => return None,
        })
    });
    match copied.flatten() {
        None => Step::Framed,
        Some(copied) if done + copied >= length => Step::Done,
        Some(copied) => {
            entry.received += copied as u32;
            Step::Partly(copied)
        }
    }
}

/// A device copies: as much as there is time for, and waits for that. It sees what it wrote before this returns, and so does the
/// peer's whose memory it is.
fn step_of_device(
    qp: &QpShared,
    entry: &mut SendEntry,
    device: &Arc<dyn DeviceMemory>,
    carrier: &mut Carrier,
    turn: Instant,
) -> Step {
    let Some(wire) = &qp.wire else { return Step::Framed };
    let (length, done) = (entry.length as usize, entry.received as usize);
    let wanted = wanted(entry).filter(|(_, needed)| *needed != Access::REMOTE_ATOMIC);
    let Some((remote, needed)) = wanted else { return Step::Framed };
    let copied = wire.within_device(device, (remote.rkey, needed), (remote.address, length), |memory| {
        let theirs = [memory.slice(done, length - done)?];
        let ours: SmallVec<[Segment; 4]> = span(&entry.sges, done, length - done).collect();
        let (from, to) =
            if needed == Access::REMOTE_WRITE { (&ours[..], &theirs[..]) } else { (&theirs[..], &ours[..]) };
        // What is mapped for a device is as its own.
        let transfer = || device.transfer(&**device);
        let (copied, outcome) = carrier.copy(transfer().ok()??, transfer, (from, to), turn);
        // One that fails does so again in the frames, and is told there.
        outcome.ok().map(|()| copied)
    });
    match copied.flatten() {
        None => Step::Framed,
        Some(copied) => {
            qp.carried.add(copied);
            if done + copied >= length {
                return Step::Done;
            }
            entry.received += copied as u32;
            Step::Partly(copied)
        }
    }
}

/// Which memory of the peer's a request wants, and for what; `None` if it is none that can be carried out here.
fn wanted(entry: &SendEntry) -> Option<(RemoteAddress, Access)> {
    match entry.op {
        WrOp::Write { remote, imm: None } if entry.length > 0 => Some((remote, Access::REMOTE_WRITE)),
        WrOp::Read { remote } if entry.length > 0 => Some((remote, Access::REMOTE_READ)),
        WrOp::CompareSwap { remote, .. } | WrOp::FetchAdd { remote, .. } => Some((remote, Access::REMOTE_ATOMIC)),
        _ => None,
    }
}

/// The old value, to where the request wants it.
fn keep(entry: &SendEntry, old: u64) -> usize {
    let mut bytes = &old.to_ne_bytes()[..];
    for piece in span(&entry.sges, 0, bytes.len()) {
        let (now, later) = bytes.split_at(Segment::len(&piece));
        piece.copy_from(now);
        bytes = later;
    }
    size_of::<u64>()
}
