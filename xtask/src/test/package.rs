//! Steps about what is published: the package, the README, and the licences of what the crate stands on.

use std::collections::HashSet;

use anyhow::{Result, bail};

use super::{Outcome, Tools};
use crate::command::Command;
use crate::workspace::{Workspace, read};

/// Without these a user lacks the terms, the start or the news.
const MUST_HOLD: &[&str] = &["src/lib.rs", "README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"];
/// What cargo itself adds.
const GENERATED: &[&str] = &["Cargo.lock", "Cargo.toml.orig", ".cargo_vcs_info.json"];

/// The test command that the README gives is the one that runs everything.
pub fn readme(_: &Workspace, _: &Tools) -> Result<Outcome> {
    let text = read("README.md".into())?;
    if !text.lines().any(|line| line.trim() == "cargo xtask test") {
        bail!("README.md: no line of a code block is `cargo xtask test`");
    }
    let other =
        text.lines().find(|line| line.trim().starts_with("cargo test") || line.trim().starts_with("cargo nextest"));
    if let Some(other) = other {
        bail!("README.md: {:?} is a second test command; `cargo xtask test` is the one", other.trim());
    }
    Ok(Outcome::passed())
}

pub fn contents(_: &Workspace, _: &Tools) -> Result<Outcome> {
    // The list is of the working tree, so a file that git does not know shows up before it is published by mistake.
    let list = Command::new("cargo package --package tokio-rdma --allow-dirty --no-verify --quiet --list").stdout()?;
    let files: Vec<_> = list.lines().collect();
    let mut faults: Vec<_> =
        MUST_HOLD.iter().filter(|it| !files.contains(it)).map(|it| format!("{it} is missing")).collect();
    let mut outcome = Outcome::passed_with(format!("{} files", files.len()));
    match Command::new("git ls-files").stdout() {
        Ok(tracked) => {
            let tracked: HashSet<_> = tracked.lines().chain(GENERATED.iter().copied()).collect();
            let strays = files.iter().filter(|file| !tracked.contains(*file));
            faults.extend(strays.map(|file| format!("{file} would be published, but is not in git")));
        }
        Err(_) => outcome.skips.push("stray files: this is no git checkout to compare with".into()),
    }
    if !faults.is_empty() {
        bail!("the package: {}", faults.join("\nthe package: "));
    }
    Ok(outcome)
}

pub fn deny(_: &Workspace, tools: &Tools) -> Result<Outcome> {
    let Some(program) = tools.cargo_deny()? else {
        return Ok(Outcome::skipped("cargo-deny is not installed"));
    };
    let deny = Command::new("").arg(program).args("--workspace --all-features");
    deny.clone().args("check --hide-inclusion-graph licenses bans sources").run()?;
    let mut outcome = Outcome::passed();
    if deny.clone().args("fetch db").finish()?.ok {
        deny.args("check advisories --disable-fetch").run()?;
    } else {
        outcome.skips.push("advisories: their database cannot be fetched from here".into());
    }
    Ok(outcome)
}
