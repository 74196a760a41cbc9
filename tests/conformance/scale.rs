//! A thousand connections on one device.

use std::time::Duration;

use futures::stream::{self, StreamExt};
use tokio::task::JoinSet;
use tokio_rdma::Connection;

use crate::common::process::{descriptors, threads};
use crate::common::{End, Pair, Rig, eventually, exercise};

const COUNT: usize = 1000;

lone_cases!(a_thousand_connections_on_one_device);
cases!(ten_simultaneous_connects_are_ten_connections);

async fn a_thousand_connections_on_one_device(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    // With one connection everything is running that a device runs.
    let first = rig.connect(&client, &server).await;
    exercise(&first).await;
    let listener = tokio_rdma::Listener::builder(&server)
        .connections(|settings| settings.send_depth(16).receive_depth(16))
        .bind(rig.address())
        .await
        .unwrap();
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    let (threads_before, descriptors_before, tasks_before) = (threads(), descriptors(), tasks());

    let accepting = async {
        let mut accepted = Vec::new();
        while accepted.len() < COUNT {
            accepted.push(listener.accept().await.unwrap());
        }
        accepted
    };
    let connecting = stream::iter(0..COUNT)
        .map(|number| {
            let builder = Connection::builder(&client).send_depth(16).receive_depth(16);
            builder.private_data(number.to_le_bytes()).connect(listener.local_address())
        })
        .buffer_unordered(64)
        .map(Result::unwrap)
        .collect::<Vec<_>>();
    let (mut accepted, connected) = tokio::join!(accepting, connecting);
    // A limit on open descriptors would have been an error already.
    assert!(rig.on_nic() || descriptors() >= descriptors_before + 2 * COUNT);
    assert_eq!(threads(), threads_before, "no thread per connection");
    // The handshakes' tasks are over.
    eventually(|| tasks() <= tasks_before, || (tasks(), tasks_before)).await;

    // One echo each: the server's connections all wait at the same time.
    accepted.sort_by_key(|connection| connection.peer_private_data().to_vec());
    let mut echoes = JoinSet::new();
    for connection in accepted {
        let end = End::new(&server, connection);
        echoes.spawn(async move {
            let buffer = end.receive(end.buffer(64)).await.unwrap().buffer;
            end.send(buffer).await.unwrap();
            end.closed().await
        });
    }
    let round_trips = stream::iter(&connected).for_each_concurrent(None, |connection| {
        let end = End::new(&client, connection.clone());
        async move {
            let seed = u64::from(end.queue_pair_number());
            let (received, sent) = tokio::join!(end.receive(end.buffer(64)), end.send(end.filled(64, seed)));
            sent.unwrap();
            crate::common::assert_pattern(received.unwrap().message(), seed);
        }
    });
    round_trips.await;
    assert_eq!(threads(), threads_before);

    drop(connected);
    for reason in echoes.join_all().await {
        assert_eq!(reason, tokio_rdma::CloseReason::Peer);
    }
    drop(listener);
    eventually(|| descriptors() <= descriptors_before, || (descriptors(), descriptors_before)).await;
    assert_eq!(threads(), threads_before);
    exercise(&first).await;
}

async fn ten_simultaneous_connects_are_ten_connections(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let listener = rig.listener(&server).await;
    let connecting =
        (0..10u8).map(|number| Connection::builder(&client).private_data([number]).connect(listener.local_address()));
    let accepting = async {
        let mut accepted = Vec::new();
        while accepted.len() < 10 {
            accepted.push(listener.accept().await.unwrap());
        }
        accepted
    };
    let (connected, mut accepted) = tokio::join!(futures::future::join_all(connecting), accepting);
    accepted.sort_by_key(|connection| connection.peer_private_data().to_vec());
    for (number, (connected, accepted)) in (0..).zip(connected.into_iter().zip(accepted)) {
        assert_eq!(accepted.peer_private_data(), [number]);
        let pair = Pair { client: End::new(&client, connected.unwrap()), server: End::new(&server, accepted) };
        exercise(&pair).await;
    }
    let nobody = tokio::time::timeout(Duration::from_millis(50), listener.accept()).await;
    assert!(nobody.is_err(), "an eleventh connection");
}
