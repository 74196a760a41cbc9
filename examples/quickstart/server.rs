//! The far end: does what the client asks, and reports what arrived.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use sha2::{Digest, Sha256};
use tokio_rdma::{Access, CloseReason, Connection, ExposedRegion, Listener};

use crate::Options;
use crate::common::child::{announce, within};
use crate::wire::{ATOMIC, CHUNK, Inbox, MAX_TARGET, Report, Request, Welcome, add};

/// Receives posted ahead: a client that sends a file finds room while this side sums up what came before.
const DEPTH: usize = 64;

/// How long a client is asked to wait when it was too fast all the same.
const RNR_TIMER: Duration = Duration::from_micros(80);

/// Serves one client, from its first request to its farewell.
pub async fn run(options: &Options) -> Result<()> {
    let device = options.open_device()?;
    let pd = device.alloc_pd()?;
    let address = options.address.clone().map_or_else(|| device.local_address(0), Ok)?;
    let settings = Listener::builder(&pd).connections(|connections| connections.rnr_timer(RNR_TIMER));
    let listener = settings.bind(address).await.context("cannot listen; --address names another place")?;
    announce(listener.local_address())?;

    let accepting = tokio::time::timeout(Duration::from_secs(options.wait), listener.accept()).await;
    let connection = accepting.map_err(|_| anyhow!("no client within {} s; --wait sets the limit", options.wait))??;
    // One client: a second one is refused at once instead of left waiting.
    drop(listener);

    let mut server =
        Server { inbox: Inbox::new(&connection, DEPTH)?, exposed: None, limit: options.limit(), connection };
    server.serve().await.with_context(|| format!("serving {}", server.connection.peer()))?;
    let closing = tokio::time::timeout(options.limit(), server.connection.closed()).await;
    match closing.map_err(|_| anyhow!("the client said goodbye and did not close"))? {
        CloseReason::Peer => Ok(()),
        reason => Err(anyhow!("the client said goodbye, and then: {reason}")),
    }
}

struct Server {
    connection: Connection,
    inbox: Inbox,
    exposed: Option<Exposed>,
    limit: Duration,
}

struct Exposed {
    target: ExposedRegion,
    counter: ExposedRegion,
}

impl Server {
    async fn serve(&mut self) -> Result<()> {
        loop {
            // The client carries out one step without a request at times, and that may take the whole limit.
            let received = self.inbox.next(2 * self.limit).await.context("waiting for a request")?;
            let request = Request::from_bytes(received.message())?;
            if request == Request::Bye {
                // No further receive: the client may have closed already, and a closed connection takes none.
                return Ok(());
            }
            self.inbox.post(received.buffer)?;
            let (limit, name) = (self.limit, format!("{request:?}"));
            if let Some(answer) = within(limit, &name, self.answer(request)).await? {
                let sending = self.connection.send(self.connection.domain().register(answer)?);
                sending.timeout(limit).await.context("answering")?;
            }
        }
    }

    async fn answer(&mut self, request: Request) -> Result<Option<Vec<u8>>> {
        let mut sum = Sha256::new();
        match request {
            Request::Expose { len } => return self.expose(len).map(|welcome| Some(welcome.to_bytes())),
            Request::Echo { count } => return self.echo(count).await.map(|()| None),
            Request::Collect { count } => {
                for _ in 0..count {
                    let received = self.inbox.next(self.limit).await?;
                    ensure!(received.in_buffer, "a notice of a write instead of a message");
                    add(&mut sum, received.message(), received.immediate);
                    self.inbox.post(received.buffer)?;
                }
            }
            Request::Notices { count, len } => {
                let mut bytes = vec![0; bounded(len, CHUNK as u64)?];
                for _ in 0..count {
                    let received = self.inbox.next(self.limit).await?;
                    let slot = received.immediate.context("a message without immediate data")?;
                    ensure!(
                        !received.in_buffer && received.len as u64 == len,
                        "not the notice of a write of {len} bytes"
                    );
                    self.exposed()?.target.copy_to(u64::from(slot) * len, &mut bytes)?;
                    add(&mut sum, &bytes, received.immediate);
                    self.inbox.post(received.buffer)?;
                }
            }
            Request::Inspect { len } => {
                let mut bytes = vec![0; CHUNK];
                for at in (0..len).step_by(CHUNK) {
                    let part = &mut bytes[..CHUNK.min((len - at) as usize)];
                    self.exposed()?.target.copy_to(at, part)?;
                    sum.update(part);
                }
            }
            Request::Bye => return Ok(None),
        }
        let counter = self.exposed()?.counter.load(0)?;
        Ok(Some(Report { sum: sum.finalize().into(), counter }.to_bytes()))
    }

    fn expose(&mut self, len: u64) -> Result<Welcome> {
        let pd = self.connection.domain();
        let exposed = Exposed {
            target: pd.alloc(bounded(len, MAX_TARGET)?)?.expose(Access::REMOTE_WRITE | Access::REMOTE_READ)?,
            counter: pd.alloc(ATOMIC)?.expose(Access::REMOTE_ATOMIC)?,
        };
        let welcome = Welcome { target: exposed.target.remote(), counter: exposed.counter.remote() };
        self.exposed = Some(exposed);
        Ok(welcome)
    }

    fn exposed(&self) -> Result<&Exposed> {
        self.exposed.as_ref().context("the client has not asked for memory yet")
    }

    async fn echo(&mut self, count: u64) -> Result<()> {
        for _ in 0..count {
            let received = self.inbox.next(self.limit).await?;
            let (len, mut message) = (received.message().len(), received.buffer);
            let rest = message.split_off(len)?;
            let message = self.connection.send(message).timeout(self.limit).await?;
            self.inbox.post(message.unsplit(rest)?)?;
        }
        Ok(())
    }
}

fn bounded(len: u64, limit: u64) -> Result<usize> {
    ensure!(len <= limit, "the client asks for {len} bytes, the limit is {limit}");
    Ok(len as usize)
}
