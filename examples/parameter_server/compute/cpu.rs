//! The CPU, in plain Rust.

use anyhow::Result;
use tokio_rdma::{Buffer, ProtectionDomain};

use super::Compute;
use crate::digits::Sample;
use crate::model::{self, PARAMETERS};
use crate::wire::{GRADIENT_LEN, floats_from_bytes, floats_to_bytes};

pub struct Cpu {
    parameters: Box<[f32; PARAMETERS]>,
    gradient: Box<[f32; PARAMETERS]>,
}

impl Cpu {
    pub fn new() -> Self {
        Self { parameters: model::zeroed(), gradient: model::zeroed() }
    }
}

impl Compute for Cpu {
    type Parameters = Buffer;
    type Gradient = Buffer;

    fn name(&self) -> &'static str {
        "the CPU"
    }

    fn alloc(&self, domain: &ProtectionDomain) -> Result<(Buffer, Buffer)> {
        Ok((domain.alloc(GRADIENT_LEN)?, domain.alloc(GRADIENT_LEN)?))
    }

    fn gradient<'a>(
        &mut self,
        parameters: &Buffer,
        samples: impl ExactSizeIterator<Item = &'a Sample>,
        gradient: &mut Buffer,
    ) -> Result<f32> {
        floats_from_bytes(parameters, &mut self.parameters[..]);
        let loss = model::gradient(&self.parameters, samples, &mut self.gradient);
        floats_to_bytes(&self.gradient[..], gradient);
        Ok(loss)
    }
}

/// One step down: each gradient counts with the same rate, whoever computed it and however many there are in a step. So the way that
/// the parameters make in an epoch does not depend on how many workers there are.
pub fn descend<'a>(
    parameters: &mut [f32; PARAMETERS],
    gradients: impl Iterator<Item = &'a [f32; PARAMETERS]>,
    rate: f32,
) {
    for gradient in gradients {
        parameters.iter_mut().zip(gradient).for_each(|(parameter, slope)| *parameter -= rate * slope);
    }
}
