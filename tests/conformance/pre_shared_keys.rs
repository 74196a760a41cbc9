//! Pre-shared keys, over every link: who has the same key gets a connection, and all others a reason.

use std::time::Duration;

use tokio::join;
use tokio_rdma::{AuthenticationFailure, Connection, ConnectionBuilder, Error, Listener, PreSharedKey, RemoteRegion};

use crate::common::run::SOON;
use crate::common::{Pair, Rig, eventually, exercise, within};

cases!(
    the_same_key_opens_a_connection,
    other_keys_are_named_at_both_ends,
    a_listener_lets_in_who_has_the_key,
    memory_described_in_private_data_can_be_used_at_once,
    probes_and_keys_go_together,
);

fn key(byte: u8) -> PreSharedKey {
    PreSharedKey::new([byte; 32]).unwrap()
}

fn keyed(byte: u8) -> impl Fn(ConnectionBuilder) -> ConnectionBuilder {
    move |settings| settings.pre_shared_key(key(byte))
}

async fn the_same_key_opens_a_connection(rig: Rig) {
    let pair = rig.pair_of(keyed(1)).await;
    exercise(&pair).await;
    let pair =
        rig.pair_of(|it| it.pre_shared_key(key(1)).private_data(*b"somebody").send_depth(2).receive_depth(1)).await;
    assert_eq!(pair.server.peer_private_data(), b"somebody");
    // Nothing of the exchange is left in the queues.
    let stats = (pair.client.stats(), pair.server.stats());
    assert_eq!((stats.0.in_flight, stats.1.in_flight, stats.0.live_slots, stats.1.live_slots), (0, 0, 0, 0));
    assert_eq!((pair.client.domain.stats().live_regions, pair.server.domain.stats().live_regions), (0, 0));
}

/// Both ends' errors, from ends that find each other by means of their own.
async fn both_errors(
    rig: &Rig,
    one: impl Fn(ConnectionBuilder) -> ConnectionBuilder,
    two: impl Fn(ConnectionBuilder) -> ConnectionBuilder,
) -> [AuthenticationFailure; 2] {
    let (mine, theirs) = (rig.domain(), rig.domain());
    let one = one(Connection::builder(&mine)).endpoint(rig.address()).await.unwrap();
    let two = two(Connection::builder(&theirs)).endpoint(rig.address()).await.unwrap();
    let (first, second) = (one.endpoint().clone(), two.endpoint().clone());
    let (one, two) = within(SOON, async { join!(one.connect(&second), two.connect(&first)) }).await;
    [one, two].map(|failed| {
        let error = failed.unwrap_err();
        assert!(error.is_caller_error(), "{error}");
        match error {
            Error::Authentication { reason, .. } => reason,
            other => panic!("{other:?}"),
        }
    })
}

async fn other_keys_are_named_at_both_ends(rig: Rig) {
    use AuthenticationFailure::*;
    let none = |settings: ConnectionBuilder| settings;
    assert_eq!(both_errors(&rig, keyed(1), none).await, [NoKeyThere, NoKeyHere]);
    assert_eq!(both_errors(&rig, none, keyed(1)).await, [NoKeyHere, NoKeyThere]);
    let mut differing = both_errors(&rig, keyed(1), keyed(2)).await;
    // Which of them proves first is not up to the test.
    differing.sort_unstable_by_key(|reason| *reason == Rejected);
    assert_eq!(differing, [Unproved, Rejected]);
}

async fn a_listener_lets_in_who_has_the_key(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let listener = Listener::builder(&server).connections(keyed(1)).bind(rig.address()).await.unwrap();
    for (count, failing) in [(1, Some(2)), (2, None)] {
        let settings = Connection::builder(&client);
        let settings = match failing {
            Some(byte) => settings.pre_shared_key(key(byte)),
            None => settings,
        };
        let error = within(SOON, settings.connect(listener.local_address())).await.unwrap_err();
        let Error::Authentication { reason, .. } = &error else { panic!("{error:?}") };
        match failing {
            Some(_) => assert_eq!(*reason, AuthenticationFailure::Rejected),
            None => assert_eq!(*reason, AuthenticationFailure::NoKeyHere),
        }
        eventually(|| listener.failed_handshakes() == count, || listener.failed_handshakes()).await;
    }
    let connecting = Connection::builder(&client).pre_shared_key(key(1)).connect(listener.local_address());
    let (connected, accepted) = within(SOON, async { join!(connecting, listener.accept()) }).await;
    let end = |domain, connection| crate::common::End::new(domain, connection);
    exercise(&Pair { client: end(&client, connected.unwrap()), server: end(&server, accepted.unwrap()) }).await;
    assert_eq!(listener.failed_handshakes(), 2);
    // A listener without a key does not pretend to have one.
    let open = rig.listener(&server).await;
    let error = within(SOON, keyed(1)(Connection::builder(&client)).connect(open.local_address())).await.unwrap_err();
    let Error::Authentication { reason, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*reason, AuthenticationFailure::NoKeyThere);
}

/// The first thing that a program does on a connection is not too early for the peer.
async fn memory_described_in_private_data_can_be_used_at_once(rig: Rig) {
    for _ in 0..10 {
        let (client, server) = (rig.domain(), rig.domain());
        let mine = client.alloc(8).unwrap().expose(tokio_rdma::Access::all()).unwrap();
        let theirs = server.alloc(8).unwrap().expose(tokio_rdma::Access::all()).unwrap();
        let described = (mine.remote().to_bytes(), theirs.remote().to_bytes());
        let settings = |it: ConnectionBuilder| keyed(1)(it).private_data(described.1);
        let listener = Listener::builder(&server).connections(settings).bind(rig.address()).await.unwrap();
        let use_it = |connection: Connection| async move {
            let region = RemoteRegion::from_bytes(connection.peer_private_data()).unwrap();
            connection.fetch_add(&region, 1).await.unwrap();
            connection
        };
        let connecting = keyed(1)(Connection::builder(&client)).private_data(described.0);
        let connecting = async { use_it(connecting.connect(listener.local_address()).await.unwrap()).await };
        let accepting = async { use_it(listener.accept().await.unwrap()).await };
        let _both = within(SOON, async { join!(connecting, accepting) }).await;
        assert_eq!((mine.load(0).unwrap(), theirs.load(0).unwrap()), (1, 1));
    }
}

async fn probes_and_keys_go_together(rig: Rig) {
    let pair = rig.pair_of(|it| it.pre_shared_key(key(1)).keepalive(Some(Duration::from_millis(1)))).await;
    let before = pair.client.stats().looks;
    eventually(|| pair.client.stats().looks > before + 3, || pair.client.stats()).await;
    exercise(&pair).await;
}
