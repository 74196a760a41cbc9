//! Memory that the CPU cannot reach, at either end or both.

mod double;
mod endings;
mod failures;
mod near;

pub(super) use self::double::Double;
use super::*;
use crate::provider::{Opcode, PostErrorKind};

/// How the two ends know each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Road {
    /// By a link alone, as in two processes.
    Apart(Link),
    /// As they do in one process, which they are in.
    Near,
}

const UNIX: Road = Road::Apart(Link::Unix);
const TCP: Road = Road::Apart(Link::Tcp);
const SHM: Road = Road::Apart(Link::SharedMemory);
const APART: [Road; 3] = [UNIX, TCP, SHM];
const ROADS: [Road; 4] = [UNIX, TCP, SHM, Road::Near];

impl std::fmt::Display for Road {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Apart(link) => link.fmt(f),
            Self::Near => f.write_str("near"),
        }
    }
}

/// Which ends are in a device's memory.
const ENDS: [[bool; 2]; 3] = [[true, false], [false, true], [true, true]];

const FRAGMENT: usize = crate::memory::device::BOUNCE;

/// Long enough for whoever does not wait to be seen.
const DELAY: Duration = Duration::from_micros(100);

/// Bounces of a queue pair that sends and receives: 4 and 3, and one for an atomic.
const MOST_BOUNCES: usize = 8;

impl Memory {
    fn on(side: &Side, device: &Arc<Double>, len: usize) -> Self {
        let segment = device.alloc(len);
        let mr = side.pd.register_device(segment, Arc::clone(device) as _).unwrap();
        Self { device: Some(Arc::clone(device)), mr, segment, words: Arc::default() }
    }

    /// In the device's memory, or in the host's.
    fn either(side: &Side, device: &Arc<Double>, on_device: bool, len: usize) -> Self {
        if on_device { Self::on(side, device, len) } else { Self::new(side, len) }
    }

    /// Nothing was written behind the end.
    fn is_intact(&self) -> bool {
        let end = self.segment.address() + self.segment.len() as u64;
        self.device.as_ref().is_none_or(|device| device.get(end, 64) == [0; 64])
    }
}

fn device() -> Arc<Double> {
    Double::new(64 << 20, DELAY)
}

/// A connection and a device at each end.
fn pair_with_devices(road: Road) -> (Side, Side, [Arc<Double>; 2]) {
    let (a, b) = match road {
        Road::Apart(link) => {
            let faults = [0; 2].map(|seed| Some(Faults::seeded(seed).keep_apart()));
            Options { link, faults, ..Options::default() }.connect()
        }
        Road::Near => pair(Link::Unix),
    };
    (a, b, [device(), device()])
}

#[track_caller]
fn all_given_back(devices: &[Arc<Double>; 2]) {
    // The engine may be at the end of a drive.
    wait_until(|| devices.iter().all(|device| device.bounces() == 0));
}

#[test]
fn every_operation_moves_every_size() {
    for road in ROADS {
        for [at_a, at_b] in ENDS {
            let (a, b, devices) = pair_with_devices(road);
            for (seed, len) in
                [1, 8, 61, 4099, 64 << 10, FRAGMENT - 1, FRAGMENT, FRAGMENT + 1, 5 << 20].into_iter().enumerate()
            {
                let source = Memory::either(&a, &devices[0], at_a, len);
                source.set(0, &pattern(len, seed as u8));
                let [target, exposed] = [0; 2].map(|_| Memory::either(&b, &devices[1], at_b, len));
                let back = Memory::either(&a, &devices[0], at_a, len);
                let grant = exposed.grant(&b, Access::all());
                let remote = exposed.remote(&grant, 0);
                b.receive(1, target.whole());
                b.receive(2, SgeList::new());
                a.send(1, source.whole());
                a.post(2, WrOp::Write { remote, imm: Some(7) }, source.whole());
                a.post(3, WrOp::Read { remote }, back.whole());
                let [done, received] = collect([(&a, 3), (&b, 2)]);
                assert_success(&done, [1, 2, 3]);
                assert_success(&received, [1, 2]);
                assert_eq!(received[0].byte_len as usize, len);
                assert_eq!((received[1].opcode, received[1].imm), (Opcode::ReceiveWriteImm, Some(7)));
                for (name, memory) in [("sent", &target), ("written", &exposed), ("read", &back)] {
                    assert!(memory.all() == source.all() && memory.is_intact(), "{name} {road} {at_a} {at_b} {len}");
                }
            }
            all_given_back(&devices);
        }
    }
}

