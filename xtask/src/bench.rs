//! Benchmarks, built in release and run.

use std::ffi::OsString;
use std::process::{Command as Process, ExitCode, Stdio};

use anyhow::{Context, Result};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use clap::Subcommand;

use crate::command::Command;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Subcommand)]
enum Bench {
    /// The software device against plain tokio sockets, UCX and others: a table, and target/bench/soft.json.
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
    /// Build the peer of the crate iceoryx2 first, which takes minutes. Without it, one found by PATH is used.
    #[arg(long)]
    iceoryx2: bool,
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
    if soft.iceoryx2 {
        bench.env("PATH", with_folder_of(&build_iceoryx2()?)?);
    }
    // Not through `Command`: the table is for whoever waits, and cargo says by its status what there is to say.
    let status = bench.stdin(Stdio::null()).status().context("run cargo bench")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The program in `peers/iceoryx2`, which is a workspace of its own.
fn build_iceoryx2() -> Result<Utf8PathBuf> {
    let build = Command::new("cargo build --release --locked").dir("peers/iceoryx2");
    build.built().context("build peers/iceoryx2")
}

/// `PATH`, and where this program is before all else.
fn with_folder_of(program: &Utf8Path) -> Result<OsString> {
    let own = program.parent().context("a program without a folder")?.as_std_path().to_owned();
    let path = std::env::var_os("PATH").unwrap_or_default();
    Ok(std::env::join_paths([own].into_iter().chain(std::env::split_paths(&path)))?)
}

/// Installs UCX's benchmark where that may be done. Without it the benchmark tells what it skips.
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
