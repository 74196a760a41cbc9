//! What all operations share: checking, waiting for a slot, posting, looking, and taking the result.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::task::coop;

use crate::completion::pair::{QueuePair, Rejected, Request, Side};
use crate::completion::queue::CompletionQueue;
use crate::completion::table::{Abandoned, Key, Outcome, Signal, Table, Ticket};
use crate::error::{Error, Operation, RemoteTarget, WcStatus};
use crate::memory::{Access, AnyBuffer, RemoteRegion};
use crate::op::OpError;
use crate::op::pieces::{self, Earlier};
use crate::op::role::Role;
use crate::provider::{RemoteAddress, WorkCompletion, WrOp};

/// What is to be done, before it is bound to a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verb {
    Send { imm: Option<u32>, patience: u32 },
    Receive,
    Write { remote: RemoteRegion, imm: Option<u32> },
    Read { remote: RemoteRegion },
    CompareSwap { remote: RemoteRegion, compare: u64, swap: u64 },
    FetchAdd { remote: RemoteRegion, add: u64 },
}

impl Verb {
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Self::Send { .. } => Operation::Send,
            Self::Receive => Operation::Receive,
            Self::Write { .. } => Operation::Write,
            Self::Read { .. } => Operation::Read,
            Self::CompareSwap { .. } => Operation::CompareSwap,
            Self::FetchAdd { .. } => Operation::FetchAdd,
        }
    }

    pub(crate) fn role(&self) -> Role {
        match self {
            Self::Send { .. } | Self::Write { .. } => Role::Source,
            _ => Role::Target,
        }
    }

    fn side(&self) -> Side {
        match self {
            Self::Receive => Side::Receive,
            _ => Side::Send,
        }
    }

    fn remote(&self) -> Option<(&RemoteRegion, Access)> {
        match self {
            Self::Send { .. } | Self::Receive => None,
            Self::Write { remote, .. } => Some((remote, Access::REMOTE_WRITE)),
            Self::Read { remote } => Some((remote, Access::REMOTE_READ)),
            Self::CompareSwap { remote, .. } | Self::FetchAdd { remote, .. } => Some((remote, Access::REMOTE_ATOMIC)),
        }
    }

    /// The request as the device takes it; `None` for a receive.
    pub(crate) fn work_request(&self) -> Option<WrOp> {
        let place = |remote: &RemoteRegion| RemoteAddress { address: remote.address(), rkey: remote.rkey() };
        Some(match *self {
            Self::Receive => return None,
            Self::Send { imm, patience } => WrOp::Send { imm, patience },
            Self::Write { ref remote, imm } => WrOp::Write { remote: place(remote), imm },
            Self::Read { ref remote } => WrOp::Read { remote: place(remote) },
            Self::CompareSwap { ref remote, compare, swap } => {
                WrOp::CompareSwap { remote: place(remote), compare, swap }
            }
            Self::FetchAdd { ref remote, add } => WrOp::FetchAdd { remote: place(remote), add },
        })
    }

    /// Whether a payload of this length travels inline: only where the bytes go from here to there.
    pub(crate) fn inline(&self, buffer: &AnyBuffer, length: u64, pair: &QueuePair) -> bool {
        matches!(self, Self::Send { .. } | Self::Write { .. })
            && length <= u64::from(pair.config.max_inline)
            && buffer.is_of_host()
    }

    /// Everything that can be refused without asking the device is refused here, before anything is posted.
    pub(crate) fn check(&self, buffer: &AnyBuffer, pair: &QueuePair) -> Result<(), Error> {
        let operation = self.operation();
        let name = operation.name();
        let limit = |what, value, limit, hint| Err(Error::Limit { operation: name, what, value, limit, hint });
        let length = buffer.len() as u64;
        buffer.check_domain(operation, pair.domain.id())?;
        buffer.check_ready(name, self.role())?;
        if let Self::Receive | Self::Read { .. } = self {
            buffer.check_writable(name)?;
        }
        let entries = buffer.entries() as u64;
        let most = match self.side() {
            Side::Send => pair.config.max_send_sge,
            Side::Receive => pair.config.max_receive_sge,
        };
        if entries > u64::from(most) {
            return limit(
                "number of scatter/gather entries",
                entries,
                u64::from(most),
                "raise max_send_sge or max_receive_sge of the connection",
            );
        }
        if length > pair.max_message {
            match self {
                Self::Receive => {}
                Self::Read { .. } | Self::Write { imm: None, .. } => {
                    let most = pair.max_message.saturating_mul(pair.send.depth() as u64);
                    if pieces::count(length, pair.max_message) > pair.send.depth() as u64 {
                        return limit(
                            "length",
                            length,
                            most,
                            "as many messages as the send queue holds; raise send_depth",
                        );
                    }
                }
                Self::Write { imm: Some(_), .. } => {
                    let hint = "the immediate tells of one message; write without it, then send an empty write with it";
                    return limit("length", length, pair.max_message, hint);
                }
                _ => {
                    let hint = "the largest message of this connection; split it";
                    return limit("length", length, pair.max_message, hint);
                }
            }
        }
        let Some((remote, needed)) = self.remote() else { return Ok(()) };
        if !remote.access().contains(needed) {
            return Err(Error::Access { operation, needed, granted: remote.access() });
        }
        if needed == Access::REMOTE_ATOMIC {
            if remote.address() % 8 != 0 {
                return limit(
                    "remote address modulo 8",
                    remote.address() % 8,
                    0,
                    "atomics work on 8-byte aligned places",
                );
            }
            if remote.len() < 8 {
                return limit("length", 8, remote.len(), "atomics need 8 bytes of remote memory");
            }
            return Ok(());
        }
        if length == 0 && !matches!(self, Self::Write { imm: Some(_), .. }) {
            return limit("length", 0, 1, "at least 1 byte; only a send or a write with immediate may be empty");
        }
        if length > remote.len() {
            return limit("length", length, remote.len(), "the buffer is longer than the remote region; split it");
        }
        Ok(())
    }
}

