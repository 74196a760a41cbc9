//! Connections by RDMA CM.
//!
//! ```text
//! active                                              passive
//! resolve address ─ resolve route ─ INIT
//! connect ──────────────── request ─────────────────▶ INIT ─ RTR ─ RTS
//! RTR ─ RTS ◀──────────────── reply ───────────────── accept
//! establish ─────────────── ready ──────────────────▶ established
//! ```
//!
//! The queue pairs are moved here, not by librdmacm, since that leaves the RNR timer at its worst value.
//! None of its calls waits: each starts something, whose end is an event.

use std::net::{IpAddr, SocketAddr};

use super::cm::{self, CmId, Event};
use super::device::Context;
use super::memory::Pd;
use super::pair::{Choices, Qp};
use super::queue::Cq;
use super::sys;
use crate::address::Address;
use crate::error::{Error, Result};
use crate::provider::{Link, PeerInfo, QpConfig};

/// How long the kernel may try to resolve an address or a route: the caller's own limit ends it earlier.
const RESOLVE_MILLIS: i32 = 60_000;

/// Requests that the kernel keeps until the listener has taken them.
const BACKLOG: i32 = 128;

/// `IB_CM_REJ_INVALID_SERVICE_ID`: nobody listens. The kernel hands on the number of the wire (InfiniBand specification,
/// volume 1, table 108).
const NOBODY_LISTENS: i32 = 8;

/// `IB_CM_REJ_CONSUMER_DEFINED`: the program refused, and its words are in the private data.
const REFUSED: i32 = 28;

pub(super) async fn resolve(address: &Address, operation: &'static str) -> Result<Vec<SocketAddr>> {
    match address {
        Address::Ip(address) => Ok(vec![*address]),
        Address::Name(name) => match tokio::net::lookup_host(name).await {
            Ok(found) => Ok(found.collect()),
            Err(error) => Err(Error::io("resolve", name, error)),
        },
        Address::Unix(_) => Err(Error::Invalid {
            operation,
            reason: format!("{address}: an RDMA NIC connects over IP; give an IP address and a port"),
        }),
    }
}

impl Context {
    pub(crate) async fn listen(&self, address: &Address) -> Result<Acceptor> {
        self.not_iwarp("listen")?;
        let device = self.inner().device();
        let mut last = None;
        for candidate in resolve(address, "listen").await? {
            let id = CmId::new(device)?;
            match id.bind(candidate).and_then(|()| id.listen(BACKLOG)) {
                Ok(()) if id.is_on_device() == Some(false) => last = Some(self.elsewhere("bind", candidate)),
                Ok(()) => {
                    let local = SocketAddr::new(candidate.ip(), id.local_port());
                    return Ok(Acceptor { id, local: local.into(), device: self.clone() });
                }
                Err(error) => last = Some(self.unreachable("bind", candidate, error)),
            }
        }
        Err(last.unwrap_or_else(|| nothing(address)))
    }

    pub(crate) async fn connect(
        &self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        address: &Address,
        private_data: &[u8],
    ) -> Result<(Qp, PeerInfo)> {
        self.not_iwarp("connect")?;
        let mut last = None;
        for candidate in resolve(address, "connect").await? {
            match self.connect_to(pd, cq, config, candidate, private_data).await {
                Ok(connected) => return Ok(connected),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| nothing(address)))
    }

    /// Its connections are made in another order, and its reads need other rights.
    fn not_iwarp(&self, operation: &'static str) -> Result<()> {
        match self.inner().device().link() {
            Link::Iwarp => Err(Error::Unsupported {
                operation,
                device: self.name().to_owned(),
                hint: "it is an iWARP device; InfiniBand and RoCE are supported",
            }),
            _ => Ok(()),
        }
    }

    async fn connect_to(
        &self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        to: SocketAddr,
        private_data: &[u8],
    ) -> Result<(Qp, PeerInfo)> {
        let (id, peer) = (self.route(to).await?, to.to_string());
        let pair = Qp::create(pd, cq, config)?;
        let mine = config.max_rd_atomic;
        let choices = Choices { config, rd_atomic: mine };
        pair.modify_for(&id, sys::IBV_QPS_INIT, "to INIT", |attr, mask| choices.init(attr, mask))?;
        id.connect(&mut parameters(config, &pair, mine, mine, private_data))
            .map_err(|error| Error::io("connect", to, error))?;
        let reply = id.inbox().next().await;
        if reply.kind != sys::RDMA_CM_EVENT_CONNECT_RESPONSE {
            return Err(not_accepted(&id, &reply, &peer));
        }
        let rd_atomic = agreed(config, &reply);
        let choices = Choices { config, rd_atomic };
        pair.modify_for(&id, sys::IBV_QPS_RTR, "to RTR", |attr, mask| choices.ready_to_receive(attr, mask))?;
        pair.modify_for(&id, sys::IBV_QPS_RTS, "to RTS", |attr, mask| choices.ready_to_send(attr, mask))?;
        id.establish().map_err(|error| Error::io("establish", format_args!("the connection with {to}"), error))?;
        let info = self.info(&id, peer, reply, rd_atomic);
        pair.belongs_to(id);
        Ok((pair, info))
    }

