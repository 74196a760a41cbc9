//! Listening for peers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore, mpsc};
use tokio::task::{JoinHandle, JoinSet};

use super::builder::resolved;
use super::{Peer, PeerBuilder};
use crate::address::{Address, IntoAddress};
use crate::connection::within;
use crate::error::{CloseReason, Error, Result};
use crate::memory::ProtectionDomain;

/// Handshakes that may be under way, and peers that may wait to be accepted.
const BACKLOG: usize = 128;

/// How long to pause when the system cannot accept (out of descriptors, say), so that trying again does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Waits for programs that speak async-rdma's protocol to connect.
///
/// Handshakes run in the background, each on its own. Dropping the listener stops listening; accepted peers live on.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    ready: Mutex<mpsc::Receiver<Peer>>,
    failed: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Listener {
    /// Listens with the default settings; see [`PeerBuilder::listen`].
    pub async fn bind(domain: &ProtectionDomain, address: impl IntoAddress) -> Result<Self> {
        Peer::builder(domain).listen(address).await
    }

    pub(super) async fn start(settings: PeerBuilder, address: &Address) -> Result<Self> {
        // A device that cannot is told now, not to each client.
        drop(settings.clone().endpoint()?);
        let io = |error| Error::io("bind", address, error);
        let listener = TcpListener::bind(resolved(address)?).await.map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let (sender, receiver) = mpsc::channel(BACKLOG);
        let failed = Arc::new(AtomicU64::new(0));
        let task = tokio::spawn(run(listener, settings, sender, failed.clone()));
        Ok(Self { address, ready: Mutex::new(receiver), failed, task })
    }

    /// The next peer. Handshakes that fail are logged and counted ([`failed_handshakes`](Self::failed_handshakes)), not returned.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the runtime that the listener was made in is gone.
    ///
    /// # Cancel safety
    ///
    /// No peer is lost when the future is dropped.
    pub async fn accept(&self) -> Result<Peer> {
        let closed = || Error::Closed { operation: "accept", reason: CloseReason::RuntimeGone };
        self.ready.lock().await.recv().await.ok_or_else(closed)
    }

    /// Where it listens, with the real port.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Handshakes that did not lead to a peer so far.
    pub fn failed_handshakes(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(listener: TcpListener, settings: PeerBuilder, ready: mpsc::Sender<Peer>, failed: Arc<AtomicU64>) {
    let slots = Arc::new(Semaphore::new(BACKLOG));
    let mut handshakes = JoinSet::new();
    loop {
        // Finished tasks are collected here and there, so that their memory does not pile up.
        while handshakes.try_join_next().is_some() {}
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, from)) => {
                let (settings, ready, failed) = (settings.clone(), ready.clone(), failed.clone());
                handshakes.spawn(async move {
                    match answer(stream, from, &settings).await {
                        // The slot is held until there is room: peers that nobody accepts stop new handshakes.
                        Ok(peer) => drop(ready.send(peer).await),
                        Err(error) => {
                            failed.fetch_add(1, Ordering::Relaxed);
                            tracing::warn!(%from, %error, "handshake failed");
                        }
                    }
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn answer(mut stream: TcpStream, from: SocketAddr, settings: &PeerBuilder) -> Result<Peer> {
    within(settings.setup(), "accept", from, settings.answer(&mut stream)).await
}
