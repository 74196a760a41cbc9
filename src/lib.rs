//! RDMA for tokio: Send, Receive, Read, Write and atomics as futures.
//!
//! A service posts an operation, awaits a future and gets its buffer back. The completion channel of the device sits in tokio's reactor;
//! no operation costs a task, an allocation or, while completions keep coming, a system call of its own to wait.
//! On machines without RDMA hardware the software device `soft0` carries the same operations over shared memory or
//! sockets, under the same rules.
//!
//! ```
//! use tokio_rdma::{Access, Connection, Device, Listener};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> tokio_rdma::Result<()> {
//! let device = Device::open("soft0")?;
//! let domain = device.alloc_pd()?;
//! let listener = Listener::bind(&domain, "127.0.0.1:0").await?;
//! let connecting = Connection::connect(&domain, listener.local_address());
//! let (client, server) = tokio::try_join!(connecting, listener.accept())?;
//!
//! // Two-sided: a message into a buffer that the peer has posted.
//! let mut receive = server.receive(domain.alloc(64)?);
//! receive.try_post()?;
//! let hello = client.send(domain.register(b"hello".to_vec())?).await?;
//! assert_eq!(receive.await?.message(), &hello[..]);
//!
//! // One-sided: the peer lends memory, and its program takes no part.
//! let shared = domain.alloc(4096)?.expose(Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC)?;
//! let remote = shared.remote(); // plain data: send it to whoever may use the memory
//! client.write(hello, &remote).await?;
//! let answer = client.read(domain.alloc(5)?, &remote).await?;
//! assert_eq!(&answer[..], b"hello");
//! assert_eq!(client.fetch_add(&remote.slice(8..16)?, 5).await?, 0);
//! # Ok(())
//! # }
//! ```
//!
//! # The path of one operation
//!
//! ```text
//! user's task                                completion                     device
//! client.write(buffer, &remote)
//!   checked, waits for a slot in order
//!   the slot takes the buffer ────────────────────────────── post ────────▶ moves the bytes
//!   looks at the completion queue:           one dispatcher per queue,
//!   whoever looks serves everybody ────────▶ behind a try-lock  ◀────────── completion
//!   not there: Pending                       the driver task sleeps on the
//!                                            completion channel's descriptor
//!   Ready(Ok(buffer)) or                  ◀─ the slot gives the buffer back
//!   Ready(Err(error with the buffer))
//! ```
//!
//! # Buffers
//!
//! - [`Buffer`]: owned, registered, unique; splits and joins. [`SharedBuffer`]: the same, read-only and shared. [`SgList`]: several of them as one operand.
//! - [`BufferPool`]: registers once, hands buffers out and takes them back when they are dropped.
//! - [`ExposedRegion`]: a buffer that a peer may read, write or update; described to it by a [`RemoteRegion`].
//!
//! An operation takes its buffer by value. The device may use memory long after a future was dropped, so a borrowed buffer
//! could not be made safe; an owned one stays with the operation's slot until the device has let go of it.
//!
//! # Cancel safety
//!
//! Every future of this crate can be dropped at any time. An operation that was not posted yet then never is. One that was posted is
//! carried out by the device all the same; its buffer is released when the device reports the completion, or when the connection is gone.
//!
//! # Features
//!
//! - `async-rdma`: the module `async_rdma`, which talks to programs that use the crate async-rdma, version 0.5.
//! - `cuda`: the module `gpu`, memory of NVIDIA GPUs in operations. It builds without a CUDA toolkit, and finds the driver at run time.
//! - `futures-io`: the `AsyncRead` and `AsyncWrite` of the futures crate for [`RdmaStream`], which has tokio's in any case.
//! - `metrics`: counters through the [metrics](https://docs.rs/metrics) facade; their names are in the module `metrics`.
//! - `psk`: `PreSharedKey`, which both ends of a connection prove to have before they use it.
//! - `serde`: `Serialize` and `Deserialize` for [`RemoteRegion`], [`QueuePairEndpoint`], [`topology::PciAddress`] and
//!   [`doctor::GpuDirectReport`].
#![deny(unsafe_code)]
#![doc(test(attr(deny(warnings), allow(dead_code))))]

#[cfg(not(target_os = "linux"))]
compile_error!("tokio-rdma runs on Linux: its devices and completion channels are Linux interfaces");

mod address;
mod affinity;
#[cfg(feature = "async-rdma")]
pub mod async_rdma;
mod completion;
mod connection;
mod device;
pub mod doctor;
mod error;
#[cfg(feature = "cuda")]
pub mod gpu;
mod memory;
pub mod messages;
mod meters;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod op;
mod provider;
mod random;
pub mod soft;
mod srq;
pub mod stream;
mod sync;
pub mod topology;

pub use address::{Address, IntoAddress};
pub use completion::CompletionMode;
#[cfg(feature = "psk")]
pub use connection::PreSharedKey;
pub use connection::{
    AuthenticationFailure, Connection, ConnectionBuilder, ConnectionId, ConnectionStats, Incoming, Listener,
    ListenerBuilder, Mtu, PendingConnection, QueuePairEndpoint,
};
pub use device::{DEVICE_VARIABLE, Device, DeviceBuilder, DeviceInfo, Provider};
pub use error::{CloseReason, Error, Operation, RemoteTarget, Result, WcStatus};
pub use memory::{
    Access, Buffer, BufferPool, DomainStats, ExposeError, ExposedRegion, Get, MemoryRegion, OwnedMemory,
    ProtectionDomain, Reclaim, RemoteRegion, SgList, SgSegment, SharedBuffer, SourceBuffer, TargetBuffer, UnsplitError,
};
pub use provider::{DeviceLimits, Link};
pub use srq::{SharedReceiveQueue, SharedReceiveQueueBuilder};
pub use stream::RdmaStream;

/// The guide's example, tested.
#[cfg(all(doctest, feature = "async-rdma"))]
#[doc = include_str!("../docs/migrating-from-async-rdma.md")]
struct Migrating;

/// The README's examples, tested.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The examples of the guide's chapters, tested.
#[cfg(doctest)]
mod guide {
    #[doc = include_str!("../docs/guide/concepts.md")]
    struct Concepts;

    #[doc = include_str!("../docs/guide/memory.md")]
    struct Memory;

    #[cfg(feature = "cuda")]
    #[doc = include_str!("../docs/guide/gpu.md")]
    struct Gpu;

    #[doc = include_str!("../docs/guide/completion-modes.md")]
    struct CompletionModes;

    #[doc = include_str!("../docs/guide/failures.md")]
    struct Failures;

    #[cfg(feature = "psk")]
    #[doc = include_str!("../docs/guide/services.md")]
    struct Services;

    #[doc = include_str!("../docs/guide/deploying.md")]
    struct Deploying;
}
