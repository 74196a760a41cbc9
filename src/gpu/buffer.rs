//! Registered memory of a GPU.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaEvent, CudaStream};

use super::device::GpuDevice;
use super::driver;
use super::error::GpuError;
use super::events;
use super::exposed::{GpuExposeError, GpuExposedRegion};
use super::guard::{GpuRead, GpuWrite};
use super::held::Held;
use super::register::GpuPath;
use super::visibility::{Visibility, VisibilityScope};
use crate::error::Result;
use crate::memory::piece::Piece;
use crate::memory::{Access, MemoryRegion, ProtectionDomain};
use crate::op::role::Role;
use crate::provider::Sge;
use crate::sync::Mutex;

/// Memory of a GPU that is registered with an RDMA device, and the CUDA events of what the GPU does with it.
///
/// Operations take it exactly as they take a [`Buffer`](crate::Buffer), and give it back. In between, the two sides are kept apart:
///
/// - **Before** an operation is posted, the GPU's work on the bytes is awaited: the last write before a Send or Write, the reads as well
///   before a Receive or Read. Neither blocks a thread.
/// - **After** the completion, the bytes are made visible to the GPU. When the future resolves, work that is launched from then on,
///   on any stream of this GPU, sees them.
///
/// Kernels and copies get at the bytes through [`read_on`](Self::read_on) and [`write_on`](Self::write_on). The CPU has no access,
/// whatever the path: copy with the stream's own methods. Its length is fixed, and it can be split.
///
/// Which [path](Self::path) the bytes take is decided when it is made, and nothing but the [`PathPolicy`](super::PathPolicy) lets it be a slower one.
///
/// ```no_run
/// use tokio_rdma::gpu::{GpuBuffer, GpuDevice};
///
/// # async fn demo(domain: &tokio_rdma::ProtectionDomain, connection: &tokio_rdma::Connection) -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = GpuDevice::open(0)?;
/// let stream = gpu.context().new_stream()?;
/// let mut buffer = GpuBuffer::alloc(&gpu, domain, 1 << 20)?;
///
/// // The GPU fills it; the Send waits for that, and the stream goes on.
/// let zeros = vec![0.0f32; 1 << 18];
/// stream.memcpy_htod(&zeros, &mut buffer.write_on::<f32>(&stream)?)?;
/// let buffer = connection.send(buffer).await?;
///
/// // What comes is there for every kernel launched from here on.
/// let received = connection.receive(buffer).await?;
/// let floats: Vec<f32> = stream.clone_dtoh(&received.buffer.read_on::<f32>(&stream)?)?;
/// assert_eq!(floats.len(), 1 << 18);
/// # Ok(())
/// # }
/// ```
///
/// # Order of operations
///
/// An operation is posted when the GPU is ready for it, so two that are started one after the other are posted in that order only if the
/// first one's buffer was [idle](Self::idle). Where the order matters, await `idle` before starting the second.
///
/// # Dropping
///
/// Never blocks. Memory that the GPU still uses is released when it does not, by a thread that waits for that.
pub struct GpuBuffer {
    // Behind a pointer, so that operations on host memory do not carry the room for it.
    held: Option<Box<Held>>,
}

impl GpuBuffer {
    pub(super) fn of(held: Held) -> Self {
        Self { held: Some(Box::new(held)) }
    }

    pub(super) fn held(&self) -> &Held {
        self.held.as_deref().expect("taken out only where the buffer goes as well")
    }

    pub(super) fn held_mut(&mut self) -> &mut Held {
        self.held.as_deref_mut().expect("taken out only where the buffer goes as well")
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.held().piece.len()
    }

    /// Whether the length is 0, as it can be after a split.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first byte, as the GPU knows it.
    pub fn address(&self) -> u64 {
        self.held().piece.address()
    }

    /// The GPU whose memory it is.
    pub fn gpu(&self) -> &GpuDevice {
        &self.held().gpu
    }

    /// How the bytes get to the RDMA device and back.
    pub fn path(&self) -> GpuPath {
        self.held().path
    }

    /// Whose work sees what comes into this buffer, once an operation's future has resolved; [`Owner`](VisibilityScope::Owner)
    /// unless something else was [chosen](Self::set_visibility_scope).
    pub fn visibility_scope(&self) -> VisibilityScope {
        self.held().scope
    }

