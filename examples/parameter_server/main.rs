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

use clap::Parser;

use crate::compute::Cpu;
use crate::options::{Options, Role};

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    let (name, result) = match options.role {
        Some(Role::Server) => ("parameter_server server", server::run(&options).await),
        Some(Role::Worker) => ("parameter_server worker", work(&options).await),
        None => ("parameter_server", launch::run(&options).await),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not eprintln: this must not panic when nobody listens any more.
            let _ = writeln!(io::stderr(), "{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn work(options: &Options) -> anyhow::Result<()> {
    tokio::select! {
        outcome = worker::run(options, Cpu::new()) => outcome,
        () = options.let_go() => anyhow::bail!("whoever started this worker is gone"),
    }
}
