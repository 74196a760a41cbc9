//! Who holds which part of a region: pure bookkeeping, without the memory itself.
//!
//! A region is cut into chunks of equal size: one for a buffer of its own, many for a pool. Each chunk counts the pieces
//! that live of it; a chunk without pieces goes back to the free list, and from there to whoever waits longest.

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
pub(super) struct Chunks {
    /// Live pieces per chunk.
    ///
    /// A count cannot overflow: each piece also holds a count of the region's `Arc`, which aborts the process first.
    pieces: Box<[AtomicUsize]>,
    queue: Mutex<Queue>,
}

/// Invariant: the first `free.len()` waiters are entitled to a chunk and have been woken; chunks beyond those are
/// anybody's. So there is no hand-over state that a cancelled waiter could lose, and nobody overtakes.
#[derive(Debug)]
struct Queue {
    /// A stack: the chunk used last is the one that the caches still hold. Never grows beyond its first capacity.
    free: Vec<u32>,
    /// In order of their tickets.
    waiters: VecDeque<Waiter>,
    next_ticket: u64,
}

#[derive(Debug)]
struct Waiter {
    ticket: u64,
    waker: Waker,
}

/// A place in the queue of those who wait.
#[derive(Debug)]
pub(super) struct Ticket(u64);

impl Chunks {
    /// `count` chunks, all free.
    pub(super) fn free(count: u32) -> Self {
        Self::new(count, (0..count).rev().collect(), 0)
    }

    /// A single chunk, held already as one piece.
    pub(super) fn taken() -> Self {
        Self::new(1, Vec::with_capacity(1), 1)
    }

