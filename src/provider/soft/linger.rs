//! Links of failed queue pairs, until their last words are read.
//!
//! Closing a TCP socket with unread data resets the connection, and the reset overtakes what the peer has not read yet:
//! a NAK, a goodbye. So the socket is closed for writing only, and read empty until the peer closes too, for a bounded time.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::net::{SendFlags, Shutdown, send, shutdown};

use super::qp::QpShared;

const PATIENCE: Duration = Duration::from_secs(1);
/// What one call discards at most.
const DISCARDS: usize = 64;

#[derive(Debug)]
pub(super) struct Lingering {
    qp: Arc<QpShared>,
    goodbye: Vec<u8>,
    sent: usize,
    shut: bool,
    deadline: Instant,
}

impl Lingering {
    pub(super) fn new(qp: Arc<QpShared>, goodbye: Vec<u8>) -> Self {
        Self { qp, goodbye, sent: 0, shut: false, deadline: Instant::now() + PATIENCE }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.qp.as_socket()
    }

    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(super) fn expired(&self, now: Instant) -> bool {
        now >= self.deadline
    }

    pub(super) fn wants(&self) -> EventFlags {
        // Edge-triggered: `advance` goes on until the socket has nothing more to take or give.
        EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET
    }

    /// Sends and discards what can be; whether the link is through.
    pub(super) fn advance(&mut self) -> bool {
        while self.sent < self.goodbye.len() {
            match send(self.qp.as_socket(), &self.goodbye[self.sent..], SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => self.sent += sent,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => return true,
            }
        }
        if self.sent == self.goodbye.len() && !self.shut {
            self.shut = true;
            if shutdown(self.qp.as_socket(), Shutdown::Write).is_err() {
                return true;
            }
        }
        let mut scrap = [0; 4096];
        for _ in 0..DISCARDS {
            match rustix::io::read(self.qp.as_socket(), &mut scrap) {
                Ok(0) => return self.shut,
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
        false
    }

    /// Ends the link; the socket itself goes with its queue pair.
    pub(super) fn close(&mut self) {
        let _ = shutdown(self.qp.as_socket(), Shutdown::Both);
    }
}
