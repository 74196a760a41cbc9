//! Memory of a GPU that a peer may use.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::CudaStream;

use super::buffer::GpuBuffer;
use super::device::GpuDevice;
use super::error::GpuError;
use super::guard::{GpuRead, GpuWrite};
use super::register::{self, GpuPath};
use crate::error::{Error, Result};
use crate::memory::device::ExposedCount;
use crate::memory::{Access, ProtectionDomain, RemoteRegion};
use crate::provider::Grant;

/// Memory of a GPU that peers may read, write or change atomically, as far as its [`Access`] goes, without this side taking part.
///
/// Made by [`GpuBuffer::expose`]; [`reclaim`](Self::reclaim) gives the buffer back. Dropping it revokes the key first.
///
/// # When the GPU sees what a peer wrote
///
/// A peer's Write tells this side nothing. Agree on a message, or let the peer use a write with immediate, and await that: a guard of
/// [`read_on`](Self::read_on) or [`write_on`](Self::write_on) that is made afterwards makes the bytes visible to work submitted through it.
/// A kernel that runs while a peer writes the same bytes sees any mixture of old and new ones, for as long as it runs
/// (GPUDirect RDMA guide, "Synchronization and Memory Ordering").
///
/// The other way round, a peer that reads sees what the GPU had finished writing: await [`idle`](Self::idle), then tell the peer.
///
/// # Atomics
///
/// A peer's atomics are atomic among the peers' operations through the same device, not with atomics of the GPU's kernels.
pub struct GpuExposedRegion {
    // Field order: revoked, then given back, then no longer counted.
    grant: Grant,
    buffer: GpuBuffer,
    _counted: ExposedCount,
    access: Access,
}

impl GpuExposedRegion {
    pub(super) fn new(mut buffer: GpuBuffer, access: Access) -> Result<Self, GpuExposeError> {
        match grant(&mut buffer, access) {
            Ok(grant) => {
                let _counted = ExposedCount::new(buffer.domain());
                Ok(Self { grant, buffer, _counted, access })
            }
            Err(error) => Err(GpuExposeError { error, buffer }),
        }
    }

    /// The description for the peer. See there whom to give it to.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion::of_local(self.buffer.address(), self.len(), self.grant.rkey(), self.access)
    }

    /// Length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)] // it never is
    pub fn len(&self) -> u64 {
        self.buffer.len() as u64
    }

    /// What peers may do.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The GPU whose memory it is.
    pub fn gpu(&self) -> &GpuDevice {
        self.buffer.gpu()
    }

    /// How the bytes get to the RDMA device and back.
    pub fn path(&self) -> GpuPath {
        self.buffer.path()
    }

    /// The domain whose connections can reach this memory.
    pub fn domain(&self) -> &ProtectionDomain {
        self.buffer.domain()
    }

    /// The bytes for work on `stream` that reads them: what peers are known to have written by now is visible to it.
    ///
    /// # Errors
    ///
    /// As [`GpuBuffer::read_on`].
    pub fn read_on<'a, T: Pod>(&'a self, stream: &'a Arc<CudaStream>) -> Result<GpuRead<'a, T>> {
        self.make_visible()?;
        self.buffer.read_on(stream)
    }

    /// The bytes for work on `stream` that writes them; otherwise as [`read_on`](Self::read_on).
    ///
    /// # Errors
    ///
    /// As [`GpuBuffer::write_on`].
    pub fn write_on<'a, T: Pod>(&'a mut self, stream: &'a Arc<CudaStream>) -> Result<GpuWrite<'a, T>> {
        self.make_visible()?;
        self.buffer.write_on(stream)
    }

    /// Resolves when the GPU's own work on these bytes has finished, as [`GpuBuffer::idle`].
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`] when the GPU has failed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn idle(&self) -> Result<()> {
        self.buffer.idle().await
    }

    /// Revokes the key and gives the buffer back, with all that peers wrote visible to the GPU. From then on no peer reaches it.
    ///
    /// Where the memory was given to a peer's process, the contents move to other memory at the same address, in the time of a copy within
    /// the GPU and of an allocation. As much memory is needed once more until the peer has let go of the old: when it next uses the key or
    /// is given other memory, or when the connection ends. The thread waits for the copy, and first for the GPU's own work on these
    /// bytes; await [`idle`](Self::idle) before.
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`] when the GPU has failed, or has no memory for that; the key is revoked and the memory released all the same.
    pub fn reclaim(self) -> Result<GpuBuffer> {
        self.grant.revoke();
        if self.grant.was_shared() {
            self.take_back()?;
        }
        self.make_visible()?;
        Ok(self.buffer)
    }

    /// The key is revoked, and no guard lives, so that nothing new begins on the bytes.
    fn take_back(&self) -> Result<(), GpuError> {
        let (held, gpu) = (self.buffer.held(), self.gpu().inner());
        let uses = held.uses.lock().all(gpu)?;
        uses.iter().try_for_each(|event| event.wait())?;
        held.shareable().map_or(Ok(()), |memory| memory.renew(gpu))
    }

    fn make_visible(&self) -> Result<()> {
        match self.path() {
            GpuPath::DmaBuf | GpuPath::PeerMemory => Ok(self.gpu().inner().make_visible(self.buffer.held().scope)?),
            // Copied by the GPU itself, and acknowledged afterwards.
            GpuPath::Software | GpuPath::Staged => Ok(()),
        }
    }
}

fn grant(buffer: &mut GpuBuffer, access: Access) -> Result<Grant> {
    const EXPOSE: &str = "expose";
    if access.is_empty() || !Access::all().contains(access) {
        let reason = format!("access is {access}; name at least one of {}, and nothing else", Access::all());
        return Err(Error::Invalid { operation: EXPOSE, reason });
    }
    let domain = buffer.domain().clone();
    domain.check_length(EXPOSE, buffer.len() as u64)?;
    if !buffer.held_mut().is_quiet()? {
        return Err(GpuError::Busy { operation: EXPOSE, hint: "await GpuBuffer::idle() first" }.into());
    }
    let held = buffer.held();
    let grant = register::grant(buffer.gpu(), &domain, buffer.path(), held.piece.mr(), held.piece.segment(), access)?;
    if domain.provider().shares_pages() {
        held.shareable().into_iter().for_each(|memory| grant.set_shareable(memory.clone()));
    }
    Ok(grant)
}

impl fmt::Debug for GpuExposedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GpuExposedRegion").field(&self.remote()).finish()
    }
}

/// [`GpuBuffer::expose`] failed, and gives the buffer back.
#[derive(Debug)]
pub struct GpuExposeError {
    error: Error,
    buffer: GpuBuffer,
}

impl GpuExposeError {
    /// What went wrong.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// What went wrong, and the buffer.
    pub fn into_parts(self) -> (Error, GpuBuffer) {
        (self.error, self.buffer)
    }
}

impl fmt::Display for GpuExposeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for GpuExposeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl From<GpuExposeError> for Error {
    fn from(failed: GpuExposeError) -> Self {
        failed.error
    }
}
