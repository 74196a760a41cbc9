//! Messages: there and back, and as many as go.

use std::collections::VecDeque;

use anyhow::{Result, ensure};
use tokio_rdma::op::{ReceiveOp, Received, SendOp};
use tokio_rdma::{Buffer, Connection};

use super::{posted, until_closed};
use crate::job::{Found, Pace};
use crate::measure::{Laps, Push, rate};

/// Sends on their way where as many go as can.
const SENDS: usize = 64;

/// Receives for those: enough for all that may come before the task that posts them again has its turn. One that finds none is tried
/// again after a millisecond.
pub const RECEIVES: u32 = 8 * SENDS as u32;

/// Sends before it is measured how many go.
const WARM_UP: u64 = 10_000;

/// Three buffers go round: a message on its way, a receive that waits for the answer, and one for the answer after that.
pub async fn round_trips(connection: &Connection, size: usize, parts: u32, pace: &Pace) -> Result<Found> {
    let domain = connection.domain();
    let (mut message, mut spare) = (domain.alloc(size)?, domain.alloc(size)?);
    let mut receive = posted(connection, domain.alloc(size)?)?;
    let mut laps = Laps::start(pace)?.of(parts);
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
pub async fn echo(connection: &Connection, size: usize) -> Result<()> {
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

pub async fn sends(connection: &Connection, size: usize, pace: &Pace) -> Result<Found> {
    rate(pace, WARM_UP, 1e-6, Sends { connection, spare: buffers(connection, size)? }).await
}

pub async fn batched_sends(connection: &Connection, size: usize, pace: &Pace) -> Result<Found> {
    rate(pace, WARM_UP, 1e-6, BatchedSends { connection, spare: buffers(connection, size)? }).await
}

fn buffers(connection: &Connection, size: usize) -> Result<Vec<Buffer>> {
    Ok((0..SENDS).map(|_| connection.domain().alloc(size)).collect::<Result<_, _>>()?)
}

struct Sends<'a> {
    connection: &'a Connection,
    spare: Vec<Buffer>,
}

impl Push for Sends<'_> {
    async fn push(&mut self, messages: u64) -> Result<()> {
        let mut in_flight = VecDeque::<SendOp<Buffer>>::with_capacity(SENDS);
        for _ in 0..messages {
            let buffer = match self.spare.pop() {
                Some(buffer) => buffer,
                None => in_flight.pop_front().expect("either spare or on its way").await?,
            };
            let mut send = self.connection.send(buffer);
            send.try_post()?;
            in_flight.push_back(send);
        }
        for send in in_flight {
            self.spare.push(send.await?);
        }
        Ok(())
    }
}

struct BatchedSends<'a> {
    connection: &'a Connection,
    spare: Vec<Buffer>,
}

impl Push for BatchedSends<'_> {
    /// One half is on its way while the other is posted.
    async fn push(&mut self, messages: u64) -> Result<()> {
        let mut in_flight = VecDeque::<SendOp<Buffer>>::with_capacity(SENDS);
        let mut left = messages as usize;
        while left > 0 {
            let count = left.min(SENDS / 2);
            while self.spare.len() < count {
                self.spare.push(in_flight.pop_front().expect("either spare or on its way").await?);
            }
            let mut batch = self.connection.batch();
            in_flight.extend(self.spare.drain(..count).map(|buffer| batch.send(buffer)));
            batch.post().await?;
            left -= count;
        }
        for send in in_flight {
            self.spare.push(send.await?);
        }
        Ok(())
    }
}

/// Receives until the client goes.
pub async fn take(connection: &Connection, size: usize) -> Result<()> {
    let post = || posted(connection, connection.domain().alloc(size)?);
    let mut receives = (0..RECEIVES).map(|_| post()).collect::<Result<VecDeque<ReceiveOp<Buffer>>>>()?;
    while let Some(receive) = receives.pop_front() {
        let Some(received) = until_closed(receive.await)? else { break };
        ensure!(received.len == size, "{} bytes came instead of {size}", received.len);
        receives.push_back(posted(connection, received.buffer)?);
    }
    Ok(())
}
