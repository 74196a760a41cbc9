//! Listeners.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::address::{Address, IntoAddress};
use crate::connection::builder::{Prepared, within};
use crate::connection::open::OpenConnections;
use crate::connection::psk::Role;
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
/// Handshakes run in the background, each on its own, so that a client that is slow holds nobody up; 128 of them at a time, and each for at most
/// [`setup_timeout`](ConnectionBuilder::setup_timeout), so that a crowd of such clients does. Dropping the listener
/// stops listening and drops the handshakes under way, as soon as the runtime gets to it; accepted connections live on.
/// To end a service in good order, see [`shutdown`](Self::shutdown).
pub struct Listener {
    address: Address,
    domain: ProtectionDomain,
    ready: Mutex<mpsc::Receiver<Connection>>,
    pub(super) shared: Arc<Shared>,
    pub(super) task: JoinHandle<()>,
}

/// What a listener and its task share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    failed: AtomicU64,
    /// No more clients are let in.
    pub(super) stopped: watch::Sender<bool>,
    pub(super) open: OpenConnections,
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
        ListenerBuilder { connections: Connection::builder(domain), domain_per_connection: false }
    }

    /// The next connection. Handshakes that fail are logged and counted ([`failed_handshakes`](Self::failed_handshakes)), not returned:
    /// a client that gives up is no failure of the server.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the runtime that [`bind`](Self::bind) was called in is gone, or after [`stop`](Self::stop) when nobody is left
    /// ([`CloseReason::Local`]).
    ///
    /// # Cancel safety
    ///
    /// No connection is lost when the future is dropped.
    pub async fn accept(&self) -> Result<Connection> {
        self.ready.lock().await.recv().await.ok_or_else(|| self.shared.no_more())
    }

    /// As [`accept`](Self::accept), for who has the listener alone.
    pub(super) fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Result<Connection>> {
        self.ready.get_mut().poll_recv(cx).map(|accepted| accepted.ok_or_else(|| self.shared.no_more()))
    }

    /// Where it listens, with the real port.
    pub fn local_address(&self) -> &Address {
        &self.address
    }

    /// The protection domain of its connections, unless each has one of its own
    /// ([`domain_per_connection`](ListenerBuilder::domain_per_connection)): [`Connection::domain`] tells that.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Handshakes that did not lead to a connection so far.
    pub fn failed_handshakes(&self) -> u64 {
        self.shared.failed.load(Ordering::Relaxed)
    }

    /// Connections of this listener that have not ended, those that wait to be accepted included.
    pub fn open_connections(&self) -> usize {
        self.shared.open.count()
    }
}

impl Shared {
    fn no_more(&self) -> Error {
        let reason = if *self.stopped.borrow() { CloseReason::Local } else { CloseReason::RuntimeGone };
        Error::Closed { operation: "accept", reason }
    }
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
    domain_per_connection: bool,
}

impl ListenerBuilder {
    /// The settings that every accepted connection gets.
    #[must_use]
    pub fn connections(mut self, settings: impl FnOnce(ConnectionBuilder) -> ConnectionBuilder) -> Self {
        self.connections = settings(self.connections);
        self
    }

