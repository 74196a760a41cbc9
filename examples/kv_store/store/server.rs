//! The server: applies PUTs and DELETEs, which come as messages. Of GETs it hears nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures::StreamExt;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_rdma::{Address, Connection, IntoAddress, Listener, ProtectionDomain};

use super::wire::{ANSWER, Answer, Call, Outcome, Request, decode, encode, joined, longest_request};
use super::{StoreError, Table};

/// How many clients are served at a time where nobody says otherwise.
pub const MOST_CLIENTS: usize = 256;

/// Receives for the requests of one client: one is answered, the others find a place meanwhile.
const DEPTH: usize = 4;

/// A listening server.
pub struct Server {
    listener: Listener,
    table: Arc<Table>,
    limit: Duration,
    most_clients: usize,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    connections: AtomicU64,
    messages: AtomicU64,
    puts: AtomicU64,
    deletes: AtomicU64,
    failed: AtomicU64,
}

/// What a server did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    pub connections: u64,
    /// Received.
    pub messages: u64,
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
        let listener = listener.bind(address).await?;
        Ok(Self { listener, table, limit, most_clients: MOST_CLIENTS, counts: Arc::default() })
    }

    /// Serves so many clients at a time instead of [`MOST_CLIENTS`]. Each has memory for four requests; further ones wait.
    pub fn most_clients(mut self, most_clients: usize) -> Self {
        self.most_clients = most_clients;
        self
    }

    pub fn address(&self) -> &Address {
        self.listener.local_address()
    }

    /// Serves until `stop` resolves; then every connection is closed.
    pub async fn serve(self, stop: impl Future<Output = ()>) -> Result<Served, StoreError> {
        let mut clients = JoinSet::new();
        let places = Arc::new(Semaphore::new(self.most_clients));
        tokio::pin!(stop);
        loop {
            let next = async {
                let place = places.clone().acquire_owned().await.expect("nobody closes it");
                Ok::<_, StoreError>((self.listener.accept().await?, place))
            };
            let (connection, place) = tokio::select! {
                next = next => next?,
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
                drop(place);
            });
        }
        clients.shutdown().await;
        let Counts { connections, messages, puts, deletes, failed } = &*self.counts;
        let [connections, messages, puts, deletes, failed] =
            [connections, messages, puts, deletes, failed].map(|count| count.load(Relaxed));
        Ok(Served { connections, messages, puts, deletes, failed })
    }
}

/// Answers one client, until it closes.
async fn client(connection: &Connection, table: &Table, counts: &Counts, limit: Duration) -> Result<(), StoreError> {
    let mut requests = connection.receiver(DEPTH, longest_request(table.shape()))?;
    let mut place = connection.domain().alloc(ANSWER)?;
    while let Some(message) = requests.next().await {
        let message = message?;
        counts.messages.fetch_add(1, Relaxed);
        let request: Request<'_> = decode("request", &message)?;
        let outcome = apply(table, counts, &request.call);
        let len = encode(&Answer { number: request.number, outcome }, &mut place)?;
        // Back to the receiver, which posts it when it is asked for the next one.
        drop(message);

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
