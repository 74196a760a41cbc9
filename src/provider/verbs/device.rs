//! Finding and opening devices.

use std::collections::HashMap;
use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use super::cm::EventChannel;
use super::events::Watcher;
use super::memory::Pd;
use super::pair::PairState;
use super::queue::Cq;
use super::{hints, sys};
use crate::error::{CloseReason, Error, Result, WcStatus};
use crate::provider::{DeviceLimits, Link};
use crate::sync::Mutex;

/// So often it is waited for in vain that a queue pair has no more receives of a shared queue: Soft-RoCE of
/// Linux 6.1 does not tell, and others may not of a queue pair that was never connected.
const UNTOLD: u32 = 2;

/// A device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) name: String,
    /// Whether one of its ports is up.
    pub(crate) active: bool,
}

/// The RDMA devices of this machine, or why that cannot be known.
pub(crate) fn devices() -> Result<Vec<Found>> {
    let list = List::new()?;
    let found = list.iter().map(|device| {
        // A device that cannot be opened is no device to prefer.
        let active = OpenDevice::open(list.verbs, device).is_ok_and(|device| device.active_port().is_some());
        Found { name: list.name(device), active }
    });
    Ok(found.collect())
}

/// Invariant: `raw` holds `count` devices, and is freed once.
struct List {
    raw: NonNull<*mut sys::ibv_device>,
    count: usize,
    verbs: &'static sys::Verbs,
}

impl List {
    fn new() -> Result<Self> {
        let verbs = sys::Verbs::get().map_err(|error| hints::not_loaded("find", error))?;
        let mut count = 0;
        // SAFETY: the result goes to a place of ours.
        let raw = unsafe { (verbs.ibv_get_device_list)(&raw mut count) };
        let Some(raw) = NonNull::new(raw) else {
            return Err(hints::last("list", "RDMA devices (is the kernel module ib_uverbs loaded?)"));
        };
        Ok(Self { raw, count: count.max(0) as usize, verbs })
    }

    fn iter(&self) -> impl Iterator<Item = *mut sys::ibv_device> {
        // SAFETY: by the invariant.
        unsafe { std::slice::from_raw_parts(self.raw.as_ptr(), self.count) }.iter().copied()
    }

    fn name(&self, device: *mut sys::ibv_device) -> String {
        device_name(self.verbs, device)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: by the invariant. Devices that were opened are kept by their contexts.
        unsafe { (self.verbs.ibv_free_device_list)(self.raw.as_ptr()) };
    }
}

/// `device` is of a list or of an open context.
fn device_name(verbs: &sys::Verbs, device: *mut sys::ibv_device) -> String {
    // SAFETY: the name is a string inside of the device.
    unsafe { CStr::from_ptr((verbs.ibv_get_device_name)(device)) }.to_string_lossy().into_owned()
}

/// An opened device.
#[derive(Clone, Debug)]
pub(crate) struct Context(Arc<ContextInner>);

/// What everything made of the device holds.
#[derive(Debug)]
pub(super) struct ContextInner {
    // Field order: the thread stops before the device is closed.
    _watcher: Watcher,
    device: Arc<OpenDevice>,
    name: String,
    limits: DeviceLimits,
}

/// The device itself; the thread that watches its events holds it too.
///
/// Invariant: `raw` is a live context, and closed after everything made in it is gone.
pub(super) struct OpenDevice {
    // Field order: the channel does not need the device, but ids that use it hold this.
    channel: Result<EventChannel, String>,
    /// Queue pairs by number, for events and completions, which name nothing else.
    pairs: Mutex<HashMap<u32, Weak<PairState>>>,
    raw: NonNull<sys::ibv_context>,
    verbs: &'static sys::Verbs,
    port_is_down: AtomicBool,
    is_gone: AtomicBool,
    /// How often in a row it was waited for in vain that a queue pair had no more receives of a shared queue.
    untold: AtomicU32,
    pub(super) port: u8,
    pub(super) port_attr: sys::ibv_port_attr,
    attr: sys::ibv_device_attr,
}

