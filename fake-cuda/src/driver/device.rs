//! Devices and what they can do.

use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, LazyLock, Mutex};

use super::context::Context;
use super::hooks::{knob, small_knob};
use super::window::{LARGE_PAGE, Window};
use super::{Code, Out, Result, driver, lock, memory, misuse};

/// A device.
pub(super) struct Device {
    index: usize,
    /// Domain, bus and device of the PCI address.
    pci: [u32; 3],
    window: Window,
    /// The context, and how often it has been retained.
    primary: Mutex<Option<(Arc<Context>, u32)>>,
}

static INITIALIZED: AtomicBool = AtomicBool::new(false);

static DEVICES: LazyLock<Vec<Device>> = LazyLock::new(|| (0..knob("devices") as usize).map(Device::new).collect());

impl Device {
    fn new(index: usize) -> Self {
        let window = Window::new(memory_size() as usize);
        let window = window.unwrap_or_else(|error| misuse(format_args!("no addresses for a device: {error}")));
        window.set_visible(knob("host_visible") != 0);
        Self { index, pci: pci_address(index), window, primary: Mutex::new(None) }
    }

    pub(super) fn retain(&self) -> Arc<Context> {
        let mut primary = lock(&self.primary);
        let (context, retained) = primary.get_or_insert_with(|| (Context::create(self.index), 0));
        *retained += 1;
        context.clone()
    }

    pub(super) fn release(&self) -> Result {
        let mut primary = lock(&self.primary);
        let (_, retained) = primary.as_mut().ok_or(Code::INVALID_CONTEXT)?;
        *retained -= 1;
        let ended = if *retained == 0 { primary.take() } else { None };
        drop(primary);
        if let Some((context, _)) = ended {
            context.destroy();
        }
        Ok(())
    }

    /// Ends the context, however often it was retained.
    pub(super) fn reset(&self) {
        let context = lock(&self.primary).take();
        if let Some((context, _)) = context {
            context.destroy();
        }
    }

    pub(super) fn primary(&self) -> Option<Arc<Context>> {
        lock(&self.primary).as_ref().map(|(context, _)| context.clone())
    }

    fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"fake CUDA device";
        uuid[15] = self.index as u8;
        uuid
    }
}

/// Where a device is plugged in: the variable `FAKE_CUDA_PCI_BUS_IDS` lists it as `domain:bus:device.function`.
fn pci_address(index: usize) -> [u32; 3] {
    let listed = std::env::var("FAKE_CUDA_PCI_BUS_IDS").unwrap_or_default();
    let Some(address) = listed.split(',').nth(index).filter(|address| !address.is_empty()) else {
        return [0, 0x17 + 0x10 * index as u32, 0];
    };
    let parts = address.strip_suffix(".0").unwrap_or(address).split(':');
    let parts: Option<Vec<u32>> = parts.map(|part| u32::from_str_radix(part, 16).ok()).collect();
    let parts = parts.and_then(|parts| <[u32; 3]>::try_from(parts).ok());
    parts.unwrap_or_else(|| misuse(format_args!("FAKE_CUDA_PCI_BUS_IDS: {address} is no PCI address")))
}

/// Bytes that each device has.
pub(super) fn memory_size() -> u64 {
    knob("memory").next_multiple_of(LARGE_PAGE)
}

pub(super) fn check_initialized() -> Result {
    if INITIALIZED.load(SeqCst) { Ok(()) } else { Err(Code::NOT_INITIALIZED) }
}

pub(super) fn get(device: i32) -> Result<&'static Device> {
    check_initialized()?;
    usize::try_from(device).ok().and_then(|index| DEVICES.get(index)).ok_or(Code::INVALID_DEVICE)
}

/// How many devices there are.
pub(super) fn count() -> usize {
    DEVICES.len()
}

/// Where a device that exists is plugged in.
pub(super) fn bus_id(device: usize) -> String {
    let [domain, bus, slot] = DEVICES[device].pci;
    format!("{domain:04X}:{bus:02X}:{slot:02X}.0")
}