#[test]
fn a_completion_means_that_the_bytes_are_there() {
    for road in ROADS {
        let (a, b, devices) = pair_with_devices(road);
        let [source, back] = [0; 2].map(|_| Memory::on(&a, &devices[0], 2 * FRAGMENT));
        let target = Memory::on(&b, &devices[1], 2 * FRAGMENT);
        let grant = target.grant(&b, Access::all());
        for round in 0..30u8 {
            let len = if round % 2 == 0 { 100 } else { 2 * FRAGMENT };
            let bytes = pattern(len, round);
            source.set(0, &bytes);
            let from = SgeList::from_slice(&[source.sge(0, len)]);
            b.receive(1, target.whole());
            a.send(1, from.clone());
            let [acknowledged, _] = collect([(&a, 0), (&b, 1)]);
            assert!(target.get(0, len) == bytes);
            let bytes = pattern(len, !round);
            source.set(0, &bytes);
            // The acknowledgement of the Send is awaited only here, unless it was there.
            a.post(2, WrOp::Write { remote: target.remote(&grant, 0), imm: None }, from);
            collect([(&a, 2 - acknowledged.len()), (&b, 0)]);
            assert!(target.get(0, len) == bytes);
            let to = SgeList::from_slice(&[back.sge(0, len)]);
            a.post(3, WrOp::Read { remote: target.remote(&grant, 0) }, to);
            collect([(&a, 1), (&b, 0)]);
            assert!(back.get(0, len) == bytes);
        }
    }
}

#[test]
fn nobody_sees_a_completion_before_its_bytes() {
    use std::sync::atomic::AtomicBool;
    let (a, b) = pair(Link::Unix);
    let devices = [0; 2].map(|_| Double::new(16 << 20, Duration::from_millis(1)));
    let [source, back] = [0; 2].map(|_| Memory::on(&a, &devices[0], 3000));
    let [target, exposed] = [0; 2].map(|_| Memory::on(&b, &devices[1], 3000));
    let grant = exposed.grant(&b, Access::all());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Drives without the lock that keeps those who poll apart, as the engine does.
        for side in [&a, &b] {
            let over = &over;
            scope.spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    side.cq.shared.drive();
                }
            });
        }
        let good = (0..30u8).all(|round| {
            let (sent, exposes) = (pattern(3000, round), pattern(3000, !round));
            source.set(0, &sent);
            exposed.set(0, &exposes);
            b.receive(1, target.whole());
            a.send(1, source.whole());
            collect_one(&b, 1);
            let received = target.all();
            a.post(2, WrOp::Read { remote: exposed.remote(&grant, 0) }, back.whole());
            collect_one(&a, 2);
            received == sent && back.all() == exposes
        });
        over.store(true, Ordering::SeqCst);
        assert!(good);
    });
}

#[test]
fn lists_are_gathered_from_devices_and_scattered_into_them() {
    for road in ROADS {
        for [at_a, at_b] in ENDS {
            let (a, b, devices) = pair_with_devices(road);
            let source = Memory::either(&a, &devices[0], at_a, 500_000);
            source.set(0, &pattern(500_000, 2));
            let target = Memory::either(&b, &devices[1], at_b, 600_000);
            let parts = [source.sge(0, 1), source.sge(1, 0), source.sge(1, 99_999), source.sge(100_000, 400_000)];
            let places = [target.sge(0, 3), target.sge(100, 250_000), target.sge(300_000, 300_000)];
            b.receive(1, SgeList::from_slice(&places));
            a.send(1, SgeList::from_slice(&parts));
            collect([(&a, 1), (&b, 1)]);
            let got = [target.get(0, 3), target.get(100, 250_000), target.get(300_000, 249_997)].concat();
            assert!(got == source.all());
            assert!(target.get(3, 97) == [0; 97] && target.is_intact());
            all_given_back(&devices);
        }
    }
}

