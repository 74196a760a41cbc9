//! What can go wrong.

use std::time::Duration;

/// Why an operation of the store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A length that the table has no room for. Nothing was changed.
    #[error("{operation}: {what} is {value}, the limit is {limit}; {hint}")]
    Limit { operation: &'static str, what: &'static str, value: u64, limit: u64, hint: &'static str },

    /// All slots that the key could be in are taken by others. Nothing was changed.
    #[error(
        "put: keys in the slots of this one are {value}, the limit is {limit}; delete some, or start the server with more --slots"
    )]
    Full { value: u64, limit: u64 },

    /// The slot was never found whole: somebody writes it all the time, or was stopped while writing.
    #[error(
        "get: reads that met a writer are {reads} within {after:?}; try again later, or store values that change less often"
    )]
    Contended { reads: u64, after: Duration },

    /// The server has not answered, and may or may not have done what it was asked to.
    #[error("{operation}: no answer within {after:?}; is the server alive?")]
    NoAnswer { operation: &'static str, after: Duration },

    /// The other side does not speak this protocol.
    #[error("{operation}: {reason}")]
    Protocol { operation: &'static str, reason: String },

    /// The connection, or the device.
    #[error(transparent)]
    Rdma(#[from] tokio_rdma::Error),
}

impl<B> From<tokio_rdma::op::OpError<B>> for StoreError {
    fn from(error: tokio_rdma::op::OpError<B>) -> Self {
        Self::Rdma(error.into())
    }
}
