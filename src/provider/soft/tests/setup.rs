//! Connection setup, rendezvous, fault injection.

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::HandshakeStep;
use super::super::wire::VERSION;
use super::*;
use crate::error::{CloseReason, Error};

/// Connects two fresh devices; the results of both sides.
async fn meet(link: Link, faults: [Option<Faults>; 2]) -> [Result<(Qp, crate::provider::PeerInfo), Error>; 2] {
    let [faults_a, faults_b] = faults;
    let (ctx_a, pd_a, cq_a) = device_for(link, default_limits(), faults_a);
    let (ctx_b, pd_b, cq_b) = device_for(link, default_limits(), faults_b);
    let acceptor = ctx_b.listen(&address(link)).await.unwrap();
    let config = config();
    let connecting = ctx_a.connect(&pd_a, &cq_a, &config, acceptor.local_address(), b"");
    let accepting = async { acceptor.accept().await?.accept(&pd_b, &cq_b, &config, |_| Ok(vec![])).await };
    let both = async { tokio::join!(connecting, accepting) };
    let (a, b) = tokio::time::timeout(PATIENCE, both).await.unwrap();
    [a, b]
}

#[test]
fn a_side_that_dies_during_setup_is_an_error_on_the_other() {
    runtime().block_on(async {
        for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
            let connector = [HandshakeStep::Connected, HandshakeStep::RequestSent, HandshakeStep::ReadySent];
            let listener = [HandshakeStep::Connected, HandshakeStep::RequestReceived, HandshakeStep::ReplySent];
            for step in connector {
                let [a, b] = meet(link, [Some(Faults::seeded(1).die_at(step)), None]).await;
                assert!(matches!(a, Err(Error::Handshake { .. })), "{step:?}: {a:?}");
                // Once it is confirmed, the listener has a connection, which is lost at once.
                assert_eq!(b.is_err(), step != HandshakeStep::ReadySent, "{step:?}: {b:?}");
            }
            for step in listener {
                let [a, b] = meet(link, [None, Some(Faults::seeded(1).die_at(step))]).await;
                assert!(matches!(b, Err(Error::Handshake { .. })), "{step:?}: {b:?}");
                // With the reply in hand, the connector may or may not notice before it is through.
                assert!(a.is_err() || step == HandshakeStep::ReplySent, "{step:?}: {a:?}");
            }
        }
    });
}

#[test]
fn a_refusal_carries_its_reason() {
    runtime().block_on(async {
        let (ctx, pd, cq) = device(default_limits(), None);
        let acceptor = ctx.listen(&address(Link::Tcp)).await.unwrap();
        let config = config();
        let long = "not today, ".repeat(40);
        let connecting = ctx.connect(&pd, &cq, &config, acceptor.local_address(), b"who");
        let accepting = async { acceptor.accept().await?.accept(&pd, &cq, &config, |_| Err(long.clone())).await };
        let (a, b) = tokio::join!(connecting, accepting);
        assert!(a.unwrap_err().to_string().contains("not today, not today"));
        assert!(b.unwrap_err().to_string().contains("refused by this side"));
        assert_eq!(ctx.stats().queue_pairs.load(Ordering::Relaxed), 0);
    });
}

#[test]
fn strangers_are_told_apart() {
    runtime().block_on(async {
        let (ctx, pd, cq) = device(default_limits(), None);
        let acceptor = ctx.listen(&address(Link::Tcp)).await.unwrap();
        let Address::Ip(at) = acceptor.local_address().clone() else { unreachable!() };
        let ours = |rest: &[u8]| [b"rdma", &[VERSION][..], rest].concat();
        let cases = [
            (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "does not speak this protocol"),
            (b"rdma\x63\x01\x00\x00".to_vec(), "version 99"),
            (ours(b"\x01\xff\xff"), "the limit is"),
            (ours(b"\x01\x03\x00abc"), "too short"),
            (ours(b""), "closed the socket"),
        ];
        for (bytes, complaint) in cases {
            let mut client = tokio::net::TcpStream::connect(at).await.unwrap();
            client.write_all(&bytes).await.unwrap();
            client.shutdown().await.unwrap();
            let error = acceptor.accept().await.unwrap().accept(&pd, &cq, &config(), |_| Ok(vec![])).await.unwrap_err();
            assert!(error.to_string().contains(complaint), "{error}");
            let _ = client.read_to_end(&mut Vec::new()).await;
        }
    });
}

