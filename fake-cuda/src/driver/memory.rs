//! The table of all memory that the driver knows.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::{Result, device, misuse};

/// How memory came to be, which decides what can be done with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `cuMemAlloc`.
    Device,
    /// `cuMemAllocAsync`.
    Pool,
    /// `cuMemMap` of memory that a NIC can reach, or not, and other processes can be given, or not.
    Mapped { gdr: bool, shared: bool },
    /// `cuMemAllocManaged`.
    Managed,
    /// `cuMemHostAlloc`.
    Pinned,
    /// `cuMemHostRegister`.
    Registered,
}

impl Kind {
    /// On the device, or as good as.
    pub(super) fn is_device(self) -> bool {
        !matches!(self, Self::Pinned | Self::Registered)
    }
}

/// A piece of memory.
#[derive(Debug, Clone)]
pub(super) struct Allocation {
    /// Never used twice.
    pub(super) id: u64,
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) kind: Kind,
    pub(super) device: usize,
    pub(super) context: usize,
    /// What the program said when it made it.
    pub(super) flags: u32,
    /// Copies that return early must not: `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
    pub(super) sync_memops: bool,
    /// `cuMemFreeAsync` was called: nothing new may use it.
    freeing: bool,
}

impl Allocation {
    fn end(&self) -> u64 {
        self.address + self.len
    }
}

/// A range of an [`Allocation`] that an operation is going to use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Range {
    id: u64,
    allocation: u64,
    address: u64,
    len: usize,
    pub(super) kind: Kind,
    pub(super) sync_memops: bool,
}

struct Table {
    issued: u64,
    live: BTreeMap<u64, Allocation>,
    /// Addresses and lengths of device memory that was freed, to tell the program what it did.
    freed: BTreeMap<u64, u64>,
}

static TABLE: RwLock<Table> = RwLock::new(Table { issued: 0, live: BTreeMap::new(), freed: BTreeMap::new() });

fn table() -> RwLockReadGuard<'static, Table> {
    TABLE.read().unwrap_or_else(PoisonError::into_inner)
}

fn table_mut() -> RwLockWriteGuard<'static, Table> {
    TABLE.write().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn find(&self, address: u64) -> Option<&Allocation> {
        self.live.range(..=address).next_back().map(|(_, found)| found).filter(|found| address < found.end())
    }

    /// Why a range that a program passes is not usable.
    fn complain(&self, address: u64, len: u64) -> ! {
        if let Some(found) = self.find(address) {
            if found.freeing {
                misuse(format_args!("use after free: {address:#x} has been given to cuMemFreeAsync"));
            }
            misuse(format_args!(
                "out of bounds: {len} bytes at {address:#x}, of {} at {:#x}",
                found.len, found.address
            ));
        }
        let freed = self.freed.range(..=address).next_back();
        if freed.is_some_and(|(&start, &freed)| address < start + freed) {
            misuse(format_args!("use after free: {len} bytes at {address:#x} have been freed"));
        }
        misuse(format_args!("unknown address: {len} bytes at {address:#x} were never allocated"));
    }
}

/// Enters memory into the table.
pub(super) fn insert(address: u64, len: u64, kind: Kind, device: usize, context: usize, flags: u32) {
    let mut table = table_mut();
    table.issued += 1;
    let id = table.issued;
    table.freed.retain(|&start, &mut freed| start >= address + len || start + freed <= address);
    let allocation = Allocation { id, address, len, kind, device, context, flags, sync_memops: false, freeing: false };
    table.live.insert(address, allocation);
}

/// Whether the program holds memory in a range.
pub(super) fn overlaps(address: u64, len: u64) -> bool {
    table().live.range(..address + len).next_back().is_some_and(|(_, found)| found.end() > address)
}

/// The memory around an address, if the driver knows it.
pub(super) fn find(address: u64) -> Option<Allocation> {
    table().find(address).cloned()
}

/// The memory that begins at an address, which the program wants to give back. Anything else is its mistake.
pub(super) fn find_start(address: u64) -> Allocation {
    let table = table();
    match table.find(address) {
        Some(found) if found.freeing => misuse(format_args!("double free: {address:#x}")),
        Some(found) if found.address == address => found.clone(),
        Some(found) => misuse(format_args!("free of {address:#x}, which lies inside of {:#x}", found.address)),
        None => table.complain(address, 0),
    }
}

