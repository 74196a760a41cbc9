//! What the metrics facade gets to know. One test, since a program has one recorder.

mod common;

use std::time::Duration;

use common::run::{SOON, poll_once};
use common::{Rig, Setup, eventually, exercise, within};
use futures::StreamExt;
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use tokio::join;
use tokio_rdma::{Access, Connection, Listener, SharedReceiveQueue, metrics};

/// What was counted so far, by name and labels, as `name{label=value,..}`.
struct Counted(Snapshotter, std::collections::BTreeMap<String, f64>);

impl Counted {
    /// A snapshot says how much each has grown since the one before.
    fn look(&mut self) {
        for (key, _, _, value) in self.0.snapshot().into_vec() {
            let (_, key) = key.into_parts();
            let (name, labels) = key.into_parts();
            let labels: Vec<_> = labels.iter().map(|label| format!("{}={}", label.key(), label.value())).collect();
            let entry = self.1.entry(format!("{}{{{}}}", name.as_str(), labels.join(","))).or_default();
            match value {
                DebugValue::Counter(by) => *entry += by as f64,
                DebugValue::Gauge(by) => *entry += by.into_inner(),
                DebugValue::Histogram(_) => unreachable!("there are none"),
            }
        }
    }

    fn of(&mut self, name: &str, labels: &str) -> f64 {
        self.look();
        let comma = if labels.is_empty() { "" } else { "," };
        self.1.get(&format!("{name}{{device=soft0{comma}{labels}}}")).copied().unwrap_or(0.0)
    }

    fn operations(&mut self, operation: &str, status: &str) -> f64 {
        self.of(metrics::OPERATIONS, &format!("operation={operation},status={status}"))
    }
}

#[test]
fn what_happens_is_counted() {
    let recorder = DebuggingRecorder::new();
    let counted = Counted(recorder.snapshotter(), Default::default());
    recorder.install().expect("nobody else has installed one");
    common::run(Setup::SOFT_TCP, |rig| story(rig, counted));
}

async fn story(rig: Rig, mut counted: Counted) {
    let pair = rig.pair().await;
    assert_eq!(counted.of(metrics::CONNECTIONS_OPENED, "link=tcp"), 2.0);
    assert_eq!(counted.of(metrics::CONNECTIONS, ""), 2.0);
    assert_eq!((counted.of(metrics::REGIONS, ""), counted.of(metrics::REGISTERED, "")), (0.0, 0.0));

    exercise(&pair).await;
    let both = [pair.client.stats(), pair.server.stats()];
    let sum = |what: fn(&tokio_rdma::ConnectionStats) -> u64| both.iter().map(what).sum::<u64>() as f64;
    assert_eq!(counted.operations("send", "success"), sum(|it| it.sends));
    assert_eq!(counted.operations("receive", "success"), sum(|it| it.receives));
    assert_eq!(counted.operations("write", "success"), sum(|it| it.writes));
    assert_eq!(counted.operations("read", "success"), sum(|it| it.reads));
    let atomics = counted.operations("compare_and_swap", "success") + counted.operations("fetch_and_add", "success");
    assert_eq!(atomics, sum(|it| it.atomics));
    assert_eq!(counted.of(metrics::BYTES_SENT, ""), sum(|it| it.bytes_sent));
    assert_eq!(counted.of(metrics::BYTES_RECEIVED, ""), sum(|it| it.bytes_received));
    assert!(counted.of(metrics::BYTES_SENT, "") > 0.0 && atomics > 0.0);

    let held = (pair.client.buffer(1000), pair.server.buffer(24));
    let more = counted.of(metrics::REGISTERED, "");
    drop(held.1);
    assert_eq!(more - counted.of(metrics::REGISTERED, ""), 24.0);
    let regions = counted.of(metrics::REGIONS, "");
    drop(held.0);
    assert_eq!(regions - counted.of(metrics::REGIONS, ""), 1.0);

    // A message that waits for a receive, and one that is given up.
    let before = counted.of(metrics::RNR_SENT, "");
    pair.client.send(pair.client.buffer(8)).timeout(Duration::from_millis(5)).await.unwrap_err();
    assert_eq!(counted.operations("send", "timeout"), 1.0);
    within(SOON, pair.server.receive(pair.server.buffer(8))).await.unwrap();

    // The end, by a failure: the operation's own, and those that it takes along.
    let region = pair.server.buffer(8).expose(Access::REMOTE_READ).unwrap();
    let stale = region.remote();
    drop(region);
    let behind = pair.client.receive(pair.client.buffer(8));
    let (failed, behind) = within(SOON, async { join!(pair.client.read(pair.client.buffer(8), &stale), behind) }).await;
    failed.unwrap_err();
    behind.unwrap_err();
    assert_eq!(counted.operations("read", "remote_access"), 1.0);
    assert_eq!(counted.operations("receive", "closed"), 1.0);
    within(SOON, async { join!(pair.client.closed(), pair.server.closed()) }).await;
    eventually_counted(&mut counted, metrics::CONNECTIONS_CLOSED, "reason=failed", 2.0).await;
    assert_eq!(counted.of(metrics::CONNECTIONS, ""), 0.0);
    assert!(counted.of(metrics::RNR_SENT, "") > before);

    a_full_queue_and_a_failed_handshake(&rig, &mut counted).await;
    a_shared_receive_queue(&rig, &mut counted).await;
}

