//! Buffers that go through pinned memory on the host, and deadlines.

use std::time::Duration;

use tokio::join;
use tokio_rdma::gpu::{GpuError, GpuPath, PathPolicy};
use tokio_rdma::{Access, Error};

use crate::common::{Rig, eventually};
use crate::gpu::{Gpu, fake_only, host_mismatches, pattern};

gpu_cases!(
    staged_buffers_do_everything_but_being_exposed,
    parts_of_a_staged_buffer,
    on_a_stream,
    a_late_producer_outlasts_its_deadline,
    posted_and_timed_out,
);

lone_gpu_cases!(
    a_copy_that_was_given_up_is_made_again,
    a_deadline_while_the_bytes_are_on_their_way_to_the_gpu,
    streams_wait_for_the_last_copy,
);

const SLOW: Duration = Duration::from_millis(300);

/// Long enough that whatever can happen has happened.
const SHORT: Duration = Duration::from_millis(30);

async fn staged_buffers_do_everything_but_being_exposed(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in [2, 17, 4096, (1 << 20) + 3] {
        for (one, other) in pair.directions() {
            let mut source = gpu.alloc_staged(&one.domain, len);
            assert_eq!(source.path(), GpuPath::Staged);
            gpu.fill_late(&mut source, Duration::from_millis(20), 1);
            let target = gpu.alloc_staged(&other.domain, len);
            let (received, sent) = join!(other.receive(target), one.send(source));
            let target = received.unwrap().buffer;
            assert_eq!(gpu.mismatches(&target, len, 1), 0, "{len} bytes");

            // From one kind to the other, and one-sided.
            let region = gpu.exposed(other, len);
            let source = one.write(sent.unwrap(), &region.remote()).await.unwrap();
            assert_eq!(gpu.mismatches_in(&region, len, 1), 0, "{len} bytes");
            let source = one.read(source, &region.remote()).await.unwrap();
            assert_eq!(gpu.mismatches(&source, len, 1), 0, "{len} bytes");
            let (noticed, written) =
                join!(other.receive(target), one.write_with_immediate(source, &region.remote(), 1));
            let (target, source) = (noticed.unwrap().buffer, written.unwrap());
            assert_eq!(gpu.mismatches(&target, len, 1), 0, "a notice leaves the buffer alone");

            // A shorter message leaves the rest alone.
            let short = one.domain.register(pattern(len / 2, 9)).unwrap();
            let (received, sent) = join!(other.receive(target), one.send(short));
            sent.unwrap();
            let target = received.unwrap().buffer;
            let bytes = gpu.contents(&target);
            assert_eq!(bytes[..len / 2], pattern(len / 2, 9));
            assert_eq!(bytes[len / 2..], pattern(len, 1)[len / 2..]);

            target.idle().await.unwrap();
            let (error, target) = target.expose(Access::all()).unwrap_err().into_parts();
            let Error::Gpu(error) = error else { panic!("{error}") };
            assert!(matches!(*error, GpuError::Invalid { operation: "expose", .. }), "{error}");
            assert!(error.to_string().contains("staged through pinned memory"), "{error}");
            assert_eq!((target.len(), source.len()), (len, len));
        }
    }
}

async fn parts_of_a_staged_buffer(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let mut source = gpu.alloc_staged(&one.domain, 10_000);
    gpu.fill_late(&mut source, SLOW, 0);
    let tail = source.split_off(4_001).unwrap();
    let mut target = gpu.alloc_staged(&other.domain, 10_000);
    let end = target.split_off(5_999).unwrap();
    // Crosswise: what came from the end of the one goes to the start of the other.
    let (received, sent) = join!(other.receive(target), one.send(tail));
    let (target, tail) = (received.unwrap().buffer, sent.unwrap());
    let (received, sent) = join!(other.receive(end), one.send(source));
    let (end, source) = (received.unwrap().buffer, sent.unwrap());
    assert_eq!(gpu.mismatches(&target, 5_999, 4_001), 0);
    assert_eq!(gpu.mismatches(&end, 4_001, 0), 0);
    assert_eq!(gpu.mismatches(&source.unsplit(tail).unwrap(), 10_000, 0), 0);
    let target = target.unsplit(end).unwrap();
    let (received, sent) = join!(one.receive(one.buffer(10_000)), other.send(target));
    sent.unwrap();
    assert_eq!(host_mismatches(&received.unwrap().message()[5_999..], 0), 0);
}

async fn on_a_stream(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let len = 1 << 20;
    for policy in [PathPolicy::Direct, PathPolicy::Staged] {
        let stream = gpu.stream();
        let target = tokio_rdma::gpu::GpuBuffer::alloc_with(&gpu, &other.domain, len, policy).unwrap();
        let (received, sent) = join!(other.receive(target).on(&stream), one.send(gpu.filled(&one.domain, len, 3)));
        sent.unwrap();
        let target = received.unwrap().buffer;
        let verdict = gpu.check(&target.read_on::<u8>(&stream).unwrap(), len, 3);
        assert_eq!(verdict.mismatches(), 0);

        let source = gpu.filled(&other.domain, len, 4);
        source.idle().await.unwrap();
        let region = source.expose(Access::REMOTE_READ).unwrap();
        let target = tokio_rdma::gpu::GpuBuffer::alloc_with(&gpu, &one.domain, len, policy).unwrap();
        let target = one.read(target, &region.remote()).on(&stream).await.unwrap();
        let verdict = gpu.check(&target.read_on::<u8>(&stream).unwrap(), len, 4);
        assert_eq!(verdict.mismatches(), 0);
    }
}

