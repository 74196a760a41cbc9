//! Listeners, and clients that do not behave.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::join;
use tokio_rdma::soft::{self, Faults, HandshakeStep};
use tokio_rdma::{Address, Connection, Error, Listener, ProtectionDomain, WcStatus};

use crate::common::raw::{self, RawListener};
use crate::common::rig::{AddressKind, contents};
use crate::common::run::SOON;
use crate::common::{End, Pair, Rig, assert_pattern, eventually, exercise, holds_for, within};

cases!(
    private_data_goes_both_ways,
    settings_of_both_ends_count_each_for_its_own,
    clients_are_accepted_in_any_task,
    dropping_the_listener_frees_the_address,
    an_address_in_use_is_an_error,
    connections_nobody_accepts_do_not_pile_up_without_end,
    each_connection_has_a_domain_of_its_own_if_asked,
);
soft_cases!(
    a_client_that_says_nothing_holds_nobody_up,
    a_client_that_talks_nonsense_holds_nobody_up,
    a_flood_of_silent_clients_ends_by_itself,
    a_client_that_dies_at_any_step_is_one_failed_handshake,
    a_server_that_dies_at_any_step_fails_the_client_in_time,
    a_server_that_says_nothing_fails_the_client_in_time,
    a_server_that_talks_nonsense_fails_the_client_in_time,
);

/// Long enough for a handshake on a busy machine, short enough to wait for its end.
const SETUP: Duration = Duration::from_millis(500);

async fn impatient_listener(rig: &Rig, domain: &ProtectionDomain) -> Listener {
    Listener::builder(domain).connections(|settings| settings.setup_timeout(SETUP)).bind(rig.address()).await.unwrap()
}

/// Somebody else connects to the listener, and everything works.
async fn others_are_served(rig: &Rig, listener: &Listener) {
    let client = rig.domain();
    let (connected, accepted) =
        within(SOON, async { join!(Connection::connect(&client, listener.local_address()), listener.accept()) }).await;
    let pair =
        Pair { client: End::new(&client, connected.unwrap()), server: End::new(listener.domain(), accepted.unwrap()) };
    exercise(&pair).await;
}

async fn private_data_goes_both_ways(rig: Rig) {
    for (there, back) in [(&b""[..], &b""[..]), (b"a name", b"another"), (&[0; 54], &[0xff; 54])] {
        let pair = rig.pair_with(|settings| settings.private_data(there), |settings| settings.private_data(back)).await;
        assert_eq!(pair.server.peer_private_data(), there);
        assert_eq!(pair.client.peer_private_data(), back);
    }
    // A descriptor fits.
    let domain = rig.domain();
    let region = domain.alloc(8).unwrap().expose(tokio_rdma::Access::REMOTE_READ).unwrap();
    let bytes = region.remote().to_bytes();
    let pair = rig
        .connect_with((&rig.domain(), |settings| settings), (&domain, |settings| settings.private_data(bytes)))
        .await;
    let remote = tokio_rdma::RemoteRegion::from_bytes(pair.client.peer_private_data()).unwrap();
    assert_eq!(pair.client.fetch(&remote).await, [0; 8]);
}

async fn settings_of_both_ends_count_each_for_its_own(rig: Rig) {
    let pair = rig
        .pair_with(
            |settings| settings.send_depth(1).receive_depth(2).max_rd_atomic(1),
            |settings| settings.send_depth(300).receive_depth(1).max_receive_sge(2),
        )
        .await;
    let mut sends: Vec<_> = (0..301).map(|_| pair.server.send(pair.server.buffer(1))).collect();
    sends[..300].iter_mut().for_each(|send| send.try_post().unwrap());
    assert!(matches!(sends[300].try_post(), Err(Error::QueueFull { depth: 300, .. })));
    let mut first = pair.client.send(pair.client.buffer(1));
    first.try_post().unwrap();
    let mut second = pair.client.send(pair.client.buffer(1));
    assert!(matches!(second.try_post(), Err(Error::QueueFull { depth: 1, .. })));
    assert_eq!((pair.client.max_rd_atomic(), pair.server.max_rd_atomic()), (1, 1));
    assert_eq!(pair.client.max_message(), pair.server.max_message());
}

