//! Plain tokio sockets: the same exchanges without the crate.

use std::io;

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rdma::{Address, RemoteRegion};

use super::announce;
use super::ours::IN_FLIGHT;
use crate::job::{Exchange, Found, Job, Pace, Usage};
use crate::measure::{Laps, Meter, Push, throughput};

/// What a request for bytes takes at least: whose, where, how many.
const REQUEST: usize = RemoteRegion::WIRE_LEN;

trait Stream: AsyncReadExt + AsyncWriteExt + Unpin + Send {}
impl Stream for TcpStream {}
impl Stream for UnixStream {}

pub async fn serve(job: &Job, at: &Address) -> Result<Usage> {
    match at {
        Address::Ip(at) => {
            let listener = TcpListener::bind(at).await?;
            announce(&listener.local_addr()?.into())?;
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            answer(job, stream).await
        }
        Address::Unix(path) => {
            let listener = UnixListener::bind(path)?;
            announce(at)?;
            let (stream, _) = listener.accept().await?;
            answer(job, stream).await
        }
        _ => bail!("{at} is neither an IP address nor a path"),
    }
}

pub async fn measure(job: &Job, at: &Address) -> Result<Found> {
    match at {
        Address::Ip(at) => {
            let stream = TcpStream::connect(at).await?;
            stream.set_nodelay(true)?;
            ask(job, stream).await
        }
        Address::Unix(path) => ask(job, UnixStream::connect(path).await?).await,
        _ => bail!("{at} is neither an IP address nor a path"),
    }
}

async fn answer(job: &Job, mut stream: impl Stream) -> Result<Usage> {
    let meter = Meter::start()?;
    let served = match job.exchange {
        Exchange::RoundTrip { size } => echo(&mut stream, size).await,
        Exchange::Write { chunk } => take(&mut stream, chunk).await,
        Exchange::Read { size } => give(&mut stream, size).await,
        other => bail!("sockets are not measured with {other:?}"),
    };
    match served {
        // The client has what it wanted.
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset) => {}
        served => served.context("serve")?,
    }
    meter.read()
}

async fn ask(job: &Job, stream: impl Stream) -> Result<Found> {
    match job.exchange {
        Exchange::RoundTrip { size } => exchange(stream, size, size, &job.pace).await,
        Exchange::Read { size } => exchange(stream, REQUEST, size, &job.pace).await,
        Exchange::Write { chunk } => push(stream, chunk, &job.pace).await,
        other => bail!("sockets are not measured with {other:?}"),
    }
}

async fn exchange(mut stream: impl Stream, there: usize, back: usize, pace: &Pace) -> Result<Found> {
    let (out, mut into) = (vec![1; there], vec![0; back]);
    let mut laps = Laps::start(pace)?;
    loop {
        stream.write_all(&out).await?;
        stream.read_exact(&mut into).await?;
        if !laps.lap()? {
            return laps.found();
        }
    }
}

async fn echo(stream: &mut impl Stream, size: usize) -> io::Result<()> {
    let mut message = vec![0; size];
    loop {
        stream.read_exact(&mut message).await?;
        stream.write_all(&message).await?;
    }
}

async fn give(stream: &mut impl Stream, size: usize) -> io::Result<()> {
    let (mut request, answer) = ([0; REQUEST], vec![1; size]);
    loop {
        stream.read_exact(&mut request).await?;
        stream.write_all(&answer).await?;
    }
}

async fn push(stream: impl Stream, chunk: usize, pace: &Pace) -> Result<Found> {
    throughput(pace, chunk, Pushes { stream, sources: vec![vec![1; chunk]; IN_FLIGHT] }).await
}

struct Pushes<S> {
    stream: S,
    /// As many as the writes in flight beside which this is measured, used in turn: a single source would stay in the cache.
    sources: Vec<Vec<u8>>,
}

impl<S: Stream> Push for Pushes<S> {
    /// Says how many chunks will come, sends them, and waits for the byte that says that they are there.
    async fn push(&mut self, chunks: u64) -> Result<()> {
        self.stream.write_all(&chunks.to_le_bytes()).await?;
        for source in (0..chunks).zip(self.sources.iter().cycle()).map(|(_, source)| source) {
            self.stream.write_all(source).await?;
        }
        let mut done = [0];
        self.stream.read_exact(&mut done).await?;
        ensure!(done == [1], "the server lost count");
        Ok(())
    }
}

async fn take(stream: &mut impl Stream, chunk: usize) -> io::Result<()> {
    let mut bytes = vec![0; chunk];
    loop {
        let mut chunks = [0; 8];
        stream.read_exact(&mut chunks).await?;
        for _ in 0..u64::from_le_bytes(chunks) {
            stream.read_exact(&mut bytes).await?;
        }
        stream.write_all(&[1]).await?;
    }
}
