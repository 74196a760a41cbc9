//! Connection setup: REQUEST, REPLY or REJECT, READY.
//!
//! Each message is a head of 8 bytes (magic, version, type, body length) and a body that is parsed strictly.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use super::context::Shared;
use super::faults::HandshakeStep;
use super::near::Name;
use super::qp::Agreed;
use super::shm::{self, Agreement, LinkPolicy, Obstacle, Socket, Wire};
use super::wire::VERSION;
use crate::error::{Error, Result};
use crate::provider::{Link, PRIVATE_DATA, PeerInfo, QpConfig};

const MAGIC: [u8; 4] = *b"rdma";
const HEAD: usize = 8;
/// Longest reason of a refusal.
const REASON: usize = 256;
/// Longest body: a refusal's.
const BODY: usize = REASON;
/// Body of a request or reply, without private data.
const FIXED: usize = 56;

const REQUEST: u8 = 1;
const REPLY: u8 = 2;
const REJECT: u8 = 3;
const READY: u8 = 4;

/// A connected socket, before it is handed to a queue pair.
#[derive(Debug)]
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    pub(super) fn link(&self) -> Link {
        match self {
            Self::Tcp(_) => Link::Tcp,
            Self::Unix(_) => Link::Unix,
        }
    }

    /// What is on its two ends, as far as shared memory is concerned.
    fn ends(&self) -> io::Result<Socket<'_>> {
        Ok(match self {
            Self::Tcp(socket) => Socket::Tcp(socket.local_addr()?, socket.peer_addr()?),
            Self::Unix(socket) => Socket::Unix(socket),
        })
    }

    /// Reads with the descriptors that come along.
    async fn read_attached(&mut self, mut out: &mut [u8], attached: &mut Vec<OwnedFd>) -> io::Result<()> {
        let Self::Unix(socket) = self else { return self.read(out).await };
        while !out.is_empty() {
            let (read, came) = shm::receive(socket, out).await?;
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            attached.extend(came);
            if attached.len() > shm::DESCRIPTORS {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "more descriptors than any message has"));
            }
            out = &mut out[read..];
        }
        Ok(())
    }

    async fn write_attached(&mut self, bytes: &[u8], attached: &[BorrowedFd<'_>]) -> io::Result<()> {
        match self {
            Self::Unix(socket) if !attached.is_empty() => shm::send(socket, bytes, attached).await,
            _ => self.write(bytes).await,
        }
    }

    async fn read(&mut self, out: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.read_exact(out).await,
            Self::Unix(socket) => socket.read_exact(out).await,
        }
        .map(|_| ())
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => socket.write_all(bytes).await,
            Self::Unix(socket) => socket.write_all(bytes).await,
        }
    }

    /// The socket without tokio, still non-blocking.
    fn into_fd(self) -> io::Result<OwnedFd> {
        Ok(match self {
            Self::Tcp(socket) => socket.into_std()?.into(),
            Self::Unix(socket) => socket.into_std()?.into(),
        })
    }
}

/// What REQUEST and REPLY say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub queue_pair: u32,
    /// Reads and atomics that this side starts, and that it serves.
    pub reads_started: u8,
    pub reads_served: u8,
    pub max_message: u64,
    /// Rendezvous: who speaks and who is meant. Zero otherwise.
    pub nonce: u64,
    pub peer_nonce: u64,
    /// Of the queue pair, for peers in the same process.
    pub name: Name,
    /// Shared memory: whether it is offered, or what became of the offer, or why not; and where else to meet for it.
    pub shm: u8,
    pub side: u64,
    pub private_data: Vec<u8>,
}

