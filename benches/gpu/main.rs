//! GPU buffers over the software device beside what CUDA itself takes for the same: `cargo bench --features cuda --bench gpu`.
//!
//! Each round measures ours and the peer's back to back; a figure is the median over the rounds. Both ends of the connection are in
//! this process, on two threads with a runtime each, over a Unix-domain socket. They do not know that they are in one process, except for
//! the rows that say so; those of two processes go through shared memory.
//!
//! ```text
//! rounds ── rows ──▶ latency · throughput · launches ──▶ figures ──▶ table, JSON
//!                        │ link (ours, host memory)   │ bare (CUDA alone, a plain socket)
//! ```

mod bare;
mod figures;
mod launches;
mod link;
mod processes;
#[path = "../common/stats.rs"]
mod stats;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use tokio_rdma::gpu::GpuDevice;

use crate::figures::{Aim, Row};
use crate::link::{End, Ends, Link};
use crate::processes::{Processes, Way};

#[derive(Parser)]
#[command(name = "gpu", about)]
struct Cli {
    /// One short round: shows that everything works, measures nothing.
    #[arg(long)]
    quick: bool,
    /// Rounds; each figure is the median over them.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The GPU's ordinal.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Fail when an aim is missed.
    #[arg(long)]
    strict: bool,
    /// Where the JSON goes.
    #[arg(long, value_name = "FILE", default_value = "target/bench/gpu.json")]
    out: PathBuf,
    /// Be the other process, listening there
    #[arg(long, hide = true, requires = "far_len")]
    far_end: Option<String>,
    /// With so many bytes of memory
    #[arg(long, hide = true)]
    far_len: Option<usize>,
    /// What `cargo bench` adds; without it (`cargo test --benches`) the run is quick.
    #[arg(long, hide = true)]
    bench: bool,
}

const LATENCIES: [usize; 5] = [8, 4 << 10, 64 << 10, 256 << 10, 1 << 20];
const LONG: usize = 64 << 20;

fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    let quick = cli.quick || !cli.bench;
    let rounds = if quick { 1 } else { cli.rounds };
    let gpu = match GpuDevice::open(cli.gpu) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(ExitCode::SUCCESS);
        }
    };
    if let (Some(address), Some(len)) = (&cli.far_end, cli.far_len) {
        processes::far_end(&gpu, address, len)?;
        return Ok(ExitCode::SUCCESS);
    }
    println!("{gpu}, {}", gpu.visibility());
    let rows = measure(&gpu, rounds, quick)?;
    let missed = figures::print(&rows, rounds);
    figures::write(&rows, &cli.out).with_context(|| format!("write {}", cli.out.display()))?;
    Ok(if cli.strict && missed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn measure(gpu: &GpuDevice, rounds: u32, quick: bool) -> Result<Vec<Row>> {
    let mut link = Link::open(gpu, gpu, Ends::Apart)?;
    let others = if GpuDevice::count() > 1 {
        Some(GpuDevice::open(usize::from(gpu.capabilities().ordinal == 0))?)
    } else {
        None
    };
    let within: Vec<_> = [gpu].into_iter().chain(&others).collect();
    let mut near = within.iter().map(|far| Link::open(gpu, far, Ends::Near)).collect::<Result<Vec<_>>>()?;
    let open = |far: &&GpuDevice| Processes::open(gpu, far.capabilities().ordinal, LONG);
    let apart: Vec<_> = match gpu.capabilities().shareable {
        true => within.iter().map(open).collect::<Result<_>>()?,
        false => {
            println!("skipped: two processes; this GPU's memory cannot be given to other processes");
            Vec::new()
        }
    };
    let bare = bare::Bare::new(gpu, LONG)?;
    let mut rows = Vec::new();
    for size in LATENCIES {
        let name = format!("receive to visible, {}", shown(size));
        rows.push(Row::new(name, "us more than to host memory", "copy + event + query", Aim::AtMost(1.3)));
    }
    for (name, peer) in [
        ("64 MiB, host to GPU", "slower of copy and link"),
        ("64 MiB, GPU to host", "slower of copy and link"),
        ("64 MiB, GPU to GPU", "slower of copy and link"),
        ("64 MiB Write, host to GPU", "slower of copy and link"),
        ("64 MiB Read, GPU to host", "slower of copy and link"),
    ] {
        rows.push(Row::new(name.to_owned(), "GB/s", peer, Aim::AtLeast(0.9)));
    }
    rows.push(Row::new("64 MiB, host to host".to_owned(), "GB/s", "plain Unix socket", Aim::None));
    for far in &within {
        let same = far.capabilities().ordinal == gpu.capabilities().ordinal;
        let (to, peer, aim) = if same {
            ("itself", "bare copy within the GPU", Aim::None)
        } else {
            ("another", "bare copy between the GPUs", Aim::AtLeast(0.9))
        };
        rows.push(Row::new(format!("64 MiB, GPU to {to} in one process"), "GB/s", peer, Aim::None));
        rows.push(Row::new("the same, 4 in flight".to_owned(), "GB/s", peer, aim));
        if !apart.is_empty() {
            rows.push(Row::new(format!("64 MiB Write, GPU to {to} of another process"), "GB/s", peer, Aim::None));
            rows.push(Row::new("the same, 4 in flight".to_owned(), "GB/s", peer, aim));
            rows.push(Row::new("Read instead, 4 in flight".to_owned(), "GB/s", peer, aim));
        }
    }
    rows.push(Row::new("launch beside 64 awaits".to_owned(), "us", "launch alone", Aim::AtMost(1.1)));
    for round in 1..=rounds {
        eprintln!("round {round} of {rounds}");
        let mut row = rows.iter_mut();
        let mut next = || row.next().context("a row for each figure");
        for size in LATENCIES {
            let times = if quick { 20 } else { 2000 };
            let (on_gpu, on_host) = link.latency(size, times)?;
            next()?.add(on_gpu - on_host, Some(bare.latency(size, times)?));
        }
        let times = if quick { 2 } else { 12 };
        let copy = bare.throughput(times)?;
        let socket = bare::socket(LONG, times)?;
        let on_host = link.messages(End::Host, End::Host, LONG, times)?;
        let limit = Some(copy.min(on_host));
        for (from, to) in [(End::Host, End::Gpu), (End::Gpu, End::Host), (End::Gpu, End::Gpu)] {
            next()?.add(link.messages(from, to, LONG, times)?, limit);
        }
        next()?.add(link.writes(LONG, times)?, limit);
        next()?.add(link.reads(LONG, times)?, limit);
        next()?.add(on_host, Some(socket));
        for (at, (link, far)) in near.iter_mut().zip(&within).enumerate() {
            let peer = Some(bare.between(far, 10 * times)?);
            next()?.add(link.messages(End::Gpu, End::Gpu, LONG, 10 * times)?, peer);
            next()?.add(link.stream(End::Gpu, End::Gpu, LONG, 20 * times)?, peer);
            if let Some(apart) = apart.get(at) {
                next()?.add(apart.one_by_one(Way::Write, 10 * times)?, peer);
                next()?.add(apart.several(Way::Write, 20 * times)?, peer);
                next()?.add(apart.several(Way::Read, 20 * times)?, peer);
            }
        }
        let (beside, alone) = launches::measure(gpu, if quick { 20 } else { 2000 })?;
        next()?.add(beside, Some(alone));
        eprintln!("bare copy {copy:.1} GB/s, plain socket {socket:.1} GB/s");
    }
    Ok(rows)
}

fn shown(size: usize) -> String {
    match size {
        size if size >= 1 << 20 => format!("{} MiB", size >> 20),
        size if size >= 1 << 10 => format!("{} KiB", size >> 10),
        size => format!("{size} B"),
    }
}
