//! Protection domains, registrations, and keys for peers.

use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::ContextInner;
use super::hints;
use super::sys;
use crate::error::{Error, Result};
use crate::memory::Access;
use crate::memory::dma::Segment;
use crate::sync::Mutex;

/// Bytes of a dma-buf that is not there.
const PROBE: usize = 4096;

/// A protection domain.
#[derive(Clone, Debug)]
pub(crate) struct Pd(Arc<PdInner>);

/// Invariant: `raw` is a live protection domain of `context`, and everything made in it holds this.
#[derive(Debug)]
pub(super) struct PdInner {
    raw: NonNull<sys::ibv_pd>,
    context: Arc<ContextInner>,
}

// SAFETY: the verbs may be called from any thread.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl Pd {
    pub(super) fn alloc(context: &Arc<ContextInner>) -> Result<Self> {
        // SAFETY: the context is live.
        let raw = unsafe { (context.verbs().ibv_alloc_pd)(context.raw()) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(hints::last("allocate", "a protection domain"));
        };
        Ok(Self(Arc::new(PdInner { raw, context: context.clone() })))
    }

    pub(super) fn inner(&self) -> &Arc<PdInner> {
        &self.0
    }

    pub(crate) fn register(&self, segment: Segment) -> Result<Mr> {
        Registration::new(&self.0, "register", segment, 0).map(Mr)
    }

    /// Registers `len` bytes of a dma-buf from `offset` on, memory of another device for instance, which a peer with `access`
    /// addresses from `iova` on (ibv_reg_mr(3)). The descriptor may be closed afterwards.
    pub(crate) fn register_dmabuf(
        &self,
        fd: RawFd,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> std::io::Result<Mr> {
        let Some(register) = self.0.context.verbs().ibv_reg_dmabuf_mr else {
            let why = "libibverbs is older than rdma-core 34: it has no ibv_reg_dmabuf_mr";
            return Err(std::io::Error::new(std::io::ErrorKind::Unsupported, why));
        };
        let access = (sys::IBV_ACCESS_LOCAL_WRITE | access.bits()) as i32;
        // SAFETY: the domain is live. No byte is touched by registering; the pages belong to the dma-buf, which the
        // registration holds.
        let raw = unsafe { register(self.0.raw(), offset, len, iova, fd, access) };
        let raw = NonNull::new(raw).ok_or_else(std::io::Error::last_os_error)?;
        Ok(Mr(Registration { raw, pd: self.0.clone() }))
    }

    /// A key over exactly `len` bytes of a dma-buf; otherwise as [`register_dmabuf`](Self::register_dmabuf).
    #[cfg(feature = "cuda")]
    pub(crate) fn grant_dmabuf(
        &self,
        fd: RawFd,
        offset: u64,
        len: usize,
        iova: u64,
        access: Access,
    ) -> std::io::Result<Grant> {
        let Mr(registration) = self.register_dmabuf(fd, offset, len, iova, access)?;
        Ok(Grant { rkey: registration.rkey(), registration: Mutex::new(Some(registration)) })
    }

    /// Whether the device can register dma-bufs, or why not. There is no attribute for it, but a device that can looks at
    /// the descriptor first: one that is none is a bad descriptor to it, and to any other the operation is unknown.
    pub(crate) fn supports_dmabuf(&self) -> Result<()> {
        match self.probe_dmabuf() {
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => Ok(()),
            Err(error) => Err(Error::io("register", "a dma-buf", error)),
            Ok(()) => Ok(()),
        }
    }

    /// What it says to a descriptor that is none.
    pub(super) fn probe_dmabuf(&self) -> std::io::Result<()> {
        self.register_dmabuf(-1, 0, PROBE, 0, Access::empty()).map(drop)
    }

    /// A registration of its own over exactly the range: its key covers nothing else, and deregistering it revokes the key
    /// without touching the local one.
    pub(crate) fn grant(&self, _: &Mr, segment: Segment, access: Access) -> Result<Grant> {
        let registration = Registration::new(&self.0, "expose", segment, access.bits())?;
        Ok(Grant { rkey: registration.rkey(), registration: Mutex::new(Some(registration)) })
    }
}

impl PdInner {
    pub(super) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw.as_ptr()
    }

    pub(super) fn context(&self) -> &Arc<ContextInner> {
        &self.context
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // SAFETY: everything made in the domain held it, and is gone.
        let returned = unsafe { (self.context.verbs().ibv_dealloc_pd)(self.raw()) };
        if returned != 0 {
            tracing::error!(error = %hints::error_of(returned), "a protection domain could not be released");
        }
    }
}

/// Invariant: `raw` is a live memory region of `pd`.
#[derive(Debug)]
struct Registration {
    raw: NonNull<sys::ibv_mr>,
    pd: Arc<PdInner>,
}

// SAFETY: the verbs may be called from any thread.
unsafe impl Send for Registration {}
// SAFETY: as above; the structure behind `raw` is only read.
unsafe impl Sync for Registration {}

impl Registration {
    /// `remote` holds rights of a peer, in the bits of `enum ibv_access_flags`.
    fn new(pd: &Arc<PdInner>, operation: &'static str, segment: Segment, remote: u32) -> Result<Self> {
        // Receives and reads write locally, and a peer's right to write needs the local one.
        let access = (sys::IBV_ACCESS_LOCAL_WRITE | remote) as i32;
        let (address, len) = (segment.address() as *mut libc::c_void, segment.len());
        // SAFETY: the domain is live. Registering reads and writes no byte; who owns the memory keeps it for as long as
        // it is registered.
        let raw = unsafe { (pd.context.verbs().ibv_reg_mr)(pd.raw(), address, len, access) };
        match NonNull::new(raw) {
            Some(raw) => Ok(Self { raw, pd: pd.clone() }),
            None => Err(hints::registering(operation, len, std::io::Error::last_os_error())),
        }
    }

    fn lkey(&self) -> u32 {
        // SAFETY: live by the invariant.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    fn rkey(&self) -> u32 {
        // SAFETY: live by the invariant.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: live by the invariant, and not used afterwards.
        let returned = unsafe { (self.pd.context.verbs().ibv_dereg_mr)(self.raw.as_ptr()) };
        if returned != 0 {
            tracing::error!(error = %hints::error_of(returned), "memory could not be deregistered");
        }
    }
}

/// A registration for local use: the peer gets no right, so its remote key is worthless.
#[derive(Debug)]
pub(crate) struct Mr(Registration);

impl Mr {
    pub(crate) fn lkey(&self) -> u32 {
        self.0.lkey()
    }
}

/// A key for the peer.
#[derive(Debug)]
pub(crate) struct Grant {
    rkey: u32,
    registration: Mutex<Option<Registration>>,
}

impl Grant {
    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Deregistering returns when the device has forgotten the key and finished what was under way.
    pub(crate) fn revoke(&self) {
        drop(self.registration.lock().take());
    }
}
