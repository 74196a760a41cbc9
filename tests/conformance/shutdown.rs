//! Ends in good order: what is under way is finished first, and nobody waits for ever.

use std::time::Duration;

use futures::StreamExt;
use tokio::join;
use tokio_rdma::{CloseReason, Connection, Error, Listener};

use crate::common::raw;
use crate::common::run::SOON;
use crate::common::{Rig, assert_pattern, eventually, exercise, holds_for, poll_once, within};

cases!(
    what_is_under_way_is_finished_first,
    what_starts_afterwards_ends_with_the_connection,
    a_shutdown_that_is_dropped_is_taken_back,
    receives_go_on_until_the_end,
    both_ends_may_shut_down_at_once,
    an_end_that_comes_first_is_told,
    a_stopped_listener_yields_who_was_there_and_ends,
    a_listener_waits_for_its_connections,
    a_listener_closes_who_does_not_end_in_time,
    an_accept_that_is_kept_does_not_hold_up_the_end,
);
soft_cases!(a_client_that_says_nothing_does_not_hold_up_the_end,);

/// Long enough for something to happen that should not.
const WHILE: Duration = Duration::from_millis(30);

async fn what_is_under_way_is_finished_first(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(4)).await;
    let region = pair.server.exposed(1 << 20);
    // Four of them are with the device and the others in line, since nobody receives.
    let sends: Vec<_> = (0..10)
        .map(|seed| {
            let end = pair.client.clone();
            tokio::spawn(async move { end.send(end.filled(64, seed)).await })
        })
        .collect();
    eventually(|| pair.client.stats().waiting == 6, || pair.client.stats()).await;
    let end = pair.client.clone();
    let remote = region.remote();
    let write = tokio::spawn(async move { end.write(end.filled(1 << 20, 99), &remote).await });
    eventually(|| pair.client.stats().waiting == 7, || pair.client.stats()).await;
    let end = pair.client.clone();
    let ending = tokio::spawn(async move { end.shutdown().await });
    eventually(|| pair.client.stats().waiting == 8, || pair.client.stats()).await;
    holds_for(WHILE, || pair.client.close_reason().is_none() && !ending.is_finished()).await;

    let mut seeds = Vec::new();
    for _ in 0..10 {
        let received = within(SOON, pair.server.receive(pair.server.buffer(64))).await.unwrap();
        let seed = (0..10).find(|&seed| received.message() == crate::common::pattern(64, seed)).unwrap();
        seeds.push(seed);
    }
    seeds.sort_unstable();
    assert_eq!(seeds, Vec::from_iter(0..10));
    assert_eq!(within(SOON, ending).await.unwrap(), CloseReason::Local);
    for send in sends {
        send.await.unwrap().unwrap();
    }
    write.await.unwrap().unwrap();
    assert_pattern(&crate::common::rig::contents(&region), 99);
    assert_eq!(within(SOON, pair.server.closed()).await, CloseReason::Peer);
    let stats = pair.client.stats();
    assert_eq!((stats.in_flight, stats.waiting, stats.errors), (0, 0, 0));
    assert!(stats.peak_in_flight <= 4, "{stats:?}");
}

async fn what_starts_afterwards_ends_with_the_connection(rig: Rig) {
    let pair = rig.pair().await;
    let mut before = pair.client.send(pair.client.filled(8, 1));
    before.try_post().unwrap();
    let peak = pair.client.stats().peak_in_flight;
    let end = pair.client.clone();
    let ending = tokio::spawn(async move { end.shutdown().await });
    eventually(|| pair.client.stats().waiting == 1, || pair.client.stats()).await;
    let mut after = pair.client.send(pair.client.filled(8, 2));
    assert!(matches!(after.try_post(), Err(Error::QueueFull { .. })));
    let after = tokio::spawn(after);
    eventually(|| pair.client.stats().waiting == 2, || pair.client.stats()).await;
    assert_pattern(within(SOON, pair.server.receive(pair.server.buffer(8))).await.unwrap().message(), 1);
    let (error, buffer) = within(SOON, after).await.unwrap().unwrap_err().into_parts();
    assert!(matches!(error, Error::Closed { reason: CloseReason::Local, .. }), "{error}");
    assert_pattern(&buffer.unwrap(), 2);
    before.await.unwrap();
    assert_eq!(within(SOON, ending).await.unwrap(), CloseReason::Local);
    assert_eq!(pair.client.stats().peak_in_flight, peak, "places that were held back are not operations");
}

