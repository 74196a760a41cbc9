//! A GPU: parameters and gradients are in its memory, and the model and the steps are kernels.
//!
//! ```text
//!    worker's GPU                                                          server's GPU
//!
//!    parameters  ◀──────────────────── Read ────────────────────────  copies of the last versions
//!        │ kernel: gradient                                                     ▲ kernel: descend
//!        ▼                                                                      │
//!    gradient, loss  ───────────────── Write ───▶  slot  ── kernel: take ──▶  taken, measured
//! ```
//!
//! While a training goes on, no thread waits for the GPU: an operation awaits the kernel that writes what it takes, and the server awaits events. All kernels of a worker,
//! and all of the server, go to one stream, so each finds what the ones before it wrote.
//!
//! | file | what |
//! |---|---|
//! | `kernels/kernels.cu`, `kernels.ptx`, `make_ptx.py` | the kernels' text, and how the one was made of the other |
//! | `kernels` | loading and launching them, and memory that they reach; the one place with unsafe code |
//! | `worker`, `keeper` | the two sides |
//! | `check` | that a GPU computes what the CPU does |

mod check;
mod keeper;
mod kernels;
mod worker;

pub use self::check::check_kernels;
pub use self::keeper::GpuKeeper;
pub use self::worker::GpuWorker;

use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::driver::CudaStream;
use tokio_rdma::gpu::GpuDevice;

use self::kernels::Kernels;

/// A GPU with the model's kernels, and the stream that they go to. Cheap to clone.
#[derive(Clone)]
pub struct Gpu {
    device: GpuDevice,
    stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
}

impl Gpu {
    pub fn open(ordinal: usize) -> Result<Self> {
        let device = GpuDevice::open(ordinal)?;
        let stream = device.context().new_stream().context("make a stream of the GPU")?;
        let kernels = Arc::new(Kernels::load(&stream)?);
        Ok(Self { device, stream, kernels })
    }

    /// The same GPU with a stream of its own, for work that does not wait for this one's.
    fn another(&self) -> Result<Self> {
        let stream = self.device.context().new_stream().context("make a stream of the GPU")?;
        let kernels = Arc::new(self.kernels.on(&stream));
        Ok(Self { device: self.device.clone(), stream, kernels })
    }

    /// For people.
    pub fn name(&self) -> String {
        let it = self.device.capabilities();
        format!("GPU {} ({})", it.ordinal, it.name)
    }
}
