//! What a buffer holds, and making it ready for a device and back for the GPU.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use super::allocation::Allocation;
use super::device::GpuDevice;
use super::error::GpuError;
use super::events::Event;
use super::register::GpuPath;
use super::staging::Mirror;
use super::uses::Uses;
use super::visibility::VisibilityScope;
use super::waiter::Waiting;
use crate::memory::device::DevicePiece;
use crate::meters::GpuWait;
use crate::op::role::Role;
use crate::sync::Mutex;

/// Bytes of the GPU's memory, and what is under way on them.
pub(super) struct Held {
    pub(super) piece: DevicePiece,
    pub(super) gpu: GpuDevice,
    pub(super) uses: Mutex<Uses>,
    pub(super) path: GpuPath,
    pub(super) mirror: Option<Arc<Mirror>>,
    /// Where the memory was made here.
    pub(super) allocation: Option<Arc<Allocation>>,
    pub(super) scope: VisibilityScope,
    /// Copying to the mirror, before an operation.
    pub(super) copying: Option<(Event, Option<Waiting>)>,
    /// The operation that the bytes are ready for.
    pub(super) ready: Option<Role>,
    /// The operation that waits for the GPU was counted.
    pub(super) waits: bool,
}

impl Held {
    /// The GPU's work that is under way, and the copies of this crate's own.
    pub(super) fn known(&self) -> Result<Vec<Event>, GpuError> {
        let mut events = self.uses.lock().known(self.gpu.inner())?;
        events.extend(self.copying.iter().map(|(event, _)| event.clone()));
        Ok(events)
    }

    /// The allocation, if these are all of its bytes and other processes can be given it.
    pub(super) fn shareable(&self) -> Option<&Arc<Allocation>> {
        let is_whole = self.piece.offset() == 0 && self.piece.len() == self.piece.region().len();
        self.allocation.as_ref().filter(|allocation| is_whole && allocation.is_shareable(self.gpu.inner()))
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
        let ready = self.poll_made_ready(role, cx);
        let waited = std::mem::replace(&mut self.waits, ready.is_pending());
        if self.waits && !waited {
            self.piece.region().domain().meters().gpu_wait(GpuWait::Idle);
        }
        ready
    }

    fn poll_made_ready(&mut self, role: Role, cx: &mut Context<'_>) -> Poll<Result<(), GpuError>> {
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
                inner.make_visible(self.scope)?;
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
