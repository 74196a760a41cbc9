//! What is known of an address, and memory as others see it: ranges, descriptors, a NIC's writes.

use std::fs;
use std::os::fd::IntoRawFd;

use super::hooks::{self, knob};
use super::memory::{self, Allocation, Kind};
use super::window::memory_file;
use super::{Code, In, Out, Result, context, driver};

/// An attribute's value, of the size that the driver API gives it.
enum Value {
    Small(u32),
    Flag(bool),
    Large(u64),
}

impl Value {
    fn put(&self, data: Out<u8>) -> Result {
        match self {
            Self::Small(value) => data.cast().put(*value),
            Self::Flag(value) => data.put(u8::from(*value)),
            Self::Large(value) => data.cast().put(*value),
        }
    }
}

const SYNC_MEMOPS: u32 = 6;

/// The attribute of an address, by its number in the driver API.
fn attribute(number: u32, address: u64, found: &Allocation) -> Result<Value> {
    let on_device = found.kind.is_device();
    let from_host = !on_device || found.kind == Kind::Managed;
    Ok(match number {
        1 => Value::Large(found.context as u64),
        // CU_MEMORYTYPE_DEVICE and CU_MEMORYTYPE_HOST.
        2 => Value::Small(if on_device { 2 } else { 1 }),
        3 => Value::Large(address),
        4 if from_host => Value::Large(address),
        SYNC_MEMOPS if matches!(found.kind, Kind::Mapped { .. }) => return Err(Code::NOT_SUPPORTED),
        SYNC_MEMOPS => Value::Flag(found.sync_memops),
        7 => Value::Large(found.id),
        8 => Value::Flag(found.kind == Kind::Managed),
        9 => Value::Small(found.device as u32),
        10 => Value::Flag(found.kind == Kind::Device),
        11 => Value::Large(found.address),
        12 => Value::Large(found.len),
        13 => Value::Flag(true),
        14 => Value::Large(0),
        15 => Value::Flag(knob("gdr") != 0 && matches!(found.kind, Kind::Device | Kind::Mapped { gdr: true, .. })),
        // Read and write.
        16 => Value::Small(3),
        17 => Value::Large(if found.kind == Kind::Pool { 0x9000_0000 + found.device as u64 } else { 0 }),
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// What `cuPointerGetAttributes` says where [`attribute`] says nothing.
fn nothing(number: u32) -> Result<Value> {
    Ok(match number {
        2 | 16 => Value::Small(0),
        // CU_DEVICE_INVALID.
        9 => Value::Small(-2i32 as u32),
        6 | 8 | 10 | 13 | 15 => Value::Flag(false),
        1 | 3 | 4 | 7 | 11 | 12 | 14 | 17 => Value::Large(0),
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// Whether the driver exports this range of an allocation, as it was measured: whole pages, of which the last may
/// reach beyond the end.
fn is_exportable(found: &Allocation, address: u64, len: u64) -> bool {
    const PAGE: u64 = 4096;
    let room = found.len.next_multiple_of(PAGE) - (address - found.address);
    let whole = address == found.address && len == room;
    let aligned = address % PAGE == 0 && len % PAGE == 0 && len > 0 && len <= room;
    aligned
        && match found.kind {
            Kind::Device | Kind::Mapped { .. } => true,
            Kind::Pool => whole,
            Kind::Managed | Kind::Pinned | Kind::Registered => false,
        }
}

/// Descriptors that `cuMemGetHandleForAddressRange` gave and that are open now.
pub(super) fn open_handles() -> u64 {
    let descriptors = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let targets = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("/memfd:fake-cuda-handle")).count() as u64
}

driver! {
    fn cuPointerGetAttribute(data: Out<u8>, number: u32, address: u64) {
        let found = memory::find(address).ok_or(Code::INVALID_VALUE)?;
        attribute(number, address, &found)?.put(data)
    }

    fn cuPointerGetAttributes(count: u32, numbers: In<u32>, data: In<Out<u8>>, address: u64) {
        let found = memory::find(address);
        for index in 0..count as usize {
            let number = numbers.get(index)?;
            let value = found.as_ref().map_or(Err(Code::INVALID_VALUE), |found| attribute(number, address, found));
            value.or_else(|_| nothing(number))?.put(data.get(index)?)?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(value: In<u32>, number: u32, address: u64) {
        let found = memory::find(address).ok_or(Code::INVALID_VALUE)?;
        if number != SYNC_MEMOPS {
            return Err(Code::INVALID_VALUE);
        }
        if matches!(found.kind, Kind::Mapped { .. }) {
            return Err(Code::NOT_SUPPORTED);
        }
        memory::set_sync_memops(found.address, value.get(0)? != 0);
        Ok(())
    }

    // Of the thread's own device only, as an H200's driver has it.
    fn cuMemGetAddressRange_v2(base: Out<u64>, len: Out<usize>, address: u64) {
        let device = context::usable()?.device;
        let found = memory::find(address).filter(|found| found.device == device).ok_or(Code::NOT_FOUND)?;
        base.put_if_wanted(found.address)?;
        len.put_if_wanted(found.len as usize)
    }

    // A descriptor that a program can pass on, hold and close. There is nothing to map behind it, as with a real one.
    fn cuMemGetHandleForAddressRange(handle: Out<i32>, address: u64, len: usize, kind: u32, flags: u64) {
        context::usable()?;
        // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD is the only kind.
        if kind != 1 {
            return Err(Code::INVALID_VALUE);
        }
        // CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE is for machines with a second way to the memory.
        if knob("dmabuf") == 0 || flags != 0 && knob("c2c") == 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let found = memory::find(address).ok_or(Code::INVALID_VALUE)?;
        if !is_exportable(&found, address, len as u64) {
            return Err(Code::INVALID_VALUE);
        }
        let file = memory_file(c"fake-cuda-handle", len).map_err(|_| Code::OUT_OF_MEMORY)?;
        handle.put(file.into_raw_fd())
    }

    fn cuFlushGPUDirectRDMAWrites(target: u32, scope: u32) {
        context::usable()?;
        // The current context, for its device or for all.
        if target != 0 || !matches!(scope, 100 | 200) {
            return Err(Code::INVALID_VALUE);
        }
        if knob("flush_options") & 1 == 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        hooks::count("flushes", 1);
        Ok(())
    }
}
