//! Deadlines: where the buffer is afterwards.

use std::time::{Duration, Instant};

use tokio::join;
use tokio_rdma::{Buffer, CloseReason, Error};

use crate::common::{Rig, assert_pattern, eventually, exercise, exercise_singly, holds_for};

/// Long enough that whatever can happen has happened, short enough to wait for.
const SHORT: Duration = Duration::from_millis(30);

cases!(
    not_posted_yet_the_buffer_comes_back,
    a_posted_send_stays_quarantined_until_the_peer_answers,
    a_posted_send_stays_quarantined_until_the_connection_ends,
    a_posted_receive_stays_quarantined_until_a_message_comes,
    a_posted_atomic_may_still_take_effect,
    a_generous_deadline_changes_nothing,
    a_deadline_that_is_over_does_not_block,
    a_timed_out_batch_member_leaves_the_others_alone,
    an_error_comes_before_the_deadline,
);

fn assert_timeout(error: &Error, operation: &str) {
    let Error::Timeout { operation: found, after, .. } = error else { panic!("{error:?}") };
    assert_eq!((*found, *after), (operation, SHORT));
    assert!(error.to_string().contains("30ms"), "{error}");
    assert!(!error.is_caller_error());
}

async fn not_posted_yet_the_buffer_comes_back(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.send_depth(1)).await;
    let (one, other) = (&pair.client, &pair.server);
    let mut blocking = one.send(one.filled(8, 0));
    blocking.try_post().unwrap();
    let buffer = one.filled(8, 1);
    let address = buffer.address();
    let start = Instant::now();
    let (error, buffer) = one.send(buffer).timeout(SHORT).await.unwrap_err().into_parts();
    assert!(start.elapsed() >= SHORT);
    assert_timeout(&error, "send");
    let buffer: Buffer = buffer.expect("the device never had it");
    assert_eq!(buffer.address(), address);
    assert_pattern(&buffer, 1);
    assert_eq!((one.stats().in_flight, one.stats().waiting), (1, 0));
    // It is not sent later either: the next message is the blocking one, then what comes after.
    let (received, sent) = join!(other.receive(other.buffer(8)), blocking);
    assert_pattern(received.unwrap().message(), 0);
    sent.unwrap();
    exercise_singly(&pair).await;
}

async fn a_posted_send_stays_quarantined_until_the_peer_answers(rig: Rig) {
    let pair = rig.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    let pool = one.pool(4096, 2);
    let mut buffer = pool.try_get().unwrap();
    crate::common::fill(&mut buffer, 1);
    let (error, buffer) = one.send(buffer).timeout(SHORT).await.unwrap_err().into_parts();
    assert_timeout(&error, "send");
    assert!(buffer.is_none(), "the device may still read it");
    holds_for(SHORT, || pool.available() == 1).await;
    assert_eq!(one.stats().live_slots, 1);
    // Nor can its place in the pool be had under another name.
    let second = pool.try_get().unwrap();
    assert!(pool.try_get().is_none());
    drop(second);

    let received = other.receive(other.buffer(4096)).await.unwrap();
    assert_pattern(received.message(), 1);
    eventually(|| pool.available() == 2, || one.stats()).await;
    assert_eq!((one.stats().in_flight, one.stats().live_slots), (0, 0));
    exercise(&pair).await;
}

async fn a_posted_send_stays_quarantined_until_the_connection_ends(rig: Rig) {
    for by_peer in [false, true] {
        let pair = rig.pair().await;
        let one = &pair.client;
        let pool = one.pool(4096, 2);
        let error = one.send(pool.try_get().unwrap()).timeout(SHORT).await.unwrap_err();
        assert!(error.into_buffer().is_none());
        assert_eq!(pool.available(), 1);
        if by_peer {
            pair.server.close().await;
            assert_eq!(one.closed().await, CloseReason::Peer);
        } else {
            one.close().await;
        }
        assert_eq!(pool.available(), 2, "no buffer of an ended connection is in use any more");
    }
}