// SAFETY: the verbs may be called from any thread.
unsafe impl Send for OpenDevice {}
// SAFETY: as above.
unsafe impl Sync for OpenDevice {}

impl Context {
    /// Opens the device of this name; `None` where there is none, also for want of a library.
    /// With `pinned`, its thread runs on the CPUs near the device.
    pub(crate) fn open(name: &str, pinned: bool) -> Result<Option<Self>> {
        let Ok(list) = List::new() else { return Ok(None) };
        let Some(device) = list.iter().find(|&device| list.name(device) == name) else { return Ok(None) };
        let mut device = OpenDevice::open(list.verbs, device)?;
        device.channel = EventChannel::new();
        let limits = device.limits(name)?;
        let device = Arc::new(device);
        let cpus = if pinned { Some(crate::topology::local_cpus(name)?) } else { None };
        let watcher = Watcher::start(device.clone(), cpus)?;
        Ok(Some(Self(Arc::new(ContextInner { _watcher: watcher, device, name: name.to_owned(), limits }))))
    }

    pub(crate) fn name(&self) -> &str {
        &self.0.name
    }

    pub(crate) fn limits(&self) -> &DeviceLimits {
        &self.0.limits
    }

    /// The CPUs near the device.
    pub(crate) fn local_cpus(&self) -> Result<Vec<usize>> {
        crate::topology::local_cpus(self.name())
    }

    pub(crate) fn addresses(&self) -> Vec<std::net::IpAddr> {
        super::gid::addresses(self.0.device())
    }

    pub(crate) fn completion_vectors(&self) -> u32 {
        self.0.completion_vectors()
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd> {
        Pd::alloc(&self.0)
    }

    pub(crate) fn create_cq(&self, depth: u32, vector: u32) -> Result<Cq> {
        Cq::create(&self.0, depth, vector)
    }

    pub(super) fn inner(&self) -> &Arc<ContextInner> {
        &self.0
    }
}

impl ContextInner {
    pub(super) fn verbs(&self) -> &'static sys::Verbs {
        self.device.verbs
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.device.raw()
    }

    pub(super) fn device(&self) -> &Arc<OpenDevice> {
        &self.device
    }

    pub(super) fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    pub(super) fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is live.
        unsafe { (*self.raw()).num_comp_vectors }.max(1) as u32
    }
}

impl OpenDevice {
    fn open(verbs: &'static sys::Verbs, device: *mut sys::ibv_device) -> Result<Self> {
        let name = device_name(verbs, device);
        // SAFETY: the device is of a list that is not freed yet.
        let raw = unsafe { (verbs.ibv_open_device)(device) };
        let raw = NonNull::new(raw).ok_or_else(|| hints::last("open", &name))?;
        // SAFETY: integers, of which zero is a value.
        let (attr, port_attr) = unsafe { std::mem::zeroed() };
        let mut this = Self {
            channel: Err("not asked for".to_owned()),
            pairs: Mutex::default(),
            raw,
            verbs,
            port_is_down: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            untold: AtomicU32::new(0),
            port: 1,
            port_attr,
            attr,
        };
        // SAFETY: the context is live, and the result goes to a place of ours.
        let returned = unsafe { (verbs.ibv_query_device)(this.raw(), &raw mut this.attr) };
        hints::check(returned, "query", &name)?;
        this.port = this.active_port().unwrap_or(1);
        this.port_attr = this.query_port(this.port)?;
        this.port_is_down = AtomicBool::new(this.port_attr.state != sys::IBV_PORT_ACTIVE);
        rustix::io::ioctl_fionbio(this.async_fd(), true)
            .map_err(|error| Error::io("prepare", "the device's event channel", error.into()))?;
        Ok(this)
    }

    fn query_port(&self, port: u8) -> Result<sys::ibv_port_attr> {
        // SAFETY: integers, of which zero is a value.
        let mut attr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is live.
        let returned = unsafe { sys::ibv_query_port(self.verbs, self.raw(), port, &mut attr) };
        hints::check(returned, "query", format_args!("port {port}"))?;
        Ok(attr)
    }

