//! What the GPU was given to do with a buffer's bytes: the events that order its work and the NIC's.

use std::sync::Arc;
use std::task::{Context, Poll, ready};

use cudarc::driver::CudaStream;
use cudarc::driver::sys::CUstreamCaptureStatus;
use smallvec::SmallVec;

use super::device::Inner;
use super::driver;
use super::error::GpuError;
use super::events::Event;
use super::waiter::Waiting;
use crate::op::role::Role;

/// Finished ones are looked for when there are more than this.
const FEW: usize = 8;

type Events = SmallVec<[Event; 2]>;

/// Work on some bytes, as far as it may not have finished.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// The last write, and what came from elsewhere in its place. A later write waits for the earlier ones.
    writes: Events,
    /// Reads since then.
    reads: Events,
    /// Guards that have not ended: their work may still be being submitted.
    open: SmallVec<[Open; 1]>,
    next: u64,
    /// Recording an event failed: what the GPU does with the bytes is not known any more.
    broken: Option<GpuError>,
    waiting: Option<Waiting>,
}

/// What has to be waited for.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) events: Vec<Event>,
    /// Nobody knows what: all that the GPU has to do.
    pub(super) everything: bool,
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty() && !self.everything
    }
}

#[derive(Debug)]
struct Open {
    id: u64,
    stream: Arc<CudaStream>,
    writes: bool,
}

impl Uses {
    /// Makes `stream` wait for what its work on the bytes must come after. A writer has the buffer to itself.
    pub(super) fn begin(&mut self, gpu: &Inner, stream: &Arc<CudaStream>, writes: bool) -> Result<u64, GpuError> {
        if writes {
            self.close_forgotten(gpu)
        } else {
            self.close_forgotten_writer(gpu)
        }
        self.check()?;
        check_stream(gpu, stream)?;
        let reads = if writes { self.reads.as_slice() } else { &[] };
        for event in self.writes.iter().chain(reads) {
            event.hold(stream)?;
        }
        let id = self.next;
        self.next += 1;
        self.open.push(Open { id, stream: stream.clone(), writes });
        Ok(id)
    }

    /// Everything that the guard `id` allowed was submitted to its stream.
    pub(super) fn end(&mut self, gpu: &Inner, id: u64) {
        if let Some(at) = self.open.iter().position(|open| open.id == id) {
            let open = self.open.remove(at);
            self.record(gpu, &open);
        }
    }

    fn record(&mut self, gpu: &Inner, open: &Open) {
        match gpu.events.record(&open.stream) {
            Ok(event) if open.writes => self.wrote(event),
            Ok(event) => {
                prune(&mut self.reads);
                self.reads.push(event);
            }
            Err(error) => self.broken = Some(error),
        }
    }

    /// A write behind everything else.
    pub(super) fn wrote(&mut self, event: Event) {
        self.reads.clear();
        self.writes.clear();
        self.writes.push(event);
    }

    /// A write that nobody ordered after the others.
    pub(super) fn wrote_as_well(&mut self, event: Event) {
        prune(&mut self.writes);
        self.writes.push(event);
    }

    /// The uses of two neighbours, as those of both together.
    pub(super) fn join(&mut self, gpu: &Inner, mut other: Self) {
        self.close_forgotten(gpu);
        other.close_forgotten(gpu);
        join(&mut self.writes, other.writes);
        join(&mut self.reads, other.reads);
        self.broken = self.broken.take().or(other.broken);
    }

    /// The same for a part of the bytes.
    pub(super) fn part(&mut self, gpu: &Inner) -> Self {
        self.close_forgotten(gpu);
        Self { writes: self.writes.clone(), reads: self.reads.clone(), broken: self.broken.clone(), ..Self::default() }
    }

    /// What is under way, for who has the buffer to itself.
    pub(super) fn all(&mut self, gpu: &Inner) -> Result<Vec<Event>, GpuError> {
        self.close_forgotten(gpu);
        self.known(gpu)
    }

