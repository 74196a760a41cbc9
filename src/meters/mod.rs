//! Counters of a device, for whoever collects those of a whole program. Without the feature `metrics` there is nothing in them.

#[cfg(feature = "metrics")]
mod exported;
#[cfg(not(feature = "metrics"))]
mod none;

#[cfg(feature = "metrics")]
pub(crate) use self::exported::Meters;
#[cfg(not(feature = "metrics"))]
pub(crate) use self::none::Meters;

/// What an operation had to wait for a GPU for.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum GpuWait {
    /// Its work on the buffer, before the operation was posted.
    Idle,
    /// The copy of what came, after it was done.
    Visible,
}

/// Counts a registration for as long as it exists.
pub(crate) struct Registered {
    meters: Meters,
    len: usize,
}

impl Registered {
    pub(crate) fn new(meters: &Meters, len: usize) -> Self {
        meters.registered(len);
        Self { meters: meters.clone(), len }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.meters.deregistered(self.len);
    }
}