    fn active_port(&self) -> Option<u8> {
        let active = |&port: &u8| self.query_port(port).is_ok_and(|attr| attr.state == sys::IBV_PORT_ACTIVE);
        (1..=self.attr.phys_port_cnt).find(active)
    }

    fn limits(&self, name: &str) -> Result<DeviceLimits> {
        let count = |value: i32| value.max(1) as u32;
        let attr = &self.attr;
        Ok(DeviceLimits {
            max_message: self.port_attr.max_msg_sz.into(),
            max_region: attr.max_mr_size,
            max_queue_depth: count(attr.max_qp_wr),
            max_sge: count(attr.max_sge),
            max_inline: self.probe_inline(name)?,
            max_rd_atomic: count(attr.max_qp_rd_atom.min(attr.max_qp_init_rd_atom)).min(255) as u8,
            max_cq_depth: count(attr.max_cqe),
            max_srq: attr.max_srq.max(0) as u32,
            max_srq_depth: attr.max_srq_wr.max(0) as u32,
            max_srq_sge: attr.max_srq_sge.max(0) as u32,
        })
    }

    /// No attribute says how much travels inline; queue pairs that ask for too much are refused.
    fn probe_inline(&self, name: &str) -> Result<u32> {
        const CANDIDATES: [u32; 4] = [256, 128, 64, 0];
        // SAFETY: all of it is made, used and destroyed here, in order.
        unsafe {
            let pd = (self.verbs.ibv_alloc_pd)(self.raw());
            let cq = (self.verbs.ibv_create_cq)(self.raw(), 1, ptr::null_mut(), ptr::null_mut(), 0);
            let taken = CANDIDATES.into_iter().find(|&inline| {
                let cap = sys::ibv_qp_cap {
                    max_send_wr: 1,
                    max_recv_wr: 1,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                };
                let mut init = sys::ibv_qp_init_attr {
                    send_cq: cq,
                    recv_cq: cq,
                    cap,
                    qp_type: sys::IBV_QPT_RC,
                    ..std::mem::zeroed()
                };
                if pd.is_null() || cq.is_null() {
                    return false;
                }
                let pair = (self.verbs.ibv_create_qp)(pd, &raw mut init);
                !pair.is_null() && (self.verbs.ibv_destroy_qp)(pair) == 0
            });
            let error = std::io::Error::last_os_error();
            if !cq.is_null() {
                (self.verbs.ibv_destroy_cq)(cq);
            }
            if !pd.is_null() {
                (self.verbs.ibv_dealloc_pd)(pd);
            }
            taken.ok_or_else(|| hints::creating(&format!("a first queue pair on {name}"), error))
        }
    }

    pub(super) fn raw(&self) -> *mut sys::ibv_context {
        self.raw.as_ptr()
    }

