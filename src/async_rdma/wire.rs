//! The formats, all little-endian. Everything that comes in is read here, bounded, and checked before it means anything.
//!
//! ```text
//! endpoint, 22 bytes   queue pair u32 | lid u16 | gid 16 bytes
//! token, 36 bytes      address u64 | length u64 | rkey u32 | deadline: secs u64, nanos u32 | access u32
//! request, 56 bytes    0 u32 | id u64 | kind u32 | body, then zeros
//!   0 alloc            size u64 | align u64 | lease: secs u64, nanos u32
//!   1 release          token
//!   2 region           0 the sender's own, 1 the receiver's u32 | token
//!   3 data             length u64; the data follows the 56 bytes
//! response             1 u32 | id u64 | kind u32 | body
//!   0 alloc            token
//!   1 release          status u64
//!   2 region           status u32
//!   3 data             status u64
//! ```
//! An immediate beside data is little-endian too. A deadline is a time since 1970 by the clock of the memory's owner. Access has the bits of `enum ibv_access_flags`.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::memory::{Access, RemoteRegion};

/// Length of each request; a message's data follows it.
pub(super) const HEADER: usize = 56;

/// The longest response.
#[cfg(test)]
pub(super) const LONGEST_RESPONSE: usize = 52;

const REQUEST: u32 = 0;
const RESPONSE: u32 = 1;

const ALLOC: u32 = 0;
const RELEASE: u32 = 1;
const REGION: u32 = 2;
const DATA: u32 = 3;

const SENDERS_OWN: u32 = 0;
const RECEIVERS_OWN: u32 = 1;

/// `IBV_ACCESS_LOCAL_WRITE`: memory that a peer may write has it too.
const LOCAL_WRITE: u32 = 1;

/// Immediates are little-endian as everything else, though the verbs, and this crate elsewhere, have them big-endian.
/// The same in both directions.
pub(super) fn immediate(value: u32) -> u32 {
    value.swap_bytes()
}

/// Memory and the key to it, lent until a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub region: RemoteRegion,
    /// Since 1970, by the owner's clock.
    pub deadline: Duration,
}

/// What one end asks of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Alloc {
        size: u64,
        align: u64,
        lease: Duration,
    },
    Release(Token),
    /// The sender lends memory of its own.
    Lend(Token),
    /// The sender gives memory of the receiver back.
    Return(Token),
    Data {
        length: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Response {
    Alloc(Token),
    Release { status: u64 },
    Region { status: u32 },
    Data { status: u64 },
}

/// What a message is. Both have the id of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Request(u64, Request),
    Response(u64, Response),
}

impl Request {
    pub(super) fn encode(&self, id: u64) -> [u8; HEADER] {
        let mut bytes = Vec::with_capacity(HEADER);
        let kind = match self {
            Self::Alloc { .. } => ALLOC,
            Self::Release(_) => RELEASE,
            Self::Lend(_) | Self::Return(_) => REGION,
            Self::Data { .. } => DATA,
        };
        head(&mut bytes, REQUEST, id, kind);
        match self {
            Self::Alloc { size, align, lease } => {
                bytes.extend(size.to_le_bytes());
                bytes.extend(align.to_le_bytes());
                put_time(&mut bytes, *lease);
            }
            Self::Release(token) => token.put(&mut bytes),
            Self::Lend(token) => {
                bytes.extend(SENDERS_OWN.to_le_bytes());
                token.put(&mut bytes);
            }
            Self::Return(token) => {
                bytes.extend(RECEIVERS_OWN.to_le_bytes());
                token.put(&mut bytes);
            }
            Self::Data { length } => bytes.extend(length.to_le_bytes()),
        }
        let mut padded = [0; HEADER];
        padded[..bytes.len()].copy_from_slice(&bytes);
        padded
    }
}

impl Response {
    pub(super) fn encode(&self, id: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let kind = match self {
            Self::Alloc(_) => ALLOC,
            Self::Release { .. } => RELEASE,
            Self::Region { .. } => REGION,
            Self::Data { .. } => DATA,
        };
        head(&mut bytes, RESPONSE, id, kind);
        match self {
            Self::Alloc(token) => token.put(&mut bytes),
            Self::Release { status } | Self::Data { status } => bytes.extend(status.to_le_bytes()),
            Self::Region { status } => bytes.extend(status.to_le_bytes()),
        }
        bytes
    }
}

