//! Bytes and text from strangers: parsed, or refused, but never a panic and never a hang.

mod common;

use std::time::Duration;

use common::raw::{self, RawListener};
use common::rig::usual;
use common::run::SOON;
use common::{End, Pair, Rig, Setup, eventually, exercise, run, within};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::join;
use tokio_rdma::{Access, Address, Connection, Listener, QueuePairEndpoint, RemoteRegion};

proptest! {
    #![proptest_config(Config { cases: 2000, failure_persistence: None, ..Config::default() })]

    #[test]
    fn region_descriptors_are_bounded(bytes in proptest::collection::vec(any::<u8>(), 0..100), genuine in 0usize..33) {
        let mut bytes = bytes;
        let start = RemoteRegion::new(4096, 64, 7, Access::all()).unwrap().to_bytes();
        let genuine = genuine.min(bytes.len());
        bytes[..genuine].copy_from_slice(&start[..genuine]);
        if let Ok(region) = RemoteRegion::from_bytes(&bytes) {
            prop_assert_eq!(&region.to_bytes()[..], &bytes[..]);
            prop_assert!(region.address().checked_add(region.len()).is_some());
            prop_assert!(Access::all().contains(region.access()));
            let text = region.to_string();
            let key = format!("{:#x}", region.rkey());
            prop_assert!(text.contains(&key), "{}", text);
        }
    }

    #[test]
    fn endpoints_are_bounded(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        match QueuePairEndpoint::from_bytes(&bytes) {
            Ok(endpoint) => {
                prop_assert!((1..=QueuePairEndpoint::MAX_LEN).contains(&bytes.len()));
                prop_assert_eq!(endpoint.as_bytes(), &bytes[..]);
                prop_assert_eq!(endpoint.to_string().parse::<QueuePairEndpoint>().unwrap(), endpoint);
            }
            Err(_) => prop_assert!(bytes.is_empty() || bytes.len() > QueuePairEndpoint::MAX_LEN),
        }
    }

    #[test]
    fn endpoint_text_is_bounded(text in "(\\PC{0,300}|[0-9a-fA-F+ -]{0,300})") {
        if let Ok(endpoint) = text.parse::<QueuePairEndpoint>() {
            prop_assert_eq!(endpoint.to_string(), text.trim().to_ascii_lowercase());
        }
    }

    #[test]
    fn addresses_are_bounded(text in "(\\PC{0,60}|(unix:)?[a-z0-9.:\\[\\]/-]{0,40}|[a-z.]{1,20}:[0-9]{1,6})") {
        if let Ok(address) = text.parse::<Address>() {
            // Whatever is understood is understood again the same way.
            let again: Address = address.to_string().parse().unwrap();
            prop_assert_eq!(&again, &address);
            match address {
                Address::Unix(path) => prop_assert_eq!(text.strip_prefix("unix:").unwrap(), path.to_str().unwrap()),
                Address::Name(name) => prop_assert!(name.rsplit_once(':').unwrap().1.parse::<u16>().is_ok()),
                _ => {}
            }
        }
    }
}

/// A deterministic sample of what a strategy makes.
fn sample<S: Strategy>(strategy: S, count: usize) -> Vec<S::Value> {
    let mut runner = TestRunner::deterministic();
    (0..count).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect()
}

#[test]
fn a_listener_survives_any_bytes_over_tcp() {
    run(Setup::SOFT_TCP, any_bytes_at_a_listener);
}

#[test]
fn a_listener_survives_any_bytes_over_unix() {
    run(Setup::SOFT_UNIX, any_bytes_at_a_listener);
}

async fn any_bytes_at_a_listener(rig: Rig) {
    let server = rig.domain();
    let settings = |settings: tokio_rdma::ConnectionBuilder| settings.setup_timeout(Duration::from_millis(200));
    let listener = Listener::builder(&server).connections(settings).bind(rig.address()).await.unwrap();
    let request = handshake_of_a_client(&rig).await;
    // Noise; a genuine request, cut, with noise in it, or with noise behind it.
    let noise = || proptest::collection::vec(any::<u8>(), 0..400);
    let strategy = (noise(), 0usize..=request.len(), proptest::collection::vec((any::<usize>(), any::<u8>()), 0..3));
    let mut clients = Vec::new();
    for (noise, genuine, changes) in sample(strategy, 150) {
        let mut bytes = request[..genuine].to_vec();
        bytes.extend(noise);
        for (at, value) in changes {
            if !bytes.is_empty() {
                let at = at % bytes.len();
                bytes[at] = value;
            }
        }
        let mut client = raw::connect(listener.local_address()).await;
        let _ = client.write_all(&bytes).await;
        // Some stay and listen, some hang up.
        if bytes.len() % 2 == 0 {
            clients.push(client);
        }
        while let Ok(accepted) = tokio::time::timeout(Duration::ZERO, listener.accept()).await {
            drop(accepted.unwrap());
        }
    }
    let client = rig.domain();
    let connecting = Connection::builder(&client).private_data(*b"genuine").connect(listener.local_address());
    let accepting = async {
        loop {
            let accepted = listener.accept().await.unwrap();
            if accepted.peer_private_data() == b"genuine" {
                return accepted;
            }
        }
    };
    let (connected, accepted) = within(SOON, async { join!(connecting, accepting) }).await;
    exercise(&Pair { client: End::new(&client, connected.unwrap()), server: End::new(&server, accepted) }).await;
    assert!(listener.failed_handshakes() > 50);
}

