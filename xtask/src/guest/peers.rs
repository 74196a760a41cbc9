//! Programs to test against and to measure beside, and our own that is measured.

use std::fs;

use anyhow::{Context, Result};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};

use crate::command::Command;

/// What async-rdma is built with, as Debian's packages.
const PACKAGES: &str = "libclang-dev libibverbs-dev librdmacm-dev pkg-config make gcc";

/// rdma-core's own example of two programs that play ping-pong.
pub fn pingpong() -> Result<Utf8PathBuf> {
    super::install("ibverbs-utils")?;
    Ok(Command::new("sh -c").arg("command -v ibv_rc_pingpong").stdout()?.trim().into())
}

/// The program of the crate async-rdma, built in one of cargo's profiles: see `peers/async-rdma/README.md`.
pub fn async_rdma(profile: &str) -> Result<Utf8PathBuf> {
    super::install(PACKAGES)?;
    // Its folder has settings that its build needs, and its lock file is the only one that works.
    let build = Command::new("cargo build --locked --profile").arg(profile);
    build.dir("peers/async-rdma").built().context("build peers/async-rdma")
}

/// `peers/c/verbs.c`, built into `dir`.
pub fn c_loop(dir: &Utf8Path) -> Result<Utf8PathBuf> {
    super::install("gcc libc6-dev libibverbs-dev")?;
    let program = dir.join("c-loop");
    Command::new("cc -O2 -Wall -o").arg(&program).args("peers/c/verbs.c -libverbs").run()?;
    Ok(program)
}

/// The library's own benchmark `verbs`, built, under a name that stays the same from build to build.
pub fn ours(dir: &Utf8Path) -> Result<Utf8PathBuf> {
    let built = Command::new("cargo bench --no-run --package tokio-rdma --bench verbs").built()?;
    let program = dir.join("ours");
    fs::copy(built, &program)?;
    Ok(program)
}
