//! Connections to programs that are not this crate's.

use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use crate::completion::queue::Room;
use crate::connection::builder::Prepared;
use crate::connection::{Connection, ConnectionBuilder};
use crate::error::{Error, Result};
use crate::provider::verbs::ForeignPair;
use crate::provider::{self, Cq, PairEndpoint, Pd, Qp};

/// A queue pair that waits for a foreign peer's endpoint.
#[derive(Debug)]
pub(crate) struct ForeignConnection {
    // Field order: the queue pair ends before the shared receive queue that `prepared` may hold.
    pair: ForeignPair,
    prepared: Prepared,
    room: Room,
}

impl ConnectionBuilder {
    /// Prepares an end of a connection whose settings the peer knows already: they are used as they are, none is agreed on.
    pub(crate) async fn foreign(self, local: Option<IpAddr>) -> Result<ForeignConnection> {
        let prepared = self.prepare("connect")?;
        if prepared.key.is_some() {
            return Err(Error::Unsupported {
                operation: "a pre-shared key with a foreign peer",
                device: prepared.device.name().to_owned(),
                hint: "its program knows no proof of one; leave it out",
            });
        }
        let room = prepared.reserve().await?;
        let pair = match (prepared.device.context(), prepared.domain.provider(), room.queue().device()) {
            (provider::Context::Verbs(device), Pd::Verbs(pd), Cq::Verbs(cq)) => {
                let (context, pd, cq, config) = (device.clone(), pd.clone(), cq.clone(), prepared.config.clone());
                device.worker().call(move || context.foreign(&pd, &cq, &config, local)).await?
            }
            _ => {
                return Err(Error::Unsupported {
                    operation: "a queue pair for a foreign peer",
                    device: prepared.device.name().to_owned(),
                    hint: "its packets are no RDMA packets; open an RDMA NIC (or the kernel's Soft-RoCE)",
                });
            }
        };
        Ok(ForeignConnection { pair, prepared, room })
    }

    /// The same, and holds up who calls.
    pub(crate) fn foreign_now(self, local: Option<IpAddr>) -> Result<ForeignConnection> {
        // Nothing in it waits for anything but the device's thread.
        let mut made = pin!(self.foreign(local));
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            match made.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(made) => return made,
                Poll::Pending => thread::park(),
            }
        }
    }
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl ForeignConnection {
    pub(crate) fn endpoint(&self) -> PairEndpoint {
        self.pair.endpoint()
    }

    pub(crate) fn connect(self, remote: &PairEndpoint) -> Result<Connection> {
        let Self { pair, prepared, room } = self;
        let (pair, info) = pair.connect(remote, prepared.hello.clone())?;
        let connection = prepared.establish(room, (Qp::Verbs(pair), info))?;
        connection.keep_alive(prepared.keepalive);
        Ok(connection)
    }
}
