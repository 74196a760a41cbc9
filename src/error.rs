//! What can go wrong, told with operation, value, limit and a hint.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::memory::Access;

/// The result of everything in this crate that has no buffer to hand back.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Which verb failed, as errors name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// A Send, with or without immediate data.
    Send,
    /// A Receive.
    Receive,
    /// An RDMA Write, with or without immediate data.
    Write,
    /// An RDMA Read.
    Read,
    /// An atomic compare-and-swap.
    CompareSwap,
    /// An atomic fetch-and-add.
    FetchAdd,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Write => "write",
            Self::Read => "read",
            Self::CompareSwap => "compare-and-swap",
            Self::FetchAdd => "fetch-and-add",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The status of a work completion, numbered as `enum ibv_wc_status` in `<infiniband/verbs.h>`.
///
/// The meaning of each is in `ibv_poll_cq(3)` and in the InfiniBand specification, volume 1, section 11.6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the specification's
pub enum WcStatus {
    Success,
    LocalLength,
    LocalQpOperation,
    LocalProtection,
    Flushed,
    BadResponse,
    LocalAccess,
    RemoteInvalidRequest,
    RemoteAccess,
    RemoteOperation,
    RetryExceeded,
    RnrRetryExceeded,
    Fatal,
    General,
    /// A status this version of the crate has no name for.
    Other(u32),
}

impl WcStatus {
    /// The status with this number in `enum ibv_wc_status`.
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Success,
            1 => Self::LocalLength,
            2 => Self::LocalQpOperation,
            4 => Self::LocalProtection,
            5 => Self::Flushed,
            7 => Self::BadResponse,
            8 => Self::LocalAccess,
            9 => Self::RemoteInvalidRequest,
            10 => Self::RemoteAccess,
            11 => Self::RemoteOperation,
            12 => Self::RetryExceeded,
            13 => Self::RnrRetryExceeded,
            19 => Self::Fatal,
            21 => Self::General,
            other => Self::Other(other),
        }
    }

    /// The number of this status in `enum ibv_wc_status`.
    pub fn as_raw(self) -> u32 {
        match self {
            Self::Success => 0,
            Self::LocalLength => 1,
            Self::LocalQpOperation => 2,
            Self::LocalProtection => 4,
            Self::Flushed => 5,
            Self::BadResponse => 7,
            Self::LocalAccess => 8,
            Self::RemoteInvalidRequest => 9,
            Self::RemoteAccess => 10,
            Self::RemoteOperation => 11,
            Self::RetryExceeded => 12,
            Self::RnrRetryExceeded => 13,
            Self::Fatal => 19,
            Self::General => 21,
            Self::Other(raw) => raw,
        }
    }

    /// Whether this status is the caller's mistake (a wrong length, key or right) rather than a network failure:
    /// reconnecting and trying the same again fails the same way.
    pub fn is_caller_error(self) -> bool {
        matches!(
            self,
            Self::LocalLength
                | Self::LocalQpOperation
                | Self::LocalProtection
                | Self::LocalAccess
                | Self::RemoteInvalidRequest
                | Self::RemoteAccess
        )
    }

    fn hint(self) -> &'static str {
        match self {
            Self::LocalLength => "the message is longer than the posted receive buffer, or than the queue pair's limit",
            Self::LocalProtection => "a local buffer's key does not cover the bytes named",
            Self::Flushed => "the queue pair went into the error state before this operation ran",
            Self::RemoteAccess => {
                "the peer's key is unknown or revoked, does not grant this right, or does not cover these bytes"
            }
            Self::RemoteInvalidRequest => {
                "the peer cannot carry this request out: check its length, its alignment and the peer's limits"
            }
            Self::RemoteOperation => "the peer could not complete the request",
            Self::Fatal => "the device, or the GPU whose memory this is, does not work any more",
            Self::RetryExceeded => {
                "the peer did not answer within timeout x (retry_count + 1): is it alive and reachable?"
            }
            Self::RnrRetryExceeded => {
                "the peer posted no receive within rnr_timer x (rnr_retry + 1): post receives earlier, or raise rnr_retry (7 = without limit)"
            }
            _ => "see ibv_poll_cq(3)",
        }
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Success => "success",
            Self::LocalLength => "local length error",
            Self::LocalQpOperation => "local queue pair operation error",
            Self::LocalProtection => "local protection error",
            Self::Flushed => "work request flushed",
            Self::BadResponse => "bad response",
            Self::LocalAccess => "local access error",
            Self::RemoteInvalidRequest => "remote invalid request",
            Self::RemoteAccess => "remote access error",
            Self::RemoteOperation => "remote operation error",
            Self::RetryExceeded => "transport retry count exceeded",
            Self::RnrRetryExceeded => "receiver-not-ready retry count exceeded",
            Self::Fatal => "fatal error",
            Self::General => "general error",
            Self::Other(_) => "unknown status",
        };
        write!(f, "{name} (status {})", self.as_raw())
    }
}

