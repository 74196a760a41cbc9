//! Letting go at any time, from any thread: the memory stays for as long as somebody uses it, and not longer.
//!
//! The stand-in ends the process when memory is used that was freed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::{CudaSlice, DevicePtr};
use tokio::join;
use tokio_rdma::gpu::{GpuBuffer, PathPolicy};
use tokio_rdma::{Access, ProtectionDomain};

use crate::common::{Rig, eventually, poll_once};
use crate::gpu::{Gpu, fake, fake_only};

gpu_cases!(
    made_here_awaited_there_dropped_elsewhere,
    dropped_while_a_kernel_uses_it,
    dropped_while_an_operation_uses_it,
    dropped_before_it_is_posted,
    connections_dropped_with_operations_in_flight,
    exposed_memory_dropped_while_a_peer_uses_it,
    a_forgotten_operation_keeps_its_buffer,
    what_is_free_does_not_wait_for_what_is_not,
    an_owner_that_panics,
);

lone_gpu_cases!(memory_comes_back, everything_comes_back, opened_and_closed_many_times);

const SLOW: Duration = Duration::from_millis(50);

async fn made_here_awaited_there_dropped_elsewhere(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    for seed in 0..20 {
        let (gpu, one, other) = (gpu.clone(), one.clone(), other.clone());
        let made = std::thread::spawn(move || {
            let source = gpu.filled(&one.domain, 5000, seed);
            let target = gpu.alloc(&other.domain, 5000);
            (other.receive(target), one.send(source), gpu)
        });
        let (receive, send, gpu) = made.join().unwrap();
        let (received, sent) = tokio::spawn(async move { join!(receive, send) }).await.unwrap();
        let checked = std::thread::spawn(move || {
            assert_eq!(gpu.mismatches(&received.unwrap().buffer, 5000, seed), 0);
            drop(sent.unwrap());
        });
        checked.join().unwrap();
    }
}

async fn dropped_while_a_kernel_uses_it(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    for policy in [PathPolicy::Direct, PathPolicy::Staged] {
        let mut verdicts = Vec::new();
        for seed in 0..20 {
            let mut buffer = GpuBuffer::alloc_with(&gpu, &domain, 5000, policy).unwrap();
            gpu.fill(&gpu.stream(), &mut buffer, seed);
            verdicts.push(gpu.check_late(&buffer, SLOW, seed));
            let started = std::time::Instant::now();
            drop(buffer);
            assert!(started.elapsed() < 20 * SLOW, "a drop waits for nobody");
        }
        assert!(verdicts.into_iter().all(|verdict| verdict.mismatches() == 0));
    }
    eventually(|| domain.stats().live_regions == 0, || domain.stats()).await;
}

/// Operations of every kind, given up after any time: before they are posted, when they are posted, when they are done.
async fn dropped_while_an_operation_uses_it(rig: Rig) {
    const COUNT: u64 = 300;
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let region = gpu.exposed(other, 100_000);
    let receiving = {
        let (gpu, other) = (gpu.clone(), other.clone());
        tokio::spawn(async move {
            let mut messages = 0;
            loop {
                let received = other.receive(gpu.alloc(&other.domain, 100_000)).await.unwrap();
                messages += 1;
                if received.len == 8 {
                    return messages - 1;
                }
            }
        })
    };
    let random = fastrand::Rng::with_seed(7);
    let mut finished = 0;
    let mut random_buffer = {
        let (gpu, domain, mut random) = (gpu.clone(), one.domain.clone(), random.clone());
        move || {
            let policy = if random.bool() { PathPolicy::Direct } else { PathPolicy::Staged };
            let mut buffer = GpuBuffer::alloc_with(&gpu, &domain, random.usize(9..100_000), policy).unwrap();
            let late = Duration::from_micros(random.u64(0..500));
            gpu.fill_late(&mut buffer, late, 1);
            buffer
        }
    };
    let mut random = random;
    for round in 0..COUNT {
        let (buffer, remote) = (random_buffer(), region.remote());
        let after = Duration::from_micros(random.u64(0..3000));
        let ended = match round % 3 {
            0 => tokio::time::timeout(after, one.send(buffer)).await.map(|sent| drop(sent.unwrap())),
            1 => tokio::time::timeout(after, one.write(buffer, &remote)).await.map(|wrote| drop(wrote.unwrap())),
            _ => tokio::time::timeout(after, one.read(buffer, &remote)).await.map(|read| drop(read.unwrap())),
        };
        finished += u64::from(ended.is_ok());
    }
    // Behind all that was posted.
    one.send_number(1).await;
    let messages = receiving.await.unwrap();
    assert!(finished < COUNT, "none was given up");
    assert!(messages <= COUNT / 3 + 1, "{messages} messages");
    drop(region);
    for end in [one, other] {
        eventually(|| end.stats().live_slots == 0, || end.stats()).await;
        eventually(|| end.domain.stats().live_regions == 0, || end.domain.stats()).await;
    }
}

