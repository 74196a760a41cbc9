//! Receivers that are late, slow, or never ready.

use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::join;
use tokio_rdma::{CloseReason, Error, WcStatus};

use crate::common::run::SOON;
use crate::common::{Rig, assert_pattern, exercise, within};

cases!(
    a_receiver_that_is_5_ms_late_costs_little,
    a_receiver_that_never_comes_is_an_error_within_the_bound,
    without_a_bound_the_deadline_decides,
    a_receiver_that_comes_within_the_bound_is_no_error,
    a_notice_waits_for_a_receive_as_well,
    no_retry_at_all_fails_at_once,
    two_thousand_messages_to_a_slow_receiver,
    both_sides_send_8_mib_before_either_receives,
    the_other_direction_flows_meanwhile,
);

async fn a_receiver_that_is_5_ms_late_costs_little(rig: Rig) {
    let mut tries = Vec::new();
    // A busy machine may be slow a few times; a timer of hundreds of milliseconds is slow each time.
    for _ in 0..10 {
        let pair = rig.pair().await;
        exercise(&pair).await;
        let start = Instant::now();
        let late = async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            pair.server.receive(pair.server.buffer(8)).await.unwrap()
        };
        let (sent, received) = join!(pair.client.send(pair.client.filled(8, 1)), late);
        let took = start.elapsed();
        sent.unwrap();
        assert_pattern(received.message(), 1);
        assert!(took >= Duration::from_millis(5), "it cannot be there before it is received: {took:?}");
        // NICs count these per port.
        assert!(rig.on_nic() || (pair.client.stats().rnr_received >= 1 && pair.server.stats().rnr_sent >= 1));
        if took < Duration::from_millis(50) {
            return;
        }
        tries.push(took);
    }
    panic!("never below 50 ms: {tries:?}");
}

async fn a_receiver_that_never_comes_is_an_error_within_the_bound(rig: Rig) {
    let timer = Duration::from_millis(10);
    let pair = rig.pair_of(|settings| settings.rnr_retry(3).rnr_timer(timer)).await;
    let start = Instant::now();
    let behind = pair.client.write(pair.client.filled(8, 2), &pair.server.exposed(8).remote());
    let (sent, behind) = within(SOON, async { join!(pair.client.send(pair.client.filled(8, 1)), behind) }).await;
    let took = start.elapsed();
    let (error, buffer) = sent.unwrap_err().into_parts();
    assert!(matches!(error, Error::Completion { status: WcStatus::RnrRetryExceeded, .. }), "{error:?}");
    assert!(error.to_string().contains("post receives earlier, or raise rnr_retry"), "{error}");
    assert!(!error.is_caller_error());
    assert_pattern(&buffer.unwrap(), 1);
    assert_pattern(&behind.unwrap_err().into_buffer().unwrap(), 2);
    assert!(took >= timer * 3, "three retries, 10 ms apart, take more than {took:?}");
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!(pair.client.close_reason(), Some(CloseReason::Failed(WcStatus::RnrRetryExceeded)));
    within(SOON, pair.server.closed()).await;
}

async fn without_a_bound_the_deadline_decides(rig: Rig) {
    let timer = Duration::from_micros(100);
    let pair = rig.pair_of(|settings| settings.rnr_retry(7).rnr_timer(timer)).await;
    let limit = Duration::from_millis(100);
    let error = pair.client.send(pair.client.filled(8, 1)).timeout(limit).await.unwrap_err();
    assert!(matches!(error.error(), Error::Timeout { .. }), "{error}");
    assert_eq!(pair.client.close_reason(), None, "not the connection's fault");
    // The message was posted, and arrives when there is room for it.
    assert_pattern(pair.server.receive(pair.server.buffer(8)).await.unwrap().message(), 1);
    exercise(&pair).await;
}

