//! A training's processes, and what they say.

use std::path::PathBuf;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use crate::example;

/// The share of held-out pictures that every training here gets right.
pub const ENOUGH: f64 = 0.95;

/// Enough for that, in a debug build on a small machine. An epoch has 45 batches of 32.
pub const EPOCHS: u64 = 16;
pub const BATCHES: u64 = EPOCHS * 45;

/// No step of any test takes so long.
pub const LIMIT: Duration = Duration::from_secs(60);

/// One training's processes find each other in a folder.
pub struct Site {
    pub program: PathBuf,
    pub folder: tempfile::TempDir,
    /// What it is told to compute on.
    pub compute: &'static str,
    /// Where it looks for the driver of GPUs before it looks elsewhere.
    pub driver: Option<tempfile::TempDir>,
}

impl Site {
    pub fn new() -> Option<Self> {
        let (program, folder) = (example::build("parameter_server")?, tempfile::tempdir().unwrap());
        Some(Self { program, folder, compute: "cpu", driver: None })
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["--compute", self.compute]).args(arguments.split_whitespace());
        command.current_dir(&self.folder).env("TOKIO_RDMA_DEVICE", "soft0");
        if let Some(driver) = &self.driver {
            command.env("LD_LIBRARY_PATH", driver.path());
        }
        command.kill_on_drop(true).stdin(Stdio::null());
        command
    }

    pub fn server(&self, arguments: &str) -> Process {
        let common = format!("--role server --address unix:socket --epochs {EPOCHS} --log-every 1 --rate 0.2");
        Process::start(self.command(&format!("{common} {arguments}")))
    }

    pub fn worker(&self) -> Process {
        Process::start(self.command("--role worker --address unix:socket --wait 20"))
    }

    pub async fn output(&self, arguments: &str) -> Output {
        timeout(LIMIT, self.command(arguments).output()).await.expect("it takes too long").unwrap()
    }
}

pub struct Process {
    pub child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    heard: Vec<String>,
}

impl Process {
    pub fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines, heard: Vec::new() }
    }

    pub async fn line(&mut self) -> Option<String> {
        let line = timeout(LIMIT, self.lines.next_line()).await;
        let line = line.unwrap_or_else(|_| panic!("nothing more after {:?}", self.heard.last())).unwrap()?;
        self.heard.push(line.clone());
        Some(line)
    }

    /// The next line that tells `words`.
    pub async fn hear(&mut self, words: &str) -> String {
        loop {
            match self.line().await {
                Some(line) if line.contains(words) => return line,
                Some(_) => {}
                None => panic!("no {words:?} at the end of {:#?}", self.heard.iter().rev().take(20).rev()),
            }
        }
    }

    /// Returns when a step from this one on was taken, with its number.
    pub async fn hear_step(&mut self, from: u64) -> u64 {
        loop {
            let line = self.hear("step ").await;
            let step = number_after(&line, "step ");
            if line.starts_with("step ") && step >= from {
                return step;
            }
        }
    }

    pub async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        let id = self.child.id().expect("it runs") as i32;
        kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
    }

    pub async fn end(mut self) -> (ExitStatus, Vec<String>) {
        while self.line().await.is_some() {}
        (timeout(LIMIT, self.child.wait()).await.expect("it does not end").unwrap(), self.heard)
    }

    /// Its lines; it ended well, with the accuracy that is enough.
    pub async fn end_trained(self) -> Vec<String> {
        let (status, heard) = self.end().await;
        assert!(status.success(), "{status}: {heard:#?}");
        assert_trained(&heard);
        heard
    }
}

#[track_caller]
pub fn assert_trained(lines: &[String]) {
    let accuracy = lines.last().and_then(|line| line.strip_prefix("test accuracy ")?.parse::<f64>().ok());
    assert!(accuracy.is_some_and(|accuracy| accuracy >= ENOUGH), "{lines:#?}");
}

#[track_caller]
pub fn number_after(line: &str, words: &str) -> u64 {
    let (_, rest) = line.split_once(words).unwrap_or_else(|| panic!("no {words:?} in {line:?}"));
    let digits = rest.split(|it: char| !it.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap_or_else(|_| panic!("no number after {words:?} in {line:?}"))
}

/// Gradients that were applied, as the server says at its end.
#[track_caller]
pub fn gradients(lines: &[String]) -> u64 {
    let line = lines.iter().find(|line| line.contains(" gradients in ")).expect("the server tells how many");
    number_after(line, "")
}

pub fn count(lines: &[String], words: &str) -> usize {
    lines.iter().filter(|line| line.contains(words)).count()
}

pub async fn assert_ends_well(workers: Vec<Process>) {
    for worker in workers {
        let (status, _) = worker.end().await;
        assert!(status.success(), "a worker: {status}");
    }
}
