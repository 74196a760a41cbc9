//! gRPC over RDMA: tonic's server and client, unchanged, on an `RdmaStream`; and the same over a `TcpStream`, to compare.
//! Without protoc: the messages are structs, and the service is written out.
//!
//! `cargo run --release -p services --bin grpc_tonic`

mod echo;
mod transport;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::StreamExt;
use tokio_rdma::{Device, Listener, RdmaStream};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};

use crate::echo::{Echo, EchoClient, Text};
use crate::transport::{Io, channel};

const ROUNDS: usize = 5;
const CALLS: usize = 400;
/// Calls before a round counts.
const WARM_UP: usize = 50;

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::open_default()?;
    let domain = device.alloc_pd()?;

    let listener = Listener::bind(&domain, device.local_address(0)?).await?;
    let address = listener.local_address().clone();
    let incoming = listener.incoming().map(|accepted| accepted.and_then(RdmaStream::from_connection).map(Io));
    tokio::spawn(Server::builder().add_service(Echo).serve_with_incoming(incoming));
    let rdma = channel(domain, address).await?;

    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into())?.with_nodelay(Some(true));
    let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr()?))?;
    tokio::spawn(Server::builder().add_service(Echo).serve_with_incoming(incoming));
    let tcp = endpoint.connect().await?; // without Nagle's delay, as is tonic's default

    println!("unary echo, median of {CALLS} calls, {ROUNDS} rounds in turns; device {}", device.name());
    println!("| length | over RDMA | over TCP |");
    println!("|-------:|----------:|---------:|");
    for length in [64, 16 << 10, 1 << 20] {
        let (mut over_rdma, mut over_tcp) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            over_rdma.push(round(&rdma, length).await?);
            over_tcp.push(round(&tcp, length).await?);
        }
        println!("| {length} | {:.1?} | {:.1?} |", median(over_rdma), median(over_tcp));
    }
    Ok(())
}

async fn round(channel: &Channel, length: usize) -> Result<Duration> {
    let mut client = EchoClient::new(channel.clone());
    let text = Text { bytes: (0..length).map(|at| (at % 251) as u8).collect() };
    let mut times = Vec::with_capacity(CALLS);
    for call in 0..WARM_UP + CALLS {
        let start = Instant::now();
        let answer = client.echo(text.clone()).await?;
        if call >= WARM_UP {
            times.push(start.elapsed());
        }
        ensure!(answer == text, "the answer is not the request");
    }
    Ok(median(times))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
