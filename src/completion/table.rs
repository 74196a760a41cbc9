//! The op table: who owns a buffer while the device may touch it, and who is woken when it lets go.
//!
//! One table per queue of a queue pair. It does no I/O and knows no device, so loom, miri and property tests run it as it is.
//!
//! ```text
//!             submit                 complete              poll_done
//!   (waiting) ──────▶ Posted(owner) ─────────▶ Done(owner) ─────────▶ (free)
//!   park ──▶ Parked ──▶ ┘  │ abandon                │ abandon
//!                          ▼                        ▼
//!                     Abandoned(owner) ──complete──▶ (free, owner dropped)
//! ```
//!
//! Invariants:
//! - An owner that went in at `submit` comes out only through `complete` + `poll_done`, `complete` after `abandon`,
//!   `retract` (the device refused it) or `end` (the queue pair is gone). Dropping a future never drops an owner that is posted.
//! - `in_flight` counts what the device holds, never more than `depth`. A finished operation whose future nobody polls keeps
//!   its slot but not its place in the queue, so it cannot starve the others; the slots grow in that case.
//! - Whoever waits for a place gets it in the order of arrival. A waiter that goes away passes the turn on.
//! - Wakers are called and owners dropped by the caller, from [`Effects`], after every lock is released.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use crate::error::CloseReason;
use crate::provider::WorkCompletion;
use crate::sync::Mutex;

/// Most slots of a table; `Key` packs into 21 + 22 bits of a work request's id.
const MAX_SLOTS: usize = 1 << Key::INDEX_BITS;

/// Names one operation; the generation makes a late or doubled completion harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    index: u32,
    generation: u32,
}

impl Key {
    pub(crate) const INDEX_BITS: u32 = 21;
    pub(crate) const GENERATION_BITS: u32 = 22;
    pub(crate) const BITS: u32 = Self::INDEX_BITS + Self::GENERATION_BITS;

    pub(crate) fn to_bits(self) -> u64 {
        u64::from(self.index) << Self::GENERATION_BITS | u64::from(self.generation)
    }

    /// The slot's number in its table.
    pub(crate) fn slot(self) -> usize {
        self.index as usize
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self {
            index: (bits >> Self::GENERATION_BITS) as u32 & ((1 << Self::INDEX_BITS) - 1),
            generation: bits as u32 & ((1 << Self::GENERATION_BITS) - 1),
        }
    }
}

/// A place in the waiting line; the first is 1.
pub(crate) type Ticket = NonZeroU64;

/// How an operation ended.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// The device reported it.
    Completed(WorkCompletion),
    /// It was never handed to the device, or the device is gone.
    Closed(CloseReason),
    /// The batch it belonged to was dropped, or refused by the device, before this member was posted.
    NotPosted(&'static str),
}

/// What the table gives back of an operation that has ended. A place to put it in, since returning it would move it twice.
#[derive(Debug)]
pub(crate) struct Done<B> {
    pub owner: Option<B>,
    pub outcome: Option<Outcome>,
}

impl<B> Default for Done<B> {
    #[inline]
    fn default() -> Self {
        Self { owner: None, outcome: None }
    }
}

/// Why the table does not take an operation.
#[derive(Clone, Debug)]
pub(crate) enum Refused {
    Closed(CloseReason),
    /// Two million finished operations that nobody polled or dropped.
    Exhausted,
}

/// What became of an operation that nobody waits for any more.
#[derive(Debug)]
pub(crate) enum Abandoned<B> {
    /// The device has its owner, and the table keeps that until the device lets go.
    Held,
    /// It was never posted.
    Parked(B),
    /// It had finished already.
    Done(B, Outcome),
    Gone,
}

/// Wakes whoever is in it when it is dropped, and drops the waker that was replaced: that may run foreign code, so declare it before
/// a guard, and it acts after the guard. One for posting, which adds one at most, and one for undoing that.
#[derive(Debug, Default)]
pub(crate) struct WakeLater {
    next: Option<Waker>,
    replaced: Option<Waker>,
}

impl WakeLater {
    #[inline]
    fn add(&mut self, waker: Option<Waker>) {
        if waker.is_some() {
            debug_assert!(self.next.is_none());
            wake(std::mem::replace(&mut self.next, waker));
        }
    }
}

impl Drop for WakeLater {
    #[inline]
    fn drop(&mut self) {
        wake(self.next.take());
    }
}

