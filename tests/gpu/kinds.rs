//! What a pointer points to, and what is done with each kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::result::{free_host, free_sync, malloc_host, malloc_managed, malloc_sync};
use cudarc::driver::sys::{self, CUdeviceptr};
use tokio::join;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, GpuError, GpuPath, MemoryKind, PathPolicy};
use tokio_rdma::{Error, ProtectionDomain};

use crate::common::{Rig, eventually};
use crate::gpu::{Gpu, count, fake_only, pattern, skipped};

gpu_cases!(
    each_kind_is_refused_by_its_name,
    memory_of_another_gpu,
    streams_that_cannot_be_followed,
    a_gpu_that_was_opened_twice,
    mapped_memory,
    slices_of_the_pool,
    a_slice_of_another_gpu_comes_back,
    memory_from_elsewhere,
    beyond_an_allocation,
    views_that_do_not_fit,
    lengths_that_cannot_be,
    buffers_of_another_domain,
);

lone_gpu_cases!(slices_where_there_is_no_pool);

const LEN: usize = 1 << 16;

const POLICIES: [PathPolicy; 3] = [PathPolicy::Direct, PathPolicy::AllowStaging, PathPolicy::Staged];

fn gpu_error(error: Error) -> GpuError {
    match error {
        Error::Gpu(error) => *error,
        other => panic!("{other}"),
    }
}

/// Why memory is not taken.
fn refusal(gpu: &GpuDevice, domain: &ProtectionDomain, address: CUdeviceptr, policy: PathPolicy) -> GpuError {
    // SAFETY: it is refused, so nothing is done with the memory.
    gpu_error(unsafe { GpuBuffer::from_raw(gpu, domain, address, 4096, (), policy) }.unwrap_err())
}

#[track_caller]
fn assert_unfit(error: &GpuError, kind: MemoryKind, words: [&str; 2]) {
    assert!(matches!(error, GpuError::Unfit { kind: found, .. } if *found == kind), "{error:?}");
    for words in words {
        assert!(error.to_string().contains(words), "{error}");
    }
}

async fn each_kind_is_refused_by_its_name(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    gpu.context().bind_to_thread().unwrap();
    for policy in POLICIES {
        // SAFETY: allocated, refused, and freed.
        unsafe {
            let managed = malloc_managed(LEN, sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL).unwrap();
            let error = refusal(&gpu, &domain, managed, policy);
            assert_unfit(&error, MemoryKind::Managed, ["is managed memory", "GpuBuffer::alloc"]);
            free_sync(managed).unwrap();

            let pinned = malloc_host(LEN, 0).unwrap();
            let error = refusal(&gpu, &domain, pinned as CUdeviceptr, policy);
            assert_unfit(&error, MemoryKind::Pinned, ["is pinned host memory", "register_raw"]);
            free_host(pinned).unwrap();
        }
        let pageable = vec![0u8; LEN];
        let error = refusal(&gpu, &domain, pageable.as_ptr() as CUdeviceptr, policy);
        assert_unfit(&error, MemoryKind::Pageable, ["is pageable host memory", "register_raw"]);
        for nothing in [0, 8, u64::MAX] {
            let error = refusal(&gpu, &domain, nothing, policy);
            assert_unfit(&error, MemoryKind::Pageable, ["or no memory", "from_raw"]);
        }
    }
}

async fn memory_of_another_gpu(rig: Rig) {
    if count() < 2 {
        return skipped("needs two GPUs");
    }
    let (zero, one, domain) = (Gpu::open(), Gpu::open_ordinal(1), rig.domain());
    assert_ne!(zero.capabilities().pci_bus_id, one.capabilities().pci_bus_id);
    let (of_zero, of_one) = (zero.alloc(&domain, LEN), one.alloc(&domain, LEN));
    for policy in POLICIES {
        let error = refusal(&zero, &domain, of_one.address(), policy);
        assert_unfit(&error, MemoryKind::OtherGpu(1), ["is memory of GPU 1", "use the GpuDevice of that GPU"]);
        let error = refusal(&one, &domain, of_zero.address(), policy);
        assert_unfit(&error, MemoryKind::OtherGpu(0), ["is memory of GPU 0", "use the GpuDevice of that GPU"]);
    }
    // Each is good with its own, and bytes go from one to the other.
    let pair = rig.pair().await;
    let source = zero.filled(&pair.client.domain, LEN, 1);
    let (received, sent) = join!(pair.server.receive(one.alloc(&pair.server.domain, LEN)), pair.client.send(source));
    assert_eq!(one.mismatches(&received.unwrap().buffer, LEN, 1), 0);
    assert_eq!(zero.mismatches(&sent.unwrap(), LEN, 1), 0);
}

