//! Descriptions of a peer's memory.

use std::fmt;
use std::ops::RangeBounds;

use super::Access;
use super::range::resolve;
use crate::error::{Error, Result};

/// A range of a peer's memory, and the key that opens it: what one-sided operations (Write, Read, atomics) aim at.
///
/// The owner of the memory gets it from [`ExposedRegion::remote`](super::ExposedRegion::remote) and sends it to the peer by any means.
///
/// **A descriptor is a capability.** Whoever has it and a connection to the domain of that memory can use it until it is revoked,
/// and nobody asks the owner again. Send it only to whom you would let at the memory, and give peers that do not trust each other
/// a [`ProtectionDomain`](super::ProtectionDomain) each.
///
/// # Wire form
///
/// [`WIRE_LEN`](Self::WIRE_LEN) bytes, integers in little-endian order:
///
/// | bytes | field | value |
/// |---|---|---|
/// | 0..4 | magic | the ASCII letters `RMEM` |
/// | 4..8 | version | 1 |
/// | 8..12 | access | bits of [`Access`] |
/// | 12..16 | rkey | the key |
/// | 16..24 | address | of the first byte, in the owner's address space |
/// | 24..32 | length | in bytes; address + length is below 2^64 |
///
/// With the feature `serde` it is serialized as these bytes (`[u8; 32]`), and checked when deserialized.
///
/// ```
/// use tokio_rdma::{Access, RemoteRegion};
///
/// # fn main() -> tokio_rdma::Result<()> {
/// let region = RemoteRegion::new(0x7f00_0000_1000, 4096, 0x1234, Access::REMOTE_READ)?;
/// let received = RemoteRegion::from_bytes(&region.to_bytes())?;
/// assert_eq!(received, region);
///
/// let second_half = received.slice(2048..)?;
/// assert_eq!((second_half.address(), second_half.len()), (0x7f00_0000_1800, 2048));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "[u8; 32]", into = "[u8; 32]"))]
pub struct RemoteRegion {
    // Invariant: address + length does not overflow, and access has only bits that have names.
    address: u64,
    length: u64,
    rkey: u32,
    access: Access,
}

const WHAT: &str = "remote region";
const MAGIC: [u8; 4] = *b"RMEM";
const VERSION: u32 = 1;

impl RemoteRegion {
    /// Length of the wire form in bytes.
    pub const WIRE_LEN: usize = 32;

    /// Describes memory whose owner told its address and key in some other way than the wire form:
    /// a program in another language, for example.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] when `address + length` is 2^64 or more, or `access` has bits without a name.
    pub fn new(address: u64, length: u64, rkey: u32, access: Access) -> Result<Self> {
        if address.checked_add(length).is_none() {
            return Err(invalid(format_args!("address {address:#x} + length {length} does not fit in 64 bits")));
        }
        if !Access::all().contains(access) {
            return Err(invalid(format_args!(
                "access {:#x} has bits outside of {:#x}",
                access.bits(),
                Access::all().bits()
            )));
        }
        Ok(Self { address, length, rkey, access })
    }

    /// Describes memory of this process, which never reaches the end of the address space.
    pub(crate) fn of_local(address: u64, length: u64, rkey: u32, access: Access) -> Self {
        debug_assert!(address.checked_add(length).is_some() && Access::all().contains(access));
        Self { address, length, rkey, access }
    }

    /// The wire form.
    pub fn to_bytes(&self) -> [u8; Self::WIRE_LEN] {
        let mut bytes = [0; Self::WIRE_LEN];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.access.bits().to_le_bytes());
        bytes[12..16].copy_from_slice(&self.rkey.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.address.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads the wire form. Only the form is checked: whether the key opens anything, the owner's device knows.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`] unless these are exactly [`WIRE_LEN`](Self::WIRE_LEN) bytes that
    /// [`to_bytes`](Self::to_bytes) could have made.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bytes: &[u8; Self::WIRE_LEN] = bytes
            .try_into()
            .map_err(|_| invalid(format_args!("{} bytes instead of {}", bytes.len(), Self::WIRE_LEN)))?;
        let [magic, version, access, rkey] = [0, 4, 8, 12].map(|at| field::<4>(bytes, at));
        if magic != MAGIC {
            return Err(invalid(format_args!("it begins with {magic:02x?} instead of {MAGIC:02x?}")));
        }
        let version = u32::from_le_bytes(version);
        if version != VERSION {
            return Err(invalid(format_args!("version {version}; this side knows {VERSION}")));
        }
        let [address, length] = [16, 24].map(|at| u64::from_le_bytes(field(bytes, at)));
        let access = Access::from_bits_retain(u32::from_le_bytes(access));
        Self::new(address, length, u32::from_le_bytes(rkey), access)
    }

    /// A part of the region, by positions in it. The key and the rights stay the same: this is for aiming, not for restricting.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when the range ends behind the region's end, or before it starts.
    pub fn slice(&self, range: impl RangeBounds<u64>) -> Result<Self> {
        let range = resolve("slice", range, self.length)?;
        Ok(Self { address: self.address + range.start, length: range.end - range.start, ..*self })
    }

    /// Address of the first byte, in the owner's address space.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// The key.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// What the owner grants.
    pub fn access(&self) -> Access {
        self.access
    }
}

