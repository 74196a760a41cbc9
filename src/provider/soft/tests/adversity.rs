//! Peers, and pauses, at their worst: raw bytes on one end of a queue pair whose other end is ours.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::super::qp::{Agreed, Way};
use super::super::wire::{HEADER, Header, Kind, flag};
use super::*;

fn victim(config: QpConfig) -> (Side, UnixStream) {
    let (socket, peer) = UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    peer.set_nonblocking(true).unwrap();
    let (ctx, pd, cq) = device(default_limits(), None);
    let agreed = Agreed { reads_started: 4, reads_served: 4, max_message: 1 << 20 };
    let token = ctx.shared.next_id();
    let way = Way { socket: OwnedFd::from(socket), wire: None, near: None };
    let qp = Qp::establish(&ctx.shared, pd.id, &cq.shared, &config, agreed, way, token).unwrap();
    (Side::new(qp, cq, pd, ctx), peer)
}

fn settle(side: &Side, out: &mut Vec<WorkCompletion>, ms: u64) {
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(ms) {
        side.poll(out);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A key revoked while the answer waits for the socket: zeros may go out, but never the end of the answer.
#[test]
fn a_read_of_revoked_memory_never_succeeds() {
    let (side, mut peer) = victim(config());
    let (big, small) = (Memory::pattern(&side, 300 << 10, 1), Memory::pattern(&side, 1024, 2));
    let (g0, g1) = (big.grant(&side, Access::all()), small.grant(&side, Access::all()));
    let (r0, r1) = (big.remote(&g0, 0), small.remote(&g1, 0));
    for (msn, r, total) in [(0, r0, 300 << 10), (1, r1, 1024)] {
        let h = Header { msn, address: r.address, key: r.rkey, total, ..Header::new(Kind::ReadRequest) };
        peer.write_all(&h.encode()).unwrap();
    }
    let mut out = Vec::new();
    settle(&side, &mut out, 50);
    assert!(side.qp.shared().writes_wait());
    g1.revoke();
    let mut bytes = Vec::new();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        side.poll(&mut out);
        let mut buf = vec![0; 1 << 20];
        if let Ok(n) = peer.read(&mut buf) {
            bytes.extend_from_slice(&buf[..n]);
        }
    }
    let (mut at, mut ended) = (0, false);
    while let Some(raw) = bytes[at.min(bytes.len())..].first_chunk::<HEADER>() {
        let h = Header::parse(raw).unwrap();
        ended |= h.kind == Kind::ReadResponse && h.msn == 1 && h.has(flag::LAST);
        at += HEADER + h.length as usize;
    }
    assert!(!ended, "the read of revoked memory completed");
}

/// A peer that answers later requests and then asks for an earlier one again lies.
#[test]
fn an_rnr_nak_for_what_was_answered_ends_the_link() {
    let (side, mut peer) = victim(config());
    let (source, memory) = (Memory::new(&side, 8), Memory::new(&side, 8));
    let mut out = Vec::new();
    side.send(0, source.whole());
    for id in 1..=5 {
        side.post(id, WrOp::Read { remote: RemoteAddress::default() }, memory.whole());
    }
    let answer = |msn| {
        let data = Header { msn, length: 8, total: 8, ..Header::new(Kind::ReadResponse) };
        let last = Header { msn, address: 8, total: 8, flags: flag::LAST, ..Header::new(Kind::ReadResponse) };
        [&data.encode()[..], &[7; 8], &last.encode()].concat()
    };
    for msn in 1..=5 {
        peer.write_all(&answer(msn)).unwrap();
        settle(&side, &mut out, 20);
    }
    peer.write_all(&Header { limit: 1, ..Header::new(Kind::RnrNak) }.encode()).unwrap();
    settle(&side, &mut out, 20);
    peer.write_all(&Header { limit: 1, ack: 5, ..Header::new(Kind::Ack) }.encode()).unwrap();
    settle(&side, &mut out, 20);
    assert!(side.qp.close_reason().is_some());
}

/// Writing fails while reading says nothing: the link is broken all the same.
#[test]
fn a_peer_that_stops_listening_is_noticed() {
    let (side, peer) = victim(config());
    peer.shutdown(std::net::Shutdown::Read).unwrap();
    let memory = Memory::new(&side, 8);
    side.send(0, memory.whole());
    let mut out = Vec::new();
    settle(&side, &mut out, 500);
    assert!(side.qp.close_reason().is_some());
}

/// What the socket's buffer takes is no sign of life.
#[test]
fn a_dead_peer_is_found_though_this_side_keeps_posting() {
    let (side, _peer) = victim(QpConfig { ack_timeout: Duration::from_millis(50), retry_count: 0, ..config() });
    let mut out = Vec::new();
    for id in 0..50 {
        let _ = side.qp.post_send(&[request(
            id,
            WrOp::Write { remote: RemoteAddress::default(), imm: None },
            SgeList::new(),
        )]);
        settle(&side, &mut out, 10);
    }
    assert!(side.qp.close_reason().is_some());
}

/// The answer came in time; it was this side that did not read it.
#[test]
fn a_pause_of_this_side_is_not_the_peers_fault() {
    let (side, mut peer) = victim(QpConfig { ack_timeout: Duration::from_millis(50), retry_count: 0, ..config() });
    let memory = Memory::new(&side, 8);
    let mut out = Vec::new();
    let hold = side.qp.shared().mute();
    side.send(0, memory.whole());
    peer.write_all(&Header { ack: 1, ..Header::new(Kind::Ack) }.encode()).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(hold);
    settle(&side, &mut out, 100);
    assert!(side.qp.close_reason().is_none());
}

/// A frame that carried an acknowledgement was forgotten when its request was put off; the peer still has to hear it.
#[test]
fn an_acknowledgement_survives_a_rewind() {
    let (side, mut peer) = victim(QpConfig { send_depth: 64, ..config() });
    let memory = Memory::new(&side, 60_000);
    let mut out = Vec::new();
    side.receive(100, memory.whole());
    let batch: Vec<_> = (0..8).map(|id| request(id, WrOp::Send { imm: None, patience: 0 }, memory.whole())).collect();
    side.qp.post_send(&batch).unwrap();
    settle(&side, &mut out, 10);
    assert!(side.qp.shared().writes_wait());
    for id in 8..24 {
        side.send(id, memory.whole());
    }
    let whole = flag::FIRST | flag::LAST;
    peer.write_all(&Header { flags: whole, ..Header::new(Kind::Send) }.encode()).unwrap();
    settle(&side, &mut out, 10);
    let mut bytes = Vec::new();
    let read = |peer: &mut UnixStream, bytes: &mut Vec<u8>| {
        let mut buf = vec![0; 1 << 20];
        while let Ok(n @ 1..) = peer.read(&mut buf) {
            bytes.extend_from_slice(&buf[..n]);
        }
    };
    read(&mut peer, &mut bytes);
    settle(&side, &mut out, 10);
    peer.write_all(&Header::new(Kind::RnrNak).encode()).unwrap();
    settle(&side, &mut out, 10);
    for _ in 0..50 {
        read(&mut peer, &mut bytes);
        settle(&side, &mut out, 4);
    }
    let (mut at, mut ack) = (0, 0);
    while let Some(raw) = bytes[at.min(bytes.len())..].first_chunk::<HEADER>() {
        let h = Header::parse(raw).unwrap();
        ack = h.ack;
        at += HEADER + h.length as usize;
    }
    assert_eq!(ack, 1);
}

/// Whoever fails a queue pair second may only go on when the first is through with the buffers.
#[test]
fn failing_waits_for_somebody_elses_failing() {
    let mut worst = 128;
    for _ in 0..20 {
        let (side, mut peer) = victim(config());
        let memory = Memory::new(&side, 1 << 18);
        let batch: Vec<_> =
            (0..128).map(|id| request(id, WrOp::Send { imm: None, patience: 0 }, memory.whole())).collect();
        side.qp.post_send(&batch).unwrap();
        peer.write_all(&[0xff; HEADER]).unwrap();
        // The engine finds the nonsense.
        while side.qp.close_reason().is_none() {
            std::hint::spin_loop();
        }
        assert!(side.qp.fail(crate::error::CloseReason::Local));
        let mut out = Vec::new();
        while side.poll(&mut out) > 0 {}
        worst = worst.min(out.len());
    }
    assert_eq!(worst, 128);
}