impl Frame {
    /// Reads what begins a message of the peer.
    pub(super) fn decode(message: &[u8]) -> Result<Self> {
        let mut bytes = Reader { rest: message, whole: message.len() };
        let (class, id, kind) = (bytes.u32()?, bytes.u64()?, bytes.u32()?);
        match class {
            REQUEST if message.len() < HEADER => {
                Err(invalid(format!("a request of {} bytes; it has {HEADER}", message.len())))
            }
            REQUEST => Ok(Self::Request(id, bytes.request(kind, message.len() - HEADER)?)),
            RESPONSE => Ok(Self::Response(id, bytes.response(kind)?)),
            other => Err(invalid(format!("it begins with {other}, so it is neither a request nor a response"))),
        }
    }
}

impl Token {
    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.region.address().to_le_bytes());
        bytes.extend(self.region.len().to_le_bytes());
        bytes.extend(self.region.rkey().to_le_bytes());
        put_time(bytes, self.deadline);
        bytes.extend((self.region.access().bits() | LOCAL_WRITE).to_le_bytes());
    }
}

fn head(bytes: &mut Vec<u8>, class: u32, id: u64, kind: u32) {
    bytes.extend(class.to_le_bytes());
    bytes.extend(id.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
}

fn put_time(bytes: &mut Vec<u8>, time: Duration) {
    bytes.extend(time.as_secs().to_le_bytes());
    bytes.extend(time.subsec_nanos().to_le_bytes());
}

fn invalid(reason: String) -> Error {
    Error::Descriptor { what: "message of async-rdma's protocol", reason }
}

struct Reader<'a> {
    rest: &'a [u8],
    whole: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some((taken, rest)) = self.rest.split_first_chunk() else {
            return Err(invalid(format!("{} bytes are too few", self.whole)));
        };
        self.rest = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn time(&mut self) -> Result<Duration> {
        let (secs, nanos) = (self.u64()?, self.u32()?);
        // What `Duration` carries over into its seconds must not overflow them.
        if nanos >= 1_000_000_000 {
            return Err(invalid(format!("a time with {nanos} nanoseconds")));
        }
        Ok(Duration::new(secs, nanos))
    }

    fn token(&mut self) -> Result<Token> {
        let (address, length, rkey) = (self.u64()?, self.u64()?, self.u32()?);
        let deadline = self.time()?;
        // Rights that this crate has no use for are none.
        let access = Access::from_bits_truncate(self.u32()?);
        Ok(Token { region: RemoteRegion::new(address, length, rkey, access)?, deadline })
    }

    fn request(&mut self, kind: u32, data: usize) -> Result<Request> {
        Ok(match kind {
            ALLOC => Request::Alloc { size: self.u64()?, align: self.u64()?, lease: self.time()? },
            RELEASE => Request::Release(self.token()?),
            REGION => match self.u32()? {
                SENDERS_OWN => Request::Lend(self.token()?),
                RECEIVERS_OWN => Request::Return(self.token()?),
                other => return Err(invalid(format!("a region that is of neither end ({other})"))),
            },
            DATA => {
                let length = self.u64()?;
                if length > data as u64 {
                    return Err(invalid(format!("{length} bytes of data announced, {data} sent")));
                }
                Request::Data { length }
            }
            other => return Err(invalid(format!("a request of kind {other}"))),
        })
    }

    fn response(&mut self, kind: u32) -> Result<Response> {
        Ok(match kind {
            ALLOC => Response::Alloc(self.token()?),
            RELEASE => Response::Release { status: self.u64()? },
            REGION => Response::Region { status: self.u32()? },
            DATA => Response::Data { status: self.u64()? },
            other => return Err(invalid(format!("a response of kind {other}"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn token() -> Token {
        let region = RemoteRegion::new(0x1122_3344_5566_7788, 0x1000, 0xaabb_ccdd, Access::all()).unwrap();
        Token { region, deadline: Duration::new(2, 3) }
    }

    /// `1122..`, spaces left out.
    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
    }

    const TOKEN: &str = "8877665544332211 0010000000000000 ddccbbaa 0200000000000000 03000000 0f000000";

    #[test]
    fn requests_are_the_documented_bytes() {
        let alloc = Request::Alloc { size: 4096, align: 64, lease: Duration::new(60, 5) };
        let cases = [
            (alloc, "00000000 0100000000000000 00000000 0010000000000000 4000000000000000 3c00000000000000 05000000"),
            (Request::Release(token()), &format!("00000000 0100000000000000 01000000 {TOKEN}")),
            (Request::Lend(token()), &format!("00000000 0100000000000000 02000000 00000000 {TOKEN}")),
            (Request::Return(token()), &format!("00000000 0100000000000000 02000000 01000000 {TOKEN}")),
            (Request::Data { length: 0 }, "00000000 0100000000000000 03000000 0000000000000000"),
        ];
        for (request, text) in cases {
            let mut expected = hex(text);
            expected.resize(HEADER, 0);
            assert_eq!(request.encode(1)[..], expected, "{request:?}");
            assert_eq!(Frame::decode(&expected).unwrap(), Frame::Request(1, request));
        }
    }

    #[test]
    fn responses_are_the_documented_bytes() {
        let cases = [
            (Response::Alloc(token()), &*format!("01000000 0700000000000000 00000000 {TOKEN}")),
            (Response::Release { status: 1 }, "01000000 0700000000000000 01000000 0100000000000000"),
            (Response::Region { status: 2 }, "01000000 0700000000000000 02000000 02000000"),
            (Response::Data { status: 0 }, "01000000 0700000000000000 03000000 0000000000000000"),
        ];
        for (response, text) in cases {
            assert_eq!(response.encode(7), hex(text), "{response:?}");
            assert!(response.encode(7).len() <= LONGEST_RESPONSE);
            assert_eq!(Frame::decode(&hex(text)).unwrap(), Frame::Response(7, response));
        }
    }

    #[test]
    fn data_is_never_longer_than_what_came() {
        let mut message = Request::Data { length: 5 }.encode(1).to_vec();
        message.extend(b"four");
        let error = Frame::decode(&message).unwrap_err().to_string();
        assert!(error.contains("5 bytes of data announced, 4 sent"), "{error}");
        message.push(0);
        assert!(Frame::decode(&message).is_ok());
    }

    fn frames() -> impl Strategy<Value = Vec<u8>> {
        let any_token = (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>(), any::<u64>(), 0u32..1_000_000_000)
            .prop_map(|(address, length, rkey, access, secs, nanos)| {
                let access = Access::from_bits_truncate(access);
                let region = RemoteRegion::new(address, length.min(u64::MAX - address), rkey, access).unwrap();
                Token { region, deadline: Duration::new(secs, nanos) }
            });
        (any::<u64>(), any_token, 0u8..9, any::<[u64; 3]>()).prop_map(|(id, token, which, [a, b, c])| match which {
            0 => Request::Alloc { size: a, align: b, lease: Duration::new(c, 7) }.encode(id).to_vec(),
            1 => Request::Release(token).encode(id).to_vec(),
            2 => Request::Lend(token).encode(id).to_vec(),
            3 => Request::Return(token).encode(id).to_vec(),
            4 => Request::Data { length: a }.encode(id).to_vec(),
            5 => Response::Alloc(token).encode(id),
            6 => Response::Release { status: a }.encode(id),
            7 => Response::Region { status: a as u32 }.encode(id),
            _ => Response::Data { status: a }.encode(id),
        })
    }

    /// What was read, written again.
    fn encoded(frame: &Frame) -> Vec<u8> {
        match frame {
            Frame::Request(id, request) => request.encode(*id).to_vec(),
            Frame::Response(id, response) => response.encode(*id),
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..128)) {
            let _ = Frame::decode(&bytes);
        }

        #[test]
        fn damaged_frames_are_read_as_what_they_say_or_refused(
            mut bytes in frames(), at in 0usize..56, flip in 1u8.., cut in 0usize..64
        ) {
            let at = at % bytes.len();
            bytes[at] ^= flip;
            bytes.truncate(bytes.len() - cut.min(bytes.len()));
            if let Ok(frame) = Frame::decode(&bytes) {
                if let Frame::Request(_, Request::Data { length }) = frame {
                    prop_assert!(length <= (bytes.len() - HEADER) as u64);
                }
                // Read once more from what it would be written as, it is the same.
                let mut again = encoded(&frame);
                again.resize(again.len().max(bytes.len()), 0);
                prop_assert_eq!(Frame::decode(&again).unwrap(), frame);
            }
        }

        #[test]
        fn whole_frames_are_read(bytes in frames()) {
            match Frame::decode(&bytes) {
                Ok(frame) => prop_assert_eq!(encoded(&frame), bytes),
                // Nothing follows these 56 bytes.
                Err(_) => prop_assert_eq!(bytes[12], DATA as u8),
            }
        }
    }
}
