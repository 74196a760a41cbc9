//! A queue pair as the operations see it: the device's queue pair and the tables of what it holds.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use tokio::sync::watch;

use crate::completion::queue::{CompletionQueue, Room};
use crate::completion::shared::Tenancy;
use crate::completion::table::{Effects, Key, Outcome, Refused, Signal, Table, Ticket, WakeLater};
use crate::error::{CloseReason, Error};
use crate::memory::{AnyBuffer, Buffer, BufferPool, ProtectionDomain};
use crate::provider::{
    self, Link, PostError, PostErrorKind, PostOne, QpConfig, ReceiveRequest, RemoteAddress, Seat, SendRequest, Sge,
    SgeList, WorkCompletion, WrOp, next_connection_id,
};
use crate::sync::{Mutex, MutexGuard};

/// Bits of a work request's id that name the queue pair within its completion queue.
const PAIR_BITS: u32 = 64 - 1 - Key::BITS;

/// Most shared receive queues of the process. They have the numbers above those of pairs; the very last one marks ids that are
/// no operations (see `provider/verbs/greeting.rs`).
pub(crate) const MAX_SHARED: usize = (1 << 16) - 1;

/// Most queue pairs of one completion queue.
pub(crate) const MAX_PAIRS: usize = (1 << PAIR_BITS) - (MAX_SHARED + 1);

/// Which queue of the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Send,
    Receive,
}

/// A work request's id: queue pair, queue, slot and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrId {
    pub pair: u32,
    pub side: Side,
    pub key: Key,
}

impl WrId {
    pub(crate) fn to_bits(self) -> u64 {
        let side = u64::from(self.side == Side::Receive);
        u64::from(self.pair) << (Key::BITS + 1) | side << Key::BITS | self.key.to_bits()
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self {
            pair: (bits >> (Key::BITS + 1)) as u32,
            side: if bits >> Key::BITS & 1 == 1 { Side::Receive } else { Side::Send },
            key: Key::from_bits(bits),
        }
    }
}

/// Plain counters, all relaxed: they tell a story, they synchronise nothing.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub sends: AtomicU64,
    pub receives: AtomicU64,
    pub writes: AtomicU64,
    pub reads: AtomicU64,
    pub atomics: AtomicU64,
    pub bytes_sent: AtomicU64,
    pub bytes_received: AtomicU64,
    pub slot_waits: AtomicU64,
    pub errors: AtomicU64,
}

/// A queue pair with its op tables.
pub(crate) struct QueuePair {
    pub(crate) send: Table<AnyBuffer>,
    pub(crate) receive: Table<AnyBuffer>,
    pub(crate) counters: Counters,
    pub(crate) config: QpConfig,
    pub(crate) max_message: u64,
    pub(crate) domain: ProtectionDomain,
    /// Differs from that of any other connection of the process.
    id: u32,
    /// Its shared receive queue, and its place there, until it has ended.
    shared: Mutex<Option<(Arc<Tenancy>, Option<Seat>)>>,
    /// The completion queue, and this pair's share of its depth.
    room: Room,
    /// This pair's number in its completion queue.
    index: u32,
    /// Held from taking a slot to posting, so that the table's order is the device's; with scratch space for that.
    send_post: Mutex<Scratch>,
    receive_post: Mutex<ReceiveRequest>,
    atomic_results: OnceLock<BufferPool>,
    closed: watch::Sender<Option<CloseReason>>,
    device: provider::Qp,
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("number", &self.device.number()).finish_non_exhaustive()
    }
}

/// Why an operation was not posted.
#[derive(Debug)]
pub(crate) enum Rejected {
    Closed(CloseReason),
    Exhausted,
    /// Receives are posted to the shared queue.
    Shared,
    System(std::io::Error),
}

