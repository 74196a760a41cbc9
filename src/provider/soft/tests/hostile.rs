//! A peer that sends what it likes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;

use super::super::qp::{Agreed, Way};
use super::super::wire::{DEVICE_FRAGMENT, HEADER, Header, Kind, flag};
use super::*;
use crate::error::CloseReason;

/// A queue pair whose peer is a bare socket.
pub(super) fn victim(depth: u32) -> (Side, TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    socket.set_nonblocking(true).unwrap();
    peer.set_nodelay(true).unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    let (ctx, pd, cq) = device(default_limits(), None);
    let agreed = Agreed { reads_started: 4, reads_served: 4, max_message: 1 << 20 };
    let config = QpConfig { receive_depth: depth, ..config() };
    let token = ctx.shared.next_id();
    let way = Way { socket: OwnedFd::from(socket), wire: None, near: None };
    let qp = Qp::establish(&ctx.shared, pd.id, &cq.shared, &config, agreed, way, token).unwrap();
    (Side::new(qp, cq, pd, ctx), peer)
}

/// The victim must close with Protocol, and flush what it had.
#[track_caller]
fn refuses(side: &Side) {
    let mut out = Vec::new();
    wait_until(|| {
        side.poll(&mut out);
        side.qp.close_reason().is_some()
    });
    side.poll(&mut out);
    let reason = side.qp.close_reason();
    assert!(matches!(reason, Some(CloseReason::Protocol(_))), "{reason:?}");
}

fn send(first: u8, length: u32, total: u32, msn: u32) -> Header {
    Header { flags: first, length, total, msn, ..Header::new(Kind::Send) }
}

#[test]
fn frames_that_break_the_rules_close_the_queue_pair() {
    const FIRST: u8 = flag::FIRST;
    const WHOLE: u8 = flag::FIRST | flag::LAST;
    let ack = Header::new(Kind::Ack);
    let read = |msn| Header { msn, ..Header::new(Kind::ReadRequest) };
    let cases: Vec<(&str, Vec<Header>)> = vec![
        ("a later request", vec![send(WHOLE, 0, 0, 1)]),
        ("an old request", vec![send(WHOLE, 0, 0, u32::MAX)]),
        ("no beginning", vec![Header { address: 8, ..send(flag::LAST, 0, 8, 0) }]),
        ("too long", vec![send(FIRST, 0, 1 << 21, 0)]),
        ("longer than anything", vec![send(FIRST, 0, u32::MAX, 0)]),
        ("a fragment too long", vec![send(FIRST, DEVICE_FRAGMENT as u32 + 1, 1 << 20, 0)]),
        ("a beginning in a message", vec![send(FIRST, HEADER as u32, 80, 0), ack, send(FIRST, 1, 8, 0)]),
        ("a read in a message", vec![send(FIRST, HEADER as u32, 80, 0), ack, read(0)]),
        ("acknowledges the future", vec![Header { ack: 1, ..ack }]),
        ("acknowledges the past", vec![Header { ack: u32::MAX, ..ack }]),
        ("answers no read", vec![Header { flags: flag::LAST, ..Header::new(Kind::ReadResponse) }]),
        ("answers no atomic", vec![Header::new(Kind::AtomicResponse)]),
        ("refuses nothing", vec![Header { status: 10, ..Header::new(Kind::Nak) }]),
        ("is not ready for nothing", vec![Header::new(Kind::RnrNak)]),
        ("an empty fragment", vec![send(FIRST, 0, 8, 0)]),
        ("a read too long", vec![Header { total: 1 << 21, ..read(0) }]),
    ];
    for (name, frames) in cases {
        let (side, mut peer) = victim(8);
        let memory = Memory::new(&side, 1 << 20);
        side.receive(1, memory.whole());
        for frame in &frames {
            peer.write_all(&frame.encode()).unwrap();
        }
        println!("{name}");
        refuses(&side);
    }
}

#[test]
fn more_reads_than_agreed_close_the_queue_pair() {
    let (side, mut peer) = victim(8);
    let exposed = Memory::new(&side, 1 << 20);
    let grant = exposed.grant(&side, Access::all());
    let remote = exposed.remote(&grant, 0);
    // Nobody reads the answers, so they pile up.
    let frames: Vec<u8> = (0..64)
        .flat_map(|msn| {
            let (address, key) = (remote.address, remote.rkey);
            Header { msn, address, key, total: 1 << 20, ..Header::new(Kind::ReadRequest) }.encode()
        })
        .collect();
    peer.write_all(&frames).unwrap();
    refuses(&side);
}

#[test]
fn a_peer_cannot_acknowledge_what_waits_in_a_full_socket() {
    let (side, mut peer) = victim(8);
    let memory = Memory::new(&side, 1 << 20);
    for id in 0..100 {
        side.post(id, WrOp::Write { remote: RemoteAddress { address: 0, rkey: 0 }, imm: None }, memory.whole());
    }
    peer.write_all(&Header { ack: 100, ..Header::new(Kind::Ack) }.encode()).unwrap();
    refuses(&side);
}

#[test]
fn random_bytes_never_panic() {
    let seed = Arc::new(AtomicU32::new(1));
    let random = || {
        let mut x = seed.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        seed.store(x, Ordering::Relaxed);
        x
    };
    for round in 0..300 {
        let (side, mut peer) = victim(4);
        let (memory, source) = (Memory::new(&side, 4096), Memory::new(&side, 4096));
        let grant = memory.grant(&side, Access::all());
        (0..4).for_each(|id| side.receive(id, memory.whole()));
        side.send(9, source.whole());
        side.post(10, WrOp::Read { remote: RemoteAddress::default() }, memory.whole());
        let mut bytes = Vec::new();
        for _ in 0..20 {
            let mut raw = [0; HEADER];
            raw.fill_with(|| random() as u8);
            if round % 3 > 0 {
                // Nearly right: known types, small numbers.
                raw = Header {
                    kind: Kind::Send,
                    flags: random() as u8 & flag::ALL,
                    status: random() as u16 % 16,
                    length: random() % 64,
                    msn: random() % 4,
                    ack: random() % 3,
                    limit: random() % 3,
                    total: random() % 64,
                    imm: 0,
                    address: if round % 2 == 0 { memory.segment.address() } else { u64::from(random() % 64) },
                    key: grant.rkey(),
                }
                .encode();
                raw[0] = (random() % 13) as u8;
            }
            bytes.extend_from_slice(&raw);
            bytes.extend((0..random() % 64).map(|_| random() as u8));
        }
        let cut = random() as usize % bytes.len();
        peer.write_all(&bytes[..cut]).unwrap();
        drop(peer);
        let mut out = Vec::new();
        wait_until(|| {
            side.poll(&mut out);
            side.qp.close_reason().is_some() && out.len() >= 6
        });
        side.poll(&mut out);
        assert_eq!(out.len(), 6, "{out:?}");
    }
}

#[test]
fn a_closing_victim_still_says_goodbye() {
    let (side, mut peer) = victim(8);
    peer.write_all(&[0xff; HEADER]).unwrap();
    refuses(&side);
    let mut rest = Vec::new();
    peer.read_to_end(&mut rest).unwrap();
    let last = rest.last_chunk::<HEADER>().unwrap();
    assert_eq!(Header::parse(last).unwrap().kind, Kind::Bye);
}
