//! What two streams say to each other. Each message is one Send with immediate data:
//!
//! ```text
//! immediate, bits 31..30   kind: 0 data, 1 credits, 2 the end, 3 hello
//! immediate, bits 29..0    credits given to the receiver of this message
//! payload of data          bytes of the stream, nothing else
//! payload of hello         8 bytes name and version, then two numbers of 4 bytes, the most significant byte first:
//!                          the longest payload this side takes, and the data messages that it has room for
//! payload of the others    none
//! ```

/// The most credits that a message can carry, and so the most receive slots of a stream.
pub(super) const MAX_CREDITS: u32 = (1 << 30) - 1;

/// The name, and in its last byte the version.
const MAGIC: [u8; 8] = *b"rdmastr\x01";

pub(super) const HELLO_LEN: usize = 16;

const NO_HELLO: &str = "the first message is no stream's hello; does the peer use RdmaStream?";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Credits,
    End,
    Hello,
}

/// The immediate data of a message.
pub(super) fn immediate(kind: Kind, credits: u32) -> u32 {
    (kind as u32) << 30 | (credits & MAX_CREDITS)
}

/// Kind and credits of a message with this immediate data.
pub(super) fn parse(immediate: u32) -> (Kind, u32) {
    let kind = match immediate >> 30 {
        0 => Kind::Data,
        1 => Kind::Credits,
        2 => Kind::End,
        _ => Kind::Hello,
    };
    (kind, immediate & MAX_CREDITS)
}

/// How a side begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The longest payload of a data message, in bytes.
    pub frame_len: u32,
    /// Data messages that may be on their way to this side before it gives more credits.
    pub slots: u32,
}

impl Hello {
    pub(super) fn encode(self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.frame_len.to_be_bytes());
        bytes[12..].copy_from_slice(&self.slots.to_be_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let Some((magic, [a, b, c, d, e, f, g, h])) = bytes.split_first_chunk::<8>() else {
            return Err(NO_HELLO);
        };
        if magic[..7] != MAGIC[..7] {
            return Err(NO_HELLO);
        }
        if magic[7] != MAGIC[7] {
            return Err("the peer's stream speaks another version");
        }
        let hello =
            Self { frame_len: u32::from_be_bytes([*a, *b, *c, *d]), slots: u32::from_be_bytes([*e, *f, *g, *h]) };
        if hello.frame_len == 0 || hello.slots == 0 || hello.slots > MAX_CREDITS {
            return Err("the peer's stream has no room, or more than the protocol can count");
        }
        Ok(hello)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_immediate_comes_back() {
        for kind in [Kind::Data, Kind::Credits, Kind::End, Kind::Hello] {
            for credits in [0, 1, MAX_CREDITS] {
                assert_eq!(parse(immediate(kind, credits)), (kind, credits));
            }
        }
    }

    #[test]
    fn a_hello_comes_back_and_nothing_else_is_taken_for_one() {
        let hello = Hello { frame_len: 1 << 15, slots: 16 };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Ok(hello));
        for len in 0..HELLO_LEN {
            assert!(Hello::decode(&bytes[..len]).is_err());
        }
        assert!(Hello::decode(&[&bytes[..], &[0]].concat()).is_err());
        for at in 0..8 {
            let mut other = bytes;
            other[at] ^= 1;
            assert!(Hello::decode(&other).is_err());
        }
        for (frame_len, slots) in [(0, 1), (1, 0), (1, MAX_CREDITS + 1)] {
            assert!(Hello::decode(&Hello { frame_len, slots }.encode()).is_err());
        }
    }
}
