//! What the test binaries share: two ends of a connection in one process, deadlines, patterns, second processes.
// Each binary uses its own part of it.
#![allow(dead_code, unused_macros, unused_imports)]

pub mod data;
pub mod example;
pub mod exercise;
pub mod process;
pub mod raw;
pub mod rig;
pub mod run;

pub use data::{assert_pattern, fill, pattern};
pub use exercise::{exercise, exercise_singly};
pub use rig::{End, Pair, Rig, Setup};
pub use run::{eventually, holds_for, poll_once, run, within, yields};
