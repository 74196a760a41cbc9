//! `cargo xtask test`: every check. One that fails does not stop the others.
//!
//! What waits for a compiler most of the time comes first, two steps at a time. What runs tests has the machine to itself.

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
use std::sync::{Mutex, PoisonError};
use std::thread;
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
    lane: Lane,
    check: fn(&Workspace, &Tools) -> Result<Outcome>,
}

/// What a step may run beside.
#[derive(Clone, Copy, PartialEq)]
enum Lane {
    /// Builds in the usual target directory, or nothing.
    Builds,
    /// Beside those of the first lane, so in target directories of their own: one compiler uses one CPU for most of its time. Of
    /// these two lanes, whatever has packages installed is here, since only one can.
    Beside,
    /// Afterwards and by itself, since how fast it gets on matters.
    Alone,
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

/// In each lane from quick to slow, so that a mistake shows early.
const STEPS: &[Step] = &[
    Step { name: "fmt", about: "the code is formatted", lane: Lane::Builds, check: rust::fmt },
    Step {
        name: "layout",
        about: "file lengths, and unsafe only where it belongs",
        lane: Lane::Builds,
        check: layout::check,
    },
    Step { name: "readme", about: "the README names this command", lane: Lane::Builds, check: package::readme },
    Step {
        name: "package",
        about: "the published package holds what it should",
        lane: Lane::Builds,
        check: package::contents,
    },
    Step {
        name: "clippy",
        about: "lints, with default and with all features",
        lane: Lane::Builds,
        check: rust::clippy,
    },
    Step { name: "docs", about: "the documentation builds, public and private", lane: Lane::Builds, check: rust::docs },
    Step { name: "build", about: "tests and the programs in examples/ build", lane: Lane::Builds, check: rust::build },
    Step {
        name: "ui",
        about: "what must not compile does not, for the right reason",
        lane: Lane::Builds,
        check: ui::check,
    },
    Step {
        name: "loom",
        about: "every interleaving of the tests named loom_*",
        lane: Lane::Builds,
        check: dynamic::loom,
    },
    Step {
        name: "deny",
        about: "licences, sources and advisories of dependencies",
        lane: Lane::Beside,
        check: package::deny,
    },
    Step {
        name: "features",
        about: "lints, with each feature alone and with all but it",
        lane: Lane::Beside,
        check: rust::features,
    },
    Step {
        name: "msrv",
        about: "the oldest Rust that Cargo.toml promises compiles it",
        lane: Lane::Beside,
        check: rust::msrv,
    },
    Step { name: "test", about: "unit and integration tests", lane: Lane::Alone, check: rust::test },
    Step { name: "doctest", about: "the examples in the documentation", lane: Lane::Alone, check: rust::doctest },
    Step { name: "examples", about: "quickstart and echo succeed", lane: Lane::Alone, check: rust::examples },
    Step { name: "bench", about: "the benchmark works", lane: Lane::Alone, check: rust::bench },
    Step {
        name: "miri",
        about: "undefined behaviour in the table and in memory",
        lane: Lane::Alone,
        check: dynamic::miri,
    },
    Step {
        name: "asan",
        about: "the tests under the address and leak sanitizers",
        lane: Lane::Alone,
        check: dynamic::asan,
    },
    Step {
        name: "guest",
        about: "RDMA NICs: the tests over Soft-RoCE in a virtual machine",
        lane: Lane::Alone,
        check: guest,
    },
    Step {
        name: "topology",
        about: "PCIe switches, NUMA nodes and an IOMMU, in virtual machines that have them",
        lane: Lane::Alone,
        check: topology,
    },
    Step {
        name: "icount",
        about: "instructions of small operations over Soft-RoCE, beside what was accepted",
        lane: Lane::Alone,
        check: icount,
    },
    Step { name: "tsan", about: "the tests under the thread sanitizer", lane: Lane::Alone, check: dynamic::tsan },
];

pub fn run(workspace: &Workspace, args: &Args) -> Result<ExitCode> {
    let chosen: Vec<_> =
        STEPS.iter().filter(|step| args.only.is_empty() || args.only.iter().any(|name| name == step.name)).collect();
    if args.list {
        chosen.iter().for_each(|step| println!("{:10}{}", step.name, step.about));
        return Ok(ExitCode::SUCCESS);
    }
    let report = Mutex::new(Report::default());
    let add = |step: &Step, outcome, start| {
        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
        report.add(step.name, outcome, start);
    };
    let run = |lane| {
        let tools = Tools::new(workspace, !args.no_install);
        for step in chosen.iter().filter(|step| step.lane == lane) {
            if args.skip.iter().any(|name| name == step.name) {
                add(step, Ok(Outcome::skipped("asked for with --skip")), Instant::now());
                continue;
            }
            println!("{}: {}", step.name, step.about);
            let start = Instant::now();
            add(step, (step.check)(workspace, &tools), start);
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| run(Lane::Beside));
        run(Lane::Builds);
    });
    run(Lane::Alone);
    Ok(report.into_inner().unwrap_or_else(PoisonError::into_inner).close())
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
