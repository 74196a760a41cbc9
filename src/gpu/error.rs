//! What goes wrong with GPUs.

use std::fmt;

use cudarc::driver::DriverError;

use super::kind::MemoryKind;
use super::register::GpuPath;
use crate::doctor::GpuDirectReport;

/// An error of a GPU, its driver, or its memory; inside of [`Error::Gpu`](crate::Error::Gpu).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no usable CUDA driver or no such GPU. Everything of this crate that needs none works all the same.
    #[error("no GPU can be used: {reason}")]
    Unavailable {
        /// What was looked for and not found.
        reason: String,
    },

    /// A call of the CUDA driver failed. After some of these errors (an illegal address in a kernel, for instance)
    /// every later call fails as well, until the process ends.
    #[error("{call}: {name} (CUDA error {code}){hint}", hint = driver_hint(*code))]
    Driver {
        /// The call, as the CUDA driver API names it.
        call: &'static str,
        /// Its `CUresult`.
        code: u32,
        /// The name of that.
        name: String,
    },

    /// A pointer to memory that is not fit for what was asked.
    #[error("{operation}: {address:#x} is {kind}; {hint}")]
    Unfit {
        /// What was asked for.
        operation: &'static str,
        /// The pointer.
        address: u64,
        /// What it points to.
        kind: MemoryKind,
        /// What to do.
        hint: &'static str,
    },

    /// No way for the device to reach the memory.
    ///
    /// Prints the refusals, and in a line each what else is broken between the two; all of it is in the
    /// [report](Self::report).
    #[error("{device} has no path to memory of {gpu}{}{}", refusals_text(.refusals), broken_text(.report.as_deref()))]
    NoPath {
        /// The RDMA device.
        device: String,
        /// The GPU.
        gpu: String,
        /// Every path that was tried, in order, and why it does not go.
        refusals: Vec<Refusal>,
        /// Every link between the two, looked at when registering failed; `None` where that was not possible.
        report: Option<Box<GpuDirectReport>>,
    },

    /// Work of the GPU that was launched on these bytes has not finished.
    #[error("{operation}: the GPU still uses the buffer; {hint}")]
    Busy {
        /// What was asked for.
        operation: &'static str,
        /// What to do.
        hint: &'static str,
    },

    /// A request that cannot be right.
    #[error("{operation}: {reason}")]
    Invalid {
        /// What was asked for.
        operation: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// A path that does not go, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Refusal {
    /// The path.
    pub path: GpuPath,
    /// Why it does not go.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.reason)
    }
}

impl GpuError {
    /// Why the device cannot reach the GPU's memory, link by link; of [`NoPath`](Self::NoPath) alone.
    pub fn report(&self) -> Option<&GpuDirectReport> {
        match self {
            Self::NoPath { report, .. } => report.as_deref(),
            _ => None,
        }
    }

    pub(crate) fn is_caller_error(&self) -> bool {
        !matches!(self, Self::Driver { .. })
    }

    /// The error of a driver call.
    pub(super) fn driver(call: &'static str) -> impl FnOnce(DriverError) -> Self {
        move |error| {
            let name =
                error.error_name().map_or_else(|_| "an unknown error".into(), |name| name.to_string_lossy().into());
            Self::Driver { call, code: error.0 as u32, name }
        }
    }
}

impl From<GpuError> for crate::Error {
    fn from(error: GpuError) -> Self {
        Self::Gpu(Box::new(error))
    }
}

fn driver_hint(code: u32) -> &'static str {
    match code {
        2 => "; the GPU has no such amount of memory free",
        700 | 702 | 709 | 714..=719 => "; a kernel failed before, and the context cannot be used any more",
        _ => "",
    }
}

fn refusals_text(refusals: &[Refusal]) -> String {
    refusals.iter().map(|refusal| format!("; {refusal}")).collect()
}

fn broken_text(report: Option<&GpuDirectReport>) -> String {
    report.map(|report| report.chain.brief()).unwrap_or_default()
}
