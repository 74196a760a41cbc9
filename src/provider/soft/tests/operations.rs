//! Each operation, on both kinds of link.

use super::*;
use crate::provider::Opcode;

const ALL: [Link; 3] = [Link::Unix, Link::Tcp, Link::SharedMemory];

#[test]
fn sends_arrive_with_their_immediate() {
    for link in ALL {
        let (a, b) = pair(link);
        let source = Memory::pattern(&a, 100, 1);
        let target = Memory::new(&b, 200);
        b.receive(7, target.whole());
        b.receive(8, target.whole());
        a.post(1, WrOp::Send { imm: Some(0xabcd), patience: 0 }, source.whole());
        a.send(2, SgeList::new());
        let [sent, received] = collect([(&a, 2), (&b, 2)]);
        assert_success(&sent, [1, 2]);
        assert_success(&received, [7, 8]);
        assert_eq!((received[0].byte_len, received[0].imm, received[0].opcode), (100, Some(0xabcd), Opcode::Receive));
        assert_eq!((received[1].byte_len, received[1].imm), (0, None));
        assert_eq!(target.get(0, 100), source.all());
    }
}

#[test]
fn lists_are_gathered_and_scattered() {
    for link in ALL {
        let (a, b) = pair(link);
        let source = Memory::pattern(&a, 5000, 2);
        let target = Memory::new(&b, 6000);
        let parts = [source.sge(0, 1), source.sge(1, 0), source.sge(1, 999), source.sge(1000, 4000)];
        let places = [target.sge(0, 3), target.sge(100, 2500), target.sge(3000, 3000)];
        b.receive(1, SgeList::from_slice(&places));
        a.send(1, SgeList::from_slice(&parts));
        collect([(&a, 1), (&b, 1)]);
        let got = [target.get(0, 3), target.get(100, 2500), target.get(3000, 2497)].concat();
        assert_eq!(got, source.all());
    }
}

#[test]
fn writes_reads_and_atomics_reach_exposed_memory() {
    for link in ALL {
        let (a, b) = pair(link);
        let exposed = Memory::pattern(&b, 4096, 3);
        let before = exposed.all();
        let grant = exposed.grant(&b, Access::all());
        let local = Memory::pattern(&a, 1000, 4);
        let back = Memory::new(&a, 1000);
        let old = Memory::new(&a, 16);
        a.post(1, WrOp::Write { remote: exposed.remote(&grant, 8), imm: None }, local.whole());
        let halves = SgeList::from_slice(&[back.sge(0, 333), back.sge(333, 667)]);
        a.post(2, WrOp::Read { remote: exposed.remote(&grant, 8) }, halves);
        let place = |at| SgeList::from_slice(&[old.sge(at, 8)]);
        let word = exposed.remote(&grant, 2048);
        a.post(3, WrOp::FetchAdd { remote: word, add: 5 }, place(0));
        let first = u64::from_ne_bytes(before[2048..2056].try_into().unwrap());
        a.post(4, WrOp::CompareSwap { remote: word, compare: first.wrapping_add(5), swap: 99 }, place(8));
        a.post(5, WrOp::Read { remote: RemoteAddress::default() }, SgeList::new());
        a.post(6, WrOp::Write { remote: RemoteAddress::default(), imm: None }, SgeList::new());
        let [done, _] = collect([(&a, 6), (&b, 0)]);
        assert_success(&done, 1..=6);
        assert_eq!(back.all(), local.all());
        assert_eq!(exposed.get(8, 1000), local.all());
        assert_eq!(exposed.get(0, 8), before[..8]);
        assert_eq!(exposed.get(1008, 1000), before[1008..2008]);
        assert_eq!(old.get(0, 8), first.to_ne_bytes());
        assert_eq!(old.get(8, 8), first.wrapping_add(5).to_ne_bytes());
        assert_eq!(exposed.get(2048, 8), 99u64.to_ne_bytes());
    }
}

