//! Protection domains: which registrations and which connections may be used together.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::OwnedMemory;
use super::backing::Memory;
use super::buffer::Buffer;
use super::chunks::Chunks;
use super::piece::Piece;
use super::range::at_most;
use super::region::MemoryRegion;
use crate::error::{Error, Result};
use crate::meters::Meters;
use crate::provider::{DeviceLimits, Pd};

/// A protection domain (PD): the scope in which keys are valid.
///
/// Buffers and connections of the same domain work together; a buffer used with a connection of another domain is an error,
/// and a [`RemoteRegion`](super::RemoteRegion) only opens memory to peers whose connection belongs to the domain of that memory.
/// A server that gives each client a domain of its own makes one client's keys worthless to the others.
///
/// Cheap to clone. The domain, and the device under it, stay open while a clone, a buffer or a connection needs them.
///
/// ```no_run
/// use tokio_rdma::{BufferPool, Device};
///
/// # fn main() -> tokio_rdma::Result<()> {
/// let device = Device::open("soft0")?;
/// let pd = device.alloc_pd()?;
///
/// let mut message = pd.alloc(4096)?;
/// message[..5].copy_from_slice(b"hello");
///
/// let pool = BufferPool::new(&pd, 16 * 1024, 256)?;
/// assert_eq!(pool.available(), 256);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct ProtectionDomain(Arc<Inner>);

struct Inner {
    // Field order: the domain goes before the device that it is of.
    pd: Pd,
    limits: DeviceLimits,
    id: u64,
    live: Live,
    meters: Meters,
    device: Arc<dyn Any + Send + Sync>,
}

/// What exists of a domain right now.
#[derive(Default)]
pub(super) struct Live {
    pub(super) regions: AtomicUsize,
    pub(super) buffers: AtomicUsize,
    pub(super) exposed: AtomicUsize,
}

/// How much of a domain's memory is in use, to find leaks. See [`ProtectionDomain::stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DomainStats {
    /// Registrations: one for each pool, and one for each buffer that was allocated or registered on its own.
    pub live_regions: usize,
    /// Buffers taken from a pool, allocated or registered, and not given back. One that was split, frozen or cloned
    /// counts once until its last piece is gone.
    pub live_buffers: usize,
    /// Exposed regions: keys that a peer can use.
    pub live_exposed: usize,
}

