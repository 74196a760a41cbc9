//! The server: keeps the parameters, gives out work, and applies what comes back.

mod checkpoint;
mod plot;
mod progress;
mod schedule;
mod seat;

pub use self::progress::say;

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use indicatif::HumanBytes;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rdma::{Listener, ProtectionDomain};

use self::checkpoint::Checkpoint;
use self::progress::{Progress, State};
use self::schedule::{Position, Schedule};
use self::seat::{Command, Event, Terms};
use crate::common::child::announce;
use crate::compute::{Copies, Keeper};
use crate::digits::{Batches, Digits};
use crate::model;
use crate::options::Options;
use crate::published::Publisher;
use crate::wire::{GRADIENT_LEN, Hello, Published};

/// How long a worker waits that was too fast for a receive.
pub const RNR_TIMER: Duration = Duration::from_micros(80);

/// Events that may wait.
const EVENTS: usize = 1024;

/// How many workers may be lost without a step in between. What ends every worker would go on for ever otherwise, since they come back.
const MOST_LOST: u32 = 100;

/// The most losses that are kept, and checkpointed: the newest ones.
const MOST_LOSSES: usize = 1 << 20;

/// How long workers may take to go when all is done.
const FAREWELL: Duration = Duration::from_secs(5);

/// Trains, from the first worker to the accuracy.
pub async fn run<K: Keeper>(options: &Options, keeper: K) -> Result<()> {
    let digits = Digits::load()?;
    let device = options.open_device()?;
    let domain = device.alloc_pd()?;
    let mut training = Training::new(options, keeper, &domain, &digits)?;

    let address = options.address.clone().map_or_else(|| device.local_address(0), Ok)?;
    let hello = Hello { computes_on: String::new() };
    let settings = Listener::builder(&domain).connections(|it| it.rnr_timer(RNR_TIMER).private_data(hello.to_bytes()));
    let listener = settings.bind(address).await.context("cannot listen; --address names another place")?;
    announce(listener.local_address())?;
    say(&format!("parameters live on {}", training.keeper.name()))?;
    if options.resume {
        let (step, applied) = (training.schedule.version(), training.schedule.applied());
        say(&format!("resumed at step {step}, with {applied} batches applied"))?;
    }

    let (sender, mut events) = mpsc::channel(EVENTS);
    let mut incoming = listener.incoming();
    let mut seats = JoinSet::new();
    let mut next_worker = 0;
    let mut stopped: Option<String> = None;
    let let_go = options.let_go();
    tokio::pin!(let_go);
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    while !training.schedule.is_finished() {
        let alone = training.alone_since.map(|since| since + options.wait());
        tokio::select! {
            connection = incoming.next() => {
                let connection = connection.context("the listener has ended")??;
                seats.spawn(seat::serve(next_worker, connection, training.terms(), sender.clone()));
                next_worker += 1;
            }
            event = events.recv() => match training.hear(event.context("every sender is gone")?).await {
                Err(error) if error.is::<io::Error>() => stopped = Some("nobody reads what it prints".to_owned()),
                heard => heard?,
            },
            saved = saved(&mut training.saving) => training.saved(saved?),
            Some(_) = seats.join_next() => {}
            () = sleep_until(alone.unwrap_or_else(Instant::now)), if alone.is_some() => {
                let (there, wanted) = (training.schedule.workers(), training.wanted());
                stopped = Some(format!("{there} of {wanted} workers within {:?} (--wait sets the limit)", options.wait()));
            }
            _ = interrupt.recv() => stopped = Some("interrupted".to_owned()),
            _ = terminate.recv() => stopped = Some("terminated".to_owned()),
            () = &mut let_go => stopped = Some("let go by whoever started it".to_owned()),
        }
        if let Some(why) = stopped.take().or_else(|| training.given_up.take()) {
            // Before the parameters are taken back, so that workers see a server that is gone and not a key that is.
            seats.shutdown().await;
            return training.stop(&why).await;
        }
    }
    // Nobody may join any more, and those who are there hear that it is over.
    drop(incoming);
    // With them go those that have joined just now, which hear it as well.
    drop(events);
    training.commands.clear();
    training.finish(&digits).await?;
    let _ = timeout(FAREWELL, async { while seats.join_next().await.is_some() {} }).await;
    training.conclude(&digits)
}

