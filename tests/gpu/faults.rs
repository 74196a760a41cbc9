//! A kernel that fails takes its context with it, and nothing else.

use std::time::{Duration, Instant};

use tokio::join;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, GpuError};
use tokio_rdma::{Access, Error, WcStatus};

use crate::common::{End, Pair, Rig, exercise, within};
use crate::gpu::{Gpu, pattern};

lone_gpu_cases!(
    while_a_send_waits_for_its_producer,
    while_a_buffer_is_waited_for,
    while_a_receive_is_posted,
    before_a_send_is_served,
    while_a_peer_writes,
    on_the_staged_path,
);

/// From the failure to the error, on a machine with other work to do.
const NOTICED: Duration = Duration::from_secs(10);

const LATE: Duration = Duration::from_millis(200);
const LEN: usize = 1 << 20;

#[track_caller]
fn assert_faulted(error: &Error) {
    let Error::Gpu(error) = error else { panic!("{error:?}") };
    assert!(matches!(**error, GpuError::Driver { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("a kernel failed before, and the context cannot be used any more"), "{text}");
    assert!(text.contains("CUDA_ERROR_"), "{text}");
}

/// Waits until the GPU's context is broken.
async fn faulted(gpu: &Gpu) {
    let stream = gpu.stream();
    gpu.fault(&stream);
    let start = Instant::now();
    while stream.synchronize().is_ok() {
        assert!(start.elapsed() < NOTICED, "the kernel did not fail");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Everything that needs the GPU says so, and everything else works.
async fn aftermath(rig: &Rig, gpu: &Gpu, end: &End) {
    assert_faulted(&GpuBuffer::alloc(gpu, &end.domain, 8).unwrap_err());
    assert!(GpuDevice::count() > 0);
    let other = rig.domain();
    exercise(&rig.connect(&end.domain, &other).await).await;
}

async fn while_a_send_waits_for_its_producer(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let ticks = tokio::spawn(async {
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let stream = gpu.stream();
    let mut source = gpu.alloc(&one.domain, LEN);
    gpu.spin(&stream, LATE);
    gpu.fault(&stream);
    gpu.fill(&stream, &mut source, 1);
    let (error, source) = within(NOTICED, one.send(source)).await.unwrap_err().into_parts();
    assert_faulted(&error);
    ticks.await.unwrap();
    let source = source.expect("it was not posted");
    assert_faulted(&source.idle().await.unwrap_err());
    assert_faulted(&source.is_idle().unwrap_err());
    assert_faulted(&source.read_on::<u8>(&stream).map(|_| ()).err().unwrap_or(error));
    let (error, source) = source.expose(Access::all()).unwrap_err().into_parts();
    assert_faulted(&error);
    drop(source);
    // The connection was not touched.
    exercise(&pair).await;
    let (received, sent) = join!(other.receive(other.buffer(8)), one.send(one.buffer(8)));
    assert!(received.is_ok() && sent.is_ok());
    aftermath(&rig, &gpu, one).await;
}

async fn while_a_buffer_is_waited_for(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let mut buffers: Vec<_> = (0..4).map(|_| gpu.alloc(&domain, LEN)).collect();
    // The fault first: streams share the queues of a GPU, and what is behind a producer's kernels in one comes after them.
    let stream = gpu.stream();
    gpu.spin(&stream, 5 * LATE);
    gpu.fault(&stream);
    for (seed, buffer) in buffers.iter_mut().enumerate() {
        gpu.fill_late(buffer, 50 * LATE, seed as u64);
    }
    let waiting = buffers.into_iter().map(|buffer| async move { buffer.idle().await });
    let ended = within(NOTICED, futures::future::join_all(waiting)).await;
    ended.into_iter().for_each(|ended| assert_faulted(&ended.unwrap_err()));
}

/// The peer's message comes to a GPU that takes nothing any more: both sides learn of it.
async fn while_a_receive_is_posted(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let mut receive = other.receive(gpu.alloc(&other.domain, LEN));
    receive.try_post().unwrap();
    let waiting = tokio::spawn(receive);
    faulted(&gpu).await;
    let source = one.domain.register(pattern(LEN, 1)).unwrap();
    let (sent, received) = within(NOTICED, async { join!(one.send(source), waiting) }).await;
    let (error, buffer) = received.unwrap().unwrap_err().into_parts();
    assert!(matches!(error, Error::Completion { .. } | Error::Closed { .. }), "{error}");
    assert!(buffer.is_some());
    let error = sent.unwrap_err();
    let status = matches!(error.error(), Error::Completion { status: WcStatus::RemoteOperation, .. });
    assert!(status, "{error}");
    drop(buffer);
    aftermath(&rig, &gpu, other).await;
}

async fn before_a_send_is_served(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    // Too much to be on its way before anybody receives it.
    let long = 16 * LEN;
    let source = gpu.filled(&one.domain, long, 1);
    source.idle().await.unwrap();
    let mut send = one.send(source);
    send.try_post().unwrap();
    faulted(&gpu).await;
    let mut receive = other.receive(other.buffer(long));
    // The peer may have been told by now.
    let _ = receive.try_post();
    let (error, buffer) = within(NOTICED, send).await.unwrap_err().into_parts();
    assert!(matches!(error, Error::Completion { .. } | Error::Closed { .. }), "{error}");
    let reason = one.close_reason().unwrap().to_string();
    assert!(reason.contains("CUDA_ERROR_"), "{reason}");
    // The connection has ended, and the peer learns of it.
    within(NOTICED, receive).await.unwrap_err();
    drop(buffer);
    aftermath(&rig, &gpu, one).await;
    aftermath(&rig, &gpu, other).await;
}

async fn while_a_peer_writes(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let Pair { client: one, server: other } = &pair;
    let region = gpu.exposed(other, LEN);
    let (writer, remote) = (one.clone(), region.remote());
    let writing = tokio::spawn(async move {
        let mut source = writer.domain.register(pattern(LEN, 1)).unwrap();
        loop {
            source = match writer.write(source, &remote).await {
                Ok(source) => source,
                Err(error) => return error,
            };
        }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    faulted(&gpu).await;
    let error = within(NOTICED, writing).await.unwrap();
    assert!(matches!(error.error(), Error::Completion { .. } | Error::Closed { .. }), "{error}");
    drop(region.reclaim());
    aftermath(&rig, &gpu, one).await;
}

async fn on_the_staged_path(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let target = gpu.alloc_staged(&other.domain, LEN);
    let source = gpu.alloc_staged(&other.domain, LEN);
    let mut receive = other.receive(target);
    receive.try_post().unwrap();
    faulted(&gpu).await;
    let message = one.domain.register(pattern(LEN, 1)).unwrap();
    let (sent, received) = within(NOTICED, async { join!(one.send(message), receive) }).await;
    // The device had no part in it: the message has come, as far as the host.
    sent.unwrap();
    let (error, buffer) = received.unwrap_err().into_parts();
    assert_faulted(&error);
    drop(buffer.expect("the device is done with it"));
    let (error, buffer) = other.send(source).await.unwrap_err().into_parts();
    assert_faulted(&error);
    drop(buffer.expect("it was not posted"));
    exercise(&pair).await;
    aftermath(&rig, &gpu, other).await;
}
