//! Which way an operation moves the bytes of its buffer.

/// What a buffer is to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Bytes leave it: a Send, a Write.
    Source,
    /// Bytes come into it: a Receive, a Read.
    Target,
}
