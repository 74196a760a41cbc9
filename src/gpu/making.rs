//! Where a buffer's memory comes from.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut};

use super::allocation::Allocation;
use super::buffer::GpuBuffer;
use super::device::GpuDevice;
use super::driver;
use super::error::GpuError;
use super::events::Event;
use super::held::Held;
use super::kind::MemoryKind;
use super::reaper::Elsewhere;
use super::register::{self, PathPolicy, Registered};
use super::visibility::VisibilityScope;
use crate::error::Result;
use crate::memory::ProtectionDomain;
use crate::memory::device::DevicePiece;
use crate::sync::Mutex;

impl GpuBuffer {
    /// Allocates and registers `len` zeroed bytes on the GPU, by a direct path: see [`PathPolicy::Direct`].
    ///
    /// The memory is mapped in units of 2 MiB on the GPUs of today, however short the buffer (of 64 KiB, by `cuMemAlloc`, where a GPU
    /// cannot map). Both allocating and registering cost far more than an operation: do it ahead of time, and
    /// [split](Self::split_to) large buffers rather than making many small ones.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`](crate::Error::Limit) when `len` is 0 or above the device's [`max_region`](crate::DeviceLimits::max_region);
    /// [`Error::Gpu`](crate::Error::Gpu) when there is no memory, or no path, with the reason for each that was tried.
    pub fn alloc(gpu: &GpuDevice, domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::alloc_with(gpu, domain, len, PathPolicy::default())
    }

    /// The same by a path that `policy` allows.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn alloc_with(gpu: &GpuDevice, domain: &ProtectionDomain, len: usize, policy: PathPolicy) -> Result<Self> {
        domain.check_length("alloc", len as u64)?;
        let memory = Arc::new(Allocation::new(gpu.inner(), len)?);
        let range = (memory.address(), len);
        let mut buffer = Self::register(gpu, domain, range, MemoryKind::Device, policy, Box::new(memory.clone()))?;
        buffer.held_mut().allocation = Some(memory);
        Ok(buffer)
    }

    /// Registers memory that cudarc allocated, without copying it. It is freed, on its own stream, when the last buffer made of it is gone.
    ///
    /// What cudarc knows of uses of the slice is awaited before the first operation. cudarc's `alloc` takes memory from the
    /// stream-ordered pool where the GPU has one, which no NIC can be given: then it takes [`PathPolicy::AllowStaging`].
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc), and [`GpuError::Unfit`] with the kind of memory. The error gives the slice back.
    pub fn from_slice<T: Pod + Send + Sync>(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        mut slice: CudaSlice<T>,
        policy: PathPolicy,
    ) -> Result<Self, FromSliceError<T>> {
        match Self::prepare_slice(gpu, domain, &mut slice, policy) {
            Ok((range, registered, event)) => {
                // Freeing it may wait for its stream.
                let owner = Box::new(Elsewhere::new(gpu.inner(), Slice(Some(slice))));
                match Self::assemble(gpu, domain, range, registered, owner) {
                    Ok(mut buffer) => {
                        buffer.held_mut().uses.lock().wrote(event);
                        Ok(buffer)
                    }
                    // Only for an address of 0, which no slice that passed the checks has.
                    Err(error) => Err(FromSliceError::new(error, None)),
                }
            }
            Err(error) => Err(FromSliceError::new(error, Some(slice))),
        }
    }

    fn prepare_slice<T: Pod>(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        slice: &mut CudaSlice<T>,
        policy: PathPolicy,
    ) -> Result<((u64, usize), Registered, Event)> {
        const FROM_SLICE: &str = "from_slice";
        let inner = gpu.inner();
        let len = slice.num_bytes();
        domain.check_length(FROM_SLICE, len as u64)?;
        if slice.context() != &inner.context {
            return Err(foreign_slice(FROM_SLICE, gpu, slice));
        }
        let context = &inner.context;
        let stream = driver::own(context, "cuStreamCreate", || context.new_stream())?;
        let allocated_on = slice.stream().clone();
        // Behind all that cudarc has noted of the slice, and all of the stream that it was allocated on.
        let address = driver::own(context, "cuStreamWaitEvent", || {
            let (address, noted) = slice.device_ptr_mut(&stream);
            drop(noted);
            // It keeps its errors to itself.
            context.check_err().map(|()| address)
        })?;
        driver::own(context, "cuStreamWaitEvent", || stream.join(&allocated_on))?;
        let event = inner.events.record(&stream)?;
        let kind = classify(gpu, FROM_SLICE, address)?;
        let registered = register::register(gpu, domain, (address, len), kind, policy)?;
        Ok(((address, len), registered, event))
    }

    /// Registers memory of this GPU that comes from elsewhere: candle, DLPack, torch, an allocator of the program's own.
    ///
    /// `owner` keeps it allocated, and is dropped after the memory was deregistered, when the last buffer made of it is gone
    /// (or right away when registering fails), on whichever thread that happens.
    ///
    /// Work on the bytes that is under way is not known: tell of it with [`ready_after`](Self::ready_after).
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc), and [`GpuError::Unfit`] with the kind of memory when it is not this GPU's own, or not fit for
    /// the paths that `policy` allows.
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped:
    /// - `address` is valid for `len` bytes of device memory in one allocation, or in one that is mapped without gaps;
    /// - nobody uses these bytes other than through the returned buffer and what is made of it, except for work that
    ///   `ready_after` was told of before the first operation.
    pub unsafe fn from_raw(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        address: u64,
        len: usize,
        owner: impl Send + Sync + 'static,
        policy: PathPolicy,
    ) -> Result<Self> {
        const FROM_RAW: &str = "from_raw";
        domain.check_length(FROM_RAW, len as u64)?;
        let kind = classify(gpu, FROM_RAW, address)?;
        let inner = gpu.inner();
        if kind == MemoryKind::Device {
            let (base, size) = inner.driver.address_range(address)?;
            if len as u64 > (base + size as u64).saturating_sub(address) {
                let reason = format!("{len} bytes at {address:#x} go beyond the allocation, {size} bytes at {base:#x}");
                return Err(GpuError::Invalid { operation: FROM_RAW, reason }.into());
            }
        }
        Self::register(gpu, domain, (address, len), kind, policy, Box::new(owner))
    }

    fn register(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        range: (u64, usize),
        kind: MemoryKind,
        policy: PathPolicy,
        owner: Box<dyn Send + Sync>,
    ) -> Result<Self> {
        let registered = register::register(gpu, domain, range, kind, policy)?;
        Self::assemble(gpu, domain, range, registered, owner)
    }

    fn assemble(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        range: (u64, usize),
        Registered { path, mr, mirror }: Registered,
        owner: Box<dyn Send + Sync>,
    ) -> Result<Self> {
        let piece = DevicePiece::whole(domain, range, mr, owner)?;
        tracing::debug!(gpu = %gpu, address = range.0, len = range.1, %path, "GPU memory registered");
        let uses = Mutex::default();
        let (gpu, scope) = (gpu.clone(), VisibilityScope::default());
        let (allocation, copying, ready, waits) = (None, None, None, false);
        Ok(Self::of(Held { piece, gpu, uses, path, mirror, allocation, scope, copying, ready, waits }))
    }
}

