//! A program of the crate async-rdma, unchanged: to test against, and to measure beside.
//!
//! ```text
//! async-rdma-peer server|client ADDRESS SPEC...     a benchmark; a server serves one client
//! async-rdma-peer listen|connect ADDRESS STEP...    the steps of a test, in order
//! ```
//!
//! The environment sets what both ends must agree on: `RDMA_DEV`, `RDMA_GID_INDEX`, `RDMA_MTU`, and what only this end
//! needs: `RT` (multi or current), `CC_TIMEOUT_MS`, `BENCH_IMPL`.

mod bench;
mod report;
mod settings;
mod spec;
mod steps;

use std::io::Write;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::spec::Spec;
use crate::steps::Step;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Serve the client of a benchmark, for ever.
    Server(Measured),
    /// Measure, and print a line of JSON for each spec.
    Client(Measured),
    /// Accept one connection and carry the steps out.
    Listen(Tested),
    /// Connect and carry the steps out.
    Connect(Tested),
}

#[derive(clap::Args)]
struct Measured {
    address: String,
    /// operation:size:inflight:iterations, the operation one of send_lat, send_raw_lat, write_lat, read_lat, write_bw.
    #[arg(required = true)]
    specs: Vec<Spec>,
}

#[derive(clap::Args)]
struct Tested {
    address: String,
    #[arg(required = true)]
    steps: Vec<Step>,
}

fn main() -> Result<()> {
    let role = Cli::parse().role;
    let mut runtime = match settings::variable("RT", "multi").as_str() {
        "current" => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    let done = runtime.block_on(async {
        match role {
            Role::Server(Measured { address, specs }) => {
                // The driver waits for this line.
                println!("READY");
                bench::server(&address, &specs).await
            }
            Role::Client(Measured { address, specs }) => bench::client(&address, &specs).await,
            Role::Listen(Tested { address, steps }) => {
                println!("READY");
                steps::run(&steps::builder(&steps)?.listen(address).await?, &steps).await
            }
            Role::Connect(Tested { address, steps }) => {
                steps::run(&steps::builder(&steps)?.connect(address).await?, &steps).await
            }
        }
    });
    if let Err(error) = &done {
        eprintln!("{error:?}");
    }
    std::io::stdout().flush()?;
    // It has no shutdown: nobody waits for its background tasks.
    std::process::exit(i32::from(done.is_err()))
}
