//! The peer, as the user sees it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::{Mutex, mpsc};

use super::agent::Agent;
use super::inbox::{Outlet, channels};
use super::settings::Settings;
use super::shared::Shared;
use super::wire::{Request, Response};
use super::{PeerBuilder, PeerStats};
use crate::address::IntoAddress;
use crate::connection::Connection;
use crate::error::{CloseReason, Result};
use crate::memory::ProtectionDomain;

/// A program that speaks async-rdma's protocol, at the other end of a connection.
///
/// Cheap to clone. The connection closes when the last clone is dropped.
///
/// A task of its own keeps receives posted, answers the peer's requests and ends leases; it runs on the runtime in which the peer
/// was connected to. Nothing else has to be called for that.
///
/// # Cancel safety
///
/// Every future can be dropped at any time. A request that was sent may still take effect at the peer; memory that was asked for
/// and comes too late is released by itself. Nothing that was received is lost.
#[derive(Clone, Debug)]
pub struct Peer {
    pub(super) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) shared: Arc<Shared>,
    pub(super) outlet: Outlet,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The agent ends by that.
        self.shared.connection.end(CloseReason::Local);
    }
}

impl Peer {
    /// Connects to a listening program, with the default settings; see [`PeerBuilder`] for those.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) when the address cannot be reached, [`Error::Handshake`](crate::Error::Handshake) when what answers is no such program,
    /// [`Error::Timeout`](crate::Error::Timeout) when it does not answer in time, [`Error::Unsupported`](crate::Error::Unsupported) when the domain's device is no RDMA NIC.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future abandons the attempt.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time enabled.
    pub async fn connect(domain: &ProtectionDomain, address: impl IntoAddress) -> Result<Self> {
        Self::builder(domain).connect(address).await
    }

    /// Settings for a peer in this protection domain.
    pub fn builder(domain: &ProtectionDomain) -> PeerBuilder {
        PeerBuilder::new(domain)
    }

    /// Starts the agent on a connection that nobody has used yet.
    pub(super) fn start(connection: Connection, settings: Settings) -> Result<Self> {
        let (inbox, outlet) = channels(settings.backlog);
        let shared = Shared::new(connection, settings)?;
        tokio::spawn(Agent::new(shared.clone(), inbox)?.run());
        Ok(Self { inner: Arc::new(Inner { shared, outlet }) })
    }

    /// Ends the connection. The peer is not told by the protocol, but its next operation fails.
    pub async fn close(&self) {
        self.inner.shared.connection.close().await;
    }

    /// Resolves when the connection has ended, with the reason. Cancel safe.
    ///
    /// The protocol has no farewell: a peer that left is noticed by the first operation that it does not acknowledge, or by
    /// [`keepalive`](crate::ConnectionBuilder::keepalive).
    pub async fn closed(&self) -> CloseReason {
        self.inner.shared.connection.closed().await
    }

    /// Why the connection has ended, or `None` while it works.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.inner.shared.connection.close_reason()
    }

    /// The protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        self.inner.shared.connection.domain()
    }

    /// The peer's address, for logs.
    pub fn address(&self) -> &str {
        self.inner.shared.connection.peer()
    }

    /// What this peer has of this side's memory, and what it was refused.
    pub fn stats(&self) -> PeerStats {
        let shared = &self.inner.shared;
        let leases = shared.leases.lock();
        PeerStats {
            regions: leases.len(),
            budget_used: leases.spent(),
            refused: shared.refused.load(Ordering::Relaxed),
            connection: shared.connection.stats(),
        }
    }

    pub(super) async fn call(&self, operation: &'static str, request: Request) -> Result<Response> {
        let called = self.inner.shared.call(operation, request, Vec::new(), None).await;
        called.map(|(response, _)| response).map_err(|(error, _)| error)
    }

    /// What came next of one kind.
    pub(super) async fn next<T>(&self, operation: &'static str, queue: &Mutex<mpsc::Receiver<T>>) -> Result<T> {
        queue.lock().await.recv().await.ok_or_else(|| self.inner.shared.closed(operation))
    }
}
