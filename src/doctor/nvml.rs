//! What NVIDIA's management library said of NVLinks, raw: values, so that tests can make up a machine.

use std::collections::BTreeMap;

use super::finding::Source;
use crate::topology::PciAddress;

/// `NVML_ERROR_INVALID_ARGUMENT`: the answer to a link behind the last one.
pub(crate) const INVALID_ARGUMENT: u32 = 2;

/// `NVML_ERROR_NOT_SUPPORTED`: the answer to any link of a GPU that has none.
pub(crate) const NOT_SUPPORTED: u32 = 3;

/// Of all GPUs.
#[derive(Clone, Debug)]
#[allow(dead_code)] // some of them by the feature
pub(crate) enum NvLinksAsked {
    /// It shall be asked when it is known which GPUs there are.
    Wanted,
    /// The crate was built without it.
    NoFeature,
    /// And why.
    NotAsked(&'static str),
    /// Who made the report has told: the end, `None` for a switch, how many, and where that comes from.
    Told(BTreeMap<PciAddress, Vec<(Option<PciAddress>, u32, Source)>>),
    /// It cannot be used.
    Failed(Source),
    /// It can.
    Asked(BTreeMap<PciAddress, Result<Vec<NvLinkAnswer>, Source>>),
}

/// Of one link. Errors are statuses of the library.
#[derive(Clone, Debug)]
pub(crate) struct NvLinkAnswer {
    pub state: Result<u32, u32>,
    /// The PCI address of the other end, in the library's words; `None` where the link is not up.
    pub end: Option<Result<String, u32>>,
    /// `None` where the link is not up, or the library has no such function.
    pub end_kind: Option<Result<u32, u32>>,
}

impl NvLinkAnswer {
    /// States (`nvmlEnableState_t`).
    pub(crate) const DOWN: u32 = 0;
    pub(crate) const UP: u32 = 1;
    /// Kinds of ends (`nvmlIntNvLinkDeviceType_t`).
    pub(crate) const GPU: u32 = 0;
    pub(crate) const SWITCH: u32 = 2;
}

impl NvLinksAsked {
    /// Asks for these, if it is to be asked at all.
    pub(super) fn ask(&mut self, gpus: &[PciAddress]) {
        if !matches!(self, Self::Wanted) || gpus.is_empty() {
            return;
        }
        #[cfg(feature = "cuda")]
        let asked = crate::gpu::nvml::nvlinks(gpus);
        #[cfg(not(feature = "cuda"))]
        let asked = Self::NoFeature;
        *self = asked;
    }
}

/// A status with its name in nvml.h.
pub(crate) fn shown(status: u32) -> String {
    let name = match status {
        1 => "UNINITIALIZED",
        INVALID_ARGUMENT => "INVALID_ARGUMENT",
        NOT_SUPPORTED => "NOT_SUPPORTED",
        4 => "NO_PERMISSION",
        6 => "NOT_FOUND",
        9 => "DRIVER_NOT_LOADED",
        12 => "LIBRARY_NOT_FOUND",
        13 => "FUNCTION_NOT_FOUND",
        15 => "GPU_IS_LOST",
        16 => "RESET_REQUIRED",
        17 => "OPERATING_SYSTEM",
        18 => "LIB_RM_VERSION_MISMATCH",
        999 => "UNKNOWN",
        _ => return format!("NVML error {status}"),
    };
    format!("NVML error {status} ({name})")
}
