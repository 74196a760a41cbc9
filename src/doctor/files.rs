//! Reading sysfs and procfs, of this machine or of a copy.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::finding::Source;

/// Where the files are.
#[derive(Clone, Debug)]
pub(super) struct Files {
    sys: PathBuf,
    proc: PathBuf,
}

/// A file that was read, or could not be.
#[derive(Debug)]
pub(super) struct Reading {
    /// Its name on the machine that it is of.
    pub file: String,
    pub text: io::Result<String>,
}

impl Files {
    pub(super) fn new(sys: &Path, proc: &Path) -> Self {
        Self { sys: sys.to_owned(), proc: proc.to_owned() }
    }

    /// `file` below `/sys`, without white space around it.
    pub(super) fn sys(&self, file: &str) -> Reading {
        Reading { file: format!("/sys/{file}"), text: read(&self.sys.join(file)) }
    }

    /// `file` below `/proc`.
    pub(super) fn proc(&self, file: &str) -> Reading {
        Reading { file: format!("/proc/{file}"), text: read(&self.proc.join(file)) }
    }

    pub(super) fn sys_exists(&self, file: &str) -> bool {
        self.sys.join(file).exists()
    }

    /// The names in a folder below `/sys`; numbers in their order.
    pub(super) fn sys_folder(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.sys.join(folder)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_by_key(|name| (name.parse::<u64>().unwrap_or(u64::MAX), name.clone()));
        names
    }
}

impl Reading {
    /// The text, if there is any.
    pub(super) fn get(&self) -> Option<&str> {
        self.text.as_deref().ok().filter(|text| !text.is_empty())
    }

    /// The line that holds `word`.
    pub(super) fn line(&self, word: &str) -> Option<&str> {
        self.get()?.lines().find(|line| line.contains(word)).map(str::trim)
    }

    /// As a source that shows `part` of its text.
    pub(super) fn showing(&self, part: &str) -> Source {
        Source::new(&self.file, part)
    }

    /// As a source: its first line, or why it cannot be read.
    pub(super) fn source(&self) -> Source {
        let answer = match &self.text {
            Ok(text) => text.lines().next().unwrap_or("empty").to_owned(),
            Err(error) => failure(error),
        };
        Source::new(&self.file, answer)
    }
}

/// An error of the system, with its number.
pub(super) fn failure(error: &io::Error) -> String {
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound, _) => "not there".to_owned(),
        (_, Some(number)) => format!("errno {number} ({})", text_of(error)),
        (_, None) => error.to_string(),
    }
}

/// Without the number that std puts behind it.
fn text_of(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

fn read(path: &Path) -> io::Result<String> {
    // What is none of text's characters goes to nobody's terminal.
    let plain = |it: char| if it.is_control() && !it.is_whitespace() { '?' } else { it };
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).trim().chars().map(plain).collect())
}