async fn streams_that_cannot_be_followed(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let mut buffer = gpu.alloc(&domain, LEN);
    let per_thread = gpu.context().per_thread_stream();
    let error = gpu_error(buffer.read_on::<u8>(&per_thread).unwrap_err());
    assert!(error.to_string().contains("per-thread default stream"), "{error}");
    if count() < 2 {
        return skipped("needs two GPUs for the rest");
    }
    let foreign = Gpu::open_ordinal(1).stream();
    for error in [buffer.read_on::<u8>(&foreign).unwrap_err(), buffer.write_on::<u8>(&foreign).unwrap_err()] {
        let error = gpu_error(error);
        assert!(error.to_string().contains("another GPU or context"), "{error}");
    }
    // The default stream is one as any other.
    let default = gpu.context().default_stream();
    gpu.spin(&default, Duration::from_millis(100));
    gpu.fill(&default, &mut buffer, 1);
    assert_eq!(gpu.mismatches(&buffer, LEN, 1), 0);
}

/// Both have the GPU's primary context, so streams and slices of the one go with buffers of the other.
async fn a_gpu_that_was_opened_twice(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let second = Gpu::open();
    let slice = second.stream().clone_htod(&pattern(LEN, 3)).unwrap();
    let source = GpuBuffer::from_slice(&gpu, &one.domain, slice, PathPolicy::AllowStaging).unwrap();
    drop(second);
    let (received, sent) = join!(other.receive(Gpu::open().alloc(&other.domain, LEN)), one.send(source));
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 3), 0);
    assert_eq!(Gpu::open().mismatches(&sent.unwrap(), LEN, 3), 0);
}

/// Physical memory, mapped at an address of its own.
struct Mapping(CUdeviceptr, usize);

impl Mapping {
    fn new(gpu: &Gpu, gpu_direct: bool) -> Self {
        gpu.context().bind_to_thread().unwrap();
        // SAFETY: the structures are plain numbers; what is made is used as its functions want, and undone by `drop`.
        unsafe {
            let mut properties: sys::CUmemAllocationProp = std::mem::zeroed();
            properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            properties.allocFlags.gpuDirectRDMACapable = u8::from(gpu_direct);
            let (mut size, mut memory, mut address) = (0, 0, 0);
            let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
            sys::cuMemGetAllocationGranularity(&mut size, &properties, least).result().unwrap();
            sys::cuMemCreate(&mut memory, size, &properties, 0).result().unwrap();
            sys::cuMemAddressReserve(&mut address, size, 0, 0, 0).result().unwrap();
            sys::cuMemMap(address, size, 0, memory, 0).result().unwrap();
            sys::cuMemRelease(memory).result().unwrap();
            let mut access: sys::CUmemAccessDesc = std::mem::zeroed();
            access.location = properties.location;
            access.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            sys::cuMemSetAccess(address, size, &access, 1).result().unwrap();
            Self(address, size)
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and nobody uses it any more.
        unsafe {
            sys::cuMemUnmap(self.0, self.1).result().unwrap();
            sys::cuMemAddressFree(self.0, self.1).result().unwrap();
        }
    }
}

async fn mapped_memory(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    if !gpu.capabilities().mappable {
        return skipped("the driver maps no memory for NICs");
    }
    let unfit = Mapping::new(&gpu, false);
    let error = refusal(&gpu, &one.domain, unfit.0, PathPolicy::Direct);
    assert_unfit(
        &error,
        MemoryKind::Mapped,
        ["mapped without gpuDirectRDMACapable", "allocFlags.gpuDirectRDMACapable = 1"],
    );
    for (mapping, policy) in [
        (unfit, PathPolicy::AllowStaging),
        (Mapping::new(&gpu, false), PathPolicy::Staged),
        (Mapping::new(&gpu, true), PathPolicy::Direct),
    ] {
        let (address, size) = (mapping.0, mapping.1);
        // SAFETY: the mapping is the owner, and nobody else uses the memory.
        let buffer = unsafe { GpuBuffer::from_raw(&gpu, &one.domain, address, size, mapping, policy) };
        let mut buffer = buffer.unwrap();
        let path = if policy == PathPolicy::Staged { GpuPath::Staged } else { GpuPath::Software };
        assert_eq!((buffer.path(), buffer.address(), buffer.len()), (path, address, size));
        gpu.fill(&gpu.stream(), &mut buffer, 1);
        let (received, sent) = join!(other.receive(gpu.alloc(&other.domain, size)), one.send(buffer));
        sent.unwrap();
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, size, 1), 0);
    }
}

