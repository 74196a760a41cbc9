//! Where the model runs, and in whose memory parameters and gradients live.
//!
//! The protocol asks one thing of that memory: that it can be an operand of a Read and of a Write, and at the server be exposed. So
//! another processor is another [`Compute`] and another [`Keeper`], and neither the worker nor the server notices. A server and workers
//! that compute on different ones work together.

mod choose;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

pub use self::choose::{Choice, Kind, NotThere, check_gpus, choose};
pub use self::cpu::{Cpu, CpuKeeper};
#[cfg(feature = "cuda")]
pub use self::gpu::{Gpu, GpuKeeper, GpuWorker, check_kernels};

use anyhow::Result;
use tokio_rdma::{ProtectionDomain, RemoteRegion, SourceBuffer, TargetBuffer};

use crate::digits::Batch;
use crate::model::PARAMETERS;

/// A processor that computes gradients, for a worker.
pub trait Compute: Send {
    /// Memory that parameters are read into, little-endian `f32`s.
    type Parameters: TargetBuffer + Send;
    /// Memory that a gradient with its loss is written from, little-endian `f32`s.
    type Gradient: SourceBuffer + Send;

    /// Its name, for people.
    fn name(&self) -> String;

    fn alloc(&self, domain: &ProtectionDomain) -> Result<(Self::Parameters, Self::Gradient)>;

    /// Begins with what does not hold up the caller, while it is not known yet whether the parameters are whole. May be called again, with others.
    fn begin(&mut self, parameters: &Self::Parameters, batch: &Batch<'_>, gradient: &mut Self::Gradient) -> Result<()>;

    /// After [`begin`](Self::begin) with the same: sets `gradient` to the mean gradient of the samples' losses and, behind it, their mean loss.
    /// Or sees to it: what still runs when this returns is what an operation awaits that takes the memory.
    fn finish(&mut self, parameters: &Self::Parameters, batch: &Batch<'_>, gradient: &mut Self::Gradient)
    -> Result<()>;
}

/// A processor that keeps parameters and takes steps, for the server.
pub trait Keeper: Send + Sync + 'static {
    type Copies: Copies<Gradient = Self::Gradient>;
    type Slot: Slot<Gradient = Self::Gradient>;
    /// One that was taken out of its slot.
    type Gradient: Send + 'static;

    /// Its name, for people.
    fn name(&self) -> String;

    /// Memory for the copies of all versions, with this one in its place.
    fn copies(&self, domain: &ProtectionDomain, version: u64, parameters: &[f32; PARAMETERS]) -> Result<Self::Copies>;

    /// Memory for one worker's gradients.
    fn slot(&self, domain: &ProtectionDomain) -> Result<Self::Slot>;
}

/// The copies of the parameters that workers read, as `published` lays them out.
pub trait Copies {
    type Gradient;

    fn remote(&self) -> RemoteRegion;

    /// Makes the copy of `version` of the one before it: a step down each gradient, with the same rate, whoever computed it and however many
    /// there are in a step. So the way that the parameters make in an epoch does not depend on how many workers there are.
    ///
    /// Returns whether all parameters are finite.
    fn descend(
        &mut self,
        version: u64,
        gradients: &[&Self::Gradient],
        rate: f32,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// A version that is there.
    fn parameters(&self, version: u64) -> Result<Box<[f32; PARAMETERS]>>;
}

/// What a worker writes its gradients into.
pub trait Slot: Send + Sync + 'static {
    type Gradient;

    fn remote(&self) -> RemoteRegion;

    /// Copies the gradient out, which then is no more the worker's to change, and measures the copy.
    fn take(&mut self) -> impl Future<Output = Result<Taken<Self::Gradient>>> + Send;
}

/// A gradient that was taken out of its slot, and what is to be checked of it.
pub struct Taken<G> {
    pub gradient: G,
    /// Its length as a vector.
    pub norm: f64,
    pub loss: f32,
}
