//! The GPU's work and the device's: neither touches the bytes before the other is done, and no thread waits for that.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::join;
use tokio::task::JoinHandle;
use tokio_rdma::Error;
use tokio_rdma::gpu::{GpuBuffer, GpuError};

use crate::common::run::SOON;
use crate::common::{Rig, eventually, within};
use crate::gpu::Gpu;

gpu_cases!(
    a_send_waits_for_a_slow_producer,
    a_write_waits_for_a_slow_producer,
    a_receive_waits_for_a_slow_reader,
    a_read_waits_for_a_slow_reader,
    a_send_does_not_wait_for_readers,
    a_forgotten_guard_is_waited_for,
    what_is_told_afterwards_is_waited_for,
    a_stream_waits_for_others_that_used_the_buffer,
    parts_know_what_the_whole_was_used_for,
    the_whole_knows_what_its_parts_were_used_for,
    a_guard_that_outlives_a_look_counts_in_full,
    a_buffer_that_came_back_is_looked_at_again,
    several_tasks_wait_for_the_same_buffer,
    exposing_a_busy_buffer_is_refused,
);

/// How long slow work takes: far longer than everything else here.
const SLOW: Duration = Duration::from_millis(300);

const LEN: usize = 100_001;

/// Counts how often another task gets its turn.
struct Ticker(Arc<AtomicU32>, JoinHandle<()>);

impl Ticker {
    fn start() -> Self {
        let ticks = Arc::new(AtomicU32::new(0));
        let counted = ticks.clone();
        let ticking = tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(5)).await;
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self(ticks, ticking)
    }

    /// It got its turn all the time: on an idle machine, 60 times while something slow was waited for.
    fn stop(self) {
        self.1.abort();
        let ticks = self.0.load(Ordering::Relaxed);
        assert!(ticks >= 5, "the runtime was blocked: {ticks} ticks");
    }
}

async fn a_send_waits_for_a_slow_producer(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for (one, other) in pair.directions() {
        let (mut source, target) = (gpu.alloc(&one.domain, LEN), gpu.alloc(&other.domain, LEN));
        let ticker = Ticker::start();
        gpu.fill_late(&mut source, SLOW, 1);
        assert!(!source.is_idle().unwrap());
        let (received, sent) = join!(other.receive(target), one.send(source));
        ticker.stop();
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 1), 0);
        assert!(sent.unwrap().is_idle().unwrap());
    }
}

async fn a_write_waits_for_a_slow_producer(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let region = gpu.exposed(other, LEN);
    let mut source = gpu.alloc(&one.domain, LEN);
    let ticker = Ticker::start();
    gpu.fill_late(&mut source, SLOW, 2);
    one.write(source, &region.remote()).await.unwrap();
    ticker.stop();
    assert_eq!(gpu.mismatches_in(&region, LEN, 2), 0);
}

async fn a_receive_waits_for_a_slow_reader(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for (one, other) in pair.directions() {
        let (source, target) = (gpu.filled(&one.domain, LEN, 3), gpu.filled(&other.domain, LEN, 2));
        let ticker = Ticker::start();
        let verdict = gpu.check_late(&target, SLOW, 2);
        let (received, sent) = join!(other.receive(target), one.send(source));
        ticker.stop();
        sent.unwrap();
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 3), 0);
        assert_eq!(verdict.mismatches(), 0, "the reader was overtaken");
    }
}

async fn a_read_waits_for_a_slow_reader(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let source = gpu.filled(&other.domain, LEN, 5);
    source.idle().await.unwrap();
    let region = source.expose(tokio_rdma::Access::REMOTE_READ).unwrap();
    let target = gpu.filled(&one.domain, LEN, 4);
    let ticker = Ticker::start();
    let verdict = gpu.check_late(&target, SLOW, 4);
    let read = one.read(target, &region.remote()).await.unwrap();
    ticker.stop();
    assert_eq!(gpu.mismatches(&read, LEN, 5), 0);
    assert_eq!(verdict.mismatches(), 0, "the reader was overtaken");
}

async fn a_send_does_not_wait_for_readers(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let source = gpu.filled(&one.domain, LEN, 6);
    source.idle().await.unwrap();
    let _verdict = gpu.check_late(&source, 10 * SLOW, 6);
    let (received, sent) = join!(other.receive(other.buffer(LEN)), one.send(source));
    assert!(!sent.unwrap().is_idle().unwrap(), "the reader is still at it");
    assert_eq!(crate::gpu::host_mismatches(received.unwrap().message(), 6), 0);
}

