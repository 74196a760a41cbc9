//! Memory of a GPU.

use std::sync::Arc;

use anyhow::{Context, Result};
use cudarc::driver::CudaStream;
use tokio_rdma::gpu::{GpuBuffer, GpuDevice, GpuExposedRegion};
use tokio_rdma::{Access, ProtectionDomain, RemoteRegion};

use super::{Exposed, Memory};

pub struct Gpu {
    device: GpuDevice,
    stream: Arc<CudaStream>,
}

impl Gpu {
    pub fn open(ordinal: usize) -> Result<Self> {
        let device = GpuDevice::open(ordinal).with_context(|| format!("open gpu:{ordinal}"))?;
        let stream = device.context().new_stream()?;
        Ok(Self { device, stream })
    }
}

impl Memory for Gpu {
    type Buffer = GpuBuffer;
    type Exposed = Area;

    /// By a direct path, or not at all: a staged one is no answer to how fast the device reaches the GPU.
    fn alloc(&self, domain: &ProtectionDomain, len: usize) -> Result<GpuBuffer> {
        Ok(GpuBuffer::alloc(&self.device, domain, len)?)
    }

    fn fill(&self, buffer: &mut GpuBuffer, bytes: &[u8]) -> Result<()> {
        self.stream.memcpy_htod(bytes, &mut buffer.write_on::<u8>(&self.stream)?)?;
        // So that no operation's time is that of waiting for it.
        Ok(self.stream.synchronize()?)
    }

    fn bytes(&self, buffer: &GpuBuffer) -> Result<Vec<u8>> {
        let bytes = self.stream.clone_dtoh(&buffer.read_on::<u8>(&self.stream)?)?;
        // So that the buffer can be posted right away.
        self.stream.synchronize()?;
        Ok(bytes)
    }

    fn expose(&self, domain: &ProtectionDomain, bytes: &[u8]) -> Result<Area> {
        let mut buffer = self.alloc(domain, bytes.len())?;
        self.fill(&mut buffer, bytes)?;
        Ok(Area { region: buffer.expose(Access::all())?, stream: self.stream.clone() })
    }

    fn describe(&self, domain: &ProtectionDomain) -> Result<String> {
        Ok(format!("{}, path {}", self.device, self.alloc(domain, 4096)?.path()))
    }
}

/// Memory that a peer uses, and the stream that looks at it.
pub struct Area {
    region: GpuExposedRegion,
    stream: Arc<CudaStream>,
}

impl Exposed for Area {
    fn remote(&self) -> RemoteRegion {
        self.region.remote()
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        Ok(self.stream.clone_dtoh(&self.region.read_on::<u8>(&self.stream)?)?)
    }
}