#[test]
fn atomics_reach_words_of_a_device() {
    for road in ROADS {
        for [at_a, at_b] in ENDS {
            let (a, b, devices) = pair_with_devices(road);
            let word = Memory::either(&b, &devices[1], at_b, 24);
            word.set(0, &[7; 24]);
            let grant = word.grant(&b, Access::all());
            let old = Memory::either(&a, &devices[0], at_a, 32);
            let place = |at| SgeList::from_slice(&[old.sge(at, 8)]);
            let remote = word.remote(&grant, 8);
            let first = u64::from_ne_bytes([7; 8]);
            a.post(1, WrOp::FetchAdd { remote, add: 5 }, place(0));
            a.post(2, WrOp::CompareSwap { remote, compare: first, swap: 1 }, place(8));
            a.post(3, WrOp::CompareSwap { remote, compare: first + 5, swap: 99 }, place(16));
            a.post(4, WrOp::FetchAdd { remote, add: u64::MAX }, place(24));
            let [done, _] = collect([(&a, 4), (&b, 0)]);
            assert_success(&done, 1..=4);
            let olds = [first, first + 5, first + 5, 99].map(u64::to_ne_bytes).concat();
            assert_eq!(old.all(), olds);
            assert_eq!(word.all(), [[7; 8], 98u64.to_ne_bytes(), [7; 8]].concat());
            a.post(5, WrOp::FetchAdd { remote: word.remote(&grant, 4), add: 1 }, place(0));
            assert_eq!(statuses(&collect([(&a, 1), (&b, 0)])[0]), [(5, WcStatus::RemoteInvalidRequest)]);
            all_given_back(&devices);
        }
    }
}

#[test]
fn atomics_of_several_peers_on_a_device_add_up() {
    let (ctx_b, pd_b, _) = super::device(default_limits(), None);
    let device = device();
    let segment = device.alloc(8);
    let mr = pd_b.register_device(segment, Arc::clone(&device) as _).unwrap();
    let grant = pd_b.grant(&mr, segment, Access::REMOTE_ATOMIC).unwrap();
    let remote = RemoteAddress { address: segment.address(), rkey: grant.rkey() };
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (ctx_b, pd_b) = (ctx_b.clone(), pd_b.clone());
            scope.spawn(move || {
                let (ctx_a, pd_a, cq_a) = super::device(default_limits(), None);
                let cq_b = ctx_b.create_cq(16).unwrap();
                let config = config();
                let (a, b) = runtime().block_on(async {
                    let acceptor = ctx_b.listen(&address(Link::Unix)).await.unwrap();
                    let connecting = ctx_a.connect(&pd_a, &cq_a, &config, acceptor.local_address(), b"");
                    let accepting =
                        async { acceptor.accept().await.unwrap().accept(&pd_b, &cq_b, &config, |_| Ok(vec![])).await };
                    let (a, b) = tokio::join!(connecting, accepting);
                    (a.unwrap().0, b.unwrap().0)
                });
                let (a, b) = (Side::new(a, cq_a, pd_a, ctx_a), Side::new(b, cq_b, pd_b, ctx_b));
                let old = Memory::new(&a, 8);
                for _ in 0..10 {
                    (0..10).for_each(|id| a.post(id, WrOp::FetchAdd { remote, add: 1 }, old.whole()));
                    assert_success(&collect([(&a, 10), (&b, 0)])[0], 0..10);
                }
            });
        }
    });
    assert_eq!(device.get(segment.address(), 8), 300u64.to_ne_bytes());
    wait_until(|| device.bounces() == 0);
}

