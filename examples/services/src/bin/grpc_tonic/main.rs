//! gRPC over RDMA: tonic's server and client, unchanged, on an `RdmaStream`; and the same over a `TcpStream`, to compare.
//! Without protoc: the messages are structs, and the service is written out.
//!
//! `cargo run --release -p services --bin grpc_tonic`. The software device shows each link that it has on one machine. With `--quick` each
//! length goes there and back a few times, which measures nothing.

mod echo;
mod transport;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::StreamExt;
use tokio_rdma::soft::LinkPolicy;
use tokio_rdma::{Address, Device, Listener, RdmaStream};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};

use crate::echo::{Echo, EchoClient, Text};
use crate::transport::{Io, channel};

const ROUNDS: usize = 5;
/// Calls in the one round of a quick run, the first half of which only warms up.
const QUICK: usize = 10;
/// Lengths of the messages, and calls in a round.
const LENGTHS: [(usize, usize); 3] = [(64, 400), (16 << 10, 400), (1 << 20, 40)];
/// Calls before a round counts.
const WARM_UP: usize = 20;

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::open_default()?;
    let mut ways = vec![("TcpStream".to_owned(), over_tcp().await?)];
    ways.push(over_rdma(&device, device.local_address(0)?).await?);
    if device.name().starts_with("soft") {
        // What there would be without shared memory, as between hosts or users.
        let apart = Device::builder(device.name()).links(LinkPolicy::Sockets).open()?;
        let path = std::env::temp_dir().join(format!("grpc_tonic.{}", std::process::id()));
        ways.push(over_rdma(&apart, path.into()).await?);
        ways.push(over_rdma(&apart, apart.local_address(0)?).await?);
    }

    let quick = std::env::args().any(|argument| argument == "--quick");
    let rounds = if quick { 1 } else { ROUNDS };
    println!("unary echo, medians over {rounds} rounds in turns; in brackets, as a share of that over a TcpStream");
    println!("device {}", device.name());
    println!("| length |{}", ways.iter().map(|(name, _)| format!(" {name} |")).collect::<String>());
    println!("|-------:|{}", "---:|".repeat(ways.len()));
    for (length, calls) in LENGTHS {
        let (warm_up, calls) = if quick { (QUICK / 2, QUICK / 2) } else { (WARM_UP, calls) };
        let mut times = vec![Vec::new(); ways.len()];
        for _ in 0..rounds {
            for ((_, channel), times) in ways.iter().zip(&mut times) {
                times.push(round(channel, length, warm_up, calls).await?);
            }
        }
        let medians: Vec<_> = times.into_iter().map(median).collect();
        let cell = |time: &Duration| format!(" {time:.1?} ({:.2}) |", time.as_secs_f64() / medians[0].as_secs_f64());
        println!("| {length} |{}", medians.iter().map(cell).collect::<String>());
    }
    Ok(())
}

/// A channel to a server of its own, and what carries it.
async fn over_rdma(device: &Device, address: Address) -> Result<(String, Channel)> {
    let domain = device.alloc_pd()?;
    let listener = Listener::bind(&domain, address).await?;
    let address = listener.local_address().clone();
    let (tell, told) = tokio::sync::oneshot::channel();
    let mut tell = Some(tell);
    let incoming = listener.incoming().map(move |accepted| {
        let connection = accepted?;
        if let Some(tell) = tell.take() {
            let _ = tell.send(connection.link().to_string());
        }
        RdmaStream::from_connection(connection).map(Io)
    });
    tokio::spawn(Server::builder().add_service(Echo).serve_with_incoming(incoming));
    let channel = channel(domain, address).await?;
    Ok((format!("RDMA, {}", told.await?), channel))
}

async fn over_tcp() -> Result<Channel> {
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], 0).into())?.with_nodelay(Some(true));
    let endpoint = Endpoint::from_shared(format!("http://{}", incoming.local_addr()?))?;
    tokio::spawn(Server::builder().add_service(Echo).serve_with_incoming(incoming));
    Ok(endpoint.connect().await?) // without Nagle's delay, as is tonic's default
}

async fn round(channel: &Channel, length: usize, warm_up: usize, calls: usize) -> Result<Duration> {
    let mut client = EchoClient::new(channel.clone());
    let text = Text { bytes: (0..length).map(|at| (at % 251) as u8).collect() };
    let mut times = Vec::with_capacity(calls);
    for call in 0..warm_up + calls {
        let start = Instant::now();
        let answer = client.echo(text.clone()).await?;
        if call >= warm_up {
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