impl Rejected {
    pub(crate) fn into_error(self, operation: &'static str) -> Error {
        match self {
            Self::Closed(reason) => Error::Closed { operation, reason },
            Self::Exhausted => Error::Invalid {
                operation,
                reason: "two million finished operations of this queue were neither awaited nor dropped".to_owned(),
            },
            Self::Shared => Error::SharedReceiveQueue { operation },
            Self::System(cause) => Error::io(operation, "on the device", cause),
        }
    }
}

impl From<Refused> for Rejected {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Closed(reason) => Self::Closed(reason),
            Refused::Exhausted => Self::Exhausted,
        }
    }
}

impl From<PostErrorKind> for Rejected {
    fn from(kind: PostErrorKind) -> Self {
        match kind {
            PostErrorKind::Closed(reason) => Self::Closed(reason),
            // The table admits no more than the queue holds, so a provider that says "full" has lost count.
            PostErrorKind::Full => Self::System(std::io::ErrorKind::OutOfMemory.into()),
            PostErrorKind::System(error) => Self::System(error),
        }
    }
}

impl QueuePair {
    /// Puts a fresh queue pair under the care of `queue`'s dispatcher.
    pub(crate) fn attach(
        device: provider::Qp,
        room: Room,
        domain: ProtectionDomain,
        config: QpConfig,
        (max_message, link): (u64, Link),
        shared: Option<Arc<Tenancy>>,
    ) -> Option<Arc<Self>> {
        let seat = device.take_seat();
        let id = seat.as_ref().map_or_else(next_connection_id, Seat::id);
        let shared = shared.map(|tenancy| (tenancy, seat));
        let (send_depth, receive_depth) = (config.send_depth as usize, config.receive_depth as usize);
        let queue = room.queue().clone();
        let seed = queue.next_seed();
        let pair = queue.adopt(|index| {
            Arc::new(Self {
                send: Table::new(send_depth, seed),
                receive: Table::new(receive_depth, seed),
                counters: Counters::default(),
                config,
                max_message,
                domain,
                id,
                shared: Mutex::new(shared),
                room,
                index,
                send_post: Mutex::new(Scratch::new(send_depth)),
                receive_post: Mutex::new(ReceiveRequest { wr_id: 0, sges: SgeList::new() }),
                atomic_results: OnceLock::new(),
                closed: watch::Sender::new(None),
                device,
            })
        })?;
        queue.meters.opened(link);
        if receive_depth == 0 {
            // Whoever posts one is refused, without a look at this on the way of all others.
            pair.receive.close(&CloseReason::Local, &mut Effects::default());
        }
        // The link may have failed before the dispatcher knew whom to tell.
        pair.device_failed();
        Some(pair)
    }

    pub(crate) fn number(&self) -> u32 {
        self.device.number()
    }

    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Whether it takes its receives from a shared queue.
    pub(crate) fn shares_receives(&self) -> bool {
        self.config.receive_depth == 0
    }

    pub(crate) fn queue(&self) -> &Arc<CompletionQueue> {
        self.room.queue()
    }

    pub(crate) fn table(&self, side: Side) -> &Table<AnyBuffer> {
        match side {
            Side::Send => &self.send,
            Side::Receive => &self.receive,
        }
    }

    pub(crate) fn provider_counters(&self) -> provider::QpCounters {
        self.device.counters()
    }

