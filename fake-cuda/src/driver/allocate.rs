//! Memory: taking and giving back.

use super::context::{self, Context};
use super::memory::{self, GRANULE, Kind};
use super::window::LARGE_PAGE;
use super::{Code, Out, Result, device, driver, hooks, stream};

/// Takes device memory, or memory of its pool.
fn allocate(context: &Context, len: usize, kind: Kind) -> Result<u64> {
    if len == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let len = len as u64;
    if len > device::memory_size() {
        return Err(Code::OUT_OF_MEMORY);
    }
    let align = if len >= LARGE_PAGE { LARGE_PAGE } else { GRANULE };
    let window = device::window(context.device);
    let address = window.take(len.next_multiple_of(GRANULE), align).ok_or(Code::OUT_OF_MEMORY)?;
    memory::insert(address, len, kind, context.device, context.handle, 0);
    Ok(address)
}

/// Takes memory that the CPU reaches at the same address.
fn allocate_on_host(len: usize, kind: Kind, flags: u32) -> Result<u64> {
    let context = context::usable()?;
    if len == 0 {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: a new mapping at an address that the system chooses.
    let address = unsafe {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0)
    };
    if address == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    memory::insert(address as u64, len as u64, kind, context.device, context.handle, flags);
    Ok(address as u64)
}

fn allocate_from_pool(address: Out<u64>, len: usize, stream: usize) -> Result {
    let stream = stream::get(stream)?;
    if hooks::knob("memory_pools") == 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    address.put(allocate(&stream.context, len, Kind::Pool)?)
}

/// Gives host memory back that was made by one function. It waits for nothing: that is for the program to do.
fn free_on_host(address: u64, kind: Kind, otherwise: Code) -> Result {
    let context = context::current()?;
    let found = memory::find(address).filter(|found| found.kind == kind && found.address == address);
    memory::free(&found.ok_or(otherwise)?);
    context.check()
}

/// A device's default pool, which is its only one.
const POOL: usize = 0x9000_0000;

fn pool_of(device: i32) -> Result<usize> {
    device::get(device)?;
    if hooks::knob("memory_pools") == 0 {
        return Err(Code::NOT_SUPPORTED);
    }
    Ok(POOL + device as usize)
}

fn check_pool(pool: usize) -> Result {
    let device = pool.checked_sub(POOL).and_then(|device| i32::try_from(device).ok());
    pool_of(device.ok_or(Code::INVALID_VALUE)?).map(|_| ())
}

driver! {
    fn cuMemAlloc_v2(address: Out<u64>, len: usize) {
        address.put(allocate(&*context::usable()?, len, Kind::Device)?)
    }

    // It waits for all that the context does, as real drivers do.
    fn cuMemFree_v2(address: u64) {
        let context = context::current()?;
        if address == 0 {
            return context.check();
        }
        let found = memory::find_start(address);
        if !matches!(found.kind, Kind::Device | Kind::Pool | Kind::Managed) {
            return Err(Code::INVALID_VALUE);
        }
        let owner = context::find(found.context)?;
        let result = owner.synchronize();
        memory::free(&found);
        result.and_then(|()| context.check())
    }

    fn cuMemAllocAsync(address: Out<u64>, len: usize, stream: usize) {
        allocate_from_pool(address, len, stream)
    }

    fn cuMemAllocFromPoolAsync(address: Out<u64>, len: usize, pool: usize, stream: usize) {
        check_pool(pool)?;
        allocate_from_pool(address, len, stream)
    }

    fn cuMemFreeAsync(address: u64, stream: usize) {
        let found = memory::find_start(address);
        if found.kind != Kind::Pool {
            return Err(Code::INVALID_VALUE);
        }
        let stream = stream::get(stream).inspect_err(|_| memory::free(&found))?;
        memory::forbid(address);
        stream.submit_always("free", move || memory::free(&found));
        Ok(())
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<usize>, device: i32) {
        pool.put(pool_of(device)?)
    }

    fn cuDeviceGetMemPool(pool: Out<usize>, device: i32) {
        pool.put(pool_of(device)?)
    }

    fn cuMemPoolSetAttribute(pool: usize, _attribute: u32, _value: usize) {
        check_pool(pool)
    }

    fn cuMemPoolTrimTo(pool: usize, _keep: usize) {
        check_pool(pool)
    }

    fn cuMemHostAlloc(address: Out<u64>, len: usize, flags: u32) {
        if flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        address.put(allocate_on_host(len, Kind::Pinned, flags)?)
    }

    fn cuMemAllocHost_v2(address: Out<u64>, len: usize) {
        address.put(allocate_on_host(len, Kind::Pinned, 0)?)
    }

    fn cuMemFreeHost(address: u64) {
        free_on_host(address, Kind::Pinned, Code::INVALID_VALUE)
    }

    fn cuMemHostRegister_v2(address: u64, len: usize, flags: u32) {
        let context = context::usable()?;
        let end = address.checked_add(len as u64).ok_or(Code::INVALID_VALUE)?;
        if address == 0 || len == 0 || flags > 15 || device::of_address(end - 1).is_some() {
            return Err(Code::INVALID_VALUE);
        }
        if memory::overlaps(address, len as u64) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }
        memory::insert(address, len as u64, Kind::Registered, context.device, context.handle, flags);
        Ok(())
    }

    fn cuMemHostUnregister(address: u64) {
        free_on_host(address, Kind::Registered, Code::HOST_MEMORY_NOT_REGISTERED)
    }

    fn cuMemHostGetDevicePointer_v2(device_address: Out<u64>, address: u64, flags: u32) {
        context::usable()?;
        let known = memory::find(address).is_some_and(|found| !found.kind.is_device());
        if flags != 0 || !known {
            return Err(Code::INVALID_VALUE);
        }
        device_address.put(address)
    }

    fn cuMemHostGetFlags(flags: Out<u32>, address: u64) {
        let found = memory::find(address).filter(|found| found.kind == Kind::Pinned);
        flags.put(found.ok_or(Code::INVALID_VALUE)?.flags)
    }

    fn cuMemAllocManaged(address: Out<u64>, len: usize, flags: u32) {
        // CU_MEM_ATTACH_GLOBAL and CU_MEM_ATTACH_HOST.
        if !matches!(flags, 1 | 2) {
            return Err(Code::INVALID_VALUE);
        }
        address.put(allocate_on_host(len, Kind::Managed, flags)?)
    }

    // Managed memory is always at hand. The location is two numbers of 4 bytes, passed as one of 8.
    fn cuMemPrefetchAsync_v2(address: u64, len: usize, _location: u64, _flags: u32, stream: usize) {
        memory::range(address, len);
        stream::get(stream).map(|_| ())
    }

    fn cuMemAdvise_v2(address: u64, len: usize, _advice: u32, _location: u64) {
        context::usable()?;
        memory::range(address, len);
        Ok(())
    }
}
