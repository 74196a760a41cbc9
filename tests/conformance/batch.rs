//! Batches: several operations with one doorbell.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use futures::future::join_all;
use tokio::join;
use tokio_rdma::op::WriteOp;
use tokio_rdma::{Access, Buffer, CloseReason, Error, WcStatus};

use crate::common::rig::contents;
use crate::common::{Rig, assert_pattern, eventually, exercise, pattern, poll_once};

core_cases!(members_run_in_order);
cases!(
    unsignaled_members_resolve_with_the_next_signaled_one,
    a_dropped_member_is_never_posted,
    a_dropped_posted_member_still_runs,
    more_members_than_slots_are_refused_whole,
    a_batch_waits_for_room,
    a_batch_in_line_can_be_dropped,
    dropped_unposted_every_member_ends,
    on_a_closed_connection_every_member_ends,
    a_refused_member_is_not_part_of_it,
    a_failing_member_ends_the_rest,
    members_may_be_awaited_before_the_post,
    an_empty_batch_is_posted_at_once,
);

async fn members_run_in_order(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(4096);
    let remote = region.remote();
    let receiving = pair.server.receive(pair.server.buffer(16));
    let noticed = pair.server.receive(pair.server.buffer(16));
    let server = async { (receiving.await.unwrap(), noticed.await.unwrap()) };
    let client = async {
        let mut batch = one.batch();
        let first = batch.write(one.filled(4096, 1), &remote);
        let send = batch.send_with_immediate(one.filled(16, 2), 7);
        // What nobody overwrites later in this batch: a read may see the writes behind it.
        let read = batch.read(one.buffer(4000), &remote.slice(96..).unwrap());
        let word = remote.slice(8..16).unwrap();
        let write = batch.write(one.domain.register(vec![0; 16]).unwrap(), &remote);
        let add = batch.fetch_add(&word, 5);
        let swap = batch.compare_swap(&word, 5, 6);
        let notice = batch.write_with_immediate(one.filled(8, 3), &remote, 8);
        let last = batch.read(one.buffer(16), &remote);
        assert_eq!((batch.len(), batch.is_empty()), (8, false));
        batch.post().await.unwrap();
        // Awaited in another order than they run.
        assert_eq!(last.await.unwrap()[8..], 6u64.to_ne_bytes());
        notice.await.unwrap();
        assert_eq!((add.await.unwrap(), swap.await.unwrap()), (0, 5));
        write.await.unwrap();
        assert_eq!(read.await.unwrap()[..], pattern(4096, 1)[96..]);
        assert_pattern(&send.await.unwrap(), 2);
        assert_pattern(&first.await.unwrap(), 1);
    };
    let ((received, notice), ()) = join!(server, client);
    assert_pattern(received.message(), 2);
    assert_eq!((received.immediate, notice.immediate, notice.len), (Some(7), Some(8), 8));
    assert_eq!(one.stats().live_slots, 0);
}

async fn unsignaled_members_resolve_with_the_next_signaled_one(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(8 * 100);
    let remote = region.remote();
    let place = |at: u64| remote.slice(at * 8..(at + 1) * 8).unwrap();
    // Silent ones in front, in the middle, and at the end, where the last one is signaled after all.
    for signaled in [&[][..], &[99], &[0], &[30, 60]] {
        let mut batch = one.batch();
        let members: Vec<_> = (0..100u64)
            .map(|at| {
                let buffer = one.filled(8, at + 7);
                if signaled.contains(&at) {
                    batch.write(buffer, &place(at))
                } else {
                    batch.write_unsignaled(buffer, &place(at))
                }
            })
            .collect();
        batch.post().await.unwrap();
        for (at, written) in (0..).zip(join_all(members).await) {
            assert_pattern(&written.unwrap(), at + 7);
        }
        let bytes = contents(&region);
        (0..100).for_each(|at| assert_pattern(&bytes[at * 8..(at + 1) * 8], at as u64 + 7));
        assert_eq!((one.stats().in_flight, one.stats().live_slots), (0, 0));
    }
    assert_eq!(one.stats().writes, 400);
}