    /// What is under way, without the work of readers whose guard is alive: it may still be being submitted.
    pub(super) fn known(&mut self, gpu: &Inner) -> Result<Vec<Event>, GpuError> {
        self.close_forgotten_writer(gpu);
        self.check()?;
        Ok(self.writes.iter().chain(&self.reads).cloned().collect())
    }

    /// A guard that was forgotten still let work be submitted; what there is by now is all that it can have been.
    /// Only for who has the buffer to itself: otherwise a reader's guard may be alive, and end later.
    fn close_forgotten(&mut self, gpu: &Inner) {
        while let Some(open) = self.open.pop() {
            self.record(gpu, &open);
        }
    }

    /// A writer's guard has the buffer to itself: where anybody else asks, it is gone. Nobody was let in beside it.
    fn close_forgotten_writer(&mut self, gpu: &Inner) {
        if self.open.iter().any(|open| open.writes) {
            self.close_forgotten(gpu);
        }
    }

    fn check(&self) -> Result<(), GpuError> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// The next event that an operation of this role waits for.
    fn front(&mut self, role: Role) -> Option<&mut Events> {
        if !self.writes.is_empty() {
            return Some(&mut self.writes);
        }
        (role == Role::Target && !self.reads.is_empty()).then_some(&mut self.reads)
    }

    /// Resolves when a device may read (source) or write (target) the bytes.
    pub(super) fn poll_quiet(&mut self, gpu: &Inner, role: Role, cx: &mut Context<'_>) -> Poll<Result<(), GpuError>> {
        self.close_forgotten(gpu);
        self.check()?;
        let mut waiting = self.waiting.take();
        while let Some(events) = self.front(role) {
            let event = &events[events.len() - 1];
            match event.poll_done(&mut waiting, cx) {
                Poll::Pending => {
                    self.waiting = waiting;
                    return Poll::Pending;
                }
                done => ready!(done)?,
            }
            events.pop();
            waiting = None;
        }
        Poll::Ready(Ok(()))
    }

    /// Whether it would resolve at once.
    pub(super) fn is_quiet(&mut self, gpu: &Inner, role: Role) -> Result<bool, GpuError> {
        self.close_forgotten(gpu);
        self.check()?;
        while let Some(events) = self.front(role) {
            if !events[events.len() - 1].is_done()? {
                return Ok(false);
            }
            events.pop();
        }
        Ok(true)
    }

    /// What must be done before the memory is released; nothing when it may be right away.
    pub(super) fn into_pending(mut self, gpu: &Inner) -> Pending {
        self.close_forgotten(gpu);
        let all = self.writes.into_iter().chain(self.reads);
        let events = all.filter(|event| matches!(event.is_done(), Ok(false))).collect();
        Pending { events, everything: self.broken.is_some() }
    }
}

/// Forgets what is done, when there is much of it.
fn prune(events: &mut Events) {
    if events.len() >= FEW {
        events.retain(|event| !matches!(event.is_done(), Ok(true)));
    }
}

/// Each event once: two parts of a buffer have those from before the split in common.
fn join(events: &mut Events, others: Events) {
    for other in others {
        if !events.iter().any(|event| event.is(&other)) {
            events.push(other);
        }
    }
    prune(events);
}

/// Streams whose work can be told apart, and waited for, by events of this GPU.
fn check_stream(gpu: &Inner, stream: &CudaStream) -> Result<(), GpuError> {
    /// `CU_STREAM_PER_THREAD`: another stream for each thread that names it.
    const PER_THREAD: usize = 2;
    let invalid = |reason: &str| Err(GpuError::Invalid { operation: "use on a stream", reason: reason.to_owned() });
    if stream.context() != &gpu.context {
        return invalid("the stream belongs to another GPU or context than the buffer");
    }
    if stream.cu_stream() as usize == PER_THREAD {
        return invalid("the per-thread default stream is another one in each thread; make a stream");
    }
    let status = driver::own(&gpu.context, "cuStreamIsCapturing", || stream.capture_status())?;
    match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
        _ => invalid("the stream is capturing a graph, whose launches no event tells of"),
    }
}
