//! Connections to programs that are not this crate's.

use std::net::IpAddr;

use crate::completion::queue::Room;
use crate::connection::builder::Prepared;
use crate::connection::{Connection, ConnectionBuilder};
use crate::error::{Error, Result};
use crate::provider::verbs::ForeignPair;
use crate::provider::{Context, Cq, PairEndpoint, Pd, Qp};

/// A queue pair that waits for a foreign peer's endpoint.
#[derive(Debug)]
pub(crate) struct ForeignConnection {
    prepared: Prepared,
    room: Room,
    pair: ForeignPair,
}

impl ConnectionBuilder {
    /// Prepares an end of a connection whose settings the peer knows already: they are used as they are, none is agreed on.
    pub(crate) fn foreign(self, local: Option<IpAddr>) -> Result<ForeignConnection> {
        let prepared = self.prepare("connect")?;
        if prepared.key.is_some() {
            return Err(Error::Unsupported {
                operation: "a pre-shared key with a foreign peer",
                device: prepared.device.name().to_owned(),
                hint: "its program knows no proof of one; leave it out",
            });
        }
        let room = prepared.reserve()?;
        let pair = match (prepared.device.context(), prepared.domain.provider(), room.queue().device()) {
            (Context::Verbs(device), Pd::Verbs(pd), Cq::Verbs(cq)) => {
                device.foreign(pd, cq, &prepared.config, local)?
            }
            _ => {
                return Err(Error::Unsupported {
                    operation: "a queue pair for a foreign peer",
                    device: prepared.device.name().to_owned(),
                    hint: "its packets are no RDMA packets; open an RDMA NIC (or the kernel's Soft-RoCE)",
                });
            }
        };
        Ok(ForeignConnection { prepared, room, pair })
    }
}

impl ForeignConnection {
    pub(crate) fn endpoint(&self) -> PairEndpoint {
        self.pair.endpoint()
    }

    pub(crate) fn connect(self, remote: &PairEndpoint) -> Result<Connection> {
        let Self { prepared, room, pair } = self;
        let (pair, info) = pair.connect(remote, prepared.hello.clone())?;
        let connection = prepared.establish(room, (Qp::Verbs(pair), info))?;
        connection.keep_alive(prepared.keepalive);
        Ok(connection)
    }
}
