//! The narrow interface between the completion machinery and a device: what libibverbs offers, and no more.
//!
//! The set of providers is closed (an enum, not a user's generic): `soft` is a software NIC in user space, `verbs` is libibverbs.
//! A provider moves bytes between [`Segment`]s and reports [`WorkCompletion`]s; it knows nothing of futures, wakers or buffers.

pub(crate) mod soft;
pub(crate) mod verbs;

pub(crate) use self::srq::{Roster, Seat, Srq, next_connection_id};

use std::os::fd::BorrowedFd;
#[cfg(feature = "cuda")]
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use crate::address::Address;
use crate::error::{CloseReason, Error, Result, WcStatus};
use crate::memory::Access;
use crate::memory::dma::Segment;
use crate::memory::pages::Pages;

/// A scatter/gather entry: where, and the key that proves it is registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sge {
    pub segment: Segment,
    pub lkey: u32,
}

/// The scatter/gather list of one work request. Four entries without allocating.
pub(crate) type SgeList = SmallVec<[Sge; 4]>;

/// Memory of the peer, as the wire names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RemoteAddress {
    pub address: u64,
    pub rkey: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum WrOp {
    Send {
        imm: Option<u32>,
        /// While no more requests than these are under way, nobody waits for the end of this one: its acknowledgement may come late.
        patience: u32,
    },
    Write {
        remote: RemoteAddress,
        imm: Option<u32>,
    },
    Read {
        remote: RemoteAddress,
    },
    /// The single SGE is the 8-byte place of the old value.
    CompareSwap {
        remote: RemoteAddress,
        compare: u64,
        swap: u64,
    },
    FetchAdd {
        remote: RemoteAddress,
        add: u64,
    },
}

impl WrOp {
    /// What a place holds before it is filled.
    pub(crate) const NOTHING: Self = Self::Send { imm: None, patience: 0 };
}

/// A work request for the send queue.
#[derive(Clone, Debug)]
pub(crate) struct SendRequest {
    pub wr_id: u64,
    pub op: WrOp,
    pub sges: SgeList,
    /// Whether success produces a completion (failure always does).
    pub signaled: bool,
    /// Whether the payload is copied at posting time (`IBV_SEND_INLINE`).
    pub inline: bool,
}

/// A work request for the receive queue.
#[derive(Clone, Debug)]
pub(crate) struct ReceiveRequest {
    pub wr_id: u64,
    pub sges: SgeList,
}

/// What a completion is about, for the receive side's sake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Opcode {
    /// Any operation of the send queue.
    #[default]
    Request,
    /// A message landed in a receive buffer.
    Receive,
    /// A Write with immediate used up a receive; the buffer is untouched.
    ReceiveWriteImm,
}

/// `pub` because a sealed trait names it; not exported.
#[derive(Clone, Copy, Debug)]
pub struct WorkCompletion {
    pub wr_id: u64,
    pub status: WcStatus,
    pub opcode: Opcode,
    /// Bytes received; of a request it says nothing.
    pub byte_len: u32,
    pub imm: Option<u32>,
    pub vendor_error: u32,
    /// Number of the queue pair; of a receive of a shared queue, once that has seen it, the connection's id.
    pub source: u32,
}

impl Default for WorkCompletion {
    fn default() -> Self {
        Self {
            wr_id: 0,
            status: WcStatus::Success,
            opcode: Opcode::Request,
            byte_len: 0,
            imm: None,
            vendor_error: 0,
            source: 0,
        }
    }
}

/// Why a post was refused. Requests before `accepted` in the list were taken and will complete; the rest were not.
#[derive(Debug)]
pub(crate) struct PostError {
    pub accepted: usize,
    pub kind: PostErrorKind,
}

#[derive(Debug)]
pub(crate) enum PostErrorKind {
    /// The queue pair is in the error state.
    Closed(CloseReason),
    /// The provider's queue is full. The op table makes this impossible; a provider that says so anyway is reported, not retried.
    Full,
    System(std::io::Error),
}

