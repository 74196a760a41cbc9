//! A program of the crate iceoryx2: loaned messages there and back, to measure beside.
//!
//! ```text
//! iceoryx2-peer server ADDRESS SPEC...     answers one client
//! iceoryx2-peer client ADDRESS SPEC...     measures, and prints a line of JSON for each SPEC
//! ```
//!
//! ADDRESS names the services. Both ends poll, as the crate's own benchmark of this pattern does.

mod link;
mod report;
mod spec;

use std::time::Instant;

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use iceoryx2::prelude::{LogLevel, set_log_level};

use crate::link::{Link, Side};
use crate::spec::Spec;

#[derive(Parser)]
struct Cli {
    #[command(subcommand)]
    role: Role,
}

#[derive(Subcommand)]
enum Role {
    /// Answer the client of a benchmark.
    Server(Measured),
    /// Measure, and print a line of JSON for each spec.
    Client(Measured),
}

#[derive(clap::Args)]
struct Measured {
    address: String,
    /// pubsub_lat:8:1:COUNT
    #[arg(required = true)]
    specs: Vec<Spec>,
}

/// Says that the client has its last answer, which must stay where it is until then.
const FAREWELL: u64 = u64::MAX;

fn main() -> Result<()> {
    // It warns when it runs with its defaults.
    set_log_level(LogLevel::Error);
    match Cli::parse().role {
        Role::Server(Measured { address, .. }) => serve(&address),
        Role::Client(Measured { address, specs }) => measure(&address, &specs),
    }
}

fn serve(address: &str) -> Result<()> {
    let link = Link::open(address, Side::Server)?;
    // The driver waits for this line.
    println!("READY");
    loop {
        match link.receive()? {
            FAREWELL => return Ok(()),
            message => link.send(message)?,
        }
    }
}

fn measure(address: &str, specs: &[Spec]) -> Result<()> {
    let link = Link::open(address, Side::Client)?;
    for spec in specs {
        let round_trip = |message: u64| -> Result<()> {
            link.send(message)?;
            let answer = link.receive()?;
            ensure!(answer == message, "{answer} came back instead of {message}");
            Ok(())
        };
        (0..spec.warm_up() as u64).try_for_each(round_trip)?;
        let mut times = Vec::with_capacity(spec.iterations);
        let mut last = Instant::now();
        for message in 0..spec.iterations as u64 {
            round_trip(message)?;
            let now = Instant::now();
            times.push(now - last);
            last = now;
        }
        report::print(times)?;
    }
    link.send(FAREWELL)
}
