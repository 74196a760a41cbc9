//! Addresses and memory taken apart: `cuMemCreate` and its like.
//!
//! The memory of a handle stands behind the addresses that it is mapped at: it has one place at a time, and begins
//! anew in the next. Memory that other processes can be given is a file, and the same in all places.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use super::memory::{self, Kind};
use super::registry::Registry;
use super::window::{LARGE_PAGE, memory_file};
use super::{Code, In, Out, Result, context, device, driver, lock};

/// What memory a program wants, as the driver API lays it out.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location_kind: u32,
    location: i32,
    win32: usize,
    compression: u8,
    gdr: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// CU_MEM_ALLOCATION_TYPE_PINNED, the only one, and CU_MEM_LOCATION_TYPE_DEVICE.
const PINNED: u32 = 1;
const ON_DEVICE: u32 = 1;

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, the only one but none.
const DESCRIPTOR: u32 = 1;

/// What the files are called, before the number of the device.
const FILE: &str = "fake-cuda-memory-";

impl Properties {
    fn pinned(device: usize, gdr: bool, shared: bool) -> Self {
        let location = device as i32;
        let handle_types = if shared { DESCRIPTOR } else { 0 };
        let (win32, compression, usage, reserved) = (0, 0, 0, [0; 4]);
        let (kind, location_kind, gdr) = (PINNED, ON_DEVICE, u8::from(gdr));
        Self { kind, handle_types, location_kind, location, win32, compression, gdr, usage, reserved }
    }

    fn device(&self) -> Result<usize> {
        if self.kind != PINNED || self.location_kind != ON_DEVICE || ![0, DESCRIPTOR].contains(&self.handle_types) {
            return Err(Code::NOT_SUPPORTED);
        }
        device::get(self.location)?;
        Ok(self.location as usize)
    }
}

/// Memory without addresses.
struct Memory {
    handle: usize,
    len: u64,
    device: usize,
    properties: Properties,
    file: Option<Arc<OwnedFd>>,
}

static MEMORY: Registry<Memory> = Registry::new("memory handle", 0x7000_0000);

/// Addresses without memory: where they begin, how many, and whose they are.
static RESERVED: Mutex<BTreeMap<u64, (u64, usize)>> = Mutex::new(BTreeMap::new());

/// What is mapped at an address, where that is a file.
static FILES: Mutex<BTreeMap<u64, Arc<OwnedFd>>> = Mutex::new(BTreeMap::new());

/// Who may use memory that is mapped, as the driver API lays it out.
#[repr(C)]
#[derive(Clone, Copy)]
struct Access {
    location_kind: u32,
    location: i32,
    flags: u32,
}

/// How a device may use the memory mapped at an address.
static OPEN: Mutex<BTreeMap<(u64, i32), u32>> = Mutex::new(BTreeMap::new());

fn reserved_device(address: u64, len: u64) -> Result<usize> {
    let reserved = lock(&RESERVED);
    let (&start, &(room, device)) = reserved.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
    let fits = len <= room && address - start <= room - len;
    if fits { Ok(device) } else { Err(Code::INVALID_VALUE) }
}

fn shared_file(device: usize, len: usize) -> Result<Arc<OwnedFd>> {
    let name = CString::new(format!("{FILE}{device}")).map_err(|_| Code::INVALID_VALUE)?;
    memory_file(&name, len).map(Arc::new).map_err(|_| Code::OUT_OF_MEMORY)
}

/// What another process has exported: its memory, the device's number, and how much it is.
fn opened(descriptor: usize) -> Option<(OwnedFd, usize, u64)> {
    let descriptor = i32::try_from(descriptor).ok()?;
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    let device = link.to_str()?.strip_prefix("/memfd:")?.strip_prefix(FILE)?.split(' ').next()?.parse().ok()?;
    // SAFETY: it is open, as the line above has seen.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) }.try_clone_to_owned().ok()?;
    // SAFETY: the structure is plain numbers, which the call fills in.
    let len = unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        (libc::fstat(file.as_raw_fd(), &mut status) == 0).then_some(status.st_size)?
    };
    Some((file, device, len as u64))
}

