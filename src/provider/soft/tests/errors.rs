//! What the responder refuses, and how queue pairs end.

use super::*;
use crate::error::CloseReason;
use crate::provider::PostErrorKind;

fn write_to(remote: RemoteAddress) -> WrOp {
    WrOp::Write { remote, imm: None }
}

/// Posts `op` with two requests behind it and expects it to be refused with `status`, on both sides.
#[track_caller]
fn refused(a: &Side, b: &Side, op: WrOp, sges: SgeList, status: WcStatus) {
    let local = Memory::new(a, 8);
    b.receive(50, SgeList::new());
    let after = write_to(RemoteAddress::default());
    let batch = [
        request(1, op, sges),
        request(2, after, SgeList::new()),
        request(3, WrOp::Send { imm: None, patience: 0 }, local.whole()),
    ];
    // First, since nothing can be posted once the answer is there.
    a.receive(4, SgeList::new());
    a.qp.post_send(&batch).unwrap();
    let [done, received] = collect([(a, 4), (b, 1)]);
    let flushed = WcStatus::Flushed;
    assert_eq!(statuses(&done), [(1, status), (2, flushed), (3, flushed), (4, flushed)]);
    assert_eq!(statuses(&received), [(50, flushed)]);
    for side in [a, b] {
        assert_eq!(side.qp.close_reason(), Some(CloseReason::Failed(status)));
    }
}

#[test]
fn keys_are_enforced_by_the_responder() {
    let cases: [(Access, i64, usize); 6] = [
        (Access::REMOTE_READ, 0, 64),
        (Access::all(), 1, 64),
        (Access::all(), -1, 64),
        (Access::all(), 64, 1),
        (Access::all(), i64::MAX, 8),
        (Access::empty(), 0, 1),
    ];
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        for (access, offset, len) in cases {
            let (a, b) = pair(link);
            let exposed = Memory::new(&b, 64);
            let grant = exposed.grant(&b, access);
            let local = Memory::pattern(&a, len, 1);
            let address = exposed.segment.address().wrapping_add_signed(offset);
            let remote = RemoteAddress { address, rkey: grant.rkey() };
            refused(&a, &b, write_to(remote), local.whole(), WcStatus::RemoteAccess);
            assert_eq!(exposed.all(), vec![0; 64]);
        }
    }
}

#[test]
fn unknown_revoked_and_foreign_keys_are_refused() {
    for case in 0..4 {
        let (a, b) = pair(Link::Unix);
        let exposed = Memory::new(&b, 64);
        let local = Memory::new(&a, 8);
        let grant = exposed.grant(&b, Access::all());
        let other_pd = b.ctx.alloc_pd().unwrap();
        let foreign = Memory::of(&other_pd, 64);
        let foreign_grant = other_pd.grant(&foreign.mr, foreign.segment, Access::all()).unwrap();
        let remote = match case {
            0 => RemoteAddress { rkey: grant.rkey() ^ 1, ..exposed.remote(&grant, 0) },
            1 => RemoteAddress { rkey: exposed.mr.lkey(), ..exposed.remote(&grant, 0) },
            2 => foreign.remote(&foreign_grant, 0),
            _ => {
                grant.revoke();
                grant.revoke();
                exposed.remote(&grant, 0)
            }
        };
        let op = if case % 2 == 0 { WrOp::Read { remote } } else { write_to(remote) };
        refused(&a, &b, op, local.whole(), WcStatus::RemoteAccess);
    }
}

#[test]
fn atomics_need_alignment_and_their_right() {
    let cases = [(4, Access::all(), WcStatus::RemoteInvalidRequest), (8, Access::REMOTE_WRITE, WcStatus::RemoteAccess)];
    for (offset, access, status) in cases {
        let (a, b) = pair(Link::Unix);
        let exposed = Memory::new(&b, 64);
        let grant = exposed.grant(&b, access);
        let local = Memory::new(&a, 8);
        let op = WrOp::FetchAdd { remote: exposed.remote(&grant, offset), add: 1 };
        refused(&a, &b, op, local.whole(), status);
    }
}

#[test]
fn a_message_longer_than_its_receive_fails_on_both_sides() {
    let (a, b) = pair(Link::Unix);
    let (source, target) = (Memory::new(&a, 65), Memory::new(&b, 64));
    b.receive(1, target.whole());
    b.receive(2, target.whole());
    let send = WrOp::Send { imm: None, patience: 0 };
    a.qp.post_send(&[request(1, send, source.whole()), request(2, send, SgeList::new())]).unwrap();
    let [done, received] = collect([(&a, 2), (&b, 2)]);
    assert_eq!(statuses(&done), [(1, WcStatus::RemoteInvalidRequest), (2, WcStatus::Flushed)]);
    assert_eq!(statuses(&received), [(1, WcStatus::LocalLength), (2, WcStatus::Flushed)]);
    assert_eq!(target.all(), vec![0; 64]);
}

