//! Operations on their way.

use anyhow::{Result, ensure};
use tokio_rdma::op::{CompareSwapOp, FetchAddOp, ReadOp, ReceiveOp, SendOp, WriteOp};
use tokio_rdma::{Connection, RemoteRegion, SourceBuffer, TargetBuffer};

use crate::plan::{Operation, Row, WORD};

/// What an operation works with, and gets back.
pub struct Slot<B> {
    pub index: usize,
    pub buffer: B,
    /// For the answer of a round trip.
    pub answer: Option<B>,
}

/// A posted operation. Those of one connection complete in the order of posting.
pub enum Flight<B: SourceBuffer + TargetBuffer> {
    RoundTrip { index: usize, send: SendOp<B>, receive: ReceiveOp<B> },
    Send { index: usize, send: SendOp<B> },
    Write { index: usize, write: WriteOp<B> },
    Read { index: usize, read: ReadOp<B> },
    FetchAdd { slot: Slot<B>, expected: u64, add: FetchAddOp },
    CompareSwap { slot: Slot<B>, expected: u64, swap: CompareSwapOp },
}

/// Makes a row's operations.
pub struct Maker<'a> {
    pub connection: &'a Connection,
    pub row: Row,
    /// The server's memory, where the operation is one-sided.
    pub region: Option<RemoteRegion>,
    /// Atomics so far.
    pub counted: u64,
}

impl Maker<'_> {
    /// Posts the next operation.
    pub fn post<B: SourceBuffer + TargetBuffer>(&mut self, slot: Slot<B>) -> Result<Flight<B>> {
        let Slot { index, buffer, answer } = slot;
        let connection = self.connection;
        // What cannot be posted right away is when it is awaited, or then says why not.
        Ok(match self.row.operation {
            Operation::RoundTrip => {
                let Some(answer) = answer else { anyhow::bail!("a round trip without a place for its answer") };
                let (mut receive, mut send) = (connection.receive(answer), connection.send(buffer));
                let _ = (receive.try_post(), send.try_post());
                Flight::RoundTrip { index, send, receive }
            }
            Operation::Send => {
                let mut send = connection.send(buffer);
                let _ = send.try_post();
                Flight::Send { index, send }
            }
            Operation::SendImm => {
                let mut send = connection.send_with_immediate(buffer, index as u32);
                let _ = send.try_post();
                Flight::Send { index, send }
            }
            Operation::Write => {
                let mut write = connection.write(buffer, &self.target(index)?);
                let _ = write.try_post();
                Flight::Write { index, write }
            }
            Operation::WriteImm => {
                let mut write = connection.write_with_immediate(buffer, &self.target(index)?, index as u32);
                let _ = write.try_post();
                Flight::Write { index, write }
            }
            Operation::Read => {
                let mut read = connection.read(buffer, &self.target(index)?);
                let _ = read.try_post();
                Flight::Read { index, read }
            }
            Operation::FetchAdd => {
                let mut add = connection.fetch_add(&self.target(0)?, 1);
                let _ = add.try_post();
                Flight::FetchAdd { slot: Slot { index, buffer, answer }, expected: self.next(), add }
            }
            Operation::CompareSwap => {
                let expected = self.next();
                let mut swap = connection.compare_swap(&self.target(0)?, expected, expected + 1);
                let _ = swap.try_post();
                Flight::CompareSwap { slot: Slot { index, buffer, answer }, expected, swap }
            }
        })
    }

    fn next(&mut self) -> u64 {
        self.counted += 1;
        self.counted - 1
    }

    fn target(&self, index: usize) -> Result<RemoteRegion> {
        let Some(region) = self.region else { anyhow::bail!("the server exposed no memory") };
        let start = (index * self.row.stride()) as u64;
        let len = if self.row.operation.is_atomic() { WORD } else { self.row.size };
        Ok(region.slice(start..start + len as u64)?)
    }
}

impl<B: SourceBuffer + TargetBuffer> Flight<B>
where
    anyhow::Error: From<tokio_rdma::op::OpError<B>>,
{
    /// Waits for the end. What an atomic found is always checked, since that costs nothing.
    pub async fn land(self) -> Result<Slot<B>> {
        let slot = |index, buffer| Slot { index, buffer, answer: None };
        Ok(match self {
            Self::RoundTrip { index, send, receive } => {
                let (buffer, received) = tokio::join!(send, receive);
                Slot { index, buffer: buffer?, answer: Some(received?.buffer) }
            }
            Self::Send { index, send } => slot(index, send.await?),
            Self::Write { index, write } => slot(index, write.await?),
            Self::Read { index, read } => slot(index, read.await?),
            Self::FetchAdd { slot, expected, add } => {
                let found = add.await?;
                ensure!(found == expected, "the counter was {found} instead of {expected}");
                slot
            }
            Self::CompareSwap { slot, expected, swap } => {
                let found = swap.await?;
                ensure!(found == expected, "the counter was {found} instead of {expected}");
                slot
            }
        })
    }
}
