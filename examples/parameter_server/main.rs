//! A parameter server: several processes train one model on handwritten digits, over one-sided operations.
//!
//! ```text
//! cargo run --release --example parameter_server -- --workers 4                                    # everything here
//! ... --example parameter_server -- --role server --address 0.0.0.0:7471 --workers 4               # on one host
//! ... --example parameter_server -- --role worker --address first.example:7471                     # on others
//! ```
//!
//! The server publishes parameters in memory that workers Read whenever they like; a worker writes its gradient into memory of its own at the
//! server, with an immediate that says whose it is. `README.md` beside this file tells more.
//!
//! | file | what |
//! |---|---|
//! | `published` | parameters that are read while they change, and why no read is torn |
//! | `wire` | what server and workers tell each other |
//! | `server/schedule` | who computes what, and when a step is taken: both modes in one rule |
//! | `server/seat` | one worker's connection and slot |
//! | `server/checkpoint` | what a restarted server goes on from |
//! | `server/progress`, `server/plot` | what people see |
//! | `worker` | pull, compute, push |
//! | `compute`, `model`, `digits` | what is trained, on what, and where it runs |
//! | `launch` | all processes on this machine |

#[path = "../common/mod.rs"]
mod common;
mod compute;
mod digits;
mod launch;
mod model;
mod options;
mod published;
mod server;
mod wire;
mod worker;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use clap::Parser;
use tokio::task::JoinSet;

use crate::compute::{Choice, Cpu, CpuKeeper, Kind, NotThere, check_gpus, choose};
use crate::digits::Digits;
use crate::options::{Options, Role};

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let (name, result) = match options.role {
        _ if options.check_kernels => ("parameter_server", check(&options).await),
        Some(Role::Server) => ("parameter_server server", serve(&options).await),
        Some(Role::Worker) => ("parameter_server worker", work(&options).await),
        None => ("parameter_server", launch(&options).await),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not eprintln: this must not panic when nobody listens any more.
            let _ = writeln!(io::stderr(), "{name}: {error:#}");
            // As for a wrong command line: on this machine it is one.
            if error.is::<NotThere>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

async fn launch(options: &Options) -> Result<()> {
    check_gpus(options.compute, options.gpu, options.gpus)?;
    let (gpus, processes) = (options.gpus.unwrap_or(1), options.workers.div_ceil(options.per_process));
    ensure!(
        gpus <= processes,
        "{gpus} GPUs for {processes} worker processes: raise --workers, or lower --per-process or --gpus"
    );
    launch::run(options).await
}

async fn serve(options: &Options) -> Result<()> {
    match choose(options.compute, options.gpu)? {
        Choice::Cpu => server::run(options, CpuKeeper).await,
        #[cfg(feature = "cuda")]
        Choice::Gpu(gpu) => server::run(options, compute::GpuKeeper::new(gpu)).await,
    }
}

async fn work(options: &Options) -> Result<()> {
    tokio::select! {
        outcome = work_together(options) => outcome,
        () = options.let_go() => bail!("whoever started this worker is gone"),
    }
}

/// As many workers as share a process. When one has failed, they end.
async fn work_together(options: &Options) -> Result<()> {
    let samples = Digits::load()?.training.len();
    let choice = choose(options.compute, options.gpu)?;
    let mut workers = JoinSet::new();
    for _ in 0..options.per_process {
        let options = options.clone();
        match &choice {
            Choice::Cpu => {
                let compute = Cpu::new()?;
                workers.spawn(async move { worker::run(&options, compute, samples).await });
            }
            #[cfg(feature = "cuda")]
            Choice::Gpu(gpu) => {
                let compute = compute::GpuWorker::new(gpu)?;
                workers.spawn(async move { worker::run(&options, compute, samples).await });
            }
        }
    }
    while let Some(ended) = workers.join_next().await {
        ended??;
    }
    Ok(())
}

async fn check(options: &Options) -> Result<()> {
    match choose(Kind::Gpu, options.gpu)? {
        #[cfg(feature = "cuda")]
        Choice::Gpu(gpu) => {
            println!("{}", gpu.name());
            compute::check_kernels(&options.open_device()?, gpu).await
        }
        Choice::Cpu => Ok(()),
    }
}
