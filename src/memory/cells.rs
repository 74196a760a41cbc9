//! Memory that others write at any time, read and written without a data race.
//!
//! Accesses of different size that race are undefined even when they are atomic. So every byte belongs to one cell of fixed size,
//! and all threads of this process go through the cells: aligned 8-byte words wherever they fit, single bytes before the first
//! and after the last word. Writing a part of a word is a read-modify-write of the whole.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU8, AtomicU64};

const WORD: usize = size_of::<u64>();

pub(super) struct Cells<'a> {
    head: &'a [AtomicU8],
    words: &'a [AtomicU64],
    tail: &'a [AtomicU8],
}

impl<'a> Cells<'a> {
    /// # Safety
    ///
    /// For `'a`, the `len` bytes at `ptr` are allocated, initialised, and reached in this process only through cells
    /// over exactly these bytes, or by a device.
    pub(super) unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        let head = ptr.align_offset(align_of::<AtomicU64>()).min(len);
        let words = (len - head) / WORD;
        let tail = head + words * WORD;
        // SAFETY: the three slices divide the caller's bytes; the middle one is aligned, or empty where no word fits.
        // Shared references to atomics allow for changes by others.
        unsafe {
            Self {
                head: slice::from_raw_parts(ptr.cast().as_ptr(), head),
                words: if words == 0 { &[] } else { slice::from_raw_parts(ptr.add(head).cast().as_ptr(), words) },
                tail: slice::from_raw_parts(ptr.add(tail).cast().as_ptr(), len - tail),
            }
        }
    }

    /// Copies `out.len()` bytes from `at` on. They lie inside.
    pub(super) fn read(&self, mut at: usize, mut out: &mut [u8]) {
        while !out.is_empty() {
            let done = match self.find(at) {
                Place::Byte(byte) => {
                    out[0] = byte.load(Relaxed);
                    1
                }
                Place::Words(words, 0) if out.len() >= WORD => {
                    let mut done = 0;
                    for (bytes, word) in out.chunks_exact_mut(WORD).zip(words) {
                        bytes.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
                        done += WORD;
                    }
                    done
                }
                Place::Words(words, within) => {
                    let done = out.len().min(WORD - within);
                    let bytes = words[0].load(Relaxed).to_ne_bytes();
                    out[..done].copy_from_slice(&bytes[within..within + done]);
                    done
                }
            };
            at += done;
            out = &mut out[done..];
        }
    }

    /// Copies `from` to the bytes from `at` on. They lie inside.
    pub(super) fn write(&self, mut at: usize, mut from: &[u8]) {
        while !from.is_empty() {
            let done = match self.find(at) {
                Place::Byte(byte) => {
                    byte.store(from[0], Relaxed);
                    1
                }
                Place::Words(words, 0) if from.len() >= WORD => {
                    let mut done = 0;
                    for (bytes, word) in from.chunks_exact(WORD).zip(words) {
                        let mut whole = [0; WORD];
                        whole.copy_from_slice(bytes);
                        word.store(u64::from_ne_bytes(whole), Relaxed);
                        done += WORD;
                    }
                    done
                }
                Place::Words(words, within) => {
                    let done = from.len().min(WORD - within);
                    merge(&words[0], within, &from[..done]);
                    done
                }
            };
            at += done;
            from = &from[done..];
        }
    }

    /// The word that begins at `at`, if one does.
    pub(super) fn word(&self, at: usize) -> Option<&'a AtomicU64> {
        let at = at.checked_sub(self.head.len())?;
        if at % WORD == 0 { self.words.get(at / WORD) } else { None }
    }

    fn find(&self, at: usize) -> Place<'a> {
        let Some(behind_head) = at.checked_sub(self.head.len()) else { return Place::Byte(&self.head[at]) };
        match self.words.get(behind_head / WORD..) {
            Some(words) if !words.is_empty() => Place::Words(words, behind_head % WORD),
            _ => Place::Byte(&self.tail[behind_head - self.words.len() * WORD]),
        }
    }
}

enum Place<'a> {
    Byte(&'a AtomicU8),
    /// The words from the one on that the place is in, and the place's position in that word.
    Words(&'a [AtomicU64], usize),
}

/// Replaces the bytes of `word` from `within` on, and leaves the others as they are, also when they change meanwhile.
fn merge(word: &AtomicU64, within: usize, from: &[u8]) {
    let mut old = word.load(Relaxed);
    loop {
        let mut bytes = old.to_ne_bytes();
        bytes[within..within + from.len()].copy_from_slice(from);
        match word.compare_exchange_weak(old, u64::from_ne_bytes(bytes), Relaxed, Relaxed) {
            Ok(_) => return,
            Err(now) => old = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn copies_match_a_slice_at_any_alignment(
            skip in 0usize..16,
            len in 0usize..64,
            ops in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 1..20),
        ) {
            let mut memory = vec![0u8; skip + len];
            let mut model = vec![0u8; len];
            // SAFETY: nothing else touches `memory` while the cells are used.
            let cells = unsafe { Cells::new(NonNull::from(&mut memory[skip..]).cast(), len) };
            for (from, to, value) in ops {
                let (a, b) = (from.index(len + 1), to.index(len + 1));
                let range = a.min(b)..a.max(b);
                let data: Vec<u8> = (0..range.len()).map(|i| value.wrapping_add(i as u8)).collect();
                cells.write(range.start, &data);
                model[range].copy_from_slice(&data);

                let mut back = vec![0; len - a];
                cells.read(a, &mut back);
                prop_assert_eq!(&back, &model[a..]);
            }
        }

        #[test]
        fn words_are_where_they_are_aligned(skip in 0usize..16, len in 0usize..40, at in 0usize..48) {
            let mut memory = vec![0u8; skip + len];
            let base = NonNull::from(&mut memory[skip..]).cast::<u8>();
            // SAFETY: nothing else touches `memory` while the cells are used.
            let cells = unsafe { Cells::new(base, len) };
            let expected = at + WORD <= len && (base.as_ptr() as usize + at) % WORD == 0;
            prop_assert_eq!(cells.word(at).is_some(), expected);
        }
    }
}
