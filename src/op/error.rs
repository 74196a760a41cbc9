//! An error that carries the buffer back.

use std::fmt;

use crate::error::Error;

/// Why an operation failed, and the buffer it was given.
///
/// The buffer is there in every case but one: after a [timeout](crate::Error::Timeout) of an operation that was already posted,
/// the device may still write to it or read it. It is then released by itself when the device lets go
/// (a pooled buffer goes back to its pool).
///
/// `?` turns it into an [`Error`] and drops the buffer.
pub struct OpError<B>(Box<Inner<B>>);

/// Apart, so that the result of an operation is not much larger than its buffer: it is moved at every operation,
/// and this is not there at most of them.
struct Inner<B> {
    error: Error,
    buffer: Option<B>,
}

impl<B> OpError<B> {
    pub(crate) fn new(error: Error, buffer: Option<B>) -> Self {
        Self(Box::new(Inner { error, buffer }))
    }

    /// The same with another view of the buffer.
    pub(crate) fn with<C>(self, buffer: impl FnOnce(B) -> Option<C>) -> OpError<C> {
        OpError::new(self.0.error, self.0.buffer.and_then(buffer))
    }

    /// What went wrong.
    pub fn error(&self) -> &Error {
        &self.0.error
    }

    /// The buffer, if the device has let go of it.
    pub fn into_buffer(self) -> Option<B> {
        self.0.buffer
    }

    /// Both.
    pub fn into_parts(self) -> (Error, Option<B>) {
        (self.0.error, self.0.buffer)
    }
}

impl<B> From<OpError<B>> for Error {
    fn from(error: OpError<B>) -> Self {
        error.0.error
    }
}

impl<B> fmt::Debug for OpError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpError").field("error", &self.0.error).field("has_buffer", &self.0.buffer.is_some()).finish()
    }
}

impl<B> fmt::Display for OpError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.error.fmt(f)
    }
}

impl<B> std::error::Error for OpError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.0.error)
    }
}
