//! Copies and fills.

use super::context::{self, Context};
use super::memory::{self, Range};
use super::stream::{self, Stream};
use super::{Code, Result, driver, hooks};

/// An end of a copy.
enum Place {
    /// Memory that the driver knows, which stays where it is until the copy has its turn.
    Known(Range),
    /// Any other memory of the program, which may be used only until the call returns.
    Pageable(usize),
}

impl Place {
    fn device(address: u64, len: usize) -> Self {
        Self::Known(memory::range(address, len))
    }

    fn host(address: usize, len: usize) -> Self {
        memory::host_range(address as u64, len).map_or(Self::Pageable(address), Self::Known)
    }

    fn is_device(&self) -> bool {
        matches!(self, Self::Known(range) if range.kind.is_device())
    }

    fn is_pageable(&self) -> bool {
        matches!(self, Self::Pageable(_))
    }

    fn sync_memops(&self) -> bool {
        matches!(self, Self::Known(range) if range.sync_memops)
    }
}

/// Where a copy reads when its turn has come.
enum Source {
    Known(Range),
    /// What pageable memory held at the time of the call.
    Staged(Vec<u8>),
}

/// Queues a copy. When this returns, pageable memory is no longer used.
fn enqueue(stream: &Stream, to: &Place, from: &Place, len: usize) -> Result {
    let (copies, bytes) = match (to.is_device(), from.is_device()) {
        (true, false) => ("copies_h2d", "bytes_h2d"),
        (false, true) => ("copies_d2h", "bytes_d2h"),
        (true, true) => ("copies_d2d", "bytes_d2d"),
        (false, false) => ("copies_h2h", "bytes_h2h"),
    };
    let source = match *from {
        Place::Known(range) => Source::Known(range),
        Place::Pageable(address) => {
            let mut staged = vec![0; len];
            // SAFETY: the caller of the driver answers for its own memory during the call.
            unsafe { std::ptr::copy_nonoverlapping(address as *const u8, staged.as_mut_ptr(), len) };
            Source::Staged(staged)
        }
    };
    let copy = move |to: *mut u8, from: *const u8| {
        // SAFETY: both ends are `len` bytes: memory that `with` keeps alive meanwhile, staged bytes, or pageable memory
        // whose owner waits for the end of this.
        unsafe { std::ptr::copy(from, to, len) };
        Ok(())
    };
    let to_known = match *to {
        Place::Known(range) => Ok(range),
        Place::Pageable(address) => Err(address),
    };
    stream.submit("copy", move || {
        hooks::delay("copy_delay_us");
        match (to_known, &source) {
            (Ok(to), Source::Known(from)) => memory::with([to, *from], |[to, from]| copy(to, from)),
            (Ok(to), Source::Staged(from)) => memory::with([to], |[to]| copy(to, from.as_ptr())),
            (Err(to), Source::Known(from)) => memory::with([*from], |[from]| copy(to as *mut u8, from)),
            (Err(to), Source::Staged(from)) => copy(to as *mut u8, from.as_ptr()),
        }?;
        hooks::count(copies, 1);
        hooks::count(bytes, len as u64);
        Ok(())
    });
    if to.is_pageable() {
        stream.wait();
        stream.context.check()?;
    }
    Ok(())
}

/// A copy that the caller waits for, unless both ends are on devices: then it is only queued, except where the program
/// has asked otherwise.
fn copy_now(to: &Place, from: &Place, len: usize) -> Result {
    let context = context::usable()?;
    if len == 0 {
        return Ok(());
    }
    enqueue(&context.default_stream(), to, from, len)?;
    let early = to.is_device() && from.is_device() && !to.sync_memops() && !from.sync_memops();
    finish(&context, early)
}

fn finish(context: &std::sync::Arc<Context>, early: bool) -> Result {
    if !early || context.sync_memops() {
        context.default_stream().wait();
    }
    context.check()
}

