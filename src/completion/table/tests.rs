//! The table alone: plain tests, a random walk against a model, and loom's exhaustive interleavings.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use super::*;
use crate::error::WcStatus;

/// Counts its wake-ups.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn counter() -> (std::sync::Arc<Count>, Waker) {
    let count = std::sync::Arc::new(Count::default());
    (count.clone(), count.into())
}

/// Counts how many of its kind are alive: a buffer that must not be dropped too early, or never.
struct Owner(std::sync::Arc<AtomicUsize>);

impl Owner {
    fn new(alive: &std::sync::Arc<AtomicUsize>) -> Option<Self> {
        alive.fetch_add(1, Ordering::SeqCst);
        Some(Self(alive.clone()))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn success() -> WorkCompletion {
    WorkCompletion { status: WcStatus::Success, ..WorkCompletion::default() }
}

fn complete<B>(table: &Table<B>, key: Key) {
    let mut effects = Effects::default();
    table.complete(key, success(), &mut effects);
    effects.run();
}

fn submit<B>(table: &Table<B>, owner: B) -> Key {
    match table.submit(&mut Some(owner), &mut None, None, &mut WakeLater::default()) {
        Poll::Ready(Ok(key)) => key,
        other => panic!("no slot: {other:?}"),
    }
}

#[cfg(not(rdma_loom))]
mod plain {
    use super::*;

    fn noop() -> Context<'static> {
        Context::from_waker(Waker::noop())
    }

    #[test]
    fn a_key_survives_its_wire_form() {
        for key in [(0, 0), (1, 2), (MAX_SLOTS as u32 - 1, (1 << Key::GENERATION_BITS) - 1)] {
            let key = Key { index: key.0, generation: key.1 };
            assert_eq!(Key::from_bits(key.to_bits()), key);
        }
    }

    #[test]
    fn an_operation_goes_round() {
        let table = Table::new(1, 7);
        let key = submit(&table, "buffer");
        let (count, waker) = counter();
        assert!(table.poll_done(key, Some(&mut Context::from_waker(&waker))).is_pending());
        complete(&table, key);
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        let Poll::Ready(Some(("buffer", Outcome::Completed(_)))) = table.poll_done(key, None) else { panic!() };
        assert_eq!((table.in_flight(), table.live_slots()), (0, 0));
    }

    #[test]
    fn a_doubled_or_stale_completion_does_nothing() {
        let table = Table::new(1, 7);
        let key = submit(&table, 1);
        complete(&table, key);
        complete(&table, key);
        assert!(matches!(table.poll_done(key, None), Poll::Ready(Some((1, _)))));
        let next = submit(&table, 2);
        complete(&table, key);
        assert!(table.poll_done(next, None).is_pending(), "the old key completed the new operation");
        assert_eq!(table.in_flight(), 1);
    }

    #[test]
    fn a_run_ends_where_the_completions_of_another_queue_begin() {
        let table = Table::new(3, 7);
        let keys = [1, 2, 3].map(|owner| submit(&table, owner));
        let of_queue = |queue: u64, key: Key| WorkCompletion { wr_id: queue << Key::BITS | key.to_bits(), ..success() };
        let completions = [of_queue(4, keys[0]), of_queue(4, keys[1]), of_queue(5, keys[2])];
        let mut effects = Effects::default();
        assert_eq!(table.complete_run(&completions, &mut effects), 2);
        assert!(effects.is_untouched(), "nobody waited");
        let ended = keys.map(|key| table.poll_done(key, None).is_ready());
        assert_eq!((ended, table.in_flight()), ([true, true, false], 1));
    }

    #[test]
    fn an_abandoned_owner_lives_until_its_completion() {
        let alive = std::sync::Arc::new(AtomicUsize::new(0));
        let table = Table::new(1, 7);
        let key = submit(&table, Owner::new(&alive).unwrap());
        assert!(matches!(table.abandon(key), Abandoned::Held));
        assert_eq!(alive.load(Ordering::SeqCst), 1, "dropped while the device may write to it");
        complete(&table, key);
        assert_eq!(alive.load(Ordering::SeqCst), 0);
        assert_eq!(table.live_slots(), 0);
    }

    #[test]
    fn the_line_is_served_in_order_and_a_leaver_passes_the_turn_on() {
        let table = Table::new(1, 7);
        let first = submit(&table, 0);
        let mut line = Vec::new();
        for _ in 0..3 {
            let (count, waker) = counter();
            let mut ticket = None;
            assert!(
                table
                    .submit(
                        &mut Some(1),
                        &mut ticket,
                        Some(&mut Context::from_waker(&waker)),
                        &mut WakeLater::default()
                    )
                    .is_pending()
            );
            line.push((ticket, count));
        }
        complete(&table, first);
        let woken = |line: &[(Option<Ticket>, std::sync::Arc<Count>)]| -> Vec<usize> {
            line.iter().map(|(_, count)| count.0.load(Ordering::SeqCst)).collect()
        };
        assert_eq!(woken(&line), [1, 0, 0]);
        // A newcomer does not jump the line, though a place is free.
        assert!(table.submit(&mut Some(9), &mut None, None, &mut WakeLater::default()).is_pending());
        table.leave(line[0].0.unwrap());
        assert_eq!(woken(&line), [1, 1, 0]);
        let mut ticket = line[1].0;
        let Poll::Ready(Ok(second)) =
            table.submit(&mut Some(2), &mut ticket, Some(&mut noop()), &mut WakeLater::default())
        else {
            panic!()
        };
        assert_eq!(ticket, None);
        complete(&table, second);
        assert_eq!(woken(&line), [1, 1, 1]);
    }

    #[test]
    fn a_finished_operation_that_nobody_polls_takes_no_place() {
        let table = Table::new(2, 7);
        let mut done = Vec::new();
        for value in 0..10 {
            let key = submit(&table, value);
            complete(&table, key);
            done.push(key);
        }
        assert_eq!((table.in_flight(), table.live_slots(), table.peak_in_flight()), (0, 10, 1));
        for (value, key) in done.into_iter().enumerate() {
            assert!(matches!(table.poll_done(key, None), Poll::Ready(Some((v, _))) if v == value));
        }
        assert_eq!(table.live_slots(), 0);
    }

    #[test]
    fn silent_members_end_with_the_next_signaled_one() {
        let table = Table::new(4, 7);
        let keys: Vec<_> = (0..4).map(|value| table.park(value).unwrap()).collect();
        assert!(matches!(table.take_places(4, &mut None, None), Poll::Ready(Ok(()))));
        for (position, &key) in keys.iter().enumerate() {
            let signal = if position % 2 == 1 { Signal::Own } else { Signal::Silent };
            assert!(table.launch([(key, signal)].into_iter()));
        }
        complete(&table, keys[1]);
        assert!(matches!(table.poll_done(keys[0], None), Poll::Ready(Some((0, Outcome::Completed(_))))));
        assert!(matches!(table.poll_done(keys[1], None), Poll::Ready(Some((1, _)))));
        assert!(table.poll_done(keys[2], None).is_pending());
        assert_eq!(table.in_flight(), 2);
        complete(&table, keys[3]);
        assert_eq!(table.in_flight(), 0);
        assert!(matches!(table.poll_done(keys[2], None), Poll::Ready(Some((2, _)))));
    }

    #[test]
    fn a_silent_member_that_fails_is_reported_once() {
        let table = Table::new(2, 7);
        let keys = [table.park("silent").unwrap(), table.park("own").unwrap()];
        assert!(matches!(table.take_places(2, &mut None, None), Poll::Ready(Ok(()))));
        assert!(
            table.launch([(keys[0], Signal::Silent)].into_iter()) && table.launch([(keys[1], Signal::Own)].into_iter())
        );
        let mut effects = Effects::default();
        for key in keys {
            table.complete(key, WorkCompletion { status: WcStatus::Flushed, ..success() }, &mut effects);
        }
        for key in keys {
            let Poll::Ready(Some((_, Outcome::Completed(done)))) = table.poll_done(key, None) else { panic!() };
            assert_eq!(done.status, WcStatus::Flushed);
        }
        assert_eq!(table.in_flight(), 0);
    }

    #[test]
    fn a_parked_member_whose_future_is_dropped_is_not_launched() {
        let table = Table::new(2, 7);
        let (kept, dropped) = (table.park(1).unwrap(), table.park(2).unwrap());
        assert!(matches!(table.abandon(dropped), Abandoned::Parked(2)));
        assert!(matches!(table.take_places(2, &mut None, None), Poll::Ready(Ok(()))));
        assert!(table.launch([(kept, Signal::Own)].into_iter()));
        assert!(!table.launch([(dropped, Signal::Own)].into_iter()));
        table.return_places(1);
        assert_eq!(table.in_flight(), 1);
    }

    #[test]
    fn a_refused_request_comes_back_also_when_the_queue_pair_ends_meanwhile() {
        let table = Table::new(1, 7);
        let key = submit(&table, "buffer");
        assert_eq!(table.retract(key, &mut WakeLater::default()), Some("buffer"));
        let key = submit(&table, "buffer");
        let mut effects = Effects::default();
        table.end(&CloseReason::Peer, &mut effects);
        assert_eq!(table.retract(key, &mut WakeLater::default()), Some("buffer"));
        assert_eq!((table.in_flight(), table.live_slots()), (0, 0));
    }

    #[test]
    fn a_refused_request_loses_nobody_s_turn() {
        let table = Table::new(2, 7);
        let first = submit(&table, 0);
        let second = submit(&table, 1);
        let line: Vec<_> = (0..2)
            .map(|_| {
                let (count, waker) = counter();
                let mut cx = Context::from_waker(&waker);
                assert!(
                    table.submit(&mut Some(2), &mut None, Some(&mut cx), &mut WakeLater::default()).is_pending(),
                    "there is no place"
                );
                count
            })
            .collect();
        // Both leave at once, as when the device refuses one that the table had let in.
        let mut wake = [WakeLater::default(), WakeLater::default()];
        assert_eq!(table.retract(first, &mut wake[0]), Some(0));
        assert_eq!(table.retract(second, &mut wake[1]), Some(1));
        drop(wake);
        assert_eq!(line[0].0.load(Ordering::SeqCst), 1, "the first in line was not told");
    }

    #[test]
    fn the_end_reaches_everybody() {
        let table = Table::new(1, 7);
        let posted = submit(&table, 1);
        let (count, waker) = counter();
        let mut ticket = None;
        let mut cx = Context::from_waker(&waker);
        assert!(table.submit(&mut Some(2), &mut ticket, Some(&mut cx), &mut WakeLater::default()).is_pending());
        assert!(table.poll_done(posted, Some(&mut cx)).is_pending());
        let mut effects = Effects::default();
        table.end(&CloseReason::Peer, &mut effects);
        effects.run();
        assert_eq!(count.0.load(Ordering::SeqCst), 2);
        assert!(matches!(table.poll_done(posted, None), Poll::Ready(Some((1, Outcome::Closed(CloseReason::Peer))))));
        assert!(matches!(
            table.submit(&mut Some(2), &mut ticket, Some(&mut cx), &mut WakeLater::default()),
            Poll::Ready(Err(Refused::Closed(_)))
        ));
        assert_eq!((table.in_flight(), table.live_slots(), table.waiting()), (0, 0, 0));
    }

    proptest::proptest! {
        /// Any order of submitting, completing, polling, abandoning and leaving keeps the counts right and loses no owner.
        #[test]
        fn random_walks_keep_the_books(steps in proptest::collection::vec((0u8..6, 0usize..8), 0..200), depth in 1usize..5) {
            let alive = std::sync::Arc::new(AtomicUsize::new(0));
            let table = Table::new(depth, 7);
            let (mut posted, mut done, mut orphans) = (Vec::new(), Vec::new(), Vec::new());
            let mut line: Vec<(Option<Owner>, Option<Ticket>)> = Vec::new();
            for (step, pick) in steps {
                match step {
                    0 | 1 => {
                        let mut entry = (Owner::new(&alive), None);
                        match table.submit(&mut entry.0, &mut entry.1, Some(&mut noop()), &mut WakeLater::default()) {
                            Poll::Ready(Ok(key)) => posted.push(key),
                            Poll::Ready(Err(refused)) => panic!("{refused:?}"),
                            Poll::Pending => line.push(entry),
                        }
                    }
                    2 if !posted.is_empty() => {
                        let key = posted.swap_remove(pick % posted.len());
                        complete(&table, key);
                        if !orphans.contains(&key.to_bits()) { done.push(key); }
                    }
                    3 if !done.is_empty() => {
                        let key = done.swap_remove(pick % done.len());
                        proptest::prop_assert!(matches!(table.poll_done(key, None), Poll::Ready(Some(_))));
                    }
                    4 if !posted.is_empty() => {
                        let key = posted[pick % posted.len()];
                        proptest::prop_assert!(matches!(table.abandon(key), Abandoned::Held));
                        if !orphans.contains(&key.to_bits()) { orphans.push(key.to_bits()); }
                    }
                    5 if !line.is_empty() => {
                        let (_, ticket) = line.remove(pick % line.len());
                        table.leave(ticket.unwrap());
                    }
                    _ => {}
                }
                // Whoever is first in line and finds room gets in.
                while let Some((owner, ticket)) = line.first_mut() {
                    match table.submit(owner, ticket, Some(&mut noop()), &mut WakeLater::default()) {
                        Poll::Ready(Ok(key)) => { posted.push(key); line.remove(0); }
                        _ => break,
                    }
                }
                proptest::prop_assert_eq!(table.in_flight(), posted.len());
                proptest::prop_assert!(table.in_flight() <= depth);
                proptest::prop_assert_eq!(table.waiting(), line.len());
                proptest::prop_assert_eq!(alive.load(Ordering::SeqCst), posted.len() + done.len() + line.len());
            }
        }
    }
}

/// Every interleaving of the races that matter, by loom: `RUSTFLAGS="--cfg rdma_loom" cargo test --lib loom_`.
#[cfg(rdma_loom)]
mod exhaustive {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// The completion arrives while the future registers its waker: it is seen or the waker is called, never neither.
    #[test]
    fn loom_completion_against_registration() {
        loom::model(|| {
            let table = Arc::new(Table::new(1, 7));
            let key = submit(&table, 1);
            let device = thread::spawn({
                let table = table.clone();
                move || complete(&table, key)
            });
            let (count, waker) = counter();
            let polled = table.poll_done(key, Some(&mut Context::from_waker(&waker)));
            device.join().unwrap();
            if polled.is_pending() {
                assert_eq!(count.0.load(Ordering::SeqCst), 1);
                assert!(table.poll_done(key, None).is_ready());
            }
            assert_eq!(table.live_slots(), 0);
        });
    }