#[test]
fn a_silent_client_holds_up_nobody() {
    runtime().block_on(async {
        let (ctx, pd, cq) = device(default_limits(), None);
        let acceptor = ctx.listen(&address(Link::Unix)).await.unwrap();
        let Address::Unix(path) = acceptor.local_address().clone() else { unreachable!() };
        let _silent = tokio::net::UnixStream::connect(&path).await.unwrap();
        let silent = acceptor.accept().await.unwrap();
        let config = config();
        let waiting = silent.accept(&pd, &cq, &config, |_| Ok(vec![]));
        assert!(tokio::time::timeout(Duration::from_millis(20), waiting).await.is_err());
        let connecting = ctx.connect(&pd, &cq, &config, acceptor.local_address(), b"");
        let accepting = async { acceptor.accept().await?.accept(&pd, &cq, &config, |_| Ok(vec![])).await };
        let (a, b) = tokio::join!(connecting, accepting);
        assert!(a.is_ok() && b.is_ok());
        drop(acceptor);
        assert!(!path.exists());
    });
}

#[test]
fn unix_paths_are_taken_over_only_from_the_dead() {
    runtime().block_on(async {
        let (ctx, ..) = device(default_limits(), None);
        let path = unix_path();
        let at = Address::Unix(path.clone());
        let first = ctx.listen(&at).await.unwrap();
        let error = ctx.listen(&at).await.unwrap_err();
        assert!(matches!(&error, Error::Io { cause, .. } if cause.kind() == std::io::ErrorKind::AddrInUse), "{error}");
        drop(first);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let second = ctx.listen(&at).await.unwrap();
        // Somebody else's file at the same path is not ours to remove.
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        drop(second);
        assert!(ctx.listen(&at).await.is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
    });
}

#[test]
fn names_are_resolved_and_refused_connections_are_errors() {
    runtime().block_on(async {
        let (ctx, pd, cq) = device(default_limits(), None);
        let acceptor = ctx.listen(&Address::Name("localhost:0".into())).await.unwrap();
        let Address::Ip(at) = acceptor.local_address().clone() else { unreachable!() };
        let name = Address::Name(format!("localhost:{}", at.port()));
        let config = config();
        let connecting = ctx.connect(&pd, &cq, &config, &name, b"");
        let accepting = async { acceptor.accept().await?.accept(&pd, &cq, &config, |_| Ok(vec![])).await };
        let (a, b) = tokio::join!(connecting, accepting);
        assert!(a.is_ok() && b.is_ok());
        drop(acceptor);
        let error = ctx.connect(&pd, &cq, &config, &Address::Ip(at), b"").await.unwrap_err();
        assert!(matches!(error, Error::Io { operation: "connect", .. }), "{error}");
        let error = ctx.connect(&pd, &cq, &config, &name, &[0; 57]).await.unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
    });
}

#[test]
fn endpoints_meet_in_any_order() {
    runtime().block_on(async {
        for round in 0..6 {
            let link = if round % 2 == 0 { Link::Unix } else { Link::Tcp };
            let (ctx_a, pd_a, cq_a) = device(default_limits(), None);
            let (ctx_b, pd_b, cq_b) = device(default_limits(), None);
            let a = ctx_a.rendezvous(&address(link)).await.unwrap();
            let b = ctx_b.rendezvous(&address(link)).await.unwrap();
            let (for_a, for_b) = (b.endpoint().to_vec(), a.endpoint().to_vec());
            assert!(for_a.len() <= 128);
            let config = config();
            let late = async {
                tokio::time::sleep(Duration::from_millis(5)).await;
                b.connect(&pd_b, &cq_b, &config, &for_b, b"b").await
            };
            let (a, b) = tokio::join!(a.connect(&pd_a, &cq_a, &config, &for_a, b"a"), late);
            let ((qp, at_a), (_peer, at_b)) = (a.unwrap(), b.unwrap());
            assert_eq!((at_a.private_data, at_b.private_data), (b"b".to_vec(), b"a".to_vec()));
            assert!(qp.close_reason().is_none());
        }
    });
}

#[test]
fn a_rendezvous_turns_strangers_away_and_can_be_given_up() {
    runtime().block_on(async {
        let (ctx, pd, cq) = device(default_limits(), None);
        let config = config();
        let mut ends =
            [ctx.rendezvous(&address(Link::Tcp)).await.unwrap(), ctx.rendezvous(&address(Link::Tcp)).await.unwrap()];
        ends.sort_by_key(|end| end.endpoint()[1..9].iter().rev().copied().collect::<Vec<_>>());
        let [listening, calling] = ends;
        let (for_calling, for_listening) = (listening.endpoint().to_vec(), calling.endpoint().to_vec());
        assert!(listening.endpoint().len() == 16);
        let own = calling.endpoint().to_vec();
        let port = u16::from_le_bytes([for_calling[14], for_calling[15]]);
        let stranger = async {
            let at = Address::Ip(([127, 0, 0, 1], port).into());
            let refused = ctx.connect(&pd, &cq, &config, &at, b"").await.unwrap_err();
            assert!(refused.to_string().contains("another endpoint"), "{refused}");
            calling.connect(&pd, &cq, &config, &for_calling, b"").await
        };
        let (a, b) = tokio::join!(listening.connect(&pd, &cq, &config, &for_listening, b""), stranger);
        assert!(a.is_ok() && b.is_ok());

        let lonely = ctx.rendezvous(&address(Link::Tcp)).await.unwrap();
        let mut larger = own.clone();
        larger[1..9].fill(0xff);
        let waiting = lonely.connect(&pd, &cq, &config, &larger, b"");
        assert!(tokio::time::timeout(Duration::from_millis(20), waiting).await.is_err());
        let lonely = ctx.rendezvous(&address(Link::Tcp)).await.unwrap();
        let own = lonely.endpoint().to_vec();
        assert!(matches!(lonely.connect(&pd, &cq, &config, &own, b"").await, Err(Error::Descriptor { .. })));
    });
}

#[test]
fn a_link_is_cut_after_so_many_bytes() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        let faults = Some(Faults::seeded(1).die_after_bytes(2500));
        let (a, b) = Options { link, faults: [faults, None], ..Options::default() }.connect();
        let (source, target) = (Memory::pattern(&a, 1000, 1), Memory::new(&b, 1000));
        for id in 0..5 {
            b.receive(id, target.whole());
        }
        // At once: the link may be cut before a further call.
        let sends: Vec<_> =
            (0..5).map(|id| request(id, WrOp::Send { imm: None, patience: 0 }, source.whole())).collect();
        a.qp.post_send(&sends).unwrap();
        let [done, received] = collect([(&a, 5), (&b, 5)]);
        for side in [&a, &b] {
            assert!(matches!(side.qp.close_reason(), Some(CloseReason::LinkLost(_))));
        }
        assert!(done.iter().any(|c| c.status == WcStatus::RetryExceeded));
        // Two arrived whole; the link may have been reset before they were read.
        let arrived = received.iter().filter(|c| c.status == WcStatus::Success).count();
        assert!(arrived <= 2, "{received:?}");
    }
}