async fn clients_are_accepted_in_any_task(rig: Rig) {
    let server = rig.domain();
    let listener = std::sync::Arc::new(rig.listener(&server).await);
    let acceptors: Vec<_> = (0..4)
        .map(|_| {
            let listener = listener.clone();
            tokio::spawn(async move {
                let mut accepted = Vec::new();
                for _ in 0..5 {
                    accepted.push(listener.accept().await.unwrap());
                }
                accepted.len()
            })
        })
        .collect();
    let client = rig.domain();
    for _ in 0..20 {
        Connection::connect(&client, listener.local_address()).await.unwrap();
    }
    for acceptor in acceptors {
        assert_eq!(within(SOON, acceptor).await.unwrap(), 5);
    }
    assert_eq!(listener.failed_handshakes(), 0);
}

async fn dropping_the_listener_frees_the_address(rig: Rig) {
    let server = rig.domain();
    let mut address = rig.address();
    for _ in 0..5 {
        let listener = loop {
            match Listener::bind(&server, &address).await {
                // RDMA CM's ports are not those of the sockets that `free` asks.
                Err(_) if rig.setup.address == AddressKind::Nic => tokio::time::sleep(Duration::from_millis(5)).await,
                bound => break bound.unwrap(),
            }
        };
        // With the real port, from the first time on.
        address = listener.local_address().clone();
        others_are_served(&rig, &listener).await;
        drop(listener);
        eventually(|| free(&address), || address.to_string()).await;
    }
}

/// Whether nothing is bound there any more: the listener's task ends a moment after it was told to.
fn free(address: &Address) -> bool {
    match address {
        Address::Ip(address) => std::net::TcpListener::bind(address).is_ok(),
        Address::Unix(path) => !path.exists(),
        _ => true,
    }
}

async fn an_address_in_use_is_an_error(rig: Rig) {
    let server = rig.domain();
    let listener = rig.listener(&server).await;
    let address = listener.local_address();
    let error = Listener::bind(&server, address).await.unwrap_err();
    let Error::Io { operation: "bind", cause, target, .. } = &error else { panic!("{error:?}") };
    assert_eq!(cause.kind(), std::io::ErrorKind::AddrInUse);
    assert!(target.contains(address.to_string().trim_start_matches("unix:")), "{target}");
    others_are_served(&rig, &listener).await;
    // What is no socket is not removed either.
    if rig.setup.address == AddressKind::Unix {
        let path = rig.path();
        std::fs::write(&path, "somebody's file").unwrap();
        Listener::bind(&server, path.as_path()).await.unwrap_err();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "somebody's file");
    }
}

async fn connections_nobody_accepts_do_not_pile_up_without_end(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let listener = impatient_listener(&rig, &server).await;
    let mut waiting = Vec::new();
    let mut refused = 0;
    while refused < 3 && waiting.len() < 1000 {
        let connecting = Connection::builder(&client).send_depth(1).receive_depth(1).setup_timeout(SETUP);
        match connecting.connect(listener.local_address()).await {
            Ok(connection) => waiting.push(connection),
            Err(_) => refused += 1,
        }
    }
    assert!((100..400).contains(&waiting.len()), "{} connections wait to be accepted", waiting.len());
    // Accepting makes room again.
    for _ in 0..waiting.len() {
        drop(within(SOON, listener.accept()).await.unwrap());
    }
    drop(waiting);
    others_are_served(&rig, &listener).await;
}