async fn a_shutdown_that_is_dropped_is_taken_back(rig: Rig) {
    let pair = rig.pair().await;
    let mut first = pair.client.send(pair.client.filled(8, 1));
    first.try_post().unwrap();
    let mut behind = pair.client.send(pair.client.filled(8, 2));
    {
        let mut ending = Box::pin(pair.client.shutdown());
        assert!(poll_once(&mut ending).is_pending());
        assert!(poll_once(&mut behind).is_pending());
        assert_eq!(pair.client.stats().waiting, 2);
    }
    within(SOON, async {
        for seed in [1, 2] {
            let (received, ()) = join!(pair.server.receive(pair.server.buffer(8)), async {
                if seed == 2 {
                    (&mut behind).await.unwrap();
                }
            });
            assert_pattern(received.unwrap().message(), seed);
        }
    })
    .await;
    first.await.unwrap();
    exercise(&pair).await;
}

async fn receives_go_on_until_the_end(rig: Rig) {
    let pair = rig.pair().await;
    let mut last = pair.client.send(pair.client.filled(8, 1));
    last.try_post().unwrap();
    let end = pair.client.clone();
    let ending = tokio::spawn(async move { end.shutdown().await });
    eventually(|| pair.client.stats().waiting == 1, || pair.client.stats()).await;
    // The peer wants an answer before it takes the last message.
    let (received, sent) = within(SOON, async {
        join!(pair.client.receive(pair.client.buffer(8)), pair.server.send(pair.server.filled(8, 3)))
    })
    .await;
    assert_pattern(received.unwrap().message(), 3);
    sent.unwrap();
    assert!(!ending.is_finished());
    within(SOON, pair.server.receive(pair.server.buffer(8))).await.unwrap();
    assert_eq!(within(SOON, ending).await.unwrap(), CloseReason::Local);
}

async fn both_ends_may_shut_down_at_once(rig: Rig) {
    for _ in 0..10 {
        let pair = rig.pair().await;
        let (client, server) = (pair.client.clone(), pair.server.clone());
        let one = tokio::spawn(async move { join!(client.shutdown(), client.shutdown()) });
        let two = tokio::spawn(async move { server.shutdown().await });
        let ((one, again), two) = (within(SOON, one).await.unwrap(), within(SOON, two).await.unwrap());
        assert_eq!(one, again);
        for reason in [one, two] {
            assert!(matches!(reason, CloseReason::Local | CloseReason::Peer), "{reason:?}");
        }
    }
}

async fn an_end_that_comes_first_is_told(rig: Rig) {
    let pair = rig.pair().await;
    let mut never = pair.client.send(pair.client.buffer(8));
    never.try_post().unwrap();
    let end = pair.client.clone();
    let ending = tokio::spawn(async move { end.shutdown().await });
    eventually(|| pair.client.stats().waiting == 1, || pair.client.stats()).await;
    pair.server.close().await;
    assert_eq!(within(SOON, ending).await.unwrap(), CloseReason::Peer);
    assert_eq!(within(SOON, pair.client.shutdown()).await, CloseReason::Peer);
    never.await.unwrap_err();
}

async fn a_stopped_listener_yields_who_was_there_and_ends(rig: Rig) {
    for stream in [false, true] {
        let (client, server) = (rig.domain(), rig.domain());
        let listener = rig.listener(&server).await;
        let address = listener.local_address().clone();
        let mut there = Vec::new();
        for _ in 0..3 {
            there.push(Connection::connect(&client, &address).await.unwrap());
        }
        // A client is connected a moment before the listener's task knows.
        eventually(|| listener.open_connections() == 3, || listener.open_connections()).await;
        listener.stop();
        listener.stop();
        if stream {
            let accepted: Vec<_> = within(SOON, listener.incoming().collect()).await;
            assert_eq!(accepted.into_iter().map(Result::unwrap).count(), 3);
        } else {
            for _ in 0..3 {
                within(SOON, listener.accept()).await.unwrap();
            }
            for _ in 0..2 {
                let error = within(SOON, listener.accept()).await.unwrap_err();
                assert!(matches!(error, Error::Closed { reason: CloseReason::Local, .. }), "{error:?}");
            }
        }
        Connection::builder(&client).setup_timeout(SOON / 10).connect(&address).await.unwrap_err();
        for connection in there {
            within(SOON, connection.closed()).await;
        }
    }
}