#[test]
fn requests_before_a_refused_one_succeed() {
    let (a, b) = pair(Link::Unix);
    let exposed = Memory::pattern(&b, 1 << 20, 1);
    let grant = exposed.grant(&b, Access::all());
    let back = Memory::new(&a, 1 << 20);
    a.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, back.whole());
    a.post(2, write_to(exposed.remote(&grant, 0)), SgeList::from_slice(&[back.sge(0, 0)]));
    a.post(3, write_to(RemoteAddress { address: 8, rkey: 0 }), SgeList::from_slice(&[back.sge(0, 8)]));
    let [done, _] = collect([(&a, 3), (&b, 0)]);
    let success = WcStatus::Success;
    assert_eq!(statuses(&done), [(1, success), (2, success), (3, WcStatus::RemoteAccess)]);
    assert!(back.all() == exposed.all());
}

#[test]
fn local_keys_are_checked() {
    let (a, b) = pair(Link::Unix);
    let exposed = Memory::new(&b, 64);
    let grant = exposed.grant(&b, Access::all());
    let good = Memory::new(&a, 64);
    let other = Memory::new(&a, 64);
    let write = write_to(exposed.remote(&grant, 0));
    let bad = Sge { lkey: other.mr.lkey(), ..good.sge(0, 8) };
    let batch = [
        request(1, write, good.whole()),
        request(2, write, SgeList::from_slice(&[bad])),
        request(3, write, good.whole()),
    ];
    a.qp.post_send(&batch).unwrap();
    let [done, _] = collect([(&a, 3), (&b, 0)]);
    assert_eq!(statuses(&done), [(1, WcStatus::Success), (2, WcStatus::LocalProtection), (3, WcStatus::Flushed)]);

    let (a, _b) = pair(Link::Unix);
    let memory = Memory::new(&a, 64);
    a.receive(1, memory.whole());
    a.receive(2, SgeList::from_slice(&[Sge { lkey: memory.mr.lkey() ^ 1, ..memory.sge(0, 8) }]));
    assert_eq!(statuses(&collect_one(&a, 2)), [(1, WcStatus::Flushed), (2, WcStatus::LocalProtection)]);
}

#[test]
fn posts_are_refused_where_they_must_be() {
    let small = QpConfig { send_depth: 2, receive_depth: 1, max_send_sge: 1, ..config() };
    let (a, b) = Options { configs: [small, config()], ..Options::default() }.connect();
    let memory = Memory::new(&a, 100);
    let two = SgeList::from_slice(&[memory.sge(0, 1), memory.sge(1, 1)]);
    let send = |sges, inline| SendRequest { inline, ..request(1, WrOp::Send { imm: None, patience: 0 }, sges) };
    let invalid = [send(two, false), send(memory.whole(), true)];
    for bad in invalid {
        let error = a.qp.post_send(&[bad]).unwrap_err();
        assert!(matches!(error.kind, PostErrorKind::System(_)) && error.accepted == 0);
    }
    let good = || send(SgeList::new(), false);
    let error = a.qp.post_send(&[good(), good(), good()]).unwrap_err();
    assert!(matches!(error.kind, PostErrorKind::Full) && error.accepted == 2);
    let receive = || ReceiveRequest { wr_id: 1, sges: SgeList::new() };
    let error = a.qp.post_receive(&[receive(), receive()]).unwrap_err();
    assert!(matches!(error.kind, PostErrorKind::Full) && error.accepted == 1);
    assert!(a.qp.fail(CloseReason::Local));
    assert!(a.qp.fail(CloseReason::Peer));
    let closed = |kind| matches!(kind, PostErrorKind::Closed(CloseReason::Local));
    assert!(closed(a.qp.post_send(&[good()]).unwrap_err().kind));
    assert!(closed(a.qp.post_receive(&[receive()]).unwrap_err().kind));
    assert_eq!(collect_one(&a, 3).len(), 3);
    wait_until(|| {
        b.poll(&mut Vec::new());
        b.qp.close_reason() == Some(CloseReason::Peer)
    });
}

#[test]
fn messages_longer_than_the_device_takes_fail_here() {
    let limits = DeviceLimits { max_message: 4096, ..default_limits() };
    let (a, b) = Options { limits: [default_limits(), limits], ..Options::default() }.connect();
    let (source, target) = (Memory::new(&a, 4097), Memory::new(&b, 5000));
    b.receive(1, target.whole());
    a.send(1, SgeList::from_slice(&[source.sge(0, 4096)]));
    a.send(2, source.whole());
    let [done, _] = collect([(&a, 2), (&b, 1)]);
    assert_eq!(statuses(&done), [(1, WcStatus::Success), (2, WcStatus::LocalLength)]);
}