fn copy_later(to: &Place, from: &Place, len: usize, stream: usize) -> Result {
    let stream = stream::get(stream)?;
    if len == 0 { Ok(()) } else { enqueue(&stream, to, from, len) }
}

/// Queues a fill with `count` values of `N` bytes each.
fn fill<const N: usize>(stream: &Stream, address: u64, value: [u8; N], count: usize) -> Result<Range> {
    let len = count.checked_mul(N).ok_or(Code::INVALID_VALUE)?;
    if address % N as u64 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let range = memory::range(address, len);
    stream.submit("memset", move || {
        hooks::delay("copy_delay_us");
        memory::with([range], |[at]| {
            for index in 0..count {
                // SAFETY: `with` gives `count` times `N` bytes that are alive as long as the closure runs.
                unsafe { at.cast::<[u8; N]>().add(index).write(value) };
            }
            Ok(())
        })
    });
    Ok(range)
}

fn fill_now<const N: usize>(address: u64, value: [u8; N], count: usize) -> Result {
    let context = context::usable()?;
    if count == 0 {
        return Ok(());
    }
    let range = fill(&context.default_stream(), address, value, count)?;
    finish(&context, range.kind.is_device() && !range.sync_memops)
}

fn fill_later<const N: usize>(address: u64, value: [u8; N], count: usize, stream: usize) -> Result {
    let stream = stream::get(stream)?;
    if count == 0 { Ok(()) } else { fill(&stream, address, value, count).map(|_| ()) }
}

driver! {
    fn cuMemcpyHtoD_v2(to: u64, from: usize, len: usize) {
        copy_now(&Place::device(to, len), &Place::host(from, len), len)
    }

    fn cuMemcpyDtoH_v2(to: usize, from: u64, len: usize) {
        copy_now(&Place::host(to, len), &Place::device(from, len), len)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) {
        copy_now(&Place::device(to, len), &Place::device(from, len), len)
    }

    fn cuMemcpy(to: usize, from: usize, len: usize) {
        copy_now(&Place::host(to, len), &Place::host(from, len), len)
    }

    fn cuMemcpyPeer(to: u64, to_context: usize, from: u64, from_context: usize, len: usize) {
        context::find(to_context)?;
        context::find(from_context)?;
        copy_now(&Place::device(to, len), &Place::device(from, len), len)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: usize, len: usize, stream: usize) {
        copy_later(&Place::device(to, len), &Place::host(from, len), len, stream)
    }

    fn cuMemcpyDtoHAsync_v2(to: usize, from: u64, len: usize, stream: usize) {
        copy_later(&Place::host(to, len), &Place::device(from, len), len, stream)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize) {
        copy_later(&Place::device(to, len), &Place::device(from, len), len, stream)
    }

    fn cuMemcpyAsync(to: usize, from: usize, len: usize, stream: usize) {
        copy_later(&Place::host(to, len), &Place::host(from, len), len, stream)
    }

    fn cuMemcpyPeerAsync(to: u64, to_context: usize, from: u64, from_context: usize, len: usize, stream: usize) {
        context::find(to_context)?;
        context::find(from_context)?;
        copy_later(&Place::device(to, len), &Place::device(from, len), len, stream)
    }

    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) {
        fill_now(address, value.to_ne_bytes(), count)
    }

    fn cuMemsetD16_v2(address: u64, value: u16, count: usize) {
        fill_now(address, value.to_ne_bytes(), count)
    }

    fn cuMemsetD32_v2(address: u64, value: u32, count: usize) {
        fill_now(address, value.to_ne_bytes(), count)
    }

    fn cuMemsetD8Async(address: u64, value: u8, count: usize, stream: usize) {
        fill_later(address, value.to_ne_bytes(), count, stream)
    }

    fn cuMemsetD16Async(address: u64, value: u16, count: usize, stream: usize) {
        fill_later(address, value.to_ne_bytes(), count, stream)
    }

    fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: usize) {
        fill_later(address, value.to_ne_bytes(), count, stream)
    }
}