async fn a_dropped_member_is_never_posted(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(3);
    let place = |at: u64| region.remote().slice(at..at + 1).unwrap();
    let ones = || one.domain.register(vec![1]).unwrap();
    let mut batch = one.batch();
    let first = batch.write_unsignaled(ones(), &place(0));
    let second = batch.write(ones(), &place(1));
    let third = batch.write_unsignaled(ones(), &place(2));
    drop(second);
    batch.post().await.unwrap();
    let (first, third) = join!(first, third);
    first.unwrap();
    third.unwrap();
    assert_eq!(contents(&region), [1, 0, 1]);

    // All of them: nothing is left to be posted.
    let mut batch = one.batch();
    drop((0..5).map(|_| batch.write(ones(), &place(1))).collect::<Vec<_>>());
    batch.post().await.unwrap();
    exercise(&pair).await;
    assert_eq!(contents(&region), [1, 0, 1]);
    assert_eq!((one.stats().in_flight, one.stats().live_slots), (0, 0));
}

async fn a_dropped_posted_member_still_runs(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(100);
    let remote = region.remote();
    let pool = one.pool(100, 3);
    let mut batch = one.batch();
    let members: Vec<_> = (0..3)
        .map(|at| {
            let mut buffer = pool.try_get().unwrap();
            buffer.fill(at + 1);
            batch.write_unsignaled(buffer, &remote)
        })
        .collect();
    batch.post().await.unwrap();
    drop(members);
    eventually(|| pool.available() == 3, || one.stats()).await;
    assert_eq!(contents(&region), [3; 100]);
    assert_eq!((one.stats().in_flight, one.stats().live_slots), (0, 0));
}

async fn more_members_than_slots_are_refused_whole(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(4)).await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let remote = region.remote();
    let mut batch = one.batch();
    let members: Vec<_> = (0..5).map(|at| batch.write(one.filled(8, at), &remote)).collect();
    let error = batch.post().await.unwrap_err();
    assert_eq!((error.accepted, error.total), (0, 5));
    assert!(matches!(error.error, Error::Limit { what: "members", value: 5, limit: 4, .. }), "{error}");
    all_come_back(members, |error| matches!(error, Error::Invalid { .. })).await;
    assert_eq!(contents(&region), [0; 8]);
    exercise(&pair).await;
}

/// Each member ends in such an error, with its buffer, which holds what was put in.
async fn all_come_back(members: Vec<WriteOp<Buffer>>, expected: impl Fn(&Error) -> bool) {
    for (seed, ended) in (0..).zip(join_all(members).await) {
        let (error, buffer) = ended.unwrap_err().into_parts();
        assert!(expected(&error), "{error:?}");
        assert_pattern(&buffer.expect("the buffer comes back"), seed);
    }
}

async fn a_batch_waits_for_room(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(4)).await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let remote = region.remote();
    // Three sends fill the queue but for one slot until the peer receives.
    let mut sends: Vec<_> = (0..3).map(|at| one.send(one.filled(8, at))).collect();
    sends.iter_mut().for_each(|send| send.try_post().unwrap());
    let mut batch = one.batch();
    let members: Vec<_> = (0..2).map(|at| batch.write(one.filled(8, at), &remote)).collect();
    let mut post = batch.post();
    assert!(poll_once(&mut post).is_pending(), "two places are not free");
    // What comes later does not get ahead, although there is one place.
    let mut later = one.write(one.filled(8, 9), &remote);
    assert!(poll_once(&mut later).is_pending());
    assert!(matches!(one.write(one.filled(8, 9), &remote).try_post(), Err(Error::QueueFull { depth: 4, .. })));
    assert_eq!((one.stats().in_flight, one.stats().waiting), (3, 2));
    let receive = async |at| assert_pattern(pair.server.receive(pair.server.buffer(8)).await.unwrap().message(), at);
    // With one of the sends over there is room for both members, and for nothing else.
    let (posted, ()) = join!(post, receive(0));
    posted.unwrap();
    assert_eq!(one.stats().peak_in_flight, 4);
    let rest = async {
        receive(1).await;
        receive(2).await;
    };
    let (members, later, sends, ()) = join!(join_all(members), later, join_all(sends), rest);
    assert!(members.iter().all(Result::is_ok) && sends.iter().all(Result::is_ok));
    later.unwrap();
    assert_pattern(&contents(&region), 9);
}

