//! Memory of a GPU, over each path that the crate has to it.

use std::time::Instant;

use tokio_rdma::gpu::{GpuBuffer, GpuDevice, PathPolicy};
use tokio_rdma::{Device, Link, Result};

use super::{Figures, path};

/// Direct paths and staged ones, over each device.
pub async fn measure(ordinal: usize, devices: &[String], deadline: Instant, figures: &mut Figures) {
    let gpu = match GpuDevice::open(ordinal) {
        Ok(gpu) => gpu,
        Err(error) => return figures.left_out.push(format!("memory of GPU {ordinal}: {error}")),
    };
    for device in devices {
        for policy in [PathPolicy::Direct, PathPolicy::Staged] {
            let by = match path_of(&gpu, device, policy) {
                Ok(by) => by,
                Err(error) => {
                    figures.left_out.push(format!("memory of {gpu} over {device}, {policy:?}: {error}"));
                    continue;
                }
            };
            let make = |domain: &_, len| GpuBuffer::alloc_with(&gpu, domain, len, policy);
            let link = (device == "soft0").then_some(Link::Tcp);
            let outcome = path::measure(device, link, deadline, "gpu", &by, make).await;
            figures.add(format!("memory of {gpu} over {device}, {by}"), outcome);
        }
    }
}

/// What a buffer with this policy gets.
fn path_of(gpu: &GpuDevice, device: &str, policy: PathPolicy) -> Result<String> {
    let domain = Device::open(device)?.alloc_pd()?;
    Ok(GpuBuffer::alloc_with(gpu, &domain, 4096, policy)?.path().to_string())
}
