//! The few synchronisation primitives that the model-checked parts use: the usual ones, or loom's under `--cfg rdma_loom`.

#[cfg(rdma_loom)]
pub(crate) use self::checked::{Arc, Mutex, MutexGuard, atomic};
#[cfg(not(rdma_loom))]
pub(crate) use self::usual::{Arc, Mutex, MutexGuard, atomic};

/// A mutex without poisoning: nothing in this crate unwinds while it holds one in a half-changed state,
/// and a panicking user task must not take the other users of a queue pair down with it.
#[cfg(not(rdma_loom))]
mod usual {
    pub(crate) use std::sync::{Arc, atomic};

    pub(crate) use parking_lot::{Mutex, MutexGuard};
}

#[cfg(rdma_loom)]
mod checked {
    pub(crate) use loom::sync::{Arc, MutexGuard, atomic};

    #[derive(Debug, Default)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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
}
