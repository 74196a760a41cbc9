//! Why a NIC can, or cannot, reach a GPU's memory: a report of every link in between.
//!
//! GPUDirect RDMA needs many things to be right at once: drivers, kernel modules, PCIe bridges, an IOMMU, limits. When one is
//! wrong, registering memory fails, or transfers do, or all works and is slow. A [`GpuDirectReport`] looks at each of them and says
//! how it is, where that comes from, and what to do.
//!
//! ```no_run
//! use tokio_rdma::doctor::GpuDirectReport;
//!
//! # fn main() -> tokio_rdma::Result<()> {
//! let report = GpuDirectReport::builder().gpu("0").nic("mlx5_0").build()?;
//! print!("{report}");
//! for fault in report.chain.faults() {
//!     println!("{}: {}; {}", fault.link, fault.value, fault.advice);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! `cargo run --release --example doctor` prints it. The module is above [`topology`](crate::topology), which knows the PCIe bus alone, and
//! above the drivers; data flows one way:
//!
//! ```text
//! files (sysfs, procfs) ─┐
//! topology (PCIe)       ─┼─▶ judge, one function per link ─▶ findings ─▶ chain ─▶ report ─▶ text
//! live (CUDA, verbs)    ─┘
//! nvml (NVLinks)        ───▶ NVLinks of each GPU ─▶ matrix ──────────▶ report
//! ```
//!
//! # When a chain holds
//!
//! A link is ok, broken or unknown; what could not be read is never ok. The chain holds when no link is broken and none is unknown but
//! those that tell only of speed ([`Link::Ats`], [`Link::Numa`], [`Link::Mtu`], [`Link::MappedMemory`]), of an amount
//! ([`Link::Bar1`]) or of versions ([`Link::KernelModule`], [`Link::Kernel`]). Of the two ways of registering a GPU's memory
//! ([`Route`]) one is enough.
//!
//! # Sources
//!
//! | link | rule | source of the rule |
//! |---|---|---|
//! | [`Visibility`](Link::Visibility) | ordered natively, or flushed | NVIDIA's GPUDirect RDMA guide, "Synchronization and Memory Ordering" |
//! | [`DmaBufImport`](Link::DmaBufImport) | a descriptor that is none is `EBADF` to a device that registers dma-bufs, `EOPNOTSUPP` to others | `ibv_reg_dmabuf_mr(3)`; the probe that NCCL and UCX make too |
//! | [`Acs`](Link::Acs) | request redirect, completion redirect and egress control are off on each bridge in between | the kernel's `drivers/pci/p2pdma.c`, NCCL's troubleshooting guide |
//! | [`Iommu`](Link::Iommu) | none, or pass-through | NVIDIA's GPUDirect RDMA guide, "Supported Systems" |
//! | [`Level`](Link::Level) | not between NUMA nodes | `nvidia-smi topo --help`; NCCL goes no farther than a root complex by itself |
//! | [`CpuCopies`](Link::CpuCopies) | `MLX5_SCATTER_TO_CQE=0` | `mlx5dv(7)` |
//!
//! In the [`Matrix`], GPUs that NVLinks join show how many (`NV18`) in place of their PCIe level, as `nvidia-smi topo --matrix` does. NVIDIA's
//! management library tells of them ([`NvLinks`]); where it cannot be asked, the PCIe level is shown.

mod chain;
mod files;
mod finding;
mod judge;
pub(crate) mod live;
mod matrix;
mod nvlinks;
pub(crate) mod nvml;
mod of_error;
mod report;
#[cfg(test)]
mod tests;
mod text;
mod units;

pub use chain::Chain;
pub use finding::{Finding, Link, Route, Source, Status};
pub use matrix::Matrix;
pub use nvlinks::NvLinks;
pub use report::{Gpu, GpuDirectReport, GpuDirectReportBuilder, Machine, Nic};

#[cfg(feature = "cuda")]
pub(crate) use judge::{machine::PEER_MEMORY, nic::copies_with_cpu};
