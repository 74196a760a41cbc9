//! Calls of the driver that fail once: an error where it matters, and never a panic, a hang, a leak, or wrong bytes.

use std::time::Duration;

use fake_cuda::Fake;
use tokio::join;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, PathPolicy};
use tokio_rdma::{Access, Error};

use crate::common::run::SOON;
use crate::common::{Pair, Rig, eventually, within};
use crate::gpu::{fake_only, pattern};

lone_gpu_cases!(while_opening_and_allocating, while_copying, while_recording_and_looking, while_waiting_and_freeing,);

const LEN: usize = 300_001;

type Tried<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Everything that this crate does with a driver. `Ok(false)` means wrong bytes.
async fn everything(pair: &Pair) -> Tried<bool> {
    let (one, other) = (&pair.client, &pair.server);
    let gpu = GpuDevice::open(0)?;
    let stream = gpu.context().new_stream()?;
    let (bytes, mut right) = (pattern(LEN, 3), true);
    let mut kept = Vec::new();
    for policy in [PathPolicy::Direct, PathPolicy::Staged] {
        let mut source = GpuBuffer::alloc_with(&gpu, &one.domain, LEN, policy)?;
        let target = GpuBuffer::alloc_with(&gpu, &other.domain, LEN, policy)?;
        stream.memcpy_htod(&bytes, &mut source.write_on::<u8>(&stream)?)?;
        source.idle().await?;
        // In the end the peer gets its message or the connection ends, so this side's failure is found first.
        let (received, sent) = join!(other.receive(target).timeout(PATIENCE), one.send(source).timeout(PATIENCE));
        let (target, source) = (received?.buffer, sent?);
        right &= stream.clone_dtoh(&target.read_on::<u8>(&stream)?)? == bytes;
        kept.push((source, target));
    }
    let (source, target) = kept.remove(0);
    let mut source = source;
    let tail = source.split_off(1000)?;
    target.idle().await?;
    let region = target.expose(Access::all())?;
    let tail = one.write(tail, &region.remote()).await?;
    let tail = one.read(tail, &region.remote().slice(0..LEN as u64 - 1000)?).await?;
    one.fetch_add(&region.remote().slice(8..16)?, 0).await?;
    right &= stream.clone_dtoh(&tail.read_on::<u8>(&stream)?)? == bytes[1000..];
    drop(region.reclaim()?);
    let slice = stream.clone_htod(&bytes)?;
    let mut slice = GpuBuffer::from_slice(&gpu, &one.domain, slice, PathPolicy::AllowStaging).map_err(Error::from)?;
    slice.ready_after(&stream.record_event(None)?)?;
    let (received, sent) = join!(other.receive(other.buffer(LEN)).timeout(PATIENCE), one.send(slice).timeout(PATIENCE));
    sent?;
    right &= received?.message() == bytes;
    Ok(right)
}

/// For a peer whose other side has failed before it sent anything.
const PATIENCE: Duration = Duration::from_millis(300);

/// Lets each call of each function fail, one at a time.
async fn try_each(rig: &Rig, fake: Fake, functions: &[&str], most: u64) {
    const OUT_OF_MEMORY: u32 = 2;
    const UNKNOWN: u32 = 999;
    let (client, server) = (rig.domain(), rig.domain());
    let counters = ["live_allocations", "live_host_allocations", "live_events", "live_streams"];
    let count = || counters.map(|counter| fake.get(counter));
    for function in functions {
        let code = if ["Alloc", "Create"].iter().any(|part| function.contains(part)) { OUT_OF_MEMORY } else { UNKNOWN };
        // A call that gives something back and does not leaves it behind, whoever calls it.
        let gives_back = ["Destroy", "Unmap", "Unregister"].iter().any(|part| function.contains(part));
        let (mut failed, mut nth) = (0, 0);
        loop {
            nth += 1;
            let pair = rig.connect(&client, &server).await;
            let before = fake.get(function);
            fake.fail(function, nth, code);
            // The error itself may hold a buffer.
            let result = within(SOON, everything(&pair)).await.map_err(|error| error.to_string());
            drop(pair);
            for domain in [&client, &server] {
                eventually(|| domain.stats().live_regions == 0, || (*function, nth, domain.stats())).await;
            }
            let reached = fake.get(function) - before >= nth;
            fake.fail(function, 0, code);
            match result {
                Ok(right) => assert!(right, "wrong bytes after call {nth} of {function}"),
                Err(error) => {
                    assert!(reached, "{error}, and all calls of {function} went well");
                    failed += 1;
                }
            }
            if !gives_back {
                eventually(|| count() == [0; 4], || (*function, nth, count())).await;
            }
            if !reached || nth == most {
                break;
            }
        }
        assert!(nth > 1, "{function} is not used at all");
        assert!(gives_back || failed > 0, "no failure of {function} was told");
        eprintln!("{function}: {failed} errors of {} failures", nth - 1);
    }
}

async fn while_opening_and_allocating(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    let functions = [
        "cuDevicePrimaryCtxRetain",
        "cuDeviceGetAttribute",
        "cuDeviceGetName",
        "cuDeviceGetPCIBusId",
        "cuStreamCreate",
        "cuMemGetAllocationGranularity",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemHostRegister_v2",
        "cuMemsetD8Async",
        "cuStreamSynchronize",
        "cuPointerGetAttribute",
    ];
    try_each(&rig, fake, &functions, 30).await;
}

async fn while_copying(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    try_each(&rig, fake, &["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"], 30).await;
}

async fn while_recording_and_looking(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    try_each(&rig, fake, &["cuEventCreate", "cuEventRecord", "cuEventQuery"], 60).await;
}

async fn while_waiting_and_freeing(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    try_each(&rig, fake, &["cuStreamWaitEvent", "cuMemUnmap", "cuMemHostUnregister", "cuEventDestroy_v2"], 30).await;
}
