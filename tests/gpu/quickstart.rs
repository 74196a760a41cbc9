//! The example, as its user starts it.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::common::example::build;
use crate::gpu::fake;

/// The example, with the stand-in for its driver where there is no real one.
struct Example(PathBuf, Option<TempDir>);

impl Example {
    fn new() -> Option<Self> {
        let directory = fake().map(|_| fake_cuda::directory(&[]).unwrap());
        Some(Self(build("gpu_quickstart")?, directory))
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.0);
        command.args(["--device", "soft0"]).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(directory) = &self.1 {
            command.env("LD_LIBRARY_PATH", directory.path());
        }
        command
    }
}

#[track_caller]
fn assert_succeeded(output: &Output) -> String {
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {said}{complained}", output.status);
    assert_eq!(complained, "");
    said.into_owned()
}

#[track_caller]
fn assert_table(said: &str) {
    for words in ["GPU 0", "visibility of what a NIC writes", "path", "software", "16777216", "on soft0"] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
}

#[test]
fn both_ends() {
    let Some(example) = Example::new() else { return };
    assert_table(&assert_succeeded(&example.command(&[]).output().unwrap()));
}

#[test]
fn an_end_in_each_process() {
    let Some(example) = Example::new() else { return };
    let mut listening = example.command(&["--listen", "127.0.0.1:0"]).spawn().unwrap();
    let mut said = BufReader::new(listening.stdout.take().unwrap());
    let (mut before, address) = (
        String::new(),
        loop {
            let mut line = String::new();
            assert!(said.read_line(&mut line).unwrap() > 0, "it has ended");
            if let Some(address) = line.trim().strip_prefix("listening at ") {
                break address.to_owned();
            }
        },
    );
    let connected = example.command(&["--connect", &address]).output().unwrap();
    assert!(assert_succeeded(&connected).contains("visibility of what a NIC writes"));
    said.read_to_string(&mut before).unwrap();
    assert!(listening.wait().unwrap().success(), "{before}");
    assert!(before.contains("software") && before.contains("16777216"), "{before}");
}

#[test]
fn without_a_gpu() {
    let Some(example) = Example::new() else { return };
    let output = example.command(&["--gpu", "77"]).output().unwrap();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{complained}");
    assert!(complained.contains("gpu_quickstart: no GPU can be used: GPU 77 was asked for"), "{complained}");
    if example.1.is_some() {
        // No driver at all.
        let output = example.command(&[]).env_remove("LD_LIBRARY_PATH").output().unwrap();
        let complained = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{complained}");
        assert!(complained.contains("libcuda.so.1"), "{complained}");
    }
}
