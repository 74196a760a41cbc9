//! The frames on the link: a fixed header of 40 bytes, little-endian, then the payload.
//!
//! Every frame carries the cumulative acknowledgement of the opposite direction (`ack`: all requests with a smaller
//! message sequence number are done) and `limit` (receives posted by the sender of this frame since the beginning;
//! with a shared queue, those that its messages have used, or will find), so acknowledgements and credits ride on whatever is sent.

use crate::error::WcStatus;
use crate::memory::device::BOUNCE;

/// Raised whenever frames or the handshake change; the handshake compares it.
pub(super) const VERSION: u8 = 4;

pub(super) const HEADER: usize = 40;

/// Messages are cut into pieces of at most this size, so that acknowledgements, responses and requests of the other
/// direction interleave, and so that a revoked key waits for one piece at most.
pub(super) const FRAGMENT: usize = 256 << 10;

/// The same for memory of a device, which is copied once more, and quicker in larger pieces.
pub(super) const DEVICE_FRAGMENT: usize = BOUNCE;

/// What is on the link instead of a payload that a peer in this process copies from a device: the number of the offer.
pub(super) const OFFER: usize = 8;

/// Operands of an atomic: compare and swap, or the addend and zero.
pub(super) const ATOMIC_OPERANDS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Send = 1,
    Write = 2,
    ReadRequest = 3,
    ReadResponse = 4,
    CompareSwap = 5,
    FetchAdd = 6,
    AtomicResponse = 7,
    Ack = 8,
    Nak = 9,
    RnrNak = 10,
    Bye = 11,
}

impl Kind {
    fn parse(raw: u8) -> Option<Self> {
        Some(match raw {
            1 => Self::Send,
            2 => Self::Write,
            3 => Self::ReadRequest,
            4 => Self::ReadResponse,
            5 => Self::CompareSwap,
            6 => Self::FetchAdd,
            7 => Self::AtomicResponse,
            8 => Self::Ack,
            9 => Self::Nak,
            10 => Self::RnrNak,
            11 => Self::Bye,
            _ => return None,
        })
    }
}

/// Bits of [`Header::flags`].
pub(super) mod flag {
    /// The first fragment of a message: `address` and `key` name remote memory. In all others `address` is the offset.
    pub(crate) const FIRST: u8 = 1;
    pub(crate) const LAST: u8 = 2;
    pub(crate) const IMM: u8 = 4;
    /// The sender only sends what the receive limit allows, so it wants to hear of receives as they are posted.
    pub(crate) const CAREFUL: u8 = 8;
    /// Of an acknowledgement: the sender wants one back, to know that the peer is alive.
    pub(crate) const SOLICIT: u8 = 16;
    /// The payload, which is a whole message, is not behind the header. There is the number, of 8 bytes, under which the sender offers it
    /// in this process.
    pub(crate) const NEAR: u8 = 32;
    /// The last fragment of a Send whose end nobody waits for yet: the acknowledgement may wait for something to ride on.
    pub(crate) const PATIENT: u8 = 64;
    pub(crate) const ALL: u8 = FIRST | LAST | IMM | CAREFUL | SOLICIT | NEAR | PATIENT;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub flags: u8,
    /// Of a NAK: the status for the initiator's completion.
    pub status: u16,
    /// Payload bytes.
    pub length: u32,
    /// The request that this frame is part of, or about (low 32 bits).
    pub msn: u32,
    pub ack: u32,
    pub limit: u32,
    /// Length of the whole message; of an RNR NAK: the timer in microseconds.
    pub total: u32,
    pub imm: u32,
    /// Remote address, or offset in the message, or the old value of an atomic.
    pub address: u64,
    pub key: u32,
}

impl Header {
    pub(super) fn new(kind: Kind) -> Self {
        Self { kind, flags: 0, status: 0, length: 0, msn: 0, ack: 0, limit: 0, total: 0, imm: 0, address: 0, key: 0 }
    }

    pub(super) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Bytes behind this header.
    pub(super) fn behind(&self) -> usize {
        if self.has(flag::NEAR) { OFFER } else { self.length as usize }
    }

    /// Whether this fragment's payload is the last of its message.
    pub(super) fn ends(&self) -> bool {
        self.offset() + u64::from(self.length) == u64::from(self.total)
    }

    /// Where this fragment starts in its message.
    pub(super) fn offset(&self) -> u64 {
        if self.has(flag::FIRST) { 0 } else { self.address }
    }

    pub(super) fn imm(&self) -> Option<u32> {
        self.has(flag::IMM).then_some(self.imm)
    }

