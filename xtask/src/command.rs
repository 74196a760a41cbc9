//! Runs other programs and keeps what they print.

use std::ffi::OsString;
use std::fmt;
use std::io::IsTerminal;
use std::path::Path;

use anyhow::{Context, Result, bail};
use cargo_metadata::Message;
use cargo_metadata::camino::Utf8PathBuf;

/// One command may take this many seconds. The longest, a sanitized build from nothing, takes about two minutes on two
/// cores; what takes ten times that long hangs.
const LIMIT_SECONDS: &str = "1200";

/// A program, its arguments and what is added to its environment.
#[derive(Clone)]
pub struct Command {
    words: Vec<OsString>,
    env: Vec<(&'static str, OsString)>,
    dir: Option<OsString>,
}

/// What a program printed, both streams together, and whether it exited with 0.
pub struct Finished {
    pub ok: bool,
    pub text: String,
}

impl Command {
    /// A command line, split at white space; an argument that may hold some is added with [`arg`](Self::arg).
    pub fn new(line: &str) -> Self {
        Self { words: line.split_whitespace().map(OsString::from).collect(), env: Vec::new(), dir: None }
    }

    /// Adds more words of the command line.
    pub fn args(mut self, line: &str) -> Self {
        self.words.extend(line.split_whitespace().map(OsString::from));
        self
    }

    pub fn arg(mut self, arg: impl AsRef<std::ffi::OsStr>) -> Self {
        self.words.push(arg.as_ref().into());
        self
    }

    pub fn env(mut self, key: &'static str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.env.push((key, value.as_ref().into()));
        self
    }

    pub fn envs(mut self, variables: &[(&'static str, OsString)]) -> Self {
        self.env.extend_from_slice(variables);
        self
    }

    pub fn dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.dir = Some(dir.as_ref().into());
        self
    }

    /// Runs it and gives what it printed; anything but exit status 0 is an error that holds all of it.
    pub fn run(&self) -> Result<String> {
        let finished = self.finish()?;
        if !finished.ok {
            bail!("{}", finished.text);
        }
        Ok(finished.text)
    }

    /// Runs it where failing is an answer too.
    pub fn finish(&self) -> Result<Finished> {
        let output = self.expression().stderr_to_stdout().stdout_capture().unchecked().run();
        let output = output.with_context(|| format!("$ {self}"))?;
        let printed = String::from_utf8_lossy(&output.stdout);
        let text = match output.status.code() {
            Some(0) => printed.into_owned(),
            Some(124) => format!("$ {self}\n{printed}\nstopped after {LIMIT_SECONDS} seconds"),
            _ => format!("$ {self}\n{printed}\n{}", output.status),
        };
        Ok(Finished { ok: output.status.success(), text })
    }

    /// Runs it and gives its standard output alone, for a program to read.
    pub fn stdout(&self) -> Result<String> {
        let output = self.expression().stderr_capture().stdout_capture().unchecked().run()?;
        if !output.status.success() {
            bail!("$ {self}\n{}\n{}", String::from_utf8_lossy(&output.stderr), output.status);
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs cargo, and gives the program that it built, the last if there are several.
    pub fn built(self) -> Result<Utf8PathBuf> {
        let mut program = None;
        for message in Message::parse_stream(self.clone().arg("--message-format=json").stdout()?.as_bytes()) {
            if let Message::CompilerArtifact(artifact) = message? {
                program = artifact.executable.or(program);
            }
        }
        program.with_context(|| format!("$ {self}\nbuilt no program"))
    }

    fn expression(&self) -> duct::Expression {
        // Somebody at a terminal has Ctrl-C, which `timeout` would keep from the command.
        let words = if std::io::stdin().is_terminal() {
            self.words.clone()
        } else {
            let timeout = ["timeout", "--kill-after=10", LIMIT_SECONDS].map(OsString::from);
            timeout.into_iter().chain(self.words.iter().cloned()).collect()
        };
        let mut expression = duct::cmd(&words[0], &words[1..]).stdin_null();
        for (key, value) in &self.env {
            expression = expression.env(key, value);
        }
        match &self.dir {
            Some(dir) => expression.dir(dir),
            None => expression,
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (key, value) in &self.env {
            write!(f, "{key}={value:?} ")?;
        }
        let words: Vec<_> = self.words.iter().map(|word| word.to_string_lossy()).collect();
        f.write_str(&words.join(" "))
    }
}
