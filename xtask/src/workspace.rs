//! What every chore knows: where things are, and what `cargo metadata` says of them.

use std::fs;

use anyhow::{Context, Result};
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use cargo_metadata::{Metadata, MetadataCommand, Package};

pub struct Workspace {
    pub metadata: Metadata,
    /// Where to build; `CARGO_TARGET_DIR` is honoured.
    pub target: Utf8PathBuf,
}

impl Workspace {
    /// Finds the workspace around the current directory, and makes its root the current directory.
    pub fn enter() -> Result<Self> {
        let metadata = MetadataCommand::new().no_deps().exec().context("cargo metadata")?;
        std::env::set_current_dir(&metadata.workspace_root)?;
        let target = metadata.target_directory.clone();
        Ok(Self { metadata, target })
    }

    /// The library itself.
    pub fn crate_package(&self) -> Result<&Package> {
        self.metadata.root_package().context("the workspace's root is not a package")
    }
}

/// The Rust files below these directories of the current one; a directory that does not exist holds none.
pub fn rust_files(directories: &[&str]) -> Result<Vec<Utf8PathBuf>> {
    let mut files = Vec::new();
    let mut pending: Vec<Utf8PathBuf> = directories.iter().map(Utf8PathBuf::from).filter(|dir| dir.is_dir()).collect();
    while let Some(directory) = pending.pop() {
        for entry in directory.read_dir_utf8()? {
            let path = entry?.into_path();
            if path.is_dir() {
                pending.push(path);
            } else if path.extension() == Some("rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

pub fn read(path: &Utf8Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("read {path}"))
}
