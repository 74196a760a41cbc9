//! The kernels of `tests/gpu/kernels.ptx`, for the CPU, and where those of the parameter server are found.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::sleep;
use std::time::Duration;

use super::memory::{self, Range};
use super::{Code, Result, training};

/// A kernel. All of their arguments are 8 bytes long.
#[derive(Clone, Copy)]
pub(super) enum Kernel {
    Fill,
    Check,
    AddF32,
    Spin,
    Fault,
    Training(training::Kernel),
}

/// A kernel with its arguments, whose pointers are of memory that lives.
pub(super) enum Launch {
    Fill { out: Option<Range>, len: usize, seed: u64 },
    Check { input: Option<Range>, len: usize, seed: u64, mismatches: Range },
    AddF32 { ranges: Option<[Range; 2]>, count: usize },
    Spin(Duration),
    Fault,
    Training(training::Launch),
}

impl Kernel {
    pub(super) fn of_name(name: &str) -> Option<Self> {
        Some(match name {
            "fill" => Self::Fill,
            "check" => Self::Check,
            "add_f32" => Self::AddF32,
            "spin" => Self::Spin,
            "fault" => Self::Fault,
            _ => return training::Kernel::of_name(name).map(Self::Training),
        })
    }

    /// Reads the arguments, as the kernel declares them.
    pub(super) fn prepare(self, argument: impl Fn(usize) -> Result<u64>) -> Result<Launch> {
        let size = |index| argument(index).map(|len| len as usize);
        // Of no bytes, the address may be any.
        let range = |index, len| Ok((len > 0).then_some(memory::range(argument(index)?, len)));
        Ok(match self {
            Self::Fill => {
                let len = size(1)?;
                Launch::Fill { out: range(0, len)?, len, seed: argument(2)? }
            }
            Self::Check => {
                let len = size(1)?;
                let mismatches = memory::range(argument(3)?, size_of::<u64>());
                Launch::Check { input: range(0, len)?, len, seed: argument(2)?, mismatches }
            }
            Self::AddF32 => {
                let count = size(2)?;
                let len = count.checked_mul(size_of::<f32>()).ok_or(Code::INVALID_VALUE)?;
                Launch::AddF32 { ranges: range(0, len)?.zip(range(1, len)?).map(|(a, b)| [a, b]), count }
            }
            Self::Spin => Launch::Spin(Duration::from_nanos(argument(0)?)),
            Self::Fault => Launch::Fault,
            Self::Training(kernel) => Launch::Training(kernel.prepare(argument)?),
        })
    }
}

/// What `fill` writes, and `check` expects, at `index`.
fn pattern(seed: u64, index: usize) -> u8 {
    ((index as u64).wrapping_add(seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

impl Launch {
    pub(super) fn run(&self) -> Result {
        match *self {
            Self::Fill { out: Some(out), len, seed } => memory::with([out], |[out]| {
                for index in 0..len {
                    // SAFETY: `with` gives `len` bytes that are alive as long as the closure runs.
                    unsafe { out.add(index).write(pattern(seed, index)) };
                }
                Ok(())
            }),
            Self::Check { input, len, seed, mismatches } => {
                let found = input.map_or(Ok(0), |input| count_mismatches(input, len, seed))?;
                memory::with([mismatches], |[mismatches]| {
                    let mismatches: *mut u64 = mismatches.cast();
                    if !mismatches.is_aligned() {
                        return Err(Code::MISALIGNED_ADDRESS);
                    }
                    // SAFETY: `with` gives 8 bytes that are alive as long as the closure runs, and they are aligned.
                    unsafe { AtomicU64::from_ptr(mismatches) }.fetch_add(found, SeqCst);
                    Ok(())
                })
            }
            Self::AddF32 { ranges: Some(ranges), count } => memory::with(ranges, |[accumulator, x]| {
                let (accumulator, x): (*mut f32, *mut f32) = (accumulator.cast(), x.cast());
                if !accumulator.is_aligned() || !x.is_aligned() {
                    return Err(Code::MISALIGNED_ADDRESS);
                }
                for index in 0..count {
                    // SAFETY: `with` gives `count` numbers each that are alive as long as the closure runs, aligned.
                    unsafe { *accumulator.add(index) += *x.add(index) };
                }
                Ok(())
            }),
            Self::Fill { out: None, .. } | Self::AddF32 { ranges: None, .. } => Ok(()),
            Self::Spin(time) => {
                sleep(time);
                Ok(())
            }
            Self::Fault => Err(Code::ILLEGAL_ADDRESS),
            Self::Training(ref launch) => launch.run(),
        }
    }
}

fn count_mismatches(input: Range, len: usize, seed: u64) -> Result<u64> {
    let mut found = 0;
    memory::with([input], |[input]| {
        for index in 0..len {
            // SAFETY: `with` gives `len` bytes that are alive as long as the closure runs.
            found += u64::from(unsafe { input.add(index).read() } != pattern(seed, index));
        }
        Ok(())
    })?;
    Ok(found)
}
