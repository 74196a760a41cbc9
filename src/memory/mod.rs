//! Registered memory: what devices may read and write, and who may when.
//!
//! ```text
//! ProtectionDomain ── alloc · register ──▶ Buffer ── freeze ──▶ SharedBuffer
//!        └── BufferPool ── get ──────────▶ │ ▲
//!                                   expose │ │ reclaim
//!                                          ▼ │
//!                                  ExposedRegion ── remote ──▶ RemoteRegion, to the peer
//! ```
//!
//! | file | what |
//! |---|---|
//! | `domain` | the protection domain: makes regions, counts what lives |
//! | `backing`, `region` | the bytes and how they are freed; their registration |
//! | `chunks`, `piece` | who holds which part of a region; a counted hold on some bytes |
//! | `buffer`, `shared`, `pool` | owned, read-only and pooled buffers |
//! | `exposed`, `cells`, `remote` | memory that a peer may use; how this side shares it; its description |
//! | `any`, `sglist`, `traits` | what an operation accepts |
//! | `dma`, `device` | where the software NIC reads and writes: memory of the host, and of other devices |
//! | `pages` | memory of an exposed region that another process may map |
//! | `racing` | copies of memory that others change meanwhile |

mod access;
mod any;
mod backing;
mod buffer;
mod cells;
mod chunks;
pub(crate) mod device;
pub(crate) mod dma;
mod domain;
mod exposed;
pub(crate) mod mapped;
pub(crate) mod pages;
pub(crate) mod piece;
mod pool;
mod racing;
mod range;
mod region;
mod remote;
mod sglist;
mod shared;
#[cfg(test)]
mod tests;
mod traits;

pub use access::Access;
pub(crate) use any::AnyBuffer;
pub use backing::OwnedMemory;
pub use buffer::{Buffer, UnsplitError};
pub use domain::{DomainStats, ProtectionDomain};
pub use exposed::{ExposeError, ExposedRegion, Reclaim};
pub use pool::{BufferPool, Get};
pub use region::MemoryRegion;
pub use remote::RemoteRegion;
pub use sglist::{SgList, SgSegment};
pub use shared::SharedBuffer;
pub(crate) use traits::{Landed, Operand};
pub use traits::{SourceBuffer, TargetBuffer};
