//! Chores of the project: `cargo xtask --help`.

mod bench;
mod bindings;
mod command;
mod guest;
mod test;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

/// Chores of tokio-rdma.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Run every check of the project, and say at the end what passed, failed and was skipped.
    Test(test::Args),
    /// Measure, and say what is aimed at.
    Bench(bench::Args),
    /// Write the bindings of libibverbs and librdmacm anew; only needed to add a symbol.
    Bindings(bindings::Args),
    /// Run things over Soft-RoCE in a QEMU guest.
    Guest(guest::Args),
}

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    let workspace = Workspace::enter()?;
    match cli.chore {
        Chore::Test(args) => test::run(&workspace, &args),
        Chore::Bench(args) => bench::run(&args),
        Chore::Bindings(args) => bindings::run(&workspace, &args),
        Chore::Guest(args) => guest::run(&workspace, &args),
    }
}
