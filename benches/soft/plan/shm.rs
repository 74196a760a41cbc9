//! Shared memory beside what others do with it, and beside what the machine can.

use super::{Aim, BOTH, Bytes, Link, Peer, Placement, Rows};
use crate::job::{Exchange, Mode, Subject};
use crate::ucx::Test;

/// Where both ends poll; on one CPU each of them would wait for the other's time slice to end.
const APART: &[Placement] = &[Placement::TwoCores];

pub(super) fn beside_shared_memory(rows: &mut Rows) {
    messages(rows);
    one_sided(rows);
    sleeping(rows);
}

fn messages(rows: &mut Rows) {
    let mut add = |name: &str, exchange, mode, peer, aim| {
        rows.add(name.to_owned(), Link::Shm, exchange, APART, mode, Some(peer), aim);
    };
    let small = Exchange::OneWay { size: 8 };
    for (mode, how) in [(Mode::Adaptive, ""), (Mode::Polling, "polling, ")] {
        // Aimed at with what a user gets who sets nothing.
        let aim = |most| (mode == Mode::Adaptive).then_some(Aim::RatioAtMost(most, 0.0));
        let ucx = Peer::Ucx(Test::POSIX_AM_LAT);
        add(&format!("send 8 B shm, {how}UCX"), small, mode, ucx, aim(1.5));
        add(&format!("send 8 B shm, {how}iceoryx2"), small, mode, Peer::Iceoryx2, aim(0.7));
    }
    let (long, ucx) = (Exchange::OneWay { size: 64 << 10 }, Peer::Ucx(Test::POSIX_CMA_TAG_LAT));
    add("send 64 KiB shm, UCX", long, Mode::Adaptive, ucx, Some(Aim::RatioAtMost(1.0, 0.0)));
    let (many, batched) = (Exchange::Sends { size: 8 }, Exchange::BatchedSends { size: 8 });
    let ucx = Peer::Ucx(Test::POSIX_AM_BW);
    add("pipelined sends 8 B shm, UCX", many, Mode::Adaptive, ucx, Some(Aim::ValueAtLeast(3.0)));
    add("batched sends 8 B shm, UCX", batched, Mode::Adaptive, ucx, None);
}

fn one_sided(rows: &mut Rows) {
    let mut add = |name: &str, exchange, peer, aim| {
        rows.add(name.to_owned(), Link::Shm, exchange, APART, Mode::Adaptive, Some(peer), Some(aim));
    };
    let put = Peer::Ucx(Test::POSIX_PUT_LAT);
    add("write 8 B seen shm, UCX", Exchange::WriteSeen, put, Aim::RatioAtMost(2.0, 0.0));
    for size in [8, 4096] {
        let (name, get) = (format!("read {} at once shm, UCX", Bytes(size)), Peer::UcxAndYield(Test::POSIX_GET));
        add(&name, Exchange::ReadAtOnce { size }, get, Aim::RatioAtMost(1.2, 0.0));
    }
    let (single, copy) = (Exchange::SingleWrite { size: 64 << 10 }, Peer::Subject(Subject::Copy));
    add("single write 64 KiB shm, memcpy", single, copy, Aim::RatioAtMost(1.2, 0.0));
    for chunk in [1 << 20, 16 << 20] {
        let (name, put) = (format!("write {} shm, UCX", Bytes(chunk)), Peer::Ucx(Test::POSIX_PUT_BW));
        add(&name, Exchange::SameWrite { chunk }, put, Aim::RatioAtLeast(0.9));
    }
}

/// Where waking a process is what takes the time.
fn sleeping(rows: &mut Rows) {
    let small = Exchange::OneWay { size: 8 };
    let eventfd = Some(Peer::Subject(Subject::EventFd));
    for (placement, most) in [(Placement::TwoCores, 1.2), (Placement::OneCore, 1.6)] {
        let (name, aim) = ("sleeping receive 8 B shm, eventfd".to_owned(), Some(Aim::RatioAtMost(most, 0.0)));
        rows.add(name, Link::Shm, small, &[placement], Mode::Event, eventfd, aim);
    }
    let (name, ucx) = ("sleeping receive 8 B shm, UCX".to_owned(), Some(Peer::Ucx(Test::POSIX_AM_LAT_SLEEPING)));
    rows.add(name, Link::Shm, small, &BOTH, Mode::Event, ucx, None);
}
