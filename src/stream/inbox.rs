//! What has arrived and is not read yet.

use std::collections::VecDeque;

use tokio::io::ReadBuf;

use crate::memory::Buffer;

/// Bytes in the order of the stream: first those that were moved out of their slots, then messages in theirs.
#[derive(Debug)]
pub(super) struct Inbox {
    spilled: VecDeque<u8>,
    frames: VecDeque<Frame>,
    len: usize,
    /// Most bytes in `spilled`.
    limit: usize,
}

#[derive(Debug)]
struct Frame {
    buffer: Buffer,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(super) fn new(slots: usize, limit: usize) -> Self {
        Self { spilled: VecDeque::new(), frames: VecDeque::with_capacity(slots), len: 0, limit }
    }

    /// Unread bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds a message that fills the first `len` bytes of `buffer`. Not an empty one.
    pub(super) fn push(&mut self, buffer: Buffer, len: usize) {
        let end = len.min(buffer.len());
        self.len += end;
        self.frames.push_back(Frame { buffer, start: 0, end });
    }

    /// Reads what fits into `out`. Returns slots that have become free, one a call: again until it is `None`.
    pub(super) fn read(&mut self, out: &mut ReadBuf<'_>) -> Option<Buffer> {
        while !self.spilled.is_empty() && out.remaining() > 0 {
            let (first, _) = self.spilled.as_slices();
            let count = first.len().min(out.remaining());
            out.put_slice(&first[..count]);
            self.spilled.drain(..count);
            self.len -= count;
        }
        if self.spilled.is_empty() && self.spilled.capacity() > 0 {
            // A stream whose reader has caught up holds no more than its slots.
            self.spilled = VecDeque::new();
        }
        if out.remaining() == 0 {
            return None;
        }
        let frame = self.frames.front_mut()?;
        let count = (frame.end - frame.start).min(out.remaining());
        out.put_slice(frame.buffer.get(frame.start..frame.start + count)?);
        frame.start += count;
        self.len -= count;
        if frame.start < frame.end {
            return None;
        }
        self.frames.pop_front().map(|frame| frame.buffer)
    }

    /// Whether the oldest message in a slot, or the next one, could be moved out of it.
    pub(super) fn can_spill(&self) -> bool {
        let len = self.frames.front().map_or(1, |frame| frame.end - frame.start);
        self.spilled.len() + len <= self.limit
    }

    /// Moves the oldest message out of its slot, and returns that.
    pub(super) fn spill(&mut self) -> Option<Buffer> {
        if !self.can_spill() {
            return None;
        }
        let Frame { buffer, start, end } = self.frames.pop_front()?;
        self.spilled.extend(buffer.get(start..end).unwrap_or_default());
        Some(buffer)
    }

    /// Forgets everything.
    pub(super) fn discard(&mut self) {
        self.spilled = VecDeque::new();
        self.frames.clear();
        self.len = 0;
    }
}