impl Hello {
    pub(super) fn new(ctx: &Shared, token: u64, config: &QpConfig, name: Name, private_data: Vec<u8>) -> Self {
        Self {
            queue_pair: token as u32,
            reads_started: config.max_rd_atomic,
            reads_served: config.max_rd_atomic,
            max_message: ctx.limits.max_message,
            nonce: 0,
            peer_nonce: 0,
            name,
            shm: Obstacle::Untold.code(),
            side: 0,
            private_data,
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(FIXED + PRIVATE_DATA);
        out.extend_from_slice(&self.queue_pair.to_le_bytes());
        out.extend_from_slice(&[self.reads_started, self.reads_served]);
        out.extend_from_slice(&self.max_message.to_le_bytes());
        out.extend_from_slice(&self.nonce.to_le_bytes());
        out.extend_from_slice(&self.peer_nonce.to_le_bytes());
        out.extend_from_slice(&self.name.to_le_bytes());
        out.push(self.shm);
        out.extend_from_slice(&self.side.to_le_bytes());
        out.push(self.private_data.len() as u8);
        out.extend_from_slice(&self.private_data);
        out
    }

    fn parse(body: &[u8]) -> std::result::Result<Self, &'static str> {
        let (fixed, private_data) = body.split_first_chunk::<FIXED>().ok_or("it is too short")?;
        let word = |at: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&fixed[at..at + 8]);
            u64::from_le_bytes(raw)
        };
        let hello = Self {
            queue_pair: u32::from_le_bytes([fixed[0], fixed[1], fixed[2], fixed[3]]),
            reads_started: fixed[4],
            reads_served: fixed[5],
            max_message: word(6),
            nonce: word(14),
            peer_nonce: word(22),
            name: Name::from(word(30)) | Name::from(word(38)) << 64,
            shm: fixed[46],
            side: word(47),
            private_data: private_data.to_vec(),
        };
        if usize::from(fixed[55]) != private_data.len() || private_data.len() > PRIVATE_DATA {
            return Err("the length of its private data is wrong");
        }
        if hello.max_message == 0 {
            return Err("its largest message is empty");
        }
        Ok(hello)
    }

    /// What holds when this side's hello meets `peer`'s.
    pub(super) fn agree(&self, peer: &Hello) -> Agreed {
        Agreed {
            reads_started: self.reads_started.min(peer.reads_served).into(),
            reads_served: self.reads_served.min(peer.reads_started).into(),
            max_message: self.max_message.min(peer.max_message),
        }
    }
}

/// One side of a connection setup in progress.
pub(super) struct Handshake<'a> {
    pub ctx: &'a Shared,
    pub stream: Stream,
    pub peer: String,
}

