//! The software device beside plain tokio sockets, UCX, iceoryx2 and bare system calls: `cargo bench --bench soft`.
//!
//! Two processes for each figure, ours and the peer's back to back in every round, each in two placements: on two CPUs and
//! on one. Where the scheduler puts two sleeping processes decides more than anything that they do, so both are pinned
//! before their runtimes start; they have one thread each, apart from those that the device has.
//!
//! ```text
//! driver ── plan (the rows) ── rounds ── trial ──▶ server process ◀── socket ──▶ client process
//!    └── summary (medians, aims) ── report (table, JSON)    ├──── role: ours · sockets · eventfd ────┘
//!                                                           └── other programs: ucx · iceoryx2
//! ```

mod available;
mod driver;
mod iceoryx2;
mod job;
mod measure;
mod place;
mod plan;
mod report;
mod role;
#[path = "../common/stats.rs"]
mod stats;
mod summary;
mod trial;
mod ucx;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use tokio_rdma::Address;

use crate::job::Job;
use crate::place::Place;

const AFTER_HELP: &str =
    "Peers that are other programs are found by PATH, and their rows told as skipped where they are not:
  ucx_perftest     UCX's benchmark (Debian: ucx-utils)
  iceoryx2-peer    peers/iceoryx2 (`cargo xtask bench soft --iceoryx2` builds it)
All run on the first two CPUs that this process may use. `taskset` chooses others, where those are threads of one core.";

#[derive(Parser)]
#[command(name = "soft", about, after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    child: Option<Child>,
    #[command(flatten)]
    settings: Settings,
    /// What `cargo bench` adds; without it (`cargo test --benches`) the run is quick.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(clap::Args)]
struct Settings {
    /// Two short rounds: shows that everything works, measures nothing.
    #[arg(long)]
    quick: bool,
    /// Rounds; each figure is the median over them. Default 5.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Only rows whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Fail when an aim is missed.
    #[arg(long)]
    strict: bool,
    /// Where the JSON goes.
    #[arg(long, value_name = "FILE", default_value = concat!(env!("CARGO_TARGET_TMPDIR"), "/../bench/soft.json"))]
    out: PathBuf,
}

/// The processes that the driver starts; of use by hand under a profiler.
#[derive(Subcommand)]
enum Child {
    /// Serves one client, tells its address and then what it used.
    #[command(hide = true)]
    Server {
        #[command(flatten)]
        place: Place,
        #[arg(value_parser = Job::parse)]
        job: Job,
        at: Address,
    },
    /// Measures against the server, and tells the result.
    #[command(hide = true)]
    Client {
        #[command(flatten)]
        place: Place,
        #[arg(value_parser = Job::parse)]
        job: Job,
        at: Address,
    },
    /// Measures without a server, and tells the result.
    #[command(hide = true)]
    Alone {
        #[command(flatten)]
        place: Place,
        #[arg(value_parser = Job::parse)]
        job: Job,
    },
    /// Becomes another program, in its place.
    #[command(hide = true)]
    Exec {
        #[command(flatten)]
        place: Place,
        #[arg(trailing_var_arg = true, required = true)]
        command: Vec<OsString>,
    },
}

fn main() -> Result<ExitCode> {
    let mut cli = Cli::parse();
    match cli.child {
        None => {
            cli.settings.quick |= !cli.bench;
            return driver::run(&cli.settings);
        }
        Some(Child::Server { place, job, at }) => {
            place.take()?;
            role::serve(&job, &at)?;
        }
        Some(Child::Client { place, job, at }) => {
            place.take()?;
            role::measure(&job, &at)?;
        }
        Some(Child::Alone { place, job }) => {
            place.take()?;
            role::measure_alone(&job)?;
        }
        Some(Child::Exec { place, command }) => {
            place.take()?;
            place::become_program(&command)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
