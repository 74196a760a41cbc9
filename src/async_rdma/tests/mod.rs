//! The protocol between two ends of this crate, over the software device, and against an end that misbehaves.

mod leases;
mod misuse;
mod wire_level;

use std::time::Duration;

use super::{Peer, PeerBuilder};
use crate::{Buffer, Connection, Device, Error, Listener, ProtectionDomain, SgList};

const MINUTE: Duration = Duration::from_secs(60);

/// Two ends of a plain connection, each with a domain of its own.
async fn connected() -> (Connection, Connection) {
    let device = Device::open("soft0").unwrap();
    let (here, there) = (device.alloc_pd().unwrap(), device.alloc_pd().unwrap());
    let listener = Listener::bind(&there, "127.0.0.1:0").await.unwrap();
    let connecting = Connection::connect(&here, listener.local_address());
    tokio::try_join!(connecting, listener.accept()).unwrap()
}

fn over(connection: Connection, settings: impl FnOnce(PeerBuilder) -> PeerBuilder) -> Peer {
    let builder = Peer::builder(&connection.domain().clone());
    settings(builder).over(connection).unwrap()
}

async fn peers(settings: impl Fn(PeerBuilder) -> PeerBuilder) -> (Peer, Peer) {
    let (client, server) = connected().await;
    (over(client, &settings), over(server, &settings))
}

fn buffer(peer: &Peer, bytes: &[u8]) -> Buffer {
    peer.domain().register(bytes.to_vec()).unwrap()
}

/// Waits for something that another task does.
async fn until(condition: impl Fn() -> bool) {
    for _ in 0..500 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not within 5 s");
}

#[tokio::test]
async fn messages_arrive_whole_and_in_order_in_both_directions() {
    let (client, server) = peers(|it| it).await;
    for round in 0..300u32 {
        let (from, to) = if round % 2 == 0 { (&client, &server) } else { (&server, &client) };
        let bytes: Vec<u8> = (0..=round * 512 / 300).map(|at| at as u8 ^ round as u8).collect();
        let back = from.send(buffer(from, &bytes)).await.unwrap();
        let message = to.receive().await.unwrap();
        assert_eq!((&message[..], message.immediate()), (&bytes[..], None));
        assert_eq!((&back[..], message.into_buffer().len()), (&bytes[..], bytes.len()));
    }
    assert_eq!((client.stats().refused, server.stats().refused), (0, 0));
}

#[tokio::test]
async fn immediates_and_every_kind_of_buffer_arrive() {
    let (client, server) = peers(|it| it).await;
    let shared = buffer(&client, b"shared").freeze();
    client.send_with_immediate(shared.clone(), 7).await.unwrap();
    let list = SgList::new().with(buffer(&client, b"two ")).with(shared);
    let list = client.send_with_immediate(list, u32::MAX).await.unwrap();
    assert_eq!(list.len(), 2, "the header is not the user's");
    for (text, immediate) in [(&b"shared"[..], 7), (b"two shared", u32::MAX)] {
        let message = server.receive().await.unwrap();
        assert_eq!((&message[..], message.immediate()), (text, Some(immediate)));
    }
}

#[tokio::test]
async fn many_sends_at_once_wait_in_line_and_all_arrive() {
    let (client, server) = peers(|it| it).await;
    let sends = (0..200u8).map(|byte| {
        let client = client.clone();
        async move { client.send(buffer(&client, &[byte; 9])).await.unwrap() }
    });
    let receiving = async {
        let mut seen = Vec::new();
        for _ in 0..200 {
            let message = server.receive().await.unwrap();
            assert!(message.iter().all(|&byte| byte == message[0]), "not mixed");
            seen.push(message[0]);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..200).collect::<Vec<_>>());
    };
    tokio::join!(futures::future::join_all(sends), receiving);
}

#[tokio::test]
async fn a_fast_sender_waits_for_a_slow_receiver() {
    let (client, server) = peers(|it| it.backlog(4)).await;
    let sending = async {
        for byte in 0..40u8 {
            client.send(buffer(&client, &[byte])).await.unwrap();
        }
    };
    let receiving = async {
        for byte in 0..40u8 {
            tokio::time::sleep(Duration::from_millis(2)).await;
            assert_eq!(server.receive().await.unwrap()[..], [byte]);
        }
    };
    tokio::join!(sending, receiving);
    assert_eq!(server.stats().refused, 0);
}

