//! Everything on this machine: this program once as the server, and several times as a worker.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::options::Options;
use crate::server::{LISTENING, say};

/// How long the server may take to listen.
const START: Duration = Duration::from_secs(20);

/// How long workers may take to end after the server has.
const END: Duration = Duration::from_secs(10);

/// Runs a whole training, with the arguments that this process got.
pub async fn run(options: &Options) -> Result<()> {
    let (mut server, mut lines, address) = start_server().await?;
    let mut workers = JoinSet::new();
    for number in 0..options.workers {
        let mut worker = this_program("worker")?.args(["--address", &address]).spawn().context("start a worker")?;
        workers.spawn(async move { (number, worker.wait().await) });
    }
    let outcome = follow(&mut server, &mut lines, &mut workers).await;
    if outcome.is_err() {
        // The workers are ended by dropping what waits for them.
        let _ = server.kill().await;
        return outcome;
    }
    let ended = timeout(END, async {
        while let Some(ended) = workers.join_next().await {
            let (number, status) = ended?;
            tell(number, status?)?;
        }
        anyhow::Ok(())
    });
    ended.await.map_err(|_| anyhow!("workers did not end within {END:?} and were killed"))?
}

/// Shows what the server prints until it has ended; its last line only when it ended well.
async fn follow(
    server: &mut Child,
    lines: &mut Lines<BufReader<ChildStdout>>,
    workers: &mut JoinSet<(usize, std::io::Result<ExitStatus>)>,
) -> Result<()> {
    loop {
        tokio::select! {
            line = lines.next_line() => match line.context("read what the server prints")? {
                Some(line) => say(&line)?,
                None => break,
            },
            Some(ended) = workers.join_next() => {
                let (number, status) = ended?;
                tell(number, status?)?;
                // None of those that this process started can come back; the server would wait for one.
                if workers.is_empty() {
                    let ending = timeout(END, server.wait()).await;
                    let status = ending.map_err(|_| anyhow!("every worker has ended before the training has"))??;
                    ensure!(status.success(), "the server ended with {status}");
                }
            }
        }
    }
    let status = server.wait().await.context("wait for the server")?;
    ensure!(status.success(), "the server ended with {status}; see its message above");
    Ok(())
}

/// A worker that failed is worth a line, and no more: the others go on.
fn tell(number: usize, status: ExitStatus) -> Result<()> {
    if status.success() { Ok(()) } else { say(&format!("worker process {number} ended with {status}")) }
}

async fn start_server() -> Result<(Child, Lines<BufReader<ChildStdout>>, String)> {
    let mut server = this_program("server")?.stdout(Stdio::piped()).spawn().context("start the server")?;
    let stdout = server.stdout.take().context("the server's standard output")?;
    let mut lines = BufReader::new(stdout).lines();
    let reading = timeout(START, lines.next_line()).await;
    let first = reading.map_err(|_| anyhow!("the server did not listen within {START:?}"))??;
    match first.as_deref().and_then(|line| line.strip_prefix(LISTENING)) {
        Some(address) => {
            let address = address.to_owned();
            Ok((server, lines, address))
        }
        None => bail!("the server did not start listening; see its message above"),
    }
}

/// This program in another role, with the arguments that it has itself. Ended when it is dropped.
fn this_program(role: &str) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("find this program's own path")?);
    command.args(std::env::args_os().skip(1)).args(["--role", role]);
    command.kill_on_drop(true).stdin(Stdio::null());
    Ok(command)
}