#[test]
fn a_revoked_key_ends_the_transfer_and_is_never_touched_again() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        let mut caught = 0;
        for round in 0..10 {
            let (a, b) = pair(link);
            let len = 8 << 20;
            let exposed = Memory::new(&b, len);
            let grant = exposed.grant(&b, Access::all());
            let local = Memory::pattern(&a, len, 1);
            let remote = exposed.remote(&grant, 0);
            let op = if round % 2 == 0 { write_to(remote) } else { WrOp::Read { remote } };
            a.post(1, op, local.whole());
            let mut out = [Vec::new(), Vec::new()];
            for _ in 0..round {
                b.poll(&mut out[1]);
                a.poll(&mut out[0]);
            }
            std::thread::scope(|scope| {
                scope.spawn(|| grant.revoke()).join().unwrap();
            });
            let frozen = exposed.all();
            wait_until(|| {
                a.poll(&mut out[0]);
                b.poll(&mut out[1]);
                !out[0].is_empty()
            });
            assert!(exposed.all() == frozen);
            // Small sockets, large messages: the first looks hardly ever finish it, unless this thread had to wait.
            if out[0][0].status != WcStatus::Success {
                assert_eq!(out[0][0].status, WcStatus::RemoteAccess);
                assert_eq!(b.qp.close_reason(), Some(CloseReason::Failed(WcStatus::RemoteAccess)));
                caught += 1;
            }
        }
        assert!(caught > 0);
    }
}

#[test]
fn a_lost_peer_fails_everything_in_order() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        let (a, b) = pair(link);
        let memory = Memory::new(&a, 64);
        for id in 0..32 {
            a.send(id, memory.whole());
            a.receive(100 + id, memory.whole());
        }
        // As if its process had died: the socket closes without a word.
        rustix::net::shutdown(&b.qp.shared().socket, rustix::net::Shutdown::Both).unwrap();
        let done = collect_one(&a, 64);
        assert_eq!(statuses(&done)[0], (0, WcStatus::RetryExceeded));
        assert!(done[1..].iter().all(|c| c.status == WcStatus::Flushed));
        assert!(done[..32].iter().map(|c| c.wr_id).eq(0..32) && done[32..].iter().map(|c| c.wr_id).eq(100..132));
        assert!(matches!(a.qp.close_reason(), Some(CloseReason::LinkLost(_))));
    }
}

#[test]
fn a_goodbye_is_told_from_a_lost_link() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        let (a, b) = pair(link);
        let memory = Memory::new(&a, 1 << 20);
        let (answer, answered) = (Memory::new(&b, 16), Memory::new(&a, 16));
        a.receive(1, answered.whole());
        // Something to read is left on the other side, which has no receive for it: closing must not reset the connection.
        a.send(2, memory.whole());
        b.send(3, answer.whole());
        drop(b.qp);
        let done = collect_one(&a, 2);
        assert_eq!(a.qp.close_reason(), Some(CloseReason::Peer));
        assert_eq!(statuses(&done), [(1, WcStatus::Success), (2, WcStatus::Flushed)]);
    }
}

#[test]
fn failing_from_another_thread_under_load() {
    for round in 0..10 {
        let (a, b) = pair(if round % 2 == 0 { Link::Unix } else { Link::Tcp });
        let exposed = Memory::new(&b, 1 << 20);
        let grant = exposed.grant(&b, Access::all());
        let local = Memory::new(&a, 1 << 20);
        let (mut posted, mut done) = (0, Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(2 + round));
                a.qp.fail(CloseReason::Local);
            });
            let mut others = Vec::new();
            loop {
                let write = write_to(exposed.remote(&grant, 0));
                match a.qp.post_send(&[request(posted, write, local.whole())]) {
                    Ok(()) => posted += 1,
                    Err(error) if matches!(error.kind, PostErrorKind::Full) => {}
                    Err(_) => break,
                }
                a.poll(&mut done);
                b.poll(&mut others);
            }
        });
        wait_until(|| {
            a.poll(&mut done);
            done.len() as u64 >= posted
        });
        assert!(done.iter().map(|c| c.wr_id).eq(0..posted));
        let first = done.iter().position(|c| c.status != WcStatus::Success).unwrap_or(done.len());
        assert!(done[first..].iter().all(|c| c.status == WcStatus::Flushed));
        wait_until(|| {
            b.poll(&mut Vec::new());
            b.qp.close_reason() == Some(CloseReason::Peer)
        });
    }
}

#[test]
fn an_overrun_ends_the_queue_pair_and_loses_nothing() {
    let (ctx_a, pd_a, _) = device(default_limits(), None);
    let (ctx_b, pd_b, cq_b) = device(default_limits(), None);
    let cq_a = ctx_a.create_cq(2).unwrap();
    let config = config();
    let (qp, _peer) = runtime().block_on(async {
        let acceptor = ctx_b.listen(&address(Link::Unix)).await.unwrap();
        let connecting = ctx_a.connect(&pd_a, &cq_a, &config, acceptor.local_address(), b"");
        let accepting = async { acceptor.accept().await.unwrap().accept(&pd_b, &cq_b, &config, |_| Ok(vec![])).await };
        let (a, b) = tokio::join!(connecting, accepting);
        (a.unwrap().0, b.unwrap().0)
    });
    let write = || request(1, write_to(RemoteAddress::default()), SgeList::new());
    qp.post_send(&(0..10).map(|_| write()).collect::<Vec<_>>()).unwrap();
    let mut out = [WorkCompletion::default(); 4];
    let mut count = 0;
    wait_until(|| {
        cq_b.poll(&mut out).unwrap();
        count += cq_a.poll(&mut out).unwrap();
        count == 10
    });
    assert!(matches!(qp.close_reason(), Some(CloseReason::Device(_))));
}
