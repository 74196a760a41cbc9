//! A worker: pulls parameters, computes a gradient, pushes it, until the server says that it is over.

use std::io::{self, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use tokio::time::{Instant, sleep};
use tokio_rdma::messages::Receiver;
use tokio_rdma::{Address, Buffer, CloseReason, Connection, Device, RemoteRegion};

use crate::common::options::server_address;
use crate::compute::Compute;
use crate::digits::Batches;
use crate::options::Options;
use crate::published::Puller;
use crate::server::RNR_TIMER;
use crate::wire::{Header, Hello, Order, PARAMETERS_LEN, Welcome, Work};

/// How long to wait before trying again to reach a server that is not there.
const PAUSE: Duration = Duration::from_millis(100);

/// The server sends an order when the one before is carried out; a welcome and the end come beside it.
const RECEIVES: usize = 4;

/// Works until the training is over. A server that is lost is looked for again: it may have been restarted.
pub async fn run(options: &Options, mut compute: impl Compute, samples: usize) -> Result<()> {
    let address = server_address("a worker", options.address.as_ref())?;
    let device = options.open_device()?;
    // Since when no gradient has served anybody. One that the server refuses does not, so a fault that repeats comes to an end.
    let mut failing_since = None;
    loop {
        let connection = connect(options, &device, address, &compute.name()).await?;
        let mut session = Session::begin(options, &connection, &compute, samples).await;
        let outcome = match &mut session {
            Ok(session) => session.work(&mut compute).await,
            Err(_) => Ok(()),
        };
        if session.as_ref().is_ok_and(|session| session.accepted) {
            failing_since = None;
        }
        let Some(lost) = session.err().or(outcome.err()) else {
            connection.close().await;
            return Ok(());
        };
        // What ended because the connection did can go on with another one. Where an operation failed, the server may have given
        // this worker up meanwhile, and taken its memory back.
        match connection.close_reason() {
            Some(CloseReason::Peer | CloseReason::LinkLost(_) | CloseReason::Failed(_)) => {}
            _ => return Err(lost),
        }
        if failing_since.get_or_insert_with(Instant::now).elapsed() > options.wait() {
            return Err(
                lost.context(format!("no gradient was accepted within {:?}; --wait sets the limit", options.wait()))
            );
        }
        let _ = writeln!(io::stderr(), "the server is gone ({lost:#}); looking for it again");
        sleep(PAUSE).await;
    }
}

async fn connect(options: &Options, device: &Device, address: &Address, computes_on: &str) -> Result<Connection> {
    let hello = Hello { computes_on: computes_on.to_owned() };
    let domain = device.alloc_pd()?;
    let until = Instant::now() + options.wait();
    loop {
        let settings = Connection::builder(&domain).rnr_timer(RNR_TIMER).private_data(hello.to_bytes());
        let error = match settings.connect(address).await {
            Ok(connection) => {
                Hello::from_bytes(connection.peer_private_data()).context("the server")?;
                return Ok(connection);
            }
            Err(error) => error,
        };
        if error.is_caller_error() || Instant::now() + PAUSE > until {
            return Err(error).with_context(|| {
                format!("no connection to {address} within {:?}; --wait sets the limit", options.wait())
            });
        }
        sleep(PAUSE).await;
    }
}

/// What belongs to one connection.
struct Session<C: Compute> {
    connection: Connection,
    orders: Receiver,
    puller: Puller,
    /// What the header and the gradient are written into.
    slot: (RemoteRegion, RemoteRegion),
    batches: Batches,
    patience: Duration,
    /// Away only while an operation has them.
    memory: Option<(C::Parameters, C::Gradient)>,
    header: Option<Buffer>,
    pulled: u64,
    pushed: bool,
    /// Whether an order came after a gradient.
    accepted: bool,
}

impl<C: Compute> Session<C> {
    async fn begin(options: &Options, connection: &Connection, compute: &C, samples: usize) -> Result<Self> {
        let mut orders = connection.receiver(RECEIVES, Order::MAX_LEN)?;
        let first = tokio::time::timeout(options.patience(), next(&mut orders)).await;
        let order = first.map_err(|_| anyhow::anyhow!("no welcome within {:?}", options.patience()))??;
        let Order::Welcome(Welcome { batch, seed, published, header, gradient, .. }) = order else {
            bail!("{order:?} instead of a welcome")
        };
        let domain = connection.domain();
        Ok(Self {
            connection: connection.clone(),
            orders,
            puller: Puller::new(connection, published, PARAMETERS_LEN)?,
            slot: (header, gradient),
            batches: Batches::new(samples, batch as usize, seed),
            patience: options.patience(),
            memory: Some(compute.alloc(domain)?),
            header: Some(domain.alloc(Header::LEN)?),
            pulled: 0,
            pushed: false,
            accepted: false,
        })
    }

    async fn work(&mut self, compute: &mut C) -> Result<()> {
        loop {
            // As long as it takes: other workers may be slow, and the connection tells when the server is gone.
            let order = next(&mut self.orders).await?;
            self.accepted |= self.pushed;
            match order {
                Order::Work(work) => self.carry_out(work, compute).await?,
                Order::Finish => return Ok(()),
                Order::Welcome(_) => bail!("a second welcome"),
            }
        }
    }

    async fn carry_out(&mut self, work: Work, compute: &mut C) -> Result<()> {
        let Work { ticket, version } = work;
        let (parameters, mut gradient) = self.memory.take().context("an earlier gradient was not finished")?;
        let batch = self.batches.of(ticket);
        let begin = |parameters: &C::Parameters| compute.begin(parameters, &batch, &mut gradient);
        let (base, parameters) = self.puller.pull(version, parameters, begin).await?;
        ensure!(base >= version, "pull: version {base}, and the server promised {version}");
        self.pulled += PARAMETERS_LEN as u64;

        compute.finish(&parameters, &batch, &mut gradient)?;
        let (samples, repeated) = (batch.range.len() as u32, self.puller.repeated);
        let gradient = self.push(Header { ticket, base, samples, pulled: self.pulled, repeated }, gradient).await?;
        self.memory = Some((parameters, gradient));
        self.pushed = true;
        Ok(())
    }

    /// Two writes, posted in this order; the second one when the gradient is there. They arrive in order too, so the notice of the second one tells
    /// of both.
    async fn push(&mut self, header: Header, gradient: C::Gradient) -> Result<C::Gradient> {
        let mut buffer = self.header.take().context("an earlier push was not finished")?;
        buffer.copy_from_slice(&header.to_bytes());
        let first = self.connection.write(buffer, &self.slot.0).timeout(self.patience);
        let second = self.connection.write_with_immediate(gradient, &self.slot.1, header.ticket as u32);
        let (first, second) = tokio::join!(biased; first, second.timeout(self.patience));
        self.header = Some(first?);
        Ok(second.map_err(tokio_rdma::Error::from)?)
    }
}

async fn next(orders: &mut Receiver) -> Result<Order> {
    let message = orders.next().await.context("the server closed the connection")??;
    Order::from_bytes(&message)
}
