//! Receiver not ready, retries, credits.

use super::*;
use crate::error::CloseReason;

#[test]
fn a_late_receive_costs_a_round_trip_and_not_a_timer() {
    takes_less_than(Duration::from_millis(50), || {
        let slow = QpConfig { rnr_timer: Duration::from_secs(10), ..config() };
        let (a, b) = Options { configs: [config(), slow], ..Options::default() }.connect();
        let (source, target) = (Memory::pattern(&a, 300_000, 1), Memory::new(&b, 300_000));
        a.send(1, source.whole());
        let (mut at_a, mut at_b) = (Vec::new(), Vec::new());
        wait_until(|| {
            a.poll(&mut at_a);
            b.poll(&mut at_b);
            a.qp.counters().rnr_naks_received == 1
        });
        assert_eq!(b.qp.counters().rnr_naks_sent, 1);
        let start = Instant::now();
        b.receive(2, target.whole());
        let [done, received] = collect([(&a, 1), (&b, 1)]);
        let waited = start.elapsed();
        assert_success(&done, [1]);
        assert_success(&received, [2]);
        assert!(target.all() == source.all());
        waited
    });
}

#[test]
fn other_traffic_flows_while_a_send_waits() {
    let (a, b) = pair(Link::Tcp);
    let exposed = Memory::pattern(&a, 64, 1);
    let grant = exposed.grant(&a, Access::all());
    let local = Memory::new(&b, 64);
    let spare = Memory::new(&a, 64);
    a.send(1, SgeList::new());
    a.receive(5, spare.whole());
    b.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, local.whole());
    b.send(2, local.whole());
    let [received, done] = collect([(&a, 1), (&b, 2)]);
    assert_success(&done, [1, 2]);
    assert_success(&received, [5]);
    b.receive(6, SgeList::new());
    let [sent, received] = collect([(&a, 1), (&b, 1)]);
    assert_success(&sent, [1]);
    assert_success(&received, [6]);
}

#[test]
fn a_receiver_that_is_never_ready_ends_the_sender() {
    takes_less_than(Duration::from_millis(400), || {
        let bounded = QpConfig { rnr_retry: 3, ..config() };
        let timer = QpConfig { rnr_timer: Duration::from_millis(20), ..config() };
        let (a, b) = Options { configs: [bounded, timer], ..Options::default() }.connect();
        let start = Instant::now();
        a.send(1, SgeList::new());
        a.send(2, SgeList::new());
        let [done, _] = collect([(&a, 2), (&b, 0)]);
        let waited = start.elapsed();
        assert_eq!(statuses(&done), [(1, WcStatus::RnrRetryExceeded), (2, WcStatus::Flushed)]);
        assert!(waited >= Duration::from_millis(80), "{waited:?}");
        assert_eq!(a.qp.close_reason(), Some(CloseReason::Failed(WcStatus::RnrRetryExceeded)));
        wait_until(|| {
            b.poll(&mut Vec::new());
            b.qp.close_reason() == Some(CloseReason::Peer)
        });
        waited
    });
}

#[test]
fn many_pipelined_sends_reach_a_slow_receiver_in_order() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        let (a, b) = pair(link);
        let (count, len) = (10_000u64, 1024);
        let (source, target) = (Memory::new(&a, 128 * len), Memory::new(&b, len));
        let (mut posted, mut finished, mut arrived) = (0, 0, 0);
        let (mut at_a, mut at_b) = (Vec::new(), Vec::new());
        let mut waiting = false;
        let start = Instant::now();
        while finished < count || arrived < count {
            assert!(start.elapsed() < PATIENCE, "{posted} {finished} {arrived} {:?}", a.qp.close_reason());
            while posted < count && posted - finished < 128 {
                let offset = (posted % 128) as usize * len;
                source.set(offset, &posted.to_le_bytes());
                a.send(posted, SgeList::from_slice(&[source.sge(offset, len)]));
                posted += 1;
            }
            if !waiting && arrived < count {
                b.receive(arrived, target.whole());
                waiting = true;
            }
            a.poll(&mut at_a);
            b.poll(&mut at_b);
            for c in at_a.drain(..) {
                assert_eq!((c.wr_id, c.status), (finished, WcStatus::Success));
                finished += 1;
            }
            for c in at_b.drain(..) {
                assert_eq!((c.wr_id, c.status), (arrived, WcStatus::Success));
                assert_eq!(target.get(0, 8), arrived.to_le_bytes());
                (arrived, waiting) = (arrived + 1, false);
            }
        }
        let sent = a.qp.shared().sent.get();
        assert!(sent < 3 * count * len as u64, "{sent} bytes for {}", count * len as u64);
    }
}

