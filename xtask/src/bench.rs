//! Benchmarks, built in release and run.

use std::process::{Command as Process, ExitCode, Stdio};

use anyhow::{Context, Result};
use clap::Subcommand;

use crate::command::Command;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// The software device against plain tokio sockets: a table, and target/bench/soft.json.
    Soft(Soft),
}

#[derive(clap::Args)]
struct Soft {
    /// Two short rounds: shows that everything works, measures nothing.
    #[arg(long)]
    quick: bool,
    /// Rounds; each figure is the median over them. Default 5.
    #[arg(long)]
    rounds: Option<u32>,
    /// Only rows whose name contains this.
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Fail when an aim is missed.
    #[arg(long)]
    strict: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let Bench::Soft(soft) = &args.bench;
    provide_ucx();
    let mut bench = Process::new("cargo");
    bench.args(["bench", "--package", "tokio-rdma", "--bench", "soft", "--"]);
    bench.args(soft.quick.then_some("--quick"));
    bench.args(soft.rounds.map(|rounds| format!("--rounds={rounds}")));
    bench.args(soft.only.as_ref().map(|name| format!("--only={name}")));
    bench.args(soft.strict.then_some("--strict"));
    // Not through `Command`: the table is for whoever waits, and cargo says by its status what there is to say.
    let status = bench.stdin(Stdio::null()).status().context("run cargo bench")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Installs the peer of the reads where that may be done. Without it the benchmark tells what it skips.
fn provide_ucx() {
    let works = |line: &str| Command::new(line).finish().is_ok_and(|finished| finished.ok);
    let root = Command::new("id --user").stdout().is_ok_and(|id| id.trim() == "0");
    if works("which ucx_perftest") || !root || !works("which apt-get") {
        return;
    }
    let install = Command::new("apt-get install --yes --quiet --no-install-recommends ucx-utils");
    if let Err(error) = install.env("DEBIAN_FRONTEND", "noninteractive").run() {
        eprintln!("UCX could not be installed: {error:#}");
    }
}