    /// Takes a slot for the owner and posts the request, or joins the line.
    /// `fill` puts the operation where the request is: handed over, it would be copied once more.
    #[inline]
    pub(crate) fn submit_send(
        &self,
        fill: impl FnOnce(&mut WrOp),
        inline: bool,
        owner: &mut Option<AnyBuffer>,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Key, Rejected>> {
        // Held from taking a slot to posting, so that the table's order is the device's.
        match &self.device {
            provider::Qp::Verbs(device) => self.submit_with(device.sender(), fill, inline, owner, ticket, cx),
            provider::Qp::Soft(device) => {
                let sender = SoftSender { device, scratch: self.send_post.lock() };
                self.submit_with(sender, fill, inline, owner, ticket, cx)
            }
        }
    }

    #[inline]
    fn submit_with(
        &self,
        sender: impl PostOne,
        fill: impl FnOnce(&mut WrOp),
        inline: bool,
        owner: &mut Option<AnyBuffer>,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Key, Rejected>> {
        let mut wake = WakeLater::default();
        // Let go of before anybody is woken.
        let mut sender = sender;
        if let Some(owner) = owner {
            match owner.only_sge() {
                Some(entry) => sender.set_entry(entry),
                None => owner.push_sges(sender.sges()),
            }
        }
        let key = match self.send.submit(owner, ticket, cx, &mut wake) {
            Poll::Ready(Ok(key)) => key,
            Poll::Ready(Err(refused)) => return Poll::Ready(Err(refused.into())),
            Poll::Pending => return Poll::Pending,
        };
        match sender.post_one(self.wr_id(Side::Send, key), fill, inline) {
            Ok(()) => Poll::Ready(Ok(key)),
            Err(error) => Poll::Ready(self.not_posted(Side::Send, key, owner, error, sender)),
        }
    }

    /// The same for a receive.
    pub(crate) fn submit_receive(
        &self,
        owner: &mut Option<AnyBuffer>,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Key, Rejected>> {
        let mut wake = WakeLater::default();
        let mut request = self.receive_post.lock();
        request.sges.clear();
        if let Some(owner) = owner {
            owner.push_sges(&mut request.sges);
        }
        let key = match self.receive.submit(owner, ticket, cx, &mut wake) {
            Poll::Ready(Ok(key)) => key,
            Poll::Ready(Err(refused)) => return Poll::Ready(Err(self.no_receive(refused))),
            Poll::Pending => return Poll::Pending,
        };
        request.wr_id = self.wr_id(Side::Receive, key);
        match self.device.post_receive(std::slice::from_ref(&*request)) {
            Ok(()) => Poll::Ready(Ok(key)),
            Err(error) => Poll::Ready(self.not_posted(Side::Receive, key, owner, error, request)),
        }
    }

    #[cold]
    fn no_receive(&self, refused: Refused) -> Rejected {
        if self.shares_receives() { Rejected::Shared } else { refused.into() }
    }

    /// Takes back what the device refused, under the posting lock still.
    #[cold]
    fn not_posted(
        &self,
        side: Side,
        key: Key,
        owner: &mut Option<AnyBuffer>,
        error: PostError,
        posting: impl Sized,
    ) -> Result<Key, Rejected> {
        // Accepted after all, if the device says so: it completes, with the error.
        if error.accepted > 0 {
            return Ok(key);
        }
        let mut wake = WakeLater::default();
        *owner = self.table(side).retract(key, &mut wake);
        // Before it wakes anybody.
        drop(posting);
        Err(error.kind.into())
    }

    /// Posts the members of a batch with one doorbell. Places for all of `members` were taken before.
    ///
    /// Returns how many of them the device took, and why not all of them.
    pub(crate) fn post_batch(&self, members: &mut Vec<BatchMember>) -> (usize, Option<Rejected>) {
        let places = members.len();
        let mut scratch = self.send_post.lock();
        let mut sender = self.device.list_sender();
        let list = &mut scratch.list;
        list.clear();
        // The last one posted always has a completion of its own, so that the silent ones before it resolve too.
        for run in members.chunk_by_mut(|member, _| member.goes_on) {
            if !self.send.launch(run.iter().map(|member| (member.key, member.signal))) {
                run.iter_mut().for_each(|member| member.dropped = true);
            }
        }
        members.retain(|member| !member.dropped);
        let last = members.len().saturating_sub(1);
        for (position, member) in members.iter_mut().enumerate() {
            list.push(SendRequest {
                wr_id: self.wr_id(Side::Send, member.key),
                op: member.op,
                sges: std::mem::take(&mut member.sges),
                signaled: member.signal == Signal::Own || position == last,
                inline: member.inline,
            });
        }
        let posted = if list.is_empty() { Ok(()) } else { sender.post(list) };
        list.clear();
        drop(sender);
        drop(scratch);
        self.queue().follow_up();
        self.send.return_places(places - members.len());
        match posted {
            Ok(()) => (members.len(), None),
            Err(PostError { accepted, kind }) => {
                let (taken, refused) = members.split_at(accepted.min(members.len()));
                if taken.last().is_some_and(|last| last.goes_on) {
                    // The device has the beginning of an operation, whose buffer would go back with the end of it.
                    self.close(CloseReason::Device("it took only a part of an operation".into()));
                    return (accepted, Some(kind.into()));
                }
                let outcome = match &kind {
                    PostErrorKind::Closed(reason) => Outcome::Closed(reason.clone()),
                    _ => Outcome::NotPosted("the device refused this member of the batch"),
                };
                let mut effects = Effects::default();
                for member in refused {
                    self.send.refuse(member.key, outcome.clone(), &mut effects);
                }
                effects.run();
                if taken.last().is_some_and(|last| last.signal == Signal::Silent) {
                    // The completion that was to speak for them is not coming; this one does.
                    self.probe();
                }
                (accepted, Some(kind.into()))
            }
        }
    }

    /// The peer may use memory from now on.
    #[cfg_attr(not(feature = "psk"), allow(dead_code))]
    pub(crate) fn admit(&self) -> crate::error::Result<()> {
        self.device.admit()
    }

    /// Why the queue pair does not work any more, once everything that was pending has ended.
    pub(crate) fn close_reason(&self) -> Option<CloseReason> {
        self.closed.borrow().clone()
    }

    /// Why it does not work any more, even if the dispatcher has not heard of it yet.
    pub(crate) fn close_reason_now(&self) -> Option<CloseReason> {
        self.device.close_reason()
    }

    pub(crate) fn closed(&self) -> watch::Receiver<Option<CloseReason>> {
        self.closed.subscribe()
    }

    /// Queue pair to the error state, everything pending ends in an error, the dispatcher forgets it. Idempotent.
    pub(crate) fn close(&self, reason: CloseReason) {
        let released = self.device.fail(reason.clone());
        let reason = self.device.close_reason().unwrap_or(reason);
        // Completions that the device reported before it failed keep their own status.
        self.queue().drain();
        if !released {
            // Some devices drop what is still in the queue when the queue pair goes, others add to it until then;
            // and no completion may be left when this pair's number goes to another.
            if !self.device.destroy() {
                return;
            }
            self.queue().drain();
        }
        self.failed(reason);
    }

    /// The device moved this queue pair to the error state by itself, if it did.
    pub(crate) fn device_failed(&self) {
        if let Some(reason) = self.device.close_reason() {
            self.close(reason);
        }
    }

    /// The queue pair is in the error state and the device touches none of its buffers any more.
    fn failed(&self, reason: CloseReason) {
        let mut effects = Effects::default();
        self.send.end(&reason, &mut effects);
        self.receive.end(&reason, &mut effects);
        effects.run();
        let first = self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            closed.get_or_insert(reason.clone());
            first
        });
        if first {
            tracing::debug!(qp = self.number(), %reason, "connection closed");
            self.queue().meters.closed(&reason, self.device.counters());
            self.queue().forget(self.index);
            // The last of it was dispatched.
            let shared = self.shared.lock().take();
            drop(shared);
        }
    }

    /// Resolves when it has ended and no buffer of it is in use any more.
    pub(crate) async fn ended(&self) -> CloseReason {
        let mut closed = self.closed();
        let reason = match closed.wait_for(Option::is_some).await.map(|reason| reason.clone()) {
            Ok(Some(reason)) => reason,
            _ => CloseReason::Local,
        };
        while self.queue().releasing() {
            tokio::task::yield_now().await;
        }
        reason
    }

    /// Completions so far, in both directions.
    pub(crate) fn completed(&self) -> u64 {
        self.send.completed() + self.receive.completed()
    }

    /// Posts an empty write that nobody awaits: the peer's device acknowledges it, or the retry budget runs out.
    /// It needs no key (InfiniBand specification, volume 1, 9.7.4.1.2: a zero-length request is not checked against memory).
    pub(crate) fn probe(&self) {
        let empty = |op: &mut WrOp| *op = WrOp::Write { remote: RemoteAddress::default(), imm: None };
        let mut owner = Some(AnyBuffer::None);
        if let Poll::Ready(Ok(key)) = self.submit_send(empty, false, &mut owner, &mut None, None) {
            self.send.abandon(key);
        }
    }

    /// Called by the dispatcher with completions of which the first is this pair's: takes those of the same queue that follow
    /// each other, and says how many.
    #[inline]
    pub(crate) fn complete(
        &self,
        completions: &[WorkCompletion],
        side: Side,
        effects: &mut Effects<AnyBuffer>,
    ) -> usize {
        self.table(side).complete_run(completions, effects)
    }

    /// An 8-byte registered place for an atomic's result.
    pub(crate) fn atomic_result(&self) -> crate::error::Result<Buffer> {
        if let Some(buffer) = self.atomic_results()?.try_get() {
            return Ok(buffer);
        }
        self.domain.alloc(8)
    }

    fn atomic_results(&self) -> crate::error::Result<&BufferPool> {
        if let Some(pool) = self.atomic_results.get() {
            return Ok(pool);
        }
        let pool = BufferPool::new(&self.domain, 8, self.config.send_depth as usize)?;
        Ok(self.atomic_results.get_or_init(|| pool))
    }

    fn wr_id(&self, side: Side, key: Key) -> u64 {
        WrId { pair: self.index, side, key }.to_bits()
    }
}

/// Where requests are put together. They stay there, since moving a fresh one in would cost more than filling it.
#[derive(Debug)]
struct Scratch {
    one: SendRequest,
    /// Of a batch.
    list: Vec<SendRequest>,
}

impl Scratch {
    fn new(depth: usize) -> Self {
        let one = SendRequest { wr_id: 0, op: WrOp::NOTHING, sges: SgeList::new(), signaled: true, inline: false };
        Self { one, list: Vec::with_capacity(depth) }
    }
}

/// Posts to the software device, which has its own lock for that: the order of slots is kept by this one.
struct SoftSender<'a> {
    device: &'a provider::soft::Qp,
    scratch: MutexGuard<'a, Scratch>,
}

impl PostOne for SoftSender<'_> {
    #[inline]
    fn set_entry(&mut self, entry: Option<Sge>) {
        let sges = &mut self.scratch.one.sges;
        sges.clear();
        sges.extend(entry);
    }

    #[inline]
    fn sges(&mut self) -> &mut SgeList {
        let sges = &mut self.scratch.one.sges;
        sges.clear();
        sges
    }

    #[inline]
    fn post_one(&mut self, wr_id: u64, fill: impl FnOnce(&mut WrOp), inline: bool) -> Result<(), PostError> {
        let request = &mut self.scratch.one;
        fill(&mut request.op);
        (request.wr_id, request.signaled, request.inline) = (wr_id, true, inline);
        self.device.post_send(std::slice::from_ref(request))
    }
}

/// A member of a batch, ready to be posted.
#[derive(Debug)]
pub(crate) struct BatchMember {
    pub key: Key,
    pub op: WrOp,
    pub sges: SgeList,
    pub signal: Signal,
    pub inline: bool,
    /// The operation goes on with the next member, which has the buffer of both.
    pub goes_on: bool,
    /// Its future was dropped before it was posted.
    pub dropped: bool,
}