async fn dropped_before_it_is_posted(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    for _ in 0..50 {
        let mut source = gpu.alloc(&one.domain, 1000);
        gpu.fill_late(&mut source, 10 * SLOW, 1);
        let mut send = one.send(source);
        assert!(poll_once(&mut send).is_pending());
        drop(send);
    }
    assert_eq!(one.stats().in_flight, 0);
    let source = gpu.filled(&one.domain, 1000, 2);
    source.idle().await.unwrap();
    let mut send = one.send(source);
    send.try_post().unwrap();
    drop(send);
    let received = other.receive(gpu.alloc(&other.domain, 1000)).await.unwrap();
    assert_eq!(gpu.mismatches(&received.buffer, 1000, 2), 0, "the first message is the first that was posted");
    drop(received);
    for end in [one, other] {
        eventually(|| end.domain.stats().live_regions == 0, || end.domain.stats()).await;
    }
}

async fn connections_dropped_with_operations_in_flight(rig: Rig) {
    let gpu = Gpu::open();
    let (client, server) = (rig.domain(), rig.domain());
    for round in 0..30 {
        let pair = rig.connect(&client, &server).await;
        let region = gpu.exposed(&pair.server, 1 << 20);
        let mut receives: Vec<_> = (0..4).map(|_| pair.server.receive(gpu.alloc(&server, 1 << 20))).collect();
        for receive in &mut receives {
            receive.try_post().unwrap();
        }
        let mut tasks = tokio::task::JoinSet::new();
        for seed in 0..6 {
            let (one, buffer, remote) =
                (pair.client.clone(), gpu.filled(&client, (1 << 20) - seed as usize, seed), region.remote());
            tasks.spawn(async move {
                let ended = match seed % 3 {
                    0 => one.send(buffer).await,
                    1 => one.write(buffer, &remote).await,
                    _ => one.read(buffer, &remote).await,
                };
                drop(ended);
            });
        }
        if round % 2 == 0 {
            tokio::time::sleep(Duration::from_micros(300 * round)).await;
        }
        match round % 3 {
            0 => drop(pair),
            1 => pair.client.close().await,
            _ => pair.server.close().await,
        }
        drop(region);
        if round % 5 < 2 {
            tasks.shutdown().await;
        } else {
            while let Some(ended) = tasks.join_next().await {
                ended.unwrap();
            }
        }
        drop(receives);
    }
    for domain in [client, server] {
        eventually(|| domain.stats().live_regions == 0, || domain.stats()).await;
    }
}

/// What comes to lie at the same place afterwards is not the peer's to write.
async fn exposed_memory_dropped_while_a_peer_uses_it(rig: Rig) {
    const LEN: usize = 1 << 20;
    let gpu = Gpu::open();
    let (client, server) = (rig.domain(), rig.domain());
    let mut refused = 0;
    for round in 0..20 {
        let pair = rig.connect(&client, &server).await;
        let region = gpu.exposed(&pair.server, LEN);
        let (one, remote) = (pair.client.clone(), region.remote());
        let mut source = gpu.alloc(&client, LEN);
        gpu.fill(&gpu.stream(), &mut source, 99);
        let writing = tokio::spawn(async move {
            loop {
                match one.write(source, &remote).await {
                    Ok(buffer) => source = buffer,
                    Err(_) => return,
                }
            }
        });
        tokio::time::sleep(Duration::from_micros(400 * round)).await;
        let address = region.remote().address();
        let next = tokio::task::spawn_blocking({
            let (gpu, server) = (gpu.clone(), server.clone());
            move || {
                match round % 2 {
                    0 => drop(region),
                    _ => drop(region.reclaim().unwrap()),
                }
                // The memory is free a moment later.
                std::thread::sleep(Duration::from_millis(5));
                gpu.alloc(&server, LEN)
            }
        });
        let next = next.await.unwrap();
        refused += u64::from(next.address() == address);
        crate::common::within(crate::common::run::SOON, writing).await.unwrap();
        assert!(gpu.contents(&next).iter().all(|byte| *byte == 0), "written to memory that was given away");
    }
    assert!(fake().is_none() || refused > 0, "no address was used again");
}

async fn a_forgotten_operation_keeps_its_buffer(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    for seed in 0..10 {
        let source = gpu.filled(&one.domain, 5000, seed);
        source.idle().await.unwrap();
        let mut send = one.send(source);
        send.try_post().unwrap();
        std::mem::forget(send);
        let received = other.receive(gpu.alloc(&other.domain, 5000)).await.unwrap();
        assert_eq!(gpu.mismatches(&received.buffer, 5000, seed), 0);
    }
}