async fn slices_of_the_pool(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    if !gpu.context().has_async_alloc() {
        return skipped("the GPU has no stream-ordered pool");
    }
    let stream = gpu.stream();
    let mut slice = stream.clone_htod(&pattern(LEN, 7)).unwrap();
    let failed = GpuBuffer::from_slice(&gpu, &one.domain, slice, PathPolicy::Direct).unwrap_err();
    assert!(failed.to_string().contains("is device memory of a stream-ordered pool"), "{failed}");
    let (error, back) = failed.into_parts();
    assert_unfit(&gpu_error(error), MemoryKind::Pool, ["GpuBuffer::alloc", "or allow staging"]);
    slice = back.expect("given back");
    assert_eq!(stream.clone_dtoh(&slice).unwrap(), pattern(LEN, 7));

    for policy in [PathPolicy::AllowStaging, PathPolicy::Staged] {
        // It is in use on a stream of its own when it is handed over.
        let stream = gpu.stream();
        let mut slice = stream.alloc_zeros::<u8>(LEN).unwrap();
        gpu.spin(&stream, Duration::from_millis(200));
        stream.memcpy_htod(&pattern(LEN, 8), &mut slice).unwrap();
        let buffer = GpuBuffer::from_slice(&gpu, &one.domain, slice, policy).unwrap();
        let path = if policy == PathPolicy::Staged { GpuPath::Staged } else { GpuPath::Software };
        assert_eq!((buffer.path(), buffer.len()), (path, LEN));
        let (received, sent) = join!(other.receive(gpu.alloc(&other.domain, LEN)), one.send(buffer));
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN, 8), 0);
        // Freed while it is still read.
        let verdict = gpu.check_late(&sent.unwrap(), Duration::from_millis(100), 8);
        assert_eq!(verdict.mismatches(), 0);
    }
    eventually(|| one.domain.stats().live_regions == 0, || one.domain.stats()).await;
}

async fn slices_where_there_is_no_pool(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    fake.set("memory_pools", 0);
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let slice = gpu.stream().clone_htod(&[1.5f32; 1000]).unwrap();
    let buffer = GpuBuffer::from_slice(&gpu, &one.domain, slice, PathPolicy::Direct).unwrap();
    let (received, sent) = join!(other.receive(gpu.alloc(&other.domain, 4000)), one.send(buffer));
    sent.unwrap();
    let (target, stream) = (received.unwrap().buffer, gpu.stream());
    assert_eq!(stream.clone_dtoh(&target.read_on::<f32>(&stream).unwrap()).unwrap(), [1.5f32; 1000]);
}

async fn a_slice_of_another_gpu_comes_back(rig: Rig) {
    if count() < 2 {
        return skipped("needs two GPUs");
    }
    let (zero, one, domain) = (Gpu::open(), Gpu::open_ordinal(1), rig.domain());
    let slice = one.stream().clone_htod(&pattern(LEN, 7)).unwrap();
    let failed = GpuBuffer::from_slice(&zero, &domain, slice, PathPolicy::AllowStaging).unwrap_err();
    let (error, slice) = failed.into_parts();
    assert_unfit(&gpu_error(error), MemoryKind::OtherGpu(1), ["from_slice", "memory of GPU 1"]);
    // Nothing of it is left behind in either context.
    assert_eq!(one.stream().clone_dtoh(&slice.unwrap()).unwrap(), pattern(LEN, 7));
    for gpu in [zero, one] {
        gpu.context().check_err().unwrap();
        assert_eq!(gpu.mismatches(&gpu.filled(&domain, LEN, 1), LEN, 1), 0);
    }
}

/// Memory of `cuMemAlloc`, freed by its owner, which counts that.
struct Owner(CUdeviceptr, Gpu, Arc<AtomicU32>);

impl Owner {
    fn new(gpu: &Gpu, freed: &Arc<AtomicU32>) -> Self {
        gpu.context().bind_to_thread().unwrap();
        // SAFETY: freed by `drop`.
        Self(unsafe { malloc_sync(LEN) }.unwrap(), gpu.clone(), freed.clone())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.1.context().bind_to_thread().unwrap();
        // SAFETY: allocated by `new`, and nobody uses it any more.
        unsafe { free_sync(self.0) }.unwrap();
        self.2.fetch_add(1, Ordering::SeqCst);
    }
}