/// How completions are waited for; it also tells the soft device's engine how patient to be.
#[derive(Clone, Debug)]
pub(crate) struct QpConfig {
    pub send_depth: u32,
    /// 0 with a shared receive queue, and only then.
    pub receive_depth: u32,
    pub max_send_sge: u32,
    pub max_receive_sge: u32,
    pub max_inline: u32,
    /// 0..=7, counted after the first attempt.
    pub retry_count: u8,
    /// 0..=7; 7 = without limit.
    pub rnr_retry: u8,
    /// What this side tells its peer to wait when no receive is posted here.
    pub rnr_timer: Duration,
    /// Local ACK timeout: how long a request may stay unanswered before one retry is counted.
    pub ack_timeout: Duration,
    /// Reads and atomics in flight that this side starts / that it serves. The connection uses the minimum of both sides.
    pub max_rd_atomic: u8,
    pub path_mtu: u32,
    /// No memory is within the peer's reach until [`Qp::admit`].
    pub guarded: bool,
    /// Where its receives come from, instead of a queue of its own.
    pub srq: Option<Srq>,
}

/// What connection setup agreed on.
#[derive(Clone, Debug)]
pub(crate) struct PeerInfo {
    pub address: String,
    pub link: Link,
    /// The peer's private data, at most [`PRIVATE_DATA`] bytes.
    pub private_data: Vec<u8>,
    pub max_rd_atomic: u8,
    /// The largest message that both sides take.
    pub max_message: u64,
}

/// What names one end of a reliable connection to a peer that is no program of this crate.
#[cfg(feature = "async-rdma")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairEndpoint {
    pub number: u32,
    pub lid: u16,
    pub gid: [u8; 16],
    /// Of its first packet.
    pub sequence: u32,
}

/// Private data that fits an RDMA CM request over RC (rdma_connect(3): 56 bytes for RDMA_PS_TCP).
pub(crate) const PRIVATE_DATA: usize = 56;

/// What carries a connection's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Link {
    /// A TCP socket (software device).
    Tcp,
    /// A Unix-domain stream socket (software device).
    Unix,
    /// Memory that both processes have mapped, on one host (software device). See [`soft`](crate::soft).
    SharedMemory,
    /// RDMA over Converged Ethernet.
    Roce,
    /// InfiniBand.
    InfiniBand,
    /// iWARP: RDMA over TCP in the NIC.
    Iwarp,
}

impl std::fmt::Display for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::SharedMemory => "shm",
            Self::Roce => "RoCE",
            Self::InfiniBand => "InfiniBand",
            Self::Iwarp => "iWARP",
        })
    }
}

/// Sizes that a device supports.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceLimits {
    /// Largest message in bytes (`max_msg_sz`).
    pub max_message: u64,
    /// Largest memory region in bytes (`max_mr_size`).
    pub max_region: u64,
    /// Deepest queue, in work requests (`max_qp_wr`).
    pub max_queue_depth: u32,
    /// Most scatter/gather entries in one work request (`max_sge`).
    pub max_sge: u32,
    /// Most bytes sent inline.
    pub max_inline: u32,
    /// Most reads and atomics in flight per connection (`max_qp_rd_atom`).
    pub max_rd_atomic: u8,
    /// Deepest completion queue (`max_cqe`).
    pub max_cq_depth: u32,
    /// Most shared receive queues (`max_srq`); 0 where there are none.
    pub max_srq: u32,
    /// Deepest shared receive queue, in receives (`max_srq_wr`).
    pub max_srq_depth: u32,
    /// Most scatter/gather entries of a receive in one (`max_srq_sge`).
    pub max_srq_sge: u32,
}

/// Counters that only the provider can keep.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct QpCounters {
    pub rnr_naks_sent: u64,
    pub rnr_naks_received: u64,
    pub bytes_between_devices: u64,
    /// Requests carried out on memory that the peer has lent, without the peer.
    pub direct: u64,
}

/// The same for either provider.
macro_rules! either {
    ($this:ident, $inner:ident => $result:expr) => {
        match $this {
            Self::Soft($inner) => $result,
            Self::Verbs($inner) => $result,
        }
    };
}

mod srq;

/// Handles of two providers in one call: only a mistake in this crate gets here.
fn mixed(operation: &'static str) -> Error {
    Error::Invalid { operation, reason: "the arguments belong to devices of different providers".to_owned() }
}

/// An opened device.
#[derive(Clone, Debug)]
pub(crate) enum Context {
    Soft(soft::Context),
    Verbs(verbs::Context),
}

#[derive(Clone, Debug)]
pub(crate) enum Pd {
    Soft(soft::Pd),
    Verbs(verbs::Pd),
}

/// A registration. Dropping it deregisters.
#[derive(Debug)]
pub(crate) enum Mr {
    Soft(soft::Mr),
    Verbs(verbs::Mr),
}