/// Parameters, and how they come about.
struct Training<'a, K: Keeper> {
    options: &'a Options,
    keeper: Arc<K>,
    schedule: Schedule,
    /// Steps before this process's life.
    began: u64,
    publisher: Publisher,
    copies: K::Copies,
    /// By ticket, so that sums come out the same whoever was first.
    gradients: BTreeMap<u64, Arrived<K::Gradient>>,
    commands: BTreeMap<u32, UnboundedSender<Command>>,
    /// Of the last steps.
    losses: Vec<f32>,
    /// Workers since the last step.
    lost: u32,
    /// Why it makes no sense to go on.
    given_up: Option<String>,
    traffic: Traffic,
    progress: Progress,
    saving: Option<JoinHandle<Result<u64>>>,
    /// Since when nothing can go on for want of workers.
    alone_since: Option<Instant>,
}

/// A gradient that waits for its step.
struct Arrived<G> {
    samples: u32,
    loss: f32,
    gradient: G,
}

/// What was moved in this process's life.
#[derive(Default)]
struct Traffic {
    gradients: u64,
    /// Of each worker, as it says.
    pulled: BTreeMap<u32, (u64, u64)>,
}

impl Traffic {
    fn pushed(&self) -> u64 {
        self.gradients * GRADIENT_LEN as u64
    }

    fn pulled(&self) -> u64 {
        self.pulled.values().fold(0, |sum, (bytes, _)| sum.saturating_add(*bytes))
    }

    fn repeated(&self) -> u64 {
        self.pulled.values().fold(0, |sum, (_, times)| sum.saturating_add(*times))
    }
}

impl<'a, K: Keeper> Training<'a, K> {
    fn new(options: &'a Options, keeper: K, domain: &ProtectionDomain, digits: &Digits) -> Result<Self> {
        let batches = Batches::new(digits.training.len(), options.batch as usize, options.seed);
        let tickets = u64::from(options.epochs) * batches.per_epoch();
        let mut parameters = model::initial(options.seed);
        let (mut position, mut losses) = (Position { version: 0, next: 0, due: Vec::new() }, Vec::new());
        if options.resume {
            let path = options.checkpoint.as_deref().context("--resume needs --checkpoint FILE")?;
            let saved = Checkpoint::load(path)?;
            let (ours, theirs) = ((options.seed, options.batch), (saved.seed, saved.batch));
            ensure!(
                ours == theirs,
                "resume: --seed and --batch are {ours:?}, the checkpoint's are {theirs:?}; go on with the same"
            );
            parameters.copy_from_slice(&saved.parameters);
            let given = saved.next;
            ensure!(
                given <= tickets,
                "resume: batches given out are {given}, the limit is {tickets}; go on with as many --epochs as before"
            );
            (position, losses) = (saved.position(), saved.losses);
        }
        let schedule = Schedule::new(position, tickets, options.staleness(), options.workers);
        let copies = keeper.copies(domain, schedule.version(), &parameters)?;
        let publisher = Publisher::new(domain, schedule.version())?;
        let progress = Progress::new(tickets, schedule.applied(), options.log_every);
        Ok(Self {
            options,
            keeper: Arc::new(keeper),
            began: schedule.version(),
            schedule,
            publisher,
            copies,
            gradients: BTreeMap::new(),
            commands: BTreeMap::new(),
            losses,
            lost: 0,
            given_up: None,
            traffic: Traffic::default(),
            progress,
            saving: None,
            alone_since: Some(Instant::now()),
        })
    }

    fn terms(&self) -> Terms<K> {
        let Options { seed, batch, .. } = *self.options;
        let published = Published { stamps: self.publisher.remote(), copies: self.copies.remote() };
        Terms { keeper: self.keeper.clone(), seed, batch, published, patience: self.options.patience() }
    }

    async fn hear(&mut self, event: Event<K::Gradient>) -> Result<()> {
        match event {
            Event::Joined { worker, greeting, commands } => {
                self.schedule.join(worker);
                self.commands.insert(worker, commands);
                self.progress.say(&format!("worker {worker} joined: {greeting}"))?;
            }
            Event::Delivered { worker, header, loss, gradient } => {
                match self.schedule.deliver(worker, header.ticket, header.base) {
                    Ok(()) => {
                        self.traffic.gradients += 1;
                        self.traffic.pulled.insert(worker, (header.pulled, header.repeated));
                        let samples = header.samples;
                        self.gradients.insert(header.ticket, Arrived { samples, loss, gradient });
                    }
                    Err(error) => self.dismiss(worker, &format!("{error:#}"))?,
                }
            }
            Event::Left { worker, why } => self.dismiss(worker, &why)?,
            Event::Broken { why } => self.given_up = self.given_up.take().or(Some(why)),
            Event::Refused { worker, why } => self.progress.say(&format!("worker {worker} was refused: {why}"))?,
        }
        while let Some(tickets) = self.schedule.step() {
            self.apply(&tickets).await?;
        }
        for (worker, work) in self.schedule.assign() {
            self.progress.begin(self.schedule.version());
            if let Some(commands) = self.commands.get(&worker) {
                // If the worker is gone, an event says so.
                let _ = commands.send(Command::Work(work));
            }
        }
        let alone = self.schedule.workers() < self.wanted();
        self.alone_since = if alone { self.alone_since.or_else(|| Some(Instant::now())) } else { None };
        Ok(())
    }

