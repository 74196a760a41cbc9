//! A completion queue and its dispatcher: whoever looks takes every completion there is, for everybody.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::completion::driver::Kick;
use crate::completion::mode::CompletionMode;
use crate::completion::pair::{MAX_PAIRS, QueuePair, WrId};
use crate::completion::shared::SharedQueue;
use crate::completion::table::Effects;
use crate::error::{CloseReason, Error, Result};
use crate::memory::AnyBuffer;
use crate::meters::Meters;
use crate::provider::{self, WorkCompletion};
use crate::sync::{Mutex, MutexGuard};

/// Completions taken in one go: a batch that fits a few cache lines and still empties a deep queue quickly.
const BATCH: usize = 32;

/// Batches one look takes at most, so that a flood of completions cannot hold a tokio worker.
const BATCHES_PER_LOOK: usize = 8;

#[derive(Debug)]
struct Dispatcher {
    batch: [WorkCompletion; BATCH],
    pairs: Vec<Option<Arc<QueuePair>>>,
    /// Shared receive queues that may report something here, by their numbers.
    shared: Vec<(u32, Arc<SharedQueue>)>,
    vacant: Vec<u32>,
    failed: Vec<u32>,
}

impl Dispatcher {
    /// The pairs that the device said have failed.
    #[cold]
    fn take_ended(&mut self) -> Vec<Arc<QueuePair>> {
        // All of a number: one that was destroyed may not be forgotten yet when another gets its number.
        let pairs = self.pairs.iter().flatten();
        let ended = pairs.filter(|pair| self.failed.contains(&pair.number())).cloned().collect();
        self.failed.clear();
        ended
    }
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    device: provider::Cq,
    dispatcher: Mutex<Dispatcher>,
    mode: CompletionMode,
    /// Where a polling thread runs that was not given a CPU of its own.
    pub(crate) cpus: Option<Arc<[usize]>>,
    pub(crate) kick: Kick,
    /// Whether a driver cares for this queue.
    pub(crate) driven: AtomicBool,
    depth: AtomicU32,
    seed: AtomicU32,
    /// Polling has failed, so no completion is to be had any more.
    broken: AtomicBool,
    /// Threads that drop buffers nobody waits for, which the tables have let go of already.
    releasing: AtomicUsize,
    /// Pairs that are to be closed, and whether somebody is at it.
    ended: Mutex<Vec<Arc<QueuePair>>>,
    ending: AtomicBool,
    pub(crate) counters: QueueCounters,
    pub(crate) meters: Meters,
}

/// Counters of a completion queue, shared by its connections.
#[derive(Debug, Default)]
pub(crate) struct QueueCounters {
    pub looks: AtomicU64,
    /// Finished operations that their futures took.
    pub taken: AtomicU64,
    pub wakeups: AtomicU64,
    pub spins: AtomicU64,
    pub events: AtomicU64,
}

impl CompletionQueue {
    pub(crate) fn new(
        context: &provider::Context,
        mode: CompletionMode,
        vector: u32,
        cpus: Option<Arc<[usize]>>,
        meters: Meters,
    ) -> Result<Self> {
        Ok(Self {
            device: context.create_cq(1, vector)?,
            cpus,
            dispatcher: Mutex::new(Dispatcher {
                batch: [WorkCompletion::default(); BATCH],
                pairs: Vec::new(),
                shared: Vec::new(),
                vacant: Vec::new(),
                failed: Vec::new(),
            }),
            mode,
            kick: Kick::default(),
            driven: AtomicBool::new(false),
            depth: AtomicU32::new(0),
            seed: AtomicU32::new(0),
            broken: AtomicBool::new(false),
            releasing: AtomicUsize::new(0),
            ended: Mutex::default(),
            ending: AtomicBool::new(false),
            counters: QueueCounters::default(),
            meters,
        })
    }

    pub(crate) fn mode(&self) -> CompletionMode {
        self.mode
    }

    /// Whether a look is a matter of memory alone, without a system call.
    pub(crate) fn looks_are_cheap(&self) -> bool {
        matches!(self.device, provider::Cq::Verbs(_))
    }

    /// Somebody waits: a driver that spins before it sleeps does so now.
    pub(crate) fn spin(&self) {
        if self.mode != CompletionMode::Event {
            self.kick.wake();
        }
    }

    /// After posting one-sided operations without waiting for them: finds those that are done already. A driver that sleeps
    /// is woken only if there is more to do.
    #[inline]
    pub(crate) fn follow_up(&self) {
        if self.device.lives_in_memory() {
            self.follow_up_in_memory();
        }
    }

