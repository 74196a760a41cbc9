//! Buffers over an RDMA NIC that cannot be given a GPU's memory: what is said of that, and staging in its place.

use std::time::Duration;

use tokio::join;
use tokio_rdma::doctor::{GpuDirectReport, Link, Status};
use tokio_rdma::gpu::{GpuBuffer, GpuError, GpuPath, PathPolicy};
use tokio_rdma::{Access, Error};

use crate::common::{Rig, eventually};
use crate::gpu::{Gpu, host_mismatches};

nic_gpu_cases!(
    direct_paths_are_refused_with_the_reason_of_each,
    the_report_tells_of_the_nic,
    staged_buffers_in_every_operation,
    staged_buffers_are_dropped_on_the_way,
);

async fn direct_paths_are_refused_with_the_reason_of_each(rig: Rig) {
    let (gpu, domain) = (Gpu::open(), rig.domain());
    let refused = GpuBuffer::alloc(&gpu, &domain, 4096).unwrap_err();
    let text = refused.to_string();
    let report = refused.gpu_direct_report().expect("all of it was looked at");
    assert_eq!(report.chain.nic.as_deref(), Some(rig.device().name()), "{report}");
    let import = report.chain.finding(Link::DmaBufImport).unwrap();
    assert!(import.status == Status::Broken && import.sources[0].answer.contains("EOPNOTSUPP"), "{report}");
    assert!(text.lines().count() < 10, "{text}");
    let Error::Gpu(error) = refused else { panic!("{refused}") };
    let GpuError::NoPath { refusals, .. } = *error else { panic!("{text}") };
    let paths: Vec<_> = refusals.iter().map(|refusal| refusal.path).collect();
    assert_eq!(paths, [GpuPath::DmaBuf, GpuPath::PeerMemory, GpuPath::Staged], "{text}");
    for word in ["dma-buf: ", "nvidia-peermem is not loaded", "PathPolicy::AllowStaging"] {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    assert_eq!(domain.stats().live_regions, 0);
}

/// Soft-RoCE's answers, and those of the kernel about it.
async fn the_report_tells_of_the_nic(rig: Rig) {
    let (gpu, device) = (Gpu::open(), rig.device());
    let report = GpuDirectReport::builder().gpu("0").nic(device.name()).build().unwrap();
    assert!(!report.chain.holds(), "{report}");
    assert_eq!(report.gpus[0].pci_address, gpu.capabilities().pci_bus_id);
    let found = |link| report.chain.finding(link).unwrap();
    for link in
        [Link::Nic, Link::Verbs, Link::Port, Link::Mtu, Link::Gid, Link::CpuCopies, Link::Kernel, Link::Visibility]
    {
        assert_eq!(found(link).status, Status::Ok, "{report:#}");
    }
    assert!(found(Link::Verbs).value.contains("opens the device"), "{report:#}");
    assert!(found(Link::Gid).value.contains("RoCE v2, "), "{report:#}");
    let address = device.local_address(0).unwrap().to_string();
    assert!(found(Link::Gid).value.contains(address.trim_end_matches(":0")), "{address} in {report:#}");
    assert_eq!(found(Link::DmaBufImport).sources[0].answer, "errno 95 (EOPNOTSUPP)");
    // The stand-in's GPU is in no slot of this machine.
    assert_eq!(found(Link::Level).status, Status::Unknown, "{report:#}");
}

fn staged(gpu: &Gpu, domain: &tokio_rdma::ProtectionDomain, len: usize) -> GpuBuffer {
    let buffer = GpuBuffer::alloc_with(gpu, domain, len, PathPolicy::AllowStaging).unwrap();
    assert_eq!(buffer.path(), GpuPath::Staged);
    buffer
}

async fn staged_buffers_in_every_operation(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    for len in [1, 17, 4096, (1 << 18) + 3] {
        for (one, other) in pair.directions() {
            let mut source = staged(&gpu, &one.domain, len);
            gpu.fill_late(&mut source, Duration::from_millis(20), 1);
            let (received, sent) = join!(other.receive(staged(&gpu, &other.domain, len)), one.send(source));
            let (target, source) = (received.unwrap().buffer, sent.unwrap());
            assert_eq!(gpu.mismatches(&target, len, 1), 0, "{len} bytes");

            let region = other.buffer(len).expose(Access::REMOTE_READ | Access::REMOTE_WRITE).unwrap();
            let source = one.write(source, &region.remote()).await.unwrap();
            let mut bytes = vec![0; len];
            region.copy_to(0, &mut bytes).unwrap();
            assert_eq!(host_mismatches(&bytes, 1), 0, "{len} bytes");
            let copy = one.read(staged(&gpu, &one.domain, len), &region.remote()).await.unwrap();
            assert_eq!(gpu.mismatches(&copy, len, 1), 0, "{len} bytes");
            let receive = other.receive(target);
            let (noticed, written) = join!(receive, one.write_with_immediate(source, &region.remote(), 7));
            written.unwrap();
            let noticed = noticed.unwrap();
            assert_eq!((noticed.immediate, noticed.len), (Some(7), len));
        }
    }
}

async fn staged_buffers_are_dropped_on_the_way(rig: Rig) {
    let (gpu, pair) = (Gpu::open(), rig.pair().await);
    let (one, other) = (pair.client, pair.server);
    let receiving = tokio::spawn({
        let (gpu, other) = (gpu.clone(), other.clone());
        async move {
            let mut received = 0;
            while other.receive(staged(&gpu, &other.domain, 4096)).await.is_ok() {
                received += 1;
            }
            received
        }
    });
    for round in 0..20 {
        let mut source = staged(&gpu, &one.domain, 4096);
        gpu.fill_late(&mut source, Duration::from_millis(1), round);
        // Dropped before it was posted, on the wire, or not at all.
        let _ = tokio::time::timeout(Duration::from_millis(round), one.send(source)).await;
    }
    one.send(one.buffer(1)).await.unwrap();
    one.connection.close().await;
    let received = receiving.await.unwrap();
    assert!((1..=21).contains(&received), "{received} messages of 21");
    for end in [one, other] {
        eventually(|| end.domain.stats().live_regions == 0, || end.domain.stats()).await;
    }
}
