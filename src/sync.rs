//! The few synchronisation primitives that the model-checked parts use: std's, or loom's under `--cfg rdma_loom`.

#[cfg(rdma_loom)]
pub(crate) use loom::sync::{Arc, MutexGuard, atomic};
#[cfg(not(rdma_loom))]
pub(crate) use std::sync::{Arc, MutexGuard, atomic};

#[cfg(rdma_loom)]
use loom::sync as imp;
#[cfg(not(rdma_loom))]
use std::sync as imp;

/// A mutex without poisoning: nothing in this crate unwinds while it holds one in a half-changed state,
/// and a panicking user task must not take the other users of a queue pair down with it.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(imp::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(imp::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    /// The guard, or `None` when somebody else holds the lock right now.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}
