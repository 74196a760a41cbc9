//! Both ends in one process: bytes go from device to device, and not through the host.

use super::*;
use crate::error::CloseReason;

/// More than one copy takes.
const LEN: usize = (9 << 20) + 1001;

/// A Send, a Write and a Read, and what they made of the bytes.
fn all_three(a: &Side, b: &Side, devices: &[Arc<Double>; 2], [at_a, at_b]: [bool; 2]) {
    let source = Memory::either(a, &devices[0], at_a, LEN);
    source.set(0, &pattern(LEN, 1));
    let [target, exposed] = [0; 2].map(|_| Memory::either(b, &devices[1], at_b, LEN));
    let back = Memory::either(a, &devices[0], at_a, LEN);
    let grant = exposed.grant(b, Access::all());
    let remote = exposed.remote(&grant, 0);
    b.receive(1, target.whole());
    a.send(1, source.whole());
    a.post(2, WrOp::Write { remote, imm: None }, source.whole());
    a.post(3, WrOp::Read { remote }, back.whole());
    let [done, received] = collect([(a, 3), (b, 1)]);
    assert_success(&done, [1, 2, 3]);
    assert_success(&received, [1]);
    assert!([&target, &exposed, &back].iter().all(|memory| memory.all() == source.all() && memory.is_intact()));
}

#[test]
fn bytes_between_devices_do_not_pass_the_host() {
    let transfers = || {
        let (a, b, devices) = pair_with_devices(Road::Near);
        all_three(&a, &b, &devices, [true, true]);
        assert_eq!(devices.each_ref().map(|device| device.copies()), [0, 0]);
        let between = [&a, &b].map(|side| side.qp.counters().bytes_between_devices);
        assert_eq!(between, [LEN as u64, 2 * LEN as u64]);
        // The link carried names alone.
        let sent = [&a, &b].map(|side| side.qp.shared().sent.get());
        assert!(sent.iter().all(|sent| *sent < 2000), "{sent:?}");
        devices.map(|device| device.transfers())
    };
    // Pieces that are there at the same time go together, on a busy machine; never are there more.
    let tries: Vec<_> = std::iter::repeat_with(transfers).take(5).collect();
    assert!(tries.contains(&[2, 4]) && tries.iter().all(|[back, there]| *back <= 2 && *there <= 4), "{tries:?}");
}

#[test]
fn devices_that_do_not_reach_each_other_use_the_host() {
    let (a, b, devices) = pair_with_devices(Road::Near);
    devices.iter().for_each(|device| device.cut_off());
    all_three(&a, &b, &devices, [true, true]);
    assert_eq!(devices.each_ref().map(|device| device.transfers()), [0, 0]);
    let between = [&a, &b].map(|side| side.qp.counters().bytes_between_devices);
    assert_eq!(between, [0, 0]);
    all_given_back(&devices);
}

#[test]
fn a_device_and_the_host() {
    for ends in [[true, false], [false, true]] {
        let (a, b, devices) = pair_with_devices(Road::Near);
        all_three(&a, &b, &devices, ends);
        assert_eq!(devices.each_ref().map(|device| device.transfers()), [0, 0]);
        all_given_back(&devices);
    }
}

/// What was read from the socket at once is more than one drive carries out.
#[test]
fn a_drive_ends_with_offers_left_and_the_rest_is_not_forgotten() {
    let (a, b, devices) = pair_with_devices(Road::Near);
    let count = 120u64;
    let source = Memory::on(&a, &devices[0], 64 * count as usize);
    source.set(0, &pattern(64 * count as usize, 5));
    let target = Memory::on(&b, &devices[1], 64 * count as usize);
    let place = |memory: &Memory, id: u64| SgeList::from_slice(&[memory.sge(64 * id as usize, 64)]);
    let mute = b.qp.shared().mute();
    (0..count).for_each(|id| b.receive(id, place(&target, id)));
    let batch: Vec<_> =
        (0..count).map(|id| request(id, WrOp::Send { imm: None, patience: 0 }, place(&source, id))).collect();
    a.qp.post_send(&batch).unwrap();
    drop(mute);
    // Only until something came: the rest is left to nobody but the engine.
    let mut received = Vec::new();
    wait_until(|| {
        b.poll(&mut received);
        !received.is_empty()
    });
    assert!((received.len() as u64) < count, "one drive did it all");
    wait_until(|| devices[1].transfers() as u64 == count);
    let [done, rest] = collect([(&a, count as usize), (&b, count as usize - received.len())]);
    received.extend(rest);
    assert_success(&done, 0..count);
    assert_success(&received, 0..count);
    assert!(target.all() == source.all());
}