/// What a client says first: the beginning of every attack that gets anywhere.
async fn handshake_of_a_client(rig: &Rig) -> Vec<u8> {
    let listener = RawListener::bind(&rig.address()).await;
    let client = rig.domain();
    let connecting = Connection::builder(&client).setup_timeout(Duration::from_secs(10)).connect(listener.address());
    let hearing = async {
        let mut stream = listener.accept().await;
        let mut bytes = vec![0; 1000];
        let len = stream.read(&mut bytes).await.unwrap();
        bytes.truncate(len);
        bytes
    };
    let (refused, bytes) = join!(connecting, hearing);
    refused.unwrap_err();
    assert!(bytes.len() > 16);
    bytes
}

#[test]
fn a_corrupted_link_ends_or_works_over_tcp() {
    run(Setup::SOFT_TCP, a_corrupted_link_ends_or_works);
}

#[test]
fn a_corrupted_link_ends_or_works_over_unix() {
    run(Setup::SOFT_UNIX, a_corrupted_link_ends_or_works);
}

/// A bit flips somewhere between two peers that follow the protocol. Nothing checks payload, so it may be wrong, and headers
/// may ask for anything: whatever happens, every operation ends, and both devices go on working.
async fn a_corrupted_link_ends_or_works(rig: Rig) {
    let (client, server) = (rig.domain(), rig.domain());
    let settings = |settings: tokio_rdma::ConnectionBuilder| {
        settings
            .setup_timeout(Duration::from_millis(300))
            .ack_timeout(Duration::from_millis(30))
            .retry_count(1)
            .rnr_retry(3)
            .rnr_timer(Duration::from_millis(5))
    };
    let listener = Listener::builder(&server).connections(settings).bind(rig.address()).await.unwrap();
    // The first bytes are headers for certain; later ones are of all kinds.
    let places = (0..160u64).step_by(3).chain(sample(160u64..9000, 26));
    for (round, place) in places.enumerate() {
        let proxy = RawListener::bind(&rig.address()).await;
        let address = proxy.address();
        let target = listener.local_address().clone();
        let to_server = round % 2 == 0;
        let flip = 1 << (round % 8);
        let relay = tokio::spawn(async move {
            let near = proxy.accept().await;
            let far = raw::connect(&target).await;
            let ((from_near, to_near), (from_far, to_far)) = (tokio::io::split(near), tokio::io::split(far));
            let none = u64::MAX;
            join!(
                copy(from_near, to_far, if to_server { place } else { none }, flip),
                copy(from_far, to_near, if to_server { none } else { place }, flip)
            );
        });
        let connecting = settings(Connection::builder(&client)).connect(address);
        let conversation = async {
            let (connected, accepted) =
                join!(connecting, tokio::time::timeout(Duration::from_millis(400), listener.accept()));
            if let (Ok(connected), Ok(Ok(accepted))) = (connected, accepted) {
                talk(&Pair { client: End::new(&client, connected), server: End::new(&server, accepted) }).await;
            }
        };
        within(SOON, conversation).await;
        relay.abort();
    }
    exercise(&rig.connect_with((&client, usual), (&server, usual)).await).await;
    // The last connection may be let go of by the thread that saw its end.
    let stats = || (client.stats(), server.stats());
    eventually(|| stats() == Default::default(), stats).await;
}

/// Some of everything. What comes of it is no matter, as long as something does.
async fn talk(pair: &Pair) {
    let (one, other) = (&pair.client, &pair.server);
    let region = other.exposed(2048);
    let remote = region.remote();
    let deadline = Duration::from_secs(2);
    let _ = join!(
        one.send(one.filled(1000, 1)).timeout(deadline),
        one.write(one.filled(2000, 2), &remote).timeout(deadline),
        one.read(one.buffer(2000), &remote).timeout(deadline),
        one.fetch_add(&remote, 1).timeout(deadline),
        other.receive(other.buffer(2000)).timeout(deadline),
        other.send(other.filled(1000, 3)).timeout(deadline),
        one.receive(one.buffer(2000)).timeout(deadline),
    );
    // Buffers may still be quarantined: closing frees them, whatever the link does.
    join!(one.close(), other.close());
}

/// Copies, and flips these bits of the byte at `place`.
async fn copy(mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin, place: u64, flip: u8) {
    let mut bytes = vec![0; 4096];
    let mut position = 0u64;
    while let Ok(len @ 1..) = from.read(&mut bytes).await {
        if let Some(at) = place.checked_sub(position).filter(|&at| at < len as u64) {
            bytes[at as usize] ^= flip;
        }
        position += len as u64;
        if to.write_all(&bytes[..len]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}
