//! Pools: order, cancellation, threads.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use super::{Counter, poll};
use crate::memory::domain::test_domain;
use crate::memory::*;

#[test]
fn pooled_buffers_come_back_whole() {
    let pd = test_domain();
    let pool = BufferPool::new(&pd, 100, 3).unwrap();
    assert_eq!((pool.capacity(), pool.available(), pool.buffer_len(), pool.region().len()), (3, 3, 100, 3 * 128));
    let mut buffer = pool.try_get().unwrap();
    assert_eq!((buffer.len(), buffer.address() % 64), (100, 0));
    let address = buffer.address();
    let head = buffer.split_to(40).unwrap().freeze();
    let clone = head.slice(10..20).unwrap();
    drop((buffer, head));
    assert_eq!(pool.available(), 2);
    drop(clone);
    assert_eq!(pool.available(), 3);
    let again = pool.try_get().unwrap();
    assert_eq!((again.address(), again.len()), (address, 100));
}

#[test]
fn a_pool_ends_in_any_order() {
    for order in 0..6 {
        let pd = test_domain();
        let pool = BufferPool::new(&pd, 64, 2).unwrap();
        let mut parts = [Some(pool.try_get().unwrap()), pool.try_get()];
        let mut pool = Some(pool);
        for step in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]][order] {
            match step {
                0 => drop(pool.take()),
                part => drop(parts[part - 1].take()),
            }
            let left = parts.iter().flatten().count();
            let live_regions = usize::from(pool.is_some() || left > 0);
            assert_eq!(pd.stats(), DomainStats { live_regions, live_buffers: left, live_exposed: 0 });
        }
    }
}

#[test]
fn waiters_are_served_in_order_and_nobody_overtakes() {
    let pool = BufferPool::new(&test_domain(), 64, 1).unwrap();
    let held = pool.try_get().unwrap();
    let wakes: [Arc<Counter>; 2] = Default::default();
    let (mut first, mut second) = (pool.get(), pool.get());
    assert!(poll(&mut first, &wakes[0]).is_pending());
    assert!(poll(&mut second, &wakes[1]).is_pending());
    drop(held);
    let counts = || wakes.each_ref().map(|counter| counter.0.load(Ordering::SeqCst));
    assert_eq!(counts(), [1, 0]);
    assert_eq!(pool.available(), 0);
    assert!(pool.try_get().is_none());
    assert!(poll(&mut pool.get(), &wakes[1]).is_pending());
    assert!(poll(&mut second, &wakes[1]).is_pending());
    let Poll::Ready(held) = poll(&mut first, &wakes[0]) else { panic!("its turn had come") };
    drop(held);
    assert_eq!(counts(), [1, 1]);
    assert!(poll(&mut second, &wakes[1]).is_ready());
    assert_eq!(pool.available(), 1);
}

#[test]
fn a_cancelled_waiter_passes_its_turn_on() {
    let pool = BufferPool::new(&test_domain(), 64, 2).unwrap();
    let held = [pool.try_get().unwrap(), pool.try_get().unwrap()];
    let wakes: [Arc<Counter>; 4] = Default::default();
    let mut waiting: Vec<_> = (0..4).map(|_| Some(pool.get())).collect();
    for (future, wakes) in waiting.iter_mut().flatten().zip(&wakes) {
        assert!(poll(future, wakes).is_pending());
    }
    let counts = || wakes.each_ref().map(|counter| counter.0.load(Ordering::SeqCst));
    waiting[1] = None; // never had a turn
    drop(held);
    assert_eq!(counts(), [1, 0, 1, 0]);
    waiting[0] = None; // woken, and gone before it looked
    assert_eq!(counts(), [1, 0, 1, 1]);
    for at in [3, 2] {
        assert!(poll(waiting[at].as_mut().unwrap(), &wakes[at]).is_ready());
    }
    assert_eq!(pool.available(), 2);
}

#[test]
fn a_waiter_that_moves_is_woken_where_it_is() {
    let pool = BufferPool::new(&test_domain(), 64, 1).unwrap();
    let held = pool.try_get();
    let wakes: [Arc<Counter>; 2] = Default::default();
    let mut get = pool.get();
    assert!(poll(&mut get, &wakes[0]).is_pending());
    assert!(poll(&mut get, &wakes[1]).is_pending());
    drop(held);
    assert_eq!(wakes.each_ref().map(|counter| counter.0.load(Ordering::SeqCst)), [0, 1]);
}

/// A task that holds a buffer of the pool that it waits for.
struct Hoarder(#[allow(dead_code)] Buffer);

impl Wake for Hoarder {
    fn wake(self: Arc<Self>) {}
}

#[test]
fn wakers_that_hold_buffers_do_not_deadlock() {
    let pool = BufferPool::new(&test_domain(), 64, 2).unwrap();
    let hoard = || Waker::from(Arc::new(Hoarder(pool.try_get().unwrap())));
    let (first, second) = (hoard(), hoard());
    let mut get = pool.get();
    let mut poll = |waker: Waker| std::pin::Pin::new(&mut get).poll(&mut Context::from_waker(&waker));
    assert!(poll(first).is_pending());
    // Replacing the first waker frees its buffer, in the middle of a poll.
    assert!(poll(second).is_pending());
    drop(get);
    assert_eq!(pool.available(), 2);
}

/// Unparks its thread: the smallest executor.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future + Unpin>(mut future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match std::pin::Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn threads_share_a_pool_and_never_a_buffer() {
    const ROUNDS: u64 = if cfg!(miri) { 20 } else { 5_000 };
    let pd = test_domain();
    let pool = BufferPool::new(&pd, 64, 3).unwrap();
    thread::scope(|scope| {
        for id in 0..8u64 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let mut buffer = match round % 3 {
                        0 => {
                            let mut abandoned = pool.get();
                            let _ = poll(&mut abandoned, &Arc::default());
                            drop(abandoned);
                            block_on(pool.get())
                        }
                        _ => block_on(pool.get()),
                    };
                    let mark = (id << 32 | round).to_ne_bytes();
                    buffer[..8].copy_from_slice(&mark);
                    let tail = buffer.split_off(32).unwrap();
                    thread::yield_now();
                    assert_eq!(buffer[..8], mark);
                    let (shared, clone) = (buffer.freeze(), tail.freeze());
                    drop(clone.clone());
                    drop(shared);
                    drop(clone);
                }
            });
        }
    });
    assert_eq!((pool.available(), pd.stats().live_buffers), (3, 0));
}
