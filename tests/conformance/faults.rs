//! The software device's faults: what a program meets on a bad day, on cue.

use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::join;
use tokio_rdma::soft::{self, Faults};
use tokio_rdma::{CloseReason, DeviceLimits, Error, ProtectionDomain, SgList, WcStatus};

use crate::common::run::SOON;
use crate::common::{Pair, Rig, assert_pattern, exercise, within};

soft_cases!(
    delayed_completions_are_late_and_right,
    delays_reorder_connections_but_no_connection,
    completions_reordered_across_connections_stay_right,
    the_nth_completion_fails,
    any_status_is_told_as_it_is,
    receivers_that_seem_not_ready_cost_only_time,
    a_link_cut_in_the_middle_ends_both_sides,
    a_message_above_the_limit_is_split_or_refused_before_posting,
    the_smaller_limit_of_both_ends_counts,
    tiny_limits_refuse_by_name,
    the_same_seed_does_the_same,
    faults_of_one_device_leave_others_alone,
);

fn faulty(rig: &Rig, faults: Faults) -> ProtectionDomain {
    limited(rig, soft::default_limits(), Some(faults))
}

fn limited(rig: &Rig, limits: DeviceLimits, faults: Option<Faults>) -> ProtectionDomain {
    rig.open(soft::device(limits, faults)).alloc_pd().unwrap()
}