#[test]
fn the_end_of_the_sender_waits_for_copies_from_its_memory() {
    for polls in 0..6 {
        let (a, b) = pair(Link::Unix);
        let devices = [0; 2].map(|_| Double::new(32 << 20, Duration::from_millis(3)));
        let [source, target] = [(&a, 0), (&b, 1)].map(|(side, at)| Memory::on(side, &devices[at], LEN));
        source.set(0, &vec![0x11; LEN]);
        b.receive(1, target.whole());
        a.send(1, source.whole());
        std::thread::scope(|scope| {
            scope.spawn(|| (0..=polls).for_each(|_| _ = b.poll(&mut Vec::new())));
            std::thread::sleep(Duration::from_millis(polls));
            a.qp.fail(CloseReason::Local);
            // The owner of the memory does with it what it likes.
            assert_eq!(devices[1].under_way(), 0);
            source.set(0, &vec![0xaa; LEN]);
        });
        wait_until(|| {
            b.poll(&mut Vec::new());
            b.qp.close_reason().is_some()
        });
        assert_eq!(b.qp.close_reason(), Some(CloseReason::Peer));
        assert!(!target.all().contains(&0xaa), "copied after it was given back");
    }
}

#[test]
fn a_key_that_is_revoked_before_the_peer_copies() {
    for at_a in [true, false] {
        let (a, b, devices) = pair_with_devices(Road::Near);
        let exposed = Memory::on(&b, &devices[1], LEN);
        exposed.set(0, &pattern(LEN, 1));
        let grant = exposed.grant(&b, Access::all());
        let local = Memory::either(&a, &devices[0], at_a, LEN);
        let mute = a.qp.shared().mute();
        let before = b.qp.shared().sent.get();
        a.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, local.whole());
        wait_until(|| {
            b.poll(&mut Vec::new());
            b.qp.shared().sent.get() > before
        });
        grant.revoke();
        drop(mute);
        let [done, _] = collect([(&a, 1), (&b, 0)]);
        assert_eq!(statuses(&done), [(1, WcStatus::RemoteAccess)]);
        wait_until(|| {
            b.poll(&mut Vec::new());
            b.qp.close_reason().is_some()
        });
        assert_eq!(b.qp.close_reason(), Some(CloseReason::Failed(WcStatus::RemoteAccess)));
        assert_eq!(local.all(), vec![0; LEN]);
        all_given_back(&devices);
    }
}

#[test]
fn a_peer_that_names_what_it_was_not_offered() {
    use super::super::super::wire::{Header, Kind, flag};
    use std::io::Write;
    let (side, mut peer) = super::super::hostile::victim(8);
    let target = Memory::new(&side, 64);
    side.receive(1, target.whole());
    let flags = flag::FIRST | flag::LAST | flag::NEAR;
    let header = Header { flags, length: 64, total: 64, ..Header::new(Kind::Send) };
    peer.write_all(&[&header.encode()[..], &0u64.to_le_bytes()].concat()).unwrap();
    wait_until(|| {
        side.poll(&mut Vec::new());
        side.qp.close_reason().is_some()
    });
    assert_eq!(side.qp.close_reason(), Some(CloseReason::Protocol("an offer from another process".into())));
    assert_eq!(target.all(), [0; 64]);
}