/// What is left to do once the locks are released.
#[derive(Debug)]
pub(crate) struct Effects<B> {
    wakers: SmallVec<[Waker; 16]>,
    owners: SmallVec<[B; 4]>,
    /// Nothing was ever put in: cheaper to ask than two lists are, and to drop.
    untouched: bool,
}

impl<B> Default for Effects<B> {
    fn default() -> Self {
        Self { wakers: SmallVec::new(), owners: SmallVec::new(), untouched: true }
    }
}

impl<B> Effects<B> {
    /// Drops the owners nobody waits for, then wakes. In this order, so that a woken task finds the memory free.
    pub(crate) fn run(&mut self) {
        if !self.owners.is_empty() {
            self.owners.clear();
        }
        if !self.wakers.is_empty() {
            self.wakers.drain(..).for_each(Waker::wake);
        }
    }

    /// Whether nothing was ever put in, so that it need not be dropped either.
    #[inline]
    pub(crate) fn is_untouched(&self) -> bool {
        self.untouched
    }

    /// Whether there are buffers to drop.
    pub(crate) fn has_owners(&self) -> bool {
        !self.owners.is_empty()
    }

    #[inline]
    pub(crate) fn wake(&mut self, waker: Option<Waker>) {
        if let Some(waker) = waker {
            self.untouched = false;
            self.wakers.push(waker);
        }
    }

    fn release(&mut self, owner: Option<B>) {
        self.untouched = false;
        self.owners.extend(owner);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Free,
    /// In a batch that is not posted yet.
    Parked,
    Posted,
    /// Posted, and nobody waits for it any more.
    Abandoned,
    Done,
}

/// The owner stays where it is from posting to the end: moving it from phase to phase would cost more than the phases do.
#[derive(Debug)]
struct Slot<B> {
    generation: u32,
    phase: Phase,
    /// Position in the queue once posted, for the members that complete silently.
    sequence: u64,
    /// There unless the slot is free.
    owner: Option<B>,
    waker: Option<Waker>,
    /// There when it is done.
    outcome: Option<Outcome>,
}

impl<B> Slot<B> {
    fn new(generation: u32) -> Self {
        Self { generation, phase: Phase::Free, sequence: 0, owner: None, waker: None, outcome: None }
    }

    /// Whether the device has the owner.
    #[inline]
    fn posted(&self) -> bool {
        matches!(self.phase, Phase::Posted | Phase::Abandoned)
    }

    /// Posted or parked → done, or, when nobody waits any more, → free: then its number goes to the free ones.
    #[inline(always)]
    #[must_use]
    fn finish(&mut self, outcome: Outcome, effects: &mut Effects<B>) -> bool {
        match self.phase {
            Phase::Posted | Phase::Parked => {
                self.phase = Phase::Done;
                put(&mut self.outcome, Some(outcome));
                effects.wake(self.waker.take());
                false
            }
            Phase::Abandoned => {
                effects.release(self.owner.take());
                self.vacate();
                true
            }
            Phase::Done | Phase::Free => false,
        }
    }

    /// Nobody's any more; its owner was taken out.
    #[inline]
    fn vacate(&mut self) {
        self.phase = Phase::Free;
        self.generation = (self.generation + 1) & ((1 << Key::GENERATION_BITS) - 1);
    }
}

#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    places: usize,
    waker: Option<Waker>,
}

#[derive(Debug)]
struct State<B> {
    slots: Vec<Slot<B>>,
    free: Vec<u32>,
    in_flight: usize,
    peak_in_flight: usize,
    posted: u64,
    completed: u64,
    /// Posted without a completion of their own, in queue order: a later completion speaks for them.
    silent: VecDeque<(u64, u32)>,
    line: VecDeque<Waiting>,
    next_ticket: Ticket,
    closed: Option<CloseReason>,
    /// Of slots that are made later.
    first_generation: u32,
}

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Table<B> {
    state: Mutex<State<B>>,
    depth: usize,
}

/// Whether the device reports an operation's success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    Own,
    /// With the next `Own` completion of the queue.
    Silent,
}

