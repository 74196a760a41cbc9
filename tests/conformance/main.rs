//! One suite for every provider and every link: each case is an `async fn` that gets a [`Rig`](common::Rig), and becomes one test
//! for each transport. A case that is not listed in its file's macro is dead code, which the compiler reports.

#[path = "../common/mod.rs"]
mod common;

/// One test per case, in a module named after what it runs on.
macro_rules! instantiate {
    ($module:ident, $($rest:tt)*) => {
        instantiate!(#[cfg(test)] $module, $($rest)*);
    };
    (# $attribute:tt $module:ident, $setup:expr, $($case:ident),+) => {
        mod $module {
            $(
                #[test]
                # $attribute
                fn $case() {
                    crate::common::run($setup, super::$case);
                }
            )+
        }
    };
}

/// Cases for every transport. A further provider is one more line here.
macro_rules! cases {
    ($($case:ident),+ $(,)?) => {
        instantiate!(soft_tcp, crate::common::Setup::SOFT_TCP, $($case),+);
        instantiate!(soft_unix, crate::common::Setup::SOFT_UNIX, $($case),+);
        instantiate!(shm_tcp, crate::common::Setup::SHM_TCP, $($case),+);
        instantiate!(#[ignore = "needs an RDMA NIC: cargo xtask guest test"] nic, crate::common::Setup::NIC, $($case),+);
    };
}

/// The core of the API, in every way of waiting for completions, on many threads and on one.
macro_rules! core_cases {
    ($($case:ident),+ $(,)?) => {
        instantiate!(soft_tcp_default, crate::common::Setup::SOFT_TCP, $($case),+);
        instantiate!(#[ignore = "needs an RDMA NIC: cargo xtask guest test"] nic_default,
            crate::common::Setup::NIC, $($case),+);
        instantiate!(#[ignore = "needs an RDMA NIC: cargo xtask guest test"] nic_event_single_thread,
            crate::common::Setup::NIC.mode(tokio_rdma::CompletionMode::Event).single_threaded(), $($case),+);
        instantiate!(#[ignore = "needs an RDMA NIC: cargo xtask guest test"] nic_polling,
            crate::common::Setup::NIC.mode(tokio_rdma::CompletionMode::Polling), $($case),+);
        instantiate!(#[ignore = "needs an RDMA NIC: cargo xtask guest test"] nic_polling_thread,
            crate::common::Setup::NIC.mode(tokio_rdma::CompletionMode::PollingThread { cpu: None }), $($case),+);
        instantiate!(soft_unix_default, crate::common::Setup::SOFT_UNIX, $($case),+);
        instantiate!(shm_unix_default, crate::common::Setup::SHM_UNIX, $($case),+);
        instantiate!(shm_tcp_event_single_thread,
            crate::common::Setup::SHM_TCP.mode(tokio_rdma::CompletionMode::Event).single_threaded(), $($case),+);
        instantiate!(shm_unix_event, crate::common::Setup::SHM_UNIX.mode(tokio_rdma::CompletionMode::Event), $($case),+);
        instantiate!(shm_unix_single_thread, crate::common::Setup::SHM_UNIX.single_threaded(), $($case),+);
        instantiate!(shm_unix_polling, crate::common::Setup::SHM_UNIX.mode(tokio_rdma::CompletionMode::Polling), $($case),+);
        instantiate!(shm_unix_polling_thread,
            crate::common::Setup::SHM_UNIX.mode(tokio_rdma::CompletionMode::PollingThread { cpu: None }), $($case),+);
        instantiate!(soft_tcp_event, crate::common::Setup::SOFT_TCP.mode(tokio_rdma::CompletionMode::Event), $($case),+);
        instantiate!(soft_unix_event_single_thread,
            crate::common::Setup::SOFT_UNIX.mode(tokio_rdma::CompletionMode::Event).single_threaded(), $($case),+);
        instantiate!(soft_tcp_single_thread, crate::common::Setup::SOFT_TCP.single_threaded(), $($case),+);
        instantiate!(soft_unix_long_spin,
            crate::common::Setup::SOFT_UNIX.mode(tokio_rdma::CompletionMode::Adaptive { spin: crate::common::run::LONG_SPIN }), $($case),+);
        instantiate!(soft_tcp_polling_single_thread,
            crate::common::Setup::SOFT_TCP.mode(tokio_rdma::CompletionMode::Polling).single_threaded(), $($case),+);
        instantiate!(soft_unix_polling, crate::common::Setup::SOFT_UNIX.mode(tokio_rdma::CompletionMode::Polling), $($case),+);
        instantiate!(soft_tcp_polling_thread,
            crate::common::Setup::SOFT_TCP.mode(tokio_rdma::CompletionMode::PollingThread { cpu: None }), $($case),+);
        instantiate!(soft_unix_polling_thread_single_thread,
            crate::common::Setup::SOFT_UNIX.mode(tokio_rdma::CompletionMode::PollingThread { cpu: Some(0) }).single_threaded(),
            $($case),+);
    };
}

/// Cases that need the software device: its faults, its limits, or a socket to misbehave on.
macro_rules! soft_cases {
    ($($case:ident),+ $(,)?) => {
        instantiate!(tcp, crate::common::Setup::SOFT_TCP, $($case),+);
        instantiate!(unix, crate::common::Setup::SOFT_UNIX, $($case),+);
        instantiate!(shm, crate::common::Setup::SHM_UNIX, $($case),+);
    };
}

/// Cases of two processes: what the first does, and what the second does.
macro_rules! process_cases {
    ($($case:ident => $first:ident, $second:ident);+ $(;)?) => {
        process_cases!(@on #[cfg(test)] two_processes_soft_tcp, SOFT_TCP, $($case, $first, $second);+);
        process_cases!(@on #[ignore = "needs an RDMA NIC: cargo xtask guest test"] two_processes_nic, NIC,
            $($case, $first, $second);+);
        process_cases!(@on #[cfg(test)] two_processes_soft_unix, SOFT_UNIX, $($case, $first, $second);+);
        process_cases!(@on #[cfg(test)] two_processes_shm_unix, SHM_UNIX, $($case, $first, $second);+);
        process_cases!(@on #[cfg(test)] two_processes_shm_tcp, SHM_TCP, $($case, $first, $second);+);
    };
    (@on # $attribute:tt $module:ident, $setup:ident, $($case:ident, $first:ident, $second:ident);+) => {
        mod $module {
            $(
                #[test]
                # $attribute
                fn $case() {
                    use crate::common::process::{test_name, two_processes};
                    let name = test_name(concat!(module_path!(), "::", stringify!($case)));
                    two_processes(name, crate::common::Setup::$setup, super::$first, super::$second);
                }
            )+
        }
    };
}

/// Cases that need a process of their own, because they count what it holds.
macro_rules! lone_cases {
    ($($case:ident),+ $(,)?) => {
        lone_cases!(@on #[cfg(test)] alone_soft_tcp, SOFT_TCP, $($case),+);
        lone_cases!(@on #[ignore = "needs an RDMA NIC: cargo xtask guest test"] alone_nic, NIC, $($case),+);
        lone_cases!(@on #[cfg(test)] alone_soft_unix, SOFT_UNIX, $($case),+);
        lone_cases!(@on #[cfg(test)] alone_shm_unix, SHM_UNIX, $($case),+);
        lone_cases!(@on #[cfg(test)] alone_shm_tcp, SHM_TCP, $($case),+);
    };
    (@on # $attribute:tt $module:ident, $setup:ident, $($case:ident),+) => {
        mod $module {
            $(
                #[test]
                # $attribute
                fn $case() {
                    use crate::common::process::{alone, test_name};
                    let name = test_name(concat!(module_path!(), "::", stringify!($case)));
                    alone(name, crate::common::Setup::$setup, super::$case);
                }
            )+
        }
    };
}

mod atomics;
mod batch;
mod buffers;
mod closing;
mod completions;
mod drops;
mod endpoints;
mod faults;
mod leaks;
mod listener;
mod long;
mod messages;
mod one_sided;
#[cfg(feature = "psk")]
mod pre_shared_keys;
mod processes;
mod progress;
mod queues;
mod receivers;
mod rights;
mod rnr;
mod runtimes;
mod scale;
mod shutdown;
mod srq;
mod stream_ends;
mod streams;
mod timeouts;
