//! Streams that write a number to memory, or wait for one.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use super::memory::{self, Range};
use super::{Code, Result, driver, stream};

/// When a wait ends.
#[derive(Clone, Copy)]
enum Condition {
    AtLeast,
    Equal,
    And,
    Nor,
}

impl Condition {
    /// By the flags of the driver API. To flush a NIC's writes is nothing that these devices can.
    fn of_flags(flags: u32) -> Result<Self> {
        Ok(match flags {
            0 => Self::AtLeast,
            1 => Self::Equal,
            2 => Self::And,
            3 => Self::Nor,
            _ => return Err(Code::NOT_SUPPORTED),
        })
    }

    fn holds(self, memory: u64, value: u64, mask: u64) -> bool {
        match self {
            // As if numbers went round.
            Self::AtLeast => memory.wrapping_sub(value) & mask <= mask >> 1,
            Self::Equal => memory == value,
            Self::And => memory & value != 0,
            Self::Nor => !(memory | value) & mask != 0,
        }
    }
}

/// A number of 4 or 8 bytes at an address.
fn number(address: u64, len: usize) -> Result<Range> {
    if address % len as u64 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    Ok(memory::range(address, len))
}

fn load(range: Range, len: usize) -> u64 {
    let mut value = 0;
    let _ = memory::with([range], |[at]| {
        // SAFETY: `with` gives `len` bytes that are alive as long as the closure runs; `number` has seen them aligned.
        value = unsafe {
            match len {
                4 => u64::from(AtomicU32::from_ptr(at.cast()).load(SeqCst)),
                _ => AtomicU64::from_ptr(at.cast()).load(SeqCst),
            }
        };
        Ok(())
    });
    value
}

fn write(stream: usize, address: u64, len: usize, value: u64, flags: u32) -> Result {
    let stream = stream::get(stream)?;
    // CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER changes nothing here.
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let range = number(address, len)?;
    stream.submit("write value", move || {
        memory::with([range], |[at]| {
            // SAFETY: as in `load`.
            unsafe {
                match len {
                    4 => AtomicU32::from_ptr(at.cast()).store(value as u32, SeqCst),
                    _ => AtomicU64::from_ptr(at.cast()).store(value, SeqCst),
                }
            }
            Ok(())
        })
    });
    Ok(())
}

fn wait(stream: usize, address: u64, len: usize, value: u64, flags: u32) -> Result {
    let stream = stream::get(stream)?;
    let condition = Condition::of_flags(flags)?;
    let range = number(address, len)?;
    let mask = if len == 4 { u64::from(u32::MAX) } else { u64::MAX };
    let context = stream.context.clone();
    stream.submit("wait value", move || {
        while !condition.holds(load(range, len), value, mask) {
            context.check()?;
            std::thread::sleep(Duration::from_micros(20));
        }
        Ok(())
    });
    Ok(())
}

driver! {
    fn cuStreamWriteValue32_v2(stream: usize, address: u64, value: u32, flags: u32) {
        write(stream, address, 4, u64::from(value), flags)
    }

    fn cuStreamWriteValue64_v2(stream: usize, address: u64, value: u64, flags: u32) {
        write(stream, address, 8, value, flags)
    }

    fn cuStreamWaitValue32_v2(stream: usize, address: u64, value: u32, flags: u32) {
        wait(stream, address, 4, u64::from(value), flags)
    }

    fn cuStreamWaitValue64_v2(stream: usize, address: u64, value: u64, flags: u32) {
        wait(stream, address, 8, value, flags)
    }
}
