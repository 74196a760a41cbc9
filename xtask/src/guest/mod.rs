//! `cargo xtask guest`: runs things over the kernel's Soft-RoCE, in a QEMU guest, so on machines without any RDMA.
//!
//! The guest is a Debian kernel and an initramfs made of what this machine has installed: modules, rdma-core, and the
//! programs to run. It boots in a few seconds without hardware virtualisation, runs them, and is gone.

mod accepted;
mod bench;
mod icount;
mod image;
mod machine;
mod pairs;
mod peers;
mod results;
mod rows;
mod test;
mod topology;

pub use icount::check as count_instructions;
pub use test::check;
pub use topology::check as check_topology;

use std::fs;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};

use crate::command::Command;
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Run the tests of RDMA NICs over Soft-RoCE.
    Test(test::Args),
    /// Test the PCIe topology on a machine with switches and NUMA nodes, without an IOMMU and with one.
    Topology(topology::Args),
    /// Measure beside perftest, a plain C loop and async-rdma.
    Bench(bench::Args),
    /// Count the instructions that small operations take, beside those of a plain C loop.
    Icount(icount::Args),
}

/// What the guest is made of, as Debian's packages.
const PACKAGES: &str = "linux-image-amd64 qemu-system-x86 rdma-core libibverbs1 librdmacm1 ibverbs-providers iproute2 \
    busybox-static cpio kmod binutils";

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    match &args.what {
        What::Test(args) => test::run(workspace, args),
        What::Topology(args) => topology::run(workspace, args),
        What::Bench(args) => bench::run(workspace, args),
        What::Icount(args) => icount::run(workspace, args),
    }
}

/// Makes sure that a guest can be made here, and says where.
fn prepare(workspace: &Workspace) -> Result<Utf8PathBuf> {
    if !cfg!(target_arch = "x86_64") {
        bail!("the guest is an x86_64 machine, which needs programs of that architecture");
    }
    install(PACKAGES)?;
    let dir = workspace.target.join("guest-machine");
    fs::create_dir_all(&dir)?;
    Ok(dir)
}

/// Has those of the packages installed that are missing, where that is possible.
fn install(packages: &str) -> Result<()> {
    let there = |package: &&str| {
        let status = Command::new("dpkg-query --show --showformat=${Status}").arg(package).finish();
        status.is_ok_and(|status| status.ok && status.text.contains("ok installed"))
    };
    let missing: Vec<_> = packages.split_whitespace().filter(|package| !there(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let missing = missing.join(" ");
    if Command::new("id -u").stdout()?.trim() != "0" {
        bail!("the guest needs packages that only root can install: {missing}");
    }
    println!("guest: installing {missing}");
    Command::new("apt-get update --quiet").run()?;
    let install = Command::new("apt-get install --yes --quiet --no-install-recommends").args(&missing);
    install.env("DEBIAN_FRONTEND", "noninteractive").run().map(drop)
}

fn name_of(program: &Utf8Path) -> Result<&str> {
    program.file_name().context("a program without a name")
}