/// How far an operation has got.
#[derive(Debug)]
pub(super) enum State {
    /// Not checked yet.
    New,
    /// Checked; perhaps in line for a slot.
    Waiting(Option<Ticket>),
    Posted(Key),
    Finished,
}

/// The engine room of every operation's future.
///
/// Dropping it before it is posted means that it never will be; dropping it afterwards leaves the buffer with the table until
/// the device lets go of it.
#[derive(Debug)]
pub(crate) struct Op {
    pair: Arc<QueuePair>,
    verb: Verb,
    length: u64,
    buffer: Option<AnyBuffer>,
    /// Of an operation that is longer than a message.
    earlier: Earlier,
    state: State,
    /// A batch refused it: it ends with what it was refused for, though its buffer may have become ready since.
    refused: bool,
}

/// A finished operation: the completion, or the error, and the buffer unless the device still has it.
pub(crate) type Finished = Result<(WorkCompletion, AnyBuffer), OpError<AnyBuffer>>;

impl Op {
    pub(crate) fn new(pair: Arc<QueuePair>, verb: Verb, buffer: AnyBuffer) -> Self {
        let length = buffer.len() as u64;
        Self {
            pair,
            verb,
            length,
            buffer: Some(buffer),
            earlier: Earlier::default(),
            state: State::New,
            refused: false,
        }
    }

    /// What a batch did not take.
    pub(crate) fn refused(pair: Arc<QueuePair>, verb: Verb, buffer: AnyBuffer) -> Self {
        let mut op = Self::new(pair, verb, buffer);
        op.refused = true;
        op
    }

    /// A member of a batch: its buffer is with the table already.
    pub(crate) fn parked(pair: Arc<QueuePair>, verb: Verb, length: u64, key: Key, earlier: Earlier) -> Self {
        Self { pair, verb, length, buffer: None, earlier, state: State::Posted(key), refused: false }
    }

