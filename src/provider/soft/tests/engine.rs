//! The engine, notifications, and what is left over.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::*;
use crate::error::CloseReason;

pub(super) fn readable(cq: &Cq, wait: Duration) -> bool {
    let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
    let fd = cq.fd();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

#[test]
fn one_sided_requests_are_served_while_nobody_looks() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        served_while_nobody_looks(link, false);
    }
}

#[test]
fn and_by_an_engine_that_is_held_up() {
    for link in [Link::Unix, Link::Tcp, Link::SharedMemory] {
        served_while_nobody_looks(link, true);
    }
}

fn served_while_nobody_looks(link: Link, held_up: bool) {
    let (a, b) = pair(link);
    if held_up {
        b.qp.shared().ctx.engine.hold_up();
    }
    let exposed = Memory::pattern(&b, 1 << 20, 1);
    let grant = exposed.grant(&b, Access::all());
    let back = Memory::new(&a, 1 << 20);
    let mut worst = Duration::ZERO;
    for round in 0..50 {
        let start = Instant::now();
        a.post(1, WrOp::Read { remote: exposed.remote(&grant, 0) }, back.whole());
        a.post(2, WrOp::Write { remote: exposed.remote(&grant, 0), imm: None }, SgeList::new());
        assert_success(&collect_one(&a, 2), [1, 2]);
        if round > 0 {
            worst = worst.max(start.elapsed());
        }
    }
    assert!(back.all() == exposed.all());
    assert!(b.ctx.stats().engine_drives.load(Ordering::Relaxed) > 0);
    assert_eq!(b.cq.shared.looks.load(Ordering::Relaxed), 0);
    assert!(worst < Duration::from_secs(1), "{link:?}: {worst:?}");
}

#[test]
fn an_acknowledgement_is_flushed_when_the_looking_stops() {
    takes_less_than(Duration::from_millis(100), || {
        let (a, b) = pair(Link::Unix);
        let exposed = Memory::new(&b, 8);
        let grant = exposed.grant(&b, Access::all());
        let local = Memory::new(&a, 8);
        a.post(1, WrOp::Write { remote: exposed.remote(&grant, 0), imm: None }, local.whole());
        let mut out = Vec::new();
        b.poll(&mut out);
        let start = Instant::now();
        assert_success(&collect_one(&a, 1), [1]);
        let waited = start.elapsed();
        // A second look writes it too, without the engine.
        a.post(2, WrOp::Write { remote: exposed.remote(&grant, 0), imm: None }, local.whole());
        wait_until(|| {
            b.poll(&mut out);
            a.poll(&mut out) > 0
        });
        waited
    });
}

#[test]
fn an_armed_queue_wakes_once_for_what_others_push() {
    let (a, _b) = pair(Link::Unix);
    assert!(!readable(&a.cq, Duration::ZERO));
    a.receive(1, SgeList::new());
    a.receive(2, SgeList::new());
    a.cq.arm().unwrap();
    assert_eq!(a.poll(&mut Vec::new()), 0);
    assert!(!readable(&a.cq, Duration::ZERO));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            a.qp.fail(CloseReason::Local);
        });
        assert!(readable(&a.cq, PATIENCE));
    });
    let events = a.cq.read_events().unwrap();
    assert_eq!(events, 1);
    a.cq.acknowledge(events);
    assert_eq!(a.cq.read_events().unwrap(), 0);
    assert_eq!(collect_one(&a, 2).len(), 2);
    assert!(!readable(&a.cq, Duration::ZERO));
    assert_eq!(a.cq.event_counts(), (1, 1));
}

#[test]
fn what_the_engine_receives_wakes_the_sleeper() {
    let (a, b) = pair(Link::Tcp);
    let (source, target) = (Memory::new(&a, 64), Memory::new(&b, 64));
    for round in 0..100 {
        b.receive(round, target.whole());
        b.cq.arm().unwrap();
        let mut out = Vec::new();
        b.poll(&mut out);
        a.send(round, source.whole());
        // Sleep as tokio does, and now and then so long that the engine is faster.
        if round % 3 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        while out.is_empty() {
            assert!(readable(&b.cq, PATIENCE));
            let events = b.cq.read_events().unwrap();
            b.cq.acknowledge(events);
            b.poll(&mut out);
            b.cq.arm().unwrap();
            b.poll(&mut out);
        }
        assert_success(&out, [round]);
        assert_success(&collect_one(&a, 1), [round]);
    }
    let (read, acknowledged) = b.cq.event_counts();
    assert_eq!(read, acknowledged);
}

/// The driver's protocol on tokio's `AsyncFd`: edge-triggered, so that a lost wake-up would hang.
async fn completions(side: &Side, fd: &AsyncFd<BorrowedFd<'_>>) -> Vec<WorkCompletion> {
    let mut out = Vec::new();
    loop {
        while side.poll(&mut out) > 0 {}
        side.cq.arm().unwrap();
        side.poll(&mut out);
        if !out.is_empty() {
            return out;
        }
        let wait = tokio::time::timeout(PATIENCE, fd.readable());
        wait.await.expect("a wake-up was lost").unwrap().clear_ready();
        let events = side.cq.read_events().unwrap();
        side.cq.acknowledge(events);
    }
}

