//! Both ends of a benchmark.

use std::alloc::Layout;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use async_rdma::{LocalMr, MrAccess, Rdma, RdmaBuilder, RemoteMr};
use futures::future::try_join;

use crate::report::Started;
use crate::settings;
use crate::spec::{Op, Spec};

/// Longer than any benchmark; the default is a minute.
const LEASE: Duration = Duration::from_secs(3600);

fn builder(specs: &[Spec]) -> Result<RdmaBuilder> {
    let longest = specs.iter().filter(|spec| spec.op == Op::SendLat).map(|spec| spec.size).max();
    Ok(settings::builder()?
        .set_qp_max_send_wr(256)
        .set_qp_max_recv_wr(64)
        .set_max_message_length(longest.unwrap_or(0).max(512))
        .set_raw(raw(specs).is_some()))
}

/// Plain messages, without the library's own protocol: a connection carries these alone.
fn raw(specs: &[Spec]) -> Option<&Spec> {
    specs.iter().find(|spec| spec.op == Op::SendRawLat)
}

fn layout(size: usize) -> Result<Layout> {
    Ok(Layout::from_size_align(size, 64)?)
}

pub async fn server(address: &str, specs: &[Spec]) -> Result<()> {
    let rdma = builder(specs)?.listen(address).await?;
    if let Some(spec) = raw(specs) {
        let answer = rdma.alloc_local_mr(layout(spec.size)?)?;
        rdma.receive_raw(layout(spec.size)?).await?;
        loop {
            // The next receive is posted before the answer goes out: they are polled in order.
            try_join(rdma.receive_raw(layout(spec.size)?), rdma.send_raw(&answer)).await?;
        }
    }
    loop {
        let message = rdma.receive().await?;
        rdma.send(&message).await?;
    }
}

pub async fn client(address: &str, specs: &[Spec]) -> Result<()> {
    let rdma = Arc::new(builder(specs)?.connect(address).await?);
    if raw(specs).is_some() {
        // The server's first receive has to be posted.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    for spec in specs {
        match spec.op {
            Op::WriteBw => throughput(&rdma, spec).await,
            _ => latency(&rdma, spec).await,
        }
        .with_context(|| spec.to_string())?;
    }
    Ok(())
}

async fn latency(rdma: &Rdma, spec: &Spec) -> Result<()> {
    let mut local = rdma.alloc_local_mr(layout(spec.size)?)?;
    let mut remote = match spec.op {
        Op::WriteLat | Op::ReadLat => Some(region(rdma, spec).await?),
        _ => None,
    };
    let mut times = Vec::with_capacity(spec.iterations);
    let mut refusals = Refusals::default();
    let mut started = Started::now()?;
    for round in 0..spec.warm_up() + spec.iterations {
        if round == spec.warm_up() {
            times.clear();
            (started, refusals) = (Started::now()?, Refusals::default());
        }
        let start = Instant::now();
        match (spec.op, &mut remote) {
            (Op::WriteLat, Some(remote)) => refusals.write(rdma, &local, remote).await?,
            (Op::ReadLat, Some(remote)) => {
                while let Err(error) = rdma.read(&mut local, remote).await {
                    refusals.again(error).await?;
                }
            }
            (Op::SendRawLat, _) => {
                let sending = async {
                    while let Err(error) = rdma.send_raw(&local).await {
                        refusals.again(error).await?;
                    }
                    Ok(())
                };
                try_join(rdma.receive_raw(layout(spec.size)?), sending).await?;
            }
            _ => {
                while let Err(error) = rdma.send(&local).await {
                    refusals.again(error).await?;
                }
                let answer = rdma.receive().await?;
                ensure!(answer.length() == spec.size, "{} bytes came back", answer.length());
            }
        }
        times.push(start.elapsed());
    }
    started.report(spec, times, refusals.operations)
}

/// Several tasks, each with one write in flight.
async fn throughput(rdma: &Arc<Rdma>, spec: &Spec) -> Result<()> {
    let share = (spec.iterations / spec.inflight).max(1);
    let mut places = Vec::new();
    for _ in 0..spec.inflight {
        let (local, mut remote) = (rdma.alloc_local_mr(layout(spec.size)?)?, region(rdma, spec).await?);
        for _ in 0..(share / 10).max(2) {
            Refusals::default().write(rdma, &local, &mut remote).await?;
        }
        places.push((local, remote));
    }
    let started = Started::now()?;
    let mut tasks = Vec::new();
    for (local, mut remote) in places {
        let rdma = rdma.clone();
        tasks.push(tokio::spawn(async move {
            let (mut times, mut refusals) = (Vec::with_capacity(share), Refusals::default());
            for _ in 0..share {
                let start = Instant::now();
                refusals.write(&rdma, &local, &mut remote).await?;
                times.push(start.elapsed());
            }
            io::Result::Ok((times, refusals.operations, remote))
        }));
    }
    let (mut times, mut refusals, mut regions) = (Vec::new(), 0, Vec::new());
    for task in tasks {
        let (its_times, its_refusals, region) = task.await??;
        times.extend(its_times);
        refusals += its_refusals;
        // Releasing them is no part of what is measured.
        regions.push(region);
    }
    started.report(spec, times, refusals)
}

async fn region(rdma: &Rdma, spec: &Spec) -> Result<RemoteMr> {
    Ok(rdma.request_remote_mr_with_timeout(layout(spec.size)?, LEASE).await?)
}

/// The library wakes whoever waits for an operation before it unlocks the operation's memory, so the next operation on that
/// can be refused. Nothing was posted then, and it can be tried again.
#[derive(Default)]
struct Refusals {
    /// Operations that were refused.
    operations: usize,
    tries: u32,
}

impl Refusals {
    async fn write(&mut self, rdma: &Rdma, local: &LocalMr, remote: &mut RemoteMr) -> io::Result<()> {
        self.tries = 0;
        while let Err(error) = rdma.write(local, remote).await {
            self.again(error).await?;
        }
        Ok(())
    }

    /// Waits a little, or gives up.
    async fn again(&mut self, error: io::Error) -> io::Result<()> {
        self.tries += 1;
        self.operations += usize::from(self.tries == 1);
        if self.tries > 100_000 || !error.to_string().contains("locked by other ops") {
            return Err(error);
        }
        // For the task that holds the lock, wherever it runs.
        std::thread::yield_now();
        tokio::task::yield_now().await;
        Ok(())
    }
}
