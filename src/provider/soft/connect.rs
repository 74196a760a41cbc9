//! Listening and connecting.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::context::{Context, Pd, Shared, at_most};
use super::cq::Cq;
use super::handshake::{Handshake, Hello, Stream};
use super::near::Offers;
use super::qp::{Qp, Way};
use super::rendezvous::Rendezvous;
use super::shm::{self, Wire};
use crate::address::Address;
use crate::error::{Error, Result};
use crate::provider::{PRIVATE_DATA, PeerInfo, QpConfig, Srq};

/// A listening socket.
#[derive(Debug)]
pub(crate) struct Acceptor {
    ctx: Arc<Shared>,
    local: Address,
    socket: Socket,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _path: BoundPath },
}

/// A Unix socket's path, with the identity of the file that this listener made there.
#[derive(Debug)]
struct BoundPath {
    path: PathBuf,
    identity: Option<(u64, u64)>,
}

impl Drop for BoundPath {
    fn drop(&mut self) {
        // Not if somebody has put another socket there meanwhile.
        if self.identity.is_some() && identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// An accepted socket whose request has not been read yet.
#[derive(Debug)]
pub(crate) struct Incoming {
    ctx: Arc<Shared>,
    stream: Stream,
    peer: String,
}

impl Context {
    pub(crate) async fn listen(&self, address: &Address) -> Result<Acceptor> {
        Acceptor::bind(&self.shared, address).await
    }

    pub(crate) async fn connect(
        &self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        address: &Address,
        private_data: &[u8],
    ) -> Result<(Qp, PeerInfo)> {
        let parts = Parts::check("connect", &self.shared, pd, cq, config)?;
        at_most("connect", "private data", private_data.len() as u64, PRIVATE_DATA as u64)?;
        let token = self.shared.next_id();
        let hello = parts.hello(token, private_data.to_vec());
        parts.initiate(dial(address).await?, address.to_string(), hello, token).await
    }

    pub(crate) async fn rendezvous(&self, local: &Address) -> Result<Rendezvous> {
        Rendezvous::bind(&self.shared, local).await
    }
}

/// What a queue pair is made of, checked to belong together.
pub(super) struct Parts<'a> {
    ctx: &'a Arc<Shared>,
    pd: &'a Pd,
    cq: &'a Cq,
    config: &'a QpConfig,
    offers: Arc<Offers>,
}

impl<'a> Parts<'a> {
    pub(super) fn check(
        operation: &'static str,
        ctx: &'a Arc<Shared>,
        pd: &'a Pd,
        cq: &'a Cq,
        config: &'a QpConfig,
    ) -> Result<Self> {
        if !pd.belongs_to(ctx) || !cq.belongs_to(ctx) {
            let reason = "the protection domain or completion queue is of another device".into();
            return Err(Error::Invalid { operation, reason });
        }
        if !config.srq.as_ref().is_none_or(|srq| matches!(srq, Srq::Soft(srq) if srq.belongs_to(ctx))) {
            let reason = "the shared receive queue is of another device".into();
            return Err(Error::Invalid { operation, reason });
        }
        ctx.check_config(operation, config)?;
        Ok(Self { ctx, pd, cq, config, offers: Offers::open()? })
    }

    /// What this side says of itself.
    pub(super) fn hello(&self, token: u64, private_data: Vec<u8>) -> Hello {
        let apart = self.ctx.faults.as_ref().is_some_and(|faults| faults.keeps_apart() || faults.cut_after().is_some());
        let name = if apart { 0 } else { self.offers.name() };
        Hello::new(self.ctx, token, self.config, name, private_data)
    }

    pub(super) async fn initiate(
        self,
        stream: Stream,
        peer: String,
        hello: Hello,
        token: u64,
    ) -> Result<(Qp, PeerInfo)> {
        let mut handshake = Handshake { ctx: self.ctx, stream, peer };
        let bell = handshake.offers()?;
        let offer = bell.as_ref().map_or_else(|obstacle| obstacle.code(), |_| shm::OFFERED);
        let hello = Hello { shm: offer, ..hello };
        let (reply, attached) = handshake.request(&hello).await?;
        let wire = handshake.confirm(&reply, attached, bell).await?;
        self.finish(handshake, &hello, reply, wire, token)
    }

    /// Answers a request that was read already.
    pub(super) async fn answer(
        self,
        mut handshake: Handshake<'_>,
        hello: Hello,
        request: Hello,
        token: u64,
    ) -> Result<(Qp, PeerInfo)> {
        let agreement = handshake.agree(&request).await?;
        let hello = Hello { shm: agreement.code(handshake.insists()), side: agreement.side, ..hello };
        let wire = handshake.reply(&hello, agreement).await?;
        self.finish(handshake, &hello, request, wire, token)
    }

