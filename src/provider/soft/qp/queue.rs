//! Work queues: rings that never allocate once they exist, and whose entries keep their scatter/gather capacity.

use super::super::keys::Device;
use crate::error::WcStatus;
use crate::memory::dma::Segment;
use crate::provider::{Sge, SgeList, WrOp};

/// A first-in first-out ring of reused entries.
pub(in super::super) struct Ring<T> {
    slots: Box<[T]>,
    head: usize,
    len: usize,
}

impl<T: Default> Ring<T> {
    pub(in super::super) fn new(depth: usize) -> Self {
        Self { slots: (0..depth).map(|_| T::default()).collect(), head: 0, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_full(&self) -> bool {
        self.len == self.slots.len()
    }

    fn slot(&self, index: usize) -> usize {
        let at = self.head + index;
        if at >= self.slots.len() { at - self.slots.len() } else { at }
    }

    /// The next free entry, still with the values of its last use; `None` when full.
    pub(in super::super) fn push(&mut self) -> Option<&mut T> {
        if self.is_full() {
            return None;
        }
        let slot = self.slot(self.len);
        self.len += 1;
        Some(&mut self.slots[slot])
    }

    /// The same in front of the oldest.
    pub(in super::super) fn push_front(&mut self) -> Option<&mut T> {
        if self.is_full() {
            return None;
        }
        self.head = self.head.checked_sub(1).unwrap_or(self.slots.len() - 1);
        self.len += 1;
        Some(&mut self.slots[self.head])
    }

    pub(super) fn get(&self, index: usize) -> Option<&T> {
        (index < self.len).then(|| &self.slots[self.slot(index)])
    }

    pub(in super::super) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        if index >= self.len {
            return None;
        }
        let slot = self.slot(index);
        Some(&mut self.slots[slot])
    }

    /// Takes the oldest entry out; its values stay readable until it is reused.
    pub(in super::super) fn pop(&mut self) -> Option<&mut T> {
        if self.len == 0 {
            return None;
        }
        let slot = self.head;
        self.head = self.slot(1);
        self.len -= 1;
        Some(&mut self.slots[slot])
    }
}

/// A posted request, until its completion.
pub(super) struct SendEntry {
    pub wr_id: u64,
    pub op: WrOp,
    pub sges: SgeList,
    /// Whose memory the list names; all of it belongs to one.
    pub device: Device,
    pub length: u32,
    pub signaled: bool,
    /// The status it must end with. It is not sent, or not again; nothing behind it is.
    pub poison: Option<WcStatus>,
    /// Reads and atomics: the response is here.
    pub answered: bool,
    /// Reads: bytes placed so far.
    pub received: u32,
    /// Which of the peer's receives it uses up, counted from the first.
    pub receive: Option<u64>,
}

impl Default for SendEntry {
    fn default() -> Self {
        Self {
            wr_id: 0,
            op: WrOp::Send { imm: None, patience: 0 },
            sges: SgeList::new(),
            device: None,
            length: 0,
            signaled: false,
            poison: None,
            answered: false,
            received: 0,
            receive: None,
        }
    }
}

impl SendEntry {
    /// Whether the peer answers with data.
    pub(super) fn wants_answer(&self) -> bool {
        matches!(self.op, WrOp::Read { .. } | WrOp::CompareSwap { .. } | WrOp::FetchAdd { .. })
    }
}

/// A posted receive.
#[derive(Default)]
pub(in super::super) struct ReceiveEntry {
    pub wr_id: u64,
    pub sges: SgeList,
    pub device: Device,
    pub capacity: u64,
    pub poison: Option<WcStatus>,
}

/// With a shared receive queue, what that has set aside for this queue pair: one at most.
pub(super) struct ReceiveQueue {
    pub ring: Ring<ReceiveEntry>,
    pub closed: bool,
}

impl ReceiveQueue {
    /// Moves the oldest receive into `entry`; the two swap their lists, so that neither allocates.
    ///
    /// One that is not covered by its keys is nobody's: the queue pair ends for its sake at any moment.
    pub(super) fn take(&mut self, entry: &mut ReceiveEntry) -> bool {
        if self.ring.get(0).is_none_or(|oldest| oldest.poison.is_some()) {
            return false;
        }
        self.ring.pop().map(|oldest| std::mem::swap(entry, oldest)).is_some()
    }
}

pub(in super::super) fn total(sges: &[Sge]) -> u64 {
    sges.iter().map(|s| s.segment.len() as u64).fold(0, u64::saturating_add)
}

/// The pieces of memory behind bytes `offset..offset + len` of a scatter/gather list.
pub(super) fn span(sges: &[Sge], offset: usize, len: usize) -> impl Iterator<Item = Segment> + '_ {
    let (mut skip, mut left) = (offset, len);
    sges.iter().filter_map(move |sge| {
        let size = sge.segment.len();
        if skip >= size || left == 0 {
            skip -= skip.min(size);
            return None;
        }
        let take = left.min(size - skip);
        let piece = sge.segment.slice(skip, take);
        (skip, left) = (0, left - take);
        piece
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_cross_entries() {
        let mut memory = [0u8; 30];
        let base = memory.as_mut_ptr();
        let sge = |at: usize, len: usize| Sge { segment: Segment::new(base.wrapping_add(at), len), lkey: 0 };
        let list = [sge(0, 10), sge(10, 0), sge(20, 5), sge(10, 10)];
        let pieces =
            |offset, len| span(&list, offset, len).map(|s| (s.address() - base as u64, s.len())).collect::<Vec<_>>();
        assert_eq!(total(&list), 25);
        assert_eq!(pieces(0, 25), [(0, 10), (20, 5), (10, 10)]);
        assert_eq!(pieces(9, 3), [(9, 1), (20, 2)]);
        assert_eq!(pieces(15, 4), [(10, 4)]);
        assert_eq!(pieces(3, 0), []);
        assert_eq!(pieces(24, 9), [(19, 1)]);
    }

    #[test]
    fn a_receive_without_its_keys_is_not_used() {
        let mut rq = ReceiveQueue { ring: Ring::new(2), closed: false };
        let mut taken = ReceiveEntry::default();
        assert!(!rq.take(&mut taken));
        rq.ring.push().unwrap().wr_id = 1;
        *rq.ring.push().unwrap() = ReceiveEntry { wr_id: 2, poison: Some(WcStatus::LocalProtection), ..taken };
        let mut taken = ReceiveEntry::default();
        assert!(rq.take(&mut taken) && taken.wr_id == 1);
        assert!(!rq.take(&mut taken) && taken.wr_id == 1 && rq.ring.len() == 1);
    }

    #[test]
    fn rings_wrap() {
        let mut ring = Ring::<u32>::new(3);
        for round in 0..10 {
            *ring.push().unwrap() = round;
            *ring.push().unwrap() = round + 100;
            assert_eq!(ring.get(1), Some(&(round + 100)));
            assert_eq!(ring.pop().map(|v| *v), Some(round));
            assert_eq!(ring.pop().map(|v| *v), Some(round + 100));
            assert!(ring.pop().is_none());
        }
        for round in 0..10 {
            *ring.push().unwrap() = round;
            *ring.push_front().unwrap() = round + 100;
            *ring.push_front().unwrap() = round + 200;
            assert!(ring.push_front().is_none() && ring.push().is_none());
            assert_eq!([(); 3].map(|()| ring.pop().map(|v| *v)), [200, 100, 0].map(|v| Some(round + v)));
        }
        let mut none = Ring::<u32>::new(0);
        assert!(none.push().is_none() && none.push_front().is_none() && none.pop().is_none() && none.get(0).is_none());
    }
}
