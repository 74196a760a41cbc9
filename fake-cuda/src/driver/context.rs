//! Contexts: a device's only, primary one, its streams and the error that it does not recover from.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use super::registry::Registry;
use super::stream::Stream;
use super::{Code, Out, Result, device, driver, event, hooks, launch, lock, memory, stream};

/// `CU_CTX_SYNC_MEMOPS`: copies that return early must not.
const SYNC_MEMOPS: u32 = 0x80;

/// A device's primary context, from its first retain to its last release.
pub(super) struct Context {
    pub(super) handle: usize,
    pub(super) device: usize,
    flags: AtomicU32,
    /// The status that every later call returns, or 0.
    fault: AtomicU32,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    default: Option<Arc<Stream>>,
    per_thread: Option<Arc<Stream>>,
    /// All that may have something to do, destroyed ones too.
    all: Vec<Arc<Stream>>,
}

static CONTEXTS: Registry<Context> = Registry::new("context", 0xC000_0000);

thread_local! {
    /// The handles of the thread's stack of contexts.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

impl Context {
    pub(super) fn create(device: usize) -> Arc<Self> {
        CONTEXTS.insert(|handle| Self {
            handle,
            device,
            flags: AtomicU32::new(0),
            fault: AtomicU32::new(0),
            streams: Mutex::default(),
        })
    }

    /// The error that an earlier operation has left.
    pub(super) fn check(&self) -> Result {
        match self.fault.load(SeqCst) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Breaks the context. The first error stays.
    pub(super) fn break_with(&self, Code(code): Code) {
        let _ = self.fault.compare_exchange(0, code, SeqCst, SeqCst);
    }

    /// Whether all operations of the context are to wait that might not.
    pub(super) fn sync_memops(&self) -> bool {
        self.flags.load(SeqCst) & SYNC_MEMOPS != 0
    }

    pub(super) fn flags(&self) -> u32 {
        self.flags.load(SeqCst)
    }

    /// The stream that has no handle.
    pub(super) fn default_stream(self: &Arc<Self>) -> Arc<Stream> {
        self.standing_stream(|streams| &mut streams.default)
    }

    /// The stream that stands for each thread's own; here, all threads share it.
    pub(super) fn per_thread_stream(self: &Arc<Self>) -> Arc<Stream> {
        self.standing_stream(|streams| &mut streams.per_thread)
    }

    fn standing_stream(self: &Arc<Self>, which: impl Fn(&mut Streams) -> &mut Option<Arc<Stream>>) -> Arc<Stream> {
        let mut streams = lock(&self.streams);
        if let Some(stream) = which(&mut streams) {
            return stream.clone();
        }
        let stream = Arc::new(Stream::start(0, self.clone(), 0, 0));
        *which(&mut streams) = Some(stream.clone());
        streams.all.push(stream.clone());
        stream
    }

    /// Remembers a stream, so that waiting for the context waits for it.
    pub(super) fn adopt(&self, stream: Arc<Stream>) {
        let mut streams = lock(&self.streams);
        streams.all.retain(|stream| stream.is_alive() || !stream.is_idle());
        streams.all.push(stream);
    }

    /// Waits for all that has been submitted to any stream.
    pub(super) fn synchronize(&self) -> Result {
        let streams = lock(&self.streams).all.clone();
        for stream in streams {
            stream.wait();
        }
        self.check()
    }

    /// Ends the context and all that belongs to it.
    pub(super) fn destroy(&self) {
        let _ = self.synchronize();
        let mine = self.handle;
        let leaked = event::purge(mine) + stream::purge(mine) + memory::purge(mine) + launch::purge(mine);
        hooks::count("leaked", leaked);
        *lock(&self.streams) = Streams::default();
        CONTEXTS.purge(|context| context.handle == mine);
    }
}

/// The calling thread's context, broken or not.
pub(super) fn current() -> Result<Arc<Context>> {
    device::check_initialized()?;
    let handle = CURRENT.with_borrow(|stack| stack.last().copied()).filter(|&handle| handle != 0);
    find(handle.ok_or(Code::INVALID_CONTEXT)?)
}

/// The calling thread's context, which must not be broken.
pub(super) fn usable() -> Result<Arc<Context>> {
    let context = current()?;
    context.check()?;
    Ok(context)
}

/// The context of a handle.
pub(super) fn find(handle: usize) -> Result<Arc<Context>> {
    CONTEXTS.find(handle).ok_or(if handle == 0 { Code::INVALID_CONTEXT } else { Code::CONTEXT_IS_DESTROYED })
}

pub(super) fn live() -> u64 {
    CONTEXTS.count()
}

driver! {
    fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: i32) {
        context.put(device::get(device)?.retain().handle)
    }

    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        device::get(device)?.release()
    }

    fn cuDevicePrimaryCtxReset_v2(device: i32) {
        device::get(device)?.reset();
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let context = device::get(device)?.primary();
        flags.put(context.as_ref().map_or(0, |context| context.flags()))?;
        active.put(i32::from(context.is_some()))
    }

    fn cuCtxGetCurrent(context: Out<usize>) {
        device::check_initialized()?;
        context.put(CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0)))
    }

    fn cuCtxSetCurrent(context: usize) {
        device::check_initialized()?;
        if context != 0 {
            find(context)?;
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            stack.push(context);
        });
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: usize) {
        find(context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: Out<usize>) {
        let top = CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        context.put_if_wanted(top)
    }

    fn cuCtxGetDevice(device: Out<i32>) {
        device.put(current()?.device as i32)
    }

    fn cuCtxGetApiVersion(context: usize, version: Out<u32>) {
        find(context)?;
        version.put(3020)
    }

    fn cuCtxSynchronize() {
        usable()?.synchronize()
    }

    fn cuCtxSetFlags(flags: u32) {
        // Scheduling, mapping, local memory, core dumps and SYNC_MEMOPS.
        if flags & !0xff != 0 {
            return Err(Code::INVALID_VALUE);
        }
        usable()?.flags.store(flags, SeqCst);
        Ok(())
    }

    fn cuCtxGetFlags(flags: Out<u32>) {
        flags.put(current()?.flags())
    }

    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        usable()?;
        least.put_if_wanted(0)?;
        greatest.put_if_wanted(stream::GREATEST_PRIORITY)
    }

    fn cuCtxEnablePeerAccess(peer: usize, _flags: u32) {
        usable()?;
        find(peer).map(|_| ())
    }
}
