//! The PCIe topology: trees that are made here, dumps of real machines, random trees, and, in a virtual machine with a PCIe tree of
//! its own (`cargo xtask guest topology`), the kernel's own sysfs.

mod choice;
#[allow(dead_code)]
#[path = "../../examples/doctor/dump/mod.rs"]
mod dump;
mod dumps;
mod facts;
mod levels;
mod live;
mod machine;
mod nics;
mod overrides;
mod random;
