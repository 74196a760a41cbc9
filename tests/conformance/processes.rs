//! Peers that are killed or stopped: two real processes.

use std::time::{Duration, Instant};

use futures::FutureExt;
use tokio::task::JoinHandle;
use tokio_rdma::{Access, CloseReason, Connection, ConnectionBuilder, Error, RemoteRegion, WcStatus};

use crate::common::process::{Parent, Second};
use crate::common::run::SOON;
use crate::common::{End, Rig, assert_pattern, within};

process_cases!(
    killed_with_32_operations_pending => survives_the_kill, serves_until_killed;
    stopped_with_32_operations_pending => gives_a_stopped_peer_up, serves_until_killed;
    stopped_while_its_receiver_is_not_ready => gives_a_stopped_receiver_up, serves_until_killed;
    stopped_for_a_moment => waits_for_a_stopped_peer, serves_until_killed;
    stopped_while_idle => notices_a_stopped_peer_by_probing, serves_until_killed;
    killed_while_idle => notices_a_killed_peer_at_once, serves_until_killed;
    killed_while_connecting => connects_to_a_dead_address, serves_until_killed;
    everything_works_between_processes => uses_the_other_process, echoes;
);

/// A message of many packets, where the device takes such long ones.
const LONG: usize = 10 << 20;

/// Long enough for a peer that is alive on a busy machine, short enough to wait for.
const BUDGET: Duration = Duration::from_millis(1500);

fn short_budget(settings: ConnectionBuilder) -> ConnectionBuilder {
    settings.ack_timeout(BUDGET / 2).retry_count(1).keepalive(None)
}

/// Accepts connections, exposes memory, and never receives anything.
async fn serves_until_killed(rig: Rig, mut parent: Parent) {
    let server = rig.domain();
    let listener = rig.listener(&server).await;
    let region = server.alloc(1 << 16).unwrap().expose(Access::all()).unwrap();
    parent.say(&listener.local_address().to_string());
    parent.say_region(&region.remote());
    let accepting = async {
        let mut connections = Vec::new();
        loop {
            connections.push(listener.accept().await.unwrap());
        }
    };
    tokio::select! {
        () = accepting => {}
        line = parent.hear() => assert_eq!(line, None),
    }
}

/// A connection with these settings to a second process, and what it exposes.
async fn meet(
    rig: &Rig,
    second: &mut Second,
    settings: impl FnOnce(ConnectionBuilder) -> ConnectionBuilder,
) -> (End, RemoteRegion) {
    let address = second.hear().await;
    let remote = second.hear_region().await;
    let client = rig.domain();
    let connection = settings(Connection::builder(&client)).connect(address.as_str()).await.unwrap();
    let end = End::new(&client, connection);
    end.write(end.filled(64, 1), &remote).await.unwrap();
    assert_pattern(&end.read(end.buffer(64), &remote).await.unwrap(), 1);
    (end, remote)
}

/// 8 of each kind: sends that nobody receives, receives, and what waits behind the sends.
fn pending(end: &End, remote: &RemoteRegion) -> Vec<JoinHandle<Error>> {
    // Posted in this order, a send first.
    macro_rules! posted {
        ($operation:expr) => {{
            let mut operation = $operation;
            operation.try_post().unwrap();
            async { operation.await.unwrap_err().into_parts() }.boxed()
        }};
    }
    (0..32u64)
        .map(|at| {
            let buffer = end.filled(64, at);
            let failing = match at % 4 {
                0 => posted!(end.send(buffer)),
                1 => posted!(end.receive(buffer)),
                2 => posted!(end.write(buffer, remote)),
                _ => posted!(end.read(buffer, remote)),
            };
            tokio::spawn(async move {
                let (error, buffer) = failing.await;
                assert_pattern(&buffer.expect("the buffer comes back"), at);
                error
            })
        })
        .collect()
}

async fn all_pending(end: &End) {
    crate::common::eventually(|| end.stats().in_flight == 32, || end.stats()).await;
}

