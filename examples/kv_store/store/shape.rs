//! Sizes of a table, and where a key may be in it.

use tokio_rdma::RemoteRegion;
use twox_hash::XxHash3_64;

use super::StoreError;
use super::entry::HEADER;

/// The most bytes that a table takes: peers map memory of up to this size (link shm).
pub const MAX_TABLE: u64 = 256 << 20;

/// The most slots that are searched for a key. With half of the slots taken, one key in 2^32 finds none of them free.
const MOST_PROBES: u32 = 32;

/// What a server tells its clients of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    slots: u32,
    key_capacity: u16,
    value_capacity: u32,
}

impl Shape {
    /// At least so many slots, with room for keys and values of so many bytes.
    pub fn new(slots: u64, key_capacity: u64, value_capacity: u64) -> Result<Self, StoreError> {
        let limit = |what, value, limit, hint| StoreError::Limit { operation: "new table", what, value, limit, hint };
        if !(1..=1 << 28).contains(&slots) {
            return Err(limit("number of slots", slots, 1 << 28, "at least 1"));
        }
        if !(1..=1 << 10).contains(&key_capacity) {
            return Err(limit("length of keys", key_capacity, 1 << 10, "at least 1"));
        }
        if value_capacity > 1 << 24 {
            return Err(limit("length of values", value_capacity, 1 << 24, "store long ones in pieces"));
        }
        let shape = Self {
            slots: slots.next_power_of_two() as u32,
            key_capacity: key_capacity as u16,
            value_capacity: value_capacity as u32,
        };
        if shape.bytes() > MAX_TABLE {
            return Err(limit("table in bytes", shape.bytes(), MAX_TABLE, "choose fewer slots or shorter values"));
        }
        Ok(shape)
    }

    pub fn slots(&self) -> u32 {
        self.slots
    }

    pub fn key_capacity(&self) -> usize {
        self.key_capacity.into()
    }

    pub fn value_capacity(&self) -> usize {
        self.value_capacity as usize
    }

    /// Slots that a key may be in.
    pub fn probes(&self) -> u32 {
        self.slots.min(MOST_PROBES)
    }

    /// Bytes of a slot: whole cache lines, so that writing one does not disturb the readers of its neighbours.
    pub fn slot_len(&self) -> usize {
        (HEADER + self.key_capacity() + self.value_capacity()).next_multiple_of(64)
    }

    /// Of the whole table.
    pub fn bytes(&self) -> u64 {
        u64::from(self.slots) * self.slot_len() as u64
    }

    /// Where a slot begins.
    pub fn offset(&self, slot: u32) -> u64 {
        u64::from(slot) * self.slot_len() as u64
    }

    /// The slots that a key may be in, in the order of searching. The step is odd and so has no divisor in common with their number:
    /// no slot comes twice. It depends on the key, so that keys that meet once go different ways afterwards.
    pub fn sequence(&self, key: &[u8]) -> impl Iterator<Item = u32> + use<> {
        let hash = XxHash3_64::oneshot(key);
        let (first, step, mask) = (hash as u32, (hash >> 32) as u32 | 1, self.slots - 1);
        (0..self.probes()).map(move |probe| first.wrapping_add(probe.wrapping_mul(step)) & mask)
    }

    /// Refuses what has no room in a slot.
    pub fn check(&self, operation: &'static str, key: &[u8], value: &[u8]) -> Result<(), StoreError> {
        let check = |what, value: usize, limit: usize, hint| match value <= limit {
            true => Ok(()),
            false => Err(StoreError::Limit { operation, what, value: value as u64, limit: limit as u64, hint }),
        };
        check("length of the key", key.len(), self.key_capacity(), "start the server with a larger --key-capacity")?;
        let hint = "start the server with a larger --value-capacity, or store it in pieces";
        check("length of the value", value.len(), self.value_capacity(), hint)
    }

    /// Shape and place of a table, for a connection's private data.
    pub fn to_bytes(self, table: &RemoteRegion) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.slots.to_le_bytes());
        bytes.extend(self.value_capacity.to_le_bytes());
        bytes.extend(self.key_capacity.to_le_bytes());
        bytes.extend(table.to_bytes());
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<(Self, RemoteRegion), StoreError> {
        let fault = |reason: &str| StoreError::Protocol { operation: "connect", reason: reason.to_owned() };
        let rest = bytes.strip_prefix(&MAGIC).ok_or_else(|| fault("the peer is no server of this store"))?;
        let split = || {
            let (slots, rest) = rest.split_first_chunk()?;
            let (value_capacity, rest) = rest.split_first_chunk()?;
            let (key_capacity, rest) = rest.split_first_chunk()?;
            Some((
                u32::from_le_bytes(*slots),
                u32::from_le_bytes(*value_capacity),
                u16::from_le_bytes(*key_capacity),
                rest,
            ))
        };
        let (slots, value_capacity, key_capacity, rest) = split().ok_or_else(|| fault("a short greeting"))?;
        let (shape, table) =
            (Self::new(slots.into(), key_capacity.into(), value_capacity.into())?, RemoteRegion::from_bytes(rest)?);
        match shape.slots == slots && table.len() == shape.bytes() {
            true => Ok((shape, table)),
            false => Err(fault("a table whose length is not that of its slots")),
        }
    }
}

const MAGIC: [u8; 4] = *b"KVS1";

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tokio_rdma::Access;

    use super::*;

    #[test]
    fn a_sequence_has_no_slot_twice() {
        for slots in [1, 2, 8, 64, 1024] {
            let shape = Shape::new(slots, 16, 16).unwrap();
            for key in 0..1000u32 {
                let sequence: Vec<_> = shape.sequence(&key.to_le_bytes()).collect();
                assert_eq!(sequence.len(), slots.min(32) as usize);
                assert!(sequence.iter().all(|slot| u64::from(*slot) < slots));
                assert_eq!(sequence.iter().collect::<HashSet<_>>().len(), sequence.len(), "{sequence:?}");
            }
        }
    }

    #[test]
    fn a_greeting_is_read_as_it_was_written_and_nothing_else_is() {
        let shape = Shape::new(1000, 16, 100).unwrap();
        assert_eq!((shape.slots(), shape.slot_len()), (1024, 192));
        let table = RemoteRegion::new(4096, shape.bytes(), 7, Access::REMOTE_READ).unwrap();
        let bytes = shape.to_bytes(&table);
        assert!(bytes.len() <= 54, "the most that a connection's private data holds");
        assert_eq!(Shape::from_bytes(&bytes).unwrap(), (shape, table));
        for len in 0..bytes.len() {
            assert!(Shape::from_bytes(&bytes[..len]).is_err(), "{len}");
        }
        for at in 0..14 {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0x80;
            assert!(Shape::from_bytes(&wrong).is_err(), "byte {at}");
        }
    }

    #[test]
    fn sizes_have_limits() {
        for (slots, key, value) in
            [(0, 1, 1), (1, 0, 1), (1, 1, 1 << 25), (1 << 29, 1, 1), (1 << 20, 1, 4096), (1, 1 << 11, 0)]
        {
            let error = Shape::new(slots, key, value).unwrap_err().to_string();
            assert!(error.contains("the limit is"), "{error}");
        }
    }
}
