//! The software device, used as a program would use it.

mod messages;
mod one_sided;

use anyhow::{Context, Result, bail, ensure};
use tokio_rdma::op::{OpError, ReceiveOp};
use tokio_rdma::{
    Access, Address, Buffer, CompletionMode, Connection, Device, Error, ExposedRegion, Listener, ProtectionDomain,
    RemoteRegion,
};

use super::{SETTLE, announce};
use crate::job::{Exchange, Found, Job, Mode, Pace, Usage};
use crate::measure::Meter;

/// Writes in flight.
pub const IN_FLIGHT: usize = 16;

/// Receives posted on an idle connection.
const IDLE_RECEIVES: usize = 16;

pub async fn serve(job: &Job, mode: Mode, at: &Address) -> Result<Usage> {
    let domain = domain(mode)?;
    let exposed = exposed_len(&job.exchange).map(|len| expose(&domain, len)).transpose()?;
    let listener = Listener::builder(&domain).connections(|connection| {
        let connection = match job.exchange {
            Exchange::Sends { .. } | Exchange::BatchedSends { .. } => connection.receive_depth(messages::RECEIVES),
            _ => connection,
        };
        match &exposed {
            Some(region) => connection.private_data(region.remote().to_bytes()),
            None => connection,
        }
    });
    let listener = listener.bind(at).await?;
    announce(listener.local_address())?;
    let connection = listener.accept().await?;
    let meter = Meter::start()?;
    match (job.exchange, &exposed) {
        (Exchange::RoundTrip { size } | Exchange::OneWay { size }, _) => messages::echo(&connection, size).await?,
        (Exchange::Sends { size } | Exchange::BatchedSends { size }, _) => messages::take(&connection, size).await?,
        (Exchange::Idle, _) => return idle(&connection, &job.pace).await,
        (Exchange::WriteSeen, Some(region)) => one_sided::answer_writes(&connection, region).await?,
        (
            Exchange::Write { .. }
            | Exchange::Read { .. }
            | Exchange::WriteSeen
            | Exchange::SingleWrite { .. }
            | Exchange::SameWrite { .. }
            | Exchange::ReadAtOnce { .. },
            _,
        ) => drop(connection.closed().await),
    }
    meter.read()
}

pub async fn measure(job: &Job, mode: Mode, at: &Address) -> Result<Found> {
    let (domain, pace) = (domain(mode)?, &job.pace);
    let mirror = (job.exchange == Exchange::WriteSeen).then(|| expose(&domain, one_sided::WORD)).transpose()?;
    let connecting = Connection::builder(&domain);
    let connecting = match &mirror {
        Some(region) => connecting.private_data(region.remote().to_bytes()),
        None => connecting,
    };
    let connection = connecting.connect(at).await?;
    match (job.exchange, &mirror) {
        (Exchange::RoundTrip { size }, _) => messages::round_trips(&connection, size, 1, pace).await,
        (Exchange::OneWay { size }, _) => messages::round_trips(&connection, size, 2, pace).await,
        (Exchange::Sends { size }, _) => messages::sends(&connection, size, pace).await,
        (Exchange::BatchedSends { size }, _) => messages::batched_sends(&connection, size, pace).await,
        (Exchange::Write { chunk }, _) => one_sided::writes(&connection, chunk, pace).await,
        (Exchange::SameWrite { chunk }, _) => one_sided::same_writes(&connection, chunk, pace).await,
        (Exchange::SingleWrite { size }, _) => one_sided::single_writes(&connection, size, pace).await,
        (Exchange::WriteSeen, Some(mirror)) => one_sided::writes_seen(&connection, mirror, pace).await,
        (Exchange::WriteSeen, None) => bail!("nothing to see the answers in"),
        (Exchange::Read { size }, _) => one_sided::reads(&connection, size, pace).await,
        (Exchange::ReadAtOnce { size }, _) => one_sided::reads_at_once(&connection, size, pace).await,
        (Exchange::Idle, _) => {
            Ok(Found { value: None, p99: None, exchanges: 0, usage: idle(&connection, pace).await? })
        }
    }
}

/// How much memory of the server the client uses by itself.
fn exposed_len(exchange: &Exchange) -> Option<usize> {
    match *exchange {
        Exchange::Write { chunk: len }
        | Exchange::SameWrite { chunk: len }
        | Exchange::SingleWrite { size: len }
        | Exchange::Read { size: len }
        | Exchange::ReadAtOnce { size: len } => Some(len),
        Exchange::WriteSeen => Some(one_sided::WORD),
        Exchange::RoundTrip { .. } | Exchange::OneWay { .. } => None,
        Exchange::Sends { .. } | Exchange::BatchedSends { .. } | Exchange::Idle => None,
    }
}

fn domain(mode: Mode) -> Result<ProtectionDomain> {
    let device = Device::builder("soft0");
    let device = match mode {
        Mode::Adaptive => device,
        Mode::Event => device.completion_mode(CompletionMode::Event),
        Mode::Polling => device.completion_mode(CompletionMode::Polling),
    };
    Ok(device.open()?.alloc_pd()?)
}

fn expose(domain: &ProtectionDomain, len: usize) -> Result<ExposedRegion> {
    Ok(domain.alloc(len)?.expose(Access::REMOTE_READ | Access::REMOTE_WRITE)?)
}

/// A receive that is in place before the peer can send.
fn posted(connection: &Connection, buffer: Buffer) -> Result<ReceiveOp<Buffer>> {
    let mut receive = connection.receive(buffer);
    receive.try_post()?;
    Ok(receive)
}

/// `None`: the connection was closed.
fn until_closed<T>(result: Result<T, OpError<Buffer>>) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.error(), Error::Closed { .. }) => Ok(None),
        Err(error) => bail!(error),
    }
}

fn remote(connection: &Connection) -> Result<RemoteRegion> {
    RemoteRegion::from_bytes(connection.peer_private_data()).context("the peer's region")
}

async fn idle(connection: &Connection, pace: &Pace) -> Result<Usage> {
    let _receives: Vec<_> =
        (0..IDLE_RECEIVES).map(|_| posted(connection, connection.domain().alloc(64)?)).collect::<Result<_>>()?;
    tokio::time::sleep(SETTLE).await;
    let meter = Meter::start()?;
    tokio::time::sleep(pace.measured).await;
    let usage = meter.read()?;
    ensure!(connection.close_reason().is_none(), "the idle connection has ended");
    // The other side may still be measuring.
    tokio::time::sleep(SETTLE).await;
    Ok(usage)
}