/// A pair whose devices take so long for each copy, with this configuration.
fn slow_pair(delay: Duration, config: QpConfig) -> (Side, Side, [Arc<Double>; 2]) {
    let (a, b) = Options { configs: [config.clone(), config], ..Options::default() }.connect();
    (a, b, [0; 2].map(|_| Double::new(64 << 20, delay)))
}

#[test]
fn a_key_that_is_revoked_in_the_middle() {
    let (a, b, devices) = slow_pair(Duration::from_millis(2), config());
    let exposed = Memory::on(&b, &devices[1], LEN);
    exposed.set(0, &vec![0x11; LEN]);
    let grant = exposed.grant(&b, Access::all());
    // Many copies, of which a drive makes one.
    let local = Memory::on(&a, &devices[0], LEN);
    let piece = LEN / 8;
    let list: SgeList = (0..8).map(|at| local.sge(at * piece, piece)).collect();
    a.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, list);
    let (mut done, mut none) = (Vec::new(), Vec::new());
    wait_until(|| {
        b.poll(&mut none);
        a.poll(&mut done);
        devices[0].transfers() > 0
    });
    grant.revoke();
    // The owner does with it what it likes.
    exposed.set(0, &vec![0xaa; LEN]);
    wait_until(|| {
        b.poll(&mut none);
        a.poll(&mut done);
        !done.is_empty()
    });
    assert_eq!(statuses(&done), [(1, WcStatus::RemoteAccess)]);
    assert!(devices[0].transfers() < 8);
    assert!(!local.all().contains(&0xaa), "read after it was revoked");
    assert_eq!(a.cq.shared.postponed_count(), 0);
}

/// What takes long is taken up again and again: once for each time it was put off, and the peer is no more lost than while bytes come.
#[test]
fn long_copies_neither_pile_up_nor_count_as_silence() {
    let patience = QpConfig { ack_timeout: Duration::from_millis(250), retry_count: 1, ..config() };
    for cut_off in [false, true] {
        let (a, b, devices) = slow_pair(Duration::from_millis(80), patience.clone());
        if cut_off {
            devices.iter().for_each(|device| device.cut_off());
        }
        let len = 8 << 20;
        let sides = [&a, &b];
        let [source, back] = [0; 2].map(|_| Memory::on(&a, &devices[0], len));
        let [target, exposed] = [0; 2].map(|_| Memory::on(&b, &devices[1], len));
        source.set(0, &pattern(len, 1));
        exposed.set(0, &pattern(len, 2));
        let grant = exposed.grant(&b, Access::all());
        // Each entry is a copy of its own.
        let list = |memory: &Memory| (0..8).map(|at| memory.sge(at * (len / 8), len / 8)).collect::<SgeList>();
        for step in 0..2 {
            let (from, to) = (list(if step == 0 { &source } else { &back }), list(&target));
            let mut out = [Vec::new(), Vec::new()];
            if step == 0 {
                b.receive(1, to);
                a.send(1, from);
            } else {
                a.post(2, WrOp::Read { remote: exposed.remote(&grant, 0) }, from);
            }
            let expected = [1, 1 - step];
            wait_until(|| {
                for (side, out) in sides.iter().zip(&mut out) {
                    side.poll(out);
                    assert!(side.cq.shared.postponed_count() <= 1);
                }
                out[0].len() == expected[0] && out[1].len() == expected[1]
            });
            assert!(out.iter().flatten().all(|done| done.status == WcStatus::Success), "{cut_off} {step}: {out:?}");
        }
        assert!(target.all() == source.all() && back.all() == exposed.all());
    }
}