    /// An id whose address and route are resolved, on this device.
    async fn route(&self, to: SocketAddr) -> Result<CmId> {
        // First where the kernel's routes lead, then from each address of this device.
        let device = self.inner().device();
        let own = super::gid::addresses(device).into_iter().filter(|ip| ip.is_ipv4() == to.is_ipv4()).map(Some);
        for from in std::iter::once(None).chain(own) {
            if let Some(id) = self.route_from(from, to).await? {
                return Ok(id);
            }
        }
        Err(self.elsewhere("connect", to))
    }

    /// `None` where the route is another device's.
    async fn route_from(&self, from: Option<IpAddr>, to: SocketAddr) -> Result<Option<CmId>> {
        let id = CmId::new(self.inner().device())?;
        let peer = to.to_string();
        if let Err(error) = id.resolve_address(from, to, RESOLVE_MILLIS) {
            return match from {
                None => Err(self.unreachable("connect", to, error)),
                Some(_) => Ok(None),
            };
        }
        let event = id.inbox().next().await;
        match event.kind {
            sys::RDMA_CM_EVENT_ADDR_RESOLVED => {}
            // No route from this one of the device's own addresses.
            _ if from.is_some() => return Ok(None),
            _ if event.status == -libc::ENODEV => return Ok(None),
            _ => return Err(cm::unexpected(&id, &event, "resolve", &peer)),
        }
        if id.is_on_device() != Some(true) {
            return Ok(None);
        }
        id.resolve_route(RESOLVE_MILLIS).map_err(|error| Error::io("find a route", to, error))?;
        let event = id.inbox().next().await;
        match event.kind {
            sys::RDMA_CM_EVENT_ROUTE_RESOLVED => Ok(Some(id)),
            _ => Err(cm::unexpected(&id, &event, "route", &peer)),
        }
    }

    fn info(&self, id: &CmId, peer: String, event: Event, max_rd_atomic: u8) -> PeerInfo {
        tracing::debug!(local = ?id.local_address(), %peer, max_rd_atomic, "RDMA CM connection");
        PeerInfo {
            address: peer,
            link: self.inner().device().link(),
            private_data: event.parameters.private_data,
            max_rd_atomic,
            // RDMA CM has no place for the peer's limit, and 56 bytes for all else.
            max_message: self.limits().max_message,
        }
    }

    /// The address exists, but not on this device.
    fn elsewhere(&self, operation: &'static str, address: SocketAddr) -> Error {
        Error::Invalid {
            operation,
            reason: format!("{address} is not reached through {}; {}", self.name(), self.own()),
        }
    }

    fn unreachable(&self, operation: &'static str, address: SocketAddr, error: std::io::Error) -> Error {
        let target = match error.raw_os_error() {
            Some(libc::ENODEV | libc::EADDRNOTAVAIL) => format!("{address} ({})", self.own()),
            _ => address.to_string(),
        };
        Error::io(operation, target, error)
    }

    fn own(&self) -> String {
        let addresses: Vec<_> = super::gid::addresses(self.inner().device()).iter().map(ToString::to_string).collect();
        match addresses.as_slice() {
            [] => format!("{} has no IP address: is its network interface up, with an address?", self.name()),
            _ => format!("{} has {}", self.name(), addresses.join(", ")),
        }
    }
}

fn nothing(address: &Address) -> Error {
    Error::Invalid { operation: "resolve", reason: format!("{address} names no address") }
}

fn parameters(config: &QpConfig, pair: &Qp, responder: u8, initiator: u8, data: &[u8]) -> sys::rdma_conn_param {
    sys::rdma_conn_param {
        private_data: data.as_ptr().cast(),
        // Checked by whoever made it; the type of the field is the limit's reason.
        private_data_len: data.len().min(255) as u8,
        responder_resources: responder,
        initiator_depth: initiator,
        flow_control: 1,
        retry_count: config.retry_count,
        rnr_retry_count: config.rnr_retry,
        srq: config.srq.is_some().into(),
        qp_num: pair.number(),
    }
}