    /// Gives each accepted connection a protection domain of its own, on the same device: [`Connection::domain`]. A key that one peer
    /// was given is worthless to all others then, whoever it was passed on to. Default: no, so that buffers and pools can be shared.
    ///
    /// Buffers for such a connection have to come from its own domain; one of another domain is refused
    /// ([`Error::ForeignBuffer`]). Registrations are not shared either: what many peers are to read is registered once for each. A device has
    /// a limited number of domains (`max_pd` of `ibv_query_device(3)`).
    ///
    /// ```
    /// use tokio_rdma::{Access, Connection, Device, Listener};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tokio_rdma::Result<()> {
    /// let domain = Device::open("soft0")?.alloc_pd()?;
    /// let listener = Listener::builder(&domain).domain_per_connection(true).bind("127.0.0.1:0").await?;
    /// let connecting = Connection::connect(&domain, listener.local_address());
    /// let (client, server) = tokio::try_join!(connecting, listener.accept())?;
    ///
    /// let lent = server.domain().alloc(64)?.expose(Access::REMOTE_WRITE)?; // opens to this client alone
    /// client.write(domain.alloc(64)?, &lent.remote()).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn domain_per_connection(mut self, each: bool) -> Self {
        self.domain_per_connection = each;
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
        if self.domain_per_connection && prepared.srq.is_some() {
            return Err(Error::Invalid {
                operation: "listen",
                reason: "a shared receive queue belongs to one protection domain, and each connection is to have its own; leave \
                         one of the two out"
                    .to_owned(),
            });
        }
        let domain = prepared.domain.clone();
        let acceptor = prepared.device.context().listen(&address).await?;
        let address = acceptor.local_address().clone();
        tracing::debug!(%address, "listening");
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let shared = Arc::<Shared>::default();
        let answering = Answering {
            prepared,
            domain_per_connection: self.domain_per_connection,
            timeout: self.connections.setup(),
            shared: shared.clone(),
        };
        let task = tokio::spawn(run(acceptor, answering, sender));
        Ok(Listener { address, domain, ready: Mutex::new(receiver), shared, task })
    }
}

/// What each handshake needs.
#[derive(Clone)]
struct Answering {
    prepared: Prepared,
    domain_per_connection: bool,
    timeout: Duration,
    shared: Arc<Shared>,
}

async fn run(acceptor: Acceptor, answering: Answering, ready: mpsc::Sender<Connection>) {
    let mut handshakes = JoinSet::new();
    let mut stopped = answering.shared.stopped.subscribe();
    tokio::select! {
        // Ends with the acceptor, so that the address is free.
        () = let_in(acceptor, &answering, &ready, &mut handshakes) => {}
        _ = stopped.wait_for(|stopped| *stopped) => {}
    }
    drop(ready);
    while handshakes.join_next().await.is_some() {}
}

async fn let_in(
    acceptor: Acceptor,
    answering: &Answering,
    ready: &mpsc::Sender<Connection>,
    handshakes: &mut JoinSet<()>,
) {
    let slots = Arc::new(Semaphore::new(BACKLOG));
    loop {
        // Finished tasks are collected here and there, so that their memory does not pile up.
        while handshakes.try_join_next().is_some() {}
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        match acceptor.accept().await {
            Ok(incoming) => {
                handshakes.spawn(handshake(incoming, answering.clone(), ready.clone(), slot));
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
    answering: Answering,
    ready: mpsc::Sender<Connection>,
    slot: OwnedSemaphorePermit,
) {
    let peer = incoming.peer();
    match answering.answer(incoming).await {
        // The slot is held until there is room, so that connections nobody accepts stop new handshakes.
        Ok(connection) => drop(ready.send(connection).await),
        Err(error) => {
            answering.shared.failed.fetch_add(1, Ordering::Relaxed);
            answering.prepared.device.meters().handshake_failed();
            tracing::warn!(%peer, %error, "handshake failed");
        }
    }
    drop(slot);
}

impl Answering {
    async fn answer(&self, incoming: Incoming) -> Result<Connection> {
        let mut prepared = self.prepared.clone();
        if self.domain_per_connection {
            prepared.domain = prepared.device.alloc_pd()?;
        }
        let room = prepared.reserve()?;
        let queue = room.queue().clone();
        let peer = incoming.peer();
        let reply = |theirs: &[u8]| hello::decode(theirs).map(|_| prepared.hello.clone());
        let accepting = incoming.accept(prepared.domain.provider(), queue.device(), &prepared.config, reply);
        let introduced = async {
            let connected = accepting.await?;
            prepared.introduce(room, connected, Role::Server).await
        };
        let connection = within(self.timeout, "accept", &peer, introduced).await?;
        self.shared.open.add(&connection);
        Ok(connection)
    }
}
