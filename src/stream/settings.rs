//! Every setting of a stream, each default with its reason.

use std::time::Duration;

use crate::address::IntoAddress;
use crate::connection::Connection;
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::stream::RdmaStream;
use crate::stream::credits::CONTROL_SLOTS;
use crate::stream::wire::{HELLO_LEN, MAX_CREDITS};

/// Sends beside those of data: hello, the end, and credits, of which the peer's side bounds how many are on their way.
const CONTROL_SENDS: u32 = 4;

#[derive(Clone, Debug)]
pub(super) struct StreamSettings {
    pub frame_len: usize,
    pub receive_slots: u32,
    pub send_buffers: u32,
    pub receive_limit: usize,
    pub linger: Duration,
}

/// What a connection holds of a stream. The numbers were checked.
impl StreamSettings {
    pub(super) fn receives(&self) -> u32 {
        self.receive_slots + CONTROL_SLOTS
    }

    pub(super) fn sends(&self) -> u32 {
        self.send_buffers + CONTROL_SENDS
    }
}

/// Settings of a stream. The two ends need not agree: each tells the other what it takes.
///
/// With the defaults a stream has 896 KiB of registered memory.
#[derive(Clone, Debug)]
#[must_use = "settings do nothing by themselves"]
pub struct StreamBuilder {
    settings: StreamSettings,
}

impl StreamBuilder {
    pub(super) fn new() -> Self {
        Self {
            settings: StreamSettings {
                frame_len: 32 << 10,
                receive_slots: 16,
                send_buffers: 8,
                receive_limit: 16 << 20,
                linger: Duration::from_secs(10),
            },
        }
    }

    /// Bytes of one message at most, in both directions: the length of a slot, and of a send buffer. A message is sent for each write,
    /// or fuller ones while credits are lacking. Default 32 KiB: what HTTP/2 sends at a time fits in, and a copy of it takes microseconds.
    pub fn frame_len(mut self, bytes: usize) -> Self {
        self.settings.frame_len = bytes;
        self
    }

    /// Receive slots: how many messages the peer may have on their way. Default 16, half a MiB: what a link of 100 Gbit/s carries
    /// in 40 microseconds.
    pub fn receive_slots(mut self, count: u32) -> Self {
        self.settings.receive_slots = count;
        self
    }

    /// Messages of this side that may be on their way. Default 8: their acknowledgements come sooner than the peer's credits.
    pub fn send_buffers(mut self, count: u32) -> Self {
        self.settings.send_buffers = count;
        self
    }

    /// Bytes, beside those in the slots, that are taken in while nobody reads; see [`RdmaStream`] on what that is for. They are
    /// ordinary memory, allocated when they are needed. Default 16 MiB. With 0, two ends that both write more than the
    /// slots hold before they read wait for each other for ever.
    pub fn receive_limit(mut self, bytes: usize) -> Self {
        self.settings.receive_limit = bytes;
        self
    }

    /// How long a stream that was dropped goes on in the background, to send what was written. Default 10 s.
    pub fn linger(mut self, time: Duration) -> Self {
        self.settings.linger = time;
        self
    }

    /// Connects, with queues as deep as these settings need. See [`RdmaStream::connect`].
    ///
    /// # Errors
    ///
    /// As [`RdmaStream::connect`], and [`Error::Limit`] when a setting is out of range.
    pub async fn connect(self, domain: &ProtectionDomain, address: impl IntoAddress) -> Result<RdmaStream> {
        self.check()?;
        let settings = &self.settings;
        let connection = Connection::builder(domain)
            .receive_depth(settings.receives())
            .send_depth(settings.sends())
            .connect(address)
            .await?;
        self.from_connection(connection)
    }

    /// Makes a stream of a connection. See [`RdmaStream::from_connection`].
    ///
    /// # Errors
    ///
    /// As [`RdmaStream::from_connection`], and [`Error::Limit`] when a setting is out of range.
    #[allow(clippy::wrong_self_convention)] // it is the stream that comes from the connection
    pub fn from_connection(self, connection: Connection) -> Result<RdmaStream> {
        self.check()?;
        let (needed, depth) = (self.settings.receives(), connection.receive_depth());
        if needed > depth {
            return Err(limit(
                "receives",
                needed.into(),
                depth.into(),
                "raise receive_depth of the connection, or use fewer receive_slots",
            ));
        }
        let (buffers, most) = (self.settings.send_buffers, connection.device().limits().max_queue_depth);
        if buffers > most {
            return Err(limit(
                "send_buffers",
                buffers.into(),
                most.into(),
                "as many as the device's send queues hold at most",
            ));
        }
        RdmaStream::start(connection, &self.settings)
    }

    fn check(&self) -> Result<()> {
        let StreamSettings { frame_len, receive_slots, send_buffers, .. } = self.settings;
        let range = |what, value: u64, least: u64, most: u64| match value {
            _ if value < least => Err(limit(what, value, least, "that is the smallest value")),
            _ if value > most => Err(limit(what, value, most, "that is the largest value")),
            _ => Ok(()),
        };
        range("frame_len", frame_len as u64, HELLO_LEN as u64, 1 << 30)?;
        range("receive_slots", receive_slots.into(), 1, MAX_CREDITS.into())?;
        range("send_buffers", send_buffers.into(), 1, MAX_CREDITS.into())
    }
}

fn limit(what: &'static str, value: u64, limit: u64, hint: &'static str) -> Error {
    Error::Limit { operation: "make a stream", what, value, limit, hint }
}