    pub(crate) fn operation(&self) -> &'static str {
        self.verb.operation().name()
    }

    pub(crate) fn role(&self) -> Role {
        self.verb.role()
    }

    /// The buffer of an operation that is not posted yet, and can be.
    pub(crate) fn unposted(&mut self) -> Option<&mut AnyBuffer> {
        match self.state {
            State::New | State::Waiting(_) if !self.refused => self.buffer.as_mut(),
            _ => None,
        }
    }

    /// Ends an operation that is not posted, and never will be.
    pub(crate) fn refuse(&mut self, error: Error) -> OpError<AnyBuffer> {
        if let State::Waiting(Some(ticket)) = std::mem::replace(&mut self.state, State::Finished) {
            self.pair.table(self.verb.side()).leave(ticket);
        }
        OpError::new(error, self.buffer.take())
    }

    #[inline]
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Finished> {
        let fresh = !matches!(self.state, State::Posted(_));
        let looks = self.pair.queue().looks_are_cheap();
        if fresh {
            // Whoever looks in a moment leaves its waker behind then, if it has to.
            let advanced = match looks {
                true => self.advance(None),
                false => Poll::Pending,
            };
            let advanced = if advanced.is_pending() { self.advance(Some(cx)) } else { advanced };
            if let Err(error) = ready!(advanced) {
                self.state = State::Finished;
                return Poll::Ready(Err(self.not_posted(error)));
            }
        }
        let State::Posted(key) = self.state else {
            return Poll::Ready(Err(OpError::new(self.polled_after_end(), None)));
        };
        // Operations may finish faster than a task can start them; the driver and the other tasks want their turn as well.
        // Not before posting, whose order is that of the first polls.
        let budget = ready!(coop::poll_proceed(cx));
        let (queue, table) = (self.pair.queue(), self.pair.table(self.verb.side()));
        let done = ready!(match looks {
            true if self.verb.side() == Side::Send => poll_looking(queue, table, key, fresh, cx),
            true => poll_waiting(queue, table, key, cx),
            // Posting several pieces leaves no waker behind.
            false => {
                let fresh = fresh && self.earlier.is_empty();
                let done_already = fresh && self.verb.remote().is_some() && queue.device().lives_in_memory();
                poll_driven(queue, table, key, fresh, done_already, cx)
            }
        });
        budget.made_progress();
        queue.counters.taken.fetch_add(1, Ordering::Relaxed);
        self.state = State::Finished;
        Poll::Ready(match done {
            Some((buffer, outcome)) => self.finish(buffer, outcome),
            None => Err(OpError::new(self.polled_after_end(), None)),
        })
    }

    /// Posts now, without waiting for a slot.
    pub(crate) fn try_post(&mut self) -> Result<(), Error> {
        match self.advance(None) {
            Poll::Ready(result) => {
                if self.verb.remote().is_some() {
                    self.pair.queue().follow_up();
                }
                result
            }
            Poll::Pending => {
                let depth = self.pair.table(self.verb.side()).depth();
                Err(Error::QueueFull { operation: self.verb.operation(), depth })
            }
        }
    }

    pub(crate) fn is_posted(&self) -> bool {
        matches!(self.state, State::Posted(_))
    }

    /// Whether a posted operation's result is there to be taken. Leaves the waker behind if not, and does not look.
    pub(crate) fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self.state {
            State::Posted(key) => self.pair.table(self.verb.side()).poll_ended(key, cx),
            State::New | State::Waiting(_) => Poll::Pending,
            State::Finished => Poll::Ready(()),
        }
    }

    /// Checks and posts, unless that was done. After an error it can be tried again, with the same result.
    fn advance(&mut self, cx: Option<&mut Context<'_>>) -> Poll<Result<(), Error>> {
        let mut ticket = match self.state {
            State::New => {
                if let Some(buffer) = &self.buffer {
                    if let Err(error) = self.verb.check(buffer, &self.pair) {
                        return Poll::Ready(Err(error));
                    }
                }
                None
            }
            State::Waiting(ticket) => ticket,
            State::Posted(_) => return Poll::Ready(Ok(())),
            State::Finished => return Poll::Ready(Err(self.polled_after_end())),
        };
        let had_ticket = ticket.is_some();
        let posted = match self.verb.work_request() {
            Some(op) if self.length > self.pair.max_message => self.submit_pieces(op, &mut ticket, cx),
            Some(op) => {
                let inline = match &self.buffer {
                    Some(buffer) => self.verb.inline(buffer, self.length, &self.pair),
                    None => false,
                };
                let request = Request::Send { op, inline };
                self.pair.submit(&request, &mut self.buffer, &mut ticket, cx)
            }
            None => self.pair.submit(&Request::Receive, &mut self.buffer, &mut ticket, cx),
        };
        self.state = State::Waiting(ticket);
        if ticket.is_some() && !had_ticket {
            self.pair.counters.slot_waits.fetch_add(1, Ordering::Relaxed);
            self.pair.queue().meters.slot_wait();
            tracing::trace!(qp = self.pair.number(), "queue full: an operation waits for a slot");
        }
        match posted {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(key)) => {
                self.state = State::Posted(key);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(rejected)) => Poll::Ready(Err(rejected.into_error(self.operation()))),
        }
    }

    /// Posts an operation that is longer than a message, once there are places for all of its pieces.
    fn submit_pieces(
        &mut self,
        op: WrOp,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Key, Rejected>> {
        // Checked: not more than the queue has places.
        let count = pieces::count(self.length, self.pair.max_message) as usize;
        if let Err(reason) = ready!(self.pair.send.take_places(count, ticket, cx)) {
            return Poll::Ready(Err(Rejected::Closed(reason)));
        }
        let mut members = Vec::with_capacity(count);
        let buffer = self.buffer.take().unwrap_or_default();
        let (key, earlier) = match pieces::park(&self.pair, &self.verb, op, buffer, Signal::Own, &mut members) {
            Ok(parked) => parked,
            Err((buffer, refused)) => {
                self.pair.send.return_places(count);
                self.buffer = Some(buffer);
                return Poll::Ready(Err(refused.into()));
            }
        };
        self.earlier = earlier;
        match self.pair.post_batch(&mut members) {
            (_, None) => Poll::Ready(Ok(key)),
            // What was posted has ended with its queue pair, and the table has the buffer.
            (_, Some(rejected)) => {
                if let Abandoned::Done(buffer, _) = self.pair.send.abandon(key) {
                    self.buffer = Some(buffer);
                }
                self.earlier.abandon(&self.pair);
                Poll::Ready(Err(rejected))
            }
        }
    }

    /// Its time is up. It may have finished at the last moment; the buffer comes back unless the device has it.
    pub(crate) fn expire(&mut self, after: Duration) -> Finished {
        let table = self.pair.table(self.verb.side());
        let buffer = match std::mem::replace(&mut self.state, State::Finished) {
            State::Posted(key) => match table.abandon(key) {
                Abandoned::Done(buffer, outcome) => return self.finish(buffer, outcome),
                Abandoned::Parked(buffer) => Some(buffer),
                Abandoned::Held | Abandoned::Gone => None,
            },
            State::Waiting(ticket) => {
                ticket.into_iter().for_each(|ticket| table.leave(ticket));
                self.buffer.take()
            }
            State::New | State::Finished => self.buffer.take(),
        };
        let hint = match buffer {
            Some(_) => "it was still waiting for its turn, and will not be posted",
            None => "it may still take effect, and its buffer stays quarantined until the device lets go of it",
        };
        let error = Error::Timeout { operation: self.operation(), after, hint: hint.into() };
        self.pair.queue().meters.failed(self.verb.operation(), &error);
        Err(OpError::new(error, buffer))
    }

    #[inline]
    fn finish(&mut self, buffer: AnyBuffer, outcome: Outcome) -> Finished {
        let outcome = match self.earlier.is_empty() {
            true => outcome,
            false => self.earlier.first_failure(&self.pair).unwrap_or(outcome),
        };
        match outcome {
            Outcome::Completed(done) if done.status == WcStatus::Success => {
                let (count, bytes) = self.counted(&done);
                count.fetch_add(1, Ordering::Relaxed);
                if let Some((total, moved)) = bytes {
                    total.fetch_add(moved, Ordering::Relaxed);
                }
                let moved = bytes.map_or(0, |(_, moved)| moved);
                self.pair.queue().meters.completed(self.verb.operation(), moved);
                Ok((done, buffer))
            }
            failed => Err(OpError::new(self.failure(failed), Some(buffer))),
        }
    }

    #[cold]
    fn not_posted(&mut self, error: Error) -> OpError<AnyBuffer> {
        self.pair.queue().meters.failed(self.verb.operation(), &error);
        OpError::new(error, self.buffer.take())
    }

    #[cold]
    fn failure(&self, outcome: Outcome) -> Error {
        let operation = self.verb.operation();
        let counters = &self.pair.counters;
        let error = match outcome {
            Outcome::Completed(done) => {
                counters.errors.fetch_add(1, Ordering::Relaxed);
                let closed = self.pair.close_reason_now().filter(|_| done.status == WcStatus::Flushed);
                let error = match (done.status, closed) {
                    (_, Some(reason)) => Error::Closed { operation: operation.name(), reason },
                    (status, None) => Error::Completion {
                        operation,
                        status,
                        vendor_error: done.vendor_error,
                        remote: self.verb.remote().map(|(remote, _)| RemoteTarget {
                            address: remote.address(),
                            length: self.length,
                            rkey: remote.rkey(),
                        }),
                    },
                };
                tracing::debug!(qp = self.pair.number(), %error, "operation failed");
                error
            }
            Outcome::Closed(reason) => {
                counters.errors.fetch_add(1, Ordering::Relaxed);
                Error::Closed { operation: operation.name(), reason }
            }
            Outcome::NotPosted(reason) => Error::Invalid { operation: operation.name(), reason: reason.to_owned() },
        };
        self.pair.queue().meters.failed(operation, &error);
        error
    }

    /// The counter of this kind of operation, and the byte counter with the bytes to add.
    fn counted(&self, done: &WorkCompletion) -> (&AtomicU64, Option<(&AtomicU64, u64)>) {
        let counters = &self.pair.counters;
        match self.verb {
            Verb::Send { .. } => (&counters.sends, Some((&counters.bytes_sent, self.length))),
            Verb::Write { .. } => (&counters.writes, Some((&counters.bytes_sent, self.length))),
            Verb::Receive => (&counters.receives, Some((&counters.bytes_received, u64::from(done.byte_len)))),
            Verb::Read { .. } => (&counters.reads, Some((&counters.bytes_received, self.length))),
            Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => (&counters.atomics, None),
        }
    }

    fn polled_after_end(&self) -> Error {
        Error::Invalid { operation: self.operation(), reason: "the future was polled after it had finished".to_owned() }
    }
}