async fn each_connection_has_a_domain_of_its_own_if_asked(rig: Rig) {
    for each in [true, false] {
        let domain = rig.domain();
        let listener = Listener::builder(&domain).domain_per_connection(each).bind(rig.address()).await.unwrap();
        let mut pairs = Vec::new();
        for _ in 0..2 {
            let client = rig.domain();
            let connecting = Connection::connect(&client, listener.local_address());
            let (connected, accepted) = within(SOON, async { join!(connecting, listener.accept()) }).await;
            let accepted = accepted.unwrap();
            let server = accepted.domain().clone();
            pairs.push(Pair { client: End::new(&client, connected.unwrap()), server: End::new(&server, accepted) });
        }
        let [one, two] = &pairs[..] else { unreachable!() };
        assert_eq!(one.server.domain.id() != two.server.domain.id(), each);
        assert_eq!(one.server.domain.id() != listener.domain().id(), each);
        exercise(one).await;
        exercise(two).await;
        // What the first client was given, and passed on to the second.
        let region = one.server.exposed(64);
        one.client.write(one.client.filled(64, 1), &region.remote()).await.unwrap();
        let written = two.client.write(two.client.filled(64, 2), &region.remote()).await;
        if !each {
            written.unwrap();
            assert_pattern(&contents(&region), 2);
            continue;
        }
        let error = written.unwrap_err();
        let Error::Completion { status, .. } = error.error() else { panic!("{error:?}") };
        assert_eq!(*status, WcStatus::RemoteAccess);
        assert_pattern(&contents(&region), 1);
        let error = one.server.send(two.server.buffer(8)).await.unwrap_err();
        assert!(matches!(error.error(), Error::ForeignBuffer { .. }), "{error}");
        exercise(one).await;
    }
}

async fn a_client_that_says_nothing_holds_nobody_up(rig: Rig) {
    let server = rig.domain();
    let listener = impatient_listener(&rig, &server).await;
    let start = Instant::now();
    let mut silent = raw::connect(listener.local_address()).await;
    let mut hesitant = raw::connect(listener.local_address()).await;
    hesitant.write_all(&[1]).await.unwrap();
    others_are_served(&rig, &listener).await;
    // Both are thrown out when their time is over.
    within(SOON, async {
        let mut bytes = Vec::new();
        let _ = silent.read_to_end(&mut bytes).await;
        let _ = hesitant.read_to_end(&mut bytes).await;
    })
    .await;
    assert!(start.elapsed() >= SETUP, "thrown out too early: {:?}", start.elapsed());
    eventually(|| listener.failed_handshakes() == 2, || listener.failed_handshakes()).await;
    others_are_served(&rig, &listener).await;
}

async fn a_client_that_talks_nonsense_holds_nobody_up(rig: Rig) {
    let server = rig.domain();
    let listener = impatient_listener(&rig, &server).await;
    let mut random = fastrand::Rng::with_seed(8);
    for round in 0..30u64 {
        let mut client = raw::connect(listener.local_address()).await;
        let mut bytes = vec![0; random.usize(1..5000)];
        random.fill(&mut bytes);
        if round % 3 == 0 {
            bytes.fill(if round % 2 == 0 { 0 } else { 0xff });
        }
        // It may be cut off while it is still talking.
        let _ = client.write_all(&bytes).await;
        if round % 10 == 0 {
            others_are_served(&rig, &listener).await;
        }
        drop(client);
    }
    eventually(|| listener.failed_handshakes() == 30, || listener.failed_handshakes()).await;
    others_are_served(&rig, &listener).await;
}

/// More of them than there are places for handshakes: whoever comes later waits for the first ones' time to be over.
async fn a_flood_of_silent_clients_ends_by_itself(rig: Rig) {
    let server = rig.domain();
    let listener = impatient_listener(&rig, &server).await;
    let mut flood = Vec::new();
    for _ in 0..120 {
        flood.push(raw::connect(listener.local_address()).await);
    }
    others_are_served(&rig, &listener).await;
    eventually(|| listener.failed_handshakes() == 120, || listener.failed_handshakes()).await;
    others_are_served(&rig, &listener).await;
}

fn dies_at(rig: &Rig, step: HandshakeStep) -> ProtectionDomain {
    let faults = Faults::seeded(1).die_at(step);
    rig.open(soft::device(soft::default_limits(), Some(faults))).alloc_pd().unwrap()
}

