//! The link through shared memory: the wire of a queue pair whose peer runs on this host, for the same user.
//!
//! It carries the stream of frames that a socket carries otherwise, so everything above it is the same: order, keys, RNR, retries,
//! flushing. The bytes go through two rings in memory that both ends have mapped ([`segment`]), and no system call is made
//! while both look; one who sleeps is woken through a descriptor that its completion queue's epoll watches (the bell).
//!
//! The socket through which the link was agreed on stays open, and has two uses. Its end is the end of the peer's process. And the
//! last bytes of a stream, a goodbye, go through it: once it is readable, what lies in the ring is read first, and then the socket.
//!
//! **Whom it trusts.** Both ends belong to the same user (`SO_PEERCRED`, compared with the effective user id, see unix(7)), who in most
//! settings can stop and inspect either process anyway (kill(2), ptrace(2)); containers that share a user id but nothing else are one where
//! not. Nothing that a peer does to the memory can make this side crash or read what is not the peer's: positions are checked where they
//! are read ([`ring`]), bytes are copied before they are parsed, and the size of the memory cannot change. Each link has a bell at either
//! end, so a peer that misuses them keeps nobody else from ringing. But one that fills its own and has writing to it block
//! (fcntl(2); the flag belongs to both ends' descriptors) holds up the thread that rings it.
#![allow(unsafe_code)]

mod lending;
mod obstacle;
mod offer;
mod policy;
mod rights;
mod ring;
mod segment;
mod window;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

pub(super) use self::lending::END;
use self::lending::Lent;
pub(super) use self::obstacle::Obstacle;
pub(super) use self::offer::{
    Agreement, OFFERED, Place, Socket, TAKEN, bell, insists, obstacle, place, receive, send, take_up, take_up_beside,
};
pub use self::policy::LinkPolicy;
pub(super) use self::rights::DESCRIPTORS;
use self::ring::{Corrupt, Reader, Writer};
use self::segment::Mapping;
use self::window::Window;
pub(super) use self::window::{Grant, Kind};
use crate::memory::dma::{Gather, Scatter};
use crate::sync::Mutex;

/// One end of a link.
#[derive(Debug)]
pub(super) struct Wire {
    memory: Mapping,
    /// Which of the two directions this end writes; it reads the other one.
    direction: usize,
    writer: Writer,
    reader: Reader,
    /// Wakes the peer.
    bell: OwnedFd,
    /// Wakes this end.
    own_bell: OwnedFd,
    /// The socket is readable: the stream ends there.
    ends: AtomicBool,
    /// This end waits for room.
    starving: AtomicBool,
    /// Through which regions are lent.
    socket: Option<Arc<OwnedFd>>,
    lent: Mutex<Lent>,
    /// What the peer has lent.
    windows: Mutex<Vec<Window>>,
    has_windows: AtomicBool,
}

impl Wire {
    fn new(memory: Mapping, bell: OwnedFd, own_bell: OwnedFd, direction: usize) -> Self {
        Self {
            memory,
            direction,
            writer: Writer::default(),
            reader: Reader::default(),
            bell,
            own_bell,
            ends: AtomicBool::new(false),
            starving: AtomicBool::new(false),
            socket: None,
            lent: Mutex::default(),
            windows: Mutex::default(),
            has_windows: AtomicBool::new(false),
        }
    }