#[test]
fn one_completion_fails_on_demand() {
    let faults = Some(Faults::seeded(1).fail_completion(3, WcStatus::General));
    let (a, b) = Options { faults: [faults, None], ..Options::default() }.connect();
    let write = WrOp::Write { remote: RemoteAddress::default(), imm: None };
    let writes: Vec<_> = (0..5).map(|id| request(id, write, SgeList::new())).collect();
    a.qp.post_send(&writes).unwrap();
    let [done, _] = collect([(&a, 5), (&b, 0)]);
    let (ok, flushed) = (WcStatus::Success, WcStatus::Flushed);
    assert_eq!(statuses(&done), [(0, ok), (1, ok), (2, WcStatus::General), (3, flushed), (4, flushed)]);
}

#[test]
fn delayed_completions_keep_their_order_within_a_queue_pair() {
    let range = Duration::ZERO..Duration::from_millis(3);
    let faults = Some(Faults::seeded(3).delay_completions(range, 0.5).reorder_across_queue_pairs());
    let (a, b) = Options { faults: [faults, None], ..Options::default() }.connect();
    for id in 0..100 {
        a.post(id, WrOp::Write { remote: RemoteAddress::default(), imm: None }, SgeList::new());
    }
    let [done, _] = collect([(&a, 100), (&b, 0)]);
    assert_success(&done, 0..100);
}

#[test]
fn a_delayed_completion_wakes_the_sleeper() {
    let range = Duration::from_millis(500)..Duration::from_millis(501);
    let faults = Some(Faults::seeded(3).delay_completions(range, 1.0));
    let (a, b) = Options { faults: [faults, None], ..Options::default() }.connect();
    a.post(1, WrOp::Write { remote: RemoteAddress::default(), imm: None }, SgeList::new());
    let mut out = Vec::new();
    for _ in 0..10 {
        b.poll(&mut out);
        a.poll(&mut out);
    }
    assert!(out.is_empty());
    a.cq.arm().unwrap();
    wait_until(|| a.cq.read_events().unwrap() == 1);
    assert_success(&collect_one(&a, 1), [1]);
}