#[test]
fn what_is_thrown_away_is_not_copied() {
    let (a, b, devices) = pair_with_devices(Road::Near);
    let source = Memory::on(&a, &devices[0], 2 * FRAGMENT);
    source.set(0, &pattern(2 * FRAGMENT, 1));
    let target = Memory::new(&b, 2 * FRAGMENT);
    (1..=3).for_each(|id| a.send(id, source.whole()));
    let (mut done, mut received) = (Vec::new(), Vec::new());
    wait_until(|| {
        a.poll(&mut done);
        b.poll(&mut received);
        a.qp.counters().rnr_naks_received > 0
    });
    assert_eq!(devices[0].copies(), 0);
    (1..=3).for_each(|id| b.receive(id, target.whole()));
    wait_until(|| {
        a.poll(&mut done);
        b.poll(&mut received);
        done.len() == 3
    });
    assert_success(&done, 1..=3);
    assert_success(&received, 1..=3);
    assert!(target.all() == source.all());
    assert_eq!(devices[0].copies(), 3 * 2);
}

/// A failure is that of the message it happens to, and not of what came before.
#[test]
fn a_source_that_fails_after_a_read_into_the_host() {
    let (a, b, devices) = pair_with_devices(Road::Near);
    let (host, exposed) = (Memory::new(&b, 4096), Memory::new(&a, 4096));
    let grant = exposed.grant(&a, Access::all());
    b.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, host.whole());
    assert_success(&collect([(&a, 0), (&b, 1)])[1], [1]);
    let source = Memory::on(&a, &devices[0], 4096);
    devices[0].break_at(1, double::Failing::Wait);
    b.receive(2, host.whole());
    a.send(3, source.whole());
    let [sent, received] = collect([(&a, 1), (&b, 1)]);
    assert_eq!(statuses(&sent), [(3, WcStatus::Fatal)]);
    assert_eq!(statuses(&received), [(2, WcStatus::Flushed)]);
    assert!(matches!(a.qp.close_reason(), Some(CloseReason::Device(_))));
    assert_eq!(b.qp.close_reason(), Some(CloseReason::Peer));
}

#[test]
fn both_ends_on_one_completion_queue() {
    let (ctx, pd, cq) = super::super::device(default_limits(), None);
    let config = config();
    let (one, other) = runtime().block_on(async {
        let acceptor = ctx.listen(&address(Link::Unix)).await.unwrap();
        let connecting = ctx.connect(&pd, &cq, &config, acceptor.local_address(), b"");
        let accepting = async { acceptor.accept().await.unwrap().accept(&pd, &cq, &config, |_| Ok(vec![])).await };
        let (one, other) = tokio::join!(connecting, accepting);
        (one.unwrap().0, other.unwrap().0)
    });
    let side = Side::new(one, cq, pd, ctx);
    let device = Double::new(64 << 20, Duration::from_millis(1));
    let [source, target] = [0; 2].map(|_| Memory::on(&side, &device, LEN));
    source.set(0, &pattern(LEN, 1));
    let piece = LEN / 8;
    let list: SgeList = (0..8).map(|at| target.sge(at * piece, piece)).collect();
    other.post_receive(&[ReceiveRequest { wr_id: 1, sges: list.clone() }]).unwrap();
    side.send(2, (0..8).map(|at| source.sge(at * piece, piece)).collect());
    let mut done = Vec::new();
    wait_until(|| {
        side.poll(&mut done);
        done.len() == 2
    });
    assert!(done.iter().all(|done| done.status == WcStatus::Success), "{done:?}");
    assert!(target.get(0, 8 * piece) == source.get(0, 8 * piece));
    // And the end of one, in the middle of it.
    other.post_receive(&[ReceiveRequest { wr_id: 3, sges: list }]).unwrap();
    side.send(4, (0..8).map(|at| source.sge(at * piece, piece)).collect());
    side.poll(&mut Vec::new());
    drop(other);
    done.clear();
    wait_until(|| {
        side.poll(&mut done);
        done.len() == 2
    });
    assert_eq!(done.iter().map(|done| done.wr_id).collect::<std::collections::BTreeSet<_>>(), [3, 4].into());
    assert_eq!(device.under_way(), 0);
}