/// A key handed to a peer for exactly one range. Dropping it revokes.
#[derive(Debug)]
pub(crate) enum Grant {
    Soft(soft::Grant),
    Verbs(verbs::Grant),
}

/// A completion queue with its channel.
#[derive(Clone, Debug)]
pub(crate) enum Cq {
    Soft(soft::Cq),
    Verbs(verbs::Cq),
}

// Lives behind an `Arc` already, and a box would be one more way to go on each post.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub(crate) enum Qp {
    Soft(soft::Qp),
    Verbs(verbs::Qp),
}

/// A listening endpoint.
#[derive(Debug)]
pub(crate) enum Acceptor {
    Soft(soft::Acceptor),
    Verbs(verbs::Acceptor),
}

/// A connection request that was not answered yet.
#[derive(Debug)]
pub(crate) enum Incoming {
    Soft(soft::Incoming),
    Verbs(verbs::Incoming),
}

/// A queue pair that waits for its peer's endpoint.
#[allow(clippy::large_enum_variant)] // few, and short-lived
#[derive(Debug)]
pub(crate) enum Rendezvous {
    Soft(soft::Rendezvous),
    Verbs(verbs::Rendezvous),
}

impl Context {
    pub(crate) fn name(&self) -> &str {
        either!(self, inner => inner.name())
    }

    pub(crate) fn limits(&self) -> &DeviceLimits {
        either!(self, inner => inner.limits())
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd> {
        match self {
            Self::Soft(inner) => inner.alloc_pd().map(Pd::Soft),
            Self::Verbs(inner) => inner.alloc_pd().map(Pd::Verbs),
        }
    }

    /// A queue with room for at least `depth` completions; `resize` raises it as queue pairs join.
    /// Where there are several completion vectors, `vector` (counted round) says which interrupt tells of them.
    pub(crate) fn create_cq(&self, depth: u32, vector: u32) -> Result<Cq> {
        match self {
            Self::Soft(inner) => inner.create_cq(depth).map(Cq::Soft),
            Self::Verbs(inner) => inner.create_cq(depth, vector).map(Cq::Verbs),
        }
    }

    /// The IP addresses by which peers reach the device.
    pub(crate) fn addresses(&self) -> Vec<std::net::IpAddr> {
        match self {
            // Those of the host are its own; this one always works, within the host.
            Self::Soft(_) => vec![std::net::Ipv4Addr::LOCALHOST.into()],
            Self::Verbs(inner) => inner.addresses(),
        }
    }

    /// Interrupts that completions can be spread over.
    pub(crate) fn completion_vectors(&self) -> u32 {
        match self {
            Self::Soft(_) => 1,
            Self::Verbs(inner) => inner.completion_vectors(),
        }
    }

    /// The numbers of the CPUs near the device.
    pub(crate) fn local_cpus(&self) -> Result<Vec<usize>> {
        match self {
            Self::Soft(inner) => Err(Error::Invalid {
                operation: "find the CPUs near",
                reason: format!("{} is software, and runs on any of them", inner.name()),
            }),
            Self::Verbs(inner) => inner.local_cpus(),
        }
    }

    pub(crate) async fn listen(&self, address: &Address) -> Result<Acceptor> {
        match self {
            Self::Soft(inner) => inner.listen(address).await.map(Acceptor::Soft),
            Self::Verbs(inner) => inner.listen(address).await.map(Acceptor::Verbs),
        }
    }

    /// Connects, handshakes and returns a queue pair that is ready to send.
    pub(crate) async fn connect(
        &self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        address: &Address,
        private_data: &[u8],
    ) -> Result<(Qp, PeerInfo)> {
        match (self, pd, cq) {
            (Self::Soft(inner), Pd::Soft(pd), Cq::Soft(cq)) => {
                inner.connect(pd, cq, config, address, private_data).await.map(|(qp, info)| (Qp::Soft(qp), info))
            }
            (Self::Verbs(inner), Pd::Verbs(pd), Cq::Verbs(cq)) => {
                inner.connect(pd, cq, config, address, private_data).await.map(|(qp, info)| (Qp::Verbs(qp), info))
            }
            _ => Err(mixed("connect")),
        }
    }

    /// Prepares an endpoint for programs with a bootstrap of their own. `local` is where the peer can reach this host.
    /// The rest is what [`Rendezvous::connect`] gets as well: a NIC's endpoint names the queue pair, so that is made here.
    pub(crate) async fn rendezvous(
        &self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        local: &Address,
        private_data: &[u8],
    ) -> Result<Rendezvous> {
        match (self, pd, cq) {
            (Self::Soft(inner), ..) => inner.rendezvous(local).await.map(Rendezvous::Soft),
            (Self::Verbs(inner), Pd::Verbs(pd), Cq::Verbs(cq)) => {
                inner.rendezvous(pd, cq, config, local, private_data).await.map(Rendezvous::Verbs)
            }
            _ => Err(mixed("endpoint")),
        }
    }
}

impl Pd {
    /// Registers memory for local use: the returned key only works for this side's scatter/gather lists.
    pub(crate) fn register(&self, segment: Segment) -> Result<Mr> {
        match self {
            Self::Soft(inner) => inner.register(segment).map(Mr::Soft),
            Self::Verbs(inner) => inner.register(segment).map(Mr::Verbs),
        }
    }