/// Sends from one side to the other: one sleeps in tokio, the other is polled now and then.
fn sleeping_in_tokio(link: Link, sender_sleeps: bool) {
    let (a, b) = pair(link);
    let len = 3 << 20;
    let (source, target) = (Memory::pattern(&a, len, 1), Memory::new(&b, len));
    let rounds = 100;
    let (sleeper, poller) = if sender_sleeps { (&a, &b) } else { (&b, &a) };
    let start = |side: &Side, round: u64| {
        if std::ptr::eq(side, &a) {
            let piece = if round % 10 == 0 { len } else { 1000 };
            a.send(round, SgeList::from_slice(&[source.sge(0, piece)]));
        } else {
            b.receive(round, target.whole());
        }
    };
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut out = Vec::new();
            for round in 0..rounds {
                start(poller, round);
                wait_until(|| {
                    std::thread::sleep(Duration::from_micros(50));
                    poller.poll(&mut out);
                    out.len() as u64 > round
                });
            }
            assert_success(&out, 0..rounds);
            while !done.load(Ordering::Relaxed) {
                poller.poll(&mut out);
                std::thread::yield_now();
            }
        });
        runtime().block_on(async {
            #[allow(deprecated)] // its successor is unsafe: this borrow is outlived by the queue, as it should be
            let fd = AsyncFd::with_interest(sleeper.cq.fd(), Interest::READABLE).unwrap();
            for round in 0..rounds {
                start(sleeper, round);
                assert_success(&completions(sleeper, &fd).await, [round]);
            }
        });
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn no_wake_up_of_a_receiver_is_lost() {
    sleeping_in_tokio(Link::Unix, false);
    sleeping_in_tokio(Link::Tcp, false);
    sleeping_in_tokio(Link::SharedMemory, false);
}

#[test]
fn no_wake_up_of_a_sender_is_lost() {
    sleeping_in_tokio(Link::Unix, true);
    sleeping_in_tokio(Link::Tcp, true);
    sleeping_in_tokio(Link::SharedMemory, true);
}

#[test]
fn an_idle_device_does_not_wake_up() {
    let (a, b) = pair(Link::Tcp);
    let memory = Memory::new(&a, 8);
    for id in 0..20 {
        a.receive(id, memory.whole());
    }
    b.send(1, SgeList::new());
    collect([(&a, 1), (&b, 1)]);
    for side in [&a, &b] {
        let mut last = u64::MAX;
        wait_until(|| {
            std::thread::sleep(Duration::from_millis(150));
            let rounds = side.ctx.shared.engine.rounds();
            std::mem::replace(&mut last, rounds) == rounds
        });
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(side.ctx.shared.engine.rounds(), last);
    }
}

#[test]
fn everything_may_be_dropped_in_any_order() {
    for order in 0..24 {
        let (a, b) = pair(if order % 2 == 0 { Link::Unix } else { Link::Tcp });
        let memory = Memory::new(&b, 1 << 20);
        let grant = memory.grant(&b, Access::all());
        let local = Memory::new(&a, 1 << 20);
        a.post(1, WrOp::Write { remote: memory.remote(&grant, 0), imm: None }, local.whole());
        a.receive(1, local.whole());
        let Side { qp, cq, pd, ctx, memory: _kept } = a;
        let mut parts: Vec<Box<dyn std::any::Any>> = vec![Box::new(qp), Box::new(cq), Box::new(pd), Box::new(ctx)];
        let mut number = order;
        for left in (1..=4).rev() {
            parts.remove(number % left);
            number /= left;
        }
        drop((grant, b));
    }
}

#[test]
fn nothing_is_left_behind() {
    // Other tests open files at the same time, so this one looks from a process of its own.
    const MARK: &str = "SOFT_NIC_LEAK_CHECK";
    if std::env::var_os(MARK).is_none() {
        let name = "provider::soft::tests::engine::nothing_is_left_behind";
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--test-threads", "1"])
            .env(MARK, "1")
            .stdout(std::process::Stdio::null())
            .status();
        assert!(status.unwrap().success());
        return;
    }
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    drop(runtime());
    let before = (files(), threads());
    for round in 0..10 {
        let (a, b) = pair(if round % 2 == 0 { Link::Unix } else { Link::Tcp });
        let memory = Memory::new(&a, 1 << 20);
        a.send(1, memory.whole());
        if round % 3 == 0 {
            rustix::net::shutdown(&b.qp.shared().socket, rustix::net::Shutdown::Both).unwrap();
        }
        // A device outlives its connections here.
        if round % 3 == 1 {
            drop((a.qp, b.qp));
            assert_eq!(a.ctx.stats().queue_pairs.load(Ordering::Relaxed), 0);
            drop(memory);
            assert_eq!(a.ctx.stats().regions.load(Ordering::Relaxed), 0);
        }
    }
    wait_until(|| (files(), threads()) == before);
}
