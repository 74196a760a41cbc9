//! The client: reads values itself, and asks the server to change them.

use std::time::{Duration, Instant};

use tokio_rdma::op::ReceiveOp;
use tokio_rdma::{Buffer, Connection, IntoAddress, ProtectionDomain, RemoteRegion};

use super::entry::Entry;
use super::wire::{ANSWER, Answer, Call, Outcome, Request, decode, encode, joined, longest_request};
use super::{Shape, StoreError};

/// Reads of a slot that is being written, without a pause in between. Writing it takes microseconds, unless the writer lost its CPU.
const IMPATIENT: u64 = 16;

/// Between further ones.
const PAUSE: Duration = Duration::from_micros(100);

/// A connection to a server of the store. One operation at a time; more run on more connections.
pub struct Client {
    connection: Connection,
    shape: Shape,
    table: RemoteRegion,
    limit: Duration,
    /// What is missing after a timeout is with the device still, and made anew.
    entry: Option<Buffer>,
    request: Option<Buffer>,
    answer: Option<ReceiveOp<Buffer>>,
    number: u64,
    counts: Counts,
}

/// What a client did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub gets: u64,
    /// RDMA Reads for them: one for each slot that was looked at, and again where it was being written.
    pub reads: u64,
    /// Reads that met a writer.
    pub torn: u64,
    /// Messages to the server.
    pub messages: u64,
}

/// A value, and which one it is of this table: a later one has a higher version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found<'a> {
    pub version: u64,
    pub value: &'a [u8],
}

impl Client {
    /// Connects. No message and no Read is waited for longer than `limit`, nor is a slot that somebody writes.
    pub async fn connect(
        domain: &ProtectionDomain,
        address: impl IntoAddress,
        limit: Duration,
    ) -> Result<Self, StoreError> {
        let connection = Connection::builder(domain).setup_timeout(limit).connect(address).await?;
        let (shape, table) = Shape::from_bytes(connection.peer_private_data())?;
        let (entry, request, answer, counts) = (None, None, None, Counts::default());
        Ok(Self { connection, shape, table, limit, entry, request, answer, number: 0, counts })
    }

    /// The value of a key. The server's program takes no part.
    pub async fn get(&mut self, key: &[u8]) -> Result<Option<Found<'_>>, StoreError> {
        self.shape.check("get", key, &[])?;
        self.counts.gets += 1;
        let mut buffer = match self.entry.take() {
            Some(buffer) => buffer,
            None => self.connection.domain().alloc(self.shape.slot_len())?,
        };
        let mut found = None;
        for slot in self.shape.sequence(key) {
            let entry;
            (entry, buffer) = self.read(slot, buffer).await?;
            match entry {
                Entry::Present { version, key: place, value } if buffer[place.clone()] == *key => {
                    found = Some((version, value));
                    break;
                }
                Entry::Empty => break,
                Entry::Present { .. } | Entry::Deleted | Entry::Torn => {}
            }
        }
        let buffer = self.entry.insert(buffer);
        Ok(found.map(|(version, place)| Found { version, value: &buffer[place] }))
    }

    /// Sets the value of a key, and returns its version.
    pub async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<u64, StoreError> {
        self.shape.check("put", key, value)?;
        match self.call("put", Call::Put { key, value }).await? {
            Outcome::Stored { version } => Ok(version),
            other => unexpected("put", other),
        }
    }

    /// Takes a key out. Returns whether it was there.
    pub async fn delete(&mut self, key: &[u8]) -> Result<bool, StoreError> {
        self.shape.check("delete", key, &[])?;
        match self.call("delete", Call::Delete { key }).await? {
            Outcome::Deleted { existed } => Ok(existed),
            other => unexpected("delete", other),
        }
    }

    pub async fn close(self) {
        self.connection.close().await;
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// One slot, whole.
    async fn read(&mut self, slot: u32, mut buffer: Buffer) -> Result<(Entry, Buffer), StoreError> {
        let start = self.shape.offset(slot);
        let remote = self.table.slice(start..start + self.shape.slot_len() as u64)?;
        let since = Instant::now();
        let mut reads = 0;
        loop {
            buffer = self.connection.read(buffer, &remote).timeout(self.limit).await?;
            reads += 1;
            self.counts.reads += 1;
            let entry = Entry::decode(&buffer);
            if entry != Entry::Torn {
                return Ok((entry, buffer));
            }
            self.counts.torn += 1;
            if reads < IMPATIENT {
                tokio::task::yield_now().await;
            } else if since.elapsed() < self.limit {
                tokio::time::sleep(PAUSE).await;
            } else {
                self.entry = Some(buffer);
                return Err(StoreError::Contended { reads, after: self.limit });
            }
        }
    }

    /// A request, and its answer.
    async fn call(&mut self, operation: &'static str, call: Call<'_>) -> Result<Outcome, StoreError> {
        let domain = self.connection.domain();
        let mut request = match self.request.take() {
            Some(request) => request,
            None => domain.alloc(longest_request(self.shape))?,
        };
        if self.answer.is_none() {
            self.answer = Some(posted(&self.connection, domain.alloc(ANSWER)?)?);
        }
        self.number += 1;
        self.counts.messages += 1;
        let len = encode(&Request { number: self.number, call }, &mut request)?;
        let rest = request.split_off(len)?;
        let exchange = async {
            let sent = self.connection.send(request).await?;
            self.request = Some(joined(sent, rest)?);
            loop {
                let Some(receive) = &mut self.answer else {
                    let reason = "no receive is posted for the answer".to_owned();
                    return Err(StoreError::Protocol { operation, reason });
                };
                // By reference: given up, it stays posted.
                let received = receive.await;
                self.answer = None;
                let received = received?;
                let answer: Answer = decode(operation, received.message())?;
                self.answer = Some(posted(&self.connection, received.buffer)?);
                // An older one is of a request that was given up.
                if answer.number == self.number {
                    return Ok(answer.outcome);
                }
            }
        };
        match tokio::time::timeout(self.limit, exchange).await {
            Ok(outcome) => outcome,
            Err(_) => Err(StoreError::NoAnswer { operation, after: self.limit }),
        }
    }
}

/// A receive that is in place when this returns.
fn posted(connection: &Connection, buffer: Buffer) -> Result<ReceiveOp<Buffer>, StoreError> {
    let mut receive = connection.receive(buffer);
    receive.try_post()?;
    Ok(receive)
}

fn unexpected<T>(operation: &'static str, outcome: Outcome) -> Result<T, StoreError> {
    Err(match outcome {
        Outcome::Full { value, limit } => StoreError::Full { value, limit },
        Outcome::Refused { why } => StoreError::Protocol { operation, reason: format!("the server refuses it: {why}") },
        other => StoreError::Protocol { operation, reason: format!("the server answers {other:?}") },
    })
}