    /// Registers memory of a device that the host's CPU cannot reach; `segment` holds the device's addresses.
    #[cfg(feature = "cuda")]
    pub(crate) fn register_device(
        &self,
        segment: Segment,
        device: std::sync::Arc<dyn crate::memory::device::DeviceMemory>,
    ) -> Result<Mr> {
        match self {
            Self::Soft(inner) => inner.register_device(segment, device).map(Mr::Soft),
            Self::Verbs(_) => Err(Error::Invalid {
                operation: "register",
                reason: "an RDMA NIC reaches a device's memory without copies, and registers it in another way".into(),
            }),
        }
    }

    /// Whether memory of other devices can be registered by dma-buf, or why not.
    pub(crate) fn supports_dmabuf(&self) -> Result<()> {
        match self {
            Self::Soft(_) => Err(Error::io("register", "a dma-buf", std::io::ErrorKind::Unsupported.into())),
            Self::Verbs(inner) => inner.supports_dmabuf(),
        }
    }

    /// Registers `len` bytes of a dma-buf from `offset` on, which this side's lists and peers with `access` address from `iova` on.
    #[cfg(feature = "cuda")]
    pub(crate) fn register_dmabuf(
        &self,
        fd: std::os::fd::RawFd,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> std::io::Result<Mr> {
        match self {
            Self::Soft(_) => Err(std::io::ErrorKind::Unsupported.into()),
            Self::Verbs(inner) => inner.register_dmabuf(fd, offset, len, iova, access).map(Mr::Verbs),
        }
    }

    /// A key for the peer over exactly that.
    #[cfg(feature = "cuda")]
    pub(crate) fn grant_dmabuf(
        &self,
        fd: std::os::fd::RawFd,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> std::io::Result<Grant> {
        match self {
            Self::Soft(_) => Err(std::io::ErrorKind::Unsupported.into()),
            Self::Verbs(inner) => inner.grant_dmabuf(fd, offset, len, iova, access).map(Grant::Verbs),
        }
    }

    /// Makes a key for the peer over exactly `segment`, which lies inside `mr`.
    pub(crate) fn grant(&self, mr: &Mr, segment: Segment, access: Access) -> Result<Grant> {
        match (self, mr) {
            (Self::Soft(inner), Mr::Soft(mr)) => inner.grant(mr, segment, access).map(Grant::Soft),
            (Self::Verbs(inner), Mr::Verbs(mr)) => inner.grant(mr, segment, access).map(Grant::Verbs),
            _ => Err(mixed("expose")),
        }
    }
}

impl Pd {
    /// Whether the provider makes use of [`Grant::set_pages`], and of what devices can share.
    pub(crate) fn shares_pages(&self) -> bool {
        match self {
            Self::Soft(inner) => inner.shares_pages(),
            Self::Verbs(_) => false,
        }
    }
}

impl Mr {
    pub(crate) fn lkey(&self) -> u32 {
        either!(self, inner => inner.lkey())
    }
}

impl Grant {
    pub(crate) fn rkey(&self) -> u32 {
        either!(self, inner => inner.rkey())
    }

    /// Where the granted memory can be mapped by peers of this host. Before anybody knows the key.
    pub(crate) fn set_pages(&self, pages: Pages) {
        if let Self::Soft(inner) = self {
            inner.set_pages(pages);
        }
    }

    /// Where the granted memory is a device's that can be given to processes of this host. Before anybody knows the key.
    #[cfg(feature = "cuda")]
    pub(crate) fn set_shareable(&self, memory: Arc<dyn crate::memory::device::Shareable>) {
        if let Self::Soft(inner) = self {
            inner.set_shareable(memory);
        }
    }

    /// Whether that memory was given to a process.
    #[cfg(feature = "cuda")]
    pub(crate) fn was_shared(&self) -> bool {
        match self {
            Self::Soft(inner) => inner.was_shared(),
            Self::Verbs(_) => false,
        }
    }

    /// Makes the key worthless. When this returns, no request of a peer touches the memory any more.
    /// Never blocks for longer than one chunk of a transfer takes, a few chunks in a device's memory. Idempotent;
    /// dropping does the same.
    pub(crate) fn revoke(&self) {
        either!(self, inner => inner.revoke())
    }
}

impl Cq {
    /// Takes up to `out.len()` completions. A provider whose progress needs the host's CPU makes it here.
    ///
    /// Only one thread calls this at a time (the dispatcher's lock).
    pub(crate) fn poll(&self, out: &mut [WorkCompletion]) -> Result<usize> {
        either!(self, inner => inner.poll(out))
    }

    /// Whether nothing but memory is looked at, and one-sided operations may be done as soon as they are posted.
    pub(crate) fn lives_in_memory(&self) -> bool {
        match self {
            Self::Soft(inner) => inner.lives_in_memory(),
            Self::Verbs(_) => false,
        }
    }

    /// Asks for one notification on [`fd`](Self::fd) at the next completion. Whoever arms polls once more before sleeping.
    pub(crate) fn arm(&self) -> Result<()> {
        either!(self, inner => inner.arm())
    }

    /// The completion channel: readable when there is something to poll. Non-blocking.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        either!(self, inner => inner.fd())
    }

    /// Reads the channel's events and returns how many there were; each must be acknowledged. When none is left unread that
    /// was there before, the next one is an edge again.
    pub(crate) fn read_events(&self) -> Result<u32> {
        either!(self, inner => inner.read_events())
    }

    pub(crate) fn acknowledge(&self, events: u32) {
        either!(self, inner => inner.acknowledge(events))
    }

    /// Has the task of `cx` woken when a queue pair fails, unless [`fd`](Self::fd) tells that too; `true` if one has already.
    pub(crate) fn wake_at_failure(&self, cx: &std::task::Context<'_>) -> bool {
        match self {
            Self::Soft(_) => false,
            Self::Verbs(inner) => inner.wake_at_failure(cx),
        }
    }

    /// Whether bytes moved since the last call, though perhaps nothing completed: a peer is at work on this side's memory.
    /// Only a device that lives on the host's CPU knows.
    pub(crate) fn take_worked(&self) -> bool {
        match self {
            Self::Soft(inner) => inner.take_worked(),
            Self::Verbs(_) => false,
        }
    }

    /// Appends the numbers of the queue pairs that went into the error state since the last call; `true` if there were any.
    /// Their completions are in the queue already. One atomic load when there are none.
    pub(crate) fn take_failed(&self, numbers: &mut Vec<u32>) -> bool {
        either!(self, inner => inner.take_failed(numbers))
    }

    /// Makes room for at least `depth` completions in all; never for fewer than before.
    pub(crate) fn resize(&self, depth: u32) -> Result<()> {
        either!(self, inner => inner.resize(depth))
    }
}

impl Qp {
    pub(crate) fn number(&self) -> u32 {
        either!(self, inner => inner.number())
    }

