//! Steps that run the code in a special way, to find what an ordinary run does not show.

use std::env::consts::ARCH;
use std::path::Path;

use anyhow::{Result, bail};

use super::tools::{Toolchain, Tools};
use super::{Outcome, canary, rust};
use crate::command::Command;
use crate::workspace::Workspace;

/// The flag is the crate's own: `--cfg loom` would reach tokio too, which then leaves `tokio::net` out.
pub fn loom(workspace: &Workspace, _: &Tools) -> Result<Outcome> {
    let test = Command::new("cargo test --package tokio-rdma --profile loom --lib loom_ --target-dir");
    let text = test.arg(workspace.target.join("loom")).env("RUSTFLAGS", format!("--cfg rdma_loom {LEAN}")).run()?;
    match rust::Tally::of(&text).ran {
        0 => Ok(Outcome::skipped("no test is named loom_*")),
        ran => Ok(Outcome::passed_with(format!("{ran} tests"))),
    }
}

/// Leaves out what only examples and benchmarks depend on, a third of what would be built.
const LEAN: &str = "--cfg rdma_tests_only";

/// The modules without system calls, which miri does not know: the operation table and memory.
pub fn miri(workspace: &Workspace, tools: &Tools) -> Result<Outcome> {
    let Some(nightly) = tools.nightly() else {
        return Ok(Outcome::skipped("needs rustup's nightly toolchain with the component miri"));
    };
    if !nightly.cargo("miri --version").finish()?.ok {
        return Ok(Outcome::skipped("the nightly toolchain lacks its component miri"));
    }
    let test = nightly.cargo("miri test --package tokio-rdma --lib --all-features --target-dir");
    let text = test.arg(workspace.target.join("miri")).args("-- table memory").run()?;
    match rust::Tally::of(&text).ran {
        0 => bail!("no test of the table or of memory ran"),
        ran => Ok(Outcome::passed_with(format!("{ran} tests"))),
    }
}

/// Of `tests/`, what uses memory: a sanitized build of the others would be for nothing.
const TESTS: &str = "--test conformance --test shm --test shm_processes --test parsing --test bad_input --test stale --test types \
     --test metrics";

const NOT_TWICE: &str =
    "conformance over TCP, topology, doctor: TCP does with memory what Unix sockets do, the others have no unsafe code";
const NO_GPU: &str = "gpu: its stand-in checks uses of memory itself, in the step test only";
const NO_COUNTS: &str = "allocations: a sanitizer allocates by itself, so they are counted in the step test only";

pub fn asan(workspace: &Workspace, tools: &Tools) -> Result<Outcome> {
    let Some(nightly) = tools.nightly() else {
        return Ok(Outcome::skipped("needs rustup's nightly toolchain"));
    };
    let symbolizer = symbolizer();
    let with = |leaks: &str| {
        // An allocation that is too large fails, as it does elsewhere, instead of ending the process.
        let options = format!("{leaks} allocator_may_return_null=1 {symbolizer}");
        move |command: Command| {
            let command = command.env("RUSTFLAGS", format!("-Zsanitizer=address {LEAN}")).env("ASAN_OPTIONS", &options);
            for_host(command).arg("--target-dir").arg(workspace.target.join("asan"))
        }
    };
    canary::must_report(&nightly, "use_after_free", "heap-use-after-free", &with("detect_leaks=0"))?;
    let leak = canary::run(&nightly, "leak", &with("detect_leaks=1"))?;
    if leak.text.contains("LeakSanitizer has encountered a fatal error") {
        // It stops all threads by way of ptrace, which some containers and all debuggers prevent.
        let tests = rust::test_sanitized(tools, &nightly, "sanitizer", TESTS, with("detect_leaks=0"))?;
        let mut outcome = Outcome::passed_with(format!("{} tests", tests));
        outcome.skips.extend([NO_COUNTS, NO_GPU, NOT_TWICE].map(Into::into));
        outcome.skips.push("leaks: the leak sanitizer cannot trace threads here".into());
        return Ok(outcome);
    }
    if leak.ok || !leak.text.contains("detected memory leaks") {
        bail!("the canary leak should end with a report of its leak, but:\n{}", leak.text);
    }
    let tests = rust::test_sanitized(tools, &nightly, "sanitizer", TESTS, with("detect_leaks=1"))?;
    let mut outcome = Outcome::passed_with(format!("{} tests, leaks included", tests));
    outcome.skips.extend([NO_COUNTS, NO_GPU, NOT_TWICE].map(Into::into));
    Ok(outcome)
}

/// std is built along. Without that the sanitizer does not see the order that a contended `Mutex`, a `OnceLock` or the
/// last `Arc` makes inside of std, and reports correct programs, in frames of their own that no suppression can name.
pub fn tsan(workspace: &Workspace, tools: &Tools) -> Result<Outcome> {
    let toolchain = match tools.nightly().filter(has_std_source) {
        Some(nightly) => nightly,
        None => match tools.debian(None)? {
            // A released compiler takes unstable flags only when it is told to.
            Some(debian) => {
                let mut toolchain = debian.toolchain();
                toolchain.env.push(("RUSTC_BOOTSTRAP", "1".into()));
                toolchain
            }
            None => {
                return Ok(Outcome::skipped(
                    "std must be built with the sanitizer too, which needs its source: rustup's nightly with the \
                     component rust-src, or Debian's package rustc-web",
                ));
            }
        },
    };
    let suppressions = workspace.metadata.workspace_root.join("xtask/tsan.supp");
    let symbolizer = symbolizer();
    let with = |command: Command| {
        let options = format!("suppressions={suppressions} {symbolizer}");
        let flags = format!("-Zsanitizer=thread {LEAN}");
        let command = command.env("RUSTFLAGS", flags).env("TSAN_OPTIONS", options);
        // Looking up the lines of one frame takes seconds, in every process that matches a suppression.
        let command = command.env("CARGO_PROFILE_SANITIZER_DEBUG", "false");
        // What an optimiser joins is no race any more.
        let command = command.env("CARGO_PROFILE_SANITIZER_OPT_LEVEL", "0");
        for_host(command).args("-Zbuild-std --target-dir").arg(workspace.target.join("tsan"))
    };
    canary::must_report(&toolchain, "race", "ThreadSanitizer: data race", &with)?;
    let synchronised = canary::run(&toolchain, "synchronised", &with)?;
    if !synchronised.ok {
        bail!("the canary synchronised has no race, but:\n{}", synchronised.text);
    }
    let tests = rust::test_sanitized(tools, &toolchain, "tsan", "--test conformance", with)?;
    let mut outcome = Outcome::passed_with(format!("{} tests", tests));
    outcome.skips.push(
        "cases without shared state of interest, and what counts: the sanitizer holds descriptors of its own".into(),
    );
    Ok(outcome)
}

/// Reports and suppressions need names. The sanitizers look for llvm-symbolizer, which may be missing, or be there under
/// another name than theirs; addr2line comes with the linker.
fn symbolizer() -> String {
    match Command::new("which addr2line").stdout() {
        Ok(path) => format!("external_symbolizer_path={}", path.trim()),
        Err(_) => String::new(),
    }
}

/// Naming the target, even the host's own, keeps RUSTFLAGS away from build scripts and procedural macros.
fn for_host(command: Command) -> Command {
    command.arg("--target").arg(format!("{ARCH}-unknown-linux-gnu"))
}

fn has_std_source(toolchain: &Toolchain) -> bool {
    let sysroot = toolchain.rustc("--print sysroot");
    sysroot.is_ok_and(|path| Path::new(&path).join("lib/rustlib/src/rust/library/Cargo.lock").exists())
}
