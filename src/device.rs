//! Devices: which there are, opening one, and what it can do.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::address::Address;
use crate::completion::queue::{CompletionQueue, Room};
use crate::completion::{CompletionMode, driver};
use crate::connection::keepalive::Keepalive;
use crate::error::{Error, Result};
use crate::memory::ProtectionDomain;
use crate::meters::Meters;
use crate::provider::{Context, DeviceLimits, soft, verbs};

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
    /// An RDMA NIC (or the kernel's Soft-RoCE), by way of libibverbs.
    Verbs,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Soft => f.write_str("software"),
            Self::Verbs => f.write_str("verbs"),
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
    meters: Meters,
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        for queue in &self.queues {
            queue.kick.stop();
        }
    }
}

impl Device {
    /// The devices of this machine: RDMA NICs, those with a port that is up first, and then the software device `soft0`,
    /// which always exists.
    pub fn list() -> Vec<DeviceInfo> {
        let nics = verbs::devices().unwrap_or_else(|error| {
            tracing::debug!(%error, "no RDMA NICs");
            Vec::new()
        });
        let (up, down): (Vec<_>, Vec<_>) = nics.into_iter().partition(|nic| nic.active);
        let nics = up.into_iter().chain(down).map(|nic| DeviceInfo { name: nic.name, provider: Provider::Verbs });
        nics.chain([DeviceInfo { name: SOFT.into(), provider: Provider::Soft }]).collect()
    }

    /// Opens the device with this name, with the defaults of [`DeviceBuilder`].
    ///
    /// # Errors
    ///
    /// [`Error::UnknownDevice`] names the devices that exist.
    pub fn open(name: &str) -> Result<Self> {
        Self::builder(name).open()
    }

    /// Opens the device that `TOKIO_RDMA_DEVICE` names, or the best one: the first RDMA NIC with a port that is up,
    /// or else this machine's software device.
    ///
    /// Says in a tracing event which one it took, and why.
    pub fn open_default() -> Result<Self> {
        let named = std::env::var_os(DEVICE_VARIABLE).filter(|name| !name.is_empty());
        let (name, why) = match named {
            Some(name) => (name.to_string_lossy().into_owned(), "named by the environment".to_owned()),
            None => match verbs::devices() {
                Ok(nics) => match nics.into_iter().find(|nic| nic.active) {
                    Some(nic) => (nic.name, "an RDMA NIC with a port that is up".to_owned()),
                    None => (SOFT.to_owned(), "no RDMA NIC with a port that is up".to_owned()),
                },
                Err(error) => (SOFT.to_owned(), format!("no RDMA NICs: {error}")),
            },
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
            Context::Verbs(_) => Provider::Verbs,
        }
    }

    /// The sizes it supports.
    pub fn limits(&self) -> &DeviceLimits {
        self.inner.context.limits()
    }

    /// An address of this device to listen at, for programs that have no better idea: the first IPv4 address of a NIC, or else its
    /// first address that is not link-local; `127.0.0.1` for the software device. Port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] when the NIC has no such address: an InfiniBand port needs an IP interface, a RoCE port one that is up.
    pub fn local_address(&self, port: u16) -> Result<Address> {
        let addresses = self.inner.context.addresses();
        let routable = |ip: &&IpAddr| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
        let best = addresses.iter().find(|ip| ip.is_ipv4()).or_else(|| addresses.iter().find(routable));
        match best {
            Some(ip) => Ok(SocketAddr::new(*ip, port).into()),
            None => Err(Error::Invalid {
                operation: "find an address of",
                reason: format!("{} has no IP address: is its network interface up, with an address?", self.name()),
            }),
        }
    }

    /// The numbers of the CPUs that share a NUMA node with the NIC, in order. A thread elsewhere reaches its registers and the
    /// completions it writes through the link between the nodes.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a software device, and for one whose place is not in sysfs.
    pub fn local_cpus(&self) -> Result<Vec<usize>> {
        self.inner.context.local_cpus()
    }

    /// Runs the calling thread on the NIC's [`local_cpus`](Self::local_cpus) from now on, and threads that it starts. A runtime near the
    /// NIC has threads that all did this:
    ///
    /// ```no_run
    /// # use tokio_rdma::Device;
    /// let device = Device::open("mlx5_0")?;
    /// let pinned = device.clone();
    /// let near = move || pinned.pin_this_thread().expect("the NIC's place is in sysfs");
    /// let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().on_thread_start(near).build().expect("a runtime");
    /// runtime.block_on(async { /* connections of this device */ });
    /// # Ok::<(), tokio_rdma::Error>(())
    /// ```
    ///
    /// For the device's own threads there is [`DeviceBuilder::pin_to_local_cpus`].
    ///
    /// # Errors
    ///
    /// As [`local_cpus`](Self::local_cpus); [`Error::Io`] when this process may run on none of them (`sched_setaffinity(2)`).
    pub fn pin_this_thread(&self) -> Result<()> {
        let cpus = self.local_cpus()?;
        crate::affinity::pin(&cpus).map_err(|error| Error::io("pin a thread to", format!("the CPUs {cpus:?}"), error))
    }

