//! What stands between this machine's NICs and the memory of its GPUs, link by link; and what each path carries.
//!
//! ```text
//! cargo run --release --example doctor                      # drivers of GPUs are not asked
//! cargo run --release --features cuda --example doctor      # all of it
//! ... --example doctor -- --gpu 3 --device mlx5_3           # between these two
//! ... --example doctor -- --probe --svg paths.svg           # and measured
//! ... --example doctor -- --json                            # for programs
//! ... --example doctor -- --dump topology.xml               # the matrix of another machine
//! ```
//!
//! Ends with status 0 only when the whole chain holds, with 1 when it does not, with 2 when it was called wrongly.
//! As root it sees more: others may not read what tells of PCIe Access Control Services.
//!
//! | file | what |
//! |---|---|
//! | `json` | the report for programs |
//! | `dump` | reading what hwloc or NCCL wrote about another machine |
//! | `probe` | measuring: what registering memory costs, what the paths carry |

#[path = "../common/mod.rs"]
mod common;
mod dump;
mod json;
mod probe;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use tokio_rdma::doctor::GpuDirectReport;

/// Reports every link between a NIC and the memory of a GPU, and what to do about those that do not hold.
#[derive(Parser)]
struct Options {
    /// The GPU: its number by PCI address, as nvidia-smi counts, or its PCI address; without it, the first that CUDA shows
    #[arg(long, value_name = "N|BUSID")]
    gpu: Option<String>,

    /// The RDMA device; without it, the one nearest to the GPU
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Print the sources of those links only that do not hold
    #[arg(long, conflicts_with = "json")]
    short: bool,

    /// Read a copy of another machine's /sys, and its /proc if that is beside it; asks no driver
    #[arg(long, value_name = "ROOT", conflicts_with = "probe")]
    sysfs: Option<PathBuf>,

    /// Print the matrix of a machine that hwloc (lstopo) or NCCL (NCCL_TOPO_DUMP_FILE) wrote about, and no chain; status 0 if it can be read
    #[arg(long, value_name = "FILE", conflicts_with_all = ["probe", "sysfs", "gpu", "device", "short"])]
    dump: Option<PathBuf>,

    /// Measure what registering memory costs and what each path carries, in about 20 seconds
    #[arg(long)]
    probe: bool,

    /// Where the picture of what was measured goes [default: doctor.svg, in target/ where there is one]
    #[arg(long, value_name = "FILE", requires = "probe")]
    svg: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            // Not eprintln: this must not panic when nobody listens any more.
            let _ = writeln!(io::stderr(), "doctor: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Whether the chain holds.
fn run(options: &Options) -> Result<bool> {
    if let Some(file) = &options.dump {
        return show_dump(file, options.json).with_context(|| format!("read {}", file.display())).map(|()| true);
    }
    let report = report(options)?;
    let figures = if options.probe { Some(probe::run(&report)) } else { None };
    let mut out = io::stdout().lock();
    if options.json {
        let whole = json::whole(&report, figures.as_ref());
        // A reader that has heard enough is no error.
        let _ = writeln!(out, "{whole:#}");
    } else if options.short {
        let _ = write!(out, "{report}");
    } else {
        let _ = write!(out, "{report:#}");
    }
    if let Some(figures) = &figures {
        let file = options.svg.clone().unwrap_or_else(default_picture);
        let drawn = probe::picture::draw(figures, &file);
        if !options.json {
            let _ = write!(out, "\n{}", probe::text::Shown(figures));
        }
        match drawn.with_context(|| format!("draw {}", file.display())) {
            Ok(()) if !options.json => drop(writeln!(out, "picture: {}", file.display())),
            Ok(()) => {}
            Err(error) => drop(writeln!(io::stderr(), "doctor: {error:#}")),
        }
    }
    Ok(report.chain.holds())
}

fn show_dump(file: &Path, as_json: bool) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let xml = std::fs::read_to_string(file)?;
    dump::write(&xml, folder.path())?;
    let mut builder = GpuDirectReport::builder().files(folder.path(), folder.path().join("proc"));
    for dump::NvLink { gpu, end, count, element } in dump::nvlinks(&xml)? {
        builder = builder.nvlinks(gpu, end, count, element);
    }
    let report = builder.build()?;
    let mut out = io::stdout().lock();
    let _ = match as_json {
        true => writeln!(out, "{:#}", json::machine(&report)),
        false => write!(out, "{}", report.overview()),
    };
    Ok(())
}

fn report(options: &Options) -> Result<GpuDirectReport> {
    let mut builder = GpuDirectReport::builder();
    if let Some(gpu) = &options.gpu {
        builder = builder.gpu(gpu);
    }
    if let Some(device) = &options.device {
        builder = builder.nic(device);
    }
    if let Some(sysfs) = &options.sysfs {
        let parts = ["bus/pci/devices", "class", "devices"];
        let is_copy = parts.iter().any(|part| sysfs.join(part).is_dir());
        anyhow::ensure!(is_copy, "--sysfs {}: none of {parts:?} is there; it takes a copy of /sys", sysfs.display());
        builder = builder.files(sysfs, sysfs.join("../proc"));
    }
    Ok(builder.build()?)
}

fn default_picture() -> PathBuf {
    let target = PathBuf::from("target");
    if target.is_dir() { target.join("doctor.svg") } else { "doctor.svg".into() }
}
