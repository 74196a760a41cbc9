//! Agreeing on a link through shared memory, while a connection is set up.
//!
//! ```text
//! connecting                                       accepting
//! REQUEST: offered          ──────────────────▶    same host, same user, wanted? makes and maps the memory
//! maps it                   ◀──────────────────    REPLY: here it is            memory, bell
//! READY: taken              ──────────────────▶    uses it too                  bell
//! ```
//!
//! In place of each of them the number of an [`Obstacle`] can come, and then the connection stays with its socket. An end that insists on
//! shared memory refuses the peer instead: with REJECT, and an accepting one tells in REPLY that it insists, so that the connecting one
//! does not take for connected what the other end is about to close.
//!
//! Descriptors go over Unix sockets only. Two ends that are connected through TCP within one host meet at a second socket, in the abstract
//! namespace (unix(7)) and made for this one handshake; from then on it is used in place of the first one.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::segment::{self, Mapping};
use super::{LinkPolicy, Obstacle, Wire, rights};
use crate::random;

/// What REQUEST says of shared memory, or else the number of an [`Obstacle`].
pub(in super::super) const OFFERED: u8 = 1;

/// What REPLY says of it, or else the number of an [`Obstacle`].
const ATTACHED: u8 = 1;
const BESIDE: u8 = 2;
/// Beside either: without shared memory the accepting end does not want the connection.
const INSISTS: u8 = 1 << 7;

/// What READY says of it, or else the number of an [`Obstacle`].
pub(in super::super) const TAKEN: u8 = 1;

/// What stands for every user that a user namespace does not know (`/proc/sys/kernel/overflowuid`): not one user.
const OVERFLOW_USER: u32 = 65534;

/// The accepting end's answer to an offer.
#[derive(Debug)]
pub(in super::super) struct Agreement {
    code: u8,
    /// For REPLY: the second socket's number.
    pub side: u64,
    refusal: Option<[&'static str; 2]>,
    memory: Option<(OwnedFd, Mapping)>,
    /// Wakes this end.
    bell: Option<OwnedFd>,
    listener: Option<UnixListener>,
}

/// What keeps the two ends of this socket from sharing memory, as far as this end can tell before it tries.
pub(in super::super) fn obstacle(policy: LinkPolicy, socket: Socket<'_>) -> Option<Obstacle> {
    match socket {
        _ if policy == LinkPolicy::Sockets => Some(Obstacle::Unwanted),
        Socket::Tcp(here, there) if !same_host(here, there) => Some(Obstacle::OtherHost),
        // Who is at the other end is asked at the second socket.
        Socket::Tcp(..) => stranger(None),
        Socket::Unix(socket) => stranger(Some(socket)),
    }
}

/// What the two ends are connected through.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Socket<'a> {
    Unix(&'a UnixStream),
    Tcp(SocketAddr, SocketAddr),
}

impl Agreement {
    /// Answers what REQUEST said.
    pub(in super::super) fn answer(policy: LinkPolicy, request: u8, socket: Socket<'_>) -> Self {
        if let Some(obstacle) = obstacle(policy, socket) {
            return Self::refused(obstacle, obstacle.words());
        }
        if request != OFFERED {
            let obstacle = Obstacle::of(request);
            return Self::refused(obstacle, obstacle.words_of_peer());
        }
        Self::make(socket).unwrap_or_else(|| Self::refused(Obstacle::Failed, Obstacle::Failed.words()))
    }

    fn make(socket: Socket<'_>) -> Option<Self> {
        let (memory, bell) = (Some(segment::create().ok()?), Some(bell().ok()?));
        let agreed = Self { code: ATTACHED, side: 0, refusal: None, memory, bell, listener: None };
        if let Socket::Unix(_) = socket {
            return Some(agreed);
        }
        let side = u64::from_ne_bytes(random::bytes().ok()?);
        let listener = UnixListener::bind(path(side)).ok()?;
        Some(Self { code: BESIDE, side, listener: Some(listener), ..agreed })
    }