    /// For a list; nobody else posts to the send queue of a NIC meanwhile.
    pub(crate) fn list_sender(&self) -> ListSender<'_> {
        match self {
            Self::Soft(inner) => ListSender::Soft(inner),
            Self::Verbs(inner) => ListSender::Verbs(inner.sender()),
        }
    }

    pub(crate) fn post_receive(&self, requests: &[ReceiveRequest]) -> std::result::Result<(), PostError> {
        either!(self, inner => inner.post_receive(requests))
    }

    /// Moves the queue pair to the error state: every outstanding request completes as flushed, the peer is told,
    /// and when this returns the provider touches no buffer of this queue pair any more (`true`), or will only let go of them
    /// when the queue pair is destroyed (`false`). Idempotent: the first reason stays.
    pub(crate) fn fail(&self, reason: CloseReason) -> bool {
        either!(self, inner => inner.fail(reason))
    }

    /// Ends the use of buffers where [`fail`](Self::fail) could not promise it. Afterwards nothing new is reported; what was
    /// reported before is still in the completion queue. `false` when the device refuses, which no sound one does. Idempotent.
    pub(crate) fn destroy(&self) -> bool {
        match self {
            Self::Soft(_) => true,
            Self::Verbs(inner) => inner.destroy(),
        }
    }

