//! The counters, bound to the program's recorder.

use std::fmt;
use std::sync::Arc;

use ::metrics::{Counter, Gauge, SharedString, Unit, counter, describe_counter, describe_gauge, gauge};

use crate::error::{CloseReason, Error, Operation, WcStatus};
use crate::metrics as names;
use crate::provider::{Link, QpCounters};

/// Those of a device. What happens at every operation is bound when the device is opened; what is rare is looked up.
#[derive(Clone)]
pub(crate) struct Meters(Arc<Bound>);

struct Bound {
    device: SharedString,
    /// In the order of [`index`].
    succeeded: [Counter; 6],
    sent: Counter,
    received: Counter,
    slot_waits: Counter,
    connections: Gauge,
    regions: Gauge,
    registered: Gauge,
    #[cfg(feature = "cuda")]
    gpu_waits: [Counter; 2],
}

const OPERATIONS: [Operation; 6] = [
    Operation::Send,
    Operation::Receive,
    Operation::Write,
    Operation::Read,
    Operation::CompareSwap,
    Operation::FetchAdd,
];

fn index(operation: Operation) -> usize {
    match operation {
        Operation::Send => 0,
        Operation::Receive => 1,
        Operation::Write => 2,
        Operation::Read => 3,
        Operation::CompareSwap => 4,
        Operation::FetchAdd => 5,
    }
}

impl Meters {
    pub(crate) fn new(device: &str) -> Self {
        describe();
        let device = SharedString::from(device.to_owned());
        let succeeded = OPERATIONS.map(|operation| {
            counter!(names::OPERATIONS, "device" => device.clone(), "operation" => operation_label(operation), "status" => "success")
        });
        Self(Arc::new(Bound {
            succeeded,
            sent: counter!(names::BYTES_SENT, "device" => device.clone()),
            received: counter!(names::BYTES_RECEIVED, "device" => device.clone()),
            slot_waits: counter!(names::SLOT_WAITS, "device" => device.clone()),
            connections: gauge!(names::CONNECTIONS, "device" => device.clone()),
            regions: gauge!(names::REGIONS, "device" => device.clone()),
            registered: gauge!(names::REGISTERED, "device" => device.clone()),
            #[cfg(feature = "cuda")]
            gpu_waits: ["idle", "visible"]
                .map(|what| counter!(names::GPU_WAITS, "device" => device.clone(), "for" => what)),
            device,
        }))
    }

    #[inline]
    pub(crate) fn completed(&self, operation: Operation, bytes: u64) {
        self.0.succeeded[index(operation)].increment(1);
        match operation {
            Operation::Send | Operation::Write => self.0.sent.increment(bytes),
            Operation::Receive | Operation::Read => self.0.received.increment(bytes),
            Operation::CompareSwap | Operation::FetchAdd => {}
        }
    }

    /// An operation has ended in this error. One that was refused for its arguments never was one.
    #[cold]
    pub(crate) fn failed(&self, operation: Operation, error: &Error) {
        let status = match error {
            Error::Closed { .. } => "closed",
            Error::Timeout { .. } => "timeout",
            Error::Completion { status, .. } => status_label(*status),
            _ => return,
        };
        let device = self.0.device.clone();
        counter!(names::OPERATIONS, "device" => device, "operation" => operation_label(operation), "status" => status)
            .increment(1);
    }

    pub(crate) fn slot_wait(&self) {
        self.0.slot_waits.increment(1);
    }

    pub(crate) fn opened(&self, link: Link) {
        let device = self.0.device.clone();
        counter!(names::CONNECTIONS_OPENED, "device" => device, "link" => link.to_string()).increment(1);
        self.0.connections.increment(1.0);
    }

