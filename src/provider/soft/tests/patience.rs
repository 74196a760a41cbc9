//! Acknowledgements that nobody waits for.

use super::super::engine::LOOKED_AT_TICK;
use super::super::wire::HEADER;
use super::*;

const LINKS: [Link; 3] = [Link::Unix, Link::Tcp, Link::SharedMemory];

fn post(side: &Side, wr_id: u64, patience: u32) {
    side.post(wr_id, WrOp::Send { imm: None, patience }, SgeList::new());
}

/// Receives that many messages and goes on looking, so that what is to be acknowledged without anything to ride on would be by now.
fn take_in(side: &Side, wanted: usize) {
    collect_one(side, wanted);
    // Whoever else drove it, and has given the message out, is done with it.
    drop(side.qp.shared().mute());
    for _ in 0..3 {
        assert_eq!(side.poll(&mut Vec::new()), 0);
    }
}

/// What `side` has sent after it took in one message of this patience.
fn answer(link: Link, patience: u32) -> u64 {
    let (a, b) = pair(link);
    b.receive(1, SgeList::new());
    post(&a, 2, patience);
    take_in(&b, 1);
    b.qp.shared().sent.get()
}

#[test]
fn it_waits_for_something_to_ride_on() {
    for link in LINKS {
        // A tick of the engine may come in between, but not each time.
        assert!((0..100).any(|_| answer(link, 1) == 0), "{link:?}");
        assert_eq!(answer(link, 0), HEADER as u64, "{link:?}");
        let (a, b) = pair(link);
        a.receive(1, SgeList::new());
        b.receive(2, SgeList::new());
        post(&a, 3, 1);
        take_in(&b, 1);
        b.send(4, SgeList::new());
        let [mut done, _] = collect([(&a, 2), (&b, 1)]);
        // The engine may have been first.
        done.sort_by_key(|done| done.wr_id);
        assert_success(&done, [1, 3]);
    }
}

/// The longest time between two looks of the receiver until the sender had its acknowledgement.
fn longest_pause(link: Link) -> Duration {
    let (a, b) = pair(link);
    b.receive(1, SgeList::new());
    post(&a, 2, 1);
    let (mut out, mut last, mut longest) = (Vec::new(), Instant::now(), Duration::ZERO);
    wait_until(|| {
        b.poll(&mut Vec::new());
        longest = longest.max(last.elapsed());
        last = Instant::now();
        a.poll(&mut out) > 0
    });
    assert_success(&out, [2]);
    longest
}

/// A tick of the engine sends it, although somebody looks all the time. When nobody did for so long, it would do so anyway, so an attempt
/// during which this thread was held up says nothing.
#[test]
fn it_does_not_wait_for_ever() {
    for link in LINKS {
        assert!((0..1000).any(|_| longest_pause(link) < Duration::from_micros(900)), "{link:?}");
    }
}

#[test]
fn it_does_not_wait_when_too_many_are_under_way() {
    for link in LINKS {
        let (a, b) = pair(link);
        for id in 0..3 {
            b.receive(id, SgeList::new());
            post(&a, 3 + id, 2);
        }
        take_in(&b, 3);
        assert!(b.qp.shared().sent.get() > 0, "{link:?}");
        // All of them, before the engine's next tick if it must.
        assert_success(&collect_one(&a, 3), [3, 4, 5]);
    }
}

#[test]
fn a_short_timeout_leaves_no_time_to_wait() {
    let short = QpConfig { ack_timeout: LOOKED_AT_TICK * 4 - Duration::from_millis(1), ..config() };
    let (a, b) = Options { configs: [short, config()], ..Options::default() }.connect();
    b.receive(1, SgeList::new());
    post(&a, 2, 1);
    take_in(&b, 1);
    assert_eq!(b.qp.shared().sent.get(), HEADER as u64);
}
