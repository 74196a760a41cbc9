//! A shared receive queue as the operations see it: the device's queue, the table of what it holds, and who is to get what comes.
//!
//! A receive is posted once, and completes on the completion queue of whichever queue pair took it. So its work request's id names no
//! pair: it has a number above all of theirs, which is the queue's in the whole process, and each completion queue that may see it
//! knows that number. Pairs are looked up first, so their completions cost nothing more.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use crate::completion::pair::{MAX_PAIRS, MAX_SHARED, Rejected, Side, WrId};
use crate::completion::queue::{CompletionQueue, Room};
use crate::completion::table::{Effects, Key, Outcome, Table, Ticket, WakeLater};
use crate::error::{CloseReason, Error, Result, WcStatus};
use crate::memory::{AnyBuffer, ProtectionDomain};
use crate::provider::{PostError, ReceiveRequest, SgeList, Srq, WorkCompletion};
use crate::sync::Mutex;

/// The receives of several queue pairs.
///
/// Futures hold this; what the device has ends with the last [`Tenancy`], which handles and queue pairs hold.
pub(crate) struct SharedQueue {
    pub(crate) receive: Table<AnyBuffer>,
    pub(crate) domain: ProtectionDomain,
    pub(crate) max_sge: u32,
    /// Whose the posted receives are, by slot, where that is no future's.
    mailboxes: Mutex<Vec<Option<Addressee>>>,
    /// Held from taking a slot to posting, so that the table's order is the device's.
    post: Mutex<ReceiveRequest>,
    /// Completion queues that may report any of these receives, and so have room for all.
    rooms: Mutex<SmallVec<[Room; 1]>>,
    number: u32,
    device: Srq,
}

/// For which receive of a slot that is, and where it goes when it has finished.
type Addressee = (Key, Arc<Mailbox>);

impl fmt::Debug for SharedQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedQueue").field("number", &self.number).finish_non_exhaustive()
    }
}

/// Keeps the device's queue; the last one destroys it and ends what is left in it.
#[derive(Debug)]
pub(crate) struct Tenancy(Arc<SharedQueue>);

impl Tenancy {
    pub(crate) fn new(device: Srq, domain: &ProtectionDomain, depth: u32, max_sge: u32) -> Result<Self> {
        let number = Numbers::take()?;
        Ok(Self(Arc::new(SharedQueue {
            receive: Table::new(depth as usize, next_seed()),
            domain: domain.clone(),
            max_sge,
            mailboxes: Mutex::new(Vec::with_capacity(depth as usize)),
            post: Mutex::new(ReceiveRequest { wr_id: 0, sges: SgeList::new() }),
            rooms: Mutex::default(),
            number,
            device,
        })))
    }

    pub(crate) fn queue(&self) -> &Arc<SharedQueue> {
        &self.0
    }

    pub(crate) fn device(&self) -> &Srq {
        &self.0.device
    }

    /// Makes room in a completion queue for all that this queue may have to report there.
    pub(crate) fn report_to(&self, queue: &Arc<CompletionQueue>, limit: u32) -> Result<()> {
        let mut rooms = self.0.rooms.lock();
        if !rooms.iter().any(|room| Arc::ptr_eq(room.queue(), queue)) {
            rooms.push(queue.reserve(self.0.receive.depth() as u32, limit)?);
            queue.serve_shared(self.0.number, self.0.clone());
        }
        Ok(())
    }
}

/// Differs from one queue to the next by an odd factor, as for pairs: a completion meant for an earlier queue of a number does not fit.
fn next_seed() -> u32 {
    static SEED: AtomicU32 = AtomicU32::new(1);
    SEED.fetch_add(0x9E37_79B1, Ordering::Relaxed)
}

impl Drop for Tenancy {
    fn drop(&mut self) {
        let queue = &self.0;
        if !queue.device.destroy() {
            // The device may still write there.
            tracing::error!("a shared receive queue was not destroyed; its buffers are never released");
            std::mem::forget(queue.clone());
            return;
        }
        let rooms = std::mem::take(&mut *queue.rooms.lock());
        for room in &rooms {
            // What was reported of this queue must not be taken for the next one's of this number.
            room.queue().drain();
            room.queue().forget_shared(queue.number);
        }
        drop(rooms);
        Numbers::give_back(queue.number);
        let mut effects = Effects::default();
        queue.receive.end(&CloseReason::Local, &mut effects);
        effects.run();
    }
}

