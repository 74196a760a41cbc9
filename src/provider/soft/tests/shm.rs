//! Links through shared memory: which connections get one, and peers that write what they like into it.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;

use super::super::LinkPolicy::{Auto, SharedMemory, Sockets};
use super::super::qp::{Agreed, Way};
use super::super::shm::Wire;
use super::super::wire::{HEADER, Header, Kind, flag};
use super::*;
use crate::error::{CloseReason, Error};
use crate::memory::dma::Gather;
use crate::memory::{ExposedRegion, ProtectionDomain};
use crate::provider;

/// Connects two devices with these policies.
fn meet(at: &Address, policies: [LinkPolicy; 2]) -> [Result<Link, Error>; 2] {
    let make = |policy| {
        let ctx = Context::open(default_limits(), None, policy).unwrap();
        let (pd, cq) = (ctx.alloc_pd().unwrap(), ctx.create_cq(1 << 10).unwrap());
        (ctx, pd, cq)
    };
    let ((ctx_a, pd_a, cq_a), (ctx_b, pd_b, cq_b)) = (make(policies[0]), make(policies[1]));
    runtime().block_on(async {
        let acceptor = ctx_b.listen(at).await.unwrap();
        let config = config();
        let connecting = ctx_a.connect(&pd_a, &cq_a, &config, acceptor.local_address(), b"");
        let accepting = async { acceptor.accept().await?.accept(&pd_b, &cq_b, &config, |_| Ok(vec![])).await };
        let (a, b) = tokio::time::timeout(PATIENCE, async { tokio::join!(connecting, accepting) }).await.unwrap();
        [a, b].map(|end| end.map(|(_, info)| info.link))
    })
}

#[test]
fn both_ends_decide_on_the_link() {
    for socket in [Link::Tcp, Link::Unix] {
        for (policies, link) in [
            ([Auto, Auto], Link::SharedMemory),
            ([SharedMemory, Auto], Link::SharedMemory),
            ([Auto, SharedMemory], Link::SharedMemory),
            ([Sockets, Auto], socket),
            ([Auto, Sockets], socket),
            ([Sockets, Sockets], socket),
        ] {
            let links = meet(&address(socket), policies).map(Result::unwrap);
            assert_eq!(links, [link; 2], "{socket}: {policies:?}");
        }
        for (policies, insisting) in [([SharedMemory, Sockets], 0), ([Sockets, SharedMemory], 1)] {
            let ends = meet(&address(socket), policies).map(|end| end.unwrap_err().to_string());
            let (one, other) = (&ends[insisting], &ends[1 - insisting]);
            assert!(one.contains("shared memory is wanted, but the other end wants sockets only"), "{ends:?}");
            assert!(other.contains("refused: shared memory is wanted, but this end wants sockets only"), "{ends:?}");
        }
    }
}

/// A thread of another user connects; the results of both ends.
fn meet_another_user(socket: Link, user: u32, policies: [LinkPolicy; 2]) -> [Result<Link, String>; 2] {
    let (told, hear) = std::sync::mpsc::channel();
    let connecting = std::thread::spawn(move || {
        rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(user)).unwrap();
        let ctx = Context::open(default_limits(), None, policies[0]).unwrap();
        let (pd, cq) = (ctx.alloc_pd().unwrap(), ctx.create_cq(1 << 10).unwrap());
        let at: Address = hear.recv().unwrap();
        runtime().block_on(async {
            let connected = tokio::time::timeout(PATIENCE, ctx.connect(&pd, &cq, &config(), &at, b"")).await.unwrap();
            connected.map(|(_, info)| info.link).map_err(|error| error.to_string())
        })
    });
    let ctx = Context::open(default_limits(), None, policies[1]).unwrap();
    let (pd, cq) = (ctx.alloc_pd().unwrap(), ctx.create_cq(1 << 10).unwrap());
    let accepted = runtime().block_on(async {
        let at = address(socket);
        let acceptor = ctx.listen(&at).await.unwrap();
        if let Address::Unix(path) = &at {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        }
        told.send(acceptor.local_address().clone()).unwrap();
        let incoming = acceptor.accept().await.unwrap();
        let accepted = incoming.accept(&pd, &cq, &config(), |_| Ok(vec![])).await;
        accepted.map(|(_, info)| info.link).map_err(|error| error.to_string())
    });
    [connecting.join().unwrap(), accepted]
}

