//! Clients that GET and PUT as fast as they can, and check every value.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution as _, Zipf};
use tokio::task::JoinSet;
use tokio_rdma::{Address, ProtectionDomain};

use crate::report::Report;
use crate::store::Client;
use crate::store::client::Counts;

/// Bytes of a value that say which PUT it is from.
const STAMP: usize = 8;

#[derive(Args, Clone, Debug)]
pub struct Load {
    /// How many clients, each with a connection of its own
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub clients: u32,

    /// How long they go on
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub seconds: u64,

    /// The share of GETs among the operations, 0 to 1; the others are PUTs
    #[arg(long, value_name = "SHARE", default_value_t = 0.95, value_parser = share)]
    pub read_share: f64,

    /// How many keys
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    pub keys: u64,

    /// Bytes of a value, at least 8
    #[arg(long, value_name = "B", default_value_t = 128, value_parser = clap::value_parser!(u64).range(STAMP as u64..=16 << 20))]
    pub value_size: u64,

    /// Which keys are asked for
    #[arg(long, value_enum, default_value = "zipf")]
    pub distribution: Distribution,

    /// How unequal zipf is: the key of rank r is asked for with a weight of 1 / r^EXPONENT
    #[arg(long, value_name = "EXPONENT", default_value_t = 0.99, value_parser = exponent)]
    pub zipf_exponent: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Distribution {
    /// Some keys much more often than others, as users do
    Zipf,
    /// All keys as often
    Uniform,
}

/// What the clients found.
pub struct Found {
    pub gets: Histogram<u64>,
    pub puts: Histogram<u64>,
    pub elapsed: Duration,
    pub counts: Counts,
}

/// Fills the table, and then runs the clients for their time, or until Ctrl-C.
pub async fn run(domain: &ProtectionDomain, address: &Address, load: &Load, limit: Duration) -> Result<Report> {
    let first = Client::connect(domain, address, limit).await;
    let first = first.with_context(|| format!("no connection to the server at {address}"))?;
    let mut report = Report::new(first.connection(), load);
    first.close().await;

    let bar = ProgressBar::new(load.keys);
    bar.set_style(ProgressStyle::with_template("{msg} {pos}/{len}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message("storing keys");
    each(domain, address, load, limit, |worker| {
        let bar = bar.clone();
        async move { worker.fill(&bar).await }
    })
    .await
    .context("storing the keys")?;
    bar.finish_and_clear();

    let stop = Arc::new(AtomicBool::new(false));
    let stopping = tokio::spawn({
        let (stop, time) = (stop.clone(), Duration::from_secs(load.seconds));
        async move {
            tokio::select! {
                () = tokio::time::sleep(time) => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            stop.store(true, Relaxed);
        }
    });
    let found = each(domain, address, load, limit, |worker| worker.go(stop.clone())).await;
    stopping.abort();
    for found in found? {
        report.add(&found)?;
    }
    Ok(report)
}

/// Runs all clients at the same time; the first failure ends them all.
async fn each<F, T>(
    domain: &ProtectionDomain,
    address: &Address,
    load: &Load,
    limit: Duration,
    work: impl Fn(Worker) -> F,
) -> Result<Vec<T>>
where
    F: Future<Output = Result<T>> + Send + 'static,
    T: Send + 'static,
{
    let mut workers = JoinSet::new();
    for number in 0..load.clients {
        let client = Client::connect(domain, address, limit).await?;
        workers.spawn(work(Worker { client, number, load: load.clone() }));
    }
    let mut outcomes = Vec::new();
    while let Some(outcome) = workers.join_next().await {
        outcomes.push(outcome??);
    }
    Ok(outcomes)
}

struct Worker {
    client: Client,
    number: u32,
    load: Load,
}

impl Worker {
    /// Stores this client's part of the keys.
    async fn fill(mut self, bar: &ProgressBar) -> Result<()> {
        let mut value = vec![0; self.load.value_size as usize];
        for key in (u64::from(self.number)..self.load.keys).step_by(self.load.clients as usize) {
            stamp(&mut value, key, 0);
            self.client.put(&name(key), &value).await?;
            bar.inc(1);
        }
        self.client.close().await;
        Ok(())
    }

    async fn go(mut self, stop: Arc<AtomicBool>) -> Result<Found> {
        let load = &self.load;
        let mut random = SmallRng::seed_from_u64(self.number.into());
        let zipf = Zipf::new(load.keys as f64, load.zipf_exponent).context("zipf")?;
        // Up to an hour in nanoseconds, with three digits.
        let histogram = || Histogram::new_with_bounds(1, 3_600_000_000_000, 3);
        let (mut gets, mut puts) = (histogram()?, histogram()?);
        let mut value = vec![0; load.value_size as usize];
        // The newest version that this client knows of.
        let mut versions: HashMap<u64, u64> = HashMap::new();
        let start = Instant::now();
        while !stop.load(Relaxed) {
            let key = match load.distribution {
                Distribution::Zipf => (zipf.sample(&mut random) as u64 - 1).min(load.keys - 1),
                Distribution::Uniform => random.random_range(0..load.keys),
            };
            let name = name(key);
            if random.random_bool(load.read_share) {
                let since = Instant::now();
                let found = self.client.get(&name).await?;
                gets.saturating_record(since.elapsed().as_nanos() as u64);
                let found = found.with_context(|| format!("key {key} is not there, though it was stored"))?;
                check(key, found.value, load.value_size)?;
                let (version, last) = (found.version, versions.entry(key).or_default());
                ensure!(version >= *last, "key {key} has version {version}, and had {last} before");
                *last = version;
            } else {
                stamp(&mut value, key, random.random());
                let since = Instant::now();
                let version = self.client.put(&name, &value).await?;
                puts.saturating_record(since.elapsed().as_nanos() as u64);
                versions.insert(key, version);
            }
            // A value that is in memory is there at the first poll, and the other clients want their turn.
            tokio::task::consume_budget().await;
        }
        let (elapsed, counts) = (start.elapsed(), self.client.counts());
        self.client.close().await;
        Ok(Found { gets, puts, elapsed, counts })
    }
}

/// A key's name.
fn name(key: u64) -> Vec<u8> {
    format!("key-{key:08}").into_bytes()
}

/// The length of the longest name.
pub fn longest_name(load: &Load) -> u64 {
    name(load.keys - 1).len() as u64
}

/// A value that says what it is the value of, in all its bytes.
fn stamp(value: &mut [u8], key: u64, number: u64) {
    let (stamp, rest) = value.split_at_mut(STAMP.min(value.len()));
    stamp.copy_from_slice(&number.to_le_bytes()[..stamp.len()]);
    SmallRng::seed_from_u64(number ^ key.rotate_left(40)).fill(rest);
}

/// Refuses a value that is not whole, or of another key.
fn check(key: u64, value: &[u8], len: u64) -> Result<()> {
    ensure!(value.len() as u64 == len, "key {key} has a value of {} bytes instead of {len}", value.len());
    let number = value.first_chunk().map_or(0, |stamp| u64::from_le_bytes(*stamp));
    let mut expected = vec![0; value.len()];
    stamp(&mut expected, key, number);
    ensure!(value == expected, "key {key} has a value that is not whole, or another key's");
    Ok(())
}

fn share(text: &str) -> Result<f64, String> {
    in_range(text, 0.0, 1.0)
}

fn exponent(text: &str) -> Result<f64, String> {
    in_range(text, 0.0, 10.0)
}

fn in_range(text: &str, least: f64, most: f64) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (least..=most).contains(&value) => Ok(value),
        _ => Err(format!("expected a number from {least} to {most}")),
    }
}

#[test]
fn a_value_is_that_of_one_put_of_one_key() {
    let (mut value, mut other) = (vec![0; 100], vec![0; 100]);
    stamp(&mut value, 3, 77);
    check(3, &value, 100).unwrap();
    stamp(&mut other, 3, 78);
    for at in 1..100 {
        let torn = [&value[..at], &other[at..]].concat();
        assert!(check(3, &torn, 100).is_err(), "{at}");
    }
    assert!(check(4, &value, 100).is_err() && check(3, &value[..99], 100).is_err());
}
