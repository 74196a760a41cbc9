//! The positions of a ring: who may read or write which part of it, and who has to be woken.
//!
//! One side writes bytes and moves `tail`, the other one reads them and moves `head`; both only grow. Each keeps its own position to
//! itself and takes the other's out of shared memory once per look, where a peer may have put anything: a position that does not
//! fit is an error, never an index.
//!
//! Somebody who is about to sleep says so first and then looks once more; somebody who has moved a position looks afterwards
//! whether the other one sleeps. With a full fence between the two on either side, one of them sees the other.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes of a ring. Both directions of a link fit a processor's second-level cache together with what is copied to and from them.
pub(super) const RING: usize = 128 << 10;

/// The reader tells of what it has read in pieces of this size: each costs a fence and a cache line that goes to the other side.
/// The writer never waits for less: what is not told of yet leaves it three quarters of the ring.
const TELL: u64 = RING as u64 / 4;

/// The peer's position makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Corrupt;

/// What both sides share. Each has cache lines of its own, two of them since processors fetch lines in pairs.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(super) struct Shared {
    tail: Line<Tail>,
    /// Bytes read since the beginning.
    head: Line<AtomicU64>,
    /// The reader sleeps, or is about to: whoever writes clears it and rings.
    sleeps: Line<AtomicU32>,
    /// The writer waits for room: whoever reads clears it and rings.
    starves: Line<AtomicU32>,
}

#[repr(C, align(128))]
#[derive(Debug, Default)]
struct Line<T>(T);

/// What one side writes, and the other one looks at all the time.
#[repr(C)]
#[derive(Debug, Default)]
struct Tail {
    /// Bytes written since the beginning.
    position: AtomicU64,
    /// Messages sent through the socket.
    messages: AtomicU32,
}

/// The writing side's own position. Only who holds the queue pair's sending half moves it.
#[derive(Debug, Default)]
pub(super) struct Writer {
    tail: AtomicU64,
}

/// The reading side's own position. Only who holds the queue pair's receiving half moves it.
#[derive(Debug, Default)]
pub(super) struct Reader {
    head: AtomicU64,
    told: AtomicU64,
    heard: AtomicU32,
}

impl Writer {
    /// Where the next byte goes, and how many there is room for.
    pub(super) fn room(&self, shared: &Shared) -> Result<(usize, usize), Corrupt> {
        let tail = self.tail.load(Ordering::Relaxed);
        let used = tail.wrapping_sub(shared.head.0.load(Ordering::Acquire));
        let free = (RING as u64).checked_sub(used).ok_or(Corrupt)?;
        Ok((index(tail), free as usize))
    }

    /// Lets the reader have `len` more bytes, which were written. `true`: it has to be woken.
    pub(super) fn publish(&self, shared: &Shared, len: usize) -> bool {
        let tail = self.tail.load(Ordering::Relaxed).wrapping_add(len as u64);
        self.tail.store(tail, Ordering::Relaxed);
        shared.tail.0.position.store(tail, Ordering::Release);
        fence(Ordering::SeqCst);
        take(&shared.sleeps.0)
    }

    /// Counts a message that was sent through the socket. `true`: the reader has to be woken.
    pub(super) fn count_message(&self, shared: &Shared) -> bool {
        shared.tail.0.messages.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        take(&shared.sleeps.0)
    }

    /// Has the reader ring when it has made room. Look once more afterwards.
    pub(super) fn starve(&self, shared: &Shared) {
        shared.starves.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

impl Reader {
    /// Where the next byte is, and how many there are.
    pub(super) fn ready(&self, shared: &Shared) -> Result<(usize, usize), Corrupt> {
        let head = self.head.load(Ordering::Relaxed);
        let ready = shared.tail.0.position.load(Ordering::Acquire).wrapping_sub(head);
        if ready > RING as u64 { Err(Corrupt) } else { Ok((index(head), ready as usize)) }
    }

    /// Gives `len` bytes that were read back to the writer. `true`: it has to be woken.
    pub(super) fn release(&self, shared: &Shared, len: usize) -> bool {
        let head = self.head.load(Ordering::Relaxed).wrapping_add(len as u64);
        self.head.store(head, Ordering::Relaxed);
        if head.wrapping_sub(self.told.load(Ordering::Relaxed)) < TELL {
            return false;
        }
        self.told.store(head, Ordering::Relaxed);
        shared.head.0.store(head, Ordering::Release);
        fence(Ordering::SeqCst);
        take(&shared.starves.0)
    }

    /// Whether messages were sent through the socket since they were last [heard](Self::hear).
    pub(super) fn has_messages(&self, shared: &Shared) -> bool {
        shared.tail.0.messages.load(Ordering::Relaxed) != self.heard.load(Ordering::Relaxed)
    }

    /// What is sent from here on is a reason to look at the socket again.
    pub(super) fn hear(&self, shared: &Shared) {
        self.heard.store(shared.tail.0.messages.load(Ordering::Acquire), Ordering::Relaxed);
    }

    /// Has the writer ring when it has written. Look once more afterwards, behind a fence.
    pub(super) fn sleep(&self, shared: &Shared) {
        if shared.sleeps.0.load(Ordering::Relaxed) == 0 {
            shared.sleeps.0.store(1, Ordering::Relaxed);
        }
    }
}

/// Clears a flag; whether it was set. Costs a load when it was not.
fn take(flag: &AtomicU32) -> bool {
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::Relaxed) != 0
}

fn index(position: u64) -> usize {
    (position % RING as u64) as usize
}

#[cfg(all(test, not(rdma_loom)))]
mod tests {
    use super::*;