/// As the driver counts it.
async fn memory_comes_back(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let free = || gpu.context().mem_get_info().unwrap().0;
    let round = async |seed: u64| {
        let source = gpu.filled(&one.domain, 4 << 20, seed);
        let mut target = gpu.alloc_staged(&other.domain, 4 << 20);
        let tail = target.split_off(1 << 20).unwrap();
        let (received, sent) = join!(other.receive(tail), one.send(gpu.filled(&one.domain, 3 << 20, seed)));
        sent.unwrap();
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, 3 << 20, seed), 0);
        let _late = gpu.check_late(&source, Duration::from_millis(1), seed);
        drop(source.expose(Access::all()));
    };
    round(0).await;
    let settled = |before: usize| move |now: usize| now >= before;
    let before = {
        // The driver keeps what pools and modules have once taken.
        eventually(|| one.domain.stats().live_regions == 0, || one.domain.stats()).await;
        gpu.context().synchronize().unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        free()
    };
    for seed in 1..30 {
        round(seed).await;
    }
    let enough = settled(before);
    eventually(|| enough(free()), || (before, free())).await;
}

/// As the stand-in counts it.
async fn everything_comes_back(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    let counters =
        ["live_allocations", "live_host_allocations", "live_events", "live_streams", "live_modules", "live_contexts"];
    let count = || counters.map(|counter| fake.get(counter));
    for seed in 0..3 {
        let (gpu, pair) = (Gpu::open(), rig.pair().await);
        for staged in [false, true] {
            let alloc = |domain| if staged { gpu.alloc_staged(domain, 70_001) } else { gpu.alloc(domain, 70_001) };
            let mut source = alloc(&pair.client.domain);
            gpu.fill_late(&mut source, SLOW, seed);
            let target = alloc(&pair.server.domain);
            let (received, sent) = join!(pair.server.receive(target), pair.client.send(source));
            sent.unwrap();
            assert_eq!(gpu.mismatches(&received.unwrap().buffer, 70_001, seed), 0);
        }
        drop(pair);
        drop(gpu);
        eventually(|| count() == [0; 6], count).await;
    }
    assert_eq!((fake.get("leaked"), fake.get("open_handles")), (0, 0));
}

async fn opened_and_closed_many_times(rig: Rig) {
    let domain = rig.domain();
    let threads = crate::common::process::threads;
    let once = async || {
        let gpu = Gpu::open();
        let mut buffer = gpu.alloc(&domain, 100);
        gpu.fill_late(&mut buffer, Duration::from_millis(2), 1);
        buffer.idle().await.unwrap();
        assert_eq!(gpu.mismatches(&buffer, 100, 1), 0);
    };
    // What the driver starts once.
    let kept = Gpu::open();
    once().await;
    eventually(|| domain.stats().live_regions == 0, || domain.stats()).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = threads();
    for _ in 0..50 {
        once().await;
    }
    eventually(|| threads() <= before, || (before, threads())).await;
    drop(kept);
}

/// Memory that is told when it is not needed any more.
fn owned(
    gpu: &Gpu,
    domain: &ProtectionDomain,
    memory: &CudaSlice<u8>,
    on_drop: impl FnOnce() + Send + Sync + 'static,
) -> GpuBuffer {
    let (address, _noted) = memory.device_ptr(memory.stream());
    let owner = OnDrop(Some(on_drop));
    // SAFETY: the memory outlives the buffer, as each case sees to, and nobody else uses it.
    unsafe { GpuBuffer::from_raw(gpu, domain, address, memory.len(), owner, PathPolicy::AllowStaging) }.unwrap()
}

struct OnDrop<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        self.0.take().unwrap()();
    }
}

async fn what_is_free_does_not_wait_for_what_is_not(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let stream = gpu.stream();
    let memory = [(); 3].map(|()| stream.alloc_zeros::<u8>(1000).unwrap());
    stream.synchronize().unwrap();
    let released = Arc::new(Mutex::new(Vec::new()));
    for (index, time) in [(0, 1500), (1, 600), (2, 1)] {
        let noting = released.clone();
        let mut buffer = owned(&gpu, &domain, &memory[index], move || noting.lock().unwrap().push(index));
        gpu.fill_late(&mut buffer, Duration::from_millis(time), 1);
    }
    let order = || released.lock().unwrap().clone();
    eventually(|| order().len() == 3, order).await;
    assert_eq!(order(), [2, 1, 0]);
}

async fn an_owner_that_panics(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let stream = gpu.stream();
    let memory = stream.alloc_zeros::<u8>(1000).unwrap();
    stream.synchronize().unwrap();
    let mut buffer = owned(&gpu, &domain, &memory, || panic!("on purpose"));
    gpu.fill_late(&mut buffer, SLOW, 1);
    drop(buffer);
    // The others' memory is released all the same.
    for _ in 0..3 {
        let mut buffer = gpu.alloc(&domain, 1000);
        gpu.fill_late(&mut buffer, SLOW, 1);
        drop(buffer);
    }
    eventually(|| domain.stats().live_regions == 0, || domain.stats()).await;
}
