//! Registered memory of a GPU.
#![allow(unsafe_code)]

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytemuck::Pod;
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};

use super::allocation::Allocation;
use super::device::{GpuDevice, Inner};
use super::driver;
use super::error::GpuError;
use super::events::{self, Event};
use super::exposed::{GpuExposeError, GpuExposedRegion};
use super::guard::{GpuRead, GpuWrite};
use super::kind::MemoryKind;
use super::register::{self, GpuPath, PathPolicy, Registered};
use super::staging::Mirror;
use super::uses::{Pending, Uses};
use super::waiter::Waiting;
use crate::error::Result;
use crate::memory::device::DevicePiece;
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
/// Which [path](Self::path) the bytes take is decided when it is made, and nothing but the [`PathPolicy`] lets it be a slower one.
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

pub(super) struct Held {
    pub(super) piece: DevicePiece,
    pub(super) gpu: GpuDevice,
    pub(super) uses: Mutex<Uses>,
    path: GpuPath,
    mirror: Option<Arc<Mirror>>,
    /// Copying to the mirror, before an operation.
    copying: Option<(Event, Option<Waiting>)>,
    /// The operation that the bytes are ready for.
    ready: Option<Role>,
}

impl GpuBuffer {
    /// Allocates and registers `len` zeroed bytes on the GPU, by a direct path: see [`PathPolicy::Direct`].
    ///
    /// The memory is mapped in units of 2 MiB on the GPUs of today, however short the buffer (of 64 KiB, by `cuMemAlloc`, where a GPU
    /// cannot map). Both allocating and registering cost far more than an operation: do it ahead of time, and
    /// [split](Self::split_to) large buffers rather than making many small ones.
    ///
    /// # Errors
    ///
    /// [`Error::Limit`](crate::Error::Limit) when `len` is 0 or above the device's [`max_region`](crate::DeviceLimits::max_region);
    /// [`Error::Gpu`](crate::Error::Gpu) when there is no memory, or no path, with the reason for each that was tried.
    pub fn alloc(gpu: &GpuDevice, domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::alloc_with(gpu, domain, len, PathPolicy::default())
    }

    /// The same by a path that `policy` allows.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc).
    pub fn alloc_with(gpu: &GpuDevice, domain: &ProtectionDomain, len: usize, policy: PathPolicy) -> Result<Self> {
        domain.check_length("alloc", len as u64)?;
        let memory = Allocation::new(gpu.inner(), len)?;
        let address = memory.address();
        Self::register(gpu, domain, (address, len), MemoryKind::Device, policy, Box::new(memory))
    }

