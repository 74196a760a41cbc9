//! Messages as streams and sinks, and connections as a stream.

use std::time::Duration;

use futures::{SinkExt, StreamExt, TryStreamExt, stream};
use tokio::join;
use tokio_rdma::messages::{Message, Sender};
use tokio_rdma::{CloseReason, Connection, Error, SgList};

use crate::buffers::too_long;
use crate::common::process::{Parent, Second};
use crate::common::run::SOON;
use crate::common::{Rig, assert_pattern, holds_for, pattern, poll_once, within};

core_cases!(messages_come_in_order_however_many_are_held);
cases!(
    receives_are_posted_from_the_start,
    buffers_that_come_back_are_posted_without_a_message,
    immediate_data_and_notices_are_told,
    a_dropped_next_loses_no_message,
    messages_outlive_their_receiver,
    a_closed_connection_ends_the_receiver,
    a_message_that_is_too_long_is_an_error,
    counts_out_of_range_are_refused,
    a_sender_holds_back,
    a_short_send_queue_keeps_the_order,
    a_bad_buffer_does_not_end_the_sender,
    a_sender_tells_of_the_end,
    every_source_can_be_sent,
    connections_come_as_a_stream,
);
process_cases!(
    killed_while_messages_are_awaited => awaits_messages, sends_until_killed;
);

fn number_of(message: &Message) -> u64 {
    u64::from_le_bytes(message[..8].try_into().unwrap())
}

async fn messages_come_in_order_however_many_are_held(rig: Rig) {
    const COUNT: u64 = 400;
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(8, 200).unwrap();
    let sending = async {
        let pool = pair.client.pool(200, 6);
        let mut sender = pair.client.sender(6);
        for number in 0..COUNT {
            let mut buffer = pool.get().await.split_to(8 + number as usize % 150).unwrap();
            let len = buffer.len();
            buffer.copy_from_slice(&pattern(len, number));
            buffer[..8].copy_from_slice(&number.to_le_bytes());
            sender.send(buffer).await.unwrap();
        }
    };
    let receiving = async {
        let mut random = fastrand::Rng::with_seed(1);
        let mut held: Vec<(u64, Message)> = Vec::new();
        for number in 0..COUNT {
            let message = receiver.next().await.unwrap().unwrap();
            assert_eq!(message.len(), 8 + number as usize % 150);
            assert_eq!(number_of(&message), number);
            held.push((number, message));
            // All but one at times: the last receive there is.
            while held.len() > random.usize(..8) {
                let (number, message) = held.swap_remove(random.usize(..held.len()));
                assert_eq!(number_of(&message), number, "held messages do not change");
                assert_eq!(message[8..], pattern(message.len(), number)[8..]);
            }
        }
    };
    join!(sending, receiving);
}

async fn receives_are_posted_from_the_start(rig: Rig) {
    let pair = rig.pair().await;
    let receiver = pair.server.receiver(3, 100).unwrap();
    for number in 0..3 {
        within(SOON, pair.client.send_number(number)).await;
    }
    assert_eq!(pair.server.stats().rnr_sent, 0);
    let numbers: Vec<_> = receiver.take(3).map_ok(|message| number_of(&message)).try_collect().await.unwrap();
    assert_eq!(numbers, [0, 1, 2]);
}

/// The receiver waits, and what it waits for is not a message but a place for one.
async fn buffers_that_come_back_are_posted_without_a_message(rig: Rig) {
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(2, 100).unwrap();
    let mut held = Vec::new();
    for number in 0..2 {
        pair.client.send_number(number).await;
        held.push(receiver.next().await.unwrap().unwrap());
    }
    let next = tokio::spawn(async move { receiver.next().await.unwrap().map(|message| number_of(&message)) });
    let sending = tokio::spawn({
        let client = pair.client.clone();
        async move { client.send_number(2).await }
    });
    holds_for(Duration::from_millis(10), || !next.is_finished()).await;
    drop(held);
    assert_eq!(within(SOON, next).await.unwrap().unwrap(), 2);
    within(SOON, sending).await.unwrap();
}