#[tokio::test]
async fn messages_that_the_user_keeps_take_no_place_from_others() {
    let (client, server) = peers(|it| it.backlog(1).max_message(64)).await;
    let mut kept = Vec::new();
    for byte in 0..100u8 {
        client.send(buffer(&client, &[byte; 64])).await.unwrap();
        kept.push(server.receive().await.unwrap());
    }
    assert!(kept.iter().enumerate().all(|(at, message)| message[..] == [at as u8; 64]));
}

#[tokio::test]
async fn lengths_are_checked_before_anything_is_sent() {
    let (client, _server) = peers(|it| it.max_message(100)).await;
    for (length, limit) in [(101, 100), (0, 1)] {
        let list = SgList::new().with(client.domain().alloc(200).unwrap().split_off(200 - length).unwrap());
        let failed = client.send(list).await.unwrap_err();
        assert!(
            matches!(failed.error(), Error::Limit { what: "length", limit: told, .. } if *told == limit),
            "{failed}"
        );
        assert_eq!(failed.into_buffer().unwrap().len_bytes(), length, "the buffer comes back");
    }
    assert_eq!(client.stats().connection.sends, 0);
}

#[tokio::test]
async fn the_end_reaches_everybody_who_waits() {
    let (client, server) = peers(|it| it).await;
    client.send(buffer(&client, b"before")).await.unwrap();
    let waiting = {
        let client = client.clone();
        tokio::spawn(async move { client.receive_region().await.unwrap() })
    };
    tokio::task::yield_now().await;
    let lent = server.lend(buffer(&server, b"lent"), crate::Access::REMOTE_READ, MINUTE).await.unwrap();
    let _region = waiting.await.unwrap();
    let waiting = {
        let client = client.clone();
        tokio::spawn(async move { client.receive().await.map(drop) })
    };
    tokio::task::yield_now().await;
    client.close().await;
    assert!(matches!(waiting.await.unwrap(), Err(Error::Closed { .. })));
    server.closed().await;
    assert_eq!(server.receive().await.unwrap()[..], *b"before", "what was there already is not lost");
    assert!(matches!(server.receive().await, Err(Error::Closed { .. })));
    let failed = server.send(buffer(&server, b"late")).await.unwrap_err();
    assert!(matches!(failed.error(), Error::Closed { .. }), "{failed}");
    assert_eq!(failed.into_buffer().unwrap()[..], *b"late");
    assert_eq!(lent.ended().await, super::LeaseEnd::Closed);
    assert_eq!(lent.reclaim().await[..], *b"lent");
}

#[tokio::test]
async fn dropping_the_last_handle_closes_and_leaves_nothing() {
    let (client, server) = peers(|it| it.budget(1 << 20)).await;
    let domains: [ProtectionDomain; 2] = [client.domain().clone(), server.domain().clone()];
    let region = client.request_region(100, 8, MINUTE).await.unwrap();
    assert_eq!(server.stats().regions, 1);
    drop(client);
    server.closed().await;
    drop((server, region));
    until(|| domains.iter().all(|domain| domain.stats() == crate::DomainStats::default())).await;
}

#[tokio::test]
async fn soft_devices_say_why_they_cannot_reach_async_rdma() {
    let domain = Device::open("soft0").unwrap().alloc_pd().unwrap();
    let errors = [
        Peer::builder(&domain).endpoint().map(drop).unwrap_err(),
        super::Listener::bind(&domain, "127.0.0.1:0").await.map(drop).unwrap_err(),
        Peer::connect(&domain, tcp_listener().await).await.map(drop).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(&error, Error::Unsupported { device, .. } if device == "soft0"), "{error}");
        assert!(error.to_string().contains("RDMA NIC"), "{error}");
    }
}

/// Where somebody listens who never answers.
async fn tcp_listener() -> std::net::SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        std::future::pending::<()>().await;
        drop(listener)
    });
    address
}

#[tokio::test]
async fn settings_out_of_range_are_refused() {
    let domain = Device::open("soft0").unwrap().alloc_pd().unwrap();
    let settings: [fn(PeerBuilder) -> PeerBuilder; 4] =
        [|it| it.max_message(0), |it| it.max_message(usize::MAX), |it| it.backlog(0), |it| it.backlog(usize::MAX)];
    for change in settings {
        let error = change(Peer::builder(&domain)).endpoint().map(drop).unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
    }
}
