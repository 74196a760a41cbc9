//! Receives that many connections share.

use std::fmt;
use std::sync::Arc;

use crate::completion::queue::CompletionQueue;
use crate::completion::shared::{SharedQueue, Tenancy};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::{ProtectionDomain, TargetBuffer};
use crate::op::SharedReceiveOp;
use crate::op::shared::SharedOp;
use crate::provider::Srq;

/// A shared receive queue (SRQ): receives that all connections made with it take their receives from.
///
/// A service with many connections posts as many receives as messages may come at a time, instead of as many for each connection.
/// Give it to [`ConnectionBuilder::srq`](crate::ConnectionBuilder::srq) or [`ListenerBuilder::srq`](crate::ListenerBuilder::srq);
/// such a connection has no receives of its own, and all else as any other.
///
/// ```
/// use futures::StreamExt;
/// use tokio_rdma::{Connection, Device, Listener, SharedReceiveQueue};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> tokio_rdma::Result<()> {
/// let domain = Device::open("soft0")?.alloc_pd()?;
/// let srq = SharedReceiveQueue::new(&domain, 64)?;
/// let listener = Listener::builder(&domain).srq(&srq).bind("127.0.0.1:0").await?;
/// let mut messages = srq.receiver(64, 4096)?; // 64 receives of 4 KiB, however many clients there are
///
/// let client = Connection::connect(&domain, listener.local_address()).await?;
/// let server = listener.accept().await?;
/// client.send(domain.register(b"hello".to_vec())?).await?;
/// let (from, message) = messages.next().await.expect("it goes on for ever")?;
/// assert_eq!((from, &message[..]), (server.id(), &b"hello"[..]));
/// # Ok(())
/// # }
/// ```
///
/// # Rules
///
/// They are those of `ibv_create_srq(3)` and of the InfiniBand specification, volume 1, 10.2.9:
///
/// - The next message, on whichever connection it comes, takes the receive that was posted first. Two messages of one connection are
///   received in order; those of different connections in any.
/// - While no receive is posted, peers are told to try again (RNR), as by a connection without receives.
///   `soft0` serves those that wait first come, first served.
/// - A message that is longer than the buffer ends its connection. That receive fails, the others stay.
/// - When a connection ends, the receives stay posted. One that a message of it had taken already fails, and gives its buffer back.
/// - `soft0` sets a receive aside for a peer that was told to try again, until it does or its connection ends; a NIC does not. So peers that say
///   that they try again, and do not, can keep as many receives as they have connections.
/// - On a NIC a receive can be lost with a peer that is gone before its connection was set up, or closed while the device does not say that
///   it has reported the last one.
/// - A message may come before [`accept`](crate::Listener::accept) has returned its connection.
///
/// # Dropping
///
/// Cheap to clone. Connections keep the queue: it is destroyed when the last handle is gone, those in listeners and settings included,
/// and the last of its connections has ended. Receives that are left in it then end in [`Error::Closed`] and give their buffers back;
/// until then messages still come to them.
#[derive(Clone)]
pub struct SharedReceiveQueue {
    tenancy: Arc<Tenancy>,
}

impl SharedReceiveQueue {
    /// A queue for up to `capacity` receives at a time, with the default settings; see [`SharedReceiveQueueBuilder`] for those.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] when the device has no shared receive queues; [`Error::Limit`] when `capacity` is 0, or above its
    /// [`max_srq_depth`](crate::DeviceLimits::max_srq_depth); [`Error::Io`] when it refuses.
    pub fn new(domain: &ProtectionDomain, capacity: u32) -> Result<Self> {
        Self::builder(domain, capacity).build()
    }

    /// Settings for a queue in this protection domain. Its buffers, and the connections that use it, are of the same domain.
    pub fn builder(domain: &ProtectionDomain, capacity: u32) -> SharedReceiveQueueBuilder {
        SharedReceiveQueueBuilder { domain: domain.clone(), capacity, max_sge: 4 }
    }

