//! Steps that run on cargo and its usual companions.

use anyhow::{Result, bail};

use super::tools::Toolchain;
use super::{Outcome, Tools};
use crate::command::Command;
use crate::workspace::Workspace;

pub fn fmt(_: &Workspace, _: &Tools) -> Result<Outcome> {
    Command::new("cargo fmt --all --check").run()?;
    Ok(Outcome::passed())
}

pub fn clippy(_: &Workspace, _: &Tools) -> Result<Outcome> {
    for features in ["", "--all-features"] {
        Command::new("cargo clippy --workspace --all-targets").args(features).args("-- -D warnings").run()?;
    }
    Ok(Outcome::passed())
}

/// The library with each feature alone and with all others but it. The step `clippy` has none and all of them, with tests and all.
pub fn features(workspace: &Workspace, _: &Tools) -> Result<Outcome> {
    // Every set is built once, so what would make a second time quicker is for nothing.
    let own = |line| {
        Command::new(line).env("CARGO_INCREMENTAL", "0").arg("--target-dir").arg(workspace.target.join("features"))
    };
    let features: Vec<_> = workspace.crate_package()?.features.keys().filter(|name| *name != "default").collect();
    let without = |left: &str| -> Vec<_> { features.iter().map(|it| it.as_str()).filter(|it| *it != left).collect() };
    let sets: Vec<_> = features.iter().flat_map(|one| [one.to_string(), without(one).join(",")]).collect();
    for set in &sets {
        let check = own("cargo clippy --package tokio-rdma --no-default-features --lib");
        check.arg(format!("--features={set}")).args("-- -D warnings").run()?;
    }
    // Another crate of a program may choose cudarc's version of CUDA.
    for version in ["cuda-11040", "cuda-12080", "cuda-13000"] {
        let check = own("cargo check --package tokio-rdma --lib");
        check.arg(format!("--features=cuda,cudarc/{version}")).run()?;
    }
    Ok(Outcome::passed_with(format!("{} sets", sets.len())))
}

pub fn docs(_: &Workspace, _: &Tools) -> Result<Outcome> {
    let doc = Command::new("cargo doc --no-deps --all-features").env("RUSTDOCFLAGS", "-D warnings");
    doc.clone().args("--workspace --document-private-items").run()?;
    doc.args("--package tokio-rdma").run()?;
    Ok(Outcome::passed())
}

/// What the steps `build`, `ui`, `test`, `examples` and `bench` build, and the tests that start examples: with other words cargo may choose other
/// features of dependencies, and then builds everything once more. `services` has no test.
pub const BUILD: &str = "--workspace --exclude services --all-features";

/// Of [`BUILD`], what has tests.
const TESTS: &str = "--lib --bins --tests";

/// Before the tests, which then have no compilers beside them; some of them start examples.
pub fn build(_: &Workspace, _: &Tools) -> Result<Outcome> {
    Command::new("cargo test --no-run").args(BUILD).args(TESTS).run()?;
    Command::new("cargo build --examples").args(BUILD).run()?;
    Ok(Outcome::passed())
}

pub fn test(_: &Workspace, tools: &Tools) -> Result<Outcome> {
    let selected = |command: &str| Command::new(command).args(BUILD).args(TESTS);
    let tally = if tools.nextest() {
        Tally::of(&selected("cargo nextest run --success-output immediate").run()?)
    } else {
        Tally::of(&selected("cargo test --no-fail-fast").args("-- --show-output").run()?)
    };
    if tally.ran == 0 {
        bail!("no test ran: a run of nothing proves nothing");
    }
    Ok(tally.outcome())
}

pub fn doctest(_: &Workspace, _: &Tools) -> Result<Outcome> {
    let tally = Tally::of(&Command::new("cargo test --doc --all-features --package tokio-rdma").run()?);
    if tally.ran == 0 {
        return Ok(Outcome::skipped("the documentation holds no example"));
    }
    Ok(tally.outcome())
}

pub fn examples(workspace: &Workspace, _: &Tools) -> Result<Outcome> {
    Command::new("cargo build --examples").args(BUILD).run()?;
    // What the README promises first.
    for example in ["quickstart", "echo"] {
        Command::new("").arg(workspace.target.join("debug/examples").join(example)).run()?;
    }
    Ok(Outcome::passed())
}

/// Two short rounds of the benchmark, so that it cannot rot; without figures, since this is a debug build on a busy machine.
pub fn bench(_: &Workspace, _: &Tools) -> Result<Outcome> {
    Command::new("cargo test").args(BUILD).args("--bench soft").run()?;
    Ok(Outcome::passed())
}