async fn a_forgotten_guard_is_waited_for(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let stream = gpu.stream();
    let mut source = gpu.alloc(&one.domain, LEN);
    gpu.spin(&stream, SLOW);
    let mut guard = source.write_on::<u8>(&stream).unwrap();
    gpu.fill_through(&mut guard, 7);
    std::mem::forget(guard);
    let target = gpu.alloc(&other.domain, LEN);
    let (received, sent) = join!(other.receive(target), one.send(source));
    sent.unwrap();
    let target = received.unwrap().buffer;
    assert_eq!(gpu.mismatches(&target, LEN, 7), 0);

    // A reader on another stream comes after a forgotten writer.
    let mut target = target;
    gpu.spin(&stream, SLOW);
    let mut guard = target.write_on::<u8>(&stream).unwrap();
    gpu.fill_through(&mut guard, 7_000);
    std::mem::forget(guard);
    assert_eq!(gpu.mismatches(&target, LEN, 7_000), 0);

    // A reader's guard as well, and a drop waits for it: use of freed memory would end the process.
    gpu.spin(&stream, SLOW);
    let guard = target.read_on::<u8>(&stream).unwrap();
    let verdict = gpu.check(&guard, LEN, 7_000);
    std::mem::forget(guard);
    drop(target);
    assert_eq!(verdict.mismatches(), 0);
}

async fn what_is_told_afterwards_is_waited_for(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let (first, second) = (gpu.stream(), gpu.stream());
    let mut source = gpu.alloc(&one.domain, LEN);
    let mut tail = source.split_off(LEN / 2).unwrap();
    gpu.spin(&first, SLOW);
    gpu.fill_secretly(&first, &mut source, 8);
    gpu.fill_secretly(&second, &mut tail, 8 + (LEN / 2) as u64);
    let event = first.record_event(None).unwrap();
    let mut source = source.unsplit(tail).unwrap();
    source.ready_after(&event).unwrap();
    source.ready_after(&second.record_event(None).unwrap()).unwrap();
    // What is recorded in it from now on is of no concern.
    let endless = gpu.stream();
    gpu.spin(&endless, 10 * SLOW);
    event.record(&endless).unwrap();
    let target = gpu.alloc(&other.domain, LEN);
    let (received, sent) = join!(other.receive(target), one.send(source));
    assert!(sent.unwrap().is_idle().unwrap());
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 8), 0);
    assert!(!event.try_is_complete().unwrap(), "this was not waited for");
}

async fn a_stream_waits_for_others_that_used_the_buffer(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let mut buffer = gpu.alloc(&domain, LEN);
    gpu.fill_late(&mut buffer, SLOW, 1);
    // Readers on other streams come after the writer, and a writer after all of them.
    let verdicts = [gpu.check_late(&buffer, SLOW, 1), gpu.check_late(&buffer, SLOW / 2, 1)];
    gpu.fill(&gpu.stream(), &mut buffer, 2);
    assert_eq!(gpu.mismatches(&buffer, LEN, 2), 0);
    assert_eq!(verdicts.map(|verdict| verdict.mismatches()), [0, 0]);

    // cudarc's own copies, on the guard's stream and on another one.
    let (one, other) = (gpu.stream(), gpu.stream());
    gpu.spin(&one, SLOW);
    other.memcpy_htod(&vec![7u8; LEN], &mut buffer.write_on::<u8>(&one).unwrap()).unwrap();
    let bytes = other.clone_dtoh(&buffer.read_on::<u8>(&one).unwrap()).unwrap();
    assert!(bytes == [7; LEN]);
}

async fn parts_know_what_the_whole_was_used_for(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let mut source = gpu.alloc(&one.domain, LEN);
    gpu.fill_late(&mut source, SLOW, 1);
    let tail = source.split_off(1000).unwrap();
    assert!(!source.is_idle().unwrap() && !tail.is_idle().unwrap());
    let target = gpu.alloc(&other.domain, LEN);
    let (received, sent) = join!(other.receive(target), one.send(tail));
    // The pattern goes on where the head ends.
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN - 1000, 1001), 0);
    let whole = source.unsplit(sent.unwrap()).unwrap();
    assert_eq!(gpu.mismatches(&whole, LEN, 1), 0);
}