    /// The future is dropped while the completion arrives: the owner is dropped exactly once, and only by one of the two.
    #[test]
    fn loom_completion_against_drop() {
        loom::model(|| {
            let alive = std::sync::Arc::new(AtomicUsize::new(0));
            let table = Arc::new(Table::new(1, 7));
            let key = submit(&table, Owner::new(&alive).unwrap());
            let device = thread::spawn({
                let table = table.clone();
                move || complete(&table, key)
            });
            drop(table.abandon(key));
            device.join().unwrap();
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            assert_eq!((table.live_slots(), table.in_flight()), (0, 0));
        });
    }

    /// A place becomes free while the first in line leaves: the second is woken whatever the order.
    #[test]
    fn loom_leaving_against_a_free_place() {
        loom::model(|| {
            let table = Arc::new(Table::new(1, 7));
            let key = submit(&table, 0);
            let mut tickets = [None, None];
            let counts: Vec<_> = tickets
                .iter_mut()
                .map(|ticket| {
                    let (count, waker) = counter();
                    assert!(
                        table
                            .submit(
                                &mut Some(1),
                                ticket,
                                Some(&mut Context::from_waker(&waker)),
                                &mut WakeLater::default()
                            )
                            .is_pending()
                    );
                    count
                })
                .collect();
            let device = thread::spawn({
                let table = table.clone();
                move || complete(&table, key)
            });
            table.leave(tickets[0].unwrap());
            device.join().unwrap();
            assert_eq!(counts[1].0.load(Ordering::SeqCst), 1, "the turn was lost");
        });
    }

