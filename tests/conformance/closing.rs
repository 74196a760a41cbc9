//! Ends of connections: reasons on both sides, and nothing that waits for ever.

use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::join;
use tokio_rdma::{CloseReason, Connection, Error};

use crate::common::run::SOON;
use crate::common::{Rig, assert_pattern, eventually, exercise, holds_for, within};

cases!(
    both_sides_say_why,
    the_last_handle_closes,
    every_waiter_is_told,
    closing_twice_is_closing_once,
    both_sides_close_at_once,
    closing_under_load_ends_everything,
    a_message_before_the_end_arrives,
    a_message_too_long_ends_both_sides,
    operations_outlive_their_handles,
    connections_of_a_device_are_independent,
    a_fresh_connection_works_afterwards,
    the_listener_is_not_needed_any_more,
    a_silent_connection_is_probed_and_lives,
);

async fn both_sides_say_why(rig: Rig) {
    let pair = rig.pair().await;
    assert_eq!((pair.client.close_reason(), pair.server.close_reason()), (None, None));
    pair.client.close().await;
    assert_eq!(pair.client.close_reason(), Some(CloseReason::Local));
    assert_eq!(within(SOON, pair.server.closed()).await, CloseReason::Peer);
    assert_eq!(pair.server.close_reason(), Some(CloseReason::Peer));
    let error = pair.server.send(pair.server.buffer(1)).await.unwrap_err();
    assert_eq!(error.to_string(), "send: the connection is closed: closed by the peer");
    let error = pair.client.fetch_add(&pair.server.exposed(8).remote(), 1).await.unwrap_err();
    assert_eq!(error.to_string(), "fetch-and-add: the connection is closed: closed on this side");
    assert!(!error.is_caller_error());
}

async fn the_last_handle_closes(rig: Rig) {
    let pair = rig.pair().await;
    let clones: Vec<Connection> = (0..3).map(|_| pair.client.connection.clone()).collect();
    drop(pair.client);
    holds_for(Duration::from_millis(20), || pair.server.close_reason().is_none()).await;
    clones[2].send(clones[2].domain().alloc(1).unwrap()).timeout(Duration::from_millis(1)).await.unwrap_err();
    drop(clones);
    assert_eq!(within(SOON, pair.server.closed()).await, CloseReason::Peer);
}

async fn every_waiter_is_told(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(4).receive_depth(4)).await;
    let waiters: Vec<_> = (0..5)
        .map(|_| {
            let end = pair.client.clone();
            tokio::spawn(async move { end.closed().await })
        })
        .collect();
    // Posted ones and ones in line, of both queues.
    let sends: Vec<_> = (0..10)
        .map(|_| {
            let end = pair.client.clone();
            tokio::spawn(async move { end.send(end.filled(8, 3)).await.unwrap_err().into_parts() })
        })
        .collect();
    let receives: Vec<_> = (0..10)
        .map(|_| {
            let end = pair.client.clone();
            tokio::spawn(async move { end.receive(end.filled(8, 3)).await.unwrap_err().into_parts() })
        })
        .collect();
    eventually(|| pair.client.stats().waiting == 12, || pair.client.stats()).await;
    pair.server.close().await;
    for waiter in waiters {
        assert_eq!(within(SOON, waiter).await.unwrap(), CloseReason::Peer);
    }
    for ended in sends.into_iter().chain(receives) {
        let (error, buffer) = within(SOON, ended).await.unwrap();
        assert!(matches!(error, Error::Closed { reason: CloseReason::Peer, .. }), "{error}");
        assert_pattern(&buffer.unwrap(), 3);
    }
    assert_eq!((pair.client.stats().waiting, pair.client.stats().live_slots), (0, 0));
    // Late askers get the answer at once.
    assert_eq!(pair.client.closed().await, CloseReason::Peer);
}

async fn closing_twice_is_closing_once(rig: Rig) {
    let pair = rig.pair().await;
    let (end, again) = (pair.client.clone(), pair.client.clone());
    join!(pair.client.close(), end.close(), async { tokio::spawn(async move { again.close().await }).await.unwrap() });
    pair.client.close().await;
    pair.server.closed().await;
    pair.server.close().await;
    assert_eq!(pair.server.close_reason(), Some(CloseReason::Peer), "the first reason stays");
    assert_eq!(pair.client.close_reason(), Some(CloseReason::Local));
}

async fn both_sides_close_at_once(rig: Rig) {
    for _ in 0..20 {
        let pair = rig.pair().await;
        let (client, server) = (pair.client.clone(), pair.server.clone());
        let (one, two) =
            join!(tokio::spawn(async move { client.close().await }), tokio::spawn(async move { server.close().await }));
        one.unwrap();
        two.unwrap();
        for end in [&pair.client, &pair.server] {
            let reason = end.close_reason().unwrap();
            assert!(matches!(reason, CloseReason::Local | CloseReason::Peer), "{reason:?}");
        }
    }
}