#[test]
fn many_in_flight_keep_their_order() {
    for road in ROADS {
        for [at_a, at_b] in ENDS {
            let (a, b, devices) = pair_with_devices(road);
            let count = 100u64;
            let len = |id: u64| [3, 700, 20_000, 100_000][id as usize % 4] + id as usize;
            let source = Memory::either(&a, &devices[0], at_a, 4 << 20);
            source.set(0, &pattern(4 << 20, 9));
            let target = Memory::either(&b, &devices[1], at_b, 4 << 20);
            let exposed = Memory::either(&b, &devices[1], at_b, 200_000);
            let back = Memory::either(&a, &devices[0], at_a, 200_000);
            let grant = exposed.grant(&b, Access::all());
            let (mut offset, mut end) = (0, Vec::new());
            for id in 0..count {
                b.receive(id, SgeList::from_slice(&[target.sge(offset, len(id))]));
                a.send(id, SgeList::from_slice(&[source.sge(offset, len(id))]));
                offset += len(id);
                end.push(offset);
            }
            // Behind them, a Write and a Read that must see it.
            let written = SgeList::from_slice(&[source.sge(77, 200_000)]);
            a.post(count, WrOp::Write { remote: exposed.remote(&grant, 0), imm: None }, written);
            a.post(count + 1, WrOp::Read { remote: exposed.remote(&grant, 0) }, back.whole());
            let (mut done, mut received) = (Vec::new(), Vec::new());
            let mut checked = 0;
            wait_until(|| {
                a.poll(&mut done);
                b.poll(&mut received);
                // What is reported is there, though more is on its way.
                for message in received.iter().skip(checked) {
                    let at = end[message.wr_id as usize] - len(message.wr_id);
                    assert!(target.get(at, len(message.wr_id)) == source.get(at, len(message.wr_id)));
                }
                checked = received.len();
                done.len() as u64 == count + 2 && received.len() as u64 == count
            });
            assert_success(&done, 0..count + 2);
            assert_success(&received, 0..count);
            assert!(back.all() == source.get(77, 200_000));
            all_given_back(&devices);
            for device in &devices {
                assert!(device.most_bounces() <= MOST_BOUNCES, "{}", device.most_bounces());
            }
        }
    }
}

#[test]
fn copies_overlap_with_the_link_and_bounces_are_few() {
    for road in APART {
        let (a, b, devices) = pair_with_devices(road);
        let len = 8 << 20;
        let source = Memory::on(&a, &devices[0], len);
        source.set(0, &pattern(len, 1));
        let target = Memory::on(&b, &devices[1], len);
        b.receive(1, target.whole());
        a.send(1, source.whole());
        collect([(&a, 1), (&b, 1)]);
        assert!(target.all() == source.all());
        for device in &devices {
            let most = device.most_bounces();
            assert!((2..=4).contains(&most), "{road}: {most}");
        }
        // A socket that gives little at a time makes more.
        assert_eq!(devices[0].copies(), len / FRAGMENT);
        all_given_back(&devices);
    }
}

#[test]
fn small_payloads_share_a_bounce() {
    let (a, b, devices) = pair_with_devices(UNIX);
    let source = Memory::on(&a, &devices[0], 6400);
    source.set(0, &pattern(6400, 1));
    let target = Memory::new(&b, 6400);
    let place = |memory: &Memory, id: u64| SgeList::from_slice(&[memory.sge(64 * id as usize, 64)]);
    (0..100).for_each(|id| b.receive(id, place(&target, id)));
    let batch: Vec<_> =
        (0..100).map(|id| request(id, WrOp::Send { imm: None, patience: 0 }, place(&source, id))).collect();
    a.qp.post_send(&batch).unwrap();
    collect([(&a, 100), (&b, 100)]);
    assert_eq!(target.all(), source.all());
    assert!(devices[0].most_bounces() <= 2, "{}", devices[0].most_bounces());
}

#[test]
fn what_waited_for_a_full_socket_is_what_was_posted() {
    for road in ROADS {
        let (a, b, devices) = pair_with_devices(road);
        let len = |id: u64| [3, 70_000, 90_000, 50][id as usize % 4] + id as usize;
        let source = Memory::on(&a, &devices[0], 5 << 20);
        source.set(0, &pattern(5 << 20, 4));
        let target = Memory::new(&b, 5 << 20);
        let mute = b.qp.shared().mute();
        let mut offset = 0;
        for id in 0..100 {
            b.receive(id, SgeList::from_slice(&[target.sge(offset, len(id))]));
            a.send(id, SgeList::from_slice(&[source.sge(offset, len(id))]));
            offset += len(id);
        }
        drop(mute);
        let [done, received] = collect([(&a, 100), (&b, 100)]);
        assert_success(&done, 0..100);
        assert_success(&received, 0..100);
        assert!(target.get(0, offset) == source.get(0, offset));
        all_given_back(&devices);
    }
}