/// Where an operation failed in the peer's memory, for the error's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteTarget {
    /// First byte, in the peer's address space.
    pub address: u64,
    /// Length of the operation in bytes.
    pub length: u64,
    /// The key that was presented.
    pub rkey: u32,
}

/// Why a connection ended. Cheap to clone; every pending operation gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// `close()` was called, or the last handle was dropped, on this side.
    Local,
    /// The peer closed in an orderly way. With an RDMA NIC also when its process died: its kernel says goodbye for it.
    Peer,
    /// The link to the peer broke: its process died, or its host is gone. The text is the system's.
    LinkLost(Arc<str>),
    /// An operation failed, and a reliable queue pair stops at its first failure.
    Failed(WcStatus),
    /// The peer sent something that the protocol does not allow.
    Protocol(Arc<str>),
    /// The runtime that drove this device's completions was shut down.
    RuntimeGone,
    /// The device failed or was removed.
    Device(Arc<str>),
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("closed on this side"),
            Self::Peer => f.write_str("closed by the peer"),
            Self::LinkLost(why) => write!(f, "the link to the peer is lost ({why})"),
            Self::Failed(status) => write!(f, "an earlier operation failed: {status}"),
            Self::Protocol(why) => write!(f, "the peer broke the protocol: {why}"),
            Self::RuntimeGone => f.write_str("the tokio runtime that drove this device was shut down"),
            Self::Device(why) => write!(f, "the device failed: {why}"),
        }
    }
}