async fn a_posted_receive_stays_quarantined_until_a_message_comes(rig: Rig) {
    let pair = rig.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    let pool = other.pool(64, 1);
    let (error, buffer) = other.receive(pool.try_get().unwrap()).timeout(SHORT).await.unwrap_err().into_parts();
    assert_timeout(&error, "receive");
    assert!(buffer.is_none(), "the device may still write to it");
    holds_for(SHORT, || pool.try_get().is_none()).await;
    // The message that it gets is lost, as documented; the next one is not.
    one.send_number(1).await;
    eventually(|| pool.available() == 1, || other.stats()).await;
    let ((), number) = join!(one.send_number(2), other.receive_number());
    assert_eq!(number, 2);
    exercise(&pair).await;
}

async fn a_posted_atomic_may_still_take_effect(rig: Rig) {
    let pair = rig.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    let region = other.exposed(8);
    // Behind a send that nobody receives, nothing gets through.
    let mut blocking = one.send(one.filled(8, 0));
    blocking.try_post().unwrap();
    let error = one.fetch_add(&region.remote(), 5).timeout(SHORT).await.unwrap_err();
    assert_timeout(&error, "fetch-and-add");
    let error = one.compare_swap(&region.remote(), 5, 6).timeout(SHORT).await.unwrap_err();
    assert_timeout(&error, "compare-and-swap");
    let error = one.read(one.buffer(8), &region.remote()).timeout(SHORT).await.unwrap_err();
    assert_timeout(error.error(), "read");
    assert!(error.into_buffer().is_none());
    assert_eq!(region.load(0).unwrap(), 0);
    let (received, sent) = join!(other.receive(other.buffer(8)), blocking);
    received.unwrap();
    sent.unwrap();
    eventually(|| region.load(0).unwrap() == 6, || one.stats()).await;
    eventually(|| one.stats().live_slots == 0, || one.stats()).await;
    exercise(&pair).await;
}

async fn a_generous_deadline_changes_nothing(rig: Rig) {
    let pair = rig.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    for limit in [Duration::from_secs(60), Duration::MAX] {
        let (received, sent) =
            join!(other.receive(other.buffer(100)).timeout(limit), one.send(one.filled(100, 1)).timeout(limit));
        assert_pattern(received.unwrap().message(), 1);
        assert_pattern(&sent.unwrap(), 1);
        let region = other.exposed(8);
        assert_eq!(one.fetch_add(&region.remote(), 1).timeout(limit).await.unwrap(), 0);
        assert_eq!(one.read(one.buffer(8), &region.remote()).timeout(limit).await.unwrap()[..], 1u64.to_ne_bytes());
    }
}

async fn a_deadline_that_is_over_does_not_block(rig: Rig) {
    let pair = rig.pair().await;
    let error = pair.client.send(pair.client.buffer(8)).timeout(Duration::ZERO).await.unwrap_err();
    assert!(matches!(error.error(), Error::Timeout { after: Duration::ZERO, .. }), "{error}");
    pair.server.receive(pair.server.buffer(8)).await.unwrap();
    exercise(&pair).await;
}

async fn a_timed_out_batch_member_leaves_the_others_alone(rig: Rig) {
    let pair = rig.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    let region = other.exposed(8);
    let pool = one.pool(8, 1);
    let mut batch = one.batch();
    let send = batch.send(pool.try_get().unwrap()).timeout(SHORT);
    let write = batch.write(one.filled(8, 3), &region.remote());
    batch.post().await.unwrap();
    assert!(send.await.unwrap_err().into_buffer().is_none());
    assert_eq!(pool.available(), 0);
    let (received, written) = join!(other.receive(other.buffer(8)), write);
    received.unwrap();
    assert_pattern(&written.unwrap(), 3);
    assert_eq!(pool.available(), 1, "the write behind it has completed");
    exercise(&pair).await;
}

async fn an_error_comes_before_the_deadline(rig: Rig) {
    let pair = rig.pair().await;
    let limit = Duration::from_secs(3600);
    let (closed, ended) = join!(
        async {
            tokio::time::sleep(SHORT).await;
            pair.client.close().await;
        },
        pair.client.send(pair.client.filled(8, 4)).timeout(limit)
    );
    let () = closed;
    let (error, buffer) = ended.unwrap_err().into_parts();
    assert!(matches!(error, Error::Closed { reason: CloseReason::Local, .. }), "{error}");
    assert_pattern(&buffer.unwrap(), 4);
}