/// The library alone: what its tests and examples depend on makes no promise to users. The other half of this one is clippy's `incompatible_msrv`, which finds newer std APIs on every machine.
pub fn msrv(workspace: &Workspace, tools: &Tools) -> Result<Outcome> {
    let version = msrv_version(workspace)?;
    let Some(toolchain) = tools.release(&version)? else {
        return Ok(Outcome::skipped(format!("neither rustup nor Debian has Rust {version} here")));
    };
    let features: Vec<_> = workspace.crate_package()?.features.keys().filter(|name| *name != NEWER).cloned().collect();
    let check = || {
        let check = toolchain.cargo("check --package tokio-rdma --lib --target-dir").arg(workspace.target.join("msrv"));
        check.arg(format!("--features={}", features.join(",")))
    };
    check().run()?;
    let mut outcome = Outcome::passed_with(toolchain.version()?);
    outcome.skips.push(format!("{NEWER}: a dependency of that feature needs a newer Rust"));
    // The layouts of libibverbs' types are asserted where they are compiled, so checking is a test of them.
    let debian = tools.debian(Some(&version))?.filter(|_| cfg!(target_arch = "x86_64"));
    match debian.map(|debian| debian.add_target(tools, "arm64", AARCH64)).transpose()? {
        Some(true) => drop(check().args("--target").arg(AARCH64).run()?),
        _ => outcome.skips.push(format!("{AARCH64}: there is no std for it here")),
    }
    Ok(outcome)
}

/// The feature whose dependency cudarc asks for Rust 1.88.
const NEWER: &str = "cuda";

const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// The promised version without its patch level: `1.85`.
fn msrv_version(workspace: &Workspace) -> Result<String> {
    match &workspace.crate_package()?.rust_version {
        Some(version) => Ok(format!("{}.{}", version.major, version.minor)),
        None => bail!("Cargo.toml: rust-version is missing"),
    }
}

/// The library's tests and those of some programs, sanitized: by another compiler or with other flags, in a target directory of their
/// own.
pub fn test_sanitized(
    tools: &Tools,
    toolchain: &Toolchain,
    profile: &str,
    tests: &str,
    configure: impl Fn(Command) -> Command,
) -> Result<usize> {
    let nextest = format!("nextest run --cargo-profile sanitizer --profile {profile}");
    let run = if tools.nextest() { &nextest } else { "test --profile sanitizer --no-fail-fast" };
    let command = toolchain.cargo(run).args("--package tokio-rdma --all-features --lib").args(tests);
    match Tally::of(&configure(command).run()?).ran {
        0 => bail!("no test ran: a run of nothing proves nothing"),
        ran => Ok(ran),
    }
}

/// What a test runner said of how many tests there were.
#[derive(Debug, Default, PartialEq)]
pub struct Tally {
    pub ran: usize,
    ignored: usize,
    /// A test that cannot do its work on this machine prints a line `skipped: REASON`.
    skips: Vec<String>,
}

impl Tally {
    /// Adds up the closing lines of cargo test (one a binary) or of nextest.
    pub fn of(text: &str) -> Self {
        let mut tally = Self::default();
        for line in text.lines().map(str::trim) {
            let words: Vec<_> = line.split_whitespace().collect();
            let before = |word| -> usize {
                let place = words.iter().position(|it| it.trim_end_matches([';', ',']) == word);
                place.and_then(|at| words[..at].last()?.parse().ok()).unwrap_or(0)
            };
            if line.starts_with("test result: ") {
                tally.ran += before("passed") + before("failed");
                tally.ignored += before("ignored");
            } else if line.starts_with("Summary [") {
                // Instead of what each test's own process said, which is shown as well.
                tally.ran = before("passed") + before("failed");
                tally.ignored = before("skipped");
            } else if let Some(reason) = line.strip_prefix("skipped: ") {
                tally.skips.push(reason.to_owned());
            }
        }
        tally
    }

    fn outcome(self) -> Outcome {
        let mut outcome = Outcome::passed_with(format!("{} tests", self.ran));
        outcome.skips = self.skips;
        if self.ignored > 0 {
            outcome
                .skips
                .push(format!("{} tests are marked #[ignore], with their reasons in the source", self.ignored));
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_cargo_test_prints() {
        let text = "test a ... ok\n\ntest result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out\n\
                    test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n";
        assert_eq!(Tally::of(text), Tally { ran: 14, ignored: 1, skips: vec![] });
    }

    #[test]
    fn counts_what_nextest_prints() {
        let text = "    skipped: no RDMA device\n    test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 3 filtered out\n\
                    \u{20}    Summary [   0.105s] 4 tests run: 4 passed (1 slow), 2 skipped\n";
        assert_eq!(Tally::of(text), Tally { ran: 4, ignored: 2, skips: vec!["no RDMA device".into()] });
    }
}
