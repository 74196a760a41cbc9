//! What the two ends do, as a program would that uses the library.

use anyhow::{Context, Result, ensure};
use tokio_rdma::op::{OpError, ReadOp, ReceiveOp, WriteOp};
use tokio_rdma::{Access, Buffer, Connection, ExposedRegion, Listener, ProtectionDomain, RemoteRegion};

use crate::measure::{Laps, now};
use crate::spec::{Op, Spec};

/// Serves one client.
pub async fn serve(domain: &ProtectionDomain, at: &str, specs: &[Spec]) -> Result<()> {
    let region = expose(domain, specs)?;
    let listener =
        Listener::builder(domain).connections(|connection| connection.private_data(region.remote().to_bytes()));
    let listener = listener.bind(at).await?;
    println!("READY");
    let connection = listener.accept().await?;
    for spec in specs {
        let mut first = posted(&connection, domain.alloc(spec.size)?)?;
        connection.send(token(domain)?).await?;
        match spec.op {
            Op::SendLat => echo(&connection, spec, first).await?,
            // The client's word that it is done.
            _ => drop((&mut first).await?),
        }
    }
    // It may still wait for the acknowledgement of its last message.
    connection.closed().await;
    Ok(())
}

/// Measures against a server with the same specs.
pub async fn measure(domain: &ProtectionDomain, at: &str, specs: &[Spec]) -> Result<()> {
    let connection = Connection::connect(domain, at).await?;
    let remote = remote(&connection)?;
    for spec in specs {
        // The server's word that it is ready. When it comes late, the device tries again.
        connection.receive(token(domain)?).await?;
        let laps = match spec.op {
            Op::SendLat => round_trips(&connection, spec).await?,
            _ => {
                let laps = one_sided(&connection, spec, &remote).await?;
                connection.send(token(domain)?).await?;
                laps
            }
        };
        laps.report()?;
    }
    connection.close().await;
    Ok(())
}

/// Both ends in this task, of which one is measured: what it costs is then all there is to count.
pub async fn measure_alone(domain: &ProtectionDomain, at: &str, specs: &[Spec]) -> Result<()> {
    let region = expose(domain, specs)?;
    let listener = Listener::bind(domain, at).await?;
    let connecting = Connection::connect(domain, listener.local_address());
    let (connection, _peer) = tokio::try_join!(connecting, listener.accept())?;
    for spec in specs {
        ensure!(spec.op != Op::SendLat, "send_lat needs a server");
        one_sided(&connection, spec, &region.remote()).await?.report()?;
    }
    Ok(())
}

fn expose(domain: &ProtectionDomain, specs: &[Spec]) -> Result<ExposedRegion> {
    let most = specs.iter().map(Spec::exposed).max().unwrap_or(0).max(1);
    Ok(domain.alloc(most)?.expose(Access::REMOTE_READ | Access::REMOTE_WRITE)?)
}

fn remote(connection: &Connection) -> Result<RemoteRegion> {
    RemoteRegion::from_bytes(connection.peer_private_data()).context("the server's region")
}

fn token(domain: &ProtectionDomain) -> Result<Buffer> {
    Ok(domain.alloc(1)?)
}

/// A receive that is in place before the peer can send.
fn posted(connection: &Connection, buffer: Buffer) -> Result<ReceiveOp<Buffer>> {
    let mut receive = connection.receive(buffer);
    receive.try_post()?;
    Ok(receive)
}

/// Three buffers go round: a message on its way, a receive that waits for the answer, and one for the answer after that.
async fn round_trips(connection: &Connection, spec: &Spec) -> Result<Laps> {
    let domain = connection.domain();
    let (mut message, mut spare) = (domain.alloc(spec.size)?, domain.alloc(spec.size)?);
    let mut waiting = Some(posted(connection, domain.alloc(spec.size)?)?);
    let mut laps = Laps::start(spec);
    let mut left = spec.warm_up() + spec.count;
    while let Some(receive) = waiting.take() {
        let began = now();
        let (sent, answer) = tokio::try_join!(connection.send(message), receive)?;
        ensure!(answer.len == spec.size, "{} bytes came back instead of {}", answer.len, spec.size);
        left -= 1;
        // None after the last round: it would get what the server says next.
        if left > 0 {
            waiting = Some(posted(connection, spare)?);
        }
        laps.lap(began);
        (message, spare) = (sent, answer.buffer);
    }
    Ok(laps)
}

