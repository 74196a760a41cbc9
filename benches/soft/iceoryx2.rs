//! iceoryx2, by the program in `peers/iceoryx2`.

use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::job::{Exchange, Pace};
use crate::trial::{Process, Trial};

pub const PROGRAM: &str = "iceoryx2-peer";

/// Round trips in a millisecond: half of what they are on a quiet machine.
const ROUND_TRIPS: u128 = 500;

/// What is of use of its line: a time one way in microseconds.
#[derive(Deserialize)]
struct Line {
    p50: f64,
}

pub async fn run(exchange: &Exchange, pace: &Pace, (server_cpu, client_cpu): (usize, usize)) -> Result<Trial> {
    let Exchange::OneWay { size } = exchange else { bail!("iceoryx2 is not measured with {exchange:?}") };
    // Those of a trial before, which may have been killed, are still known by their names.
    static TRIALS: AtomicU32 = AtomicU32::new(0);
    let address = format!("soft/{}/{}", std::process::id(), TRIALS.fetch_add(1, Ordering::Relaxed));
    let spec = format!("pubsub_lat:{size}:1:{}", pace.measured.as_millis() * ROUND_TRIPS);
    let start = |role: &str, cpu| Process::start("exec", cpu, "sockets", [PROGRAM, role, &address, &spec]);
    let mut server = start("server", server_cpu)?;
    let ready = server.text().await?;
    ensure!(ready.as_deref() == Some("READY"), "the server of iceoryx2 said {ready:?}");
    let mut client = start("client", client_cpu)?;
    let line: Line = client.line().await.context("iceoryx2")?;
    client.end().await?;
    server.end().await?;
    Ok(Trial::of_value(line.p50))
}