impl<B> Table<B> {
    /// `seed` differs from table to table, so that a completion meant for an earlier one does not fit.
    pub(crate) fn new(depth: usize, seed: u32) -> Self {
        let first_generation = seed & ((1 << Key::GENERATION_BITS) - 1);
        let slots = (0..depth).map(|_| Slot::new(first_generation)).collect();
        Self {
            state: Mutex::new(State {
                slots,
                free: (0..depth as u32).rev().collect(),
                in_flight: 0,
                peak_in_flight: 0,
                posted: 0,
                completed: 0,
                silent: VecDeque::with_capacity(depth),
                line: VecDeque::new(),
                next_ticket: Ticket::MIN,
                closed: None,
                first_generation,
            }),
            depth,
        }
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Operations that the device holds.
    pub(crate) fn in_flight(&self) -> usize {
        self.state.lock().in_flight
    }

    /// Completions that the device reported.
    pub(crate) fn completed(&self) -> u64 {
        self.state.lock().completed
    }

    /// The most that the device ever held.
    pub(crate) fn peak_in_flight(&self) -> usize {
        self.state.lock().peak_in_flight
    }

    /// Slots that hold an owner, whether posted, parked or finished.
    pub(crate) fn live_slots(&self) -> usize {
        let state = self.state.lock();
        state.slots.len() - state.free.len()
    }

    /// Operations that wait for a place.
    pub(crate) fn waiting(&self) -> usize {
        self.state.lock().line.len()
    }

    /// Takes a place for `owner` and moves it in, or joins the line (when `cx` is given) and leaves it.
    /// The task of `cx` is woken at the completion, or when its turn in the line has come.
    ///
    /// The caller holds the queue's posting lock and posts the request before releasing it,
    /// so that the table's order is the device's. Who is next in line is woken with `wake`, which the caller drops after that lock.
    #[inline(always)]
    pub(crate) fn submit(
        &self,
        owner: &mut Option<B>,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
        wake: &mut WakeLater,
    ) -> Poll<Result<Key, Refused>> {
        let waker = cx.as_ref().map(|cx| cx.waker().clone());
        let mut state = self.state.lock();
        match state.take_places(self.depth, 1, ticket, cx, &mut wake.replaced) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(reason)) => return Poll::Ready(Err(Refused::Closed(reason))),
            Poll::Ready(Ok(())) => {}
        }
        // The owner stays with the caller unless there is a slot for it.
        let Some(index) = owner.as_ref().and_then(|_| state.free_slot()) else {
            state.in_flight -= 1;
            wake.add(state.next_in_line(self.depth));
            return Poll::Ready(Err(Refused::Exhausted));
        };
        let sequence = state.next_sequence();
        let slot = &mut state.slots[index as usize];
        (slot.phase, slot.sequence) = (Phase::Posted, sequence);
        put(&mut slot.owner, owner.take());
        put(&mut slot.waker, waker);
        let key = Key { index, generation: slot.generation };
        wake.add(state.next_in_line(self.depth));
        Poll::Ready(Ok(key))
    }

    /// Moves `owner` into a slot that takes no place in the queue yet: a member of a batch.
    /// Gives it back when the queue is closed or the table is at its limit.
    pub(crate) fn park(&self, owner: B) -> Result<Key, (B, Refused)> {
        let mut state = self.state.lock();
        if let Some(reason) = &state.closed {
            return Err((owner, Refused::Closed(reason.clone())));
        }
        let Some(index) = state.free_slot() else {
            return Err((owner, Refused::Exhausted));
        };
        let slot = &mut state.slots[index as usize];
        (slot.phase, slot.owner) = (Phase::Parked, Some(owner));
        Ok(Key { index, generation: slot.generation })
    }

    /// Takes `places` places at once, for a batch, or joins the line.
    pub(crate) fn take_places(
        &self,
        places: usize,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Result<(), CloseReason>> {
        let mut replaced = None;
        let mut state = self.state.lock();
        let taken = state.take_places(self.depth, places, ticket, cx, &mut replaced);
        let next = if matches!(taken, Poll::Ready(Ok(()))) { state.next_in_line(self.depth) } else { None };
        drop(state);
        wake(next);
        taken
    }

    /// Takes all places once everything that came before is done: until they are returned, nothing is posted.
    pub(crate) fn take_all_places(
        &self,
        ticket: &mut Option<Ticket>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CloseReason>> {
        let mut replaced = None;
        let mut state = self.state.lock();
        // The device holds nothing more by that.
        let peak = state.peak_in_flight;
        let taken = state.take_places(self.depth, self.depth, ticket, Some(cx), &mut replaced);
        state.peak_in_flight = peak;
        taken
    }

    /// Gives places back that no member used.
    pub(crate) fn return_places(&self, places: usize) {
        let mut state = self.state.lock();
        state.in_flight -= places;
        let next = state.next_in_line(self.depth);
        drop(state);
        wake(next);
    }

    /// Turns the parked members that belong to one operation into posted ones, each using up one place.
    /// `false`, and nothing is done, when its future was dropped meanwhile.
    pub(crate) fn launch(&self, run: impl Iterator<Item = (Key, Signal)> + Clone) -> bool {
        let mut state = self.state.lock();
        if !run.clone().all(|(key, _)| state.slot(key).is_some_and(|slot| slot.phase == Phase::Parked)) {
            return false;
        }
        for (key, signal) in run {
            let sequence = state.posted;
            let Some(slot) = state.slot(key) else { continue };
            (slot.phase, slot.sequence) = (Phase::Posted, sequence);
            state.posted += 1;
            if signal == Signal::Silent {
                state.silent.push_back((sequence, key.index));
            }
        }
        true
    }

    /// Ends a parked or just posted member that the device did not take; its owner goes back to its future.
    /// Its place, if it had one, is free again.
    pub(crate) fn refuse(&self, key: Key, outcome: Outcome, effects: &mut Effects<B>) {
        let mut state = self.state.lock();
        let silent = state.silent.iter().position(|&(_, index)| index == key.index);
        let Some(slot) = state.slot(key) else { return };
        let posted = slot.posted();
        state.finish(key.index, outcome, effects);
        if posted {
            if let Some(position) = silent {
                state.silent.remove(position);
            }
            state.in_flight -= 1;
            effects.wake(state.next_in_line(self.depth));
        }
    }

    /// Undoes a `submit` whose request the device refused.
    pub(crate) fn retract(&self, key: Key, wake: &mut WakeLater) -> Option<B> {
        let mut state = self.state.lock();
        let slot = state.slot(key)?;
        // Unless the queue pair ended at the same time, which ended this operation too.
        let posted = slot.posted();
        let (owner, waker) = (slot.owner.take(), slot.waker.take());
        slot.outcome = None;
        state.in_flight -= usize::from(posted);
        state.release(key.index);
        wake.add(state.next_in_line(self.depth));
        drop(state);
        drop(waker);
        owner
    }

    /// The device is done with an operation, and with every silent one before it.
    pub(crate) fn complete(&self, key: Key, completion: WorkCompletion, effects: &mut Effects<B>) {
        let mut state = self.state.lock();
        state.complete(key, &completion, effects);
        effects.wake(state.next_in_line(self.depth));
    }

    /// The same for each of the completions that are of the first one's queue, up to one that is not; how many those were.
    #[inline]
    pub(crate) fn complete_run(&self, completions: &[WorkCompletion], effects: &mut Effects<B>) -> usize {
        let mut state = self.state.lock();
        let mut done = 0;
        while let Some(completion) = completions.get(done) {
            if completion.wr_id >> Key::BITS != completions[0].wr_id >> Key::BITS {
                break;
            }
            state.complete(Key::from_bits(completion.wr_id), completion, effects);
            done += 1;
        }
        // Once: whoever is woken takes its place, and passes the turn on if there are more.
        effects.wake(state.next_in_line(self.depth));
        done
    }

    /// The owner and the outcome, once there; registers the waker otherwise (when `cx` is given).
    pub(crate) fn poll_done(&self, key: Key, cx: Option<&mut Context<'_>>) -> Poll<Option<(B, Outcome)>> {
        let mut done = Done::default();
        self.take_done(key, cx, &mut done).map(|()| done.owner.zip(done.outcome))
    }

    /// The same, into a place of the caller's that is empty, and stays so for a key that no operation has any more.
    #[inline(never)]
    pub(crate) fn take_done(&self, key: Key, cx: Option<&mut Context<'_>>, done: &mut Done<B>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.take_done(key, done) {
            return Poll::Ready(());
        }
        let Some(slot) = state.slot(key) else { return Poll::Ready(()) };
        match slot.phase {
            Phase::Done | Phase::Free => Poll::Ready(()),
            Phase::Parked | Phase::Posted | Phase::Abandoned => {
                let replaced = cx.and_then(|cx| set_waker(&mut slot.waker, cx));
                drop(state);
                drop(replaced);
                Poll::Pending
            }
        }
    }

    /// The same for one that is done, as nearly all are that are asked again.
    #[inline(always)]
    pub(crate) fn take_if_done(&self, key: Key, done: &mut Done<B>) -> bool {
        self.state.lock().take_done(key, done)
    }

    /// Whether the operation has ended, without taking anything; registers the waker otherwise.
    pub(crate) fn poll_ended(&self, key: Key, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        let Some(slot) = state.slot(key) else { return Poll::Ready(()) };
        match slot.phase {
            Phase::Done | Phase::Free => Poll::Ready(()),
            Phase::Parked | Phase::Posted | Phase::Abandoned => {
                let replaced = set_waker(&mut slot.waker, cx);
                drop(state);
                drop(replaced);
                Poll::Pending
            }
        }
    }

    /// The future is dropped, or its time is up. An owner that the device holds stays until it lets go; any other is returned.
    pub(crate) fn abandon(&self, key: Key) -> Abandoned<B> {
        let mut state = self.state.lock();
        let Some(slot) = state.slot(key) else { return Abandoned::Gone };
        let waker = slot.waker.take();
        if slot.posted() {
            slot.phase = Phase::Abandoned;
            drop(state);
            drop(waker);
            return Abandoned::Held;
        }
        let (owner, outcome) = (slot.owner.take(), slot.outcome.take());
        state.release(key.index);
        drop(state);
        drop(waker);
        match (owner, outcome) {
            (Some(owner), Some(outcome)) => Abandoned::Done(owner, outcome),
            (Some(owner), None) => Abandoned::Parked(owner),
            (None, _) => Abandoned::Gone,
        }
    }

    /// Leaves the line; the turn passes on.
    pub(crate) fn leave(&self, ticket: Ticket) {
        let mut state = self.state.lock();
        let gone = state.position(ticket).and_then(|position| state.line.remove(position));
        let next = state.next_in_line(self.depth);
        drop(state);
        drop(gone);
        wake(next);
    }

    /// Nothing is admitted any more; whoever waits in the line is told.
    pub(crate) fn close(&self, reason: &CloseReason, effects: &mut Effects<B>) {
        let mut state = self.state.lock();
        if state.closed.is_none() {
            state.closed = Some(reason.clone());
        }
        for waiting in &mut state.line {
            effects.wake(waiting.waker.take());
        }
    }

    /// The queue pair is gone (or the device promised to touch nothing of it any more): everything posted ends.
    pub(crate) fn end(&self, reason: &CloseReason, effects: &mut Effects<B>) {
        self.close(reason, effects);
        let mut state = self.state.lock();
        state.silent.clear();
        for index in 0..state.slots.len() {
            if state.slots[index].posted() {
                state.in_flight -= 1;
                state.finish(index as u32, Outcome::Closed(reason.clone()), effects);
            }
        }
    }
}

