//! Agreeing on a link through shared memory, while a connection is set up.
//!
//! ```text
//! connecting                                       accepting
//! REQUEST: offered          ──────────────────▶    same host, same user, wanted? makes the memory
//! maps it                   ◀──────────────────    REPLY: here it is            memory, bell
//! READY: taken              ──────────────────▶    maps it too                  bell
//! ```
//!
//! Descriptors go over Unix sockets only. Two ends that are connected through TCP within one host meet at a second socket, in the abstract
//! namespace (unix(7)) and made for this one handshake; from then on it is used in place of the first one.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};

use super::{LinkPolicy, Wire, segment};
use crate::error::Result;
use crate::provider::soft::context::random;

/// What REQUEST says of shared memory.
pub(in super::super) const DECLINED: u8 = 0;
pub(in super::super) const OFFERED: u8 = 1;

/// What REPLY says of it, or else the number of a reason why not.
const ATTACHED: u8 = 1;
const BESIDE: u8 = 2;

/// Why there is none: the numbers from 3 on.
const REASONS: [&str; 4] = [
    "the other end wants sockets only",
    "the ends belong to different users",
    "the ends are not on one host, or not in one network namespace",
    "the other end could not make shared memory",
];
const UNWANTED: u8 = 3;
const OTHER_USER: u8 = 4;
const OTHER_HOST: u8 = 5;
const FAILED: u8 = 6;

/// What stands for every user that a user namespace does not know (`/proc/sys/kernel/overflowuid`): not one user.
const OVERFLOW_USER: u32 = 65534;

/// Most descriptors in one message.
pub(in super::super) const DESCRIPTORS: usize = 2;

/// The accepting end's answer to an offer.
#[derive(Debug)]
pub(in super::super) struct Agreement {
    /// For REPLY.
    pub code: u8,
    pub side: u64,
    memory: Option<OwnedFd>,
    listener: Option<UnixListener>,
}

/// A place in the abstract namespace, by number.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Side(pub u64);

impl Side {
    fn path(self) -> String {
        format!("\0tokio-rdma-{:016x}", self.0)
    }
}

/// Whether the connecting end offers shared memory over this socket, or why not.
pub(in super::super) fn offer(policy: LinkPolicy, socket: Socket<'_>) -> std::result::Result<(), &'static str> {
    match (policy, socket) {
        (LinkPolicy::Sockets, _) => Err("this end wants sockets only"),
        (_, Socket::Unix(socket)) if !same_user(socket) => Err(reason(OTHER_USER)),
        (_, Socket::Tcp(here, there)) if !same_host(here, there) => Err(reason(OTHER_HOST)),
        _ => Ok(()),
    }
}

/// What the two ends are connected through.
#[derive(Clone, Copy, Debug)]
pub(in super::super) enum Socket<'a> {
    Unix(&'a UnixStream),
    Tcp(SocketAddr, SocketAddr),
}

/// What REPLY's number means, if it is a refusal.
pub(in super::super) fn reason(code: u8) -> &'static str {
    REASONS.get(usize::from(code).wrapping_sub(UNWANTED.into())).copied().unwrap_or("the other end did not say why")
}

impl Agreement {
    /// Answers what REQUEST said.
    pub(in super::super) fn answer(policy: LinkPolicy, request: u8, socket: Socket<'_>) -> Self {
        let refused = |code| Self { code, side: 0, memory: None, listener: None };
        match (policy, socket) {
            (LinkPolicy::Sockets, _) => return refused(UNWANTED),
            _ if request != OFFERED => return refused(UNWANTED),
            (_, Socket::Unix(socket)) if !same_user(socket) => return refused(OTHER_USER),
            (_, Socket::Tcp(here, there)) if !same_host(here, there) => return refused(OTHER_HOST),
            _ => {}
        }
        let Ok(memory) = segment::create() else { return refused(FAILED) };
        if let Socket::Unix(_) = socket {
            return Self { code: ATTACHED, side: 0, memory: Some(memory), listener: None };
        }
        match random().and_then(|side| Ok((side, listen(Side(side))?))) {
            Ok((side, listener)) => Self { code: BESIDE, side, memory: Some(memory), listener: Some(listener) },
            Err(_) => refused(FAILED),
        }
    }

