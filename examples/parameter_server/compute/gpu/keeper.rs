//! Parameters and steps on a GPU.

use std::sync::Arc;

use anyhow::{Context, Result};
use tokio_rdma::gpu::{GpuBuffer, GpuExposedRegion};
use tokio_rdma::{Access, ProtectionDomain, RemoteRegion};

use super::Gpu;
use super::kernels::{Floats, Mapped};
use crate::compute::{Copies, Keeper, Slot, Taken};
use crate::model::{self, PARAMETERS};
use crate::published::Layout;
use crate::wire::{GRADIENT, GRADIENT_LEN, PARAMETERS_LEN};

/// Where the copies lie.
const LAYOUT: Layout = Layout { len: PARAMETERS_LEN as u64 };

/// Addresses of gradients that there is room for at first.
const FEW: usize = 64;

pub struct GpuKeeper(Gpu);

impl GpuKeeper {
    pub fn new(gpu: Gpu) -> Self {
        Self(gpu)
    }

    /// Memory that workers reach. They have to do that directly: what is staged through the host cannot be exposed.
    fn expose(&self, domain: &ProtectionDomain, len: usize, first: &[f32], access: Access) -> Result<GpuExposedRegion> {
        let Gpu { device, stream, .. } = &self.0;
        let mut buffer = GpuBuffer::alloc(device, domain, len)
            .context("no memory of the GPU that workers reach; --compute cpu keeps the parameters in the host's")?;
        if !first.is_empty() {
            stream.memcpy_htod(first, &mut buffer.write_on::<f32>(stream)?)?;
            stream.synchronize()?;
        }
        Ok(buffer.expose(access)?)
    }
}

impl Keeper for GpuKeeper {
    type Copies = GpuCopies;
    type Slot = GpuSlot;
    type Gradient = Arc<Floats>;

    fn name(&self) -> String {
        self.0.name()
    }

    fn copies(&self, domain: &ProtectionDomain, version: u64, parameters: &[f32; PARAMETERS]) -> Result<GpuCopies> {
        let len = LAYOUT.total() as usize;
        let mut all = vec![0.0; len / size_of::<f32>()];
        all[index(version)..][..PARAMETERS].copy_from_slice(parameters);
        let stream = &self.0.stream;
        Ok(GpuCopies {
            memory: self.expose(domain, len, &all, Access::REMOTE_READ)?,
            addresses: Mapped::new(stream, FEW)?,
            broken: Mapped::new(stream, 1)?,
            gpu: self.0.clone(),
        })
    }

    fn slot(&self, domain: &ProtectionDomain) -> Result<GpuSlot> {
        let stream = &self.0.stream;
        Ok(GpuSlot {
            memory: self.expose(domain, GRADIENT_LEN, &[], Access::REMOTE_WRITE)?,
            taken: Arc::new(Floats::zeros(stream, GRADIENT)?),
            found: Mapped::new(stream, 2)?,
            gpu: self.0.clone(),
        })
    }
}

/// The first value of a version's copy.
fn index(version: u64) -> usize {
    LAYOUT.copy(version) as usize / size_of::<f32>()
}

pub struct GpuCopies {
    memory: GpuExposedRegion,
    /// Of the gradients of a step.
    addresses: Mapped<u64>,
    /// Whether a parameter is not finite.
    broken: Mapped<u64>,
    gpu: Gpu,
}

impl Copies for GpuCopies {
    type Gradient = Arc<Floats>;

    fn remote(&self) -> RemoteRegion {
        self.memory.remote()
    }

    async fn descend(&mut self, version: u64, gradients: &[&Arc<Floats>], rate: f32) -> Result<bool> {
        let Gpu { stream, kernels, .. } = &self.gpu;
        if gradients.len() > self.addresses.len() {
            self.addresses = Mapped::new(stream, gradients.len().next_power_of_two())?;
        }
        self.broken.set(0, 0)?;
        let places = (index(version - 1), index(version));
        {
            let mut copies = self.memory.write_on(stream)?;
            kernels.descend(&mut copies, places, gradients, &mut self.addresses, rate, &self.broken)?;
        }
        self.memory.idle().await?;
        Ok(self.broken.get(0)? == 0)
    }

    /// Waits for the GPU on this thread: it is idle between steps, and this is for checkpoints.
    fn parameters(&self, version: u64) -> Result<Box<[f32; PARAMETERS]>> {
        let stream = &self.gpu.stream;
        let all = stream.clone_dtoh(&self.memory.read_on::<f32>(stream)?)?;
        stream.synchronize()?;
        let mut parameters = model::zeroed();
        parameters.copy_from_slice(&all[index(version)..][..PARAMETERS]);
        Ok(parameters)
    }
}

pub struct GpuSlot {
    pub(super) memory: GpuExposedRegion,
    /// The gradient that was taken last.
    taken: Arc<Floats>,
    /// The square of its length, and its loss.
    found: Mapped<f64>,
    gpu: Gpu,
}

impl Slot for GpuSlot {
    type Gradient = Arc<Floats>;

    fn remote(&self) -> RemoteRegion {
        self.memory.remote()
    }

    async fn take(&mut self) -> Result<Taken<Arc<Floats>>> {
        let Gpu { stream, kernels, .. } = &self.gpu;
        if Arc::strong_count(&self.taken) > 1 {
            // No step has been taken with it yet.
            self.taken = Arc::new(Floats::zeros(stream, GRADIENT)?);
        }
        kernels.take(&self.memory.read_on(stream)?, &self.taken, &self.found)?;
        self.memory.idle().await?;
        let (square, loss) = (self.found.get(0)?, self.found.get(1)?);
        Ok(Taken { gradient: self.taken.clone(), norm: square.sqrt(), loss: loss as f32 })
    }
}
