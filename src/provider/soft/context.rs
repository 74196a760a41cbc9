//! The device: protection domains, registrations, grants.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::cq::Cq;
use super::engine::Control;
use super::faults::{FaultState, Faults};
use super::keys::{Device, Key, KeyTable, Use};
use super::shm::LinkPolicy;
use super::srq::Srq;
use crate::error::{Error, Result};
use crate::memory::Access;
use crate::memory::dma::Segment;
use crate::memory::pages::Pages;
use crate::provider::{DeviceLimits, QpConfig};
use crate::random;
use crate::sync::Mutex;

/// Lengths on the wire are 32 bits.
const WIRE_MESSAGE: u64 = 1 << 31;
/// What one gather or scatter has room for.
const GATHER_SGE: u32 = 64;

/// An opened software NIC. Clones are the same device; the engine thread ends with the last object made from it.
#[derive(Clone, Debug)]
pub(crate) struct Context {
    pub(super) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) limits: DeviceLimits,
    pub(super) keys: KeyTable,
    pub(super) engine: Arc<Control>,
    pub(super) faults: Option<Arc<FaultState>>,
    pub(super) stats: Stats,
    pub(super) links: LinkPolicy,
    /// Makes a fetch, a sum and a store of a device's memory one operation, as far as this device's peers can see.
    pub(super) device_atomics: Mutex<()>,
    ids: AtomicU64,
}

/// What lives and what happened, for tests and for finding leaks.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    pub queue_pairs: AtomicUsize,
    pub regions: AtomicUsize,
    pub grants: AtomicUsize,
    /// Times that the engine served a queue pair because nobody else did.
    pub engine_drives: AtomicU64,
}

#[derive(Clone, Debug)]
pub(crate) struct Pd {
    ctx: Arc<Shared>,
    pub(super) id: u64,
}

#[derive(Debug)]
pub(crate) struct Mr {
    ctx: Arc<Shared>,
    pd: u64,
    key: Arc<Key>,
}

#[derive(Debug)]
pub(crate) struct Grant {
    ctx: Arc<Shared>,
    key: Arc<Key>,
}

/// What the software NIC supports unless a program asks for less.
pub fn default_limits() -> DeviceLimits {
    DeviceLimits {
        max_message: 1 << 30,
        max_region: 1 << 46,
        max_queue_depth: 16384,
        max_sge: 32,
        max_inline: 256,
        max_rd_atomic: 128,
        max_cq_depth: 1 << 22,
        max_srq: 1 << 16,
        max_srq_depth: 1 << 16,
        max_srq_sge: 32,
    }
}

impl Context {
    pub(crate) fn open(mut limits: DeviceLimits, faults: Option<Faults>, links: LinkPolicy) -> Result<Self> {
        limits.max_message = limits.max_message.clamp(1, WIRE_MESSAGE);
        limits.max_sge = limits.max_sge.clamp(1, GATHER_SGE);
        let shared = Arc::new(Shared {
            limits,
            keys: KeyTable::new(u32::from_ne_bytes(random::bytes()?)),
            engine: Control::start()?,
            faults: faults.map(|faults| Arc::new(FaultState::new(faults))),
            stats: Stats::default(),
            links,
            device_atomics: Mutex::default(),
            ids: AtomicU64::new(1),
        });
        Ok(Self { shared })
    }

    pub(crate) fn name(&self) -> &str {
        crate::device::SOFT
    }

    pub(crate) fn limits(&self) -> &DeviceLimits {
        &self.shared.limits
    }

    #[cfg(test)]
    pub(crate) fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    pub(crate) fn alloc_pd(&self) -> Result<Pd> {
        Ok(Pd { ctx: Arc::clone(&self.shared), id: self.shared.next_id() })
    }

    pub(crate) fn create_srq(&self, pd: &Pd, depth: u32, max_sge: u32) -> Result<Srq> {
        Srq::create(&self.shared, pd, depth, max_sge)
    }

    pub(crate) fn create_cq(&self, depth: u32) -> Result<Cq> {
        at_most("create completion queue", "depth", depth.into(), self.shared.limits.max_cq_depth.into())?;
        Cq::create(&self.shared, depth)
    }
}

