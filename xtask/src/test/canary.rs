//! Programs whose fault is known, to see that a sanitizer works here before its silence is believed.

use anyhow::{Result, bail};

use super::tools::Toolchain;
use crate::command::{Command, Finished};

/// Runs one of the programs in `xtask/canary`, built as `configure` says.
pub fn run(toolchain: &Toolchain, name: &str, configure: &impl Fn(Command) -> Command) -> Result<Finished> {
    configure(toolchain.cargo("run --quiet --profile sanitizer --package canary --bin").arg(name)).finish()
}

/// The program must fail, and the sanitizer must say that this is why.
pub fn must_report(
    toolchain: &Toolchain,
    name: &str,
    report: &str,
    configure: &impl Fn(Command) -> Command,
) -> Result<()> {
    let finished = run(toolchain, name, configure)?;
    if finished.ok || !finished.text.contains(report) {
        bail!("the canary {name} should end with the report {report:?}, but:\n{}", finished.text);
    }
    Ok(())
}