impl SharedQueue {
    /// Takes a slot for the owner and posts it, or joins the line. What it gets goes to `mailbox`, if there is one, and to
    /// the future otherwise.
    pub(crate) fn submit(
        &self,
        owner: &mut Option<AnyBuffer>,
        ticket: &mut Option<Ticket>,
        mailbox: Option<&Arc<Mailbox>>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<Key, Rejected>> {
        let mut wake = WakeLater::default();
        let had_ticket = ticket.is_some();
        let mut request = self.post.lock();
        request.sges.clear();
        if let Some(owner) = owner {
            owner.push_sges(&mut request.sges);
        }
        let key = match self.receive.submit(owner, ticket, cx, &mut wake) {
            Poll::Ready(Ok(key)) => key,
            Poll::Ready(Err(refused)) => return Poll::Ready(Err(refused.into())),
            Poll::Pending => {
                drop(request);
                if ticket.is_some() && !had_ticket {
                    self.domain.meters().slot_wait();
                }
                return Poll::Pending;
            }
        };
        let side = match mailbox {
            Some(mailbox) => {
                self.address(key, mailbox);
                Side::Send
            }
            None => Side::Receive,
        };
        request.wr_id = WrId { pair: MAX_PAIRS as u32 + self.number, side, key }.to_bits();
        match self.device.post(std::slice::from_ref(&*request)) {
            Ok(()) => Poll::Ready(Ok(key)),
            Err(PostError { accepted: 1.., .. }) => Poll::Ready(Ok(key)),
            Err(error) => {
                let mut wake_as_well = WakeLater::default();
                *owner = self.receive.retract(key, &mut wake_as_well);
                drop(request);
                Poll::Ready(Err(error.kind.into()))
            }
        }
    }

    fn address(&self, key: Key, mailbox: &Arc<Mailbox>) {
        let mut mailboxes = self.mailboxes.lock();
        if mailboxes.len() <= key.slot() {
            mailboxes.resize(key.slot() + 1, None);
        }
        match &mut mailboxes[key.slot()] {
            Some((before, same)) if Arc::ptr_eq(same, mailbox) => *before = key,
            place => *place = Some((key, mailbox.clone())),
        }
    }

    /// Called by a dispatcher, which holds its lock: what one connection receives comes here in order.
    pub(crate) fn complete(&self, id: WrId, mut completion: WorkCompletion, effects: &mut Effects<AnyBuffer>) {
        match self.device.roster().find(completion.source) {
            Some(connection) => completion.source = connection,
            // Its connection was given up before it was one.
            None => {
                completion.source = 0;
                if completion.status == WcStatus::Success {
                    completion.status = WcStatus::Flushed;
                }
            }
        }
        self.receive.complete(id.key, completion, effects);
        // Its other side is none; the bit says whose receive it was.
        if id.side == Side::Send {
            if let Some(Some((key, mailbox))) = self.mailboxes.lock().get(id.key.slot()) {
                if *key == id.key {
                    mailbox.deliver(id.key, effects);
                }
            }
        }
    }

    /// What has arrived in a mailbox under this key.
    pub(crate) fn collect(&self, key: Key) -> Option<(AnyBuffer, Outcome)> {
        match self.receive.poll_done(key, None) {
            Poll::Ready(done) => done,
            Poll::Pending => None,
        }
    }

    /// Nobody collects from this mailbox any more: its buffers are released, those that are posted when a message has used them.
    pub(crate) fn close(&self, mailbox: &Arc<Mailbox>) {
        let mut keys = Vec::new();
        for place in self.mailboxes.lock().iter_mut() {
            if let Some((key, _)) = place.take_if(|(_, own)| Arc::ptr_eq(own, mailbox)) {
                keys.push(key);
            }
        }
        keys.into_iter().for_each(|key| drop(self.receive.abandon(key)));
    }

    /// Somebody waits for a message: looks where no driver does. Whether it looked anywhere.
    pub(crate) fn look(&self) -> bool {
        // Without the lock: a look may wake anybody, and end the last connection of this queue.
        let asleep: SmallVec<[Arc<CompletionQueue>; 2]> = {
            let rooms = self.rooms.lock();
            rooms.iter().map(Room::queue).filter(|queue| !queue.kick.awake()).cloned().collect()
        };
        for queue in &asleep {
            queue.look();
            if queue.looks_are_cheap() { queue.spin() } else { queue.kick.wake() }
        }
        !asleep.is_empty()
    }

    /// Counts an operation whose result was taken, so that drivers know of work being done.
    pub(crate) fn taken(&self) {
        for room in self.rooms.lock().iter() {
            room.queue().counters.taken.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Where the messages of a receiver arrive: keys of finished receives, in the order in which they finished.
#[derive(Debug)]
pub(crate) struct Mailbox(Mutex<Arrivals>);

#[derive(Debug)]
struct Arrivals {
    keys: VecDeque<Key>,
    waker: Option<Waker>,
}

impl Mailbox {
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Mutex::new(Arrivals { keys: VecDeque::with_capacity(capacity), waker: None }))
    }

    fn deliver(&self, key: Key, effects: &mut Effects<AnyBuffer>) {
        let mut arrivals = self.0.lock();
        arrivals.keys.push_back(key);
        effects.wake(arrivals.waker.take());
    }

    /// The next key; leaves the waker behind if there is none.
    pub(crate) fn next(&self, cx: &mut Context<'_>) -> Option<Key> {
        let mut arrivals = self.0.lock();
        let key = arrivals.keys.pop_front();
        if key.is_none() && !arrivals.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            let replaced = arrivals.waker.replace(cx.waker().clone());
            drop(arrivals);
            drop(replaced);
        }
        key
    }
}

/// Numbers of the process's shared receive queues.
#[derive(Debug)]
struct Numbers {
    free: Vec<u32>,
    next: u32,
}

static NUMBERS: std::sync::Mutex<Numbers> = std::sync::Mutex::new(Numbers { free: Vec::new(), next: 0 });

impl Numbers {
    fn lock() -> std::sync::MutexGuard<'static, Self> {
        NUMBERS.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn take() -> Result<u32> {
        let mut numbers = Self::lock();
        if let Some(number) = numbers.free.pop() {
            return Ok(number);
        }
        let number = numbers.next;
        if number as usize >= MAX_SHARED {
            return Err(Error::Limit {
                operation: "create shared receive queue",
                what: "shared receive queues of this process",
                value: MAX_SHARED as u64 + 1,
                limit: MAX_SHARED as u64,
                hint: "one serves thousands of connections",
            });
        }
        numbers.next += 1;
        Ok(number)
    }

    fn give_back(number: u32) {
        Self::lock().free.push(number);
    }
}