impl<B> State<B> {
    #[inline]
    fn take_places(
        &mut self,
        depth: usize,
        places: usize,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
        replaced: &mut Option<Waker>,
    ) -> Poll<Result<(), CloseReason>> {
        // Nearly always: room, and nobody who came before.
        if ticket.is_none() && self.line.is_empty() && self.closed.is_none() && self.in_flight + places <= depth {
            self.admit(places);
            return Poll::Ready(Ok(()));
        }
        self.join_line(depth, places, ticket, cx, replaced)
    }

    #[inline(never)]
    fn join_line(
        &mut self,
        depth: usize,
        places: usize,
        ticket: &mut Option<Ticket>,
        cx: Option<&mut Context<'_>>,
        replaced: &mut Option<Waker>,
    ) -> Poll<Result<(), CloseReason>> {
        let position = ticket.and_then(|ticket| self.position(ticket));
        if let Some(reason) = self.closed.clone() {
            if let Some(waiting) = position.and_then(|position| self.line.remove(position)) {
                *replaced = waiting.waker;
            }
            *ticket = None;
            return Poll::Ready(Err(reason));
        }
        let my_turn = match position {
            Some(position) => position == 0,
            None => self.line.is_empty(),
        };
        if my_turn && self.in_flight + places <= depth {
            if position.is_some() {
                *replaced = self.line.pop_front().and_then(|waiting| waiting.waker);
            }
            *ticket = None;
            self.admit(places);
            return Poll::Ready(Ok(()));
        }
        if let Some(cx) = cx {
            match position {
                Some(position) => *replaced = set_waker(&mut self.line[position].waker, cx),
                None => {
                    let mine = self.next_ticket;
                    self.next_ticket = self.next_ticket.saturating_add(1);
                    self.line.push_back(Waiting { ticket: mine, places, waker: Some(cx.waker().clone()) });
                    *ticket = Some(mine);
                }
            }
        }
        Poll::Pending
    }

