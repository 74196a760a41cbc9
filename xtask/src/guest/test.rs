//! The tests of RDMA NICs, the quickstart, and services that run over streams, over Soft-RoCE.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use cargo_metadata::camino::Utf8PathBuf;

use super::machine::{self, Clock};
use super::{image, install, name_of, peers, prepare};
use crate::command::Command;
use crate::workspace::Workspace;

#[derive(clap::Args)]
pub struct Args {
    /// Run these test programs of `tests/` only.
    #[arg(long = "test", value_name = "NAME", default_values_t = TESTS.map(String::from))]
    tests: Vec<String>,
    /// Set a variable of the tests' environment, for example TOKIO_RDMA_TEST_WAITS=1000000.
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Seconds that the guest may run.
    #[arg(long, default_value_t = 900)]
    timeout: u32,
    /// Run only tests whose name contains one of these.
    filters: Vec<String>,
}

/// The test programs that know how to use a NIC.
const TESTS: [&str; 4] = ["verbs", "conformance", "allocations", "gpu"];

/// Stands in for the driver of a GPU, which the guest has not.
const STAND_IN: &str = "libfake_cuda.so";

/// What the tests watch the programs with.
const TOOLS: &[&str] = &["strace"];

/// What the quickstart says of the device that it took.
const CHOSEN: &str = "device rxe0 (verbs), link RoCE";

/// Unchanged tonic and hyper; each compares what comes back, and says which device it took.
const SERVICES: [(&str, &str); 2] = [("grpc_tonic", "device rxe0"), ("http_hyper", "device rxe0, link RoCE")];

