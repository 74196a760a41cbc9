//! What a region's bytes are made of, and how they are freed.
//!
//! Invariant of [`Memory`]: `ptr` is valid for reads and writes of `len` initialised bytes, `1 <= len <= isize::MAX`,
//! until it is dropped; nobody else reaches them meanwhile; and the pointer is the allocation's own,
//! so that pointers derived from it may go anywhere inside.
//!
//! Memory of a device is the exception: there the pointer is an address that only the device understands. Pieces of it are held by
//! types that never dereference them.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// A page of every host that this crate runs on, or a part of one. Page-aligned memory of its own shares no page
/// with the program's other data, which matters since devices pin, and fork treats specially, whole pages.
pub(super) const PAGE: usize = 4096;

/// Memory that a program hands over to be registered: a `Vec<u8>` (its length, not its spare capacity) or a `Box<[u8]>`.
///
/// Nothing is copied; the allocation is registered where it is and freed when the last buffer made of it is gone.
pub struct OwnedMemory(Vec<u8>);

impl From<Vec<u8>> for OwnedMemory {
    fn from(memory: Vec<u8>) -> Self {
        Self(memory)
    }
}

impl From<Box<[u8]>> for OwnedMemory {
    fn from(memory: Box<[u8]>) -> Self {
        Self(memory.into_vec())
    }
}

impl fmt::Debug for OwnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedMemory").field("len", &self.0.len()).finish()
    }
}

pub(super) struct Memory {
    ptr: NonNull<u8>,
    len: usize,
    owner: Owner,
}

/// Raw parts rather than the `Vec` itself: while the region lives, its bytes are reached through buffers only,
/// and a `Vec` that is moved along would claim them too.
enum Owner {
    Pages(Layout),
    Vec { capacity: usize },
    Foreign { _owner: Box<dyn Send + Sync> },
}

// SAFETY: by the invariant nobody else reaches the bytes, and each kind of owner may be dropped on any thread.
unsafe impl Send for Memory {}
// SAFETY: `&Memory` only tells address and length.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed pages of their own. `len` is not 0.
    pub(super) fn pages(operation: &'static str, len: usize) -> Result<Self> {
        let too_large = |_| Error::Limit {
            operation,
            what: "length",
            value: len as u64,
            limit: (isize::MAX as usize & !(PAGE - 1)) as u64,
            hint: "",
        };
        let layout = Layout::from_size_align(len, PAGE).map_err(too_large)?.pad_to_align();
        debug_assert_ne!(layout.size(), 0);
        // SAFETY: the layout's size is not 0, since `len` is not.
        let ptr = NonNull::new(unsafe { alloc_zeroed(layout) });
        let ptr = ptr.ok_or_else(|| {
            Error::io(operation, format_args!("{len} bytes"), io::Error::from(io::ErrorKind::OutOfMemory))
        })?;
        Ok(Self { ptr, len, owner: Owner::Pages(layout) })
    }

    /// The caller's allocation. It is not empty.
    pub(super) fn owned(memory: OwnedMemory) -> Self {
        let mut vec = ManuallyDrop::new(memory.0);
        let (len, capacity) = (vec.len(), vec.capacity());
        // SAFETY: a Vec's pointer is never null.
        let ptr = unsafe { NonNull::new_unchecked(vec.as_mut_ptr()) };
        Self { ptr, len, owner: Owner::Vec { capacity } }
    }

    /// Memory that `owner` keeps alive.
    ///
    /// # Safety
    ///
    /// The type's invariant holds for `ptr` and `len` until `owner` is dropped.
    pub(super) unsafe fn foreign(ptr: NonNull<u8>, len: usize, owner: Box<dyn Send + Sync>) -> Self {
        Self { ptr, len, owner: Owner::Foreign { _owner: owner } }
    }

    /// Memory of a device, at an address of the device's, that `owner` keeps allocated. It is not empty.
    #[cfg(feature = "cuda")]
    pub(super) fn of_device(address: u64, len: usize, owner: Box<dyn Send + Sync>) -> Option<Self> {
        let ptr = NonNull::new(std::ptr::without_provenance_mut(usize::try_from(address).ok()?))?;
        Some(Self { ptr, len, owner: Owner::Foreign { _owner: owner } })
    }

    pub(super) fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether it was made by [`pages`](Self::pages), where those have the size of the system's.
    pub(super) fn has_pages(&self) -> bool {
        matches!(self.owner, Owner::Pages(_)) && !cfg!(miri) && rustix::param::page_size() == PAGE
    }
}

impl OwnedMemory {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.owner {
            // SAFETY: allocated in `pages` with this layout, and freed only here.
            Owner::Pages(layout) => unsafe { dealloc(self.ptr.as_ptr(), layout) },
            // SAFETY: the parts of the Vec that `owned` took apart, put together only here.
            Owner::Vec { capacity } => drop(unsafe { Vec::from_raw_parts(self.ptr.as_ptr(), self.len, capacity) }),
            Owner::Foreign { .. } => {}
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = match self.owner {
            Owner::Pages(_) => "pages",
            Owner::Vec { .. } => "vec",
            Owner::Foreign { .. } => "foreign",
        };
        f.debug_struct("Memory").field("ptr", &self.ptr).field("len", &self.len).field("owner", &owner).finish()
    }
}
