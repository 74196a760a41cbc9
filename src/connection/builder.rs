//! Every setting of a connection, each default with its reason.

use std::fmt;
use std::time::Duration;

use crate::address::IntoAddress;
use crate::completion::queue::Room;
use crate::connection::psk::{self, PreSharedKey, Role};
use crate::connection::{Connection, PendingConnection, hello};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::provider::{PeerInfo, Qp, QpConfig};
use crate::srq::SharedReceiveQueue;

/// The path MTU: how large a packet may be (`enum ibv_mtu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs)] // sizes in bytes
pub enum Mtu {
    B256 = 256,
    B512 = 512,
    B1024 = 1024,
    B2048 = 2048,
    B4096 = 4096,
}

impl Mtu {
    /// The MTU of so many bytes, or the next smaller one.
    pub(super) fn from_bytes(bytes: u32) -> Self {
        match bytes {
            4096.. => Self::B4096,
            2048.. => Self::B2048,
            1024.. => Self::B1024,
            512.. => Self::B512,
            _ => Self::B256,
        }
    }
}

/// Settings of a connection; the same for both ends, each end its own.
///
/// The defaults suit a service on one host or a LAN. Values out of the device's range are refused when connecting,
/// naming the value and the limit.
#[derive(Clone, Debug)]
pub struct ConnectionBuilder {
    domain: ProtectionDomain,
    send_depth: u32,
    receive_depth: u32,
    max_send_sge: u32,
    max_receive_sge: u32,
    max_inline: Option<u32>,
    retry_count: u8,
    rnr_retry: u8,
    rnr_timer: Duration,
    ack_timeout: Duration,
    max_rd_atomic: Option<u8>,
    mtu: Option<Mtu>,
    keepalive: Option<Duration>,
    setup_timeout: Duration,
    private_data: Vec<u8>,
    key: Option<PreSharedKey>,
    srq: Option<SharedReceiveQueue>,
}

impl ConnectionBuilder {
    pub(crate) fn new(domain: &ProtectionDomain) -> Self {
        Self {
            domain: domain.clone(),
            send_depth: 128,
            receive_depth: 128,
            max_send_sge: 4,
            max_receive_sge: 4,
            max_inline: None,
            retry_count: 7,
            rnr_retry: 7,
            rnr_timer: Duration::from_micros(960),
            ack_timeout: Duration::from_micros(536_871),
            max_rd_atomic: None,
            mtu: None,
            keepalive: Some(Duration::from_secs(10)),
            setup_timeout: Duration::from_secs(10),
            private_data: Vec::new(),
            key: None,
            srq: None,
        }
    }

    /// Slots of the send queue: how many sends, writes, reads and atomics the device may hold at a time (`max_send_wr`).
    /// Further ones wait in line. Default 128: enough to fill a fast link with 4 KiB operations, small enough for thousands of connections.
    #[must_use]
    pub fn send_depth(mut self, depth: u32) -> Self {
        self.send_depth = depth;
        self
    }

    /// Slots of the receive queue: how many receives can be posted at a time (`max_recv_wr`). Default 128, as for sending.
    #[must_use]
    pub fn receive_depth(mut self, depth: u32) -> Self {
        self.receive_depth = depth;
        self
    }

    /// Takes the receives of this connection from a shared receive queue of the same protection domain; `receive_depth` and `max_receive_sge`
    /// mean nothing then. Default: none, the connection has receives of its own.
    ///
    /// Connecting by [`endpoint`](Self::endpoint) needs one of those on an RDMA NIC, and is [`Error::Unsupported`] there. So does the proof of a
    /// pre-shared key everywhere: the two together are [`Error::Invalid`].
    #[must_use]
    pub fn srq(mut self, srq: &SharedReceiveQueue) -> Self {
        self.srq = Some(srq.clone());
        self
    }

    /// Scatter/gather entries of one operation of the send queue (`max_send_sge`). Default 4: a header, a body and some to spare.
    #[must_use]
    pub fn max_send_sge(mut self, entries: u32) -> Self {
        self.max_send_sge = entries;
        self
    }

    /// Scatter/gather entries of one receive (`max_recv_sge`). Default 4, as for sending.
    #[must_use]
    pub fn max_receive_sge(mut self, entries: u32) -> Self {
        self.max_receive_sge = entries;
        self
    }

