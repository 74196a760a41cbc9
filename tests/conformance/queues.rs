//! Full queues: backpressure, order, and `try_post`.

use std::sync::Mutex;

use futures::future::join_all;
use tokio::join;
use tokio_rdma::Error;

use crate::common::rig::contents;
use crate::common::{Rig, assert_pattern, eventually, exercise, exercise_singly, poll_once};

cases!(
    ten_thousand_writes_through_eight_slots,
    who_waits_gets_a_slot_in_the_order_of_arrival,
    a_full_queue_is_an_error_only_for_try_post,
    a_full_receive_queue_is_backpressure_too,
    cancelled_before_posting_means_never_posted,
    a_waiter_that_goes_away_passes_the_turn_on,
    results_nobody_takes_do_not_block_the_queue,
    posting_ahead_fixes_the_order,
    a_hundred_tasks_share_one_connection,
    sixteen_threads_share_one_connection,
);

async fn ten_thousand_writes_through_eight_slots(rig: Rig) {
    const COUNT: usize = 10_000;
    let pair = rig.pair_of(|settings| settings.send_depth(8)).await;
    let one = &pair.client;
    let region = pair.server.exposed(8 * COUNT);
    let remote = region.remote();
    let buffer = one.filled(8, 1).freeze();
    let writes = (0..COUNT as u64).map(|at| one.write(buffer.clone(), &remote.slice(8 * at..).unwrap()));
    for written in join_all(writes).await {
        written.unwrap();
    }
    assert!(contents(&region).chunks(8).all(|chunk| *chunk == buffer[..]));
    let stats = one.stats();
    assert_eq!(
        (stats.writes, stats.errors, stats.in_flight, stats.live_slots, stats.waiting),
        (COUNT as u64, 0, 0, 0, 0)
    );
    assert!(stats.peak_in_flight <= 8, "never more than there are slots: {stats:?}");
    // Soft-RoCE has finished most of them by the time that they are posted, and so has this side where it writes by itself.
    if !rig.on_nic() && stats.direct == 0 {
        assert_eq!(stats.peak_in_flight, 8, "all slots are used");
        assert!((1..=COUNT as u64 - 8).contains(&stats.slot_waits), "{} had to wait", stats.slot_waits);
    }
}

async fn who_waits_gets_a_slot_in_the_order_of_arrival(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(3)).await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let done = Mutex::new(Vec::new());
    let adds = (0..200).map(|at| {
        let add = one.fetch_add(&region.remote(), 1);
        let done = &done;
        async move {
            assert_eq!(add.await.unwrap(), at, "posted in the order of arrival");
            done.lock().unwrap().push(at);
        }
    });
    join_all(adds).await;
    assert_eq!(done.lock().unwrap().len(), 200);
}

async fn a_full_queue_is_an_error_only_for_try_post(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(2)).await;
    let (one, other) = (&pair.client, &pair.server);
    // Nobody receives, so the slots stay taken.
    let mut first = one.send(one.filled(8, 0));
    let mut second = one.send(one.filled(8, 1));
    let mut third = one.send(one.filled(8, 2));
    first.try_post().unwrap();
    first.try_post().expect("it is posted, which is what was asked for");
    second.try_post().unwrap();
    let error = third.try_post().unwrap_err();
    assert!(matches!(error, Error::QueueFull { depth: 2, .. }), "{error:?}");
    assert!(error.to_string().starts_with("send: all 2 slots"), "{error}");
    assert!(!error.is_caller_error());
    assert_eq!((one.stats().in_flight, one.stats().waiting), (2, 0), "a refusal leaves nothing behind");
    let receive = async {
        for at in 0..3 {
            assert_pattern(other.receive(other.buffer(8)).await.unwrap().message(), at);
        }
    };
    let (first, second, third, ()) = join!(first, second, third, receive);
    assert_pattern(&first.unwrap(), 0);
    assert_pattern(&second.unwrap(), 1);
    assert_pattern(&third.unwrap(), 2);
}

async fn a_full_receive_queue_is_backpressure_too(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.receive_depth(2)).await;
    let (one, other) = (&pair.client, &pair.server);
    let mut receives: Vec<_> = (0..3).map(|_| other.receive(other.buffer(8))).collect();
    receives[0].try_post().unwrap();
    receives[1].try_post().unwrap();
    let error = receives[2].try_post().unwrap_err();
    assert!(error.to_string().starts_with("receive: all 2 slots"), "{error}");
    let send = async {
        for number in 0..3 {
            one.send_number(number).await;
        }
    };
    let (received, ()) = join!(join_all(receives), send);
    for (number, received) in (0u64..).zip(received) {
        assert_eq!(received.unwrap().message(), number.to_le_bytes());
    }
}

async fn cancelled_before_posting_means_never_posted(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(1)).await;
    let (one, other) = (&pair.client, &pair.server);
    let region = other.exposed(8);
    let mut blocking = one.send(one.filled(8, 0));
    blocking.try_post().unwrap();
    let mut write = one.write(one.filled(8, 1), &region.remote());
    let mut send = one.send(one.filled(8, 2));
    let mut add = one.fetch_add(&region.remote(), 1);
    assert!(poll_once(&mut write).is_pending());
    assert!(poll_once(&mut send).is_pending());
    assert!(poll_once(&mut add).is_pending());
    assert_eq!((one.stats().in_flight, one.stats().waiting), (1, 3));
    drop((write, send, add));
    assert_eq!(one.stats().waiting, 0);
    let (received, sent) = join!(other.receive(other.buffer(8)), blocking);
    assert_pattern(received.unwrap().message(), 0);
    sent.unwrap();
    exercise_singly(&pair).await;
    assert_eq!(contents(&region), [0; 8]);
}