/// Reads and atomics in flight: the least of what either side starts and serves.
fn agreed(config: &QpConfig, event: &Event) -> u8 {
    let theirs = event.parameters.responder_resources.min(event.parameters.initiator_depth);
    config.max_rd_atomic.min(theirs)
}

fn not_accepted(id: &CmId, event: &Event, peer: &str) -> Error {
    let reason = match (event.kind, event.status) {
        (sys::RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS) => {
            return Error::io("connect", peer, std::io::ErrorKind::ConnectionRefused.into());
        }
        (sys::RDMA_CM_EVENT_REJECTED, REFUSED) => {
            let words = event.parameters.private_data.split(|&byte| byte == 0).next().unwrap_or_default();
            format!("the peer refused: {}", String::from_utf8_lossy(words).escape_debug())
        }
        _ => return cm::unexpected(id, event, "connect", peer),
    };
    Error::Handshake { step: "connect", peer: peer.to_owned(), reason }
}

/// A listening endpoint.
#[derive(Debug)]
pub(crate) struct Acceptor {
    id: CmId,
    local: Address,
    device: Context,
}

impl Acceptor {
    pub(crate) fn local_address(&self) -> &Address {
        &self.local
    }

    pub(crate) async fn accept(&self) -> Result<Incoming> {
        loop {
            let event = self.id.inbox().next().await;
            match event {
                Event { kind: sys::RDMA_CM_EVENT_CONNECT_REQUEST, request: Some(ref _id), .. } => {
                    let peer = event.request.as_ref().and_then(CmId::peer_address);
                    let peer = peer.map_or_else(|| "unknown".to_owned(), |address| address.to_string());
                    return Ok(Incoming { event, peer, device: self.device.clone() });
                }
                Event { kind: sys::RDMA_CM_EVENT_DEVICE_REMOVAL, .. } => {
                    let error = std::io::Error::from_raw_os_error(libc::ENODEV);
                    return Err(Error::io("accept", &self.local, error));
                }
                _ => tracing::debug!(event = self.id.name_of(event.kind), "event of a listener"),
            }
        }
    }
}

/// A connection request that was not answered yet; dropped, it is refused.
#[derive(Debug)]
pub(crate) struct Incoming {
    event: Event,
    peer: String,
    device: Context,
}

impl Incoming {
    pub(crate) fn peer(&self) -> String {
        self.peer.clone()
    }

    pub(crate) async fn accept(
        self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        reply: impl FnOnce(&[u8]) -> std::result::Result<Vec<u8>, String> + Send,
    ) -> Result<(Qp, PeerInfo)> {
        let Self { mut event, peer, device } = self;
        let handshake = |reason: String| Error::Handshake { step: "request", peer: peer.clone(), reason };
        let Some(id) = event.request.take() else { return Err(handshake("it holds no id".to_owned())) };
        if id.is_on_device() != Some(true) {
            let reason = format!("it came in through another device than {}", device.name());
            id.reject(&reason);
            return Err(handshake(reason));
        }
        let ours = match reply(&event.parameters.private_data) {
            Ok(ours) => ours,
            Err(reason) => {
                id.reject(&reason);
                return Err(handshake(reason));
            }
        };
        let pair = Qp::create(pd, cq, config)?;
        let rd_atomic = agreed(config, &event);
        let choices = Choices { config, rd_atomic };
        pair.modify_for(&id, sys::IBV_QPS_INIT, "to INIT", |attr, mask| choices.init(attr, mask))?;
        pair.modify_for(&id, sys::IBV_QPS_RTR, "to RTR", |attr, mask| choices.ready_to_receive(attr, mask))?;
        pair.modify_for(&id, sys::IBV_QPS_RTS, "to RTS", |attr, mask| choices.ready_to_send(attr, mask))?;
        id.accept(&mut parameters(config, &pair, rd_atomic, rd_atomic, &ours))
            .map_err(|error| Error::io("accept", &peer, error))?;
        let ready = id.inbox().next().await;
        if ready.kind != sys::RDMA_CM_EVENT_ESTABLISHED {
            return Err(cm::unexpected(&id, &ready, "ready", &peer));
        }
        let info = device.info(&id, peer, event, rd_atomic);
        pair.belongs_to(id);
        Ok((pair, info))
    }
}
