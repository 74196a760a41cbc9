//! Physical memory of a GPU, mapped: the kind of allocation that can be given back while the GPU is at work.
//!
//! `cuMemFree` waits until the GPU has nothing left to do, and keeps all other threads from submitting anything until then: with a
//! kernel that runs for 400 ms, 380 ms on an H200. Unmapping took 0.2 ms beside the same kernel, and held up nobody. Since it waits
//! for nothing, it must not come before the last use of the memory has ended.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

use super::allocation::too_long;
use super::device::Inner;
use super::driver;
use super::error::GpuError;
use crate::sync::Mutex;

/// What memory is passed between processes as (cuda.h).
const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory with an address range of its own.
///
/// Invariant: what is mapped at the range is the handle's memory. Both are there until it is dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    address: u64,
    len: usize,
    behind: Mutex<Behind>,
}

/// In this order they are dropped.
#[derive(Debug)]
struct Behind {
    range: Range,
    handle: Handle,
}

impl Mapping {
    /// At least `len` bytes. The context is current.
    pub(super) fn new(gpu: &Inner, len: usize) -> Result<Self, GpuError> {
        let properties = properties(gpu);
        let mut unit = 0;
        // SAFETY: the pointers are to values of this frame.
        let status = unsafe {
            sys::cuMemGetAllocationGranularity(
                &mut unit,
                &properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        };
        status.result().map_err(GpuError::driver("cuMemGetAllocationGranularity"))?;
        let len = len.checked_next_multiple_of(unit.max(1)).ok_or_else(|| too_long(len))?;
        Self::of(gpu, Handle::create(gpu, len)?, len)
    }

    /// All `len` bytes of what another process has [exported](Self::export), for this GPU to use. The context is current.
    pub(super) fn import(gpu: &Inner, memory: BorrowedFd<'_>, len: usize) -> Result<Self, GpuError> {
        Self::of(gpu, Handle::import(gpu, memory)?, len)
    }

    fn of(gpu: &Inner, handle: Handle, len: usize) -> Result<Self, GpuError> {
        let mut range = Range::reserve(&gpu.context, len)?;
        range.map(gpu, &handle)?;
        Ok(Self { address: range.address, len, behind: Mutex::new(Behind { range, handle }) })
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// A descriptor of the memory, for another process.
    pub(super) fn export(&self) -> Result<OwnedFd, GpuError> {
        let Behind { handle, .. } = &*self.behind.lock();
        driver::make_current(&handle.context).map_err(GpuError::driver("cuCtxSetCurrent"))?;
        let mut descriptor: c_int = -1;
        // SAFETY: the memory lives; for this kind of handle the result is an int.
        let status = unsafe {
            sys::cuMemExportToShareableHandle((&raw mut descriptor).cast::<c_void>(), handle.number, DESCRIPTOR, 0)
        };
        status.result().map_err(GpuError::driver("cuMemExportToShareableHandle"))?;
        // SAFETY: on success it is a descriptor of its own, for the caller to close.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Puts other memory in its place, with the same contents: who has the old one mapped neither sees nor changes the new.
    ///
    /// Nothing uses the addresses during the call. After an error nothing may be mapped there, and nobody may use them at all.
    pub(super) fn renew(&self, gpu: &Inner) -> Result<(), GpuError> {
        gpu.bind()?;
        let Self { address, len, .. } = *self;
        let fresh = Handle::create(gpu, len)?;
        let mut elsewhere = Range::reserve(&gpu.context, len)?;
        elsewhere.map(gpu, &fresh)?;
        let stream = &gpu.incoming;
        // SAFETY: both are mapped for this GPU, as long as that, and nobody else uses them.
        unsafe { result::memcpy_dtod_async(elsewhere.address, address, len, stream.cu_stream()) }
            .map_err(GpuError::driver("cuMemcpyDtoDAsync"))?;
        driver::own(&gpu.context, "cuStreamSynchronize", || stream.synchronize())?;
        drop(elsewhere);
        let others = others_with_access(gpu, address)?;
        let behind = &mut *self.behind.lock();
        behind.range.unmap().map_err(GpuError::driver("cuMemUnmap"))?;
        behind.range.map(gpu, &fresh)?;
        behind.handle = fresh;
        others.into_iter().try_for_each(|access| behind.range.open(&access))
    }
}

/// Physical memory.
#[derive(Debug)]
struct Handle {
    number: u64,
    context: Arc<CudaContext>,
}

impl Handle {
    fn create(gpu: &Inner, len: usize) -> Result<Self, GpuError> {
        let properties = properties(gpu);
        let mut number = 0;
        // SAFETY: the pointers are to values of this frame.
        unsafe { sys::cuMemCreate(&mut number, len, &properties, 0) }
            .result()
            .map_err(GpuError::driver("cuMemCreate"))?;
        Ok(Self { number, context: gpu.context.clone() })
    }

    fn import(gpu: &Inner, memory: BorrowedFd<'_>) -> Result<Self, GpuError> {
        let mut number = 0;
        // In the place of a pointer stands the number itself.
        let descriptor = std::ptr::without_provenance_mut(memory.as_raw_fd() as usize);
        // SAFETY: the pointer is to a value of this frame; the descriptor stays the caller's.
        unsafe { sys::cuMemImportFromShareableHandle(&mut number, descriptor, DESCRIPTOR) }
            .result()
            .map_err(GpuError::driver("cuMemImportFromShareableHandle"))?;
        Ok(Self { number, context: gpu.context.clone() })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let bound = driver::make_current(&self.context);
        // SAFETY: created or imported, and released only here. What is mapped stays until it is unmapped.
        if let Err(error) = bound.and(unsafe { sys::cuMemRelease(self.number) }.result()) {
            tracing::warn!(%error, "GPU memory could not be released");
        }
    }
}

/// Addresses, and whether memory stands behind them.
#[derive(Debug)]
struct Range {
    address: u64,
    len: usize,
    mapped: bool,
    context: Arc<CudaContext>,
}

impl Range {
    /// Any; aligned to the unit of allocation.
    fn reserve(context: &Arc<CudaContext>, len: usize) -> Result<Self, GpuError> {
        let mut address = 0;
        // SAFETY: the pointer is to a value of this frame.
        unsafe { sys::cuMemAddressReserve(&mut address, len, 0, 0, 0) }
            .result()
            .map_err(GpuError::driver("cuMemAddressReserve"))?;
        Ok(Self { address, len, mapped: false, context: context.clone() })
    }

    /// Puts memory of the same length there, for `gpu` to read and write.
    fn map(&mut self, gpu: &Inner, handle: &Handle) -> Result<(), GpuError> {
        let (address, len) = (self.address, self.len);
        // SAFETY: a reserved range that nothing is mapped to.
        unsafe { sys::cuMemMap(address, len, 0, handle.number, 0) }.result().map_err(GpuError::driver("cuMemMap"))?;
        self.mapped = true;
        self.open(&sys::CUmemAccessDesc {
            location: location(gpu),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        })
    }

    fn open(&self, access: &sys::CUmemAccessDesc) -> Result<(), GpuError> {
        // SAFETY: the range is mapped; one descriptor.
        unsafe { sys::cuMemSetAccess(self.address, self.len, access, 1) }
            .result()
            .map_err(GpuError::driver("cuMemSetAccess"))
    }

    fn unmap(&mut self) -> Result<(), cudarc::driver::DriverError> {
        if std::mem::take(&mut self.mapped) {
            // SAFETY: mapped by `map`. Whoever drops or renews it sees to it that the last use has ended; a registration with a NIC, which
            // renewed memory has none of, is gone.
            unsafe { sys::cuMemUnmap(self.address, self.len) }.result()?;
        }
        Ok(())
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let bound = driver::make_current(&self.context);
        let unmapped = self.unmap();
        // SAFETY: reserved by `reserve`, and freed only here.
        let freed = unsafe { sys::cuMemAddressFree(self.address, self.len) }.result();
        if let Err(error) = bound.and(unmapped).and(freed) {
            tracing::warn!(%error, address = self.address, "addresses of GPU memory could not be freed");
        }
    }
}

/// What a GPU may do with what is mapped at an address; 0 is nothing.
pub(super) fn access(location: &sys::CUmemLocation, address: u64) -> Result<u64, GpuError> {
    let mut allowed = 0;
    // SAFETY: the pointers are to values that live during the call.
    unsafe { sys::cuMemGetAccess(&mut allowed, location, address) }
        .result()
        .map_err(GpuError::driver("cuMemGetAccess"))?;
    Ok(allowed)
}

/// What other GPUs than the owner may do with what is mapped at an address.
fn others_with_access(gpu: &Inner, address: u64) -> Result<Vec<sys::CUmemAccessDesc>, GpuError> {
    let count = result::device::get_count().map_err(GpuError::driver("cuDeviceGetCount"))?;
    let own = gpu.context.cu_device();
    let mut others = Vec::new();
    for location in (0..count).filter(|device| *device != own).map(location_of) {
        if access(&location, address)? != 0 {
            // The only kind that is ever given.
            let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            others.push(sys::CUmemAccessDesc { location, flags });
        }
    }
    Ok(others)
}

/// Where the GPU's memory is.
pub(super) fn location(gpu: &Inner) -> sys::CUmemLocation {
    location_of(gpu.context.cu_device())
}

fn location_of(device: sys::CUdevice) -> sys::CUmemLocation {
    // SAFETY: plain data, for which zeros mean "nowhere".
    let mut location: sys::CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    // By its place: what it is called depends on the version of CUDA that cudarc was told to be built for.
    // SAFETY: the location is the type and then the device, 4 bytes each, in all of them (cuda.h, `CUmemLocation`).
    unsafe { (&raw mut location).cast::<i32>().add(1).write(device) };
    location
}

fn properties(gpu: &Inner) -> sys::CUmemAllocationProp {
    // SAFETY: plain data, for which zeros mean "nothing special".
    let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = location(gpu);
    if gpu.capabilities().shareable {
        properties.requestedHandleTypes = DESCRIPTOR;
    }
    properties.allocFlags.gpuDirectRDMACapable = u8::from(gpu.capabilities().gpu_direct);
    properties
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::gpu::GpuDevice;

    fn set(gpu: &Inner, at: u64, value: u8) {
        gpu.bind().unwrap();
        // SAFETY: both mappings are longer, and live as long as the test.
        unsafe { result::memset_d8_async(at, value, 64, gpu.incoming.cu_stream()) }.unwrap();
        gpu.incoming.synchronize().unwrap();
    }

    fn get(gpu: &Inner, at: u64) -> [u8; 64] {
        let mut bytes = [0; 64];
        gpu.bind().unwrap();
        // SAFETY: as above.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, at) }.unwrap();
        bytes
    }

    #[test]
    fn who_has_mapped_it_neither_sees_nor_changes_what_was_renewed() {
        // Loaded first, it is what is found; where a real driver would be found instead, it says so, and that one will do.
        let _ = fake_cuda::load();
        let gpu = GpuDevice::open(0).unwrap();
        let gpu = gpu.inner();
        assert!(gpu.capabilities().shareable);
        let ours = Mapping::new(gpu, 1).unwrap();
        set(gpu, ours.address(), 1);
        let theirs = Mapping::import(gpu, ours.export().unwrap().as_fd(), ours.len()).unwrap();
        assert_eq!(get(gpu, theirs.address()), [1; 64]);
        set(gpu, theirs.address(), 2);
        assert_eq!(get(gpu, ours.address()), [2; 64]);

        ours.renew(gpu).unwrap();
        set(gpu, theirs.address(), 3);
        assert_eq!(get(gpu, ours.address()), [2; 64], "the contents came along, and nothing else does");
        set(gpu, ours.address(), 4);
        assert_eq!(get(gpu, theirs.address()), [3; 64]);
        // It can be given away again.
        let again = Mapping::import(gpu, ours.export().unwrap().as_fd(), ours.len()).unwrap();
        assert_eq!(get(gpu, again.address()), [4; 64]);
    }

    #[test]
    fn a_descriptor_of_something_else_is_an_error_of_the_driver() {
        let _ = fake_cuda::load();
        let gpu = GpuDevice::open(0).unwrap();
        gpu.inner().bind().unwrap();
        let file = tempfile::tempfile().unwrap();
        let error = Mapping::import(gpu.inner(), file.as_fd(), 2 << 20).unwrap_err();
        assert!(error.to_string().contains("cuMemImportFromShareableHandle"), "{error}");
        let ours = Mapping::new(gpu.inner(), 1).unwrap();
        // A peer that claims more than there is.
        let error = Mapping::import(gpu.inner(), ours.export().unwrap().as_fd(), 2 * ours.len()).unwrap_err();
        assert!(error.to_string().contains("cuMemMap"), "{error}");
    }
}
