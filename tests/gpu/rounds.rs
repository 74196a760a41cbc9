//! Bytes that one kernel makes and another one checks, with every verb, over every combination of ends.

use tokio::join;
use tokio_rdma::gpu::GpuPath;
use tokio_rdma::{Access, Buffer, Connection, Listener, SharedReceiveQueue};

use crate::common::rig::contents;
use crate::common::{End, Rig};
use crate::gpu::{Gpu, fake, host_mismatches, pattern};

gpu_cases!(
    sent_and_received,
    received_from_a_shared_queue,
    sent_by_the_host_and_received_by_the_gpu,
    sent_by_the_gpu_and_received_by_the_host,
    written,
    written_with_immediate,
    read,
    parts_of_a_buffer,
    many_in_flight,
    one_end_in_both_roles,
    atomics_on_memory_of_the_gpu,
    between_gpus_and_the_host,
);

lone_gpu_cases!(within_one_process);

/// A whole page, less, more, odd ones, and more than the software device takes in one piece.
fn lengths() -> Vec<usize> {
    let mut lengths = vec![1, 8, 17, 4095, 4097, 64 << 10, (256 << 10) - 1, (256 << 10) + 1, 1 << 20, (5 << 20) + 1];
    if fake().is_none() {
        lengths.push(64 << 20);
    }
    lengths
}

async fn sent_and_received(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in lengths() {
        for (one, other) in pair.directions() {
            let seed = 3 * len as u64;
            let source = gpu.filled(&one.domain, len, seed);
            assert_eq!(source.path(), GpuPath::Software);
            let target = gpu.alloc(&other.domain, len + 3);
            let (received, sent) = join!(other.receive(target), one.send(source));
            let received = received.unwrap();
            assert_eq!((received.len, received.in_buffer), (len, true));
            assert_eq!(gpu.mismatches(&received.buffer, len, seed), 0, "{len} bytes");
            assert_eq!(gpu.contents(&received.buffer)[len..], [0, 0, 0], "nothing behind the message is touched");
            assert_eq!(gpu.mismatches(&sent.unwrap(), len, seed), 0);
        }
    }
}

async fn received_from_a_shared_queue(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let srq = SharedReceiveQueue::new(&domain, 4).unwrap();
    let listener = Listener::builder(&domain).srq(&srq).bind(rig.address()).await.unwrap();
    let theirs = rig.domain();
    let mut ends = Vec::new();
    for _ in 0..2 {
        let (client, server) = join!(Connection::connect(&theirs, listener.local_address()), listener.accept());
        ends.push((End::new(&theirs, client.unwrap()), server.unwrap()));
    }
    for len in lengths() {
        for (client, server) in &ends {
            let seed = 5 * len as u64;
            let mut receive = srq.receive(gpu.alloc(&domain, len + 3));
            receive.try_post().unwrap();
            client.send(gpu.filled(&theirs, len, seed)).await.unwrap();
            let (from, received) = receive.await.unwrap();
            assert_eq!((from, received.len), (server.id(), len));
            assert_eq!(gpu.mismatches(&received.buffer, len, seed), 0, "{len} bytes");
            assert_eq!(gpu.contents(&received.buffer)[len..], [0, 0, 0], "nothing behind the message is touched");
        }
    }
}

async fn between_gpus_and_the_host(rig: Rig) {
    let ((near, far), pair) = (Gpu::open_two(), rig.pair().await);
    for len in lengths() {
        for (one, other) in pair.directions() {
            let source = near.filled(&one.domain, len, 3);
            let (received, sent) = join!(other.receive(far.alloc(&other.domain, len)), one.send(source));
            assert_eq!(far.mismatches(&received.unwrap().buffer, len, 3), 0, "sent {len} bytes");
            let mut source = sent.unwrap();
            near.fill(&near.stream(), &mut source, 4);
            let exposed = far.exposed(other, len);
            let source = one.write(source, &exposed.remote()).await.unwrap();
            assert_eq!(far.mismatches_in(&exposed, len, 4), 0, "written {len} bytes");
            drop(source);
            let back = one.read(near.alloc(&one.domain, len), &exposed.remote()).await.unwrap();
            assert_eq!(near.mismatches(&back, len, 4), 0, "read {len} bytes");
            let back = one.read(one.buffer(len), &exposed.remote()).await.unwrap();
            assert_eq!(host_mismatches(&back, 4), 0, "read {len} bytes to the host");
        }
    }
}

