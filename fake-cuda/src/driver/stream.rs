//! Streams: each a thread that carries out operations in their order.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use super::context::{self, Context};
use super::registry::Registry;
use super::{Code, Out, Result, driver, hooks, lock};

/// Priorities are 0 down to this.
pub(super) const GREATEST_PRIORITY: i32 = -5;

/// A queue of operations.
pub(super) struct Stream {
    pub(super) handle: usize,
    pub(super) context: Arc<Context>,
    flags: u32,
    priority: i32,
    queue: Mutex<Sender<Work>>,
    progress: Arc<Progress>,
}

/// An operation whose turn will come.
struct Work {
    /// By which name a test can let it fail.
    what: &'static str,
    /// Runs even if the context is broken: others wait for it.
    always: bool,
    run: Box<dyn FnOnce() -> Result + Send>,
}

/// How many operations were submitted, and how many are done.
#[derive(Default)]
struct Progress {
    counts: Mutex<(u64, u64)>,
    changed: Condvar,
}

static STREAMS: Registry<Stream> = Registry::new("stream", 0x5000_0000);

impl Stream {
    /// A stream with its thread, which ends with it, once all is done.
    pub(super) fn start(handle: usize, context: Arc<Context>, flags: u32, priority: i32) -> Self {
        let (queue, work) = channel();
        let progress = Arc::new(Progress::default());
        let (thread_context, thread_progress) = (context.clone(), progress.clone());
        thread::Builder::new()
            .name("fake-cuda".into())
            .spawn(move || carry_out(&work, &thread_context, &thread_progress))
            .expect("the system has threads left");
        Self { handle, context, flags, priority, queue: Mutex::new(queue), progress }
    }

    /// Queues an operation that a broken context does not carry out.
    pub(super) fn submit(&self, what: &'static str, run: impl FnOnce() -> Result + Send + 'static) {
        self.push(Work { what, always: false, run: Box::new(run) });
    }

    /// Queues an operation that others wait for.
    pub(super) fn submit_always(&self, what: &'static str, run: impl FnOnce() + Send + 'static) {
        let run = Box::new(|| {
            run();
            Ok(())
        });
        self.push(Work { what, always: true, run });
    }

    fn push(&self, work: Work) {
        let queue = lock(&self.queue);
        lock(&self.progress.counts).0 += 1;
        queue.send(work).expect("the thread ends after the stream");
    }

    /// Waits for all that has been submitted by now.
    pub(super) fn wait(&self) {
        let mut counts = lock(&self.progress.counts);
        let (submitted, _) = *counts;
        while counts.1 < submitted {
            counts = self.progress.changed.wait(counts).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        let (submitted, done) = *lock(&self.progress.counts);
        submitted == done
    }

    /// Whether the program may still use it.
    pub(super) fn is_alive(&self) -> bool {
        self.handle == 0 || STREAMS.find(self.handle).is_some()
    }
}

/// The thread of a stream.
fn carry_out(work: &Receiver<Work>, context: &Context, progress: &Progress) {
    for Work { what, always, run } in work {
        let broken = context.check().is_err();
        let wanted = if broken { Ok(()) } else { hooks::enter(what) };
        let run = || if always || (wanted.is_ok() && !broken) { run() } else { Ok(()) };
        // Whoever waits for this operation would wait forever.
        let done = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| std::process::abort());
        if let Err(code) = wanted.and(done) {
            context.break_with(code);
        }
        lock(&progress.counts).1 += 1;
        progress.changed.notify_all();
    }
}

/// The stream of a handle that the program passes. It and its context must be alive.
pub(super) fn get(handle: usize) -> Result<Arc<Stream>> {
    let stream = match handle {
        // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD have fixed handles.
        0 | 1 => context::usable()?.default_stream(),
        2 => context::usable()?.per_thread_stream(),
        _ => STREAMS.get(handle)?,
    };
    stream.context.check()?;
    Ok(stream)
}

pub(super) fn live() -> u64 {
    STREAMS.count()
}

/// Forgets a context's streams, and says how many the program had left.
pub(super) fn purge(context: usize) -> u64 {
    STREAMS.purge(|stream| stream.context.handle == context)
}

fn create(handle_out: Out<usize>, flags: u32, priority: i32) -> Result {
    let context = context::usable()?;
    // CU_STREAM_NON_BLOCKING is the only flag.
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    let priority = priority.clamp(GREATEST_PRIORITY, 0);
    let stream = STREAMS.insert(|handle| Stream::start(handle, context.clone(), flags, priority));
    context.adopt(stream.clone());
    handle_out.put(stream.handle)
}

driver! {
    fn cuStreamCreate(stream: Out<usize>, flags: u32) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: Out<usize>, flags: u32, priority: i32) {
        create(stream, flags, priority)
    }

    // What it still has to do, it does.
    fn cuStreamDestroy_v2(stream: usize) {
        if stream <= 2 {
            return Err(Code::INVALID_HANDLE);
        }
        STREAMS.remove(stream)?.context.check()
    }

    fn cuStreamQuery(stream: usize) {
        let stream = get(stream)?;
        let idle = stream.is_idle();
        stream.context.check()?;
        if idle { Ok(()) } else { Err(Code::NOT_READY) }
    }

    fn cuStreamSynchronize(stream: usize) {
        let stream = get(stream)?;
        stream.wait();
        stream.context.check()
    }

    fn cuStreamGetCtx(stream: usize, context: Out<usize>) {
        context.put(get(stream)?.context.handle)
    }

    fn cuStreamGetFlags(stream: usize, flags: Out<u32>) {
        flags.put(get(stream)?.flags)
    }

    fn cuStreamGetPriority(stream: usize, priority: Out<i32>) {
        priority.put(get(stream)?.priority)
    }

    fn cuStreamIsCapturing(stream: usize, status: Out<u32>) {
        get(stream)?;
        status.put(0)
    }

    fn cuStreamAttachMemAsync(stream: usize, _address: u64, _len: usize, _flags: u32) {
        get(stream).map(|_| ())
    }

    fn cuLaunchHostFunc(stream: usize, function: Option<extern "C" fn(*mut c_void)>, data: usize) {
        let stream = get(stream)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        stream.submit("host function", move || {
            function(data as *mut c_void);
            Ok(())
        });
        Ok(())
    }
}
