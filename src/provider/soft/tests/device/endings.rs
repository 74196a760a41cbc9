//! Ends in the middle of a transfer: revoked keys, closed and dropped queue pairs, lost links.

use super::*;
use crate::error::CloseReason;

const LEN: usize = 4 << 20;

/// Longer than it takes the copies of all bounces of a queue pair to be carried out.
const LATE: Duration = Duration::from_millis(10);

#[test]
fn a_revoked_key_is_never_touched_again() {
    for road in ROADS {
        let mut caught = [0; 2];
        for round in 0..16 {
            let (a, b, devices) = pair_with_devices(road);
            let exposed = Memory::on(&b, &devices[1], LEN);
            exposed.set(0, &pattern(LEN, 3));
            let grant = exposed.grant(&b, Access::all());
            let local = Memory::pattern(&a, LEN, 1);
            let remote = exposed.remote(&grant, 0);
            let reads = round % 2 == 1;
            let op = if reads { WrOp::Read { remote } } else { WrOp::Write { remote, imm: None } };
            let mut out = [Vec::new(), Vec::new()];
            let frozen = std::thread::scope(|scope| {
                a.post(1, op, local.whole());
                let revoker = scope.spawn(|| {
                    std::thread::sleep(Duration::from_micros(300 * round));
                    grant.revoke();
                    // What is read from here on must not arrive there, and what arrived must stay.
                    let frozen = exposed.all();
                    if reads {
                        exposed.set(0, &vec![0xaa; LEN]);
                    }
                    frozen
                });
                wait_until(|| {
                    a.poll(&mut out[0]);
                    b.poll(&mut out[1]);
                    !out[0].is_empty() && revoker.is_finished()
                });
                revoker.join().unwrap()
            });
            std::thread::sleep(LATE);
            if !reads {
                assert!(exposed.all() == frozen, "written after it was revoked");
            }
            let status = out[0][0].status;
            if status != WcStatus::Success {
                assert_eq!(status, WcStatus::RemoteAccess);
                assert_eq!(b.qp.close_reason(), Some(CloseReason::Failed(WcStatus::RemoteAccess)));
                caught[usize::from(reads)] += 1;
            }
            if reads {
                let aa = local.all().iter().filter(|byte| **byte == 0xaa).count();
                let usual = frozen.iter().chain(&pattern(LEN, 1)).filter(|byte| **byte == 0xaa).count();
                assert!(aa <= usual, "read after it was revoked");
            }
            all_given_back(&devices);
        }
        // Between devices of one process a read is over too soon.
        let expected = if road == Road::Near { &caught[..1] } else { &caught[..] };
        assert!(expected.iter().all(|count| *count > 0), "{caught:?}");
    }
}

/// Starts transfers of all kinds in both directions, and polls a few times.
fn busy(a: &Side, b: &Side, devices: &[Arc<Double>; 2], polls: usize) -> ([Vec<Memory>; 2], Vec<Grant>) {
    let sides = [a, b];
    let memories = [0, 1].map(|at| [0; 3].map(|_| Memory::on(sides[at], &devices[at], LEN)));
    for (at, side) in sides.into_iter().enumerate() {
        memories[at][0].set(0, &pattern(LEN, at as u8));
        side.receive(100, memories[at][1].whole());
    }
    // They live as long as the test: revoking is not what is tested here.
    let mut grants = Vec::new();
    for (at, side) in sides.into_iter().enumerate() {
        let theirs = &memories[1 - at][2];
        let grant = theirs.grant(sides[1 - at], Access::all());
        let remote = theirs.remote(&grant, 0);
        side.send(1, memories[at][0].whole());
        side.post(2, WrOp::Write { remote, imm: None }, memories[at][0].whole());
        side.post(3, WrOp::Read { remote }, memories[at][2].whole());
        side.memory.lock().push(Arc::default());
        grants.push(grant);
    }
    let mut out = Vec::new();
    for _ in 0..polls {
        a.poll(&mut out);
        b.poll(&mut out);
    }
    (memories.map(Vec::from), grants)
}

#[test]
fn nothing_is_touched_once_a_queue_pair_has_failed() {
    for road in ROADS {
        for polls in 0..12 {
            let (a, b, devices) = pair_with_devices(road);
            let (memories, _grants) = busy(&a, &b, &devices, polls);
            std::thread::scope(|scope| {
                // As much may happen at the other end at the same time.
                scope.spawn(|| (0..polls).for_each(|_| _ = b.poll(&mut Vec::new())));
                scope.spawn(|| (0..polls).for_each(|_| _ = a.poll(&mut Vec::new())));
                a.qp.fail(CloseReason::Local);
            });
            assert_eq!((devices[0].bounces(), devices[0].under_way()), (0, 0));
            let frozen: Vec<_> = memories[0].iter().map(Memory::all).collect();
            std::thread::sleep(LATE);
            assert!(memories[0].iter().map(Memory::all).eq(frozen));
            wait_until(|| {
                b.poll(&mut Vec::new());
                b.qp.close_reason().is_some()
            });
            assert_eq!(b.qp.close_reason(), Some(CloseReason::Peer));
            all_given_back(&devices);
        }
    }
}

