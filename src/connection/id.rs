//! What tells a connection from others.

use std::fmt;

/// A connection of this process; see [`Connection::id`](crate::Connection::id). Not the queue pair's number, which goes to another
/// connection when this one has ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(u32);

impl ConnectionId {
    pub(crate) fn new(id: u32) -> Self {
        Self(id)
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionId({self})")
    }
}
