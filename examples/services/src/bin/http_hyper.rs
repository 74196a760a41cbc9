//! HTTP over RDMA: hyper's server and client, unchanged, on an `RdmaStream` instead of a `TcpStream`.
//!
//! `cargo run --release -p services --bin http_hyper`; with `--quick` fewer requests

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, client, server};
use hyper_util::rt::TokioIo;
use tokio_rdma::{Device, Listener, RdmaStream};

/// Lengths of the requests' bodies: one that fits in a message, and ones that do not.
const LENGTHS: [usize; 4] = [0, 64, 64 << 10, 4 << 20];

const REQUESTS: u32 = 50;
const QUICK: u32 = 5;

/// Answers with the body of the request.
async fn echo(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let body = request.into_body().collect().await?.to_bytes();
    Ok(Response::new(Full::new(body)))
}

async fn serve(listener: Listener) -> Result<(), tokio_rdma::Error> {
    loop {
        let stream = TokioIo::new(RdmaStream::accept(&listener).await?);
        tokio::spawn(async move {
            if let Err(error) = server::conn::http1::Builder::new().serve_connection(stream, service_fn(echo)).await {
                eprintln!("server: {error}");
            }
        });
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::open_default()?;
    let domain = device.alloc_pd()?;
    let listener = Listener::bind(&domain, device.local_address(0)?).await?;
    let address = listener.local_address().clone();
    tokio::spawn(serve(listener));

    let stream = RdmaStream::connect(&domain, &address).await?;
    println!("device {}, link {}, server {address}", device.name(), stream.connection().link());
    let (mut requests, connection) = client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);

    let count = if std::env::args().any(|argument| argument == "--quick") { QUICK } else { REQUESTS };
    for length in LENGTHS {
        let body = Bytes::from_iter((0..length).map(|at| (at % 251) as u8));
        let start = Instant::now();
        for _ in 0..count {
            let request = Request::post("/echo").header("host", "rdma").body(Full::new(body.clone()))?;
            requests.ready().await?;
            let response = requests.send_request(request).await?;
            ensure!(response.status().is_success(), "the server says {}", response.status());
            ensure!(response.into_body().collect().await?.to_bytes() == body, "the answer is not the request");
        }
        let each = start.elapsed() / count;
        println!("{length:>8} bytes there and back: {each:?} a request");
    }
    // The connection ends when nobody can ask any more.
    drop(requests);
    connection.await?.context("the client's connection")
}