fn check_multiple(number: u64) -> Result {
    if number > 0 && number % LARGE_PAGE == 0 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

driver! {
    fn cuMemGetAllocationGranularity(granularity: Out<usize>, properties: In<Properties>, _option: u32) {
        properties.get(0)?.device()?;
        granularity.put(LARGE_PAGE as usize)
    }

    fn cuMemCreate(handle: Out<u64>, len: usize, properties: In<Properties>, flags: u64) {
        let properties = properties.get(0)?;
        let device = properties.device()?;
        check_multiple(len as u64)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let file = match properties.handle_types {
            DESCRIPTOR => Some(shared_file(device, len)?),
            _ => None,
        };
        let memory = MEMORY.insert(|handle| Memory { handle, len: len as u64, device, properties, file });
        handle.put(memory.handle as u64)
    }

    // For the other process, which gets a descriptor of its own.
    fn cuMemExportToShareableHandle(descriptor: Out<i32>, handle: u64, kind: u32, flags: u64) {
        let memory = MEMORY.get(handle as usize)?;
        let file = memory.file.as_ref().filter(|_| kind == DESCRIPTOR && flags == 0).ok_or(Code::INVALID_VALUE)?;
        descriptor.put(file.try_clone().map_err(|_| Code::OUT_OF_MEMORY)?.into_raw_fd())
    }

    // The descriptor stays the caller's.
    fn cuMemImportFromShareableHandle(handle: Out<u64>, descriptor: usize, kind: u32) {
        let (file, device, len) = Some(descriptor).filter(|_| kind == DESCRIPTOR).and_then(opened).ok_or(Code::INVALID_VALUE)?;
        device::get(device as i32)?;
        let properties = Properties::pinned(device, true, true);
        let file = Some(Arc::new(file));
        let memory = MEMORY.insert(|handle| Memory { handle, len, device, properties, file });
        handle.put(memory.handle as u64)
    }

    // Memory that is mapped stays until it is unmapped.
    fn cuMemRelease(handle: u64) {
        MEMORY.remove(handle as usize).map(|_| ())
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: Out<Properties>, handle: u64) {
        properties.put(MEMORY.get(handle as usize)?.properties)
    }

    // How a program learns that an address is of this kind. The handle is a new one, to be released again.
    fn cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) {
        let found = memory::find(address).ok_or(Code::INVALID_VALUE)?;
        let Kind::Mapped { gdr, shared } = found.kind else { return Err(Code::INVALID_VALUE) };
        let properties = Properties::pinned(found.device, gdr, shared);
        let file = lock(&FILES).get(&found.address).cloned();
        let memory = MEMORY.insert(|handle| Memory { handle, len: found.len, device: found.device, properties, file });
        handle.put(memory.handle as u64)
    }

    // The addresses are of the thread's device, or without a context of the first.
    fn cuMemAddressReserve(address: Out<u64>, len: usize, align: usize, _wish: u64, flags: u64) {
        check_multiple(len as u64)?;
        if flags != 0 || align != 0 && !align.is_power_of_two() {
            return Err(Code::INVALID_VALUE);
        }
        let device = context::current().map_or(0, |context| context.device);
        let align = LARGE_PAGE.max(align as u64);
        if len as u64 > device::memory_size() || align > device::memory_size() {
            return Err(Code::OUT_OF_MEMORY);
        }
        let start = device::window(device).take(len as u64, align).ok_or(Code::OUT_OF_MEMORY)?;
        lock(&RESERVED).insert(start, (len as u64, device));
        address.put(start)
    }

    fn cuMemAddressFree(address: u64, len: usize) {
        let mut reserved = lock(&RESERVED);
        let &(room, device) = reserved.get(&address).ok_or(Code::INVALID_VALUE)?;
        if room != len as u64 || memory::overlaps(address, room) {
            return Err(Code::INVALID_VALUE);
        }
        reserved.remove(&address);
        device::window(device).give_back(address, room);
        Ok(())
    }

    fn cuMemMap(address: u64, len: usize, offset: usize, handle: u64, flags: u64) {
        let memory = MEMORY.get(handle as usize)?;
        let context = context::usable()?;
        let device = reserved_device(address, len as u64)?;
        check_multiple(len as u64)?;
        let whole = offset == 0 && len as u64 == memory.len;
        // A file may be another device's.
        let fits = device == memory.device || memory.file.is_some();
        if flags != 0 || !whole || !fits || memory::overlaps(address, len as u64) {
            return Err(Code::INVALID_VALUE);
        }
        if let Some(file) = &memory.file {
            device::window(device).put_in(address, len as u64, file).map_err(|_| Code::OUT_OF_MEMORY)?;
            lock(&FILES).insert(address, file.clone());
        }
        let kind = Kind::Mapped { gdr: memory.properties.gdr != 0, shared: memory.file.is_some() };
        memory::insert(address, len as u64, kind, device, context.handle, 0);
        Ok(())
    }

    // It waits, as cuMemFree does.
    fn cuMemUnmap(address: u64, len: usize) {
        let found = memory::find(address).ok_or(Code::INVALID_VALUE)?;
        let whole = found.address == address && found.len == len as u64;
        if !whole || !matches!(found.kind, Kind::Mapped { .. }) {
            return Err(Code::INVALID_VALUE);
        }
        let result = context::find(found.context)?.synchronize();
        lock(&OPEN).retain(|(start, _), _| *start != address);
        lock(&FILES).remove(&address);
        memory::free(&found);
        result
    }

    fn cuMemSetAccess(address: u64, len: usize, access: In<Access>, count: usize) {
        let found = memory::find(address).filter(|found| matches!(found.kind, Kind::Mapped { .. }));
        let found = found.ok_or(Code::INVALID_VALUE)?;
        let whole = found.address == address && found.len == len as u64;
        if !whole || count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        for at in 0..count {
            let Access { location_kind, location, flags } = access.get(at)?;
            if location_kind != ON_DEVICE {
                return Err(Code::INVALID_VALUE);
            }
            device::get(location)?;
            lock(&OPEN).insert((address, location), flags);
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: Out<u64>, location: In<[u32; 2]>, address: u64) {
        let found = memory::find(address).filter(|found| matches!(found.kind, Kind::Mapped { .. }));
        let (found, [_, device]) = (found.ok_or(Code::INVALID_VALUE)?, location.get(0)?);
        let open = lock(&OPEN).get(&(found.address, device as i32)).copied();
        flags.put(open.unwrap_or(0).into())
    }
}
