//! Waking the right tasks, and resting when there is nothing to do.

use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::join;
use tokio_rdma::CompletionMode;

use crate::common::run::SOON;
use crate::common::{Rig, eventually, exercise, within};

core_cases!(sixteen_tasks_are_woken_by_one_look, waves_after_pauses_all_complete);
cases!(
    an_idle_connection_sleeps,
    several_completion_queues_work_alike,
    counters_tell_what_happened,
    a_flood_of_sends_needs_no_receive_of_its_own,
);

/// Sixteen operations of different kinds, in tasks of their own, complete at the same moment.
async fn sixteen_tasks_are_woken_by_one_look(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(8);
    let remote = region.remote();
    for round in 0..20u64 {
        // Everything waits behind this send, until the peer receives.
        let mut gate = pair.client.send(pair.client.buffer(1));
        gate.try_post().unwrap();
        let tasks: Vec<_> = (0..16)
            .map(|task| {
                let end = pair.client.clone();
                tokio::spawn(async move {
                    match task % 4 {
                        0 => drop(end.write(end.buffer(8), &remote.slice(..8).unwrap()).await.unwrap()),
                        1 => drop(end.read(end.buffer(8), &remote).await.unwrap()),
                        2 => drop(end.send(end.buffer(8)).await.unwrap()),
                        _ => drop(end.receive(end.buffer(8)).await.unwrap()),
                    }
                })
            })
            .collect();
        eventually(|| pair.client.stats().in_flight == 17, || pair.client.stats()).await;
        for _ in 0..4 {
            pair.server.send(pair.server.buffer(8)).await.unwrap();
        }
        let receives: Vec<_> = (0..5).map(|_| pair.server.receive(pair.server.buffer(8))).collect();
        let (received, sent) = join!(join_all(receives), gate);
        assert!(received.iter().all(Result::is_ok));
        sent.unwrap();
        for task in tasks {
            within(SOON, task).await.unwrap();
        }
        assert_eq!(pair.client.stats().live_slots, 0, "round {round}");
    }
}

/// Events that were read only in part, or a flag cleared too early, show up in the second wave, not in the first.
async fn waves_after_pauses_all_complete(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(8);
    let remote = region.remote();
    for wave in [1, 3, 1, 16, 100, 1, 1] {
        let adds: Vec<_> = (0..wave)
            .map(|_| {
                let end = pair.client.clone();
                tokio::spawn(async move { end.fetch_add(&remote, 1).await.unwrap() })
            })
            .collect();
        for add in adds {
            within(SOON, add).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(region.load(0).unwrap(), 123);
}

async fn an_idle_connection_sleeps(rig: Rig) {
    for mode in [CompletionMode::Event, CompletionMode::default()] {
        let open = || (rig.setup.device)().completion_mode(mode).open().unwrap().alloc_pd().unwrap();
        let pair = rig.connect(&open(), &open()).await;
        exercise(&pair).await;
        let mut receive = pair.server.receive(pair.server.buffer(8));
        receive.try_post().unwrap();
        // Whatever follows the traffic is over soon.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let before = [pair.client.stats(), pair.server.stats()];
        let start = Instant::now();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let after = [pair.client.stats(), pair.server.stats()];
        let budget = (5.0 * start.elapsed().as_secs_f64()) as u64;
        for (before, after) in before.iter().zip(&after) {
            let wakeups = after.wakeups - before.wakeups;
            let looks = after.looks - before.looks;
            assert!(wakeups <= budget && looks <= budget, "{mode:?}: {wakeups} wake-ups, {looks} looks in a second");
        }
        // And it wakes up again.
        pair.client.send_number(1).await;
        within(SOON, receive).await.unwrap();
        exercise(&pair).await;
    }
}

async fn several_completion_queues_work_alike(rig: Rig) {
    let open = || rig.open((rig.setup.device)().completion_queues(3)).alloc_pd().unwrap();
    let (client, server) = (open(), open());
    let mut pairs = Vec::new();
    for _ in 0..7 {
        pairs.push(rig.connect(&client, &server).await);
    }
    join_all(pairs.iter().map(exercise)).await;
    pairs.truncate(2);
    join_all(pairs.iter().map(exercise)).await;
}

async fn counters_tell_what_happened(rig: Rig) {
    let pair = rig.pair().await;
    exercise(&pair).await;
    for end in [&pair.client, &pair.server] {
        let stats = end.stats();
        // A write, one with immediate, one in a batch; the sums of what `exercise` moves each way.
        assert_eq!((stats.sends, stats.receives, stats.writes, stats.reads, stats.atomics), (2, 3, 3, 1, 3));
        assert_eq!(stats.errors, 0);
        assert_eq!(stats.bytes_sent, 3000 + 30 + 2 * 4096 + 64);
        assert_eq!((stats.in_flight, stats.live_slots, stats.waiting), (0, 0, 0));
        assert!(stats.looks > 0 && stats.peak_in_flight >= 1);
    }
    assert!(pair.client.queue_pair_number() > 0);
    assert!(!pair.client.peer().is_empty());
    assert_eq!(pair.client.link(), pair.server.link());
}

/// The send queue's completions are taken although this side never receives.
async fn a_flood_of_sends_needs_no_receive_of_its_own(rig: Rig) {
    const COUNT: u64 = 10_000;
    let pair = rig.pair().await;
    let server = pair.server.clone();
    let sink = tokio::spawn(async move {
        let pool = server.pool(64, 100);
        for at in 0..COUNT / 100 {
            let receives: Vec<_> = (0..100).map(|_| server.receive(pool.try_get().unwrap())).collect();
            for (number, received) in (at * 100..).zip(join_all(receives).await) {
                assert_eq!(received.unwrap().message()[..8], number.to_le_bytes());
            }
        }
    });
    let pool = pair.client.pool(64, 64);
    let mut sends = tokio::task::JoinSet::new();
    for number in 0..COUNT {
        let mut buffer = pool.get().await;
        buffer[..8].copy_from_slice(&number.to_le_bytes());
        let mut send = pair.client.send(buffer);
        // Posted here, so in this order; awaited elsewhere.
        send.try_post().unwrap();
        sends.spawn(async move { drop(send.await.unwrap()) });
        while sends.try_join_next().is_some() {}
    }
    within(SOON, sink).await.unwrap();
    sends.join_all().await;
    assert_eq!(pair.client.stats().sends, COUNT);
}
