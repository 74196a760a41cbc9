//! Settings, and the ways to a peer.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpStream;

use super::endpoint::{Endpoint, hear, tell};
use super::settings::Settings;
use super::{Listener, Peer};
use crate::address::{Address, IntoAddress};
use crate::connection::{Connection, ConnectionBuilder, ForeignConnection, Mtu, within};
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;

/// Settings of a peer; a listener's are those of every peer that it accepts.
///
/// The protocol agrees on nothing, so what both ends must have in common is set at both: [`mtu`](Self::mtu), and the longest
/// message. The defaults are async-rdma's.
#[derive(Clone, Debug)]
pub struct PeerBuilder {
    connection: ConnectionBuilder,
    settings: Settings,
    local: Option<IpAddr>,
}

/// How long this side asks a peer to wait that finds no receive posted. async-rdma's own value, since its peer tries
/// only 7 times.
const RNR_TIMER: Duration = Duration::from_micros(5120);

impl PeerBuilder {
    pub(super) fn new(domain: &ProtectionDomain) -> Self {
        // Reads in flight are as many as the peer serves, which it does not tell.
        let connection = Connection::builder(domain).mtu(Mtu::B512).max_rd_atomic(1).rnr_timer(RNR_TIMER);
        Self { connection, settings: Settings::default(), local: None }
    }

    /// The path MTU, the same at both ends (async-rdma: `set_mtu`). Default 512 bytes, which is async-rdma's default.
    #[must_use]
    pub fn mtu(mut self, mtu: Mtu) -> Self {
        self.connection = self.connection.mtu(mtu);
        self
    }

    /// Other settings of the connection: depths, retries, timeouts. They are used as they are; the peer does not learn of them.
    /// Of the defaults, [`max_rd_atomic`](ConnectionBuilder::max_rd_atomic) is 1 here, as at the peer.
    #[must_use]
    pub fn connection(mut self, settings: impl FnOnce(ConnectionBuilder) -> ConnectionBuilder) -> Self {
        self.connection = settings(self.connection);
        self
    }

    /// The longest message in bytes (async-rdma: `set_max_message_length`). Default 512, as there. A peer that sends a longer
    /// one ends the connection, so give the larger one where the two ends differ.
    #[must_use]
    pub fn max_message(mut self, bytes: usize) -> Self {
        self.settings.max_message = bytes;
        self
    }

    /// Bytes that the peer may have allocated here at a time, by its `request_remote_mr`; whole pages count. Default 0: it gets
    /// none, and its request fails after 5 s, since the protocol has no way to say no.
    #[must_use]
    pub fn budget(mut self, bytes: u64) -> Self {
        self.settings.budget = bytes;
        self
    }

    /// How long the peer may have such memory at most; the deadline in its token says so. Default 1 h.
    #[must_use]
    pub fn longest_lease(mut self, lease: Duration) -> Self {
        self.settings.longest_lease = lease;
        self
    }

    /// Messages that may wait for [`Peer::receive`], and so many of each other thing that comes from the peer. Default 256.
    /// Each message's place is registered memory from the start.
    #[must_use]
    pub fn backlog(mut self, count: usize) -> Self {
        self.settings.backlog = count;
        self
    }