impl Handshake<'_> {
    pub(super) fn error(&self, step: &'static str, reason: impl ToString) -> Error {
        Error::Handshake { step, peer: self.peer.clone(), reason: reason.to_string() }
    }

    /// A place where fault injection may end the setup; the socket closes with this value.
    pub(super) fn reached(&self, step: HandshakeStep, name: &'static str) -> Result<()> {
        match &self.ctx.faults {
            Some(faults) if faults.dies_at(step) => Err(self.error(name, "ended by fault injection")),
            _ => Ok(()),
        }
    }

    async fn send(&mut self, step: &'static str, kind: u8, body: &[u8]) -> Result<()> {
        self.send_attached(step, kind, body, &[]).await
    }

    async fn send_attached(
        &mut self,
        step: &'static str,
        kind: u8,
        body: &[u8],
        attached: &[BorrowedFd<'_>],
    ) -> Result<()> {
        let mut message = Vec::with_capacity(HEAD + body.len());
        message.extend_from_slice(&MAGIC);
        message.extend_from_slice(&[VERSION, kind]);
        message.extend_from_slice(&(body.len() as u16).to_le_bytes());
        message.extend_from_slice(body);
        let sent = self.stream.write_attached(&message, attached).await;
        sent.map_err(|error| self.error(step, error))
    }

    async fn receive(&mut self, step: &'static str) -> Result<(u8, Vec<u8>)> {
        self.receive_attached(step, None).await
    }

    /// A message, and where some are due the descriptors that come with it; all others are lost on the way.
    async fn receive_attached(
        &mut self,
        step: &'static str,
        mut attached: Option<&mut Vec<OwnedFd>>,
    ) -> Result<(u8, Vec<u8>)> {
        let mut head = [0; HEAD];
        self.fill(step, &mut head, attached.as_deref_mut()).await?;
        if head[..4] != MAGIC {
            return Err(self.error(step, "the peer does not speak this protocol (is it another service's port?)"));
        }
        if head[4] != VERSION {
            let reason = format!("the peer speaks version {} of the protocol, this side version {VERSION}", head[4]);
            return Err(self.error(step, reason));
        }
        let length = usize::from(u16::from_le_bytes([head[6], head[7]]));
        if length > BODY {
            return Err(self.error(step, format!("a message of {length} bytes, the limit is {BODY}")));
        }
        let mut body = vec![0; length];
        self.fill(step, &mut body, attached).await?;
        Ok((head[5], body))
    }

    async fn fill(&mut self, step: &'static str, out: &mut [u8], attached: Option<&mut Vec<OwnedFd>>) -> Result<()> {
        let read = match attached {
            Some(attached) => self.stream.read_attached(out, attached).await,
            None => self.stream.read(out).await,
        };
        match read {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.error(step, "the peer closed the socket"))
            }
            Err(error) => Err(self.error(step, error)),
        }
    }

    /// Whether this side offers shared memory, with the descriptor by which the peer wakes it; an error if it insists but cannot.
    pub(super) fn offers(&self) -> Result<std::result::Result<OwnedFd, Obstacle>> {
        let ends = self.stream.ends().map_err(|error| self.error("link", error))?;
        let offered = match shm::obstacle(self.ctx.links, ends) {
            Some(obstacle) => Err(obstacle),
            None => shm::bell().map_err(|_| Obstacle::Failed),
        };
        match offered {
            Err(obstacle) if self.insists() => Err(self.error("link", wanted(obstacle.words()[0]))),
            offered => Ok(offered),
        }
    }

    pub(super) fn insists(&self) -> bool {
        self.ctx.links == LinkPolicy::SharedMemory
    }

    /// The connecting side, up to the reply, with what came along.
    pub(super) async fn request(&mut self, hello: &Hello) -> Result<(Hello, Vec<OwnedFd>)> {
        self.reached(HandshakeStep::Connected, "connect")?;
        self.send("request", REQUEST, &hello.encode()).await?;
        self.reached(HandshakeStep::RequestSent, "request")?;
        let mut attached = Vec::new();
        let due = (hello.shm == shm::OFFERED).then_some(&mut attached);
        match self.receive_attached("reply", due).await? {
            (REPLY, body) => {
                let reply = Hello::parse(&body).map_err(|why| self.error("reply", format!("bad reply: {why}")))?;
                if (reply.nonce, reply.peer_nonce) != (hello.peer_nonce, hello.nonce) {
                    return Err(self.error("reply", "another endpoint answered"));
                }
                Ok((reply, attached))
            }
            (REJECT, why) => Err(self.refused("request", &why)),
            (kind, _) => Err(self.error("reply", format!("unexpected message {kind}"))),
        }
    }

    /// The connecting side, from the reply on: takes up shared memory if there is some, and confirms.
    pub(super) async fn confirm(
        &mut self,
        reply: &Hello,
        attached: Vec<OwnedFd>,
        bell: std::result::Result<OwnedFd, Obstacle>,
    ) -> Result<Option<Wire>> {
        let taken = match (shm::place(reply.shm), bell) {
            (_, Err(own)) => Err((own, own.words())),
            (shm::Place::Attached, Ok(bell)) => match shm::take_up(attached, bell) {
                Ok(wire) => Ok((None, wire)),
                Err(_) => Err((Obstacle::Failed, Obstacle::Failed.words())),
            },
            (shm::Place::Beside, Ok(bell)) => match shm::take_up_beside(reply.side, bell).await {
                Ok((socket, wire)) => Ok((Some(socket), wire)),
                Err(own) => Err((own, own.words())),
            },
            (shm::Place::Nowhere, Ok(_)) => {
                let obstacle = Obstacle::of(reply.shm);
                Err((obstacle, obstacle.words_of_peer()))
            }
        };
        let (beside, wire, ready) = match taken {
            Ok((beside, wire)) => (beside, Some(wire), shm::TAKEN),
            // Not told that all is well, the other end does not go on either.
            Err((_, [why, for_peer])) if self.insists() || shm::insists(reply.shm) => {
                self.refuse("ready", &wanted(for_peer)).await;
                return Err(self.error("link", wanted(why)));
            }
            Err((obstacle, [why, _])) => {
                tracing::debug!(peer = self.peer, why, "no link through shared memory");
                (None, None, obstacle.code())
            }
        };
        let bell = wire.as_ref().filter(|_| beside.is_none()).map(Wire::own_bell);
        self.send_attached("ready", READY, &[ready], bell.as_slice()).await?;
        if let Some(beside) = beside {
            self.stream = Stream::Unix(beside);
        }
        self.reached(HandshakeStep::ReadySent, "ready")?;
        Ok(wire)
    }

    /// The listening side, up to the request.
    pub(super) async fn await_request(&mut self) -> Result<Hello> {
        self.reached(HandshakeStep::Connected, "connect")?;
        let hello = match self.receive("request").await? {
            (REQUEST, body) => {
                Hello::parse(&body).map_err(|why| self.error("request", format!("bad request: {why}")))?
            }
            (kind, _) => return Err(self.error("request", format!("unexpected message {kind}"))),
        };
        self.reached(HandshakeStep::RequestReceived, "request")?;
        Ok(hello)
    }

    /// Answers what the request said of shared memory. If this side insists and cannot have it, the peer is refused.
    pub(super) async fn agree(&mut self, request: &Hello) -> Result<Agreement> {
        let ends = self.stream.ends().map_err(|error| self.error("link", error))?;
        let agreement = Agreement::answer(self.ctx.links, request.shm, ends);
        if let Some([why, for_peer]) = agreement.refusal().filter(|_| self.insists()) {
            self.refuse("reply", &wanted(for_peer)).await;
            return Err(self.error("link", wanted(why)));
        }
        Ok(agreement)
    }

    pub(super) async fn reply(&mut self, hello: &Hello, agreement: Agreement) -> Result<Option<Wire>> {
        let attached = agreement.attached();
        self.send_attached("reply", REPLY, &hello.encode(), attached.as_ref().map_or(&[], |it| &it[..])).await?;
        self.reached(HandshakeStep::ReplySent, "reply")?;
        let mut attached = Vec::new();
        let (ready, mut met) = {
            let meeting = agreement.meet();
            let due = (agreement.refusal().is_none() && !agreement.meets()).then_some(&mut attached);
            let ready = self.receive_attached("ready", due);
            tokio::pin!(meeting, ready);
            let mut met = None;
            let ready = loop {
                tokio::select! {
                    it = &mut meeting, if met.is_none() => met = Some(it),
                    it = &mut ready => break it?,
                }
            };
            // The two come by different ways.
            if met.is_none() && agreement.meets() && ready == (READY, vec![shm::TAKEN]) {
                met = Some(meeting.await);
            }
            (ready, met)
        };
        match (ready.0, ready.1.as_slice()) {
            (READY, [shm::TAKEN]) => {}
            (READY, [code]) => {
                let [why, _] = agreement.refusal().unwrap_or(Obstacle::of(*code).words_of_peer());
                // A peer that was told that this side insists does not come here.
                if self.insists() {
                    return Err(self.error("link", wanted(why)));
                }
                tracing::debug!(peer = self.peer, why, "no link through shared memory");
                return Ok(None);
            }
            (REJECT, why) => return Err(self.refused("ready", why)),
            (kind, _) => return Err(self.error("ready", format!("unexpected message {kind}"))),
        }
        let bell = match met.take() {
            Some((socket, bell)) => {
                self.stream = Stream::Unix(socket);
                Some(bell)
            }
            None => attached.pop(),
        };
        let bell = bell.ok_or_else(|| self.error("ready", "the peer's descriptor is missing"))?;
        agreement.conclude(bell).map(Some).map_err(|error| self.error("ready", error))
    }

    /// Refuses the peer; the error is for this side.
    pub(super) async fn reject(&mut self, reason: &str) -> Error {
        self.refuse("reply", reason).await;
        self.error("request", format!("refused by this side: {reason}"))
    }

    async fn refuse(&mut self, step: &'static str, reason: &str) {
        let mut end = reason.len().min(REASON);
        while !reason.is_char_boundary(end) {
            end -= 1;
        }
        // That the refusal does not arrive changes nothing: the socket closes.
        let _ = self.send(step, REJECT, &reason.as_bytes()[..end]).await;
    }

    /// The peer has refused.
    fn refused(&self, step: &'static str, why: &[u8]) -> Error {
        self.error(step, format!("refused: {}", String::from_utf8_lossy(why).escape_debug()))
    }

    pub(super) fn finish(self, agreed: &Agreed, peer: Hello, wire: Option<&Wire>) -> Result<(OwnedFd, PeerInfo)> {
        let info = PeerInfo {
            address: self.peer,
            link: if wire.is_some() { Link::SharedMemory } else { self.stream.link() },
            private_data: peer.private_data,
            max_rd_atomic: agreed.reads_started.min(agreed.reads_served) as u8,
            max_message: agreed.max_message,
        };
        let socket = self.stream.into_fd().map_err(|error| Error::io("take over", &info.address, error))?;
        Ok((socket, info))
    }
}

fn wanted(why: &str) -> String {
    format!("shared memory is wanted, but {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hellos_survive_the_round_trip_and_are_checked() {
        let hello = Hello {
            queue_pair: 7,
            reads_started: 16,
            reads_served: 4,
            max_message: 1 << 30,
            nonce: 1,
            peer_nonce: u64::MAX,
            name: 0x1122_3344_5566_7788_99aa_bbcc_ddee_ff00,
            shm: 2,
            side: 0x0102_0304_0506_0708,
            private_data: b"who I am".to_vec(),
        };
        let bytes = hello.encode();
        assert_eq!(Hello::parse(&bytes), Ok(hello.clone()));
        for len in 0..bytes.len() {
            assert!(Hello::parse(&bytes[..len]).is_err());
        }
        let empty = Hello { max_message: 0, ..hello.clone() };
        assert!(Hello::parse(&empty.encode()).is_err());
        let long = Hello { private_data: vec![0; PRIVATE_DATA + 1], ..hello };
        assert!(Hello::parse(&long.encode()).is_err());
    }
}
