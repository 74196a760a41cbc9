//! The instruction counts that were found good, and the tools that they belong to.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use cargo_metadata::camino::Utf8Path;
use serde::{Deserialize, Serialize};

use super::image;
use crate::command::Command;

/// How much an operation may grow.
pub const SLACK: f64 = 0.02;

const HEAD: &str = "# Instructions of the guest for one operation, kernel included: see `cargo xtask guest icount`.\n\
    # Rewritten by `cargo xtask guest icount --accept`. They hold for these tools alone.\n\n";

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Accepted {
    pub tools: BTreeMap<String, String>,
    /// By the case's name.
    pub instructions: BTreeMap<String, f64>,
}

impl Accepted {
    pub fn read(path: &Utf8Path) -> Result<Option<Self>> {
        if !path.exists() {
            return Ok(None);
        }
        let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        Ok(Some(toml::from_str(&text).with_context(|| format!("parse {path}"))?))
    }

    pub fn write(&self, path: &Utf8Path) -> Result<()> {
        let text = format!("{HEAD}{}", toml::to_string(self)?);
        fs::write(path, text).with_context(|| format!("write {path}"))
    }
}

/// Everything that decides how many instructions an operation takes, apart from the code in this repository.
pub fn tools() -> Result<BTreeMap<String, String>> {
    let mut tools = BTreeMap::new();
    let kernel = format!("linux-image-{}", image::kernel_version()?);
    for (name, package) in [
        ("kernel", kernel.as_str()),
        ("qemu", "qemu-system-x86"),
        ("rdma-core", "ibverbs-providers"),
        ("perftest", "perftest"),
        ("libc", "libc6"),
        ("gcc", "gcc"),
    ] {
        let version = Command::new("dpkg-query --show --showformat=${Version}").arg(package).stdout()?;
        tools.insert(name.to_owned(), version.trim().to_owned());
    }
    tools.insert("rustc".to_owned(), Command::new("rustc --version").stdout()?.trim().to_owned());
    Ok(tools)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_accepted_is_read_back() {
        let dir = std::env::temp_dir().join(format!("accepted-{}.toml", std::process::id()));
        let path = Utf8Path::from_path(&dir).unwrap();
        let tools = [("kernel", "6.1"), ("rustc", "1.85")].map(|(name, version)| (name.to_owned(), version.to_owned()));
        let accepted = Accepted { tools: tools.into(), instructions: [("write-8".to_owned(), 14412.5)].into() };
        assert_eq!(Accepted::read(path).unwrap(), None);
        accepted.write(path).unwrap();
        let read = Accepted::read(path);
        fs::remove_file(path).unwrap();
        assert_eq!(read.unwrap(), Some(accepted));
    }
}
