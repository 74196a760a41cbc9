//! What all operations share: checking, waiting for a slot, posting, looking, and taking the result.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::task::coop;

use crate::completion::pair::{QueuePair, Rejected, Side};
use crate::completion::queue::CompletionQueue;
use crate::completion::table::{Abandoned, Done, Key, Outcome, Signal, Table, Ticket};
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

    /// The request as the device takes it. A receive has none.
    pub(crate) fn work_request(&self) -> WrOp {
        let mut op = WrOp::NOTHING;
        self.fill(&mut op);
        op
    }

    /// The same, in its place.
    #[inline]
    fn fill(&self, op: &mut WrOp) {
        let place = |remote: &RemoteRegion| RemoteAddress { address: remote.address(), rkey: remote.rkey() };
        match *self {
            Self::Receive => {}
            Self::Send { imm, patience } => *op = WrOp::Send { imm, patience },
            Self::Write { ref remote, imm } => *op = WrOp::Write { remote: place(remote), imm },
            Self::Read { ref remote } => *op = WrOp::Read { remote: place(remote) },
            Self::CompareSwap { ref remote, compare, swap } => {
                *op = WrOp::CompareSwap { remote: place(remote), compare, swap }
            }
            Self::FetchAdd { ref remote, add } => *op = WrOp::FetchAdd { remote: place(remote), add },
        }
    }

    /// Whether a payload of this length travels inline: only where the bytes go from here to there.
    pub(crate) fn inline(&self, buffer: &AnyBuffer, length: u64, pair: &QueuePair) -> bool {
        matches!(self, Self::Send { .. } | Self::Write { .. })
            && length <= u64::from(pair.config.max_inline)
            && buffer.is_of_host()
    }

    /// Everything that can be refused without asking the device is refused here, before anything is posted.
    #[inline]
    pub(crate) fn check(&self, buffer: &AnyBuffer, pair: &QueuePair) -> Result<(), Error> {
        if self.is_plain(buffer, pair) {
            debug_assert!(self.check_all(buffer, pair).is_ok());
            return Ok(());
        }
        self.check_all(buffer, pair)
    }

    /// Whether it is what nearly all are, one [`Buffer`](crate::Buffer) in one message, with nothing wrong. Of others this says nothing.
    #[inline]
    fn is_plain(&self, buffer: &AnyBuffer, pair: &QueuePair) -> bool {
        let AnyBuffer::Buffer(buffer) = buffer else { return false };
        let length = buffer.len() as u64;
        let fits = |remote: &RemoteRegion, needed| remote.access().contains(needed) && length <= remote.len();
        let entries = match self.side() {
            Side::Send => pair.config.max_send_sge,
            Side::Receive => pair.config.max_receive_sge,
        };
        let in_place = match self {
            Self::Send { .. } | Self::Receive => true,
            Self::Write { remote, .. } => fits(remote, Access::REMOTE_WRITE),
            Self::Read { remote } => fits(remote, Access::REMOTE_READ),
            Self::CompareSwap { .. } | Self::FetchAdd { .. } => false,
        };
        in_place && entries > 0 && 0 < length && length <= pair.max_message && buffer.domain().id() == pair.domain.id()
    }

    #[inline(never)]
    fn check_all(&self, buffer: &AnyBuffer, pair: &QueuePair) -> Result<(), Error> {
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
    /// Not checked yet. A batch that refused it has checked it: it ends with what it was refused for, though its buffer may have
    /// become ready since.
    New {
        refused: bool,
    },
    /// Checked; perhaps in line for a slot.
    Waiting(Option<Ticket>),
    Posted(Key),
    Finished,
}

/// The engine room of every operation's future.
///
/// Dropping it before it is posted means that it never will be; dropping it afterwards leaves the buffer with the table until
/// the device lets go of it.
///
/// Not longer than 128 bytes, up to which moving it is no call of a function: see the assertion below.
#[derive(Debug)]
pub(crate) struct Op {
    pair: Arc<QueuePair>,
    verb: Verb,
    length: u64,
    buffer: Option<AnyBuffer>,
    /// Of an operation that is longer than a message.
    earlier: Earlier,
    state: State,
}