    /// How long the peer may take to answer a request. Default 5 s, as async-rdma waits.
    #[must_use]
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.settings.answer_timeout = timeout;
        self
    }

    /// The IP address of the device to use. Default: the one that the TCP connection has here, if the device has it too, and
    /// otherwise the device's best.
    #[must_use]
    pub fn local(mut self, address: IpAddr) -> Self {
        self.local = Some(address);
        self
    }

    /// Connects to a listening program. See [`Peer::connect`].
    pub async fn connect(self, address: impl IntoAddress) -> Result<Peer> {
        let settings = self.settings.clone();
        self.checked()?.connect_raw(address).await.and_then(|connection| Peer::start(connection, settings))
    }

    /// Connects to a program that was told `set_raw(true)`: a plain [`Connection`], whose Sends and Receives are the program's
    /// `send_raw` and `receive_raw`, without the protocol.
    ///
    /// # Errors
    ///
    /// As [`Peer::connect`].
    pub async fn connect_raw(self, address: impl IntoAddress) -> Result<Connection> {
        let address = address.into_address()?;
        let setup = self.connection.setup();
        within(setup, "connect", &address, self.connect_to(&address)).await
    }

    async fn connect_to(&self, address: &Address) -> Result<Connection> {
        let mut stream = match address {
            Address::Ip(address) => TcpStream::connect(address).await,
            Address::Name(name) => TcpStream::connect(&**name).await,
            Address::Unix(_) => return Err(no_path("connect", address)),
        }
        .map_err(|error| Error::io("connect", address, error))?;
        let pair = self.pair(&stream)?;
        tell(&mut stream, &pair.endpoint().into()).await?;
        let peer = hear(&mut stream).await?;
        ready(pair, peer).await
    }

    /// Answers a client. When it is told this side's endpoint, its messages find receives already. The caller bounds the time.
    pub(super) async fn answer(&self, stream: &mut TcpStream) -> Result<Peer> {
        let remote = hear(stream).await?;
        let pair = self.pair(stream)?;
        let own = pair.endpoint().into();
        let peer = Peer::start(ready(pair, remote).await?, self.settings.clone())?;
        tell(stream, &own).await?;
        Ok(peer)
    }

    fn pair(&self, stream: &TcpStream) -> Result<ForeignConnection> {
        let local = self.local.or_else(|| stream.local_addr().ok().map(|address| address.ip()));
        self.connection.clone().foreign(local)
    }

    /// Listens for such programs to connect. Port 0 takes a free one; `[::]` listens to IPv4 as well where the system does so.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] naming the address, for example when it is in use; [`Error::Unsupported`] when the domain's device is
    /// no RDMA NIC.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time enabled.
    pub async fn listen(self, address: impl IntoAddress) -> Result<Listener> {
        let address = address.into_address()?;
        Listener::start(self.checked()?, &address).await
    }

    /// Prepares a connection for programs that carry endpoints by means of their own (async-rdma: `ibv_connect`), and for
    /// programs other than async-rdma that connect with the verbs.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when a setting is out of the device's range; [`Error::Unsupported`] when the domain's device is no RDMA NIC.
    pub fn endpoint(self) -> Result<PendingPeer> {
        let this = self.checked()?;
        let pair = this.connection.clone().foreign(this.local)?;
        let endpoint = pair.endpoint().into();
        Ok(PendingPeer { pair, endpoint, settings: this.settings })
    }

    /// Speaks the protocol over a connection that exists, of any device, between two programs of this crate: a way to test on
    /// machines without RDMA what will talk to async-rdma later. Nothing may have been posted on it yet, at either end.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when a setting is out of range, [`Error::Io`] when there is no memory.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time enabled.
    pub fn over(self, connection: Connection) -> Result<Peer> {
        Peer::start(connection, self.checked()?.settings)
    }

    pub(super) fn setup(&self) -> Duration {
        self.connection.setup()
    }

    fn checked(self) -> Result<Self> {
        for (what, value, limit) in
            [("max_message", self.settings.max_message, MOST_BYTES), ("backlog", self.settings.backlog, MOST_WAITING)]
        {
            if !(1..=limit).contains(&value) {
                let (value, limit) = (value as u64, limit as u64);
                return Err(Error::Limit { operation: "connect", what, value, limit, hint: "at least 1" });
            }
        }
        Ok(self)
    }
}

/// Larger things belong into a region.
const MOST_BYTES: usize = 1 << 30;

/// What tokio's channels hold is far above that.
const MOST_WAITING: usize = 1 << 20;

pub(super) fn no_path(operation: &'static str, address: &Address) -> Error {
    Error::Invalid {
        operation,
        reason: format!("{address}: the protocol begins over TCP; give an IP address and a port"),
    }
}

pub(super) fn resolved(address: &Address) -> Result<String> {
    match address {
        Address::Ip(address) => Ok(SocketAddr::to_string(address)),
        Address::Name(name) => Ok(name.clone()),
        Address::Unix(_) => Err(no_path("listen", address)),
    }
}

/// A queue pair that waits for its peer's endpoint; made by [`PeerBuilder::endpoint`].
#[derive(Debug)]
pub struct PendingPeer {
    pair: ForeignConnection,
    endpoint: Endpoint,
    settings: Settings,
}

impl PendingPeer {
    /// This side's endpoint, for the peer.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// Connects to the peer, which does the same with this side's endpoint. It is not waited for: operations are tried again
    /// until the peer is ready or their retries are used up.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] when the device refuses the endpoint.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O and time enabled.
    pub fn connect(self, remote: &Endpoint) -> Result<Peer> {
        let settings = self.settings.clone();
        Peer::start(self.connect_raw(remote)?, settings)
    }

    /// The same without the protocol: a plain [`Connection`], to a program with `set_raw(true)` or to any that uses the verbs.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    ///
    /// # Panics
    ///
    /// As [`connect`](Self::connect).
    pub fn connect_raw(self, remote: &Endpoint) -> Result<Connection> {
        self.pair.connect(&remote.into())
    }
}

/// Over RoCE the kernel looks for the peer's address while it connects the queue pair, for up to a second where there is none:
/// not on a thread that others need.
async fn ready(pair: ForeignConnection, remote: Endpoint) -> Result<Connection> {
    let connecting = tokio::task::spawn_blocking(move || pair.connect(&(&remote).into()));
    let ended = |_| Error::Closed { operation: "connect", reason: crate::CloseReason::RuntimeGone };
    connecting.await.map_err(ended)?
}