fn field<const N: usize>(bytes: &[u8; RemoteRegion::WIRE_LEN], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

fn invalid(reason: fmt::Arguments<'_>) -> Error {
    Error::Descriptor { what: WHAT, reason: reason.to_string() }
}

impl fmt::Display for RemoteRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} (length {}, rkey {:#x}, access {})", self.address, self.length, self.rkey, self.access)
    }
}

impl From<RemoteRegion> for [u8; RemoteRegion::WIRE_LEN] {
    fn from(region: RemoteRegion) -> Self {
        region.to_bytes()
    }
}

impl TryFrom<[u8; RemoteRegion::WIRE_LEN]> for RemoteRegion {
    type Error = Error;

    fn try_from(bytes: [u8; RemoteRegion::WIRE_LEN]) -> Result<Self> {
        Self::from_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_region() -> impl Strategy<Value = RemoteRegion> {
        (any::<u64>(), any::<u64>(), any::<u32>(), 0u32..8).prop_map(|(address, length, rkey, access)| {
            let access = Access::from_bits_truncate(access << 1);
            RemoteRegion::new(address, length.min(u64::MAX - address), rkey, access).unwrap()
        })
    }

    #[test]
    fn the_wire_form_is_the_documented_one() {
        let access = Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let region = RemoteRegion::new(0x0807_0605_0403_0201, 0x1000, 0xaabb_ccdd, access).unwrap();
        let expected = b"RMEM\x01\0\0\0\x0c\0\0\0\xdd\xcc\xbb\xaa\x01\x02\x03\x04\x05\x06\x07\x08\0\x10\0\0\0\0\0\0";
        assert_eq!(&region.to_bytes(), expected);
        assert_eq!(RemoteRegion::from_bytes(expected).unwrap(), region);
    }

    #[test]
    fn overflow_and_unknown_rights_are_refused() {
        assert!(RemoteRegion::new(u64::MAX, 0, 1, Access::empty()).is_ok());
        assert!(RemoteRegion::new(u64::MAX, 1, 1, Access::empty()).is_err());
        assert!(RemoteRegion::new(1, u64::MAX, 1, Access::empty()).is_err());
        assert!(RemoteRegion::new(0, 1, 1, Access::from_bits_retain(1)).is_err());
        assert!(RemoteRegion::new(0, 1, 1, Access::from_bits_retain(1 << 31)).is_err());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(region in any_region()) {
            prop_assert_eq!(RemoteRegion::from_bytes(&region.to_bytes()).unwrap(), region);
        }

        #[test]
        fn other_lengths_are_refused(region in any_region(), len in 0usize..64) {
            let mut bytes = region.to_bytes().to_vec();
            bytes.resize(len, 0);
            prop_assert_eq!(RemoteRegion::from_bytes(&bytes).is_ok(), len == RemoteRegion::WIRE_LEN);
        }

        #[test]
        fn random_bytes_never_make_an_invalid_region(mut bytes in any::<[u8; 32]>(), genuine in 0usize..12) {
            let start = RemoteRegion::new(0, 0, 0, Access::all()).unwrap().to_bytes();
            bytes[..genuine].copy_from_slice(&start[..genuine]);
            if let Ok(region) = RemoteRegion::from_bytes(&bytes) {
                prop_assert!(region.address().checked_add(region.len()).is_some());
                prop_assert!(Access::all().contains(region.access()));
                prop_assert_eq!(region.to_bytes(), bytes);
            }
        }

        #[test]
        fn a_flipped_bit_is_refused_or_is_another_region(region in any_region(), bit in 0usize..256) {
            let mut bytes = region.to_bytes();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let read = RemoteRegion::from_bytes(&bytes);
            if bit < 64 {
                prop_assert!(read.is_err(), "magic and version");
            } else if let Ok(read) = read {
                prop_assert_ne!(read, region);
            }
        }

        #[test]
        fn slices_stay_inside(region in any_region(), start: u64, end: u64) {
            match region.slice(start..end) {
                Ok(slice) => {
                    prop_assert!(start <= end && end <= region.len());
                    prop_assert_eq!(slice.address(), region.address() + start);
                    prop_assert_eq!(slice.len(), end - start);
                    prop_assert_eq!((slice.rkey(), slice.access()), (region.rkey(), region.access()));
                }
                Err(_) => prop_assert!(start > end || end > region.len()),
            }
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn serde_checks_what_it_reads() {
        use serde::Deserialize;
        use serde::de::IntoDeserializer;
        use serde::de::value::{Error as ValueError, SeqDeserializer};

        let read = |bytes: [u8; 32]| {
            let bytes = bytes.into_iter().map(IntoDeserializer::<ValueError>::into_deserializer);
            RemoteRegion::deserialize(SeqDeserializer::<_, ValueError>::new(bytes))
        };
        let region = RemoteRegion::new(4096, 64, 7, Access::REMOTE_WRITE).unwrap();
        assert_eq!(read(region.to_bytes()).unwrap(), region);
        let mut overflowing = region.to_bytes();
        overflowing[16..].fill(0xff);
        assert!(read(overflowing).unwrap_err().to_string().contains("64 bits"));
    }
}