    pub(super) fn verbs(&self) -> &'static sys::Verbs {
        self.verbs
    }

    pub(super) fn name(&self) -> String {
        // SAFETY: an open context's device is live.
        device_name(self.verbs, unsafe { (*self.raw()).device })
    }

    pub(super) fn channel(&self) -> Result<&EventChannel> {
        let missing = |text: &String| Error::io("use", "RDMA CM", std::io::Error::other(text.clone()));
        self.channel.as_ref().map_err(missing)
    }

    pub(super) fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is live, and with it its descriptor.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    pub(super) fn link(&self) -> Link {
        // SAFETY: an open context's device is live.
        let transport = unsafe { (*(*self.raw()).device).transport_type };
        match (transport, self.port_attr.link_layer) {
            (sys::IBV_TRANSPORT_IWARP, _) => Link::Iwarp,
            (_, ETHERNET) => Link::Roce,
            _ => Link::InfiniBand,
        }
    }

    /// Whether another open context, RDMA CM's, is of the same device.
    ///
    /// # Safety
    ///
    /// `other` is live.
    pub(super) unsafe fn is(&self, other: *mut sys::ibv_context) -> bool {
        // SAFETY: the caller's promise, and an open context's device is live.
        unsafe { device_name(self.verbs, (*other).device) == self.name() }
    }

    pub(super) fn add(&self, pair: &Arc<PairState>) {
        self.pairs.lock().insert(pair.number(), Arc::downgrade(pair));
    }

    /// Forgets a queue pair, unless another one has its number by now.
    pub(super) fn remove(&self, pair: &Arc<PairState>) {
        let mut pairs = self.pairs.lock();
        if pairs.get(&pair.number()).is_some_and(|known| known.ptr_eq(&Arc::downgrade(pair))) {
            pairs.remove(&pair.number());
        }
    }

    /// The device was pulled out: the kernel has taken everything of it apart already.
    pub(super) fn gone(&self) {
        self.is_gone.store(true, Ordering::Release);
        self.fail_all(&CloseReason::Device("it was removed".into()));
    }

    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Whether it is worth waiting for the event that a queue pair has no more receives of a shared queue.
    pub(super) fn tells_of_last_receives(&self) -> bool {
        self.untold.load(Ordering::Relaxed) < UNTOLD && !self.is_gone()
    }

    pub(super) fn told_of_last_receive(&self, told: bool) {
        let untold = if told { 0 } else { self.untold.load(Ordering::Relaxed).saturating_add(1) };
        self.untold.store(untold, Ordering::Relaxed);
    }

    pub(super) fn pair(&self, number: u32) -> Option<Arc<PairState>> {
        self.pairs.lock().get(&number).and_then(Weak::upgrade)
    }

    /// Every queue pair fails.
    pub(super) fn fail_all(&self, reason: &CloseReason) {
        let pairs: Vec<_> = self.pairs.lock().values().filter_map(Weak::upgrade).collect();
        for pair in pairs {
            pair.fail_and_tell(reason.clone());
        }
    }

    /// The first failed completion says why; a flush says nothing, but perhaps an event does that nobody has read yet.
    pub(super) fn completion_failed(&self, number: u32, status: WcStatus) {
        let Some(pair) = self.pair(number) else { return };
        let unclear = [WcStatus::Flushed, WcStatus::RetryExceeded, WcStatus::LocalQpOperation].contains(&status);
        if unclear && pair.reason().is_none() {
            self.read_async_events();
        }
        pair.fail_and_tell(self.reason(status));
    }

    fn reason(&self, status: WcStatus) -> CloseReason {
        match status {
            // Nothing failed on this side before it, so it was the peer's request that did.
            WcStatus::Flushed => {
                CloseReason::Protocol("the device refused one of its requests, and does not say which".into())
            }
            // The second one is Soft-RoCE's, which finds no route any more.
            WcStatus::RetryExceeded | WcStatus::LocalQpOperation if self.port_is_down.load(Ordering::Relaxed) => {
                CloseReason::LinkLost(format!("port {} of {} is down", self.port, self.name()).into())
            }
            status => CloseReason::Failed(status),
        }
    }

    /// The port went down, or came up again.
    pub(super) fn port_changed(&self, port: u8, down: bool) {
        if port == self.port {
            self.port_is_down.store(down, Ordering::Relaxed);
        }
    }

    /// A greeting of a queue pair that is being connected has completed.
    pub(super) fn greeted(&self, number: u32, id: u64, status: WcStatus) {
        if let Some(pair) = self.pair(number) {
            pair.greeted().completed(id, status);
        }
    }
}

/// `IBV_LINK_LAYER_ETHERNET`, which is in an enum without a name.
pub(super) const ETHERNET: u8 = 2;

impl std::fmt::Debug for OpenDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OpenDevice").field("port", &self.port).finish_non_exhaustive()
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        // SAFETY: live by the invariant; whatever was made in it held the context, and is gone.
        let returned = unsafe { (self.verbs.ibv_close_device)(self.raw()) };
        if returned != 0 {
            tracing::error!(error = %hints::error_of(returned), "an RDMA device could not be closed");
        }
    }
}