/// A slice of cudarc's, which frees itself where its context is current.
struct Slice<T>(Option<CudaSlice<T>>);

impl<T> Drop for Slice<T> {
    fn drop(&mut self) {
        let Some(slice) = self.0.take() else { return };
        if let Err(error) = driver::make_current(slice.context()) {
            tracing::warn!(%error, "the context of GPU memory that is to be freed cannot be used");
        }
        drop(slice);
    }
}

fn classify(gpu: &GpuDevice, operation: &'static str, address: u64) -> Result<MemoryKind, GpuError> {
    let inner = gpu.inner();
    inner.bind()?;
    let kind = MemoryKind::of(inner.driver, inner.capabilities().ordinal, address);
    match kind.of_this_gpu() {
        true => Ok(kind),
        false => Err(GpuError::Unfit { operation, address, kind, hint: kind.hint() }),
    }
}

/// A slice of another context, whose events this one's streams cannot record.
fn foreign_slice<T>(operation: &'static str, gpu: &GpuDevice, slice: &CudaSlice<T>) -> crate::Error {
    let (address, _noted) = slice.device_ptr(slice.stream());
    let other = slice.ordinal();
    if other == gpu.capabilities().ordinal {
        let reason =
            "the slice belongs to another context of this GPU; open that with GpuDevice::from_context".to_owned();
        return GpuError::Invalid { operation, reason }.into();
    }
    let kind = MemoryKind::OtherGpu(other as u32);
    GpuError::Unfit { operation, address, kind, hint: kind.hint() }.into()
}

/// [`GpuBuffer::from_slice`] failed, and gives the slice back.
pub struct FromSliceError<T> {
    // Apart, so that results without it are small.
    failed: Box<(crate::Error, Option<CudaSlice<T>>)>,
}

impl<T> FromSliceError<T> {
    /// What went wrong.
    pub fn error(&self) -> &crate::Error {
        &self.failed.0
    }

    /// What went wrong, and the slice.
    pub fn into_parts(self) -> (crate::Error, Option<CudaSlice<T>>) {
        *self.failed
    }

    fn new(error: crate::Error, slice: Option<CudaSlice<T>>) -> Self {
        Self { failed: Box::new((error, slice)) }
    }
}

impl<T> fmt::Debug for FromSliceError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromSliceError").field("error", self.error()).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for FromSliceError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl<T> std::error::Error for FromSliceError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error().source()
    }
}

impl<T> From<FromSliceError<T>> for crate::Error {
    fn from(failed: FromSliceError<T>) -> Self {
        failed.into_parts().0
    }
}
