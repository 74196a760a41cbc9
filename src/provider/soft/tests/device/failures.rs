//! Devices that fail, at any copy, when it starts or when it is waited for.

use super::double::Failing;
use super::*;
use crate::error::CloseReason;

/// As many copies as the last one that is broken, at either end.
const LEN: usize = 6 * FRAGMENT;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Send,
    Write,
    WriteImm,
    Read,
    Atomic,
}

/// The device of one side fails at its `nth` copy: both sides must hear of it, and everything must end.
fn fails(road: Road, operation: Operation, at_a: bool, nth: i64, failing: Failing) {
    let name = format!("{road} {operation:?} {at_a} {nth} {failing:?}");
    let (a, b, devices) = pair_with_devices(road);
    let (mine, theirs) = (Memory::either(&a, &devices[0], at_a, LEN), Memory::either(&b, &devices[1], !at_a, LEN));
    let word = SgeList::from_slice(&[mine.sge(0, 8)]);
    let grant = theirs.grant(&b, Access::all());
    let remote = theirs.remote(&grant, 0);
    devices[usize::from(!at_a)].break_at(nth, failing);
    let receives = matches!(operation, Operation::Send | Operation::WriteImm);
    b.receive(10, theirs.whole());
    b.receive(11, SgeList::new());
    a.receive(4, SgeList::new());
    let (op, sges) = match operation {
        Operation::Send => (WrOp::Send { imm: None, patience: 0 }, mine.whole()),
        Operation::Write => (WrOp::Write { remote, imm: None }, mine.whole()),
        Operation::WriteImm => (WrOp::Write { remote, imm: Some(1) }, mine.whole()),
        Operation::Read => (WrOp::Read { remote }, mine.whole()),
        Operation::Atomic => (WrOp::FetchAdd { remote, add: 1 }, word),
    };
    let behind = request(2, WrOp::Write { remote, imm: None }, SgeList::new());
    // Everything behind it is flushed, posted before it failed or refused after.
    let posted = a.qp.post_send(&[request(1, op, sges), behind]).is_ok();
    let [done, received] = collect([(&a, 2 + usize::from(posted)), (&b, 2)]);

    let [ours, other] = [&a, &b].map(|side| side.qp.close_reason());
    let text =
        |reason: &Option<CloseReason>| matches!(reason, Some(CloseReason::Device(why)) if why.contains("fallen off"));
    let (_, status) = statuses(&done)[0];
    if at_a {
        assert!(text(&ours), "{name}: {ours:?}");
        assert_eq!(other, Some(CloseReason::Peer), "{name}");
        assert_eq!(status, WcStatus::Fatal, "{name}");
    } else {
        assert!(text(&other), "{name}: {other:?}");
        assert_eq!(ours, Some(CloseReason::Failed(WcStatus::RemoteOperation)), "{name}");
        assert_eq!(status, WcStatus::RemoteOperation, "{name}");
    }
    assert!(done.iter().skip(1).all(|c| c.status == WcStatus::Flushed), "{name}: {done:?}");
    // The receive that it used failed with it; where it did not get so far, all are flushed.
    let first = statuses(&received)[0];
    let used = receives && !at_a;
    assert_eq!(first, (10, if used { WcStatus::Fatal } else { WcStatus::Flushed }), "{name}");
    assert_eq!(statuses(&received)[1], (11, WcStatus::Flushed), "{name}");
    all_given_back(&devices);
}

#[test]
fn a_failing_device_ends_its_queue_pairs_and_says_why() {
    use Operation::*;
    for road in ROADS {
        for failing in [Failing::Start, Failing::Wait] {
            for at_a in [true, false] {
                for operation in [Send, Write, WriteImm, Read] {
                    for nth in [1, 2, 4, 6] {
                        fails(road, operation, at_a, nth, failing);
                    }
                }
                fails(road, Atomic, at_a, 1, failing);
            }
            // The second copy stores the result.
            fails(road, Atomic, false, 2, failing);
        }
    }
}

#[test]
fn other_queue_pairs_of_the_same_nic_work_on() {
    let (ctx_a, pd_a, cq_a) = super::super::device(default_limits(), None);
    let (ctx_b, pd_b, cq_b) = super::super::device(default_limits(), None);
    let device = device();
    let mut pairs: Vec<_> = runtime().block_on(async {
        let acceptor = ctx_b.listen(&address(Link::Tcp)).await.unwrap();
        let mut pairs = Vec::new();
        for _ in 0..2 {
            let config = config();
            let connecting = ctx_a.connect(&pd_a, &cq_a, &config, acceptor.local_address(), b"");
            let accepting =
                async { acceptor.accept().await.unwrap().accept(&pd_b, &cq_b, &config, |_| Ok(vec![])).await };
            let (a, b) = tokio::join!(connecting, accepting);
            pairs.push((a.unwrap().0, b.unwrap().0));
        }
        pairs
    });
    let (qp_a, qp_b) = pairs.remove(0);
    let side_a = Side::new(qp_a, cq_a, pd_a, ctx_a);
    let side_b = Side::new(qp_b, cq_b, pd_b, ctx_b);
    let broken = Memory::on(&side_a, &device, LEN);
    let (source, target) = (Memory::pattern(&side_a, LEN, 1), Memory::new(&side_b, LEN));
    let unfinished = Memory::new(&side_b, LEN);
    let [grant, other_grant] = [&target, &unfinished].map(|memory| memory.grant(&side_b, Access::all()));
    let write = WrOp::Write { remote: target.remote(&grant, 0), imm: None };
    let fails = WrOp::Write { remote: unfinished.remote(&other_grant, 0), imm: None };
    device.break_at(4, Failing::Wait);
    let (other, _kept) = pairs.remove(0);
    side_a.post(1, fails, broken.whole());
    other.post_send(&[request(2, write, source.whole()), request(3, write, source.whole())]).unwrap();
    let [mut done, _] = collect([(&side_a, 3), (&side_b, 0)]);
    done.sort_by_key(|completion| completion.wr_id);
    let success = WcStatus::Success;
    assert_eq!(statuses(&done), [(1, WcStatus::Fatal), (2, success), (3, success)]);
    assert!(target.all() == source.all());
    assert_eq!(other.close_reason(), None);
    wait_until(|| device.bounces() == 0);
}
