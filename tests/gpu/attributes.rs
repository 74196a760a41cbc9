//! What the GPU says of itself, and what follows.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, PathPolicy, Visibility, VisibilityScope, driver_version};
use tokio_rdma::topology::PciAddress;
use tokio_rdma::{Device, Error, Provider, gpu::GpuError};

use crate::common::{Rig, eventually};
use crate::gpu::{Gpu, fake, fake_only};

gpu_cases!(what_there_is, no_such_gpu, the_nic_near_it, others_errors_stay_theirs);

lone_gpu_cases!(the_visibility_rule, other_attributes, the_scope_of_visibility);

async fn what_there_is(rig: Rig) {
    let gpu = Gpu::open();
    let found = gpu.capabilities();
    assert!(GpuDevice::count() >= 1);
    assert_eq!(found.ordinal, 0);
    let parts: Vec<_> = found.pci_bus_id.split([':', '.']).collect();
    assert!(parts.len() == 4 && parts.iter().all(|part| u32::from_str_radix(part, 16).is_ok()), "{found:?}");
    assert_eq!(found.pci_bus_id, found.pci_bus_id.to_lowercase());
    assert!(found.compute_capability >= (5, 0), "{found:?}");
    assert!(found.driver_version >= 11_000, "{found:?}");
    let (major, minor) = (found.driver_version / 1000, found.driver_version % 1000 / 10);
    assert_eq!(driver_version().unwrap(), format!("{major}.{minor}"));
    let text = gpu.device.to_string();
    assert!(text.contains("GPU 0") && text.contains(&found.name) && text.contains(&found.pci_bus_id), "{text}");
    if fake().is_some() {
        assert_eq!(gpu.visibility(), Visibility::Native);
        assert_eq!((found.writes_ordering, found.gpu_direct, found.dma_buf), (100, true, true));
    }
    // From a context that the program has.
    let same = GpuDevice::from_context(gpu.context()).unwrap();
    assert_eq!(same.capabilities(), found);
    let buffer = GpuBuffer::alloc_with(&same, &rig.domain(), 100, PathPolicy::AllowStaging).unwrap();
    assert_eq!(gpu.contents(&buffer), [0; 100]);
}

async fn the_nic_near_it(_: Rig) {
    let gpu = Gpu::open();
    let address: PciAddress = gpu.capabilities().pci_bus_id.parse().unwrap();
    // Never the software device, wherever this runs.
    match Device::open_near(&gpu) {
        Ok(device) => assert_eq!(device.provider(), Provider::Verbs),
        Err(Error::NoNearNic { function, .. }) => assert_eq!(function, address),
        Err(error) => panic!("{error}"),
    }
}

async fn no_such_gpu(_: Rig) {
    fake();
    for ordinal in [GpuDevice::count(), 1000, usize::MAX] {
        let Error::Gpu(error) = GpuDevice::open(ordinal).unwrap_err() else { panic!("another error") };
        assert!(matches!(*error, GpuError::Unavailable { .. }), "{error}");
        assert!(error.to_string().contains("CUDA_VISIBLE_DEVICES"), "{error}");
    }
}

/// cudarc keeps an error of a drop for the next call to find. That must be one of the program's.
async fn others_errors_stay_theirs(rig: Rig) {
    let unknown = || DriverError(CUresult::CUDA_ERROR_UNKNOWN);
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (&pair.client, &pair.server);
    let context = gpu.context();
    for policy in [PathPolicy::Direct, PathPolicy::Staged] {
        let source = gpu.filled(&one.domain, 5000, 1);
        let stream = gpu.stream();
        context.record_err(Err::<(), _>(unknown()));
        let target = GpuBuffer::alloc_with(&gpu, &other.domain, 5000, policy).unwrap();
        drop(target.read_on::<u8>(&stream).unwrap());
        let (received, sent) = tokio::join!(other.receive(target), one.send(source));
        sent.unwrap().idle().await.unwrap();
        let received = received.unwrap();
        assert_eq!(context.check_err().unwrap_err(), unknown(), "it was told to somebody else");
        assert_eq!(gpu.mismatches(&received.buffer, 5000, 1), 0);
        // Memory is freed whatever is left behind.
        context.record_err(Err::<(), _>(unknown()));
        drop(received);
        for end in [one, other] {
            eventually(|| end.domain.stats().live_regions == 0, || end.domain.stats()).await;
        }
        assert_eq!(context.check_err().unwrap_err(), unknown(), "it was told to somebody else");
    }
}