    fn refused(obstacle: Obstacle, why: [&'static str; 2]) -> Self {
        Self { code: obstacle.code(), side: 0, refusal: Some(why), memory: None, bell: None, listener: None }
    }

    /// What REPLY says, from an end that insists or not.
    pub(in super::super) fn code(&self, insists: bool) -> u8 {
        if insists && self.refusal.is_none() { self.code | INSISTS } else { self.code }
    }

    /// Why there will be none, in words for this end and for the peer.
    pub(in super::super) fn refusal(&self) -> Option<[&'static str; 2]> {
        self.refusal
    }

    /// Whether there is a second socket to meet at.
    pub(in super::super) fn meets(&self) -> bool {
        self.listener.is_some()
    }

    /// What goes with REPLY.
    pub(in super::super) fn attached(&self) -> Option<[BorrowedFd<'_>; 2]> {
        let (memory, _) = self.memory.as_ref().filter(|_| self.code == ATTACHED)?;
        Some([memory.as_fd(), self.bell.as_ref()?.as_fd()])
    }

    /// Waits for the connecting end at the second socket and gives it the memory; pending for good when there is no such socket.
    /// The results are that socket and the peer's bell.
    pub(in super::super) async fn meet(&self) -> (UnixStream, OwnedFd) {
        let (Some(listener), Some((memory, _)), Some(bell)) = (&self.listener, &self.memory, &self.bell) else {
            return std::future::pending().await;
        };
        loop {
            // Whoever else comes by is sent away; when that does not work at all, the peer gives up, and says so.
            let Ok((socket, _)) = listener.accept().await else { return std::future::pending().await };
            if stranger(Some(&socket)).is_some() || send(&socket, &[0], &[memory.as_fd(), bell.as_fd()]).await.is_err()
            {
                continue;
            }
            if let Ok((1, mut received)) = receive(&socket, &mut [0]).await {
                if let (Some(bell), true) = (received.pop(), received.is_empty()) {
                    return (socket, bell);
                }
            }
        }
    }

    /// This end of the link, once the peer has taken it.
    pub(in super::super) fn conclude(self, bell: OwnedFd) -> io::Result<Wire> {
        let ((_, memory), own_bell) = self.memory.zip(self.bell).ok_or(io::ErrorKind::NotConnected)?;
        if !is_bell(&bell) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's descriptor is no eventfd"));
        }
        Ok(Wire::new(memory, bell, own_bell, 0))
    }
}

/// An eventfd by which a peer wakes this end. There is none either where the peer's could not be told from anything else.
pub(in super::super) fn bell() -> io::Result<OwnedFd> {
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    if is_bell(&bell) { Ok(bell) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// Whether writing to a peer's descriptor wakes somebody, and does nothing else. Without /proc that is not known, and then it is not.
fn is_bell(bell: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", bell.as_raw_fd()));
    let nonblocking = fcntl_getfl(bell).and_then(|flags| fcntl_setfl(bell, flags | OFlags::NONBLOCK));
    link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]") && nonblocking.is_ok()
}

/// The connecting end of the link, out of what came with REPLY.
pub(in super::super) fn take_up(mut received: Vec<OwnedFd>, own_bell: OwnedFd) -> io::Result<Wire> {
    match (received.pop(), received.pop(), received.pop()) {
        (Some(bell), Some(memory), None) if is_bell(&bell) => {
            Ok(Wire::new(Mapping::of(memory.as_fd())?, bell, own_bell, 1))
        }
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the memory did not come with the reply")),
    }
}

/// The same through the second socket, which is then the one to use.
pub(in super::super) async fn take_up_beside(side: u64, own_bell: OwnedFd) -> Result<(UnixStream, Wire), Obstacle> {
    // Nobody of that name is in another network namespace.
    let socket = UnixStream::connect(path(side)).await.map_err(|_| Obstacle::OtherHost)?;
    if let Some(stranger) = stranger(Some(&socket)) {
        return Err(stranger);
    }
    let taken = async {
        let (_, received) = receive(&socket, &mut [0]).await?;
        let wire = take_up(received, own_bell)?;
        send(&socket, &[0], &[wire.own_bell()]).await?;
        io::Result::Ok(wire)
    };
    let wire = taken.await.map_err(|_| Obstacle::Failed)?;
    Ok((socket, wire))
}

/// Where the memory is that REPLY tells of.
pub(in super::super) enum Place {
    Nowhere,
    Attached,
    Beside,
}

pub(in super::super) fn place(code: u8) -> Place {
    match code & !INSISTS {
        ATTACHED => Place::Attached,
        BESIDE => Place::Beside,
        _ => Place::Nowhere,
    }
}

/// Whether the accepting end wants no connection without shared memory.
pub(in super::super) fn insists(code: u8) -> bool {
    code & INSISTS != 0
}

/// A place in the abstract namespace.
fn path(side: u64) -> String {
    format!("\0tokio-rdma-{side:016x}")
}

fn same_host(here: SocketAddr, there: SocketAddr) -> bool {
    let (here, there) = (here.ip().to_canonical(), there.ip().to_canonical());
    here == there || (here.is_loopback() && there.is_loopback())
}

/// Whether this end's user is nobody in particular, or not the other end's.
fn stranger(socket: Option<&UnixStream>) -> Option<Obstacle> {
    let user = rustix::process::geteuid().as_raw();
    let peer = match socket {
        // Of whom the kernel does not tell is not the same one.
        Some(socket) => socket.peer_cred().ok().map(|peer| peer.uid()),
        None => Some(user),
    };
    match peer {
        _ if user == OVERFLOW_USER => Some(Obstacle::UnknownUser),
        Some(OVERFLOW_USER) => Some(Obstacle::UnknownUser),
        peer => (peer != Some(user)).then_some(Obstacle::OtherUser),
    }
}

/// As [`rights::send`], once there is room.
pub(in super::super) async fn send(socket: &UnixStream, bytes: &[u8], attached: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = socket.async_io(Interest::WRITABLE, || rights::send(socket, bytes, attached));
    // A socket that nothing was written to yet has room for a handshake's message.
    if sent.await? == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// As [`rights::receive`], once there is something.
pub(in super::super) async fn receive(socket: &UnixStream, out: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    socket.async_io(Interest::READABLE, || rights::receive(socket, out)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_on_this_host() {
        let same = |here: &str, there: &str| same_host(here.parse().unwrap(), there.parse().unwrap());
        assert!(same("127.0.0.1:1", "127.0.0.1:2") && same("127.0.0.1:1", "127.0.0.9:2"));
        assert!(same("10.0.0.7:1", "10.0.0.7:2") && same("[::ffff:10.0.0.7]:1", "10.0.0.7:2"));
        assert!(same("[::1]:1", "[::1]:2"));
        assert!(!same("10.0.0.7:1", "10.0.0.8:2") && !same("127.0.0.1:1", "10.0.0.7:2"));
    }
}
