//! Memory of GPUs in operations, on a real GPU where there is one, and on a stand-in for the driver (`fake-cuda`) elsewhere.
//!
//! `TOKIO_RDMA_TEST_GPU=fake` takes the stand-in where there is a GPU. `TOKIO_RDMA_TEST_GPU_ROUNDS` is how many transfers [`soak`]
//! makes; those of an hour need `TOKIO_RDMA_TEST_CASE_SECONDS=3600` too. On a real GPU, `CUDA_DEVICE_MAX_CONNECTIONS=32` keeps
//! streams with slow kernels from holding up each other.
//!
//! On the stand-in a kernel or a copy that uses memory that was freed ends the process, so that cases about the end of things
//! need not look for it.
// Kernels are launched, and memory of all kinds is made.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;

/// Cases over each link of the software device: by the socket alone, as between two processes, and as within one.
macro_rules! gpu_cases {
    ($($case:ident),+ $(,)?) => {
        gpu_cases!(@on soft_tcp_apart, crate::common::Setup::SOFT_TCP_APART, $($case),+);
        gpu_cases!(@on soft_unix, crate::common::Setup::SOFT_UNIX, $($case),+);
        gpu_cases!(@on shm_tcp, crate::common::Setup::SHM_TCP, $($case),+);
        gpu_cases!(@on soft_unix_single_thread, crate::common::Setup::SOFT_UNIX.single_threaded(), $($case),+);
    };
    (@on $module:ident, $setup:expr, $($case:ident),+) => {
        mod $module {
            $(
                #[test]
                fn $case() {
                    crate::common::run($setup, super::$case);
                }
            )+
        }
    };
}

/// Cases over an RDMA NIC, with the stand-in: where there is a NIC there is no GPU.
macro_rules! nic_gpu_cases {
    ($($case:ident),+ $(,)?) => {
        mod over_roce {
            $(
                #[test]
                #[ignore = "needs an RDMA NIC: cargo xtask guest test"]
                fn $case() {
                    crate::common::run(crate::common::Setup::NIC, super::$case);
                }
            )+
        }
    };
}

/// Cases that need a process of their own: they turn the stand-in's knobs, read its counters, or leave the GPU's context broken.
macro_rules! lone_gpu_cases {
    ($($case:ident),+ $(,)?) => {
        mod alone {
            $(
                #[test]
                fn $case() {
                    use crate::common::process::{alone, test_name};
                    let name = test_name(concat!(module_path!(), "::", stringify!($case)));
                    alone(name, crate::common::Setup::SOFT_UNIX, super::$case);
                }
            )+
        }
    };
}

/// Cases of two processes: what the first does, and what the second does.
macro_rules! two_process_gpu_cases {
    ($($case:ident => $first:ident, $second:ident);+ $(;)?) => {
        two_process_gpu_cases!(@on soft_tcp, SOFT_TCP, $($case, $first, $second);+);
        two_process_gpu_cases!(@on soft_unix, SOFT_UNIX, $($case, $first, $second);+);
        two_process_gpu_cases!(@on shm, SHM_TCP, $($case, $first, $second);+);
    };
    (@on $module:ident, $setup:ident, $($case:ident, $first:ident, $second:ident);+) => {
        mod $module {
            $(
                #[test]
                fn $case() {
                    use crate::common::process::{test_name, two_processes};
                    let name = test_name(concat!(module_path!(), "::", stringify!($case)));
                    two_processes(name, crate::common::Setup::$setup, super::$first, super::$second);
                }
            )+
        }
    };
}

mod gpu;

mod absent;
mod attributes;
mod batches;
mod drops;
mod failing;
mod faults;
mod kinds;
#[cfg(feature = "metrics")]
mod meters;
mod nic;
mod ordering;
mod quickstart;
mod registration;
mod rounds;
mod sharing;
mod soak;
mod staged;
mod waiting;