async fn closing_under_load_ends_everything(rig: Rig) {
    for by_peer in [false, true] {
        let pair = rig.pair_of(|settings| settings.send_depth(16)).await;
        let region = pair.server.exposed(1 << 16);
        let remote = region.remote();
        let before = pair.client.domain.stats();
        let load: Vec<_> = (0..32u64)
            .map(|task| {
                let end = pair.client.clone();
                tokio::spawn(async move {
                    let mut buffer = end.filled(1 << 16, task);
                    loop {
                        let result = match task % 2 {
                            0 => end.write(buffer, &remote).await,
                            _ => end.read(buffer, &remote).await,
                        };
                        buffer = match result {
                            Ok(buffer) => buffer,
                            Err(error) => return error.into_parts(),
                        };
                    }
                })
            })
            .collect();
        eventually(|| pair.client.stats().writes > 50, || pair.client.stats()).await;
        let start = Instant::now();
        if by_peer {
            pair.server.close().await
        } else {
            pair.client.close().await
        }
        for task in load {
            let (error, buffer) = within(SOON, task).await.unwrap();
            assert!(matches!(error, Error::Closed { .. }), "{error}");
            drop(buffer.expect("every buffer comes back"));
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        let stats = pair.client.stats();
        assert_eq!((stats.in_flight, stats.live_slots, stats.waiting), (0, 0, 0));
        assert_eq!(pair.client.domain.stats(), before);
    }
}

async fn a_message_before_the_end_arrives(rig: Rig) {
    for len in [8, 1 << 20] {
        let pair = rig.pair().await;
        let mut receive = pair.server.receive(pair.server.buffer(len));
        receive.try_post().unwrap();
        pair.client.send(pair.client.filled(len, 1)).await.unwrap();
        // Delivered means delivered, although this side is gone by the time that the other one looks.
        drop(pair.client);
        assert_pattern(within(SOON, receive).await.unwrap().message(), 1);
        assert_eq!(within(SOON, pair.server.closed()).await, CloseReason::Peer);
    }
}

async fn a_message_too_long_ends_both_sides(rig: Rig) {
    let pair = rig.pair().await;
    let mut behind = pair.server.receive(pair.server.buffer(100));
    let mut first = pair.server.receive(pair.server.buffer(10));
    first.try_post().unwrap();
    behind.try_post().unwrap();
    let (first, sent) = join!(first, pair.client.send(pair.client.buffer(11)));
    let failed = |error: &Error| match error {
        Error::Completion { status, .. } => Some(*status),
        _ => None,
    };
    let [at_receiver, at_sender] = crate::buffers::too_long(&rig);
    assert_eq!(failed(first.unwrap_err().error()), Some(at_receiver));
    assert_eq!(failed(sent.unwrap_err().error()), Some(at_sender));
    assert!(matches!(behind.await.unwrap_err().error(), Error::Closed { .. }));
    let reasons = within(SOON, async { join!(pair.client.closed(), pair.server.closed()) }).await;
    // Over RDMA CM the other end's goodbye may be first.
    let told = |reason: &CloseReason| {
        matches!(reason, CloseReason::Failed(_)) || (rig.on_nic() && *reason == CloseReason::Peer)
    };
    assert!(told(&reasons.0) && told(&reasons.1), "{reasons:?}");
}

async fn operations_outlive_their_handles(rig: Rig) {
    let pair = rig.pair().await;
    let domain = pair.client.domain.clone();
    let send = pair.client.send(pair.client.filled(8, 1));
    let mut posted = pair.client.receive(pair.client.filled(8, 2));
    posted.try_post().unwrap();
    let batch = pair.client.batch();
    drop(pair.client);
    for (error, buffer, seed) in [
        {
            let (error, buffer) = send.await.unwrap_err().into_parts();
            (error, buffer, 1)
        },
        {
            let (error, buffer) = posted.await.unwrap_err().into_parts();
            (error, buffer, 2)
        },
    ] {
        assert!(matches!(error, Error::Closed { reason: CloseReason::Local, .. }), "{error}");
        assert_pattern(&buffer.unwrap(), seed);
    }
    batch.post().await.unwrap();
    assert_eq!(domain.stats().live_buffers, 0);
}

async fn connections_of_a_device_are_independent(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let mut pairs = Vec::new();
    for _ in 0..5 {
        pairs.push(rig.connect(&client, &server).await);
    }
    let mut numbers: Vec<_> = pairs.iter().map(|pair| pair.client.queue_pair_number()).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 5, "each queue pair has a number of its own");
    pairs[0].client.close().await;
    drop(pairs.remove(3));
    pairs[1].client.send(pairs[1].server.buffer(1)).await.unwrap_err();
    within(SOON, pairs[0].server.closed()).await;
    join_all(pairs[1..].iter().map(exercise)).await;
}

async fn a_fresh_connection_works_afterwards(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    for _ in 0..10 {
        let pair = rig.connect(&client, &server).await;
        exercise(&pair).await;
        pair.client.close().await;
        within(SOON, pair.server.closed()).await;
    }
    let regions = || (client.stats().live_regions, server.stats().live_regions);
    eventually(|| regions() == (0, 0), regions).await;
}

async fn the_listener_is_not_needed_any_more(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let listener = rig.listener(&server).await;
    let address = listener.local_address().clone();
    let (connected, accepted) = join!(Connection::connect(&client, &address), listener.accept());
    let pair = crate::common::Pair {
        client: crate::common::End::new(&client, connected.unwrap()),
        server: crate::common::End::new(&server, accepted.unwrap()),
    };
    drop(listener);
    exercise(&pair).await;
    assert!(Connection::connect(&client, &address).await.is_err(), "nobody listens any more");
}

async fn a_silent_connection_is_probed_and_lives(rig: Rig) {
    let often = Some(Duration::from_millis(10));
    let pair = rig.pair_of(|settings| settings.keepalive(often)).await;
    let mut receive = pair.server.receive(pair.server.buffer(8));
    receive.try_post().unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    for end in [&pair.client, &pair.server] {
        assert_eq!(end.close_reason(), None);
        let stats = end.stats();
        assert_eq!((stats.writes, stats.errors), (0, 0), "a probe is no operation of the program's");
    }
    pair.client.send_number(4).await;
    assert_eq!(receive.await.unwrap().message(), 4u64.to_le_bytes());
    exercise(&pair).await;
}
