//! The near end: each operation, one function each.

use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use tokio_rdma::op::{CompareSwapOp, FetchAddOp, ReadOp, SendOp, WriteOp};
use tokio_rdma::{Address, Buffer, BufferPool, Connection, RemoteRegion, SgList, SharedBuffer};

use crate::Options;
use crate::common::child::within;
use crate::measure::{Times, pipelined};
use crate::table::{Row, Table};
use crate::wire::{ATOMIC, CHUNK, Inbox, MAX_TARGET, Report, Request, Sum, Welcome, add};

/// Operations of each kind, and their length.
const COUNT: usize = 1000;
const LEN: usize = 4096;

/// Members of a batch, and batches.
const BATCH: usize = 16;
const BATCHES: usize = COUNT / BATCH;

/// Operations in flight when a file is moved.
const WINDOW: usize = 16;

/// The file to move, in memory.
pub struct File {
    name: String,
    bytes: Vec<u8>,
    sum: Sum,
}

/// Reads the file to move; without a path, this program's own executable.
pub fn load(path: Option<&Path>) -> Result<File> {
    let (name, path) = match path {
        Some(path) => (path.display().to_string(), path.to_owned()),
        None => ("this program".to_owned(), std::env::current_exe().context("find this program's own path")?),
    };
    let read = || -> Result<Vec<u8>> {
        // Asked before it is opened: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(&path)?;
        ensure!(metadata.is_file(), "not a regular file");
        let len = metadata.len();
        ensure!(len <= MAX_TARGET, "{len} bytes; the longest file that a quickstart server takes has {MAX_TARGET}");
        let mut bytes = Vec::with_capacity(len as usize);
        // It may grow meanwhile.
        std::fs::File::open(&path)?.take(MAX_TARGET).read_to_end(&mut bytes)?;
        ensure!(!bytes.is_empty(), "the file is empty, there is nothing to move");
        Ok(bytes)
    };
    let bytes = read().with_context(|| format!("read {name}"))?;
    let sum = Sha256::digest(&bytes).into();
    Ok(File { name, bytes, sum })
}

/// Connects, runs every step, and prints the table. Fails at the first thing that is not as it should be.
pub async fn run(options: &Options, address: Address, file: File) -> Result<()> {
    let device = options.open_device()?;
    let pd = device.alloc_pd()?;
    let limit = options.limit();
    let connecting = Connection::builder(&pd).setup_timeout(limit).connect(&address);
    let connection = connecting.await.with_context(|| format!("no connection to {address}"))?;

    let mut table = Table::new(&connection, limit);
    let len = file.bytes.len();
    let room = len.max(COUNT * LEN) as u64;
    let mut client = within(limit, "setup", Client::new(&connection, room, limit)).await?;
    let shared = pd.register(file.bytes)?.freeze();

    table.step("send", client.send()).await?;
    table.step("send with immediate", client.send_with_immediate()).await?;
    table.step("send of 3 SGEs", client.send_gathered()).await?;
    table.step("send, then receive the answer", client.send_and_receive()).await?;
    table.step("write", client.write()).await?;
    table.step("read", client.read()).await?;
    table.step("write with immediate", client.write_with_immediate()).await?;
    table.step("read into 3 SGEs", client.read_scattered()).await?;
    table.step("batch of 15 unsignaled writes and 1 write", client.batch()).await?;
    table.step("compare-and-swap", client.compare_swap()).await?;
    table.step("fetch-and-add", client.fetch_add()).await?;
    table.step("file by send", client.file_by_send(&shared, file.sum)).await?;
    table.step("file by write", client.file_by_write(&shared, file.sum)).await?;
    table.step("file by read, back", client.file_by_read(len, file.sum)).await?;

    within(limit, "goodbye", client.ask(Request::Bye)).await?;
    let closing = async {
        connection.close().await;
        Ok(())
    };
    within(limit, "close", closing).await?;
    table.print(&file.name, len, &file.sum)
}

struct Client {
    connection: Connection,
    inbox: Inbox,
    pool: BufferPool,
    target: RemoteRegion,
    counter: RemoteRegion,
    limit: Duration,
}

