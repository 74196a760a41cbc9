//! The library over an RDMA NIC, for one measurement: `cargo xtask guest bench` and `cargo xtask guest icount` run it in a
//! guest, beside others that take the same command line and print the same lines.
//!
//! ```text
//! verbs server ADDR:PORT SPEC...   serves one client
//! verbs client ADDR:PORT SPEC...   measures, and prints a line of JSON for each SPEC
//! verbs local  ADDR:PORT SPEC...   both ends in one task of one process (not for send_lat)
//!
//! SPEC = op:size:in_flight:count   op = send_lat | write_lat | read_lat | write_bw
//!
//! RDMA_DEV   the device
//! MODE       adaptive (default) | event | polling: how completions are waited for
//! WORKERS    threads of the runtime (default: a current-thread runtime)
//! ```

mod measure;
mod role;
mod spec;

use std::env;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use tokio::runtime::{Builder, Runtime};
use tokio_rdma::{CompletionMode, Device, ProtectionDomain};

use crate::spec::Spec;

#[derive(Parser)]
#[command(name = "verbs", about)]
struct Cli {
    #[command(subcommand)]
    role: Option<Role>,
    /// What `cargo bench` adds.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Role {
    /// Serve one client.
    Server(Task),
    /// Measure against a server.
    Client(Task),
    /// Measure with both ends in this process.
    Local(Task),
}

#[derive(clap::Args)]
struct Task {
    at: String,
    #[arg(required = true)]
    specs: Vec<Spec>,
}

fn main() -> Result<()> {
    let Some(role) = Cli::parse().role else {
        println!("This one needs an RDMA NIC, or a guest that has one: cargo xtask guest bench");
        return Ok(());
    };
    let runtime = runtime()?;
    // In a task, as a service handles a connection. (The future of `block_on` itself gets its turn less readily.)
    runtime.block_on(async {
        let domain = domain()?;
        let work = async move {
            match &role {
                Role::Server(Task { at, specs }) => role::serve(&domain, at, specs).await,
                Role::Client(Task { at, specs }) => role::measure(&domain, at, specs).await,
                Role::Local(Task { at, specs }) => role::measure_alone(&domain, at, specs).await,
            }
        };
        tokio::spawn(work).await?
    })
}

fn runtime() -> Result<Runtime> {
    let mut builder = match env::var("WORKERS") {
        Ok(workers) => {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(workers.parse().context("WORKERS")?);
            builder
        }
        Err(_) => Builder::new_current_thread(),
    };
    Ok(builder.enable_all().build()?)
}

fn domain() -> Result<ProtectionDomain> {
    let mode = match env::var("MODE").as_deref() {
        Err(_) | Ok("adaptive") => CompletionMode::default(),
        Ok("event") => CompletionMode::Event,
        Ok("polling") => CompletionMode::Polling,
        Ok(other) => bail!("MODE is adaptive, event or polling, not {other:?}"),
    };
    let name = env::var("RDMA_DEV").context("RDMA_DEV names the device")?;
    Ok(Device::builder(&name).completion_mode(mode).open()?.alloc_pd()?)
}