    /// Why there will be none.
    pub(in super::super) fn refusal(&self) -> Option<&'static str> {
        self.memory.is_none().then(|| reason(self.code))
    }

    /// Whether there is a second socket to meet at.
    pub(in super::super) fn meets(&self) -> bool {
        self.listener.is_some()
    }

    /// What goes with REPLY.
    pub(in super::super) fn attached<'a>(&'a self, bell: BorrowedFd<'a>) -> Option<[BorrowedFd<'a>; 2]> {
        let memory = self.memory.as_ref().filter(|_| self.code == ATTACHED)?;
        Some([memory.as_fd(), bell])
    }

    /// Waits for the connecting end at the second socket and gives it the memory; pending for good when there is no such socket.
    /// The results are that socket and the peer's bell.
    pub(in super::super) async fn meet(&self, bell: Option<BorrowedFd<'_>>) -> (UnixStream, OwnedFd) {
        let (Some(listener), Some(memory), Some(bell)) = (&self.listener, &self.memory, bell) else {
            return std::future::pending().await;
        };
        loop {
            // Whoever else comes by is sent away; when that does not work at all, the peer gives up, and says so.
            let Ok((socket, _)) = listener.accept().await else { return std::future::pending().await };
            if !same_user(&socket) || send(&socket, &[0], &[memory.as_fd(), bell]).await.is_err() {
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
        let memory = self.memory.ok_or(io::ErrorKind::NotConnected)?;
        if !is_bell(&bell) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer's descriptor is no eventfd"));
        }
        Wire::new(memory.as_fd(), bell, 0)
    }
}

/// Whether writing to a peer's descriptor wakes somebody, and does nothing else. Without /proc that is not known, and then it is not.
fn is_bell(bell: &OwnedFd) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", bell.as_raw_fd()));
    let nonblocking = fcntl_getfl(bell).and_then(|flags| fcntl_setfl(bell, flags | OFlags::NONBLOCK));
    link.is_ok_and(|link| link.as_os_str() == "anon_inode:[eventfd]") && nonblocking.is_ok()
}

/// The connecting end of the link, out of what came with REPLY.
pub(in super::super) fn take_up(mut received: Vec<OwnedFd>) -> io::Result<Wire> {
    match (received.pop(), received.pop(), received.pop()) {
        (Some(bell), Some(memory), None) if is_bell(&bell) => Wire::new(memory.as_fd(), bell, 1),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the memory did not come with the reply")),
    }
}

/// The same through the second socket, which is then the one to use.
pub(in super::super) async fn take_up_beside(side: Side, bell: BorrowedFd<'_>) -> io::Result<(UnixStream, Wire)> {
    let socket = UnixStream::connect(side.path()).await?;
    if !same_user(&socket) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason(OTHER_USER)));
    }
    let (_, received) = receive(&socket, &mut [0]).await?;
    let wire = take_up(received)?;
    send(&socket, &[0], &[bell]).await?;
    Ok((socket, wire))
}

/// Where the memory is that REPLY tells of.
pub(in super::super) enum Place {
    Nowhere,
    Attached,
    Beside,
}

pub(in super::super) fn place(code: u8) -> Place {
    match code {
        ATTACHED => Place::Attached,
        BESIDE => Place::Beside,
        _ => Place::Nowhere,
    }
}

fn listen(side: Side) -> Result<UnixListener> {
    UnixListener::bind(side.path()).map_err(|error| crate::error::Error::io("bind", "an abstract socket", error))
}

fn same_host(here: SocketAddr, there: SocketAddr) -> bool {
    let (here, there) = (here.ip().to_canonical(), there.ip().to_canonical());
    here == there || (here.is_loopback() && there.is_loopback())
}

fn same_user(socket: &UnixStream) -> bool {
    let user = rustix::process::geteuid().as_raw();
    user != OVERFLOW_USER && socket.peer_cred().is_ok_and(|peer| peer.uid() == user)
}

/// Sends bytes, the first of which carries the descriptors.
pub(in super::super) async fn send(socket: &UnixStream, bytes: &[u8], attached: &[BorrowedFd<'_>]) -> io::Result<()> {
    let sent = socket.async_io(Interest::WRITABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !attached.is_empty() && !control.push(SendAncillaryMessage::ScmRights(attached)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
    });
    // A socket that nothing was written to yet has room for a handshake's message.
    if sent.await? == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Reads once: how many bytes, and what came with them.
pub(in super::super) async fn receive(socket: &UnixStream, out: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let read = socket.async_io(Interest::READABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let read = recvmsg(socket, &mut [IoSliceMut::new(out)], &mut control, flags)?;
        let mut received = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                received.extend(descriptors);
            }
        }
        Ok((read.bytes, received))
    });
    read.await
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

    #[test]
    fn every_refusal_has_its_reason() {
        let reasons: Vec<_> = [UNWANTED, OTHER_USER, OTHER_HOST, FAILED].map(reason).into();
        assert_eq!(reasons, REASONS);
        assert!([0, 1, 2, 7, 255].map(reason).iter().all(|reason| !REASONS.contains(reason)));
    }
}
