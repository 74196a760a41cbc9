//! Rules about the source that no lint knows: how long a file may be, and where `unsafe` may stand.

use std::str::FromStr;

use anyhow::{Result, anyhow, bail};
use cargo_metadata::camino::Utf8Path;
use proc_macro2::{TokenStream, TokenTree};

use super::{Outcome, Tools};
use crate::workspace::{Workspace, read, rust_files};

const LONGEST_FILE: usize = 800;
/// Most files should be shorter than this, so it is told how many are not.
const LONG_FILE: usize = 400;

/// Modules that may hold `unsafe`, and any number of it: each a folder or a file. Tests may misuse memory on purpose,
/// the canaries do nothing else, and the stand-in for a driver speaks C.
const UNSAFE_ROOMS: &[&str] = &[
    "src/provider/verbs",
    "src/provider/soft/shm",
    "src/memory",
    "src/gpu",
    "tests",
    "benches",
    // Launch kernels.
    "examples/gpu_quickstart",
    "examples/parameter_server/compute/gpu/kernels",
    "fake-cuda",
    "xtask/canary",
];
/// Registers the completion channel's descriptor with tokio, which is one unsafe call.
const ONE_UNSAFE: &str = "src/completion/driver";

pub fn check(_: &Workspace, _: &Tools) -> Result<Outcome> {
    let files = rust_files(&["src", "tests", "examples", "benches", "fake-cuda", "xtask"])?;
    let mut faults = Vec::new();
    let mut long = 0;
    for file in &files {
        let text = read(file)?;
        let lines = text.lines().count();
        long += usize::from(lines > LONG_FILE);
        if lines > LONGEST_FILE {
            faults.push(format!("{file}: {lines} lines, the limit is {LONGEST_FILE}; split it by idea"));
        }
        let allowed = if UNSAFE_ROOMS.iter().any(|room| is_in(file, room)) {
            usize::MAX
        } else {
            usize::from(is_in(file, ONE_UNSAFE))
        };
        let tokens = TokenStream::from_str(&text).map_err(|error| anyhow!("{file}: {error}"))?;
        let mut unsafe_lines = Vec::new();
        find_unsafe(tokens, &mut unsafe_lines);
        for line in unsafe_lines.iter().skip(allowed) {
            faults.push(format!("{file}:{line}: `unsafe` does not belong here; CONTRIBUTING.md says where it does"));
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(Outcome::passed_with(format!("{} files, {long} over {LONG_FILE} lines", files.len())))
}

/// Whether the file is the module's own (`room.rs`) or lies in its folder.
fn is_in(file: &Utf8Path, room: &str) -> bool {
    file.as_str().strip_prefix(room).is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
}

/// Lines with the keyword. Comments and strings are no keywords for the tokenizer, so they never count.
fn find_unsafe(tokens: TokenStream, lines: &mut Vec<usize>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => find_unsafe(group.stream(), lines),
            TokenTree::Ident(ident) if ident == "unsafe" => lines.push(ident.span().start().line),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_keyword_counts() {
        let text = "/// unsafe\nfn f() { let s = \"unsafe\"; unsafe_code();\n unsafe { g() } }\n";
        let mut lines = Vec::new();
        find_unsafe(TokenStream::from_str(text).unwrap(), &mut lines);
        assert_eq!(lines, [3]);
    }

    #[test]
    fn a_room_is_a_folder_or_a_file() {
        assert!(is_in("src/memory/pool.rs".into(), "src/memory"));
        assert!(is_in("src/memory.rs".into(), "src/memory"));
        assert!(!is_in("src/memory_map.rs".into(), "src/memory"));
    }
}
