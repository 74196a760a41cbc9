//! Programs of `examples/`, as their users start them.

use std::collections::BTreeMap;
use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// What was built in this process: cargo takes its time to find that there is nothing to do.
static BUILT: Mutex<BTreeMap<&str, PathBuf>> = Mutex::new(BTreeMap::new());

/// Builds the example as this test was built, and with its features; says so and gives `None` where that cannot be.
pub fn build(example: &'static str) -> Option<PathBuf> {
    // One that could not be built takes nothing away from the others.
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(program) = built.get(example) {
        return Some(program.clone());
    }
    let program = build_now(example)?;
    built.insert(example, program.clone());
    Some(program)
}

fn build_now(example: &str) -> Option<PathBuf> {
    let Some(cargo) = env::var_os("CARGO") else {
        eprintln!("skipped: needs cargo, to build the example {example}");
        return None;
    };
    // target/debug/deps/gpu-...
    let test = env::current_exe().unwrap();
    let target = test.ancestors().nth(3).unwrap();
    let profile = test.ancestors().nth(2).unwrap();
    if profile.file_name()? != "debug" || profile.parent()? != target {
        eprintln!("skipped: the example {example} is built in the usual profile only");
        return None;
    }
    let features: Vec<_> = [
        cfg!(feature = "cuda").then_some("cuda"),
        cfg!(feature = "serde").then_some("serde"),
        cfg!(feature = "async-rdma").then_some("async-rdma"),
        cfg!(feature = "futures-io").then_some("futures-io"),
        cfg!(feature = "metrics").then_some("metrics"),
        cfg!(feature = "psk").then_some("psk"),
    ]
    .into_iter()
    .flatten()
    .collect();
    // The packages that the checks of this repository choose, so that what is built already serves here too.
    let built = Command::new(cargo)
        .args(["build", "--quiet", "--workspace", "--exclude", "services", "--example", example])
        .arg(format!("--features={}", features.join(",")))
        .arg("--target-dir")
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .unwrap();
    assert!(built.success());
    Some(profile.join("examples").join(example))
}