/// A listener with so many clients, all accepted: the clients' ends and the listener's.
async fn serving(rig: &Rig, count: usize) -> (Listener, Vec<Connection>, Vec<Connection>) {
    let (client, server) = (rig.domain(), rig.domain());
    let listener = rig.listener(&server).await;
    let (mut clients, mut served) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let connecting = Connection::connect(&client, listener.local_address());
        let (connected, accepted) = within(SOON, async { join!(connecting, listener.accept()) }).await;
        clients.push(connected.unwrap());
        served.push(accepted.unwrap());
    }
    (listener, clients, served)
}

async fn a_listener_waits_for_its_connections(rig: Rig) {
    let (listener, clients, served) = serving(&rig, 3).await;
    // Nobody is going to accept this one.
    let late = Connection::connect(clients[0].domain(), listener.local_address()).await.unwrap();
    let ending = async { listener.shutdown(SOON * 2).await };
    let clients_end = async {
        within(SOON, late.closed()).await;
        for (left, (client, served)) in clients.iter().zip(&served).enumerate() {
            assert_eq!(listener.open_connections(), 3 - left);
            let sent = client.send(client.domain().alloc(8).unwrap());
            let (sent, received) = join!(sent, served.receive(served.domain().alloc(8).unwrap()));
            sent.unwrap();
            received.unwrap();
            assert_eq!(client.shutdown().await, CloseReason::Local);
            served.closed().await;
        }
    };
    let (cut_off, ()) = within(SOON, async { join!(ending, clients_end) }).await;
    assert_eq!((cut_off, listener.open_connections()), (0, 0));
    assert_eq!(listener.shutdown(Duration::ZERO).await, 0);
}

async fn a_listener_closes_who_does_not_end_in_time(rig: Rig) {
    let (listener, clients, served) = serving(&rig, 3).await;
    clients[1].close().await;
    within(SOON, served[1].closed()).await;
    let mut pending = served[0].receive(served[0].domain().alloc(8).unwrap());
    pending.try_post().unwrap();
    assert_eq!(within(SOON, listener.shutdown(WHILE)).await, 2);
    assert!(matches!(pending.await.unwrap_err().error(), Error::Closed { reason: CloseReason::Local, .. }));
    assert_eq!(served[2].close_reason(), Some(CloseReason::Local));
    for client in [&clients[0], &clients[2]] {
        assert_eq!(within(SOON, client.closed()).await, CloseReason::Peer);
    }
}

async fn an_accept_that_is_kept_does_not_hold_up_the_end(rig: Rig) {
    let server = rig.domain();
    let listener = rig.listener(&server).await;
    let mut accepting = Box::pin(listener.accept());
    assert!(poll_once(&mut accepting).is_pending());
    let client = within(SOON, Connection::connect(&rig.domain(), listener.local_address())).await.unwrap();
    eventually(|| listener.open_connections() == 1, || listener.open_connections()).await;
    assert_eq!(within(SOON, listener.shutdown(WHILE)).await, 1);
    assert_eq!(within(SOON, client.closed()).await, CloseReason::Peer);
}

async fn a_client_that_says_nothing_does_not_hold_up_the_end(rig: Rig) {
    let server = rig.domain();
    let settings = |it: tokio_rdma::ConnectionBuilder| it.setup_timeout(SOON * 10);
    let listener = Listener::builder(&server).connections(settings).bind(rig.address()).await.unwrap();
    let _silent = raw::connect(listener.local_address()).await;
    // Let in before the end is wanted.
    Connection::connect(&rig.domain(), listener.local_address()).await.unwrap();
    within(SOON, listener.accept()).await.unwrap();
    assert_eq!(within(SOON, listener.shutdown(WHILE)).await, 0);
}