async fn immediate_data_and_notices_are_told(rig: Rig) {
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(4, 100).unwrap();
    let region = pair.server.exposed(64);
    let client = &pair.client;
    client.send(client.filled(10, 1)).await.unwrap();
    client.send_with_immediate(client.filled(20, 2), 7).await.unwrap();
    client.write_with_immediate(client.filled(64, 3), &region.remote(), 8).await.unwrap();
    client.send(client.empty()).await.unwrap();
    let mut told = Vec::new();
    for _ in 0..4 {
        let message = receiver.next().await.unwrap().unwrap();
        told.push((message.len(), message.immediate(), message.written()));
    }
    assert_eq!(told, [(10, None, None), (20, Some(7), None), (0, Some(8), Some(64)), (0, None, None)]);
}

async fn a_dropped_next_loses_no_message(rig: Rig) {
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(2, 100).unwrap();
    let sending = tokio::spawn({
        let client = pair.client.clone();
        async move {
            for number in 0..200 {
                client.send_number(number).await;
            }
        }
    });
    let mut expected = 0;
    while expected < 200 {
        match poll_once(&mut receiver.next()) {
            std::task::Poll::Ready(message) => {
                assert_eq!(number_of(&message.unwrap().unwrap()), expected);
                expected += 1;
            }
            std::task::Poll::Pending => tokio::task::yield_now().await,
        }
    }
    within(SOON, sending).await.unwrap();
}

async fn messages_outlive_their_receiver(rig: Rig) {
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(2, 100).unwrap();
    pair.client.send(pair.client.filled(100, 1)).await.unwrap();
    let message = receiver.next().await.unwrap().unwrap();
    drop(receiver);
    pair.client.close().await;
    pair.server.close().await;
    assert_pattern(&message, 1);
}

async fn a_closed_connection_ends_the_receiver(rig: Rig) {
    let pair = rig.pair().await;
    let mut receivers = [pair.server.receiver(4, 100).unwrap(), pair.client.receiver(4, 100).unwrap()];
    pair.client.send_number(5).await;
    pair.client.close().await;
    within(SOON, pair.server.closed()).await;
    let last = receivers[0].next().await.unwrap().unwrap();
    assert_eq!(number_of(&last), 5);
    drop(last);
    for receiver in &mut receivers {
        assert!(within(SOON, receiver.next()).await.is_none());
        assert!(receiver.next().await.is_none());
    }
    assert_eq!(receivers[0].connection().close_reason(), Some(CloseReason::Peer));
}

async fn a_message_that_is_too_long_is_an_error(rig: Rig) {
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(2, 100).unwrap();
    pair.client.send(pair.client.buffer(101)).await.unwrap_err();
    let error = within(SOON, receiver.next()).await.unwrap().unwrap_err();
    let [expected, _] = too_long(&rig);
    assert!(matches!(error, Error::Completion { status, .. } if status == expected), "{error}");
    assert!(receiver.next().await.is_none());
}

async fn counts_out_of_range_are_refused(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.receive_depth(4)).await;
    for (count, size) in [(0, 1), (1, 0), (5, 1)] {
        assert!(matches!(pair.server.receiver(count, size).unwrap_err(), Error::Limit { .. }));
    }
    let _all = pair.server.receiver(4, 1).unwrap();
    assert!(matches!(pair.server.receiver(1, 1).unwrap_err(), Error::QueueFull { .. }));
}

async fn a_sender_holds_back(rig: Rig) {
    let pair = rig.pair().await;
    let mut sender: Sender = pair.client.sender(3);
    for number in 0..3 {
        sender.feed(pair.client.filled(10, number)).await.unwrap();
    }
    let mut fourth = Box::pin(sender.feed(pair.client.filled(10, 3)));
    holds_for(Duration::from_millis(10), || poll_once(&mut fourth).is_pending()).await;
    assert_eq!(pair.client.stats().peak_in_flight, 3);
    let mut receiver = pair.server.receiver(4, 10).unwrap();
    within(SOON, fourth).await.unwrap();
    within(SOON, sender.close()).await.unwrap();
    assert_eq!(sender.in_flight(), 0);
    for number in 0..4 {
        assert_pattern(&receiver.next().await.unwrap().unwrap(), number);
    }
}

