//! The bytes of a slot.
//!
//! | bytes | field | value, little-endian |
//! |---|---|---|
//! | 0..8 | checksum | XXH3 of 64 bits over all that follows, up to the end of the value |
//! | 8..16 | version | of this contents; no other has the same |
//! | 16..20 | length of the value | |
//! | 20..22 | length of the key | |
//! | 22..24 | state | 1: a key and its value. 2: a key was here, and is deleted |
//! | 24.. | key, value | one behind the other |
//!
//! A slot that was never used is all zeros.

use std::ops::Range;

use twox_hash::XxHash3_64;

/// What comes before the key.
pub const HEADER: usize = 24;

const PRESENT: u16 = 1;
const DELETED: u16 = 2;

/// What was read from a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Never used.
    Empty,
    /// A key was here. Others may be behind it.
    Deleted,
    /// A key, and where its value is.
    Present { version: u64, key: Range<usize>, value: Range<usize> },
    /// Not of one version.
    Torn,
}

/// The contents with a key and its value, of this version.
pub fn present(bytes: &mut Vec<u8>, version: u64, key: &[u8], value: &[u8]) {
    encode(bytes, version, PRESENT, key, value);
}

/// The contents after a key was deleted.
pub fn deleted(bytes: &mut Vec<u8>, version: u64) {
    encode(bytes, version, DELETED, &[], &[]);
}

fn encode(bytes: &mut Vec<u8>, version: u64, state: u16, key: &[u8], value: &[u8]) {
    bytes.clear();
    bytes.extend([0; 8]);
    bytes.extend(version.to_le_bytes());
    bytes.extend((value.len() as u32).to_le_bytes());
    bytes.extend((key.len() as u16).to_le_bytes());
    bytes.extend(state.to_le_bytes());
    bytes.extend(key);
    bytes.extend(value);
    let checksum = XxHash3_64::oneshot(&bytes[8..]);
    bytes[..8].copy_from_slice(&checksum.to_le_bytes());
}

impl Entry {
    /// What a slot held while it was read. Whatever the bytes are, there is an answer.
    pub fn decode(bytes: &[u8]) -> Self {
        let Some((header, _)) = bytes.split_first_chunk::<HEADER>() else { return Self::Torn };
        if *header == [0; HEADER] {
            return Self::Empty;
        }
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let (checksum, version, lengths) = (word(0), word(8), word(16));
        // Of two versions, these may be anything.
        let (value_len, key_len, state) =
            (lengths as u32 as usize, (lengths >> 32) as u16 as usize, (lengths >> 48) as u16);
        let (key, value) = (HEADER..HEADER + key_len, HEADER + key_len..HEADER + key_len + value_len);
        match bytes.get(8..value.end) {
            Some(covered) if XxHash3_64::oneshot(covered) == checksum => {}
            _ => return Self::Torn,
        }
        match state {
            PRESENT => Self::Present { version, key, value },
            DELETED => Self::Deleted,
            _ => Self::Torn,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn slot(version: u64, key: &[u8], value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        present(&mut bytes, version, key, value);
        bytes.resize(256, 0);
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = slot(7, b"key", b"a value");
        let Entry::Present { version, key, value } = Entry::decode(&bytes) else {
            panic!("{:?}", Entry::decode(&bytes))
        };
        assert_eq!((version, &bytes[key], &bytes[value]), (7, &b"key"[..], &b"a value"[..]));
        let mut bytes = Vec::new();
        deleted(&mut bytes, 8);
        assert_eq!(Entry::decode(&bytes), Entry::Deleted);
        assert_eq!(Entry::decode(&[0; 256]), Entry::Empty);
        assert_eq!(Entry::decode(&[0; 3]), Entry::Torn);
    }

    /// The same value under another version has another checksum: what a slot held before cannot pass for what it holds now.
    #[test]
    fn every_mixture_of_two_versions_is_torn() {
        let pairs = [
            (slot(1, b"key", &[1; 200]), slot(2, b"key", &[2; 200])),
            (slot(1, b"key", &[1; 200]), slot(2, b"key", &[1; 200])),
            (slot(1, b"key", &[1; 200]), slot(2, b"another", &[1; 20])),
            (vec![0; 256], slot(1, b"key", &[1; 200])),
        ];
        for (old, new) in pairs {
            for from in (0..256).step_by(8) {
                for to in (from + 8..=256).step_by(8) {
                    let mut mixed = old.clone();
                    mixed[from..to].copy_from_slice(&new[from..to]);
                    let read = Entry::decode(&mixed);
                    let is_whole = |version: &[u8]| read == Entry::decode(version) && mixed[..224] == version[..224];
                    // Where the header is still all zeros, the slot is still empty.
                    let untouched = read == Entry::Empty && mixed[..HEADER] == [0; HEADER];
                    assert!(
                        read == Entry::Torn || is_whole(&old) || is_whole(&new) || untouched || {
                            // Behind the end of the shorter of the two values nothing is covered.
                            let Entry::Present { value, .. } = &read else { panic!("{from}..{to}: {read:?}") };
                            [&old, &new].iter().any(|whole| whole[..value.end] == mixed[..value.end])
                        }
                    );
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_flipped_bit_is_seen(bit in 0..8 * (HEADER + 3 + 40)) {
            let mut bytes = slot(9, b"key", &[5; 40]);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Entry::decode(&bytes), Entry::Torn);
        }

        #[test]
        fn any_bytes_have_an_answer(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let read = Entry::decode(&bytes);
            prop_assert!(read == Entry::Torn || bytes.iter().take(HEADER).all(|byte| *byte == 0), "{:?}", read);
        }
    }
}