/// Between GPUs of one process nothing goes through the host, and the connection says so.
async fn within_one_process(rig: Rig) {
    let ((near, far), pair) = (Gpu::open_two(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let len = (9 << 20) + 1;
    let before = fake().map(|fake| (fake.get("bytes_d2h"), fake.get("bytes_h2d")));
    let (received, sent) =
        join!(other.receive(far.alloc(&other.domain, len)), one.send(near.filled(&one.domain, len, 3)));
    let mut sent = sent.unwrap();
    let after = fake().map(|fake| (fake.get("bytes_d2h"), fake.get("bytes_h2d")));
    assert_eq!(before, after);
    assert_eq!(far.mismatches(&received.unwrap().buffer, len, 3), 0);
    assert_eq!([one, other].map(|end| end.stats().bytes_between_gpus), [0, len as u64]);
    if crate::gpu::count() > 1 {
        if let Some(fake) = fake() {
            // Opened to the other GPU once.
            let opened = fake.get("cuMemSetAccess");
            let (received, again) = join!(other.receive(far.alloc(&other.domain, len)), one.send(sent));
            received.unwrap();
            sent = again.unwrap();
            assert_eq!((fake.get("cuMemSetAccess"), fake.get("cuCtxEnablePeerAccess")), (opened + 1, 1));
        }
    }
    // What lies in the host's memory is not between GPUs.
    let between = other.stats().bytes_between_gpus;
    let (received, _) = join!(other.receive(other.buffer(len)), one.send(sent));
    assert_eq!(host_mismatches(received.unwrap().message(), 3), 0);
    assert_eq!(other.stats().bytes_between_gpus, between);

    let apart = Rig::new(crate::common::Setup::SOFT_TCP_APART);
    let pair = apart.pair().await;
    let (one, other) = (&pair.client, &pair.server);
    let (received, _) = join!(other.receive(far.alloc(&other.domain, len)), one.send(near.filled(&one.domain, len, 3)));
    assert_eq!(far.mismatches(&received.unwrap().buffer, len, 3), 0);
    assert_eq!(other.stats().bytes_between_gpus, 0);
}

fn of_host(end: &End, len: usize, seed: u64) -> Buffer {
    end.domain.register(pattern(len, seed)).unwrap()
}

async fn sent_by_the_host_and_received_by_the_gpu(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in lengths() {
        for (one, other) in pair.directions() {
            let target = gpu.alloc(&other.domain, len);
            let (received, sent) = join!(other.receive(target), one.send(of_host(one, len, 5)));
            assert_eq!(gpu.mismatches(&received.unwrap().buffer, len, 5), 0, "{len} bytes");
            sent.unwrap();
        }
    }
}

async fn sent_by_the_gpu_and_received_by_the_host(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in lengths() {
        for (one, other) in pair.directions() {
            let source = gpu.filled(&one.domain, len, 6);
            let (received, sent) = join!(other.receive(other.buffer(len)), one.send_with_immediate(source, len as u32));
            let received = received.unwrap();
            assert_eq!(received.immediate, Some(len as u32));
            assert_eq!(host_mismatches(received.message(), 6), 0, "{len} bytes");
            sent.unwrap();
        }
    }
}

async fn written(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in lengths() {
        for (one, other) in pair.directions() {
            let on_gpu = gpu.exposed(other, len);
            one.write(gpu.filled(&one.domain, len, 1), &on_gpu.remote()).await.unwrap();
            assert_eq!(gpu.mismatches_in(&on_gpu, len, 1), 0, "{len} bytes");
            one.write(of_host(one, len, 2), &on_gpu.remote()).await.unwrap();
            let back = on_gpu.reclaim().unwrap();
            assert_eq!(gpu.mismatches(&back, len, 2), 0, "{len} bytes");

            let on_host = other.exposed(len);
            one.write(gpu.filled(&one.domain, len, 3), &on_host.remote()).await.unwrap();
            assert_eq!(host_mismatches(&contents(&on_host), 3), 0, "{len} bytes");
        }
    }
}

async fn written_with_immediate(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in lengths() {
        for (one, other) in pair.directions() {
            let region = gpu.exposed(other, len);
            // The notice comes to a buffer of the GPU as well.
            let notice = gpu.alloc(&other.domain, 1);
            let (noticed, written) = join!(
                other.receive(notice),
                one.write_with_immediate(gpu.filled(&one.domain, len, 4), &region.remote(), 9)
            );
            written.unwrap();
            let noticed = noticed.unwrap();
            assert_eq!((noticed.immediate, noticed.in_buffer, noticed.len), (Some(9), false, len));
            assert_eq!(gpu.mismatches_in(&region, len, 4), 0, "{len} bytes");
        }
    }
}

async fn read(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in lengths() {
        for (one, other) in pair.directions() {
            let mut source = gpu.alloc(&other.domain, len);
            gpu.fill(&gpu.stream(), &mut source, 7);
            source.idle().await.unwrap();
            let on_gpu = source.expose(Access::REMOTE_READ).unwrap();
            let read = one.read(gpu.alloc(&one.domain, len), &on_gpu.remote()).await.unwrap();
            assert_eq!(gpu.mismatches(&read, len, 7), 0, "{len} bytes");
            let read = one.read(one.buffer(len), &on_gpu.remote()).await.unwrap();
            assert_eq!(host_mismatches(&read, 7), 0, "{len} bytes");

            let on_host = of_host(other, len, 8).expose(Access::REMOTE_READ).unwrap();
            let read = one.read(gpu.alloc(&one.domain, len), &on_host.remote()).await.unwrap();
            assert_eq!(gpu.mismatches(&read, len, 8), 0, "{len} bytes");
        }
    }
}

async fn parts_of_a_buffer(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let cuts = [1, 8, 1000, 70_001];
    let mut source = gpu.filled(&one.domain, 100_000, 1);
    let mut target = gpu.alloc(&other.domain, 100_000);
    let mut parts = (Vec::new(), Vec::new());
    for at in cuts {
        let ((), sent) = join!(
            async {
                let part = other.receive(target.split_to(at).unwrap()).await.unwrap();
                parts.1.push(part.buffer);
            },
            one.send(source.split_to(at).unwrap())
        );
        parts.0.push(sent.unwrap());
    }
    let (received, sent) = join!(other.receive(target), one.send(source));
    parts.0.push(sent.unwrap());
    parts.1.push(received.unwrap().buffer);
    for parts in [parts.0, parts.1] {
        let whole = parts.into_iter().reduce(|first, second| first.unsplit(second).unwrap()).unwrap();
        assert_eq!((whole.len(), gpu.mismatches(&whole, 100_000, 1)), (100_000, 0));
    }
}

async fn many_in_flight(rig: Rig) {
    const COUNT: u64 = 64;
    const LEN: usize = 30_001;
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for (one, other) in pair.directions() {
        let mut receives: Vec<_> = (0..COUNT).map(|_| other.receive(gpu.alloc(&other.domain, LEN))).collect();
        for receive in &mut receives {
            receive.try_post().unwrap();
        }
        let mut sources = Vec::new();
        for seed in 0..COUNT {
            let source = gpu.filled(&one.domain, LEN, seed);
            // So that they are posted in order.
            source.idle().await.unwrap();
            sources.push(source);
        }
        let sends = sources.into_iter().map(|source| one.send(source));
        let (received, sent) = join!(futures::future::join_all(receives), futures::future::join_all(sends));
        for (seed, received) in received.into_iter().enumerate() {
            assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, seed as u64), 0);
        }
        assert!(sent.into_iter().all(|sent| sent.is_ok()));
    }
}