#[test]
fn a_write_with_immediate_uses_a_receive_and_leaves_its_buffer_alone() {
    let (a, b) = pair(Link::Unix);
    let exposed = Memory::new(&b, 64);
    let grant = exposed.grant(&b, Access::REMOTE_WRITE);
    let untouched = Memory::new(&b, 64);
    let source = Memory::pattern(&a, 40, 5);
    b.receive(9, untouched.whole());
    b.receive(10, SgeList::new());
    a.post(1, WrOp::Write { remote: exposed.remote(&grant, 0), imm: Some(1) }, source.whole());
    a.post(2, WrOp::Write { remote: RemoteAddress::default(), imm: Some(2) }, SgeList::new());
    let [_, received] = collect([(&a, 2), (&b, 2)]);
    assert_success(&received, [9, 10]);
    assert_eq!((received[0].opcode, received[0].byte_len, received[0].imm), (Opcode::ReceiveWriteImm, 40, Some(1)));
    assert_eq!((received[1].byte_len, received[1].imm), (0, Some(2)));
    assert_eq!(exposed.get(0, 40), source.all());
    assert_eq!(untouched.all(), vec![0; 64]);
}

#[test]
fn large_messages_arrive_whole() {
    for link in ALL {
        for len in [16 << 10, (1 << 20) + 1, 10 << 20] {
            let (a, b) = pair(link);
            let source = Memory::pattern(&a, len, 6);
            let target = Memory::new(&b, len);
            let exposed = Memory::new(&b, len);
            let grant = exposed.grant(&b, Access::all());
            let back = Memory::new(&a, len);
            b.receive(1, target.whole());
            a.post(1, WrOp::Write { remote: exposed.remote(&grant, 0), imm: None }, source.whole());
            a.post(2, WrOp::Read { remote: exposed.remote(&grant, 0) }, back.whole());
            a.send(3, source.whole());
            let [done, received] = collect([(&a, 3), (&b, 1)]);
            assert_success(&done, [1, 2, 3]);
            assert_eq!(received[0].byte_len as usize, len);
            assert!(target.all() == source.all() && exposed.all() == source.all() && back.all() == source.all());
        }
    }
}

#[test]
fn both_directions_at_once() {
    let (a, b) = pair(Link::Tcp);
    let len = 3 << 20;
    let (ours, theirs) = (Memory::pattern(&a, len, 7), Memory::pattern(&b, len, 8));
    let (at_a, at_b) = (Memory::new(&a, len), Memory::new(&b, len));
    a.receive(1, at_a.whole());
    b.receive(1, at_b.whole());
    a.send(2, ours.whole());
    b.send(2, theirs.whole());
    collect([(&a, 2), (&b, 2)]);
    assert!(at_b.all() == ours.all() && at_a.all() == theirs.all());
}

#[test]
fn completions_keep_the_posting_order() {
    let (a, b) = pair(Link::Unix);
    let exposed = Memory::pattern(&b, 1 << 20, 9);
    let grant = exposed.grant(&b, Access::all());
    let local = Memory::new(&a, 1 << 20);
    // What is read and what is written go on at the same time, so they have memory of their own.
    let (small, target) = (Memory::new(&a, 8), Memory::new(&b, 8));
    let target_grant = target.grant(&b, Access::all());
    for round in 0..50 {
        a.post(2 * round, WrOp::Read { remote: exposed.remote(&grant, 0) }, local.whole());
        a.post(2 * round + 1, WrOp::Write { remote: target.remote(&target_grant, 0), imm: None }, small.whole());
    }
    let [done, _] = collect([(&a, 100), (&b, 0)]);
    assert_success(&done, 0..100);
}