    /// Payloads up to this many bytes are handed to the device with the request, which saves it a read of host memory
    /// (`max_inline_data`). Default: what the device takes, but at most 64: more makes every slot of the queue larger.
    #[must_use]
    pub fn max_inline(mut self, bytes: u32) -> Self {
        self.max_inline = Some(bytes);
        self
    }

    /// How often a request that nobody acknowledges is tried again before the connection counts as dead, 0 to 7 (`retry_cnt`).
    /// Default 7, the most there is: together with [`ack_timeout`](Self::ack_timeout) it bounds the wait to 4.3 s.
    #[must_use]
    pub fn retry_count(mut self, count: u8) -> Self {
        self.retry_count = count;
        self
    }

    /// How often a message is tried again when the peer has no receive posted, 0 to 7; 7 means without limit (`rnr_retry`).
    /// Default 7: in a service a slow receiver is no broken connection, and [`timeout`](crate::op::SendOp::timeout) sets a deadline where one is wanted.
    #[must_use]
    pub fn rnr_retry(mut self, count: u8) -> Self {
        self.rnr_retry = count;
        self
    }

    /// How long this side asks its peer to wait before it tries again when no receive is posted here (`min_rnr_timer`).
    /// Rounded up to a value that the wire format has. Default 0.96 ms: a receiver that is late by a scheduling slice costs one retry;
    /// the specification's 0 would mean 655 ms.
    #[must_use]
    pub fn rnr_timer(mut self, timer: Duration) -> Self {
        self.rnr_timer = timer;
        self
    }

    /// How long to wait for an acknowledgement before a retry is counted (local ACK timeout, 4.096 us x 2^n, rounded up).
    /// Default 0.54 s (n = 17): a stopped or overloaded host gets 4.3 s in all before its connections are given up.
    #[must_use]
    pub fn ack_timeout(mut self, timeout: Duration) -> Self {
        self.ack_timeout = timeout;
        self
    }

    /// Reads and atomics in flight at a time, in each direction (`max_rd_atomic`, `max_dest_rd_atomic`). The connection uses
    /// the smaller of both ends' values. Default: 16, or what the device supports: with 1, pipelined reads run one by one.
    #[must_use]
    pub fn max_rd_atomic(mut self, count: u8) -> Self {
        self.max_rd_atomic = Some(count);
        self
    }

    /// The path MTU. Default: the largest that the path supports. The software device has no packets of its own to size:
    /// it takes any value, and [`Connection::mtu`] tells it. On an RDMA NIC set it at both ends alike: RDMA CM does not tell the
    /// peer, and a packet that is larger than the other end's value ends the connection.
    #[must_use]
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// How long a connection may be silent before it is probed with an empty write, which a peer that is gone does not
    /// acknowledge. `None` switches that off. Default 10 s: a reliable connection has no probing of its own,
    /// and would not notice a lost peer until it sends.
    #[must_use]
    pub fn keepalive(mut self, interval: Option<Duration>) -> Self {
        self.keepalive = interval;
        self
    }

    /// How long connecting may take in all, and on a listener each single handshake. Default 10 s.
    #[must_use]
    pub fn setup_timeout(mut self, timeout: Duration) -> Self {
        self.setup_timeout = timeout;
        self
    }

