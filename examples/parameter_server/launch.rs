//! Everything on this machine: this program once as the server, and several times as a worker.

use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::common::child::Server;
use crate::options::Options;
use crate::server::say;

/// How long the server may take to listen.
const START: Duration = Duration::from_secs(20);

/// How long workers may take to end after the server has, and the server after them or after it was told to.
const END: Duration = Duration::from_secs(10);

/// The number of a worker process, and how it ended.
type Ended = (usize, std::io::Result<ExitStatus>);

/// Runs a whole training, with the arguments that this process got. Whatever becomes of this process, the others end with it: each
/// watches its standard input, which is a pipe from here.
pub async fn run(options: &Options) -> Result<()> {
    let (mut server, address) = Server::start(arguments("server"), START).await?;
    let mut workers = JoinSet::new();
    for number in 0..options.workers.div_ceil(options.per_process) {
        let mut command = Command::new(std::env::current_exe().context("find this program's own path")?);
        // Takes the place of one that was given here, which is the server's.
        let gpu = number % options.gpus.unwrap_or(1) + options.gpu;
        let together = options.per_process.min(options.workers - number * options.per_process);
        command.args(arguments("worker")).arg("--address").arg(address.to_string());
        command.args([format!("--gpu={gpu}"), format!("--per-process={together}")]);
        let mut worker = command.kill_on_drop(true).stdin(Stdio::piped()).spawn().context("start a worker")?;
        workers.spawn(async move {
            // Waiting closes it otherwise.
            let _stdin = worker.stdin.take();
            (number, worker.wait().await)
        });
    }
    let outcome = follow(&mut server, &mut workers).await;
    // A last checkpoint takes a while also after a failure here.
    server.let_go();
    let drained = timeout(END, async { while let Ok(Some(_)) = server.line().await {} }).await;
    let outcome = server.finish(outcome, END).await;
    if outcome.is_err() || drained.is_err() {
        // Ended by dropping what waits for them.
        workers.shutdown().await;
        return outcome;
    }
    let ended = timeout(END, async {
        while let Some(ended) = workers.join_next().await {
            tell(ended?)?;
        }
        anyhow::Ok(())
    });
    ended.await.map_err(|_| anyhow::anyhow!("workers did not end within {END:?} and were killed"))?
}

/// Shows what the server prints until it prints no more.
async fn follow(server: &mut Server, workers: &mut JoinSet<Ended>) -> Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let told = async {
        tokio::select! {
            _ = interrupt.recv() => "interrupted",
            _ = terminate.recv() => "terminated",
        }
    };
    tokio::pin!(told);
    // What the signal that came says.
    let mut signalled = None;
    // Until when the server has to be done, and why.
    let mut ending: Option<(Instant, &str)> = None;
    loop {
        let until = ending.map(|(until, _)| until);
        tokio::select! {
            line = server.line() => match (line?, signalled) {
                (Some(line), _) => say(&line)?,
                (None, None) => return Ok(()),
                (None, Some(why)) => bail!("{why}"),
            },
            Some(ended) = workers.join_next() => {
                tell(ended?)?;
                // None of those that this process started can come back; the server would wait for one.
                if workers.is_empty() {
                    ending.get_or_insert((Instant::now() + END, "every worker has ended before the training has"));
                }
            }
            why = &mut told, if signalled.is_none() => {
                server.let_go();
                signalled = Some(why);
                ending = Some((Instant::now() + END, why));
            }
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                bail!("{}", ending.map_or("", |(_, why)| why))
            }
        }
    }
}

/// A worker that failed is worth a line, and no more: the others go on.
fn tell((number, status): Ended) -> Result<()> {
    let status = status?;
    if status.success() { Ok(()) } else { say(&format!("worker process {number} ended with {status}")) }
}

/// Those of this process, for this program in another role.
fn arguments(role: &str) -> Vec<OsString> {
    let own = std::env::args_os().skip(1);
    own.chain(["--role", role, "--until-eof"].map(OsString::from)).collect()
}
