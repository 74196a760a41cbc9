//! The few synchronisation primitives that the model-checked parts use: ordinary ones, or loom's under `--cfg rdma_loom`.

#[cfg(rdma_loom)]
pub(crate) use loom::sync::{Arc, MutexGuard, atomic};
#[cfg(not(rdma_loom))]
pub(crate) use parking_lot::MutexGuard;
#[cfg(not(rdma_loom))]
pub(crate) use std::sync::{Arc, atomic};

/// A mutex without poisoning: nothing in this crate unwinds while it holds one in a half-changed state,
/// and a panicking user task must not take the other users of a queue pair down with it.
///
/// Not std's, which asks at each turn of the key whether the thread panics: a dozen instructions, at six locks an operation.
#[cfg(not(rdma_loom))]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

#[cfg(not(rdma_loom))]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }

    /// The guard, or `None` when somebody else holds the lock right now.
    #[inline]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.0.try_lock()
    }
}

/// The same, of loom's.
#[cfg(rdma_loom)]
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

#[cfg(rdma_loom)]
impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        match self.0.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        }
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}
