//! Programs that must not compile: each file in `tests/ui` names its errors, `//~ E0382` on the line that has one.
//!
//! Exactly those errors must appear, so a case never passes for another reason, such as a misspelt name.
//! Codes and lines are compared rather than texts, which change with every compiler.

use std::collections::BTreeSet;
use std::io::BufReader;

use anyhow::{Context, Result, bail};
use cargo_metadata::Message;
use cargo_metadata::camino::{Utf8Path, Utf8PathBuf};
use cargo_metadata::diagnostic::{Diagnostic, DiagnosticLevel};

use super::rust::BUILD;
use super::{Outcome, Tools};
use crate::command::Command;
use crate::workspace::{Workspace, read, rust_files};

const CASES: &str = "tests/ui";
/// What a case may use.
const CRATES: &[&str] = &["tokio_rdma", "tokio"];

/// Line and code of each error.
type Errors = BTreeSet<(usize, String)>;

pub fn check(workspace: &Workspace, _: &Tools) -> Result<Outcome> {
    let cases = rust_files(&[CASES])?;
    if cases.is_empty() {
        return Ok(Outcome::skipped(format!("{CASES} holds no case")));
    }
    let libraries = build()?;
    let out = workspace.target.join("ui");
    std::fs::create_dir_all(&out)?;
    let mut faults = Vec::new();
    for case in &cases {
        let expected = expected(&read(case)?);
        let (found, text) = compile(case, &libraries, &out)?;
        if expected.is_empty() {
            faults.push(format!("{case}: no line says `//~` and the error it has"));
        } else if expected != found {
            faults.push(format!("{case}: expected {expected:?}, found {found:?}\n{text}"));
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(Outcome::passed_with(format!("{} cases", cases.len())))
}

/// Builds the library, with the examples for the sake of the dependencies that only they have.
fn build() -> Result<Vec<(String, Utf8PathBuf)>> {
    let build = Command::new("cargo build --quiet --lib --examples --message-format=json").args(BUILD);
    let messages = build.stdout()?;
    let mut libraries = Vec::new();
    for message in Message::parse_stream(BufReader::new(messages.as_bytes())) {
        let Message::CompilerArtifact(artifact) = message? else { continue };
        let name = artifact.target.name.replace('-', "_");
        let rlib = artifact.filenames.into_iter().find(|file| file.extension() == Some("rlib"));
        if let Some(rlib) = rlib.filter(|_| CRATES.contains(&name.as_str())) {
            libraries.push((name, rlib));
        }
    }
    Ok(libraries)
}

fn expected(text: &str) -> Errors {
    let numbered = (1..).zip(text.lines());
    let marked = numbered.filter_map(|(number, line)| Some((number, line.split_once("//~")?.1)));
    marked.flat_map(|(number, codes)| codes.split_whitespace().map(move |code| (number, code.to_owned()))).collect()
}

/// The errors of a case, and how the compiler tells them.
fn compile(case: &Utf8Path, libraries: &[(String, Utf8PathBuf)], out: &Utf8Path) -> Result<(Errors, String)> {
    let mut rustc = Command::new("rustc --edition=2024 --crate-type=bin --emit=metadata --error-format=json --out-dir");
    rustc = rustc.arg(out);
    for (name, rlib) in libraries {
        let directory = rlib.parent().context("a library has a directory")?;
        rustc = rustc.arg(format!("--extern={name}={rlib}")).arg(format!("-Ldependency={directory}/deps"));
        rustc = rustc.arg(format!("-Ldependency={directory}"));
    }
    let printed = rustc.arg(case).finish()?.text;
    let mut errors = Errors::new();
    let mut text = String::new();
    for line in printed.lines().filter(|line| line.starts_with('{')) {
        let diagnostic: Diagnostic = serde_json::from_str(line)?;
        text.extend(diagnostic.rendered.as_deref());
        let line = diagnostic.spans.iter().find(|span| span.is_primary).map(|span| span.line_start);
        if let (DiagnosticLevel::Error, Some(line)) = (diagnostic.level, line) {
            let code = diagnostic.code.map_or_else(|| "without a code".to_owned(), |code| code.code);
            errors.insert((line, code));
        }
    }
    Ok((errors, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_name_line_and_code() {
        let text = "fn main() {\n    f(a, a); //~ E0382\n    g(); //~ E0277 E0308\n}\n";
        let found: Vec<_> = expected(text).into_iter().collect();
        assert_eq!(found, [(2, "E0382".into()), (3, "E0277".into()), (3, "E0308".into())]);
    }
}
