//! NVIDIA's management library: what it says of NVLinks, which neither CUDA nor sysfs know.
//!
//! Statuses, states and kinds are numbers here: a driver may know some that are newer than any list of them.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_uint, c_void};
use std::sync::OnceLock;

use libloading::Library;

use crate::doctor::Source;
use crate::doctor::nvml::{NOT_SUPPORTED, NvLinkAnswer, NvLinksAsked, shown};
use crate::topology::PciAddress;

const LIBRARY: &str = "libnvidia-ml.so.1";

/// No GPU has so many NVLinks: those of Hopper and Blackwell have 18.
const MOST_LINKS: c_uint = 64;

type Status = c_uint;
/// `nvmlDevice_t`.
type Device = *mut c_void;
type Plain = unsafe extern "C" fn() -> Status;
type ByBusId = unsafe extern "C" fn(*const c_char, *mut Device) -> Status;
type LinkNumber = unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> Status;
type LinkEnd = unsafe extern "C" fn(Device, c_uint, *mut PciInfo) -> Status;

/// `nvmlPciInfo_t`, which has been of this form since `_v2` of its functions.
#[repr(C)]
struct PciInfo {
    legacy_bus_id: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

/// The loaded library.
struct Nvml {
    init: Plain,
    shutdown: Plain,
    by_bus_id: ByBusId,
    link_state: LinkNumber,
    link_end: LinkEnd,
    /// Since R470.
    link_end_kind: Option<LinkNumber>,
    /// The functions above are its.
    _library: Library,
}

/// The NVLinks of these GPUs, each asked by its address. Takes as long as the library does to begin, tens of milliseconds for each GPU.
pub(crate) fn nvlinks(gpus: &[PciAddress]) -> NvLinksAsked {
    let nvml = match Nvml::get() {
        Ok(nvml) => nvml,
        Err(reason) => return NvLinksAsked::Failed(Source::new(LIBRARY, reason)),
    };
    match Session::begin(nvml) {
        Ok(session) => NvLinksAsked::Asked(gpus.iter().map(|gpu| (*gpu, session.links_of(*gpu))).collect()),
        Err(status) => NvLinksAsked::Failed(Source::new("nvmlInit_v2", shown(status))),
    }
}

impl Nvml {
    /// The library, or why there is none. Looked for once, and kept: it has state of its own that others in the process may use.
    fn get() -> Result<&'static Self, &'static str> {
        static NVML: OnceLock<Result<Nvml, String>> = OnceLock::new();
        NVML.get_or_init(Self::load).as_ref().map_err(String::as_str)
    }

    fn load() -> Result<Self, String> {
        // SAFETY: the library is NVIDIA's, whose initialisers are made to run at any time.
        let library = unsafe { Library::new(LIBRARY) }.map_err(|error| format!("cannot be loaded: {error}"))?;
        Ok(Self {
            init: symbol(&library, "nvmlInit_v2")?,
            shutdown: symbol(&library, "nvmlShutdown")?,
            by_bus_id: symbol(&library, "nvmlDeviceGetHandleByPciBusId_v2")?,
            link_state: symbol(&library, "nvmlDeviceGetNvLinkState")?,
            link_end: symbol(&library, "nvmlDeviceGetNvLinkRemotePciInfo_v2")?,
            link_end_kind: symbol(&library, "nvmlDeviceGetNvLinkRemoteDeviceType").ok(),
            _library: library,
        })
    }
}

/// The library between its beginning and its end, which it counts.
struct Session(&'static Nvml);

impl Session {
    fn begin(nvml: &'static Nvml) -> Result<Self, Status> {
        // SAFETY: declared as in nvml.h; may be called at any time.
        match unsafe { (nvml.init)() } {
            0 => Ok(Self(nvml)),
            status => Err(status),
        }
    }

    /// One answer for each link until one behind the last.
    fn links_of(&self, gpu: PciAddress) -> Result<Vec<NvLinkAnswer>, Source> {
        let device = self
            .device(gpu)
            .map_err(|status| Source::new(format!("nvmlDeviceGetHandleByPciBusId_v2({gpu})"), shown(status)))?;
        let mut links = Vec::new();
        for link in 0..MOST_LINKS {
            let state = number(self.0.link_state, device, link);
            let is_up = state == Ok(NvLinkAnswer::UP);
            // Behind the last one there is none; and where one cannot be told, nothing can.
            let is_last = state.is_err_and(|status| status != NOT_SUPPORTED);
            links.push(NvLinkAnswer {
                state,
                end: is_up.then(|| self.end(device, link)),
                end_kind: self.0.link_end_kind.filter(|_| is_up).map(|kind| number(kind, device, link)),
            });
            if is_last {
                break;
            }
        }
        Ok(links)
    }

    fn device(&self, gpu: PciAddress) -> Result<Device, Status> {
        let bus_id = CString::new(gpu.to_string()).unwrap_or_default();
        let mut device: Device = std::ptr::null_mut();
        // SAFETY: declared as in nvml.h; a string that ends, and a place for a handle, both of this frame. The library has begun.
        match unsafe { (self.0.by_bus_id)(bus_id.as_ptr(), &mut device) } {
            0 => Ok(device),
            status => Err(status),
        }
    }

    /// The address of what is at the other end, in the library's words.
    fn end(&self, device: Device, link: c_uint) -> Result<String, Status> {
        let mut info = PciInfo {
            legacy_bus_id: [0; 16],
            domain: 0,
            bus: 0,
            device: 0,
            device_id: 0,
            subsystem_id: 0,
            bus_id: [0; 32],
        };
        // SAFETY: declared as in nvml.h; the handle is one that this session was given, and the place is of this frame.
        match unsafe { (self.0.link_end)(device, link, &mut info) } {
            0 => Ok(text(&info.bus_id)),
            status => Err(status),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: declared as in nvml.h; ends what `begin` began. No handle of this session is used after it.
        let status = unsafe { (self.0.shutdown)() };
        if status != 0 {
            tracing::debug!(status, "nvmlShutdown");
        }
    }
}

fn number(function: LinkNumber, device: Device, link: c_uint) -> Result<u32, Status> {
    let mut value = 0;
    // SAFETY: both functions of this type are declared so in nvml.h, with an enum of C at the place, which is of this frame. The handle is
    // one that the session was given.
    match unsafe { function(device, link, &mut value) } {
        0 => Ok(value),
        status => Err(status),
    }
}

/// Up to its zero; without one, all of it. What is none of text's characters goes to nobody's terminal.
fn text(characters: &[c_char]) -> String {
    let bytes: Vec<u8> = characters.iter().map(|it| *it as u8).collect();
    let whole = CStr::from_bytes_until_nul(&bytes).map_or(&bytes[..], CStr::to_bytes);
    whole.iter().map(|byte| if byte.is_ascii_graphic() { char::from(*byte) } else { '?' }).collect()
}

fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: each caller names the type that nvml.h declares the function with.
    match unsafe { library.get::<T>(name.as_bytes()) } {
        Ok(symbol) => Ok(*symbol),
        Err(error) => Err(format!("has no {name}: {error}")),
    }
}