    #[inline(never)]
    fn follow_up_in_memory(&self) {
        if !self.kick.awake() {
            let looked = self.look_unless_busy().is_some();
            if !looked || self.device.take_worked() {
                self.kick.wake();
            }
        }
    }

    pub(crate) fn device(&self) -> &provider::Cq {
        &self.device
    }

    /// Makes room for a queue pair's completions before it exists: a completion queue never overruns.
    pub(crate) fn reserve(self: &Arc<Self>, depth: u32, limit: u32) -> Result<Room> {
        let grow = |before: u32| before.checked_add(depth).filter(|total| *total <= limit);
        let before =
            self.depth.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grow).map_err(|before| Error::Limit {
                operation: "connect",
                what: "completion queue depth",
                value: u64::from(before) + u64::from(depth),
                limit: u64::from(limit),
                hint: "use shorter queues, or a device with more completion queues",
            })?;
        let room = Room { queue: self.clone(), depth };
        // The device never shrinks a queue, so the order of two of these does not matter.
        self.device.resize(before + depth)?;
        // A device may forget at that that it was armed, and the driver sleeps.
        self.kick.wake();
        Ok(room)
    }

    /// How many completions this queue may have to hold.
    pub(crate) fn load(&self) -> u32 {
        self.depth.load(Ordering::Relaxed)
    }

    /// Registers a queue pair with the dispatcher under a fresh index.
    pub(crate) fn adopt(&self, make: impl FnOnce(u32) -> Arc<QueuePair>) -> Option<Arc<QueuePair>> {
        let mut dispatcher = self.dispatcher.lock();
        let index = match dispatcher.vacant.pop() {
            Some(index) => index,
            None if dispatcher.pairs.len() < MAX_PAIRS => {
                dispatcher.pairs.push(None);
                dispatcher.pairs.len() as u32 - 1
            }
            None => return None,
        };
        let pair = make(index);
        dispatcher.pairs[index as usize] = Some(pair.clone());
        Some(pair)
    }

    pub(crate) fn forget(&self, index: u32) {
        let mut dispatcher = self.dispatcher.lock();
        let gone = dispatcher.pairs.get_mut(index as usize).and_then(Option::take);
        if gone.is_some() {
            dispatcher.vacant.push(index);
        }
        drop(dispatcher);
        drop(gone);
    }

    /// From now on, completions of this shared receive queue go there.
    pub(crate) fn serve_shared(&self, number: u32, queue: Arc<SharedQueue>) {
        let mut dispatcher = self.dispatcher.lock();
        let at = dispatcher.shared.partition_point(|(other, _)| *other < number);
        dispatcher.shared.insert(at, (number, queue));
    }

    /// None of its completions is to come any more.
    pub(crate) fn forget_shared(&self, number: u32) {
        let mut dispatcher = self.dispatcher.lock();
        let at = dispatcher.shared.binary_search_by_key(&number, |(other, _)| *other);
        let gone = at.ok().map(|at| dispatcher.shared.remove(at));
        drop(dispatcher);
        drop(gone);
    }

    /// Everyone that is attached.
    pub(crate) fn pairs(&self) -> Vec<Arc<QueuePair>> {
        self.dispatcher.lock().pairs.iter().flatten().cloned().collect()
    }

    /// Takes what is there, unless somebody else is at it. Returns the number of completions found.
    pub(crate) fn look(&self) -> usize {
        self.look_unless_busy().unwrap_or(0)
    }

    /// The same; `None` when somebody else is at it.
    pub(crate) fn look_unless_busy(&self) -> Option<usize> {
        Some(self.dispatch(self.dispatcher.try_lock()?, BATCHES_PER_LOOK))
    }

    /// Like [`look`](Self::look), but waits for somebody else's look to end first. After arming the queue nothing less will do:
    /// that other look may have polled before the queue was armed.
    pub(crate) fn look_after_arming(&self) -> usize {
        self.dispatch(self.dispatcher.lock(), BATCHES_PER_LOOK)
    }

    /// Takes everything that was there when this was called.
    pub(crate) fn drain(&self) {
        // What the others' operations add meanwhile is theirs: the queue holds no more than this at once.
        let looks = self.load() as usize / (BATCH * BATCHES_PER_LOOK) + 1;
        for _ in 0..looks {
            if self.broken.load(Ordering::SeqCst) || self.dispatch(self.dispatcher.lock(), BATCHES_PER_LOOK) == 0 {
                return;
            }
        }
    }

    /// Whether buffers of operations that have ended are being dropped at this moment.
    ///
    /// A thread that needs to know of an end may find the tables empty while another still drops what was in them.
    pub(crate) fn releasing(&self) -> bool {
        self.releasing.load(Ordering::SeqCst) > 0
    }

    /// A number for the tables of a new queue pair that differs from those of the pairs before it.
    pub(crate) fn next_seed(&self) -> u32 {
        // An odd step far from 1, since generations grow by 1.
        self.seed.fetch_add(0x9E37_79B1, Ordering::Relaxed)
    }

    fn dispatch(&self, mut guard: MutexGuard<'_, Dispatcher>, batches: usize) -> usize {
        let dispatcher = &mut *guard;
        let mut effects = Effects::<AnyBuffer>::default();
        let mut found = 0;
        // Asked first: a queue pair's last completions are there before the device says that it failed,
        // so they are all in the polls that follow, and keep their own status.
        let failed = self.device.take_failed(&mut dispatcher.failed);
        let mut left = batches;
        let broken = loop {
            let taken = match self.device.poll(&mut dispatcher.batch) {
                Ok(taken) => taken,
                // Boxed, since it is there at hardly any look.
                Err(error) => break Some(Box::new(error)),
            };
            let mut done = 0;
            while done < taken {
                let rest = &dispatcher.batch[done..taken];
                let id = WrId::from_bits(rest[0].wr_id);
                done += if let Some(Some(pair)) = dispatcher.pairs.get(id.pair as usize) {
                    pair.complete(rest, id.side, &mut effects)
                } else {
                    complete_shared(&dispatcher.shared, &rest[0], &mut effects);
                    1
                };
            }
            found += taken;
            left = left.saturating_sub(1);
            if taken < BATCH || (left == 0 && !failed) {
                break None;
            }
        };
        let ended = if dispatcher.failed.is_empty() { None } else { Some(dispatcher.take_ended()) };
        // Only who holds the dispatcher counts this.
        advance(&self.counters.looks, 1);
        if effects.is_untouched() {
            drop(guard);
            std::mem::forget(effects);
        } else {
            self.carry_out(effects, guard);
        }
        if let Some(ended) = ended {
            self.end(ended);
        }
        if let Some(error) = broken.filter(|_| !self.broken.swap(true, Ordering::SeqCst)) {
            self.fail_all(&CloseReason::Device(error.to_string().into()));
        }
        found
    }

    /// Lets go of the dispatcher, drops the buffers that nobody waits for, and wakes.
    #[inline(never)]
    fn carry_out(&self, mut effects: Effects<AnyBuffer>, guard: MutexGuard<'_, Dispatcher>) {
        let releases = effects.has_owners();
        // Said before anybody else can find the tables empty.
        if releases {
            self.releasing.fetch_add(1, Ordering::SeqCst);
        }
        drop(guard);
        effects.run();
        if releases {
            self.releasing.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Closes pairs that the device has given up. Closing one may come upon more of them: whoever is at it already takes care of
    /// those, since each calling the next would use up the stack when a host with a thousand connections dies.
    #[cold]
    fn end(&self, pairs: Vec<Arc<QueuePair>>) {
        self.ended.lock().extend(pairs);
        while !self.ending.swap(true, Ordering::SeqCst) {
            loop {
                let pair = self.ended.lock().pop();
                let Some(pair) = pair else { break };
                pair.device_failed();
            }
            self.ending.store(false, Ordering::SeqCst);
            if self.ended.lock().is_empty() {
                break;
            }
        }
    }

    /// Closes every queue pair.
    pub(crate) fn fail_all(&self, reason: &CloseReason) {
        for pair in self.pairs() {
            pair.close(reason.clone());
        }
    }
}

/// A completion that is no pair's: of a receive of a shared queue, or of a pair that is gone.
#[inline(never)]
fn complete_shared(shared: &[(u32, Arc<SharedQueue>)], completion: &WorkCompletion, effects: &mut Effects<AnyBuffer>) {
    let id = WrId::from_bits(completion.wr_id);
    let Some(number) = id.pair.checked_sub(MAX_PAIRS as u32) else { return };
    if let Ok(at) = shared.binary_search_by_key(&number, |(other, _)| *other) {
        shared[at].1.complete(id, *completion, effects);
    }
}

/// Adds to a counter that one thread at a time writes, without a locked instruction.
pub(crate) fn advance(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// A queue pair's share of a completion queue, given back on drop.
#[derive(Debug)]
pub(crate) struct Room {
    queue: Arc<CompletionQueue>,
    depth: u32,
}

impl Room {
    pub(crate) fn queue(&self) -> &Arc<CompletionQueue> {
        &self.queue
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.queue.depth.fetch_sub(self.depth, Ordering::Relaxed);
    }
}
