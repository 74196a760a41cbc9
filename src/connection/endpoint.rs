//! Endpoints for programs that bring their own bootstrap.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::completion::driver;
use crate::completion::queue::Room;
use crate::connection::Connection;
use crate::connection::builder::{Prepared, within};
use crate::connection::psk::Role;
use crate::error::{Error, Result};
use crate::provider::Rendezvous;

/// Longest endpoint, in bytes.
const MAX_LEN: usize = 128;

/// What one side of a connection must know of the other: opaque bytes, to be carried by any means (MPI, etcd, a file).
///
/// Its text form (`Display`, `FromStr`) is hexadecimal. Parsing is bounded: at most 128 bytes. It is good for one connection.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct QueuePairEndpoint(Vec<u8>);

impl QueuePairEndpoint {
    /// The longest wire form, in bytes.
    pub const MAX_LEN: usize = MAX_LEN;

    /// The wire form.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// From the wire form. What it means is checked when connecting.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] when it is empty or longer than [`MAX_LEN`](Self::MAX_LEN).
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.is_empty() || bytes.len() > MAX_LEN {
            return Err(invalid(format!("{} bytes; expected 1 to {MAX_LEN}", bytes.len())));
        }
        Ok(Self(bytes.to_vec()))
    }
}

fn invalid(reason: String) -> Error {
    Error::Descriptor { what: "queue pair endpoint", reason }
}

impl fmt::Display for QueuePairEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for QueuePairEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePairEndpoint({self})")
    }
}

impl FromStr for QueuePairEndpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim();
        if text.len() > 2 * MAX_LEN || text.len() % 2 != 0 {
            let most = 2 * MAX_LEN;
            return Err(invalid(format!("{} characters; expected an even number of at most {most}", text.len())));
        }
        // Digits only: a parser of numbers would also take signs.
        if !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(invalid("not hexadecimal".to_owned()));
        }
        let bytes = (0..text.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&text[at..at + 2], 16))
            .collect::<std::result::Result<Vec<u8>, _>>()
            .map_err(|_| invalid("not hexadecimal".to_owned()))?;
        Self::from_bytes(&bytes)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for QueuePairEndpoint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for QueuePairEndpoint {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// A connection that waits for the peer's endpoint; made by [`ConnectionBuilder::endpoint`](crate::ConnectionBuilder::endpoint).
#[derive(Debug)]
pub struct PendingConnection {
    prepared: Prepared,
    room: Room,
    rendezvous: Rendezvous,
    endpoint: QueuePairEndpoint,
    setup_timeout: Duration,
}

impl PendingConnection {
    pub(super) fn new(prepared: Prepared, room: Room, rendezvous: Rendezvous, setup_timeout: Duration) -> Result<Self> {
        let endpoint = QueuePairEndpoint::from_bytes(rendezvous.endpoint())?;
        Ok(Self { prepared, room, rendezvous, endpoint, setup_timeout })
    }

    /// This side's endpoint, for the peer.
    pub fn endpoint(&self) -> &QueuePairEndpoint {
        &self.endpoint
    }

    /// Connects to the peer, which does the same with this side's endpoint. The order of the two calls does not matter.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] when the bytes are no endpoint, [`Error::Handshake`] when whoever answers is not that peer,
    /// [`Error::Timeout`] when the peer does not call in time.
    pub async fn connect(self, remote: &QueuePairEndpoint) -> Result<Connection> {
        let Self { prepared, room, rendezvous, endpoint, setup_timeout } = self;
        let queue = room.queue().clone();
        // The runtime that the endpoint was made in may be gone.
        driver::ensure(&queue)?;
        let connecting = rendezvous.connect(
            prepared.domain.provider(),
            queue.device(),
            &prepared.config,
            remote.as_bytes(),
            &prepared.hello,
        );
        // Both ends know both endpoints, so they come to opposite roles.
        let role = if endpoint.0 < remote.0 { Role::Server } else { Role::Client };
        let introduced = async {
            let connected = connecting.await?;
            prepared.introduce(room, connected, role).await
        };
        within(setup_timeout, "connect", "the peer", introduced).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_bytes_round_trip() {
        let endpoint = QueuePairEndpoint::from_bytes(&[0, 1, 0xfe, 0xff]).unwrap();
        assert_eq!(endpoint.to_string(), "0001feff");
        assert_eq!(endpoint.to_string().parse::<QueuePairEndpoint>().unwrap(), endpoint);
    }

    #[test]
    fn hostile_text_is_refused() {
        for text in ["", "0", "zz", "0001é", "é0", &"00".repeat(MAX_LEN + 1)] {
            assert!(text.parse::<QueuePairEndpoint>().is_err(), "{text:?}");
        }
    }
}
