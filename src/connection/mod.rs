//! Connections: setting them up, what they offer, and how they end.

mod builder;
mod endpoint;
#[cfg(feature = "async-rdma")]
mod foreign;
mod hello;
mod id;
mod incoming;
pub(crate) mod keepalive;
mod listener;
mod open;
mod psk;
mod shutdown;
mod stats;

#[cfg(feature = "async-rdma")]
pub(crate) use self::builder::within;
pub use self::builder::{ConnectionBuilder, Mtu};
pub use self::endpoint::{PendingConnection, QueuePairEndpoint};
#[cfg(feature = "async-rdma")]
pub(crate) use self::foreign::ForeignConnection;
pub use self::id::ConnectionId;
pub use self::incoming::Incoming;
pub use self::listener::{Listener, ListenerBuilder};
pub use self::psk::AuthenticationFailure;
#[cfg(feature = "psk")]
pub use self::psk::PreSharedKey;
pub use self::stats::ConnectionStats;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::address::IntoAddress;
use crate::completion::driver;
use crate::completion::pair::QueuePair;
use crate::completion::queue::Room;
use crate::connection::hello::Hello;
use crate::device::{Device, Provider};
use crate::error::{CloseReason, Error, Result};
use crate::memory::{AnyBuffer, ProtectionDomain, RemoteRegion, SourceBuffer, TargetBuffer};
use crate::op::core::{Op, Verb};
use crate::op::{Batch, CompareSwapOp, FetchAddOp, ReadOp, ReceiveOp, SendOp, WriteOp};
use crate::provider::{Link, PeerInfo, Qp, QpConfig};
use crate::srq::SharedReceiveQueue;

/// A reliable connection (RC queue pair) to a peer.
///
/// Cheap to clone. It closes when the last clone is dropped, also while operations are pending: those end in
/// [`Error::Closed`] and give their buffers back.
///
/// Operations are futures that own their buffer and return it, also inside of an error. They start when first polled (or with
/// `try_post`), wait in the order of arrival when the queue is full, and complete in the order in which they were posted.
///
/// # Cancel safety
///
/// Any operation's future can be dropped at any time. Before it is posted it then never will be. Afterwards the device still carries
/// it out; its buffer is kept until the device reports the completion (or the connection ends), and only then released.
#[derive(Clone)]
pub struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    pair: Arc<QueuePair>,
    device: Device,
    peer: PeerInfo,
    /// What the peer said while connecting.
    hello: Hello,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.pair.close(CloseReason::Local);
    }
}

impl Connection {
    /// Connects to a listener with the default settings; see [`ConnectionBuilder`] for those.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the address cannot be reached, [`Error::Handshake`] when the peer is no listener of this crate or refuses,
    /// [`Error::Timeout`] when it does not answer in time.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future abandons the attempt and leaves nothing behind.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time enabled.
    pub async fn connect(domain: &ProtectionDomain, address: impl IntoAddress) -> Result<Self> {
        Self::builder(domain).connect(address).await
    }

    /// Settings for a connection in this protection domain.
    pub fn builder(domain: &ProtectionDomain) -> ConnectionBuilder {
        ConnectionBuilder::new(domain)
    }

    /// Takes a queue pair that is ready to send into service.
    fn establish(
        device: Device,
        domain: ProtectionDomain,
        room: Room,
        config: QpConfig,
        srq: Option<SharedReceiveQueue>,
        (qp, peer): (Qp, PeerInfo),
    ) -> Result<Self> {
        let hello = hello::of_peer(&peer)?;
        let shared = srq.map(|srq| srq.tenancy().clone());
        let agreed = (peer.max_message, peer.link);
        let pair = QueuePair::attach(qp, room, domain, config, agreed, shared).ok_or(Error::Limit {
            operation: "connect",
            what: "connections of one completion queue",
            value: crate::completion::pair::MAX_PAIRS as u64 + 1,
            limit: crate::completion::pair::MAX_PAIRS as u64,
            hint: "open the device with more completion queues",
        })?;
        // The runtime of the driver that was there during the handshake may have ended since, before it knew this pair.
        if let Err(error) = driver::ensure(pair.queue()) {
            pair.close(CloseReason::Local);
            return Err(error);
        }
        tracing::debug!(
            qp = pair.number(), peer = %peer.address, link = %peer.link, device = device.name(),
            max_rd_atomic = peer.max_rd_atomic, max_message = peer.max_message, "connected"
        );
        Ok(Self { inner: Arc::new(Inner { pair, device, peer, hello }) })
    }

    /// Probes the peer from now on, as [`keepalive`](ConnectionBuilder::keepalive) says.
    fn keep_alive(&self, interval: Option<Duration>) {
        if let Some(interval) = interval {
            self.inner.device.keepalive().watch(&self.inner.pair, interval);
        }
    }