#[test]
fn dropped_queue_pairs_and_lost_links_give_everything_back() {
    for road in ROADS {
        for polls in 0..8 {
            let (a, b, devices) = pair_with_devices(road);
            let _kept = busy(&a, &b, &devices, polls);
            if polls % 2 == 0 {
                drop(b.qp);
                wait_until(|| {
                    a.poll(&mut Vec::new());
                    a.qp.close_reason() == Some(CloseReason::Peer)
                });
            } else {
                rustix::net::shutdown(&b.qp.shared().socket, rustix::net::Shutdown::Both).unwrap();
                wait_until(|| {
                    a.poll(&mut Vec::new());
                    b.poll(&mut Vec::new());
                    [&a, &b].iter().all(|side| matches!(side.qp.close_reason(), Some(CloseReason::LinkLost(_))))
                });
            }
            all_given_back(&devices);
        }
    }
}

#[test]
fn a_queue_pair_whose_peer_does_not_read_holds_few_bounces() {
    let (a, b, devices) = pair_with_devices(UNIX);
    let source = Memory::on(&a, &devices[0], LEN);
    let mute = b.qp.shared().mute();
    (0..20).for_each(|id| a.post(id, WrOp::Write { remote: RemoteAddress::default(), imm: None }, source.whole()));
    std::thread::sleep(LATE);
    assert!((1..=4).contains(&devices[0].bounces()), "{}", devices[0].bounces());
    a.qp.fail(CloseReason::Local);
    assert_eq!((devices[0].bounces(), devices[0].under_way()), (0, 0));
    drop(mute);
}

#[test]
fn no_copy_is_under_way_once_a_peer_broke_the_rules() {
    use super::super::super::wire::{HEADER, Header, Kind, flag};
    use std::io::Write;
    let (side, mut peer) = super::super::hostile::victim(8);
    let device = Double::new(4 << 20, Duration::from_millis(5));
    // Nothing of the next frame would fit in behind it, so its copy begins at once.
    let len = FRAGMENT - 1000;
    let target = Memory::on(&side, &device, FRAGMENT);
    side.receive(1, target.whole());
    let header = Header { flags: flag::FIRST, length: len as u32, total: FRAGMENT as u32, ..Header::new(Kind::Send) };
    let bytes = [&header.encode()[..], &vec![1; len], &[0xff; HEADER]].concat();
    let writing = std::thread::spawn(move || peer.write_all(&bytes).map(|()| peer));
    let mut out = Vec::new();
    wait_until(|| {
        side.poll(&mut out);
        side.qp.close_reason().is_some()
    });
    assert_eq!((device.bounces(), device.under_way()), (0, 0));
    assert!(matches!(side.qp.close_reason(), Some(CloseReason::Protocol(_))));
    assert_eq!((device.copies(), target.get(0, len + 1).last()), (1, Some(&0)));
    let _ = writing.join();
}

#[test]
fn no_copy_is_under_way_once_a_queue_pair_has_failed() {
    let (a, _b, _) = pair_with_devices(UNIX);
    let device = Double::new(LEN, Duration::from_millis(100));
    let source = Memory::on(&a, &device, LEN / 2);
    a.send(1, source.whole());
    // The socket is full by now, and the device at work for what comes next.
    assert!(device.under_way() > 0);
    a.qp.fail(CloseReason::Local);
    assert_eq!((device.bounces(), device.under_way()), (0, 0));
}

#[test]
fn revoking_does_not_wait_for_a_peer_that_does_not_read() {
    for road in APART {
        let (a, b, devices) = pair_with_devices(road);
        let exposed = Memory::on(&b, &devices[1], 4 * LEN);
        let grant = Arc::new(exposed.grant(&b, Access::all()));
        let local = Memory::new(&a, 4 * LEN);
        a.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, local.whole());
        let mute = a.qp.shared().mute();
        wait_until(|| {
            b.poll(&mut Vec::new());
            b.qp.shared().writes_wait() && devices[1].bounces() > 0
        });
        let revoker = std::thread::spawn({
            let grant = Arc::clone(&grant);
            move || grant.revoke()
        });
        // Nobody drives meanwhile but the engine, which finds the socket full.
        wait_until(|| revoker.is_finished());
        drop(mute);
        let [done, _] = collect([(&a, 1), (&b, 0)]);
        assert_eq!(statuses(&done), [(1, WcStatus::RemoteAccess)]);
    }
}
