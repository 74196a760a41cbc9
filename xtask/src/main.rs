//! Chores of the project: `cargo xtask --help`.

mod bench;
mod command;
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
}

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    let workspace = Workspace::enter()?;
    match cli.chore {
        Chore::Test(args) => test::run(&workspace, &args),
        Chore::Bench(args) => bench::run(&args),
    }
}