    fn finish(
        self,
        handshake: Handshake<'_>,
        own: &Hello,
        peer: Hello,
        wire: Option<Wire>,
        token: u64,
    ) -> Result<(Qp, PeerInfo)> {
        let agreed = own.agree(&peer);
        let near = if own.name == 0 { None } else { self.offers.meet(peer.name) };
        let (socket, info) = handshake.finish(&agreed, peer, wire.as_ref())?;
        let way = Way { socket, wire, near };
        let qp = Qp::establish(self.ctx, self.pd.id, &self.cq.shared, self.config, agreed, way, token)?;
        Ok((qp, info))
    }
}

/// Connects a socket to `address`, trying each address that a name resolves to.
pub(super) async fn dial(address: &Address) -> Result<Stream> {
    let failed = |error| Error::io("connect", address, error);
    let tcp = match address {
        Address::Unix(path) => return UnixStream::connect(path).await.map(Stream::Unix).map_err(failed),
        Address::Ip(ip) => TcpStream::connect(ip).await.map_err(failed)?,
        Address::Name(name) => TcpStream::connect(name.as_str()).await.map_err(failed)?,
    };
    tcp.set_nodelay(true).map_err(failed)?;
    Ok(Stream::Tcp(tcp))
}

/// Binds a Unix listener. A socket that nobody listens on any more is replaced; a live one is not, nor is any other file.
async fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
            let probe = UnixStream::connect(path).await;
            let stale = probe.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
            if !is_socket || !stale {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        other => other,
    }
}

impl Acceptor {
    pub(super) async fn bind(ctx: &Arc<Shared>, address: &Address) -> Result<Self> {
        let failed = |error| Error::io("bind", address, error);
        let ctx = Arc::clone(ctx);
        let listener = match address {
            Address::Unix(path) => {
                let listener = bind_unix(path).await.map_err(failed)?;
                let path = BoundPath { identity: identity(path), path: path.clone() };
                return Ok(Self { ctx, local: address.clone(), socket: Socket::Unix { listener, _path: path } });
            }
            Address::Ip(ip) => TcpListener::bind(ip).await.map_err(failed)?,
            Address::Name(name) => TcpListener::bind(name.as_str()).await.map_err(failed)?,
        };
        let local = Address::Ip(listener.local_addr().map_err(failed)?);
        Ok(Self { ctx, local, socket: Socket::Tcp(listener) })
    }

    pub(crate) fn local_address(&self) -> &Address {
        &self.local
    }

    /// Returns as soon as a socket is there: a peer that then says nothing holds up nobody else.
    pub(crate) async fn accept(&self) -> Result<Incoming> {
        let failed = |error| Error::io("accept", &self.local, error);
        let (stream, peer) = match &self.socket {
            Socket::Tcp(listener) => {
                let (socket, peer) = listener.accept().await.map_err(failed)?;
                socket.set_nodelay(true).map_err(failed)?;
                (Stream::Tcp(socket), peer.to_string())
            }
            Socket::Unix { listener, .. } => {
                let (socket, _) = listener.accept().await.map_err(failed)?;
                // Clients of Unix sockets have no address; the kernel knows which process it is.
                let peer = match socket.peer_cred().ok().and_then(|credentials| credentials.pid()) {
                    Some(pid) => format!("unix:pid {pid}"),
                    None => "unix:unknown".to_owned(),
                };
                (Stream::Unix(socket), peer)
            }
        };
        Ok(Incoming { ctx: Arc::clone(&self.ctx), stream, peer })
    }
}

impl Incoming {
    pub(crate) fn peer(&self) -> String {
        self.peer.clone()
    }

    pub(super) fn into_parts(self) -> (Stream, String) {
        (self.stream, self.peer)
    }

    pub(crate) async fn accept(
        self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        reply: impl FnOnce(&[u8]) -> std::result::Result<Vec<u8>, String> + Send,
    ) -> Result<(Qp, PeerInfo)> {
        let Self { ctx, stream, peer } = self;
        let parts = Parts::check("accept", &ctx, pd, cq, config)?;
        let mut handshake = Handshake { ctx: &ctx, stream, peer };
        let request = handshake.await_request().await?;
        if request.peer_nonce != 0 {
            return Err(handshake.reject("this is a listener, not the other end of a rendezvous").await);
        }
        let private_data = match reply(&request.private_data) {
            Ok(data) => data,
            Err(reason) => return Err(handshake.reject(&reason).await),
        };
        if private_data.len() > PRIVATE_DATA {
            let error = at_most("accept", "private data", private_data.len() as u64, PRIVATE_DATA as u64);
            handshake.reject("the listening side failed").await;
            return Err(error.err().unwrap_or_else(|| handshake.error("reply", "private data is too long")));
        }
        let token = ctx.next_id();
        let hello = Hello { nonce: 0, peer_nonce: request.nonce, ..parts.hello(token, private_data) };
        parts.answer(handshake, hello, request, token).await
    }
}
