//! The CPU, in plain Rust.

use anyhow::Result;
use tokio::task::block_in_place;
use tokio_rdma::{Access, Buffer, ExposedRegion, ProtectionDomain, RemoteRegion};

use super::{Compute, Copies, Keeper, Slot, Taken};
use crate::digits::{Batch, Digits, Sample};
use crate::model::{self, PARAMETERS};
use crate::published::Layout;
use crate::wire::{GRADIENT_LEN, PARAMETERS_LEN, floats_from_bytes, floats_to_bytes};

/// Computes gradients.
pub struct Cpu {
    samples: Vec<Sample>,
    parameters: Box<[f32; PARAMETERS]>,
    gradient: Box<[f32; PARAMETERS]>,
}

impl Cpu {
    pub fn new() -> Result<Self> {
        Ok(Self { samples: Digits::load()?.training, parameters: model::zeroed(), gradient: model::zeroed() })
    }
}

impl Compute for Cpu {
    type Parameters = Buffer;
    type Gradient = Buffer;

    fn name(&self) -> String {
        "the CPU".to_owned()
    }

    fn alloc(&self, domain: &ProtectionDomain) -> Result<(Buffer, Buffer)> {
        Ok((domain.alloc(PARAMETERS_LEN)?, domain.alloc(GRADIENT_LEN)?))
    }

    /// All that there is to do takes the caller's time.
    fn begin(&mut self, _: &Buffer, _: &Batch<'_>, _: &mut Buffer) -> Result<()> {
        Ok(())
    }

    fn finish(&mut self, parameters: &Buffer, batch: &Batch<'_>, gradient: &mut Buffer) -> Result<()> {
        block_in_place(|| {
            floats_from_bytes(parameters, &mut self.parameters[..]);
            let samples = batch.indices().map(|index| &self.samples[index]);
            let loss = model::gradient(&self.parameters, samples, &mut self.gradient);
            floats_to_bytes(&self.gradient[..], gradient);
            floats_to_bytes(&[loss], &mut gradient[PARAMETERS_LEN..]);
        });
        Ok(())
    }
}

/// Keeps parameters.
pub struct CpuKeeper;

impl Keeper for CpuKeeper {
    type Copies = CpuCopies;
    type Slot = CpuSlot;
    type Gradient = Box<[f32; PARAMETERS]>;

    fn name(&self) -> String {
        "the CPU".to_owned()
    }

    fn copies(&self, domain: &ProtectionDomain, version: u64, parameters: &[f32; PARAMETERS]) -> Result<CpuCopies> {
        let layout = Layout { len: PARAMETERS_LEN as u64 };
        let mut bytes = vec![0; PARAMETERS_LEN];
        floats_to_bytes(parameters, &mut bytes);
        let memory = domain.alloc(layout.total() as usize)?.expose(Access::REMOTE_READ)?;
        memory.copy_from(layout.copy(version), &bytes)?;
        Ok(CpuCopies { memory, layout, parameters: Box::new(*parameters), bytes })
    }

    fn slot(&self, domain: &ProtectionDomain) -> Result<CpuSlot> {
        let memory = domain.alloc(GRADIENT_LEN)?.expose(Access::REMOTE_WRITE)?;
        Ok(CpuSlot { memory, bytes: vec![0; GRADIENT_LEN] })
    }
}

pub struct CpuCopies {
    memory: ExposedRegion,
    layout: Layout,
    /// The latest version.
    parameters: Box<[f32; PARAMETERS]>,
    /// The same in the form that is published.
    bytes: Vec<u8>,
}

impl Copies for CpuCopies {
    type Gradient = Box<[f32; PARAMETERS]>;

    fn remote(&self) -> RemoteRegion {
        self.memory.remote()
    }

    async fn descend(&mut self, version: u64, gradients: &[&Self::Gradient], rate: f32) -> Result<bool> {
        for gradient in gradients {
            let slopes = self.parameters.iter_mut().zip(gradient.iter());
            slopes.for_each(|(parameter, slope)| *parameter -= rate * slope);
        }
        floats_to_bytes(&self.parameters[..], &mut self.bytes);
        self.memory.copy_from(self.layout.copy(version), &self.bytes)?;
        Ok(self.parameters.iter().all(|it| it.is_finite()))
    }

    fn parameters(&self, _version: u64) -> Result<Box<[f32; PARAMETERS]>> {
        Ok(self.parameters.clone())
    }
}

pub struct CpuSlot {
    memory: ExposedRegion,
    /// What was in it.
    bytes: Vec<u8>,
}

impl Slot for CpuSlot {
    type Gradient = Box<[f32; PARAMETERS]>;

    fn remote(&self) -> RemoteRegion {
        self.memory.remote()
    }

    async fn take(&mut self) -> Result<Taken<Self::Gradient>> {
        self.memory.copy_to(0, &mut self.bytes)?;
        let (mut gradient, mut loss) = (model::zeroed(), [f32::NAN]);
        floats_from_bytes(&self.bytes, &mut gradient[..]);
        floats_from_bytes(&self.bytes[PARAMETERS_LEN..], &mut loss);
        let norm = gradient.iter().map(|it| f64::from(*it).powi(2)).sum::<f64>().sqrt();
        Ok(Taken { gradient, norm, loss: loss[0] })
    }
}
