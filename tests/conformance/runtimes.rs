//! Several runtimes: one drives the device, others use it, and any of them may end.

use std::time::Duration;

use tokio::join;
use tokio_rdma::{CloseReason, Error};

use crate::common::rig::Setup;
use crate::common::run::SOON;
use crate::common::{Pair, Rig, assert_pattern, eventually, exercise, within};

core_cases!(operations_run_in_another_runtime_than_the_connection_was_made_in);
cases!(
    the_driving_runtime_ends,
    the_driving_runtime_ends_in_event_mode,
    a_device_is_driven_again_by_the_next_runtime,
    a_runtime_that_only_uses_the_device_may_end,
    dropping_everything_outside_of_a_runtime,
);

/// Connects inside of a runtime of its own, which then drives both devices.
async fn driven_elsewhere(setup: Setup) -> (tokio::runtime::Runtime, Pair) {
    tokio::task::spawn_blocking(move || {
        let runtime = setup.runtime();
        // Not `block_on` alone: on a current-thread runtime the drivers would stand still afterwards.
        let pair = runtime.block_on(async { tokio::spawn(async move { Rig::new(setup).pair().await }).await.unwrap() });
        (runtime, pair)
    })
    .await
    .unwrap()
}

async fn operations_run_in_another_runtime_than_the_connection_was_made_in(rig: Rig) {
    // Its runtime needs threads of its own, since nobody blocks on it.
    let (runtime, pair) = driven_elsewhere(Setup { workers: 2, ..rig.setup }).await;
    for _ in 0..20 {
        exercise(&pair).await;
    }
    drop(pair);
    runtime.shutdown_background();
}

async fn ends(rig: Rig, setup: Setup) {
    let (runtime, pair) = driven_elsewhere(Setup { workers: 2, ..setup }).await;
    exercise(&pair).await;
    let operations: Vec<_> = (0..20u64)
        .map(|at| {
            let end = pair.client.clone();
            tokio::spawn(async move {
                let buffer = end.filled(64, at);
                let (error, buffer) = match at % 2 {
                    0 => end.receive(buffer).await.unwrap_err().into_parts(),
                    _ => end.send(buffer).await.unwrap_err().into_parts(),
                };
                assert_pattern(&buffer.unwrap(), at);
                error
            })
        })
        .collect();
    eventually(|| pair.client.stats().in_flight == 20, || pair.client.stats()).await;
    runtime.shutdown_background();
    for operation in operations {
        let error = within(SOON, operation).await.unwrap();
        // Whichever of the two devices loses its driver first tells the other.
        assert!(
            matches!(error, Error::Closed { reason: CloseReason::RuntimeGone | CloseReason::Peer, .. }),
            "{error:?}"
        );
    }
    let reasons = within(SOON, async { join!(pair.client.closed(), pair.server.closed()) }).await;
    assert!(reasons.0 == CloseReason::RuntimeGone || reasons.1 == CloseReason::RuntimeGone, "{reasons:?}");
    assert_eq!(pair.client.stats().live_slots, 0);
    let error = pair.client.send(pair.client.buffer(1)).await.unwrap_err();
    assert!(matches!(error.error(), Error::Closed { .. }), "{error}");
    // The devices themselves are as good as before.
    exercise(&rig.connect(&pair.client.domain, &pair.server.domain).await).await;
}

async fn the_driving_runtime_ends(rig: Rig) {
    let setup = rig.setup;
    ends(rig, setup).await;
}

async fn the_driving_runtime_ends_in_event_mode(rig: Rig) {
    let setup = rig.setup.mode(tokio_rdma::CompletionMode::Event);
    ends(rig, setup).await;
}

async fn a_device_is_driven_again_by_the_next_runtime(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    for workers in [0, 1, 2] {
        let setup = Setup { workers, ..rig.setup };
        let (client, server) = (client.clone(), server.clone());
        let round = tokio::task::spawn_blocking(move || {
            setup.runtime().block_on(async {
                let pair = Rig::new(setup).connect(&client, &server).await;
                exercise(&pair).await;
                // Left open: the runtime ends under it.
                pair
            })
        });
        let pair = round.await.unwrap();
        within(SOON, async { join!(pair.client.closed(), pair.server.closed()) }).await;
    }
}

async fn a_runtime_that_only_uses_the_device_may_end(rig: Rig) {
    let pair = rig.pair().await;
    let end = pair.client.clone();
    let pool = end.pool(64, 4);
    let lent = pool.clone();
    tokio::task::spawn_blocking(move || {
        let runtime = Setup::SOFT_TCP.runtime();
        for _ in 0..4 {
            let (end, pool) = (end.clone(), lent.clone());
            runtime.spawn(async move { end.send(pool.get().await).await });
        }
        runtime.block_on(eventually(|| end.stats().in_flight == 4, || end.stats()));
        // Its tasks are dropped, and with them the futures of what is posted.
        runtime.shutdown_timeout(Duration::from_secs(5));
    })
    .await
    .unwrap();
    assert_eq!(pool.available(), 0, "the device has the buffers still");
    for _ in 0..4 {
        within(SOON, pair.server.receive(pair.server.buffer(64))).await.unwrap();
    }
    eventually(|| pool.available() == 4, || pair.client.stats()).await;
    exercise(&pair).await;
}

async fn dropping_everything_outside_of_a_runtime(rig: Rig) {
    let pair = rig.pair().await;
    let mut receive = pair.server.receive(pair.server.buffer(8));
    receive.try_post().unwrap();
    let batch = pair.client.batch();
    let listener = rig.listener(&pair.server.domain).await;
    let domain = pair.client.domain.clone();
    let thread = std::thread::spawn(move || {
        drop(listener);
        drop(pair);
        drop(batch);
        drop(receive);
    });
    within(SOON, tokio::task::spawn_blocking(move || thread.join())).await.unwrap().unwrap();
    assert_eq!((domain.stats().live_regions, domain.stats().live_buffers), (0, 0));
}
