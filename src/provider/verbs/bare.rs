//! Queue pairs that are connected without RDMA CM: whoever brings the peer's numbers moves them through the states.

use std::net::Ipv6Addr;

use super::device::OpenDevice;
use super::gid::Gid;
use super::pair::{Choices, Qp};
use super::sys;
use crate::error::{Error, Result};
use crate::provider::QpConfig;

/// Routers between the hosts.
const HOP_LIMIT: u8 = 64;

/// What has to be known of the peer, and agreed on with it.
pub(super) struct Remote {
    pub(super) number: u32,
    /// Of its first packet.
    pub(super) sequence: u32,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
    pub(super) mtu: sys::ibv_mtu,
    pub(super) rd_atomic: u8,
}

impl Remote {
    /// For logs and errors.
    pub(super) fn name(&self) -> String {
        format!("{} (queue pair {:#x})", Ipv6Addr::from(self.gid).to_canonical(), self.number)
    }
}

impl Qp {
    /// From RESET to INIT, where receives can be posted.
    pub(super) fn initialise(&self, device: &OpenDevice, config: &QpConfig) -> Result<()> {
        // SAFETY: integers, of which zero is a value.
        let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        let mut mask = sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT;
        attr.qp_state = sys::IBV_QPS_INIT;
        attr.port_num = device.port;
        Choices { config, rd_atomic: config.max_rd_atomic }.init(&mut attr, &mut mask);
        self.modify(&mut attr, mask, "to INIT")
    }

    /// From INIT to RTS. That the peer can receive is another matter.
    pub(super) fn make_ready(
        &self,
        device: &OpenDevice,
        config: &QpConfig,
        local: &Gid,
        sequence: u32,
        remote: &Remote,
    ) -> Result<()> {
        let choices = Choices { config, rd_atomic: remote.rd_atomic };
        // SAFETY: integers, of which zero is a value.
        let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        let mut mask = sys::IBV_QP_STATE | sys::IBV_QP_AV | sys::IBV_QP_DEST_QPN | sys::IBV_QP_RQ_PSN;
        attr.qp_state = sys::IBV_QPS_RTR;
        attr.path_mtu = remote.mtu;
        attr.dest_qp_num = remote.number;
        attr.rq_psn = remote.sequence;
        attr.ah_attr.port_num = device.port;
        attr.ah_attr.dlid = remote.lid;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid.raw = remote.gid;
        // The tables of real devices are far smaller than this type.
        attr.ah_attr.grh.sgid_index = local.index.min(255) as u8;
        attr.ah_attr.grh.hop_limit = HOP_LIMIT;
        choices.ready_to_receive(&mut attr, &mut mask);
        self.modify(&mut attr, mask, "to RTR").map_err(|error| explain(error, local, remote))?;
        // SAFETY: as above.
        let mut attr: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        let mut mask = sys::IBV_QP_STATE | sys::IBV_QP_SQ_PSN;
        attr.qp_state = sys::IBV_QPS_RTS;
        attr.sq_psn = sequence;
        choices.ready_to_send(&mut attr, &mut mask);
        self.modify(&mut attr, mask, "to RTS")
    }
}

/// Most failures to get ready are GIDs that do not reach each other.
fn explain(error: Error, local: &Gid, remote: &Remote) -> Error {
    match error {
        Error::Io { operation, target, cause } => {
            let to = Ipv6Addr::from(remote.gid);
            Error::Io { operation, target: format!("{target} with GID {local} towards {to}"), cause }
        }
        other => other,
    }
}
