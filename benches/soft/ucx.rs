//! UCX, by its own benchmark.

mod test;

use std::net::TcpListener;
use std::time::Duration;

use anyhow::{Context, Result};
use procfs::net::TcpState;

pub use self::test::Test;
use crate::job::{Exchange, Pace};
use crate::trial::{Process, Trial};

pub const PROGRAM: &str = "ucx_perftest";

impl Test {
    pub async fn run(
        &self,
        exchange: &Exchange,
        pace: &Pace,
        (server_cpu, client_cpu): (usize, usize),
    ) -> Result<Trial> {
        let port = free_port()?;
        let command = |arguments: String| {
            let words = ["env"].into_iter().chain(self.environment()).chain([PROGRAM]).map(str::to_owned);
            words.chain(arguments.split_whitespace().map(str::to_owned)).collect::<Vec<_>>()
        };
        let mut server = Process::start("exec", server_cpu, "sockets", command(format!("-p {port}")))?;
        while !is_listening(port)? {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let arguments = format!("127.0.0.1 -p {port} {} -f -v", self.arguments(exchange, pace)?);
        let mut client = Process::start("exec", client_cpu, "sockets", command(arguments))?;
        let mut printed = Vec::new();
        while let Some(line) = client.text().await? {
            printed.push(line);
        }
        client.end().await?;
        // Read to the end, so that it never waits for a full pipe.
        while server.text().await?.is_some() {}
        server.end().await?;
        let value = column(&printed, self.column()).with_context(|| format!("{PROGRAM} printed {printed:?}"))?;
        Ok(Trial::of_value(value * self.unit(exchange)?))
    }
}

/// Of its CSV: a line of names, and one of values.
fn column(printed: &[String], name: &str) -> Option<f64> {
    let header = printed.iter().position(|line| line.split(',').any(|column| column == name))?;
    let column = printed[header].split(',').position(|column| column == name)?;
    printed.get(header + 1)?.split(',').nth(column)?.trim().parse().ok()
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Asked of the system: connecting to find out would use up the server, which takes one client.
fn is_listening(port: u16) -> Result<bool> {
    let mut sockets = procfs::net::tcp()?;
    sockets.extend(procfs::net::tcp6().unwrap_or_default());
    Ok(sockets.iter().any(|socket| socket.state == TcpState::Listen && socket.local_address.port() == port))
}