type Done = Option<(AnyBuffer, Outcome)>;

/// Looks before it waits: a small operation may be through by the time its request is posted, and one look costs less than
/// the way to the driver and back.
#[inline]
fn poll_looking(
    queue: &CompletionQueue,
    table: &Table<AnyBuffer>,
    key: Key,
    fresh: bool,
    cx: &mut Context<'_>,
) -> Poll<Done> {
    if !fresh {
        if let Poll::Ready(done) = table.poll_done(key, None) {
            return Poll::Ready(done);
        }
    }
    queue.look();
    let done = table.poll_done(key, Some(cx));
    if done.is_pending() {
        // One that sleeps in event mode is woken by the channel, which is armed.
        queue.spin();
    }
    done
}

/// A message comes when the peer sends one: the driver looks, unless it sleeps.
#[inline]
fn poll_waiting(queue: &CompletionQueue, table: &Table<AnyBuffer>, key: Key, cx: &mut Context<'_>) -> Poll<Done> {
    let done = table.poll_done(key, Some(cx));
    if done.is_ready() || queue.kick.awake() {
        return done;
    }
    queue.look();
    let done = table.poll_done(key, None);
    if done.is_pending() {
        queue.spin();
    }
    done
}

/// So often somebody else's look may be in the way, each of some tens of nanoseconds, before that is left to find what is done.
const OTHERS_LOOKS: usize = 32;

