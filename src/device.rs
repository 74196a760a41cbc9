//! Devices: which there are, opening one, and what it can do.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::completion::queue::{CompletionQueue, Room};
use crate::completion::{CompletionMode, driver};
use crate::connection::keepalive::Keepalive;
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::provider::{Context, DeviceLimits, soft};

/// Names the device that [`Device::open_default`] opens, instead of the one it would choose.
pub const DEVICE_VARIABLE: &str = "TOKIO_RDMA_DEVICE";

/// The software device's name.
pub(crate) const SOFT: &str = "soft0";

/// What implements a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Provider {
    /// The software NIC of this crate: runs on any Linux machine.
    Soft,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Soft => f.write_str("software"),
        }
    }
}

/// A device that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The name to open it by.
    pub name: String,
    /// What implements it.
    pub provider: Provider,
}

/// An opened RDMA device. Cheap to clone; closed when the last handle and everything made from it are gone.
///
/// Each `open` is a context of its own, as with `ibv_open_device(3)`: its protection domains, keys and completion queues
/// are separate from those of another `open`. Open once and share it.
///
/// Completions are looked after by a task on the runtime in which the first connection was made. When that runtime ends,
/// every connection of this device ends with it ([`CloseReason::RuntimeGone`](crate::CloseReason::RuntimeGone)).
#[derive(Clone)]
pub struct Device {
    inner: Arc<DeviceInner>,
}

pub(crate) struct DeviceInner {
    context: Context,
    queues: Vec<Arc<CompletionQueue>>,
    next_queue: AtomicU64,
    keepalive: Arc<Keepalive>,
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        for queue in &self.queues {
            queue.kick.stop();
        }
    }
}

impl Device {
    /// The devices of this machine. The software device `soft0` is always among them.
    pub fn list() -> Vec<DeviceInfo> {
        vec![DeviceInfo { name: SOFT.into(), provider: Provider::Soft }]
    }

    /// Opens the device with this name, with the defaults of [`DeviceBuilder`].
    ///
    /// # Errors
    ///
    /// [`Error::UnknownDevice`] names the devices that exist.
    pub fn open(name: &str) -> Result<Self> {
        Self::builder(name).open()
    }

    /// Opens the device that `TOKIO_RDMA_DEVICE` names, or the best one: this machine's software device.
    ///
    /// Says in a tracing event which one it took, and why.
    pub fn open_default() -> Result<Self> {
        let (name, why) = match std::env::var_os(DEVICE_VARIABLE) {
            Some(name) => (name.to_string_lossy().into_owned(), "named by the environment"),
            None => (SOFT.to_owned(), "no RDMA NIC is supported by this build"),
        };
        let device = Self::open(&name)?;
        tracing::info!(device = device.name(), provider = %device.provider(), why, "opened the default device");
        Ok(device)
    }

    /// Settings for opening the device with this name.
    pub fn builder(name: &str) -> DeviceBuilder {
        DeviceBuilder::new(Source::Named(name.to_owned()))
    }

    /// The device's name, as in [`Device::list`].
    pub fn name(&self) -> &str {
        self.inner.context.name()
    }

    /// What implements this device.
    pub fn provider(&self) -> Provider {
        match self.inner.context {
            Context::Soft(_) => Provider::Soft,
        }
    }

    /// The sizes it supports.
    pub fn limits(&self) -> &DeviceLimits {
        self.inner.context.limits()
    }

    /// How its completions are waited for.
    pub fn completion_mode(&self) -> CompletionMode {
        self.inner.queues[0].mode()
    }

    /// A protection domain: memory registered in it works with connections made in it, and with no others.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        let pd = self.inner.context.alloc_pd()?;
        Ok(ProtectionDomain::new(pd, self.limits().clone(), self.inner.clone()))
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn keepalive(&self) -> &Arc<Keepalive> {
        &self.inner.keepalive
    }

    pub(crate) fn from_domain(domain: &ProtectionDomain) -> Option<Self> {
        let inner = domain.device().clone().downcast::<DeviceInner>().ok()?;
        Some(Self { inner })
    }

    /// Room for one more connection on one of the completion queues, with its driver running.
    pub(crate) fn reserve(&self, depth: u32) -> Result<Room> {
        let start = self.inner.next_queue.fetch_add(1, Ordering::Relaxed) as usize;
        let count = self.inner.queues.len();
        // The emptiest one; the rotating start breaks ties.
        let queue = (0..count)
            .map(|step| &self.inner.queues[(start + step) % count])
            .min_by_key(|queue| queue.load())
            .unwrap_or(&self.inner.queues[0]);
        let room = queue.reserve(depth, self.limits().max_cq_depth)?;
        driver::ensure(queue)?;
        Ok(room)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).field("provider", &self.provider()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) enum Source {
    Named(String),
    Soft { limits: DeviceLimits, faults: Option<soft::Faults> },
}

/// Settings of a device that is about to be opened.
#[derive(Debug)]
pub struct DeviceBuilder {
    source: Source,
    mode: CompletionMode,
    queues: usize,
}

impl DeviceBuilder {
    pub(crate) fn new(source: Source) -> Self {
        Self { source, mode: CompletionMode::default(), queues: 1 }
    }

    /// How completions are waited for. Default: [`CompletionMode::Adaptive`], since most waits are either very short or long.
    #[must_use]
    pub fn completion_mode(mut self, mode: CompletionMode) -> Self {
        self.mode = mode;
        self
    }

    /// How many completion queues the connections are spread over; each has a driver task of its own. Default: 1,
    /// which serves thousands of connections; more help when several workers are busy with completions at the same time.
    #[must_use]
    pub fn completion_queues(mut self, count: usize) -> Self {
        self.queues = count;
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownDevice`], or [`Error::Limit`] when a setting is out of range.
    pub fn open(self) -> Result<Device> {
        if !(1..=MAX_QUEUES).contains(&self.queues) {
            return Err(Error::Limit {
                operation: "open",
                what: "number of completion queues",
                value: self.queues as u64,
                limit: MAX_QUEUES as u64,
                hint: "at least 1; one serves thousands of connections",
            });
        }
        if let CompletionMode::PollingThread { cpu: Some(cpu) } = self.mode {
            if cpu >= rustix::thread::CpuSet::MAX_CPU {
                return Err(Error::Limit {
                    operation: "open",
                    what: "CPU number",
                    value: cpu as u64,
                    limit: rustix::thread::CpuSet::MAX_CPU as u64 - 1,
                    hint: "see /sys/devices/system/cpu",
                });
            }
        }
        let context = match self.source {
            Source::Named(name) if name == SOFT => Context::Soft(soft::Context::open(soft::default_limits(), None)?),
            Source::Named(name) => {
                let available = Device::list().into_iter().map(|device| device.name).collect();
                return Err(Error::UnknownDevice { name, available });
            }
            Source::Soft { limits, faults } => Context::Soft(soft::Context::open(limits, faults)?),
        };
        let queues =
            (0..self.queues).map(|_| CompletionQueue::new(&context, self.mode).map(Arc::new)).collect::<Result<_>>()?;
        Ok(Device {
            inner: Arc::new(DeviceInner { context, queues, next_queue: AtomicU64::new(0), keepalive: Arc::default() }),
        })
    }
}

/// More completion queues than CPUs bring nothing, and the largest hosts have fewer than this.
const MAX_QUEUES: usize = 1024;