#[test]
fn pretended_unreadiness_only_costs_time() {
    let faults = Some(Faults::seeded(5).rnr(0.3));
    let (a, b) = Options { faults: [None, faults], ..Options::default() }.connect();
    let (source, target) = (Memory::new(&a, 8), Memory::new(&b, 8));
    for id in 0..100 {
        b.receive(id, target.whole());
    }
    for id in 0..100 {
        a.send(id, source.whole());
    }
    let [done, received] = collect([(&a, 100), (&b, 100)]);
    assert_success(&done, 0..100);
    assert_success(&received, 0..100);
    assert!(a.qp.counters().rnr_naks_received > 10);
}

#[test]
fn a_peer_that_is_never_ready_though_receives_are_posted_ends_the_sender() {
    let bounded = QpConfig { rnr_retry: 1, ..config() };
    let timer = QpConfig { rnr_timer: Duration::from_millis(10), ..config() };
    let faults = Some(Faults::seeded(5).rnr(1.0));
    let options = Options { configs: [bounded, timer], faults: [None, faults], ..Options::default() };
    let (a, b) = options.connect();
    b.receive(1, SgeList::new());
    a.send(1, SgeList::new());
    let [done, _] = collect([(&a, 1), (&b, 1)]);
    assert_eq!(statuses(&done), [(1, WcStatus::RnrRetryExceeded)]);
}

#[test]
fn a_silent_peer_exceeds_the_retries() {
    takes_less_than(Duration::from_millis(400), || {
        let hasty = QpConfig { ack_timeout: Duration::from_millis(20), retry_count: 2, ..config() };
        // The peer does the handshake and then says nothing more, though its socket stays open.
        let (ctx, pd, cq) = device(default_limits(), None);
        let (peer, peer_pd, peer_cq) = device(default_limits(), None);
        let (qp, _held) = runtime().block_on(async {
            let acceptor = peer.listen(&address(Link::Tcp)).await.unwrap();
            let connecting = ctx.connect(&pd, &cq, &hasty, acceptor.local_address(), b"");
            let accepting =
                async { acceptor.accept().await.unwrap().accept(&peer_pd, &peer_cq, &config(), |_| Ok(vec![])).await };
            let (a, b) = tokio::join!(connecting, accepting);
            let b = b.unwrap().0;
            let mute = b.shared().mute();
            (a.unwrap().0, (mute, b))
        });
        let start = Instant::now();
        let write = WrOp::Write { remote: RemoteAddress::default(), imm: None };
        qp.post_send(&[request(1, write, SgeList::new()), request(2, write, SgeList::new())]).unwrap();
        let mut out = Vec::new();
        wait_until(|| {
            let mut batch = [WorkCompletion::default(); 4];
            let count = cq.poll(&mut batch).unwrap();
            out.extend_from_slice(&batch[..count]);
            out.len() == 2
        });
        let waited = start.elapsed();
        assert_eq!(statuses(&out), [(1, WcStatus::RetryExceeded), (2, WcStatus::Flushed)]);
        assert!(waited >= Duration::from_millis(60), "{waited:?}");
        assert_eq!(qp.close_reason(), Some(CloseReason::Failed(WcStatus::RetryExceeded)));
        waited
    });
}