async fn a_batch_in_line_can_be_dropped(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(2)).await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let mut send = one.send(one.filled(8, 1));
    send.try_post().unwrap();
    let mut batch = one.batch();
    let members: Vec<_> = (0..2).map(|at| batch.write(one.filled(8, at), &region.remote())).collect();
    let mut post = batch.post();
    assert!(poll_once(&mut post).is_pending());
    let mut behind = Watched::new(one.write(one.filled(8, 5), &region.remote()));
    assert!(behind.poll().is_pending(), "in line behind the batch");
    drop(post);
    // The turn passes on: there was a place for this one all the time.
    all_come_back(members, |error| matches!(error, Error::Invalid { .. })).await;
    eventually(|| behind.woken(), || one.stats()).await;
    let (received, sent, written) = join!(pair.server.receive(pair.server.buffer(8)), send, behind.finish());
    received.unwrap();
    sent.unwrap();
    written.unwrap();
    assert_pattern(&contents(&region), 5);
}

/// A future with a waker that remembers.
struct Watched<F> {
    future: F,
    flag: std::sync::Arc<Flag>,
}

#[derive(Default)]
struct Flag(std::sync::atomic::AtomicBool);

impl std::task::Wake for Flag {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

impl<F: Future + Unpin> Watched<F> {
    fn new(future: F) -> Self {
        Self { future, flag: Default::default() }
    }

    fn poll(&mut self) -> Poll<F::Output> {
        let waker = self.flag.clone().into();
        Pin::new(&mut self.future).poll(&mut std::task::Context::from_waker(&waker))
    }

    fn woken(&self) -> bool {
        self.flag.0.load(std::sync::atomic::Ordering::SeqCst)
    }

