//! What came from the peer and waits for the user.

use std::fmt;
use std::ops::Deref;

use tokio::sync::{Mutex, mpsc};

use super::PeerRegion;
use crate::memory::Buffer;

/// A message of the peer: its bytes.
///
/// They lie in registered memory, so that they can be sent on without copying: see [`into_buffer`](Self::into_buffer).
#[derive(Debug)]
pub struct Message {
    data: Buffer,
    immediate: Option<u32>,
}

impl Message {
    pub(super) fn new(data: Buffer, immediate: Option<u32>) -> Self {
        Self { data, immediate }
    }

    /// The 32 bits that the peer sent along, if any.
    pub fn immediate(&self) -> Option<u32> {
        self.immediate
    }

    /// The memory that holds the message, of exactly its length. It goes back to this peer's pool when it is dropped.
    pub fn into_buffer(self) -> Buffer {
        self.data
    }
}

impl Deref for Message {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.data
    }
}

/// The agent's ends.
pub(super) struct Inbox {
    pub(super) messages: mpsc::Sender<Message>,
    pub(super) regions: mpsc::Sender<PeerRegion>,
    pub(super) returned: mpsc::Sender<Buffer>,
    pub(super) notices: mpsc::Sender<u32>,
}

/// The user's ends. Whoever waits holds the lock, and others wait for that.
pub(super) struct Outlet {
    pub(super) messages: Mutex<mpsc::Receiver<Message>>,
    pub(super) regions: Mutex<mpsc::Receiver<PeerRegion>>,
    pub(super) returned: Mutex<mpsc::Receiver<Buffer>>,
    pub(super) notices: Mutex<mpsc::Receiver<u32>>,
}

/// Each kind has room for so many.
pub(super) fn channels(backlog: usize) -> (Inbox, Outlet) {
    let (messages, messages_out) = mpsc::channel(backlog);
    let (regions, regions_out) = mpsc::channel(backlog);
    let (returned, returned_out) = mpsc::channel(backlog);
    let (notices, notices_out) = mpsc::channel(backlog);
    let outlet = Outlet {
        messages: Mutex::new(messages_out),
        regions: Mutex::new(regions_out),
        returned: Mutex::new(returned_out),
        notices: Mutex::new(notices_out),
    };
    (Inbox { messages, regions, returned, notices }, outlet)
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outlet").finish_non_exhaustive()
    }
}