/// A connection of a device to itself: both buffers belong to one domain.
async fn one_end_in_both_roles(rig: Rig) {
    let gpu = Gpu::open();
    let domain = rig.domain();
    let pair = rig.connect(&domain, &domain).await;
    let whole = gpu.filled(&domain, 3 << 20, 3);
    let received = {
        let (received, sent) = join!(pair.server.receive(gpu.alloc(&domain, 3 << 20)), pair.client.send(whole));
        sent.unwrap();
        received.unwrap().buffer
    };
    assert_eq!(gpu.mismatches(&received, 3 << 20, 3), 0);
}

async fn atomics_on_memory_of_the_gpu(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let region = gpu.exposed(other, 64);
    let word = region.remote().slice(8..16).unwrap();
    assert_eq!(one.fetch_add(&word, 40).await.unwrap(), 0);
    assert_eq!(one.fetch_add(&word, 2).await.unwrap(), 40);
    assert_eq!(one.compare_swap(&word, 42, 7).await.unwrap(), 42);
    assert_eq!(one.compare_swap(&word, 42, 8).await.unwrap(), 7);
    let stream = gpu.stream();
    let words = stream.clone_dtoh(&region.read_on::<u64>(&stream).unwrap()).unwrap();
    assert_eq!(words, [0, 7, 0, 0, 0, 0, 0, 0]);
}
