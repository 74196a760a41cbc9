//! Talks to programs that use the crate [async-rdma](https://crates.io/crates/async-rdma), version 0.5, unchanged.
//!
//! It speaks that crate's protocol, written from a description of its formats: no code of it is used, and it is no dependency.
//! The feature `async-rdma` turns it on.
//!
//! ```no_run
//! use std::time::Duration;
//! use tokio_rdma::async_rdma::Peer;
//! use tokio_rdma::{Access, Device};
//!
//! # async fn demo() -> tokio_rdma::Result<()> {
//! let domain = Device::open("mlx5_0")?.alloc_pd()?;
//! let peer = Peer::connect(&domain, "host.example:7471").await?;
//!
//! // Its program's receive() gets this, and its send() is received here.
//! peer.send(domain.register(b"hello".to_vec())?).await?;
//! println!("{:?}", &peer.receive().await?[..]);
//!
//! // Memory of the peer.
//! let region = peer.request_region(4096, 64, Duration::from_secs(60)).await?;
//! let buffer = peer.write(domain.alloc(4096)?, &region).await?;
//! peer.read(buffer, &region).await?;
//! peer.release(region).await?;
//!
//! // Memory for the peer: its program's receive_remote_mr() gets it.
//! let lent = peer.lend(domain.alloc(4096)?, Access::REMOTE_READ, Duration::from_secs(60)).await?;
//! lent.ended().await;
//! let _buffer = lent.reclaim().await;
//! # Ok(())
//! # }
//! ```
//!
//! # What goes over the wire
//!
//! Both ends exchange 22 bytes over TCP, which name their queue pairs. Everything else is agreed on beforehand, at both ends:
//! the path MTU, the longest message. Then each message is one Send, and each request is answered by another.
//! Reads and writes are plain RDMA: the peer's program takes no part.
//!
//! # What the protocol cannot do
//!
//! - It has no credits: each end keeps 10 receives posted. Of this side at most 8 requests are unanswered at a time, and the
//!   rest wait in line. That caps what such a link carries; between two programs of this crate use a [`Connection`](crate::Connection).
//! - It has no version, no farewell, and no way to refuse memory but silence.
//! - A peer of async-rdma does not compare lengths, and does not take its keys back. This side does both: what would end behind a
//!   region, or comes after its lease, is refused here before it is posted, and keys given to the peer are revoked in time.
//!
//! # Devices
//!
//! An RDMA NIC, or the kernel's Soft-RoCE: the peer is reached by RDMA packets, which the software device `soft0` has none of, and
//! it says so with [`Error::Unsupported`](crate::Error::Unsupported). Two programs of this crate can speak the protocol over any
//! connection: see [`PeerBuilder::over`].

mod agent;
mod builder;
mod calls;
mod endpoint;
mod inbox;
mod leases;
mod listener;
mod loans;
mod one_sided;
mod peer;
mod region;
mod send;
mod settings;
mod shared;
#[cfg(test)]
mod tests;
mod wire;

pub use self::builder::{PeerBuilder, PendingPeer};
pub use self::endpoint::Endpoint;
pub use self::inbox::Message;
pub use self::leases::LeaseEnd;
pub use self::listener::Listener;
pub use self::peer::Peer;
pub use self::region::{LentRegion, PeerRegion};

/// What a peer has of this side, and what it was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerStats {
    /// Regions of this side that the peer can use.
    pub regions: usize,
    /// Bytes of the [budget](PeerBuilder::budget) in use.
    pub budget_used: u64,
    /// Requests of the peer that were refused or could not be kept, each of which is logged.
    pub refused: u64,
    /// What happened on the connection.
    pub connection: crate::ConnectionStats,
}