/// Neither end of a connection that one of them does not want believes that it has one, and both know why.
#[test]
fn another_user_gets_a_socket() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can connect as another user");
        return;
    }
    for socket in [Link::Tcp, Link::Unix] {
        for (user, why) in [
            (1000, "shared memory is wanted, but the ends belong to different users"),
            (
                65534,
                "shared memory is wanted, but the user id 65534 stands for any user that the namespace does not know",
            ),
        ] {
            assert_eq!(meet_another_user(socket, user, [Auto, Auto]), [Ok(socket), Ok(socket)]);
            // As far as the connecting end knows beforehand, nobody hears of it.
            let [a, b] = meet_another_user(socket, user, [SharedMemory, Auto]);
            assert!(a.as_ref().is_err_and(|error| error.contains(why)) && b.is_err(), "{a:?}, {b:?}");
            let ends = meet_another_user(socket, user, [Auto, SharedMemory]);
            assert!(ends.iter().all(|end| end.as_ref().is_err_and(|error| error.contains(why))), "{ends:?}");
        }
    }
}

/// Through its bell, and not because the engine looks now and then.
#[test]
fn a_message_wakes_who_sleeps_without_the_engine() {
    let (a, b) = pair(Link::SharedMemory);
    let (source, target) = (Memory::new(&a, 8), Memory::new(&b, 8));
    let (mut out, mut ignored) = (Vec::new(), Vec::new());
    for round in 0..100 {
        b.receive(round, target.whole());
        b.cq.arm().unwrap();
        b.poll(&mut out);
        a.send(round, source.whole());
        assert!(super::engine::readable(&b.cq, PATIENCE));
        b.cq.acknowledge(b.cq.read_events().unwrap());
        while out.len() as u64 <= round {
            b.poll(&mut out);
        }
        while ignored.len() as u64 <= round {
            b.poll(&mut out);
            a.poll(&mut ignored);
        }
    }
    let served = b.ctx.stats().engine_drives.load(Ordering::Relaxed);
    assert!(served < 10, "the engine served {served} of 100 messages");
}

/// A queue pair whose peer is the bare other end of its link.
struct Attacker {
    wire: Wire,
    socket: UnixStream,
}

fn victim(depth: u32) -> (Side, Attacker) {
    let (socket, theirs) = UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    let (ctx, pd, cq) = device_for(Link::SharedMemory, default_limits(), None);
    let [ours, wire] = Wire::pair();
    let agreed = Agreed { reads_started: 4, reads_served: 4, max_message: 1 << 20 };
    let config = QpConfig { receive_depth: depth, ..config() };
    let way = Way { socket: OwnedFd::from(socket), wire: Some(ours), near: None };
    let qp = Qp::establish(&ctx.shared, pd.id, &cq.shared, &config, agreed, way, ctx.shared.next_id()).unwrap();
    (Side::new(qp, cq, pd, ctx), Attacker { wire, socket: theirs })
}

impl Attacker {
    fn write(&self, bytes: &[u8]) -> usize {
        let mut gather = Gather::new();
        gather.push_bytes(bytes);
        self.wire.send(&gather).unwrap_or(0)
    }
}

fn random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// Six requests and receives that must all be told of in the end, and memory that the peer may use.
fn busy(side: &Side) -> ([Memory; 2], Memory, Grant) {
    let [source, target, exposed] = [(); 3].map(|()| Memory::new(side, 4096));
    let grant = exposed.grant(side, Access::all());
    (0..4).for_each(|id| side.receive(id, target.whole()));
    // At once: the first one may find that the link is broken.
    let read = WrOp::Read { remote: RemoteAddress::default() };
    let requests =
        [request(9, WrOp::Send { imm: None, patience: 0 }, source.whole()), request(10, read, target.whole())];
    side.qp.post_send(&requests).unwrap();
    ([source, target], exposed, grant)
}

#[track_caller]
fn ends(side: &Side) {
    let mut out = Vec::new();
    // Whoever ends it says so first, and may be the engine.
    wait_until(|| {
        side.poll(&mut out);
        side.qp.close_reason().is_some() && out.len() >= 6
    });
    side.poll(&mut out);
    assert_eq!(out.len(), 6, "{out:?}");
}

#[test]
fn positions_that_make_no_sense_close_the_queue_pair() {
    // The peer's tail; the other direction's head and tail are this side's own, and a wrong one is not believed.
    for value in [129 << 10, u64::MAX, 1 << 63] {
        let (side, attacker) = victim(4);
        let _busy = busy(&side);
        attacker.wire.scribble(1024, value);
        ends(&side);
        assert!(matches!(side.qp.close_reason(), Some(CloseReason::Protocol(_))), "{:?}", side.qp.close_reason());
    }
    let (side, attacker) = victim(4);
    attacker.wire.scribble(128, 1 << 40);
    let _busy = busy(&side);
    ends(&side);
    assert!(matches!(side.qp.close_reason(), Some(CloseReason::LinkLost(_))), "{:?}", side.qp.close_reason());
}

