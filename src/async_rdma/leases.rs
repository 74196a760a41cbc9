//! Memory of this side that the peer may use, and until when.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tokio::time::Instant;

use super::wire::Token;
use crate::memory::{Buffer, ExposedRegion, RemoteRegion};
use crate::sync::Mutex;

/// Registering pins whole pages.
const PAGE: u64 = 4096;

/// Longer leases are as good as none, and times stay far from where they overflow.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The longest lease that is asked for or kept.
pub(super) fn bounded(lease: Duration) -> Duration {
    lease.min(CENTURY)
}

/// When a lease that begins now ends.
pub(super) fn deadline(lease: Duration) -> Instant {
    Instant::now() + bounded(lease)
}

/// The same for the peer: since 1970, by this host's clock.
pub(super) fn wall_clock(lease: Duration) -> Duration {
    since_1970().saturating_add(bounded(lease))
}

/// When a lease ends that ends at this time by the peer's clock: as good as the two clocks agree.
pub(super) fn from_wall_clock(deadline: Duration) -> Instant {
    self::deadline(deadline.saturating_sub(since_1970()))
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Why a [`LentRegion`](super::LentRegion) is lent no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LeaseEnd {
    /// The peer does not need it any more.
    Released,
    /// The peer gave it back, with what it wrote.
    Returned,
    /// Its time was over.
    Expired,
    /// The connection ended.
    Closed,
}

/// Memory that the user lent: the user's handle and the table both know it.
#[derive(Debug)]
pub(super) struct Slot {
    memory: Mutex<Option<Lent>>,
    end: watch::Sender<Option<LeaseEnd>>,
}

#[derive(Debug)]
pub(super) enum Lent {
    Exposed(ExposedRegion),
    Back(Buffer),
}

impl Slot {
    pub(super) fn new(region: ExposedRegion) -> Arc<Self> {
        Arc::new(Self { memory: Mutex::new(Some(Lent::Exposed(region))), end: watch::Sender::new(None) })
    }

    /// Revokes the key, keeps the memory for the user, and says why.
    pub(super) async fn end(&self, why: LeaseEnd) {
        if let Some(region) = self.take_exposed() {
            let buffer = region.reclaim().await;
            *self.memory.lock() = Some(Lent::Back(buffer));
        }
        self.tell(why);
    }

    /// Says why, the first time.
    fn tell(&self, why: LeaseEnd) {
        self.end.send_if_modified(|end| {
            let first = end.is_none();
            end.get_or_insert(why);
            first
        });
    }

    fn take_exposed(&self) -> Option<ExposedRegion> {
        let mut memory = self.memory.lock();
        match memory.take() {
            Some(Lent::Exposed(region)) => Some(region),
            other => {
                *memory = other;
                None
            }
        }
    }

    /// The memory, for the user; waits while the other side of this is about to revoke the key.
    pub(super) async fn reclaim(&self) -> Buffer {
        let mut end = self.end.subscribe();
        loop {
            let memory = self.memory.lock().take();
            match memory {
                Some(Lent::Exposed(region)) => return region.reclaim().await,
                Some(Lent::Back(buffer)) => return buffer,
                None => drop(end.changed().await),
            }
        }
    }

    pub(super) async fn ended(&self) -> LeaseEnd {
        let mut end = self.end.subscribe();
        match end.wait_for(Option::is_some).await.map(|end| *end) {
            Ok(Some(end)) => end,
            _ => LeaseEnd::Closed,
        }
    }

    /// Uses the memory where it is.
    pub(super) fn with<T>(&self, exposed: impl FnOnce(Option<&mut Lent>) -> T) -> T {
        exposed(self.memory.lock().as_mut())
    }
}

/// What the peer may use.
#[derive(Debug)]
pub(super) enum Memory {
    /// Allocated because the peer asked for it.
    Asked(ExposedRegion),
    /// The user's.
    Lent(Arc<Slot>),
}

#[derive(Debug)]
struct Held {
    memory: Memory,
    region: RemoteRegion,
    charge: u64,
    deadline: Instant,
}

/// All of it, by key.
#[derive(Debug)]
pub(super) struct Leases {
    held: HashMap<u32, Held>,
    budget: u64,
    spent: u64,
    closed: bool,
}

impl Leases {
    /// `budget`: bytes that peers may make this side allocate, in whole pages.
    pub(super) fn new(budget: u64) -> Self {
        Self { held: HashMap::new(), budget, spent: 0, closed: false }
    }

    /// Whether the budget has so many bytes left.
    pub(super) fn affords(&self, size: u64) -> bool {
        charge(size).is_some_and(|charge| charge <= self.budget.saturating_sub(self.spent))
    }

    /// Gives the memory back when everything has ended already.
    pub(super) fn insert(&mut self, memory: Memory, region: RemoteRegion, deadline: Instant) -> Result<(), Memory> {
        if self.closed {
            return Err(memory);
        }
        let charge = match memory {
            Memory::Asked(_) => charge(region.len()).unwrap_or(u64::MAX),
            Memory::Lent(_) => 0,
        };
        self.spent = self.spent.saturating_add(charge);
        self.held.insert(region.rkey(), Held { memory, region, charge, deadline });
        Ok(())
    }

    /// Takes what exactly this token is for.
    pub(super) fn take(&mut self, token: &Token) -> Option<Memory> {
        let held = self.held.get(&token.region.rkey())?;
        let same = (held.region.address(), held.region.len()) == (token.region.address(), token.region.len());
        if same { self.remove(token.region.rkey()) } else { None }
    }

    /// Forgets memory that its owner takes back. Its key may be another region's by now.
    pub(super) fn forget(&mut self, region: &RemoteRegion, owned: &Arc<Slot>) {
        if let Some(Held { memory: Memory::Lent(slot), .. }) = self.held.get(&region.rkey()) {
            if Arc::ptr_eq(slot, owned) {
                self.remove(region.rkey());
            }
        }
    }

    /// Whether the token is for memory that the peer asked for.
    pub(super) fn was_asked_for(&self, token: &Token) -> bool {
        matches!(self.held.get(&token.region.rkey()), Some(Held { memory: Memory::Asked(_), .. }))
    }

    fn remove(&mut self, rkey: u32) -> Option<Memory> {
        let held = self.held.remove(&rkey)?;
        self.spent = self.spent.saturating_sub(held.charge);
        Some(held.memory)
    }

    /// Takes what is due.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Memory> {
        let due: Vec<u32> = self.held.iter().filter(|(_, held)| held.deadline <= now).map(|(&rkey, _)| rkey).collect();
        due.into_iter().filter_map(|rkey| self.remove(rkey)).collect()
    }

    /// When the next lease ends.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.held.values().map(|held| held.deadline).min()
    }

    /// Takes everything, and nothing comes in any more.
    pub(super) fn close(&mut self) -> Vec<Memory> {
        self.closed = true;
        self.spent = 0;
        self.held.drain().map(|(_, held)| held.memory).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.held.len()
    }

    pub(super) fn spent(&self) -> u64 {
        self.spent
    }
}

/// What memory of this size costs.
fn charge(size: u64) -> Option<u64> {
    size.checked_next_multiple_of(PAGE)
}

impl Memory {
    /// Revokes the key. Memory that the peer asked for is freed.
    pub(super) async fn end(self, why: LeaseEnd) {
        match self {
            Self::Asked(region) => drop(region.reclaim().await),
            Self::Lent(slot) => slot.end(why).await,
        }
    }

    /// The same where nothing can wait: memory that was lent keeps its key until the user takes it back.
    pub(super) fn abandon(self) {
        match self {
            Self::Asked(region) => drop(region),
            Self::Lent(slot) => slot.tell(LeaseEnd::Closed),
        }
    }
}
