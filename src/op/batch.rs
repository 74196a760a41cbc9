//! Several operations with one doorbell.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use crate::completion::pair::{BatchMember, QueuePair};
use crate::completion::table::{Effects, Outcome, Signal, Ticket};
use crate::error::{Error, Result};
use crate::memory::{AnyBuffer, Operand, RemoteRegion, SourceBuffer, TargetBuffer};
use crate::op::core::{Op, Verb};
use crate::op::pieces;
use crate::op::{CompareSwapOp, FetchAddOp, ReadOp, SendOp, WriteOp};

/// Collects operations and posts them together, in order, with one doorbell.
///
/// Each method takes its buffer and returns the member's future at once; the futures get going when the batch is posted,
/// and can be awaited in any order. A member that is refused right away (too long, a foreign buffer, a missing right, memory that a GPU is busy with) is not part of
/// the batch: its future says why, and gives the buffer back.
///
/// # Cancel safety
///
/// Dropping the batch before it is posted means that none of its members ever runs; each one's future ends in an error
/// with its buffer. Dropping a member's future before the batch is posted takes that member out.
#[derive(Debug)]
#[must_use = "a batch does nothing unless it is posted"]
pub struct Batch {
    pair: Arc<QueuePair>,
    members: Vec<BatchMember>,
}

impl Batch {
    pub(crate) fn new(pair: Arc<QueuePair>) -> Self {
        Self { pair, members: Vec::new() }
    }

    /// Adds a Send; see [`Connection::send`](crate::Connection::send).
    pub fn send<B: SourceBuffer>(&mut self, buffer: B) -> SendOp<B> {
        SendOp::new(self.add_buffer(Verb::Send { imm: None, patience: 0 }, buffer, Signal::Own))
    }

    /// Adds a Send with immediate data; see [`Connection::send_with_immediate`](crate::Connection::send_with_immediate).
    pub fn send_with_immediate<B: SourceBuffer>(&mut self, buffer: B, immediate: u32) -> SendOp<B> {
        SendOp::new(self.add_buffer(Verb::Send { imm: Some(immediate), patience: 0 }, buffer, Signal::Own))
    }

    /// Adds a Write; see [`Connection::write`](crate::Connection::write).
    pub fn write<B: SourceBuffer>(&mut self, buffer: B, remote: &RemoteRegion) -> WriteOp<B> {
        WriteOp::new(self.add_buffer(Verb::Write { remote: *remote, imm: None }, buffer, Signal::Own))
    }

    /// Adds a Write without a completion of its own: its future resolves together with the next member that has one
    /// (the last member always has). Saves the device a completion.
    pub fn write_unsignaled<B: SourceBuffer>(&mut self, buffer: B, remote: &RemoteRegion) -> WriteOp<B> {
        WriteOp::new(self.add_buffer(Verb::Write { remote: *remote, imm: None }, buffer, Signal::Silent))
    }

    /// Adds a Write with immediate; see [`Connection::write_with_immediate`](crate::Connection::write_with_immediate).
    pub fn write_with_immediate<B: SourceBuffer>(
        &mut self,
        buffer: B,
        remote: &RemoteRegion,
        immediate: u32,
    ) -> WriteOp<B> {
        let verb = Verb::Write { remote: *remote, imm: Some(immediate) };
        WriteOp::new(self.add_buffer(verb, buffer, Signal::Own))
    }

    /// Adds a Read; see [`Connection::read`](crate::Connection::read).
    pub fn read<B: TargetBuffer>(&mut self, buffer: B, remote: &RemoteRegion) -> ReadOp<B> {
        ReadOp::new(self.add_buffer(Verb::Read { remote: *remote }, buffer, Signal::Own))
    }

    /// Adds a compare-and-swap; see [`Connection::compare_swap`](crate::Connection::compare_swap).
    pub fn compare_swap(&mut self, remote: &RemoteRegion, compare: u64, swap: u64) -> CompareSwapOp {
        CompareSwapOp::new(self.add_atomic(Verb::CompareSwap { remote: *remote, compare, swap }))
    }

    /// Adds a fetch-and-add; see [`Connection::fetch_add`](crate::Connection::fetch_add).
    pub fn fetch_add(&mut self, remote: &RemoteRegion, add: u64) -> FetchAddOp {
        FetchAddOp::new(self.add_atomic(Verb::FetchAdd { remote: *remote, add }))
    }

