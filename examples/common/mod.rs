//! What the larger examples share.
// Each of them uses its own part of it.
#![allow(dead_code)]

pub mod chart;
pub mod child;
pub mod options;
pub mod units;