    /// What the peer writes to wake this end.
    pub(super) fn own_bell(&self) -> BorrowedFd<'_> {
        self.own_bell.as_fd()
    }

    /// Tells which socket the link belongs to.
    pub(super) fn with_socket(self, socket: &Arc<OwnedFd>) -> Self {
        Self { socket: Some(Arc::clone(socket)), ..self }
    }

    /// Whether the peer has lent anything.
    pub(super) fn lends(&self) -> bool {
        self.has_windows.load(Ordering::Relaxed)
    }

    /// Takes as many bytes as there is room for. Only under the lock of the queue pair's sending half.
    pub(super) fn send(&self, gather: &Gather<'_>) -> io::Result<usize> {
        let shared = self.memory.positions(self.direction);
        let (at, room) = self.writer.room(shared)?;
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.starving.store(false, Ordering::Relaxed);
        let len = gather.copy_to(self.memory.bytes(self.direction, at, room));
        if self.writer.publish(shared, len) {
            self.ring();
        }
        Ok(len)
    }

    /// Gives what has come, as far as there are places for it; 0 at the end of the stream. Only under the lock of the queue pair's
    /// receiving half.
    pub(super) fn read(&self, scatter: Scatter<'_>, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let direction = 1 - self.direction;
        let shared = self.memory.positions(direction);
        // Before looking: what was written before the socket's end is in the ring by then.
        let ends = self.ends.load(Ordering::SeqCst);
        let (at, ready) = self.reader.ready(shared)?;
        if ready == 0 {
            return if ends { scatter.read(socket) } else { Err(io::ErrorKind::WouldBlock.into()) };
        }
        let len = scatter.copy_from(self.memory.bytes(direction, at, ready));
        if self.reader.release(shared, len) {
            self.ring();
        }
        Ok(len)
    }

    /// Whether there is something to [`read`](Self::read), if only an error.
    pub(super) fn has_news(&self) -> bool {
        let ready = self.reader.ready(self.memory.positions(1 - self.direction));
        !matches!(ready, Ok((_, 0))) || self.has_messages() || self.ends.load(Ordering::Relaxed)
    }

    /// Whether [`send`](Self::send) would take a byte, or fail.
    pub(super) fn has_room(&self) -> bool {
        !matches!(self.writer.room(self.memory.positions(self.direction)), Ok((_, 0)))
    }

    /// Has the peer ring when it has sent something. Afterwards comes a full fence, and then another look.
    pub(super) fn sleep(&self) {
        self.reader.sleep(self.memory.positions(1 - self.direction));
    }

    /// Has the peer ring when it has made room; whether it has already.
    pub(super) fn starve(&self) -> bool {
        self.starving.store(true, Ordering::Relaxed);
        self.writer.starve(self.memory.positions(self.direction));
        self.has_room()
    }

    /// Whether this end waits for room, or did not long ago.
    pub(super) fn is_starving(&self) -> bool {
        self.starving.load(Ordering::Relaxed)
    }

    /// The socket has become readable.
    fn end(&self) {
        self.ends.store(true, Ordering::SeqCst);
    }

    fn ring(&self) {
        // Fails when the counter is full, which only the peer can bring about.
        let _ = rustix::io::write(self.bell.as_fd(), &1u64.to_ne_bytes());
    }
}

/// Between [`Wire::sleep`] and the look after it, once for any number of links.
pub(super) fn settle() {
    fence(Ordering::SeqCst);
}

impl From<Corrupt> for io::Error {
    fn from(_: Corrupt) -> Self {
        io::Error::new(io::ErrorKind::InvalidData, CORRUPT)
    }
}

/// What closes a queue pair whose peer scribbles over the ring.
pub(super) const CORRUPT: &str = "a position in the link's shared memory makes no sense";

#[cfg(test)]
impl Wire {
    /// Both ends of a link that nobody negotiated.
    pub(super) fn pair() -> [Self; 2] {
        let (memory, first) = segment::create().unwrap();
        let second = Mapping::of(memory.as_fd()).unwrap();
        let [of_first, of_second] = [(); 2].map(|()| bell().unwrap());
        let again = |bell: &OwnedFd| bell.try_clone().unwrap();
        [Self::new(first, again(&of_second), again(&of_first), 0), Self::new(second, of_first, of_second, 1)]
    }

    /// Puts a word anywhere into the shared memory, as a peer could.
    pub(super) fn scribble(&self, at: usize, word: u64) {
        self.memory.scribble(at, word);
    }
}