    fn admit(&mut self, places: usize) {
        self.in_flight += places;
        self.peak_in_flight = self.peak_in_flight.max(self.in_flight);
    }

    fn position(&self, ticket: Ticket) -> Option<usize> {
        self.line.binary_search_by_key(&ticket, |waiting| waiting.ticket).ok()
    }

    /// The waker of the first in line, if there is room for it now.
    #[inline]
    fn next_in_line(&mut self, depth: usize) -> Option<Waker> {
        let in_flight = self.in_flight;
        let first = self.line.front_mut()?;
        if in_flight + first.places <= depth { first.waker.take() } else { None }
    }

    #[inline]
    fn free_slot(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| self.one_more_slot())
    }

    #[cold]
    fn one_more_slot(&mut self) -> Option<u32> {
        if self.slots.len() >= MAX_SLOTS {
            return None;
        }
        let index = self.slots.len() as u32;
        self.slots.push(Slot::new(self.first_generation));
        // Room for every slot at once, so that giving them back never allocates.
        self.free.reserve(self.slots.len());
        Some(index)
    }

    fn slot(&mut self, key: Key) -> Option<&mut Slot<B>> {
        self.slots.get_mut(key.index as usize).filter(|slot| slot.generation == key.generation)
    }

    fn next_sequence(&mut self) -> u64 {
        let sequence = self.posted;
        self.posted += 1;
        sequence
    }

    #[inline(always)]
    fn take_done(&mut self, key: Key, done: &mut Done<B>) -> bool {
        let Some(slot) = self.slot(key).filter(|slot| slot.phase == Phase::Done) else { return false };
        put(&mut done.owner, slot.owner.take());
        put(&mut done.outcome, slot.outcome.take());
        slot.vacate();
        self.free.push(key.index);
        true
    }

    /// Frees a slot whose owner was taken out.
    fn release(&mut self, index: u32) {
        self.slots[index as usize].vacate();
        self.free.push(index);
    }

    #[inline(always)]
    fn complete(&mut self, key: Key, completion: &WorkCompletion, effects: &mut Effects<B>) {
        if !self.silent.is_empty() {
            self.complete_silent(key, completion, effects);
        }
        let Some(slot) = self.slot(key) else { return };
        if !slot.posted() {
            return;
        }
        if slot.finish(Outcome::Completed(*completion), effects) {
            self.free.push(key.index);
        }
        self.in_flight -= 1;
        self.completed += 1;
    }

    /// What was posted before this one without a completion of its own is done.
    #[inline(never)]
    fn complete_silent(&mut self, key: Key, completion: &WorkCompletion, effects: &mut Effects<B>) {
        let Some(slot) = self.slot(key).filter(|slot| slot.posted()) else { return };
        let sequence = slot.sequence;
        while let Some(&(before, index)) = self.silent.front() {
            if before > sequence {
                break;
            }
            self.silent.pop_front();
            if before < sequence {
                // Success: a silent request that fails has a completion of its own, with an error.
                let done = WorkCompletion { status: crate::error::WcStatus::Success, ..*completion };
                self.in_flight -= 1;
                self.finish(index, Outcome::Completed(done), effects);
            }
        }
    }

    fn finish(&mut self, index: u32, outcome: Outcome, effects: &mut Effects<B>) {
        if self.slots[index as usize].finish(outcome, effects) {
            self.free.push(index);
        }
    }
}

/// Returns the waker that was replaced: dropping it may run foreign code, so not under a lock.
#[must_use]
fn set_waker(place: &mut Option<Waker>, cx: &Context<'_>) -> Option<Waker> {
    match place {
        Some(waker) if waker.will_wake(cx.waker()) => None,
        _ => place.replace(cx.waker().clone()),
    }
}

/// Fills a place that is empty, without asking again whether something has to be dropped there.
#[inline]
fn put<T>(place: &mut Option<T>, value: Option<T>) {
    debug_assert!(place.is_none());
    std::mem::forget(std::mem::replace(place, value));
}

fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

#[cfg(test)]
mod tests;