    /// The queue closes while an operation is admitted: it ends, one way or the other.
    #[test]
    fn loom_end_against_submit() {
        loom::model(|| {
            let table = Arc::new(Table::new(1, 7));
            let closer = thread::spawn({
                let table = table.clone();
                move || {
                    let mut effects = Effects::default();
                    table.close(&CloseReason::Local, &mut effects);
                    table.end(&CloseReason::Local, &mut effects);
                    effects.run();
                }
            });
            let submitted = table.submit(&mut Some(1), &mut None, None, &mut WakeLater::default());
            closer.join().unwrap();
            match submitted {
                Poll::Ready(Ok(key)) => assert!(table.poll_done(key, None).is_ready()),
                Poll::Ready(Err(Refused::Closed(_))) => {}
                other => panic!("{other:?}"),
            }
            assert_eq!(table.live_slots(), 0);
        });
    }

    /// The member's future is dropped while the batch is posted: posted and quarantined, or not posted at all.
    #[test]
    fn loom_launch_against_drop() {
        loom::model(|| {
            let alive = std::sync::Arc::new(AtomicUsize::new(0));
            let table = Arc::new(Table::new(1, 7));
            let Ok(key) = table.park(Owner::new(&alive).unwrap()) else { panic!() };
            let dropper = thread::spawn({
                let table = table.clone();
                move || drop(table.abandon(key))
            });
            assert!(matches!(table.take_places(1, &mut None, None), Poll::Ready(Ok(()))));
            if table.launch([(key, Signal::Own)].into_iter()) {
                assert_eq!(alive.load(Ordering::SeqCst), 1);
                dropper.join().unwrap();
                assert_eq!(alive.load(Ordering::SeqCst), 1, "dropped while posted");
                complete(&table, key);
            } else {
                dropper.join().unwrap();
                table.return_places(1);
            }
            assert_eq!(alive.load(Ordering::SeqCst), 0);
            assert_eq!((table.live_slots(), table.in_flight()), (0, 0));
        });
    }
}
