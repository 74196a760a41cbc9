//! The operations, one file per verb. Each is a named future that owns its buffer and gives it back.

mod atomic;
mod batch;
pub(crate) mod core;
mod error;
mod pieces;
mod read;
mod receive;
pub(crate) mod role;
mod send;
pub(crate) mod shared;
pub(crate) mod timeout;
mod typed;
mod write;

pub use self::atomic::{CompareSwapOp, FetchAddOp};
pub use self::batch::{Batch, BatchError, PostBatch};
pub use self::error::OpError;
pub use self::read::ReadOp;
pub use self::receive::{ReceiveOp, Received};
pub use self::send::SendOp;
pub use self::shared::SharedReceiveOp;
pub use self::timeout::Timeout;
pub use self::write::WriteOp;