/// The addresses of a device that exists.
pub(super) fn window(device: usize) -> &'static Window {
    &DEVICES[device].window
}

/// The device whose addresses these are.
pub(super) fn of_address(address: u64) -> Option<usize> {
    DEVICES.iter().position(|device| device.window.contains(address))
}

/// Does what the knob `host_visible` says.
pub(super) fn apply_visibility() {
    if INITIALIZED.load(SeqCst) {
        for device in &*DEVICES {
            device.window.set_visible(knob("host_visible") != 0);
        }
    }
}

/// A device attribute by its number in the driver API.
fn attribute(number: u32, device: &Device) -> Option<i32> {
    Some(match number {
        // Threads of a block, block and grid dimensions.
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        // Shared and constant memory, and that of a block that asks for more.
        8 => 48 << 10,
        9 => 64 << 10,
        97 => 227 << 10,
        // The width of a warp.
        10 => 32,
        // Multiprocessors and their threads.
        16 => 132,
        39 => 2048,
        // What all devices of today can: copies beside kernels, mapped host memory, several kernels at once, one
        // address space, stream priorities, managed memory, host memory under its own address, registered memory,
        // addresses of one's own, descriptors of memory.
        15 | 19 | 31 | 41 | 78 | 83 | 89 | 91 | 99 | 102 | 103 => 1,
        // The PCI bus, device and domain.
        33 => device.pci[1] as i32,
        34 => device.pci[2] as i32,
        50 => device.pci[0] as i32,
        40 => 3,
        // The compute capability.
        75 => small_knob("compute_capability") / 10,
        76 => small_knob("compute_capability") % 10,
        // PAGEABLE_MEMORY_ACCESS, and by the CPU's page tables.
        88 | 100 => small_knob("c2c"),
        // CAN_FLUSH_REMOTE_WRITES.
        98 => 0,
        110 | 116 => small_knob("gdr"),
        115 => small_knob("memory_pools"),
        117 => small_knob("flush_options"),
        118 => small_knob("writes_ordering"),
        124 => small_knob("dmabuf"),
        // HOST_NUMA_ID.
        134 => 0,
        _ if (1..=160).contains(&number) => 0,
        _ => return None,
    })
}

driver! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if DEVICES.is_empty() {
            return Err(Code::NO_DEVICE);
        }
        INITIALIZED.store(true, SeqCst);
        Ok(())
    }

    fn cuDriverGetVersion(version: Out<i32>) {
        version.put(small_knob("driver_version"))
    }

    fn cuDeviceGetCount(count: Out<i32>) {
        check_initialized()?;
        count.put(DEVICES.len() as i32)
    }

    fn cuDeviceGet(device: Out<i32>, ordinal: i32) {
        get(ordinal)?;
        device.put(ordinal)
    }

    fn cuDeviceGetName(name: Out<c_char>, len: i32, device: i32) {
        name.put_string(&format!("Fake CUDA device {}", get(device)?.index), len)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: i32) {
        uuid.put(get(device)?.uuid())
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: i32) {
        uuid.put(get(device)?.uuid())
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: i32) {
        get(device)?;
        bytes.put(memory_size() as usize)
    }

    fn cuDeviceGetAttribute(value: Out<i32>, number: u32, device: i32) {
        value.put(attribute(number, get(device)?).ok_or(Code::INVALID_VALUE)?)
    }

    fn cuDeviceGetPCIBusId(id: Out<c_char>, len: i32, device: i32) {
        id.put_string(&bus_id(get(device)?.index), len)
    }

    fn cuDeviceCanAccessPeer(can: Out<i32>, device: i32, peer: i32) {
        get(device)?;
        get(peer)?;
        can.put(i32::from(device != peer))
    }

    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = super::context::usable()?;
        let used = memory::used_of(context.device);
        free.put(memory_size().saturating_sub(used) as usize)?;
        total.put(memory_size() as usize)
    }
}
