//! The report behind an error.

use super::report::GpuDirectReport;
use crate::error::Error;

impl Error {
    /// Why a NIC cannot reach a GPU's memory, link by link, where that is what the error is about: memory of a GPU that could not be
    /// registered (`GpuError::NoPath` of the feature `cuda`, the report of that moment), or no usable NIC near a GPU
    /// ([`NoNearNic`](Self::NoNearNic), looked at when this is called, for the nearest of the NICs).
    ///
    /// `None` for other errors, and where the machine cannot be looked at.
    pub fn gpu_direct_report(&self) -> Option<GpuDirectReport> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(error) => error.report().cloned(),
            Self::NoNearNic { function, candidates } => {
                let builder = GpuDirectReport::builder().without_allocating().gpu(function.to_string());
                let nearest = candidates.iter().min_by_key(|candidate| candidate.path.level);
                nearest.into_iter().fold(builder, |builder, nearest| builder.nic(&nearest.name)).build().ok()
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_errors_have_none() {
        let error = Error::Invalid { operation: "test", reason: "none".into() };
        assert_eq!(error.gpu_direct_report(), None);
        // Nor has one about a function that is no GPU of this machine.
        let function = "ffff:ff:1f.7".parse().unwrap();
        assert_eq!(Error::NoNearNic { function, candidates: Vec::new() }.gpu_direct_report(), None);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn the_error_of_a_registration_stays_short_and_holds_all() {
        use crate::doctor::tests::broken_twice;
        use crate::gpu::GpuError;

        let report = broken_twice();
        let error = GpuError::NoPath {
            device: "mlx5_0".into(),
            gpu: "GPU 0".into(),
            refusals: Vec::new(),
            report: Some(Box::new(report.clone())),
        };
        let text = error.to_string();
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(
            text.contains("acs: redirects at 0000:02:00.0") && text.contains("iommu: it translates (DMA-FQ)"),
            "{text}"
        );
        assert_eq!(Error::from(error).gpu_direct_report(), Some(report));
    }
}