    /// Up to 54 bytes that the peer gets with the connection: a name, a version, a [`RemoteRegion`](crate::RemoteRegion).
    #[must_use]
    pub fn private_data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.private_data = data.into();
        self
    }

    /// Has both ends prove that they were given the same key, before either of them gets the connection or the peer can use any memory.
    /// The peer needs the same setting. Default: none.
    ///
    /// It keeps out who does not know the key, and does no more. It is not bound to the connection: whoever passes the messages on between two
    /// holders of the key, because they are on the way or because one of the two was made to connect to them, has both connections afterwards; and
    /// where several services share a key, each of them can do that. Nothing is encrypted, nor are packets protected, so who can forge
    /// packets on the network can still write into a connection that is open. The settings that both ends agree on are not covered. Against such
    /// people a network of your own helps, or encryption below (IPsec in the NIC) or above.
    ///
    /// The proof is a challenge and a response each way (HMAC with SHA-256 over fresh random numbers of both ends, which end it is, and the private
    /// data of both), in four messages of at most 65 bytes on the connection, within [`setup_timeout`](Self::setup_timeout). No end shows
    /// the key; but whoever listens, or takes the server's place, sees the client's answer and can try out guesses on it. So make the key of random
    /// bytes and not of words. The messages need receives like all others: with [`rnr_retry`](Self::rnr_retry) below 7 a peer that is slow in posting
    /// its first one may fail the handshake.
    ///
    /// # Errors
    ///
    /// Connecting then fails with [`Error::Authentication`] where the keys differ, or one end has none; a listener logs and counts it
    /// ([`failed_handshakes`](crate::Listener::failed_handshakes)). [`Error::Timeout`] when the peer says nothing.
    ///
    /// ```
    /// use tokio_rdma::{Connection, Device, Listener, PreSharedKey};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> tokio_rdma::Result<()> {
    /// let key = PreSharedKey::new(*b"32 random bytes from a safe place")?;
    /// let domain = Device::open("soft0")?.alloc_pd()?;
    /// let listener = Listener::builder(&domain).connections(|it| it.pre_shared_key(key.clone())).bind("127.0.0.1:0").await?;
    /// let connecting = Connection::builder(&domain).pre_shared_key(key.clone()).connect(listener.local_address());
    /// let (_client, _server) = tokio::try_join!(connecting, listener.accept())?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "psk")]
    #[must_use]
    pub fn pre_shared_key(mut self, key: PreSharedKey) -> Self {
        self.key = Some(key);
        self
    }

    /// Connects to a listener. See [`Connection::connect`].
    pub async fn connect(self, address: impl IntoAddress) -> Result<Connection> {
        let address = address.into_address()?;
        let prepared = self.prepare("connect")?;
        let room = prepared.reserve()?;
        let (domain, queue) = (&prepared.domain, room.queue().clone());
        let connecting = prepared.device.context().connect(
            domain.provider(),
            queue.device(),
            &prepared.config,
            &address,
            &prepared.hello,
        );
        let introduced = async {
            let connected = connecting.await?;
            prepared.introduce(room, connected, Role::Client).await
        };
        within(self.setup_timeout, "connect", &address, introduced).await
    }

    /// Prepares a connection for programs that exchange endpoints by means of their own (MPI, etcd, a batch system):
    /// `local` is an address of this host that the peer can reach, with port 0 for any.
    /// Give [`PendingConnection::endpoint`] to the peer, and its endpoint to [`PendingConnection::connect`].
    pub async fn endpoint(self, local: impl IntoAddress) -> Result<PendingConnection> {
        let local = local.into_address()?;
        let prepared = self.prepare("endpoint")?;
        let room = prepared.reserve()?;
        let queue = room.queue().clone();
        let preparing = prepared.device.context().rendezvous(
            prepared.domain.provider(),
            queue.device(),
            &prepared.config,
            &local,
            &prepared.hello,
        );
        let rendezvous = preparing.await?;
        PendingConnection::new(prepared, room, rendezvous, self.setup_timeout)
    }

    pub(crate) fn setup(&self) -> Duration {
        self.setup_timeout
    }

    /// Checks every setting against the device.
    pub(super) fn prepare(&self, operation: &'static str) -> Result<Prepared> {
        let device = Device::from_domain(&self.domain).ok_or_else(|| Error::Invalid {
            operation,
            reason: "the protection domain belongs to no open device".to_owned(),
        })?;
        let limits = device.limits();
        let range = |what, value: u64, least: u64, limit: u64| {
            if value < least {
                return Err(Error::Limit { operation, what, value, limit: least, hint: "that is the smallest value" });
            }
            if value > limit {
                return Err(Error::Limit {
                    operation,
                    what,
                    value,
                    limit,
                    hint: "that is the largest value this device takes",
                });
            }
            Ok(())
        };
        range("send_depth", self.send_depth.into(), 1, limits.max_queue_depth.into())?;
        range("receive_depth", self.receive_depth.into(), 1, limits.max_queue_depth.into())?;
        range("max_send_sge", self.max_send_sge.into(), 1, limits.max_sge.into())?;
        range("max_receive_sge", self.max_receive_sge.into(), 1, limits.max_sge.into())?;
        range("retry_count", self.retry_count.into(), 0, 7)?;
        range("rnr_retry", self.rnr_retry.into(), 0, 7)?;
        let max_inline = self.max_inline.unwrap_or(limits.max_inline.min(DEFAULT_INLINE));
        range("max_inline", max_inline.into(), 0, limits.max_inline.into())?;
        let max_rd_atomic = self.max_rd_atomic.unwrap_or(limits.max_rd_atomic.min(DEFAULT_RD_ATOMIC));
        range("max_rd_atomic", max_rd_atomic.into(), 1, limits.max_rd_atomic.into())?;
        range("rnr_timer in microseconds", micros(self.rnr_timer), 10, 491_520)?;
        range("ack_timeout in microseconds", micros(self.ack_timeout), 4, 8_796_093_022)?;
        if let Some(interval) = self.keepalive {
            range("keepalive in milliseconds", interval.as_millis().try_into().unwrap_or(u64::MAX), 1, 24 * 3_600_000)?;
        }
        if self.srq.is_some() && self.key.is_some() {
            return Err(Error::Invalid {
                operation,
                reason: "a pre-shared key is proved in messages that need receives of the connection's own, and it has a shared \
                         receive queue; leave one of the two out"
                    .to_owned(),
            });
        }
        if let Some(srq) = self.srq.as_ref().filter(|srq| srq.domain().id() != self.domain.id()) {
            let (theirs, ours) = (srq.domain().id(), self.domain.id());
            return Err(Error::Invalid {
                operation,
                reason: format!(
                    "the shared receive queue belongs to protection domain {theirs}, the connection to {ours}; not every \
                     device can use it in another one"
                ),
            });
        }
        Ok(Prepared {
            hello: hello::encode(&self.private_data, self.key.is_some())?,
            private_data: self.private_data.clone(),
            key: self.key.clone(),
            domain: self.domain.clone(),
            keepalive: self.keepalive,
            config: QpConfig {
                send_depth: self.send_depth,
                receive_depth: if self.srq.is_some() { 0 } else { self.receive_depth },
                max_send_sge: self.max_send_sge,
                max_receive_sge: self.max_receive_sge,
                max_inline,
                retry_count: self.retry_count,
                rnr_retry: self.rnr_retry,
                rnr_timer: self.rnr_timer,
                ack_timeout: self.ack_timeout,
                max_rd_atomic,
                path_mtu: self.mtu.unwrap_or(Mtu::B4096) as u32,
                guarded: self.key.is_some(),
                srq: self.srq.as_ref().map(|srq| srq.device().clone()),
            },
            srq: self.srq.clone(),
            device,
        })
    }
}

