//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::builder::RangedU64ValueParser;
use clap::{Parser, ValueEnum};
use tokio_rdma::{Address, Device, IntoAddress};

use crate::common::child;
use crate::common::options::open_device;
use crate::compute::Kind;

/// Trains a small model of handwritten digits with several worker processes and a parameter server.
///
/// Without --role everything runs on this machine: the server and the workers are processes that this one starts.
#[derive(Clone, Debug, Parser)]
#[command(args_override_self = true)]
pub struct Options {
    /// Run only this side, for several hosts
    #[arg(long)]
    pub role: Option<Role>,

    /// Where the server listens, and workers connect: IP:PORT, HOST:PORT or unix:PATH. A server without it takes the device's own address
    #[arg(long, value_parser = |text: &str| text.into_address())]
    pub address: Option<Address>,

    /// Workers to start; a server begins when so many have joined. More may join later, and any may leave
    #[arg(long, default_value_t = 4, value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub workers: usize,

    /// When a step is taken: with the gradients of all workers, or without waiting for slow ones
    #[arg(long, default_value = "sync")]
    pub mode: Mode,

    /// With --mode bounded: how many steps may be taken between the parameters that a gradient was computed with and those it is applied to
    #[arg(long, value_name = "STEPS", default_value_t = 8, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    pub staleness: u64,

    /// How often the training goes through all samples
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub epochs: u32,

    /// Samples of a gradient
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub batch: u32,

    /// The learning rate, of each gradient
    #[arg(long, default_value_t = 0.1, value_parser = rate)]
    pub rate: f32,

    /// Of the first parameters and of the order of the samples
    #[arg(long, default_value_t = 1)]
    pub seed: u64,

    /// Write checkpoints to this file
    #[arg(long, value_name = "FILE")]
    pub checkpoint: Option<PathBuf>,

    /// Steps between checkpoints
    #[arg(long, value_name = "STEPS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    pub checkpoint_every: u64,

    /// Go on from the checkpoint
    #[arg(long, requires = "checkpoint")]
    pub resume: bool,

    /// Draw the loss into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,

    /// Steps between lines that say how far it is; without it a bar on a terminal, and ten lines elsewhere
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u64).range(1..))]
    pub log_every: Option<u64>,

    /// Where parameters and gradients live and are computed. Processes on several hosts may differ
    #[arg(long, default_value = "auto")]
    pub compute: Kind,

    /// Without --role: how many GPUs the workers are spread over, from --gpu on. The server takes the first one
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    pub gpus: Option<usize>,

    /// How many workers share a process, and end with it. Processes that share a GPU take turns on it, workers of one process do not
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = RangedU64ValueParser::<usize>::new().range(1..=256))]
    pub per_process: usize,

    /// The number of the GPU to compute on
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub gpu: usize,

    /// Only check that the GPU computes what the CPU does, and tell how long it takes
    #[arg(long, conflicts_with = "role")]
    pub check_kernels: bool,

    /// The RDMA device; without it, the default one
    #[arg(long)]
    pub device: Option<String>,

    /// How many seconds a worker tries to reach the server, again after each loss, and a server waits for workers
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub wait: u64,

    /// End when standard input does
    #[arg(long, hide = true)]
    pub until_eof: bool,

    /// How many seconds a worker may take for a gradient before its work is given to another one
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub patience: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    Server,
    Worker,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// A step takes one gradient of each worker
    Sync,
    /// A step takes what is there, within --staleness
    Bounded,
}

impl Options {
    pub fn open_device(&self) -> Result<Device> {
        open_device(self.device.as_deref())
    }

    /// Resolves when whoever started this process has let it go; never where nobody asked for that.
    pub async fn let_go(&self) {
        if self.until_eof { child::let_go().await } else { std::future::pending().await }
    }

    /// How many steps a gradient may lie behind.
    pub fn staleness(&self) -> u64 {
        match self.mode {
            Mode::Sync => 0,
            Mode::Bounded => self.staleness,
        }
    }

    pub fn wait(&self) -> Duration {
        Duration::from_secs(self.wait)
    }

    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.patience)
    }
}

fn rate(text: &str) -> Result<f32, String> {
    let rate: f32 = text.parse().map_err(|error| format!("{error}"))?;
    if rate > 0.0 && rate <= 10.0 { Ok(rate) } else { Err("the limits are 0, without 0 itself, and 10".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_do_not_contradict_each_other() {
        use clap::CommandFactory;
        Options::command().debug_assert();
        let parse = |arguments: &str| Options::try_parse_from(arguments.split(' '));
        assert_eq!(parse("x --mode bounded --staleness 3").unwrap().staleness(), 3);
        assert_eq!(parse("x --staleness 3").unwrap().staleness(), 0);
        assert!(parse("x --resume").is_err());
        for wrong in
            ["--batch 0", "--rate 0", "--rate NaN", "--rate -1", "--rate 11", "--workers 0", "--checkpoint-every 0"]
        {
            assert!(parse(&format!("x {wrong}")).is_err(), "{wrong}");
        }
    }
}
