//! Second processes of the test binary, and what a process holds.

use std::future::Future;
use std::process::Stdio;
use std::time::Duration;
use std::{env, fs, io, process, thread};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio_rdma::RemoteRegion;

use super::rig::{Rig, Setup};
use super::run::{SOON, eventually, run, within};

/// Set in a second process.
const SECOND: &str = "TOKIO_RDMA_TEST_SECOND_PROCESS";

/// What a second process prints in front of what it has to say; libtest prints to the same place.
const MARK: &str = "@second-process@ ";

/// Runs `first` here, and `second` in another process of this binary, which is started for the same test.
pub fn two_processes<F, G>(
    test: &'static str,
    setup: Setup,
    first: impl FnOnce(Rig, Second) -> F + Send + 'static,
    second: impl FnOnce(Rig, Parent) -> G + Send + 'static,
) where
    F: Future<Output = ()> + 'static,
    G: Future<Output = ()> + 'static,
{
    if env::var_os(SECOND).is_some() {
        run(setup, |rig| second(rig, Parent::new()));
    } else {
        run(setup, |rig| async { first(rig, Second::start(test, &[])).await });
    }
}

/// Runs the case in a process where nothing else runs, so that it can count descriptors and threads.
pub fn alone<F: Future<Output = ()> + 'static>(
    test: &'static str,
    setup: Setup,
    case: impl FnOnce(Rig) -> F + Send + 'static,
) {
    alone_with(test, setup, &[], case);
}

/// As [`alone`], with these variables in the environment.
pub fn alone_with<F: Future<Output = ()> + 'static>(
    test: &'static str,
    setup: Setup,
    variables: &'static [(&str, &str)],
    case: impl FnOnce(Rig) -> F + Send + 'static,
) {
    if env::var_os(SECOND).is_some() {
        run(setup, case);
    } else {
        run(setup, move |_| async move {
            let mut second = Second::start(test, variables);
            drop(second.input.take());
            let status = second.child.wait().await.unwrap();
            assert!(status.success(), "in a process of its own: {status}");
        });
    }
}

/// The name of a test as the command line takes it.
pub fn test_name(path: &'static str) -> &'static str {
    path.split_once("::").map_or(path, |(_, name)| name)
}

/// The other process, seen from the first one. Killed when dropped.
pub struct Second {
    test: String,
    child: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Second {
    fn start(test: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
            .env(SECOND, "1")
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take(), child.stdout.take().unwrap());
        Self { test: test.to_owned(), child, input, output: BufReader::new(output).lines() }
    }

    /// One more process for the same test.
    pub fn another(&self) -> Self {
        Self::start(&self.test, &[])
    }

    /// The next thing it says.
    pub async fn hear(&mut self) -> String {
        within(SOON, async {
            loop {
                let line = self.output.next_line().await.unwrap().expect("the second process has ended");
                if let Some((_, said)) = line.split_once(MARK) {
                    return said.to_owned();
                }
            }
        })
        .await
    }

    /// The region that it tells about.
    pub async fn hear_region(&mut self) -> RemoteRegion {
        let text = self.hear().await;
        let digits = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
        RemoteRegion::from_bytes(&(0..text.len()).step_by(2).map(digits).collect::<Vec<_>>()).unwrap()
    }

    pub async fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().unwrap();
        input.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// Stops it, and returns when none of its threads runs any more.
    pub async fn stop(&self) {
        stop(&self.child).await;
    }

    pub fn resume(&self) {
        resume(&self.child);
    }

    /// Kills it, as with `kill -9`, and waits until it is gone.
    pub async fn kill(mut self) {
        self.child.kill().await.unwrap();
    }

    /// Waits until it has ended by itself, without a failure.
    pub async fn end(mut self) {
        drop(self.input.take());
        let status = within(SOON, self.child.wait()).await.unwrap();
        assert!(status.success(), "the second process: {status}");
    }
}

/// The first process, seen from the second one.
pub struct Parent {
    heard: tokio::sync::mpsc::UnboundedReceiver<String>,
}

impl Parent {
    fn new() -> Self {
        let (said, heard) = tokio::sync::mpsc::unbounded_channel();
        thread::spawn(move || {
            let mut line = String::new();
            while io::stdin().read_line(&mut line).is_ok_and(|len| len > 0) {
                let _ = said.send(line.trim().to_owned());
                line.clear();
            }
            // The first process wants no more of this one, or is gone.
            drop(said);
            thread::sleep(Duration::from_secs(30));
            process::exit(3);
        });
        Self { heard }
    }

    pub fn say(&self, line: &str) {
        println!("{MARK}{line}");
    }

    pub fn say_region(&self, region: &RemoteRegion) {
        self.say(&region.to_bytes().map(|byte| format!("{byte:02x}")).concat());
    }

    /// The next line from the first process; `None` when it has no more to say.
    pub async fn hear(&mut self) -> Option<String> {
        self.heard.recv().await
    }
}

/// Stops a process, and returns when none of its threads runs any more.
pub async fn stop(process: &Child) {
    signal(process, Signal::STOP);
    let tasks = format!("/proc/{}/task", process.id().expect("it runs"));
    let stopped = || {
        fs::read_dir(&tasks).unwrap().all(|thread| {
            let stat = fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
            // The state comes after the name, which is in parentheses.
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
        })
    };
    eventually(stopped, || "its threads still run").await;
}

pub fn resume(process: &Child) {
    signal(process, Signal::CONT);
}

fn signal(process: &Child, signal: Signal) {
    let id = process.id().expect("it runs") as i32;
    kill_process(Pid::from_raw(id).unwrap(), signal).unwrap();
}

/// Open descriptors of this process.
pub fn descriptors() -> usize {
    // The directory itself is open while it is read.
    fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Threads of this process.
pub fn threads() -> usize {
    fs::read_dir("/proc/self/task").unwrap().count()
}