#[test]
fn a_late_receiver_gets_what_the_device_held() {
    for road in ROADS {
        for [at_a, at_b] in ENDS {
            let (a, b, devices) = pair_with_devices(road);
            let len = 600_000;
            let source = Memory::either(&a, &devices[0], at_a, len);
            source.set(0, &pattern(len, 1));
            let target = Memory::either(&b, &devices[1], at_b, len);
            let (mut done, mut received) = (Vec::new(), Vec::new());
            for round in 0..10 {
                let before = a.qp.counters().rnr_naks_received;
                a.send(2 * round, source.whole());
                a.send(2 * round + 1, SgeList::from_slice(&[source.sge(0, 9)]));
                wait_until(|| {
                    a.poll(&mut done);
                    b.poll(&mut received);
                    a.qp.counters().rnr_naks_received > before
                });
                for wr_id in [2 * round, 2 * round + 1] {
                    b.receive(wr_id, target.whole());
                    wait_until(|| {
                        a.poll(&mut done);
                        b.poll(&mut received);
                        received.len() as u64 == wr_id + 1
                    });
                }
                assert!(target.all() == source.all());
                wait_until(|| {
                    a.poll(&mut done);
                    b.poll(&mut received);
                    done.len() as u64 == 2 * round + 2
                });
            }
            assert_success(&done, 0..20);
            assert_success(&received, 0..20);
            all_given_back(&devices);
        }
    }
}

#[test]
fn lists_over_several_memories_are_refused_at_posting() {
    let (a, b, [one, other]) = pair_with_devices(UNIX);
    let host = Memory::new(&a, 64);
    let [first, second] = [&one, &other].map(|device| Memory::on(&a, device, 64));
    let refused =
        |kind| matches!(kind, PostErrorKind::System(error) if error.kind() == std::io::ErrorKind::InvalidInput);
    for (left, right) in [(&host, &first), (&first, &host), (&first, &second)] {
        let sges = SgeList::from_slice(&[left.sge(0, 8), right.sge(0, 8)]);
        let error = a.qp.post_receive(&[ReceiveRequest { wr_id: 1, sges: sges.clone() }]).unwrap_err();
        assert!(error.accepted == 0 && refused(error.kind));
        let error = a.qp.post_send(&[request(1, WrOp::Send { imm: None, patience: 0 }, sges)]).unwrap_err();
        assert!(error.accepted == 0 && refused(error.kind));
    }
    let inline = SendRequest { inline: true, ..request(1, WrOp::Send { imm: None, patience: 0 }, first.whole()) };
    assert!(refused(a.qp.post_send(&[inline]).unwrap_err().kind));
    // Nothing of that was taken, and an empty entry is nobody's memory.
    first.set(0, b"a device");
    let target = Memory::new(&b, 64);
    b.receive(1, target.whole());
    a.send(1, SgeList::from_slice(&[host.sge(0, 0), first.sge(0, 8), second.sge(3, 0)]));
    let [done, received] = collect([(&a, 1), (&b, 1)]);
    assert_success(&done, [1]);
    assert_success(&received, [1]);
    assert_eq!(target.get(0, 9), b"a device\0");
}

#[test]
fn a_grant_is_of_its_regions_memory_and_range() {
    let (a, b, devices) = pair_with_devices(TCP);
    let exposed = Memory::on(&b, &devices[1], 4096);
    let part = exposed.segment.slice(1024, 1024).unwrap();
    let grant = b.pd.grant(&exposed.mr, part, Access::REMOTE_WRITE).unwrap();
    let source = Memory::pattern(&a, 1024, 3);
    a.post(1, WrOp::Write { remote: exposed.remote(&grant, 1024), imm: None }, source.whole());
    a.post(2, WrOp::Write { remote: exposed.remote(&grant, 1025), imm: None }, source.whole());
    let [done, _] = collect([(&a, 2), (&b, 0)]);
    assert_eq!(statuses(&done), [(1, WcStatus::Success), (2, WcStatus::RemoteAccess)]);
    assert_eq!(exposed.all(), [vec![0; 1024], source.all(), vec![0; 2048]].concat());
    assert!(b.pd.grant(&exposed.mr, Segment::new(std::ptr::null_mut(), 8), Access::all()).is_err());
}
