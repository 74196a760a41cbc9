//! What the administrator knows better than sysfs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::address::PciAddress;
use super::level::Level;
use crate::error::{Error, Result};

/// Levels of pairs, from a file.
#[derive(Clone, Debug, Default)]
pub(super) struct Overrides {
    file: PathBuf,
    /// With the line that says so. The lesser of a pair is first.
    levels: BTreeMap<(Name, Name), (Level, usize)>,
    unused: Vec<String>,
}

/// What a line calls a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Name {
    Function(PciAddress),
    Nic(String),
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    line: usize,
    pair: (Name, Name),
    level: Level,
}

impl Overrides {
    /// `known` gives what this machine calls a device, or `None` for one that it has not.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, a line is no entry, or two lines disagree.
    pub(super) fn read(file: &Path, known: impl Fn(&Name) -> Option<Name>) -> Result<Self> {
        let text = fs::read(file).map_err(|error| Error::io("read the topology override", file.display(), error))?;
        let at = |(line, why): (usize, String)| Error::Invalid {
            operation: "read the topology override",
            reason: format!("{}, line {line}: {why}", file.display()),
        };
        let mut this = Self { file: file.to_owned(), ..Self::default() };
        for entry in parse(&String::from_utf8_lossy(&text)).map_err(at)? {
            this.add(entry, &known).map_err(at)?;
        }
        Ok(this)
    }

    pub(super) fn get(&self, a: &Name, b: &Name) -> Option<(Level, usize)> {
        self.levels.get(&ordered(a.clone(), b.clone())).copied()
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// Lines about devices that are not there.
    pub(super) fn unused(&self) -> &[String] {
        &self.unused
    }

    fn add(&mut self, entry: Entry, known: &impl Fn(&Name) -> Option<Name>) -> Result<(), (usize, String)> {
        let Entry { line, pair: (a, b), level } = entry;
        let (Some(first), Some(second)) = (known(&a), known(&b)) else {
            let absent = if known(&a).is_none() { &a } else { &b };
            self.unused.push(format!("{}, line {line}: this machine has no {absent}", self.file.display()));
            return Ok(());
        };
        if first == second {
            return Err((line, format!("{a} and {b} are one device, which needs no level")));
        }
        match self.levels.insert(ordered(first, second), (level, line)) {
            Some((other, before)) if other != level => {
                Err((line, format!("{a} and {b} are {level} here, and {other} in line {before}")))
            }
            _ => Ok(()),
        }
    }
}

fn ordered(a: Name, b: Name) -> (Name, Name) {
    if a <= b { (a, b) } else { (b, a) }
}

/// The entries, or the number of the first line that is none and why.
fn parse(text: &str) -> Result<Vec<Entry>, (usize, String)> {
    let mut entries = Vec::new();
    for (index, text) in text.lines().enumerate() {
        let line = index + 1;
        let text = text.split('#').next().unwrap_or_default();
        let words: Vec<_> = text.split_whitespace().collect();
        match words[..] {
            [] => {}
            [a, b, level] => {
                let level = level.parse().map_err(|error: Error| (line, error.to_string()))?;
                entries.push(Entry { line, pair: (Name::of(a), Name::of(b)), level });
            }
            _ => {
                let expected = "expected two devices (a PCI address, or the name of an RDMA device) and a level";
                return Err((
                    line,
                    format!("{expected}, as in `0000:19:00.0 mlx5_0 PIX`; found {} words", words.len()),
                ));
            }
        }
    }
    Ok(entries)
}

impl Name {
    fn of(text: &str) -> Self {
        text.parse().map_or_else(|_| Self::Nic(text.to_owned()), Self::Function)
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Function(address) => address.fmt(f),
            Self::Nic(name) => name.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_are_two_devices_and_a_level() {
        let text = "# a comment\n\n 00000000:19:00.0\tmlx5_0  pix # behind the hidden switch\nmlx5_0 mlx5_1 NODE\n";
        let function = Name::Function("0000:19:00.0".parse().unwrap());
        let nic = |name: &str| Name::Nic(name.to_owned());
        let expected = [
            Entry { line: 3, pair: (function, nic("mlx5_0")), level: Level::Pix },
            Entry { line: 4, pair: (nic("mlx5_0"), nic("mlx5_1")), level: Level::Node },
        ];
        assert_eq!(parse(text).unwrap(), expected);
    }

    #[test]
    fn what_is_no_entry_is_told_with_its_line_and_what_was_expected() {
        let (line, why) = parse("\n0000:19:00.0 mlx5_0\n").unwrap_err();
        assert!(line == 2 && why.contains("2 words") && why.contains("0000:19:00.0 mlx5_0 PIX"), "{why}");
        let (line, why) = parse("a b near").unwrap_err();
        assert!(line == 1 && why.contains("near") && why.contains("NODE"), "{why}");
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*|([0-9a-f:. #\n]|PIX|mlx5)*") {
            let _ = parse(&text);
        }
    }
}
