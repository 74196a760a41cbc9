//! Listeners.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use crate::address::{Address, IntoAddress};
use crate::connection::builder::{Prepared, within};
use crate::connection::{Connection, ConnectionBuilder, hello};
use crate::error::{CloseReason, Error, Result};
use crate::memory::ProtectionDomain;
use crate::provider::{Acceptor, Incoming};
use crate::srq::SharedReceiveQueue;

/// Handshakes that may be under way, and connections that may wait to be accepted: a flood of clients costs no more than this.
const BACKLOG: usize = 128;

/// How long to pause when the system cannot accept (out of descriptors, say), so that trying again does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Waits for peers to connect.
///
/// Handshakes run in the background, each on its own, so that a client that is slow or hostile holds nobody up. Dropping the listener
/// stops listening and drops the handshakes under way, as soon as the runtime gets to it; accepted connections live on.
pub struct Listener {
    address: Address,
    domain: ProtectionDomain,
    ready: Mutex<mpsc::Receiver<Connection>>,
    failed: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Listener {
    /// Listens at an address with the default settings; see [`Listener::builder`] for others. Port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] naming the address, for example when it is in use.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time enabled.
    pub async fn bind(domain: &ProtectionDomain, address: impl IntoAddress) -> Result<Self> {
        Self::builder(domain).bind(address).await
    }

    /// Settings for a listener whose connections belong to this protection domain.
    pub fn builder(domain: &ProtectionDomain) -> ListenerBuilder {
        ListenerBuilder { connections: Connection::builder(domain) }
    }

    /// The next connection. Handshakes that fail are logged and counted ([`failed_handshakes`](Self::failed_handshakes)), not returned:
    /// a client that gives up is no failure of the server.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the runtime that [`bind`](Self::bind) was called in is gone.
    ///
    /// # Cancel safety
    ///
    /// No connection is lost when the future is dropped.
    pub async fn accept(&self) -> Result<Connection> {
        self.ready.lock().await.recv().await.ok_or_else(runtime_gone)
    }

    /// As [`accept`](Self::accept), for who has the listener alone.
    pub(super) fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Result<Connection>> {
        self.ready.get_mut().poll_recv(cx).map(|accepted| accepted.ok_or_else(runtime_gone))
    }

    /// Where it listens, with the real port.
    pub fn local_address(&self) -> &Address {
        &self.address
    }

    /// The protection domain of its connections.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Handshakes that did not lead to a connection so far.
    pub fn failed_handshakes(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

fn runtime_gone() -> Error {
    Error::Closed { operation: "accept", reason: CloseReason::RuntimeGone }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Settings of a listener.
#[derive(Clone, Debug)]
pub struct ListenerBuilder {
    connections: ConnectionBuilder,
}

impl ListenerBuilder {
    /// The settings that every accepted connection gets.
    #[must_use]
    pub fn connections(mut self, settings: impl FnOnce(ConnectionBuilder) -> ConnectionBuilder) -> Self {
        self.connections = settings(self.connections);
        self
    }

    /// Has every accepted connection take its receives from this queue; see [`ConnectionBuilder::srq`].
    #[must_use]
    pub fn srq(self, srq: &SharedReceiveQueue) -> Self {
        self.connections(|settings| settings.srq(srq))
    }

    /// Starts listening. See [`Listener::bind`].
    pub async fn bind(self, address: impl IntoAddress) -> Result<Listener> {
        let address = address.into_address()?;
        let prepared = self.connections.prepare("listen")?;
        let domain = prepared.domain.clone();
        let acceptor = prepared.device.context().listen(&address).await?;
        let address = acceptor.local_address().clone();
        tracing::debug!(%address, "listening");
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let failed = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn(run(acceptor, prepared, self.connections.setup(), sender, failed.clone()));
        Ok(Listener { address, domain, ready: Mutex::new(receiver), failed, task })
    }
}

async fn run(
    acceptor: Acceptor,
    prepared: Prepared,
    timeout: Duration,
    ready: mpsc::Sender<Connection>,
    failed: Arc<AtomicU64>,
) {
    let slots = Arc::new(Semaphore::new(BACKLOG));
    let mut handshakes = JoinSet::new();
    loop {
        // Finished tasks are collected here and there, so that their memory does not pile up.
        while handshakes.try_join_next().is_some() {}
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        match acceptor.accept().await {
            Ok(incoming) => {
                handshakes.spawn(handshake(incoming, prepared.clone(), timeout, ready.clone(), failed.clone(), slot));
            }
            Err(error) => {
                tracing::warn!(address = %acceptor.local_address(), %error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One client's handshake, from the first byte to the queue of ready connections.
async fn handshake(
    incoming: Incoming,
    prepared: Prepared,
    timeout: Duration,
    ready: mpsc::Sender<Connection>,
    failed: Arc<AtomicU64>,
    slot: OwnedSemaphorePermit,
) {
    let peer = incoming.peer();
    match answer(incoming, prepared, timeout).await {
        // The slot is held until there is room, so that connections nobody accepts stop new handshakes.
        Ok(connection) => drop(ready.send(connection).await),
        Err(error) => {
            failed.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%peer, %error, "handshake failed");
        }
    }
    drop(slot);
}

async fn answer(incoming: Incoming, prepared: Prepared, timeout: Duration) -> Result<Connection> {
    let room = prepared.reserve()?;
    let queue = room.queue().clone();
    let peer = incoming.peer();
    let reply = |theirs: &[u8]| hello::decode(theirs).map(|_| prepared.hello.clone());
    let accepting = incoming.accept(prepared.domain.provider(), queue.device(), &prepared.config, reply);
    let connected = within(timeout, "accept", &peer, accepting).await?;
    prepared.establish(room, connected)
}