    /// Chooses whose work sees what comes into this buffer, and what peers write once it is exposed. A wider scope may cost a flush
    /// for each operation on the paths by which a NIC writes the memory itself, and nothing on the others. Parts that are
    /// split off have it too; what is joined gets the wider one.
    ///
    /// # Errors
    ///
    /// [`GpuError::Invalid`] where a NIC writes the memory itself and the GPU neither orders its writes for that scope nor flushes them;
    /// nothing has changed then.
    pub fn set_visibility_scope(&mut self, scope: VisibilityScope) -> Result<()> {
        let visibility = self.gpu().visibility_to(scope);
        let by_nic = matches!(self.path(), GpuPath::DmaBuf | GpuPath::PeerMemory);
        if by_nic && visibility == Visibility::NeedsRead {
            let reason = format!("{scope:?}: {visibility}; stage the buffer instead (PathPolicy::Staged)");
            return Err(GpuError::Invalid { operation: "set_visibility_scope", reason }.into());
        }
        self.held_mut().scope = scope;
        Ok(())
    }

    /// The region that this buffer is a part of.
    pub fn region(&self) -> &MemoryRegion {
        self.held().piece.region()
    }

    /// The domain that this buffer can be used in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.region().domain()
    }

    /// The bytes as values of `T`, for work on `stream` that reads them. Makes the stream wait for the last write;
    /// a later write, by the GPU or by a device, waits until what was submitted to `stream` while the guard lived is done.
    ///
    /// # Errors
    ///
    /// [`GpuError::Invalid`] when the length is no multiple of `T`'s size or the address not aligned for it, [`GpuError::Driver`].
    pub fn read_on<'a, T: Pod>(&'a self, stream: &'a Arc<CudaStream>) -> Result<GpuRead<'a, T>> {
        Ok(GpuRead::new(self.held(), stream)?)
    }

    /// The bytes as values of `T`, for work on `stream` that writes them, and may read them. Makes the stream wait for earlier uses;
    /// a later use, by the GPU or by a device, waits until what was submitted to `stream` while the guard lived is done.
    ///
    /// # Errors
    ///
    /// As [`read_on`](Self::read_on).
    pub fn write_on<'a, T: Pod>(&'a mut self, stream: &'a Arc<CudaStream>) -> Result<GpuWrite<'a, T>> {
        self.changes();
        Ok(GpuWrite::new(self.held(), stream)?)
    }

    /// Tells of a write by work that was not submitted through a guard: the bytes are ready when `event` is done.
    /// Work that is recorded later in the same event does not count.
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`], for example for an event of another context.
    pub fn ready_after(&mut self, event: &CudaEvent) -> Result<()> {
        self.changes();
        let held = self.held();
        let inner = held.gpu.inner();
        // An event of our own behind that one: the program may record its own anew. Not on a stream that copies go through.
        let context = &inner.context;
        let stream = driver::own(context, "cuStreamCreate", || context.new_stream())?;
        driver::own(context, "cuStreamWaitEvent", || stream.wait(event))?;
        let event = inner.events.record(&stream)?;
        held.uses.lock().wrote_as_well(event);
        Ok(())
    }

    /// Resolves when all work of the GPU on these bytes that is known has finished. What is submitted through a guard is known
    /// from when the guard is dropped.
    ///
    /// # Errors
    ///
    /// [`GpuError::Driver`] when the GPU has failed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub async fn idle(&self) -> Result<()> {
        Ok(events::all_done(self.held().known()?).await?)
    }

    /// Takes the first `at` bytes off; `self` keeps the rest. Both know of the uses so far.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`](crate::Error::Limit) when `at` is above the length; `self` is unchanged.
    pub fn split_to(&mut self, at: usize) -> Result<Self> {
        let tail = self.split("split_to", at)?;
        Ok(std::mem::replace(self, tail))
    }

    /// Takes the bytes from `at` on off; `self` keeps the first `at`.
    ///
    /// # Errors
    ///
    /// As [`split_to`](Self::split_to).
    pub fn split_off(&mut self, at: usize) -> Result<Self> {
        self.split("split_off", at)
    }

    fn split(&mut self, operation: &'static str, at: usize) -> Result<Self> {
        let held = self.held_mut();
        let piece = held.piece.split_off(operation, at)?;
        held.ready = None;
        let mut uses = held.uses.lock().part(held.gpu.inner());
        // What is copied to the mirror for an operation that was given up must end before the bytes change.
        if let Some((event, _)) = &held.copying {
            uses.wrote_as_well(event.clone());
        }
        let (gpu, path, mirror) = (held.gpu.clone(), held.path, held.mirror.clone());
        let (allocation, scope) = (held.allocation.clone(), held.scope);
        Ok(Self::of(Held {
            piece,
            gpu,
            uses: Mutex::new(uses),
            path,
            mirror,
            allocation,
            scope,
            copying: None,
            ready: None,
            waits: false,
        }))
    }

    /// Joins two buffers that a split made of one: `other` begins where `self` ends.
    ///
    /// # Errors
    ///
    /// When they are not neighbours, or not parts of one original buffer. The error holds both.
    pub fn unsplit(mut self, mut other: Self) -> Result<Self, GpuUnsplitError> {
        self.settle_copy();
        other.settle_copy();
        let Some(tail) = other.held.take() else { return Ok(self) };
        let Held { piece, gpu, uses, path, mirror, allocation, scope, ready, .. } = *tail;
        match self.held_mut().piece.join(piece) {
            Ok(()) => {
                let uses = std::mem::take(&mut *uses.lock());
                let held = self.held_mut();
                held.uses.lock().join(gpu.inner(), uses);
                held.scope = held.scope.max(scope);
                held.ready = None;
                Ok(self)
            }
            Err((piece, why)) => {
                let (copying, waits) = (None, false);
                let other = Self::of(Held { piece, gpu, uses, path, mirror, allocation, scope, copying, ready, waits });
                Err(GpuUnsplitError { first: self, second: other, why })
            }
        }
    }

    /// The bytes are about to change: what was made ready, or is being made ready, is not what they will be.
    fn changes(&mut self) {
        self.settle_copy();
        self.held_mut().ready = None;
    }

    /// Counts the copy to the mirror among the uses.
    fn settle_copy(&mut self) {
        let held = self.held_mut();
        if let Some((event, _)) = held.copying.take() {
            held.uses.lock().wrote_as_well(event);
        }
    }

    /// Opens this memory to peers whose connection belongs to the same domain and that get to know the
    /// [`RemoteRegion`](crate::RemoteRegion) of it.
    ///
    /// # Errors
    ///
    /// [`Error::Gpu`](crate::Error::Gpu) with [`GpuError::Busy`] while the GPU uses it (await [`idle`](Self::idle) first), or when it is
    /// staged; and as [`Buffer::expose`](crate::Buffer::expose). The error gives the buffer back.
    pub fn expose(self, access: Access) -> Result<GpuExposedRegion, GpuExposeError> {
        GpuExposedRegion::new(self, access)
    }

    /// Whether [`idle`](Self::idle) would resolve at once.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn is_idle(&self) -> Result<bool> {
        for event in self.held().known()? {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(crate) fn piece(&self) -> &Piece {
        self.held().piece.piece()
    }

    /// The scatter/gather entry: the bytes, or their twins on the host.
    pub(crate) fn sge(&self) -> Option<Sge> {
        let held = self.held();
        match &held.mirror {
            None => held.piece.sge(),
            Some(mirror) => held.piece.sge_in(mirror.part(held.piece.offset(), held.piece.len())?),
        }
    }

    pub(crate) fn check_ready(&self, operation: &'static str, role: Role) -> Result<()> {
        match self.held().ready {
            Some(ready) if ready == role || ready == Role::Target && self.held().mirror.is_none() => Ok(()),
            _ => Err(GpuError::Busy { operation, hint: "await GpuBuffer::idle() first, or await the operation alone" }
                .into()),
        }
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        let Some(mut held) = self.held.take() else { return };
        let inner = held.gpu.inner().clone();
        let mut pending = std::mem::take(&mut *held.uses.lock()).into_pending(&inner);
        let copying = held.copying.take().map(|(event, _)| event);
        pending.events.extend(copying.filter(|event| matches!(event.is_done(), Ok(false))));
        if !pending.is_empty() {
            inner.reaper.retire(&inner.context, pending, held);
        }
    }
}

/// Where it is, not what is in it.
impl fmt::Debug for GpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuBuffer")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("len", &self.len())
            .field("path", &self.path())
            .field("gpu", &format_args!("{}", self.gpu()))
            .finish()
    }
}

/// [`GpuBuffer::unsplit`] refused, and gives both buffers back.
#[derive(Debug)]
pub struct GpuUnsplitError {
    first: GpuBuffer,
    second: GpuBuffer,
    why: &'static str,
}

impl GpuUnsplitError {
    /// The two buffers, in the order they were given.
    pub fn into_buffers(self) -> (GpuBuffer, GpuBuffer) {
        (self.first, self.second)
    }
}

impl fmt::Display for GpuUnsplitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unsplit: {}", self.why)
    }
}

impl std::error::Error for GpuUnsplitError {}

impl From<GpuUnsplitError> for crate::Error {
    fn from(error: GpuUnsplitError) -> Self {
        GpuError::Invalid { operation: "unsplit", reason: error.why.to_owned() }.into()
    }
}
