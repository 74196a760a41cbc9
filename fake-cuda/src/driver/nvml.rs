//! The part of NVIDIA's management library, `libnvidia-ml.so.1`, that tells of NVLinks. Its statuses are numbers of its own.

use std::ffi::{CStr, c_char};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use super::hooks::knob;
use super::{Code, Out, Result, device, driver, misuse};

const UNINITIALIZED: Code = Code(1);
const INVALID_ARGUMENT: Code = Code(2);
const NOT_SUPPORTED: Code = Code(3);
const NOT_FOUND: Code = Code(6);

/// As a driver knows them whose GPUs are of Hopper's or Blackwell's generation.
const MOST_LINKS: u32 = 18;

/// `nvmlIntNvLinkDeviceType_t`.
const GPU: u64 = 0;

/// How often the library has been begun, and not ended.
static SESSIONS: AtomicU64 = AtomicU64::new(0);

/// How many links each device has: the variable `FAKE_CUDA_NVLINKS` lists it, the last number is that of all further ones.
static LINKS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let listed = std::env::var("FAKE_CUDA_NVLINKS").unwrap_or_else(|_| "0".to_owned());
    let number = |text: &str| text.parse().ok().filter(|count| *count <= MOST_LINKS);
    let numbers = listed.split(',').map(number).collect::<Option<Vec<_>>>();
    numbers
        .unwrap_or_else(|| misuse(format_args!("FAKE_CUDA_NVLINKS: {listed} has more than numbers up to {MOST_LINKS}")))
});

/// Handles are numbers that begin here.
const FIRST: usize = 0x4e56_0000;

/// The index of a handle's device.
fn device_of(handle: usize) -> Result<usize> {
    if SESSIONS.load(SeqCst) == 0 {
        return Err(UNINITIALIZED);
    }
    let index = handle.checked_sub(FIRST).filter(|index| *index < device::count());
    Ok(index.unwrap_or_else(|| misuse(format_args!("{handle:#x} is no device of the management library"))))
}

/// The index of the device, of which this is a link that is there.
fn link_of(handle: usize, link: u32) -> Result<usize> {
    let index = device_of(handle)?;
    let links = LINKS.get(index).or(LINKS.last()).copied().unwrap_or(0);
    match link {
        MOST_LINKS.. => Err(INVALID_ARGUMENT),
        _ if link >= links => Err(NOT_SUPPORTED),
        _ => Ok(index),
    }
}

/// `nvmlPciInfo_t`.
#[repr(C)]
pub(super) struct PciInfo {
    legacy_bus_id: [u8; 16],
    numbers: [u32; 5],
    bus_id: [u8; 32],
}

impl PciInfo {
    /// At an address of any text.
    fn at(address: &str) -> Self {
        let mut info = Self { legacy_bus_id: [0; 16], numbers: [u32::MAX; 5], bus_id: [0; 32] };
        // Without the last zero, where the text is too long: a mistake of the library's.
        for (to, byte) in info.bus_id.iter_mut().zip(address.bytes()) {
            *to = byte;
        }
        info
    }
}

/// What is at the other end: the variable `FAKE_CUDA_NVLINK_ENDS` says it for all, or else it is the next device, or a switch that is hidden.
fn end(index: usize) -> String {
    if let Ok(address) = std::env::var("FAKE_CUDA_NVLINK_ENDS") {
        return address;
    }
    match knob("nvlink_kind") {
        GPU => device::bus_id((index + 1) % device::count()),
        _ => "FFFFFFFF:FF:FF.0".to_owned(),
    }
}

/// Fails with a status that a knob says.
fn obey(status: &str) -> Result {
    match knob(status) {
        0 => Ok(()),
        status => Err(Code(status as u32)),
    }
}

driver! {
    fn nvmlInit_v2() {
        obey("nvml_status")?;
        SESSIONS.fetch_add(1, SeqCst);
        Ok(())
    }

    fn nvmlShutdown() {
        let ended = SESSIONS.fetch_update(SeqCst, SeqCst, |sessions| sessions.checked_sub(1));
        ended.map(|_| ()).map_err(|_| UNINITIALIZED)
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(bus_id: *const c_char, handle: Out<usize>) {
        if bus_id.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: not null, so by the library's contract a string.
        let wanted = unsafe { CStr::from_ptr(bus_id) }.to_string_lossy();
        if SESSIONS.load(SeqCst) == 0 {
            return Err(UNINITIALIZED);
        }
        let index = (0..device::count()).find(|index| device::bus_id(*index).eq_ignore_ascii_case(&wanted));
        handle.put(FIRST + index.ok_or(NOT_FOUND)?)
    }

    fn nvmlDeviceGetNvLinkState(handle: usize, link: u32, state: Out<u32>) {
        link_of(handle, link)?;
        obey("nvlink_status")?;
        state.put(knob("nvlink_state") as u32)
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(handle: usize, link: u32, kind: Out<u32>) {
        link_of(handle, link)?;
        kind.put(knob("nvlink_kind") as u32)
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(handle: usize, link: u32, info: Out<PciInfo>) {
        info.put(PciInfo::at(&end(link_of(handle, link)?)))
    }
}
