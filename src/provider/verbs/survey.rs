//! What a device says of itself that is in no file: asked for a report, not on the way of any operation.

use std::io;

use super::device::Context;
use super::memory::Pd;
use crate::error::{Error, Result};

/// The answers.
#[derive(Debug)]
pub(crate) struct Survey {
    /// Of the port in use, in bytes.
    pub(crate) active_mtu: u32,
    /// The same.
    pub(crate) max_mtu: u32,
    /// What registering a dma-buf that is none says: `EBADF` from a device that can register dma-bufs.
    pub(crate) dma_buf: io::Result<()>,
}

/// Opens the device, asks, and closes it again.
pub(crate) fn survey(name: &str) -> Result<Survey> {
    let Some(context) = Context::open(name, false)? else {
        return Err(Error::Invalid { operation: "open", reason: format!("libibverbs shows no device named {name}") });
    };
    let port = &context.inner().device().port_attr;
    let (active_mtu, max_mtu) = (bytes(port.active_mtu), bytes(port.max_mtu));
    let dma_buf = Pd::alloc(context.inner())?.probe_dmabuf();
    Ok(Survey { active_mtu, max_mtu, dma_buf })
}

/// `enum ibv_mtu`: 1 is 256 bytes, and each next one twice as much.
fn bytes(mtu: u32) -> u32 {
    if (1..=5).contains(&mtu) { 128 << mtu } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::verbs::sys;

    #[test]
    fn mtus_in_bytes() {
        assert_eq!(bytes(sys::IBV_MTU_256), 256);
        assert_eq!(bytes(sys::IBV_MTU_1024), 1024);
        assert_eq!(bytes(sys::IBV_MTU_4096), 4096);
        assert_eq!((bytes(0), bytes(99)), (0, 0));
    }

    #[test]
    fn a_device_that_is_not_there() {
        let text = survey("no-such-device").unwrap_err().to_string();
        assert!(text.contains("no-such-device") || text.contains("libibverbs"), "{text}");
    }
}