/// Any failure in this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No device has this name.
    #[error("no RDMA device named {name:?}; this machine has {}{}", available.join(", "), nics_text(no_nics))]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// The names that exist.
        available: Vec<String>,
        /// Why there can be no RDMA NICs among them, if so: a library that is missing, say.
        no_nics: Option<String>,
    },

    /// No RDMA NIC near a GPU, or another function, can be used.
    #[error("no RDMA NIC near {function}: {}", crate::topology::listed(candidates))]
    NoNearNic {
        /// The GPU.
        function: crate::topology::PciAddress,
        /// Every NIC, with how near it is and why it cannot be used.
        candidates: Vec<crate::topology::Candidate>,
    },

    /// A value is outside of what the device, the connection or the buffer allows. Nothing was posted.
    #[error("{operation}: {what} is {value}, the limit is {limit}{}", hint_text(hint))]
    Limit {
        /// What was attempted, for example `write` or `connect`.
        operation: &'static str,
        /// Which value, for example `length`.
        what: &'static str,
        /// The value given.
        value: u64,
        /// The largest (or, where the hint says so, the smallest) value allowed.
        limit: u64,
        /// What to do about it; may be empty.
        hint: &'static str,
    },

    /// A buffer was used with a connection of another protection domain.
    #[error(
        "{operation}: the buffer belongs to protection domain {buffer}, the connection to {connection}; \
         a key is only valid in the domain that it was made in"
    )]
    ForeignBuffer {
        /// The operation.
        operation: Operation,
        /// Number of the buffer's protection domain.
        buffer: u64,
        /// Number of the connection's protection domain.
        connection: u64,
    },

    /// The descriptor does not grant what the operation needs. Nothing was posted.
    #[error("{operation}: needs {needed}, but the remote region grants {granted}")]
    Access {
        /// The operation.
        operation: Operation,
        /// The right it needs.
        needed: Access,
        /// The rights that the descriptor grants.
        granted: Access,
    },

    /// An argument that no limit describes is wrong. Nothing was posted.
    #[error("{operation}: {reason}")]
    Invalid {
        /// What was attempted.
        operation: &'static str,
        /// What is wrong with which value.
        reason: String,
    },

    /// The connection is closed; the operation did not run, or its outcome is unknown.
    #[error("{operation}: the connection is closed: {reason}")]
    Closed {
        /// What was attempted.
        operation: &'static str,
        /// Why it is closed.
        reason: CloseReason,
    },

    /// The operation completed with an error.
    #[error("{operation} failed: {status}{}; {}", remote_text(remote), status.hint())]
    Completion {
        /// The operation.
        operation: Operation,
        /// The completion's status.
        status: WcStatus,
        /// The provider's own code, 0 where it has none.
        vendor_error: u32,
        /// The remote memory named by the operation, if any.
        remote: Option<RemoteTarget>,
    },

    /// The deadline passed before the operation completed.
    ///
    /// The operation may still take effect. Its buffer stays quarantined until the device reports its completion or the
    /// queue pair ends, and is released then.
    #[error("{operation}: not done within {after:?}; {hint}")]
    Timeout {
        /// What was attempted.
        operation: &'static str,
        /// The deadline.
        after: Duration,
        /// What it means for the buffer, or who did not answer.
        hint: Cow<'static, str>,
    },

    /// The queue is full and the caller asked not to wait.
    #[error(
        "{operation}: all {depth} slots of the queue are in use; await the operation to wait for one, or raise the depth"
    )]
    QueueFull {
        /// The operation.
        operation: Operation,
        /// Slots in the queue.
        depth: usize,
    },

    /// The connection takes its receives from a shared receive queue, so none can be posted on the connection itself.
    #[error(
        "{operation}: this connection receives through a shared receive queue; use SharedReceiveQueue::receive, or its receiver"
    )]
    SharedReceiveQueue {
        /// What was attempted.
        operation: &'static str,
    },

    /// Connection setup failed.
    #[error("{step} with {peer}: {reason}")]
    Handshake {
        /// Which step: `connect`, `request`, `reply`, `ready`.
        step: &'static str,
        /// The peer's address.
        peer: String,
        /// What happened.
        reason: String,
    },

    /// The two ends have not proved to each other that they have the same pre-shared key.
    #[error("authenticate {peer}: {reason}")]
    Authentication {
        /// The peer's address.
        peer: String,
        /// Which end lacks what.
        reason: crate::connection::AuthenticationFailure,
    },

    /// The peer's program got the request and said no.
    #[error("{operation}: the peer refused: {reason}")]
    Refused {
        /// What was asked for.
        operation: &'static str,
        /// Its answer.
        reason: String,
    },

    /// Bytes that should be a descriptor are not one.
    #[error("not a valid {what}: {reason}")]
    Descriptor {
        /// Which kind of descriptor.
        what: &'static str,
        /// What is wrong.
        reason: String,
    },

    /// The device or this build cannot do that.
    #[error("{operation} is not supported by {device}: {hint}")]
    Unsupported {
        /// What was attempted.
        operation: &'static str,
        /// The device.
        device: String,
        /// What would.
        hint: &'static str,
    },

    /// A GPU, its driver or its memory.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(Box<crate::gpu::GpuError>),

    /// The system refused.
    #[error("{operation} {target}: {cause}")]
    Io {
        /// What was attempted, for example `bind`.
        operation: &'static str,
        /// On what: an address or a length.
        target: String,
        /// The system's answer. It is part of the text, and therefore not repeated by [`source`](std::error::Error::source).
        cause: std::io::Error,
    },
}

impl Error {
    /// Whether the same operation would fail again on a fresh connection, because the arguments are wrong.
    ///
    /// Use it to decide whether to reconnect: a caller's error is no reason to.
    pub fn is_caller_error(&self) -> bool {
        match self {
            Self::Completion { status, .. } => status.is_caller_error(),
            Self::Limit { .. }
            | Self::ForeignBuffer { .. }
            | Self::Access { .. }
            | Self::Invalid { .. }
            | Self::Descriptor { .. }
            | Self::UnknownDevice { .. }
            | Self::SharedReceiveQueue { .. }
            | Self::Unsupported { .. } => true,
            // What the peer sent in its place may be a fault of the moment.
            Self::Authentication { reason, .. } => *reason != crate::connection::AuthenticationFailure::NoProof,
            #[cfg(feature = "cuda")]
            Self::Gpu(error) => error.is_caller_error(),
            _ => false,
        }
    }

    pub(crate) fn io(operation: &'static str, target: impl fmt::Display, cause: std::io::Error) -> Self {
        Self::Io { operation, target: target.to_string(), cause }
    }
}

fn hint_text(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!("; {hint}") }
}

fn nics_text(reason: &Option<String>) -> String {
    reason.as_ref().map_or_else(String::new, |reason| format!("; RDMA NICs cannot be used: {reason}"))
}

fn remote_text(remote: &Option<RemoteTarget>) -> String {
    match remote {
        Some(r) => format!(" at remote address {:#x}, length {}, rkey {:#x}", r.address, r.length, r.rkey),
        None => String::new(),
    }
}
