//! A stand-in for NVIDIA's driver library, `libcuda.so.1`, for tests on machines without a GPU.
//!
//! It exports the part of the driver API that this project and cudarc use, and of the management library
//! `libnvidia-ml.so.1` what tells of NVLinks. Device memory is out of the CPU's reach, streams run by themselves, and a program that
//! uses what it has given back is ended with a message: mistakes show here as they would on a real machine, or sooner.
//!
//! A test calls [`load`] before anything of CUDA:
//!
//! ```no_run
//! let fake = fake_cuda::load().expect("the stand-in is built with the tests");
//! fake.set("event_polls", 3);
//! // ... CUDA by way of cudarc ...
//! assert_eq!(fake.get("live_allocations"), 0);
//! ```
//!
//! # Knobs
//!
//! Set by [`Fake::set`], or when the library is loaded by the variable `FAKE_CUDA_` and the name in capitals
//! (`FAKE_CUDA_EVENT_POLLS=3`):
//!
//! | name | meaning | default |
//! |---|---|---|
//! | `devices` | number of devices; only before the first call | 2 |
//! | `memory` | bytes of each device; only before the first call | 8 GiB |
//! | `driver_version` | as `cuDriverGetVersion` gives it | 13000 |
//! | `compute_capability` | of each device, ten times: 90 is 9.0 | 90 |
//! | `host_visible` | 1: the CPU may touch device memory at its device address | 0 |
//! | `event_polls` | how often a finished event still answers "not ready" to a query | 0 |
//! | `copy_delay_us` | how long a stream waits before each copy | 0 |
//! | `kernel_delay_us` | how long a stream waits before each kernel | 0 |
//! | `writes_ordering` | whom a NIC's writes reach in order: 0 nobody, 100 the device, 200 all devices | 100 |
//! | `flush_options` | 1: `cuFlushGPUDirectRDMAWrites` works | 1 |
//! | `c2c` | 1: CPU and GPU share page tables | 0 |
//! | `dmabuf` | 1: memory can be exported as a dma-buf | 1 |
//! | `gdr` | 1: memory can be registered with a NIC | 1 |
//! | `memory_pools` | 1: `cuMemAllocAsync` works | 1 |
//! | `nvlink_kind` | what NVLinks lead to: 2 switches, 0 the next device | 2 |
//! | `nvlink_state` | as `nvmlDeviceGetNvLinkState` gives it of links that are there | 1 |
//! | `nvlink_status` | if not 0, how that function fails instead | 0 |
//! | `nvml_status` | if not 0, how `nvmlInit_v2` fails | 0 |
//! | `reset` | sets all of these to their defaults, counters to 0, and forgets failures | |
//!
//! The variable `FAKE_CUDA_PCI_BUS_IDS` lists where the devices are plugged in, as `0000:17:00.0,0000:27:00.0`. `FAKE_CUDA_NVLINKS` lists how
//! many NVLinks each has, the last number counting for all further ones (none by default), and `FAKE_CUDA_NVLINK_ENDS` is what is said to be
//! the address of the other end of each.
//!
//! # Counters
//!
//! Read by [`Fake::get`]: `live_allocations`, `live_bytes` (device and managed memory), `live_host_allocations`
//! (allocated or registered), `live_events`, `live_streams`, `live_modules`, `live_contexts`, `open_handles`
//! (descriptors of exported memory that are open now), `leaked` (objects that were alive when their context ended),
//! `flushes`, `launches`, `copies_h2d`, `copies_d2h`, `copies_d2d`, `bytes_h2d`, `bytes_d2h`, `bytes_d2d`; and by the
//! name of any function of the driver, how often it was called.
//!
//! # What it does not do
//!
//! Graphs, arrays, occupancy, contexts beside the primary one, pools beside the default one, sharing with other
//! processes but for memory of `cuMemCreate` that was asked for as a descriptor. The default stream orders nothing but itself, as for streams that are made with
//! `CU_STREAM_NON_BLOCKING`, and threads share the stream that stands for each one's own. Memory of `cuMemCreate` is
//! mapped as a whole, and begins anew at each place unless it is shared. Kernels are those of `tests/gpu/kernels.ptx` and of the
//! parameter server among the examples, by name, whatever the image is.

mod driver;
mod library;

pub use library::{Fake, MANAGEMENT, directory, load, path};