    pub(crate) fn closed(&self, reason: &CloseReason, counters: QpCounters) {
        let device = || self.0.device.clone();
        counter!(names::CONNECTIONS_CLOSED, "device" => device(), "reason" => reason_label(reason)).increment(1);
        counter!(names::RNR_SENT, "device" => device()).increment(counters.rnr_naks_sent);
        counter!(names::RNR_RECEIVED, "device" => device()).increment(counters.rnr_naks_received);
        self.0.connections.decrement(1.0);
    }

    pub(crate) fn handshake_failed(&self) {
        counter!(names::HANDSHAKES_FAILED, "device" => self.0.device.clone()).increment(1);
    }

    pub(super) fn registered(&self, len: usize) {
        self.0.regions.increment(1.0);
        self.0.registered.increment(len as f64);
    }

    pub(super) fn deregistered(&self, len: usize) {
        self.0.regions.decrement(1.0);
        self.0.registered.decrement(len as f64);
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn gpu_wait(&self, wait: super::GpuWait) {
        self.0.gpu_waits[wait as usize].increment(1);
    }
}

impl fmt::Debug for Meters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Meters").field(&self.0.device).finish()
    }
}

fn describe() {
    let counters = [
        (names::OPERATIONS, Unit::Count, "Operations that have ended."),
        (names::BYTES_SENT, Unit::Bytes, "Payload of sends and writes that succeeded."),
        (names::BYTES_RECEIVED, Unit::Bytes, "Payload of receives and reads that succeeded."),
        (names::SLOT_WAITS, Unit::Count, "Operations that had to wait for a place in the queue."),
        (names::CONNECTIONS_OPENED, Unit::Count, "Connections made."),
        (names::CONNECTIONS_CLOSED, Unit::Count, "Connections that have ended."),
        (names::HANDSHAKES_FAILED, Unit::Count, "Clients of a listener that did not get a connection."),
        (names::RNR_SENT, Unit::Count, "Messages that came while no receive was posted here."),
        (names::RNR_RECEIVED, Unit::Count, "Messages of this side that came while the peer had no receive posted."),
        (names::GPU_WAITS, Unit::Count, "Operations that had to wait for a GPU."),
    ];
    for (name, unit, text) in counters {
        describe_counter!(name, unit, text);
    }
    let gauges = [
        (names::CONNECTIONS, Unit::Count, "Connections that are open."),
        (names::REGIONS, Unit::Count, "Registrations of memory that exist."),
        (names::REGISTERED, Unit::Bytes, "Length of the registrations that exist."),
    ];
    for (name, unit, text) in gauges {
        describe_gauge!(name, unit, text);
    }
}

fn operation_label(operation: Operation) -> &'static str {
    match operation {
        Operation::CompareSwap => "compare_and_swap",
        Operation::FetchAdd => "fetch_and_add",
        other => other.name(),
    }
}

fn status_label(status: WcStatus) -> &'static str {
    match status {
        WcStatus::Success => "success",
        WcStatus::LocalLength => "local_length",
        WcStatus::LocalQpOperation => "local_qp_operation",
        WcStatus::LocalProtection => "local_protection",
        WcStatus::Flushed => "flushed",
        WcStatus::BadResponse => "bad_response",
        WcStatus::LocalAccess => "local_access",
        WcStatus::RemoteInvalidRequest => "remote_invalid_request",
        WcStatus::RemoteAccess => "remote_access",
        WcStatus::RemoteOperation => "remote_operation",
        WcStatus::RetryExceeded => "retry_exceeded",
        WcStatus::RnrRetryExceeded => "rnr_retry_exceeded",
        WcStatus::Fatal => "fatal",
        WcStatus::General => "general",
        WcStatus::Other(_) => "other",
    }
}

fn reason_label(reason: &CloseReason) -> &'static str {
    match reason {
        CloseReason::Local => "local",
        CloseReason::Peer => "peer",
        CloseReason::LinkLost(_) => "link_lost",
        CloseReason::Failed(_) => "failed",
        CloseReason::Protocol(_) => "protocol",
        CloseReason::RuntimeGone => "runtime_gone",
        CloseReason::Device(_) => "device",
    }
}
