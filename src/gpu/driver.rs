//! The CUDA driver: whether it is there, and the few functions that cudarc's safe interface lacks.
//!
//! cudarc panics when the library or one of its symbols is missing, so nothing of it is called before [`Driver::get`]
//! has found both. `CUresult` is a number here: a driver may know errors that are newer than any list of them.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use cudarc::driver::{CudaContext, DriverError, result};
use libloading::Library;

use super::error::GpuError;

const LIBRARY: &str = "libcuda.so.1";

/// What cudarc is asked for in this crate, so that a driver without it is an error and no panic. All of it came with CUDA 11 or before.
const USED: [&str; 31] = [
    "cuCtxEnablePeerAccess",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8Async",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamIsCapturing",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
];

/// The same for memory that is mapped, which came with CUDA 10.2 and 11.3.
const MAPPING: [&str; 9] = [
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemGetAccess",
    "cuMemGetAllocationGranularity",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
];

/// The same for memory that processes share, which came with CUDA 10.2.
const SHARING: [&str; 2] = ["cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"];

type Status = c_uint;
type Init = unsafe extern "C" fn(c_uint) -> Status;
type DriverVersion = unsafe extern "C" fn(*mut c_int) -> Status;
type PointerAttribute = unsafe extern "C" fn(*mut c_void, c_int, c_ulonglong) -> Status;
type AddressRange = unsafe extern "C" fn(*mut c_ulonglong, *mut usize, c_ulonglong) -> Status;
type RangeHandle = unsafe extern "C" fn(*mut c_void, c_ulonglong, usize, c_int, c_ulonglong) -> Status;
type Flush = unsafe extern "C" fn(c_int, c_int) -> Status;
type ExchangeCaptureMode = unsafe extern "C" fn(*mut c_int) -> Status;
type DeviceAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Status;
type TotalMemory = unsafe extern "C" fn(*mut usize, c_int) -> Status;
type PciBusId = unsafe extern "C" fn(*mut std::ffi::c_char, c_int, c_int) -> Status;

/// The loaded driver.
pub(super) struct Driver {
    version: i32,
    pointer_attribute: PointerAttribute,
    address_range: AddressRange,
    device_attribute: DeviceAttribute,
    pci_bus_id: PciBusId,
    total_memory: TotalMemory,
    maps_memory: bool,
    shares_memory: bool,
    /// Since CUDA 11.7.
    range_handle: Option<RangeHandle>,
    /// Since CUDA 11.3.
    flush: Option<Flush>,
    /// Since CUDA 10.1.
    exchange_capture_mode: Option<ExchangeCaptureMode>,
    /// The functions above are its.
    _library: Library,
}

/// `CUmemRangeHandleType` and `CUflushGPUDirectRDMAWritesTarget`, as cuda.h numbers them.
const DMA_BUF_FD: c_int = 1;
const FLUSH_CURRENT_CONTEXT: c_int = 0;

/// Pointer attributes (`CUpointer_attribute`).
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Attribute {
    MemoryType = 2,
    IsManaged = 8,
    DeviceOrdinal = 9,
    IsLegacyIpcCapable = 10,
    MempoolHandle = 17,
    GpuDirectCapable = 15,
}

impl Attribute {
    /// As cuda.h names it, without what all of them begin with.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::MemoryType => "MEMORY_TYPE",
            Self::IsManaged => "IS_MANAGED",
            Self::DeviceOrdinal => "DEVICE_ORDINAL",
            Self::IsLegacyIpcCapable => "IS_LEGACY_CUDA_IPC_CAPABLE",
            Self::MempoolHandle => "MEMPOOL_HANDLE",
            Self::GpuDirectCapable => "IS_GPU_DIRECT_RDMA_CAPABLE",
        }
    }
}