async fn a_full_queue_and_a_failed_handshake(rig: &Rig, counted: &mut Counted) {
    let pair = rig.pair_of(|settings| settings.send_depth(1)).await;
    let mut first = pair.client.send(pair.client.buffer(1));
    first.try_post().unwrap();
    let second = pair.client.send(pair.client.buffer(1));
    let receives = async {
        eventually(|| pair.client.stats().waiting == 1, || pair.client.stats()).await;
        for _ in 0..2 {
            pair.server.receive(pair.server.buffer(1)).await.unwrap();
        }
    };
    let (first, second, ()) = within(SOON, async { join!(first, second, receives) }).await;
    first.unwrap();
    second.unwrap();
    assert_eq!(counted.of(metrics::SLOT_WAITS, ""), 1.0);
    pair.client.close().await;
    within(SOON, pair.server.closed()).await;
    eventually_counted(counted, metrics::CONNECTIONS_CLOSED, "reason=peer", 1.0).await;
    assert_eq!(counted.of(metrics::CONNECTIONS_CLOSED, "reason=local"), 1.0);

    let server = rig.domain();
    let listener = Listener::bind(&server, rig.address()).await.unwrap();
    drop(common::raw::connect(listener.local_address()).await);
    eventually(|| listener.failed_handshakes() == 1, || listener.failed_handshakes()).await;
    eventually_counted(counted, metrics::HANDSHAKES_FAILED, "", 1.0).await;
    let _connection = Connection::connect(&rig.domain(), listener.local_address()).await.unwrap();
}

async fn a_shared_receive_queue(rig: &Rig, counted: &mut Counted) {
    let (ours, theirs) = (rig.domain(), rig.domain());
    let srq = SharedReceiveQueue::new(&ours, 1).unwrap();
    let listener = Listener::builder(&ours).srq(&srq).bind(rig.address()).await.unwrap();
    let (client, server) = join!(Connection::connect(&theirs, listener.local_address()), listener.accept());
    let (client, server) = (client.unwrap(), server.unwrap());
    let send = async |len| within(SOON, client.send(theirs.alloc(len).unwrap())).await;
    let receives = |counted: &mut Counted| {
        let operations = ["success", "timeout", "local_length", "closed"].map(|it| counted.operations("receive", it));
        (operations, counted.of(metrics::BYTES_RECEIVED, ""), counted.of(metrics::SLOT_WAITS, ""))
    };
    let ([success, timeout, local_length, closed], bytes, waits) = receives(counted);

    let (mut first, mut second) = (srq.receive(ours.alloc(8).unwrap()), srq.receive(ours.alloc(8).unwrap()));
    first.try_post().unwrap();
    assert!(poll_once(&mut second).is_pending());
    send(8).await.unwrap();
    within(SOON, first).await.unwrap();
    let (sent, second) = join!(send(5), within(SOON, second));
    drop((sent.unwrap(), second.unwrap()));
    assert_eq!(receives(counted), ([success + 2.0, timeout, local_length, closed], bytes + 13.0, waits + 1.0));

    // Given up while it is posted, so that the next message goes to nobody.
    srq.receive(ours.alloc(8).unwrap()).timeout(Duration::from_millis(5)).await.unwrap_err();
    send(8).await.unwrap();
    eventually(|| srq.posted() == 0, || srq.posted()).await;
    let mut messages = srq.receiver(1, 8).unwrap();
    send(7).await.unwrap();
    within(SOON, messages.next()).await.unwrap().unwrap();
    assert_eq!(receives(counted), ([success + 3.0, timeout + 1.0, local_length, closed], bytes + 20.0, waits + 1.0));

    // One that is too long, one that is left when nobody can send any more, and one that comes then.
    drop(messages);
    let short = srq.receive(ours.alloc(1).unwrap());
    let (sent, short) = join!(send(2), within(SOON, short));
    drop((sent.unwrap_err(), short.unwrap_err()));
    let mut left = srq.receive(ours.alloc(8).unwrap());
    left.try_post().unwrap();
    let late = srq.receive(ours.alloc(8).unwrap());
    drop((srq, listener, server));
    within(SOON, left).await.unwrap_err();
    within(SOON, late).await.unwrap_err();
    let operations = [success + 3.0, timeout + 1.0, local_length + 1.0, closed + 2.0];
    assert_eq!(receives(counted), (operations, bytes + 20.0, waits + 1.0));
}

/// The count comes a moment after whoever waits for the event is woken.
async fn eventually_counted(counted: &mut Counted, name: &str, labels: &str, expected: f64) {
    let mut now = counted.of(name, labels);
    eventually(
        || {
            now = counted.of(name, labels);
            now == expected
        },
        || format!("{name} {labels}"),
    )
    .await;
}
