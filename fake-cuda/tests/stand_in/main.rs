//! The stand-in for NVIDIA's driver, by way of cudarc.

mod as_on_a_gpu;
mod common;
mod hooks;
mod library;
mod mistakes;