impl Driver {
    /// The driver, or why there is none. Looked for once.
    pub(super) fn get() -> Result<&'static Self, GpuError> {
        static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
        DRIVER.get_or_init(Self::load).as_ref().map_err(|reason| GpuError::Unavailable { reason: reason.clone() })
    }

    fn load() -> Result<Self, String> {
        // SAFETY: the library is NVIDIA's, whose initialisers are made to run at any time.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| format!("{LIBRARY} of the CUDA driver cannot be loaded: {error}"))?;
        let version = {
            let mut version = 0;
            // SAFETY: declared as in cuda.h; the pointer is to an int of this frame.
            let status = unsafe { symbol::<DriverVersion>(&library, "cuDriverGetVersion")?(&mut version) };
            checked_load("cuDriverGetVersion", status)?;
            version
        };
        for name in USED {
            symbol::<*const c_void>(&library, name)
                .map_err(|error| format!("{error}; the driver is of CUDA {}", shown(version)))?;
        }
        // SAFETY: declared as in cuda.h; 0 is the only flag there is.
        checked_load("cuInit", unsafe { symbol::<Init>(&library, "cuInit")?(0) })?;
        Ok(Self {
            version,
            pointer_attribute: symbol(&library, "cuPointerGetAttribute")?,
            address_range: symbol(&library, "cuMemGetAddressRange_v2")?,
            device_attribute: symbol(&library, "cuDeviceGetAttribute")?,
            pci_bus_id: symbol(&library, "cuDeviceGetPCIBusId")?,
            total_memory: symbol(&library, "cuDeviceTotalMem_v2")?,
            maps_memory: has(&library, &MAPPING),
            shares_memory: has(&library, &SHARING),
            range_handle: symbol(&library, "cuMemGetHandleForAddressRange").ok(),
            flush: symbol(&library, "cuFlushGPUDirectRDMAWrites").ok(),
            exchange_capture_mode: symbol(&library, "cuThreadExchangeStreamCaptureMode").ok(),
            _library: library,
        })
    }

    /// 1000 times the major plus 10 times the minor number of the CUDA version that the driver supports.
    pub(super) fn version(&self) -> i32 {
        self.version
    }

    /// Whether it has all of [`MAPPING`].
    pub(super) fn maps_memory(&self) -> bool {
        self.maps_memory
    }

    /// Whether it has all of [`SHARING`].
    pub(super) fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    /// Whether memory of the device can be exported as a dma-buf. The attribute has no name in CUDA before 11.7, which cudarc may be
    /// built for.
    pub(super) fn exports_dmabufs(&self, device: i32) -> bool {
        const DMA_BUF_SUPPORTED: c_int = 124;
        self.attribute(device, DMA_BUF_SUPPORTED).is_ok_and(|value| value != 0)
    }

    /// An attribute of a device by its number, which the driver may not know yet: then its error.
    pub(super) fn attribute(&self, device: i32, number: c_int) -> Result<i32, u32> {
        let mut value = 0;
        // SAFETY: declared as in cuda.h; the pointer is to an int of this frame.
        match unsafe { (self.device_attribute)(&mut value, number, device) } {
            0 => Ok(value),
            code => Err(code),
        }
    }

    /// How many bytes a device has.
    pub(super) fn total_memory(&self, device: i32) -> Option<u64> {
        let mut bytes = 0;
        // SAFETY: declared as in cuda.h; the pointer is to a number of this frame.
        let status = unsafe { (self.total_memory)(&mut bytes, device) };
        (status == 0).then_some(bytes as u64)
    }

    /// An attribute of a pointer, as a number of up to 8 bytes; `None` when the driver does not know the pointer or the attribute.
    pub(super) fn pointer_attribute(&self, address: u64, attribute: Attribute) -> Option<u64> {
        let mut value = 0u64;
        // SAFETY: declared as in cuda.h. No attribute asked for is larger than 8 bytes, and those that are smaller fill the
        // lower ones of a number that is 0 before, on the little-endian machines that CUDA exists for.
        let status = unsafe { (self.pointer_attribute)((&raw mut value).cast(), attribute as c_int, address) };
        (status == 0).then_some(value)
    }

    /// The allocation that an address lies in: its start and its length.
    pub(super) fn address_range(&self, address: u64) -> Result<(u64, usize), GpuError> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: declared as in cuda.h; the pointers are to numbers of this frame.
        checked("cuMemGetAddressRange", unsafe { (self.address_range)(&mut base, &mut len, address) })?;
        Ok((base, len))
    }

    /// A dma-buf of whole pages of device memory. The context that owns the memory is current.
    pub(super) fn export_dmabuf(&self, address: u64, len: usize) -> Result<OwnedFd, GpuError> {
        const CALL: &str = "cuMemGetHandleForAddressRange";
        let Some(export) = self.range_handle else {
            let reason = format!("the driver is of CUDA {}, and dma-bufs came with 11.7", shown(self.version));
            return Err(GpuError::Unavailable { reason });
        };
        let mut fd: RawFd = -1;
        // SAFETY: declared as in cuda.h; for this type of handle it stores an int. No flags: a mapping of another type is for
        // registrations that only some NICs have (CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE).
        checked(CALL, unsafe { export((&raw mut fd).cast(), address, len, DMA_BUF_FD, 0) })?;
        // SAFETY: on success it is a descriptor of its own, for the caller to close.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Makes what NICs wrote to memory of the current context visible to a `CUflushGPUDirectRDMAWritesScope`.
    pub(super) fn flush_to(&self, scope: c_int) -> Result<(), GpuError> {
        let Some(flush) = self.flush else {
            let reason = "the driver is older than CUDA 11.3: it has no cuFlushGPUDirectRDMAWrites".to_owned();
            return Err(GpuError::Unavailable { reason });
        };
        // SAFETY: declared as in cuda.h.
        checked("cuFlushGPUDirectRDMAWrites", unsafe { flush(FLUSH_CURRENT_CONTEXT, scope) })
    }

    /// Lets this thread make calls while another one captures a graph, which would be spoiled by them otherwise.
    pub(super) fn leave_captures_alone(&self) {
        const RELAXED: c_int = 2;
        if let Some(exchange) = self.exchange_capture_mode {
            let mut mode = RELAXED;
            // SAFETY: declared as in cuda.h; the pointer is to an int of this frame.
            let status = unsafe { exchange(&mut mode) };
            if status != 0 {
                tracing::debug!(status, "cuThreadExchangeStreamCaptureMode");
            }
        }
    }

    /// The PCI address of a GPU, as `domain:bus:device.function`.
    pub(super) fn pci_bus_id(&self, device: i32) -> Result<String, GpuError> {
        let mut text = [0u8; 32];
        // SAFETY: declared as in cuda.h; it writes no more than the length given, with a zero at the end.
        let status = unsafe { (self.pci_bus_id)(text.as_mut_ptr().cast(), text.len() as c_int, device) };
        checked("cuDeviceGetPCIBusId", status)?;
        let len = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Ok(String::from_utf8_lossy(&text[..len]).to_ascii_lowercase())
    }
}