/// What the guest printed, and what that adds up to.
pub struct Outcome {
    pub passed: usize,
    pub failed: usize,
    /// Cases that do not apply to the guest's NIC, each with the reason.
    pub skips: Vec<String>,
    pub(super) console: String,
    pub(super) seconds: u64,
}

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    let outcome = in_guest(workspace, args)?;
    println!("{}", outcome.console);
    outcome.skips.iter().for_each(|why| println!("skipped: {why}"));
    println!("guest: {} s", outcome.seconds);
    println!("{} passed, {} failed, {} skipped", outcome.passed, outcome.failed, outcome.skips.len());
    Ok(if outcome.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Everything, for `cargo xtask test`. A failure is an error with what the guest printed.
pub fn check(workspace: &Workspace) -> Result<Outcome> {
    let args = Args { tests: TESTS.map(String::from).into(), env: Vec::new(), timeout: 900, filters: Vec::new() };
    let outcome = in_guest(workspace, &args)?;
    if outcome.failed > 0 {
        bail!("{}\n{} passed, {} failed", outcome.console, outcome.passed, outcome.failed);
    }
    Ok(outcome)
}

fn in_guest(workspace: &Workspace, args: &Args) -> Result<Outcome> {
    let dir = prepare(workspace)?;
    install(&TOOLS.join(" "))?;
    let tests = args.tests.iter().map(|test| format!("--test {test}")).collect::<Vec<_>>().join(" ");
    let mut programs = build("test --no-run", &tests)?;
    let stand_in = programs.iter().position(|file| file.file_name() == Some(STAND_IN)).map(|at| programs.remove(at));
    let mut job: String = args.env.iter().map(|variable| format!("export '{variable}'\n")).collect();
    for program in &programs {
        let (name, filters) = (name_of(program)?, args.filters.join(" "));
        // Those that need a NIC are ignored elsewhere. One at a time: the guest has emulated processors.
        job +=
            &format!("/programs/{name} --ignored --test-threads=1 {filters}\necho \"guest: {name} exited with $?\"\n");
    }
    let expected = programs.len();
    if args.tests.iter().any(|test| test == "gpu") {
        job.insert_str(0, &format!("export FAKE_CUDA_LIBRARY=/programs/{STAND_IN}\n"));
        programs.push(stand_in.with_context(|| format!("cargo did not build {STAND_IN}"))?);
    }
    let everything = args.filters.is_empty() && args.tests.len() == TESTS.len();
    if everything {
        // Together, so that the library has the same features for both, and is built once.
        programs.extend(build("build", "--example quickstart --package services --bins")?);
        job += "/programs/quickstart --timeout 60 && echo 'guest: quickstart succeeded'\n";
        for (service, _) in SERVICES {
            job += &format!("/programs/{service} --quick && echo 'guest: {service} succeeded'\n");
        }
    }
    if args.tests.iter().any(|test| test == "verbs") {
        for (variable, peer) in [("ASYNC_RDMA", peers::async_rdma("dev")?), ("PINGPONG", peers::pingpong()?)] {
            job.insert_str(0, &format!("export TOKIO_RDMA_TEST_{variable}=/programs/{}\n", name_of(&peer)?));
            programs.push(peer);
        }
    }
    let image = image::build(&dir, &programs, TOOLS, &job)?;
    let start = Instant::now();
    let console = machine::boot(&image, &dir, Clock::Host, args.timeout)?;
    let mut outcome = summary(console, expected)?;
    outcome.seconds = start.elapsed().as_secs();
    if everything {
        for (program, chosen) in [("quickstart", CHOSEN)].into_iter().chain(SERVICES) {
            let done = format!("guest: {program} succeeded");
            let well = [chosen, &done].iter().all(|line| outcome.console.contains(line));
            *(if well { &mut outcome.passed } else { &mut outcome.failed }) += 1;
        }
    }
    Ok(outcome)
}

/// Builds programs for the guest, and the library that one of them loads.
pub(super) fn build(how: &str, what: &str) -> Result<Vec<Utf8PathBuf>> {
    let command = Command::new("cargo").args(how).args(what);
    let command = command.args("--profile=guest --message-format=json --package tokio-rdma --all-features");
    let mut programs = Vec::new();
    for message in cargo_metadata::Message::parse_stream(command.stdout()?.as_bytes()) {
        if let cargo_metadata::Message::CompilerArtifact(artifact) = message? {
            programs.extend(artifact.executable);
            programs.extend(artifact.filenames.into_iter().filter(|file| file.file_name() == Some(STAND_IN)));
        }
    }
    Ok(programs)
}

/// Adds up what the test programs counted.
pub(super) fn summary(console: String, programs: usize) -> Result<Outcome> {
    let (mut passed, mut failed, mut finished) = (0, 0, 0);
    let mut skips = Vec::new();
    for line in console.lines().map(str::trim) {
        if let Some(result) = line.strip_prefix("test result: ") {
            passed += count(result, "passed")?;
            failed += count(result, "failed")?;
            finished += 1;
        }
        // The console holds the test's name in front of it.
        if let Some((before, why)) = line.split_once("skipped: ") {
            skips.push(format!("{}: {why}", before.trim_start_matches("test ").trim_end_matches(" ... ")));
        }
    }
    passed -= skips.len().min(passed);
    // A program that crashed, or that the guest's time was too short for, counted nothing.
    failed += programs.saturating_sub(finished);
    if passed + failed == 0 {
        bail!("no test ran, which proves nothing:\n{console}");
    }
    Ok(Outcome { passed, failed, skips, console, seconds: 0 })
}

/// The number before `word` in a line like `ok. 3 passed; 0 failed; ...`.
fn count(result: &str, word: &str) -> Result<usize> {
    let mut words = result.split([' ', ';']).filter(|part| !part.is_empty()).collect::<Vec<_>>().into_iter().rev();
    words.find(|part| *part == word);
    words.next().with_context(|| format!("no number of {word} in {result:?}"))?.parse().context(result.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_their_word() {
        let line = "FAILED. 3 passed; 12 failed; 0 ignored; 0 measured; 49 filtered out; finished in 0.62s";
        assert_eq!((count(line, "passed").unwrap(), count(line, "failed").unwrap()), (3, 12));
        assert!(count("no numbers", "passed").is_err());
    }

    #[test]
    fn skips_do_not_pass_and_missing_programs_fail() {
        let console = "test a::b ... skipped: for a reason\nok\ntest c ... ok\ntest result: ok. 2 passed; 0 failed;\n";
        let outcome = summary(console.to_owned(), 2).unwrap();
        assert_eq!((outcome.passed, outcome.failed), (1, 1));
        assert_eq!(outcome.skips, ["a::b: for a reason"]);
        assert!(summary(String::new(), 0).is_err());
    }
}