async fn a_late_producer_outlasts_its_deadline(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    for policy in [PathPolicy::Direct, PathPolicy::Staged] {
        let mut source = tokio_rdma::gpu::GpuBuffer::alloc_with(&gpu, &one.domain, 1000, policy).unwrap();
        gpu.fill_late(&mut source, 3 * SLOW, 2);
        let (error, source) = one.send(source).timeout(SHORT).await.unwrap_err().into_parts();
        assert!(matches!(error, Error::Timeout { operation: "send", after: SHORT, .. }), "{error}");
        // The device never had it, and it still knows what the GPU does.
        let source = source.expect("it was not posted");
        assert_eq!(one.stats().in_flight, 0);
        assert!(!source.is_idle().unwrap());
        let (received, sent) = join!(other.receive(other.buffer(1000)), one.send(source));
        sent.unwrap();
        assert_eq!(host_mismatches(received.unwrap().message(), 2), 0);
    }
}

/// Bytes that were brought over for an operation that did not come about are old when the GPU has written others.
async fn a_copy_that_was_given_up_is_made_again(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let (stream, len) = (gpu.stream(), 100_001);
    let mut source = gpu.alloc_staged(&one.domain, len);
    fake.set("copy_delay_us", 700_000);
    for seed in 1..3 {
        gpu.fill(&stream, &mut source, seed);
        source.idle().await.unwrap();
        // Its first look starts the copy.
        let given_up = one.send(source).timeout(SHORT).await.unwrap_err();
        source = given_up.into_buffer().expect("it was not posted");
        gpu.fill(&stream, &mut source, 10 * seed);
        let (received, sent) = join!(other.receive(other.buffer(len)), one.send(source));
        assert_eq!(host_mismatches(received.unwrap().message(), 10 * seed), 0);
        source = sent.unwrap();
    }
}

async fn posted_and_timed_out(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    for policy in [PathPolicy::Direct, PathPolicy::Staged] {
        let target = tokio_rdma::gpu::GpuBuffer::alloc_with(&gpu, &other.domain, 1000, policy).unwrap();
        let (error, buffer) = other.receive(target).timeout(SHORT).await.unwrap_err().into_parts();
        assert!(matches!(error, Error::Timeout { operation: "receive", .. }), "{error}");
        assert!(buffer.is_none(), "the device may still write to it");
        assert_eq!(other.stats().live_slots, 1);
        // The message that it gets is lost, and then it is free.
        one.send(gpu.filled(&one.domain, 1000, 1)).await.unwrap();
        eventually(|| other.stats().live_slots == 0, || other.stats()).await;
    }
    eventually(|| other.domain.stats().live_regions == 0, || other.domain.stats()).await;
}

async fn a_deadline_while_the_bytes_are_on_their_way_to_the_gpu(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let target = gpu.alloc_staged(&other.domain, 1000);
    let receive = other.receive(target).timeout(Duration::from_millis(1500));
    fake.set("copy_delay_us", 4_000_000);
    let source = one.domain.register(pattern(1000, 5)).unwrap();
    let (received, sent) = join!(receive, one.send(source));
    fake.set("copy_delay_us", 0);
    sent.unwrap();
    let (error, target) = received.unwrap_err().into_parts();
    assert!(error.to_string().contains("still on their way to the GPU"), "{error}");
    let target = target.expect("the device is done with it");
    assert!(!target.is_idle().unwrap());
    // A reader comes after the copy all the same.
    assert_eq!(gpu.mismatches(&target, 1000, 5), 0);
}

/// With `on`, the operation ends before the copy does.
async fn streams_wait_for_the_last_copy(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let stream = gpu.stream();
    let target = gpu.alloc_staged(&other.domain, 1000);
    fake.set("copy_delay_us", 1_000_000);
    let source = one.domain.register(pattern(1000, 5)).unwrap();
    let (received, sent) = join!(other.receive(target).on(&stream), one.send(source));
    sent.unwrap();
    let target = received.unwrap().buffer;
    assert!(!target.is_idle().unwrap(), "the copy was waited for");
    let verdict = gpu.check(&target.read_on::<u8>(&stream).unwrap(), 1000, 5);
    assert_eq!(verdict.mismatches(), 0);
    // And so does the next operation.
    let (received, sent) = join!(one.receive(one.buffer(1000)), other.send(target));
    sent.unwrap();
    assert_eq!(host_mismatches(received.unwrap().message(), 5), 0);
}