async fn the_visibility_rule(_: Rig) {
    let Some(fake) = fake_only() else { return };
    for (writes_ordering, flush_options, c2c, expected) in [
        (0, 0, 0, Visibility::NeedsRead),
        (0, 1, 0, Visibility::Flush),
        // Flushing is for the GPU's own memory operations alone.
        (0, 2, 0, Visibility::NeedsRead),
        (0, 3, 0, Visibility::Flush),
        (100, 0, 0, Visibility::Native),
        (100, 1, 0, Visibility::Native),
        (200, 0, 0, Visibility::Native),
        (200, 1, 1, Visibility::NeedsRead),
        (0, 1, 1, Visibility::NeedsRead),
    ] {
        fake.set("writes_ordering", writes_ordering);
        fake.set("flush_options", flush_options);
        fake.set("c2c", c2c);
        let gpu = GpuDevice::open(0).unwrap();
        assert_eq!(gpu.visibility(), expected, "ordering {writes_ordering}, flush {flush_options}, c2c {c2c}");
        let found = gpu.capabilities();
        assert_eq!(found.writes_ordering, writes_ordering as i32);
        assert_eq!((found.flush_from_host, found.coherent_with_host), (flush_options & 1 == 1, c2c == 1));
    }
}

/// The software device copies, so it does not care.
async fn other_attributes(rig: Rig) {
    let Some(fake) = fake_only() else { return };
    for knob in ["writes_ordering", "flush_options", "dmabuf", "gdr", "memory_pools"] {
        fake.set(knob, 0);
    }
    fake.set("event_polls", 5);
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let found = gpu.capabilities();
    assert_eq!((found.gpu_direct, found.dma_buf), (false, false));
    let (received, sent) = tokio::join!(
        pair.server.receive(gpu.alloc(&pair.server.domain, 5000)),
        pair.client.send(gpu.filled(&pair.client.domain, 5000, 1))
    );
    sent.unwrap();
    assert_eq!(gpu.mismatches(&received.unwrap().buffer, 5000, 1), 0);
    assert_eq!(fake.get("flushes"), 0);
}

/// Where the software device copies, each scope is as good; parts keep it, and what is joined has the wider one.
async fn the_scope_of_visibility(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let mut buffer = gpu.alloc(&domain, 5000);
    assert_eq!(buffer.visibility_scope(), VisibilityScope::Owner);
    let mut tail = buffer.split_off(1000).unwrap();
    tail.set_visibility_scope(VisibilityScope::AllDevices).unwrap();
    let end = tail.split_off(10).unwrap();
    assert_eq!(
        (buffer.visibility_scope(), end.visibility_scope()),
        (VisibilityScope::Owner, VisibilityScope::AllDevices)
    );
    let joined = buffer.unsplit(tail).unwrap().unsplit(end).unwrap();
    assert_eq!(joined.visibility_scope(), VisibilityScope::AllDevices);
    let Some(fake) = fake() else { return };
    for (writes_ordering, flush_options, expected) in
        [(200, 0, Visibility::Native), (100, 1, Visibility::Flush), (100, 0, Visibility::NeedsRead)]
    {
        fake.set("writes_ordering", writes_ordering);
        fake.set("flush_options", flush_options);
        let gpu = GpuDevice::open(0).unwrap();
        assert_eq!(gpu.visibility_to(VisibilityScope::AllDevices), expected);
        assert_eq!(gpu.visibility_to(VisibilityScope::Owner), Visibility::Native);
    }
}