/// What a killed process leaves behind.
fn lost(rig: &Rig, reason: &CloseReason) -> bool {
    // Of a connection by RDMA CM the kernel ends what a process did not, and that is no different on the wire.
    matches!(reason, CloseReason::LinkLost(_)) || (rig.on_nic() && *reason == CloseReason::Peer)
}

/// Stopping a process stops no NIC.
const NIC_GOES_ON: &str = "the NIC of a stopped process goes on answering";

async fn survives_the_kill(rig: Rig, mut second: Second) {
    let (end, remote) = meet(&rig, &mut second, |settings| settings).await;
    let operations = pending(&end, &remote);
    all_pending(&end).await;
    second.kill().await;
    let start = Instant::now();
    let mut oldest = 0;
    for operation in operations {
        let error = within(SOON, operation).await.unwrap();
        match error {
            Error::Closed { reason, .. } if lost(&rig, &reason) => {}
            Error::Completion { status: WcStatus::RetryExceeded, .. } => oldest += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(oldest <= 1, "at most the oldest request is told more");
    let reason = within(SOON, end.closed()).await;
    assert!(lost(&rig, &reason), "{reason:?}");
    let stats = end.stats();
    assert_eq!((stats.in_flight, stats.live_slots, stats.waiting), (0, 0, 0));

    // The same device goes on with somebody else.
    let server = rig.domain();
    crate::common::exercise(&rig.connect(&end.domain, &server).await).await;
}

async fn gives_a_stopped_peer_up(rig: Rig, mut second: Second) {
    if rig.skipped_on_nic(NIC_GOES_ON) {
        return second.kill().await;
    }
    let (end, remote) = meet(&rig, &mut second, short_budget).await;
    second.stop().await;
    let start = Instant::now();
    let operations = pending(&end, &remote);
    all_given_up(&end, operations).await;
    assert!(start.elapsed() >= BUDGET, "before the budget was used up: {:?}", start.elapsed());
    second.kill().await;
}

async fn all_given_up(end: &End, operations: Vec<JoinHandle<Error>>) {
    let mut given_up = 0;
    for operation in operations {
        match within(SOON, operation).await.unwrap() {
            Error::Completion { status: WcStatus::RetryExceeded, .. } => given_up += 1,
            Error::Closed { reason: CloseReason::Failed(WcStatus::RetryExceeded), .. } => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(given_up, 1, "the oldest request ran out of retries, the others were flushed");
    assert_eq!(within(SOON, end.closed()).await, CloseReason::Failed(WcStatus::RetryExceeded));
}

/// "Not ready" was its last word: waiting for a receiver without limit must not hide that nobody is there any more.
async fn gives_a_stopped_receiver_up(rig: Rig, mut second: Second) {
    if rig.skipped_on_nic(NIC_GOES_ON) {
        return second.kill().await;
    }
    let (end, remote) = meet(&rig, &mut second, short_budget).await;
    let operations = pending(&end, &remote);
    all_pending(&end).await;
    crate::common::eventually(|| end.stats().rnr_received > 0, || end.stats()).await;
    // As long as it is alive, there is no limit.
    tokio::time::sleep(2 * BUDGET).await;
    assert_eq!(end.close_reason(), None);
    second.stop().await;
    all_given_up(&end, operations).await;
    second.kill().await;
}

/// Within the budget a stop is no failure.
async fn waits_for_a_stopped_peer(rig: Rig, mut second: Second) {
    let (end, remote) = meet(&rig, &mut second, |settings| settings).await;
    second.stop().await;
    let writes: Vec<_> = (0..8)
        .map(|at| {
            let end = end.clone();
            tokio::spawn(async move { end.write(end.filled(64, at), &remote).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(end.close_reason(), None);
    second.resume();
    for write in writes {
        within(SOON, write).await.unwrap().unwrap();
    }
    end.write(end.filled(64, 9), &remote).await.unwrap();
    assert_pattern(&end.read(end.buffer(64), &remote).await.unwrap(), 9);
    second.end().await;
    assert!(matches!(within(SOON, end.closed()).await, CloseReason::Peer | CloseReason::LinkLost(_)));
}

async fn notices_a_stopped_peer_by_probing(rig: Rig, mut second: Second) {
    if rig.skipped_on_nic(NIC_GOES_ON) {
        return second.kill().await;
    }
    let probing = |settings| short_budget(settings).keepalive(Some(Duration::from_millis(100)));
    let (end, _) = meet(&rig, &mut second, probing).await;
    // Alive and silent: the probes are answered.
    tokio::time::sleep(BUDGET).await;
    assert_eq!(end.close_reason(), None);
    let mut receive = end.receive(end.buffer(8));
    receive.try_post().unwrap();
    second.stop().await;
    let error = within(Duration::from_secs(5), receive).await.unwrap_err();
    let reason = CloseReason::Failed(WcStatus::RetryExceeded);
    assert!(matches!(error.error(), Error::Closed { reason: found, .. } if *found == reason), "{error:?}");
    assert_eq!(within(SOON, end.closed()).await, reason);
    second.kill().await;
}

async fn notices_a_killed_peer_at_once(rig: Rig, mut second: Second) {
    let (end, _) = meet(&rig, &mut second, |settings| settings.keepalive(None)).await;
    second.kill().await;
    let reason = within(Duration::from_secs(5), end.closed()).await;
    assert!(lost(&rig, &reason), "{reason:?}");
    assert!(rig.on_nic() || reason.to_string().starts_with("the link to the peer is lost"), "{reason}");
}

async fn connects_to_a_dead_address(rig: Rig, mut second: Second) {
    let address = second.hear().await;
    second.kill().await;
    let client = rig.domain();
    let error = within(SOON, Connection::connect(&client, address.as_str())).await.unwrap_err();
    assert!(matches!(error, Error::Io { operation: "connect", .. }), "{error:?}");
    assert!(error.to_string().contains(address.trim_start_matches("unix:")), "{error}");
    // A socket that its killed owner left behind is no obstacle to the next one.
    let listener = tokio_rdma::Listener::bind(&client, address.as_str()).await.unwrap();
    assert_eq!(listener.local_address().to_string(), address);
}

async fn uses_the_other_process(rig: Rig, mut second: Second) {
    let (end, remote) = meet(&rig, &mut second, |settings| settings).await;
    for len in [1, 7, 4096, 65_537, LONG.min(end.max_message() as usize)] {
        let (received, sent) = tokio::join!(end.receive(end.buffer(len)), end.send(end.filled(len, 3)));
        sent.unwrap();
        assert_pattern(received.unwrap().message(), 3);
    }
    let word = remote.slice(8..16).unwrap();
    end.write(end.domain.register(vec![0; 16]).unwrap(), &remote).await.unwrap();
    assert_eq!(end.fetch_add(&word, 7).await.unwrap(), 0);
    assert_eq!(end.compare_swap(&word, 7, 8).await.unwrap(), 7);
    end.write_with_immediate(end.empty(), &remote, 1).await.unwrap();
    assert_eq!(second.hear().await, "notice 1, counter 8");
    second.end().await;
}

/// Sends every message back, and says what a notice is about.
async fn echoes(rig: Rig, mut parent: Parent) {
    let server = rig.domain();
    let listener = rig.listener(&server).await;
    let region = server.alloc(1 << 16).unwrap().expose(Access::all()).unwrap();
    parent.say(&listener.local_address().to_string());
    parent.say_region(&region.remote());
    let end = End::new(&server, listener.accept().await.unwrap());
    loop {
        let received = end.receive(end.buffer(LONG)).await.unwrap();
        if !received.in_buffer {
            parent.say(&format!("notice {}, counter {}", received.immediate.unwrap(), region.load(8).unwrap()));
            break;
        }
        let mut message = received.buffer;
        let message = message.split_to(received.len).unwrap();
        end.send(message).await.unwrap();
    }
    assert_eq!(parent.hear().await, None);
}
