//! From the end of a connection to an error of the I/O traits.

use std::io;

use crate::connection::Connection;
use crate::error::{CloseReason, Error, WcStatus};

/// Why a stream failed, one of whose operations ended in this error.
pub(super) fn reason(error: Error, connection: &Connection) -> CloseReason {
    match error {
        Error::Closed { reason, .. } => reason,
        // What was under way when the link broke has timed out, say; the connection knows what happened first.
        Error::Completion { status, .. } => connection.close_reason().unwrap_or(CloseReason::Failed(status)),
        other => CloseReason::Device(other.to_string().into()),
    }
}

/// The error that reading or writing ends in, with the crate's [`Error`] inside.
pub(super) fn io_error(operation: &'static str, reason: &CloseReason) -> io::Error {
    let kind = match reason {
        CloseReason::Peer | CloseReason::LinkLost(_) => io::ErrorKind::ConnectionReset,
        CloseReason::Local => io::ErrorKind::ConnectionAborted,
        CloseReason::Failed(WcStatus::RetryExceeded | WcStatus::RnrRetryExceeded) => io::ErrorKind::TimedOut,
        // The other end refused what a stream sends, or did not understand it.
        CloseReason::Failed(_) => io::ErrorKind::InvalidData,
        CloseReason::Protocol(_) => io::ErrorKind::InvalidData,
        CloseReason::RuntimeGone | CloseReason::Device(_) => io::ErrorKind::Other,
    };
    io::Error::new(kind, Error::Closed { operation, reason: reason.clone() })
}

/// Writing after the end was said.
pub(super) fn after_shutdown() -> io::Error {
    let reason = "the stream was shut down for writing before".to_owned();
    io::Error::new(io::ErrorKind::BrokenPipe, Error::Invalid { operation: "write to the stream", reason })
}