async fn memory_from_elsewhere(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let freed = Arc::new(AtomicU32::new(0));
    let count = || freed.load(Ordering::SeqCst);
    for (round, policy) in POLICIES.into_iter().enumerate() {
        let owner = Owner::new(&gpu, &freed);
        // A part of it, at an odd place.
        // SAFETY: the owner keeps the memory, and nobody else uses it.
        let buffer = unsafe { GpuBuffer::from_raw(&gpu, &one.domain, owner.0 + 3, LEN - 10, owner, policy) };
        let mut buffer = buffer.unwrap();
        gpu.fill_late(&mut buffer, Duration::from_millis(20), 4);
        let (received, sent) = join!(other.receive(gpu.alloc(&other.domain, LEN)), one.send(buffer));
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, LEN - 10, 4), 0);
        let mut first = sent.unwrap();
        let second = first.split_off(100).unwrap();
        let verdict = gpu.check_late(&first, Duration::from_millis(100), 4);
        drop(first);
        assert_eq!(count(), round as u32, "the other half is alive");
        assert_eq!(gpu.mismatches(&second, second.len(), 104), 0);
        drop(second);
        assert_eq!(verdict.mismatches(), 0);
        eventually(|| count() == round as u32 + 1, count).await;
    }
}

async fn beyond_an_allocation(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let freed = Arc::new(AtomicU32::new(0));
    for (round, (offset, len)) in [(0, LEN + 1), (1, LEN), (LEN - 1, 2), (0, 1 << 40)].into_iter().enumerate() {
        let owner = Owner::new(&gpu, &freed);
        // SAFETY: it is refused, so nothing is done with the memory.
        let result =
            unsafe { GpuBuffer::from_raw(&gpu, &domain, owner.0 + offset as u64, len, owner, PathPolicy::Direct) };
        let error = result.unwrap_err();
        let text = error.to_string();
        let limited = matches!(error, Error::Limit { .. });
        assert!(limited || text.contains("go beyond the allocation"), "{text}");
        assert!(error.is_caller_error());
        assert_eq!(freed.load(Ordering::SeqCst), round as u32 + 1, "the owner is dropped when it is refused");
    }
}

async fn views_that_do_not_fit(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let stream = gpu.stream();
    let mut buffer = gpu.alloc(&domain, 30);
    let mut odd = buffer.split_off(13).unwrap();
    let check = |error: Error, words: &str| {
        assert!(
            matches!(gpu_error(error), GpuError::Invalid { operation: "use on a stream", reason } if reason.contains(words))
        );
    };
    check(buffer.read_on::<u32>(&stream).unwrap_err(), "13 bytes");
    check(buffer.write_on::<u16>(&stream).unwrap_err(), "values of 2 bytes aligned to 2");
    check(buffer.read_on::<()>(&stream).unwrap_err(), "values of 0 bytes");
    let mut end = odd.split_off(16).unwrap();
    assert_eq!((odd.len(), end.len()), (16, 1));
    check(odd.read_on::<u64>(&stream).unwrap_err(), "16 bytes at");
    check(odd.write_on::<[u16; 2]>(&stream).unwrap_err(), "values of 4 bytes aligned to 2");
    assert_eq!(odd.read_on::<[u8; 8]>(&stream).unwrap().len(), 2);
    assert_eq!(end.write_on::<u8>(&stream).unwrap().len(), 1);
    let error = end.split_off(2).unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    let empty = end.split_to(0).unwrap();
    assert!(empty.is_empty() && empty.read_on::<u64>(&stream).is_err() == (empty.address() % 8 != 0));
}

async fn lengths_that_cannot_be(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    for policy in POLICIES {
        for len in [0, usize::MAX, usize::MAX / 2] {
            let error = GpuBuffer::alloc_with(&gpu, &domain, len, policy).unwrap_err();
            assert!(matches!(error, Error::Limit { .. }), "{error}");
        }
        // More than any GPU has, and less than a device takes.
        let error = GpuBuffer::alloc_with(&gpu, &domain, 1 << 42, policy).unwrap_err();
        match error {
            Error::Gpu(error) => assert!(error.to_string().contains("no such amount of memory free"), "{error}"),
            error => assert!(matches!(error, Error::Limit { .. }), "{error}"),
        }
        // SAFETY: it is refused.
        let error = unsafe { GpuBuffer::from_raw(&gpu, &domain, 4096, 0, (), policy) }.unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
    }
}

async fn buffers_of_another_domain(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let elsewhere = rig.domain();
    let (error, buffer) = pair.client.send(gpu.alloc(&elsewhere, 8)).await.unwrap_err().into_parts();
    assert!(matches!(error, Error::ForeignBuffer { .. }), "{error}");
    let (error, _) = pair.client.receive(buffer.unwrap()).await.unwrap_err().into_parts();
    assert!(matches!(error, Error::ForeignBuffer { .. }), "{error}");
}