    /// Registers memory that cudarc allocated, without copying it. It is freed, on its own stream, when the last buffer made of it is gone.
    ///
    /// What cudarc knows of uses of the slice is awaited before the first operation. cudarc's `alloc` takes memory from the
    /// stream-ordered pool where the GPU has one, which no NIC can be given: then it takes [`PathPolicy::AllowStaging`].
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc), and [`GpuError::Unfit`] with the kind of memory. The error gives the slice back.
    pub fn from_slice<T: Pod + Send + Sync>(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        mut slice: CudaSlice<T>,
        policy: PathPolicy,
    ) -> Result<Self, FromSliceError<T>> {
        match Self::prepare_slice(gpu, domain, &mut slice, policy) {
            Ok((range, registered, event)) => {
                let owner = Box::new(SliceOwner { slice: ManuallyDrop::new(slice), gpu: gpu.inner().clone() });
                match Self::assemble(gpu, domain, range, registered, owner) {
                    Ok(mut buffer) => {
                        buffer.held_mut().uses.lock().wrote(event);
                        Ok(buffer)
                    }
                    // Only for an address of 0, which no slice that passed the checks has.
                    Err(error) => Err(FromSliceError::new(error, None)),
                }
            }
            Err(error) => Err(FromSliceError::new(error, Some(slice))),
        }
    }

    fn prepare_slice<T: Pod>(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        slice: &mut CudaSlice<T>,
        policy: PathPolicy,
    ) -> Result<((u64, usize), Registered, Event)> {
        const FROM_SLICE: &str = "from_slice";
        let inner = gpu.inner();
        let len = slice.num_bytes();
        domain.check_length(FROM_SLICE, len as u64)?;
        if slice.context() != &inner.context {
            return Err(foreign_slice(FROM_SLICE, gpu, slice));
        }
        let context = &inner.context;
        let stream = driver::own(context, "cuStreamCreate", || context.new_stream())?;
        let allocated_on = slice.stream().clone();
        // Behind all that cudarc has noted of the slice, and all of the stream that it was allocated on.
        let address = {
            let (address, _noted) = slice.device_ptr_mut(&stream);
            address
        };
        driver::own(context, "cuStreamWaitEvent", || stream.join(&allocated_on))?;
        let event = inner.events.record(&stream)?;
        let kind = classify(gpu, FROM_SLICE, address)?;
        let registered = register::register(gpu, domain, (address, len), kind, policy)?;
        Ok(((address, len), registered, event))
    }

    /// Registers memory of this GPU that comes from elsewhere: candle, DLPack, torch, an allocator of the program's own.
    ///
    /// `owner` keeps it allocated, and is dropped after the memory was deregistered, when the last buffer made of it is gone
    /// (or right away when registering fails), on whichever thread that happens.
    ///
    /// Work on the bytes that is under way is not known: tell of it with [`ready_after`](Self::ready_after).
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc), and [`GpuError::Unfit`] with the kind of memory when it is not this GPU's own, or not fit for
    /// the paths that `policy` allows.
    ///
    /// # Safety
    ///
    /// From this call until `owner` is dropped:
    /// - `address` is valid for `len` bytes of device memory in one allocation, or in one that is mapped without gaps;
    /// - nobody uses these bytes other than through the returned buffer and what is made of it, except for work that
    ///   `ready_after` was told of before the first operation.
    pub unsafe fn from_raw(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        address: u64,
        len: usize,
        owner: impl Send + Sync + 'static,
        policy: PathPolicy,
    ) -> Result<Self> {
        const FROM_RAW: &str = "from_raw";
        domain.check_length(FROM_RAW, len as u64)?;
        let kind = classify(gpu, FROM_RAW, address)?;
        let inner = gpu.inner();
        if kind == MemoryKind::Device {
            let (base, size) = inner.driver.address_range(address)?;
            if len as u64 > (base + size as u64).saturating_sub(address) {
                let reason = format!("{len} bytes at {address:#x} go beyond the allocation, {size} bytes at {base:#x}");
                return Err(GpuError::Invalid { operation: FROM_RAW, reason }.into());
            }
        }
        Self::register(gpu, domain, (address, len), kind, policy, Box::new(owner))
    }

    fn register(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        range: (u64, usize),
        kind: MemoryKind,
        policy: PathPolicy,
        owner: Box<dyn Send + Sync>,
    ) -> Result<Self> {
        let registered = register::register(gpu, domain, range, kind, policy)?;
        Self::assemble(gpu, domain, range, registered, owner)
    }

    fn assemble(
        gpu: &GpuDevice,
        domain: &ProtectionDomain,
        range: (u64, usize),
        Registered { path, mr, mirror }: Registered,
        owner: Box<dyn Send + Sync>,
    ) -> Result<Self> {
        let piece = DevicePiece::whole(domain, range, mr, owner)?;
        tracing::debug!(gpu = %gpu, address = range.0, len = range.1, %path, "GPU memory registered");
        let uses = Mutex::default();
        Ok(Self::of(Held { piece, gpu: gpu.clone(), uses, path, mirror, copying: None, ready: None }))
    }

    fn of(held: Held) -> Self {
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
        Ok(Self::of(Held { piece, gpu, uses: Mutex::new(uses), path, mirror, copying: None, ready: None }))
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
        let Held { piece, gpu, uses, path, mirror, ready, .. } = *tail;
        match self.held_mut().piece.join(piece) {
            Ok(()) => {
                let uses = std::mem::take(&mut *uses.lock());
                let held = self.held_mut();
                held.uses.lock().join(gpu.inner(), uses);
                held.ready = None;
                Ok(self)
            }
            Err((piece, why)) => {
                let other = Self::of(Held { piece, gpu, uses, path, mirror, copying: None, ready });
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

impl Held {
    /// The GPU's work that is under way, and the copies of this crate's own.
    fn known(&self) -> Result<Vec<Event>, GpuError> {
        let mut events = self.uses.lock().known(self.gpu.inner())?;
        events.extend(self.copying.iter().map(|(event, _)| event.clone()));
        Ok(events)
    }

    /// Whether there is none, and can be none any more through guards.
    pub(super) fn is_quiet(&mut self) -> Result<bool, GpuError> {
        self.forget_copy()?;
        Ok(self.copying.is_none() && self.uses.lock().is_quiet(self.gpu.inner(), Role::Target)?)
    }

    /// A copy for an operation that was given up has no bearing on anything once it is done.
    fn forget_copy(&mut self) -> Result<(), GpuError> {
        if let Some((event, _)) = &self.copying {
            if event.is_done()? {
                self.copying = None;
            }
        }
        Ok(())
    }

    /// Resolves when the operation may be posted.
    pub(super) fn poll_ready(&mut self, role: Role, cx: &mut Context<'_>) -> Poll<Result<(), GpuError>> {
        let inner = self.gpu.inner();
        // In any case: since it was made ready for an operation that did not come about, the GPU may have got to read it.
        ready!(self.uses.lock().poll_quiet(inner, role, cx))?;
        if self.ready == Some(role) {
            return Poll::Ready(Ok(()));
        }
        if self.copying.is_none() {
            if let (Role::Source, Some(mirror)) = (role, &self.mirror) {
                let event = mirror.fetch(inner, self.piece.address(), self.piece.offset(), self.piece.len())?;
                self.copying = Some((event, None));
            }
        }
        if let Some((event, waiting)) = &mut self.copying {
            ready!(event.poll_done(waiting, cx))?;
            self.copying = None;
        }
        self.ready = Some(role);
        Poll::Ready(Ok(()))
    }

    pub(super) fn try_ready(&mut self, operation: &'static str, role: Role) -> Result<(), GpuError> {
        // What it was made ready for may not have come about, and the GPU may have got to read it since.
        let was_ready = self.ready.take();
        self.forget_copy()?;
        let quiet = self.uses.lock().is_quiet(self.gpu.inner(), role)?;
        if quiet && was_ready == Some(role) {
            self.ready = was_ready;
            return Ok(());
        }
        let staged_source = role == Role::Source && self.mirror.is_some();
        if staged_source || self.copying.is_some() {
            let hint = "the bytes are staged, and have to be copied first: await the operation";
            return Err(GpuError::Busy { operation, hint });
        }
        if !quiet {
            return Err(GpuError::Busy { operation, hint: "await GpuBuffer::idle() first, or the operation" });
        }
        self.ready = Some(role);
        Ok(())
    }

    /// The device has written `len` bytes: starts whatever else it takes until the GPU sees them. The event is what remains.
    pub(super) fn land(&mut self, len: usize) -> Result<Option<Event>, GpuError> {
        let inner = self.gpu.inner().clone();
        match self.path {
            // The software device completes when its own copies have.
            GpuPath::Software => Ok(None),
            GpuPath::DmaBuf | GpuPath::PeerMemory => {
                inner.bind()?;
                inner.visibility().establish(inner.driver)?;
                Ok(None)
            }
            GpuPath::Staged => {
                let Some(mirror) = self.mirror.as_ref().filter(|_| len > 0) else { return Ok(None) };
                let len = len.min(self.piece.len());
                let event = mirror.store(&inner, self.piece.offset(), self.piece.address(), len)?;
                self.uses.lock().wrote(event.clone());
                Ok(Some(event))
            }
        }
    }

    pub(super) fn reset_ready(&mut self) {
        self.ready = None;
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

/// A slice of cudarc's. Dropping it may wait for its stream, so that is done elsewhere.
struct SliceOwner<T: Send + 'static> {
    slice: ManuallyDrop<CudaSlice<T>>,
    gpu: Arc<Inner>,
}

impl<T: Send + 'static> Drop for SliceOwner<T> {
    fn drop(&mut self) {
        // SAFETY: not used afterwards.
        let slice = Some(unsafe { ManuallyDrop::take(&mut self.slice) });
        self.gpu.reaper.retire(&self.gpu.context, Pending::default(), Box::new(Slice(slice)));
    }
}

/// Frees itself where its context is current.
struct Slice<T>(Option<CudaSlice<T>>);

impl<T> Drop for Slice<T> {
    fn drop(&mut self) {
        let Some(slice) = self.0.take() else { return };
        if let Err(error) = driver::make_current(slice.context()) {
            tracing::warn!(%error, "the context of GPU memory that is to be freed cannot be used");
        }
        drop(slice);
    }
}

fn classify(gpu: &GpuDevice, operation: &'static str, address: u64) -> Result<MemoryKind, GpuError> {
    let inner = gpu.inner();
    inner.bind()?;
    let kind = MemoryKind::of(inner.driver, inner.capabilities().ordinal, address);
    match kind.of_this_gpu() {
        true => Ok(kind),
        false => Err(GpuError::Unfit { operation, address, kind, hint: kind.hint() }),
    }
}

/// A slice of another context, whose events this one's streams cannot record.
fn foreign_slice<T>(operation: &'static str, gpu: &GpuDevice, slice: &CudaSlice<T>) -> crate::Error {
    let (address, _noted) = slice.device_ptr(slice.stream());
    let other = slice.ordinal();
    if other == gpu.capabilities().ordinal {
        let reason =
            "the slice belongs to another context of this GPU; open that with GpuDevice::from_context".to_owned();
        return GpuError::Invalid { operation, reason }.into();
    }
    let kind = MemoryKind::OtherGpu(other as u32);
    GpuError::Unfit { operation, address, kind, hint: kind.hint() }.into()
}

/// [`GpuBuffer::from_slice`] failed, and gives the slice back.
pub struct FromSliceError<T> {
    // Apart, so that results without it are small.
    failed: Box<(crate::Error, Option<CudaSlice<T>>)>,
}

impl<T> FromSliceError<T> {
    /// What went wrong.
    pub fn error(&self) -> &crate::Error {
        &self.failed.0
    }

    /// What went wrong, and the slice.
    pub fn into_parts(self) -> (crate::Error, Option<CudaSlice<T>>) {
        *self.failed
    }

    fn new(error: crate::Error, slice: Option<CudaSlice<T>>) -> Self {
        Self { failed: Box::new((error, slice)) }
    }
}

impl<T> fmt::Debug for FromSliceError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FromSliceError").field("error", self.error()).finish_non_exhaustive()
    }
}

impl<T> fmt::Display for FromSliceError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl<T> std::error::Error for FromSliceError<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error().source()
    }
}

impl<T> From<FromSliceError<T>> for crate::Error {
    fn from(failed: FromSliceError<T>) -> Self {
        failed.into_parts().0
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
