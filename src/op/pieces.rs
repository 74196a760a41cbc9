//! Reads and writes that are longer than one message: cut into pieces, posted together, awaited as one.
//!
//! The pieces go into the queue one behind the other, with nothing in between, so that the order of operations is what it
//! would be with one long message. All but the last are silent and own nothing; the last one owns the buffer, and the device
//! is done with the whole of it when the last one completes.

use std::sync::Arc;

use crate::completion::pair::{BatchMember, QueuePair};
use crate::completion::table::{Key, Outcome, Refused, Signal};
use crate::error::WcStatus;
use crate::memory::AnyBuffer;
use crate::op::core::Verb;
use crate::provider::{SgeList, WrOp};

/// How many messages an operation takes.
pub(crate) fn count(length: u64, max_message: u64) -> u64 {
    length.div_ceil(max_message.max(1)).max(1)
}

/// The pieces before the last. For nearly every operation there are none, so they take little room.
#[derive(Debug, Default)]
#[allow(clippy::box_collection)]
pub(crate) struct Earlier(Option<Box<Vec<Key>>>);

impl Earlier {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Forgets them. They own nothing, so this is all that there is to it.
    pub(crate) fn abandon(&mut self, pair: &QueuePair) {
        for key in self.0.take().into_iter().flat_map(|keys| *keys) {
            drop(pair.send.abandon(key));
        }
    }

    /// Called when the last piece has ended: what failed first, if that was an earlier piece.
    pub(crate) fn first_failure(&mut self, pair: &QueuePair) -> Option<Outcome> {
        let mut failure = None;
        for key in self.0.take().into_iter().flat_map(|keys| *keys) {
            match pair.send.poll_done(key, None) {
                std::task::Poll::Ready(Some((_, outcome))) => {
                    let says = match &outcome {
                        Outcome::Completed(done) => !matches!(done.status, WcStatus::Success | WcStatus::Flushed),
                        _ => false,
                    };
                    if says {
                        failure.get_or_insert(outcome);
                    }
                }
                std::task::Poll::Ready(None) => {}
                std::task::Poll::Pending => drop(pair.send.abandon(key)),
            }
        }
        failure
    }
}

/// Parks an operation of `count` pieces in the table and appends them to `members`, for a post of all of them together.
///
/// Gives the buffer back when the table takes no more.
pub(crate) fn park(
    pair: &Arc<QueuePair>,
    verb: &Verb,
    op: WrOp,
    buffer: AnyBuffer,
    signal: Signal,
    members: &mut Vec<BatchMember>,
) -> Result<(Key, Earlier), (AnyBuffer, Refused)> {
    let length = buffer.len() as u64;
    let count = count(length, pair.max_message);
    let mut sges = SgeList::new();
    buffer.push_sges(&mut sges);
    let inline = verb.inline(&buffer, length, pair);
    if count == 1 {
        let key = pair.send.park(buffer)?;
        members.push(BatchMember { key, op, sges, signal, inline, goes_on: false, dropped: false });
        return Ok((key, Earlier::default()));
    }
    let start = members.len();
    let mut earlier = Earlier::default();
    let mut offset = 0;
    for _ in 1..count {
        let key = match pair.send.park(AnyBuffer::None) {
            Ok(key) => key,
            Err((_, refused)) => return Err((undo(pair, members, start, earlier, buffer), refused)),
        };
        earlier.0.get_or_insert_default().push(key);
        let (op, sges) = (at(op, offset), cut(&sges, offset, pair.max_message));
        members.push(BatchMember {
            key,
            op,
            sges,
            signal: Signal::Silent,
            inline: false,
            goes_on: true,
            dropped: false,
        });
        offset += pair.max_message;
    }
    match pair.send.park(buffer) {
        Ok(key) => {
            let (op, sges) = (at(op, offset), cut(&sges, offset, length - offset));
            members.push(BatchMember { key, op, sges, signal, inline: false, goes_on: false, dropped: false });
            Ok((key, earlier))
        }
        Err((buffer, refused)) => Err((undo(pair, members, start, earlier, buffer), refused)),
    }
}

fn undo(
    pair: &QueuePair,
    members: &mut Vec<BatchMember>,
    start: usize,
    mut earlier: Earlier,
    buffer: AnyBuffer,
) -> AnyBuffer {
    members.truncate(start);
    earlier.abandon(pair);
    buffer
}

/// The same operation, so many bytes further on in the peer's memory.
fn at(op: WrOp, offset: u64) -> WrOp {
    match op {
        WrOp::Read { mut remote } => {
            remote.address = remote.address.wrapping_add(offset);
            WrOp::Read { remote }
        }
        WrOp::Write { mut remote, imm } => {
            remote.address = remote.address.wrapping_add(offset);
            WrOp::Write { remote, imm }
        }
        // Nothing else is cut.
        other => other,
    }
}

/// The entries of `length` bytes from `offset` on.
fn cut(sges: &SgeList, mut offset: u64, mut length: u64) -> SgeList {
    let mut part = SgeList::new();
    for sge in sges {
        let len = sge.segment.len() as u64;
        if offset >= len {
            offset -= len;
            continue;
        }
        let take = length.min(len - offset);
        if take == 0 {
            break;
        }
        // Both lie within the segment, whose length is a `usize`.
        if let Some(segment) = sge.segment.slice(offset as usize, take as usize) {
            part.push(crate::provider::Sge { segment, lkey: sge.lkey });
        }
        (offset, length) = (0, length - take);
    }
    part
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::dma::Segment;
    use crate::provider::Sge;

    #[test]
    fn an_operation_takes_as_many_messages_as_it_needs() {
        for (length, messages) in [(0, 1), (1, 1), (10, 1), (11, 2), (20, 2), (21, 3), (u64::MAX, u64::MAX / 10 + 1)] {
            assert_eq!(count(length, 10), messages, "{length}");
        }
        assert_eq!(count(3, 0), 3);
    }

    #[test]
    fn parts_of_a_list_cover_it_without_gaps() {
        let sge = |at: usize, len: usize| Sge {
            segment: Segment::new(std::ptr::without_provenance_mut(at), len),
            lkey: at as u32,
        };
        let list = SgeList::from_iter([sge(1000, 5), sge(2000, 1), sge(3000, 10)]);
        let shown = |offset, length| -> Vec<_> {
            let part = cut(&list, offset, length);
            part.iter().map(|it| (it.segment.address(), it.segment.len(), it.lkey)).collect()
        };
        assert_eq!(shown(0, 4), [(1000, 4, 1000)]);
        assert_eq!(shown(4, 4), [(1004, 1, 1000), (2000, 1, 2000), (3000, 2, 3000)]);
        assert_eq!(shown(8, 4), [(3002, 4, 3000)]);
        assert_eq!(shown(12, 4), [(3006, 4, 3000)]);
        assert_eq!(shown(5, 1), [(2000, 1, 2000)]);
        assert_eq!(shown(16, 4), []);
    }
}