async fn a_short_send_queue_keeps_the_order(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(2)).await;
    let mut receiver = pair.server.receiver(20, 8).unwrap();
    let mut sender: Sender = pair.client.sender(10);
    let mut numbers =
        stream::iter((0..100u64).map(|number| Ok(pair.client.domain.register(number.to_le_bytes().to_vec()).unwrap())));
    let receiving = async {
        for number in 0..100 {
            assert_eq!(number_of(&receiver.next().await.unwrap().unwrap()), number);
        }
    };
    let (sent, ()) = within(SOON, async { join!(sender.send_all(&mut numbers), receiving) }).await;
    sent.unwrap();
}

async fn a_bad_buffer_does_not_end_the_sender(rig: Rig) {
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(2, 100).unwrap();
    let mut sender: Sender = pair.client.sender(2);
    let error = sender.send(pair.server.buffer(10)).await.unwrap_err();
    assert!(matches!(error, Error::ForeignBuffer { .. }), "{error}");
    sender.send(pair.client.filled(10, 1)).await.unwrap();
    assert_pattern(&receiver.next().await.unwrap().unwrap(), 1);
}

async fn a_sender_tells_of_the_end(rig: Rig) {
    let pair = rig.pair().await;
    let mut sender: Sender = pair.client.sender(2);
    sender.feed(pair.client.buffer(10)).await.unwrap();
    pair.server.close().await;
    let error = within(SOON, sender.flush()).await.unwrap_err();
    assert!(matches!(error, Error::Closed { reason: CloseReason::Peer, .. }), "{error}");
    assert!(sender.send(pair.client.buffer(10)).await.is_err());
}

async fn every_source_can_be_sent(rig: Rig) {
    let pair = rig.pair().await;
    let mut receiver = pair.server.receiver(4, 100).unwrap();
    let shared = pair.client.filled(100, 1).freeze();
    pair.client.sender(1).send_all(&mut stream::iter([Ok(shared.clone()), Ok(shared)])).await.unwrap();
    let list = SgList::new().with(pair.client.filled(40, 1));
    pair.client.sender(1).send(list).await.unwrap();
    for len in [100, 100, 40] {
        let message = receiver.next().await.unwrap().unwrap();
        assert_eq!(message.len(), len);
        assert_pattern(&message, 1);
    }
}

async fn connections_come_as_a_stream(rig: Rig) {
    let domain = rig.domain();
    let mut incoming = rig.listener(&domain).await.incoming();
    let address = incoming.listener().local_address().clone();
    for _ in 0..3 {
        assert!(poll_once(&mut incoming.next()).is_pending());
        let (connected, accepted) = join!(Connection::connect(&domain, &address), incoming.next());
        let (client, server) = (connected.unwrap(), accepted.unwrap().unwrap());
        let mut receive = server.receive(domain.alloc(8).unwrap());
        receive.try_post().unwrap();
        client.send(domain.alloc(8).unwrap()).await.unwrap();
        assert_eq!(receive.await.unwrap().len, 8);
    }
    let listener = incoming.into_listener();
    let (connected, accepted) = join!(Connection::connect(&domain, &address), listener.accept());
    connected.unwrap();
    accepted.unwrap();
}

async fn sends_until_killed(rig: Rig, mut parent: Parent) {
    let listener = rig.listener(&rig.domain()).await;
    parent.say(&listener.local_address().to_string());
    let connection = listener.accept().await.unwrap();
    connection.send(connection.domain().alloc(8).unwrap()).await.unwrap();
    assert_eq!(parent.hear().await, None);
}

async fn awaits_messages(rig: Rig, mut second: Second) {
    let address = second.hear().await;
    let connection = Connection::connect(&rig.domain(), address.as_str()).await.unwrap();
    let mut receiver = connection.receiver(4, 100).unwrap();
    assert_eq!(receiver.next().await.unwrap().unwrap().len(), 8);
    second.kill().await;
    match within(SOON, receiver.next()).await {
        // A NIC's kernel says goodbye for a process that died.
        None => assert_eq!(connection.close_reason(), Some(CloseReason::Peer)),
        Some(Err(Error::Closed { reason: CloseReason::LinkLost(_), .. })) => {}
        other => panic!("{other:?}"),
    }
    assert!(receiver.next().await.is_none());
}
