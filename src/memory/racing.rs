//! Copies of memory that another process, or another thread, may change at the same time.
//!
//! To Rust such a copy is a race, and a compiler may read the source again later, when it has changed. So the bytes are moved by
//! instructions that it does not see through, as a device would move them: the result is some mixture of old and new bytes, and
//! whatever was copied stays as it is.
#![allow(unsafe_code)]

/// Copies `len` bytes.
///
/// # Safety
///
/// `from` can be read and `to` written for `len` bytes during the call. The two do not overlap. Nobody holds a reference
/// to what is written.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: reads and writes exactly the caller's bytes; the direction flag is clear by the calling convention.
    unsafe {
        std::arch::asm!(
            // Short copies by words: starting a string instruction costs more than they do.
            "cmp rcx, {short}",
            "ja 4f",
            "2:",
            "sub rcx, 8",
            "jb 3f",
            "mov {word}, [rsi]",
            "mov [rdi], {word}",
            "add rsi, 8",
            "add rdi, 8",
            "jmp 2b",
            "3:",
            "add rcx, 8",
            "je 5f",
            "4:",
            "rep movsb",
            "5:",
            short = const SHORT,
            word = out(reg) _,
            inout("rcx") len => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack),
        );
    }
}

#[cfg(target_arch = "x86_64")]
const SHORT: usize = 128;

/// The same where no instructions were written: volatile accesses, which are done once each and in this order.
///
/// # Safety
///
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy(mut from: *const u8, mut to: *mut u8, mut len: usize) {
    const WORD: usize = size_of::<usize>();
    // SAFETY: stays inside of the caller's bytes; words are only used where both are aligned.
    unsafe {
        while len > 0 {
            if len >= WORD && from.addr() % WORD == 0 && to.addr() % WORD == 0 {
                to.cast::<usize>().write_volatile(from.cast::<usize>().read_volatile());
                (from, to, len) = (from.add(WORD), to.add(WORD), len - WORD);
            } else {
                to.write_volatile(from.read_volatile());
                (from, to, len) = (from.add(1), to.add(1), len - 1);
            }
        }
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::copy;

    #[test]
    fn every_length_and_alignment_is_copied_exactly() {
        for len in (0..300).chain([4095, 4096, 70_000]) {
            for skip in [0, 1, 3, 8] {
                let from: Vec<u8> = (0..skip + len).map(|i| (i * 7 + i / 251) as u8 | 1).collect();
                let mut to = vec![0; skip + len + 9];
                // SAFETY: both are long enough, and of their own.
                unsafe { copy(from[skip..].as_ptr(), to[skip..].as_mut_ptr(), len) };
                assert_eq!(to[skip..skip + len], from[skip..]);
                assert!(to[..skip].iter().chain(&to[skip + len..]).all(|byte| *byte == 0), "{len} bytes at {skip}");
            }
        }
    }
}