impl Shared {
    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Refuses a queue pair that this device cannot make.
    pub(super) fn check_config(&self, operation: &'static str, config: &QpConfig) -> Result<()> {
        let limits = &self.limits;
        for (what, value, limit) in [
            ("send queue depth", config.send_depth, limits.max_queue_depth),
            ("receive queue depth", config.receive_depth, limits.max_queue_depth),
            ("scatter/gather entries of a send", config.max_send_sge, limits.max_sge),
            ("scatter/gather entries of a receive", config.max_receive_sge, limits.max_sge),
            ("inline bytes", config.max_inline, limits.max_inline),
            ("reads and atomics in flight", config.max_rd_atomic.into(), limits.max_rd_atomic.into()),
        ] {
            at_most(operation, what, value.into(), limit.into())?;
        }
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.engine.stop();
    }
}

pub(super) fn at_most(operation: &'static str, what: &'static str, value: u64, limit: u64) -> Result<()> {
    if value > limit { Err(Error::Limit { operation, what, value, limit, hint: "" }) } else { Ok(()) }
}

fn keys_used_up(operation: &'static str) -> Error {
    Error::Invalid { operation, reason: "all keys of the device are in use".into() }
}

impl Pd {
    pub(crate) fn register(&self, segment: Segment) -> Result<Mr> {
        self.enter(segment, None)
    }

    /// Registers memory of a device, which the NIC only reaches through copies. `segment` holds the device's addresses.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn register_device(
        &self,
        segment: Segment,
        device: Arc<dyn crate::memory::device::DeviceMemory>,
    ) -> Result<Mr> {
        self.enter(segment, Some(device))
    }

    fn enter(&self, segment: Segment, device: Device) -> Result<Mr> {
        at_most("register", "length", segment.len() as u64, self.ctx.limits.max_region)?;
        let key = self.ctx.keys.insert(self.id, Use::Local, segment, device).ok_or_else(|| keys_used_up("register"))?;
        self.ctx.stats.regions.fetch_add(1, Ordering::Relaxed);
        Ok(Mr { ctx: Arc::clone(&self.ctx), pd: self.id, key })
    }

    pub(crate) fn grant(&self, mr: &Mr, segment: Segment, access: Access) -> Result<Grant> {
        if !Arc::ptr_eq(&self.ctx, &mr.ctx) || mr.pd != self.id || !mr.key.contains(&segment) {
            let reason = "the range is not inside a memory region of this protection domain".into();
            return Err(Error::Invalid { operation: "grant", reason });
        }
        let (usage, device) = (Use::Remote(access), mr.key.device().clone());
        let key = self.ctx.keys.insert(self.id, usage, segment, device).ok_or_else(|| keys_used_up("grant"))?;
        self.ctx.stats.grants.fetch_add(1, Ordering::Relaxed);
        Ok(Grant { ctx: Arc::clone(&self.ctx), key })
    }

    /// Whether memory that is exposed can be shared with peers that have a link through shared memory.
    pub(crate) fn shares_pages(&self) -> bool {
        self.ctx.links != LinkPolicy::Sockets && self.ctx.faults.is_none()
    }

    pub(super) fn belongs_to(&self, ctx: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.ctx, ctx)
    }
}

impl Mr {
    pub(crate) fn lkey(&self) -> u32 {
        self.key.number
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.ctx.keys.remove(&self.key);
        self.ctx.stats.regions.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Grant {
    pub(crate) fn rkey(&self) -> u32 {
        self.key.number
    }

    /// Lets peers of this host map the memory, which is that of these pages. Before anybody knows the key.
    pub(crate) fn set_pages(&self, pages: Pages) {
        self.key.set_pages(pages);
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn set_shareable(&self, memory: Arc<dyn crate::memory::device::Shareable>) {
        self.key.set_shareable(memory);
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn was_shared(&self) -> bool {
        self.key.was_shared()
    }

    pub(crate) fn revoke(&self) {
        self.ctx.keys.remove(&self.key);
        self.key.restore(true);
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        // Nobody gets to see what is in the memory.
        self.ctx.keys.remove(&self.key);
        self.key.restore(false);
        self.ctx.stats.grants.fetch_sub(1, Ordering::Relaxed);
    }
}
