//! Contents that tell where they belong.

/// The word at this position: SplitMix64 of seed and position, so that a shifted, repeated or foreign piece is seen.
fn word(seed: u64, position: u64) -> [u8; 8] {
    let mut z = (seed.rotate_left(32) ^ position).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()
}

/// Fills with the pattern of this seed.
pub fn fill(bytes: &mut [u8], seed: u64) {
    for (position, chunk) in bytes.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(seed, position as u64)[..chunk.len()]);
    }
}

/// The pattern of this seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill(&mut bytes, seed);
    bytes
}

/// Panics at the first byte that is not the pattern's.
#[track_caller]
pub fn assert_pattern(bytes: &[u8], seed: u64) {
    if let Some(at) = differs(bytes, seed) {
        panic!("byte {at} of {} is {:#04x}, not that of pattern {seed}", bytes.len(), bytes[at]);
    }
}

/// The first byte that is not the pattern's.
pub fn differs(bytes: &[u8], seed: u64) -> Option<usize> {
    bytes.chunks(8).enumerate().find_map(|(position, chunk)| {
        let expected = word(seed, position as u64);
        // Byte by byte only where it matters: unoptimised, that takes most of a large transfer's time.
        if *chunk == expected[..chunk.len()] {
            return None;
        }
        let inside = (0..chunk.len()).find(|&at| chunk[at] != expected[at])?;
        Some(8 * position + inside)
    })
}
