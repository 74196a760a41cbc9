//! Opening the NIC that is near a GPU.

use super::address::PciAddress;
use super::choice::{Candidate, Ranking};
use super::{ROOT, Topology};
use crate::device::Device;
use crate::error::{Error, Result};

impl Device {
    /// Opens the RDMA NIC that is nearest to a GPU and can be used: the first of [`Topology::nics_for`] that opens.
    ///
    /// Never the software device `soft0`, which is near no GPU. Says in a tracing event which NIC it took, and why.
    ///
    /// # Errors
    ///
    /// [`Error::NoNearNic`] lists each NIC with its level and why it is none; [`Error::Invalid`] for a faulty
    /// [override file](crate::topology#override-file).
    #[cfg(feature = "cuda")]
    pub fn open_near(gpu: &crate::gpu::GpuDevice) -> Result<Self> {
        Self::open_near_function(gpu.capabilities().pci_bus_id.parse()?)
    }

    /// As `open_near` of the feature `cuda`, for the GPU with this PCI address: for programs that know of GPUs by other means, or
    /// want the NIC that is near another device, an NVMe drive for one.
    ///
    /// # Errors
    ///
    /// As `open_near`.
    pub fn open_near_function(function: PciAddress) -> Result<Self> {
        let Ranking { usable, left_out } = Topology::read()?.nics_for(function);
        let mut candidates = Vec::new();
        for candidate in usable {
            match Self::open(&candidate.name) {
                Ok(device) => {
                    let Candidate { path, .. } = candidate;
                    tracing::info!(device = device.name(), near = %function, level = %path.level, why = path.why, "opened a near device");
                    return Ok(device);
                }
                Err(error) => candidates.push(Candidate { unusable: Some(error.to_string()), ..candidate }),
            }
        }
        candidates.extend(left_out);
        Err(Error::NoNearNic { function, candidates })
    }
}

/// For the text of [`Error::NoNearNic`].
pub(crate) fn listed(candidates: &[Candidate]) -> String {
    if candidates.is_empty() {
        return format!("this machine has none ({ROOT}/class/infiniband); is its driver loaded?");
    }
    candidates.iter().map(Candidate::to_string).collect::<Vec<_>>().join("; ")
}