async fn the_whole_knows_what_its_parts_were_used_for(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    for slow_head in [true, false] {
        let mut head = gpu.alloc(&one.domain, LEN);
        let mut tail = head.split_off(1000).unwrap();
        let times = if slow_head { [SLOW, Duration::ZERO] } else { [Duration::ZERO, SLOW] };
        gpu.fill_late(&mut head, times[0], 0);
        gpu.fill_late(&mut tail, times[1], 1000);
        let (source, target) = (head.unsplit(tail).unwrap(), gpu.alloc(&other.domain, LEN));
        let (received, sent) = join!(other.receive(target), one.send(source));
        sent.unwrap();
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 0), 0);
    }
    // What does not belong together stays apart.
    let mut buffer = gpu.alloc(&one.domain, 10);
    let (tail, middle) = (buffer.split_off(8).unwrap(), buffer.split_off(4).unwrap());
    let (first, second) = buffer.unsplit(tail).unwrap_err().into_buffers();
    let whole = first.unsplit(middle).unwrap().unsplit(second).unwrap();
    let error = whole.unsplit(gpu.alloc(&one.domain, 10)).unwrap_err();
    assert_eq!(error.to_string(), "unsplit: the buffers belong to different memory regions");
}

/// Asking whether a buffer is idle tells nothing of what a guard that lives on will be used for.
async fn a_guard_that_outlives_a_look_counts_in_full(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let (source, target) = (gpu.filled(&one.domain, LEN, 2), gpu.filled(&other.domain, LEN, 1));
    let stream = gpu.stream();
    let guard = target.read_on::<u8>(&stream).unwrap();
    target.idle().await.unwrap();
    assert!(target.is_idle().unwrap());
    gpu.spin(&stream, SLOW);
    let verdict = gpu.check(&guard, LEN, 1);
    drop(guard);
    assert!(!target.is_idle().unwrap());
    let (received, sent) = join!(other.receive(target), one.send(source));
    sent.unwrap();
    assert_eq!(verdict.mismatches(), 0, "the reader was overtaken");
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 2), 0);
}

/// It was ready for an operation that never came about, and then a kernel got it.
async fn a_buffer_that_came_back_is_looked_at_again(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair_of(|settings| settings.receive_depth(1)).await);
    let (one, other) = (&pair.client, &pair.server);
    let (source, target) = (gpu.filled(&one.domain, LEN, 2), gpu.filled(&other.domain, LEN, 1));
    let mut occupying = other.receive(other.buffer(8));
    occupying.try_post().unwrap();
    let (error, target) = other.receive(target).timeout(Duration::from_millis(30)).await.unwrap_err().into_parts();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    let target = target.expect("it was not posted");
    let verdict = gpu.check_late(&target, SLOW, 1);
    one.send_number(1).await;
    occupying.await.unwrap();
    let (received, sent) = join!(other.receive(target), one.send(source));
    sent.unwrap();
    assert_eq!(verdict.mismatches(), 0, "the reader was overtaken");
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 2), 0);
}

async fn several_tasks_wait_for_the_same_buffer(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let mut buffer = gpu.alloc(&domain, LEN);
    gpu.fill_late(&mut buffer, SLOW, 1);
    let buffer = Arc::new(buffer);
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let buffer = buffer.clone();
            tokio::spawn(async move { buffer.idle().await })
        })
        .collect();
    // One that gives up takes nothing from the others.
    waiting[2].abort();
    for waiting in waiting.into_iter().take(2) {
        within(SOON, waiting).await.unwrap().unwrap();
    }
    assert!(buffer.is_idle().unwrap());
    // Nothing happened to the bytes.
    let buffer = Arc::try_unwrap(buffer).unwrap_or_else(|_| panic!("all tasks have ended"));
    assert_eq!(gpu.mismatches(&buffer, LEN, 1), 0);
}

async fn exposing_a_busy_buffer_is_refused(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let mut buffer = gpu.alloc(&domain, LEN);
    gpu.fill_late(&mut buffer, SLOW, 1);
    let (error, buffer): (_, GpuBuffer) = buffer.expose(tokio_rdma::Access::all()).unwrap_err().into_parts();
    let Error::Gpu(error) = error else { panic!("{error}") };
    assert!(matches!(*error, GpuError::Busy { operation: "expose", .. }), "{error}");
    eventually(|| buffer.is_idle().unwrap(), || ()).await;
    buffer.expose(tokio_rdma::Access::all()).unwrap();
}
