//! What one side does alone with the other's memory.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use futures::FutureExt;
use tokio::task::{coop, yield_now};
use tokio_rdma::op::WriteOp;
use tokio_rdma::{Buffer, BufferPool, Connection, ExposedRegion, RemoteRegion, SharedBuffer};

use super::{IN_FLIGHT, remote};
use crate::job::{Found, Pace};
use crate::measure::{Laps, Push, throughput};

/// What a peer can be seen to have written: a number.
pub const WORD: usize = size_of::<u64>();

/// Looks at exposed memory, some nanoseconds each, before the runtime has its turn.
const LOOKS: u32 = 500;

/// Reads too short to be timed alone.
const READS: u32 = 16;

/// The peer's memory is used directly once it has been lent, which it is soon after the first use: within so many.
const FIRST_USES: u32 = 1000;

/// Between those.
const PAUSE: Duration = Duration::from_millis(1);

pub async fn writes(connection: &Connection, chunk: usize, pace: &Pace) -> Result<Found> {
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

/// As UCX's benchmark does, which has one buffer.
pub async fn same_writes(connection: &Connection, chunk: usize, pace: &Pace) -> Result<Found> {
    let remote = remote(connection)?;
    until_lent(connection, &remote).await?;
    let source = connection.domain().alloc(chunk)?.freeze();
    let found = throughput(pace, chunk, SameWrites { connection, remote, source }).await?;
    ensure_direct(connection)?;
    Ok(found)
}

struct SameWrites<'a> {
    connection: &'a Connection,
    remote: RemoteRegion,
    source: SharedBuffer,
}

impl Push for SameWrites<'_> {
    async fn push(&mut self, chunks: u64) -> Result<()> {
        let mut in_flight = VecDeque::<WriteOp<SharedBuffer>>::with_capacity(IN_FLIGHT);
        for _ in 0..chunks {
            if in_flight.len() == IN_FLIGHT {
                if let Some(oldest) = in_flight.pop_front() {
                    oldest.await?;
                }
            }
            let mut write = self.connection.write(self.source.clone(), &self.remote);
            write.try_post()?;
            in_flight.push_back(write);
        }
        for write in in_flight {
            write.await?;
        }
        Ok(())
    }
}

pub async fn single_writes(connection: &Connection, size: usize, pace: &Pace) -> Result<Found> {
    let remote = remote(connection)?;
    until_lent(connection, &remote).await?;
    let mut buffer = connection.domain().alloc(size)?;
    let mut laps = Laps::start(pace)?;
    loop {
        buffer = connection.write(buffer, &remote).await?;
        if !laps.lap()? {
            break;
        }
    }
    ensure_direct(connection)?;
    laps.found()
}

/// Writes numbers, and waits in its own memory for the server's.
pub async fn writes_seen(connection: &Connection, mirror: &ExposedRegion, pace: &Pace) -> Result<Found> {
    let remote = remote(connection)?;
    let mut buffer = connection.domain().alloc(WORD)?;
    let mut laps = Laps::start(pace)?.of(2);
    for number in 1_u64.. {
        buffer.copy_from_slice(&number.to_ne_bytes());
        buffer = connection.write(buffer, &remote).await?;
        ensure!(is_seen(connection, mirror, number).await?, "the server has gone");
        if !laps.lap()? {
            break;
        }
    }
    ensure_direct(connection)?;
    laps.found()
}

/// Writes each number back, until the client goes.
pub async fn answer_writes(connection: &Connection, exposed: &ExposedRegion) -> Result<()> {
    let remote = remote(connection)?;
    let mut buffer = connection.domain().alloc(WORD)?;
    for number in 1_u64.. {
        if !is_seen(connection, exposed, number).await? {
            break;
        }
        buffer.copy_from_slice(&number.to_ne_bytes());
        match super::until_closed(connection.write(buffer, &remote).await)? {
            Some(written) => buffer = written,
            None => break,
        }
    }
    Ok(())
}

/// Looks until the number is there. `false`: the connection was closed first.
async fn is_seen(connection: &Connection, exposed: &ExposedRegion, number: u64) -> Result<bool> {
    loop {
        for _ in 0..LOOKS {
            if exposed.load(0)? == number {
                return Ok(true);
            }
        }
        if connection.close_reason().is_some() {
            return Ok(false);
        }
        // The first writes come through the runtime.
        yield_now().await;
    }
}

pub async fn reads(connection: &Connection, size: usize, pace: &Pace) -> Result<Found> {
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

pub async fn reads_at_once(connection: &Connection, size: usize, pace: &Pace) -> Result<Found> {
    let remote = remote(connection)?;
    until_lent(connection, &remote).await?;
    let mut buffer = connection.domain().alloc(size)?;
    let mut laps = Laps::start(pace)?.of(READS);
    loop {
        for _ in 0..READS {
            // Where it is due, which would be told as a poll without a result.
            if !coop::has_budget_remaining() {
                yield_now().await;
            }
            match connection.read(buffer, &remote).now_or_never() {
                Some(read) => buffer = read?,
                None => bail!("a read was not complete at its first poll"),
            }
        }
        if !laps.lap()? {
            return laps.found();
        }
    }
}

/// What is measured as direct was so.
fn ensure_direct(connection: &Connection) -> Result<()> {
    let stats = connection.stats();
    // The server's memory may have been lent at any moment after it was asked for, so that a few are not.
    ensure!(stats.direct > stats.writes / 2, "only {} of {} writes were direct", stats.direct, stats.writes);
    Ok(())
}

/// Reads a little of the peer's memory until that needs no answer.
async fn until_lent(connection: &Connection, remote: &RemoteRegion) -> Result<()> {
    let start = remote.slice(..WORD as u64)?;
    let mut buffer = connection.domain().alloc(WORD)?;
    for _ in 0..FIRST_USES {
        buffer = connection.read(buffer, &start).await?;
        if connection.stats().direct > 0 {
            return Ok(());
        }
        tokio::time::sleep(PAUSE).await;
    }
    bail!("the peer's memory was not lent within {FIRST_USES} reads")
}