async fn delayed_completions_are_late_and_right(rig: Rig) {
    let late = Duration::from_millis(20)..Duration::from_millis(30);
    let client = faulty(&rig, Faults::seeded(1).delay_completions(late.clone(), 1.0));
    let pair = rig.connect(&client, &rig.domain()).await;
    let region = pair.server.exposed(8);
    let start = Instant::now();
    pair.client.write(pair.client.filled(8, 1), &region.remote()).await.unwrap();
    assert!(start.elapsed() >= late.start, "{:?}", start.elapsed());
    // All at once: they wait side by side, not one after the other.
    let start = Instant::now();
    let adds = join_all((0..100).map(|_| pair.client.fetch_add(&region.remote(), 1))).await;
    assert!(adds.iter().all(Result::is_ok));
    assert!(start.elapsed() >= late.start && start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    exercise(&pair).await;
    // A dropped operation's buffer is not free while its completion is held back.
    let pool = pair.client.pool(8, 1);
    let mut write = pair.client.write(pool.try_get().unwrap(), &region.remote());
    write.try_post().unwrap();
    drop(write);
    assert_eq!(pool.available(), 0);
    within(SOON, pool.get()).await;
}

/// Each connection's completions in order, whatever happens between connections.
async fn in_order_everywhere(rig: &Rig, faults: Faults) -> Vec<usize> {
    const CONNECTIONS: usize = 5;
    const COUNT: u64 = 40;
    let (client, server) = (faulty(rig, faults), rig.domain());
    let mut pairs = Vec::new();
    for _ in 0..CONNECTIONS {
        pairs.push(rig.connect(&client, &server).await);
    }
    let finished = std::sync::Mutex::new(Vec::new());
    let work = pairs.iter().enumerate().map(|(number, pair)| {
        let finished = &finished;
        async move {
            let region = pair.server.exposed(8);
            let remote = region.remote();
            let adds = (0..COUNT).map(|at| {
                let add = pair.client.fetch_add(&remote, 1);
                async move {
                    assert_eq!(add.await.unwrap(), at);
                    finished.lock().unwrap().push((number, at));
                }
            });
            join_all(adds).await;
            exercise(pair).await;
        }
    });
    within(SOON, join_all(work)).await;
    let finished = finished.into_inner().unwrap();
    assert_eq!(finished.len(), CONNECTIONS * COUNT as usize);
    finished.into_iter().map(|(number, _)| number).collect()
}

async fn delays_reorder_connections_but_no_connection(rig: Rig) {
    let faults = Faults::seeded(2).delay_completions(Duration::ZERO..Duration::from_millis(2), 0.3);
    in_order_everywhere(&rig, faults).await;
}

async fn completions_reordered_across_connections_stay_right(rig: Rig) {
    in_order_everywhere(&rig, Faults::seeded(3).reorder_across_queue_pairs()).await;
}

async fn the_nth_completion_fails(rig: Rig) {
    let client = faulty(&rig, Faults::seeded(4).fail_completion(5, WcStatus::RetryExceeded));
    let (pair, other) = (rig.connect(&client, &rig.domain()).await, rig.connect(&client, &rig.domain()).await);
    let region = pair.server.exposed(8);
    let remote = region.remote();
    // Those behind the fifth may find the connection ended already.
    let writes = (0..8).map(|at| pair.client.write(pair.client.filled(8, at), &remote));
    let mut ended = join_all(writes).await;
    for (at, behind) in (5..).zip(ended.split_off(5)) {
        let (error, buffer) = behind.unwrap_err().into_parts();
        let failed = CloseReason::Failed(WcStatus::RetryExceeded);
        assert!(matches!(&error, Error::Closed { reason, .. } if *reason == failed), "{error:?}");
        assert_pattern(&buffer.unwrap(), at);
    }
    let (error, buffer) = ended.pop().unwrap().unwrap_err().into_parts();
    assert!(matches!(error, Error::Completion { status: WcStatus::RetryExceeded, .. }), "{error:?}");
    assert_pattern(&buffer.unwrap(), 4);
    assert!(ended.into_iter().all(|done| done.is_ok()), "four before it");
    assert_eq!(within(SOON, pair.client.closed()).await, CloseReason::Failed(WcStatus::RetryExceeded));
    within(SOON, pair.server.closed()).await;
    assert_eq!(pair.client.stats().live_slots, 0);
    exercise(&other).await;
}

async fn any_status_is_told_as_it_is(rig: Rig) {
    let statuses = [
        (WcStatus::RemoteAccess, true),
        (WcStatus::RemoteOperation, false),
        (WcStatus::RnrRetryExceeded, false),
        (WcStatus::LocalProtection, true),
        (WcStatus::General, false),
        (WcStatus::Other(77), false),
    ];
    for (status, caller) in statuses {
        let pair = rig.connect(&faulty(&rig, Faults::seeded(5).fail_completion(1, status)), &rig.domain()).await;
        let region = pair.server.exposed(8);
        let error = pair.client.fetch_add(&region.remote(), 1).await.unwrap_err();
        assert!(matches!(error, Error::Completion { status: found, .. } if found == status), "{error:?}");
        assert_eq!(error.is_caller_error(), caller, "{error}");
        let text = error.to_string();
        let number = format!("(status {})", status.as_raw());
        assert!(text.starts_with("fetch-and-add failed: ") && text.contains(&number), "{text}");
        assert!(text.contains(&format!("{:#x}", region.remote().address())), "{text}");
        assert_eq!(within(SOON, pair.client.closed()).await, CloseReason::Failed(status));
    }
}

async fn receivers_that_seem_not_ready_cost_only_time(rig: Rig) {
    const COUNT: u64 = 300;
    let server = faulty(&rig, Faults::seeded(6).rnr(0.3));
    let pair = rig.connect(&rig.domain(), &server).await;
    let receives = async {
        for at in 0..COUNT / 50 {
            let receives = (0..50).map(|_| pair.server.receive(pair.server.buffer(64)));
            for (number, received) in (at * 50..).zip(join_all(receives).await) {
                assert_pattern(received.unwrap().message(), number);
            }
        }
    };
    let sends = join_all((0..COUNT).map(|number| pair.client.send(pair.client.filled(64, number))));
    let (sent, ()) = within(SOON, async { join!(sends, receives) }).await;
    assert!(sent.iter().all(Result::is_ok));
    assert!(pair.server.stats().rnr_sent > 0, "the fault was at work");
    exercise(&pair).await;
}

async fn a_link_cut_in_the_middle_ends_both_sides(rig: Rig) {
    const LEN: usize = 1 << 20;
    // At the start, inside of a fragment, between two messages, far into the transfer.
    for cut in [0, 1, 100_000, LEN as u64, 3 * LEN as u64 + 7] {
        let pair = rig.connect(&faulty(&rig, Faults::seeded(7).die_after_bytes(cut)), &rig.domain()).await;
        let (client, server) = (&pair.client, &pair.server);
        let receives = join_all((0..5).map(|_| server.receive(server.buffer(LEN))));
        let sends = join_all((0..5).map(|at| client.send(client.filled(LEN, at))));
        let (sent, received) = within(SOON, async { join!(sends, receives) }).await;
        let whole = (cut / LEN as u64) as usize;
        for (at, received) in (0..).zip(received) {
            match received {
                Ok(received) => {
                    assert!(at < whole, "message {at} arrived although the link was cut after {cut} bytes");
                    assert_pattern(received.message(), at as u64);
                }
                Err(error) => {
                    assert!(matches!(error.error(), Error::Closed { .. }), "{error:?}");
                    assert!(error.into_buffer().is_some());
                }
            }
        }
        for (at, sent) in (0..).zip(sent) {
            if let Err(error) = sent {
                let lost = matches!(
                    error.error(),
                    Error::Closed { reason: CloseReason::LinkLost(_), .. }
                        | Error::Completion { status: WcStatus::RetryExceeded, .. }
                );
                assert!(lost, "{error:?}");
                assert_pattern(&error.into_buffer().unwrap(), at as u64);
            } else {
                assert!(at < whole, "send {at} cannot have succeeded");
            }
        }
        let reasons = within(SOON, async { join!(client.closed(), server.closed()) }).await;
        assert!(matches!(reasons, (CloseReason::LinkLost(_), CloseReason::LinkLost(_))), "{cut}: {reasons:?}");
        for end in [client, server] {
            assert_eq!((end.stats().in_flight, end.stats().live_slots), (0, 0));
        }
    }
}

fn tiny() -> DeviceLimits {
    let mut limits = soft::default_limits();
    limits.max_message = 4096;
    limits
}

async fn a_message_above_the_limit_is_split_or_refused_before_posting(rig: Rig) {
    let pair = rig.connect(&limited(&rig, tiny(), None), &limited(&rig, tiny(), None)).await;
    let (client, server) = (&pair.client, &pair.server);
    let region = server.exposed(8192);
    let two = |first, second| SgList::new().with(client.filled(first, 1)).with(client.filled(second, 2));
    let failed = [
        ("send", client.send(client.filled(4097, 1)).await.unwrap_err().into()),
        ("send", client.send(two(4096, 1)).await.unwrap_err().into()),
        ("send", client.send_with_immediate(two(2000, 2097), 1).await.unwrap_err().into()),
        ("write", client.write_with_immediate(two(1, 4096), &region.remote(), 1).await.unwrap_err().into()),
    ];
    for (operation, error) in failed {
        let error: Error = error;
        let limit = matches!(error, Error::Limit { what: "length", value: 4097, limit: 4096, .. });
        assert!(limit && error.to_string().starts_with(operation), "{operation}: {error}");
    }
    assert_eq!((client.stats().in_flight, client.stats().errors), (0, 0), "nothing was posted");
    // Exactly the limit is fine, and a receive may be longer.
    let (received, sent) = join!(server.receive(server.buffer(8192)), client.send(two(4000, 96)));
    sent.unwrap();
    assert_eq!(received.unwrap().len, 4096);
    exercise(&pair).await;
}

async fn the_smaller_limit_of_both_ends_counts(rig: Rig) {
    let pair = rig.connect(&rig.domain(), &limited(&rig, tiny(), None)).await;
    assert_eq!((pair.client.max_message(), pair.server.max_message()), (4096, 4096));
    assert_eq!(pair.client.device().limits().max_message, 1 << 30);
    let error = pair.client.send(pair.client.buffer(4097)).await.unwrap_err();
    assert!(matches!(error.error(), Error::Limit { value: 4097, limit: 4096, .. }), "{error}");
    exercise(&pair).await;
}

async fn tiny_limits_refuse_by_name(rig: Rig) {
    let mut limits = soft::default_limits();
    limits.max_region = 10_000;
    limits.max_queue_depth = 8;
    limits.max_sge = 2;
    limits.max_cq_depth = 40;
    let domain = limited(&rig, limits, None);
    let text = domain.alloc(10_001).unwrap_err().to_string();
    assert_eq!(text, "alloc: length is 10001, the limit is 10000");
    let other = rig.domain();
    let listener = rig.listener(&other).await;
    let builder =
        || tokio_rdma::Connection::builder(&domain).send_depth(8).receive_depth(8).max_send_sge(2).max_receive_sge(2);
    for (refused, what) in [
        (builder().send_depth(9), "send_depth is 9, the limit is 8"),
        (builder().receive_depth(9), "receive_depth is 9, the limit is 8"),
        (builder().max_send_sge(3), "max_send_sge is 3, the limit is 2"),
        (builder().max_receive_sge(3), "max_receive_sge is 3, the limit is 2"),
    ] {
        let error = refused.connect(listener.local_address()).await.unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    // 16 completions each: two connections fit into a completion queue of 40, three do not; one that ended makes room.
    let first = builder().connect(listener.local_address()).await.unwrap();
    let _second = builder().connect(listener.local_address()).await.unwrap();
    let error = builder().connect(listener.local_address()).await.unwrap_err();
    assert!(error.to_string().contains("completion queue depth is 48, the limit is 40"), "{error}");
    drop(first);
    // Soon: whoever looks at it at this moment holds it for a moment longer.
    within(SOON, async {
        while let Err(error) = builder().connect(listener.local_address()).await {
            assert!(error.to_string().contains("completion queue depth is 48, the limit is 40"), "{error}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
}

/// One operation after the other, so that nothing but the seed decides.
async fn story(rig: &Rig, seed: u64) -> Vec<bool> {
    let server = faulty(rig, Faults::seeded(seed).rnr(0.4));
    let pair: Pair = rig.connect(&rig.domain(), &server).await;
    let mut story = Vec::new();
    for number in 0..40 {
        let before = pair.server.stats().rnr_sent;
        let mut receive = pair.server.receive(pair.server.buffer(8));
        receive.try_post().unwrap();
        let ((), received) = join!(pair.client.send_number(number), receive);
        received.unwrap();
        story.push(pair.server.stats().rnr_sent > before);
    }
    story
}

async fn the_same_seed_does_the_same(rig: Rig) {
    let first = story(&rig, 1).await;
    assert_eq!(first, story(&rig, 1).await);
    assert_ne!(first, story(&rig, 2).await);
    assert!(first.contains(&true) && first.contains(&false), "{first:?}");
}

async fn faults_of_one_device_leave_others_alone(rig: Rig) {
    let bad = faulty(&rig, Faults::seeded(8).die_after_bytes(10));
    let server = rig.domain();
    let (broken, fine) = (rig.connect(&bad, &server).await, rig.connect(&rig.domain(), &server).await);
    let region = broken.server.exposed(100);
    broken.client.write(broken.client.buffer(100), &region.remote()).await.unwrap_err();
    within(SOON, broken.server.closed()).await;
    exercise(&fine).await;
    exercise(&rig.connect(&rig.domain(), &server).await).await;
}
