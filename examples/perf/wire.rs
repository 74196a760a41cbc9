//! What client and server tell each other: lines of JSON over a connection of their own, so that it cannot disturb what is measured.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio_rdma::op::ReceiveOp;
use tokio_rdma::{Buffer, Connection, RemoteRegion};

use crate::plan::Row;

/// Longer than anything that is told.
const LONGEST: usize = 4096;

/// More than either side says before it has heard the other.
const DEPTH: usize = 4;

/// What the client says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Prepare for this row. Answer: [`Answer::Ready`], and [`Answer::Posted`] when the connection for it is there.
    Start(Row),
    /// All that this side posts before it measures is completed. Answer: [`Answer::Checked`].
    Check,
    /// No more rows.
    Bye,
}

/// What the server says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// First of all: where its bytes are.
    Hello { memory: String },
    /// Connect, and show this.
    Ready { ticket: Vec<u8>, region: Option<Vec<u8>> },
    /// The receives are in place.
    Posted,
    /// What arrived was compared, and `fault` says what was wrong with it.
    Checked { fault: Option<String> },
    /// The row cannot be measured.
    Refused { why: String },
}

/// The connection beside the measured one.
pub struct Control {
    connection: Connection,
    posted: VecDeque<ReceiveOp<Buffer>>,
    limit: Duration,
}

impl Control {
    pub fn new(connection: Connection, limit: Duration) -> Result<Self> {
        let mut control = Self { connection, posted: VecDeque::with_capacity(DEPTH), limit };
        for _ in 0..DEPTH {
            control.post(control.connection.domain().alloc(LONGEST)?)?;
        }
        Ok(control)
    }

    pub async fn tell(&self, message: &impl Serialize) -> Result<()> {
        let bytes = self.connection.domain().register(serde_json::to_vec(message)?)?;
        self.connection.send(bytes).timeout(self.limit).await?;
        Ok(())
    }

    pub async fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        self.hear_within(self.limit).await
    }

    pub async fn hear_within<T: DeserializeOwned>(&mut self, limit: Duration) -> Result<T> {
        let receive = self.posted.pop_front().context("no receive is posted")?;
        let received = receive.timeout(limit).await?;
        let message = serde_json::from_slice(received.message()).context("not a message of this program's")?;
        // Whoever has said the last word may have closed already, and a closed connection takes no receive; the next
        // `hear` tells.
        let _ = self.post(received.buffer);
        Ok(message)
    }

    pub async fn close(self) {
        self.connection.close().await;
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    fn post(&mut self, buffer: Buffer) -> Result<()> {
        let mut receive = self.connection.receive(buffer);
        receive.try_post()?;
        self.posted.push_back(receive);
        Ok(())
    }
}

impl Answer {
    /// The region of a `Ready`.
    pub fn region(bytes: Option<&[u8]>) -> Result<Option<RemoteRegion>> {
        Ok(bytes.map(RemoteRegion::from_bytes).transpose()?)
    }

    /// An answer that was not expected.
    pub fn unexpected<T>(self) -> Result<T> {
        match self {
            Self::Refused { why } => bail!("the server: {why}"),
            other => bail!("the server answered {other:?}; is it of the same version?"),
        }
    }
}
