//! What names one end of a connection, and the exchange of it.

use std::fmt;
use std::io;
use std::net::Ipv6Addr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::error::{Error, Result};
use crate::provider::PairEndpoint;

/// What a peer must know of a queue pair to connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Endpoint {
    /// Number of the queue pair, 24 bits.
    pub queue_pair: u32,
    /// LID of the port; InfiniBand alone has one.
    pub lid: u16,
    /// GID of the port: over RoCE an IP address.
    pub gid: [u8; 16],
    /// Number of its first packet, 24 bits. Not part of [`to_bytes`](Self::to_bytes): with async-rdma it is always 0.
    pub sequence: u32,
}

impl Endpoint {
    /// Length of the wire form in bytes.
    pub const WIRE_LEN: usize = 22;

    /// An endpoint whose first packet has the number 0.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] when the number has more than 24 bits.
    pub fn new(queue_pair: u32, lid: u16, gid: [u8; 16]) -> Result<Self> {
        Self { queue_pair, lid, gid, sequence: 0 }.checked()
    }

    /// The same with another number of its first packet, as programs other than async-rdma choose it.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] when the number has more than 24 bits.
    pub fn with_sequence(self, sequence: u32) -> Result<Self> {
        Self { sequence, ..self }.checked()
    }

    /// As async-rdma writes it, little-endian: queue pair (4 bytes), LID (2), GID (16).
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        let mut bytes = [0; Self::WIRE_LEN];
        bytes[..4].copy_from_slice(&self.queue_pair.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.lid.to_le_bytes());
        bytes[6..].copy_from_slice(&self.gid);
        bytes
    }

    /// Reads the wire form.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] when no queue pair has that number.
    pub fn from_bytes(bytes: &[u8; Self::WIRE_LEN]) -> Result<Self> {
        let [a, b, c, d, e, f, gid @ ..] = *bytes;
        Self::new(u32::from_le_bytes([a, b, c, d]), u16::from_le_bytes([e, f]), gid)
    }

    fn checked(self) -> Result<Self> {
        for (what, value) in [("queue pair number", self.queue_pair), ("sequence number", self.sequence)] {
            if value >= 1 << 24 {
                let reason = format!("{what} {value:#x} has more than 24 bits");
                return Err(Error::Descriptor { what: "endpoint of async-rdma's protocol", reason });
            }
        }
        Ok(self)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (queue pair {:#x})", Ipv6Addr::from(self.gid).to_canonical(), self.queue_pair)
    }
}

impl From<PairEndpoint> for Endpoint {
    fn from(PairEndpoint { number, lid, gid, sequence }: PairEndpoint) -> Self {
        Self { queue_pair: number, lid, gid, sequence }
    }
}

impl From<&Endpoint> for PairEndpoint {
    fn from(endpoint: &Endpoint) -> Self {
        Self { number: endpoint.queue_pair, lid: endpoint.lid, gid: endpoint.gid, sequence: endpoint.sequence }
    }
}

/// Tells the peer this side's endpoint, as the active side does first. The caller bounds the time.
pub(super) async fn tell(stream: &mut TcpStream, own: &Endpoint) -> Result<()> {
    let told = stream.write_all(&own.to_bytes()).await;
    told.map_err(|error| failed(stream, &error))
}

/// Reads the peer's endpoint. The caller bounds the time.
pub(super) async fn hear(stream: &mut TcpStream) -> Result<Endpoint> {
    let mut bytes = [0; Endpoint::WIRE_LEN];
    match stream.read_exact(&mut bytes).await {
        Ok(_) => Endpoint::from_bytes(&bytes),
        Err(error) => Err(failed(stream, &error)),
    }
}

fn failed(stream: &TcpStream, error: &io::Error) -> Error {
    let peer = stream.peer_addr().map_or_else(|_| "the peer".to_owned(), |address| address.to_string());
    let reason = match error.kind() {
        io::ErrorKind::UnexpectedEof => format!("it closed before it had told its {} bytes", Endpoint::WIRE_LEN),
        _ => error.to_string(),
    };
    Error::Handshake { step: "exchange of endpoints", peer, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::net::TcpListener;

    fn endpoint() -> Endpoint {
        Endpoint::new(0x00ab_cdef, 0x1234, std::array::from_fn(|at| at as u8)).unwrap()
    }

    #[test]
    fn the_wire_form_is_the_documented_one() {
        let expected = *b"\xef\xcd\xab\x00\x34\x12\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f";
        assert_eq!(endpoint().to_bytes(), expected);
        assert_eq!(Endpoint::from_bytes(&expected).unwrap(), endpoint());
    }

    #[test]
    fn numbers_have_24_bits() {
        assert!(Endpoint::new(1 << 24, 0, [0; 16]).is_err());
        assert!(endpoint().with_sequence(1 << 24).is_err());
        assert_eq!(endpoint().with_sequence(7).unwrap().sequence, 7);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes: [u8; Endpoint::WIRE_LEN]) {
            match Endpoint::from_bytes(&bytes) {
                Ok(endpoint) => prop_assert_eq!(endpoint.to_bytes(), bytes),
                Err(_) => prop_assert_ne!(bytes[3], 0),
            }
        }
    }

    async fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let connecting = TcpStream::connect(listener.local_addr().unwrap());
        let (client, server) = tokio::join!(connecting, listener.accept());
        (client.unwrap(), server.unwrap().0)
    }

    #[tokio::test]
    async fn both_ends_get_the_others() {
        let (mut client, mut server) = sockets().await;
        let (ours, theirs) = (endpoint(), Endpoint::new(7, 0, [9; 16]).unwrap());
        tell(&mut client, &ours).await.unwrap();
        assert_eq!(hear(&mut server).await.unwrap(), ours);
        tell(&mut server, &theirs).await.unwrap();
        assert_eq!(hear(&mut client).await.unwrap(), theirs);
    }

    #[tokio::test]
    async fn a_peer_that_says_too_little_is_told_apart() {
        let (mut client, mut server) = sockets().await;
        client.write_all(&endpoint().to_bytes()[..21]).await.unwrap();
        drop(client);
        let error = hear(&mut server).await.unwrap_err();
        assert!(error.to_string().contains("before it had told its 22 bytes"), "{error}");
    }
}
