//! Which processor a process computes on.

use anyhow::Result;
use clap::ValueEnum;
use thiserror::Error;

#[cfg(feature = "cuda")]
use super::Gpu;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// A GPU where there is one and the program is built for it, else the CPU
    Auto,
    Cpu,
    Gpu,
}

/// What was asked for is not on this machine.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct NotThere(String);

pub enum Choice {
    Cpu,
    #[cfg(feature = "cuda")]
    Gpu(Gpu),
}

/// Opens the GPU with this number, if it is one that is to compute.
pub fn choose(kind: Kind, gpu: usize) -> Result<Choice> {
    if kind == Kind::Cpu || kind == Kind::Auto && count().is_err() { Ok(Choice::Cpu) } else { open(gpu) }
}

/// Whether so many GPUs are there from the number `first` on, where they are to compute.
pub fn check_gpus(kind: Kind, first: usize, wanted: Option<usize>) -> Result<()> {
    match (kind, count(), wanted) {
        (Kind::Auto, Err(_), None) | (Kind::Cpu, _, None) => Ok(()),
        (Kind::Cpu, _, Some(_)) => Err(NotThere("--gpus and --compute cpu contradict each other".to_owned()).into()),
        (_, Err(reason), _) => Err(reason.into()),
        (_, Ok(there), wanted) => check_range(first, wanted.unwrap_or(1), there),
    }
}

fn check_range(first: usize, wanted: usize, there: usize) -> Result<()> {
    let last = first.saturating_add(wanted - 1);
    if last < there {
        return Ok(());
    }
    let reason = format!("GPU {last} was asked for, and CUDA shows {there} to this process");
    Err(NotThere(format!("{reason}; --gpu and --gpus choose, and see CUDA_VISIBLE_DEVICES")).into())
}

/// How many GPUs there are, or why there is none.
#[cfg(feature = "cuda")]
fn count() -> Result<usize, NotThere> {
    use tokio_rdma::gpu::{GpuDevice, driver_version};
    match driver_version() {
        Err(error) => Err(NotThere(format!("{error}; --compute cpu needs none"))),
        Ok(_) => match GpuDevice::count() {
            0 => Err(NotThere("CUDA shows no GPU to this process; --compute cpu needs none".to_owned())),
            count => Ok(count),
        },
    }
}

#[cfg(not(feature = "cuda"))]
fn count() -> Result<usize, NotThere> {
    let reason = "this program was built without the feature cuda, and so knows no GPU";
    Err(NotThere(format!("{reason}; build it with --features cuda, or take --compute cpu")))
}

#[cfg(feature = "cuda")]
fn open(gpu: usize) -> Result<Choice> {
    check_range(gpu, 1, count()?)?;
    Gpu::open(gpu).map(Choice::Gpu)
}

#[cfg(not(feature = "cuda"))]
fn open(_gpu: usize) -> Result<Choice> {
    count()?;
    Ok(Choice::Cpu)
}