    /// Completion vectors: interrupts that [`DeviceBuilder::completion_vector`] chooses from.
    pub fn completion_vectors(&self) -> u32 {
        self.inner.context.completion_vectors()
    }

    /// How its completions are waited for.
    pub fn completion_mode(&self) -> CompletionMode {
        self.inner.queues[0].mode()
    }

    /// A protection domain: memory registered in it works with connections made in it, and with no others.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        let pd = self.inner.context.alloc_pd()?;
        Ok(ProtectionDomain::new(pd, self.limits().clone(), self.inner.meters.clone(), self.inner.clone()))
    }

    pub(crate) fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn meters(&self) -> &Meters {
        &self.inner.meters
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
    vector: u32,
    pinned: bool,
    links: Option<soft::LinkPolicy>,
}

impl DeviceBuilder {
    pub(crate) fn new(source: Source) -> Self {
        Self { source, mode: CompletionMode::default(), queues: 1, vector: 0, pinned: false, links: None }
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

    /// The completion vector of the first completion queue, which is to say the interrupt and with it the CPU that tells of its
    /// completions (`/proc/interrupts`, `irqbalance(1)`); further queues get the next ones, round and round. Default: 0.
    #[must_use]
    pub fn completion_vector(mut self, vector: u32) -> Self {
        self.vector = vector;
        self
    }

    /// Runs this device's threads on the CPUs near the NIC: the one that hears of its events, and polling threads
    /// ([`CompletionMode::PollingThread`]) without a CPU of their own. For the runtime's own threads, see
    /// [`Device::pin_this_thread`]. Default: no, since the scheduler may know better on a host with one NUMA node.
    ///
    /// Opening the device fails when it is not known which CPUs those are.
    #[must_use]
    pub fn pin_to_local_cpus(mut self) -> Self {
        self.pinned = true;
        self
    }

    /// What the software device carries its connections through; both ends have to agree. Default: the variable `TOKIO_RDMA_LINK`
    /// (`auto`, `sockets` or `shm`), or else [`LinkPolicy::Auto`](soft::LinkPolicy::Auto). A NIC has one link, and is not opened with a
    /// policy.
    #[must_use]
    pub fn links(mut self, policy: soft::LinkPolicy) -> Self {
        self.links = Some(policy);
        self
    }

    /// Opens the device.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownDevice`], also with the reason when RDMA NICs cannot be used on this machine; [`Error::Limit`] when a
    /// setting is out of range.
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
        let soft = |limits, faults| {
            let links = soft::LinkPolicy::or_from_environment(self.links)?;
            soft::Context::open(limits, faults, links).map(Context::Soft)
        };
        let context = match self.source {
            Source::Named(name) if name == SOFT => soft(soft::default_limits(), None)?,
            Source::Named(name) if self.links.is_some() => {
                let reason = format!("{name} is no software device, so there is no choice of links");
                return Err(Error::Invalid { operation: "open", reason });
            }
            Source::Named(name) => match verbs::Context::open(&name, self.pinned)? {
                Some(context) => Context::Verbs(context),
                None => {
                    let available = Device::list().into_iter().map(|device| device.name).collect();
                    let no_nics = verbs::devices().err().map(|error| error.to_string());
                    return Err(Error::UnknownDevice { name, available, no_nics });
                }
            },
            Source::Soft { limits, faults } => soft(limits, faults)?,
        };
        let vectors = context.completion_vectors();
        if self.vector >= vectors {
            return Err(Error::Limit {
                operation: "open",
                what: "completion vector",
                value: self.vector.into(),
                limit: u64::from(vectors) - 1,
                hint: "they are counted from 0",
            });
        }
        let cpus: Option<Arc<[usize]>> = if self.pinned { Some(context.local_cpus()?.into()) } else { None };
        let meters = Meters::new(context.name());
        let queues = (self.vector..)
            .take(self.queues)
            .map(|vector| CompletionQueue::new(&context, self.mode, vector, cpus.clone(), meters.clone()).map(Arc::new))
            .collect::<Result<_>>()?;
        Ok(Device {
            inner: Arc::new(DeviceInner {
                context,
                queues,
                next_queue: AtomicU64::new(0),
                keepalive: Arc::default(),
                meters,
            }),
        })
    }
}

/// More completion queues than CPUs bring nothing, and the largest hosts have fewer than this.
const MAX_QUEUES: usize = 1024;
