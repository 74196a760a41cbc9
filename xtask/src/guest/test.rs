//! The tests of RDMA NICs, the quickstart, and services that run over streams, over Soft-RoCE.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use cargo_metadata::camino::Utf8PathBuf;

use super::image::{self, Image};
use super::machine::{self, Clock};
use super::{install, name_of, peers, prepare};
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

/// Takes as long as all the others.
const LONG: &str = "conformance";

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

/// What one guest runs.
#[derive(Default)]
struct Part {
    name: &'static str,
    programs: Vec<Utf8PathBuf>,
    job: String,
    /// How many of the programs count tests.
    counting: usize,
}

/// Two guests beside each other, since a guest waits for half of its time: one for the longest program, one for the rest.
fn in_guest(workspace: &Workspace, args: &Args) -> Result<Outcome> {
    let dir = prepare(workspace)?;
    install(&TOOLS.join(" "))?;
    let everything = args.filters.is_empty() && args.tests.len() == TESTS.len();
    let (mut long, mut rest) = parts(args, everything)?;
    if args.tests.iter().any(|test| test == "verbs") {
        for (variable, peer) in [("ASYNC_RDMA", peers::async_rdma("dev")?), ("PINGPONG", peers::pingpong()?)] {
            rest.job.insert_str(0, &format!("export TOKIO_RDMA_TEST_{variable}=/programs/{}\n", name_of(&peer)?));
            rest.programs.push(peer);
        }
    }
    let environment: String = args.env.iter().map(|variable| format!("export '{variable}'\n")).collect();
    let mut guests = Vec::new();
    for part in [&mut long, &mut rest] {
        if part.counting > 0 {
            part.job.insert_str(0, &environment);
            guests.push((&*part, image::build(&dir.join(part.name), &part.programs, TOOLS, &part.job)?));
        }
    }
    let start = Instant::now();
    // One after the other: what waits for something in a guest has little patience for a neighbour that takes its CPUs.
    let boot = |(part, image): &(&Part, Image)| {
        let console = dir.join(format!("console-{}.log", part.name));
        machine::boot(image, &console, Clock::Host, args.timeout)
    };
    let console = guests.iter().map(boot).collect::<Result<String>>()?;
    let mut outcome = summary(console, long.counting + rest.counting)?;
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

/// The long test program, and the others with all else that is asked for.
fn parts(args: &Args, everything: bool) -> Result<(Part, Part)> {
    let tests = args.tests.iter().map(|test| format!("--test {test}")).collect::<Vec<_>>().join(" ");
    // In one build, so that the library has the same features for all, and is built once.
    let others = if everything { "--example quickstart --package services --bins" } else { "" };
    let mut long = Part { name: "long", ..Part::default() };
    let mut rest = Part { name: "rest", ..Part::default() };
    for program in build("build", &format!("{tests} {others}"))? {
        let name = name_of(&program)?.to_owned();
        if name == STAND_IN && args.tests.iter().any(|test| test == "gpu") {
            rest.job.insert_str(0, &format!("export FAKE_CUDA_LIBRARY=/programs/{STAND_IN}\n"));
            rest.programs.push(program);
        } else if args.tests.iter().any(|test| name.starts_with(&format!("{test}-"))) {
            let part = if name.starts_with(LONG) { &mut long } else { &mut rest };
            // Those that need a NIC are ignored elsewhere. One at a time: the guest has emulated processors.
            part.job += &format!(
                "/programs/{name} --ignored --test-threads=1 {}\necho \"guest: {name} exited with $?\"\n",
                args.filters.join(" ")
            );
            part.programs.push(program);
            part.counting += 1;
        } else if name != STAND_IN {
            rest.programs.push(program);
        }
    }
    if long.counting + rest.counting != args.tests.len() {
        bail!("cargo built {} of the test programs {}", long.counting + rest.counting, args.tests.join(", "));
    }
    if everything {
        rest.job += "/programs/quickstart --timeout 60 && echo 'guest: quickstart succeeded'\n";
        for (service, _) in SERVICES {
            rest.job += &format!("/programs/{service} --quick && echo 'guest: {service} succeeded'\n");
        }
    }
    Ok((long, rest))
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