// A GPU's buffer is longer, and so are loom's counts. Looked at with the lints only: a compiler to come that lays it out in another way shall
// not refuse the crate.
#[cfg(clippy)]
const _: () = assert!(cfg!(any(feature = "cuda", rdma_loom)) || size_of::<Op>() <= 128);

/// How an operation ended whose buffer and completion are elsewhere.
pub(crate) type Ended = Result<(), OpError<AnyBuffer>>;

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
            state: State::New { refused: false },
        }
    }

    /// What a batch did not take.
    pub(crate) fn refused(pair: Arc<QueuePair>, verb: Verb, buffer: AnyBuffer) -> Self {
        let mut op = Self::new(pair, verb, buffer);
        op.state = State::New { refused: true };
        op
    }

    /// A member of a batch: its buffer is with the table already.
    pub(crate) fn parked(pair: Arc<QueuePair>, verb: Verb, length: u64, key: Key, earlier: Earlier) -> Self {
        Self { pair, verb, length, buffer: None, earlier, state: State::Posted(key) }
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
            State::New { refused: false } | State::Waiting(_) => self.buffer.as_mut(),
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

    /// Ends with the buffer and the completion in `done`, or with the error.
    #[inline]
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>, done: &mut Done<AnyBuffer>) -> Poll<Ended> {
        let fresh = !matches!(self.state, State::Posted(_));
        let looks = self.pair.queue().looks_are_cheap();
        if fresh {
            ready!(self.start(looks, cx))?;
        }
        let State::Posted(key) = self.state else {
            return Poll::Ready(Err(self.polled_again()));
        };
        // Operations may finish faster than a task can start them; the driver and the other tasks want their turn as well.
        // Not before posting, whose order is that of the first polls.
        let budget = ready!(coop::poll_proceed(cx));
        let (queue, table) = (self.pair.queue(), self.pair.table(self.verb.side()));
        ready!(match looks {
            true if self.verb.side() == Side::Send => poll_looking(queue, table, key, fresh, cx, done),
            true => poll_waiting(queue, table, key, cx, done),
            // Posting several pieces leaves no waker behind.
            false => {
                let fresh = fresh && self.earlier.is_empty();
                let done_already = fresh && self.verb.remote().is_some() && queue.device().lives_in_memory();
                poll_driven(queue, table, key, fresh, done_already, cx, done)
            }
        });
        budget.made_progress();
        queue.counters.taken.fetch_add(1, Ordering::Relaxed);
        self.state = State::Finished;
        Poll::Ready(match &done.outcome {
            // Nearly always.
            Some(Outcome::Completed(it)) if it.status == WcStatus::Success && self.earlier.is_empty() => {
                self.count(it);
                Ok(())
            }
            _ => self.finish_less_simply(done),
        })
    }

    #[inline(never)]
    fn finish_less_simply(&mut self, done: &mut Done<AnyBuffer>) -> Ended {
        let (Some(buffer), Some(outcome)) = (done.owner.take(), done.outcome.take()) else {
            return Err(self.polled_again());
        };
        let (completion, buffer) = self.finish(buffer, outcome)?;
        *done = Done { owner: Some(buffer), outcome: Some(Outcome::Completed(completion)) };
        Ok(())
    }

    /// Posts it, or leaves the waker behind. Whoever looks in a moment leaves it behind then, if at all.
    #[inline]
    fn start(&mut self, looks: bool, cx: &mut Context<'_>) -> Poll<Result<(), OpError<AnyBuffer>>> {
        if looks {
            match self.advance(None) {
                Poll::Ready(Ok(())) => return Poll::Ready(Ok(())),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(self.not_posted(error))),
                Poll::Pending => {}
            }
        }
        match self.advance(Some(cx)) {
            Poll::Ready(Ok(())) => Poll::Ready(Ok(())),
            Poll::Ready(Err(error)) => Poll::Ready(Err(self.not_posted(error))),
            Poll::Pending => Poll::Pending,
        }
    }

    /// Posts now, without waiting for a slot.
    #[inline]
    pub(crate) fn try_post(&mut self) -> Result<(), Error> {
        match self.advance(None) {
            Poll::Ready(Ok(())) => {
                if self.verb.remote().is_some() {
                    self.pair.queue().follow_up();
                }
                Ok(())
            }
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending => Err(self.no_slot()),
        }
    }

    #[cold]
    fn no_slot(&self) -> Error {
        let depth = self.pair.table(self.verb.side()).depth();
        Error::QueueFull { operation: self.verb.operation(), depth }
    }

    pub(crate) fn is_posted(&self) -> bool {
        matches!(self.state, State::Posted(_))
    }

    /// Whether a posted operation's result is there to be taken. Leaves the waker behind if not, and does not look.
    pub(crate) fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self.state {
            State::Posted(key) => self.pair.table(self.verb.side()).poll_ended(key, cx),
            State::New { .. } | State::Waiting(_) => Poll::Pending,
            State::Finished => Poll::Ready(()),
        }
    }

    /// Checks and posts, unless that was done. After an error it can be tried again, with the same result.
    fn advance(&mut self, cx: Option<&mut Context<'_>>) -> Poll<Result<(), Error>> {
        let mut ticket = if let State::New { .. } = self.state {
            if let Some(buffer) = &self.buffer {
                if let Err(error) = self.verb.check(buffer, &self.pair) {
                    return Poll::Ready(Err(error));
                }
            }
            None
        } else {
            match self.state {
                State::Waiting(ticket) => ticket,
                State::Posted(_) => return Poll::Ready(Ok(())),
                State::New { .. } | State::Finished => return Poll::Ready(Err(self.polled_after_end())),
            }
        };
        let had_ticket = ticket.is_some();
        let posted = match &self.verb {
            Verb::Receive => self.pair.submit_receive(&mut self.buffer, &mut ticket, cx),
            _ if self.length > self.pair.max_message => self.submit_pieces(&mut ticket, cx),
            verb => {
                let inline = match &self.buffer {
                    Some(buffer) => verb.inline(buffer, self.length, &self.pair),
                    None => false,
                };
                self.pair.submit_send(|op| verb.fill(op), inline, &mut self.buffer, &mut ticket, cx)
            }
        };
        match posted {
            Poll::Ready(Ok(key)) => {
                self.state = State::Posted(key);
                Poll::Ready(Ok(()))
            }
            Poll::Ready(Err(rejected)) => {
                self.state = State::Waiting(ticket);
                Poll::Ready(Err(rejected.into_error(self.operation())))
            }
            Poll::Pending => {
                self.wait_for_slot(ticket, had_ticket);
                Poll::Pending
            }
        }
    }

    #[inline(never)]
    fn wait_for_slot(&mut self, ticket: Option<Ticket>, had_ticket: bool) {
        self.state = State::Waiting(ticket);
        if ticket.is_some() && !had_ticket {
            self.pair.counters.slot_waits.fetch_add(1, Ordering::Relaxed);
            self.pair.queue().meters.slot_wait();
            tracing::trace!(qp = self.pair.number(), "queue full: an operation waits for a slot");
        }
    }

    /// Posts an operation that is longer than a message, once there are places for all of its pieces.
    #[inline(never)]
    fn submit_pieces(
        &mut self,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Key, Rejected>> {
        // Checked: not more than the queue has places.
        let count = pieces::count(self.length, self.pair.max_message) as usize;
        if let Err(reason) = ready!(self.pair.send.take_places(count, ticket, cx)) {
            return Poll::Ready(Err(Rejected::Closed(reason)));
        }
        let mut members = Vec::with_capacity(count);
        let op = self.verb.work_request();
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
            State::New { .. } | State::Finished => self.buffer.take(),
        };
        let hint = match buffer {
            Some(_) => "it was still waiting for its turn, and will not be posted",
            None => "it may still take effect, and its buffer stays quarantined until the device lets go of it",
        };
        let error = Error::Timeout { operation: self.operation(), after, hint: hint.into() };
        self.pair.queue().meters.failed(self.verb.operation(), &error);
        Err(OpError::new(error, buffer))
    }

    #[inline(never)]
    fn finish(&mut self, buffer: AnyBuffer, outcome: Outcome) -> Finished {
        let outcome = match self.earlier.is_empty() {
            true => outcome,
            false => self.earlier.first_failure(&self.pair).unwrap_or(outcome),
        };
        match outcome {
            Outcome::Completed(done) if done.status == WcStatus::Success => {
                self.count(&done);
                Ok((done, buffer))
            }
            failed => Err(OpError::new(self.failure(failed), Some(buffer))),
        }
    }

    #[cold]
    fn not_posted(&mut self, error: Error) -> OpError<AnyBuffer> {
        self.state = State::Finished;
        self.pair.queue().meters.failed(self.verb.operation(), &error);
        OpError::new(error, self.buffer.take())
    }

    #[cold]
    fn polled_again(&self) -> OpError<AnyBuffer> {
        OpError::new(self.polled_after_end(), None)
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

    /// Counts one that was successful, and its bytes.
    #[inline]
    fn count(&self, done: &WorkCompletion) {
        let counters = &self.pair.counters;
        let (count, bytes) = match self.verb {
            Verb::Send { .. } => (&counters.sends, Some((&counters.bytes_sent, self.length))),
            Verb::Write { .. } => (&counters.writes, Some((&counters.bytes_sent, self.length))),
            Verb::Receive => (&counters.receives, Some((&counters.bytes_received, u64::from(done.byte_len)))),
            Verb::Read { .. } => (&counters.reads, Some((&counters.bytes_received, self.length))),
            Verb::CompareSwap { .. } | Verb::FetchAdd { .. } => (&counters.atomics, None),
        };
        count.fetch_add(1, Ordering::Relaxed);
        if let Some((total, moved)) = bytes {
            total.fetch_add(moved, Ordering::Relaxed);
        }
        self.pair.queue().meters.completed(self.verb.operation(), bytes.map_or(0, |(_, moved)| moved));
    }

    fn polled_after_end(&self) -> Error {
        Error::Invalid { operation: self.operation(), reason: "the future was polled after it had finished".to_owned() }
    }
}

