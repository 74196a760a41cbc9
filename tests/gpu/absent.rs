//! Without a driver, and with one that is too old.

use tokio_rdma::Error;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, GpuError, driver_version};

use crate::common::process::{alone_with, test_name};
use crate::common::{Rig, Setup, exercise};
use crate::gpu::{Gpu, a_driver_is_installed, skipped};

lone_gpu_cases!(without_a_driver);

fn assert_unavailable(error: Error, words: &str) {
    let Error::Gpu(error) = error else { panic!("{error}") };
    assert!(matches!(*error, GpuError::Unavailable { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("no GPU can be used: ") && text.contains(words), "{text}");
}

async fn without_a_driver(rig: Rig) {
    if a_driver_is_installed() {
        return skipped("needs a machine without a CUDA driver");
    }
    for _ in 0..3 {
        assert_eq!(GpuDevice::count(), 0);
        assert_unavailable(GpuDevice::open(0).unwrap_err(), "libcuda.so.1 of the CUDA driver cannot be loaded");
        assert_unavailable(driver_version().unwrap_err(), "libcuda.so.1");
    }
    exercise(&rig.pair().await).await;
}

/// Runs the case with a driver that lacks these functions.
fn with_a_driver_without<F: Future<Output = ()> + 'static>(
    test: &'static str,
    functions: &[&str],
    case: impl FnOnce(Rig) -> F + Send + 'static,
) {
    let directory = fake_cuda::directory(functions).unwrap();
    let path: &'static str = directory.path().to_str().unwrap().to_owned().leak();
    let variables: &'static [(&str, &str)] = vec![("LD_LIBRARY_PATH", path)].leak();
    alone_with(test, Setup::SOFT_UNIX, variables, case);
}

#[test]
fn with_a_driver_that_lacks_what_is_needed() {
    let name = test_name(concat!(module_path!(), "::with_a_driver_that_lacks_what_is_needed"));
    with_a_driver_without(name, &["cuMemcpyHtoDAsync_v2"], |rig| async move {
        assert_eq!(GpuDevice::count(), 0);
        assert_unavailable(GpuDevice::open(0).unwrap_err(), "libcuda.so.1 has no cuMemcpyHtoDAsync_v2");
        exercise(&rig.pair().await).await;
    });
}

#[test]
fn with_a_driver_that_lacks_what_is_useful() {
    let name = test_name(concat!(module_path!(), "::with_a_driver_that_lacks_what_is_useful"));
    let newer = ["cuMemGetHandleForAddressRange", "cuFlushGPUDirectRDMAWrites", "cuMemCreate"];
    with_a_driver_without(name, &newer, |rig| async move {
        let (gpu, pair) = (Gpu::open(), rig.pair().await);
        assert!(!gpu.capabilities().mappable, "memory comes from cuMemAlloc");
        let source = gpu.filled(&pair.client.domain, 5000, 1);
        let target = GpuBuffer::alloc(&gpu, &pair.server.domain, 5000).unwrap();
        let (received, sent) = tokio::join!(pair.server.receive(target), pair.client.send(source));
        sent.unwrap();
        assert_eq!(gpu.mismatches(&received.unwrap().buffer, 5000, 1), 0);
    });
}