    fn new(count: u32, free: Vec<u32>, pieces: usize) -> Self {
        Self {
            pieces: (0..count).map(|_| AtomicUsize::new(pieces)).collect(),
            queue: Mutex::new(Queue { free, waiters: VecDeque::new(), next_ticket: 0 }),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.pieces.len()
    }

    /// Chunks that [`take`](Self::take) would give right now.
    pub(super) fn available(&self) -> usize {
        let queue = self.queue.lock();
        queue.free.len().saturating_sub(queue.waiters.len())
    }

    /// Takes a chunk that nobody waits for, held as one piece.
    pub(super) fn take(&self) -> Option<u32> {
        let chunk = self.queue.lock().take()?;
        Some(self.first_piece(chunk))
    }

    /// Takes a chunk, or queues up. `ticket` is the caller's place in the queue between two calls;
    /// one who stops calling gives it to [`leave`](Self::leave).
    pub(super) fn poll_take(&self, ticket: &mut Option<Ticket>, cx: &mut Context<'_>) -> Poll<u32> {
        // A waker is user code: dropping one can end a task that holds a buffer of this pool, which comes back here.
        // So wakers leave the lock before they are dropped or woken.
        let mut _old_waker = None;
        let mut queue = self.queue.lock();
        let place = ticket.as_ref().and_then(|ticket| queue.position(ticket.0));
        let taken = match place {
            None => queue.take(),
            Some(at) if at < queue.free.len() => {
                _old_waker = queue.waiters.remove(at).map(|waiter| waiter.waker);
                queue.free.pop()
            }
            Some(at) => {
                let waker = &mut queue.waiters[at].waker;
                if !waker.will_wake(cx.waker()) {
                    _old_waker = Some(std::mem::replace(waker, cx.waker().clone()));
                }
                None
            }
        };
        match taken {
            Some(chunk) => {
                *ticket = None;
                Poll::Ready(self.first_piece(chunk))
            }
            None => {
                if place.is_none() {
                    *ticket = Some(queue.enter(cx.waker().clone()));
                }
                Poll::Pending
            }
        }
    }

    /// Gives up a place in the queue. If its turn had come, it is the next one's.
    pub(super) fn leave(&self, ticket: Ticket) {
        let mut queue = self.queue.lock();
        let Some(at) = queue.position(ticket.0) else { return };
        let left = queue.waiters.remove(at);
        let next = if at < queue.free.len() { queue.last_entitled() } else { None };
        drop(queue);
        drop(left);
        if let Some(waker) = next {
            waker.wake();
        }
    }

    /// Counts one more piece of a chunk that the caller holds a piece of.
    pub(super) fn add_piece(&self, chunk: u32) {
        // Relaxed, as for Arc: the caller's own piece keeps the count above zero.
        self.pieces[chunk as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one piece less. `true`: it was the last, and the caller must [`put_back`](Self::put_back) the chunk.
    pub(super) fn drop_piece(&self, chunk: u32) -> bool {
        // What the other pieces' holders did to the memory happens before its next use.
        self.pieces[chunk as usize].fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether the caller's piece is the only one of its chunk. If so it stays so until the caller makes another.
    pub(super) fn is_only_piece(&self, chunk: u32) -> bool {
        self.pieces[chunk as usize].load(Ordering::Acquire) == 1
    }

    /// Makes a chunk without pieces available again.
    pub(super) fn put_back(&self, chunk: u32) {
        let mut queue = self.queue.lock();
        queue.free.push(chunk);
        let next = queue.last_entitled();
        drop(queue);
        if let Some(waker) = next {
            waker.wake();
        }
    }

    fn first_piece(&self, chunk: u32) -> u32 {
        self.pieces[chunk as usize].store(1, Ordering::Relaxed);
        chunk
    }
}

impl Queue {
    fn take(&mut self) -> Option<u32> {
        if self.waiters.len() < self.free.len() { self.free.pop() } else { None }
    }

    fn enter(&mut self, waker: Waker) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiters.push_back(Waiter { ticket, waker });
        Ticket(ticket)
    }

    fn position(&self, ticket: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket).ok()
    }

    /// The waiter whose turn it became when the number of free chunks, or of those before it, changed by one.
    fn last_entitled(&self) -> Option<Waker> {
        self.waiters.get(self.free.len().checked_sub(1)?).map(|waiter| waiter.waker.clone())
    }
}

#[cfg(all(test, rdma_loom))]
#[allow(unsafe_code)]
mod loom_tests {
    use std::future::poll_fn;

    use loom::cell::UnsafeCell;
    use loom::future::block_on;
    use loom::thread;

    use super::*;
    use crate::sync::Arc;

    /// Gives the chunk back, as a dropped piece does.
    fn release(chunks: &Chunks, chunk: u32) {
        if chunks.drop_piece(chunk) {
            chunks.put_back(chunk);
        }
    }

    fn wait(chunks: &Chunks) -> u32 {
        let mut ticket = None;
        block_on(poll_fn(|cx| chunks.poll_take(&mut ticket, cx)))
    }

    /// The memory of a chunk that was split in two; loom notices when two threads use a part at once.
    #[derive(Default)]
    struct Parts([UnsafeCell<u8>; 2]);

    // SAFETY: the tests only use a part while they hold a piece that covers it.
    unsafe impl Sync for Parts {}

    impl Parts {
        fn write(&self, part: usize) {
            // SAFETY: as above, and loom checks it.
            self.0[part].with_mut(|byte| unsafe { *byte += 1 });
        }
    }

    #[test]
    fn the_next_owner_is_woken_and_alone() {
        loom::model(|| {
            let shared = Arc::new((Chunks::free(1), Parts::default()));
            let held = shared.0.take().unwrap();
            shared.0.add_piece(held);
            let threads = [0, 1].map(|part| {
                let shared = shared.clone();
                thread::spawn(move || {
                    shared.1.write(part);
                    release(&shared.0, held);
                })
            });
            let chunk = wait(&shared.0);
            shared.1.write(0);
            shared.1.write(1);
            release(&shared.0, chunk);
            threads.map(|thread| thread.join().unwrap());
            assert_eq!(shared.0.available(), 1);
        });
    }

    #[test]
    fn a_waiter_that_leaves_loses_no_chunk() {
        loom::model(|| {
            let chunks = Arc::new(Chunks::free(1));
            let held = chunks.take().unwrap();
            let releaser = thread::spawn({
                let chunks = chunks.clone();
                move || release(&chunks, held)
            });
            let quitter = thread::spawn({
                let chunks = chunks.clone();
                move || {
                    let mut ticket = None;
                    let waker = Waker::noop();
                    match chunks.poll_take(&mut ticket, &mut Context::from_waker(waker)) {
                        Poll::Ready(chunk) => release(&chunks, chunk),
                        Poll::Pending => ticket.into_iter().for_each(|ticket| chunks.leave(ticket)),
                    }
                }
            });
            let chunk = wait(&chunks);
            release(&chunks, chunk);
            releaser.join().unwrap();
            quitter.join().unwrap();
            assert_eq!(chunks.available(), 1);
        });
    }
}
