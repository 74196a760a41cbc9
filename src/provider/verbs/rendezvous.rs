//! Connections for programs with a bootstrap of their own: the endpoints carry what RDMA CM would.
//!
//! ```text
//! byte 0       version of this layout
//! byte 1       link layer of the port
//! byte 2..6    queue pair number
//! byte 6..10   first packet sequence number
//! byte 10..26  GID
//! byte 26..28  LID
//! byte 28      path MTU, as enum ibv_mtu
//! byte 29      reads and atomics in flight
//! byte 30..38  longest message
//! byte 38..    private data
//! last 4       checksum of all before: a NIC cannot tell a wrong number from a peer that is late
//! ```
//! All numbers are big-endian.

use std::net::IpAddr;

use super::bare::Remote;
use super::device::Context;
use super::gid::{self, Gid};
use super::greeting::End;
use super::memory::Pd;
use super::pair::Qp;
use super::queue::Cq;
use super::{sys, timers};
use crate::address::Address;
use crate::error::{Error, Result, WcStatus};
use crate::provider::{PRIVATE_DATA, PeerInfo, QpConfig};

const VERSION: u8 = 1;
const HEADER: usize = 38;

/// What one side tells the other.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Endpoint {
    link_layer: u8,
    number: u32,
    sequence: u32,
    gid: [u8; 16],
    lid: u16,
    mtu: u8,
    rd_atomic: u8,
    max_message: u64,
    private_data: Vec<u8>,
}

impl Endpoint {
    fn end(&self) -> End {
        End { number: self.number, sequence: self.sequence }
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION, self.link_layer];
        bytes.extend(self.number.to_be_bytes());
        bytes.extend(self.sequence.to_be_bytes());
        bytes.extend(self.gid);
        bytes.extend(self.lid.to_be_bytes());
        bytes.extend([self.mtu, self.rd_atomic]);
        bytes.extend(self.max_message.to_be_bytes());
        bytes.extend(&self.private_data);
        let sum = checksum(&bytes);
        bytes.extend(sum);
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<Self> {
        let wrong = |reason: String| Error::Descriptor { what: "queue pair endpoint of an RDMA NIC", reason };
        if bytes.first() != Some(&VERSION) {
            return Err(wrong(format!("version {:?}, this side speaks {VERSION}", bytes.first())));
        }
        let Some((bytes, sum)) = bytes.split_last_chunk::<4>() else {
            return Err(wrong(format!("{} bytes are too few", bytes.len())));
        };
        if *sum != checksum(bytes) {
            return Err(wrong("its checksum is wrong".to_owned()));
        }
        let Some((header, private_data)) = bytes.split_first_chunk::<HEADER>() else {
            return Err(wrong(format!("{} bytes, at least {HEADER} are needed", bytes.len())));
        };
        if private_data.len() > PRIVATE_DATA {
            return Err(wrong(format!("{} bytes of private data, the limit is {PRIVATE_DATA}", private_data.len())));
        }
        let field = |at: usize| [header[at], header[at + 1], header[at + 2], header[at + 3]];
        let this = Self {
            link_layer: header[1],
            number: u32::from_be_bytes(field(2)),
            sequence: u32::from_be_bytes(field(6)),
            gid: std::array::from_fn(|at| header[10 + at]),
            lid: u16::from_be_bytes([header[26], header[27]]),
            mtu: header[28],
            rd_atomic: header[29],
            max_message: u64::from_be_bytes(std::array::from_fn(|at| header[30 + at])),
            private_data: private_data.to_vec(),
        };
        for (what, value, limit) in
            [("queue pair number", this.number, MAX_24), ("sequence number", this.sequence, MAX_24)]
        {
            if value > limit {
                return Err(wrong(format!("{what} {value:#x} has more than 24 bits")));
            }
        }
        if this.max_message == 0 || this.rd_atomic == 0 {
            return Err(wrong(format!(
                "messages of {} bytes, {} reads in flight: neither can be 0",
                this.max_message, this.rd_atomic
            )));
        }
        if !(sys::IBV_MTU_256..=sys::IBV_MTU_4096).contains(&this.mtu.into()) {
            return Err(wrong(format!("path MTU {} is none of 1 to 5", this.mtu)));
        }
        Ok(this)
    }
}

const MAX_24: u32 = (1 << 24) - 1;

/// FNV-1a, against slips, not against malice.
fn checksum(bytes: &[u8]) -> [u8; 4] {
    let sum = bytes.iter().fold(0x811c_9dc5_u32, |sum, &byte| (sum ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    sum.to_be_bytes()
}

/// A queue pair in INIT that waits for its peer's endpoint.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    pair: Qp,
    config: QpConfig,
    gid: Gid,
    endpoint: Endpoint,
    bytes: Vec<u8>,
    pd: Pd,
    device: Context,
}

impl Context {
    /// `local` is an IP address of this device, or unspecified for the best one.
    pub(crate) async fn rendezvous(
        &self,
        pd: &Pd,
        cq: &Cq,
        config: &QpConfig,
        local: &Address,
        private_data: &[u8],
    ) -> Result<Rendezvous> {
        if config.srq.is_some() {
            return Err(Error::Unsupported {
                operation: "an endpoint with a shared receive queue",
                device: self.name().to_owned(),
                hint: "its first message needs a receive of its own; connect by address",
            });
        }
        let device = self.inner().device();
        let addresses = super::connect::resolve(local, "endpoint").await?;
        let local: Option<IpAddr> = addresses.first().map(|address| address.ip());
        let gid = gid::choose(&gid::table(device), local)?;
        let port = &device.port_attr;
        let pair = Qp::create(pd, cq, config)?;
        pair.initialise(device, config)?;
        let endpoint = Endpoint {
            link_layer: port.link_layer,
            number: pair.number(),
            sequence: fresh_sequence(),
            gid: gid.value,
            lid: port.lid,
            mtu: port.active_mtu.min(timers::mtu_from_bytes(config.path_mtu)) as u8,
            rd_atomic: config.max_rd_atomic,
            max_message: self.limits().max_message,
            private_data: private_data.to_vec(),
        };
        let bytes = endpoint.encode();
        Ok(Rendezvous { pair, config: config.clone(), gid, endpoint, bytes, pd: pd.clone(), device: self.clone() })
    }
}

/// Different for each connection, so that packets of an earlier one do not fit.
fn fresh_sequence() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as u32 & MAX_24
}