#[test]
fn unsignaled_requests_are_silent() {
    let (a, b) = pair(Link::Unix);
    let exposed = Memory::new(&b, 8);
    let grant = exposed.grant(&b, Access::all());
    let local = Memory::new(&a, 8);
    let write = WrOp::Write { remote: exposed.remote(&grant, 0), imm: None };
    let batch: Vec<_> =
        (0..30).map(|id| SendRequest { signaled: id % 10 == 9, ..request(id, write, local.whole()) }).collect();
    a.qp.post_send(&batch).unwrap();
    let [done, _] = collect([(&a, 3), (&b, 0)]);
    assert_success(&done, [9, 19, 29]);
}

#[test]
fn reads_beyond_the_window_wait() {
    let config = QpConfig { max_rd_atomic: 2, ..config() };
    let (a, b) = Options { configs: [config.clone(), config], ..Options::default() }.connect();
    let exposed = Memory::pattern(&b, 64, 1);
    let grant = exposed.grant(&b, Access::all());
    let local = Memory::new(&a, 64 * 100);
    for id in 0..100 {
        let place = SgeList::from_slice(&[local.sge(64 * id as usize, 64)]);
        a.post(id, WrOp::Read { remote: exposed.remote(&grant, 0) }, place);
    }
    let [done, _] = collect([(&a, 100), (&b, 0)]);
    assert_success(&done, 0..100);
    assert_eq!(local.all(), exposed.all().repeat(100));
}

#[test]
fn atomics_of_many_add_up() {
    let (a, b) = pair(Link::Tcp);
    let exposed = Memory::new(&b, 8);
    let grant = exposed.grant(&b, Access::REMOTE_ATOMIC);
    let old = Memory::new(&a, 8);
    std::thread::scope(|scope| {
        scope.spawn(|| (0..10_000).for_each(|_| _ = exposed.segment.fetch_add(0, 1)));
        for round in 0..100 {
            for id in 0..10 {
                a.post(round * 10 + id, WrOp::FetchAdd { remote: exposed.remote(&grant, 0), add: 1 }, old.whole());
            }
            collect([(&a, 10), (&b, 0)]);
        }
    });
    assert_eq!(exposed.all(), 11_000u64.to_ne_bytes());
}

#[test]
fn several_queue_pairs_share_a_completion_queue() {
    let (ctx_a, pd_a, cq_a) = device(default_limits(), None);
    let (ctx_b, pd_b, cq_b) = device(default_limits(), None);
    let pairs: Vec<_> = runtime().block_on(async {
        let acceptor = ctx_b.listen(&address(Link::Tcp)).await.unwrap();
        let mut pairs = Vec::new();
        for _ in 0..5 {
            let config = config();
            let connecting = ctx_a.connect(&pd_a, &cq_a, &config, acceptor.local_address(), b"");
            let accepting =
                async { acceptor.accept().await.unwrap().accept(&pd_b, &cq_b, &config, |_| Ok(vec![])).await };
            let (a, b) = tokio::join!(connecting, accepting);
            pairs.push((a.unwrap().0, b.unwrap().0));
        }
        pairs
    });
    let source = Memory::of(&pd_a, 64);
    // One each: the engine and this thread may place at the same time.
    let targets: Vec<_> = pairs.iter().map(|_| Memory::of(&pd_b, 64)).collect();
    for round in 0..200u64 {
        for (index, (a, b)) in pairs.iter().enumerate() {
            b.post_receive(&[ReceiveRequest { wr_id: index as u64, sges: targets[index].whole() }]).unwrap();
            a.post_send(&[request(round, WrOp::Send { imm: None, patience: 0 }, source.whole())]).unwrap();
        }
        let mut seen = [0; 2];
        wait_until(|| {
            for (cq, seen) in [&cq_a, &cq_b].into_iter().zip(&mut seen) {
                let mut out = [WorkCompletion::default(); 8];
                let count = cq.poll(&mut out).unwrap();
                assert!(out[..count].iter().all(|c| c.status == WcStatus::Success));
                *seen += count;
            }
            seen == [5, 5]
        });
    }
    drop(pairs);
    assert_eq!(ctx_a.stats().queue_pairs.load(Ordering::Relaxed), 0);
}