    /// How many workers it takes to go on.
    fn wanted(&self) -> usize {
        self.schedule.quorum().max(1)
    }

    /// Tells once of each worker why it is not there any more.
    fn dismiss(&mut self, worker: u32, why: &str) -> Result<()> {
        self.schedule.leave(worker);
        let Some(commands) = self.commands.remove(&worker) else { return Ok(()) };
        let _ = commands.send(Command::Dismiss);
        self.lost += 1;
        if self.lost >= MOST_LOST {
            let lost = self.lost;
            self.given_up = Some(format!("{lost} workers were lost without a step in between, the last one: {why}"));
        }
        self.progress.say(&format!("worker {worker} left: {why}"))
    }

    /// One step, with the gradients of these tickets.
    async fn apply(&mut self, tickets: &[u64]) -> Result<()> {
        let arrived: Vec<_> = tickets.iter().filter_map(|ticket| self.gradients.remove(ticket)).collect();
        let gradients: Vec<_> = arrived.iter().map(|it| &it.gradient).collect();
        let (version, rate) = (self.schedule.version(), self.options.rate);
        let copies = &mut self.copies;
        let step = async {
            let finite = copies.descend(version, &gradients, rate).await?;
            ensure!(finite, "step {version}: the parameters are not finite any more; lower --rate, which is {rate}");
            Ok(())
        };
        self.publisher.publish(version, step).await?;

        let samples: f64 = arrived.iter().map(|it| f64::from(it.samples)).sum();
        let loss: f64 = arrived.iter().map(|it| f64::from(it.loss) * f64::from(it.samples)).sum();
        self.keep((loss / samples.max(1.0)) as f32);
        self.lost = 0;
        self.progress.step(self.state())?;
        if version % self.options.checkpoint_every == 0 {
            self.save()?;
        }
        Ok(())
    }

    /// A step's loss. Once there are twice as many as are kept the older half goes, which is rare and so costs little.
    fn keep(&mut self, loss: f32) {
        self.losses.push(loss);
        if self.losses.len() >= 2 * MOST_LOSSES {
            self.losses.drain(..MOST_LOSSES);
        }
    }

    fn state(&self) -> State {
        State {
            step: self.schedule.version(),
            applied: self.schedule.applied(),
            loss: self.losses.last().copied().unwrap_or(f32::NAN),
            workers: self.schedule.workers(),
            moved: self.traffic.pushed().saturating_add(self.traffic.pulled()),
        }
    }

    /// Starts to write a checkpoint, unless one is being written: the next one will be newer.
    fn save(&mut self) -> Result<()> {
        if self.saving.is_some() {
            return Ok(());
        }
        let Some(path) = self.options.checkpoint.clone() else { return Ok(()) };
        let checkpoint = self.checkpoint()?;
        self.saving = Some(tokio::task::spawn_blocking(move || checkpoint.save(&path).map(|()| checkpoint.version)));
        Ok(())
    }

    fn checkpoint(&self) -> Result<Checkpoint> {
        let Options { seed, batch, .. } = *self.options;
        let Position { version, next, due } = self.schedule.position();
        Ok(Checkpoint {
            seed,
            batch,
            version,
            next,
            due,
            parameters: self.copies.parameters(version)?.to_vec(),
            losses: self.losses[self.losses.len().saturating_sub(MOST_LOSSES)..].to_vec(),
        })
    }

    /// That nobody reads this is noticed with the next step, and must not keep the last checkpoint from being written.
    fn saved(&self, version: u64) {
        let _ = self.progress.say(&format!("checkpoint at step {version}"));
    }

    /// The last checkpoint, after those under way.
    async fn save_last(&mut self) -> Result<()> {
        if self.saving.is_some() {
            let before = saved(&mut self.saving).await?;
            self.saved(before);
        }
        self.save()?;
        if self.saving.is_some() {
            let last = saved(&mut self.saving).await?;
            self.saved(last);
        }
        Ok(())
    }