async fn a_client_that_dies_at_any_step_is_one_failed_handshake(rig: Rig) {
    for step in [HandshakeStep::Connected, HandshakeStep::RequestSent, HandshakeStep::ReadySent] {
        let server = rig.domain();
        let listener = impatient_listener(&rig, &server).await;
        let client = dies_at(&rig, step);
        for _ in 0..3 {
            let attempt = within(SOON, Connection::connect(&client, listener.local_address())).await;
            let error = attempt.unwrap_err();
            assert!(matches!(error, Error::Handshake { .. } | Error::Io { .. }), "{step:?}: {error:?}");
        }
        if step == HandshakeStep::ReadySent {
            // The server cannot know: it has a connection, which ends at once.
            for _ in 0..3 {
                let connection = within(SOON, listener.accept()).await.unwrap();
                within(SOON, connection.closed()).await;
            }
            assert_eq!(listener.failed_handshakes(), 0);
        } else {
            eventually(|| listener.failed_handshakes() == 3, || listener.failed_handshakes()).await;
        }
        assert_eq!(client.stats(), Default::default());
        others_are_served(&rig, &listener).await;
    }
}

async fn a_server_that_dies_at_any_step_fails_the_client_in_time(rig: Rig) {
    for step in [HandshakeStep::Connected, HandshakeStep::RequestReceived, HandshakeStep::ReplySent] {
        let server = dies_at(&rig, step);
        let listener = rig.listener(&server).await;
        let client = rig.domain();
        for round in 1..=3 {
            let connecting = Connection::builder(&client).setup_timeout(SOON).connect(listener.local_address());
            match within(SOON / 2, connecting).await {
                // With the reply in hand the client takes itself for connected, but not for long.
                Ok(connection) => {
                    assert_eq!(step, HandshakeStep::ReplySent);
                    within(SOON / 2, connection.closed()).await;
                }
                Err(error) => {
                    assert!(matches!(error, Error::Handshake { .. } | Error::Io { .. }), "{step:?}: {error:?}")
                }
            }
            eventually(|| listener.failed_handshakes() == round, || (step, listener.failed_handshakes())).await;
        }
        let accepted = tokio::time::timeout(Duration::from_millis(20), listener.accept()).await;
        assert!(accepted.is_err(), "{step:?}");
    }
}

async fn a_server_that_says_nothing_fails_the_client_in_time(rig: Rig) {
    let listener = RawListener::bind(&rig.address()).await;
    let client = rig.domain();
    let start = Instant::now();
    let connecting = Connection::builder(&client).setup_timeout(SETUP).connect(listener.address());
    let (error, _silent) = join!(within(SOON, connecting), listener.accept());
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Timeout { operation: "connect", after: SETUP, .. }), "{error:?}");
    assert!(start.elapsed() >= SETUP);
}

async fn a_server_that_talks_nonsense_fails_the_client_in_time(rig: Rig) {
    let listener = RawListener::bind(&rig.address()).await;
    let client = rig.domain();
    let mut random = fastrand::Rng::with_seed(9);
    for round in 0..10 {
        let connecting = Connection::builder(&client).setup_timeout(SOON).connect(listener.address());
        let answering = async {
            let mut stream = listener.accept().await;
            let mut bytes = vec![0; random.usize(100..2000)];
            random.fill(&mut bytes);
            if round == 0 {
                bytes = b"HTTP/1.1 400 Bad Request\r\n\r\nThis is another kind of server altogether, sorry about that."
                    .to_vec();
            }
            let _ = stream.write_all(&bytes).await;
            stream
        };
        let (error, _stream) = join!(within(SOON / 2, connecting), answering);
        let error = error.unwrap_err();
        assert!(matches!(error, Error::Handshake { .. }), "{error:?}");
    }
    // And one that hangs up at once.
    let connecting = Connection::connect(&client, listener.address());
    let (error, ()) = join!(within(SOON / 2, connecting), async { drop(listener.accept().await) });
    assert!(matches!(error.unwrap_err(), Error::Handshake { .. } | Error::Io { .. }));
    holds_for(Duration::from_millis(10), || client.stats() == Default::default()).await;
}
