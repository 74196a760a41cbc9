//! Where the model runs, and in whose memory parameters and gradients live.
//!
//! The protocol asks one thing of that memory: that it can be an operand of a Read and of a Write. So another processor is another
//! [`Compute`], and neither the worker nor the server would notice.

mod cpu;

pub use self::cpu::{Cpu, descend};

use anyhow::Result;
use tokio_rdma::{ProtectionDomain, SourceBuffer, TargetBuffer};

use crate::digits::Sample;

/// A processor that computes gradients.
pub trait Compute {
    /// Memory that parameters are read into, little-endian `f32`s.
    type Parameters: TargetBuffer;
    /// Memory that a gradient is written from, little-endian `f32`s.
    type Gradient: SourceBuffer;

    /// Its name, for people.
    fn name(&self) -> &'static str;

    fn alloc(&self, domain: &ProtectionDomain) -> Result<(Self::Parameters, Self::Gradient)>;

    /// Sets `gradient` to the mean gradient of the samples' losses, and returns the mean loss.
    fn gradient<'a>(
        &mut self,
        parameters: &Self::Parameters,
        samples: impl ExactSizeIterator<Item = &'a Sample>,
        gradient: &mut Self::Gradient,
    ) -> Result<f32>;
}