async fn a_waiter_that_goes_away_passes_the_turn_on(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(1)).await;
    let (one, other) = (pair.client.clone(), &pair.server);
    let mut random = fastrand::Rng::with_seed(5);
    for round in 0..30 {
        let mut blocking = one.send(one.filled(8, 0));
        blocking.try_post().unwrap();
        let region = other.exposed(8);
        let mut waiting: Vec<_> = (0..20)
            .map(|_| {
                let (one, remote) = (one.clone(), region.remote());
                tokio::spawn(async move { one.fetch_add(&remote, 1).await.unwrap() })
            })
            .collect();
        eventually(|| one.stats().waiting == 20, || one.stats()).await;
        random.shuffle(&mut waiting);
        let gone = waiting.split_off(10);
        let mut receive = other.receive(other.buffer(8));
        // Some before the slot is free, some at about the same time.
        for (at, task) in gone.iter().enumerate() {
            task.abort();
            if at == round % 10 {
                receive.try_post().unwrap();
            }
        }
        let (received, sent) = join!(receive, blocking);
        received.unwrap();
        sent.unwrap();
        for task in waiting {
            task.await.expect("whoever stays in line gets a turn");
        }
        for task in gone {
            let _ = task.await;
        }
        eventually(|| one.stats().live_slots == 0, || one.stats()).await;
        assert!((10..=20).contains(&region.load(0).unwrap()));
    }
}

async fn results_nobody_takes_do_not_block_the_queue(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(2)).await;
    let one = &pair.client;
    let region = pair.server.exposed(8);
    let mut forgotten = Vec::new();
    for at in 0..100 {
        let mut write = one.write(one.filled(8, at), &region.remote());
        eventually(|| write.try_post().is_ok(), || one.stats()).await;
        forgotten.push(write);
    }
    exercise(&pair).await;
    assert_eq!(one.stats().live_slots, 100);
    for (at, write) in (0..).zip(forgotten) {
        assert_pattern(&write.await.unwrap(), at);
    }
    assert_eq!(one.stats().live_slots, 0);
}

async fn posting_ahead_fixes_the_order(rig: Rig) {
    let pair = rig.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    let mut receives: Vec<_> = (0..10).map(|_| other.receive(other.buffer(8))).collect();
    receives.iter_mut().for_each(|receive| receive.try_post().unwrap());
    let mut sends: Vec<_> = (0..10).map(|at| one.send(one.filled(8, at))).collect();
    // Posted from the last to the first, awaited from the first to the last.
    sends.iter_mut().rev().for_each(|send| send.try_post().unwrap());
    for sent in sends {
        sent.await.unwrap();
    }
    for (at, received) in (0..10).rev().zip(receives) {
        assert_pattern(received.await.unwrap().message(), at);
    }
}

async fn a_hundred_tasks_share_one_connection(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(100 * 64);
    let remote = region.remote();
    let tasks: Vec<_> = (0..100u64)
        .map(|task| {
            let one = pair.client.clone();
            tokio::spawn(async move {
                let place = remote.slice(task * 64..(task + 1) * 64).unwrap();
                for round in 0..20 {
                    let seed = task * 1000 + round;
                    one.write(one.filled(64, seed), &place).await.unwrap();
                    assert_pattern(&one.read(one.buffer(64), &place).await.unwrap(), seed);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!((pair.client.stats().writes, pair.client.stats().reads), (2000, 2000));
}

/// Threads of the system, not tasks that a few workers share: whoever looks, posts, drops and closes does so at the same time.
async fn sixteen_threads_share_one_connection(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(8)).await;
    let region = pair.server.exposed(16 * 64);
    let remote = region.remote();
    let runtime = tokio::runtime::Handle::current();
    let threads: Vec<_> = (0..16u64)
        .map(|thread| {
            let (one, runtime) = (pair.client.clone(), runtime.clone());
            let place = remote.slice(thread * 64..(thread + 1) * 64).unwrap();
            std::thread::spawn(move || {
                runtime.block_on(async {
                    for round in 0..30 {
                        let seed = thread * 100 + round;
                        let mut batch = one.batch();
                        let first = batch.write_unsignaled(one.filled(64, 0), &place);
                        let second = batch.write(one.filled(64, seed), &place);
                        drop(first);
                        batch.post().await.unwrap();
                        drop(one.read(one.buffer(64), &place));
                        second.await.unwrap();
                        assert_pattern(&one.read(one.buffer(64), &place).await.unwrap(), seed);
                        let mut dropped = one.read(one.buffer(64), &place);
                        let _ = dropped.try_post();
                    }
                })
            })
        })
        .collect();
    let joined = tokio::task::spawn_blocking(|| threads.into_iter().all(|thread| thread.join().is_ok()));
    assert!(joined.await.unwrap());
    eventually(|| pair.client.stats().live_slots == 0, || pair.client.stats()).await;
    assert_eq!(pair.client.stats().writes, 16 * 30, "a member that was dropped never ran");
    exercise(&pair).await;
}
