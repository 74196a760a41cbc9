//! The bytes of a buffer in the hands of a stream.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, LaunchArgs, PushKernelArg, SyncOnDrop, sys::CUdeviceptr,
};

use super::driver;
use super::error::GpuError;
use super::held::Held;

/// What both guards are: a range of device memory, a stream, and an entry among the buffer's uses.
struct Use<'a, T> {
    held: &'a Held,
    stream: &'a Arc<CudaStream>,
    address: CUdeviceptr,
    len: usize,
    id: u64,
    values: PhantomData<T>,
}

impl<'a, T: Pod> Use<'a, T> {
    fn begin(held: &'a Held, stream: &'a Arc<CudaStream>, writes: bool) -> Result<Self, GpuError> {
        const VIEW: &str = "use on a stream";
        let (address, bytes) = (held.piece.address(), held.piece.len());
        let (size, align) = (size_of::<T>(), align_of::<T>());
        if size == 0 || bytes % size != 0 || address % align as u64 != 0 {
            let reason = format!(
                "{bytes} bytes at {address:#x} are no whole number of values of {size} bytes aligned to {align}"
            );
            return Err(GpuError::Invalid { operation: VIEW, reason });
        }
        let id = held.uses.lock().begin(held.gpu.inner(), stream, writes)?;
        Ok(Self { held, stream, address, len: bytes / size, id, values: PhantomData })
    }
}

impl<T> Use<'_, T> {
    /// Work on another stream is ordered by waiting: before it for the guard's stream, and after it on the CPU, since the guard
    /// stands for one stream.
    fn on<'b>(&'b self, stream: &'b CudaStream) -> (CUdeviceptr, SyncOnDrop<'b>) {
        if *stream == **self.stream {
            return (self.address, SyncOnDrop::Record(None));
        }
        let context = stream.context();
        if driver::own(context, "cuStreamWaitEvent", || stream.join(self.stream)).is_err() {
            // After an error here as well, nothing runs that there would be an order with.
            let _ = driver::own(context, "cuStreamSynchronize", || self.stream.synchronize());
        }
        (self.address, SyncOnDrop::sync_stream(stream))
    }
}

impl<T> Drop for Use<'_, T> {
    fn drop(&mut self) {
        self.held.uses.lock().end(self.held.gpu.inner(), self.id);
    }
}

macro_rules! guard {
    ($(#[$doc:meta])* $name:ident writes $writes:literal) => {
        $(#[$doc])*
        pub struct $name<'a, T>(Use<'a, T>);

        impl<'a, T: Pod> $name<'a, T> {
            pub(super) fn new(held: &'a Held, stream: &'a Arc<CudaStream>) -> Result<Self, GpuError> {
                Use::begin(held, stream, $writes).map(Self)
            }
        }

        impl<T> $name<'_, T> {
            /// Address of the first value, as the GPU knows it. For launches on the guard's stream, while the guard lives.
            pub fn address(&self) -> CUdeviceptr {
                self.0.address
            }

            /// The stream whose work this is for.
            pub fn stream(&self) -> &Arc<CudaStream> {
                self.0.stream
            }

            /// How many values.
            pub fn len(&self) -> usize {
                self.0.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.0.len == 0
            }
        }

        impl<T> DeviceSlice<T> for $name<'_, T> {
            fn len(&self) -> usize {
                self.0.len
            }

            fn stream(&self) -> &Arc<CudaStream> {
                self.0.stream
            }
        }

        impl<T> DevicePtr<T> for $name<'_, T> {
            fn device_ptr<'a>(&'a self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
                self.0.on(stream)
            }
        }

        impl<T> fmt::Debug for $name<'_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("address", &format_args!("{:#x}", self.0.address))
                    .field("len", &self.0.len)
                    .finish_non_exhaustive()
            }
        }
    };
}

guard! {
    /// A buffer's bytes for work on one stream that reads them; made by [`GpuBuffer::read_on`](super::GpuBuffer::read_on).
    ///
    /// Submit the work while the guard lives: pass the guard to cudarc's copies as they take a `CudaSlice`, or to a kernel's launch as
    /// an argument (its address is passed). When it is dropped, what was submitted to the stream counts as the buffer's use.
    /// A copy that is given another stream works too, and then waits for its end. One exception, which cudarc does not tell a guard of:
    /// after a `memcpy_dtod` to another GPU, wait for that GPU's stream before the guard is dropped.
    GpuRead writes false
}

guard! {
    /// A buffer's bytes for work on one stream that writes them; made by [`GpuBuffer::write_on`](super::GpuBuffer::write_on).
    /// Otherwise as [`GpuRead`].
    GpuWrite writes true
}

impl<T> DevicePtrMut<T> for GpuWrite<'_, T> {
    fn device_ptr_mut<'a>(&'a mut self, stream: &'a CudaStream) -> (CUdeviceptr, SyncOnDrop<'a>) {
        self.0.on(stream)
    }
}

// SAFETY: a kernel's argument of this type is a device pointer, and a pointer to that is pushed, which lives as long as the guard is
// borrowed.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b GpuRead<'c, T>> for LaunchArgs<'a> {
    fn arg(&mut self, arg: &'b GpuRead<'c, T>) -> &mut Self {
        self.arg(&arg.0.address)
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, 'c: 'b, T> PushKernelArg<&'b mut GpuWrite<'c, T>> for LaunchArgs<'a> {
    fn arg(&mut self, arg: &'b mut GpuWrite<'c, T>) -> &mut Self {
        self.arg(&arg.0.address)
    }
}
