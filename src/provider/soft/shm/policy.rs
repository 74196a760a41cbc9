//! Which links a program wants.

use crate::error::{Error, Result};

/// Names the policy of devices whose program does not: `auto`, `sockets` or `shm`.
const VARIABLE: &str = "TOKIO_RDMA_LINK";

/// How the software device carries its connections. See [`DeviceBuilder::links`](crate::DeviceBuilder::links).
///
/// [`Connection::link`](crate::Connection::link) says what it came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkPolicy {
    /// Shared memory between processes of one host and one user (and within a process), where both ends agree and nothing stands in
    /// the way; otherwise the socket that they connected through. The default.
    #[default]
    Auto,
    /// Sockets only: for peers of the same user that are not trusted with more (see the module [`soft`](crate::soft)), and for
    /// programs that expose and take back memory all the time for peers on other hosts.
    Sockets,
    /// Shared memory only: connecting fails, and says why, where it cannot be had.
    SharedMemory,
}

impl LinkPolicy {
    /// What the program chose, or else the environment.
    pub(crate) fn or_from_environment(chosen: Option<Self>) -> Result<Self> {
        if let Some(policy) = chosen {
            return Ok(policy);
        }
        let Some(value) = std::env::var_os(VARIABLE) else { return Ok(Self::default()) };
        match value.to_str() {
            Some("") => Ok(Self::default()),
            Some("auto") => Ok(Self::Auto),
            Some("sockets") => Ok(Self::Sockets),
            Some("shm") => Ok(Self::SharedMemory),
            _ => Err(Error::Invalid {
                operation: "open",
                reason: format!("{VARIABLE} is {value:?}; it can be auto, sockets or shm"),
            }),
        }
    }
}
