//! The software device, used as a program would use it.

use std::collections::VecDeque;

use anyhow::{Context, Result, bail, ensure};
use tokio_rdma::op::{OpError, ReceiveOp, Received, WriteOp};
use tokio_rdma::{
    Access, Address, Buffer, BufferPool, CompletionMode, Connection, Device, Error, ExposedRegion, Listener,
    ProtectionDomain, RemoteRegion,
};

use super::{SETTLE, announce};
use crate::job::{Exchange, Found, Job, Mode, Pace, Usage};
use crate::measure::{Laps, Meter, Push, throughput};

/// Writes in flight.
pub const IN_FLIGHT: usize = 16;

/// Receives posted on an idle connection.
const IDLE_RECEIVES: usize = 16;

pub async fn serve(job: &Job, mode: Mode, at: &Address) -> Result<Usage> {
    let domain = domain(mode)?;
    let exposed = match job.exchange {
        Exchange::Write { chunk: len } | Exchange::Read { size: len } => Some(expose(&domain, len)?),
        Exchange::RoundTrip { .. } | Exchange::Idle => None,
    };
    let listener = Listener::builder(&domain).connections(|connection| match &exposed {
        Some(region) => connection.private_data(region.remote().to_bytes()),
        None => connection,
    });
    let listener = listener.bind(at).await?;
    announce(listener.local_address())?;
    let connection = listener.accept().await?;
    let meter = Meter::start()?;
    match job.exchange {
        Exchange::RoundTrip { size } => echo(&connection, size).await?,
        Exchange::Write { .. } | Exchange::Read { .. } => drop(connection.closed().await),
        Exchange::Idle => return idle(&connection, &job.pace).await,
    }
    meter.read()
}

pub async fn measure(job: &Job, mode: Mode, at: &Address) -> Result<Found> {
    let connection = Connection::connect(&domain(mode)?, at).await?;
    match job.exchange {
        Exchange::RoundTrip { size } => round_trips(&connection, size, &job.pace).await,
        Exchange::Write { chunk } => writes(&connection, chunk, &job.pace).await,
        Exchange::Read { size } => reads(&connection, size, &job.pace).await,
        Exchange::Idle => {
            Ok(Found { value: None, p99: None, exchanges: 0, usage: idle(&connection, &job.pace).await? })
        }
    }
}

fn domain(mode: Mode) -> Result<ProtectionDomain> {
    let device = Device::builder("soft0");
    let device = match mode {
        Mode::Adaptive => device,
        Mode::Event => device.completion_mode(CompletionMode::Event),
        Mode::Polling => device.completion_mode(CompletionMode::Polling),
    };
    Ok(device.open()?.alloc_pd()?)
}

fn expose(domain: &ProtectionDomain, len: usize) -> Result<ExposedRegion> {
    Ok(domain.alloc(len)?.expose(Access::REMOTE_READ | Access::REMOTE_WRITE)?)
}

/// A receive that is in place before the peer can send.
fn posted(connection: &Connection, buffer: Buffer) -> Result<ReceiveOp<Buffer>> {
    let mut receive = connection.receive(buffer);
    receive.try_post()?;
    Ok(receive)
}

/// Three buffers go round: a message on its way, a receive that waits for the answer, and one for the answer after that.
async fn round_trips(connection: &Connection, size: usize, pace: &Pace) -> Result<Found> {
    let domain = connection.domain();
    let (mut message, mut spare) = (domain.alloc(size)?, domain.alloc(size)?);
    let mut receive = posted(connection, domain.alloc(size)?)?;
    let mut laps = Laps::start(pace)?;
    loop {
        let next = posted(connection, spare)?;
        let (sent, answer) = tokio::try_join!(connection.send(message), receive)?;
        ensure!(answer.len == size, "{} bytes came back instead of {size}", answer.len);
        (message, spare, receive) = (sent, answer.buffer, next);
        if !laps.lap()? {
            return laps.found();
        }
    }
}

/// Sends back what comes, until the client goes.
async fn echo(connection: &Connection, size: usize) -> Result<()> {
    let domain = connection.domain();
    let mut spare = domain.alloc(size)?;
    let mut received = posted(connection, domain.alloc(size)?)?.await;
    loop {
        let Some(Received { buffer, .. }) = until_closed(received)? else { return Ok(()) };
        let next = posted(connection, spare)?;
        let sent;
        (sent, received) = tokio::join!(connection.send(buffer), next);
        // The client goes when it has its last answer; the acknowledgement may be lost with it.
        let Some(buffer) = until_closed(sent)? else { return Ok(()) };
        spare = buffer;
    }
}

/// `None`: the connection was closed.
fn until_closed<T>(result: Result<T, OpError<Buffer>>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.error(), Error::Closed { .. }) => Ok(None),
        Err(error) => bail!(error),
    }
}

fn remote(connection: &Connection) -> Result<RemoteRegion> {
    RemoteRegion::from_bytes(connection.peer_private_data()).context("the server's region")
}

async fn writes(connection: &Connection, chunk: usize, pace: &Pace) -> Result<Found> {
    let remote = remote(connection)?;
    let pool = BufferPool::new(connection.domain(), chunk, IN_FLIGHT)?;
    throughput(pace, chunk, Writes { connection, remote, pool }).await
}

struct Writes<'a> {
    connection: &'a Connection,
    remote: RemoteRegion,
    pool: BufferPool,
}

impl Push for Writes<'_> {
    async fn push(&mut self, chunks: u64) -> Result<()> {
        // They complete in the order of posting, and give their buffers back to the pool.
        let mut in_flight = VecDeque::<WriteOp<Buffer>>::with_capacity(IN_FLIGHT);
        for _ in 0..chunks {
            if in_flight.len() == IN_FLIGHT {
                if let Some(oldest) = in_flight.pop_front() {
                    oldest.await?;
                }
            }
            let mut write = self.connection.write(self.pool.get().await, &self.remote);
            write.try_post()?;
            in_flight.push_back(write);
        }
        for write in in_flight {
            write.await?;
        }
        Ok(())
    }
}

async fn reads(connection: &Connection, size: usize, pace: &Pace) -> Result<Found> {
    let remote = remote(connection)?;
    let mut buffer = connection.domain().alloc(size)?;
    let mut laps = Laps::start(pace)?;
    loop {
        buffer = connection.read(buffer, &remote).await?;
        if !laps.lap()? {
            return laps.found();
        }
    }
}

async fn idle(connection: &Connection, pace: &Pace) -> Result<Usage> {
    let _receives: Vec<_> =
        (0..IDLE_RECEIVES).map(|_| posted(connection, connection.domain().alloc(64)?)).collect::<Result<_>>()?;
    tokio::time::sleep(SETTLE).await;
    let meter = Meter::start()?;
    tokio::time::sleep(pace.measured).await;
    let usage = meter.read()?;
    ensure!(connection.close_reason().is_none(), "the idle connection has ended");
    // The other side may still be measuring.
    tokio::time::sleep(SETTLE).await;
    Ok(usage)
}