/// Leaves looking to the driver while that is awake, unless the operation may be `done_already` and a look costs little.
#[inline(never)]
fn poll_driven(
    queue: &CompletionQueue,
    table: &Table<AnyBuffer>,
    key: Key,
    fresh: bool,
    done_already: bool,
    cx: &mut Context<'_>,
) -> Poll<Done> {
    // It looks as soon as this task has had its turn; posting has left the waker behind.
    if fresh && queue.kick.awake() {
        if !done_already {
            return Poll::Pending;
        }
        // A driver on another CPU is at it most of the time, for a moment each. What it finds is found.
        for _ in 0..OTHERS_LOOKS {
            let looked = queue.look_unless_busy().is_some();
            let done = table.poll_done(key, None);
            if looked || done.is_ready() {
                return done;
            }
            std::hint::spin_loop();
        }
        return Poll::Pending;
    }
    let mut done = table.poll_done(key, Some(cx));
    if done.is_pending() && !queue.kick.awake() {
        queue.look();
        done = table.poll_done(key, None);
        // Somebody must go on looking, and follow up on what was found, unless that was this operation alone.
        if !(done_already && done.is_ready() && !queue.device().take_worked()) {
            queue.kick.wake();
        }
    }
    done
}

impl Drop for Op {
    fn drop(&mut self) {
        if !self.earlier.is_empty() {
            self.earlier.abandon(&self.pair);
        }
        let table = self.pair.table(self.verb.side());
        match self.state {
            State::Waiting(Some(ticket)) => table.leave(ticket),
            State::Posted(key) => drop(table.abandon(key)),
            _ => {}
        }
    }
}