    pub(super) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[2..4].copy_from_slice(&self.status.to_le_bytes());
        out[4..8].copy_from_slice(&self.length.to_le_bytes());
        out[8..12].copy_from_slice(&self.msn.to_le_bytes());
        out[12..16].copy_from_slice(&self.ack.to_le_bytes());
        out[16..20].copy_from_slice(&self.limit.to_le_bytes());
        out[20..24].copy_from_slice(&self.total.to_le_bytes());
        out[24..28].copy_from_slice(&self.imm.to_le_bytes());
        out[28..36].copy_from_slice(&self.address.to_le_bytes());
        out[36..40].copy_from_slice(&self.key.to_le_bytes());
        out
    }

    /// Everything about a header that can be wrong on its own is refused here; what depends on the state, by the receiver.
    pub(super) fn parse(raw: &[u8; HEADER]) -> Result<Self, &'static str> {
        let u32_at = |at: usize| u32::from_le_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
        let header = Self {
            kind: Kind::parse(raw[0]).ok_or("unknown frame type")?,
            flags: raw[1],
            status: u16::from_le_bytes([raw[2], raw[3]]),
            length: u32_at(4),
            msn: u32_at(8),
            ack: u32_at(12),
            limit: u32_at(16),
            total: u32_at(20),
            imm: u32_at(24),
            address: u64::from(u32_at(28)) | u64::from(u32_at(32)) << 32,
            key: u32_at(36),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.flags & !flag::ALL != 0 {
            return Err("unknown flags");
        }
        if self.has(flag::NEAR) && self.length == 0 {
            return Err("an offer of nothing");
        }
        if self.has(flag::PATIENT) && !(self.kind == Kind::Send && self.has(flag::LAST)) {
            return Err("patience where none belongs");
        }
        match self.kind {
            Kind::Send | Kind::Write | Kind::ReadResponse => self.check_fragment(),
            _ if self.has(flag::NEAR) => Err("an offer where none belongs"),
            Kind::CompareSwap | Kind::FetchAdd if self.length as usize != ATOMIC_OPERANDS => {
                Err("an atomic without its operands")
            }
            Kind::CompareSwap | Kind::FetchAdd => Ok(()),
            _ if self.length != 0 => Err("payload where none belongs"),
            _ => Ok(()),
        }
    }

    fn check_fragment(&self) -> Result<(), &'static str> {
        if self.has(flag::NEAR) && (self.length != self.total || self.offset() != 0) {
            return Err("an offer of a part");
        }
        if self.length as usize > DEVICE_FRAGMENT && !self.has(flag::NEAR) {
            return Err("a fragment is too long");
        }
        let end = self.offset().checked_add(u64::from(self.length)).ok_or("a fragment's end overflows")?;
        if end > u64::from(self.total) {
            return Err("a fragment exceeds its message");
        }
        // The data of a Read is followed by an empty last fragment: only then nothing was revoked in between.
        if self.kind == Kind::ReadResponse {
            let ends = self.length == 0 && end == u64::from(self.total);
            return if ends == self.has(flag::LAST) { Ok(()) } else { Err("a read response ends in the wrong place") };
        }
        if self.has(flag::LAST) != (end == u64::from(self.total)) {
            return Err("a message ends in the wrong place");
        }
        if self.length == 0 && self.total > 0 {
            return Err("an empty fragment");
        }
        Ok(())
    }
}

/// The full sequence number nearest to `base` with these low bits.
pub(super) fn extend(base: u64, low: u32) -> u64 {
    let distance = low.wrapping_sub(base as u32) as i32;
    base.wrapping_add_signed(i64::from(distance))
}

/// The status a NAK may carry; anything else becomes the general one for the responder's side.
pub(super) fn nak_status(raw: u16) -> WcStatus {
    match WcStatus::from_raw(u32::from(raw)) {
        status @ (WcStatus::RemoteInvalidRequest | WcStatus::RemoteAccess) => status,
        _ => WcStatus::RemoteOperation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_round_trip() {
        let header = Header {
            kind: Kind::Write,
            flags: flag::FIRST | flag::IMM | flag::CAREFUL,
            status: 0,
            length: 4096,
            msn: 0x0102_0304,
            ack: 7,
            limit: 9,
            total: 1 << 20,
            imm: 0xdead_beef,
            address: 0x1122_3344_5566_7788,
            key: 0x99aa_bbcc,
        };
        assert_eq!(Header::parse(&header.encode()), Ok(header));
    }

    #[test]
    fn sequence_numbers_extend_across_the_wrap() {
        assert_eq!(extend(0, 5), 5);
        assert_eq!(extend(0xffff_fffe, 3), 0x1_0000_0003);
        assert_eq!(extend(0x1_0000_0003, 0xffff_fffe), 0xffff_fffe);
        assert_eq!(extend(7, 7), 7);
    }

    #[test]
    fn bad_headers_are_refused() {
        let bad = |change: fn(&mut Header)| {
            let mut header = Header::new(Kind::Send);
            header.flags = flag::FIRST | flag::LAST;
            header.length = 8;
            header.total = 8;
            assert!(Header::parse(&header.encode()).is_ok());
            change(&mut header);
            assert!(Header::parse(&header.encode()).is_err(), "{header:?}");
        };
        bad(|h| h.length = 9);
        bad(|h| h.length = u32::MAX);
        bad(|h| h.flags = flag::FIRST);
        bad(|h| h.flags = 0x80);
        bad(|h| (h.flags, h.length) = (flag::FIRST | flag::PATIENT, 4));
        bad(|h| (h.kind, h.flags) = (Kind::Write, h.flags | flag::PATIENT));
        bad(|h| (h.flags, h.length, h.total) = (h.flags | flag::NEAR, 0, 0));
        bad(|h| (h.flags, h.total) = (flag::FIRST | flag::NEAR, 9));
        bad(|h| (h.kind, h.flags) = (Kind::Bye, flag::NEAR));
        bad(|h| h.total = 9);
        bad(|h| (h.flags, h.address) = (flag::LAST, u64::MAX));
        bad(|h| (h.flags, h.address, h.length) = (0, 0, 0));
        bad(|h| h.kind = Kind::Ack);
        bad(|h| h.kind = Kind::FetchAdd);
        bad(|h| h.kind = Kind::ReadResponse);
        assert!(Header::parse(&[0; HEADER]).is_err());
        assert!(Header::parse(&[0xff; HEADER]).is_err());
    }
}
