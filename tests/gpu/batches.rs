//! Batches, and posting at once: for buffers that are ready.

use std::time::Duration;

use tokio::join;
use tokio_rdma::gpu::{GpuBuffer, GpuError};
use tokio_rdma::{Access, Error};

use crate::common::Rig;
use crate::gpu::{Gpu, host_mismatches};

gpu_cases!(ready_buffers_go_together, busy_buffers_come_back, posting_at_once);

const SLOW: Duration = Duration::from_millis(800);
const LEN: usize = 70_001;

fn assert_busy(error: &Error) {
    let Error::Gpu(error) = error else { panic!("{error}") };
    assert!(matches!(**error, GpuError::Busy { .. }), "{error}");
    assert!(error.to_string().contains("the GPU still uses the buffer; await GpuBuffer::idle() first"), "{error}");
}

async fn ready_buffers_go_together(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for (one, other) in pair.directions() {
        let region = gpu.exposed(other, 3 * LEN);
        let part = |at| region.remote().slice(at as u64 * LEN as u64..(at as u64 + 1) * LEN as u64).unwrap();
        let mut buffers = Vec::new();
        for seed in 0..4 {
            let buffer = gpu.filled(&one.domain, LEN, seed);
            buffer.idle().await.unwrap();
            buffers.push(buffer);
        }
        let staged = gpu.alloc_staged(&one.domain, LEN);
        let mut buffers = buffers.into_iter();
        let mut next = || buffers.next().unwrap();
        let mut batch = one.batch();
        let silent = batch.write_unsignaled(next(), &part(0));
        let write = batch.write(next(), &part(1));
        let send = batch.send(next());
        let notice = batch.write_with_immediate(next(), &part(2), 5);
        let read = batch.read(staged, &part(1));
        assert_eq!(batch.len(), 5);
        let mut receives = [other.receive(gpu.alloc(&other.domain, LEN)), other.receive(gpu.alloc(&other.domain, 1))];
        for receive in &mut receives {
            receive.try_post().unwrap();
        }
        batch.post().await.unwrap();
        let (silent, write, send, notice, read) = join!(silent, write, send, notice, read);
        for (seed, buffer) in [silent, write, send, notice].into_iter().enumerate() {
            assert_eq!(gpu.mismatches(&buffer.unwrap(), LEN, seed as u64), 0);
        }
        assert_eq!(gpu.mismatches(&read.unwrap(), LEN, 1), 0);
        let [message, notice] = receives;
        assert_eq!(gpu.mismatches(&message.await.unwrap().buffer, LEN, 2), 0);
        assert_eq!(notice.await.unwrap().immediate, Some(5));
        let whole = region.reclaim().unwrap();
        let bytes = gpu.contents(&whole);
        for (part, seed) in bytes.chunks(LEN).zip([0, 1, 3]) {
            assert_eq!(host_mismatches(part, seed), 0);
        }
    }
}

async fn busy_buffers_come_back(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let region = gpu.exposed(other, LEN);
    let ready = gpu.filled(&one.domain, LEN, 1);
    ready.idle().await.unwrap();
    let mut busy = gpu.alloc(&one.domain, LEN);
    gpu.fill_late(&mut busy, SLOW, 2);
    let read_from = gpu.filled(&one.domain, LEN, 3);
    read_from.idle().await.unwrap();
    let verdict = gpu.check_late(&read_from, SLOW, 3);
    let staged = gpu.alloc_staged(&one.domain, LEN);

    let mut batch = one.batch();
    let writing = batch.write(busy, &region.remote());
    let write = batch.write(ready, &region.remote());
    let reading = batch.read(read_from, &region.remote());
    // Bytes that have to be copied first cannot go at once.
    let staging = batch.write(staged, &region.remote());
    assert_eq!(batch.len(), 1);
    batch.post().await.unwrap();
    write.await.unwrap();
    // Not even when it has become ready since: the batch is over.
    tokio::time::sleep(SLOW).await;
    let refused: Vec<(Error, Option<GpuBuffer>)> = vec![
        writing.await.unwrap_err().into_parts(),
        reading.await.unwrap_err().into_parts(),
        staging.await.unwrap_err().into_parts(),
    ];
    for (error, buffer) in refused {
        assert_busy(&error);
        assert_eq!(buffer.unwrap().len(), LEN);
    }
    assert_eq!(verdict.mismatches(), 0);
    assert_eq!(gpu.mismatches_in(&region, LEN, 1), 0, "the others' bytes are not there");
}

async fn posting_at_once(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let mut source = gpu.alloc(&one.domain, LEN);
    gpu.fill_late(&mut source, SLOW, 2);
    let mut send = one.send(source);
    assert_busy(&send.try_post().unwrap_err());
    assert_busy(&send.try_post().unwrap_err());
    // It can be awaited all the same, and then waits for the GPU.
    let (received, sent) = join!(other.receive(gpu.alloc(&other.domain, LEN)), send);
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 2), 0);

    let source = sent.unwrap();
    source.idle().await.unwrap();
    let mut send = one.send(source);
    send.try_post().unwrap();
    other.receive(other.buffer(LEN)).await.unwrap();
    let source = send.await.unwrap();

    // A staged source has to be copied first; a target has not.
    let target = gpu.alloc_staged(&other.domain, LEN);
    let mut receive = other.receive(target);
    receive.try_post().unwrap();
    one.send(source).await.unwrap();
    let target = receive.await.unwrap().buffer;
    assert_eq!(gpu.mismatches(&target, LEN, 2), 0);
    target.idle().await.unwrap();
    let mut send = other.send(target);
    let error = send.try_post().unwrap_err();
    assert!(error.to_string().contains("the bytes are staged, and have to be copied first"), "{error}");
    let (received, sent) = join!(one.receive(one.buffer(LEN)), send);
    sent.unwrap();
    assert_eq!(host_mismatches(received.unwrap().message(), 2), 0);

    let region = gpu.exposed(other, LEN);
    let mut write = one.write(gpu.alloc(&one.domain, LEN + 1), &region.remote());
    assert!(matches!(write.try_post().unwrap_err(), Error::Limit { .. }));
    assert_eq!(write.await.unwrap_err().into_buffer().unwrap().len(), LEN + 1);
    let remote = gpu.alloc(&other.domain, LEN).expose(Access::REMOTE_READ).unwrap();
    let error = one.write(gpu.alloc(&one.domain, LEN), &remote.remote()).await.unwrap_err();
    assert!(matches!(error.error(), Error::Access { .. }), "{error}");
}