impl Rendezvous {
    pub(crate) fn endpoint(&self) -> &[u8] {
        &self.bytes
    }

    /// Ready when the peer is: both greet each other until both have heard it. The caller bounds the time.
    pub(crate) async fn connect(self, remote: &[u8]) -> Result<(Qp, PeerInfo)> {
        let remote = Endpoint::decode(remote)?;
        if remote.link_layer != self.endpoint.link_layer {
            return Err(Error::Descriptor {
                what: "queue pair endpoint of an RDMA NIC",
                reason: format!("link layer {}, this side's is {}", remote.link_layer, self.endpoint.link_layer),
            });
        }
        let rd_atomic = self.config.max_rd_atomic.min(remote.rd_atomic);
        let mut facts = Remote {
            number: remote.number,
            sequence: remote.sequence,
            lid: remote.lid,
            gid: remote.gid,
            mtu: self.endpoint.mtu.min(remote.mtu).into(),
            rd_atomic,
        };
        let address = facts.name();
        // A queue pair can be connected to itself, and would even work.
        if (remote.number, remote.gid, remote.sequence)
            == (self.endpoint.number, self.endpoint.gid, self.endpoint.sequence)
        {
            let reason = "that is this side's own endpoint".to_owned();
            return Err(Error::Handshake { step: "connect", peer: address, reason });
        }
        let failed = |reason| Error::Handshake { step: "connect", peer: address.clone(), reason };
        let (me, peer) = (self.endpoint.end(), remote.end());
        for round in (0..=u16::MAX).cycle() {
            // A greeting that was heard in vain, since this side's ran out of retries, was one packet.
            let heard = self.pair.state().greeted().heard();
            facts.sequence = (remote.sequence + u32::from(heard)) & MAX_24;
            self.pair.await_greeting(&self.pd, round, heard)?;
            self.pair.make_ready(self.device.inner().device(), &self.config, &self.gid, me.sequence, &facts)?;
            self.pair.greet(round, me, peer)?;
            match self.pair.state().greeted().done().await {
                WcStatus::Success => break,
                // The peer is not ready yet.
                WcStatus::RetryExceeded => self.reset()?,
                status => return Err(failed(format!("{status}; {}", self.gid))),
            }
        }
        self.pair.greeted_by(peer, me).map_err(failed)?;
        let info = PeerInfo {
            address,
            link: self.device.inner().device().link(),
            private_data: remote.private_data,
            max_rd_atomic: rd_atomic,
            max_message: self.endpoint.max_message.min(remote.max_message),
        };
        Ok((self.pair, info))
    }

    fn reset(&self) -> Result<()> {
        // SAFETY: integers, of which zero is a value.
        let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attr.qp_state = sys::IBV_QPS_RESET;
        self.pair.modify(&mut attr, sys::IBV_QP_STATE, "to RESET")?;
        self.pair.initialise(self.device.inner().device(), &self.config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            link_layer: 2,
            number: 0x00ab_cdef,
            sequence: MAX_24,
            gid: std::array::from_fn(|at| at as u8),
            lid: 0x1234,
            mtu: 3,
            rd_atomic: 16,
            max_message: 1 << 31,
            private_data: vec![7; PRIVATE_DATA],
        }
    }

    #[test]
    fn endpoints_round_trip_and_fit() {
        let bytes = endpoint().encode();
        assert_eq!(Endpoint::decode(&bytes).unwrap(), endpoint());
        assert!(bytes.len() <= crate::QueuePairEndpoint::MAX_LEN, "{}", bytes.len());
    }

    #[test]
    fn hostile_endpoints_are_refused() {
        let good = endpoint().encode();
        let flipped = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            bytes
        };
        for at in 0..good.len() {
            assert!(Endpoint::decode(&flipped(at)).is_err(), "byte {at}");
            assert!(Endpoint::decode(&good[..at]).is_err(), "cut at {at}");
        }
        // Whoever means harm has the checksum right.
        let sealed = |change: fn(&mut Endpoint)| {
            let mut endpoint = endpoint();
            change(&mut endpoint);
            endpoint.encode()
        };
        let bad = [
            sealed(|it| it.number = 1 << 24),
            sealed(|it| it.sequence = 1 << 24),
            sealed(|it| it.private_data.push(0)),
            sealed(|it| it.mtu = 0),
            sealed(|it| it.max_message = 0),
            sealed(|it| it.rd_atomic = 0),
            sealed(|it| it.mtu = 6),
        ];
        for bytes in &bad {
            assert!(Endpoint::decode(bytes).is_err(), "{bytes:?}");
        }
    }
}