    /// Members added and not refused.
    pub fn len(&self) -> usize {
        self.members.iter().filter(|member| !member.goes_on).count()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Waits for room in the send queue for all members at once, then posts them with one doorbell.
    ///
    /// # Errors
    ///
    /// [`BatchError`] says how many members, counted from the first, the device took: those complete as usual.
    /// The others were not posted; each one's future ends in an error with its buffer.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future before it resolves posts nothing.
    pub fn post(self) -> PostBatch {
        PostBatch { batch: self, ticket: None }
    }

    fn add_buffer<B: Operand>(&mut self, verb: Verb, buffer: B, signal: Signal) -> Op {
        let mut buffer = buffer.into_any();
        // If it is not, the check says so, now and when the operation is polled.
        let _ = B::try_ready(&mut buffer, verb.role());
        self.add(verb, buffer, signal)
    }

    fn add(&mut self, verb: Verb, buffer: AnyBuffer, signal: Signal) -> Op {
        // A member that is refused becomes an operation of its own, which fails the same check when it is polled.
        if verb.check(&buffer, &self.pair).is_err() {
            return Op::refused(self.pair.clone(), verb, buffer);
        }
        let length = buffer.len() as u64;
        match pieces::park(&self.pair, &verb, verb.work_request(), buffer, signal, &mut self.members) {
            Ok((key, earlier)) => Op::parked(self.pair.clone(), verb, length, key, earlier),
            Err((buffer, _)) => Op::refused(self.pair.clone(), verb, buffer),
        }
    }

    fn add_atomic(&mut self, verb: Verb) -> Result<Op> {
        let result = self.pair.atomic_result()?;
        Ok(self.add(verb, AnyBuffer::Buffer(result), Signal::Own))
    }

    fn refuse(&mut self, outcome: &Outcome) {
        let mut effects = Effects::default();
        for member in self.members.drain(..) {
            self.pair.send.refuse(member.key, outcome.clone(), &mut effects);
        }
        effects.run();
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.refuse(&Outcome::NotPosted("the batch was dropped before it was posted"));
    }
}

/// A batch on its way to the device; see [`Batch::post`].
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct PostBatch {
    batch: Batch,
    ticket: Option<Ticket>,
}

impl Future for PostBatch {
    type Output = Result<(), BatchError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let (pair, total, places) = (this.batch.pair.clone(), this.batch.len(), this.batch.members.len());
        if places == 0 {
            return Poll::Ready(Ok(()));
        }
        let depth = pair.send.depth();
        if places > depth {
            this.batch.refuse(&Outcome::NotPosted("the batch has more messages than the send queue has slots"));
            let hint = "split the batch, or raise send_depth";
            let error =
                Error::Limit { operation: "batch", what: "members", value: places as u64, limit: depth as u64, hint };
            return Poll::Ready(Err(BatchError { accepted: 0, total, error }));
        }
        if let Err(reason) = ready!(pair.send.take_places(places, &mut this.ticket, Some(cx))) {
            this.batch.refuse(&Outcome::Closed(reason.clone()));
            let error = Error::Closed { operation: "batch", reason };
            return Poll::Ready(Err(BatchError { accepted: 0, total, error }));
        }
        let (accepted, rejected) = pair.post_batch(&mut this.batch.members);
        let accepted = this.batch.members.iter().take(accepted).filter(|member| !member.goes_on).count();
        this.batch.members.clear();
        Poll::Ready(match rejected {
            None => Ok(()),
            Some(rejected) => Err(BatchError { accepted, total, error: rejected.into_error("batch") }),
        })
    }
}

impl Drop for PostBatch {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.batch.pair.send.leave(ticket);
        }
    }
}

/// A batch that was not posted, or only in part.
#[derive(Debug)]
pub struct BatchError {
    /// Members that the device took, counted from the first; they complete as usual.
    pub accepted: usize,
    /// Members of the batch.
    pub total: usize,
    /// Why the rest was not taken.
    pub error: Error,
}

impl fmt::Display for BatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} members of the batch were posted: {}", self.accepted, self.total, self.error)
    }
}

impl std::error::Error for BatchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<BatchError> for Error {
    fn from(error: BatchError) -> Self {
        error.error
    }
}
