//! From a completion on the device to the future that waits for it.

mod company;
pub(crate) mod driver;
mod mode;
pub(crate) mod pair;
pub(crate) mod queue;
pub(crate) mod shared;
pub(crate) mod table;

pub use mode::CompletionMode;