impl Client {
    /// Gets `room` bytes of memory from the server.
    async fn new(connection: &Connection, room: u64, limit: Duration) -> Result<Self> {
        let pd = connection.domain();
        let pool = BufferPool::new(pd, CHUNK, WINDOW)?;
        let mut inbox = Inbox::new(connection, 4)?;
        connection.send(pd.register(Request::Expose { len: room }.to_bytes())?).await?;
        let received = inbox.next(limit).await?;
        let Welcome { target, counter } = Welcome::from_bytes(received.message())?;
        inbox.post(received.buffer)?;
        ensure!(target.len() >= room, "the server exposed {} bytes instead of {room}", target.len());
        Ok(Self { connection: connection.clone(), inbox, pool, target, counter, limit })
    }

    async fn send(&mut self) -> Result<Row> {
        self.ask(Request::Collect { count: COUNT as u64 }).await?;
        let mut sum = Sha256::new();
        let prepare = |index| {
            let message = self.message("send", index)?;
            add(&mut sum, &message, None);
            Ok(self.connection.send(message))
        };
        let times = pipelined(COUNT, 1, prepare, SendOp::try_post, |_, _| Ok(())).await?;
        self.confirm(sum).await?;
        Ok(Row::new(LEN, COUNT, times))
    }

    async fn send_with_immediate(&mut self) -> Result<Row> {
        self.ask(Request::Collect { count: COUNT as u64 }).await?;
        let mut sum = Sha256::new();
        let prepare = |index| {
            let (message, immediate) = (self.message("send with immediate", index)?, index as u32);
            add(&mut sum, &message, Some(immediate));
            Ok(self.connection.send_with_immediate(message, immediate))
        };
        let times = pipelined(COUNT, 1, prepare, SendOp::try_post, |_, _| Ok(())).await?;
        self.confirm(sum).await?;
        Ok(Row::new(LEN, COUNT, times))
    }

    async fn send_gathered(&mut self) -> Result<Row> {
        self.ask(Request::Collect { count: COUNT as u64 }).await?;
        let mut sum = Sha256::new();
        let prepare = |index| {
            let message = segments(self.message("send of 3 SGEs", index)?)?;
            message.iter().for_each(|segment| sum.update(&segment[..]));
            Ok(self.connection.send(message))
        };
        let times = pipelined(COUNT, 1, prepare, SendOp::try_post, |_, _| Ok(())).await?;
        self.confirm(sum).await?;
        Ok(Row::new(LEN, COUNT, times))
    }

    /// A request and its answer: the round trip.
    async fn send_and_receive(&mut self) -> Result<Row> {
        self.ask(Request::Echo { count: COUNT as u64 }).await?;
        let mut times = Times::new();
        for index in 0..COUNT {
            let message = self.message("receive", index)?;
            let round_trip = async {
                let message = self.connection.send(message).await?;
                anyhow::Ok((message, self.inbox.next(self.limit).await?))
            };
            let (message, answer) = times.time(round_trip).await?;
            ensure!(answer.message() == &message[..], "answer {index} differs from what was sent");
            self.inbox.post(answer.buffer)?;
        }
        Ok(Row::new(LEN, COUNT, times))
    }

    async fn write(&mut self) -> Result<Row> {
        let mut sum = Sha256::new();
        let prepare = |index| {
            let message = self.message("write", index)?;
            sum.update(&message[..]);
            Ok(self.connection.write(message, &self.slot(index)?))
        };
        let times = pipelined(COUNT, 1, prepare, WriteOp::try_post, |_, _| Ok(())).await?;
        self.inspect(COUNT * LEN, sum).await?;
        Ok(Row::new(LEN, COUNT, times))
    }

    /// Reads what [`write`](Self::write) wrote.
    async fn read(&mut self) -> Result<Row> {
        let prepare = |index| Ok(self.connection.read(self.buffer(LEN)?, &self.slot(index)?));
        let check = |index, bytes: Buffer| {
            ensure!(bytes[..] == self.message("write", index)?[..], "read {index} got something else");
            Ok(())
        };
        let times = pipelined(COUNT, 1, prepare, ReadOp::try_post, check).await?;
        Ok(Row::new(LEN, COUNT, times))
    }

