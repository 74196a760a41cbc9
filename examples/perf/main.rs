//! How fast each operation is between two processes, over the sizes, depths and completion modes that one asks for.
//!
//! ```text
//! cargo run --release --example perf                                     # every operation, both ends on this machine
//! ... --example perf -- --operation write,read --sizes 8..1M --depth 16  # doubling from 8 B to 1 MiB
//! ... --example perf -- --mode polling --json perf.json --svg perf.svg
//! ... --features cuda --example perf -- --memory gpu:0 --gpus 2          # the client's bytes on GPU 0, the server's on GPU 1
//! ... --example perf -- --role server --address 0.0.0.0:7471             # on one host
//! ... --example perf -- --role client --address first.example:7471       # on another
//! ```
//!
//! Each row has a connection of its own. Before anything is timed, the first messages of the row are compared byte by byte where
//! they arrive. A time is that from posting to completion; of a round trip, until the answer is there. Ends with status 0
//! only if all rows were measured.
//!
//! Over the software device, GPUs of the two processes copy directly where memory is lent through the link shm, and
//! the GPUs reach each other: Reads and Writes then, nothing else. The table and the JSON say of each row whether they did.
//!
//! | file | what |
//! |---|---|
//! | `plan` | what can be asked for, and the rows that this makes |
//! | `client` | the end that measures |
//! | `server` | the far end: memory, receives, answers, and a look at what arrived |
//! | `wire` | what the two tell each other, over a connection beside the measured one |
//! | `memory` | where the bytes are: the host, or a GPU (with the feature `cuda`) |
//! | `flight`, `laps` | operations on their way, and their times |
//! | `report` | the table, the JSON, the picture |

mod client;
#[path = "../common/mod.rs"]
mod common;
mod flight;
mod laps;
mod memory;
mod plan;
mod report;
mod server;
mod wire;

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Parser;

use crate::common::child::Server;
use crate::common::options::server_address;
use crate::memory::{Host, Place};
use crate::plan::{Options, Role};

fn main() -> ExitCode {
    let options = Arc::new(Options::parse());
    let name = match options.role {
        Some(Role::Server) => "perf server",
        Some(Role::Client) => "perf client",
        None => "perf",
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not eprintln: this must not panic when nobody listens any more.
            let _ = writeln!(io::stderr(), "{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Arc<Options>) -> Result<()> {
    options.check_gpus()?;
    // One thread, so that no time is that of waking another one. What is measured is a task, as a service's work is:
    // the future of `block_on` itself gets its turn less readily.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a runtime")?;
    match options.memory {
        Place::Host => runtime.block_on(async { tokio::spawn(work(options, Host)).await? }),
        #[cfg(feature = "cuda")]
        Place::Gpu(ordinal) => {
            let gpu = memory::gpu::Gpu::open(ordinal)?;
            runtime.block_on(async { tokio::spawn(work(options, gpu)).await? })
        }
        #[cfg(not(feature = "cuda"))]
        Place::Gpu(ordinal) => Err(memory::MemoryError::NoSupport { ordinal }.into()),
    }
}

async fn work<M: memory::Memory>(options: Arc<Options>, memory: M) -> Result<()> {
    match options.role {
        Some(Role::Server) => server::run(&options, &memory).await,
        Some(Role::Client) => {
            let address = server_address("a client", options.address.as_ref())?;
            client::run(&options, &memory, address).await
        }
        None => {
            options.rows()?;
            let (server, address) = Server::start(options.of_server(), options.limit()).await?;
            server.finish(client::run(&options, &memory, &address).await, options.limit()).await
        }
    }
}