#[test]
fn random_frames_never_panic() {
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    for round in 0..300 {
        let (side, attacker) = victim(4);
        let (_memory, exposed, grant) = busy(&side);
        for _ in 0..20 {
            let mut raw = [0; HEADER];
            raw.fill_with(|| random(&mut seed) as u8);
            if round % 3 > 0 {
                let mut small = |limit| (random(&mut seed) % limit) as u32;
                raw = Header {
                    kind: Kind::Send,
                    flags: small(256) as u8 & flag::ALL,
                    status: small(16) as u16,
                    length: small(64),
                    msn: small(4),
                    ack: small(3),
                    limit: small(3),
                    total: small(64),
                    imm: 0,
                    address: exposed.segment.address(),
                    key: grant.rkey(),
                }
                .encode();
                raw[0] = (random(&mut seed) % 13) as u8;
            }
            attacker.write(&raw);
            let payload: Vec<u8> = (0..random(&mut seed) % 64).map(|byte| byte as u8).collect();
            attacker.write(&payload);
        }
        drop(attacker);
        ends(&side);
    }
}

/// A peer that was stopped in the middle of a copy: who takes the region back waits for a bounded time, and the link lives on.
#[test]
fn taking_a_region_back_does_not_wait_for_a_peer_that_stays() {
    let (side, attacker) = victim(4);
    let domain = ProtectionDomain::new(
        provider::Pd::Soft(side.pd.clone()),
        default_limits(),
        crate::meters::Meters::new("soft0"),
        Arc::new(provider::Context::Soft(side.ctx.clone())),
    );
    let _busy = busy(&side);
    let mut out = Vec::new();
    // Uses the key once; then the region comes through the socket, with the slot that is open for it.
    let mut lent = |round: u32, region: &ExposedRegion| {
        let (address, key) = (region.remote().address(), region.remote().rkey());
        let request = Header { address, key, total: 8, msn: round, ..Header::new(Kind::ReadRequest) };
        attacker.write(&request.encode());
        let mut message = [0; 64];
        wait_until(|| {
            side.poll(&mut out);
            (&attacker.socket).read(&mut message).is_ok_and(|read| read == 64)
        });
        assert_eq!(message[12..16], key.to_le_bytes());
        // Whoever drives, the engine perhaps, has answered by the time that it lets go. A key that is taken back earlier is refused.
        drop(side.qp.shared().mute());
        u32::from_le_bytes(message[4..8].try_into().unwrap())
    };
    attacker.socket.set_nonblocking(true).unwrap();
    let expose = || domain.alloc(4096).unwrap().expose(Access::all()).unwrap();
    let reclaim = |region: ExposedRegion| {
        let mut reclaim = std::pin::pin!(region.reclaim());
        let reclaimed = reclaim.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
        let std::task::Poll::Ready(buffer) = reclaimed else { panic!("it waits") };
        buffer
    };
    let region = expose();
    region.copy_from(0, &[7; 4096]).unwrap();
    assert_eq!(lent(0, &region), 0);
    // Slot 0 of the end that writes the first ring: open under the first number, and busy.
    attacker.wire.scribble(4096, 1 << 32 | 1);
    let start = Instant::now();
    assert_eq!(reclaim(region)[..], [7; 4096]);
    assert!(start.elapsed() >= Duration::from_millis(50) && start.elapsed() < Duration::from_secs(10));
    // It may still find out that it was given up; other slots come and go.
    for round in 1..4 {
        let region = expose();
        assert_eq!(lent(round, &region), 1);
        reclaim(region);
    }
    assert_eq!(side.qp.close_reason(), None);
    drop(attacker);
    ends(&side);
}

/// A peer that writes random words to all that it has mapped, while this side sends, receives and is read from.
#[test]
fn a_scribbling_peer_ends_its_connection_and_nothing_else() {
    for seed in 1..=40u64 {
        let (side, attacker) = victim(4);
        let _busy = busy(&side);
        let stop = Arc::new(AtomicBool::new(false));
        let scribbling = std::thread::spawn({
            let stop = Arc::clone(&stop);
            move || {
                let mut seed = seed;
                while !stop.load(Ordering::Relaxed) {
                    let (draw, word) = (random(&mut seed), random(&mut seed));
                    // Often the positions, and often by values that are nearly right.
                    let at = if draw % 2 == 0 { draw as usize >> 8 } else { (draw as usize >> 8) % 2048 };
                    attacker.wire.scribble(at, if word % 3 == 0 { word } else { word % (300 << 10) });
                }
                attacker
            }
        });
        let mut out = Vec::new();
        let start = Instant::now();
        while side.qp.close_reason().is_none() && start.elapsed() < Duration::from_millis(50) {
            side.poll(&mut out);
        }
        stop.store(true, Ordering::Relaxed);
        drop(scribbling.join().unwrap());
        wait_until(|| {
            side.poll(&mut out);
            side.qp.close_reason().is_some()
        });
        side.poll(&mut out);
        assert_eq!(out.len(), 6, "{out:?}");
        assert!(out.iter().all(|done| done.status != WcStatus::Success || done.wr_id < 10), "{out:?}");
    }
}