    async fn write_with_immediate(&mut self) -> Result<Row> {
        self.ask(Request::Notices { count: COUNT as u64, len: LEN as u64 }).await?;
        let mut sum = Sha256::new();
        let prepare = |index| {
            let (message, immediate) = (self.message("write with immediate", index)?, index as u32);
            add(&mut sum, &message, Some(immediate));
            Ok(self.connection.write_with_immediate(message, &self.slot(index)?, immediate))
        };
        let times = pipelined(COUNT, 1, prepare, WriteOp::try_post, |_, _| Ok(())).await?;
        self.confirm(sum).await?;
        Ok(Row::new(LEN, COUNT, times))
    }

    /// Reads what [`write_with_immediate`](Self::write_with_immediate) wrote.
    async fn read_scattered(&mut self) -> Result<Row> {
        let prepare = |index| Ok(self.connection.read(segments(self.buffer(LEN)?)?, &self.slot(index)?));
        let check = |index, list: SgList| {
            let bytes: Vec<u8> = list.iter().flat_map(|segment| segment.iter().copied()).collect();
            ensure!(bytes == self.message("write with immediate", index)?[..], "read {index} got something else");
            Ok(())
        };
        let times = pipelined(COUNT, 1, prepare, ReadOp::try_post, check).await?;
        Ok(Row::new(LEN, COUNT, times))
    }

    /// One doorbell and one completion for each batch.
    async fn batch(&mut self) -> Result<Row> {
        let (mut times, mut sum) = (Times::new(), Sha256::new());
        for first in (0..BATCHES * BATCH).step_by(BATCH) {
            let mut batch = self.connection.batch();
            let mut members = Vec::with_capacity(BATCH);
            for index in first..first + BATCH {
                let (message, slot) = (self.message("batch", index)?, self.slot(index)?);
                sum.update(&message[..]);
                members.push(if members.len() + 1 < BATCH {
                    batch.write_unsignaled(message, &slot)
                } else {
                    batch.write(message, &slot)
                });
            }
            let carry_out = async {
                batch.post().await?;
                for member in members {
                    member.await?;
                }
                anyhow::Ok(())
            };
            times.time(carry_out).await?;
        }
        self.inspect(BATCHES * BATCH * LEN, sum).await?;
        Ok(Row::new(BATCH * LEN, BATCHES, times))
    }

    /// Counts from 0 to `COUNT`; a swap that expects another value must change nothing.
    async fn compare_swap(&mut self) -> Result<Row> {
        let prepare = |index| Ok(self.connection.compare_swap(&self.counter, index as u64, index as u64 + 1));
        let check = |index, before| {
            ensure!(before == index as u64, "the counter was {before} instead of {index}");
            Ok(())
        };
        let times = pipelined(COUNT, 1, prepare, CompareSwapOp::try_post, check).await?;
        let found = self.connection.compare_swap(&self.counter, 0, u64::MAX).await?;
        ensure!(found == COUNT as u64, "a swap that expects 0 found {found} instead of {COUNT}");
        self.check_counter(COUNT as u64).await?;
        Ok(Row::new(ATOMIC, COUNT, times))
    }

    /// Adds 3 `COUNT` times to what [`compare_swap`](Self::compare_swap) left.
    async fn fetch_add(&mut self) -> Result<Row> {
        let expected = |index: usize| (COUNT + 3 * index) as u64;
        let prepare = |_| Ok(self.connection.fetch_add(&self.counter, 3));
        let check = |index, before| {
            ensure!(before == expected(index), "the counter was {before} instead of {}", expected(index));
            Ok(())
        };
        let times = pipelined(COUNT, 1, prepare, FetchAddOp::try_post, check).await?;
        self.check_counter(expected(COUNT)).await?;
        Ok(Row::new(ATOMIC, COUNT, times))
    }

    /// Messages of 64 KiB; the server sums them up as they come.
    async fn file_by_send(&mut self, file: &SharedBuffer, sum: Sum) -> Result<Row> {
        let chunks = file.len().div_ceil(CHUNK);
        self.ask(Request::Collect { count: chunks as u64 }).await?;
        let prepare = |index| Ok(self.connection.send(file.slice(chunk(index, file.len()))?));
        let times = pipelined(chunks, WINDOW, prepare, SendOp::try_post, |_, _| Ok(())).await?;
        let arrived = self.report().await?.sum;
        ensure!(arrived == sum, "the file arrived with another SHA-256");
        Ok(Row::file(file.len(), times))
    }