impl ProtectionDomain {
    pub(crate) fn new(pd: Pd, limits: DeviceLimits, meters: Meters, device: Arc<dyn Any + Send + Sync>) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(Inner { pd, limits, id, live: Live::default(), meters, device }))
    }

    /// This domain's number, unique in the process: what errors call it.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Whether the device can register memory of other devices, a GPU's for instance, by dma-buf (`ibv_reg_dmabuf_mr(3)`);
    /// asks it, and registers nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] with the reason: the device, its driver or the installed library cannot.
    pub fn supports_dmabuf(&self) -> Result<()> {
        self.0.pd.supports_dmabuf()
    }

    /// Allocates and registers `len` zeroed bytes, page-aligned, as a registration of their own.
    ///
    /// Registering costs system calls and pins memory, so do it ahead of time; for many buffers of one size
    /// use a [`BufferPool`](super::BufferPool).
    ///
    /// # Errors
    ///
    /// [`Error::Limit`] when `len` is 0 or above the device's [`max_region`](DeviceLimits::max_region),
    /// [`Error::Io`] when there is no memory or the device refuses.
    pub fn alloc(&self, len: usize) -> Result<Buffer> {
        self.check_length("alloc", len as u64)?;
        self.whole(Memory::pages("alloc", len)?)
    }

    /// Registers memory that the program allocated, without copying it: a `Vec<u8>` (its length, not its spare capacity)
    /// or a `Box<[u8]>`. For atomics of a peer use [`alloc`](Self::alloc), whose memory is aligned. It is freed when the last buffer made of it is gone, also when registering fails.
    ///
    /// ```
    /// # fn demo(pd: &tokio_rdma::ProtectionDomain) -> tokio_rdma::Result<()> {
    /// let buffer = pd.register(b"hello".to_vec())?;
    /// assert_eq!(&buffer[..], b"hello");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn register(&self, memory: impl Into<OwnedMemory>) -> Result<Buffer> {
        let memory = memory.into();
        self.check_length("register", memory.len() as u64)?;
        self.whole(Memory::owned(memory))
    }

    /// Registers memory that comes from elsewhere: a file mapping, huge pages, another library's allocator.
    ///
    /// `owner` keeps the memory alive, and is dropped after the memory is deregistered, when the last buffer
    /// made of it is gone (or right away when registering fails), on whichever thread that happens.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped:
    /// - `ptr` is valid for reads and writes of `len` initialised bytes, in one allocation, on any thread;
    /// - nobody reads or writes these bytes other than through the returned buffer and what is made of it,
    ///   this process and others that map the same memory included.
    pub unsafe fn register_raw(
        &self,
        ptr: NonNull<u8>,
        len: usize,
        owner: impl Send + Sync + 'static,
    ) -> Result<Buffer> {
        self.check_length("register_raw", len as u64)?;
        at_most("register_raw", "length", len as u64, isize::MAX as u64)?;
        // SAFETY: the caller's promise, and the length was checked.
        self.whole(unsafe { Memory::foreign(ptr, len, Box::new(owner)) })
    }

    /// Counts of what is registered and in use. Each is exact, but they are not read at one instant.
    pub fn stats(&self) -> DomainStats {
        let live = self.live();
        DomainStats {
            live_regions: live.regions.load(Ordering::Relaxed),
            live_buffers: live.buffers.load(Ordering::Relaxed),
            live_exposed: live.exposed.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn provider(&self) -> &Pd {
        &self.0.pd
    }

    /// The device under this domain.
    pub(crate) fn device(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.0.device
    }

    pub(crate) fn limits(&self) -> &DeviceLimits {
        &self.0.limits
    }

    pub(crate) fn meters(&self) -> &Meters {
        &self.0.meters
    }

    pub(super) fn live(&self) -> &Live {
        &self.0.live
    }

    /// Refuses lengths that no region can have.
    pub(crate) fn check_length(&self, operation: &'static str, len: u64) -> Result<()> {
        if len == 0 {
            let hint = "memory of 0 bytes cannot be registered; the smallest length is 1";
            return Err(Error::Limit { operation, what: "length", value: 0, limit: 1, hint });
        }
        at_most(operation, "length", len, self.limits().max_region)
    }

    /// One buffer over a new region.
    fn whole(&self, memory: Memory) -> Result<Buffer> {
        let len = memory.len();
        let region = MemoryRegion::new(self, memory, Chunks::taken(), len)?;
        // SAFETY: the region's only chunk was taken for this piece.
        Ok(Buffer::from_piece(unsafe { Piece::of_chunk(region, 0, len) }))
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain").field("id", &self.id()).field("stats", &self.stats()).finish()
    }
}

/// Counts one thing of a domain for as long as it exists.
pub(super) struct Counted {
    domain: ProtectionDomain,
    counter: fn(&Live) -> &AtomicUsize,
}

impl Counted {
    pub(super) fn new(domain: &ProtectionDomain, counter: fn(&Live) -> &AtomicUsize) -> Self {
        counter(domain.live()).fetch_add(1, Ordering::Relaxed);
        Self { domain: domain.clone(), counter }
    }

    pub(super) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.counter)(self.domain.live()).fetch_sub(1, Ordering::Relaxed);
    }
}

/// A domain of a device of its own, for this folder's tests.
#[cfg(test)]
pub(super) fn test_domain() -> ProtectionDomain {
    use crate::provider::{Context, soft};
    let context =
        Context::Soft(soft::Context::open(soft::default_limits(), None, soft::LinkPolicy::default()).unwrap());
    let (pd, limits) = (context.alloc_pd().unwrap(), context.limits().clone());
    ProtectionDomain::new(pd, limits, Meters::new("soft0"), Arc::new(context))
}
