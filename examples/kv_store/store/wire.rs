//! The messages.

use serde::{Deserialize, Serialize};
use tokio_rdma::Buffer;

use super::{Shape, StoreError};

/// What a client asks for. The answer has the same number.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Request<'a> {
    pub number: u64,
    #[serde(borrow)]
    pub call: Call<'a>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Call<'a> {
    Put { key: &'a [u8], value: &'a [u8] },
    Delete { key: &'a [u8] },
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    pub number: u64,
    pub outcome: Outcome,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    Stored {
        version: u64,
    },
    Deleted {
        existed: bool,
    },
    Full {
        value: u64,
        limit: u64,
    },
    /// A client that checks what it asks for does not get this.
    Refused {
        why: String,
    },
}

/// The longest answer; a reason is cut to fit.
pub const ANSWER: usize = 256;

/// The longest request: its numbers take less than what is added.
pub fn longest_request(shape: Shape) -> usize {
    shape.key_capacity() + shape.value_capacity() + 64
}

impl Outcome {
    pub fn of_error(error: StoreError) -> Self {
        match error {
            StoreError::Full { value, limit } => Self::Full { value, limit },
            other => Self::Refused { why: other.to_string().chars().take(ANSWER / 8).collect() },
        }
    }
}

/// Writes a message to the start of `bytes`, and tells its length.
pub fn encode(message: &impl Serialize, bytes: &mut [u8]) -> Result<usize, StoreError> {
    Ok(postcard::to_slice(message, bytes).map_err(|error| fault("encode", error))?.len())
}

pub fn decode<'a, T: Deserialize<'a>>(operation: &'static str, bytes: &'a [u8]) -> Result<T, StoreError> {
    postcard::from_bytes(bytes).map_err(|error| fault(operation, error))
}

/// The whole buffer of a message again, after its first part was sent.
pub fn joined(first: Buffer, rest: Buffer) -> Result<Buffer, StoreError> {
    first.unsplit(rest).map_err(|_| StoreError::Protocol {
        operation: "send",
        reason: "the buffer came back as another one".to_owned(),
    })
}

fn fault(operation: &'static str, error: postcard::Error) -> StoreError {
    StoreError::Protocol { operation, reason: format!("not a message of this store: {error}") }
}