async fn a_receiver_that_comes_within_the_bound_is_no_error(rig: Rig) {
    let timer = Duration::from_millis(400);
    let pair = rig.pair_of(|settings| settings.rnr_retry(6).rnr_timer(timer)).await;
    // Several times, so that a count that is not reset would run out.
    for round in 0..10 {
        let late = async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            pair.server.receive(pair.server.buffer(8)).await.unwrap()
        };
        let (sent, received) = join!(pair.client.send(pair.client.filled(8, round)), late);
        sent.unwrap();
        assert_pattern(received.message(), round);
    }
}

async fn a_notice_waits_for_a_receive_as_well(rig: Rig) {
    let pair = rig.pair().await;
    let region = pair.server.exposed(100_000);
    let late = async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let notice = pair.server.receive(pair.server.buffer(1)).await.unwrap();
        assert_pattern(&crate::common::rig::contents(&region), 6);
        notice
    };
    let write = pair.client.write_with_immediate(pair.client.filled(100_000, 6), &region.remote(), 9);
    let (written, notice) = join!(write, late);
    written.unwrap();
    assert_eq!((notice.immediate, notice.len), (Some(9), 100_000));
}

async fn no_retry_at_all_fails_at_once(rig: Rig) {
    let pair = rig.pair_of(|settings| settings.rnr_retry(0)).await;
    let error = within(SOON, pair.client.send(pair.client.buffer(8))).await.unwrap_err();
    assert!(matches!(error.error(), Error::Completion { status: WcStatus::RnrRetryExceeded, .. }), "{error}");
}

async fn two_thousand_messages_to_a_slow_receiver(rig: Rig) {
    const COUNT: u64 = 2000;
    let pair = rig.pair().await;
    let server = pair.server.clone();
    let slow = tokio::spawn(async move {
        let mut buffer = server.buffer(1024);
        for number in 0..COUNT {
            // One at a time, so that hardly any message finds a receive, and now and then a nap.
            let received = server.receive(buffer).await.unwrap();
            assert_eq!(received.message()[..8], number.to_le_bytes());
            assert_eq!(received.message()[8..], crate::common::pattern(1024, number)[8..]);
            buffer = received.buffer;
            if number % 500 == 0 {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        }
    });
    let sends = (0..COUNT).map(|number| {
        let mut buffer = pair.client.filled(1024, number);
        buffer[..8].copy_from_slice(&number.to_le_bytes());
        pair.client.send(buffer)
    });
    let sent = within(Duration::from_secs(60), join_all(sends)).await;
    assert!(sent.iter().all(Result::is_ok));
    within(SOON, slow).await.unwrap();
    assert_eq!((pair.client.stats().sends, pair.server.stats().receives), (COUNT, COUNT));
}

/// Neither side's sending may depend on the other's sending being done.
async fn both_sides_send_8_mib_before_either_receives(rig: Rig) {
    const PART: usize = 1 << 20;
    let pair = rig.pair().await;
    let sends: Vec<_> = pair
        .directions()
        .into_iter()
        .flat_map(|(one, _)| {
            (0..8).map(|part| {
                let mut send = one.send(one.filled(PART, part));
                send.try_post().unwrap();
                tokio::spawn(send)
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(sends.iter().all(|send| !send.is_finished()));
    let receive = |end: crate::common::End| async move {
        for part in 0..8 {
            assert_pattern(end.receive(end.buffer(PART)).await.unwrap().message(), part);
        }
    };
    within(Duration::from_secs(60), async {
        join!(receive(pair.client.clone()), receive(pair.server.clone()));
        for send in sends {
            send.await.unwrap().unwrap();
        }
    })
    .await;
}

async fn the_other_direction_flows_meanwhile(rig: Rig) {
    let pair = rig.pair().await;
    let mut blocked = pair.client.send(pair.client.filled(8, 1));
    blocked.try_post().unwrap();
    let region = pair.client.exposed_filled(1000, 2);
    for number in 0..50 {
        let ((), received) = join!(pair.server.send_number(number), pair.client.receive_number());
        assert_eq!(received, number);
        assert_pattern(&pair.server.fetch(&region.remote()).await, 2);
    }
    let (received, sent) = join!(pair.server.receive(pair.server.buffer(8)), blocked);
    assert_pattern(received.unwrap().message(), 1);
    sent.unwrap();
}
