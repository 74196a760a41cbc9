//! What the crate reports through the [metrics](https://docs.rs/metrics) facade.
//!
//! Install a recorder (an exporter for Prometheus, say) **before** a device is opened: the device's counters are bound to the recorder
//! that is there then, once, so that an operation costs two additions and no look-up. Without a recorder they lead nowhere.
//!
//! All have the label `device`, the device's name; several devices of one name are counted together.
//!
//! | name | kind, unit | further labels | what |
//! |---|---|---|---|
//! | [`OPERATIONS`] | counter | `operation`, `status` | operations that have ended, when their futures take the result, or that found the connection closed; not those that were refused for their arguments |
//! | [`BYTES_SENT`] | counter, bytes | | payload of sends and writes that succeeded |
//! | [`BYTES_RECEIVED`] | counter, bytes | | payload of receives and reads that succeeded |
//! | [`SLOT_WAITS`] | counter | | operations that found the queue full and had to wait in line |
//! | [`CONNECTIONS_OPENED`] | counter | `link` | connections made, those that fail to authenticate included |
//! | [`CONNECTIONS_CLOSED`] | counter | `reason` | connections that have ended |
//! | [`CONNECTIONS`] | gauge | | connections that are open |
//! | [`HANDSHAKES_FAILED`] | counter | | clients of a listener that did not get a connection |
//! | [`RNR_SENT`] | counter | | messages that came while no receive was posted here; added when the connection ends, and 0 with a NIC |
//! | [`RNR_RECEIVED`] | counter | | the same at the peers, for messages of this side |
//! | [`REGIONS`] | gauge | | registrations of memory that exist, without those for exposed memory |
//! | [`REGISTERED`] | gauge, bytes | | their length: of host memory and of GPUs', whatever of it counts as locked |
//! | [`GPU_WAITS`] | counter | `for` | operations that had to wait for a GPU: `idle`, until its work on the buffer was done; `visible`, until it saw the bytes |
//!
//! Values of the labels:
//!
//! - `operation`: `send`, `receive`, `write`, `read`, `compare_and_swap`, `fetch_and_add`;
//! - `status`: `success` (of a GPU's memory, that the device is done; the copy to it may fail afterwards), `closed` (the connection ended first; of a shared receive queue, `flushed`), `timeout` (given up; it may have happened all the same), or the status of the
//!   completion: `local_length`, `remote_access`, `retry_exceeded` and so on, as in [`WcStatus`](crate::WcStatus);
//! - `reason`: `local`, `peer`, `link_lost`, `failed`, `protocol`, `runtime_gone`, `device`, as in [`CloseReason`](crate::CloseReason);
//! - `link`: as [`Link`](crate::Link) prints.
//!
//! How often a NIC has sent packets again it counts itself, per port: `/sys/class/infiniband/DEVICE/ports/1/hw_counters`. What concerns one
//! connection is in [`Connection::stats`](crate::Connection::stats).
//!
//! # Cost
//!
//! Without the feature, none: there is nothing to be called. With it and without a recorder, two branches for an operation. With a
//! recorder, two calls of its counters.

/// Operations that have ended.
pub const OPERATIONS: &str = "tokio_rdma_operations_total";
/// Payload sent and written.
pub const BYTES_SENT: &str = "tokio_rdma_sent_bytes_total";
/// Payload received and read.
pub const BYTES_RECEIVED: &str = "tokio_rdma_received_bytes_total";
/// Operations that had to wait for a place in the queue.
pub const SLOT_WAITS: &str = "tokio_rdma_slot_waits_total";
/// Connections made.
pub const CONNECTIONS_OPENED: &str = "tokio_rdma_connections_opened_total";
/// Connections that have ended.
pub const CONNECTIONS_CLOSED: &str = "tokio_rdma_connections_closed_total";
/// Connections that are open.
pub const CONNECTIONS: &str = "tokio_rdma_connections";
/// Clients of a listener that did not get a connection.
pub const HANDSHAKES_FAILED: &str = "tokio_rdma_handshakes_failed_total";
/// Messages that came while no receive was posted here.
pub const RNR_SENT: &str = "tokio_rdma_rnr_sent_total";
/// Messages of this side that came while the peer had no receive posted.
pub const RNR_RECEIVED: &str = "tokio_rdma_rnr_received_total";
/// Registrations of memory that exist.
pub const REGIONS: &str = "tokio_rdma_regions";
/// The length of these.
pub const REGISTERED: &str = "tokio_rdma_registered_bytes";
/// Operations that had to wait for a GPU.
pub const GPU_WAITS: &str = "tokio_rdma_gpu_waits_total";
