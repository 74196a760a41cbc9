//! Many who wait, and how little that takes.

use std::fs;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::common::run::SOON;
use crate::common::{Rig, within};
use crate::gpu::Gpu;

lone_gpu_cases!(many_wait_at_once, waiting_takes_little, awaits_are_given_up);

/// CPU time that the waiter thread has used.
fn used_by_the_waiter() -> Option<Duration> {
    let threads = fs::read_dir("/proc/self/task").unwrap().flatten();
    let waiter = threads
        .into_iter()
        .find(|thread| fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.trim() == "gpu-waiter"))?;
    // Nanoseconds on a CPU come first.
    let used = fs::read_to_string(waiter.path().join("schedstat")).ok()?;
    Some(Duration::from_nanos(used.split_whitespace().next()?.parse().ok()?))
}

async fn many_wait_at_once(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    for times in [[100, 100], [20, 400]] {
        let mut tasks = JoinSet::new();
        for index in 0..64u64 {
            let mut buffer = gpu.alloc(&domain, 1000);
            gpu.fill_late(&mut buffer, Duration::from_millis(times[index as usize % 2]), index);
            let gpu = gpu.clone();
            tasks.spawn(async move {
                buffer.idle().await.unwrap();
                assert!(buffer.is_idle().unwrap());
                (gpu.mismatches(&buffer, 1000, index), index)
            });
        }
        while let Some(ended) = within(SOON, tasks.join_next()).await {
            assert_eq!(ended.unwrap().0, 0);
        }
    }
}

async fn waiting_takes_little(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let wait = async |count: u64, time: Duration| {
        let mut tasks = JoinSet::new();
        for index in 0..count {
            let mut buffer = gpu.alloc(&domain, 1000);
            gpu.fill_late(&mut buffer, time, index);
            tasks.spawn(async move { buffer.idle().await.unwrap() });
        }
        within(SOON, tasks.join_all()).await;
    };
    // Starts the thread.
    wait(1, Duration::from_millis(5)).await;
    for count in [1, 64] {
        let (start, before) = (Instant::now(), used_by_the_waiter().unwrap());
        wait(count, Duration::from_millis(1500)).await;
        let used = used_by_the_waiter().unwrap() - before;
        assert!(used < start.elapsed() / 2, "{used:?} of {:?} for {count}", start.elapsed());
    }
    // Nobody waits: nothing at all.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let before = used_by_the_waiter().unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(used_by_the_waiter().unwrap(), before);
    // And it comes back.
    wait(3, Duration::from_millis(5)).await;
}

async fn awaits_are_given_up(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let mut buffer = gpu.alloc(&domain, 1000);
    gpu.fill_late(&mut buffer, Duration::from_millis(600), 1);
    let mut given_up = 0;
    while given_up < 200 && tokio::time::timeout(Duration::from_micros(500), buffer.idle()).await.is_err() {
        given_up += 1;
    }
    assert!(given_up > 0);
    within(SOON, buffer.idle()).await.unwrap();
    assert_eq!(gpu.mismatches(&buffer, 1000, 1), 0);
}