    async fn file_by_write(&mut self, file: &SharedBuffer, sum: Sum) -> Result<Row> {
        let len = file.len();
        let prepare = |index| {
            let range = chunk(index, len);
            Ok(self.connection.write(file.slice(range.clone())?, &self.place(range)?))
        };
        let times = pipelined(len.div_ceil(CHUNK), WINDOW, prepare, WriteOp::try_post, |_, _| Ok(())).await?;
        self.ask(Request::Inspect { len: len as u64 }).await?;
        let arrived = self.report().await?.sum;
        ensure!(arrived == sum, "the file arrived with another SHA-256");
        Ok(Row::file(len, times))
    }

    /// Fetches what [`file_by_write`](Self::file_by_write) left at the server: here this side is the far end.
    async fn file_by_read(&mut self, len: usize, sum: Sum) -> Result<Row> {
        let mut arrived = Sha256::new();
        let prepare = |index| {
            let range = chunk(index, len);
            Ok(self.connection.read(self.buffer(range.len())?, &self.place(range)?))
        };
        let add = |_, bytes: Buffer| {
            arrived.update(&bytes[..]);
            Ok(())
        };
        let times = pipelined(len.div_ceil(CHUNK), WINDOW, prepare, ReadOp::try_post, add).await?;
        ensure!(Sum::from(arrived.finalize()) == sum, "the file came back with another SHA-256");
        Ok(Row::file(len, times))
    }

    async fn ask(&self, request: Request) -> Result<()> {
        self.connection.send(self.connection.domain().register(request.to_bytes())?).await?;
        Ok(())
    }

    async fn report(&mut self) -> Result<Report> {
        let received = self.inbox.next(self.limit).await?;
        let report = Report::from_bytes(received.message())?;
        self.inbox.post(received.buffer)?;
        Ok(report)
    }

    /// Compares what the server received with what was sent.
    async fn confirm(&mut self, sent: Sha256) -> Result<()> {
        ensure!(self.report().await?.sum == Sum::from(sent.finalize()), "the server got other bytes than were sent");
        Ok(())
    }

    /// Compares the first `len` bytes of the server's memory with what was written.
    async fn inspect(&mut self, len: usize, written: Sha256) -> Result<()> {
        self.ask(Request::Inspect { len: len as u64 }).await?;
        self.confirm(written).await
    }

    async fn check_counter(&mut self, expected: u64) -> Result<()> {
        self.ask(Request::Inspect { len: 0 }).await?;
        let counter = self.report().await?.counter;
        ensure!(counter == expected, "the counter at the server is {counter} instead of {expected}");
        Ok(())
    }

    /// The message with this number in a step. No two are alike.
    fn message(&self, step: &str, index: usize) -> Result<Buffer> {
        let mut message = self.buffer(LEN)?;
        let seed = Sha256::digest(format!("{step} {index}"));
        message.chunks_mut(seed.len()).zip(0u8..).for_each(|(block, number)| {
            block.copy_from_slice(&seed[..block.len()]);
            block[0] = block[0].wrapping_add(number);
        });
        Ok(message)
    }

    fn buffer(&self, len: usize) -> Result<Buffer> {
        let mut whole = self.pool.try_get().context("the pool has no buffer left")?;
        // The rest comes back to the pool together with this part.
        Ok(whole.split_to(len)?)
    }

    fn slot(&self, index: usize) -> Result<RemoteRegion> {
        self.place(index * LEN..(index + 1) * LEN)
    }

    fn place(&self, range: Range<usize>) -> Result<RemoteRegion> {
        Ok(self.target.slice(range.start as u64..range.end as u64)?)
    }
}

/// Three segments that are not in the order of their addresses, so that only a real list keeps them apart.
fn segments(mut buffer: Buffer) -> Result<SgList> {
    let first = buffer.split_to(1000)?;
    let second = buffer.split_to(24)?;
    Ok(SgList::new().with(buffer).with(first).with(second))
}

/// Where a piece of a file is.
fn chunk(index: usize, len: usize) -> Range<usize> {
    let start = index * CHUNK;
    start..len.min(start + CHUNK)
}
