//! Memory of NVIDIA GPUs in operations: awaiting a receive means that the GPU can use the bytes.
//!
//! ```text
//! GpuDevice ── alloc · from_slice · from_raw ──▶ GpuBuffer ── send · receive · read · write ──▶ Connection
//!     │                                          │ ▲   │ ▲
//!     │                            read_on,      │ │   │ │ reclaim
//!     │ streams, events            write_on ◀────┘ │   ▼ │
//!     ▼                                │           │  GpuExposedRegion ── remote ──▶ RemoteRegion, to the peer
//! kernels and copies of the program ◀──┘           │
//!     what they were given to do is awaited before the device touches the bytes
//! ```
//!
//! Needs the feature `cuda`, which builds anywhere; the driver's library is loaded when the first GPU is opened, and its absence is an
//! [error](GpuError::Unavailable) of that call alone. Kernels, streams and allocations are [cudarc](https://docs.rs/cudarc)'s.
//!
//! # Paths
//!
//! | RDMA device | path | what moves the bytes |
//! |---|---|---|
//! | a NIC | [`DmaBuf`](GpuPath::DmaBuf), else [`PeerMemory`](GpuPath::PeerMemory) | the NIC, between its link and the GPU's memory |
//! | a NIC | [`Staged`](GpuPath::Staged), if allowed | the NIC, to and from pinned memory; a copy by the GPU before or after |
//! | `soft0` | [`Software`](GpuPath::Software) | its engine, in pieces through pinned memory, copies and link at the same time |
//!
//! A buffer says which one it got. No path is taken that its [`PathPolicy`] does not allow: the error lists what was tried.
//! GPU and NIC being able to reach each other does not mean that they do so fast; that depends on the PCIe topology between them.
//!
//! # Files
//!
//! | file | what |
//! |---|---|
//! | `driver`, `kind` | libcuda; what a pointer points to |
//! | `device`, `visibility`, `survey`, `nvml` | a GPU; when it sees what a NIC wrote; what a report asks CUDA, and of NVLinks |
//! | `events`, `waiter`, `uses` | points in streams, awaiting them, and which of them a buffer waits for |
//! | `allocation`, `mapping`, `reaper` | memory, and releasing it without making anybody wait |
//! | `register`, `staging`, `bounce`, `pinned` | paths; copies through pinned memory |
//! | `buffer`, `making`, `held`, `guard`, `exposed`, `operand` | what programs hold, and what operations take |

mod allocation;
mod bounce;
mod buffer;
mod device;
mod driver;
mod error;
mod events;
mod exposed;
mod guard;
mod held;
mod kind;
mod making;
mod mapping;
pub(crate) mod nvml;
mod operand;
mod peers;
mod pinned;
mod reaper;
mod register;
mod staging;
pub(crate) mod survey;
mod uses;
mod visibility;
mod waiter;

pub use buffer::{GpuBuffer, GpuUnsplitError};
pub use device::{GpuCapabilities, GpuDevice, driver_version};
pub use error::{GpuError, Refusal};
pub use exposed::{GpuExposeError, GpuExposedRegion};
pub use guard::{GpuRead, GpuWrite};
pub use kind::MemoryKind;
pub use making::FromSliceError;
pub use register::{GpuPath, PathPolicy};
pub use visibility::{Visibility, VisibilityScope};
