//! Gradients on a GPU.

use anyhow::Result;
use tokio_rdma::ProtectionDomain;
use tokio_rdma::gpu::{GpuBuffer, PathPolicy};

use super::Gpu;
use super::kernels::Samples;
use crate::compute::Compute;
use crate::digits::{Batch, Digits};
use crate::wire::{GRADIENT_LEN, PARAMETERS_LEN};

pub struct GpuWorker {
    gpu: Gpu,
    samples: Samples,
    /// Whose order the GPU knows.
    epoch: Option<(u64, u64)>,
}

impl GpuWorker {
    /// With all samples in the GPU's memory: what a batch is, is a range of the epoch's order, which goes there once in an epoch.
    /// Its kernels do not wait for those of others.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        let gpu = gpu.another()?;
        let samples = Samples::upload(&gpu.stream, &Digits::load()?.training)?;
        Ok(Self { gpu, samples, epoch: None })
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Compute for GpuWorker {
    type Parameters = GpuBuffer;
    type Gradient = GpuBuffer;

    fn name(&self) -> String {
        self.gpu.name()
    }

    fn alloc(&self, domain: &ProtectionDomain) -> Result<(GpuBuffer, GpuBuffer)> {
        // Staged where the RDMA device does not reach the GPU: then there is a copy more, and no other way.
        let alloc = |len| GpuBuffer::alloc_with(&self.gpu.device, domain, len, PathPolicy::AllowStaging);
        Ok((alloc(PARAMETERS_LEN)?, alloc(GRADIENT_LEN)?))
    }

    fn begin(&mut self, parameters: &GpuBuffer, batch: &Batch<'_>, gradient: &mut GpuBuffer) -> Result<()> {
        let Gpu { stream, kernels, .. } = &self.gpu;
        if self.epoch != Some(batch.epoch) {
            self.epoch = None;
            self.samples.set_order(batch.order)?;
            self.epoch = Some(batch.epoch);
        }
        let parameters = parameters.read_on(stream)?;
        kernels.gradient(&parameters, &self.samples, batch.range.clone(), &mut gradient.write_on(stream)?)
    }

    /// The kernel runs.
    fn finish(&mut self, _: &GpuBuffer, _: &Batch<'_>, _: &mut GpuBuffer) -> Result<()> {
        Ok(())
    }
}