    async fn finish(self) -> F::Output {
        self.future.await
    }
}

async fn dropped_unposted_every_member_ends(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let before = one.domain.stats();
    let mut batch = one.batch();
    let members: Vec<_> = (0..3).map(|at| batch.write(one.filled(8, at), &region.remote())).collect();
    drop(batch);
    all_come_back(members, |error| error.to_string().contains("dropped before it was posted")).await;
    // And the post's future, not polled or polled never.
    let mut batch = one.batch();
    let members: Vec<_> = (0..3).map(|at| batch.write(one.filled(8, at), &region.remote())).collect();
    drop(batch.post());
    all_come_back(members, |error| matches!(error, Error::Invalid { .. })).await;
    assert_eq!(contents(&region), [0; 8]);
    assert_eq!((one.domain.stats(), one.stats().live_slots), (before, 0));
    exercise(&pair).await;
}

async fn on_a_closed_connection_every_member_ends(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let closed = |error: &Error| matches!(error, Error::Closed { reason: CloseReason::Local, .. });
    // Collected before, posted after.
    let mut batch = one.batch();
    let members: Vec<_> = (0..3).map(|at| batch.write(one.filled(8, at), &region.remote())).collect();
    one.close().await;
    let error = batch.post().await.unwrap_err();
    assert_eq!((error.accepted, error.total), (0, 3));
    assert!(closed(&error.error), "{error}");
    all_come_back(members, closed).await;
    // Collected after.
    let mut batch = one.batch();
    let members: Vec<_> = (0..3).map(|at| batch.write(one.filled(8, at), &region.remote())).collect();
    let add = batch.fetch_add(&region.remote(), 1);
    let _ = batch.post().await;
    all_come_back(members, closed).await;
    assert!(closed(&add.await.unwrap_err()));
    assert_eq!(one.stats().live_slots, 0);
}

async fn a_refused_member_is_not_part_of_it(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let read_only = pair.server.buffer(8).expose(Access::REMOTE_READ).unwrap();
    let region = pair.server.exposed(8);
    let foreign = rig.domain();
    let mut batch = one.batch();
    let fine = batch.write(one.filled(8, 1), &region.remote());
    let too_long = batch.write(one.filled(9, 2), &region.remote());
    let no_right = batch.write_unsignaled(one.filled(8, 3), &read_only.remote());
    let not_ours = batch.send(foreign.alloc(8).unwrap());
    let misaligned = batch.fetch_add(&region.remote().slice(..7).unwrap(), 1);
    assert_eq!(batch.len(), 1);
    batch.post().await.unwrap();
    assert_pattern(&fine.await.unwrap(), 1);
    let (error, buffer) = too_long.await.unwrap_err().into_parts();
    assert!(matches!(error, Error::Limit { value: 9, limit: 8, .. }), "{error}");
    assert_pattern(&buffer.unwrap(), 2);
    let (error, buffer) = no_right.await.unwrap_err().into_parts();
    assert!(matches!(error, Error::Access { .. }), "{error}");
    assert_pattern(&buffer.unwrap(), 3);
    let (error, buffer) = not_ours.await.unwrap_err().into_parts();
    assert!(matches!(error, Error::ForeignBuffer { .. }), "{error}");
    assert_eq!(buffer.unwrap().domain().id(), foreign.id());
    assert!(matches!(misaligned.await, Err(Error::Limit { .. })));
    exercise(&pair).await;
}

/// In front of the failure everything completes, also what has no completion of its own; behind it nothing runs.
async fn a_failing_member_ends_the_rest(rig: Rig) {
    let pair = rig.pair().await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let revoked = pair.server.exposed(8);
    let stale = revoked.remote();
    let _kept = revoked.reclaim().await;
    let mut batch = one.batch();
    let before = batch.write_unsignaled(one.filled(8, 0), &region.remote());
    let fails = batch.write_unsignaled(one.filled(8, 1), &stale);
    let behind = batch.write(one.filled(8, 2), &region.remote());
    batch.post().await.unwrap();
    let (before, fails, behind) = join!(before, fails, behind);
    assert_pattern(&before.unwrap(), 0);
    let (error, buffer) = fails.unwrap_err().into_parts();
    assert!(matches!(error, Error::Completion { status: WcStatus::RemoteAccess, .. }), "{error}");
    assert_pattern(&buffer.unwrap(), 1);
    let (error, buffer) = behind.unwrap_err().into_parts();
    assert!(matches!(error, Error::Closed { reason: CloseReason::Failed(WcStatus::RemoteAccess), .. }), "{error}");
    assert_pattern(&buffer.unwrap(), 2);
    assert_eq!(contents(&region), pattern(8, 0));
    assert_eq!((one.stats().in_flight, one.stats().live_slots), (0, 0));
}

async fn members_may_be_awaited_before_the_post(rig: Rig) {
    let pair = rig.pair().await;
    let one = pair.client.clone();
    let region = pair.server.exposed(8);
    let mut batch = one.batch();
    let member = tokio::spawn(batch.write_unsignaled(one.filled(8, 4), &region.remote()));
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert!(!member.is_finished());
    batch.post().await.unwrap();
    assert_pattern(&member.await.unwrap().unwrap(), 4);
}

async fn an_empty_batch_is_posted_at_once(rig: Rig) {
    let pair = rig.pair().await;
    let batch = pair.client.batch();
    assert!(batch.is_empty());
    batch.post().await.unwrap();
    exercise(&pair).await;
}
