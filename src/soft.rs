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

//!
//! # Links
//!
//! Two ends on one host are linked through shared memory if they belong to the same user and neither refuses; otherwise through the
//! socket that they connected through. [`LinkPolicy`] chooses, and [`Connection::link`](crate::Connection::link) says which it is.
//!
//! Shared memory trusts the peer as far as its user goes: the kernel's word for who connected (`SO_PEERCRED`, unix(7)) is compared with the
//! effective user id of this process, and another user's process gets the socket. Processes of one user can stop and inspect each
//! other anyway (kill(2), ptrace(2)). A peer that misbehaves in the memory it shares, by accident or on purpose, can end its own
//! connection, and hold up the thread that wakes it. It cannot make this side crash,
//! and never reaches memory that was not exposed, or not any more.
//!
//! Memory that is exposed can be mapped by peers if it consists of pages of its own: what [`ProtectionDomain::alloc`] allocated,
//! and buffers of a [`BufferPool`] whose length is a multiple of the page size. [`Buffer::expose`] then copies it into a file of its own
//! (memfd_create(2)) in place, and [`ExposedRegion::reclaim`] copies it back into pages that no peer has, which takes as long as
//! copying does: some 0.2 ms per MiB. A copy of at most 256 KiB that a peer has begun is waited for, up to 50 ms; one that
//! takes longer, of a process that was stopped for instance, counts for nothing and reaches nothing. Operations on other memory, and on this memory before the peer has mapped it, go through the link like
//! messages.
//!
//! Memory of a GPU is given to peers where it is a whole allocation of `GpuBuffer::alloc`, and their GPUs copy from and to it. CUDA maps memory
//! of another process for reading and writing only, so that a grant of reading alone is kept by the peer's copy of this crate, and not
//! by the driver. What was taken back is other memory at the same address.
//!
//! [`ProtectionDomain::alloc`]: crate::ProtectionDomain::alloc
//! [`BufferPool`]: crate::BufferPool
//! [`Buffer::expose`]: crate::Buffer::expose
//! [`ExposedRegion::reclaim`]: crate::ExposedRegion::reclaim

use crate::device::{DeviceBuilder, Source};
use crate::provider::DeviceLimits;

pub use crate::provider::soft::{Faults, HandshakeStep, LinkPolicy, default_limits};

/// A software device with these limits and faults; open it with [`DeviceBuilder::open`].
pub fn device(limits: DeviceLimits, faults: Option<Faults>) -> DeviceBuilder {
    DeviceBuilder::new(Source::Soft { limits, faults })
}
