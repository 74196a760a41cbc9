//! One figure: a server process, a client process, and what they tell.

use std::ffi::OsStr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use crate::iceoryx2;
use crate::job::{Exchange, Found, Job, Subject, Usage};
use crate::place::Place;
use crate::plan::{Link, Peer, Row};

/// Longer than any trial by far; whoever has not ended by then never will.
const LIMIT: Duration = Duration::from_secs(15);

/// A figure and what it took.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Trial {
    pub value: f64,
    /// The 99th percentile of latencies.
    pub p99: Option<f64>,
    /// CPU time of the client while it measured, of both processes where idle: in % of one CPU.
    pub cpu: Option<f64>,
    /// Voluntary context switches of the client per exchange; of both processes in all where idle.
    pub switches: Option<f64>,
}

/// Runs one side of a row; its server and its client on these CPUs.
pub async fn run(row: &Row, contender: Peer, cpus: (usize, usize), quick: bool) -> Result<Trial> {
    let trial = async {
        match contender {
            Peer::Subject(subject) if subject.is_alone() => alone(row, subject, cpus.1, quick).await,
            Peer::Subject(subject) => of_two(row, subject, cpus, quick).await,
            Peer::Ucx(test) => test.run(&row.exchange, &row.pace(quick), cpus).await,
            Peer::UcxAndYield(test) => {
                let operation = test.run(&row.exchange, &row.pace(quick), cpus).await?;
                let turn = alone(row, Subject::Yield, cpus.1, quick).await?;
                Ok(Trial::of_value(operation.value + turn.value))
            }
            Peer::Iceoryx2 => iceoryx2::run(&row.exchange, &row.pace(quick), cpus).await,
        }
    };
    match tokio::time::timeout(LIMIT, trial).await {
        Ok(result) => result,
        Err(_) => bail!("not done after {LIMIT:?}"),
    }
}

async fn of_two(row: &Row, subject: Subject, cpus: (usize, usize), quick: bool) -> Result<Trial> {
    let job = row.job(subject, quick);
    let text = serde_json::to_string(&job)?;
    let dir = tempfile::tempdir()?;
    let at = match row.link {
        Link::Tcp => "127.0.0.1:0".to_owned(),
        Link::Unix | Link::Shm => format!("unix:{}", dir.path().join("server").display()),
    };
    let policy = if row.link == Link::Shm { "shm" } else { "sockets" };
    let mut server = Process::start("server", cpus.0, policy, [&text, &at])?;
    let at: String = server.line().await?;
    let mut client = Process::start("client", cpus.1, policy, [&text, &at])?;
    let found: Found = client.line().await?;
    client.end().await?;
    let used: Usage = server.line().await?;
    server.end().await?;
    Ok(Trial::of(&job, &found, &used))
}

/// Of one process.
async fn alone(row: &Row, subject: Subject, cpu: usize, quick: bool) -> Result<Trial> {
    let job = row.job(subject, quick);
    let mut process = Process::start("alone", cpu, "sockets", [serde_json::to_string(&job)?])?;
    let found: Found = process.line().await?;
    process.end().await?;
    Ok(Trial::of(&job, &found, &Usage::default()))
}

impl Trial {
    /// Of another program, which tells no more.
    pub fn of_value(value: f64) -> Self {
        Self { value, p99: None, cpu: None, switches: None }
    }

    fn of(job: &Job, client: &Found, server: &Usage) -> Self {
        let share = |usage: &Usage| 100.0 * usage.cpu.as_secs_f64() / usage.wall.as_secs_f64();
        let mut cpu = share(&client.usage);
        let mut switches = client.usage.switches as f64;
        if job.exchange == Exchange::Idle {
            cpu += share(server);
            switches += server.switches as f64;
        } else {
            switches /= client.exchanges.max(1) as f64;
        }
        Self { value: client.value.unwrap_or(cpu), p99: client.p99, cpu: Some(cpu), switches: Some(switches) }
    }
}

/// A child of the driver; killed when this is dropped, or when the driver ends.
pub struct Process {
    what: &'static str,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// This program again, as `what`, with this policy for the software device's links.
    pub fn start(
        what: &'static str,
        cpu: usize,
        policy: &str,
        args: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env("TOKIO_RDMA_LINK", policy).arg(what).args(Place::on(cpu)).arg("--").args(args);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let out = child.stdout.take().context("no standard output")?;
        Ok(Self { what, child, lines: BufReader::new(out).lines() })
    }

    /// The next line that it prints, as text or `None` at its end.
    pub async fn text(&mut self) -> Result<Option<String>> {
        Ok(self.lines.next_line().await?)
    }

    pub async fn line<T: DeserializeOwned>(&mut self) -> Result<T> {
        match self.text().await? {
            Some(line) => serde_json::from_str(&line).with_context(|| format!("the {} said {line:?}", self.what)),
            None => bail!("the {} ended without a word ({})", self.what, self.child.wait().await?),
        }
    }

    pub async fn end(mut self) -> Result<()> {
        let status = self.child.wait().await?;
        if !status.success() {
            bail!("the {} ended with {status}", self.what);
        }
        Ok(())
    }
}