    /// Sends a message of `buffer.len()` bytes into the next buffer that the peer posted. Resolves when the peer has it.
    ///
    /// An empty buffer is a message too. When the peer has no buffer posted, the send waits as long as
    /// [`rnr_retry`](ConnectionBuilder::rnr_retry) allows (without limit by default).
    ///
    /// # Errors
    ///
    /// [`OpError`](crate::op::OpError) with the buffer: [`Error::Limit`] when it is longer than [`max_message`](Self::max_message) or has too many segments,
    /// [`Error::ForeignBuffer`], [`Error::Closed`]; [`Error::Completion`] when the peer's buffer is too short or the peer does not answer.
    /// A failed completion ends the connection, as on any RC queue pair.
    ///
    /// # Cancel safety
    ///
    /// See [`Connection`]: dropping it is safe; a message that was posted still arrives.
    pub fn send<B: SourceBuffer>(&self, buffer: B) -> SendOp<B> {
        SendOp::new(self.op(Verb::Send { imm: None, patience: 0 }, buffer.into_any()))
    }

    /// Like [`send`](Self::send), with 32 bits that arrive as [`Received::immediate`](crate::op::Received::immediate).
    pub fn send_with_immediate<B: SourceBuffer>(&self, buffer: B, immediate: u32) -> SendOp<B> {
        self.send_patiently(buffer, immediate, 0)
    }

    /// The same for a message whose end nobody waits for, while no more than `patience` requests are under way.
    pub(crate) fn send_patiently<B: SourceBuffer>(&self, buffer: B, immediate: u32, patience: u32) -> SendOp<B> {
        SendOp::new(self.op(Verb::Send { imm: Some(immediate), patience }, buffer.into_any()))
    }

    /// Posts `buffer` for one message of the peer. Resolves when a message is in it, or when a Write with immediate used it up.
    ///
    /// Messages go to the posted buffers in order. Post ahead of time: with [`try_post`](ReceiveOp::try_post), or by polling.
    ///
    /// # Errors
    ///
    /// [`OpError`](crate::op::OpError) with the buffer: [`Error::Closed`] when the connection ends first, [`Error::Completion`] with
    /// [`WcStatus::LocalLength`](crate::WcStatus::LocalLength) when the message is longer than the buffer (which ends the connection);
    /// and what is refused before posting, as for [`send`](Self::send). [`Error::SharedReceiveQueue`] when the connection was made
    /// with one: post there.
    ///
    /// # Cancel safety
    ///
    /// Dropping it is safe, but a posted receive stays posted: the message it gets is lost.
    pub fn receive<B: TargetBuffer>(&self, buffer: B) -> ReceiveOp<B> {
        ReceiveOp::new(self.op(Verb::Receive, buffer.into_any()))
    }

    /// Writes the whole buffer to the start of `remote`, without the peer's program taking part.
    /// Resolves when the bytes are in the peer's memory. For another place, [`slice`](RemoteRegion::slice) the region.
    ///
    /// More bytes than [`max_message`](Self::max_message) go in several messages, posted together: they take as many slots of the
    /// send queue, and the order of operations is that of one message.
    ///
    /// # Errors
    ///
    /// [`OpError`](crate::op::OpError) with the buffer. Before posting: [`Error::Limit`] when the buffer is empty, longer than the region,
    /// or takes more messages than the send queue has slots,
    /// [`Error::Access`] when the region does not grant writing, [`Error::ForeignBuffer`], [`Error::Closed`]. Afterwards
    /// [`Error::Completion`], for example with [`WcStatus::RemoteAccess`](crate::WcStatus::RemoteAccess) when the peer has revoked the key; that ends the connection.
    ///
    /// # Cancel safety
    ///
    /// See [`Connection`].
    pub fn write<B: SourceBuffer>(&self, buffer: B, remote: &RemoteRegion) -> WriteOp<B> {
        WriteOp::new(self.op(Verb::Write { remote: *remote, imm: None }, buffer.into_any()))
    }

    /// Like [`write`](Self::write), and then tells the peer: uses up one of its receives, which resolves with `immediate` and the length,
    /// after the bytes are in place. The buffer may be empty: a bare notice. It is one message, so not longer than
    /// [`max_message`](Self::max_message).
    pub fn write_with_immediate<B: SourceBuffer>(
        &self,
        buffer: B,
        remote: &RemoteRegion,
        immediate: u32,
    ) -> WriteOp<B> {
        WriteOp::new(self.op(Verb::Write { remote: *remote, imm: Some(immediate) }, buffer.into_any()))
    }

    /// Fills the whole buffer from the start of `remote`, without the peer's program taking part.
    /// For another place, [`slice`](RemoteRegion::slice) the region; for fewer bytes, split the buffer. More bytes than
    /// [`max_message`](Self::max_message) go in several messages, as for [`write`](Self::write).
    /// The bytes of one Read are not a snapshot: see [`ExposedRegion`](crate::ExposedRegion) on what is atomic.
    ///
    /// A Write that is posted behind a Read of the same bytes may overtake it at the peer (InfiniBand specification, volume 1,
    /// table 79: such a Write needs a fence). Await the Read before overwriting what it reads.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write), with the right to read.
    ///
    /// # Cancel safety
    ///
    /// See [`Connection`].
    pub fn read<B: TargetBuffer>(&self, buffer: B, remote: &RemoteRegion) -> ReadOp<B> {
        ReadOp::new(self.op(Verb::Read { remote: *remote }, buffer.into_any()))
    }

