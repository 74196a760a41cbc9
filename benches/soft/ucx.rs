//! UCX over TCP, by its own benchmark.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use procfs::net::TcpState;

use crate::job::{Exchange, Job};
use crate::trial::{Process, Trial};

const PROGRAM: &str = "ucx_perftest";

/// The transport under test and nothing beside it; the variables must be UCX's own names.
const ENVIRONMENT: [&str; 3] = ["UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo", "UCX_WARN_UNUSED_ENV_VARS=n"];

/// The column of its CSV that holds the median in microseconds.
const MEDIAN: &str = "50.0_percentile_lat";

pub fn is_installed() -> bool {
    let mut probe = Command::new(PROGRAM);
    probe.arg("-h").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok()
}

/// Reads, as many as take about the job's time: one takes 1 to 3 ms.
pub async fn get(job: &Job, (server_cpu, client_cpu): (usize, usize)) -> Result<Trial> {
    let Exchange::Read { size } = job.exchange else { anyhow::bail!("UCX is measured with reads only") };
    let port = free_port()?;
    let command = |arguments: String| {
        let words = ["env"].into_iter().chain(ENVIRONMENT).chain([PROGRAM]).map(str::to_owned);
        words.chain(arguments.split_whitespace().map(str::to_owned)).collect::<Vec<_>>()
    };
    let mut server = Process::start("exec", server_cpu, "sockets", command(format!("-p {port}")))?;
    while !is_listening(port)? {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let [reads, warm_up] = [job.pace.measured, job.pace.warm_up].map(|time| (time.as_millis() / 2).max(1));
    let arguments = format!("127.0.0.1 -p {port} -t ucp_get -s {size} -n {reads} -w {warm_up} -f -v");
    let mut client = Process::start("exec", client_cpu, "sockets", command(arguments))?;
    let mut printed = Vec::new();
    while let Some(line) = client.text().await? {
        printed.push(line);
    }
    client.end().await?;
    // Read to the end, so that it never waits for a full pipe.
    while server.text().await?.is_some() {}
    server.end().await?;
    let value = median(&printed).with_context(|| format!("{PROGRAM} printed {printed:?}"))?;
    Ok(Trial { value, p99: None, cpu: None, switches: None })
}

fn median(printed: &[String]) -> Option<f64> {
    let header = printed.iter().position(|line| line.contains(MEDIAN))?;
    let column = printed[header].split(',').position(|name| name == MEDIAN)?;
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
