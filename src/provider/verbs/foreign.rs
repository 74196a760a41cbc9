//! Queue pairs whose peer is no program of this crate: it learns of this end by means of its own, and both are told the
//! settings that they must share.

use std::net::IpAddr;

use super::bare::Remote;
use super::device::Context;
use super::gid::{self, Gid};
use super::memory::Pd;
use super::pair::Qp;
use super::queue::Cq;
use super::timers;
use crate::error::{Error, Result};
use crate::provider::{PairEndpoint, PeerInfo, QpConfig};

/// A queue pair in INIT that waits for its peer's endpoint.
#[derive(Debug)]
pub(crate) struct ForeignPair {
    pair: Qp,
    config: QpConfig,
    gid: Gid,
    device: Context,
}

impl Context {
    /// `local` is an IP address to connect from, where this device has it; otherwise the device's best one is taken.
    pub(crate) fn foreign(&self, pd: &Pd, cq: &Cq, config: &QpConfig, local: Option<IpAddr>) -> Result<ForeignPair> {
        let device = self.inner().device();
        let table = gid::table(device);
        let gid = gid::choose(&table, local).or_else(|_| gid::choose(&table, None))?;
        let (wanted, active) = (timers::mtu_from_bytes(config.path_mtu), device.port_attr.active_mtu);
        if wanted > active {
            return Err(Error::Limit {
                operation: "connect",
                what: "path MTU",
                value: config.path_mtu.into(),
                // Each step of the enum doubles, from 256 on.
                limit: 128 << active.min(5),
                hint: "the port carries no more, and both ends must be set to the same",
            });
        }
        let pair = Qp::create(pd, cq, config)?;
        pair.initialise(device, config)?;
        tracing::debug!(qp = pair.number(), %gid, "a queue pair for a foreign peer");
        Ok(ForeignPair { pair, config: config.clone(), gid, device: self.clone() })
    }
}

impl ForeignPair {
    /// This end; its first packet has the number 0.
    pub(crate) fn endpoint(&self) -> PairEndpoint {
        let lid = self.device.inner().device().port_attr.lid;
        PairEndpoint { number: self.pair.number(), lid, gid: self.gid.value, sequence: 0 }
    }

    /// Ready to send, which does not say that the peer is ready to receive.
    pub(crate) fn connect(self, remote: &PairEndpoint, private_data: Vec<u8>) -> Result<(Qp, PeerInfo)> {
        let facts = Remote {
            number: remote.number,
            sequence: remote.sequence,
            lid: remote.lid,
            gid: remote.gid,
            mtu: timers::mtu_from_bytes(self.config.path_mtu),
            rd_atomic: self.config.max_rd_atomic,
        };
        let device = self.device.inner().device();
        self.pair.make_ready(device, &self.config, &self.gid, self.endpoint().sequence, &facts)?;
        let info = PeerInfo {
            address: facts.name(),
            link: device.link(),
            private_data,
            max_rd_atomic: self.config.max_rd_atomic,
            max_message: self.device.limits().max_message,
        };
        Ok((self.pair, info))
    }
}