    /// Atomically replaces the first 8 bytes of `remote` by `swap` if they equal `compare`. Resolves to the value before;
    /// the swap happened if that equals `compare`. The value is a `u64` in the peer's byte order.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when the place is not 8-byte aligned or shorter than 8 bytes, [`Error::Access`] without the right to atomics,
    /// [`Error::Closed`], [`Error::Completion`].
    ///
    /// # Cancel safety
    ///
    /// Dropping it is safe; one that was posted still takes effect.
    pub fn compare_swap(&self, remote: &RemoteRegion, compare: u64, swap: u64) -> CompareSwapOp {
        CompareSwapOp::new(self.atomic(Verb::CompareSwap { remote: *remote, compare, swap }))
    }

    /// Atomically adds to the first 8 bytes of `remote` (wrapping). Resolves to the value before. Errors and cancel safety
    /// as for [`compare_swap`](Self::compare_swap).
    pub fn fetch_add(&self, remote: &RemoteRegion, add: u64) -> FetchAddOp {
        FetchAddOp::new(self.atomic(Verb::FetchAdd { remote: *remote, add }))
    }

    /// Starts a batch: several operations with one doorbell.
    pub fn batch(&self) -> Batch {
        Batch::new(self.inner.pair.clone())
    }

    /// Ends the connection: the queue pair goes to the error state, every pending operation ends in an error with its buffer,
    /// the peer is told. When this resolves, no buffer of this connection is in use any more.
    ///
    /// Operations that are under way are cut off, this side's and the peer's; to finish in good order, see [`shutdown`](Self::shutdown).
    pub async fn close(&self) {
        self.inner.pair.close(CloseReason::Local);
        self.closed().await;
    }

    /// As [`close`](Self::close), for a reason of the crate's own, and without waiting.
    pub(crate) fn end(&self, reason: CloseReason) {
        self.inner.pair.close(reason);
    }

    /// Resolves when the connection has ended and no buffer of it is in use any more, with the reason. Cancel safe.
    pub async fn closed(&self) -> CloseReason {
        self.inner.pair.ended().await
    }

    /// Why the connection has ended, or `None` while it works.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.inner.pair.close_reason_now()
    }

    /// What carries the bytes.
    pub fn link(&self) -> Link {
        self.inner.peer.link
    }

    /// The device that this connection runs on.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// What implements that device.
    pub fn provider(&self) -> Provider {
        self.inner.device.provider()
    }

    /// The protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.inner.pair.domain
    }

    /// The peer's address, for logs.
    pub fn peer(&self) -> &str {
        &self.inner.peer.address
    }

    /// What the peer gave as [`private_data`](ConnectionBuilder::private_data).
    pub fn peer_private_data(&self) -> &[u8] {
        &self.inner.hello.user
    }

    /// The longest message, in bytes, that both ends take. Reads and writes may be longer, since they are split.
    pub fn max_message(&self) -> u64 {
        self.inner.peer.max_message
    }

    /// Reads and atomics in flight at a time: the smaller of both ends' limits. More are queued by the device.
    pub fn max_rd_atomic(&self) -> u8 {
        self.inner.peer.max_rd_atomic
    }

    /// The path MTU of this side.
    pub fn mtu(&self) -> Mtu {
        Mtu::from_bytes(self.inner.pair.config.path_mtu)
    }

    /// What tells this connection from any other that this process makes: a [`SharedReceiveQueue`] says by it where a message came from.
    pub fn id(&self) -> ConnectionId {
        ConnectionId::new(self.inner.pair.id())
    }

    /// This side's queue pair number.
    pub fn queue_pair_number(&self) -> u32 {
        self.inner.pair.number()
    }

    /// What happened on this connection so far.
    pub fn stats(&self) -> ConnectionStats {
        ConnectionStats::of(&self.inner.pair)
    }

    /// Receives that can be posted at a time.
    pub(crate) fn receive_depth(&self) -> u32 {
        self.inner.pair.config.receive_depth
    }

    /// Refuses receives of its own where the connection has a shared queue.
    pub(crate) fn check_receives(&self, operation: &'static str) -> Result<()> {
        if self.inner.pair.shares_receives() { Err(Error::SharedReceiveQueue { operation }) } else { Ok(()) }
    }

    fn op(&self, verb: Verb, buffer: AnyBuffer) -> Op {
        Op::new(self.inner.pair.clone(), verb, buffer)
    }

    fn atomic(&self, verb: Verb) -> Result<Op> {
        Ok(self.op(verb, AnyBuffer::Buffer(self.inner.pair.atomic_result()?)))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("qp", &self.queue_pair_number())
            .field("peer", &self.peer())
            .field("link", &self.link())
            .field("closed", &self.close_reason())
            .finish_non_exhaustive()
    }
}