async fn echo(connection: &Connection, spec: &Spec, first: ReceiveOp<Buffer>) -> Result<()> {
    let (mut received, mut message) = (first, connection.domain().alloc(spec.size)?);
    for _ in 1..spec.warm_up() + spec.count {
        let got = received.await?;
        received = posted(connection, got.buffer)?;
        message = connection.send(message).await?;
    }
    received.await?;
    connection.send(message).await?;
    Ok(())
}

/// One after the other, or so many in flight; they complete in the order of posting.
async fn one_sided(connection: &Connection, spec: &Spec, remote: &RemoteRegion) -> Result<Laps> {
    let place = |number: usize| -> Result<_> {
        let start = (number * spec.size) as u64;
        Ok((connection.domain().alloc(spec.size)?, remote.slice(start..start + spec.size as u64)?))
    };
    let places = (0..spec.in_flight).map(place).collect::<Result<Vec<_>>>()?;
    match (spec.op, spec.in_flight) {
        (Op::ReadLat, 1) => one_by_one(spec, places, |buffer, remote| connection.read(buffer, remote)).await,
        (_, 1) => one_by_one(spec, places, |buffer, remote| connection.write(buffer, remote)).await,
        (Op::ReadLat, _) => pipelined(spec, places, |buffer, remote| connection.read(buffer, remote)).await,
        _ => pipelined(spec, places, |buffer, remote| connection.write(buffer, remote)).await,
    }
}

type Place = (Buffer, RemoteRegion);

async fn one_by_one<F>(spec: &Spec, places: Vec<Place>, post: impl Fn(Buffer, &RemoteRegion) -> F) -> Result<Laps>
where
    F: Future<Output = Result<Buffer, OpError<Buffer>>>,
{
    let mut laps = Laps::start(spec);
    for (mut buffer, remote) in places {
        for _ in 0..spec.warm_up() + spec.count {
            let began = now();
            buffer = post(buffer, &remote).await?;
            laps.lap(began);
        }
    }
    Ok(laps)
}

/// Futures of one kind, all posted: each is awaited in turn, and its buffer posted anew in its place.
async fn pipelined<F>(spec: &Spec, places: Vec<Place>, post: impl Fn(Buffer, &RemoteRegion) -> F) -> Result<Laps>
where
    F: Future<Output = Result<Buffer, OpError<Buffer>>> + Post + Unpin,
{
    let mut laps = Laps::start(spec);
    let mut under_way = Vec::with_capacity(places.len());
    for (buffer, remote) in places {
        let (began, mut op) = (now(), post(buffer, &remote));
        op.try_post()?;
        under_way.push(UnderWay { op, began, remote });
    }
    let mut left = spec.warm_up() + spec.count;
    while left > 0 {
        for place in under_way.iter_mut().take(left) {
            let buffer = (&mut place.op).await?;
            laps.lap(place.began);
            left -= 1;
            if left >= spec.in_flight {
                place.began = now();
                place.op = post(buffer, &place.remote);
                place.op.try_post()?;
            }
        }
    }
    Ok(laps)
}

struct UnderWay<F> {
    op: F,
    began: u64,
    remote: RemoteRegion,
}

/// An operation that can be posted before it is awaited.
trait Post {
    fn try_post(&mut self) -> tokio_rdma::Result<()>;
}

impl Post for WriteOp<Buffer> {
    fn try_post(&mut self) -> tokio_rdma::Result<()> {
        Self::try_post(self)
    }
}

impl Post for ReadOp<Buffer> {
    fn try_post(&mut self) -> tokio_rdma::Result<()> {
        Self::try_post(self)
    }
}
