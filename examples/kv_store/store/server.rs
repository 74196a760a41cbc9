//! The server: applies PUTs and DELETEs, which come as messages. Of GETs it hears nothing.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_rdma::op::ReceiveOp;
use tokio_rdma::{Address, Buffer, CloseReason, Connection, Error, IntoAddress, Listener, ProtectionDomain};

use super::wire::{ANSWER, Answer, Call, Outcome, Request, decode, encode, longest_request};
use super::{StoreError, Table};

/// Requests of one client that find a place while an answer is on its way.
const DEPTH: usize = 4;

/// A listening server.
pub struct Server {
    listener: Listener,
    table: Arc<Table>,
    limit: Duration,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    connections: AtomicU64,
    puts: AtomicU64,
    deletes: AtomicU64,
    failed: AtomicU64,
}

/// What a server did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    pub connections: u64,
    pub puts: u64,
    pub deletes: u64,
    /// Connections that ended otherwise than by their client's wish.
    pub failed: u64,
}

impl Server {
    /// Listens. A client that does not take its answer within `limit` is given up.
    pub async fn bind(
        domain: &ProtectionDomain,
        table: Arc<Table>,
        address: impl IntoAddress,
        limit: Duration,
    ) -> Result<Self, StoreError> {
        let greeting = table.shape().to_bytes(&table.remote());
        let listener = Listener::builder(domain).connections(|connection| connection.private_data(greeting));
        Ok(Self { listener: listener.bind(address).await?, table, limit, counts: Arc::default() })
    }

    pub fn address(&self) -> &Address {
        self.listener.local_address()
    }

    /// Serves until `stop` resolves; then every connection is closed.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<Served, StoreError> {
        let mut clients = JoinSet::new();
        tokio::pin!(stop);
        loop {
            let connection = tokio::select! {
                connection = self.listener.accept() => connection?,
                Some(_) = clients.join_next() => continue,
                () = &mut stop => break,
            };
            self.counts.connections.fetch_add(1, Relaxed);
            let (table, counts, limit) = (self.table.clone(), self.counts.clone(), self.limit);
            clients.spawn(async move {
                // One client's failure is none of the others' business.
                if let Err(error) = client(&connection, &table, &counts, limit).await {
                    counts.failed.fetch_add(1, Relaxed);
                    tracing::debug!(peer = connection.peer(), %error, "a client is given up");
                }
                connection.close().await;
            });
        }
        clients.shutdown().await;
        let Counts { connections, puts, deletes, failed } = &*self.counts;
        let [connections, puts, deletes, failed] =
            [connections, puts, deletes, failed].map(|count| count.load(Relaxed));
        Ok(Served { connections, puts, deletes, failed })
    }
}

/// Answers one client, until it closes.
async fn client(connection: &Connection, table: &Table, counts: &Counts, limit: Duration) -> Result<(), StoreError> {
    let domain = connection.domain();
    let mut requests = VecDeque::with_capacity(DEPTH);
    for _ in 0..DEPTH {
        requests.push_back(posted(connection, domain.alloc(longest_request(table.shape()))?)?);
    }
    let mut place = domain.alloc(ANSWER)?;
    while let Some(request) = requests.pop_front() {
        let received = match request.await {
            Ok(received) => received,
            Err(error) if matches!(error.error(), Error::Closed { reason: CloseReason::Peer, .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let request: Request<'_> = decode("request", received.message())?;
        let outcome = apply(table, counts, &request.call);
        let len = encode(&Answer { number: request.number, outcome }, &mut place)?;
        requests.push_back(posted(connection, received.buffer)?);

        let rest = place.split_off(len)?;
        let sent = connection.send(place).timeout(limit).await?;
        place = joined(sent, rest)?;
    }
    Ok(())
}

fn apply(table: &Table, counts: &Counts, call: &Call<'_>) -> Outcome {
    let outcome = match call {
        Call::Put { key, value } => {
            counts.puts.fetch_add(1, Relaxed);
            table.put(key, value).map(|version| Outcome::Stored { version })
        }
        Call::Delete { key } => {
            counts.deletes.fetch_add(1, Relaxed);
            table.delete(key).map(|existed| Outcome::Deleted { existed })
        }
    };
    outcome.unwrap_or_else(Outcome::of_error)
}

/// A receive that is in place when this returns.
pub fn posted(connection: &Connection, buffer: Buffer) -> Result<ReceiveOp<Buffer>, StoreError> {
    let mut receive = connection.receive(buffer);
    receive.try_post()?;
    Ok(receive)
}

/// The whole buffer again.
pub fn joined(first: Buffer, rest: Buffer) -> Result<Buffer, StoreError> {
    first.unsplit(rest).map_err(|_| StoreError::Protocol {
        operation: "send",
        reason: "the buffer came back as another one".to_owned(),
    })
}