    #[test]
    fn positions_go_round_and_stay_apart() {
        let (shared, writer, reader) = (Shared::default(), Writer::default(), Reader::default());
        let start = u64::MAX - 1000;
        for position in [&shared.tail.0.position, &shared.head.0, &writer.tail, &reader.head, &reader.told] {
            position.store(start, Ordering::Relaxed);
        }
        let (mut written, mut read) = (0, 0);
        for step in 1..400usize {
            let (at, room) = writer.room(&shared).unwrap();
            assert_eq!(at, start.wrapping_add(written as u64) as usize % RING);
            let len = (step * 7919 % RING).min(room);
            writer.publish(&shared, len);
            written += len;
            let (at, ready) = reader.ready(&shared).unwrap();
            assert_eq!((at, ready), (start.wrapping_add(read as u64) as usize % RING, written - read));
            let len = (step * 6007 % RING).min(ready);
            reader.release(&shared, len);
            read += len;
        }
        assert!(read > 10 * RING);
    }

    #[test]
    fn an_emptied_ring_has_room_though_the_reader_was_not_told_to_say_so() {
        let (shared, writer, reader) = (Shared::default(), Writer::default(), Reader::default());
        for _ in 0..100 {
            let (_, room) = writer.room(&shared).unwrap();
            assert!(room > RING / 2, "{room}");
            writer.publish(&shared, room / 3);
            let (_, ready) = reader.ready(&shared).unwrap();
            assert_eq!(ready, room / 3);
            reader.release(&shared, ready);
        }
    }

    #[test]
    fn positions_that_make_no_sense_are_refused() {
        let (shared, writer, reader) = (Shared::default(), Writer::default(), Reader::default());
        for wrong in [RING as u64 + 1, u64::MAX, u64::MAX / 2] {
            shared.tail.0.position.store(wrong, Ordering::Relaxed);
            assert_eq!(reader.ready(&shared), Err(Corrupt));
            shared.head.0.store(wrong, Ordering::Relaxed);
            assert_eq!(writer.room(&shared).is_err(), wrong <= u64::MAX - RING as u64);
        }
    }
}

/// Every interleaving: `RUSTFLAGS="--cfg rdma_loom" cargo test --lib loom_`.
#[cfg(all(test, rdma_loom))]
mod loom_tests {
    use std::sync::atomic::AtomicBool;

    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::Condvar;
    use loom::sync::Mutex;

    use super::*;

    /// An eventfd.
    #[derive(Default)]
    struct Bell(Mutex<bool>, Condvar);

    impl Bell {
        fn ring(&self) {
            *self.0.lock().unwrap() = true;
            self.1.notify_one();
        }

        fn wait(&self) {
            let mut rung = self.0.lock().unwrap();
            while !*rung {
                rung = self.1.wait(rung).unwrap();
            }
            *rung = false;
        }
    }

    #[test]
    fn loom_a_sleeping_reader_sees_every_byte() {
        loom::model(|| {
            let shared = Arc::new((Shared::default(), Bell::default(), [UnsafeCell::new(0u8), UnsafeCell::new(0)]));
            let theirs = shared.clone();
            let writing = loom::thread::spawn(move || {
                let (shared, bell, bytes) = &*theirs;
                let writer = Writer::default();
                for value in [1, 2] {
                    let (at, _) = writer.room(shared).unwrap();
                    bytes[at].with_mut(|byte| unsafe { *byte = value });
                    if writer.publish(shared, 1) {
                        bell.ring();
                    }
                }
            });
            let (shared, bell, bytes) = &*shared;
            let reader = Reader::default();
            for expected in [1, 2] {
                let at = loop {
                    match reader.ready(shared).unwrap() {
                        (at, 1..) => break at,
                        _ => {
                            reader.sleep(shared);
                            fence(Ordering::SeqCst);
                            if reader.ready(shared).unwrap().1 == 0 {
                                bell.wait();
                            }
                        }
                    }
                };
                assert_eq!(bytes[at].with(|byte| unsafe { *byte }), expected);
                reader.release(shared, 1);
            }
            writing.join().unwrap();
        });
    }

    #[test]
    fn loom_a_starving_writer_hears_of_room() {
        loom::model(|| {
            let shared = Arc::new((Shared::default(), Bell::default()));
            let full = AtomicBool::new(true);
            let writer = Writer::default();
            writer.publish(&shared.0, RING);
            let theirs = shared.clone();
            let reading = loom::thread::spawn(move || {
                let (shared, bell) = &*theirs;
                let reader = Reader::default();
                // What is below `TELL` is told of with the next one.
                for len in [TELL as usize - 1, 1] {
                    assert!(reader.ready(shared).unwrap().1 >= len);
                    if reader.release(shared, len) {
                        bell.ring();
                    }
                }
            });
            let (shared, bell) = &*shared;
            while full.swap(writer.room(shared).unwrap().1 == 0, Ordering::Relaxed) {
                writer.starve(shared);
                if writer.room(shared).unwrap().1 == 0 {
                    bell.wait();
                }
            }
            reading.join().unwrap();
        });
    }
}