/// Looks before it waits: a small operation may be through by the time its request is posted, and one look costs less than
/// the way to the driver and back.
#[inline]
fn poll_looking(
    queue: &CompletionQueue,
    table: &Table<AnyBuffer>,
    key: Key,
    fresh: bool,
    cx: &mut Context<'_>,
    done: &mut Done<AnyBuffer>,
) -> Poll<()> {
    if !fresh && table.take_if_done(key, done) {
        return Poll::Ready(());
    }
    queue.look();
    let ended = table.take_done(key, Some(cx), done);
    if ended.is_pending() {
        // One that sleeps in event mode is woken by the channel, which is armed.
        queue.spin();
    }
    ended
}

/// A message comes when the peer sends one: the driver looks, unless it sleeps.
#[inline]
fn poll_waiting(
    queue: &CompletionQueue,
    table: &Table<AnyBuffer>,
    key: Key,
    cx: &mut Context<'_>,
    done: &mut Done<AnyBuffer>,
) -> Poll<()> {
    let ended = table.take_done(key, Some(cx), done);
    if ended.is_ready() || queue.kick.awake() {
        return ended;
    }
    queue.look();
    let ended = table.take_done(key, None, done);
    if ended.is_pending() {
        queue.spin();
    }
    ended
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
    done: &mut Done<AnyBuffer>,
) -> Poll<()> {
    // It looks as soon as this task has had its turn; posting has left the waker behind.
    if fresh && queue.kick.awake() {
        if !done_already {
            return Poll::Pending;
        }
        // A driver on another CPU is at it most of the time, for a moment each. What it finds is found.
        for _ in 0..OTHERS_LOOKS {
            let looked = queue.look_unless_busy().is_some();
            let ended = table.take_done(key, None, done);
            if looked || ended.is_ready() {
                return ended;
            }
            std::hint::spin_loop();
        }
        return Poll::Pending;
    }
    let mut ended = table.take_done(key, Some(cx), done);
    if ended.is_pending() && !queue.kick.awake() {
        queue.look();
        ended = table.take_done(key, None, done);
        // Somebody must go on looking, and follow up on what was found, unless that was this operation alone.
        if !(done_already && ended.is_ready() && !queue.device().take_worked()) {
            queue.kick.wake();
        }
    }
    ended
}

impl Drop for Op {
    #[inline]
    fn drop(&mut self) {
        // Finished ones, and so nearly all, leave nothing behind.
        if !matches!(self.state, State::Finished) || !self.earlier.is_empty() {
            self.give_up();
        }
    }
}

impl Op {
    #[inline(never)]
    fn give_up(&mut self) {
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
