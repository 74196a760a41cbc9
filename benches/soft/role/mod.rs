//! What the two processes of a trial do.

mod alone;
mod eventfd;
mod ours;
mod sockets;

use std::io::Write;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;
use tokio_rdma::Address;

use crate::job::{Job, Subject};

/// How long an idle connection gets to become quiet.
const SETTLE: Duration = Duration::from_millis(500);

pub fn serve(job: &Job, at: &Address) -> Result<()> {
    let (job, at) = (*job, at.clone());
    let used = run(async move {
        match job.subject {
            Subject::Ours(mode) => ours::serve(&job, mode, &at).await,
            Subject::Sockets => sockets::serve(&job, &at).await,
            Subject::EventFd => eventfd::serve(&at),
            Subject::Copy | Subject::Yield => bail!("{:?} has no server", job.subject),
        }
    })?;
    tell(&used)
}

pub fn measure(job: &Job, at: &Address) -> Result<()> {
    let (job, at) = (*job, at.clone());
    let found = run(async move {
        match job.subject {
            Subject::Ours(mode) => ours::measure(&job, mode, &at).await,
            Subject::Sockets => sockets::measure(&job, &at).await,
            Subject::EventFd => eventfd::measure(&job.pace, &at),
            Subject::Copy | Subject::Yield => bail!("{:?} has no server", job.subject),
        }
    })?;
    tell(&found)
}

pub fn measure_alone(job: &Job) -> Result<()> {
    let job = *job;
    let found = run(async move {
        match job.subject {
            Subject::Copy => alone::copies(&job),
            Subject::Yield => alone::yields(&job.pace).await,
            other => bail!("{other:?} needs a server"),
        }
    })?;
    tell(&found)
}

/// In a task, as a service handles a connection. (The future of `block_on` itself gets its turn less readily.)
fn run<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async { tokio::spawn(work).await? })
}

/// A line for the driver.
fn tell(value: &impl Serialize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(value)?)?;
    Ok(out.flush()?)
}

/// The server's first line: it listens.
fn announce(at: &Address) -> Result<()> {
    tell(&at.to_string())
}