    /// Posts `buffer` for one message of any of the connections. Resolves to the connection and what it sent, when a message is
    /// in the buffer or a Write with immediate used it up.
    ///
    /// More than [`capacity`](Self::capacity) wait in line for a place. Which future gets which message is the order of posting.
    ///
    /// # Errors
    ///
    /// [`OpError`](crate::op::OpError) with the buffer. Before posting: [`Error::ForeignBuffer`], [`Error::Limit`] when it has more segments than
    /// [`max_sge`](SharedReceiveQueueBuilder::max_sge). Afterwards [`Error::Completion`]:
    /// [`WcStatus::LocalLength`](crate::WcStatus::LocalLength) when the message is longer than the buffer, or
    /// [`WcStatus::Flushed`](crate::WcStatus::Flushed) when the connection ended in the middle of it; post it again, the queue works on.
    /// [`Error::Closed`] when the queue was destroyed.
    ///
    /// # Cancel safety
    ///
    /// Dropping it is safe, but a posted receive stays posted: the message it gets is lost.
    pub fn receive<B: TargetBuffer>(&self, buffer: B) -> SharedReceiveOp<B> {
        SharedReceiveOp::new(SharedOp::new(self.queue().clone(), buffer.into_any()))
    }

    /// Receives that it can hold at a time.
    pub fn capacity(&self) -> usize {
        self.queue().receive.depth()
    }

    /// Receives that the device holds right now. A service that posts by itself looks here whether more are needed.
    pub fn posted(&self) -> usize {
        self.queue().receive.in_flight()
    }

    /// The protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.queue().domain
    }

    pub(crate) fn queue(&self) -> &Arc<SharedQueue> {
        self.tenancy.queue()
    }

    pub(crate) fn tenancy(&self) -> &Arc<Tenancy> {
        &self.tenancy
    }

    pub(crate) fn device(&self) -> &Srq {
        self.tenancy.device()
    }

    /// Has this completion queue take in the receives of connections that complete there.
    pub(crate) fn report_to(&self, queue: &Arc<CompletionQueue>, limit: u32) -> Result<()> {
        self.tenancy.report_to(queue, limit)
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("capacity", &self.capacity())
            .field("posted", &self.posted())
            .finish_non_exhaustive()
    }
}

/// Settings of a shared receive queue.
#[derive(Clone, Debug)]
#[must_use = "settings do nothing by themselves"]
pub struct SharedReceiveQueueBuilder {
    domain: ProtectionDomain,
    capacity: u32,
    max_sge: u32,
}

impl SharedReceiveQueueBuilder {
    /// Scatter/gather entries of one receive. Default 4, as for a connection.
    pub fn max_sge(mut self, entries: u32) -> Self {
        self.max_sge = entries;
        self
    }

    /// Makes the queue.
    ///
    /// # Errors
    ///
    /// As for [`SharedReceiveQueue::new`].
    pub fn build(self) -> Result<SharedReceiveQueue> {
        const CREATE: &str = "create shared receive queue";
        let device = Device::from_domain(&self.domain).ok_or_else(|| Error::Invalid {
            operation: CREATE,
            reason: "the protection domain belongs to no open device".to_owned(),
        })?;
        let limits = device.limits();
        if limits.max_srq == 0 {
            return Err(Error::Unsupported {
                operation: CREATE,
                device: device.name().to_owned(),
                hint: "post receives on each connection",
            });
        }
        for (what, value, limit) in
            [("capacity", self.capacity, limits.max_srq_depth), ("max_sge", self.max_sge, limits.max_srq_sge)]
        {
            let hint =
                if value == 0 { "the smallest value is 1" } else { "that is the largest value this device takes" };
            let limit = if value == 0 { 1 } else { limit };
            if value == 0 || value > limit {
                return Err(Error::Limit { operation: CREATE, what, value: value.into(), limit: limit.into(), hint });
            }
        }
        let queue = device.context().create_srq(self.domain.provider(), self.capacity, self.max_sge)?;
        let tenancy = Arc::new(Tenancy::new(queue, &self.domain, self.capacity, self.max_sge)?);
        Ok(SharedReceiveQueue { tenancy })
    }
}
