//! Made-up machines, link by link and as a whole.

mod chain;
mod fixture;
mod links;
mod nvlinks;
mod screens;

#[cfg(feature = "cuda")]
pub(super) use screens::broken_twice;