/// See [`ConnectionBuilder::max_inline`].
const DEFAULT_INLINE: u32 = 64;

/// See [`ConnectionBuilder::max_rd_atomic`].
const DEFAULT_RD_ATOMIC: u8 = 16;

fn micros(duration: Duration) -> u64 {
    duration.as_micros().try_into().unwrap_or(u64::MAX)
}

/// Checked settings.
#[derive(Clone, Debug)]
pub(super) struct Prepared {
    pub device: Device,
    pub domain: ProtectionDomain,
    pub config: QpConfig,
    /// The private data and what else goes with it, as the peer gets it.
    pub hello: Vec<u8>,
    pub private_data: Vec<u8>,
    pub keepalive: Option<Duration>,
    pub key: Option<PreSharedKey>,
    pub srq: Option<SharedReceiveQueue>,
}

impl Prepared {
    /// Room in a completion queue for this connection's operations.
    pub(super) fn reserve(&self) -> Result<Room> {
        let room = self.device.reserve(self.config.send_depth + self.config.receive_depth)?;
        if let Some(srq) = &self.srq {
            srq.report_to(room.queue(), self.device.limits().max_cq_depth)?;
        }
        Ok(room)
    }

    /// A connection that nobody probes yet.
    pub(super) fn establish(&self, room: Room, connected: (Qp, PeerInfo)) -> Result<Connection> {
        let (device, domain) = (self.device.clone(), self.domain.clone());
        Connection::establish(device, domain, room, self.config.clone(), self.srq.clone(), connected)
    }

    /// A connection whose two ends have found that they may talk to each other.
    pub(super) async fn introduce(&self, room: Room, connected: (Qp, PeerInfo), role: Role) -> Result<Connection> {
        let connection = self.establish(room, connected)?;
        psk::check(&connection, role, &self.private_data, self.key.as_ref()).await?;
        // Not before: a peer answers no probe until it has let this side in.
        connection.keep_alive(self.keepalive);
        Ok(connection)
    }
}

/// Bounds a step of connection setup.
pub(crate) async fn within<T>(
    limit: Duration,
    operation: &'static str,
    peer: impl fmt::Display,
    step: impl Future<Output = Result<T>>,
) -> Result<T> {
    match tokio::time::timeout(limit, step).await {
        Ok(result) => result,
        Err(_) => {
            let hint = format!("{peer} did not answer in time; setup_timeout is the limit").into();
            Err(Error::Timeout { operation, after: limit, hint })
        }
    }
}
