//! What the environment sets.

use std::time::Duration;

use anyhow::{bail, Context, Result};
use async_rdma::{RdmaBuilder, MTU};

pub fn variable(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.to_owned())
}

fn number(name: &str, default: &str) -> Result<usize> {
    let text = variable(name, default);
    text.parse().with_context(|| format!("{name}={text}"))
}

pub fn builder() -> Result<RdmaBuilder> {
    let mtu = match number("RDMA_MTU", "1024")? {
        256 => MTU::MTU256,
        512 => MTU::MTU512,
        1024 => MTU::MTU1024,
        2048 => MTU::MTU2048,
        4096 => MTU::MTU4096,
        other => bail!("RDMA_MTU={other}"),
    };
    // Its own default, after which it looks by itself for completions whose notice it missed.
    let timeout = Duration::from_millis(number("CC_TIMEOUT_MS", "100")? as u64);
    Ok(RdmaBuilder::default()
        .set_dev(&variable("RDMA_DEV", "rxe0"))
        .set_gid_index(number("RDMA_GID_INDEX", "1")?)
        .set_mtu(mtu)
        .set_cc_evnet_timeout(timeout))
}
