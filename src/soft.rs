//! The software device for tests: smaller limits, and faults that come on cue.
//!
//! `Device::open("soft0")` is all that a program needs. This module is for those who want to see their program meet a slow completion,
//! a lost peer or a tiny message limit: it opens the same device, which then misbehaves as told, and does so again with the same seed.
//!
//! ```
//! use tokio_rdma::soft::{self, Faults};
//!
//! # fn main() -> tokio_rdma::Result<()> {
//! let mut limits = soft::default_limits();
//! limits.max_message = 4096;
//! let device = soft::device(limits, Some(Faults::seeded(7).rnr(0.1))).open()?;
//! assert_eq!(device.limits().max_message, 4096);
//! # Ok(())
//! # }
//! ```

use crate::device::{DeviceBuilder, Source};
use crate::provider::DeviceLimits;

pub use crate::provider::soft::{Faults, HandshakeStep, LinkPolicy, default_limits};

/// A software device with these limits and faults; open it with [`DeviceBuilder::open`].
pub fn device(limits: DeviceLimits, faults: Option<Faults>) -> DeviceBuilder {
    DeviceBuilder::new(Source::Soft { limits, faults })
}