    /// From now on the keys that the peer has open memory to it, where [`QpConfig::guarded`] was set.
    #[cfg_attr(not(feature = "psk"), allow(dead_code))]
    pub(crate) fn admit(&self) -> Result<()> {
        match self {
            Self::Soft(inner) => {
                inner.admit();
                Ok(())
            }
            Self::Verbs(inner) => inner.admit(),
        }
    }

    /// Why the queue pair is in the error state, if it is.
    pub(crate) fn close_reason(&self) -> Option<CloseReason> {
        either!(self, inner => inner.close_reason())
    }

    pub(crate) fn counters(&self) -> QpCounters {
        either!(self, inner => inner.counters())
    }

    /// Its place among the queue pairs of its shared receive queue, which is the caller's from now on.
    pub(crate) fn take_seat(&self) -> Option<Seat> {
        either!(self, inner => inner.take_seat())
    }
}

/// The right to post to a send queue, one signaled request at a time.
pub(crate) trait PostOne {
    /// The only entry of the next request, or that it has none.
    fn set_entry(&mut self, entry: Option<Sge>);

    /// Where its entries go instead if there may be several: an empty list.
    fn sges(&mut self) -> &mut SgeList;

    /// Posts it. `fill` puts the operation where it belongs: handed over, it would be copied once more.
    fn post_one(
        &mut self,
        wr_id: u64,
        fill: impl FnOnce(&mut WrOp),
        inline: bool,
    ) -> std::result::Result<(), PostError>;
}

/// The same for a list.
pub(crate) enum ListSender<'a> {
    Soft(&'a soft::Qp),
    Verbs(verbs::Sender<'a>),
}

impl ListSender<'_> {
    /// Posts the list with one doorbell.
    pub(crate) fn post(&mut self, requests: &[SendRequest]) -> std::result::Result<(), PostError> {
        match self {
            Self::Soft(inner) => inner.post_send(requests),
            Self::Verbs(inner) => inner.post_list(requests),
        }
    }
}

impl Acceptor {
    pub(crate) fn local_address(&self) -> &Address {
        either!(self, inner => inner.local_address())
    }

    /// The next request. Cancel safe.
    pub(crate) async fn accept(&self) -> Result<Incoming> {
        match self {
            Self::Soft(inner) => inner.accept().await.map(Incoming::Soft),
            Self::Verbs(inner) => inner.accept().await.map(Incoming::Verbs),
        }
    }
}

impl Incoming {
    pub(crate) fn peer(&self) -> String {
        either!(self, inner => inner.peer())
    }

    /// Answers the request. The peer's private data is in the `PeerInfo`; `reply` sees it and gives this side's, or refuses with a reason.
    pub(crate) async fn accept(
        self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        reply: impl FnOnce(&[u8]) -> std::result::Result<Vec<u8>, String> + Send,
    ) -> Result<(Qp, PeerInfo)> {
        match (self, pd, cq) {
            (Self::Soft(inner), Pd::Soft(pd), Cq::Soft(cq)) => {
                inner.accept(pd, cq, config, reply).await.map(|(qp, info)| (Qp::Soft(qp), info))
            }
            (Self::Verbs(inner), Pd::Verbs(pd), Cq::Verbs(cq)) => {
                inner.accept(pd, cq, config, reply).await.map(|(qp, info)| (Qp::Verbs(qp), info))
            }
            _ => Err(mixed("accept")),
        }
    }
}

impl Rendezvous {
    /// This side's endpoint, opaque bytes for the other side's [`connect`](Self::connect); at most 128.
    pub(crate) fn endpoint(&self) -> &[u8] {
        either!(self, inner => inner.endpoint())
    }

    pub(crate) async fn connect(
        self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        remote: &[u8],
        private_data: &[u8],
    ) -> Result<(Qp, PeerInfo)> {
        match (self, pd, cq) {
            (Self::Soft(inner), Pd::Soft(pd), Cq::Soft(cq)) => {
                inner.connect(pd, cq, config, remote, private_data).await.map(|(qp, info)| (Qp::Soft(qp), info))
            }
            // Made with its queue pair, which the endpoint names.
            (Self::Verbs(inner), ..) => inner.connect(remote).await.map(|(qp, info)| (Qp::Verbs(qp), info)),
            _ => Err(mixed("connect")),
        }
    }
}