/// Forbids new uses of memory, because the program has given it to `cuMemFreeAsync`. Those queued may still run.
pub(super) fn forbid(address: u64) {
    if let Some(found) = table_mut().live.get_mut(&address) {
        found.freeing = true;
    }
}

/// Sets `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
pub(super) fn set_sync_memops(address: u64, on: bool) {
    if let Some(found) = table_mut().live.get_mut(&address) {
        found.sync_memops = on;
    }
}

/// Gives memory back. Nothing that runs uses it meanwhile; what runs later finds it gone.
pub(super) fn free(allocation: &Allocation) {
    let mut table = table_mut();
    if table.live.get(&allocation.address).is_none_or(|found| found.id != allocation.id) {
        misuse(format_args!("double free: {:#x}", allocation.address));
    }
    table.live.remove(&allocation.address);
    release(&mut table, allocation);
}

fn release(table: &mut Table, Allocation { address, len, kind, device, .. }: &Allocation) {
    match kind {
        Kind::Device | Kind::Pool | Kind::Mapped { .. } => {
            let window = device::window(*device);
            if matches!(kind, Kind::Mapped { shared: true, .. }) {
                window.take_out(*address, *len);
            }
            window.poison(*address, *len);
            // Of memory that is mapped, the program has reserved the addresses for itself.
            if !matches!(kind, Kind::Mapped { .. }) {
                window.give_back(*address, len.next_multiple_of(GRANULE));
            }
            table.freed.insert(*address, *len);
        }
        Kind::Managed | Kind::Pinned => {
            // SAFETY: `allocate` mapped this range, and it has just left the table.
            unsafe { libc::munmap(*address as *mut _, *len as usize) };
        }
        Kind::Registered => {}
    }
}

/// What `cuMemAlloc` aligns to.
pub(super) const GRANULE: u64 = 512;

/// A range that the program passes as device memory. It must be alive as a whole.
pub(super) fn range(address: u64, len: usize) -> Range {
    let table = table();
    match table.find(address) {
        Some(found) if !found.freeing && len as u64 <= found.end() - address => Range {
            id: found.id,
            allocation: found.address,
            address,
            len,
            kind: found.kind,
            sync_memops: found.sync_memops,
        },
        _ => table.complain(address, len as u64),
    }
}

/// A range that the program passes as host memory: `None` if the driver does not know it.
pub(super) fn host_range(address: u64, len: usize) -> Option<Range> {
    let known = table().find(address).is_some_and(|found| len as u64 <= found.end() - address);
    (known || device::of_address(address).is_some()).then(|| range(address, len))
}

/// Lets an operation use ranges whose turn has come. They must still be alive, and stay so meanwhile.
pub(super) fn with<const N: usize, T>(
    ranges: [Range; N],
    use_them: impl FnOnce([*mut u8; N]) -> Result<T>,
) -> Result<T> {
    let table = table();
    use_them(ranges.map(|range| {
        let found = table.live.get(&range.allocation).filter(|found| found.id == range.id);
        let Some(found) = found else {
            let (len, address) = (range.len, range.address);
            misuse(format_args!("use after free: a queued operation uses {len} bytes at {address:#x}, freed since"));
        };
        match found.kind {
            Kind::Managed | Kind::Pinned | Kind::Registered => range.address as *mut u8,
            _ => device::window(found.device).shadow(range.address) as *mut u8,
        }
    }))
}

/// Pieces and bytes of device memory in use.
pub(super) fn device_usage() -> (u64, u64) {
    let table = table();
    table.live.values().filter(|found| found.kind.is_device()).fold((0, 0), |(n, bytes), a| (n + 1, bytes + a.len))
}

/// Pieces of host memory that are allocated or registered.
pub(super) fn host_usage() -> u64 {
    table().live.values().filter(|found| !found.kind.is_device()).count() as u64
}

/// Bytes of one device in use.
pub(super) fn used_of(device: usize) -> u64 {
    table().live.values().filter(|found| found.kind.is_device() && found.device == device).map(|a| a.len).sum()
}

/// Frees all of a context's memory, and says how many pieces.
pub(super) fn purge(context: usize) -> u64 {
    let mut table = table_mut();
    let gone: Vec<_> = table.live.values().filter(|found| found.context == context).cloned().collect();
    for allocation in &gone {
        table.live.remove(&allocation.address);
        release(&mut table, allocation);
    }
    gone.len() as u64
}
