//! `cargo xtask test`: every check, one after the other. One that fails does not stop the others.

mod canary;
mod debian;
mod dynamic;
mod layout;
mod package;
mod report;
mod rust;
mod tools;
mod ui;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use clap::builder::PossibleValuesParser;

use crate::workspace::Workspace;
use report::Report;
use tools::Tools;

#[derive(clap::Args)]
pub struct Args {
    /// Print the steps and what each does, and run none.
    #[arg(long)]
    list: bool,
    /// Run only these steps.
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = PossibleValuesParser::new(names()))]
    only: Vec<String>,
    /// Leave these steps out; they count as skipped.
    #[arg(long, value_name = "NAME", num_args = 1.., value_parser = PossibleValuesParser::new(names()))]
    skip: Vec<String>,
    /// Install nothing; a step that lacks its tool counts as skipped.
    #[arg(long)]
    no_install: bool,
}

/// One check. An error is a failure, and holds all that the failing command printed.
struct Step {
    name: &'static str,
    about: &'static str,
    check: fn(&Workspace, &Tools) -> Result<Outcome>,
}

/// How a check that did not fail ended.
#[derive(Default)]
struct Outcome {
    /// Whether anything was checked.
    ran: bool,
    /// What is worth telling beside `passed`, for example how many tests ran.
    note: String,
    /// What could not be checked, each with its reason.
    skips: Vec<String>,
}

/// From quick to slow, so that a mistake shows early.
const STEPS: &[Step] = &[
    Step { name: "fmt", about: "the code is formatted", check: rust::fmt },
    Step { name: "layout", about: "file lengths, and unsafe only where it belongs", check: layout::check },
    Step { name: "readme", about: "the README names this command", check: package::readme },
    Step { name: "clippy", about: "lints, with default and with all features", check: rust::clippy },
    Step { name: "features", about: "lints, with each feature alone and with all but it", check: rust::features },
    Step { name: "docs", about: "the documentation builds, public and private", check: rust::docs },
    Step { name: "test", about: "unit and integration tests", check: rust::test },
    Step { name: "doctest", about: "the examples in the documentation", check: rust::doctest },
    Step {
        name: "examples",
        about: "the programs in examples/ build, and quickstart and echo succeed",
        check: rust::examples,
    },
    Step { name: "bench", about: "the benchmark works", check: rust::bench },
    Step { name: "ui", about: "what must not compile does not, for the right reason", check: ui::check },
    Step { name: "package", about: "the published package holds what it should", check: package::contents },
    Step { name: "deny", about: "licences, sources and advisories of dependencies", check: package::deny },
    Step { name: "msrv", about: "the oldest Rust that Cargo.toml promises compiles it", check: rust::msrv },
    Step { name: "loom", about: "every interleaving of the tests named loom_*", check: dynamic::loom },
    Step { name: "miri", about: "undefined behaviour in the table and in memory", check: dynamic::miri },
    Step { name: "asan", about: "the tests under the address and leak sanitizers", check: dynamic::asan },
    Step { name: "guest", about: "RDMA NICs: the tests over Soft-RoCE in a virtual machine", check: guest },
    Step {
        name: "topology",
        about: "PCIe switches, NUMA nodes and an IOMMU, in virtual machines that have them",
        check: topology,
    },
    Step {
        name: "icount",
        about: "instructions of small operations over Soft-RoCE, beside what was accepted",
        check: icount,
    },
    Step { name: "tsan", about: "the tests under the thread sanitizer", check: dynamic::tsan },
];

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    let chosen = STEPS.iter().filter(|step| args.only.is_empty() || args.only.iter().any(|name| name == step.name));
    if args.list {
        chosen.for_each(|step| println!("{:10}{}", step.name, step.about));
        return Ok(ExitCode::SUCCESS);
    }
    let tools = Tools::new(workspace, !args.no_install);
    let mut report = Report::default();
    for step in chosen {
        if args.skip.iter().any(|name| name == step.name) {
            report.add(step.name, Ok(Outcome::skipped("asked for with --skip")), Instant::now());
            continue;
        }
        println!("{}: {}", step.name, step.about);
        let start = Instant::now();
        report.add(step.name, (step.check)(workspace, &tools), start);
    }
    Ok(report.close())
}

/// Why there can be no guest, if so.
fn no_guest(tools: &Tools) -> Option<&'static str> {
    if !tools.may_install() {
        return Some("it needs packages, and nothing may be installed");
    }
    (!cfg!(target_arch = "x86_64")).then_some("the guest is an x86_64 machine")
}

fn icount(workspace: &Workspace, tools: &Tools) -> Result<Outcome> {
    if let Some(why) = no_guest(tools) {
        return Ok(Outcome::skipped(why));
    }
    let (cases, incomparable) = crate::guest::count_instructions(workspace)?;
    Ok(match incomparable {
        None => Outcome::passed_with(format!("{cases} cases")),
        Some(why) => Outcome::skipped(format!("{cases} cases were counted and compared with nothing: {why}")),
    })
}

fn guest(workspace: &Workspace, tools: &Tools) -> Result<Outcome> {
    if let Some(why) = no_guest(tools) {
        return Ok(Outcome::skipped(why));
    }
    let outcome = crate::guest::check(workspace)?;
    Ok(Outcome { skips: outcome.skips, ..Outcome::passed_with(format!("{} tests", outcome.passed)) })
}

fn topology(workspace: &Workspace, tools: &Tools) -> Result<Outcome> {
    if let Some(why) = no_guest(tools) {
        return Ok(Outcome::skipped(why));
    }
    let outcome = crate::guest::check_topology(workspace)?;
    Ok(Outcome { skips: outcome.skips, ..Outcome::passed_with(format!("{} tests", outcome.passed)) })
}

impl Outcome {
    fn passed() -> Self {
        Self { ran: true, ..Self::default() }
    }

    fn passed_with(note: impl Into<String>) -> Self {
        Self { ran: true, note: note.into(), ..Self::default() }
    }

    fn skipped(reason: impl Into<String>) -> Self {
        Self { skips: vec![reason.into()], ..Self::default() }
    }
}

fn names() -> impl Iterator<Item = &'static str> {
    STEPS.iter().map(|step| step.name)
}