/// Makes the context the thread's current one. cudarc's own `bind_to_thread` would first report what went wrong in somebody's drop,
/// and then bind nothing.
pub(super) fn make_current(context: &CudaContext) -> Result<(), DriverError> {
    // SAFETY: the context is alive.
    unsafe { result::ctx::set_current(context.cu_ctx()) }
}

/// A call that cudarc makes: its own error, rather than one that somebody's drop has left behind, which stays for the program to find.
///
/// Each call of cudarc's contexts, streams and events that binds the context goes through this (a query of an event binds none):
/// with such an error about, it would do nothing, a wait included.
pub(super) fn own<T>(
    context: &CudaContext,
    name: &'static str,
    call: impl FnOnce() -> Result<T, DriverError>,
) -> Result<T, GpuError> {
    let others = context.check_err();
    let result = call();
    context.record_err(others);
    result.map_err(GpuError::driver(name))
}

fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: each caller names the type that cuda.h declares the function with, or asks for its address alone.
    match unsafe { library.get::<T>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(error) => Err(format!("{LIBRARY} has no {name}: {error}")),
    }
}

/// Whether the library has all of these.
fn has(library: &Library, names: &[&str]) -> bool {
    names.iter().all(|name| symbol::<*const c_void>(library, name).is_ok())
}

fn checked(call: &'static str, status: Status) -> Result<(), GpuError> {
    match status {
        0 => Ok(()),
        code => Err(GpuError::Driver { call, code, name: name(code).to_owned() }),
    }
}

fn checked_load(call: &str, status: Status) -> Result<(), String> {
    match status {
        0 => Ok(()),
        code => Err(format!("{call}: {} (CUDA error {code})", name(code))),
    }
}

/// The errors that the calls of this file give, as cuda.h names them.
fn name(code: u32) -> &'static str {
    match code {
        1 => "CUDA_ERROR_INVALID_VALUE",
        2 => "CUDA_ERROR_OUT_OF_MEMORY",
        3 => "CUDA_ERROR_NOT_INITIALIZED",
        34 => "CUDA_ERROR_STUB_LIBRARY",
        46 => "CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => "CUDA_ERROR_NO_DEVICE",
        101 => "CUDA_ERROR_INVALID_DEVICE",
        201 => "CUDA_ERROR_INVALID_CONTEXT",
        700 => "CUDA_ERROR_ILLEGAL_ADDRESS",
        719 => "CUDA_ERROR_LAUNCH_FAILED",
        801 => "CUDA_ERROR_NOT_SUPPORTED",
        803 => "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        804 => "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        _ => "see CUresult in cuda.h",
    }
}

pub(super) fn shown(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}
