//! The server's side of a table: the region that clients read, and who writes to it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio_rdma::{Access, ExposedRegion, ProtectionDomain, RemoteRegion};

use super::{Shape, StoreError, entry};

/// A table, exposed for reading.
pub struct Table {
    shape: Shape,
    region: ExposedRegion,
    /// One writer at a time.
    state: Mutex<State>,
}

struct State {
    /// What is in the region, so that the server need not read what it wrote.
    slots: Vec<Slot>,
    version: u64,
    /// The contents that is written next.
    scratch: Vec<u8>,
}

#[derive(Clone)]
enum Slot {
    Empty,
    Deleted,
    Taken(Box<[u8]>),
}

impl Table {
    pub fn new(domain: &ProtectionDomain, shape: Shape) -> Result<Self, StoreError> {
        let region =
            domain.alloc(shape.bytes() as usize)?.expose(Access::REMOTE_READ).map_err(tokio_rdma::Error::from)?;
        let slots = vec![Slot::Empty; shape.slots() as usize];
        Ok(Self { shape, region, state: Mutex::new(State { slots, version: 0, scratch: Vec::new() }) })
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    pub fn remote(&self) -> RemoteRegion {
        self.region.remote()
    }

    /// Sets the value of a key, and returns its version.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<u64, StoreError> {
        self.shape.check("put", key, value)?;
        let mut state = self.state();
        let free = match self.find(&state, key) {
            Place::Taken(slot) | Place::Free(slot) => slot,
            Place::None => {
                let probes = u64::from(self.shape.probes());
                return Err(StoreError::Full { value: probes, limit: probes });
            }
        };
        state.slots[free as usize] = Slot::Taken(key.into());
        self.write(&mut state, free, |bytes, version| entry::present(bytes, version, key, value))
    }

    /// Takes a key out. Returns whether it was there.
    pub fn delete(&self, key: &[u8]) -> Result<bool, StoreError> {
        let mut state = self.state();
        let Place::Taken(slot) = self.find(&state, key) else { return Ok(false) };
        state.slots[slot as usize] = Slot::Deleted;
        self.write(&mut state, slot, entry::deleted)?;
        Ok(true)
    }

    /// Where a key is, or may go. It must not go to a free slot while it is in another one further on.
    fn find(&self, state: &State, key: &[u8]) -> Place {
        let mut free = Place::None;
        for slot in self.shape.sequence(key) {
            match &state.slots[slot as usize] {
                Slot::Taken(other) if **other == *key => return Place::Taken(slot),
                Slot::Taken(_) => {}
                Slot::Deleted => free = free.or(slot),
                Slot::Empty => return free.or(slot),
            }
        }
        free
    }

    /// Readers may look at any time, and see any part of it.
    fn write(&self, state: &mut State, slot: u32, fill: impl FnOnce(&mut Vec<u8>, u64)) -> Result<u64, StoreError> {
        state.version += 1;
        fill(&mut state.scratch, state.version);
        self.region.copy_from(self.shape.offset(slot), &state.scratch)?;
        Ok(state.version)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing in here panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Place {
    Taken(u32),
    Free(u32),
    None,
}

impl Place {
    /// The first free one.
    fn or(self, slot: u32) -> Self {
        if matches!(self, Self::None) { Self::Free(slot) } else { self }
    }
}