    /// Ends before the end, so that `--resume` goes on from here.
    async fn stop(mut self, why: &str) -> Result<()> {
        self.progress.end();
        let step = self.schedule.version();
        // The file may hold more than a training that has not begun.
        if step > self.began {
            let saved = self.save_last().await;
            saved.with_context(|| format!("{why}, at step {step}; the parameters of that step are lost"))?;
        }
        match &self.options.checkpoint {
            Some(_) if step == 0 => bail!("{why}, before the first step"),
            Some(path) => bail!("{why}, at step {step}; --resume goes on from {}", path.display()),
            None => bail!("{why}, at step {step}; with --checkpoint FILE the training could go on from there"),
        }
    }

    async fn finish(&mut self, digits: &Digits) -> Result<()> {
        self.progress.end();
        self.save_last().await?;
        if let Some(file) = &self.options.plot {
            let title = format!(
                "{} training samples, {} steps, {}",
                digits.training.len(),
                self.schedule.version(),
                self.mode()
            );
            let before = self.schedule.version().saturating_sub(self.losses.len() as u64);
            plot::draw(before as usize, &self.losses, &title, file)?;
        }
        Ok(())
    }

    fn mode(&self) -> String {
        match self.options.staleness() {
            0 => "synchronous".to_owned(),
            limit => format!("at most {limit} steps stale"),
        }
    }

    fn conclude(&self, digits: &Digits) -> Result<()> {
        let seconds = self.progress.elapsed().as_secs_f64().max(1e-9);
        let rate = |bytes: u64| HumanBytes((bytes as f64 / seconds) as u64);
        let Traffic { gradients, .. } = self.traffic;
        say(&format!(
            "{gradients} gradients in {seconds:.2} s, {:.0}/s: pushed {}/s, pulled {}/s, {} pulls repeated",
            gradients as f64 / seconds,
            rate(self.traffic.pushed()),
            rate(self.traffic.pulled()),
            self.traffic.repeated(),
        ))?;
        let (steps, stalest) = (self.schedule.version(), self.schedule.stalest());
        let speed = (steps - self.began) as f64 / seconds;
        let mode = self.mode();
        say(&format!("{steps} steps, {mode}, {speed:.0}/s; the stalest gradient lay {stalest} steps behind"))?;
        let parameters = self.copies.parameters(steps)?;
        say(&format!("test accuracy {:.3}", model::accuracy(&parameters, &digits.held_out)))
    }
}

/// Waits for a checkpoint that is being written; for ever if none is. A training whose checkpoints cannot be written does not go on as
/// if they were.
async fn saved(saving: &mut Option<JoinHandle<Result<u64>>>) -> Result<u64> {
    let Some(writing) = saving else { return pending().await };
    let outcome = writing.await;
    *saving = None;
    outcome.context("write a checkpoint")?
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tokio_rdma::Device;

    use super::*;
    use crate::compute::CpuKeeper;

    #[tokio::test]
    async fn a_checkpoint_of_a_long_training_can_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        let options = Options::try_parse_from(["x"]).unwrap();
        let domain = Device::open("soft0").unwrap().alloc_pd().unwrap();
        let mut training = Training::new(&options, CpuKeeper, &domain, &Digits::load().unwrap()).unwrap();
        training.losses = vec![0.5; 2 * MOST_LOSSES - 1];
        training.keep(0.5);
        assert_eq!(training.losses.len(), MOST_LOSSES);
        training.losses = vec![0.5; 20 * MOST_LOSSES];
        training.checkpoint().unwrap().save(&path).unwrap();
        assert_eq!(Checkpoint::load(&path).unwrap().losses.len(), MOST_LOSSES);
    }

    /// Workers come back after whatever has ended them.
    #[tokio::test]
    async fn what_ends_every_worker_ends_the_training() {
        let options = Options::try_parse_from(["x", "--workers", "1"]).unwrap();
        let domain = Device::open("soft0").unwrap().alloc_pd().unwrap();
        let mut training = Training::new(&options, CpuKeeper, &domain, &Digits::load().unwrap()).unwrap();
        for worker in 0..MOST_LOST {
            assert_eq!(training.given_up, None, "{worker}");
            let (commands, _receiver) = mpsc::unbounded_channel();
            training.hear(Event::Joined { worker, greeting: String::new(), commands }).await.unwrap();
            training.hear(Event::Left { worker, why: "a fault".to_owned() }).await.unwrap();
        }
        assert!(training.given_up.unwrap().ends_with("a fault"));
    }
}
